"""The scaler on a GPU: no host synchronisation, capture in a CUDA graph, several devices. Skipped without one.

That dtypes, norms and trained weights are those of the reference and of torch.amp: gpu_checks.
"""

import math

import pytest
import torch

import ampkit.optim
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.loss_scale import DynamicLossScale
from tests.helpers.scaler_tools import iterate, with_grads

pytestmark = pytest.mark.gpu

# A captured step warns of a learning rate that the host holds.
AWARE = {
    "torch_fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "ampkit": lambda params: ampkit.optim.AdamW(params, lr=torch.tensor(1e-2, device="cuda")),
    "ampkit_sgd": lambda params: ampkit.optim.SGD(params, lr=torch.tensor(1e-2, device="cuda"), momentum=0.9),
}


@pytest.fixture
def sync_is_an_error():
    """Any host wait inside raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def started(*arguments, **options) -> GradScaler:
    scaler = GradScaler("cuda", *arguments, **options)
    scaler.scale(torch.ones((), device="cuda", requires_grad=True))
    return scaler


@pytest.mark.parametrize("which", AWARE)
@pytest.mark.parametrize("rule", [DynamicLossScale(), DynamicLossScale(hysteresis=2, tolerance=0.1)])
def test_no_host_wait_in_an_iteration(which, rule, sync_is_an_error) -> None:
    torch.cuda.set_sync_debug_mode("default")
    params = with_grads([torch.randn(1000, device="cuda"), torch.randn(3, 5, device="cuda")])
    optimizer = AWARE[which](params)
    scaler = started(loss_scale=rule)
    loss = torch.ones((), device="cuda", requires_grad=True)
    scaler.step(optimizer)  # the first step compiles kernels and makes the optimizer's state
    scaler.update()
    torch.cuda.set_sync_debug_mode("error")
    for step in range(300):  # past a folding of the counts
        scaler.scale(loss)
        if step % 3 == 0:
            scaler.unscale_(optimizer)
        elif step % 3 == 1:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.found_inf(optimizer)
        scaler.update()


@pytest.mark.parametrize("which", AWARE)
def test_step_and_update_replay_in_a_cuda_graph(which) -> None:
    """Scales as eager, and replays are counted."""
    params = with_grads([torch.ones(16, device="cuda")])
    optimizer = AWARE[which](params)
    scaler = started(8.0, growth_interval=2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            iterate(scaler, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    scaler.update(8.0)
    scaler._growth_tracker.zero_()
    warmed_up = scaler.stats()
    for group in optimizer.param_groups:
        group["capturable"] = True  # torch's optimizers refuse capture without it, and warn of it before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iterate(scaler, optimizer)
    seen = []
    for value in (1.0, 1.0, math.inf, 1.0):
        params[0].grad.fill_(value)
        graph.replay()
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    assert seen == [(8.0, 1), (16.0, 0), (8.0, 0), (8.0, 1)]
    stats = scaler.stats()
    assert stats.updates - warmed_up.updates == 4
    assert stats.skips - warmed_up.skips == 1
    assert stats.backoffs - warmed_up.backoffs == 1


def test_gradients_offloaded_to_the_host() -> None:
    params = with_grads([torch.full((5,), 8.0, device="cuda"), torch.full((5,), 8.0)])
    scaler = started(4.0)
    optimizer = torch.optim.SGD(params, lr=1.0)
    norm = scaler.clip_grad_norm_(optimizer, 1e9)
    assert norm.is_cuda
    assert norm.item() == pytest.approx(2.0 * math.sqrt(10))
    assert [p.grad.tolist() for p in params] == [[2.0] * 5] * 2
    iterate(scaler, optimizer)
    params[1].grad[0] = math.nan
    scaler.step(optimizer)
    assert bool(scaler.found_inf(optimizer))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_overflow_as_one() -> None:
    params = with_grads([torch.full((5,), math.inf, device="cuda:0"), torch.full((5,), math.inf, device="cuda:1")])
    optimizer = AWARE["torch_fused"](params)
    scaler = started()
    scaler.step(optimizer)
    assert all((param == 1.0).all() for param in params)
    outputs = scaler.scale([torch.ones((), device=f"cuda:{i}", requires_grad=True) for i in range(2)])
    assert [output.device.index for output in outputs] == [0, 1]
