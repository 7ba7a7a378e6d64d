"""Which module runs, and which call of it: a stack per thread, kept by global module hooks while a tool is open."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ampkit.policy.module_paths import path_of
from ampkit.torch_internals.dispatcher import is_open
from ampkit.torch_internals.operator_tracing import current_node


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
        accelerator = torch.accelerator.current_accelerator()
        self._device_types = ("cpu",) if accelerator is None else ("cpu", accelerator.type)

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
