"""What an iteration launches where Triton runs on the scale's device, and that its numbers are those without Triton."""

import itertools
import math
import os
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import DynamicLossScale, GradScaler
from ampkit.optim import AdamW
from ampkit_kernels import implementation
from tests.helpers.scaler_tools import alike, one_parameter, started

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of the inf and NaN under test
    pytest.mark.filterwarnings("ignore:the loss scale has fallen"),
]
# Operators that launch nothing on a GPU: new memory, views, and what the profiler notes.
FREE = ("aten.empty", "aten.slice", "aten.unbind", "aten.detach", "aten.select", "aten.lift_fresh", "profiler.")


class Launches(TorchDispatchMode):
    """Kernels by name, operators, and "upload" for a copy of addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name == "aten.copy_.default" and args[0].dtype is torch.int64:
            name = "upload"
        if not name.startswith(FREE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Have the kernels serve tensors on the CPU."""
    from ampkit_kernels.triton_ops.unscale import unscale_kernel

    counted = Launches()
    launcher = type(unscale_kernel).__getitem__

    def noted(kernel, grid):
        launch = launcher(kernel, grid)

        def run(*args, **options):
            counted.names.append(kernel.fn.__name__)
            with torch._C._DisableTorchDispatch():  # the interpreter computes with NumPy and copies
                launch(*args, **options)

        return run

    monkeypatch.setattr(type(unscale_kernel), "__getitem__", noted)
    monkeypatch.setattr(implementation, "AUTO", ("cuda", "cpu"))
    return counted


@pytest.mark.parametrize("clips", ["the scaler", "the step"])
@pytest.mark.parametrize("moved", [False, True])
def test_clipping_a_step_and_an_update_take_eight_launches_at_most(launches, clips, moved) -> None:
    """And a copy of addresses, if gradients are elsewhere than before. A step that clips writes no gradient."""
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    max_grad_norm = 0.5 if clips == "the step" else None
    scaler, optimizer = GradScaler("cpu", 1024.0), AdamW(params, impl="triton", max_grad_norm=max_grad_norm)
    for _ in range(3):
        scaler.scale(torch.ones((), requires_grad=True))
        for param in params:
            if moved or param.grad is None:
                param.grad = torch.full_like(param, 3.0)
        launches.names.clear()
        with launches:
            if max_grad_norm is None:
                scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
    upload, clip = ["upload"] * moved, ["unscale_kernel"] * (max_grad_norm is None)
    step, update = ["prepare_kernel", "step_kernel"], ["aten._amp_update_scale_.default", "aten.clamp_.default"]
    assert launches.names == ["inverse_kernel", *upload, "norm_kernel", "finish_kernel", *clip, *step, *update]
    assert params[0].grad.eq(3.0).all() == (max_grad_norm is not None)


def test_scales_at_both_ends_of_float32_are_torchs() -> None:
    """A growth that would reach inf keeps the scale, `max_scale` or not; the count of clean updates starts again."""
    largest = torch.finfo(torch.float32).max
    for growth, backoff, start in itertools.product((2.0, 1e30), (0.5, 1e-30), (1.0, 1e30, largest)):
        rule = DynamicLossScale(1.0, growth_factor=growth, backoff_factor=backoff, growth_interval=2)
        for flag in (torch.zeros(()), torch.ones(())):
            theirs = rule.init("cpu", scale=start, growth_tracker=1)
            state = rule.next_state(theirs, flag)
            torch._amp_update_scale_(theirs.scale, theirs.growth_tracker, flag, growth, backoff, 2)
            assert (state.scale, state.growth_tracker) == (theirs.scale, theirs.growth_tracker), (growth, start)


def trained(seed: int, dtype: torch.dtype) -> list[Any]:
    """All that a run shows, by a random strategy, some iterations without a step.

    Gradients are powers of two, alone, so that the order of sums and the dtype of the clip factor change no bit.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    rule = DynamicLossScale(
        draw(1.0, 3.0, 2.0**14, 12345.6),
        growth_factor=draw(1.0, 2.0, 1.7, 1e30),
        backoff_factor=draw(0.5, 0.3, 1.0),
        growth_interval=draw(0, 1, 2, 5, 2**40),
        min_scale=draw(2.0**-126, 0.7),
        max_scale=draw(2.0**15, 3.4e38),
        hysteresis=draw(1, 1, 2, 3),
    )
    scaler, found = started(loss_scale=rule), list[Any]()
    pairs = [one_parameter(dtype=dtype) for _ in range(3)]
    for _ in range(8):
        for param, optimizer in pairs[: draw(1, 2, 3)]:
            param.grad = torch.full_like(param, draw(0.0, 0.25, 1.0, 2.0**-23, 2.0, 2.0**100, math.inf, math.nan))
            found += [scaler.clip_grad_norm_(optimizer, draw(0.5, 3, 0.123), draw(1.0, math.inf)), param.grad.float()]
            if draw(True, True, False):
                scaler.step(optimizer)
        scaler.update()
        found += [scaler._scale.clone(), scaler._growth_tracker.clone()]
        found += [each.clone() for each in scaler._counters]
        found += [scaler.stats()] * draw(True, False)
    return [*found, scaler.stats(), str(scaler.history)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_runs_have_the_bits_of_runs_without_kernels(launches, monkeypatch, dtype: torch.dtype) -> None:
    """Inverse scales, norms and clip factors."""
    for seed in range(8 * dtype.itemsize, 8 * dtype.itemsize + 4):
        ours = trained(seed, dtype)
        with monkeypatch.context() as patch:
            patch.setattr(implementation, "AUTO", ("cuda",))
            theirs = trained(seed, dtype)
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert alike(mine, other), (seed, index, mine, other)
    assert {"inverse_kernel", "norm_kernel", "finish_kernel"} <= set(launches.names)
