"""The dispatch mode that autocast rests on, lifted above autograd.

A `TorchDispatchMode` usually sits at the dispatch key `Python`, below autograd: a cast made there is not
differentiated, and `linear` arrives as `t` + `addmm`. This one is put at a key above autograd, above functorch and
above torch's own autocast: an operator meets it whole and first, and what it does is differentiated, vmapped and
traced as if the casts had been written by hand.

The key is `TESTING_ONLY_GenericMode`, which torch defines and no build of torch uses. A kernel is registered there for
each operator that some policy lists; every other operator falls through in C++, at no cost, also into composites,
whose parts meet the mode again. The key is included only while a region is open, so the registrations mean nothing
outside. Because the mode does not need torch's autocast keys excluded, the region's state *is* torch's own autocast
state: `torch.is_autocast_enabled(...)`, `torch.autocast(enabled=False)` in a library, activation checkpointing and
operators with `register_autocast` all see it. docs/architecture.md has the measurements behind this.

The open region is kept in torch's thread-local store, which autograd hands to its worker threads: backward meets the
mode of whoever called backward, as with torch.amp.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch._C import DispatchKeySet
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit.policy import casting
from ampkit.policy.op_table import Rule
from ampkit.policy.policy import Policy, register_changes
from ampkit.region import _checkpoint_frames, _compiled, _fingerprint, recurrent
from ampkit.region.weight_cache import WeightCache
from ampkit.torch_internals.dispatcher import BELOW as _BELOW
from ampkit.torch_internals.dispatcher import KEY as _KEY
from ampkit.torch_internals.dispatcher import KEY_NAME as _KEY_NAME
from ampkit.torch_internals.dispatcher import Exclude as _Exclude
from ampkit.torch_internals.dispatcher import get_in_tls as _get_in_tls
from ampkit.torch_internals.dispatcher import has_kernel as _has_kernel
from ampkit.torch_internals.dispatcher import higher_order_fallthrough as _hop_fallthrough
from ampkit.torch_internals.dispatcher import higher_order_ops as _higher_order_ops
from ampkit.torch_internals.dispatcher import is_excluded as _is_excluded
from ampkit.torch_internals.dispatcher import is_in_tls as _is_in_tls
from ampkit.torch_internals.dispatcher import is_included as _is_included
from ampkit.torch_internals.dispatcher import put_in_tls as _put_in_tls
from ampkit.torch_internals.dispatcher import set_excluded as _set_excluded
from ampkit.torch_internals.dispatcher import set_included as _set_included

TLS_NAME = "ampkit.mode"

_AUTOCAST_KEYS = {
    "cpu": "AutocastCPU", "cuda": "AutocastCUDA", "mps": "AutocastMPS", "xpu": "AutocastXPU", "hpu": "AutocastHPU",
    "mtia": "AutocastMTIA", "maia": "AutocastMAIA", "xla": "AutocastXLA", "ipu": "AutocastIPU",
    "privateuseone": "AutocastPrivateUse1",
}
_NUMBERS = frozenset({int, float, bool, complex, torch.SymInt, torch.SymFloat, torch.SymBool})
_NO_ARGUMENTS: Mapping[str, Any] = {}
_top_hooks = _checkpoint_frames.top_hooks

# Used for every listed operator: finding these by way of their modules and classes takes longer than asking them.
_enabled, _dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
_LOWER, _DECOMPOSE = Rule.LOWER, Rule.DECOMPOSE

_Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


class AutocastMode(TorchDispatchMode):
    """What an open region does to operators: one policy per device type, and a weight cache.

    Nothing in it changes, so regions with the same policies and cache share one. Whether a device's autocast is enabled
    and its dtype are read from torch at every operator, so a `torch.autocast` region inside, of any library, is
    respected. `Entered` puts it at its key; it refuses the place where `with` would put it, below autograd.
    """

    record: Any = None      # where the calls are noted, while a record is being taken; see `recording`

    def __init__(self, policies: tuple[tuple[str, Policy], ...], cache: WeightCache | None) -> None:
        super().__init__()
        self.policies = policies
        self.cache = cache
        self.open = True
        self.changes = register_changes()
        self.lookup = None if cache is None else cache.cast
        self.tables = tuple((device, policy.rules()) for device, policy in policies)
        self.mark = _fingerprint.mark_of(policies)
        self.hidden, self.below = keysets(tuple(device for device, _ in policies))
        for _, table in self.tables:
            if not table.installed:
                install(table)
                table.installed = True

    @functools.cached_property
    def left(self) -> AutocastMode:
        """The mode as it stays in the thread when its region has been left, with none around it.

        Backward of `torch.cond` and its kind computes the forward again under the dispatcher keys that forward saw,
        the mode's key among them, wherever it is called.
        """
        mode = AutocastMode(self.policies, None)
        mode.open = False
        return mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False        # torch would wrap `__torch_dispatch__` in a call of its own; the kernels are marked instead

    def __enter__(self) -> NoReturn:
        raise RuntimeError(
            "AutocastMode cannot be pushed as an ordinary mode: its casts would escape autograd. Use ampkit.autocast"
        )

    @_compiled.runs_as_it_is
    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Cast what the policy casts, and call `func` with neither this mode nor torch's autocast in the way.

        NotImplemented if no rule in force names `func`: the operator then goes on as if the mode were not there.
        """
        call = self.prepare(func, args, _NO_ARGUMENTS if kwargs is None else kwargs)
        if call is None:
            return NotImplemented
        if _top_hooks(True) is not None:
            _checkpoint_frames.note_region(self)
        run, args, kwargs = call
        with _Exclude(self.hidden):
            return run(*args, **kwargs)

    def prepare(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call | None:
        """The call to make in place of `op(*args, **kwargs)`; None to go on as if the mode were not there."""
        if len(self.tables) == 1:
            device, table = self.tables[0]
            rule = table.get(op)
            if rule is None or rule is _DECOMPOSE or not _enabled(device):
                return None
            return self._follow(rule, op, args, kwargs, device)
        call: _Call | None = None
        for device, table in self.tables:
            rule = table.get(op)
            if rule is None or rule is _DECOMPOSE or not _enabled(device):
                continue
            if any(value.device.type == device for value in casting.tensors((*args, *kwargs.values()))):
                call = self._follow(rule, op, args, kwargs, device)
                _, args, kwargs = call
        return call

    def _follow(
        self, rule: Rule, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str
    ) -> _Call:
        """The call that a rule asks for."""
        if rule is _LOWER:
            cast = casting.cast_to(device, _dtype_of(device))
            args = cast.args(args, self.lookup)
            if kwargs:
                kwargs = cast.kwargs(kwargs, self.lookup)
            if op in recurrent.LAYERS:
                recurrent.flatten_weights(op, args)
        elif rule is Rule.FLOAT32:
            cast = casting.cast_to(device, torch.float32)
            args, kwargs = cast.args(args), cast.kwargs(kwargs)
        elif rule is Rule.FLOAT32_DTYPE_ARG:
            op, args, kwargs = casting.with_float32_dtype(op, args, kwargs, device)
        elif rule is Rule.PROMOTE:
            dtype = casting.widest_dtype(args, device)
            if kwargs:
                dtype = casting.widest_dtype(kwargs.values(), device, dtype)
            if dtype is torch.float32:      # any other is the one dtype of them all, and there is nothing to cast
                cast = casting.cast_to(device, dtype)
                args, kwargs = cast.args(args), cast.kwargs(kwargs)
        elif rule is Rule.BANNED and any(
            casting.is_eligible(value, device) for value in casting.tensors((*args, *kwargs.values()))
        ):
            raise RuntimeError(_banned_message(op))
        return op._op, args, kwargs


@functools.cache
def keysets(devices: tuple[str, ...]) -> tuple[DispatchKeySet, DispatchKeySet]:
    """The keys that must not answer again for what the mode has cast, and those that an operator goes on to."""
    hidden = DispatchKeySet(_KEY)
    for device in devices:
        hidden |= DispatchKeySet(torch._C._dispatch_key_parse(_AUTOCAST_KEYS[device]))
    return hidden, _BELOW - hidden


def current() -> AutocastMode | None:
    """The mode of the innermost region open in this thread, or handed to it by autograd."""
    mode = _get_in_tls(TLS_NAME) if _is_in_tls(TLS_NAME) else None
    return mode if mode is not None and mode.open else None


class Entered:
    """One entry of a mode into this thread's dispatcher state, and what to put back on leaving.

    Made before anything changes, and everything is put back as a value: `leave` undoes an `enter` that an exception has
    cut short, and called again completes a `leave` that one has cut short.
    """

    __slots__ = ("active", "excluded", "included", "mark", "mode", "previous")

    def __init__(self, mode: AutocastMode, previous: AutocastMode | None, *, active: bool) -> None:
        """`mode` is to come in place of `previous`, the `current` one. With `active` False operators go past it."""
        self.mode = mode
        self.previous = previous
        self.active = active
        self.included = _is_included(_KEY)
        self.excluded = _is_excluded(_KEY)      # inside an island, or inside an operator
        self.mark = _fingerprint.thread.mark

    def enter(self) -> None:
        """Make the mode the thread's."""
        _put_in_tls(TLS_NAME, self.mode)
        _fingerprint.write(self.mode.mark if self.active else ())
        if self.active and not self.included:
            _set_included(_KEY, True)
        if self.excluded is self.active:
            _set_excluded(_KEY, not self.active)

    def leave(self, *, again: bool = False) -> None:
        """Restore the state found on entry; `again` after `enter` or `leave` was cut short."""
        if again or (self.active and not self.included):
            _set_included(_KEY, self.included)
        if again or self.excluded is self.active:
            _set_excluded(_KEY, self.excluded)
        _fingerprint.write(self.mark, anew=again)
        _put_in_tls(TLS_NAME, self.previous or self.mode.left)


_libraries: dict[str, torch.library.Library] = {}
_begun: set[OpOverload] = set()         # a kernel may be there: the registration has begun
_installed: set[OpOverload] = set()     # and has ended
_prepared = False
_installing_lock = threading.Lock()


def _forked() -> None:
    """In a child process: the lock may be held by a thread that is not there."""
    global _installing_lock
    _installing_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def install(ops: Iterable[OpOverload]) -> None:
    """Register the mode's kernel for operators that have none yet; what an interrupt cuts short, once more."""
    missing = [op for op in ops if op not in _installed]
    if not missing:
        return
    with _installing_lock:
        _prepare()
        for op in missing:
            if op in _installed:
                continue
            namespace = op.namespace
            if namespace not in _libraries:
                _libraries[namespace] = torch.library.Library(namespace, "IMPL")
            if op not in _begun or not _has_kernel(op.name(), _KEY_NAME):
                _begun.add(op)
                _libraries[namespace].impl(op, _kernel(op), _KEY_NAME, with_keyset=True)
            _go_before_tracer(op)
            _installed.add(op)


def _prepare() -> None:
    """What the first kernel of a process needs around it. Each part can be repeated."""
    global _prepared
    if not _prepared:
        if "_" not in _libraries:
            _libraries["_"] = _fallthrough()
        _let_higher_order_ops_through()
        _checkpoint_frames.follow_reentrant(current)
        _prepared = True


def _fallthrough() -> torch.library.Library:
    """Have operators without a kernel of ours go past the key."""
    library = torch.library.Library("_", "IMPL")
    try:
        library.fallback(torch.library.fallthrough_kernel, _KEY_NAME)
    except RuntimeError as error:
        raise RuntimeError(
            f"the dispatch key {_KEY_NAME} that ampkit needs for itself is taken: by another copy of ampkit, imported "
            "anew or reloaded in this process, or by another library. Start a new process and import ampkit once"
        ) from error
    return library


def _kernel(op: OpOverload) -> Callable[..., Any]:
    """What `op` runs at the mode's key."""
    slots = [n for n, argument in enumerate(op._schema.arguments) if str(argument.type) == "Tensor"]

    @_compiled.runs_as_it_is
    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        mode = _get_in_tls(TLS_NAME)
        result = mode.__torch_dispatch__(op, (), args, kwargs)
        if result is not NotImplemented:
            return result
        if any(type(args[slot]) in _NUMBERS for slot in slots if slot < len(args)):
            with _Exclude(mode.hidden):     # `x + 1`: redispatch takes no number for a tensor
                return op._op(*args, **kwargs)
        return op.redispatch(keyset & mode.below, *args, **kwargs)

    return kernel


def _go_before_tracer(op: OpOverload) -> None:
    """Have pre-dispatch tracing (`torch.export`) record what the mode makes of `op`, not `op` as it was called.

    That tracer sits at the one key above the mode's. It is a Python mode that `OpOverload._get_dispatch` looks up at
    every call; for operators with a kernel of ours the look-up is asked here first.
    """
    look_up = op._get_dispatch

    @_compiled.runs_as_it_is
    def get_dispatch(key: Any) -> Any:
        found = look_up(key)
        if key != torch._C.DispatchKey.PreDispatch or not callable(found):
            return found

        @_compiled.runs_as_it_is
        def handler(*args: Any, **kwargs: Any) -> Any:
            mode = current() if is_open() else None
            result = NotImplemented if mode is None else mode.__torch_dispatch__(op, (), args, kwargs)
            return found(*args, **kwargs) if result is NotImplemented else result

        return handler

    op._get_dispatch = get_dispatch  # type: ignore[method-assign]


def is_open() -> bool:
    """Whether operators meet the mode here: a region is open, and it is not an island."""
    return _is_included(_KEY) and not _is_excluded(_KEY)


def _let_higher_order_ops_through() -> None:
    """`torch.cond` and its kind dispatch in Python and know nothing of fallbacks: tell them to skip the key."""
    for op in _higher_order_ops.values():
        op.fallthrough(_KEY)
    if _KEY not in _hop_fallthrough:
        _hop_fallthrough.append(_KEY)


def _banned_message(op: OpOverload) -> str:
    if op.name() == "aten::binary_cross_entropy":
        use = "use binary_cross_entropy_with_logits (or BCEWithLogitsLoss) on the values before the sigmoid"
    else:
        use = "use an operator that is safe in low precision"
    return (
        f"operator '{op.name()}' is unsafe under autocast: its low-precision input has lost what it needs. "
        f"Either {use}; or call it in `with autocast(enabled=False)` on .float() inputs; or let it run in float32: "
        f"autocast(policy=Policy.default(device_type).with_rules({{{op.name()!r}: Rule.FLOAT32}}))"
    )
