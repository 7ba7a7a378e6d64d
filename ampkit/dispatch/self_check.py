"""The self check: whether regions work with the running torch, tried once per process on a 2x2 matrix product.

A region depends on the behavior of private names of torch. For supported releases the tests cover it; the check decides
for all other versions, and for builds of torch that differ from its releases. It runs in a new thread, which has no
modes: the first region may be made in a trace or under other modes.
"""

from __future__ import annotations

import functools
import threading

import torch

from ampkit.dispatch.dispatcher import TLS_NAME
from ampkit.dispatch.mode import AutocastMode
from ampkit.policy.policy import Policy
from ampkit.torch_private import is_excluded, is_included, put_in_tls, set_included, unsupported

__all__ = ["once", "problem"]


@functools.cache
def once() -> None:
    """Raise `RuntimeError` if regions do not work: with torch's version, the problem and a version to install."""
    text = problem()
    if text is not None:
        raise RuntimeError(unsupported(text))


def problem() -> str | None:
    """Return a description of the first thing that does not work; None if regions work."""
    mode = AutocastMode((("cpu", Policy.default("cpu")),), None)  # raises if the dispatch key is taken
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(_try_out(mode)), name="ampkit self check", daemon=True)
    thread.start()
    thread.join()
    return found[0]


def _try_out(mode: AutocastMode) -> str | None:
    weight = torch.ones(2, 2, dtype=torch.float32, device="cpu", requires_grad=True)
    before = is_included(mode.key), is_excluded(mode.key)
    torch.set_autocast_enabled("cpu", True)
    put_in_tls(TLS_NAME, mode)
    set_included(mode.key, True)
    try:
        product, negated = torch.mm(weight, weight), torch.neg(weight)
    except Exception as error:  # which a region would have raised too
        return f"{type(error).__name__}: {error}"
    finally:
        set_included(mode.key, False)
    if (is_included(mode.key), is_excluded(mode.key)) != before:
        return "a region is still active after it has ended"
    if negated.dtype is not torch.float32 or negated.grad_fn is None:
        return "an operator without a rule does not fall through the region"
    if product.dtype is not torch.bfloat16:
        return "an operator with a rule does not compute with the casts of the region"
    node = product.grad_fn
    cast = None if node is None else node.next_functions[1][0]
    if cast is None or not cast.next_functions or getattr(cast.next_functions[0][0], "variable", None) is not weight:
        return "the casts of a region are not differentiated"
    return None
