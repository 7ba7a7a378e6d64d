"""Bytes that FP8 rules and 16-bit optimizer state save: sizes of tensors, counted."""

import torch
from torch import nn

import ampkit


def saved_for_backward(rule):
    """Return the megabytes that autograd saves for backward of an MLP, 512 tokens, under a rule for linear layers."""
    mlp = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    policy, saved = ampkit.Policy.default("cpu").with_rules({"aten::linear": rule}), {}
    weights = {weight.data_ptr() for weight in mlp.parameters()}

    def count(tensor):
        saved[tensor.data_ptr()] = tensor  # with the tensor, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        with ampkit.autocast("cpu", torch.bfloat16, policy=policy):
            mlp(torch.randn(512, 256))
    return sum(tensor.nbytes for address, tensor in saved.items() if address not in weights) / 1e6


def per_weight(dtype, **scheme):
    """Return the bytes per weight between steps, with AdamW's state."""
    weight = nn.Parameter(torch.ones(1024, dtype=dtype))
    optimizer = ampkit.optim.AdamW([weight], **scheme)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = [each for each in optimizer.state[weight].values() if each.numel() > 1]
    return sum(tensor.nbytes for tensor in (weight, *state)) / weight.numel()


def main():
    """Count; return megabytes saved for backward and bytes per weight, by name."""
    megabytes = {"bfloat16": saved_for_backward("lower"), "FP8": saved_for_backward("float8_rowwise")}
    n_bytes = {
        "float32": per_weight(torch.float32),
        "bfloat16, remainder": per_weight(torch.bfloat16, masters="remainder"),
        "... bfloat16 moments": per_weight(torch.bfloat16, masters="remainder", state_dtype=torch.bfloat16),
        "bfloat16, stochastic": per_weight(torch.bfloat16, rounding="stochastic"),
    }
    print(*(f"{name}: {value:.2f} MB for backward" for name, value in megabytes.items()), sep="\n")
    print(*(f"{name}: {value:g} bytes per weight" for name, value in n_bytes.items()), sep="\n")
    return megabytes, n_bytes


if __name__ == "__main__":
    main()
