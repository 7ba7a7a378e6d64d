"""Shared by the tests of rules for modules: a model, and the dtypes that its layers computed in."""

import torch
from torch import nn

from ampkit import Policy, autocast
from tests.helpers.regions import BF16, FP32, state

X = torch.ones(2, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.mlp(self.attn(x)))


class Model(nn.Module):
    """Blocks and a head; `dtypes` has the dtype that each linear layer computed in."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def dtypes(model, policy, call=None, dtype=BF16):
    """The output dtype of every linear layer by its path, from a run in a region with the policy."""
    seen, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            handles.append(
                module.register_forward_hook(lambda module, args, out, name=name: seen.__setitem__(name, out.dtype))
            )
    before = state()
    with autocast("cpu", dtype, policy=policy):
        (call or model)(X)
    assert state() == before
    for handle in handles:
        handle.remove()
    return seen


def rules(model, modules):
    return Policy.default("cpu").for_modules(model, modules)


ALL = {"blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp", "head"}


def only(*names):
    """The result of `dtypes` where only these layers are in float32."""
    return {name: FP32 if name in names else BF16 for name in ALL}
