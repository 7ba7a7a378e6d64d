"""Regions on two processes: DDP, FSDP2 and tensor parallelism over gloo, beside torch.autocast where that works."""

import contextlib
import copy
import dataclasses
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

from ampkit import GradGuard, Policy, autocast
from ampkit.optim import AdamW
from ampkit.torch_private import parsed
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


def float32_rules_hold_under_a_policy_of_fsdp2(rank: int, world: int) -> None:
    """Their modules are wrapped without a `param_dtype`, as docs/distributed.md does: the bits of the plain model."""

    def build() -> tuple[nn.Sequential, Policy]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8)), nn.Linear(8, 4))
        return model, Policy.default("cpu").for_modules(model, {"1": torch.float32})

    def trained(model: nn.Module, rules: Policy) -> tuple[Tensor, list[Tensor]]:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))  # equal on all ranks
        with autocast("cpu", torch.bfloat16, policy=rules):
            y = model(x)
        y.float().square().mean().backward()
        grads: list[Any] = [param.grad for param in model.parameters()]
        return y.detach(), [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]

    expected = trained(*build())
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, rules = build()
    wide = [model.get_submodule(path) for rule in rules.check().rules for path in rule.modules]
    assert [type(module) for module in wide] == [nn.Sequential]
    for module in wide:
        fully_shard(module)
    fully_shard(model, mp_policy=low)
    torch.testing.assert_close(trained(model, rules), expected, rtol=0, atol=0)
    without, rules = build()
    fully_shard(without, mp_policy=low)
    with pytest.raises(RuntimeError, match=r"mixed dtype|same dtype"):  # FSDP has rounded the weights
        trained(without, rules)
    if hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"):
        model, rules = build()
        kept = {param for module in model[1:2] for param in module.parameters()}
        low = dataclasses.replace(low, param_dtype_override_fn=lambda param: param.dtype if param in kept else None)
        fully_shard(model, mp_policy=low)
        torch.testing.assert_close(trained(model, rules), expected, rtol=0, atol=0)


def float32_gradients_of_bfloat16_shards(rank: int, world: int) -> None:
    """By `Tensor.grad_dtype`, which FSDP2 follows since torch 2.15 and before drops: either trains, and skips."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).bfloat16()
    for param in model.parameters():
        param.grad_dtype = torch.float32
    fully_shard(model)
    optimizer, guard = AdamW(model.parameters(), lr=1e-2), GradGuard("cpu")
    for step in range(3):
        before = [param.detach().full_tensor() for param in model.parameters()]
        x = torch.full((4, 8), torch.nan if step == 1 and rank == 0 else 1.0, dtype=torch.bfloat16)
        norm: Any = guard.backward_and_step(model(x).float().square().mean(), optimizer, max_norm=1.0)
        assert {param.grad.dtype for param in model.parameters()} == {GRADIENTS_OF_SHARDS}
        assert bool(norm.isfinite()) is (step != 1)
        optimizer.zero_grad()
        after = [param.detach().full_tensor() for param in model.parameters()]
        assert all(map(torch.equal, before, after)) is (step == 1)


GRADIENTS_OF_SHARDS = torch.float32 if parsed(torch.__version__) >= (2, 15) else torch.bfloat16


@pytest.mark.parametrize(
    "check",
    [
        ddp_has_torchs_bits,
        float32_rules_hold_under_a_policy_of_fsdp2,
        float32_gradients_of_bfloat16_shards,
        fsdp2_has_torchs_bits,
        tensor_and_sequence_parallel_have_torchs_bits,
    ],
)
def test_on_two_processes(check: Callable[[int, int], None]) -> None:
    on_ranks(check)
