"""Where an operator is called from: which module runs, which line of the user's, and what stands between.

Modules are a stack per thread, kept by global hooks while a tool is open. One walk over the frames finds the line, and
whether a loss scaler or a checkpoint's recompute stands between. Frames are told apart by their files: torch's,
ampkit's and Python's own are libraries, everything else (transformers and its like too) is where somebody wrote the
model down.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ampkit.policy.module_paths import path_of
from ampkit.torch_internals.dispatcher import is_open
from ampkit.torch_internals.operator_tracing import current_node
from ampkit.torch_internals.operators import current_device_type
from ampkit.user_code import AMPKIT, TORCH, is_library

_Kind = Literal["user", "library", "scaler", "recompute", "backward"]
_SPECIAL: dict[str, _Kind] = {
    f"{TORCH}amp/grad_scaler.py": "scaler",
    f"{TORCH}utils/checkpoint.py": "recompute",
    f"{TORCH}autograd/graph.py": "backward",       # above it is who called backward
}
_files: dict[str, _Kind] = {}


class Caller(NamedTuple):
    """Who called an operator. The line is worked out when somebody asks: most operators never come up."""

    code: CodeType | None       # None: no code of the user's is on this thread's stack
    instruction: int
    scaler: bool
    scaling: bool               # it is a loss that the scaler scales, and no gradient that it looks at
    recompute: bool
    outside: bool               # it called backward, and is not itself what backward runs

    def line(self) -> tuple[str, int]:
        """Where in the user's code: the file as seen from the working directory, and the line; ("", 0) if nowhere."""
        if self.code is None:
            return "", 0
        lines = (line for start, end, line in self.code.co_lines() if start <= self.instruction < end and line)
        return self.code.co_filename.removeprefix(os.path.join(os.getcwd(), "")), next(lines, self.code.co_firstlineno)


def find_caller(depth: int, *, recompute: bool = False) -> Caller:
    """The innermost user frame, from `depth` frames up; with `recompute`, also whether a checkpoint runs it again."""
    frame = sys._getframe(depth)
    code, instruction = None, 0
    scaler = scaling = outside = False
    while frame is not None:
        name = frame.f_code.co_filename
        kind = _files.get(name)
        if kind is None:
            kind = _files[name] = _classify(name)
        if kind == "user":
            if code is None:
                code, instruction = frame.f_code, frame.f_lasti
            if not recompute:
                break
        elif code is None and kind == "scaler":
            scaler = True
            scaling |= frame.f_code.co_name == "scale"
        elif recompute and kind == "recompute":
            return Caller(code, instruction, scaler, scaling, recompute=True, outside=outside)
        elif kind == "backward":
            recompute = False
            if code is not None:
                break
            outside = True
        frame = frame.f_back
    return Caller(code, instruction, scaler, scaling, recompute=False, outside=outside)


def _classify(name: str) -> _Kind:
    if name in _SPECIAL:
        return _SPECIAL[name]
    if name.startswith(f"{AMPKIT}scaler/"):
        return "scaler"
    return "library" if is_library(name) else "user"


class ModuleCall(NamedTuple):
    """One call of a module: its path from the model, and which call since the step began."""

    name: str                       # its class, where it is not below the model, or the model itself
    number: int                     # 1 is the first; 0 in a recompute, which cannot tell


class _Running(threading.local):
    """The modules that this thread is in, outermost first."""

    def __init__(self) -> None:
        self.stack: list[tuple[Module, ModuleCall]] = []


class ModuleCalls:
    """Follows the calls of modules, of `model` or, without one, of whatever module is outermost."""

    def __init__(self, model: Module | None) -> None:
        self.model = model
        self._running = _Running()
        self._numbers: dict[int, int] = {}
        self._roots: dict[int, Module] = {}
        self.region: Literal["ampkit", "torch", "none"] = "none"       # what modules were called in
        self._device_types = {"cpu", current_device_type()}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Context with the hooks.

        A compiled module warns that they fire for its wrapper too: they do, and wrappers have no path here.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
            with register_module_forward_pre_hook(self._enter):
                with register_module_forward_hook(self._leave, always_call=True):
                    yield

    def current(self) -> ModuleCall | None:
        """The innermost call that this thread is in."""
        stack = self._running.stack
        return stack[-1][1] if stack else None

    def roots(self) -> list[Module]:
        """The models that were given or seen."""
        return [self.model] if self.model is not None else list(self._roots.values())

    def new_step(self) -> None:
        """Count calls from one again."""
        self._numbers.clear()

    def _enter(self, module: Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return      # a trace follows hooks, and fails on what they do
        if self.region != "ampkit":
            self._note_region()
        stack = self._running.stack
        root = self.model if self.model is not None else (stack[0][0] if stack else module)
        self._roots[id(root)] = root
        number = 0
        if current_node() is None:      # else a checkpoint runs it again
            number = self._numbers[id(module)] = self._numbers.get(id(module), 0) + 1
        stack.append((module, ModuleCall(path_of(root, module) or type(module).__name__, number)))

    def _note_region(self) -> None:
        if is_open():
            self.region = "ampkit"
        elif any(map(torch.is_autocast_enabled, self._device_types)):
            self.region = "torch"

    def _leave(self, module: Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._running.stack
        while stack and stack.pop()[0] is not module:
            pass        # those inside it that an exception ended
