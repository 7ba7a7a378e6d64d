"""The parts of a scaler, each by itself, and the scaler's records under torch's names."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.amp.grad_scaler import OptState

import ampkit
from ampkit import DynamicLossScale, GradScaler, StaticLossScale
from ampkit.scaler.iteration import Iteration
from ampkit.scaler.live_scale import LiveScale
from ampkit.scaler.optimizer_record import OptimizerRecord
from ampkit.scaler.scaling import Scaling
from ampkit.scaler.shared_gradients import SharedGradients
from ampkit.scaler.step_log import StepLog
from ampkit.scaler.stepping import Stepping
from ampkit.scaler.unscaling import Unscaling

PACKAGE = Path(ampkit.__file__).parent
STANDS_ON = {
    "torch_internals": set(),
    "gradients": {"torch_internals"},
    "optim": {"torch_internals", "gradients"},
    "scaler": {"torch_internals", "gradients", "user_warnings"},
}
CPU = torch.device("cpu")


def placed(scale: float = 4.0) -> LiveScale:
    live = LiveScale(DynamicLossScale(scale))
    live.place(CPU)
    return live


def optimizer_of(*grads: float) -> torch.optim.SGD:
    params = [torch.nn.Parameter(torch.ones(1)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = torch.tensor([grad])
    return torch.optim.SGD(params, lr=1.0)


def grads_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [param.grad.item() for group in optimizer.param_groups for param in group["params"]]


def test_the_inverse_of_a_scale_changes_nothing() -> None:
    live = placed(3.0)
    before = vars(live).copy()
    inv_scale, used = live.inverse()
    assert inv_scale == torch.tensor(3.0, dtype=torch.float64).reciprocal().float()
    assert used == 3.0
    assert vars(live) == before
    static = LiveScale(StaticLossScale(1.0))
    with pytest.raises(AssertionError, match="on no device yet"):
        static.inverse()
    assert static.on(CPU) == 1.0
    assert static.scale is None


def test_a_scale_answers_and_counts() -> None:
    live = placed()
    scale = live.scale
    live.advance(torch.tensor(1.0), None, None)
    live.advance(torch.tensor(0.0), None, None)
    assert live.scale is scale
    assert scale == 2.0
    assert live.ledger.totals(live.tensor).backoffs == 1


def test_gradients_are_unscaled_and_checked_without_a_scaler() -> None:
    live, iteration = placed(), Iteration()
    unscaling = Unscaling(live, iteration)
    optimizer = optimizer_of(8.0, float("inf"))
    assert unscaling.look(optimizer, unscaling.inverse_scale()) == {CPU: torch.tensor(1.0)}
    assert grads_of(optimizer) == [8.0, float("inf")]
    found = unscaling.unscale_(optimizer, unscaling.inverse_scale(), torch.zeros(()), allow_fp16=False)
    assert found == {CPU: torch.tensor(1.0)}
    assert grads_of(optimizer) == [2.0, float("inf")]
    assert iteration.scale_used == 4.0
    iteration.begin()
    assert iteration.scale_used is None


def test_gradients_are_shared_until_a_backward_pass_has_written_them() -> None:
    shared, records = SharedGradients(), {}
    first, second = optimizer_of(1.0, 2.0), optimizer_of(4.0)
    param = first.param_groups[0]["params"][0]
    second.add_param_group({"params": [param]})
    for optimizer in (first, second):
        records[id(optimizer)] = record = OptimizerRecord()
        record.optimizer = optimizer
    mine = records[id(first)]
    mine.stage = OptState.UNSCALED
    shared.mark(mine, [param.grad], lambda _: None)
    params = [param for group in second.param_groups for param in group["params"]]
    assert shared.split(second, params, records) == [([params[0]], None), ([param], mine)]
    shared.keep_versions(records)
    param.grad.add_(1.0)
    assert shared.split(second, params, records) == [(params, None)]


def test_steps_are_taken_or_skipped_and_noted() -> None:
    live, iteration = placed(), Iteration()
    unscaling, log = Unscaling(live, iteration), StepLog(live, on_stuck="raise")
    stepping = Stepping(live, iteration, unscaling, log)
    for grad, value in ((1.0, 0.0), (float("nan"), 1.0)):
        optimizer = optimizer_of(grad)
        record = iteration.record_of(optimizer)
        record.found_inf_per_device = unscaling.look(optimizer, torch.ones(()))
        stepping.on_host(optimizer, record, (), {})
        assert optimizer.param_groups[0]["params"][0].item() == value
        assert log.stepped(optimizer) is record.known_finite is (value == 0.0)
    assert log.stats().skips == log.stats().steps == 1
    assert [culprit.nan for culprit in log.report(None, None)] == [1]


def test_losses_are_scaled_and_followed() -> None:
    live, iteration = LiveScale(StaticLossScale(8.0)), Iteration()
    scaling = Scaling(live, iteration, StepLog(live))
    with pytest.warns(UserWarning, match="does not require grad") as caught:
        assert scaling.scale(torch.ones(()), live.place) == 8.0
    assert caught[0].filename == __file__, "at the line that called the package"
    kept = scaling.scale({"loss": torch.ones((), requires_grad=True)}, live.place)
    assert [loss() for loss in iteration.shared.losses] == [kept["loss"]]
    assert iteration.scale_calls == 2


class Overrides(GradScaler):
    """What libraries do: private methods of torch's replaced, to unscale float16 gradients or to step otherwise."""

    def __init__(self) -> None:
        super().__init__("cpu", 4.0)
        self.called: list[str] = []

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16=True):
        self.called.append("_unscale_grads_")
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        self.called.append("_maybe_opt_step")
        assert not sum(flag.item() for flag in optimizer_state["found_inf_per_device"].values())
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    def _check_inf_per_device(self, optimizer):
        self.called.append("_check_inf_per_device")
        return super()._check_inf_per_device(optimizer)

    def _lazy_init_scale_growth_tracker(self, dev):
        self.called.append("_lazy_init_scale_growth_tracker")
        super()._lazy_init_scale_growth_tracker(dev)


def test_private_methods_that_a_subclass_replaces_are_called() -> None:
    scaler = Overrides()
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    for fused in (False, True):
        optimizer = torch.optim.SGD([param], lr=0.5, fused=fused)
        scaler.scale(param.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.called == [
        "_lazy_init_scale_growth_tracker", "_unscale_grads_", "_maybe_opt_step", "_check_inf_per_device"
    ]
    assert param.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("_scale", torch.tensor(2.0)), ("_growth_tracker", torch.tensor(3, dtype=torch.int32)), ("_growth_factor", 3.0),
     ("_backoff_factor", 0.25), ("_growth_interval", 7), ("_init_scale", 2.0), ("_init_growth_tracker", 1),
     ("_per_optimizer_states", {}), ("process_group", "a group"), ("allow_fp16", True), ("on_stuck", "raise"),
     ("count_every_step", True)],
)
def test_attributes_that_live_in_parts_can_be_set(name, value) -> None:
    scaler = GradScaler("cpu")
    setattr(scaler, name, value)
    assert getattr(scaler, name) is value or getattr(scaler, name) == value
    assert name not in vars(scaler)


def test_compiled_code_scales_and_reads_the_scale() -> None:
    scaler = GradScaler("cpu", 4.0)
    loss = torch.ones((), requires_grad=True)
    scaler.scale(loss)
    torch._dynamo.reset()
    compiled = torch.compile(lambda loss: (scaler.scale(loss), loss * scaler._scale), backend="eager", fullgraph=True)
    assert compiled(loss) == (4.0, 4.0)


@pytest.mark.parametrize("room", [*STANDS_ON, "whole_model"])
def test_rooms_stand_on_those_below_and_name_nothing_private_of_torch(room) -> None:
    """Imports for type checkers and within functions count."""
    for path in sorted((PACKAGE / room).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom | ast.Import)]
        names = {getattr(node, "module", None) or node.names[0].name for node in imported}
        rooms = {name.split(".")[1] for name in names if name.startswith("ampkit.")} - {room}
        assert rooms <= STANDS_ON.get(room, rooms), f"{path.name} imports from {rooms}"
        private = re.findall(r"\btorch(?:\.\w+)*\._\w+|from torch[\w.]* import .*\b_\w+", text)
        assert room == "torch_internals" or not private, f"{path.name} names {private}"


def test_optimizers_are_there_after_a_plain_import() -> None:
    subprocess.run([sys.executable, "-c", "import ampkit; ampkit.optim.AdamW"], check=True, cwd=PACKAGE.parent)
