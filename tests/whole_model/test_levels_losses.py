"""Levels with several losses, accumulation and overflows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampkit import amp
from ampkit.amp import loss_scalers, master_params
from ampkit.optim import SGD
from ampkit.scaler.loss_scale import DynamicLossScale
from tests.helpers.scaler_tools import count_reads
from tests.helpers.whole_model import backward, batches, both_dtypes, loss_of, overflowing, set_up, sgd

SCALED = pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])


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
    assert all(map(torch.equal, views, expected))


@SCALED
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_printed_reported_and_leaves_no_flag_behind(
    opt_level: str, fused: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """`test_a_level_is_its_parts_to_the_bit` has what it skips."""
    model, optimizer = set_up(
        opt_level, optimizer_of=lambda model: torch.optim.SGD(model.parameters(), 0.1, 0.9, fused=fused),
        dtype=torch.float16, loss_scale="dynamic", verbosity=1,
    )
    scaler, = loss_scalers(optimizer)
    for bad in (False, True, False):
        model.zero_grad()       # is enough: masters let go of their gradients at each step
        backward(overflowing(model) if bad else loss_of(model), optimizer)
        optimizer.step()
        assert bool(scaler.found_inf(optimizer)) is bad
        assert not hasattr(optimizer, "found_inf")
        assert ("step skipped; the loss scale is 32768 now" in capsys.readouterr().out) is (bad and not fused)
        assert not bad or "head.weight" in str(scaler.overflow_report(model))
    optimizer.zero_grad()
    backward(overflowing(model), optimizer)
    optimizer.zero_grad()       # drops that batch, and its overflow
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
        opt_level, [nn.Linear(4, 4), nn.Linear(4, 4)],
        lambda towers: [torch.optim.SGD(tower.parameters(), 0.1, fused=fused) for tower in towers],
        dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=2.0**8), num_losses=3,
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


def test_an_exception_inside_puts_gradients_back() -> None:
    model, optimizer = set_up("O1", dtype=torch.float16)
    backward(loss_of(model), optimizer)
    grads = [p.grad.clone() for p in model.parameters()]
    with model.conv.weight.register_hook(lambda grad: 1 / 0), pytest.raises(ZeroDivisionError):
        backward(loss_of(model), optimizer)     # after the head has its gradients
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    backward(loss_of(model), optimizer)
    optimizer.step()


@pytest.mark.parametrize(("optimizer_of", "expected"), [(sgd, 1), (lambda model: SGD(model.parameters(), 0.1), 0)])
def test_backward_reads_nothing_and_an_ordinary_step_one_flag(optimizer_of: Any, expected: int) -> None:
    model, optimizer = set_up("O2", optimizer_of=optimizer_of, dtype=torch.float16)
    with count_reads() as reads:
        backward(loss_of(model), optimizer)
        optimizer.step()
    assert reads.count("aten._local_scalar_dense.default") == expected
