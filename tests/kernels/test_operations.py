"""Each operation beside plain arithmetic: the checks of `tests.gpu_checks.operations`, in the interpreter.

The same checks run on a CUDA device, with those that need one.
"""

import os

import pytest
import torch

from ampkit_kernels.configs import Config
from tests.gpu_checks import cuda_only, operations, training

ON_GPU = {**operations.CHECKS, **cuda_only.CHECKS, **training.CHECKS}
# Long tensors in large blocks; the other lists cross from block to block and from chunk to chunk.
LONG = ("every_half_pattern", "casts_round_every_tie_to_even")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_on_the_gpu(name: str) -> None:
    ON_GPU[name](torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("name", operations.CHECKS)
def test_reference(name: str) -> None:
    operations.CHECKS[name](torch.device("cpu"), "reference")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
@pytest.mark.parametrize("name", operations.CHECKS)
def test_interpreted(interpreted, name: str) -> None:
    if name in LONG:
        interpreted(Config(block=4096, chunk=65536))
    operations.CHECKS[name](torch.device("cpu"), "triton")
