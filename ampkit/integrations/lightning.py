"""Lightning's `Trainer`: precision plugins, and a callback that logs the loss scale."""

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

from ampkit.integrations._precision import OwnRegions
from ampkit.policy.policy import Policy
from ampkit.region.arguments import autocast_device_type
from ampkit.scaler.grad_scaler import GradScaler

__all__ = ["FSDPPrecision", "MixedPrecision", "ScaleMonitor"]


class MixedPrecision(OwnRegions, LightningMixedPrecision):
    """Lightning's plugin of this name with ampkit's regions and scaler.

    Hooks and clipping see unscaled gradients whatever the optimizer, so that `gradient_clip_val` works with
    `fused=True` and `ampkit.optim`, in manual optimization too. Checkpoints resume both ways with Lightning's own
    plugin, whose name and state these are.

    Args:
        precision: "16-mixed" or "bf16-mixed".
        device: the device type, as "cuda".
        scaler: None: `GradScaler(device)` for "16-mixed", none for "bf16-mixed"; there one can skip steps:
            `GradScaler(device, loss_scale=NoOpLossScale(), skip_above=...)`.
        policy: what the regions cast; None: the default for the device.
        cache: a `WeightCache` that keeps casts between batches.

    Raises as Lightning's; TypeError for a scaler of torch's, ValueError for the name of no policy, RuntimeError where
    this machine has no such device.

    >>> from lightning import Trainer
    >>> plugin = MixedPrecision("bf16-mixed", "cpu")
    >>> trainer = Trainer(plugins=[plugin], accelerator="cpu", logger=False, enable_checkpointing=False)
    """

    scaler: GradScaler | None  # pyright: ignore[reportIncompatibleVariableOverride]  a subclass of torch's

    def autocast_context_manager(self) -> Any:
        """The region of a step. It keeps its casts: ampkit's are sound under `torch.no_grad`."""
        return self.region()

    def forward_context(self) -> Any:
        """The same, for every kind of step."""
        return self.autocast_context_manager()

    def convert_module(self, module: Any) -> Any:
        """As Lightning's; raises `TypeError` for a module that Fabric sets up, whose plugins are others."""
        if not isinstance(module, LightningModule):
            raise TypeError(
                f"this plugin is for Lightning's Trainer, and got a {type(module).__name__} from Fabric; pass "
                f"Fabric(plugins=[ampkit.integrations.fabric.MixedPrecision(precision, device)])"
            )
        return super().convert_module(module)

    def optimizer_step(
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, let hooks and clipping see unscaled gradients, step, and update the scale."""
        lbfgs: Any = torch.optim.LBFGS      # which Lightning refuses in float16
        if self.scaler is None or isinstance(optimizer, lbfgs):
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:     # no loss: gradients of earlier batches stay scaled
            return None
        # manual optimization may have clipped, which unscales
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
        """Clip unscaled gradients, of fused optimizers too, which Lightning's plugin refuses."""
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

    Ranks skip together, with fused optimizers too. Values can be clipped; norms Lightning refuses under this strategy.

    Args:
        precision, scaler, policy: as of `MixedPrecision`.
        device: the device type; None: the accelerator of this machine, or the CPU.

    Raises as `MixedPrecision`.
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        scaler: GradScaler | None = None,
        *,
        policy: Policy | str | None = None,
        device: str | None = None,
    ) -> None:
        LightningFSDPPrecision.__init__(self, "bf16-mixed")     # which makes no scaler
        super().__init__(precision, autocast_device_type(device), scaler, policy=policy)

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Scale a loss, once for both plugins."""
        return LightningFSDPPrecision.pre_backward(self, tensor, module)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Raise, saying why not."""
        LightningFSDPPrecision.clip_grad_by_norm(self, optimizer, clip_val)


class ScaleMonitor(Callback):
    """Logs the loss scale and how many steps were skipped, and says where the first overflows began.

    `loss_scale` and `skipped_steps` are logged every `log_every_n_steps` of the trainer, at one host read; of several
    ranks it is checked that they agree, at one more. Says so where the trainer's plugin has no `ampkit.GradScaler`.
    """

    def __init__(self) -> None:
        self._has_reported = False

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Say when there is nothing to log."""
        if not isinstance(getattr(trainer.precision_plugin, "scaler", None), GradScaler):
            plugin = type(trainer.precision_plugin)
            rank_zero_info(
                f"ScaleMonitor logs nothing: the precision plugin is {plugin.__module__}.{plugin.__name__}, without an "
                f"ampkit.GradScaler. Pass plugins=[ampkit.integrations.lightning.MixedPrecision('16-mixed', device)]; "
                f"'bf16-mixed' has a scaler only if it is given one"
            )

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, when that is due."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if not isinstance(scaler, GradScaler) or (trainer.fit_loop.total_batch_idx + 1) % trainer.log_every_n_steps:
            return
        scaler.check_ranks()
        stats = scaler.stats()
        pl_module.log_dict({"loss_scale": stats.scale, "skipped_steps": float(stats.skips + stats.outliers)})
        if stats.skips and not self._has_reported:
            rank_zero_info(f"steps have been skipped; in the last one:\n{scaler.overflow_report(pl_module)}")
            self._has_reported = True
