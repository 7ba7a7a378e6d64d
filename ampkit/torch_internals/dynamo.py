"""Dynamo: functions that it skips, calls while it traces, or puts into graphs; compilation and its callbacks."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.fx.node import has_side_effect

from ampkit.torch_internals.private_names import private, refuse

F = TypeVar("F", bound=Callable[..., Any])

_Action = private("_C._dynamo.eval_frame._FrameAction")
_Strategy = private("_C._dynamo.eval_frame._FrameExecStrategy")
_set_strategy = private("_C._dynamo.eval_frame.set_code_exec_strategy")
TracingContext = private("_guards.TracingContext")

DYNAMO_CALLBACKS = "torch._dynamo.callback"  # a module, in `sys.modules` if Dynamo is imported
AS_FORWARD = "same_as_forward"  # torch's default for `backward_autocast`

# Whether Dynamo is tracing the call. A wrapper would take two calls more in every region.
tracing = torch.compiler.is_dynamo_compiling


def dynamo_skip(function: F) -> F:
    """Decorator: Dynamo traces `function` into its caller, but compiles neither it nor its callees alone.

    After a graph break inside a region, Dynamo resumes frame by frame, and must not compile entering, casting and
    leaving.
    """
    if refuse not in (_Action, _Strategy, _set_strategy):
        _set_strategy(function.__code__, _Strategy(_Action.SKIP, _Action.SKIP))
    return function


def called_while_tracing(function: F) -> F:
    """Decorator: Dynamo calls `function` while it traces, with constants, and keeps the result as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def put_in_graphs(function: Callable[..., None]) -> None:
    """Have Dynamo put calls of `function` into graphs as they are, and keep tracers from dropping them as dead code."""
    torch.compiler.allow_in_graph(function)
    has_side_effect(function)


def object_at(address: int) -> Any:
    """The object with this `id`, for a function that Dynamo calls while it traces.

    In torch 2.11 Dynamo passes only constants to such a function. An object's `id` is one while Dynamo's guard on it
    holds; the code being traced keeps the object alive.
    """
    return ctypes.cast(address, ctypes.py_object).value


def tracer() -> Any:
    """Dynamo's instruction translator if Dynamo is tracing in this thread, else None."""
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    return None if dynamo is None else getattr(dynamo.tls, "current_tx", None)


def records_autocast(translator: Any, enter: Callable[..., None], leave: Callable[..., None]) -> bool:
    """Whether the graph enters torch's autocast between its last node, a call of `leave`, and the call of `enter`."""
    depth = 0
    for node in reversed(translator.output.graph.nodes):
        if node.target is torch.amp.autocast_mode._enter_autocast:
            return True
        if node.target is enter:
            depth += 1
        elif node.target is leave:
            depth -= 1
        if depth == 0:
            break
    return False


def at_end_of_trace(translator: Any, call: Callable[[], None]) -> None:
    """Have `call` called when the trace ends, fails or stops."""
    translator.output.add_cleanup_hook(call)


def runs_a_graph(frame: FrameType) -> bool:
    """Whether a frame runs the generated code of an FX graph."""
    return frame.f_code.co_filename.startswith("<eval_with_key>")


def frame_on_stack(frame: FrameType) -> bool:
    """Whether a frame is still on this thread's stack; if not, an exception may have ended its call.

    Two places leave a region without a `finally`: a graph that `torch.compile(backend="eager")` runs, and module hooks,
    which an exception that is no `Exception` (`KeyboardInterrupt`) skips.
    """
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


def compile_callbacks() -> Any:
    """Dynamo's registry of callbacks for the start and end of compilation; None while Dynamo is not imported."""
    return getattr(sys.modules.get(DYNAMO_CALLBACKS), "callback_handler", None)


def is_compiling() -> bool:
    """Whether a compilation is going on whose end callbacks will be called; those of exports are not."""
    return getattr(compile_callbacks(), "_CompilationCallbackHandler__pending_callbacks_counter", 0) > 0


def backward_autocast() -> Any:
    """torch's option for the autocast state in which AOTAutograd traces backward."""
    from torch._functorch import config

    return config.backward_pass_autocast


def set_backward_autocast(state: str) -> None:
    """Set the option that `backward_autocast` returns."""
    from torch._functorch import config

    config.backward_pass_autocast = state


def has_compiled() -> bool:
    """Whether Dynamo has compiled any code in this process."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and bool(frames.output_codes.seen)


def forget_compiled() -> None:
    """Drop the code that Dynamo has compiled so far, if Dynamo is imported."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
