"""Work models beside torch's own counter."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import trainer, training, work, workloads
from benchmarks.scaling import Scaling
from tests.benchmarks.helpers import TINY


def counted_flops(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> int:
    """FLOPs of forward and backward as torch counts them, with attention written out."""
    torch._C._set_mkldnn_enabled(False)     # the counter knows no fused LSTM layer, only what it is made of
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
            workloads.loss_of(model(batch[0]), batch[1]).backward()
    finally:
        torch._C._set_mkldnn_enabled(True)
    return counted.get_total_flops()


@pytest.mark.parametrize("name", TINY)
def test_flop_models_are_what_torch_counts(name: str):
    workload = TINY[name]()
    (batch,) = workload.batches(1, torch.Generator().manual_seed(0))
    model = workload.build()
    assert len(batch[0]) == workload.samples
    assert counted_flops(model, batch) == workload.flops


def test_large_models_have_the_parameters_they_are_known_for():
    sizes = {}
    for case in training.large():
        assert isinstance(case, training.Training)
        if case.variant == trainer.Variant():
            with torch.device("meta"):
                sizes[case.name] = sum(p.numel() for p in case.workload().build().parameters())
    assert sizes == {
        "GPT-2 124M, bf16": 124_439_808, "ResNet-50, bf16": 25_557_032,
    }


def test_byte_models_add_up():
    """A step is 28 bytes of AdamW, 8 of each micro-batch, and 4 more to add each further gradient to what is there."""
    assert work.training_bytes(10) == 10 * 36
    assert work.training_bytes(10, 8) == 10 * (28 + 8 * 8 + 7 * 4)
    assert work.region_casts(10) == 60
    assert Scaling(name="", job="clip", tensors=3, elements=5).work() == work.Work(0, 180, "12 bytes per element")
