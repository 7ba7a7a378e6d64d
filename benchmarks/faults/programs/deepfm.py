"""Trains factorization machines to predict clicks, with the repository's layers: deep, and with logarithms."""

import argparse

import torch
from torchfm.model.afn import AdaptiveFactorizationNetwork
from torchfm.model.dfm import DeepFactorizationMachineModel

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--workers", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

fields = [12, 8, 20, 5]
clicks = torch.stack([torch.randint(size, (640,)) for size in fields], dim=1)
likes = torch.randn(sum(fields))
labels = (likes[clicks].sum(1) + likes[clicks[:, 0]] * likes[clicks[:, 1]] > 0).float()
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(clicks[:512], labels[:512]),
    batch_size=64,
    shuffle=True,
    num_workers=options.workers,
)


class Average(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.deep = DeepFactorizationMachineModel(fields, 8, (16, 16), 0.1)
        self.logarithmic = AdaptiveFactorizationNetwork(fields, 8, 12, (16,), (0.1,))

    def forward(self, x):
        return 0.5 * (self.deep(x) + self.logarithmic(x))


model = Average()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-6)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=options.dtype == "float16")

losses = []
for _ in range(3):
    model.train()
    for batch, wanted in loader:
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            predicted = model(batch)
        loss = torch.nn.functional.binary_cross_entropy(predicted.float(), wanted)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())

model.eval()
with torch.no_grad():
    predicted = model(clicks[512:])
    metrics = {
        "accuracy": ((predicted > 0.5) == (labels[512:] > 0.5)).float().mean().item(),
        "log loss": -torch.log(torch.where(labels[512:] > 0.5, predicted, 1 - predicted)).mean().item(),
    }
print(losses[0], losses[-1], metrics)
