"""Trains a small U-Net to segment disks, with cross-entropy and the repository's dice loss."""

import argparse

import torch
from torch import nn
from torch.nn import functional
from unet.unet_parts import DoubleConv, Down, OutConv, Up
from utils.dice_score import dice_loss, multiclass_dice_coeff

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--workers", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)


class SmallUNet(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.inc, self.down1, self.down2 = DoubleConv(channels, 8), Down(8, 16), Down(16, 32)
        self.up1, self.up2, self.outc = Up(32, 16, bilinear=False), Up(16, 8, bilinear=False), OutConv(8, classes)

    def forward(self, x):
        first = self.inc(x)
        second = self.down1(first)
        return self.outc(self.up2(self.up1(self.down2(second), second), first))


rows, columns = torch.meshgrid(torch.arange(24), torch.arange(24), indexing="ij")
centers = torch.randint(6, 18, (48, 2))
distance = (rows - centers[:, :1, None]).square() + (columns - centers[:, 1:, None]).square()
masks = (distance < 25).long()
images = masks[:, None] * 1.0 + 0.5 * torch.randn(48, 1, 24, 24)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(images, masks), batch_size=4, shuffle=True, num_workers=options.workers
)

model = SmallUNet(1, 2)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9)
grad_scaler = torch.amp.GradScaler("cpu", enabled=options.dtype == "float16")

losses = []
for _ in range(2):
    model.train()
    for batch, targets in loader:
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            predicted = model(batch)
            loss = functional.cross_entropy(predicted, targets)
            loss += dice_loss(
                functional.softmax(predicted, dim=1).float(),
                functional.one_hot(targets, 2).permute(0, 3, 1, 2).float(),
                multiclass=True,
            )
        optimizer.zero_grad(set_to_none=True)
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        losses.append(loss.item())

model.eval()
score = torch.zeros(())
with torch.no_grad():
    for batch, targets in loader:
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            predicted = functional.one_hot(model(batch).argmax(dim=1), 2).permute(0, 3, 1, 2).float()
        truth = functional.one_hot(targets, 2).permute(0, 3, 1, 2).float()
        score += multiclass_dice_coeff(predicted[:, 1:], truth[:, 1:])
metrics = {"dice": (score / len(loader)).item()}
print(losses[0], losses[-1], metrics)
