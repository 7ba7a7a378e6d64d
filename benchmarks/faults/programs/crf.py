"""Trains a tagger, a recurrent network with the repository's conditional random field on top."""

import argparse

import torch
from torch import nn
from torchcrf import CRF

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

words = torch.randint(30, (12, 160))
tags = (words // 10 + torch.cat([torch.zeros(1, 160, dtype=torch.long), words[:-1] // 15])) % 4
lengths = torch.randint(6, 13, (160,))
mask = torch.arange(12)[:, None] < lengths


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.recurrent = nn.GRU(16, 16, bidirectional=True)
        self.norm = nn.LayerNorm(32)
        self.emissions = nn.Linear(32, 4)
        self.crf = CRF(4)

    def forward(self, x):
        hidden, _ = self.recurrent(self.embedding(x))
        return self.emissions(self.norm(hidden))


model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0, enabled=options.dtype == "float16")

losses = []
for _ in range(18):
    chosen = torch.randint(128, (32,))
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        emissions = model(words[:, chosen])
        loss = -model.crf(emissions.float(), tags[:, chosen], mask[:, chosen], reduction="token_mean")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

with torch.no_grad():
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        emissions = model(words[:, 128:])
    decoded = model.crf.decode(emissions.float(), mask[:, 128:])
    right = sum(int((torch.tensor(found) == tags[: len(found), 128 + i]).sum()) for i, found in enumerate(decoded))
metrics = {"accuracy": right / int(lengths[128:].sum())}
print(losses[0], losses[-1], metrics)
