"""What each rank does in the test of Lightning's FSDP strategy; started by torchrun, never collected."""

import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from ampkit import GradScaler, autocast
from ampkit.integrations.lightning import FSDPPrecision

warnings.simplefilter("ignore")         # Lightning's, about workers, ranks and its own future


class OnCpu(FSDPStrategy):
    """Lightning's strategy, which is for GPUs, but for the call that wraps the model."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


class CpuPrecision(FSDPPrecision):
    """The plugin, for the CPU."""

    device = "cpu"


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batches = 0
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        out = self.layers(batch)
        assert out.dtype is torch.float16
        return out.float().square().mean()

    def on_after_backward(self) -> None:
        self.batches += 1
        if self.batches == 2 and self.trainer.global_rank == 0:
            grads = (param.grad for param in self.parameters() if param.grad is not None and param.grad.numel())
            next(grads).view(-1)[0] = torch.inf

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, fused=True)


def main() -> None:
    plugin = CpuPrecision("16-mixed", GradScaler("cpu", init_scale=256.0))
    assert isinstance(plugin.forward_context(), autocast)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=OnCpu(precision_plugin=plugin), max_steps=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(torch.randn(64, 6), batch_size=4))     # pyright: ignore[reportArgumentType]
    assert plugin.scaler is not None
    stats = plugin.scaler.stats()
    print(f"rank {trainer.global_rank}: scale {stats.scale:g}, {stats.steps} steps, {stats.skips} skipped", flush=True)


if __name__ == "__main__":
    main()
