"""Lightning Fabric: a precision plugin."""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision

from ampkit.integrations._precision import OwnRegions

__all__ = ["MixedPrecision"]


class MixedPrecision(OwnRegions, FabricMixedPrecision):
    """Fabric's plugin of this name with ampkit's regions and scaler.

    `fabric.clip_gradients` works with `fused=True` and `ampkit.optim`. Fabric raises there when an overflow makes the
    norm infinite, unless `error_if_nonfinite=False`: the scaler would skip that step. Save and load the plugin
    beside the model, `fabric.save(path, {"model": model, "precision": plugin})`, for the scale to go on.

    Args:
        precision: "16-mixed" or "bf16-mixed".
        device: the device type, as "cuda".
        scaler: None: `GradScaler(device)` for "16-mixed", none for "bf16-mixed"; there one can skip steps:
            `GradScaler(device, loss_scale=NoOpLossScale(), skip_above=...)`.
        policy: what the regions cast; None: the default for the device.
        cache: a `WeightCache` that keeps casts between batches.

    Raises as Fabric's; TypeError for a scaler of torch's, ValueError for the name of no policy, RuntimeError where this
    machine has no such device.

    >>> from lightning.fabric import Fabric
    >>> fabric = Fabric(accelerator="cpu", plugins=[MixedPrecision("bf16-mixed", "cpu")])
    """

    def forward_context(self) -> Any:
        """The region of a forward."""
        return self.region()

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale before gradients are clipped, those of fused optimizers too."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
