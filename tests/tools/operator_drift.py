"""Compare ampkit's operator lists with the running torch: operators that are new, gone or under another rule.

`make operators` runs the tests that use this.

torch has no list to read. Its dispatcher says which operators have an autocast kernel; what that casts to is observed:
each operator is called under torch's own autocast, and stopped when it is redispatched with its cast arguments. The
tensors are fake: nothing is computed, and no such device is needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit.dispatch import casting
from ampkit.dispatch.dispatcher import AUTOCAST_KEYS, autocast_key
from ampkit.policy.operators import dtype_overload, names, resolve
from ampkit.policy.rules import Rule
from ampkit.policy.torch_lists import TORCH
from ampkit.torch_private import OpOverload
from tests.helpers.op_samples import native

# Defined or registered by the code of a library that a build of torch may lack.
ONLY_WHERE_BUILT = {"_cudnn_rnn": "cuDNN", "miopen_rnn": "MIOpen"}


def list_drift(device_type: str) -> list[str]:
    """The differences of `TORCH[device_type]` from the casts of torch.amp on that device type, a line per operator."""
    listed = {name: group.rule for group in TORCH[device_type] for name in names(group)}
    live = {name: rule_of(resolve(name), device_type) for name in registered(device_type)}
    gone = listed.keys() - live.keys() - ONLY_WHERE_BUILT.keys()
    return [
        *(f"new: {name}, torch {rule}" for name, rule in live.items() if name not in listed),
        *(f"gone: {name}, listed as {listed[name]}" for name in gone),
        *(
            f"different: {name}, listed as {listed[name]}, torch {rule}"
            for name, rule in live.items()
            if name in listed and rule not in (None, listed[name])
        ),
    ]


def registered(device_type: str) -> set[str]:
    """ATen's operators with a torch.amp kernel for a device type; no such device is needed."""
    every = torch._C._dispatch_get_registrations_for_dispatch_key(AUTOCAST_KEYS[device_type])
    return {name.removeprefix("aten::") for name in every if name.startswith("aten::")}


def rule_of(op: OpOverload, device_type: str) -> Rule | None:
    """The rule of torch.amp for an operator on a device type; None if it could not be observed."""
    half, single = torch.bfloat16, torch.float32
    with FakeTensorMode(), native(device_type, torch.bfloat16):
        low, full, mixed = (
            _arrival(op, device_type, *dtypes) for dtypes in ((half, half), (single, single), (half, single))
        )
    if isinstance(low, Exception):
        return Rule.BANNED if "unsafe to autocast" in str(low) else None
    if single in low.asked_for:
        return Rule.FLOAT32_DTYPE_ARG
    if low.dtypes == {single}:
        return Rule.FLOAT32
    if isinstance(full, Exception) or isinstance(mixed, Exception):
        return None
    if full.dtypes == {half}:
        return Rule.LOWER
    return Rule.PROMOTE if mixed.dtypes == {single} else Rule.KEEP


class _Arrived(BaseException):
    """Ends a call when the operator is redispatched with cast arguments. No `Exception`: no handler catches it."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.dtypes = {tensor.dtype for tensor in casting.tensors(args)}
        self.asked_for = {value for value in args if isinstance(value, torch.dtype)}


class _Watch(TorchDispatchMode):
    """Lies below torch's autocast: computes its casts, and stops at the operator."""

    def __init__(self, op: OpOverload) -> None:
        super().__init__()
        self.ops = {op, dtype_overload(op) or op}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in self.ops:
            raise _Arrived((*args, *(kwargs or {}).values()))
        return op(*args, **(kwargs or {}))


def _arrival(op: OpOverload, device_type: str, first: torch.dtype, others: torch.dtype) -> _Arrived | Exception:
    """How a call is redispatched whose first tensor and other tensors have these dtypes; or what autocast raised."""
    args = _arguments(op, device_type, first, others)
    key = autocast_key(device_type)
    if not any(torch._C._dispatch_keys(tensor).has(key) for tensor in casting.tensors(args)):  # fake MAIA's do not
        return RuntimeError(f"autocast does not see fake tensors of device type {device_type!r}")
    try:
        with _Watch(op), torch._C._AutoDispatchBelowAutograd():
            op(*args)
        return RuntimeError(f"{op} did not arrive")
    except _Arrived as arrived:
        return arrived
    except Exception as error:
        return error


def _arguments(op: OpOverload, device_type: str, first: torch.dtype, others: torch.dtype) -> list[Any]:
    """Arguments of the types in an operator's schema, those without a default; their values do not matter."""
    dtypes = [first]

    def tensor() -> torch.Tensor:
        return torch.empty(2, 2, dtype=dtypes.pop() if dtypes else others, device=device_type)

    plain = {"int": 1, "float": 1.0, "number": 1, "bool": False, "str": "", "List[int]": [1], "List[float]": [1.0]}
    found: list[Any] = []
    for argument in op._schema.arguments:
        if argument.has_default_value() or argument.kwarg_only:
            break
        kind = str(argument.type)
        if kind == "Tensor":
            found.append(tensor())
        elif kind in ("List[Tensor]", "List[Optional[Tensor]]"):
            found.append([tensor(), tensor()])
        else:
            found.append(plain.get(kind))  # None for what is optional
    return found
