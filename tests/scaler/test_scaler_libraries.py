"""What libraries reach for in torch.amp.GradScaler: its records, and the private methods that they replace."""

import copy
import gc
import pickle
import re
import weakref
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from ampkit import DynamicLossScale, NoOpLossScale, StaticLossScale
from ampkit.optim import SGD
from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.paths import ROOT
from tests.helpers.scaler_tools import BOTH, iterate, one_parameter, started

CPU = torch.device("cpu")
INF = float("inf")


# Records


def test_records_that_code_for_torchs_scaler_makes_are_taken() -> None:
    scaler = started(GradScaler, 4.0)
    (a, first), (b, second) = one_parameter(grad=8.0), one_parameter(grad=16.0)
    scaler._per_optimizer_states[id(second)] = {
        "stage": OptState.UNSCALED,
        "found_inf_per_device": {CPU: torch.ones(1)},
    }
    for optimizer in (first, second):
        scaler.step(optimizer)
    assert (a.grad.item(), scaler.stepped(first), b.grad.item(), scaler.stepped(second)) == (2.0, True, 16.0, False)
    scaler.update()
    assert scaler.get_scale() == 2.0


def test_a_subclass_whose_own_update_replaces_the_records_begins_an_iteration() -> None:
    """Its optimizers may die, and a norm is judged again."""

    class Updates(GradScaler):
        def update(self, new_scale=None):
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    scaler, alive = Updates("cpu", 4.0, skip_above=10.0), []
    for value in (1.0, 100.0, 1.0):
        param, optimizer = one_parameter()
        scaler.scale((param * value).sum()).backward()
        iterate(scaler, optimizer)
        assert scaler.stepped(optimizer) == (value == 1.0)
        assert (scaler._outlier, scaler._by_owner_id) == (None, {})
        alive.append(weakref.ref(optimizer))
        del optimizer
        gc.collect()
    assert [each() for each in alive] == [None] * 3


@BOTH
@pytest.mark.parametrize("stage", [2, OptState.READY])
def test_a_stage_set_by_hand_lets_gradients_be_unscaled_again(cls, stage) -> None:
    """Loops for SAM set 2, others READY, to compute an iteration's gradients again."""
    scaler, (param, _) = started(cls, 4.0), one_parameter(grad=8.0)
    optimizer = (SGD if cls is GradScaler else torch.optim.SGD)([param], lr=1.0)
    if cls is GradScaler:  # a factor that clipping left to the step is forgotten then
        scaler.clip_grad_norm_(optimizer, 1e-9)
    else:
        scaler.unscale_(optimizer)
    scaler._per_optimizer_states[id(optimizer)].update(stage=stage, found_inf_per_device={})
    param.grad = torch.tensor([8.0])
    scaler.unscale_(optimizer)
    assert param.grad.item() == 2.0
    scaler.step(optimizer)
    assert param.item() == -1.0


# Private methods and attributes


def test_private_methods_that_a_subclass_replaces_are_called() -> None:
    """As libraries replace torch's, to unscale float16 gradients or to step otherwise."""
    called: list[str] = []

    class Overrides(GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16=True):
            called.append("_unscale_grads_")
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    for name in ("_maybe_opt_step", "_check_inf_per_device", "_lazy_init_scale_growth_tracker"):

        def noted(self, *arguments, name=name):
            called.append(name)
            return getattr(GradScaler, name)(self, *arguments)

        setattr(Overrides, name, noted)
    scaler = Overrides("cpu", 4.0)
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    for fused in (False, True):
        optimizer = torch.optim.SGD([param], lr=0.5, fused=fused)
        scaler.scale(param.float().sum()).backward()
        iterate(scaler, optimizer)
        optimizer.zero_grad()
    assert called == ["_lazy_init_scale_growth_tracker", "_unscale_grads_", "_maybe_opt_step", "_check_inf_per_device"]
    assert param.tolist() == [0.0, 0.0]


def test_unscaling_with_a_process_group_before_anything_was_scaled() -> None:
    """As torch's test of its sharded scaler does it, with the process group and the tensors of one element."""
    common_fsdp = pytest.importorskip("torch.testing._internal.common_fsdp")
    scaler = GradScaler("cpu", 2.0, process_group=common_fsdp.DummyProcessGroup(0, 1))
    values = torch.tensor([16.0, 32.0, 64.0])
    param = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], values, (2, 3))
    for factor, flag in ((1.0, 0.0), (INF, 1.0)):
        param.grad = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], values * factor, (2, 3))
        found = scaler._unscale_grads_(torch.optim.SGD([param], lr=1.0), torch.full((1,), 0.5), torch.zeros(1))
        assert found[param.device] == flag
        assert factor == INF or torch.equal(param.grad.to_dense(), param.to_dense() / 2)


def test_private_attributes_can_be_set() -> None:
    scaler = GradScaler("cpu")
    for name, value in (
        ("_scale", torch.tensor(2.0)),
        ("_growth_tracker", torch.tensor(3, dtype=torch.int32)),
        ("_growth_factor", 3.0),
        ("_backoff_factor", 0.25),
        ("_growth_interval", 7),
        ("_init_scale", 2.0),
        ("_init_growth_tracker", 1),
        ("_per_optimizer_states", defaultdict(_refresh_per_optimizer_state)),
    ):
        setattr(scaler, name, value)
        assert getattr(scaler, name) is value or getattr(scaler, name) == value
    iterate(scaler, one_parameter(grad=1.0)[1])  # with the scale that was put there by hand
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (2.0, 4)


def test_compiled_code_scales_and_reads_the_scale() -> None:
    scaler = GradScaler("cpu", 4.0)
    loss = torch.ones((), requires_grad=True)
    scaler.scale(loss)
    torch._dynamo.reset()
    compiled = torch.compile(lambda loss: (scaler.scale(loss), loss * scaler._scale), backend="eager", fullgraph=True)
    assert compiled(loss) == (4.0, 4.0)


# Devices that hold no numbers


@pytest.mark.parametrize(
    "rule", [DynamicLossScale(hysteresis=2), StaticLossScale(8.0), NoOpLossScale()], ids=lambda rule: rule.kind
)
def test_every_method_works_under_a_default_device(rule) -> None:
    with torch.device("meta"):
        scaler = GradScaler("cpu", loss_scale=rule)
        scaler.load_state_dict(scaler.state_dict())
        scaler.stats()
        param = torch.nn.Parameter(torch.ones(2, device="cpu"))
        plain = torch.optim.SGD([param], lr=0.1)
        fused = torch.optim.SGD([param], lr=0.1, fused=True, momentum=0.9)
        uses = [
            (plain, scaler.unscale_),
            (plain, lambda each: scaler.clip_grad_norm_(each, 1.0)),
            (plain, lambda each: scaler.clip_grad_value_(each, 1.0)),
            (fused, lambda _: None),
        ]
        for factor in (1.0, INF):
            for optimizer, use in uses:
                optimizer.zero_grad()
                scaler.scale((param * factor).sum()).backward()
                use(optimizer)
                iterate(scaler, optimizer)
                assert scaler.stepped(optimizer) == (factor == 1.0)
        scaler.update(4.0)
        assert (scaler.stats().steps, scaler.stats().skips, len(scaler.history)) == (4, 4, 9)
        assert len(scaler.overflow_report(optimizer=fused)) == 1
        copies = copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))
        assert [again.state_dict() for again in copies] == [scaler.state_dict()] * 2
        assert GradScaler("cpu", enabled=False).found_inf(plain).device == CPU


@BOTH
def test_fake_tensors_are_unscaled_and_stepped(cls) -> None:
    with FakeTensorMode():
        scaler = cls("cpu")
        param = torch.nn.Parameter(torch.ones(2))
        for fused, use in ((False, scaler.unscale_), (True, scaler.step)):
            optimizer = torch.optim.SGD([param], lr=0.1, fused=fused)
            scaler.scale(param.sum()).backward()
            use(optimizer)
            scaler.update()
        if cls is GradScaler:
            for clip in (scaler.clip_grad_norm_, scaler.clip_grad_value_):
                scaler.scale(param.sum()).backward()
                clip(optimizer, 1.0)
                iterate(scaler, optimizer)


# Parameters


@BOTH
@pytest.mark.parametrize("fused", [True, False])
def test_parameters_may_be_swapped_after_an_iteration(cls, fused: bool) -> None:
    """`torch.utils.swap_tensors`, which `Module.to` may call, refuses tensors with weak references."""
    scaler, param = cls("cpu"), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1, fused=fused)
    for factor in (1.0, INF):
        optimizer.zero_grad()
        scaler.scale((param * factor).sum()).backward()
        iterate(scaler, optimizer)
    grad, param.grad = param.grad, None  # as `Module.to` does
    torch.utils.swap_tensors(grad, torch.zeros(2))
    torch.utils.swap_tensors(param, torch.nn.Parameter(torch.zeros(2)))
    assert grad.tolist() == param.tolist() == [0.0, 0.0]


def test_an_optimizer_that_never_finds_gradients_is_named_once() -> None:
    scaler, (_, optimizer), (_, other) = started(), one_parameter(), one_parameter()
    for _ in range(2):
        iterate(scaler, optimizer)
    with pytest.warns(UserWarning, match=r"SGD has found no gradients in its first 3 steps.*another model") as caught:
        scaler.step(optimizer)
    assert caught[0].filename == __file__
    scaler.update()
    iterate(scaler, other, 1.0)  # a phase without gradients after steps is no cause to warn
    for each in (optimizer, other) * 5:
        iterate(scaler, each, None)
    assert scaler.stats().no_gradients == 13


def test_a_logger_gets_numbers_at_any_time() -> None:
    """Without an update or clipping, after a skipped step, disabled, resumed."""

    def logged(scaler: GradScaler) -> dict[str, float]:
        found = scaler.metrics()
        assert {type(value) for value in found.values()} <= {int, float}  # as SummaryWriter.add_scalar takes them
        return found

    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler, disabled = GradScaler("cpu", 8.0), GradScaler("cpu", enabled=False)
    for each in (scaler, disabled):
        expected = {"loss_scale": each.get_scale(), "skipped_steps": 0, "outlier_steps": 0}
        assert logged(each) == expected
        for clips in (False, True):
            optimizer.zero_grad()
            each.scale(param.sum()).backward()
            if clips:
                each.clip_grad_norm_(optimizer, 9.0)
            each.step(optimizer)
            each.update()
            assert logged(each) == {**expected, **({"grad_norm": 1.0} if clips and each is scaler else {})}
    resumed = started(GradScaler, 2.0)
    resumed.load_state_dict(scaler.state_dict())
    assert logged(resumed) == {"loss_scale": 8.0, "skipped_steps": 0, "outlier_steps": 0}
    param.grad = torch.full((1,), torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert logged(scaler) == {"loss_scale": 4.0, "skipped_steps": 1, "outlier_steps": 0}


def test_the_lines_of_the_page_write_to_tensorboard(tmp_path: Path) -> None:
    """With the real writer, and read back."""
    pytest.importorskip("tensorboard", reason="it is no dependency of the suite")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    page = (ROOT / "docs" / "scaler.md").read_text(encoding="utf-8")
    lines = re.search(r"^for name, value in scaler\.metrics\(\)\.items\(\):\n    writer\..*\n", page, re.MULTILINE)
    assert lines is not None
    scaler = started(GradScaler, 8.0)
    with SummaryWriter(str(tmp_path)) as writer:
        exec(lines[0], {"scaler": scaler, "writer": writer, "step": 7})
    written = EventAccumulator(str(tmp_path)).Reload()
    scalars = {
        name: [(event.step, event.value) for event in written.Scalars(name)] for name in written.Tags()["scalars"]
    }
    assert scalars == {name: [(7, value)] for name, value in scaler.metrics().items()}
