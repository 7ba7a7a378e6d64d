"""The two models of the demo, small enough to train on a laptop's processor."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DigitsNet(nn.Sequential):
    """Two convolutions with batch norm and a linear head: `[n, 1, 8, 8]` images to `[n, 10]` logits."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, 10),
        )


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, time, width]` to the same shape."""
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class CharGPT(nn.Module):
    """A character-level GPT: `[batch, time]` int64 codes to `[batch, time, alphabet]` logits."""

    def __init__(
        self, alphabet_size: int, context: int = 32, width: int = 128, depth: int = 3, heads: int = 4
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(alphabet_size, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet_size)
        for table in (self.embed, self.position):       # torch's unit normal drowns the blocks at first
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        """Predict the next character at each position."""
        x = self.embed(codes) + self.position(torch.arange(codes.shape[1], device=codes.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
