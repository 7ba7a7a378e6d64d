"""The meaning of O0 to O3, which of their properties may be overridden, and which models and optimizers they accept.

Data and checks, without side effects; `amp.initialize` carries a level out. Levels and properties are Apex's. For
bfloat16, which has float32's range, the loss scale defaults to 1.
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
from ampkit.gradients.collect import masters_of
from ampkit.half_precision.boundary import refuse_bounded
from ampkit.half_precision.half import Buffers
from ampkit.scaler.loss_scale import SMALLEST_SCALE, DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_CASTING = ("dtype", "keep_batchnorm_fp32", "master_weights", "buffers")


class Level(NamedTuple):
    """The defaults of a level, and the names of the properties that may be overridden."""

    description: str
    casts_model: bool = False
    has_region: bool = False
    keep_batchnorm_fp32: bool = False
    master_weights: bool = False
    scale: float | str | None = "dynamic"  # None: no scale, and no step is skipped
    inputs: torch.dtype | None = None  # the dtype of floating-point inputs of a float32 model
    overridable: tuple[str, ...] = ()


LEVELS: dict[str, Level] = {
    "O0": Level("float32 throughout", scale=None, inputs=torch.float32),
    "O1": Level(
        "float32 weights, forward in an autocast region",
        has_region=True,
        overridable=("dtype", "policy", "patch_torch_functions"),
    ),
    "O2": Level(
        "a 16-bit model with batch norms and master weights in float32",
        casts_model=True,
        keep_batchnorm_fp32=True,
        master_weights=True,
        overridable=_CASTING,
    ),
    "O3": Level("a 16-bit model and nothing else", casts_model=True, scale=1.0, overridable=_CASTING),
}


class LevelOptions(NamedTuple):
    """A level with its overrides resolved.

    `dtype` is the 16-bit type of the region or the model. `inputs` is the dtype that the model's inputs are cast to;
    None: no cast. `loss_scale` is None for no scaler.
    """

    level: Level
    dtype: torch.dtype
    inputs: torch.dtype | None
    keep_batchnorm_fp32: bool
    master_weights: bool
    buffers: Buffers
    loss_scale: LossScale | None
    cast_model_outputs: torch.dtype
    num_losses: int


def resolve(opt_level: Any, default_dtype: torch.dtype, **overrides: Any) -> LevelOptions:
    """Return the options of a level with overrides, named as in `amp.frontend.Overrides`; None means the default.

    Raises `ValueError` or `TypeError` that names the property, its value and the accepted values.
    """
    if not isinstance(opt_level, str) or opt_level not in LEVELS:
        raise ValueError(f"unknown opt_level {opt_level!r}; expected 'O0', 'O1', 'O2' or 'O3', with the letter O")
    given = {name: value for name, value in overrides.items() if value is not None}
    for name in {"dtype", "cast_model_outputs", "cast_model_type"} & set(given):
        given[name] = as_dtype(given[name])
    level = _as_apex_casts(opt_level, LEVELS[opt_level], given)
    for name in ("keep_batchnorm_fp32", "master_weights"):
        if not isinstance(given.setdefault(name, getattr(level, name)), bool):
            raise TypeError(f"{name} is {given[name]!r}; expected True, False or None")
    # An override that repeats the level's value is accepted at every level.
    for name, of_level in (
        ("patch_torch_functions", False),
        ("dtype", None),
        ("keep_batchnorm_fp32", level.keep_batchnorm_fp32),
        ("master_weights", level.master_weights),
        ("buffers", None),
        ("policy", None),
    ):
        if given.get(name, of_level) is not of_level and name not in level.overridable:
            others = " or ".join(repr(other) for other in LEVELS if name in LEVELS[other].overridable)
            raise _senseless(name, given[name], opt_level, others)
    outputs, num_losses = given.get("cast_model_outputs", torch.float32), given.get("num_losses", 1)
    if not getattr(outputs, "is_floating_point", False):
        raise TypeError(f"cast_model_outputs is {outputs!r}; expected None or a dtype such as torch.float16")
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"num_losses is {num_losses!r}; expected the number of losses with separate scales, 1 or more")
    dtype = given.get("dtype", default_dtype)
    if dtype not in SIXTEEN_BIT:
        raise ValueError(f"dtype is {dtype!r}; expected torch.float16 or torch.bfloat16; opt_level 'O0' is float32")
    return LevelOptions(
        level,
        dtype,
        dtype if level.casts_model else level.inputs,
        given["keep_batchnorm_fp32"],
        given["master_weights"] and level.casts_model,
        given.get("buffers", "exact"),
        _loss_scale(level, dtype, given),
        outputs,
        num_losses,
    )


def _as_apex_casts(opt_level: str, level: Level, given: dict[str, Any]) -> Level:
    """Return the level after `patch_torch_functions` and `cast_model_type`, whose 16-bit type becomes `dtype`."""
    patches = given.get("patch_torch_functions", level.has_region)
    if not isinstance(patches, bool):
        raise TypeError(f"patch_torch_functions is {patches!r}; expected True, False or None")
    level = level._replace(has_region=patches and level.has_region)
    model_type = given.get("cast_model_type")
    if model_type is None:
        return level
    if model_type is False or model_type is torch.float32:  # the model keeps its float32 weights
        return level._replace(casts_model=False, inputs=model_type or None)
    if model_type not in SIXTEEN_BIT:
        raise ValueError(
            f"cast_model_type is {model_type!r}; expected torch.float16, torch.bfloat16, torch.float32 or False"
        )
    if opt_level == "O1":
        raise _senseless("cast_model_type", model_type, opt_level, "'O2' or 'O3'")
    if given.setdefault("dtype", model_type) is not model_type:
        raise ValueError(f"cast_model_type={model_type} and dtype={given['dtype']} are one property; leave one out")
    return LEVELS["O3"]._replace(scale=None) if opt_level == "O0" else level


def _senseless(name: str, value: Any, opt_level: str, others: str) -> ValueError:
    return ValueError(
        f"{name}={value} makes no sense at {opt_level} ({LEVELS[opt_level].description}); leave it out, or use "
        f"opt_level {others}"
    )


def _loss_scale(level: Level, dtype: torch.dtype, given: dict[str, Any]) -> LossScale | None:
    """Return the strategy of the loss scale; None for no scaler."""
    scale = given.get("loss_scale")
    smallest, largest = given.get("min_loss_scale"), given.get("max_loss_scale", 2.0**24)
    if scale is None:
        scale = 1.0 if level.scale == "dynamic" and dtype is torch.bfloat16 else level.scale
    if scale is None or isinstance(scale, DynamicLossScale | StaticLossScale):
        return scale
    if scale == "dynamic":
        return DynamicLossScale(
            init_scale=min(2.0**16, float(largest)),
            max_scale=float(largest),
            min_scale=SMALLEST_SCALE if smallest is None else float(smallest),
        )
    try:
        number = math.nan if isinstance(scale, bool) else float(scale)  # Apex's scripts pass strings from argparse
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 < number < math.inf:
        raise ValueError(
            f"loss_scale is {scale!r}; expected a positive number, 'dynamic', or a strategy: DynamicLossScale()"
        )
    if smallest is not None:
        raise ValueError(f"min_loss_scale={smallest} makes no sense with the static loss_scale={scale}; leave one out")
    if number != 1.0:
        return StaticLossScale(number)
    return None if level.scale is None else NoOpLossScale()


def as_list(argument: Any, cls: type, name: str, expected: str) -> list[Any]:
    """Return one object or a list or tuple of objects as a list. Raise `TypeError` for objects of other classes."""
    items = list(argument) if isinstance(argument, list | tuple) else [argument]
    for item in items:
        if not isinstance(item, cls):
            raise TypeError(f"{name} holds a {type(item).__name__}; expected {expected}, or a list of them")
    if len({id(item) for item in items}) != len(items):
        raise ValueError(f"{name} holds one object twice; expected each once")
    return items


def bare_optimizers(optimizers: Any) -> list[Optimizer]:
    """Return the `torch.optim.Optimizer`s of one optimizer or a list, without wrappers such as Apex's LARC.

    Such a wrapper is not an `Optimizer`: it holds one as `optim` or `optimizer`, shares its parameter groups, changes
    gradients in its own `step` and then calls the optimizer's.
    """
    items = []
    for item in optimizers if isinstance(optimizers, list | tuple) else [optimizers]:
        inner: Any = getattr(item, "optim", None) or getattr(item, "optimizer", None)
        wraps = not isinstance(item, Optimizer) and isinstance(inner, Optimizer)
        shares = wraps and getattr(item, "param_groups", None) is inner.param_groups
        items.append(inner if shares else item)
    expected = "a torch.optim.Optimizer, or an object that holds one as `optim` and shares its param_groups"
    return as_list(items, Optimizer, "optimizers", expected)


def check_model(model: Module, *, casts_model: bool) -> None:
    """Refuse a model that is wrapped, converted or not float32, or sharded if the level would convert it."""
    name = type(model).__name__
    if isinstance(model, _WRAPPERS) or name == "FullyShardedDataParallel":
        raise RuntimeError(
            f"the model is wrapped in {name} already; call amp.initialize on the bare model first, and wrap its "
            f"result: {name}(model, ...)"
        )
    if casts_model and any("FSDPModule" in [base.__name__ for base in type(m).__mro__] for m in model.modules()):
        raise RuntimeError(
            f"this {name} is sharded by fully_shard, which keeps float32 shards and casts them itself; use opt_level "
            f"'O1', or fully_shard's MixedPrecisionPolicy with ampkit.GradScaler"
        )
    refuse_bounded(model)
    # A float64 buffer is accepted: a model after .double() has float64 parameters.
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

    If losses are scaled, refuse a parameter of two optimizers: both would unscale its gradient.
    """
    names = {id(param): name for model in models for name, param in model.named_parameters()}
    owners: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        params = [id(param) for group in optimizer.param_groups for param in group["params"]]
        if masters_of(optimizer) is not None:
            raise RuntimeError(
                f"this {type(optimizer).__name__} has master weights already; pass initialize a bare optimizer, and "
                f"let opt_level 'O2' make them"
            )
        if names.keys().isdisjoint(params):
            raise RuntimeError(
                f"{type(optimizer).__name__} holds no parameter of these models; make the optimizer from the model "
                f"that is passed along with it, after anything that replaces its parameters"
            )
        for param in params if is_scaled else ():
            if owners.setdefault(param, optimizer) is not optimizer:
                raise RuntimeError(
                    f"parameter {names.get(param, 'of no model')} is in two optimizers; give it to one of them"
                )
