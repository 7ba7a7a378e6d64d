"""Apex amp's functions around a training loop: `initialize` once, `scale_loss` around each backward.

Nothing in torch is patched: O1 runs forward in an autocast region, O2 and O3 convert the model, and the optimizers' own
hooks intercept steps. `loss_scalers` is not in Apex. docs/apex.md compares the levels.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampkit.amp import levels
from ampkit.amp.fp32_checkpoints import Fp32Checkpoints
from ampkit.amp.scaled_gradients import LossScaler, ScaledGradients, scaled_backward
from ampkit.half_precision.boundary import Boundary, device_type_of, put_boundary
from ampkit.half_precision.half import BATCH_NORMS, Buffers, HalfPlan
from ampkit.half_precision.master_weights import MasterWeights, load_masters_, refuse_other_masters
from ampkit.policy.policy import Policy
from ampkit.region.arguments import autocast_device_type, named_policy
from ampkit.scaler.loss_scale import LossScale

__all__ = ["initialize", "load_state_dict", "loss_scalers", "master_params", "scale_loss", "state_dict"]

Models = TypeVar("Models", bound=Module | Sequence[Module])
Optimizers = TypeVar("Optimizers")

_BACKWARD = "backward inside `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`"


class Overrides(TypedDict, total=False):
    """The keyword arguments of `initialize`. None, if it is allowed, means the level's default.

    Args:
        dtype: the 16-bit type, torch.float16 or torch.bfloat16, or its name; by default autocast's on this device.
        keep_batchnorm_fp32: at O2 (default True) and O3 (default False).
        master_weights: at O2 (default True) and O3 (default False).
        loss_scale: "dynamic" (default at O1 and O2 with float16), a number, or a strategy such as `DynamicLossScale`.
            1.0 (default at O3 and with bfloat16) scales nothing but skips steps with inf or NaN. O0 by default has
            no scale and skips no step.
        cast_model_outputs: the dtype of the models' floating-point outputs; float32 by default.
        num_losses: the number of losses with separate scales; see `scale_loss`.
        enabled: False returns everything unchanged and makes `scale_loss` yield the loss itself.
        verbosity: 0 prints nothing; 1, the default, prints skipped steps.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale; the upper one is 2**24 by default.
        policy: the operator rules of O1's region; "torch" and "default" are names of two.
        buffers: which buffers to convert at O2 and O3, as of `half`: "exact" (default), "all" (as Apex), or "none".
        cast_model_type: Apex's name for `dtype` at O2 and O3; at O0 a 16-bit type also converts the model.
            With float32 the model keeps its weights and its inputs are cast to float32; with False neither is cast.
        patch_torch_functions: False leaves out O1's region; no function is patched.
    """

    dtype: torch.dtype | str | None
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: LossScale | float | str | None
    cast_model_outputs: torch.dtype | str | None
    num_losses: int
    enabled: bool
    verbosity: int
    min_loss_scale: float | None
    max_loss_scale: float | None
    policy: Policy | str | None
    buffers: Buffers | None
    cast_model_type: torch.dtype | str | bool | None
    patch_torch_functions: bool | None


@overload
def initialize(
    models: Models, optimizers: None = None, opt_level: str = "O1", **overrides: Unpack[Overrides]
) -> Models: ...
@overload
def initialize(
    models: Models, optimizers: Optimizers, opt_level: str = "O1", **overrides: Unpack[Overrides]
) -> tuple[Models, Optimizers]: ...
def initialize(models: Any, optimizers: Any = None, opt_level: str = "O1", **overrides: Any) -> Any:
    """Set models and optimizers up for a level of precision. Synchronizes with the device at O2 and O3.

    `O0`: float32. `O1`: float32 weights, forward in an autocast region. `O2`: 16-bit model with batch norms in
    float32, float32 master weights in the optimizers, inputs cast on forward. `O3`: 16-bit model. Models are
    changed in place. Call it once models are on their device and before they are wrapped in DDP.

    Args:
        models: a module or a list of modules, in float32.
        optimizers: an optimizer, a list, or None for inference; they may be wrapped as by Apex's LARC.
        opt_level: "O0", "O1", "O2" or "O3".
        overrides: properties of the level, see `Overrides`: dtype, loss_scale, num_losses, ...

    Returns:
        `models`, or `models` and `optimizers`: the same objects in the form in which they were passed.

    Raises:
        ValueError, TypeError: an unknown level or property, or an override that makes no sense at the level.
        RuntimeError: a model that is not float32, is wrapped, or has been initialized; an optimizer that does not
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
    all_models = levels.as_list(models, Module, "models", "a torch.nn.Module")
    all_optimizers = [] if optimizers is None else levels.bare_optimizers(optimizers)
    for optimizer in all_optimizers:
        if hasattr(optimizer, "_ampkit_session"):
            raise RuntimeError(
                f"this {type(optimizer).__name__} has been through initialize already; call it once, "
                f"with all models and optimizers that belong together"
            )
    unknown = sorted(set(overrides) - set(Overrides.__annotations__))
    if unknown:
        known = ", ".join(Overrides.__annotations__)
        raise TypeError(f"initialize got {', '.join(unknown)}; expected properties among {known}")
    enabled, verbosity = overrides.pop("enabled", True), overrides.pop("verbosity", 1)
    device_type = autocast_device_type(device_type_of(all_models[0]) if all_models else None)
    options = levels.resolve(opt_level, torch.get_autocast_dtype(device_type), **overrides)
    policy = overrides.get("policy")
    rules = None if policy is None else named_policy(policy, device_type)
    if enabled:
        _set_up(options, all_models, all_optimizers, rules, device_type, verbosity)
    else:
        session = _Session(())
        for optimizer in all_optimizers:
            session.add(optimizer, None)
    return models if optimizers is None else (models, optimizers)


def _set_up(
    options: levels.LevelOptions,
    models: Sequence[Module],
    optimizers: Sequence[Optimizer],
    policy: Policy | None,
    device_type: str,
    verbosity: int,
) -> None:
    """Carry `initialize` out: all checks come before the first change."""
    level = options.level
    for model in models:
        levels.check_model(model, casts_model=level.casts_model)
    levels.check_optimizers(models, optimizers, is_scaled=options.loss_scale is not None)
    for optimizer in optimizers if options.master_weights else ():
        refuse_other_masters(optimizer)
    keep = BATCH_NORMS if options.keep_batchnorm_fp32 else ()
    plans = [HalfPlan(model, options.dtype, keep, options.buffers) for model in models if level.casts_model]
    for plan in plans:
        plan.require_fit()
    losses = range(options.num_losses if options.loss_scale is not None else 0)
    session = _Session(tuple(LossScaler(device_type, loss_scale=options.loss_scale, allow_fp16=True) for _ in losses))
    weights: dict[Tensor, Tensor] = {param: param.detach() for model in models for param in model.parameters()}
    for plan in plans:
        plan.carry_out()
    all_masters: list[MasterWeights] = []
    for optimizer in optimizers:
        scaled = ScaledGradients(optimizer, _BACKWARD, verbose=verbosity > 0) if session.scalers else None
        session.add(optimizer, scaled)
        if options.master_weights:
            all_masters.append(masters := MasterWeights(optimizer))
            pairs = zip(masters.masters(), masters.model_parameters(), strict=True)
            load_masters_(masters, [(master, weights[param]) for master, param in pairs if param in weights])
            if scaled is not None:
                scaled.masters = masters
        elif level.casts_model and optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # casts its state to the parameters' dtype
    region = options.dtype if level.has_region else None
    boundary = Boundary(options.inputs, options.cast_model_outputs, region, policy)
    for index, model in enumerate(models):
        put_boundary(model, boundary._replace(note=plans[index].note()) if plans else boundary)
        if plans:
            Fp32Checkpoints(all_masters).attach(model)


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: Module | None = None,
    delay_unscale: bool = False,
) -> Iterator[Tensor]:
    """Yield the loss times its scale for `backward`; then unscale and check the gradients. Never synchronizes.

    ::

        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()

    Unscaled gradients add up over several losses and micro-batches, each under its own scale. If any gradient is not
    finite, the next `step` of each of `optimizers` changes nothing. `step` reads one flag from the device unless the
    optimizer skips there by itself (`ampkit.optim`, `fused=True`).

    Args:
        loss: the loss, a tensor of any floating-point dtype; it is cast to float32 first.
        optimizers: one optimizer or several: all whose parameters get gradients from this backward.
        loss_id: the index of the scale to use, from 0 to `num_losses` - 1.
        model: not used; accepted because Apex has it.
        delay_unscale: leave the gradients scaled, so that later backwards of the same loss add to them. Not for the
            last backward before a step.

    Returns:
        A context manager that gives the scaled loss in float32, or `loss` itself if nothing is scaled.

    Raises:
        RuntimeError: an optimizer that has not been through `initialize`, or gradients under another scale.
        IndexError: `loss_id` has no scale.
        TypeError: the loss is not a tensor.
    """
    all_optimizers = levels.bare_optimizers(optimizers)
    if not isinstance(loss, Tensor):
        raise TypeError(f"scale_loss takes the loss tensor that backward is called on, got {type(loss).__name__}")
    session = _session_of(all_optimizers)
    if not session.scalers:
        yield loss
        return
    gradients = [optimizer._ampkit_gradients for optimizer in all_optimizers]  # type: ignore[attr-defined]
    with scaled_backward(loss, session.scaler(loss_id), gradients, delay_unscale=delay_unscale) as scaled:
        yield scaled


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Iterate over the parameters that the optimizer steps, for clipping and logging: masters if there are any.

    Never synchronizes.

    Args:
        optimizer: an optimizer, initialized or not.

    Returns:
        An iterator over the parameters of all groups, in their order.

    >>> model = torch.nn.Linear(2, 1)
    >>> [tuple(p.shape) for p in master_params(torch.optim.SGD(model.parameters(), lr=0.1))]
    [(1, 2), (1,)]
    """
    for group in optimizer.param_groups:
        yield from group["params"]


def loss_scalers(optimizer: Optimizer | None = None) -> tuple[LossScaler, ...]:
    """Return the scalers of the losses, for `stats()`, `history`, `found_inf(optimizer)` and `overflow_report()`.

    Never synchronizes.

    Args:
        optimizer: an optimizer of the call of `initialize` that is meant; None if there was one call.

    Returns:
        One scaler for each loss; none if nothing is scaled.

    Raises:
        RuntimeError: an optimizer that has not been through `initialize`, or None unless there was one call.
    """
    return _session_of([] if optimizer is None else levels.bare_optimizers(optimizer)).scalers


def state_dict(optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Return the loss scales, to save with the model's and the optimizers' state. Synchronizes with the device.

    Masters are in the model's state_dict.

    Args:
        optimizer: as of `loss_scalers`.

    Returns:
        One entry per loss, with Apex's keys and, under "scaler", the state of its `GradScaler`.
    """
    saved = {}
    for index, scaler in enumerate(loss_scalers(optimizer)):
        state = scaler.state_dict()
        saved[f"loss_scaler{index}"] = {
            "loss_scale": state["scale"],
            "unskipped": state["_growth_tracker"],
            "scaler": state,
        }
    return saved


def load_state_dict(state_dict: Mapping[str, Any], optimizer: Optimizer | None = None) -> None:
    """Load the result of `state_dict`, or of Apex's `amp.state_dict`, after `initialize`. Synchronizes for Apex's.

    Args:
        state_dict: the saved loss scales, with as many entries as there are losses.
        optimizer: as of `loss_scalers`.

    Raises:
        ValueError: another number of losses.
        TypeError, RuntimeError: as `GradScaler.load_state_dict`. Nothing has been loaded when it raises.
    """
    scalers = loss_scalers(optimizer)
    names = [f"loss_scaler{index}" for index in range(len(scalers))]
    if set(names) != set(state_dict):
        raise ValueError(
            f"the saved scales are {sorted(map(str, state_dict))}, this script's {names}; pass num_losses to "
            f"initialize as it was"
        )
    checked = [
        (scaler, scaler.checked_state(_scaler_state(state_dict[name], name, scaler)))
        for name, scaler in zip(names, scalers, strict=True)
    ]
    for scaler, state in checked:
        scaler.load_checked_state(state)


def _scaler_state(entry: Any, name: str, scaler: LossScaler) -> Any:
    """Return the scaler's state in a saved entry; the two numbers that Apex saves replace the present ones."""
    if isinstance(entry, Mapping) and "scaler" in entry:
        return entry["scaler"]
    if not isinstance(entry, Mapping) or not {"loss_scale", "unskipped"} <= set(entry):
        raise TypeError(f"the saved {name!r} is {entry!r}; expected a dict with 'loss_scale' and 'unskipped'")
    present = {key: value for key, value in scaler.state_dict().items() if key != "ampkit"}
    return {**present, "scale": entry["loss_scale"], "_growth_tracker": entry["unskipped"]}


class _Session:
    """One call of `initialize`, with the scalers of its losses; none if nothing is scaled."""

    def __init__(self, scalers: tuple[LossScaler, ...]) -> None:
        self.scalers = scalers

    def add(self, optimizer: Any, gradients: ScaledGradients | None) -> None:
        """Attach this session and its gradients to an optimizer."""
        optimizer._ampkit_session, optimizer._ampkit_gradients = self, gradients
        _sessions.add(self)

    def scaler(self, loss_id: Any) -> LossScaler:
        """Return the scaler of a loss; raise `IndexError` for an unknown `loss_id`."""
        if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < len(self.scalers):
            raise IndexError(
                f"loss_id is {loss_id!r}; expected 0 to {len(self.scalers) - 1}, or pass num_losses to initialize, "
                f"which is {len(self.scalers)}"
            )
        return self.scalers[loss_id]


_sessions: weakref.WeakSet[_Session] = weakref.WeakSet()  # kept alive by their optimizers


def _session_of(optimizers: Sequence[Optimizer]) -> _Session:
    """Return the session that these optimizers share; for no optimizers, the only session there is."""
    for optimizer in optimizers:
        if not hasattr(optimizer, "_ampkit_session"):
            raise RuntimeError(
                f"this {type(optimizer).__name__} has not been through initialize; call model, optimizer = "
                f"amp.initialize(model, optimizer, opt_level=...) first"
            )
    sessions: set[Any] = {optimizer._ampkit_session for optimizer in optimizers}  # type: ignore[attr-defined]
    if not optimizers:
        if len(_sessions) > 1:
            gc.collect()  # frees optimizers that only reference cycles hold
        sessions = set(_sessions)
    if not sessions:
        raise RuntimeError("no optimizer has been through initialize; call it first")
    if len(sessions) > 1:
        raise RuntimeError(
            f"the optimizers belong to {len(sessions)} calls of initialize; pass optimizers of one call"
            if optimizers
            else f"initialize has been called {len(sessions)} times; pass an optimizer of the call that is meant"
        )
    return sessions.pop()
