"""What to do about operators that no precision helps, in the user's own code: by operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["advice_for", "poles", "why_undefined"]

_ROOT = ("the derivative of {op} is inf at 0",
         "safe = torch.where(x > 0, x, 1); y = torch.where(x > 0, {op}(safe, ...), 0)    # both of them")
_ARC = ("the derivative of {op} is inf at 1 and at -1", "{op}(x.clamp(-1 + 1e-6, 1 - 1e-6))")
_ZERO = ("division by 0", "clamp the divisor: y.clamp_min(1) for counts, y.clamp_min(eps) with an eps that the dtype "
         "holds")
_LOG = ("{op} of 0", "clamp before it: x.clamp_min(1e-6).log(); of probabilities use log_softmax, logsigmoid")
_LARGE = ("{op} grows beyond any dtype", "clamp before it, or subtract the maximum: logsumexp, log_softmax, softplus")

# By base name: why its result, or in backward its derivative, has no value, and what helps.
_FORWARD: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("div", "reciprocal", "rsqrt", "addcdiv", "remainder", "fmod"), _ZERO),
    **dict.fromkeys(("log", "log2", "log10", "xlogy", "special_xlog1py"), _LOG),
    "logit": ("logit of 0 or 1", "clamp before it: torch.logit(x, eps=1e-6), of float16 eps=1e-3"),
    **dict.fromkeys(("exp", "exp2", "expm1", "cosh", "sinh", "pow"), _LARGE),
    "sqrt": ("sqrt of a negative number", "clamp before it: x.clamp_min(0).sqrt()"),
    "log1p": ("log1p of -1 or less", "clamp before it: x.clamp_min(-1 + 1e-6).log1p()"),
    "acos": ("acos of more than 1", "acos(x.clamp(-1, 1))"),
    "asin": ("asin of more than 1", "asin(x.clamp(-1, 1))"),
    "atanh": ("atanh of 1", "atanh(x.clamp(-1 + 1e-6, 1 - 1e-6))"),
    "acosh": ("acosh of less than 1", "acosh(x.clamp_min(1))"),
    "std": ("a deviation of 1 element, with the correction of 1", "std(correction=0), or more than one element"),
    "mean": ("a mean of no elements", "leave it out where it is empty: x.mean() if x.numel() else x.sum()"),
    "nll_loss_forward": ("a mean over no target", "skip a batch whose targets are all ignore_index, or divide "
                         "reduction='sum' by the number of targets that count, at least 1; look at weight"),
    "native_batch_norm": ("a variance that its dtype cannot hold", "keep BatchNorm in float32: module.float()"),
    "_ctc_loss": ("no alignment of targets and inputs", "F.ctc_loss(..., zero_infinity=True)"),
    "_weight_norm_interface": ("the norm of a row of the direction is 0: 0 / 0", "initialize what is normalized "
                               "(original1) with rows that are not 0"),
    "_softmax": ("a softmax over nothing but -inf", "leave one place of each row unmasked, or put "
                 "torch.finfo(scores.dtype).min in place of -inf"),
}
_FORWARD["var"] = _FORWARD["var_mean"] = _FORWARD["std_mean"] = _FORWARD["std"]
_FORWARD["_log_softmax"] = _FORWARD["_safe_softmax"] = _FORWARD["_softmax"]
_FORWARD["nll_loss2d_forward"] = _FORWARD["nll_loss_forward"]
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


def why_undefined(op: str, args: tuple[Any, ...] = ()) -> str:
    """Why an operator has no value for its inputs, in words."""
    base = _base(op)
    if args and isinstance(args[0], Tensor):
        if base == "div" and not args[0].any():
            return "0 / 0"
        if base == "logit":
            return f"logit of {int(bool((args[0] == 1).any()))}"
        if base in ("log", "log2", "log10", "xlogy") and bool((args[base == "xlogy"] < 0).any()):
            return f"{base} of a negative number"
    return _FORWARD.get(base, ("undefined in any precision", ""))[0].format(op=base)


def advice_for(op: str, backward_of: str) -> tuple[str, str]:
    """Why, and what helps; of an operator in backward by its forward."""
    base = _base(backward_of or op)
    general = ("", "keep inputs that it cannot take away from it: clamp them, or torch.where on what goes in and on "
                   "what comes out")
    in_a_hook = backward_of and base not in _BACKWARD       # or in a function's own backward: it is the user's
    base = _base(op) if in_a_hook else base
    why, what = (_BACKWARD if backward_of and not in_a_hook else _FORWARD).get(base, general)
    return why.format(op=base), what.format(op=f"torch.{base}")
