"""A pytest plugin that puts ampkit in torch.amp's place, for `tests.tools.other_suites`.

Every name in torch's modules is replaced. A class of torch's that a test still reaches raises when it is
instantiated. The report says in how many tests a region and a scaler of ampkit was made; if in none, the run has
compared nothing.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from typing_extensions import deprecated

import ampkit

CLASSES: dict[str, Any] = {"autocast": torch.amp.autocast, "GradScaler": torch.amp.GradScaler}  # torch's own
FUNCTIONS: dict[str, Any] = {"custom_fwd": torch.amp.custom_fwd, "custom_bwd": torch.amp.custom_bwd}
_made: set[str] = set()  # by the test that runs


class Autocast(ampkit.autocast):
    """`ampkit.autocast` with torch.amp's own operator list where no other policy is given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"policy": "torch", **options})


OURS: dict[str, Any] = {
    "autocast": Autocast,
    "GradScaler": ampkit.GradScaler,  # itself: its pickles name torch.amp.grad_scaler's
    "custom_fwd": ampkit.custom_fwd,
    "custom_bwd": ampkit.custom_bwd,
}


def replacements() -> Iterator[tuple[ModuleType, str, Any]]:
    """Each module of torch and name in it to replace, with the object of ampkit for it."""
    for path, module in sorted(sys.modules.items()):
        if path.partition(".")[0] != "torch":
            continue
        for name, value in list(vars(module).items()) if isinstance(module, ModuleType) else ():
            theirs = CLASSES.get(name) or FUNCTIONS.get(name)
            if value is theirs and theirs is not None:
                yield module, name, OURS[name]
            elif theirs is not None and getattr(value, "__module__", "").startswith("torch."):  # torch.cuda.amp's
                yield module, name, _of_device(value.__module__.split(".")[1], value, OURS[name])


def _of_device(device_type: str, theirs: Any, ours: Any) -> Any:
    """A form of `ours` for one device, which is deprecated in torch's words."""
    if not isinstance(theirs, type):
        return deprecated(theirs.__deprecated__, category=FutureWarning)(
            lambda *args, **options: ours(*args, device_type=device_type, **options)
        )
    words = getattr(theirs, "__deprecated__", None) or theirs.__init__.__deprecated__
    signature = inspect.signature(theirs.__init__)

    def init(self: Any, *args: Any, **options: Any) -> None:
        arguments = signature.bind(self, *args, **options).arguments
        ours.__init__(self, device_type, **{name: value for name, value in arguments.items() if name != "self"})

    return type(theirs.__name__, (ours,), {"__init__": deprecated(words, category=FutureWarning)(init)})


def calling_first(call: Callable[[Any], None], init: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` that makes a call with the new object before it does anything."""

    @functools.wraps(init)
    def calling(self: Any, *args: Any, **options: Any) -> None:
        call(self)
        init(self, *args, **options)

    return calling


def refuse(made: Any) -> None:
    """Raise for an object of torch's classes that is not of ampkit's."""
    if not isinstance(made, tuple(OURS[name] for name in CLASSES)):
        raise AssertionError(f"torch's {type(made).__name__} was made, by a name that as_torch_amp does not replace")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Replace everything, before any test or conftest imports it."""
    for module, name, value in list(replacements()):
        setattr(module, name, value)
    for name, theirs in CLASSES.items():
        theirs.__init__ = calling_first(refuse, theirs.__init__)
        OURS[name].__init__ = calling_first(lambda made, name=name: _made.add(name), OURS[name].__init__)


@pytest.fixture(scope="session")
def _counts(record_testsuite_property: Callable[[str, object], None]) -> Iterator[dict[str, int]]:
    counts = dict.fromkeys(CLASSES, 0)
    yield counts
    for name, count in counts.items():
        record_testsuite_property(name, count)


@pytest.fixture(autouse=True)
def _count(_counts: dict[str, int]) -> Iterator[None]:
    _made.clear()
    yield
    for name in _made:
        _counts[name] += 1
