"""FP8 rules under FSDP2 and tensor parallel, on two ranks of gloo, beside one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ampkit import record_casts
from tests.helpers.float8 import BF16, GW_HP, ROWWISE, RULES, TENSORWISE, fp8, mlp, step
from tests.helpers.ranks import on_ranks


def model():
    torch.manual_seed(0)
    return mlp()


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def fsdp(rank, world, rule, dtype):
    """Before and after a step: calls in FP8, whether the output has one process's bits, the distance of gradients."""
    mesh, sharded, whole = init_device_mesh("cpu", (world,)), model(), model()
    for module in (sharded[0], sharded[2], sharded):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype), reshard_after_forward=True)
    xs, grads = torch.randn(world, 32, 64, dtype=dtype), torch.randn(world, 32, 64)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
    result = []
    for _ in range(2):
        wanted = [step(whole.to(dtype), x, grad, fp8(rule)) for x, grad in zip(xs, grads, strict=True)]
        optimizer.zero_grad()
        with record_casts() as record, fp8(rule):
            y = sharded(xs[rank])
        y.backward(grads[rank].to(y.dtype))
        means = [torch.stack(each).float().mean(0) for each in zip(*(want[2:] for want in wanted), strict=True)]
        apart = max(distance(p.grad.full_tensor(), want) for p, want in zip(sharded.parameters(), means, strict=True))
        result.append((sum(call.float8 == rule.name for call in record.calls), torch.equal(y, wanted[rank][0]), apart))
        optimizer.step()
        whole = model()
        for parameter, shard in zip(whole.parameters(), sharded.parameters(), strict=True):
            parameter.data.copy_(shard.full_tensor().detach())
    return result


@pytest.mark.parametrize(("rule", "dtype"), [(TENSORWISE, torch.float32), (ROWWISE, BF16), (GW_HP, torch.float32)])
def test_fsdp_computes_what_one_process_does(rule, dtype):
    """Nothing is stale after a step; with bfloat16 parameters gradients are reduced in bfloat16."""
    for steps in on_ranks(fsdp, rule, dtype):
        for n_fp8, same_output, apart in steps:
            assert (n_fp8, same_output) == (2, True)
            assert apart <= (1e-6 if dtype is torch.float32 else 5e-3)


def reduced_between(rank, world):
    """Whether the version stays and the layer has a new cast, after a collective has written to the layer's input."""
    layer, x = torch.nn.Linear(64, 48), torch.full((8, 64), rank + 1.0, requires_grad=True) * 1
    with fp8(ROWWISE):
        layer(x)
        before = x._version
        dist.all_reduce(x.detach())
        found = layer(x)
    with fp8(ROWWISE):
        return x._version == before, torch.equal(found, layer(x))


def test_a_collective_on_a_shared_input_is_seen():
    assert on_ranks(reduced_between) == [(True, True)] * 2


def tensor_parallel(rank, world, rule):
    """The distances of output and gradients from those of one process."""
    whole = model()
    split = parallelize_module(
        model(), init_device_mesh("cpu", (world,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    x, grad = torch.randn(32, 64), torch.randn(32, 64)
    with record_casts() as record:
        found = step(split, x, grad, fp8(rule))
    assert [call.float8 for call in record.calls] == [rule.name] * 2
    assert "products in compiled code and of DTensors are omitted" in str(record.float8())
    full = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]
    return [distance(each, want) for each, want in zip(full, step(whole, x, grad, fp8(rule)), strict=True)]


@pytest.mark.parametrize("rule", RULES)
def test_under_tensor_parallel_an_amax_is_the_groups(rule):
    """An amax of one rank's part would show as an error of FP8's size; sums of bfloat16 parts are rounded twice."""
    for output, x_grad, *grads in on_ranks(tensor_parallel, rule):
        assert max(output, x_grad) <= 1e-2
        assert max(grads) <= 5e-3
