"""What an iteration launches where Triton runs on the scale's device, and that single numbers keep their bits.

Kernels over gradients do not run here, only the few that compute with single numbers.
"""

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ampkit_kernels
from ampkit import DynamicLossScale, GradScaler
from ampkit.gradients import clipping
from ampkit.optim import AdamW
from ampkit.scaler.history import History

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),       # NumPy's, of the inf and NaN under test
]
# Operators that launch nothing on a GPU: new memory, views, and what the profiler notes.
FREE = ("aten.empty", "aten.slice", "aten.unbind", "aten.detach", "aten.select", "aten.lift_fresh", "profiler.")
OVER_GRADIENTS = ("unscale_kernel", "norm_kernel", "finish_kernel", "prepare_kernel", "adamw_kernel")


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
    """Have the kernels serve tensors on the CPU; those over gradients are counted and do not run."""
    from ampkit_kernels import triton_ops
    from ampkit_kernels.triton_ops.unscale import unscale_kernel

    counted = Launches()
    launcher = type(unscale_kernel).__getitem__

    def noted(kernel, grid):
        name = kernel.fn.__name__
        launch = launcher(kernel, grid)

        def run(*args, **options):
            counted.names.append(name)
            if name not in OVER_GRADIENTS:
                with torch._C._DisableTorchDispatch():      # the interpreter computes with NumPy and copies
                    launch(*args, **options)

        return run

    monkeypatch.setattr(type(unscale_kernel), "__getitem__", noted)
    monkeypatch.setattr(ampkit_kernels, "backend", lambda _: triton_ops)
    return counted


@pytest.mark.parametrize("strategy", [DynamicLossScale(1024.0), DynamicLossScale(hysteresis=2, tolerance=0.1)])
@pytest.mark.parametrize(("captured", "moved"), [(False, False), (False, True), (True, False)])
def test_clipping_a_step_and_an_update_take_six_launches(launches, monkeypatch, strategy, captured, moved) -> None:
    """And one more to copy addresses of gradients elsewhere than before, or in a CUDA graph one to count."""
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    scaler, optimizer = GradScaler("cpu", loss_scale=strategy), AdamW(params, impl="triton")
    for i in range(3):
        scaler.scale(torch.ones((), requires_grad=True))
        for param in params:
            if moved or param.grad is None:
                param.grad = torch.full_like(param, 3.0)
        if i == 2:
            monkeypatch.setattr(ampkit_kernels, "is_capturing", lambda _: captured)
        launches.names.clear()
        with launches:
            scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
    upload, tally = ["upload"] * moved, ["tally_kernel"] * captured
    step = ["prepare_kernel", "adamw_kernel", "update_kernel"]
    assert launches.names == ["inverse_kernel", *upload, "norm_kernel", "finish_kernel", *step, *tally]


def test_counting_in_one_launch_gives_the_same_counts(launches) -> None:
    """Beside the operators that the launch replaces, with no, one and several steps between updates."""
    ours, theirs = History(torch.device("cpu"), {}), History(torch.device("cpu"), {})
    theirs.triton = None
    generator = torch.Generator().manual_seed(0)
    before = torch.tensor(2.0**10)
    for i in range(20):
        flags = [torch.randint(2, (), generator=generator).float() for _ in range(int(torch.randint(4, ())))]
        overflow = max([torch.zeros(()), *flags])
        after = before * (0.5 if overflow else float(torch.randint(1, 3, (), generator=generator)))
        for history in (ours, theirs):
            for flag in flags:
                history.note_step(flag)
            assert history.note_update(before, overflow, None) is (i == 0)
            history.fold(after)
        assert ours.totals(after) == theirs.totals(after)
        before = after
    assert ours.rows(before) == theirs.rows(before)
    assert {"tally_kernel"} == set(launches.names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_clip_factor_has_torchs_bits(launches, monkeypatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(f"{__name__}.OVER_GRADIENTS", ())
    ops = ampkit_kernels.backend(torch.ones(()))
    generator = torch.Generator().manual_seed(0)
    for norm in (0.0, 0.3, 1e-7, 2.0, 1e30, float("inf"), float("nan")):
        for max_norm in (0.5, 3, *torch.rand(5, generator=generator).tolist()):
            inv_scale = torch.rand((), generator=generator)
            grads = ampkit_kernels.FlatList.of([torch.tensor([norm], dtype=dtype)])
            total, factor = ops.norm_and_clip_factor(grads, inv_scale, torch.zeros(()), 1.0, max_norm)
            expected = (inv_scale * clipping.coefficient(total, max_norm)).float()
            torch.testing.assert_close(factor, expected, rtol=0, atol=0, equal_nan=True)


def test_single_numbers_in_one_launch_have_torchs_bits(launches) -> None:
    """The inverse of a scale; and its next value by random strategies and overflows, through the scaler's own call."""
    generator = torch.Generator().manual_seed(0)
    for value in (1.0, 3.0, 2.0**-126, 3.4e38, *torch.rand(20, generator=generator).tolist()):
        scale = torch.tensor(value)
        inverse = ampkit_kernels.backend(scale).inverse_scale(scale)
        assert inverse == (scale.double().reciprocal().float(), 0.0, scale)

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    for _ in range(40):
        rule = DynamicLossScale(
            draw(1.0, 3.0, 2.0**14), growth_factor=draw(1.0, 2.0, 1.7, 1e30), backoff_factor=draw(0.5, 0.3, 1.0),
            growth_interval=draw(0, 1, 2, 5, 2**40), min_scale=draw(2.0**-126, 0.7), max_scale=draw(2.0**15, 3.4e38),
            hysteresis=draw(1, 1, 2, 3), hysteresis_refill=draw("growth", "clean"), tolerance=draw(0.0, 0.0, 0.3),
        )
        scaler = GradScaler("cpu", loss_scale=rule)
        scaler.scale(torch.ones((), requires_grad=True))
        theirs = rule.init("cpu")
        for _ in range(8):
            found_inf = torch.tensor(draw(0.0, 0.0, 1.0, float("nan")))
            theirs = rule.next_state(theirs, found_inf)
            scaler._advance(found_inf)
            assert (scaler._scale, scaler._growth_tracker, *scaler._counters) == tuple(theirs), rule
