"""Levels with several losses, accumulation, overflows and clipping."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampkit.amp import (
    initialize,
    loss_scalers,
    master_params,
    scale_loss,
)
from ampkit.containers import SIXTEEN_BIT
from ampkit.optim import SGD
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.loss_scale import DynamicLossScale, StaticLossScale
from tests.helpers.levels import (
    backward,
    batches,
    ids,
    make,
    overflowing,
    set_up,
    sgd,
)
from tests.helpers.scaler_tools import count_reads


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, **ids)
def test_losses_add_up_under_scales_of_their_own(opt_level: str, dtype: torch.dtype) -> None:
    """Two losses with static scales give the gradients of their sum with none, as far as rounding goes."""
    (x, y), = batches(1)
    grads = []
    for scales in ((1.0, 1.0), (64.0, 1024.0)):
        model, optimizer = set_up(opt_level, dtype=dtype, num_losses=2, loss_scale="2.0")
        for scaler, scale in zip(loss_scalers(optimizer), scales, strict=True):
            scaler.load_state_dict(GradScaler("cpu", loss_scale=StaticLossScale(scale)).state_dict())
        model.eval()
        backward(F.cross_entropy(model(x), y), optimizer, loss_id=0)
        backward(model(x).square().mean(), optimizer, loss_id=1)
        grads.append([p.grad.float() for p in master_params(optimizer)])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_accumulation_with_and_without_delay(opt_level: str) -> None:
    """Powers of two scale exactly, so that gradients unscaled one by one or all at once are the same at O1; at O2
    float32 masters add up without delay, and the 16-bit model with it."""
    results = []
    for delayed in ((), (0, 1)):
        model, optimizer = set_up(opt_level, dtype=torch.float16, loss_scale=256.0)
        model.eval()
        for _ in range(2):
            optimizer.zero_grad()
            for index, (x, y) in enumerate(batches(3)):
                backward(F.cross_entropy(model(x), y) / 3, optimizer, delay_unscale=index in delayed)
            optimizer.step()
        results.append([p.detach().clone() for p in master_params(optimizer)])
    exactly = {"rtol": 0.0, "atol": 0.0} if opt_level == "O1" else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(*results, **exactly)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_accumulation_over_gradients_that_view_ddps_buckets(opt_level: str, tmp_path: Path) -> None:
    def weights(wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        model, optimizer = set_up(opt_level, dtype=torch.bfloat16, loss_scale=128.0)
        wrapped = wrap(model)
        for x, y in batches(3):
            backward(F.cross_entropy(wrapped(x), y), optimizer)
        optimizer.step()
        return list(master_params(optimizer))

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        got = weights(lambda model: nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True))
    finally:
        torch.distributed.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(got, weights(lambda model: model), strict=True))


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_printed_reported_and_leaves_no_flag_behind(
    opt_level: str, fused: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """`test_a_level_is_its_parts_to_the_bit` has what it skips."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, fused=fused)
    model, optimizer = initialize(model, optimizer, opt_level, dtype=torch.float16, loss_scale="dynamic")
    (scaler,), ((x, y),) = loss_scalers(), batches(1)
    for bad in (False, True, False):
        model.zero_grad()       # is enough: masters let go of their gradients at each step
        backward(overflowing(model, x, y) if bad else F.cross_entropy(model(x), y), optimizer)
        optimizer.step()
        assert bool(scaler.found_inf(optimizer)) is bad
        assert not hasattr(optimizer, "found_inf")
        assert ("step skipped; the loss scale is 32768 now" in capsys.readouterr().out) is (bad and not fused)
        assert not bad or "head.weight" in str(scaler.overflow_report(model))
    assert (scaler.stats().steps, scaler.stats().skips) == (2, 1)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_an_overflow_skips_every_optimizer_of_its_loss_and_no_other(
    opt_level: str, bad: int, fused: bool, delay: bool
) -> None:
    """A loss of both optimizers, then one of each, as in Apex's documentation; the second iteration is clean.

    Two networks that are trained together do not step apart, whichever of them overflows.
    """
    torch.manual_seed(0)
    towers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    towers, optimizers = initialize(
        towers, [torch.optim.SGD(tower.parameters(), 0.1, fused=fused) for tower in towers], opt_level,
        dtype=torch.float16, verbosity=0, loss_scale=DynamicLossScale(init_scale=2.0**8), num_losses=3,
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
        same = [all(map(torch.equal, old, master_params(one))) for old, one in zip(before, optimizers, strict=True)]
        assert same == [bad_loss in (0, 1), bad_loss in (0, 2)]
    assert [s.get_scale() for s in loss_scalers()] == [2.0**7 if bad == i else 2.0**8 for i in range(3)]


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_a_batch_that_is_dropped_after_an_overflow_skips_no_later_step(opt_level: str) -> None:
    model, optimizer = set_up(opt_level, dtype=torch.float16, loss_scale="dynamic")
    (x, y), = batches(1)
    backward(overflowing(model, x, y), optimizer)
    optimizer.zero_grad()
    backward(F.cross_entropy(model(x), y), optimizer)
    optimizer.step()
    assert loss_scalers()[0].stats().skips == 0


def test_an_exception_inside_puts_gradients_back() -> None:
    model, optimizer = set_up("O1", dtype=torch.float16)
    (x, y), = batches(1)
    backward(F.cross_entropy(model(x), y), optimizer)
    grads = [p.grad.clone() for p in model.parameters()]

    def interrupted() -> None:
        with scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    backward(F.cross_entropy(model(x), y), optimizer)
    optimizer.step()


def test_backward_reads_nothing_and_an_ordinary_step_one_flag() -> None:
    for optimizer_of, expected in ((sgd, 1), (lambda m: SGD(m.parameters(), 0.1), 0)):
        model = make()
        model, optimizer = initialize(model, optimizer_of(model), "O2", dtype=torch.float16, verbosity=0)
        (x, y), = batches(1)
        with count_reads() as reads:
            backward(F.cross_entropy(model(x), y), optimizer)
            optimizer.step()
        assert reads.count("aten._local_scalar_dense.default") == expected
