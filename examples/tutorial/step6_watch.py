"""Skip steps of outlying gradients, log the scale, and name the parameter that overflowed."""

import json
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from ampkit import GradScaler, TimesMedian, autocast

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(0)
batches = torch.Generator().manual_seed(0)
pixels, labels = (torch.tensor(part, device=device) for part in load_digits(return_X_y=True))
images = pixels.float() / 16

model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
scaler = GradScaler(device, skip_above=TimesMedian(20.0))
parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
start, checkpoint = 0, Path("digits.pt")
if checkpoint.exists():
    saved = torch.load(checkpoint)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    start = saved["step"]
    batches.set_state(saved["batches"])
    if start >= steps:
        sys.exit(f"{checkpoint} has {start} steps, and this run ends at {steps}: ask for more steps, or delete it")

for step in range(start, steps):
    rows = torch.randint(1500, (64,), generator=batches)
    optimizer.zero_grad()
    with autocast(device.type, torch.float16):
        loss = cross_entropy(model(images[rows]), labels[rows])
    scaler.backward_and_step(loss, optimizer, max_norm=1.0)
    if scaler.stepped(optimizer):
        schedule.step()
    elif scaler.found_inf(optimizer):
        print(f"step {step} was skipped:\n{scaler.overflow_report()}")
    if step % 10 == 0:
        with open("digits.jsonl", "a") as log:  # or a logger: wandb.log(scaler.metrics(), step=step)
            log.write(json.dumps({"step": step, "loss": loss.item(), **scaler.metrics()}) + "\n")
    if (step + 1) % 50 == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, "step": step + 1, "batches": batches.get_state()}, checkpoint)

with torch.no_grad(), autocast(device.type, torch.float16):
    right = model(images[1500:]).argmax(1) == labels[1500:]
print(f"{right.float().mean():.1%} of {len(right)} unseen digits are right, the last loss is {loss:.4f}")
