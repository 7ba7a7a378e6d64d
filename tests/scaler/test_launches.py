"""What an iteration launches where Triton serves the device, counted; and that fewer launches compute the same."""

import contextlib
import math
import os
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import DynamicLossScale, GradScaler, StaticLossScale
from ampkit.gradients import clipping, kernels
from ampkit.optim import AdamW

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
# Operators that launch nothing on a GPU: new memory, views, and what the profiler notes.
FREE = ("aten.empty", "aten.slice", "aten.unbind", "aten.detach", "aten.select", "aten.lift_fresh", "profiler.")
# Where it is asked whether a graph is being captured.
CAPTURING = (
    "ampkit_kernels.triton_ops.pointer_table.is_capturing", "ampkit_kernels.triton_ops.steps.is_capturing",
    "ampkit_kernels.optimizer_api.is_capturing", "ampkit.optim._planned.is_capturing",
    "ampkit.scaler.history._is_capturing",
)


class Launches(TorchDispatchMode):
    """Kernels by name, operators, and "upload" for a copy of addresses. Kernels that are `left_out` do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.left_out: frozenset[str] = frozenset()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name == "aten.copy_.default" and args[0].dtype is torch.int64:
            name = "upload"
        if not name.startswith(FREE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches() -> Iterator[Launches]:
    """Have Triton's interpreter serve tensors on the CPU as its kernels serve a GPU, and count."""
    import ampkit_kernels
    from ampkit_kernels.triton_ops.unscale import unscale_kernel
    from benchmarks.host import Served

    counted = Launches()
    launcher = type(unscale_kernel).__getitem__

    def noted(kernel, grid):
        name = kernel.fn.__name__
        counted.names.append(name)
        launch = launcher(kernel, grid)

        def run(*args, **options):
            if name in counted.left_out:
                return None
            with torch._C._DisableTorchDispatch():      # the interpreter computes with NumPy and copies
                return launch(*args, **options)

        return run

    served = Served()
    with (
        mock.patch.object(type(unscale_kernel), "__getitem__", noted),
        mock.patch.object(kernels, "_loaded", [served, served]),
        mock.patch.object(kernels, "serves", return_value=True),
    ):
        assert ampkit_kernels.FlatList is served.FlatList
        yield counted


def training(
    strategy: DynamicLossScale | StaticLossScale | None = None, **options: int
) -> tuple[GradScaler, AdamW, list[torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (300,), (1,))]
    given = {"init_scale": 1024.0} if strategy is None else {"loss_scale": strategy}
    scaler = GradScaler("cpu", **given, **options)
    return scaler, AdamW(params, torch.tensor(1e-3), impl="triton"), params


def iterate(
    scaler: GradScaler, optimizer: AdamW, params: list[torch.nn.Parameter], seed: int, *, clip: bool,
    into: list[torch.Tensor] | None = None,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scaler.scale(torch.ones((), requires_grad=True))
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator) * 1024.0
        param.grad = grad if into is None else into[i].copy_(grad)
    if seed == 2:
        params[1].grad[7] = float("inf")
    if clip:
        scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("strategy", [None, DynamicLossScale(hysteresis=2, tolerance=0.1)], ids=["plain", "hysteresis"])
def test_clipping_and_adamw_take_eight_launches_after_backward(launches, strategy) -> None:
    scaler, optimizer, params = training(strategy)
    for seed in range(2):
        iterate(scaler, optimizer, params, seed, clip=True)
    scaler.scale(torch.ones((), requires_grad=True))
    for param in params:
        param.grad = torch.full_like(param, 3.0)        # elsewhere than before
    launches.names.clear()
    with launches:
        scaler.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert launches.names == [
        "inverse_kernel", "upload", "norm_kernel", "finish_kernel", "upload", "prepare_kernel", "adamw_kernel",
        "update_kernel",
    ]


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("strategy", [
    None, DynamicLossScale(64.0, hysteresis=2, growth_interval=2), DynamicLossScale(64.0, tolerance=0.5),
], ids=["plain", "hysteresis", "tolerance"])
def test_fewer_launches_leave_the_same_bits(launches, strategy, clip) -> None:
    """Beside the operators that the launches stand for; the norm itself is the kernel's on both sides."""
    results = []
    for fused in (True, False):
        scaler, optimizer, params = training(strategy)
        with mock.patch.object(kernels, "serves", lambda tensor, fused=fused: fused):
            for seed in range(6):
                iterate(scaler, optimizer, params, seed, clip=clip)
        state = scaler.state_dict()
        own = state.pop("ampkit")
        results.append((state, own["totals"], own["counters"], [row["scale"] for row in scaler.history], params))
    ours, theirs = results
    assert ours[:4] == theirs[:4]
    assert ours[1]["skips"] == 1
    assert all(torch.equal(p, q) for p, q in zip(ours[4], theirs[4], strict=True))


def test_what_only_code_after_a_step_asks_for_is_there(launches) -> None:
    """A second optimizer that shares a gradient unscales it by the first one's scale."""
    scaler, optimizer, params = training()
    other = torch.optim.SGD(params[:1], lr=0.0)
    scaler.scale(torch.ones((), requires_grad=True))
    for param in params:
        param.grad = torch.full_like(param, 1024.0)
    scaler.step(optimizer)
    scaler.unscale_(other)
    assert torch.equal(params[0].grad, torch.ones(5, 3))


@pytest.mark.parametrize("norm", [0.0, 0.3, 1e-7, 2.0, 1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_clip_factor_has_torchs_bits(launches, norm: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for max_norm in (0.5, 1.0, 3, *torch.rand(20, generator=generator).tolist()):
        inv_scale = torch.rand((), generator=generator)
        grads = kernels.flat_list([torch.tensor([norm], dtype=dtype)])
        assert grads is not None
        found = kernels.norm_and_clip_factor(grads, inv_scale, torch.zeros(()), 1.0, max_norm)
        assert found is not None
        total, factor = found
        expected = (inv_scale * clipping.coefficient(total, max_norm)).float()
        torch.testing.assert_close(factor, expected, rtol=0, atol=0, equal_nan=True)


def test_an_update_in_one_launch_follows_the_strategy(launches) -> None:
    """Random strategies and random overflows, step by step."""
    generator = torch.Generator().manual_seed(0)

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    for _ in range(60):
        plain = draw(True, False)
        rule = DynamicLossScale(
            draw(1.0, 3.0, 2.0**14), growth_factor=draw(1.0, 2.0, 1.7, 1e30), backoff_factor=draw(0.5, 0.3, 1.0),
            growth_interval=draw(0, 1, 2, 5, 2**40), min_scale=draw(2.0**-126, 0.7), max_scale=draw(2.0**15, 3.4e38),
            **({} if plain else {
                "hysteresis": draw(1, 2, 3), "hysteresis_refill": draw("growth", "clean"), "tolerance": draw(0.0, 0.3),
            }),
        )
        ours, theirs = rule.init("cpu"), rule.init("cpu")
        for _ in range(12):
            found_inf = torch.tensor(draw(0.0, 0.0, 1.0, float("nan")))
            theirs = rule.next_state(theirs, found_inf)
            kernels.update_scale_(
                *ours[:2], None if rule.is_plain else ours[2:], found_inf, growth_factor=rule.growth_factor,
                backoff_factor=rule.backoff_factor, growth_interval=rule.growth_interval, min_scale=rule.min_scale,
                max_scale=rule.max_scale, hysteresis=rule.hysteresis,
                refills_when_clean=rule.hysteresis_refill == "clean", tolerance=rule.tolerance,
            )
            compared = 2 if rule.is_plain else 5      # torch's rule has no counters to move
            assert [value.item() for value in ours[:compared]] == [value.item() for value in theirs[:compared]], rule


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """As in a CUDA graph's capture, except that what is launched runs at once, as in a replay."""
    with contextlib.ExitStack() as stack:
        for where in CAPTURING:
            stack.enter_context(mock.patch(where, return_value=True))
        yield


def captured(launches: Launches, count: int, *, unscale: bool = False, keep: bool = False) -> list[str]:
    """What a captured iteration launches for `count` parameters. Their gradients are the graph's own unless `keep`."""
    launches.left_out = frozenset({"_write_kernel", "unscale_kernel", "norm_kernel", "adamw_kernel"})
    params = [torch.nn.Parameter(torch.ones(1 + i % 7)) for i in range(count)]
    scaler = GradScaler("cpu", 1024.0)
    optimizer = AdamW(params, torch.tensor(1e-3), impl="triton")
    for graph in (contextlib.nullcontext, contextlib.nullcontext, capturing):
        scaler.scale(torch.ones((), requires_grad=True))
        for param in params:
            if param.grad is None or not keep:
                param.grad = torch.full_like(param, 3.0)
        launches.names.clear()
        with graph(), launches:
            if unscale:
                scaler.unscale_(optimizer)
            scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
    return launches.names


def test_a_captured_iteration_over_gradients_that_stay_takes_seven_launches(launches) -> None:
    assert captured(launches, 150, keep=True) == [
        "inverse_kernel", "norm_kernel", "finish_kernel", "prepare_kernel", "adamw_kernel", "update_kernel",
        "tally_kernel",
    ]


@pytest.mark.parametrize(("count", "unscale", "launched"), [(150, False, 12), (150, True, 16), (1000, False, 24)])
def test_a_captured_iteration_writes_addresses_of_the_graphs_own_gradients_alone(
    launches, count: int, unscale: bool, launched: int
) -> None:
    """128 at a time for each table, and one copy of those that the step has besides."""
    names = captured(launches, count, unscale=unscale)
    assert len(names) == launched
    found = Counter(names)
    assert found["_write_kernel"] == (2 + unscale) * -(-count // 128)
    assert (found["upload"], found["_expand_kernel"]) == (1, 0)


@pytest.mark.parametrize("keep", [True, False])
def test_captured_iterations_leave_the_same_bits(launches, keep: bool) -> None:
    """Beside the same iterations, launched one by one; eager ones after a capture go by the plan made before it."""
    results = []
    for graph in (capturing, contextlib.nullcontext):
        scaler, optimizer, params = training()
        grads = [torch.zeros_like(param) for param in params]
        plans = []
        for seed in range(9):
            with graph() if seed in (3, 4, 7) else contextlib.nullcontext():
                iterate(scaler, optimizer, params, seed, clip=True, into=grads if keep else None)
            plans.append(optimizer._planned[0])
        assert plans == [plans[0]] * 9
        results.append((scaler.stats(), [param.detach() for param in params]))
    ours, theirs = results
    assert ours[0] == theirs[0]
    assert all(torch.equal(p, q) for p, q in zip(ours[1], theirs[1], strict=True))


def test_the_kernel_that_counts_is_loaded_by_the_first_update(launches) -> None:
    """Loading one is not allowed in a capture, and later updates are summed up many at a time."""
    scaler, optimizer, params = training()
    for seed in range(2):
        launches.names.clear()
        iterate(scaler, optimizer, params, seed, clip=True)
        assert launches.names.count("tally_kernel") == (1 if seed == 0 else 0)
    assert (scaler.stats().updates, len(scaler.history)) == (2, 2)


@pytest.mark.parametrize("strategy", [
    None, DynamicLossScale(64.0, hysteresis=2, growth_interval=2), StaticLossScale(64.0),
], ids=["plain", "hysteresis", "static"])
@pytest.mark.parametrize("history_size", [0, 5])
def test_counting_in_one_launch_gives_the_same_counts(launches, strategy, history_size) -> None:
    """Beside the operators that the launch stands for, with no, one and several steps between updates."""
    results = []
    for fused in (True, False):
        scaler, optimizer, params = training(strategy, history_size=history_size)
        other = AdamW([torch.nn.Parameter(torch.ones(2))], torch.tensor(1e-3), impl="triton")
        with mock.patch.object(kernels, "serves", lambda tensor, fused=fused: fused), capturing():
            for seed in range(8):
                if seed in (3, 6):
                    other.param_groups[0]["params"][0].grad = torch.full((2,), math.nan if seed == 6 else 1.0)
                    scaler.step(other)
                if seed in (4, 7):      # an update without a step
                    scaler.scale(torch.ones((), requires_grad=True))
                    params[0].grad = torch.full_like(params[0], math.inf if seed == 7 else 1.0)
                    scaler.unscale_(optimizer)
                    scaler.update()
                    continue
                iterate(scaler, optimizer, params, seed, clip=True)
        results.append((scaler.stats(), scaler.state_dict(), scaler.history))
    ours, theirs = results
    assert ours == theirs
    assert (ours[0].updates, ours[0].steps, ours[0].skips, ours[0].overflows) == (8, 6, 2, 3)
