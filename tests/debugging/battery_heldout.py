"""More faults from public threads, shown to the tools for the first time after they were mended for the others."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampkit import GradScaler
from tests.debugging.planted import B16, F16, FLOAT, LINES, Step, loop, loss_of, planted, whole

INF = math.inf
WIDER = FLOAT + "|float32"


# pytorch/pytorch#88474: the scaler skips the step, and the running statistics are lost
@whole("nonfinite", r"overflow", LINES, "aten::addmm", "0")
def statistics_after_a_skipped_step() -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    nn.init.constant_(model.get_parameter("0.weight"), 100.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=F16):
            loss = model(torch.randn(4, 8).abs() * 100 + 100).float().square().mean()       # here
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return model, step


# pytorch/pytorch#31829
@planted("in backward of aten::logsumexp", r"-inf|inf - inf|masked", r"finfo|clamp|where")
def sum_over_no_path(x: Tensor) -> Tensor:
    paths = x + torch.where(torch.arange(8) == 5, -INF, 0.0)[:, None]
    total = torch.logsumexp(paths, -1)      # here
    return torch.where(total.isinf(), 0.0, total)


# HobbitLong/SupContrast#141
@planted("aten::div.Tensor", r"rows 0, 3(.|\n)*(0 / 0|by 0|is 0)", r"clamp")
def contrast_without_positives(x: Tensor) -> Tensor:
    labels = torch.tensor([0, 1, 1, 3, 4, 4, 4, 1])
    positive = (labels[:, None] == labels).float() - torch.eye(8)
    return -(positive * (x @ x.t()).log_softmax(-1)).sum(1) / positive.sum(1)       # here


# NVIDIA-NeMo/RL#4161
@planted("aten::sqrt", r"negative", r"clamp|var\(|std\(")
def deviation_by_moments(x: Tensor) -> Tensor:
    reward = x * 0 + 1000.35
    deviation = (reward.square().mean(-1, keepdim=True) - reward.mean(-1, keepdim=True).square() - 1e-3).sqrt()  # here
    return x / (deviation + 1e-4)


# NVIDIA/apex#812
@planted("aten::log", r"0 in float16|underflow", FLOAT, dtype=F16)
def divergence_of_normals(x: Tensor) -> Tensor:
    ratio = ((x * 1e-6 + 1e-4) / 1).pow(2)      # here
    return 0.5 * (ratio - 1 - ratio.log()) + x


# Megvii-BaseDetection/YOLOX#1565
@planted("aten::div.Tensor", r"1e-16 is 0 in float16", FLOAT, dtype=F16)
def distance_of_boxes(x: Tensor) -> Tensor:
    diagonal, distance = x * 0, x * 0
    return 1 - distance / diagonal.clamp(1e-16) + x     # here


# p-e-w/heretic#348
@planted("aten::(sub.Tensor|kl_div)", r"-inf|inf - inf", r"where|mask|finfo|nan_to_num")
def divergence_of_suppressed_tokens(x: Tensor) -> Tensor:
    logits = x.masked_fill(torch.arange(16) == 7, -INF)
    reference = logits.detach().log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), reference, log_target=True, reduction="none")       # here


# zhuchen03/FreeLB#8: what is divided by inf is 0, and the perturbation with it
@planted("aten::linalg_vector_norm", r"overflow", WIDER, dtype=F16, tool="precision")
def perturbation_of_an_embedding(x: Tensor) -> Tensor:
    gradient = x.detach().sign() * 3e4
    norm = torch.norm(gradient, dim=-1, keepdim=True)       # here
    return x * (gradient / norm * 4)


# Comfy-Org/ComfyUI#16001
@planted("aten::linspace", r"linspace|made|rounded", WIDER, dtype=B16, tool="precision")
def schedule_in_bfloat16(x: Tensor) -> Tensor:
    sigmas = torch.linspace(1.0, 0.9, 201, dtype=x.dtype)       # here
    return x * (sigmas[:16] - sigmas[1:17]) * 2000


# NVIDIA-NeMo/Automodel#2248
@whole("precision", r"update.*(nothing|lost|rounds)", WIDER + "|[mM]aster", "aten::.*", "")
def moments_in_bfloat16() -> tuple[nn.Module, Step]:
    model = nn.Linear(8, 8).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, betas=(0.9, 0.9999))

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8, dtype=B16)).float().square().sum().backward()
        optimizer.step()        # here

    step()
    return model, step


# pytorch/torchtitan#3575
@loop(r"zero_grad", r"before the first|once|after .*step", scaler=False)
def zeroed_for_each_micro_batch(model: nn.Module, x: Tensor, optimizer: Any, scaler: Any) -> None:
    for _ in range(4):
        optimizer.zero_grad()       # here
        (loss_of(model, x, B16) / 4).backward()
    optimizer.step()
