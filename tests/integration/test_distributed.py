"""Regions on two processes: DDP, FSDP2 and tensor parallelism over gloo, beside torch.autocast where that works."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ampkit
from ampkit import Policy, Rule, WeightCache
from benchmarks.workloads import Decoder, DecoderBlock
from tests.helpers.models import CASES
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")

WORLD = 2
Region = Callable[[], contextlib.AbstractContextManager[Any]]
Check = Callable[[], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Add `function` to what runs in both processes, in a test of its name."""
    CHECKS[function.__name__] = function
    return function


def native() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def ours() -> contextlib.AbstractContextManager[Any]:
    return ampkit.autocast("cpu", torch.bfloat16, policy=Policy.torch("cpu"))


def train(wrap: Callable[[nn.Module], nn.Module], region: Region, name: str = "convnet") -> list[Tensor]:
    """Losses, gradients and parameters of three steps of a wrapped model, each process on data of its own."""
    case = next(case for case in CASES if case.name == name)
    torch.manual_seed(0)
    model = wrap(case.build())
    torch.manual_seed(1 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        inputs, targets = case.batch()
        with region():
            loss = case.loss(model(inputs), targets)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [value.to_local() if isinstance(value, DTensor) else value for value in (*found, *model.parameters())]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    """Equal dtypes and values, one by one."""
    assert len(got) == len(expected) > 10
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one.dtype is other.dtype, index
        assert torch.equal(one, other), f"value {index} of {len(got)} differs by {(one - other).abs().max()}"


@check
def ddp_has_torchs_bits() -> None:
    expected = train(DistributedDataParallel, native)
    got = train(DistributedDataParallel, ours)
    assert_same(got, expected)
    assert not torch.equal(got[0], train(DistributedDataParallel, contextlib.nullcontext)[0])
    parameters = torch.cat([value.detach().flatten() for value in got[-8:]])
    gathered = [torch.empty_like(parameters) for _ in range(WORLD)]
    dist.all_gather(gathered, parameters)
    assert torch.equal(*gathered), "the replicas have drifted apart"


@check
def ddp_options_have_torchs_bits() -> None:
    """Views of buckets, unused parameters; static graphs, compressed gradients."""

    def viewing(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)

    def static(model: nn.Module) -> nn.Module:
        model = DistributedDataParallel(model, static_graph=True)
        model.register_comm_hook(None, fp16_compress_hook)
        return model

    assert_same(train(viewing, ours, "decoder"), train(viewing, native, "decoder"))
    assert_same(train(static, ours), train(static, native))


@check
def ddp_joins_ranks_with_uneven_inputs() -> None:
    """A rank that has run out shadows the collectives of the others; its scaler and cache have had fewer steps."""

    def run(region: Region, scaler: torch.amp.GradScaler) -> list[Tensor]:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        with model.join():
            for _ in range(2 + 3 * dist.get_rank()):
                optimizer.zero_grad()
                with region():
                    loss = model(torch.ones(4, 8)).float().pow(2).mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                found.append(loss.detach())
        return [*found, *model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]

    cache, policy = WeightCache(), Policy.torch("cpu")
    got = run(lambda: ampkit.autocast("cpu", torch.bfloat16, policy=policy, cache=cache), ampkit.GradScaler("cpu"))
    expected = run(native, torch.amp.GradScaler("cpu"))
    assert len(got) == len(expected) == 10 + 3 * dist.get_rank()
    assert all(map(torch.equal, got, expected))


@check
def ddp_accumulates_with_a_lasting_cache() -> None:
    """`no_sync` micro-batches; every weight is cast once per optimizer step, gradients are those without the cache."""

    def gradients(cache: WeightCache | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = DistributedDataParallel(Decoder())
        torch.manual_seed(1 + dist.get_rank())
        found = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for micro in range(3):
                ids = torch.randint(32, (2, 9))
                with model.no_sync() if micro < 2 else contextlib.nullcontext():
                    with ampkit.autocast("cpu", torch.bfloat16, cache=cache):
                        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                    loss.backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        return found

    cache = WeightCache()
    assert_same(gradients(cache), gradients(None))
    info = cache.info()
    assert info.misses * 2 == info.hits > 0, f"{info}: expected one cast and two uses of it for each weight and step"


@check
def ddp_runs_a_wrapped_forward() -> None:
    """The region belongs to the module inside, the loop around it opens none."""

    def wrap(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(ampkit.wrap_forward(model, "cpu", torch.bfloat16, policy=Policy.torch("cpu")))

    def decorated(model: nn.Module) -> nn.Module:
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        return DistributedDataParallel(model)

    assert_same(train(wrap, contextlib.nullcontext), train(decorated, contextlib.nullcontext))


def shard_blocks(model: nn.Module, policy: MixedPrecisionPolicy, **options: Any) -> nn.Module:
    """FSDP2 on every block, then on the whole."""
    for module in model.modules():
        if isinstance(module, DecoderBlock):
            fully_shard(module, mp_policy=policy, **options)
    fully_shard(model, mp_policy=policy, **options)
    return model


@check
def fsdp2_has_torchs_bits() -> None:
    """Sharding in float32, casting by the region; with and without resharding after forward."""
    for reshard in (True, False):
        def wrap(model: nn.Module, reshard: bool = reshard) -> nn.Module:
            return shard_blocks(model, MixedPrecisionPolicy(), reshard_after_forward=reshard)

        got = train(wrap, ours, "decoder")
        assert_same(got, train(wrap, native, "decoder"))
        assert {value.dtype for value in got} == {torch.float32}


@check
def fsdp2_with_its_own_low_precision_parameters_has_torchs_bits() -> None:
    """FSDP casts parameters before the all-gather; the region still keeps what must be float32 there."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def wrap(model: nn.Module) -> nn.Module:
        return shard_blocks(model, policy)

    assert_same(train(wrap, ours, "decoder"), train(wrap, native, "decoder"))


@check
def fsdp2_weights_are_recast_after_a_step() -> None:
    """FSDP writes gathered weights into one storage, below the version counter: a lasting cache must notice steps."""
    cache = WeightCache()

    def wrap(model: nn.Module) -> nn.Module:
        return shard_blocks(model, MixedPrecisionPolicy())

    def lasting() -> contextlib.AbstractContextManager[Any]:
        return ampkit.autocast("cpu", torch.bfloat16, policy=Policy.torch("cpu"), cache=cache)

    assert_same(train(wrap, lasting, "decoder"), train(wrap, native, "decoder"))
    assert cache.info().misses > 0


@check
def sharded_weights_written_between_regions_are_recast() -> None:
    """No optimizer steps, and the all-gather of the next forward does not bump the version counter. FSDP 2 and 1."""

    def assert_fresh(model: nn.Module, ids: Tensor, rewritten: Callable[[nn.Module], None]) -> None:
        cache = WeightCache()
        for trial in range(6):
            for grad in (torch.no_grad, torch.enable_grad):
                with grad(), ampkit.autocast("cpu", torch.bfloat16, cache=cache):
                    got = model(ids)
                with grad(), ampkit.autocast("cpu", torch.bfloat16):
                    expected = model(ids)
                assert torch.equal(got, expected), f"stale in trial {trial}"
            rewritten(model)

    def clamped(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(-0.9)
                p.clamp_(-0.3, 0.3)

    def loaded(model: nn.Module) -> None:
        model.load_state_dict({name: value * 0.8 for name, value in model.state_dict().items()})

    ids = torch.randint(32, (2, 8))
    for reshard in (True, False):
        for rewritten in (clamped, loaded):
            def resharded(model: nn.Module, rewritten: Callable[[nn.Module], None] = rewritten) -> None:
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()
                rewritten(model)

            model = shard_blocks(Decoder(), MixedPrecisionPolicy(), reshard_after_forward=reshard)
            assert_fresh(model, ids, resharded)
    assert_fresh(FullyShardedDataParallel(Decoder(), use_orig_params=True, device_id=torch.device("cpu")), ids, clamped)


@check
def collectives_that_write_weights_are_seen() -> None:
    """They do not bump the version counter. A cache that outlives regions recasts after each."""
    rank = dist.get_rank()

    def exchange(p: Tensor) -> None:
        dist.send(p, 1) if rank == 0 else dist.recv(p, 0)

    def exchange_batch(p: Tensor) -> None:
        operation = dist.P2POp(dist.isend if rank == 0 else dist.irecv, p, 1 - rank)
        for work in dist.batch_isend_irecv([operation]):
            work.wait()

    def wait_for_broadcast(p: Tensor) -> None:
        work = dist.broadcast(p, 0, async_op=True)
        assert work is not None
        work.wait()

    writes: dict[str, Callable[[Tensor], object]] = {
        "broadcast": lambda p: dist.broadcast(p, 0),
        "broadcast, async": wait_for_broadcast,
        "all_reduce": dist.all_reduce,
        "reduce": lambda p: dist.reduce(p, 1),
        "scatter": lambda p: dist.scatter(p, [torch.full((4, 4), 5.0)] * WORLD if rank == 0 else None, 0),
        "all_to_all": lambda p: dist.all_to_all_single(p, torch.full((4, 4), 7.0)),
        "recv": exchange,
        "irecv": exchange_batch,
        "DDP made": lambda p: dist._broadcast_coalesced(dist.group.WORLD, [p.detach()], 1024, 0),
    }
    x = torch.eye(4, dtype=torch.bfloat16)
    for name, write in writes.items():
        for trained in (True, False):
            p, cache = nn.Parameter(torch.full((4, 4), 1.0 + rank), trained), WeightCache()
            with ampkit.autocast("cpu", torch.bfloat16, cache=cache):
                torch.mm(x, p)
            with torch.no_grad():
                write(p)
            with ampkit.autocast("cpu", torch.bfloat16, cache=cache):
                assert torch.equal(torch.mm(x, p), p.to(torch.bfloat16)), name


class Perceptron(nn.Module):
    """Norm, up, GELU, down: what column-wise and row-wise parallelism are made for."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def parallel_perceptron(sequence: bool) -> Perceptron:
    """The model split over both processes, from the seed that `Perceptron()` would be built from."""
    torch.manual_seed(0)
    model = Perceptron()
    mesh = init_device_mesh("cpu", (WORLD,))
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
    parallelize_module(model, mesh, plan)
    return model


def parallel_step(model: Perceptron, x: Tensor, region: Region) -> dict[str, Tensor]:
    """Output and whole gradients of one step, all of them checked to be what float32 parameters should get."""
    model.zero_grad()
    with region():
        y = model(x)
        y = y.full_tensor() if isinstance(y, DTensor) else y
    y.float().pow(2).sum().backward()
    found = {"output": y.detach()}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.dtype is torch.float32, f"{name} has a {p.grad.dtype} gradient"
        assert isinstance(p.grad, DTensor) == isinstance(p, DTensor)
        found[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
    return found


def assert_parallel_is_right(sequence: bool) -> None:
    """Against torch.autocast on the same split model, bit for bit, and against one process up to rounding."""
    torch.manual_seed(0)
    whole = Perceptron()
    torch.manual_seed(3)
    x = torch.randn(2, 4, 8)
    exact = parallel_step(copy.deepcopy(whole), x, contextlib.nullcontext)
    model = parallel_perceptron(sequence)
    local = distribute_tensor(x, init_device_mesh("cpu", (WORLD,)), [Shard(1)]) if sequence else x
    for policy in (Policy.torch("cpu"), Policy.default("cpu")):
        got = parallel_step(model, local, lambda policy=policy: ampkit.autocast("cpu", torch.bfloat16, policy=policy))
        assert got["output"].dtype is torch.bfloat16
        for name, value in exact.items():
            error = (got[name].float() - value).norm() / value.norm()
            assert error < 0.03, f"{name} is {error:.3f} from float32's"
    got = parallel_step(model, local, ours)
    expected = parallel_step(model, local, native)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@check
def tensor_parallel_has_torchs_bits() -> None:
    assert_parallel_is_right(sequence=False)


@check
def sequence_parallel_has_torchs_bits() -> None:
    assert_parallel_is_right(sequence=True)


@check
def dtensor_operators_follow_the_policy() -> None:
    """Casts of a DTensor stay DTensors with the same placement, and the user's rules reach them."""
    mesh = init_device_mesh("cpu", (WORLD,))
    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
    weight = nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [Replicate()]))
    with ampkit.autocast("cpu", torch.bfloat16):
        product = x @ weight
        probabilities = product.softmax(-1)
    assert isinstance(product, DTensor)
    assert (product.dtype, product.placements) == (torch.bfloat16, (Shard(0),))
    assert probabilities.dtype is torch.float32
    kept = Policy.default("cpu").with_rules({"aten::matmul": Rule.FLOAT32})
    with ampkit.autocast("cpu", torch.bfloat16, policy=kept):
        assert (x @ weight).dtype is torch.float32
    product.to_local().float().sum().backward()
    assert isinstance(weight.grad, DTensor)
    assert weight.grad.dtype is torch.float32


def run_check(rank: int, world: int, name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_processes(name: str) -> None:
    on_ranks(run_check, name)
