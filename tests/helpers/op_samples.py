"""Calls of operators on which to compare ampkit with torch.amp: torch's own samples, on real and absent devices.

torch.amp's casts for a device also run on fake tensors of that device, so a machine without a GPU can show what
torch.amp does on one. A `Call` is made from samples on the CPU and moved to a fake device where needed.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from ampkit import Policy, autocast


class Call(NamedTuple):
    """One call of a public torch function, with a name for failure messages."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def op_db_calls(dtype: torch.dtype, limit: int) -> Iterator[Call]:
    """Up to `limit` calls for every entry of torch's operator database that takes `dtype`."""
    from torch.testing._internal.common_methods_invocations import op_db

    for entry in op_db:
        if dtype not in entry.dtypes:
            continue
        name = f"{entry.name} {entry.variant_test_name}".strip()
        seed(0)
        # `entry.sample_inputs` would call torch.manual_seed before each sample; see `seed`.
        samples = entry.sample_inputs_func(entry, "cpu", dtype, False)
        for index, sample in enumerate(itertools.islice(samples, limit)):
            args = (sample.input, *sample.args)
            yield Call(f"{name} #{index} on {dtype}", entry.op, args, dict(sample.kwargs))


def seed(value: int) -> None:
    """Seed the CPU's generator only: `torch.manual_seed` also queues a call with a stack trace for each device."""
    torch.default_generator.manual_seed(value)


@contextlib.contextmanager
def native(device: str, dtype: torch.dtype) -> Iterator[None]:
    """torch.amp for a device that may be absent, where `torch.autocast` would disable itself."""
    state = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, state[0])
        torch.set_autocast_dtype(device, state[1])


def region(policy: Policy, dtype: torch.dtype) -> autocast:
    """ampkit's region for the policy's device; with an index, so that an absent CUDA does not disable it."""
    device = "cuda:0" if policy.device_type == "cuda" else policy.device_type
    return autocast(device, dtype, policy=policy)


def run(
    call: Call, context: contextlib.AbstractContextManager[Any], *, backward: Literal["outside", "inside"] | None = None
) -> list[Any] | Exception:
    """The flat results of a call on copies of its arguments, or what it raised.

    With `backward`, the gradients of every floating-point argument follow, computed outside the context or inside.
    """
    seed(0)
    args, kwargs = tree_map(_copied, (call.args, call.kwargs))
    leaves = (
        [
            leaf.requires_grad_()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided
        ]
        if backward
        else []
    )

    def gradients(results: list[Any]) -> tuple[Any, ...]:
        outputs = [out for out in results if isinstance(out, torch.Tensor) and out.requires_grad]
        seed(1)
        grad_outputs = [torch.randn_like(out) for out in outputs]
        return torch.autograd.grad(outputs, leaves, grad_outputs, allow_unused=True) if outputs else ()

    try:
        with context:
            results = tree_leaves(call.function(*args, **kwargs))
            if backward == "inside":
                return [*results, *gradients(results)]
        return [*results, *gradients(results)] if backward else results
    except Exception as error:
        return error


def run_fake(call: Call, device: str, context: contextlib.AbstractContextManager[Any]) -> list[Any] | Exception:
    """The dtypes and shapes of a call's results with every dense tensor on a fake `device`, or what it raised."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        args, kwargs = tree_map(lambda leaf: _moved(leaf, device), (call.args, call.kwargs))
        try:
            with context:
                results = tree_leaves(call.function(*args, **kwargs))
        except Exception as error:
            return error
    return [
        (out.dtype, out.device.type, tuple(out.shape)) if isinstance(out, torch.Tensor) else type(out)
        for out in results
    ]


def same(a: Any, b: Any) -> bool:
    """Whether two results have the same dtype and values. NaN equals NaN, and -0.0 equals 0.0."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b)
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        return same(a.to_dense(), b.to_dense())
    if a.is_complex():
        a, b = (torch.view_as_real(x.resolve_conj().to(torch.complex128)) for x in (a, b))
    if a.is_floating_point():
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.double().nan_to_num(), b.double().nan_to_num())
    return torch.equal(a, b)


def difference(a: list[Any] | Exception, b: list[Any] | Exception) -> str | None:
    """A text that says how two outcomes differ; None if they do not. Two errors are the same outcome."""
    if isinstance(a, Exception) or isinstance(b, Exception):
        if isinstance(a, Exception) and isinstance(b, Exception):
            return None
        return f"torch.amp: {_short(a)}; ampkit: {_short(b)}"
    if len(a) != len(b):
        return f"torch.amp gave {len(a)} results, ampkit {len(b)}"
    for x, y in zip(a, b, strict=True):
        if not (same(x, y) if isinstance(x, torch.Tensor) else x == y or type(x) is type(y) is not tuple):
            return f"torch.amp: {_short(x)}; ampkit: {_short(y)}"
    return None


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return leaf.detach().clone()
    return leaf


def _moved(leaf: Any, device: str) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=device)
    return leaf


def _short(outcome: Any) -> str:
    if isinstance(outcome, Exception):
        return f"{type(outcome).__name__}({str(outcome)[:120]!r})"
    if isinstance(outcome, torch.Tensor):
        return f"{outcome.dtype} {tuple(outcome.shape)} {outcome.flatten()[:4].tolist()}"
    return str(outcome)[:200]
