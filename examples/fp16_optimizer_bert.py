"""FP16_Optimizer as BERT's scripts use it: a half model, two parameter groups, `--fp16 --loss_scale`.

The model is a small transformer that classifies digits read row by row. `--loss_scale 0` is dynamic, a power of
two static. Warm-up and decay of the learning rate are written into the parameter groups, as those scripts do.

    python examples/fp16_optimizer_bert.py --fp16 --loss_scale 0
"""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ampkit.amp.fp16_optimizer import FP16Optimizer
from ampkit.optim import AdamW


class Reader(nn.Module):
    """Eight rows of eight pixels as eight tokens."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(0.02 * torch.randn(8, width))
        self.LayerNorm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.classifier = nn.Linear(width, 10)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.LayerNorm(self.embed(rows) + self.position)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.down(F.gelu(self.up(x)))
        return self.classifier(x.mean(1))


def main(arguments: Sequence[str] = ()) -> float:
    """Train with the given arguments; return the held-out accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp16", action="store_true", help="half model, float32 masters")
    parser.add_argument("--loss_scale", type=float, default=0, help="0 (dynamic) or a power of 2 (static)")
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--warmup_proportion", type=float, default=0.1)
    parser.add_argument("--num_train_epochs", type=int, default=6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32, device=args.device).view(-1, 8, 8) / 16
    y = torch.tensor(labels, device=args.device)
    held_out = torch.arange(len(y), device=args.device) % 5 == 0
    train_x, train_y = x[~held_out], y[~held_out]

    model = Reader().to(args.device)
    if args.fp16:
        model.half()
        x, train_x = x.half(), train_x.half()
    undecayed = ("bias", "LayerNorm")
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(part in n for part in undecayed)],
            "weight_decay": 0.01,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(part in n for part in undecayed)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = AdamW(groups, lr=args.learning_rate)
    if args.fp16:
        if args.loss_scale == 0:
            optimizer = FP16Optimizer(optimizer, dynamic_loss_scale=True)
        else:
            optimizer = FP16Optimizer(optimizer, static_loss_scale=args.loss_scale)

    batches = [rows for _ in range(args.num_train_epochs) for rows in torch.randperm(len(train_y)).split(64)]
    for step, rows in enumerate(batches):
        loss = F.cross_entropy(model(train_x[rows]).float(), train_y[rows])
        if args.fp16:
            optimizer.backward(loss)
            optimizer.clip_master_grads(1.0)
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        progress = step / len(batches)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(progress / args.warmup_proportion, 1.0 - progress)
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        accuracy = (model(x[held_out]).argmax(1) == y[held_out]).double().mean().item()
    scale = f", loss scale {optimizer.loss_scale:g}" if args.fp16 else ""
    print(f"accuracy {accuracy:.1%}, weights in {model.classifier.weight.dtype}{scale}")
    return accuracy


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
