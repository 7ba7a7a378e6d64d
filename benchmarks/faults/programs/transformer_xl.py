"""Trains a language model with memory on a periodic text, with the repository's layers and adaptive softmax."""

import argparse

import torch
from mem_transformer import MemTransformerLM

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

text = (torch.arange(2000) * 7 + torch.arange(2000) // 11) % 40
text = text[:1920].view(8, 240).t().contiguous()

model = MemTransformerLM(
    40, 2, 2, 24, 12, 48, 0.1, 0.0, d_embed=24, div_val=1, cutoffs=[16], tgt_len=8, ext_len=0, mem_len=8, attn_type=0
)
for name, weight in model.named_parameters():
    if weight.dim() > 1:
        torch.nn.init.normal_(weight, 0.0, 0.05)
    elif "norm" not in name:
        torch.nn.init.zeros_(weight)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=options.dtype == "float16")

losses, memory = [], ()
for step in range(20):
    data, target = text[step * 8 : step * 8 + 8], text[step * 8 + 1 : step * 8 + 9]
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        output = model(data, target, *memory)
        loss, memory = output[0].float().mean(), output[1:]
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    losses.append(loss.item())

model.eval()
total = 0.0
with torch.no_grad():
    for step in range(20, 26):
        data, target = text[step * 8 : step * 8 + 8], text[step * 8 + 1 : step * 8 + 9]
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            output = model(data, target, *memory)
        memory = output[1:]
        total += output[0].float().mean().item()
metrics = {"validation": total / 6}
print(losses[0], losses[-1], metrics)
