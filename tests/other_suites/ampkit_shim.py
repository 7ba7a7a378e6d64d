"""A pytest plugin that puts ampkit in the place of torch.amp, and of Apex, for the tests of other projects.

`AMPKIT_SHIM=1` puts it there; `AMPKIT_OUTCOMES` names a file that gets the outcome of every test as JSON. Used by
`tests.other_suites`; its modules are not imported by ampkit's own tests.
"""

import json
import os
import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import ampkit

WORST = ("passed", "skipped", "failed")
_outcomes: dict[str, str] = defaultdict(lambda: "passed")


class Autocast(ampkit.autocast):
    """`ampkit.autocast` with torch.amp's own operator list where no other policy is given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"policy": "torch", **options})


def replace_torch_amp() -> None:
    """What a program can import from torch's public names."""
    torch.autocast = torch.amp.autocast = Autocast      # type: ignore[misc]
    torch.amp.GradScaler = ampkit.GradScaler        # type: ignore[misc]  (pickles name torch.amp.grad_scaler's)
    torch.amp.custom_fwd, torch.amp.custom_bwd = ampkit.custom_fwd, ampkit.custom_bwd


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is requested for a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if len(args) > 1 and func is torch.Tensor.to and str(args[1]).startswith("cuda"):
            args = (args[0], "cpu", *args[2:])
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


class Scaler:
    """One of Apex's loss scalers, as its tests read and set it."""

    def __init__(self, scaler: ampkit.GradScaler) -> None:
        self.__dict__["scaler"] = scaler

    def loss_scale(self) -> float:
        return self.scaler.get_scale()

    def __setattr__(self, name: str, value: float) -> None:
        assert name == "_loss_scale", name
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": float(value)})


class ApexAmp(ModuleType):
    """`apex.amp`: the names that ampkit has, the older `init`, and the state that Apex's tests read."""

    def __init__(self) -> None:
        super().__init__("apex.amp")
        vars(self).update({name: getattr(ampkit.amp, name) for name in ampkit.amp.__all__ if name != "initialize"})
        self._amp_state = SimpleNamespace(
            handle=SimpleNamespace(_deactivate=lambda: None), loss_scalers=[],
            opt_properties=SimpleNamespace(loss_scale=None),
        )

    def initialize(self, models: Any, optimizers: Any = None, opt_level: str = "O1", **options: Any) -> Any:
        """`ampkit.amp.initialize`, in float16 on a CPU too."""
        dtype = {} if opt_level == "O0" else {"dtype": torch.float16}
        found = ampkit.amp.initialize(models, optimizers, opt_level, **{**dtype, **options})
        if optimizers is not None:
            first = found[1][0] if isinstance(found[1], list) else found[1]
            self._amp_state.loss_scalers[:] = map(Scaler, ampkit.amp.loss_scalers(first))
        self._amp_state.opt_properties.loss_scale = options.get(
            "loss_scale", "dynamic" if opt_level in ("O1", "O2") else 1.0
        )
        return found

    def init(self, enabled: bool = True, allow_banned: bool = False) -> Any:
        """The handle of the older interface: casts from now on, until it is deactivated."""
        policy = ampkit.Policy.default("cuda" if torch.cuda.is_available() else "cpu")
        banned = {"aten::binary_cross_entropy": "float32" if allow_banned else "banned"}
        region = ampkit.autocast(None, torch.float16, enabled, policy=policy.with_rules(banned))
        region.__enter__()
        return SimpleNamespace(_deactivate=lambda: region.__exit__(None, None, None))


def replace_apex() -> None:
    """`import apex`; without a GPU, its tests' helpers too, and tensors on the CPU."""
    package = ModuleType("apex")
    package.amp = ApexAmp()        # type: ignore[attr-defined]
    sys.modules |= {"apex": package, "apex.amp": package.amp}
    if torch.cuda.is_available():
        return
    half, single = "torch.HalfTensor", "torch.FloatTensor"
    helpers = ModuleType("utils")
    helpers.__dict__.update(
        HALF=half, FLOAT=single, DTYPES=[torch.half, torch.float],
        common_init=lambda test: vars(test).update(h=64, b=16, c=16, k=3, t=10),
        ALWAYS_HALF={torch.float: half, torch.half: half}, ALWAYS_FLOAT={torch.float: single, torch.half: single},
        MATCH_INPUT={torch.float: single, torch.half: half},
    )
    sys.modules["utils"] = helpers
    torch.nn.Module.cuda = lambda self, device=None: self       # type: ignore[method-assign]
    OnCpu().__enter__()


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported."""
    if os.environ.get("AMPKIT_SHIM") == "1":
        replace_torch_amp()
        replace_apex()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The worst outcome of a test's phases."""
    _outcomes[report.nodeid] = max(_outcomes[report.nodeid], report.outcome, key=WORST.index)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A module that cannot be collected fails as a whole."""
    if report.failed:
        _outcomes[report.nodeid] = "failed"


def pytest_sessionfinish() -> None:
    """Leave the outcomes where they were asked for."""
    if name := os.environ.get("AMPKIT_OUTCOMES"):
        with open(name, "w", encoding="utf-8") as file:
            json.dump(_outcomes, file)
