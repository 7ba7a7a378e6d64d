"""Registration: for each operator of a policy, the function that torch's dispatcher calls while a region is open.

`install` registers an *entry* at a dispatch key for each operator that some policy lists, once per process. The entry,
whose text is `_ENTRY`, looks the operator up in the `handlers` of the thread's mode. The handler found there is

- generated for the operator and its rule (`generated_handlers`), the fast path, or
- one of `GENERAL_HANDLERS`, made by `_general`, which passes any operator to the mode's `__torch_dispatch__`
  (`autocast_mode`), the slow path.
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

_NUMBER_TYPES = frozenset({int, float, bool, complex, torch.SymInt, torch.SymFloat, torch.SymBool})

_libraries: dict[str, Library] = {}  # by the operators' namespace
GENERAL_HANDLERS: dict[str, Handler] = {}  # by the operator's name, as `aten::linear`
OPERATORS: dict[str, OpOverload] = {}  # by their names
_installed: set[tuple[OpOverload, Any]] = set()  # operators that have an entry, with its key
_installing_lock = renewed_lock(__name__, "_installing_lock")


def install(ops: Iterable[OpOverload], key: Any) -> None:
    """Register an entry at `key` for operators that have none there yet.

    A new thread registers them. Signal handlers run in the main thread alone, so neither Ctrl-C nor a handler that
    opens a region itself comes between a registration and its note in `_installed`.
    """
    missing = [op for op in ops if (op, key) not in _installed]
    if missing:
        in_own_thread(_install, missing, key)


def in_own_thread(function: Callable[..., R], *args: Any) -> R:
    """Call a function in a new thread, which has no modes and gets no signals; return or raise what it does."""
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
        _cast_before_tracer(op)
        OPERATORS[name] = op
    if not has_kernel(name, KEY_NAMES[key]):  # a child that was forked during the registration has the entry already
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
        for op in higher_order_ops.values():  # `torch.cond` and similar dispatch in Python, without fallbacks
            op.fallthrough(key)
        if key not in higher_order_fallthrough:
            higher_order_fallthrough.append(key)
    _libraries["_"] = library


_ENTRY = """\
def entry(_keys, {s.params}):
    _mode = _get_mode({tls!r})
    return _mode.handlers[_name](_mode, _keys, {s.call})
"""


def _entry(op: OpOverload) -> Handler:
    """The function registered for `op`: it calls the handler that the thread's mode has for it."""
    signature = signature_of(op)
    if signature is None:
        general = GENERAL_HANDLERS[op.name()]  # every mode has this handler for it
        return dynamo_skip(lambda keys, *args, **kwargs: general(get_in_tls(TLS_NAME), keys, *args, **kwargs))
    text = _ENTRY.format(s=signature, tls=TLS_NAME)
    return dynamo_skip(defined("entry", text, "<ampkit dispatch>", {"_get_mode": get_in_tls, "_name": op.name()}))


def _general(op: OpOverload) -> Handler:
    """The handler of `op` for any rule, any arguments and any mode."""
    positions = [n for n, argument in enumerate(op._schema.arguments) if str(argument.type) == "Tensor"]
    ahead, refuses_numbers = keys_ahead(op), not takes_numbers(op)

    @dynamo_skip
    def handler(mode: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if refuses_numbers or functorch_level() is not None:
            args = _with_tensors(args, _numbers(args, positions))
        if refuses_numbers:  # in traced code torch treats some tensors as numbers, also without a tensor beside them
            for position in _numbers(args, positions):
                args = (*args[:position], torch.tensor(args[position]), *args[position + 1 :])
        if not (mode.as_torch and is_ahead(keyset, ahead)):
            result = mode.__torch_dispatch__(op, (), args, kwargs)
            if result is not NotImplemented:
                return result
        # If none of the mode's policies lists `op`, torch's autocast key must stay included: the operator's library may
        # have registered a function there, and without the key autocast counts as disabled for the operator's parts.
        listed = any(op in table for _, table in mode.tables)
        excluded, below = (mode.excluded_keys, mode.redispatch_keys) if listed else keysets(())
        if _numbers(args, positions):
            # The dispatcher passes on numbers in the place of tensors (`x + 1`), which redispatch does not accept.
            with Exclude(excluded):
                return op._op(*args, **kwargs)
        return op.redispatch(keyset & below, *args, **kwargs)

    return handler


def _numbers(args: tuple[Any, ...], positions: list[int]) -> list[int]:
    """Those of the positions of tensors at which a number was given."""
    return [position for position in positions if position < len(args) and type(args[position]) in _NUMBER_TYPES]


def _with_tensors(args: tuple[Any, ...], positions: list[int]) -> tuple[Any, ...]:
    """Arguments with tensors for the numbers at `positions`; they promote as numbers do, and no digit is lost.

    Autograd saves a number as a tensor with a flag. If a transform has wrapped that tensor, torch cannot hand it to a
    Python function in backward: it reads the number, and the wrapper has no memory. Any region of the process would
    fail so once one policy has a rule for `mul`.
    """
    tensor = next((arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()), None)
    if tensor is None:
        return args
    changed = list(args)
    for position in positions:
        if type(args[position]) in (int, float, bool):
            number = torch.scalar_tensor(args[position], dtype=torch.float64)
            # A float64 number would promote a tensor without dimensions, so it gets that tensor's dtype; a dtype of 16
            # bits only if no digit is lost.
            low = number.to(tensor.dtype) if tensor.dim() == 0 else number
            if tensor.dtype not in (torch.float16, torch.bfloat16) or bool(low == number):
                changed[position] = low
    return tuple(changed)


def _cast_before_tracer(op: OpOverload) -> None:
    """Have pre-dispatch tracing (`torch.export`) record the casts and the call on cast arguments.

    That tracer is a Python mode at the one key above the regions' keys. `OpOverload._get_dispatch` looks it up at every
    call; for operators with an entry, `_get_dispatch` below wraps this look-up.
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
