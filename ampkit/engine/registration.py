"""Registration of handlers at the regions' dispatch keys, once per operator and key in a process.

This is the front door of the engine: torch's dispatcher calls the *entry* registered here for each operator that some
policy lists, while a region is open. The entry looks the operator up in the `handlers` of the thread's mode. These are
generated for the operator (`generated_handlers`), or those of `GENERAL_HANDLERS`, which pass any operator to the mode's
`__torch_dispatch__` (`autocast_mode`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.library import Library

from ampkit.engine.signatures import defined, signature_of
from ampkit.torch_internals.dispatcher import (
    KEY_NAMES,
    PRE_DISPATCH,
    TLS_NAME,
    Exclude,
    current,
    get_in_tls,
    has_kernel,
    higher_order_fallthrough,
    higher_order_ops,
    is_open,
    keysets,
)
from ampkit.torch_internals.dynamo import dynamo_skip
from ampkit.torch_internals.forks import renewed_lock
from ampkit.torch_internals.operators import OpOverload, takes_numbers
from ampkit.torch_internals.transforms import functorch_level, is_ahead, keys_ahead

Handler = Callable[..., Any]
R = TypeVar("R")

_NUMBERS = frozenset({int, float, bool, complex, torch.SymInt, torch.SymFloat, torch.SymBool})

_libraries: dict[str, Library] = {}
GENERAL_HANDLERS: dict[str, Handler] = {}         # by the operator's name
OPERATORS: dict[str, OpOverload] = {}
_installed: set[tuple[OpOverload, Any]] = set()      # with the key
_installing_lock = renewed_lock(__name__, "_installing_lock")


def install(ops: Iterable[OpOverload], key: Any) -> None:
    """Register an entry at `key` for operators that have none there yet.

    A thread of its own registers them. Signal handlers run in the main thread alone, so neither Ctrl-C nor a handler
    that opens a region of its own comes between a registration and the note of it.
    """
    missing = [op for op in ops if (op, key) not in _installed]
    if missing:
        in_own_thread(_install, missing, key)


def in_own_thread(function: Callable[..., R], *args: Any) -> R:
    """What a function returns or raises in a new thread, which has no modes and gets no signals."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function(*args))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"ampkit {function.__name__}", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _install(ops: list[OpOverload], key: Any) -> None:
    with _installing_lock:
        if not _libraries:
            _prepare()
        for op in ops:
            if (op, key) not in _installed:
                _install_operator(op, key)


def _install_operator(op: OpOverload, key: Any) -> None:
    name = op.name()
    if op.namespace not in _libraries:
        _libraries[op.namespace] = Library(op.namespace, "IMPL")
    if name not in OPERATORS:
        GENERAL_HANDLERS[name] = _general(op)
        _go_before_tracer(op)
        OPERATORS[name] = op
    if not has_kernel(name, KEY_NAMES[key]):      # it may, in a child forked amid the registration
        _libraries[op.namespace].impl(op, _entry(op), KEY_NAMES[key], with_keyset=True)
    _installed.add((op, key))


def _prepare() -> None:
    """Make the keys fallthroughs for operators without an entry; done once, before the first registration."""
    library = Library("_", "IMPL")
    for key, name in KEY_NAMES.items():
        try:
            library.fallback(torch.library.fallthrough_kernel, name)
        except RuntimeError as error:
            raise RuntimeError(
                f"the dispatch key {name} that ampkit needs for itself is taken: by another copy of ampkit, imported "
                "again or reloaded in this process, or by another library. Start a new process and import ampkit once"
            ) from error
        for op in higher_order_ops.values():    # `torch.cond` and its kin dispatch in Python, without fallbacks
            op.fallthrough(key)
        if key not in higher_order_fallthrough:
            higher_order_fallthrough.append(key)
    _libraries["_"] = library


_ENTRY = """\
def entry(_keys, {s.params}):
    return _mode({tls!r}).handlers[_name](_keys, {s.call})
"""


def _entry(op: OpOverload) -> Handler:
    """The function registered for `op`: it calls the handler that the thread's mode has for it."""
    signature = signature_of(op)
    if signature is None:
        return GENERAL_HANDLERS[op.name()]       # no mode has another
    text = _ENTRY.format(s=signature, tls=TLS_NAME)
    return dynamo_skip(defined("entry", text, "<ampkit dispatch>", {"_mode": get_in_tls, "_name": op.name()}))


def _general(op: OpOverload) -> Handler:
    """The handler of `op` for any rule, argument and mode."""
    slots = [n for n, argument in enumerate(op._schema.arguments) if str(argument.type) == "Tensor"]
    ahead, refuses_numbers = keys_ahead(op), not takes_numbers(op)

    @dynamo_skip
    def handler(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        mode = get_in_tls(TLS_NAME)
        if functorch_level() is not None:
            args = _without_numbers(args, _numbers(args, slots))
        if refuses_numbers and _numbers(args, slots):       # tensors that torch has marked as numbers, of traced code
            args = _without_numbers(args, _numbers(args, slots))
            numbers = _numbers(args, slots)         # beside which no tensor says of which dtype they are
            args = tuple(torch.tensor(arg) if n in numbers else arg for n, arg in enumerate(args))
        if not (mode.as_torch and is_ahead(keyset, ahead)):
            result = mode.__torch_dispatch__(op, (), args, kwargs)
            if result is not NotImplemented:
                return result
        # Where no list of the mode has `op`, torch's key must stay: its library may have an autocast kernel for it, and
        # without the key autocast counts as disabled for its parts.
        listed = any(op in table for _, table in mode.tables)
        excluded, below = (mode.excluded_keys, mode.redispatch_keys) if listed else keysets(())
        if _numbers(args, slots):
            # The dispatcher passes numbers in the place of tensors (`x + 1`), which redispatch does not accept.
            with Exclude(excluded):
                return op._op(*args, **kwargs)
        return op.redispatch(keyset & below, *args, **kwargs)

    return handler


def _numbers(args: tuple[Any, ...], slots: list[int]) -> list[int]:
    """Where a number stands in the place of a tensor."""
    return [slot for slot in slots if slot < len(args) and type(args[slot]) in _NUMBERS]


def _without_numbers(args: tuple[Any, ...], slots: list[int]) -> tuple[Any, ...]:
    """Arguments with tensors for the numbers at `slots`, which promote as numbers do and have their digits.

    Autograd saves a number as a tensor that is marked as one. Where a transform has wrapped it, torch cannot hand it to
    a Python function in backward: it reads the number, and the wrapper has no memory. Any region of the process would
    meet that once one policy has a rule for `mul`.
    """
    tensor = next((arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()), None)
    if tensor is None:
        return args
    changed = list(args)
    for slot in slots:
        if type(args[slot]) in (int, float, bool):
            number = torch.scalar_tensor(args[slot], dtype=torch.float64)
            # A tensor without dimensions would be promoted; in 16 bits it takes the number if no digit is lost.
            low = number.to(tensor.dtype) if tensor.dim() == 0 else number
            if tensor.dtype not in (torch.float16, torch.bfloat16) or bool(low == number):
                changed[slot] = low
    return tuple(changed)


def _go_before_tracer(op: OpOverload) -> None:
    """Have pre-dispatch tracing (`torch.export`) record the casts and the call, not `op` as it was called.

    That tracer is at the one key above the mode's. It is a Python mode that `OpOverload._get_dispatch` looks up at
    every call; for operators with an entry that look-up goes through `_get_dispatch`.
    """
    op._get_dispatch = functools.partial(_get_dispatch, op, op._get_dispatch)  # type: ignore[method-assign]


@dynamo_skip
def _get_dispatch(op: OpOverload, look_up: Callable[[Any], Any], key: Any) -> Any:
    handler = look_up(key)
    if key == PRE_DISPATCH and callable(handler):
        return functools.partial(_before_tracer, op, handler)
    return handler


@dynamo_skip
def _before_tracer(op: OpOverload, tracer: Handler, *args: Any, **kwargs: Any) -> Any:
    mode = current() if is_open() else None
    result = NotImplemented if mode is None else mode.__torch_dispatch__(op, (), args, kwargs)
    return tracer(*args, **kwargs) if result is NotImplemented else result
