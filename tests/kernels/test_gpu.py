"""On a CUDA device: the checks of `tests.gpu_checks`, one test each. Without one, the kernels' own run interpreted."""

import os

import pytest
import torch

from ampkit_kernels.configs import Config
from tests.gpu_checks import cuda_only, operations, tools, training

ON_GPU = {**operations.CHECKS, **cuda_only.CHECKS, **training.CHECKS}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_on_the_gpu(name: str) -> None:
    ON_GPU[name](torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
@pytest.mark.parametrize("name", operations.CHECKS)
def test_rehearsed_in_the_interpreter(interpreted, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over short lists in large blocks: the kernels' own tests are beside this file."""
    interpreted(Config(block=4096, chunk=65536))
    for module in (tools, operations):
        monkeypatch.setattr(module, "SIZES", (1, 17, 300, 20_000))
    operations.CHECKS[name](torch.device("cpu"))
