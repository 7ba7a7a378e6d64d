"""FP16Optimizer: an optimizer wrapper with master weights and a loss scale, after Apex's FP16_Optimizer.

For scripts that call `optimizer.backward(loss)` instead of `loss.backward()`, as NVIDIA's BERT scripts do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampkit.amp.scaled_gradients import LossScaler, ScaledGradients, scaled_backward
from ampkit.gradients.collect import parameters
from ampkit.half_precision.master_weights import MasterWeights, load_masters_, refuse_other_masters, saved_masters
from ampkit.scaler.loss_scale import LARGEST_SCALE, DynamicLossScale, LossScale, StaticLossScale

__all__ = ["FP16Optimizer"]

# Apex's names in `dynamic_loss_args`, and the fields of `DynamicLossScale`.
_DYNAMIC_NAMES = {"init_scale": "init_scale", "scale_factor": "growth_factor", "scale_window": "growth_interval"}


class FP16Optimizer(torch.optim.Optimizer):
    """Wrapper of an optimizer of a float16 or bfloat16 model, with float32 master weights and loss scaling.

    ::

        ampkit.half(model, in_place=True)  # unlike model.half(), keeps rotary frequencies and the like in float32
        optimizer = FP16Optimizer(torch.optim.AdamW(groups), static_loss_scale=args.loss_scale)  # 0: dynamic
        for batch in data:
            optimizer.zero_grad()
            optimizer.backward(model(batch))
            optimizer.clip_master_grads(1.0)
            optimizer.step()

    Learning-rate schedulers and code that reads or writes `param_groups` can use it instead of the wrapped optimizer,
    which must no longer be used directly.

    Args:
        optimizer: a `torch.optim.Optimizer` over the model's parameters, in any groups; `ampkit.optim` writes
            masters and model in one launch.
        static_loss_scale: the scale; 0 means a dynamic scale, as `--loss_scale 0` does in those scripts.
        dynamic_loss_scale: whether the scale is dynamic: Apex's starts at 2**32, halves on overflow and doubles after
            1,000 steps without overflow.
        dynamic_loss_args: `init_scale`, `scale_factor` and `scale_window` of the dynamic scale, or the fields of
            `DynamicLossScale` by their names.
        verbose: print a line for each skipped step.

    Raises:
        TypeError: `optimizer` is not an optimizer, or unknown `dynamic_loss_args`.
        ValueError: a scale below 0 or not finite, or `dynamic_loss_args` with a static scale.
        RuntimeError: the optimizer has master weights already.

    `step` reads one flag from the device unless the optimizer skips there by itself (`ampkit.optim`, `fused=True`).
    `loss_scale`, `overflow` and state dicts synchronize with the device; `backward` and clipping do not.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, FP16Optimizer):
            raise TypeError(f"FP16Optimizer wraps a plain torch.optim.Optimizer, got {type(optimizer).__name__}")
        refuse_other_masters(optimizer)
        dynamic = dynamic_loss_scale or static_loss_scale == 0
        if dynamic_loss_args and not dynamic:
            raise ValueError("dynamic_loss_args were given for a static scale; pass dynamic_loss_scale=True with them")
        rule: LossScale = _dynamic(dynamic_loss_args or {}) if dynamic else StaticLossScale(float(static_loss_scale))
        # Optimizer.__init__ is not called: `__getattr__` finds groups, state and defaults in the wrapped optimizer.
        self.optimizer = optimizer
        devices = [param.device.type for param in parameters(optimizer)]
        self.scaler = LossScaler(devices[0] if devices else "cpu", loss_scale=rule, allow_fp16=True)
        self._gradients = ScaledGradients(optimizer, "optimizer.backward(loss), not loss.backward()", verbose=verbose)
        self.masters = self._gradients.masters = MasterWeights(optimizer)

    @property
    def loss_scale(self) -> float:
        """The loss scale."""
        return self.scaler.get_scale()

    @property
    def overflow(self) -> bool:
        """Whether a gradient in the masters, or of the last step if they have none, is not finite."""
        found_inf = self._gradients.found_inf
        return found_inf is not None and bool(found_inf != 0)

    def __repr__(self) -> str:
        return f"FP16Optimizer({self.optimizer!r}, {self.scaler.loss_scale})"

    def __getattr__(self, name: str) -> Any:
        """Delegate other attributes, such as parameter groups, state and hooks, to the wrapped optimizer."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> Any:
        raise TypeError("an FP16Optimizer cannot be pickled or copied; save state_dict() and load it into a new one")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of masters and model.

        Args:
            set_to_none: True sets gradients to None, False to zero.
        """
        self.optimizer.zero_grad(set_to_none)
        self._gradients.forget()

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run backward from `loss` times the scale, and move the gradients to the masters, unscaled and checked.

        Gradients of several calls before a step add up.

        Args:
            loss: the loss, a tensor of one element.
            update_master_grads: False leaves the gradients in the model, scaled, until a later backward or a call of
                the method `update_master_grads`.
            retain_graph: as of `Tensor.backward`.

        Raises:
            TypeError: `loss` is not a tensor.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward takes the loss tensor, got {type(loss).__name__}; pass it before .item()")
        with scaled_backward(loss, self.scaler, [self._gradients], delay_unscale=not update_master_grads) as scaled:
            scaled.backward(retain_graph=retain_graph)

    def update_master_grads(self) -> None:
        """Move the gradients of `backward(..., update_master_grads=False)` to the masters.

        Raises:
            RuntimeError: there are none.
        """
        if not self._gradients.still_scaled():
            raise RuntimeError("no gradient is scaled; call optimizer.backward(loss) first, not loss.backward()")
        self.scaler.unscale_all_([self._gradients])

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Limit the joint norm of all unscaled gradients by `torch.nn.utils.clip_grad_norm_`.

        Args:
            max_norm: the largest norm after clipping.
            norm_type: p of the p-norm; may be inf.

        Returns:
            The norm before clipping, a 0-d tensor.

        Raises:
            RuntimeError: backward has not run since the last step.
        """
        if not self._gradients.unscaled:
            raise RuntimeError("clip_master_grads() without a backward since the last step")
        return torch.nn.utils.clip_grad_norm_(parameters(self.optimizer), max_norm, norm_type)

    def step(self) -> Any:  # type: ignore[override]
        """Step the masters and write the model's 16-bit weights, unless a gradient is not finite.

        Returns:
            The result of the wrapped optimizer's `step`.

        Raises:
            RuntimeError: backward has not run since the last step, or its gradients are still scaled.
        """
        return self.optimizer.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; its 16-bit parameters get masters in the next step.

        Args:
            param_group: as of `torch.optim.Optimizer.add_param_group`.
        """
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of scale, wrapped optimizer and masters. A resumed run has bitwise identical results."""
        return {
            "loss_scaler": self.scaler.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.masters.state_dict()["masters"],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a result of `state_dict`, and write the model's 16-bit parameters from the masters.

        Args:
            state_dict: a result of `state_dict`.

        Raises:
            KeyError: missing entries.
            ValueError, TypeError, RuntimeError: masters of another model, or a state that the scaler or the wrapped
                optimizer refuses. Nothing has been loaded when it raises.
        """
        missing = {"loss_scaler", "optimizer_state_dict", "fp32_from_fp16"} - set(state_dict)
        if missing:
            raise KeyError(f"not a state dict of FP16Optimizer: {sorted(missing)} missing, got {sorted(state_dict)}")
        values = saved_masters(self.masters, {"masters": state_dict["fp32_from_fp16"]})
        scale = self.scaler.checked_state(state_dict["loss_scaler"])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])  # checks before it loads
        load_masters_(self.masters, values)
        self.scaler.load_checked_state(scale)


def _dynamic(dynamic_loss_args: Mapping[str, Any]) -> DynamicLossScale:
    """Return the strategy with Apex's defaults; the first scale is too large on purpose and soon falls."""
    fields: dict[str, Any] = {"init_scale": 2.0**32, "growth_interval": 1000, "max_scale": LARGEST_SCALE}
    fields.update((_DYNAMIC_NAMES.get(name, name), value) for name, value in dynamic_loss_args.items())
    return DynamicLossScale(**fields)
