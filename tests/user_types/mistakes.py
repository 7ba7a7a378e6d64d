"""Mistakes that a strict type checker must find; each line names the rule of pyright that finds it."""

import torch
from torch import Tensor, nn

import ampkit
from ampkit import GradScaler, Policy, amp, autocast, half, matmul, optim


@autocast("cpu")
def loss_of(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return nn.functional.cross_entropy(output, target, reduction=reduction)


x = torch.ones(2, 2)
scaler = GradScaler("cpu")
optimizer = optim.SGD([x])

loss_of(x)  # reportCallIssue
loss_of(x, x, reduction=1)  # reportArgumentType
loss_of(x, x).backwards()  # reportAttributeAccessIssue
autocast("cpu", 16)  # reportArgumentType
autocast("cpu", policy=1)  # reportArgumentType
autocast("cpu", polcy="torch")  # reportCallIssue
scaler.scale(1.0)  # reportCallIssue reportArgumentType
scaler.scale(x).backwards()  # reportAttributeAccessIssue
scaler.step(x)  # reportArgumentType
steps: str = scaler.step(optimizer)  # reportAssignmentType
linear: nn.Conv2d = half(nn.Linear(1, 1))  # reportAssignmentType
amp.initialize(nn.Linear(1, 1), level="O2")  # reportCallIssue
amp.initialize("model")  # reportArgumentType
pair: tuple[nn.Linear, int] = amp.initialize(nn.Linear(1, 1))  # reportAssignmentType
matmul.float8_layers(nn.Linear(1, 1), "cpu")  # reportArgumentType
Policy.default("cpu").for_modules({"head": "float32"})  # reportCallIssue
ampkit.integration  # reportAttributeAccessIssue
ampkit.integrations.ligthning  # reportAttributeAccessIssue
ampkit.initialize  # reportAttributeAccessIssue
