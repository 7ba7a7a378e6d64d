"""The call site of an operator: the module that runs, the line of the user's code, and a scaler or recompute.

Global hooks maintain a stack of modules per thread while an observer is open. One walk up the frames finds the user's
line, and whether a loss scaler or a checkpoint's recompute makes the call. The file of a frame determines its kind:
files of torch, ampkit and Python are libraries; all others, including transformers, contain a model.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ampkit.debugging.torch_private import current_node
from ampkit.dispatch.dispatcher import is_open
from ampkit.policy.module_paths import path_of
from ampkit.policy.policy import Policy
from ampkit.region.stack import thread
from ampkit.torch_private import current_device_type
from ampkit.user_code import AMPKIT, TORCH, is_library

_Kind = Literal["user", "library", "scaler", "recompute", "backward"]
_SPECIAL: dict[str, _Kind] = {
    f"{TORCH}amp/grad_scaler.py": "scaler",
    f"{TORCH}utils/checkpoint.py": "recompute",
    f"{TORCH}autograd/graph.py": "backward",  # frames above it called backward
}


@functools.cache
def _kind_of(filename: str) -> _Kind:
    if filename.startswith(f"{AMPKIT}scaler/"):
        return "scaler"
    return _SPECIAL.get(filename) or ("library" if is_library(filename) else "user")


class Caller(NamedTuple):
    """The caller of an operator. `line` computes the line only for operators that a report mentions."""

    code: CodeType | None  # of the innermost user frame; None: this thread's stack has none
    instruction: int
    scaler: bool  # a loss scaler called the operator
    scaling: bool  # to scale a loss, not to unscale or check gradients
    recompute: bool  # a checkpoint computes its forward again
    outside: bool  # the user frame called backward, and does not run inside it

    def line(self) -> tuple[str, int]:
        """Return the file, relative to the working directory, and the line of the user's code; ("", 0) if none."""
        if self.code is None:
            return "", 0
        lines = (line for start, end, line in self.code.co_lines() if start <= self.instruction < end and line)
        return relative(self.code.co_filename), next(lines, self.code.co_firstlineno)


@functools.cache
def relative(filename: str) -> str:
    """Return a file's name, relative to the working directory if it is below it."""
    return filename.removeprefix(os.path.join(os.getcwd(), ""))


def find_caller(depth: int, *, recompute: bool = False) -> Caller:
    """Return the innermost user frame, from `depth` frames up; with `recompute`, note a checkpoint's recompute."""
    frame = sys._getframe(depth)
    code, instruction = None, 0
    scaler = scaling = outside = False
    while frame is not None:
        kind = _kind_of(frame.f_code.co_filename)
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


def script_line(depth: int) -> tuple[str, int]:
    """Return the file and line of the outermost user frame, from `depth` frames up: the script; ("", 0) if none."""
    frame, found = sys._getframe(depth), ("", 0)
    while frame is not None and "runpy" not in frame.f_code.co_filename:  # which `ampkit debug` runs scripts with
        if _kind_of(frame.f_code.co_filename) == "user":
            found = relative(frame.f_code.co_filename), frame.f_lineno
        frame = frame.f_back
    return found


class ModuleCall(NamedTuple):
    """One call of a module: its path from the model, and the number of the call in the step."""

    name: str  # the class name for the model itself, and for modules outside it
    number: int  # from 1; 0 in a recompute


class _Running(threading.local):
    """The modules that run in this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[tuple[Module, ModuleCall]] = []


class ModuleCalls:
    """Tracks the calls of modules below `model`; without it, below the outermost module that runs."""

    def __init__(self, model: Module | None) -> None:
        self.model = model
        self._running = _Running()
        self._numbers: dict[int, int] = {}
        self._roots: dict[int, Module] = {}
        self.region: Literal["ampkit", "torch", "none"] = "none"  # the kind of region that modules ran in
        self.policy: Policy | None = None  # of the first of these regions, if it was given one
        self.inputs: list[weakref.ref[Tensor]] = []  # of the outermost module that ran last
        self._device_types = {"cpu", current_device_type()}

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """Return a context in which the hooks are registered.

        A compiled module warns that the hooks also run for its wrapper, which is harmless: a wrapper has no path here.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
            with register_module_forward_pre_hook(self._enter):
                with register_module_forward_hook(self._leave, always_call=True):
                    yield

    def current(self) -> ModuleCall | None:
        """Return the innermost module call of this thread."""
        stack = self._running.stack
        return stack[-1][1] if stack else None

    def roots(self) -> list[Module]:
        """Return the model, or without one the outermost modules that ran."""
        return [self.model] if self.model is not None else list(self._roots.values())

    def new_step(self) -> None:
        """Count calls from 1 again."""
        self._numbers.clear()

    def _enter(self, module: Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # Dynamo traces hooks, and fails on these
        if self.region != "ampkit":
            self._note_region()
        stack = self._running.stack
        if not stack:
            self.inputs = [weakref.ref(each) for each in args if isinstance(each, Tensor) and not each.requires_grad]
        root = self.model if self.model is not None else (stack[0][0] if stack else module)
        self._roots[id(root)] = root
        number = 0
        if current_node() is None:  # not in a checkpoint's recompute
            number = self._numbers[id(module)] = self._numbers.get(id(module), 0) + 1
        stack.append((module, ModuleCall(path_of(root, module) or type(module).__name__, number)))

    def _note_region(self) -> None:
        if is_open():
            self.region = "ampkit"
            self.policy = next((entry.spec.policy for entry in thread.regions if entry.spec.enabled), None)
        elif any(map(torch.is_autocast_enabled, self._device_types)):
            self.region = "torch"

    def _leave(self, module: Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._running.stack
        while stack and stack.pop()[0] is not module:
            pass  # modules inside of it that ended with an exception
