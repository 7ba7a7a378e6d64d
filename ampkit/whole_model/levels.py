"""Whole-model precision by level: `initialize` once, `scale_loss` around each backward.

The interface of Apex amp. Nothing is patched: O1 runs forward in an autocast region, O2 and O3 convert the
model, and steps are intercepted by the optimizers' own hooks. docs/levels.md compares the levels.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampkit.policy.policy import Policy
from ampkit.policy.values import as_dtype
from ampkit.region.arguments import named_policy
from ampkit.region.autocast import autocast_device_type
from ampkit.scaler.loss_scale import LossScale
from ampkit.whole_model import _level_options
from ampkit.whole_model._boundary import Boundary, device_type_of, put_boundary
from ampkit.whole_model._fp32_checkpoints import Fp32Checkpoints
from ampkit.whole_model._level_checks import as_list, bare_optimizers, check_model, check_optimizers
from ampkit.whole_model._level_options import LevelOptions
from ampkit.whole_model._level_scaler import LevelScaler
from ampkit.whole_model._level_session import Session
from ampkit.whole_model.half import BATCH_NORMS, HalfPlan
from ampkit.whole_model.master_weights import MasterWeights

__all__ = [
    "amp_state_dict", "initialize", "load_amp_state_dict", "loss_scalers", "master_params", "scale_loss",
]

Models = TypeVar("Models", bound=Module | Sequence[Module])
Optimizers = TypeVar("Optimizers")

_sessions: weakref.WeakKeyDictionary[Optimizer, Session] = weakref.WeakKeyDictionary()


class Overrides(TypedDict, total=False):
    """The keyword arguments of `initialize`, which says what they mean."""

    dtype: torch.dtype | str | None
    cast_model_type: torch.dtype | str | None
    patch_torch_functions: bool | None
    keep_batchnorm_fp32: bool | str | None
    master_weights: bool | None
    loss_scale: LossScale | float | str | None
    cast_model_outputs: torch.dtype | str | None
    num_losses: int
    enabled: bool
    verbosity: int
    min_loss_scale: float | None
    max_loss_scale: float | None
    policy: Policy | str | None


@overload
def initialize(
    models: Models, optimizers: None = None, opt_level: str = "O1", **overrides: Unpack[Overrides]
) -> Models: ...
@overload
def initialize(
    models: Models, optimizers: Optimizers, opt_level: str = "O1", **overrides: Unpack[Overrides]
) -> tuple[Models, Optimizers]: ...
def initialize(
    models: Any,
    optimizers: Any = None,
    opt_level: str = "O1",
    *,
    dtype: torch.dtype | str | None = None,
    cast_model_type: torch.dtype | str | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: LossScale | float | str | None = None,
    cast_model_outputs: torch.dtype | str | None = None,
    num_losses: int = 1,
    enabled: bool = True,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    policy: Policy | str | None = None,
) -> Any:
    """Set models and optimizers up for a level of precision; returns them as they were passed.

    `O0`: float32. `O1`: float32 weights, forward in an autocast region. `O2`: 16-bit model with batch norms in
    float32, float32 master weights in the optimizers, inputs cast on forward. `O3`: 16-bit model. Models are
    changed in place. Call it once models are on their device and before they are wrapped in DDP.

    Args:
        models: a module or a list of modules, in float32.
        optimizers: an optimizer, a list, or None for inference; they may be wrapped as by Apex's LARC.
        opt_level: "O0", "O1", "O2" or "O3".
        dtype: the 16-bit type, torch.float16 or torch.bfloat16, or its name; None is what `autocast` takes there.
        cast_model_type: the same for O2 and O3, by Apex's name.
        patch_torch_functions: accepted as Apex takes it (True at O1 only); nothing is patched.
        keep_batchnorm_fp32: at O2 (default True) and O3 (default False).
        master_weights: at O2 (default True) and O3 (default False).
        loss_scale: "dynamic" (default at O1 and O2 with float16), a number, or a strategy such as
            `DynamicLossScale`. 1.0 (default at O3 and with bfloat16) scales nothing; steps with inf or NaN are
            skipped all the same, except at O0, which is left alone altogether unless it is given a scale.
        cast_model_outputs: what floating-point outputs of the models are cast to; None is float32.
        num_losses: how many losses have scales of their own; see `scale_loss`.
        enabled: False returns everything unchanged and makes `scale_loss` yield the loss itself.
        verbosity: 0 prints nothing; 1 prints the level and skipped steps.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale.
        policy: the operator rules of O1's region; "torch" and "default" are names of two.

    Raises:
        ValueError, TypeError: an unknown level, or an override that makes no sense at it.
        RuntimeError: a model that is not float32, is wrapped, or has been initialised; an optimizer that does not
            fit the models. Nothing has been changed then.

    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = initialize(model, optimizer, opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    >>> with scale_loss(model(torch.ones(2, 4)).mean(), optimizer) as scaled:
    ...     scaled.backward()
    >>> optimizer.step()
    >>> model.weight.dtype, model.state_dict()["weight"].dtype
    (torch.bfloat16, torch.float32)
    """
    all_models = as_list(models, Module, "models", "a torch.nn.Module")
    all_optimizers = [] if optimizers is None else bare_optimizers(optimizers)
    for optimizer in all_optimizers:
        if optimizer in _sessions:
            raise RuntimeError(
                f"this {type(optimizer).__name__} has been through initialize already; call it once for each model "
                f"and optimizer, with all of those that belong together"
            )
    device_type = autocast_device_type(device_type_of(all_models[0]) if all_models else None)
    options = _level_options.resolve(
        opt_level, torch.get_autocast_dtype(device_type), dtype=as_dtype(dtype),
        cast_model_type=as_dtype(cast_model_type), patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights, loss_scale=loss_scale, cast_model_outputs=as_dtype(cast_model_outputs),
        num_losses=num_losses, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale,
    )
    if policy is not None and not options.has_region:
        raise ValueError(f"policy makes no sense at {opt_level}, which opens no region; use opt_level 'O1'")
    rules = None if policy is None else named_policy(policy, device_type)
    session = Session(options if enabled else None, device_type, verbosity)
    if enabled:
        _set_up(session, options, all_models, all_optimizers, rules)
    for optimizer in all_optimizers:
        _sessions[optimizer] = session
    return models if optimizers is None else (models, optimizers)


def _set_up(
    session: Session,
    options: LevelOptions,
    models: Sequence[Module],
    optimizers: Sequence[Optimizer],
    policy: Policy | None,
) -> None:
    """Check everything, then change everything."""
    for model in models:
        check_model(model, casts_model=options.casts_model)
    check_optimizers(models, optimizers)
    keep = BATCH_NORMS if options.keep_batchnorm_fp32 else ()
    plans = [HalfPlan(model, options.dtype, keep) for model in models] if options.casts_model else []
    # The float32 storage outlives the conversion as the masters': nothing is copied and no digit is lost.
    values: dict[Tensor, Tensor] = {param: param.detach() for model in models for param in model.parameters()}
    for plan in plans:
        plan.carry_out()
    all_masters: list[MasterWeights] = []
    for optimizer in optimizers:
        own = {param for group in optimizer.param_groups for param in group["params"]}
        converted = {param: value for param, value in values.items() if param in own and param.dtype is options.dtype}
        masters = session.follow(optimizer, master_values=converted if options.master_weights else None)
        if masters is not None:
            all_masters.append(masters)
        elif options.casts_model and optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())   # casts its state to the parameters' dtype
    for model in models:
        inputs = options.dtype if options.casts_model else None if options.has_region else torch.float32
        put_boundary(
            model,
            Boundary(inputs, options.cast_model_outputs, options.dtype if options.has_region else None, policy),
        )
        if options.casts_model:
            Fp32Checkpoints(all_masters).attach(model)
    if session.verbosity > 0 and (not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0):
        print(f"ampkit {options}")


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: Module | None = None,
    delay_unscale: bool = False,
) -> Iterator[Tensor]:
    """The loss times its scale, for `backward` inside; on leaving, gradients are unscaled and checked.

    ::

        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()

    Unscaled gradients add up over several losses and micro-batches, each under its own scale. If any of them
    was not finite, the next `step` of that optimizer changes nothing. Never syncs; `step` reads one flag unless
    the optimizer skips on the device.

    Args:
        loss: the loss tensor; 16-bit ones are cast to float32 first.
        optimizers: those whose parameters this backward fills.
        loss_id: whose scale to use, below `num_losses`.
        model: accepted, because Apex has it; not used.
        delay_unscale: leave the gradients scaled, to add further backwards of the same loss to them and unscale
            once. Not for the last backward before a step.

    Raises:
        RuntimeError: an optimizer that has not been through `initialize`, or gradients under another scale.
        IndexError: a `loss_id` that there is no scale for. TypeError: a loss that is no tensor.
    """
    all_optimizers = bare_optimizers(optimizers)
    if not isinstance(loss, Tensor):
        raise TypeError(f"scale_loss takes the loss tensor that backward is called on, got {type(loss).__name__}")
    session = _session_of(all_optimizers)
    if not session.scales:
        yield loss
        return
    scaler = session.scaler(loss_id)
    states = [session.state(optimizer) for optimizer in all_optimizers]
    for state in states:
        state.begin_backward(scaler, delay_unscale=delay_unscale)
    try:
        yield scaler.scale(loss.float())
    except BaseException:
        for state in states:
            if state.delayed is None:
                state.flow.restore()
        raise
    if delay_unscale:
        for state in states:
            state.delayed = (scaler, scaler.updates)
    else:
        session.unscale_and_update(all_optimizers, scaler)


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """The float32 parameters that the optimizer steps, for clipping and logging: masters where there are any.

    >>> model = torch.nn.Linear(2, 1)
    >>> [tuple(p.shape) for p in master_params(torch.optim.SGD(model.parameters(), lr=0.1))]
    [(1, 2), (1,)]
    """
    for group in optimizer.param_groups:
        yield from group["params"]


def loss_scalers(optimizer: Optimizer | None = None) -> tuple[LevelScaler, ...]:
    """The scalers behind the losses, for `stats()`, `history`, `skipped(optimizer)` and `overflow_report()`.

    `optimizer` selects the call of `initialize`; None if there was one only. Empty if nothing is scaled.
    """
    return tuple(_session_for(optimizer).scalers)


def amp_state_dict(optimizer: Optimizer | None = None) -> dict[str, Any]:
    """The loss scales, to be saved with the model's and the optimizers' state. Reads the device.

    One entry per loss, in Apex's form and with what Apex does not save. Masters are in the model's state_dict.
    `optimizer` selects the call of `initialize`; None if there was one only.
    """
    session = _session_for(optimizer)
    saved = {}
    for index, scaler in enumerate(session.scalers):
        state = scaler.state_dict()
        saved[f"loss_scaler{index}"] = {
            "loss_scale": state["scale"], "unskipped": state["_growth_tracker"], "scaler": state,
        }
    return saved


def load_amp_state_dict(
    state_dict: Mapping[str, Any], optimizer: Optimizer | None = None, *, strict: bool = True
) -> None:
    """Load what `amp_state_dict`, or Apex's `amp.state_dict`, returned. Call it after `initialize`.

    Nothing has been loaded when it raises.

    Raises:
        ValueError: other losses than this script's, unless `strict` is False. And as `GradScaler.load_state_dict`.
    """
    scalers = _session_for(optimizer).scalers
    names = [f"loss_scaler{index}" for index in range(len(scalers))]
    if strict and set(names) != set(state_dict):
        raise ValueError(
            f"the saved scales are {sorted(map(str, state_dict))}, this script's {names}; pass num_losses to "
            f"initialize as it was, or strict=False to load what both have"
        )
    loads = [
        scaler.loadable(_scaler_state(state_dict[name], name, scaler))
        for name, scaler in zip(names, scalers, strict=True)
        if name in state_dict
    ]
    for load in loads:
        load()


def _scaler_state(entry: Any, name: str, scaler: LevelScaler) -> Any:
    """The scaler's own state in an entry; for an entry of Apex's, this scaler's with the two numbers in it."""
    if isinstance(entry, Mapping) and "scaler" in entry:
        return entry["scaler"]
    if not isinstance(entry, Mapping) or not {"loss_scale", "unskipped"} <= set(entry):
        raise TypeError(f"the saved {name!r} is {entry!r}; expected a dict with 'loss_scale' and 'unskipped'")
    now = {key: value for key, value in scaler.state_dict().items() if key != "ampkit"}
    return {**now, "scale": entry["loss_scale"], "_growth_tracker": entry["unskipped"]}


def _session_for(optimizer: Optimizer | None) -> Session:
    return _session_of([] if optimizer is None else bare_optimizers(optimizer))


def _session_of(optimizers: Sequence[Optimizer]) -> Session:
    """The session of these optimizers; without any, the only session there is."""
    for optimizer in optimizers:
        if optimizer not in _sessions:
            raise RuntimeError(
                f"this {type(optimizer).__name__} has not been through initialize; call model, optimizer = "
                f"amp.initialize(model, optimizer, opt_level=...) first"
            )
    found = {id(session): session for session in (_sessions[optimizer] for optimizer in optimizers)}
    if len(found) > 1:
        raise RuntimeError("the optimizers come from different calls of initialize; pass them to one call together")
    if optimizers:
        return next(iter(found.values()))
    living = _living()
    if len(living) > 1:
        gc.collect()
        living = _living()
    if len(living) != 1:
        raise RuntimeError(
            "no optimizer has been through initialize; call it first" if not living else
            f"initialize has been called {len(living)} times; pass an optimizer to say which one is meant"
        )
    return living[0]


def _living() -> list[Session]:
    return list({id(session): session for session in _sessions.values()}.values())
