"""Regions on two processes: DDP, FSDP2 and tensor parallelism over gloo, beside torch.autocast where that works."""

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ampkit import autocast
from benchmarks.workloads import Decoder, DecoderBlock
from tests.helpers.models import CASES
from tests.helpers.ranks import on_ranks
from tests.helpers.regions import like_torch as ours
from tests.helpers.training import Region, native, trains_as_torch

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")


def ddp_has_torchs_bits(rank: int, world: int) -> None:
    """Plain; views of buckets, unused parameters; static graphs, compressed gradients. Data differ between ranks."""

    def static(model: nn.Module) -> nn.Module:
        model = DistributedDataParallel(model, static_graph=True)
        model.register_comm_hook(None, fp16_compress_hook)
        return model

    viewing = functools.partial(DistributedDataParallel, gradient_as_bucket_view=True, find_unused_parameters=True)
    for wrap, name in ((DistributedDataParallel, "convnet"), (static, "convnet"), (viewing, "decoder")):
        case = CASES[name]
        trains_as_torch(lambda wrap=wrap, case=case: wrap(case.build()), case.loss_of, seed=rank)


def shard_blocks(model: nn.Module, policy: MixedPrecisionPolicy, **options: Any) -> nn.Module:
    """FSDP2 on every block, then on the whole."""
    for module in model.modules():
        if isinstance(module, DecoderBlock):
            fully_shard(module, mp_policy=policy, **options)
    fully_shard(model, mp_policy=policy, **options)
    return model


def fsdp2_has_torchs_bits(rank: int, world: int) -> None:
    """Sharding in float32, casting by the region, with and without resharding after forward; and where FSDP casts
    parameters before the all-gather, and the region keeps what must be float32 there."""
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for policy, reshard in ((MixedPrecisionPolicy(), True), (MixedPrecisionPolicy(), False), (low, True)):
        wrap = functools.partial(shard_blocks, policy=policy, reshard_after_forward=reshard)
        trains_as_torch(lambda wrap=wrap: wrap(Decoder()), CASES["decoder"].loss_of, seed=rank)


def parallel_step(model: nn.Module, x: Tensor, region: Region) -> dict[str, Tensor]:
    """Output and whole gradients of one step, all of them checked to be what float32 parameters should get."""
    model.zero_grad()
    with region():
        y = model(x)
        y = y.full_tensor() if isinstance(y, DTensor) else y
    y.float().pow(2).sum().backward()
    results = {"output": y.detach()}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.dtype is torch.float32, f"{name} has a {p.grad.dtype} gradient"
        assert isinstance(p.grad, DTensor) == isinstance(p, DTensor)
        results[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
    return results


def tensor_and_sequence_parallel_have_torchs_bits(rank: int, world: int) -> None:
    """On the same split model; and the default policy is near one process in float32."""
    mesh = init_device_mesh("cpu", (world,))
    tensor = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    sequence = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    x = torch.randn(2, 4, 8)
    for plan, inputs in ((tensor, x), (sequence, distribute_tensor(x, mesh, [Shard(1)]))):
        model = nn.Sequential(
            OrderedDict(norm=nn.LayerNorm(8), up=nn.Linear(8, 32), activation=nn.GELU(), down=nn.Linear(32, 8))
        )
        exact = parallel_step(copy.deepcopy(model), x, contextlib.nullcontext)
        parallelize_module(model, mesh, plan)
        expected, got = parallel_step(model, inputs, native), parallel_step(model, inputs, ours)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        got = parallel_step(model, inputs, lambda: autocast("cpu"))
        assert got["output"].dtype is torch.bfloat16
        for name, value in exact.items():
            error = (got[name].float() - value).norm() / value.norm()
            assert error < 0.03, f"{name} is {error:.3f} from float32's"


@pytest.mark.parametrize(
    "check",
    [
        ddp_has_torchs_bits,
        fsdp2_has_torchs_bits,
        tensor_and_sequence_parallel_have_torchs_bits,
    ],
)
def test_on_two_processes(check: Callable[[int, int], None]) -> None:
    on_ranks(check)
