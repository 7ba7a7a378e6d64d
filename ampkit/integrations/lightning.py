"""Lightning's `Trainer`: precision plugins with ampkit's regions and scaler, and a callback that logs the scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import FSDPPrecision as LightningFSDPPrecision
from lightning.pytorch.plugins import MixedPrecision as LightningMixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_info
from torch import Tensor

from ampkit.integrations._precision_plugin import PrecisionPlugin
from ampkit.policy.policy import Policy
from ampkit.region.arguments import autocast_device_type
from ampkit.scaler.grad_scaler import GradScaler

__all__ = ["FSDPPrecision", "MixedPrecision", "ScaleMonitor"]


class MixedPrecision(PrecisionPlugin, LightningMixedPrecision):
    """Lightning's plugin of this name with ampkit's regions and scaler.

    Hooks and clipping see unscaled gradients with every optimizer, so that `gradient_clip_val` works with `fused=True`
    and `ampkit.optim`, in manual optimization as well. Name and state equal Lightning's own plugin: either
    loads the other's checkpoints.

    Args:
        precision: "16-mixed" or "bf16-mixed".
        device: the device type, such as "cuda".
        scaler: the scaler; None: `GradScaler(device)` for "16-mixed", no scaler for "bf16-mixed", where one can skip
            steps: `GradGuard(device, skip_above=...)`.
        policy: the policy of the regions, or its name; None: the default for the device.

    Raises:
        TypeError: `scaler` is not an `ampkit.GradScaler`.
        ValueError: the name of the policy is unknown, or Lightning's plugin refuses an argument.
        RuntimeError: this machine does not have the device.

    >>> from lightning import Trainer
    >>> plugin = MixedPrecision("bf16-mixed", "cpu")
    >>> trainer = Trainer(plugins=[plugin], accelerator="cpu", logger=False, enable_checkpointing=False)
    """

    scaler: GradScaler | None  # pyright: ignore[reportIncompatibleVariableOverride]  a subclass of torch's

    def autocast_context_manager(self) -> Any:
        """Return the region of a step. It caches casts, unlike Lightning's: ampkit's are safe under `torch.no_grad`."""
        return self.region()

    def forward_context(self) -> Any:
        """Return the region of any kind of step."""
        return self.autocast_context_manager()

    def convert_module(self, module: Any) -> Any:
        """Convert as Lightning's plugin does; raise `TypeError` for a module of Fabric, which needs another plugin."""
        if not isinstance(module, LightningModule):
            raise TypeError(
                f"this plugin is for Lightning's Trainer, but got a {type(module).__name__} from Fabric; pass "
                f"Fabric(plugins=[ampkit.integrations.fabric.MixedPrecision(precision, device)])"
            )
        return super().convert_module(module)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, let hooks and clipping see unscaled gradients, step, and update the scale."""
        lbfgs: Any = torch.optim.LBFGS  # which Lightning refuses in float16
        if self.scaler is None or isinstance(optimizer, lbfgs):
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:  # no loss: gradients of earlier batches remain scaled
            return None
        # Manual optimization may have clipped, which unscales.
        self.scaler.unscale_(optimizer, allow_repeat=not model.automatic_optimization)
        self._after_closure(model, optimizer)
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip unscaled gradients, for fused optimizers as well, which Lightning's plugin refuses."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        """Clip unscaled gradients element by element."""
        if self.scaler is None:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            self.scaler.clip_grad_value_(optimizer, clip_val)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Clip unscaled gradients by their total norm."""
        if self.scaler is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self.scaler.clip_grad_norm_(optimizer, clip_val)


class FSDPPrecision(MixedPrecision, LightningFSDPPrecision):
    """Lightning's plugin of this name, for `FSDPStrategy(precision_plugin=...)`, with ampkit's regions and scaler.

    Ranks skip together, with fused optimizers as well. Gradients can be clipped by value; Lightning does not clip by
    norm under this strategy.

    Args:
        precision, scaler, policy: as of `MixedPrecision`.
        device: the device type; None: the accelerator of this machine, or the CPU.

    Raises:
        TypeError, ValueError, RuntimeError: as `MixedPrecision`.
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        scaler: GradScaler | None = None,
        *,
        policy: Policy | str | None = None,
        device: str | None = None,
    ) -> None:
        LightningFSDPPrecision.__init__(self, "bf16-mixed")  # in bfloat16 it makes no scaler
        super().__init__(precision, autocast_device_type(device), scaler, policy=policy)

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Scale the loss once; both base classes would."""
        return LightningFSDPPrecision.pre_backward(self, tensor, module)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Raise Lightning's error: it does not clip by norm under FSDP."""
        LightningFSDPPrecision.clip_grad_by_norm(self, optimizer, clip_val)


class ScaleMonitor(Callback):
    """Callback that logs the loss scale and the number of skipped steps, and reports where the first overflow began.

    `loss_scale` and `skipped_steps` are logged every `log_every_n_steps` of the trainer, with one host read, and with
    several ranks another one that checks that they agree. Prints a message if the trainer's plugin has no
    `ampkit.GradScaler`.
    """

    def __init__(self) -> None:
        self._has_reported = False

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Print a message if there is nothing to log."""
        if not isinstance(getattr(trainer.precision_plugin, "scaler", None), GradScaler):
            plugin = type(trainer.precision_plugin)
            rank_zero_info(
                f"ScaleMonitor logs nothing: the precision plugin is {plugin.__module__}.{plugin.__name__}, without an "
                f"ampkit.GradScaler. Pass plugins=[ampkit.integrations.lightning.MixedPrecision('16-mixed', device)]; "
                f"'bf16-mixed' has a scaler only if you pass one"
            )

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, if this step is one to log."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if not isinstance(scaler, GradScaler) or (trainer.fit_loop.total_batch_idx + 1) % trainer.log_every_n_steps:
            return
        scaler.check_ranks()
        stats = scaler.stats()
        pl_module.log_dict({"loss_scale": stats.scale, "skipped_steps": float(stats.skips + stats.outliers)})
        if stats.skips and not self._has_reported:
            rank_zero_info(f"steps have been skipped; in the last one:\n{scaler.overflow_report(pl_module)}")
            self._has_reported = True
