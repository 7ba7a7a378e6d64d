"""The policy mark: a guard by which Dynamo compiles a function again under another policy.

Dynamo traces a function that is called inside a region with the region's casts, and guards on torch's autocast state:
enabled and dtype of each device type. Two regions that differ in policy alone would look the same to these guards, and
to AOTAutograd's cache on disk. So a region whose policy is not torch.amp's list encodes its policy as the autocast
dtypes of device types that torch still lists and that no build of torch can run, one dtype per digit: the *mark*. It
casts nothing; torch's guards check it in C++. Entering a region takes two more calls, or four if the mark has two
digits.

There are about two thousand marks, so the cache on disk, which other processes share, also gets the full policy while
Dynamo compiles, through `torch.compiler.config.cache_key_tag`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
from typing import Any

import torch

from ampkit.engine.thread_state import OpenRegions, thread
from ampkit.policy.module_rules import ModuleRules
from ampkit.policy.policy import Policy, register_changes, registered
from ampkit.torch_internals.dynamo import (
    AS_FORWARD,
    DYNAMO_CALLBACKS,
    backward_autocast,
    compile_callbacks,
    dynamo_skip,
    forget_compiled,
    is_compiling,
    set_backward_autocast,
)
from ampkit.torch_internals.forks import renewed_lock

_set_enabled, _set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype

MARK_DEVICES = ("ipu", "maia")
_DIGITS = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)

Mark = tuple[tuple[str, torch.dtype], ...]

_marking_lock = renewed_lock(__name__, "_marking_lock")
_marks: dict[str, Mark] = {}  # by the text of the policies
_texts: dict[Mark, str] = {}
_numbers: dict[ModuleRules, int] = {}  # a number for each set of bound modules; none is used twice
_counter = itertools.count(1)


class _Compilation:
    """Dynamo's callbacks, and the user's values of torch's options while it compiles with ampkit's in their place."""

    callbacks: Any = None  # once Dynamo is imported
    tag: str | None = None
    backward: str | None = None


def mark_of(policies: tuple[tuple[str, Policy], ...]) -> Mark:
    """The mark of a region with these policies: empty for torch.amp's own list, else unique in this process."""
    return _mark_of(policies, register_changes())


@functools.lru_cache(maxsize=64)  # every recompute of a checkpoint asks, and a policy's text may be long
def _mark_of(policies: tuple[tuple[str, Policy], ...], changes: int) -> Mark:
    """The mark after so many `register_op` calls."""
    if not registered() and all(policy == Policy.torch(kind) for kind, policy in policies):
        return ()
    text = repr([(device_type, _text_of(policy)) for device_type, policy in policies])
    if registered():
        text += repr(sorted((op.name(), rule.value) for op, rule in registered().items()))
    with _marking_lock:
        if text not in _marks:
            mark = _free_mark(text)
            _texts[mark], _marks[text] = text, mark  # in this order, should an interrupt come between
        return _marks[text]


def _text_of(policy: Policy) -> str:
    """A policy as text, with a number of this process in place of the modules that its rules bind."""
    if not policy.modules:
        return policy.text
    with _marking_lock:
        number = _numbers.setdefault(policy.modules, next(_counter))
    rules = [
        (rule.key, rule.value.text if isinstance(rule.value, Policy) else str(rule.value))
        for rule in policy.modules.rules
    ]
    return repr((policy.text, number, rules))


def _free_mark(text: str) -> Mark:
    """A mark that no other policy of this process has: by a hash of the text, so mostly the same in every process."""
    capacity = len(_DIGITS) ** 2
    if len(_texts) >= capacity:
        _marks.clear()
        _texts.clear()
        _numbers.clear()
        _mark_of.cache_clear()
        forget_compiled()  # code compiled under an old mark must not match a new one
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
    mark: Mark = ((MARK_DEVICES[0], _DIGITS[number % len(_DIGITS)]),)
    if mark not in _texts:
        return mark
    while True:
        first, second = divmod(number % capacity, len(_DIGITS))
        mark = ((MARK_DEVICES[0], _DIGITS[first]), (MARK_DEVICES[1], _DIGITS[second]))
        if mark not in _texts:
            return mark
        number += 1


def write(regions: OpenRegions, mark: Mark) -> None:
    """Set the mark of this thread, whose regions are given."""
    before, regions.mark = regions.mark, mark  # first, since a signal handler may enter a region during the rest
    try:
        for device in MARK_DEVICES[len(mark) : len(before)]:
            _set_enabled(device, False)
        for device, digit in mark:
            if regions.digits.get(device) is not digit:
                _set_dtype(device, digit)
                regions.digits[device] = digit
            _set_enabled(device, True)
    except BaseException:  # from a signal handler; leaving the region then clears the digits of both marks
        regions.mark = before + mark
        raise
    if mark and DYNAMO_CALLBACKS in sys.modules:
        registry = _Compilation.callbacks or compile_callbacks()
        if registry is not None and _begin not in registry.start_callbacks:  # `torch._dynamo.reset` drops callbacks
            registry.register_end_callback(_end)  # first: a start without an end would change all later compilations
            registry.register_start_callback(_begin)
            _Compilation.callbacks = registry


@dynamo_skip  # torch holds a lock, which a compilation of this, amid a compiled step, would wait for
def _begin(_: Any) -> None:
    mark = thread.regions.mark
    if mark:
        _Compilation.tag = torch.compiler.config.cache_key_tag
        torch.compiler.config.cache_key_tag = _Compilation.tag + hashlib.sha256(_texts[mark].encode()).hexdigest()
        trace_backward_as_eager()


def trace_backward_as_eager() -> None:
    """Have Dynamo trace the backward of the current compilation with autocast off, as eager code runs it.

    AOTAutograd traces a backward in the autocast state that surrounds the compiled call, which would cast the products
    of a float32 module's backward. The option is part of the keys of AOTAutograd's cache.
    """
    if _Compilation.backward is None and is_compiling() and backward_autocast() == AS_FORWARD:
        _Compilation.backward = AS_FORWARD
        set_backward_autocast("off")


@dynamo_skip
def _end(_: Any) -> None:
    if _Compilation.tag is not None:
        torch.compiler.config.cache_key_tag = _Compilation.tag
        _Compilation.tag = None
    if _Compilation.backward is not None:
        set_backward_autocast(_Compilation.backward)
        _Compilation.backward = None
