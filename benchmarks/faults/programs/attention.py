"""Trains the transformer of "Attention is all you need" to reverse sequences, with its own schedule."""

import argparse

import torch
from torch.nn import functional
from transformer.Models import Transformer
from transformer.Optim import ScheduledOptim

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)
PAD = 0

model = Transformer(
    20,
    20,
    PAD,
    PAD,
    d_word_vec=32,
    d_model=32,
    d_inner=64,
    n_layers=2,
    n_head=2,
    d_k=16,
    d_v=16,
    dropout=0.0,
    n_position=20,
)
optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
schedule = ScheduledOptim(optimizer, 0.5, 32, 50)
scaler = torch.amp.GradScaler("cpu", enabled=options.dtype == "float16")


def batch():
    source = torch.randint(3, 20, (16, 10))
    source[torch.arange(10) >= torch.randint(5, 11, (16, 1))] = PAD
    target = torch.cat([torch.full((16, 1), 2), source.flip(1)], dim=1)
    return source, target[:, :-1], target[:, 1:]


def smoothed_loss(predicted, gold, smoothing=0.1):
    kept = gold.ne(PAD)
    classes = predicted.size(1)
    one_hot = torch.zeros_like(predicted).scatter(1, gold.view(-1, 1), 1)
    one_hot = one_hot * (1 - smoothing) + (1 - one_hot) * smoothing / (classes - 1)
    per_word = -(one_hot * functional.log_softmax(predicted, dim=1)).sum(dim=1)
    return per_word.masked_select(kept).sum() / kept.sum()


losses = []
for _ in range(20):
    source, target, gold = batch()
    schedule.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        predicted = model(source, target)
        loss = smoothed_loss(predicted, gold.reshape(-1))
    scaler.scale(loss).backward()
    schedule._update_learning_rate()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

model.eval()
words = torch.zeros(())
correct = torch.zeros(())
with torch.no_grad():
    for _ in range(10):
        source, target, gold = batch()
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            predicted = model(source, target)
        kept = gold.reshape(-1).ne(PAD)
        correct += (predicted.argmax(1) == gold.reshape(-1))[kept].sum()
        words += kept.sum()
metrics = {"accuracy": (correct / words).item(), "words": words.item()}
print(losses[0], losses[-1], metrics)
