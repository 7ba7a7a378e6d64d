"""Lightning's Trainer and Fabric: a precision plugin each. `gradient_clip_val` works with fused optimizers."""

import tempfile

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import ampkit.optim
from ampkit.integrations import fabric as for_fabric
from ampkit.integrations.lightning import MixedPrecision, ScaleMonitor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batches() -> DataLoader:
    torch.manual_seed(0)
    inputs = torch.randn(128, 8)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return (self.layers(inputs) - targets).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ampkit.optim.AdamW(self.parameters(), lr=0.01)


def with_the_trainer() -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator=DEVICE,
            devices=1,
            max_epochs=2,
            gradient_clip_val=1.0,
            accumulate_grad_batches=2,
            default_root_dir=folder,
            log_every_n_steps=4,
            enable_checkpointing=False,
            enable_progress_bar=False,
            plugins=[MixedPrecision("16-mixed", DEVICE)],
            callbacks=[ScaleMonitor()],
        )
        trainer.fit(Regression(), batches())
    return trainer.callback_metrics


def with_fabric() -> float:
    precision = for_fabric.MixedPrecision("16-mixed", DEVICE)
    fabric = Fabric(accelerator=DEVICE, devices=1, plugins=[precision])
    model = Regression().layers
    model, optimizer = fabric.setup(model, ampkit.optim.AdamW(model.parameters(), lr=0.01))
    loss = torch.zeros(())
    for inputs, targets in fabric.setup_dataloaders(batches()):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)  # the scaler skips those
        optimizer.step()
    return loss.item()


def main() -> tuple[dict[str, torch.Tensor], float]:
    metrics, loss = with_the_trainer(), with_fabric()
    print(f"Trainer: scale {metrics['loss_scale']:g}, {metrics['skipped_steps']:g} skipped. Fabric: loss {loss:.4f}")
    return metrics, loss


if __name__ == "__main__":
    main()
