"""initialize and scale_loss: each level against what it stands for; losses that overflow, add up and accumulate."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ampkit import Policy, amp, autocast
from ampkit.amp import loss_scalers, master_params
from ampkit.amp.levels import LEVELS
from ampkit.dtypes import SIXTEEN_BIT
from ampkit.half_precision.half import half
from ampkit.half_precision.master_weights import MasterWeights
from ampkit.optim import SGD, AdamW
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.loss_scale import DynamicLossScale, NoOpLossScale
from tests.helpers.half_models import BATCH, OPTIMIZERS, backward, batches, both_dtypes, loss_of, make, set_up
from tests.helpers.scaler_tools import count_reads

SCALED = pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])


@both_dtypes
@pytest.mark.parametrize(
    ("opt_level", "low"), [("O0", ""), ("O1", "scale"), ("O2", "conv scale"), ("O3", "conv bn stepped")]
)
def test_what_a_level_is(opt_level: str, low: str, dtype: torch.dtype) -> None:
    """Apex's table of dtypes and scales, with no scale where bfloat16 needs none."""
    model, optimizer = set_up(opt_level, **({} if opt_level == "O0" else {"dtype": dtype}))

    def of(part: str) -> torch.dtype:
        return dtype if part in low else torch.float32

    assert model.conv.weight.dtype == model.head.weight.dtype == of("conv")
    assert model.bn.weight.dtype == model.bn.running_var.dtype == of("bn")
    assert {p.dtype for p in master_params(optimizer)} == {of("stepped")}
    scale = DynamicLossScale(max_scale=2.0**24) if of("scale") is torch.float16 else NoOpLossScale()
    assert [scaler.loss_scale for scaler in loss_scalers(optimizer)] == [scale] * (opt_level != "O0")
    seen = []
    model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    x = BATCH[0]
    assert model(x if opt_level == "O1" else x.double()).dtype is torch.float32
    assert seen == [torch.float32 if opt_level == "O0" else dtype]
    if opt_level != "O0":
        model, _ = set_up(opt_level, cast_model_outputs=torch.float16)  # dtype: the device's own
        model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        assert model(x).dtype is torch.float16
        assert seen[1:] == [torch.get_autocast_dtype("cpu")]


@pytest.mark.parametrize("kind", ["torch-sgd", "ampkit-sgd"])
@pytest.mark.parametrize(("opt_level", "dtype"), [("O0", None), *itertools.product(("O1", "O2"), SIXTEEN_BIT)])
def test_a_level_is_its_parts_to_the_bit(opt_level: str, dtype: torch.dtype | None, kind: str) -> None:
    """O0: float32; O1: `autocast` and `GradScaler`; O2: `half`, `MasterWeights` from float32, and `GradScaler`.

    Losses, gradients, weights and scale of 12 steps, overflows and growths among them.
    """
    scaled = opt_level != "O0"
    rule = DynamicLossScale(init_scale=2.0**22, growth_interval=3, max_scale=2.0**40)
    scaler, by_hand = GradScaler("cpu", enabled=scaled, loss_scale=rule, allow_fp16=True), make()
    start = {p: p.detach().clone() for p in by_hand.parameters()}
    if opt_level == "O2":
        half(by_hand, dtype, cast_outputs=torch.float32, in_place=True)
    by_hand_optimizer = OPTIMIZERS[kind](by_hand.parameters())
    if opt_level == "O2":
        masters = MasterWeights(by_hand_optimizer)
        masters.load_state_dict({"masters": [weight for p, weight in start.items() if p.dtype is dtype]})
    model, optimizer = set_up(
        opt_level,
        optimizer_of=lambda model: OPTIMIZERS[kind](model.parameters()),
        dtype=dtype,
        loss_scale=rule if scaled else None,
        policy=Policy.default("cpu") if opt_level == "O1" else None,
    )
    for batch in batches(12):
        by_hand_optimizer.zero_grad()
        with autocast("cpu", dtype, enabled=opt_level == "O1"):
            expected = loss_of(by_hand, batch)
        scaler.scale(expected).backward()
        scaler.unscale_(by_hand_optimizer)
        expected_grads = [p.grad.clone() for p in master_params(by_hand_optimizer)]
        scaler.step(by_hand_optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        backward(loss, optimizer)
        for grad, p in zip(expected_grads, master_params(optimizer), strict=True):
            assert torch.equal(grad, p.grad) or not torch.isfinite(grad).all()
        optimizer.step()
        assert torch.equal(loss, expected)
        assert [by_level.get_scale() for by_level in loss_scalers(optimizer)] == [scaler.get_scale()] * scaled
        torch.testing.assert_close([*master_params(optimizer)], [*master_params(by_hand_optimizer)], rtol=0, atol=0)
        torch.testing.assert_close([*model.parameters()], [*by_hand.parameters()], rtol=0, atol=0)
    for by_level in loss_scalers(optimizer):
        stats = by_level.stats()
        assert (stats.steps, stats.skips) == (scaler.stats().steps, scaler.stats().skips)
        assert (stats.skips > 0) is (dtype is torch.float16)
        assert stats.growths > 0


def gradient_error_bound(x: Tensor, y: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """How far a least-squares gradient computed in `dtype` may be from the exact one, elementwise, in float64.

    With unit roundoff u, x and w are rounded once each, the prediction once more: it is off by at most
    c3 |x||w|, where ck = k u / (1 - k u). The gradient of the loss is rounded, multiplied with rounded x, and
    rounded: x^T r (2/n) is off by at most c3 |x|^T |r| (2/n), and the prediction's error comes on top. Sums are
    accumulated in float32; float32's unit times the number of terms covers that and the loss itself.
    """
    n, d = x.shape
    u = torch.finfo(dtype).eps / 2 + (n + d + 4) * 2.0**-24
    c3 = 3 * u / (1 - 3 * u)
    residual = (x @ w - y).abs()
    prediction_error = c3 * (x.abs() @ w.abs())
    # below float16's normal range the error is half its smallest number instead
    tiny = 2.0**-25 if dtype is torch.float16 else 0.0
    return 2 / n * (x.abs().T @ ((1 + c3) * prediction_error + c3 * residual)) + tiny * (1 + x.abs().sum(0))


@both_dtypes
def test_o2_masters_stay_within_the_derived_bound_of_float32(dtype: torch.dtype) -> None:
    """A gradient step of a convex loss with lr <= 2/L moves two points no farther apart. So after T steps the masters
    are within lr * sum_t |error of the t-th gradient| of the float32 run, both from the same start."""
    n, d, lr = 32, 8, 0.05
    x, truth = torch.randn(n, d), torch.randn(d)
    y = x @ truth + 0.5 * torch.randn(n)
    assert lr <= 2 / float(torch.linalg.matrix_norm(2 / n * x.T @ x, 2))
    model, optimizer = set_up(
        "O2",
        nn.Linear(d, 1, bias=False),
        lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        dtype=dtype,
        loss_scale=64.0 if dtype is torch.float16 else 1.0,
    )
    (master,) = master_params(optimizer)
    start = plain = master.detach().clone().flatten()
    allowed = distance = 0.0
    for step in range(1, 61):
        here = master.detach().double().flatten()
        allowed += lr * float(gradient_error_bound(x.double(), y.double(), here, dtype).norm())
        plain = plain - lr * 2 / n * (x.T @ (x @ plain - y))
        optimizer.zero_grad()
        backward(F.mse_loss(model(x).flatten(), y), optimizer)
        optimizer.step()
        distance = float((master.detach().flatten() - plain).double().norm())
        # float32's own rounding of each update, on both sides
        assert distance <= allowed + 4 * step * 2.0**-24 * float(plain.norm())
        assert torch.equal(model.weight, master.to(dtype))
    assert 0.0 < distance < 0.02 * float((plain - start).norm())
    assert loss_scalers(optimizer)[0].stats().skips == 0


@pytest.mark.parametrize("opt_level", LEVELS)
def test_memory_per_parameter(opt_level: str) -> None:
    """Bytes held for each weight after backward and after step with AdamW, as docs/apex.md has them."""
    model, optimizer = set_up(
        opt_level,
        nn.Linear(64, 64, bias=False),
        lambda model: AdamW(model.parameters()),
        dtype=None if opt_level == "O0" else torch.bfloat16,
    )

    def held() -> float:
        tensors = {model.weight, model.weight.grad, *master_params(optimizer)}
        tensors |= {p.grad for p in master_params(optimizer)}
        tensors |= {v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.ndim}
        return sum(t.nbytes for t in tensors if t is not None) / model.weight.numel()

    for _ in range(2):
        optimizer.zero_grad()
        backward(model(torch.randn(4, 64)).square().mean(), optimizer)
        at_step = held()
        optimizer.step()
    assert (at_step, held()) == {"O0": (16, 16), "O1": (16, 16), "O2": (18, 14), "O3": (8, 8)}[opt_level]


@SCALED
@both_dtypes
def test_losses_add_up_under_scales_of_their_own(opt_level: str, dtype: torch.dtype) -> None:
    """Two losses with static scales give the gradients of their sum with none, as far as rounding goes."""
    grads = []
    for scales in ((1.0, 1.0), (64.0, 1024.0)):
        model, optimizer = set_up(opt_level, dtype=dtype, num_losses=2, loss_scale="2.0")
        saved = {f"loss_scaler{i}": {"loss_scale": scale, "unskipped": 0} for i, scale in enumerate(scales)}
        amp.load_state_dict(saved, optimizer)
        for loss_id in range(2):
            backward(loss_of(model.eval(), batches(2)[loss_id]), optimizer, loss_id=loss_id)
        grads.append([p.grad.float() for p in master_params(optimizer)])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_accumulation_with_and_without_delay_and_over_gradients_that_view_ddps_buckets(
    opt_level: str, tmp_path: Path
) -> None:
    """Powers of two scale exactly, so that gradients unscaled one by one or all at once are the same at O1; at O2
    float32 masters add up without delay, and the 16-bit model with it."""

    def weights(delayed: tuple[int, ...] = (), wrap: Callable[[Any], nn.Module] = lambda model: model) -> list[Tensor]:
        model, optimizer = set_up(opt_level, dtype=torch.float16, loss_scale=256.0)
        wrapped = wrap(model.eval())
        for _ in range(2):
            optimizer.zero_grad()
            for index, batch in enumerate(batches(3)):
                backward(loss_of(wrapped, batch) / 3, optimizer, delay_unscale=index in delayed)
            optimizer.step()
        return list(master_params(optimizer))

    expected = weights()
    exactly = {"rtol": 0.0, "atol": 0.0} if opt_level == "O1" else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(weights(delayed=(0, 1)), expected, **exactly)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        views = weights(wrap=lambda model: nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True))
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close([*views], [*expected], rtol=0, atol=0)


@SCALED
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_printed_reported_and_leaves_no_flag_behind(
    opt_level: str, fused: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """`test_a_level_is_its_parts_to_the_bit` has what it skips."""
    model, optimizer = set_up(
        opt_level,
        optimizer_of=lambda model: torch.optim.SGD(model.parameters(), 0.1, 0.9, fused=fused),
        dtype=torch.float16,
        loss_scale="dynamic",
        verbosity=1,
    )
    (scaler,) = loss_scalers(optimizer)
    for bad in (False, True, False):
        model.zero_grad()  # enough: each step drops the masters' gradients
        backward(loss_of(model) * 1e30 if bad else loss_of(model), optimizer)
        optimizer.step()
        assert bool(scaler.found_inf(optimizer)) is bad
        assert not hasattr(optimizer, "found_inf")
        assert ("step skipped; the loss scale is 32768 now" in capsys.readouterr().out) is (bad and not fused)
        assert not bad or "head.weight" in str(scaler.overflow_report(model))
    optimizer.zero_grad()
    backward(loss_of(model) * 1e30, optimizer)
    optimizer.zero_grad()  # drops that batch, and its overflow
    backward(loss_of(model), optimizer)
    optimizer.step()
    assert (scaler.stats().steps, scaler.stats().skips) == (3, 1)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [0, 1, 2])
@SCALED
def test_an_overflow_skips_every_optimizer_of_its_loss_and_no_other(
    opt_level: str, bad: int, fused: bool, delay: bool
) -> None:
    """A loss of both optimizers, then one of each, as in Apex's documentation; the second iteration is clean.

    Two networks that are trained together do not step apart, whichever of them overflows.
    """
    towers, optimizers = set_up(
        opt_level,
        [nn.Linear(4, 4), nn.Linear(4, 4)],
        lambda towers: [torch.optim.SGD(tower.parameters(), 0.1, fused=fused) for tower in towers],
        dtype=torch.float16,
        loss_scale=DynamicLossScale(init_scale=2.0**8),
        num_losses=3,
    )
    for bad_loss in (bad, None):
        before = [[p.detach().clone() for p in master_params(optimizer)] for optimizer in optimizers]
        for loss_id, whose in enumerate((optimizers, optimizers[:1], optimizers[1:])):
            factor = 1e38 if loss_id == bad_loss else 1.0
            # delayed, the overflow is in a micro-batch before the last
            for huge, last in ((factor, False), (1.0, True)) if delay and loss_id == 0 else ((factor, True),):
                first, second = (tower(torch.ones(2, 4)).square().mean() for tower in towers)
                loss = (first + second * huge, first * huge, second * huge)[loss_id]
                backward(loss, whose, loss_id=loss_id, delay_unscale=not last)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same = [all(map(torch.equal, old, master_params(o))) for old, o in zip(before, optimizers, strict=True)]
        assert same == [bad_loss in (0, 1), bad_loss in (0, 2)]
    assert [s.get_scale() for s in loss_scalers(optimizers[0])] == [2.0**7 if bad == i else 2.0**8 for i in range(3)]


def test_an_exception_inside_puts_gradients_back() -> None:
    model, optimizer = set_up("O1", dtype=torch.float16)
    backward(loss_of(model), optimizer)
    grads = [p.grad.clone() for p in model.parameters()]
    with model.conv.weight.register_hook(lambda grad: 1 / 0), pytest.raises(ZeroDivisionError):
        backward(loss_of(model), optimizer)  # after the head has its gradients
    torch.testing.assert_close([p.grad for p in model.parameters()], grads, rtol=0, atol=0)
    backward(loss_of(model), optimizer)
    optimizer.step()


@pytest.mark.parametrize(("cls", "expected"), [(torch.optim.SGD, 1), (SGD, 0)])
def test_backward_reads_nothing_and_an_ordinary_step_one_flag(cls: Any, expected: int) -> None:
    model, optimizer = set_up("O2", optimizer_of=lambda model: cls(model.parameters(), 0.1), dtype=torch.float16)
    with count_reads() as reads:
        backward(loss_of(model), optimizer)
        optimizer.step()
    assert reads.count("aten._local_scalar_dense.default") == expected


@pytest.mark.gpu
@both_dtypes
@SCALED
def test_on_cuda_levels_train_without_waiting_for_the_device(opt_level: str, dtype: torch.dtype) -> None:
    """With an optimizer that skips on the device, an overflow among the steps included."""
    model, optimizer = set_up(
        opt_level,
        make().cuda(),
        lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
        dtype=dtype,
        loss_scale="dynamic",
    )
    x, y = (tensor.cuda() for tensor in BATCH)
    losses = []
    for index in range(12):
        torch.cuda.set_sync_debug_mode("error" if index > 1 else "default")  # the first steps allocate and compile
        try:
            optimizer.zero_grad()
            losses.append(loss_of(model, (x, y)))
            backward(losses[-1] * (torch.inf if index == 4 else 1.0), optimizer)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert losses[-1] < losses[0] / 2
    stats = loss_scalers(optimizer)[0].stats()
    assert (stats.steps, stats.skips) == (11, 1)
    if opt_level == "O2":
        assert torch.equal(model.head.weight, list(master_params(optimizer))[-2].to(dtype))
