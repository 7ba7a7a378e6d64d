"""What an opt_level means, which properties may be overridden at it, and why the others may not.

Pure: names and numbers in, a frozen description out. The levels and properties are Apex's; where a level's
16-bit type is bfloat16, the loss scale defaults to 1, because bfloat16 has float32's range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ampkit.scaler.loss_scale import SMALLEST_SCALE, DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale

HALVES = (torch.float16, torch.bfloat16)


class Level(NamedTuple):
    """What a level does when nothing is overridden."""

    casts_model: bool
    has_region: bool
    keeps_batch_norm: bool
    has_masters: bool
    scale: float | str | None       # None: losses and gradients are left alone altogether
    what: str


LEVELS: dict[str, Level] = {
    "O0": Level(False, False, False, False, None, "float32 throughout, the baseline to compare with"),
    "O1": Level(False, True, False, False, "dynamic", "float32 weights, forward in an autocast region"),
    "O2": Level(True, False, True, True, "dynamic", "16-bit model, batch norms and master weights in float32"),
    "O3": Level(True, False, False, False, 1.0, "16-bit model and nothing else, the speed to compare with"),
}


@dataclass(frozen=True)
class LevelOptions:
    """A level with its overrides resolved.

    `dtype` is the 16-bit type of the region or the model; `loss_scale` None means that there is no scaler.
    """

    opt_level: str
    dtype: torch.dtype
    casts_model: bool
    has_region: bool
    keep_batchnorm_fp32: bool
    master_weights: bool
    loss_scale: LossScale | None
    cast_model_outputs: torch.dtype
    num_losses: int

    def __str__(self) -> str:
        low = "" if self.opt_level == "O0" else f" in {str(self.dtype).removeprefix('torch.')}"
        scale = "none" if self.loss_scale is None else self.loss_scale.kind
        model = ""
        if self.casts_model:
            model = f"keep_batchnorm_fp32={self.keep_batchnorm_fp32}, master_weights={self.master_weights}, "
        return f"{self.opt_level}{low}: {LEVELS[self.opt_level].what} ({model}loss scale {scale})"


def resolve(
    opt_level: Any,
    default_dtype: torch.dtype,
    *,
    dtype: Any = None,
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    cast_model_outputs: Any = None,
    num_losses: Any = 1,
    min_loss_scale: Any = None,
    max_loss_scale: Any = None,
) -> LevelOptions:
    """The options of a level with these overrides, None where its default is meant.

    Raises `ValueError` or `TypeError` that names the property, says why it makes no sense and what does.
    """
    level = LEVELS[_checked_level(opt_level)]
    low = _low_dtype(opt_level, level, dtype, cast_model_type, default_dtype)
    _check_patching(opt_level, patch_torch_functions)
    if cast_model_outputs is not None and not _is_float(cast_model_outputs):
        raise TypeError(f"cast_model_outputs is {cast_model_outputs!r}; expected None or a dtype such as torch.float16")
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"num_losses is {num_losses!r}; expected how many losses have scales of their own, 1 or more")
    return LevelOptions(
        opt_level,
        low,
        level.casts_model,
        level.has_region,
        _keep_batchnorm(opt_level, level, keep_batchnorm_fp32),
        _masters(opt_level, level, master_weights),
        _loss_scale(level, low, loss_scale, min_loss_scale, max_loss_scale),
        torch.float32 if cast_model_outputs is None else cast_model_outputs,
        num_losses,
    )


def _checked_level(opt_level: Any) -> str:
    if isinstance(opt_level, str) and opt_level in LEVELS:
        return opt_level
    guess = str(opt_level).upper().replace("0", "O", 1)
    hint = f": did you mean {guess!r}, with the letter O?" if guess in LEVELS else ""
    raise ValueError(f"unknown opt_level {opt_level!r}; expected 'O0', 'O1', 'O2' or 'O3'{hint}")


def _low_dtype(opt_level: str, level: Level, dtype: Any, cast_model_type: Any, default: torch.dtype) -> torch.dtype:
    if dtype is not None and dtype not in HALVES:
        raise ValueError(f"dtype is {dtype!r}; expected torch.float16 or torch.bfloat16, the 16-bit type of the level")
    if opt_level == "O0" and (dtype is not None or cast_model_type not in (None, False, torch.float32)):
        raise ValueError(
            f"O0 computes in float32, so that {dtype or cast_model_type} makes no sense; use opt_level 'O2' or 'O3' "
            f"to convert the model, 'O1' to cast around its operators"
        )
    if opt_level == "O1" and cast_model_type not in (None, False, torch.float32):
        raise ValueError(
            f"O1 leaves the weights in float32 and casts around operators, so that cast_model_type="
            f"{cast_model_type} makes no sense; pass dtype={cast_model_type} for what operators are cast to, or use "
            f"opt_level 'O2' or 'O3' to convert the model"
        )
    if not level.casts_model:
        return default if dtype is None else dtype
    if cast_model_type is not None and cast_model_type not in HALVES:
        raise ValueError(
            f"{opt_level} converts the model, so that cast_model_type={cast_model_type} makes no sense; expected "
            f"torch.float16 or torch.bfloat16; use opt_level 'O0' for float32"
        )
    if None not in (dtype, cast_model_type) and dtype is not cast_model_type:
        raise ValueError(f"dtype={dtype} and cast_model_type={cast_model_type} are two names of one property; pass one")
    return dtype or cast_model_type or default


def _check_patching(opt_level: str, value: Any) -> None:
    wanted = opt_level == "O1"
    if value is not None and bool(value) is not wanted:
        raise ValueError(
            f"patch_torch_functions={value} makes no sense at {opt_level}: ampkit patches nothing, and casts around "
            f"operators at O1 only; leave it out, or choose opt_level {'O0' if wanted else 'O1'!r}"
        )


def _keep_batchnorm(opt_level: str, level: Level, value: Any) -> bool:
    if isinstance(value, str) and value in ("True", "False"):
        value = value == "True"     # as argparse hands it over
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"keep_batchnorm_fp32 is {value!r}; expected True, False, 'True', 'False' or None")
    if not level.casts_model and value is not None:
        raise ValueError(
            f"keep_batchnorm_fp32={value} makes no sense at {opt_level}, which leaves every weight in float32, batch "
            f"norms included; leave it out, or use opt_level 'O2' or 'O3'"
        )
    return level.keeps_batch_norm if value is None else value


def _masters(opt_level: str, level: Level, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"master_weights is {value!r}; expected True, False or None")
    if not level.casts_model and value:
        raise ValueError(
            f"master_weights=True makes no sense at {opt_level}: its weights are float32 and their own masters; "
            f"leave it out, or use opt_level 'O2'"
        )
    return level.has_masters if value is None else value


def _loss_scale(level: Level, low: torch.dtype, value: Any, least: Any, most: Any) -> LossScale | None:
    if value is None:
        value = level.scale
        if value == "dynamic" and low is torch.bfloat16:
            value = 1.0
    if value is None:
        return None
    if isinstance(value, DynamicLossScale | StaticLossScale):
        return value
    if value == "dynamic":
        return DynamicLossScale(
            init_scale=min(2.0**16, 2.0**24 if most is None else float(most)),
            min_scale=SMALLEST_SCALE if least is None else float(least),
            max_scale=2.0**24 if most is None else float(most),
        )
    number = _number(value)
    if least is not None:
        raise ValueError(f"min_loss_scale={least} makes no sense beside the static loss_scale={value}; leave one out")
    if level.scale is None and number == 1.0:
        return None
    return NoOpLossScale() if number == 1.0 else StaticLossScale(number)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"loss_scale is {value!r}; expected 'dynamic', a number, or such as DynamicLossScale()")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"loss_scale is {value!r}; expected 'dynamic' or a number such as 128.0") from None
    if not 0.0 < number < float("inf"):
        raise ValueError(
            f"loss_scale is {value!r}; expected a positive number, or 'dynamic', which older scripts write as 0"
        )
    return number


def _is_float(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point
