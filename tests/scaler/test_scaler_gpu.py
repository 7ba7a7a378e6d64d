"""The scaler on a GPU: no synchronization, capture in a CUDA graph, several devices. Skipped without one.

That dtypes, norms and trained weights are those of the reference and of torch.amp: gpu_checks.
"""

import math
from dataclasses import replace

import pytest
import torch

import ampkit.optim
from ampkit import DynamicLossScale, GradScaler, NoOpLossScale
from tests.helpers.scaler_tools import iterate, started, with_grads

pytestmark = pytest.mark.gpu

# A captured step warns of a learning rate that the host holds.
AWARE = {
    "torch_fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "ampkit": lambda params: ampkit.optim.AdamW(params, lr=torch.tensor(1e-2, device="cuda")),
    "ampkit_sgd": lambda params: ampkit.optim.SGD(params, lr=torch.tensor(1e-2, device="cuda"), momentum=0.9),
}


@pytest.mark.parametrize("which", AWARE)
@pytest.mark.parametrize("rule", [DynamicLossScale(), DynamicLossScale(hysteresis=2), NoOpLossScale()])
def test_no_host_wait_in_an_iteration(which, rule) -> None:
    optimizer = AWARE[which](with_grads([torch.randn(1000, device="cuda"), torch.randn(3, 5, device="cuda")]))
    scaler, loss = started(device="cuda", loss_scale=rule), torch.ones((), device="cuda", requires_grad=True)
    iterate(scaler, optimizer)  # the first step compiles kernels and makes the optimizer's state
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(300):  # past a folding of the counts
            scaler.scale(loss)
            if step % 3 == 0:
                scaler.unscale_(optimizer)
            elif step % 3 == 1:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.found_inf(optimizer)
            scaler.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("which", AWARE)
def test_step_and_update_replay_in_a_cuda_graph(which) -> None:
    """Scales as eager. Replays are not counted."""
    params = with_grads([torch.ones(16, device="cuda")])
    optimizer, scaler = AWARE[which](params), started(GradScaler, 8.0, device="cuda", growth_interval=2)
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
    assert scaler.stats() == replace(warmed_up, scale=8.0)


def test_gradients_offloaded_to_the_host() -> None:
    params = with_grads([torch.full((5,), 8.0, device="cuda"), torch.full((5,), 8.0)])
    optimizer, scaler = torch.optim.SGD(params, lr=1.0), started(GradScaler, 4.0, device="cuda")
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
    params = with_grads([torch.full((5,), math.inf, device=f"cuda:{i}") for i in range(2)])
    scaler = started(device="cuda")
    scaler.step(AWARE["torch_fused"](params))
    assert [param.tolist() for param in params] == [[1.0] * 5] * 2
    outputs = scaler.scale([torch.ones((), device=f"cuda:{i}", requires_grad=True) for i in range(2)])
    assert [output.device.index for output in outputs] == [0, 1]
