"""Whether regions work with the running torch, tried once per process on a 2x2 matrix product.

A region depends on private names of torch, and on what they do. For supported releases that is tested; the check
decides for all other versions, and for builds of torch that differ from its releases.

It runs in a thread of its own, because the first region may be made in a trace or under other modes, and a new thread
has neither. It calls autograd nodes itself and runs no backward: after one, a forked child could not run another.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ampkit.torch_internals.dispatcher import (
    KEY,
    TLS_NAME,
    Exclude,
    is_excluded,
    is_included,
    keysets,
    put_in_tls,
    set_included,
)
from ampkit.torch_internals.kernels import GENERAL, in_own_thread, install
from ampkit.torch_internals.lookup import missing, refuse
from ampkit.torch_internals.operators import OpOverload, canonical
from ampkit.torch_internals.versions import no_regions

_MM = canonical(torch.ops.aten.mm.default)


@functools.cache
def once() -> None:
    """Return if regions work; `RuntimeError` with torch's version, what fails and what to install if they do not."""
    found = fault()
    if found is not None:
        raise RuntimeError(no_regions(found))


def fault() -> str | None:
    """What does not work, in words; None if all does. Raises if another library has taken the key."""
    if missing:
        refuse()
    install((_MM,), KEY)
    try:
        return in_own_thread(_tried)
    except Exception as error:      # a region would have raised it too
        return f"{type(error).__name__}: {error}"


class _Halving:
    """Takes the place of an open region's mode, with one rule: `mm` in bfloat16."""

    def __init__(self) -> None:
        self.kernels = GENERAL
        self.as_torch = False
        self.open = True        # for `current`, which is called while operators are traced
        self.excluded_keys, self.redispatch_keys = keysets(("cpu",))

    def __torch_dispatch__(self, op: OpOverload, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if op is not _MM:
            return NotImplemented
        with Exclude(self.excluded_keys):
            return op._op(*(arg.bfloat16() for arg in args), **kwargs)


def _tried() -> str | None:
    mode, weight = _Halving(), torch.ones(2, 2, dtype=torch.float32, device="cpu", requires_grad=True)
    before = is_included(KEY), is_excluded(KEY)
    put_in_tls(TLS_NAME, mode)
    set_included(KEY, True)
    try:
        product, negated = torch.mm(weight, weight), torch.neg(weight)
    finally:
        set_included(KEY, False)
    if (is_included(KEY), is_excluded(KEY)) != before:
        return "a region that is left stays in the thread"
    if negated.dtype is not torch.float32 or negated.grad_fn is None:
        return "an operator without a rule does not fall through the region"
    if product.dtype is not torch.bfloat16:
        return "an operator with a rule does not compute with what the region casts"
    node: Any = product.grad_fn
    cast = node.next_functions[1][0]
    if not cast.next_functions or cast.next_functions[0][0].variable is not weight:
        return "what the region casts is not differentiated"
    with torch.no_grad():
        gradient = cast(node(torch.ones_like(product))[1])
    if gradient.dtype is not torch.float32 or gradient.ne(2).any():
        return "the gradient of what the region casts is wrong"
    return None
