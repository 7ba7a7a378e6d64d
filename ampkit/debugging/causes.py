"""Why an operator's result is not finite: the same operator, run again in float64 on the same inputs, tells.

Nothing of the user's is touched: inputs are copies, random number generators are put back, and operators that would
talk to other processes or that need memory in a form of their own are not run again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampkit.debugging.operator_facts import OperatorFacts, other_arguments, tensors_in
from ampkit.dtypes import dtype_name
from ampkit.torch_internals.operator_tracing import OpOverload

_LOW = (torch.float16, torch.bfloat16, torch.float32, torch.complex64)


@dataclass(frozen=True)
class Cause:
    """Why a result is not finite.

    `kind`: "overflow" (the exact result is finite, `value` its largest magnitude, `limit` what the dtype can hold),
    "intermediate" (the exact result would fit; the kernel overflowed on the way), "undefined" (NaN or inf for these
    inputs in any precision), "rounded" (the same, of a 0 or inf that is one only in its dtype), "from inf" (an inf came
    in, and a NaN of it comes out), "constant" (it was asked for), "arrived" (it was in the tensor before the step),
    "received" (from another rank), "uninitialised" (`torch.empty` was read), "unknown" (the operator could not be run
    again), "passed on" (an input was as broken), or "skipped" (a scaler met it, and it is still in a gradient).
    """

    kind: str
    text: str
    value: float | None = None
    limit: float | None = None


CONSTANT = Cause("constant", "an inf or NaN that the code asks for")
RECEIVED = Cause("received", "received from another rank: what this one sent is finite")
UNINITIALISED = Cause("uninitialised", "memory was read that nothing was written to")
PASSED_ON = Cause("passed on", "its inputs are broken")
SKIPPED = Cause("skipped", "it was in a gradient of a step that the scaler skipped")


def described(tensor: Tensor, name: str) -> str:
    """An input of an operator: its name, dtype, shape and largest finite magnitude, and whether it has NaN or inf.

    Of integers, which may be labels or lengths, their range.
    """
    text = f"{name} {dtype_name(tensor.dtype)}{list(tensor.shape)}".lstrip()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        low, high = (int(one) for one in torch.aminmax(tensor.long()))      # uint16 has none
        return f"{text} all {low}" if low == high else f"{text} from {low} to {high}"
    broken = [what for what, there in (("NaN", tensor.isnan()), ("inf", tensor.isinf())) if bool(there.any())]
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return f"{text} up to {largest_finite(values):.4g}" + (f" with {' and '.join(broken)}" if broken else "")


def extremes(tensor: Tensor) -> tuple[float, float]:
    """The least and the greatest value, both NaN if one is: one pass tells inf, NaN and headroom."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    low, high = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    return low.item(), high.item()


def is_broken(tensor: Tensor) -> bool:
    """Whether a value is inf or NaN."""
    return not math.isfinite(sum(extremes(tensor)))


def item_at_fault(outputs: list[Tensor], arguments: Any) -> tuple[list[Tensor], Any]:
    """Of an operator on lists of tensors, the first broken result and the arguments that it was made of."""
    place = next(i for i, one in enumerate(outputs) if is_broken(one))

    def pick(value: Any) -> Any:
        return [value[place]] if isinstance(value, (list, tuple)) and len(value) == len(outputs) else value

    args, kwargs = arguments
    return [outputs[place]], ([pick(value) for value in args], {key: pick(value) for key, value in kwargs.items()})


def broken_elements(outputs: Sequence[Tensor]) -> str:
    """How many elements of a result are inf or NaN, and in which rows (places in the first dimension) if in few."""
    one = next(one for one in outputs if not bool(torch.isfinite(one).all()))
    broken = ~torch.isfinite(one)
    count, rows = int(broken.sum()), ""
    if one.ndim and one.shape[0] > 1:
        places = broken.reshape(one.shape[0], -1).any(1).nonzero().flatten().tolist()
        if len(places) < min(4, one.shape[0]):
            rows = f", in row{'s' * (len(places) > 1)} {', '.join(map(str, places))} of {one.shape[0]}"
    return f"{count} of {one.numel()} elements{rows}"


def rounded_number(
    numbers: Sequence[float], dtype: torch.dtype, into: Sequence[float] = (0.0, 1.0, -1.0)
) -> str | None:
    """Of Python numbers, one that a dtype rounds to one of `into`, in words."""
    for number in numbers:
        held = float(torch.tensor(number, dtype=dtype))
        if held != number and held in into:
            return f"{number:.10g} is {held:g} in {dtype_name(dtype)}"
    return None


def largest_finite(values: Tensor) -> float:
    """The largest magnitude among finite elements, 0.0 without any."""
    low, high = extremes(values) if values.numel() else (0.0, 0.0)
    if math.isfinite(high - low):
        return max(abs(low), abs(high))
    wide = values.double()
    return float(torch.where(torch.isfinite(wide), wide, 0.0).abs().max())


def find_cause(
    func: OpOverload, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any],
    outputs: Sequence[Tensor], *, from_inf: bool,
) -> Cause:
    """The cause of the non-finite values in `outputs`, given the arguments as they were before the call.

    `from_inf`: there is an inf among them, and no NaN.
    """
    floats = [one for one in tensors_in((args, kwargs)) if one.is_floating_point()]
    if floats and not any(one.numel() for one in floats):
        return Cause("undefined", "undefined in any precision: there are no elements to compute it of")
    if from_inf:
        rows = _rows_of_minus_inf(facts, args)
        what = "inf" if any(bool((one == math.inf).any()) for one in floats) else "-inf"
        return Cause("from inf", rows or f"{what} comes in: inf - inf, 0 * inf and inf / inf are NaN in any precision")
    if facts.communicates or facts.opaque_state:
        return Cause("unknown", f"{facts.name} cannot be run again to compare with float64")
    try:
        exact = run_in_float64(func, facts, args, kwargs)
    except Exception as error:      # kernels say in many ways that they have no float64
        return Cause("unknown", f"{facts.name} does not run in float64: {str(error).splitlines()[0][:100]}")
    return _compare(facts.name, args, outputs, exact)


def run_in_float64(
    func: OpOverload, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """The results of an operator on float64 copies of its inputs."""
    def widened(value: Tensor) -> Tensor:
        if value.dtype not in _LOW and not value.is_floating_point():
            return value.clone()
        return value.detach().to(torch.complex128 if value.is_complex() else torch.float64, copy=True)

    wide_args, wide_kwargs = other_arguments(
        func, args, kwargs, widened, lambda dtype: torch.float64 if dtype in _LOW else dtype
    )
    devices = {tensor.device for tensor in tensors_in((args, kwargs)) if tensor.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(list(devices), enabled=facts.random):
        result = func(*wide_args, **wide_kwargs)
    outputs = [*facts.outputs(result, wide_args, wide_kwargs), *facts.buffers(wide_args, wide_kwargs)]
    return [one for one in outputs if one.is_floating_point() or one.is_complex()]


def _compare(op: str, args: tuple[Any, ...], outputs: Sequence[Tensor], exact: Sequence[Tensor]) -> Cause:
    """Tell overflow from what no precision can help with, output by output."""
    for got, want in zip(outputs, exact, strict=False):
        if got.shape != want.shape:
            continue
        if got.is_complex():
            got, want = torch.view_as_real(got), torch.view_as_real(want)
        wrong = ~torch.isfinite(got)
        if not bool(wrong.any()):
            continue
        there = want[wrong]
        name, limit = dtype_name(got.dtype), torch.finfo(got.dtype).max
        finite = torch.isfinite(there)
        if bool(finite.any()):
            value = float(there[finite].abs().max())
            if value > limit:
                text = f"overflow: the result is {value:.4g}, and {name} ends at {limit:.4g}"
                return Cause("overflow", text, value, limit)
            text = f"overflow inside the operator: the result would be {value:.4g}, within {name}'s {limit:.4g}"
            return Cause("intermediate", text, value, limit)
        what = "NaN" if bool(torch.isnan(there).any()) else "inf"
        return Cause("undefined", f"{why_undefined(op, args, what)}: float64 gives {what} of the same inputs too")
    return Cause("unknown", f"{op} is finite when run again on the same inputs")


def _rows_of_minus_inf(facts: OperatorFacts, args: tuple[Any, ...]) -> str:
    """Of a softmax, the rows that are masked altogether, in words."""
    if facts.name not in ("aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax") or args[0].ndim == 0:
        return ""
    rows = (args[0] == -math.inf).all(args[1])
    return f"{int(rows.sum())} of {rows.numel()} rows are -inf throughout: nothing is left after the mask"


def asks_for_nonfinite(value: Any) -> bool:
    """Whether a Python number among arguments is inf or NaN."""
    if isinstance(value, (list, tuple)):
        return any(map(asks_for_nonfinite, value))
    if isinstance(value, dict):
        return asks_for_nonfinite(list(value.values()))
    return isinstance(value, float) and not math.isfinite(value)


# --- what an operator cannot take, and what to do about it in the user's own code

_ROOT = ("the derivative of {op} is inf at 0",
         "safe = torch.where(x > 0, x, 1); y = torch.where(x > 0, {op}(safe, ...), 0)    # both of them")
_ARC = ("the derivative of {op} is inf at 1 and at -1", "{op}(x.clamp(-1 + 1e-6, 1 - 1e-6))")
_ZERO = ("division by 0", "clamp the divisor: y.clamp_min(1) for counts, y.clamp_min(eps) with an eps that the dtype "
         "holds")
_LOG = ("{op} of 0", "clamp before it: x.clamp_min(1e-6).log(); of probabilities use log_softmax, logsigmoid")
_POLE = ("an overflow beyond float64 too, or a pole of {op}", "clamp before it, away from where {op} is inf")
_LARGE = ("an overflow beyond float64 too",
          "clamp before it, or subtract the maximum: logsumexp, log_softmax, softplus")

# By base name: why its result, or in backward its derivative, has no value, and what helps.
_FORWARD: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("div", "reciprocal", "rsqrt", "addcdiv", "remainder", "fmod"), _ZERO),
    **dict.fromkeys(("log", "log2", "log10", "xlogy", "special_xlog1py"), _LOG),
    "logit": ("logit of 0 or 1", "clamp before it: torch.logit(x, eps=1e-6), of float16 eps=1e-3"),
    **dict.fromkeys(("exp", "exp2", "expm1", "cosh", "sinh"), _LARGE), "pow": _POLE,
    "sqrt": ("sqrt of a negative number", "clamp before it: x.clamp_min(0).sqrt()"),
    "log1p": ("log1p of -1 or less", "clamp before it: x.clamp_min(-1 + 1e-6).log1p()"),
    **dict.fromkeys(("acos", "asin"), ("{op} of more than 1", "{op}(x.clamp(-1, 1))")),
    "atanh": ("atanh of 1", "atanh(x.clamp(-1 + 1e-6, 1 - 1e-6))"),
    "acosh": ("acosh of less than 1", "acosh(x.clamp_min(1))"),
    **dict.fromkeys(("std", "std_mean", "var", "var_mean"), (
        "a deviation of 1 element, with the correction of 1", "std(correction=0), or more than one element")),
    "mean": ("a mean of no elements", "leave it out where it is empty: x.mean() if x.numel() else x.sum()"),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), (
        "the class weight of every target is 0", "skip a batch whose targets are all ignore_index, or "
        "divide reduction='sum' by the number of targets that count, at least 1")),
    "native_batch_norm": ("a variance that its dtype cannot hold", "keep BatchNorm in float32: module.float()"),
    "_ctc_loss": ("no alignment of targets and inputs", "F.ctc_loss(..., zero_infinity=True)"),
    "_weight_norm_interface": ("the norm of a row of the direction is 0: 0 / 0", "initialize what is normalized "
                               "(original1) with rows that are not 0"),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), (
        "a softmax over nothing but -inf",
        "leave one place of each row unmasked, or put torch.finfo(scores.dtype).min in place of -inf")),
}
_BACKWARD: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("sqrt", "pow", "hypot", "norm", "linalg_vector_norm", "_euclidean_dist", "_cdist_forward"), _ROOT),
    **dict.fromkeys(("acos", "asin"), _ARC),
    **dict.fromkeys(("_linalg_svd", "_linalg_eigh"), (
        "two singular values or eigenvalues are equal, and their vectors have no derivative",
        "svdvals or eigvalsh where vectors are not needed, or a little noise, so that values are distinct")),
    **{name: _FORWARD[name] for name in ("div", "log", "log2", "log10", "log1p", "rsqrt", "reciprocal", "std", "var",
                                         "atanh", "acosh", "exp", "mean")},
}


_UNTIL_ONE = ("acos", "asin", "atanh", "erfinv", "log1p", "logit")


def _base(op: str) -> str:
    return op.partition("::")[2].partition(".")[0].rstrip("_").removeprefix("_foreach_")


def poles(op: str, backward_of: str) -> tuple[float, ...]:
    """The numbers that an operator, or its derivative, may not take: 0, and of some 1 and -1."""
    return (0.0, 1.0, -1.0) if _base(backward_of or op) in _UNTIL_ONE else (0.0,)


def why_undefined(op: str, args: tuple[Any, ...], what: str) -> str:
    """Why an operator has no value, or inf, for its inputs in any precision, in words."""
    base = _base(op)
    if args and isinstance(args[0], Tensor):
        if base == "div" and not args[0].any():
            return "0 / 0"
        if base == "logit":
            return f"logit of {int(bool((args[0] == 1).any()))}"
        if base in ("log", "log2", "log10", "xlogy") and bool((args[base == "xlogy"] < 0).any()):
            return f"{base} of a negative number"
        if base.startswith("nll_loss") and not bool((args[1] != args[4]).any()):
            return f"{args[1].numel()} of {args[1].numel()} targets are {args[4]}, which is ignore_index"
    general = _POLE if what == "inf" else ("undefined in any precision", "")
    return _FORWARD.get(base, general)[0].format(op=base)


def advice_for(op: str, backward_of: str) -> tuple[str, str]:
    """Why, and what helps; of an operator in backward by its forward."""
    base = _base(backward_of or op)
    general = ("", "keep inputs that it cannot take away from it: clamp them, or torch.where on what goes in and on "
                   "what comes out")
    in_a_hook = backward_of and base not in _BACKWARD       # or in a function's own backward: it is the user's
    base = _base(op) if in_a_hook else base
    why, what = (_BACKWARD if backward_of and not in_a_hook else _FORWARD).get(base, general)
    return why.format(op=base), what.format(op=f"torch.{base}")
