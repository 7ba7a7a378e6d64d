"""Lightning Fabric: `MixedPrecision`, a precision plugin with ampkit's regions and scaler."""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision

from ampkit.integrations._precision_plugin import PrecisionPlugin

__all__ = ["MixedPrecision"]


class MixedPrecision(PrecisionPlugin, FabricMixedPrecision):
    """Fabric's plugin of this name with ampkit's regions and scaler.

    `fabric.clip_gradients` works with `fused=True` and `ampkit.optim`. When an overflow makes the norm infinite, it
    raises, unless `error_if_nonfinite=False`; the scaler would skip that step. To keep the scale in a checkpoint, save
    and load the plugin with the model: `fabric.save(path, {"model": model, "precision": plugin})`.

    Args:
        precision: "16-mixed" or "bf16-mixed".
        device: the device type, such as "cuda".
        scaler: the scaler; None: `GradScaler(device)` for "16-mixed", no scaler for "bf16-mixed", where one can skip
            steps: `GradGuard(device, skip_above=...)`.
        policy: the policy of the regions, or its name; None: the default for the device.

    Raises:
        TypeError: `scaler` is not an `ampkit.GradScaler`.
        ValueError: the name of the policy is unknown, or Fabric's plugin refuses an argument.
        RuntimeError: this machine does not have the device.

    >>> from lightning.fabric import Fabric
    >>> fabric = Fabric(accelerator="cpu", plugins=[MixedPrecision("bf16-mixed", "cpu")])
    """

    def forward_context(self) -> Any:
        """Return the region of a forward."""
        return self.region()

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale gradients before they are clipped, for fused optimizers as well."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
