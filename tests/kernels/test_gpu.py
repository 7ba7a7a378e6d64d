"""On a CUDA device: the checks of `benchmarks.gpu`, one test each. Without one, the kernels' own run interpreted."""

import os

import pytest
import torch

from benchmarks.gpu import checks, cuda_checks, training_checks

ON_GPU = {**checks.CHECKS, **cuda_checks.CHECKS, **training_checks.CHECKS}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_on_the_gpu(name: str) -> None:
    ON_GPU[name](torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", checks.CHECKS)
def test_rehearsed_in_the_interpreter(name: str) -> None:
    checks.CHECKS[name](torch.device("cpu"))
