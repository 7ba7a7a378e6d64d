"""The plugin of `make other-suites`: every name in torch's modules leads to ampkit's classes."""

import importlib
import pickle
from typing import Any

import pytest
import torch

import ampkit
from tests.tools import as_torch_amp

NAMES = [
    "torch.autocast",
    "torch.amp.autocast",
    "torch.amp.autocast_mode.autocast",
    "torch.GradScaler",
    "torch.amp.GradScaler",
    "torch.amp.grad_scaler.GradScaler",
    "torch.amp.custom_fwd",
    "torch.amp.custom_bwd",
    "torch.amp.autocast_mode.custom_fwd",
    *(f"torch.{kind}.amp.{name}" for kind in ("cpu", "cuda") for name in ("autocast", "GradScaler")),
    "torch.cuda.amp.autocast_mode.autocast",
    "torch.cuda.amp.grad_scaler.GradScaler",
    "torch.cuda.amp.custom_fwd",
    "torch.cuda.amp.autocast_mode.custom_bwd",
]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in list(as_torch_amp.replacements()):
        monkeypatch.setattr(module, name, value)
    for theirs in as_torch_amp.CLASSES.values():
        monkeypatch.setattr(theirs, "__init__", as_torch_amp.calling_first(as_torch_amp.refuse, theirs.__init__))


def found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", NAMES)
def test_every_name_is_of_ampkit(path: str) -> None:
    kind, ours = path.rpartition(".")[2], found(path)
    if kind.startswith("custom"):
        assert ours is getattr(ampkit, kind) or hasattr(ours, "__deprecated__")
        return
    assert issubclass(ours, getattr(ampkit, kind))
    device = path.split(".")[1]
    if device == "cpu":
        with pytest.warns(FutureWarning, match=rf"`torch.cpu.amp.{kind}\(args...\)` is deprecated"):
            made = ours(enabled=True)
        assert isinstance(made, getattr(ampkit, kind))


def test_what_is_made_by_a_name_that_is_left_raises() -> None:
    torch.GradScaler("cpu")
    for name, theirs in as_torch_amp.CLASSES.items():
        with pytest.raises(AssertionError, match=f"torch's {name} was made"):
            theirs("cpu")


def test_scalers_pickle_under_torchs_name() -> None:
    scaler: Any = torch.GradScaler("cpu", init_scale=3.0)
    assert type(pickle.loads(pickle.dumps(scaler))) is ampkit.GradScaler
