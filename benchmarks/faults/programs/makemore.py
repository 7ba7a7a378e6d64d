"""Trains makemore's GRU and transformer on made-up words, with accumulated micro-batches and a checkpoint."""

import argparse
import io

import torch
from makemore import RNN, ModelConfig, Transformer

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--model", choices=("gru", "transformer"), default="gru")
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)
accumulation = 2


def build():
    config = ModelConfig(block_size=12, vocab_size=20, n_layer=2, n_head=2, n_embd=32, n_embd2=32)
    model = RNN(config, cell_type="gru") if options.model == "gru" else Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**18, enabled=options.dtype == "float16")


def batch():
    first = torch.randint(1, 20, (16, 1))
    words = (first * torch.arange(1, 14)) % 20
    return words[:, :-1], words[:, 1:].contiguous()


losses = []


def train(steps):
    for _ in range(steps):
        total = torch.zeros(())
        for _ in range(accumulation):
            inputs, targets = batch()
            with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
                _, loss = model(inputs, targets)
                loss = loss / accumulation
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total.item())


model, optimizer, scaler = build()
train(12)
file = io.BytesIO()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, file)
file.seek(0)
saved = torch.load(file)
model, optimizer, scaler = build()
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
scaler.load_state_dict(saved["scaler"])
train(12)

with torch.no_grad():
    right = torch.zeros(())
    seen = torch.zeros(())
    for _ in range(16):
        inputs, targets = batch()
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            logits, loss = model(inputs, targets)
        right += (logits.argmax(-1) == targets).sum()
        seen += targets.numel()
metrics = {"accuracy": (right / seen).item(), "seen": seen.item()}
print(losses[0], losses[-1], metrics)
