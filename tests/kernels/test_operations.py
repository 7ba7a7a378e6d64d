"""Each operation beside plain arithmetic: the checks of `tests.gpu_checks.operations`, in Triton's interpreter.

On a CUDA device the same checks run, and those that need a device.
"""

import pytest
import torch

from ampkit_kernels import reference
from ampkit_kernels.configs import Config
from tests.gpu_checks import cuda_only, operations, training

ON_GPU = {**operations.CHECKS, **cuda_only.CHECKS, **training.CHECKS}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_on_the_gpu(name: str) -> None:
    ON_GPU[name](torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("name", operations.CHECKS)
def test_reference(monkeypatch: pytest.MonkeyPatch, name: str, on_host: bool) -> None:
    """With branches on the host, and with tensor arithmetic in their place, as on a GPU without Triton."""
    if not on_host:
        monkeypatch.setattr(reference, "is_on_host", lambda scalar: False)
    operations.CHECKS[name](torch.device("cpu"), "reference")


@pytest.mark.parametrize("name", operations.CHECKS)
def test_interpreted(interpreted, name: str) -> None:
    if name == "every_half_pattern":  # long tensors; with small blocks the other lists have several blocks and chunks
        interpreted(Config(block=4096, chunk=65536))
    operations.CHECKS[name](torch.device("cpu"), "triton")
