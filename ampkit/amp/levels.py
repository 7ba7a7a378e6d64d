"""What an opt_level means, which of its properties may be overridden, and which models and optimizers it takes.

Pure: nothing here changes anything. The levels and properties are Apex's; where a level's 16-bit type is bfloat16, the
loss scale defaults to 1, because bfloat16 has float32's range. `amp.initialize` carries a level out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import Module
from torch.optim import Optimizer

from ampkit.dtypes import REAL_FLOATS, SIXTEEN_BIT, as_dtype
from ampkit.gradients.masters import masters_of
from ampkit.half_precision.boundary import refuse_bounded
from ampkit.scaler.loss_scale import SMALLEST_SCALE, DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


_CASTING = ("dtype", "keep_batchnorm_fp32", "master_weights")


class Level(NamedTuple):
    """What a level does when nothing is overridden, and what of it may be."""

    what: str
    casts_model: bool = False
    has_region: bool = False
    keep_batchnorm_fp32: bool = False
    master_weights: bool = False
    scale: float | str | None = "dynamic"       # None: losses and gradients are left alone altogether
    inputs: torch.dtype | None = None           # what floating-point inputs of a float32 model are cast to
    takes: tuple[str, ...] = ()


LEVELS: dict[str, Level] = {
    "O0": Level("float32 throughout", scale=None, inputs=torch.float32),
    "O1": Level(
        "float32 weights, forward in an autocast region", has_region=True,
        takes=("dtype", "policy", "patch_torch_functions"),
    ),
    "O2": Level(
        "a 16-bit model with batch norms and master weights in float32", casts_model=True, keep_batchnorm_fp32=True,
        master_weights=True, takes=_CASTING,
    ),
    "O3": Level("a 16-bit model and nothing else", casts_model=True, scale=1.0, takes=_CASTING),
}


class LevelOptions(NamedTuple):
    """A level with its overrides resolved.

    `dtype` is the 16-bit type of the region or the model; `inputs` what the model's inputs are cast to, None if they
    are not; `loss_scale` None means that there is no scaler.
    """

    level: Level
    dtype: torch.dtype
    inputs: torch.dtype | None
    keep_batchnorm_fp32: bool
    master_weights: bool
    loss_scale: LossScale | None
    cast_model_outputs: torch.dtype
    num_losses: int


def resolve(opt_level: Any, default_dtype: torch.dtype, **overrides: Any) -> LevelOptions:
    """The options of a level with these overrides, by the names of `amp.Overrides`; None stands for its default.

    Raises `ValueError` or `TypeError` that names the property, says why it makes no sense and what does.
    """
    level = LEVELS[_checked_level(opt_level)]
    given = {name: value for name, value in overrides.items() if value is not None}
    for name in {"dtype", "cast_model_outputs", "cast_model_type"} & set(given):
        given[name] = as_dtype(given[name])
    level = _as_apex_casts(opt_level, level, given)
    batch_norms = given.get("keep_batchnorm_fp32", level.keep_batchnorm_fp32)
    batch_norms = {"True": True, "False": False}.get(batch_norms, batch_norms)      # as argparse hands it over
    if not isinstance(batch_norms, bool):
        raise TypeError(f"keep_batchnorm_fp32 is {batch_norms!r}; expected True, False, 'True', 'False' or None")
    masters = given.get("master_weights", level.master_weights)
    if not isinstance(masters, bool):
        raise TypeError(f"master_weights is {masters!r}; expected True, False or None")
    # What says what the level does anyway is harmless.
    for name, harmless in (
        ("patch_torch_functions", given.get("patch_torch_functions") is False),
        ("dtype", False),
        ("keep_batchnorm_fp32", batch_norms is level.keep_batchnorm_fp32),
        ("master_weights", masters is level.master_weights),
        ("policy", False),
    ):
        if name in given and name not in level.takes and not harmless:
            others = " or ".join(repr(other) for other in LEVELS if name in LEVELS[other].takes)
            raise _senseless(name, given[name], opt_level, others)
    outputs, num_losses = given.get("cast_model_outputs", torch.float32), given.get("num_losses", 1)
    if not getattr(outputs, "is_floating_point", False):
        raise TypeError(f"cast_model_outputs is {outputs!r}; expected None or a dtype such as torch.float16")
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"num_losses is {num_losses!r}; expected how many losses have scales of their own, 1 or more")
    low = given.get("dtype", default_dtype)
    if low not in SIXTEEN_BIT:
        raise ValueError(f"dtype is {low!r}; expected torch.float16 or torch.bfloat16; opt_level 'O0' is float32")
    masters = masters and level.casts_model
    inputs = low if level.casts_model else level.inputs
    return LevelOptions(level, low, inputs, batch_norms, masters, _loss_scale(level, low, given), outputs, num_losses)


def _as_apex_casts(opt_level: str, level: Level, given: dict[str, Any]) -> Level:
    """The level after Apex's overrides of what it casts; `given` has a 16-bit `cast_model_type` as its `dtype`."""
    patches = given.get("patch_torch_functions", level.has_region)
    if not isinstance(patches, bool):
        raise TypeError(f"patch_torch_functions is {patches!r}; expected True, False or None")
    level = level._replace(has_region=patches and level.has_region)
    to = given.get("cast_model_type")
    if to is None:
        return level
    if to is False or to is torch.float32:      # the model keeps its float32 weights
        return level._replace(casts_model=False, inputs=to or None)
    if to not in SIXTEEN_BIT:
        raise ValueError(f"cast_model_type is {to!r}; expected torch.float16, torch.bfloat16, torch.float32 or False")
    if opt_level == "O1":
        raise _senseless("cast_model_type", to, opt_level, "'O2' or 'O3'")
    if given.setdefault("dtype", to) is not to:
        raise ValueError(f"cast_model_type={to} and dtype={given['dtype']} are one property; leave one out")
    return LEVELS["O3"]._replace(scale=None) if opt_level == "O0" else level


def _senseless(name: str, value: Any, opt_level: str, others: str) -> ValueError:
    return ValueError(
        f"{name}={value} makes no sense at {opt_level} ({LEVELS[opt_level].what}); leave it out, or use opt_level "
        f"{others}"
    )


def _checked_level(opt_level: Any) -> str:
    if isinstance(opt_level, str) and opt_level in LEVELS:
        return opt_level
    guess = str(opt_level).upper().replace("0", "O", 1)
    hint = f": did you mean {guess!r}, with the letter O?" if guess in LEVELS else ""
    if isinstance(opt_level, bool):
        hint = f"; Apex takes `enabled` there: pass enabled={opt_level}"
    raise ValueError(f"unknown opt_level {opt_level!r}; expected 'O0', 'O1', 'O2' or 'O3'{hint}")


def _loss_scale(level: Level, low: torch.dtype, given: dict[str, Any]) -> LossScale | None:
    value, least, most = given.get("loss_scale"), given.get("min_loss_scale"), given.get("max_loss_scale", 2.0**24)
    if value is None:
        value = 1.0 if level.scale == "dynamic" and low is torch.bfloat16 else level.scale
    if value is None or isinstance(value, DynamicLossScale | StaticLossScale):
        return value
    if value == "dynamic":
        return DynamicLossScale(
            init_scale=min(2.0**16, float(most)), max_scale=float(most),
            min_scale=SMALLEST_SCALE if least is None else float(least),
        )
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"loss_scale is {value!r}; expected 'dynamic', a number, or such as DynamicLossScale()")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0.0 < number < math.inf:
        raise ValueError(
            f"loss_scale is {value!r}; expected a positive number, or 'dynamic', which older scripts write as 0"
        )
    if least is not None:
        raise ValueError(f"min_loss_scale={least} makes no sense beside the static loss_scale={value}; leave one out")
    if number != 1.0:
        return StaticLossScale(number)
    return None if level.scale is None else NoOpLossScale()


def as_list(value: Any, cls: type, name: str, what: str) -> list[Any]:
    """One object or a list or tuple of them, as a list. Raises `TypeError` for anything else."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    for item in items:
        if not isinstance(item, cls):
            raise TypeError(f"{name} holds a {type(item).__name__}; expected {what}, or a list of them")
    if len({id(item) for item in items}) != len(items):
        raise ValueError(f"{name} holds one object twice; expected each once")
    return items


def bare_optimizers(value: Any) -> list[Optimizer]:
    """One optimizer or a list of them, without what wraps them.

    A wrapper in the manner of Apex's LARC is no `Optimizer` itself: it holds one as `optim` or `optimizer`, shares its
    parameter groups, changes gradients in its `step` and calls the other's.
    """
    items = []
    for item in value if isinstance(value, list | tuple) else [value]:
        inner: Any = getattr(item, "optim", None) or getattr(item, "optimizer", None)
        wraps = not isinstance(item, Optimizer) and isinstance(inner, Optimizer)
        shares = wraps and getattr(item, "param_groups", None) is inner.param_groups
        items.append(inner if shares else item)
    what = "a torch.optim.Optimizer, or an object that holds one as `optim` and shares its param_groups"
    return as_list(items, Optimizer, "optimizers", what)


def check_model(model: Module, *, casts_model: bool) -> None:
    """Refuse a model that is wrapped, converted or initialized already, or sharded before it is to be converted."""
    name = type(model).__name__
    if isinstance(model, _WRAPPERS) or name == "FullyShardedDataParallel":
        raise RuntimeError(
            f"the model is wrapped in {name} already; call amp.initialize on the bare model first, and wrap what "
            f"it returns: {name}(model, ...)"
        )
    if casts_model and any("FSDPModule" in [base.__name__ for base in type(m).__mro__] for m in model.modules()):
        raise RuntimeError(
            f"this {name} is sharded by fully_shard, which keeps float32 shards and casts them itself; use opt_level "
            f"'O1', or fully_shard's MixedPrecisionPolicy with ampkit.GradScaler"
        )
    refuse_bounded(model)
    # float64 buffers are no sign of a float64 model: .double() would have converted its parameters too.
    for kind, tensors, allowed in (
        ("parameter", model.named_parameters(), (torch.float32,)),
        ("buffer", model.named_buffers(), (torch.float32, torch.float64)),
    ):
        for path, tensor in tensors:
            if tensor.dtype in REAL_FLOATS and tensor.dtype not in allowed:
                raise RuntimeError(
                    f"{kind} {path} is {tensor.dtype}; expected a float32 model at every opt_level: leave out "
                    f".half(), .bfloat16() or .double() (or call model.float()), and let opt_level convert it"
                )


def check_optimizers(models: Sequence[Module], optimizers: Sequence[Optimizer], *, is_scaled: bool) -> None:
    """Refuse an optimizer that has master weights, or that holds no parameter of the models.

    Where losses are scaled, refuse a parameter of two: each would unscale its gradient, and step a master of its own.
    """
    theirs = {id(param): name for model in models for name, param in model.named_parameters()}
    owners: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        params = [id(param) for group in optimizer.param_groups for param in group["params"]]
        if masters_of(optimizer) is not None:
            raise RuntimeError(
                f"this {type(optimizer).__name__} has master weights already; pass initialize a bare optimizer, and "
                f"let opt_level 'O2' make them"
            )
        if theirs.keys().isdisjoint(params):
            raise RuntimeError(
                f"{type(optimizer).__name__} holds no parameter of the models given; make the optimizer from the model "
                f"that is passed along with it, after anything that replaces its parameters"
            )
        for param in params if is_scaled else ():
            if owners.setdefault(param, optimizer) is not optimizer:
                raise RuntimeError(
                    f"parameter {theirs.get(param, 'of no model')} is in two optimizers; give it to one of them"
                )
