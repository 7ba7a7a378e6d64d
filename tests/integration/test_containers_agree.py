"""Three functions walk containers, each with its own contract; on ordinary containers they give the same."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

from ampkit import containers
from ampkit.region import custom_function
from ampkit.scaler import nested

Pair = namedtuple("Pair", "first second")
X = torch.ones(2)
BF16 = torch.bfloat16
WALKERS = {
    "containers": lambda value: containers.map_tensors(value, torch.Tensor.bfloat16),
    "scale": lambda value: nested.map_tensors(value, torch.Tensor.bfloat16),
    "custom_fwd": lambda value: custom_function._cast(value, "cpu", BF16),
}


def described(value: Any) -> Any:
    """Types all the way down, and the dtypes of tensors."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return type(value), [(key, described(item)) for key, item in items]


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize(
    "value",
    [X, [X, X], (X, [X]), {"a": X, "b": (X,)}, OrderedDict(a=X), Pair(X, [X]), [], {}, {"a": {"b": [Pair(X, X)]}}],
    ids=lambda value: type(value).__name__,
)
def test_ordinary_containers_keep_their_type(value: Any, walker: str) -> None:
    def expected(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return BF16
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return type(value), [(key, expected(item)) for key, item in items]

    assert described(WALKERS[walker](value)) == expected(value)


def test_where_they_differ() -> None:
    """`scale` and `custom_fwd` as torch's: lazy iterables, strings refused or left; `containers` keeps what it can."""
    assert WALKERS["containers"]("text") == WALKERS["custom_fwd"]("text") == "text"
    with pytest.raises(ValueError, match="got str"):
        WALKERS["scale"]("text")
    nothing = [torch.ones(2, dtype=torch.int64)]
    assert containers.map_tensors(nothing, lambda tensor: tensor) is nothing
    assert WALKERS["custom_fwd"](nothing) is not nothing
    for name in ("scale", "custom_fwd"):
        lazy = WALKERS[name](item for item in [X])
        assert next(lazy).dtype is BF16
