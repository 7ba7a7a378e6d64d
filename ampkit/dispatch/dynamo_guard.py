"""The policy tag: a guard by which Dynamo compiles a function again under another policy.

Dynamo traces a function that is called inside a region with the region's casts, and guards on torch's autocast state:
enabled and dtype of each device type. These guards do not distinguish regions that differ only in policy. So a
region whose policy is not torch.amp's list encodes its policy as the autocast dtypes of device types that torch still
lists and that no build of torch can run, one dtype per digit: the *tag*. It casts nothing; torch's guards check it in
C++.

There are about two thousand tags. AOTAutograd's cache on disk, which other processes share, gets the full policy while
Dynamo compiles, through `torch.compiler.config.cache_key_tag`.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import uuid
from typing import Any

import torch

from ampkit.forks import process_lock
from ampkit.policy.policy import Policy, register_changes, registered
from ampkit.torch_private import dynamo_skip, functorch_config, loaded

__all__ = ["TAG_DEVICES", "Tag", "begin_backward_as_eager", "current_tag", "tag_of", "write_tag"]

Tag = tuple[tuple[str, torch.dtype], ...]  # a device type and its autocast dtype for each digit

TAG_DEVICES = ("ipu", "maia")
_DIGITS = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
_is_enabled, _dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
_set_enabled, _set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
_tags: dict[str, Tag] = {}  # by the text of the policies
_texts: dict[Tag, str] = {}


def tag_of(policies: tuple[tuple[str, Policy], ...], *, casts: bool = True) -> Tag:
    """Return the tag of a region with these policies: empty for one policy, otherwise unique.

    torch.amp's own list has no tag in a region that casts. The default policy has none in a region that casts nothing:
    regions inside inherit the policy, and without an outer region they have the default one.
    """
    return _tag_of(policies, casts, register_changes())


@functools.lru_cache(maxsize=64)
def _tag_of(policies: tuple[tuple[str, Policy], ...], casts: bool, changes: int) -> Tag:
    untagged = Policy.torch if casts else Policy.default
    if not (casts and registered()) and all(policy == untagged(device_type) for device_type, policy in policies):
        return ()
    # A policy's `repr` is the same in every process, its `text` has the number of its module rules in this one.
    text = repr([(device_type, policy, policy.text) for device_type, policy in policies])
    text += repr(sorted((op.name(), rule.value) for op, rule in registered().items()))
    with process_lock():
        if text not in _tags:
            _tags[text] = tag = _free_tag(text)
            _texts[tag] = text
        return _tags[text]


def _free_tag(text: str) -> Tag:
    """Return a tag that is unique in this process: from a hash of the text, so mostly the same in every process."""
    capacity = len(_DIGITS) ** 2
    if len(_texts) >= capacity:
        _tags.clear()
        _texts.clear()
        _tag_of.cache_clear()
        forget_compiled()  # code compiled under an old tag must not match a new one
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
    tag: Tag = ((TAG_DEVICES[0], _DIGITS[number % len(_DIGITS)]),)
    while tag in _texts:
        first, second = divmod(number % capacity, len(_DIGITS))
        tag = ((TAG_DEVICES[0], _DIGITS[first]), (TAG_DEVICES[1], _DIGITS[second]))
        number += 1
    return tag


def current_tag() -> Tag:
    """Return the tag that is set in this thread."""
    if not _is_enabled(TAG_DEVICES[0]):
        return ()
    return tuple([(device, _dtype_of(device)) for device in TAG_DEVICES if _is_enabled(device)])


def write_tag(tag: Tag, now: Tag) -> None:
    """Set the tag of this thread, which was set to `now` before."""
    for device, digit in tag:
        _set_dtype(device, digit)
        _set_enabled(device, True)
    for device, _ in now[len(tag) :]:  # of a longer tag
        _set_enabled(device, False)
    if tag and "torch._dynamo.callback" in sys.modules:
        callbacks = loaded("_dynamo.callback", "callback_handler")
        if callbacks is not None and _begin not in callbacks.start_callbacks:  # `torch._dynamo.reset` drops callbacks
            callbacks.register_end_callback(_end)  # first: a start without an end would change all later compilations
            callbacks.register_start_callback(_begin)


class _Compilation:
    """torch's options as they were before ampkit changed them for a compilation."""

    cache_key_tag: str | None = None
    changed_backward = False


@dynamo_skip  # torch holds a lock, which a compilation of this, amid a compiled step, would wait for
def _begin(_: Any) -> None:
    tag = current_tag()
    if tag:
        # After an operator has raised in a graph of `backend="eager"`, torch restores which devices are enabled, but
        # not their dtypes. The digits are then not the tag of a policy, and nothing on disk may match.
        text = _texts.get(tag) or uuid.uuid4().hex
        _Compilation.cache_key_tag = torch.compiler.config.cache_key_tag
        torch.compiler.config.cache_key_tag = _Compilation.cache_key_tag + hashlib.sha256(text.encode()).hexdigest()
        begin_backward_as_eager()


def begin_backward_as_eager() -> None:
    """Have the current compilation trace backward with autocast off, as eager code runs it, until it ends."""
    _Compilation.changed_backward |= trace_backward_as_eager()


@dynamo_skip
def _end(_: Any) -> None:
    if _Compilation.cache_key_tag is not None:
        torch.compiler.config.cache_key_tag = _Compilation.cache_key_tag
        _Compilation.cache_key_tag = None
    if _Compilation.changed_backward:
        traced_backward()
        _Compilation.changed_backward = False


def forget_compiled() -> None:
    """Drop the code that Dynamo has compiled so far."""
    reset = loaded("_dynamo", "reset")
    if reset is not None:
        reset()


# AOTAutograd traces a backward in the autocast state that surrounds the compiled call, which would cast the products of
# a float32 module's backward. While Dynamo compiles in a region it traces backward with autocast off, as eager code
# runs it. The option is part of the keys of AOTAutograd's cache.

_AS_FORWARD = "same_as_forward"  # torch's default for the option


def trace_backward_as_eager() -> bool:
    """Have the current compilation trace backward with autocast off. Returns whether this has changed the option."""
    # Compilations of exports call no end callback.
    if not loaded("_dynamo.callback", "callback_handler._CompilationCallbackHandler__pending_callbacks_counter"):
        return False
    if functorch_config().backward_pass_autocast != _AS_FORWARD:
        return False
    functorch_config().backward_pass_autocast = "off"
    return True


def traced_backward() -> None:
    """Undo the change of `trace_backward_as_eager`."""
    functorch_config().backward_pass_autocast = _AS_FORWARD
