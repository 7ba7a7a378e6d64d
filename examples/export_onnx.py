"""Export a model with its region to ONNX: the casts become `Cast` nodes, and ampkit is not needed to run the file.

It needs onnx and onnxscript. `python examples/export_onnx.py model.onnx`
"""

import sys

import torch
from torch import nn

from ampkit import Policy, autocast


def main(path: str = "model.onnx") -> "torch.onnx.ONNXProgram":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).eval()
    policy = Policy.default("cpu").for_modules(model, {"2": torch.float32})
    model.forward = autocast("cpu", torch.float16, policy=policy)(model.forward)  # type: ignore[method-assign]
    program = torch.onnx.export(model, (torch.randn(8, 16),), dynamo=True, verbose=False)
    assert program is not None
    program.save(path)
    kinds = [node.op_type for node in program.model.graph]
    print(f"{path}: {', '.join(kinds)}")
    return program


if __name__ == "__main__":
    main(*sys.argv[1:])
