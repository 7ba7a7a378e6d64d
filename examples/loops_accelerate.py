"""Accelerate: one call on the Accelerator; accumulation, clipping, schedulers and checkpoints are unchanged."""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs

import ampkit.optim
from ampkit.integrations.accelerate import use_ampkit


def main(steps: int = 16) -> float:
    settings = GradScalerKwargs(init_scale=2.0**10)
    accelerator = use_ampkit(
        Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2, kwargs_handlers=[settings])
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    optimizer = ampkit.optim.AdamW(model.parameters(), lr=0.01)  # unscales, clips and skips in one kernel
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    for step in range(steps):
        with accelerator.accumulate(model):
            batch = torch.randn(16, 8, device=accelerator.device)
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            if step == 5:
                next(iter(model.parameters())).grad[0, 0] = torch.inf  # an overflow
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()  # waits when the step was skipped
            if accelerator.optimizer_step_was_skipped and accelerator.sync_gradients:
                print(f"step {step} was skipped:\n{accelerator.scaler.overflow_report(model)}")
            optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        accelerator.load_state(folder)
    print(f"scale {accelerator.scaler.get_scale():g}, learning rate {scheduler.get_last_lr()[0]:.6f}")
    return scheduler.get_last_lr()[0]


if __name__ == "__main__":
    main()
