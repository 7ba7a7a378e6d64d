"""MasterWeights: against an optimizer over float32 weights, to the bit, and everything that may join or change."""

import contextlib
import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ampkit import optim
from ampkit.amp import loss_scalers
from ampkit.amp.fp16_optimizer import FP16Optimizer
from ampkit.gradients.collect import masters_of
from ampkit.half_precision.master_weights import MasterWeights
from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.half_models import OPTIMIZERS, backward, batches, both_dtypes, loss_of, make_half, set_up
from tests.helpers.ranks import on_ranks


@pytest.mark.parametrize("scaler_of", [None, GradScaler, torch.amp.GradScaler], ids=["none", "ours", "torchs"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@both_dtypes
def test_it_is_an_optimizer_over_float32_weights(dtype: torch.dtype, kind: str, scaler_of: Any) -> None:
    """By hand: float32 copies stepped with the model's gradients, rounded back. Equal to the bit, step after step.

    An overflow changes no weight. torch's scaler finds float32 gradients once they are taken.
    """
    model = make_half(dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    masters = MasterWeights(optimizer)
    scaler = (scaler_of or GradScaler)("cpu", init_scale=2.0**3, enabled=scaler_of is not None, growth_interval=3)
    reference = copy.deepcopy(model)
    wide = [p.detach().float().requires_grad_() for p in reference.parameters()]
    by_hand = OPTIMIZERS[kind](wide)
    for index, batch in enumerate(batches(6)):
        bad = index == 2 and scaler_of is not None
        optimizer.zero_grad()
        scale = scaler.get_scale()
        scaler.scale(loss_of(model, batch) * (torch.inf if bad else 1.0)).backward()
        if scaler_of is torch.amp.GradScaler:
            masters.take_gradients_()
        scaler.step(optimizer)
        scaler.update()
        reference.zero_grad()
        (loss_of(reference, batch) * scale).backward()
        with torch.no_grad():
            for p, w in zip(reference.parameters(), wide, strict=True):
                w.grad = p.grad.float() / scale
            if not bad:
                by_hand.step()
            for p, w in zip(reference.parameters(), wide, strict=True):
                p.copy_(w)
        torch.testing.assert_close(
            [*(p for group in optimizer.param_groups for p in group["params"])], [*wide], rtol=0, atol=0
        )
        torch.testing.assert_close([*model.parameters()], [*reference.parameters()], rtol=0, atol=0)
    assert {p.grad for p in (*masters.model_parameters(), *masters.masters())} == {None}


@pytest.mark.parametrize("broken", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("inv", [1.0, 2.0**-4, 0.3])
def test_gradients_are_widened_unscaled_added_and_checked(broken: int | None, inv: float) -> None:
    """Taken twice: number 1 is empty, number 2, of float32, is left alone, number 3 comes late, number 4 not at all."""
    dtypes = (torch.float16, torch.float16, torch.float32, torch.bfloat16, torch.float16)
    params = [nn.Parameter(torch.randn(n, 2).to(dtype)) for n, dtype in zip((3, 0, 2, 2, 1), dtypes, strict=True)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    masters, totals = MasterWeights(optimizer), {}
    for together in (3, 4):
        flags: dict[torch.device, Tensor] = {}
        for index, param in enumerate(params[:together]):
            param.grad = torch.randn_like(param)
            if index == broken:
                param.grad[:1] = torch.inf
            if index != 2:
                totals[param] = param.grad.float() * inv + totals.get(param, 0.0)
        masters.take_gradients_(torch.tensor(inv), flags)
        assert list(map(bool, flags.values())) == [broken == 0 or (broken, together) == (3, 4)]
    masters.take_gradients_(torch.tensor(inv), flags := {})
    assert not flags
    assert [param.grad is None for param in params] == [True, True, False, True, True]
    assert masters.master_of(params[2]) is None
    grads = {param: master.grad for param, master in zip(masters.model_parameters(), masters.masters(), strict=True)}
    assert grads.pop(params[4]) is None
    torch.testing.assert_close(grads, totals, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="Triton does not interpret here")
def test_a_lazily_negated_gradient_arrives_with_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels read memory, which holds the values without the sign."""
    monkeypatch.setattr("ampkit_kernels.implementation.AUTO", ("cuda", "cpu"))
    param = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    masters = MasterWeights(optimizer := torch.optim.SGD([param], lr=1.0))
    param.grad = torch._neg_view(torch.ones(4, dtype=torch.bfloat16))
    optimizer.step()
    assert masters.masters()[0].tolist() == [1.0] * 4


def test_groups_that_join_later_and_thawed_parameters_get_masters() -> None:
    """In the next step; frozen ones have none."""
    model, extra = make_half(), nn.Linear(10, 10).bfloat16()
    model.head.requires_grad_(False)
    optimizer = OPTIMIZERS["torch-adamw"](model.parameters())
    masters = MasterWeights(optimizer)
    assert len(masters.masters()) == 1
    frozen = model.head.weight.clone()
    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 1e-3})
    for expected in (3, 5):
        (extra(model(batches(1)[0][0]).bfloat16())).sum().backward()
        optimizer.step()
        assert len(masters.masters()) == expected
        assert torch.equal(model.head.weight, frozen) is (expected == 3)
        model.head.requires_grad_(True)
    assert {p.dtype for group in optimizer.param_groups for p in group["params"]} == {torch.float32}
    master = masters.master_of(extra.weight)
    assert torch.equal(extra.weight, master.bfloat16())
    assert optimizer.state[master]["exp_avg"].dtype is torch.float32
    optimizer.add_param_group({"params": [extra.weight]})
    with pytest.raises(RuntimeError, match=r"of shape \(10, 10\) was given to the optimizer a second time, in"):
        optimizer.step()


def channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


def vector(model: nn.Module) -> None:
    """Every parameter becomes a view of one tensor, half as large as before."""
    params = [param for param in model.parameters() if param.dtype is torch.bfloat16]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params).detach() * 0.5, params)


def data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


def with_masters(optimizer: Any, model: nn.Module) -> tuple[Any, Callable[[Tensor], None], list[nn.Parameter]]:
    return model, Tensor.backward, MasterWeights(optimizer).masters()


def with_o2(optimizer: Any, model: nn.Module) -> tuple[Any, Callable[[Tensor], None], list[nn.Parameter]]:
    masters = masters_of(optimizer)
    return model, lambda loss: backward(loss, optimizer), masters.masters()


def with_fp16_optimizer(optimizer: Any, model: nn.Module) -> tuple[Any, Callable[[Tensor], None], list[nn.Parameter]]:
    wrapped = FP16Optimizer(optimizer, static_loss_scale=8.0)
    return model, wrapped.backward, wrapped.masters.masters()


@pytest.mark.parametrize("replace", [channels_last, vector, data])
@pytest.mark.parametrize("wrap", [with_masters, with_o2, with_fp16_optimizer])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_model_whose_storage_is_replaced_is_still_updated(kind: str, wrap: Any, replace: Any) -> None:
    """New values that come with the storage reach the masters."""
    if wrap is with_o2:
        model, optimizer = set_up("O2", None, lambda net: OPTIMIZERS[kind](net.parameters()), dtype=torch.bfloat16)
    else:
        model = make_half()
        optimizer = OPTIMIZERS[kind](model.parameters())
    model, run_backward, masters = wrap(optimizer, model)
    for index, batch in enumerate(batches(4)):
        if index == 1:
            replace(model)
        before = model.conv.weight.detach().clone()
        optimizer.zero_grad()
        run_backward(loss_of(model, batch))
        optimizer.step()
        assert not torch.equal(model.conv.weight, before)
        assert torch.equal(model.conv.weight, masters[0].bfloat16())
        assert (model.conv.weight - before).abs().max() < 0.06


def test_sparse_gradients_become_dense() -> None:
    """Those of repeated indices are added in float32, and to what the master holds."""
    param = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    masters = MasterWeights(optimizer := torch.optim.SGD([param], lr=1.0))
    values = torch.tensor([256.0, 1.0], dtype=torch.bfloat16)
    for _ in range(2):
        param.grad = torch.sparse_coo_tensor([[3, 3]], values, (4,), check_invariants=True)
        masters.take_gradients_(torch.tensor(0.5))
    optimizer.step()
    assert masters.masters()[0].tolist() == [0.0, 0.0, 0.0, -257.0]


def test_state_of_a_used_optimizer_moves_to_the_masters() -> None:
    model = make_half()
    optimizer = OPTIMIZERS["torch-adamw"](model.parameters())
    loss_of(model).backward()
    optimizer.step()
    momentum = optimizer.state[model.head.weight]["exp_avg"].clone()
    masters = MasterWeights(optimizer)
    state = optimizer.state[masters.master_of(model.head.weight)]
    assert torch.equal(state["exp_avg"], momentum.float())
    assert float(state["step"]) == 1.0
    assert model.head.weight not in optimizer.state
    for set_to_none in (False, True):  # clears both sides
        loss_of(model).backward()
        masters.take_gradients_()
        loss_of(model).backward()
        optimizer.zero_grad(set_to_none)
        grads = [p.grad for p in (*model.parameters(), *masters.masters())]
        cleared = None if set_to_none else False
        assert [grad if grad is None else bool(grad.any()) for grad in grads] == [cleared] * len(grads)


def test_changes_from_outside_are_followed() -> None:
    """A mask or a checkpoint written into the model reaches the masters, masters that are loaded reach the model;
    digits of untouched weights stay.
    """
    model = make_half()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    masters = MasterWeights(optimizer)
    loss_of(model).backward()
    optimizer.step()
    master = masters.master_of(model.conv.weight)
    before = master.detach().clone()
    with torch.no_grad():
        model.conv.weight[0] = 0.0
    optimizer.step()  # no gradients: nothing but what was followed
    assert set(master[0].flatten().tolist()) == {0.0}
    assert torch.equal(master[1:], before[1:])
    assert not torch.equal(before, before.bfloat16().float())
    model.load_state_dict(make_half(seed=1).state_dict())
    optimizer.step()
    assert torch.equal(master, make_half(seed=1).conv.weight.float())
    masters.load_state_dict({"masters": [loaded + 1.0 for loaded in masters.masters()]})
    assert torch.equal(model.conv.weight, make_half(seed=1).conv.weight + 1.0)


def test_what_is_refused() -> None:
    """Nothing has changed then. The masters do not keep their optimizer alive."""
    model = make_half()
    optimizer = OPTIMIZERS["torch-sgd"](model.parameters())
    masters = MasterWeights(optimizer)
    gone = MasterWeights(torch.optim.SGD([nn.Parameter(torch.ones(2).half())], lr=0.1))
    remainders = optim.AdamW(make_half().parameters(), masters="remainder")
    before = [m.detach().clone() for m in masters.masters()]
    wrong = [*map(torch.zeros_like, before[:2]), torch.ones(9)]
    for refused, error, message in (
        (lambda: MasterWeights([]), TypeError, "MasterWeights takes a torch.optim.Optimizer, got list"),
        (lambda: MasterWeights(optimizer), RuntimeError, "SGD has master weights already; keep using the first"),
        (lambda: MasterWeights(remainders), ValueError, "AdamW has masters='remainder', which stores the remainders"),
        (lambda: gone.state_dict(), ReferenceError, "no longer exists"),
        (lambda: masters.load_state_dict({"state": 1}), KeyError, r"no 'masters' in .*, which has \['state'\]"),
        (lambda: masters.load_state_dict({"masters": [torch.ones(1)]}), ValueError, "are 1 saved .* has 3"),
        (lambda: masters.load_state_dict({"masters": wrong}), ValueError, r"saved master 2 has shape \(9,\)"),
    ):
        with pytest.raises(error, match=message):
            refused()
    torch.testing.assert_close([*before], [*masters.masters()], rtol=0, atol=0)
    assert torch.float32 not in {param.dtype for param in remainders.param_groups[0]["params"] if param.ndim > 1}
    for step in (lambda: optimizer.step(lambda: 1.0), lambda: optimizer.step(closure=lambda: 1.0)):
        with pytest.raises(
            RuntimeError, match=r"SGD.step got a closure, .*; run backward first and call step\(\) without"
        ):
            step()
    loss_of(model).backward()
    torch.utils.swap_tensors(masters.masters()[-1], nn.Parameter(torch.ones(10, device="meta")))  # as if it had moved
    with pytest.raises(RuntimeError, match=r"is on cpu, its float32 master on meta; move the model before"):
        masters.take_gradients_()
    assert model.conv.weight.grad is not None
    assert masters.masters()[0].grad is None


def test_what_autograd_saved_before_a_step_is_stale_after_it() -> None:
    """Also where a kernel writes the 16-bit parameters by address, which does not bump their version counters."""
    makers = list(OPTIMIZERS.values())
    if os.environ.get("TRITON_INTERPRET") == "1":
        makers.append(lambda params: optim.SGD(params, lr=0.1, impl="triton"))
    for optimizer_of in makers:
        model = make_half().eval()
        optimizer = optimizer_of(model.parameters())
        MasterWeights(optimizer)
        held = loss_of(model)
        held.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            held.backward()


def sharded_parameters(rank: int, world: int) -> None:
    """16-bit parameters that are DTensors step as plain ones do, with replicated gradients added to sharded ones."""
    mesh, ends = init_device_mesh("cpu", (world,)), []
    weight, *grads = torch.randn(4, 6, 4).bfloat16()
    for place in (lambda value, at: value.clone(), lambda value, at: distribute_tensor(value, mesh, [at])):
        param = nn.Parameter(place(weight, Shard(0)))
        optimizer = OPTIMIZERS["torch-adamw"]([param])
        masters, flags = MasterWeights(optimizer), {}
        for grad in grads:
            for placement in (Shard(0), Replicate()):
                param.grad = place(grad, placement)
                masters.take_gradients_(torch.tensor(0.5), flags)
            optimizer.step()
            masters.load_state_dict(copy.deepcopy(masters.state_dict()))
        assert list(map(bool, flags.values())) == [False]
        ends.append((masters.masters()[0].detach(), param.detach()))
    for plain, sharded in zip(*ends, strict=True):
        assert torch.equal(plain, sharded.full_tensor())


def o2_under_ddp(rank: int, world: int) -> None:
    """An O2 model wrapped after initialize: ranks see other data, step together, skip together, save alike.

    Micro-batches under `no_sync` are delayed: what is unscaled before the last would stay this rank's own.
    """
    model, optimizer = set_up("O2", dtype=torch.float16)
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    data = iter(batches(16)[rank::world])
    for step in range(4):
        optimizer.zero_grad()
        for last in (False, True):
            with contextlib.nullcontext() if last else parallel.no_sync():
                loss = loss_of(parallel, next(data)) * (1e30 if (step, rank) == (1, 1) else 1.0)
                backward(loss, optimizer, delay_unscale=not last)
        optimizer.step()
    assert (loss_scalers(optimizer)[0].stats().steps, loss_scalers(optimizer)[0].get_scale()) == (3, 2.0**15)
    saved = parallel.state_dict()["module.head.weight"]
    assert saved.dtype is torch.float32
    assert not torch.equal(saved, saved.half().float())
    others = [torch.empty_like(saved) for _ in range(2)]
    dist.all_gather(others, saved.contiguous())
    assert torch.equal(*others)


@pytest.mark.parametrize("function", [sharded_parameters, o2_under_ddp])
def test_on_two_ranks(function: Callable[[int, int], None]) -> None:
    on_ranks(function)
