"""Run one call in a region of torch.amp and one of ampkit, and compare."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from ampkit import Policy, autocast
from tests.helpers.op_samples import native, same

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# oneDNN's 16-bit LSTM needs AVX-512; on other CPUs torch.autocast raises at `nn.LSTM`, and so does `Policy.torch`.
LSTM_IN_16_BITS = torch.ops.mkldnn._is_mkldnn_bf16_supported()
needs_16_bit_lstm = pytest.mark.skipif(not LSTM_IN_16_BITS, reason="no 16-bit LSTM in oneDNN on this CPU")

REGIONS = [torch.autocast, autocast]
both = pytest.mark.parametrize("region", REGIONS, ids=["torch", "ampkit"])


def product(dtype: torch.dtype = FP32, device: str = "cpu") -> torch.dtype:
    """The dtype of `mm` in the current region."""
    a = torch.ones(2, 2, dtype=dtype, device=device)
    return torch.mm(a, a).dtype


def copies(call: Callable[[], Any]) -> int:
    """The number of dtype conversions that copy in a call; a cast from the cache copies nothing."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        call()
    conversions = [event for event in profile.events() or () if event.name == "aten::_to_copy"]
    return sum(any(child.name == "aten::copy_" for child in event.cpu_children) for event in conversions)


def state() -> tuple[Any, ...]:
    """torch's autocast state in this thread: enabled and dtype per device, cache flag, nesting."""
    torch.autocast_increment_nesting()
    nesting = torch.autocast_decrement_nesting()
    kinds = ("cpu", "cuda", "mps", "xpu")
    return (
        *((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        torch.is_autocast_cache_enabled(),
        nesting,
    )


def like_torch(dtype: torch.dtype | None = None, **kwargs: Any) -> autocast:
    """ampkit's region for the CPU with torch.amp's own list."""
    return autocast("cpu", dtype, policy=Policy.torch("cpu"), **kwargs)


def outcome(call: Callable[[], Any], context: contextlib.AbstractContextManager[Any]) -> Any:
    """The result of a call in a context, or the exception it raises, from the same random numbers each time."""
    torch.manual_seed(0)
    try:
        with context:
            return call()
    except (RuntimeError, TypeError, ValueError) as error:
        return error


def on_both(call: Callable[[], Any], dtype: torch.dtype = BF16) -> Any:
    """The result of a call on CPU tensors in ampkit's region, which must have the bits of torch.amp's.

    Where both raise, the exception is raised; where only one does, that is a failure.
    """
    theirs = outcome(call, torch.autocast("cpu", dtype))
    ours = outcome(call, like_torch(dtype))
    _raise_if_both(theirs, ours)
    pairs = zip(tree_leaves(theirs), tree_leaves(ours), strict=True)
    different = [(a, b) for a, b in pairs if not (same(a, b) if isinstance(a, torch.Tensor) else a == b)]
    assert different == [], "(torch.amp, ampkit)"
    return ours


def on_fake_cuda(call: Callable[[], Any], dtype: torch.dtype = FP16) -> Any:
    """The result dtypes of a call on fake CUDA tensors in ampkit's region, which must be torch.amp's.

    `call` makes its tensors itself, with `device="cuda"`. Exceptions are handled as in `on_both`.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        theirs = _dtypes(outcome(call, native("cuda", dtype)))
        ours = _dtypes(outcome(call, autocast("cuda:0", dtype, policy=Policy.torch("cuda"))))
    _raise_if_both(theirs, ours)
    assert theirs == ours
    return ours


def _dtypes(result: Any) -> Any:
    return tree_map(lambda leaf: leaf.dtype if isinstance(leaf, torch.Tensor) else leaf, result)


def _raise_if_both(theirs: Any, ours: Any) -> None:
    if isinstance(ours, Exception):
        if not isinstance(theirs, Exception):
            raise AssertionError(f"torch.amp gives {theirs!r}") from ours
        raise ours
    if isinstance(theirs, Exception):
        raise AssertionError(f"ampkit gives {ours!r}") from theirs
