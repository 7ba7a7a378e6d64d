"""FP8: casts compared with PyTorch's operators, a linear layer forward and backward with bf16 and torchao.

On a CPU the same cases run over small matrices with PyTorch's operators on both sides: a rehearsal.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import ampkit_kernels as kernels
from ampkit import Policy, Rule, autocast
from benchmarks import byte_model
from benchmarks.case import AMPKIT, TORCH_OPERATORS, Case, Side

BF16, TORCHAO = "bf16", "torchao"
E4M3 = torch.float8_e4m3fn
TENSOR, ROW = kernels.Scaling(False, E4M3, False), kernels.Scaling(True, E4M3, True)
FORMS = {
    "one scale": (TENSOR, TENSOR, byte_model.FLOAT8_TENSOR),
    "rows and columns": (ROW, ROW, byte_model.FLOAT8_ROWS_AND_COLUMNS),
    "rows": (ROW, None, byte_model.FLOAT8_ROWS),
}
RECIPES = {
    Rule.FLOAT8_TENSORWISE: "tensorwise",
    Rule.FLOAT8_ROWWISE: "rowwise",
    Rule.FLOAT8_ROWWISE_GW_HP: "rowwise_with_gw_hp",
}


def side(job: Callable[[], object], **facts: float) -> Side:
    """Return a side that calls `job`."""

    def run(calls: int) -> None:
        for _ in range(calls):
            job()

    return Side(run, facts=lambda: facts)


@dataclass(frozen=True, kw_only=True)
class Quantize(Case):
    """A bf16 matrix to FP8."""

    forms: str
    rows: int
    columns: int
    family: str = "float8"
    base: str = TORCH_OPERATORS
    everyday: bool = False
    events: bool = True

    def sides(self, device: torch.device) -> dict[str, Side]:
        x = torch.randn(self.rows, self.columns, device=device).bfloat16()
        along_rows, along_columns, moved = FORMS[self.forms]
        job = functools.partial(kernels.quantize, x, along_rows, along_columns)
        return {
            AMPKIT: side(job, bytes_moved=moved.total * x.numel()),
            TORCH_OPERATORS: side(functools.partial(job, impl="reference")),
        }


@dataclass(frozen=True, kw_only=True)
class Linear(Case):
    """Forward and backward of a square linear layer with float32 weights."""

    rule: Rule
    rows: int
    width: int
    family: str = "float8"
    base: str = BF16
    everyday: bool = False
    events: bool = True

    def sides(self, device: torch.device) -> dict[str, Side]:
        layer = nn.Linear(self.width, self.width, bias=False, device=device)
        x = torch.randn(self.rows, self.width, device=device).bfloat16().requires_grad_()
        grad = torch.randn_like(x)
        default = Policy.default(device.type)

        def job(model: Callable[..., torch.Tensor], policy: Policy) -> None:
            with autocast(device.type, torch.bfloat16, policy=policy):
                y = model(x)
            y.backward(grad)

        policy = default.with_rules({"aten::linear": self.rule})
        compiled = torch.compile(layer)
        sides = {
            BF16: side(functools.partial(job, layer, default)),
            AMPKIT: side(functools.partial(job, layer, policy)),
            f"{AMPKIT}, compiled": side(functools.partial(job, compiled, policy)),
        }
        if importlib.util.find_spec("torchao"):
            float8 = importlib.import_module("torchao.float8")
            config = float8.Float8LinearConfig.from_recipe_name(RECIPES[self.rule])
            theirs = float8.convert_to_float8_training(nn.Sequential(layer), config=config)
            sides[f"{TORCHAO}, compiled"] = side(functools.partial(job, torch.compile(theirs), default))
        return sides if device.type == "cuda" else {name: sides[name] for name in sides if "," not in name}


def cases() -> list[Case]:
    """Sizes around and above the width at which FP8 pays by counts, and small ones for a CPU."""
    all_cases: list[Case] = []
    for device, sizes in (("cpu", ((64, 128),)), ("cuda", ((8192, 1024), (8192, 4096), (16384, 8192)))):
        for rows, width in sizes:
            shape = f"{rows} x {width}"
            all_cases += [
                Quantize(name=f"{forms}, {shape}", forms=forms, rows=rows, columns=width, devices=(device,))
                for forms in FORMS
            ]
            all_cases += [
                Linear(name=f"linear, {rule.value}, {shape}", rule=rule, rows=rows, width=width, devices=(device,))
                for rule in RECIPES
            ]
    return all_cases
