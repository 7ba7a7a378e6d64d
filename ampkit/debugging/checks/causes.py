"""The cause of a non-finite result: the operator runs again in float64 on the same inputs.

Operators that communicate with other processes, or that need memory in a private format, do not run again. The second
half of the file lists the inputs for which operators are undefined, with recommendations for the user's code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampkit.debugging.finding import Cause
from ampkit.debugging.observe.operator_properties import OperatorProperties, tensors_in
from ampkit.debugging.observe.rerun import run_in_float64
from ampkit.dtypes import dtype_name

CONSTANT = Cause("constant", "written explicitly in the code")
RECEIVED = Cause("received", "received from another rank: this rank sent finite values")
UNINITIALIZED = Cause("uninitialized", "memory was read before anything was written to it")
PROPAGATED = Cause("propagated", "its inputs are not finite")
SKIPPED = Cause("skipped", "it was in a gradient of a step that the scaler skipped")


def find_cause(
    op: OperatorProperties,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[Tensor],
    *,
    from_inf: bool,
) -> Cause:
    """Return the cause of the non-finite values in `outputs`, given the arguments as they were before the call.

    `from_inf`: the arguments contain inf, and no NaN.
    """
    floats = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
    if floats and not any(tensor.numel() for tensor in floats):
        return Cause("undefined", "undefined in any precision: the inputs have no elements")
    if from_inf:
        rows = _rows_of_minus_inf(op, args)
        is_minus_inf = not any(bool((tensor == math.inf).any()) for tensor in floats)
        inf = "-inf" if is_minus_inf else "inf"
        text = f"an input has {inf}: inf - inf, 0 * inf and inf / inf are NaN in any precision"
        return Cause("from inf", rows or text, is_minus_inf=is_minus_inf and not rows)
    if op.communicates or op.opaque_state:
        return Cause("unknown", f"{op.name} cannot be run again to compare with float64")
    try:
        references = run_in_float64(op, args, kwargs)
    except Exception as error:  # operators without float64 raise many kinds of errors
        return Cause("unknown", f"{op.name} does not run in float64: {str(error).splitlines()[0][:100]}")
    # The first non-finite output distinguishes an overflow from values that are undefined in any precision.
    for output, reference in zip(outputs, references, strict=False):
        if output.shape != reference.shape:
            continue
        if output.is_complex():
            output, reference = torch.view_as_real(output), torch.view_as_real(reference)
        nonfinite = ~torch.isfinite(output)
        if not bool(nonfinite.any()):
            continue
        values = reference[nonfinite]
        name, limit = dtype_name(output.dtype), torch.finfo(output.dtype).max
        finite = torch.isfinite(values)
        if bool(finite.any()):
            value = float(values[finite].abs().max())
            inside = "" if value > limit else " inside the operator"
            text = f"overflow{inside}: the exact result is {value:.4g}; the {name} maximum is {limit:.4g}"
            return Cause("intermediate" if inside else "overflow", text, value, limit)
        result = "NaN" if bool(torch.isnan(values).any()) else "inf"
        return Cause("undefined", f"{why_undefined(op.name, args, result)}: in float64 the result is {result} too")
    return Cause("unknown", f"{op.name} is finite when run again on the same inputs")


def _rows_of_minus_inf(op: OperatorProperties, args: tuple[Any, ...]) -> str:
    """Return the rows of a softmax that are -inf throughout, or that have +inf, in words; "" for other operators."""
    if op.name not in ("aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax") or args[0].ndim == 0:
        return ""
    rows = (args[0] == -math.inf).all(args[1])
    if not bool(rows.any()):
        above = int((args[0] == math.inf).any(args[1]).sum())
        return f"{above} of {rows.numel()} rows have +inf: their elements overflowed before" if above else ""
    return f"{int(rows.sum())} of {rows.numel()} rows are -inf throughout: the mask leaves no element"


def writes_nonfinite(value: Any) -> bool:
    """Return whether the arguments contain a Python number that is inf or NaN."""
    if isinstance(value, (list, tuple)):
        return any(map(writes_nonfinite, value))
    if isinstance(value, dict):
        return writes_nonfinite(list(value.values()))
    return isinstance(value, float) and not math.isfinite(value)


# --- inputs for which an operator is undefined, and recommendations for the user's code

_ROOT = (
    "the derivative of {op} is inf at 0",
    "safe = torch.where(x > 0, x, 1); y = torch.where(x > 0, {op}(safe, ...), 0)    # both of them",
)
_ARC = ("the derivative of {op} is inf at 1 and at -1", "{op}(x.clamp(-1 + 1e-6, 1 - 1e-6))")
_ZERO = (
    "division by 0",
    "clamp the divisor: y.clamp_min(1) for counts, y.clamp_min(eps) with an eps that is not 0 in the dtype",
)
_LOG = ("{op} of 0", "clamp before it: x.clamp_min(1e-6).log(); for probabilities use log_softmax, logsigmoid")
_POLE = ("an overflow beyond float64 too, or a pole of {op}", "clamp its input away from the values where {op} is inf")
_LARGE = (
    "an overflow beyond float64 too",
    "clamp before it, or subtract the maximum: logsumexp, log_softmax, softplus",
)
_GENERAL = ("", "exclude inputs for which it is undefined: clamp them, or torch.where on both its input and its result")

# By base name of the operator: why its result, or its derivative, is undefined, and a recommendation.
_FORWARD: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("div", "reciprocal", "rsqrt", "addcdiv", "remainder", "fmod"), _ZERO),
    **dict.fromkeys(("log", "log2", "log10", "xlogy", "special_xlog1py"), _LOG),
    "logit": ("logit of 0 or 1", "clamp before it: torch.logit(x, eps=1e-6), in float16 eps=1e-3"),
    **dict.fromkeys(("exp", "exp2", "expm1", "cosh", "sinh"), _LARGE),
    "pow": _POLE,
    "sqrt": ("sqrt of a negative number", "clamp before it: x.clamp_min(0).sqrt()"),
    "log1p": ("log1p of -1 or less", "clamp before it: x.clamp_min(-1 + 1e-6).log1p()"),
    **dict.fromkeys(("acos", "asin"), ("{op} of more than 1", "{op}(x.clamp(-1, 1))")),
    "atanh": ("atanh of 1", "atanh(x.clamp(-1 + 1e-6, 1 - 1e-6))"),
    "acosh": ("acosh of less than 1", "acosh(x.clamp_min(1))"),
    **dict.fromkeys(
        ("std", "std_mean", "var", "var_mean"),
        ("the deviation of 1 element with correction=1", "std(correction=0), or more than one element"),
    ),
    "mean": ("the mean of no elements", "leave it out for an empty tensor: x.mean() if x.numel() else x.sum()"),
    **dict.fromkeys(
        ("nll_loss_forward", "nll_loss2d_forward"),
        (
            "the class weight of every target is 0",
            "skip a batch whose targets are all ignore_index, or "
            "divide reduction='sum' by the number of targets that count, at least by 1",
        ),
    ),
    "native_batch_norm": ("the variance overflows its dtype", "keep BatchNorm in float32: module.float()"),
    "_ctc_loss": ("no alignment of targets and inputs", "F.ctc_loss(..., zero_infinity=True)"),
    "_weight_norm_interface": (
        "the norm of a row of the direction is 0: 0 / 0",
        "initialize the direction (original1) with rows that are not 0",
    ),
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "_safe_softmax"),
        (
            "a softmax over nothing but -inf",
            "leave one element of each row unmasked, or use torch.finfo(scores.dtype).min in place of -inf",
        ),
    ),
}
# For backward, if its reason is not the one of forward.
_BACKWARD: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("sqrt", "pow", "hypot", "norm", "linalg_vector_norm", "_euclidean_dist", "_cdist_forward"), _ROOT),
    **dict.fromkeys(("acos", "asin"), _ARC),
    **dict.fromkeys(
        ("_linalg_svd", "_linalg_eigh"),
        (
            "two singular values or eigenvalues are equal, and their vectors have no derivative",
            "svdvals or eigvalsh if vectors are not needed, or add a little noise, so that values are distinct",
        ),
    ),
}


def _base(op: str) -> str:
    return op.partition("::")[2].partition(".")[0].rstrip("_").removeprefix("_foreach_")


def why_undefined(op: str, args: tuple[Any, ...], result: str) -> str:
    """Return why an operator's result is `result`, "NaN" or "inf", for its inputs in any precision, in words."""
    base = _base(op)
    if args and isinstance(args[0], Tensor):
        if base == "div" and not args[0].any():
            return "0 / 0"
        if base == "logit":
            return "logit of 1" if bool((args[0] == 1).any()) else "logit of 0"
        if base in ("log", "log2", "log10", "xlogy"):
            logged = args[1] if base == "xlogy" else args[0]
            if bool((logged < 0).any()):
                return f"{base} of a negative number"
        if base.startswith("nll_loss") and not bool((args[1] != args[4]).any()):
            return f"{args[1].numel()} of {args[1].numel()} targets are {args[4]}, which is ignore_index"
    general = _POLE if result == "inf" else ("undefined in any precision", "")
    return _FORWARD.get(base, general)[0].format(op=base)


def advice_for(op: str, backward_of: str) -> tuple[str, str]:
    """Return why an operator, in backward its forward operator, is undefined, and a recommendation."""
    base = _base(backward_of or op)
    entry = (_BACKWARD.get(base) if backward_of else None) or _FORWARD.get(base)
    if entry is None:  # the user's own operator, in a hook or in a custom function's backward
        base = _base(op)
        entry = _FORWARD.get(base, _GENERAL)
    why, recommendation = entry
    return why.format(op=base), recommendation.format(op=f"torch.{base}")
