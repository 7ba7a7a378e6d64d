"""GradGuard: skipped steps without a scale. And `backward_and_step`, by which a loop needs no other call."""

import copy
import io
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ampkit.optim
from ampkit import DynamicLossScale, GradGuard, GradScaler, LossScaleStuckError, StaticLossScale, TimesMedian
from tests.helpers.ranks import on_ranks
from tests.helpers.scaler_tools import OPTIMIZERS, count_reads, with_grads

S = StaticLossScale(2.0)
WHICH = pytest.mark.parametrize("which", OPTIMIZERS)


def trained(guard: Any, which: str, losses: int = 6, spoiled: int = -1, **options: Any) -> tuple[list[Tensor], Any]:
    """A loop without a call of `scale`; the parameters and the optimizer's state after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = OPTIMIZERS[which](model.parameters())
    for step in range(losses):
        x = torch.randn(8, 4)
        if step == spoiled:
            x[0] = math.nan
            if guard is None:
                continue
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if guard is None:
            optimizer.step()
        else:
            guard.step(optimizer)
            guard.update()
    return [param.detach() for param in model.parameters()], optimizer.state_dict()["state"]


@WHICH
def test_a_spoiled_step_is_as_if_it_had_not_been(which: str) -> None:
    guard = GradGuard("cpu")
    assert isinstance(guard, torch.amp.GradScaler)
    got, want = trained(guard, which, spoiled=3), trained(None, which, spoiled=3)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    stats = guard.stats()
    assert (stats.scale, stats.steps, stats.skips, stats.updates) == (1.0, 5, 1, 6)
    assert guard.history[3]["overflow"]
    loss = torch.ones((), requires_grad=True)
    assert guard.scale(loss) is loss
    assert trained(GradGuard("cpu", enabled=False), which)[0][0].isfinite().all()


@pytest.mark.parametrize("first", ["step", "unscale_", "clip_grad_norm_", "clip_grad_value_", "update"])
def test_no_loss_has_to_be_scaled_first(first: str) -> None:
    (param,) = with_grads([torch.full((4,), 2.0)])
    optimizer = torch.optim.SGD([param], lr=1.0)
    guard = GradGuard("cpu")
    if first == "update":
        with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
            guard.update()
        return
    getattr(guard, first)(optimizer, *[1.0] * first.startswith("clip"))
    norm = {"clip_grad_norm_": 1.0, "clip_grad_value_": 2.0}.get(first, 4.0)
    assert param.grad is not None
    assert param.grad.norm().item() == pytest.approx(norm)


@WHICH
def test_it_reads_the_device_as_rarely_as_a_scaler(which: str) -> None:
    reads = []
    for make in (GradGuard, GradScaler):
        scaler = make("cpu")
        optimizer = OPTIMIZERS[which](with_grads([torch.ones(3)]))
        scaler.scale(torch.ones((), requires_grad=True))
        with count_reads() as seen:
            for _ in range(3):
                scaler.clip_grad_norm_(optimizer, 1.0)
                scaler.step(optimizer)
                scaler.update()
        reads.append(seen)
    assert reads[0] == reads[1]
    assert bool(reads[0]) is (which == "ordinary")


def test_outliers_are_skipped_and_counted() -> None:
    params = with_grads([torch.ones(4)])
    optimizer, guard = torch.optim.SGD(params, lr=0.0), GradGuard("cpu", skip_above=TimesMedian(10.0))
    stepped = []
    for value in [1.0] * 16 + [100.0, 1.0]:
        params[0].grad.fill_(value)
        guard.step(optimizer)
        guard.update()
        stepped.append(guard.stepped(optimizer))
    assert stepped == [True] * 16 + [False, True]
    assert (guard.stats().outliers, guard.stats().skips) == (1, 0)


def test_checkpoints_and_copies_go_on() -> None:
    guard = GradGuard("cpu", skip_above=TimesMedian(10.0))
    trained(guard, "ordinary", spoiled=3)
    saved = guard.state_dict()
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = GradGuard("cpu", skip_above=TimesMedian(10.0))
    loaded.load_state_dict(torch.load(file))
    for other in (loaded, copy.deepcopy(guard), pickle.loads(pickle.dumps(guard))):
        assert type(other) is GradGuard
        assert other.state_dict() == saved
        assert (other.stats().skips, other.get_scale()) == (1, 1.0)
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(saved)
    assert torchs.get_scale() == 1.0
    guard.load_state_dict(torch.amp.GradScaler("cpu").state_dict())  # a run that goes on in bfloat16
    assert guard.get_scale() == 1.0
    with pytest.warns(UserWarning, match="this scaler keeps NoOpLossScale"):
        guard.load_state_dict(GradScaler("cpu").state_dict())


@pytest.mark.parametrize("which", [*OPTIMIZERS, "on the device"])
@pytest.mark.parametrize("make", [GradGuard, lambda *given, **options: GradScaler(*given, loss_scale=S, **options)])
def test_a_run_that_skips_every_step_is_reported(which: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a scale that never changes: 20 steps in a row. If the host cannot see the flags, by `stats`."""

    def spoiled(scaler: Any) -> Iterator[int]:
        optimizer = OPTIMIZERS["fused" if which == "on the device" else which](with_grads([torch.full((2,), math.nan)]))
        scaler.scale(torch.ones((), requires_grad=True))
        if which == "on the device":
            monkeypatch.setattr("ampkit.scaler.grad_scaler.host_value_or_none", lambda value: None)
        for step in range(1, 25):
            scaler.step(optimizer)
            scaler.update()
            scaler.stats()
            yield step

    steps = spoiled(make("cpu"))
    assert [next(steps) for _ in range(19)][-1] == 19
    with pytest.warns(UserWarning, match="inf or NaN in 20 steps in a row, and all of them were skipped"):
        next(steps)
    assert next(steps) == 21  # once
    seen: list[Any] = []
    assert len(list(spoiled(make("cpu", on_stuck=seen.append)))) == 24
    assert len(seen) == 5
    with pytest.raises(LossScaleStuckError, match="inf or NaN in 20 steps"):
        list(spoiled(make("cpu", on_stuck="raise")))


def spoiled_on_one_rank(rank: int, world: int) -> tuple[float, int]:
    """Parameters that each rank has for itself, as of a pipeline."""
    params = with_grads([torch.full((2,), math.nan if rank else 1.0)])
    optimizer = torch.optim.SGD(params, lr=1.0)
    guard = GradGuard("cpu", process_group=dist.group.WORLD)
    guard.step(optimizer)
    guard.update()
    guard.check_ranks()
    return params[0][0].item(), guard.stats().skips


def test_ranks_skip_together() -> None:
    assert on_ranks(spoiled_on_one_rank) == [(1.0, 1), (1.0, 1)]


# --- in one call

SCALERS: dict[str, Any] = {
    "dynamic": lambda: GradScaler("cpu", init_scale=2.0**14, growth_interval=3),
    "hysteresis": lambda: GradScaler("cpu", loss_scale=DynamicLossScale(2.0**14, hysteresis=2), skip_above=1e3),
    "guard": lambda: GradGuard("cpu"),
    "disabled": lambda: GradScaler("cpu", enabled=False),
}


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("scaler", SCALERS)
@WHICH
def test_one_call_is_the_loop_written_by_hand(which: str, scaler: str, max_norm: float | None) -> None:
    """With accumulation, and a step that overflows, to the bit."""
    runs = []
    for in_one in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
        optimizer, scale = OPTIMIZERS[which](model.parameters()), SCALERS[scaler]()
        norms: list[Any] = []
        for batch in range(10):
            with ampkit.autocast("cpu", torch.float16):
                loss = model(torch.randn(8, 4) * (1e6 if batch == 5 and scaler != "disabled" else 1)).square().mean()
            accumulate = batch % 2 == 0
            if in_one:
                norms.append(scale.backward_and_step(loss, optimizer, max_norm, accumulate=accumulate))
                if not accumulate:
                    optimizer.zero_grad()
                continue
            scale.scale(loss).backward()
            norms.append(None)
            if not accumulate:
                if max_norm is not None:
                    norms[-1] = scale.clip_grad_norm_(optimizer, max_norm)
                scale.step(optimizer)
                scale.update()
                optimizer.zero_grad()
        assert [norm is None for norm in norms] == [max_norm is None or batch % 2 == 0 for batch in range(10)]
        state = [*model.state_dict().values(), *(norm for norm in norms if norm is not None)]
        runs.append((state, scale.state_dict()))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=0, atol=0, equal_nan=True)
    assert runs[0][1] == runs[1][1]
    if scaler == "guard":
        assert runs[0][1]["ampkit"]["totals"]["skips"] == 1


def test_one_call_refuses_several_losses() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer: Any = torch.optim.SGD([param], lr=1.0)
    losses: Any = [param.sum(), param.sum()]
    for scaler in (GradScaler("cpu"), GradScaler("cpu", enabled=False)):
        with pytest.raises(TypeError, match=r"loss is list; expected one tensor: .* call scale\(\) and backward\(\)"):
            scaler.backward_and_step(losses, optimizer)
    with pytest.raises(AttributeError, match=r"got list for an optimizer; expected a torch\.optim\.Optimizer"):
        GradScaler("cpu").backward_and_step(losses[0], [optimizer])  # type: ignore[arg-type]
