"""Regions beside what people do to modules: parametrizations, copies, assignment, optimizers, scripts, contexts.
"""

import contextlib
import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import ampkit
from tests.helpers.matrix import QUIET, Net, Program, Programs, Region, default, gradients

PROGRAMS = Programs()
pytestmark = QUIET


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@PROGRAMS.add
def parametrizations(region: Region) -> Any:
    model, x = nn.Sequential(weight_norm(nn.Linear(6, 6)), spectral_norm(nn.Linear(6, 6)), orthogonal(nn.Linear(6, 6)),
                             nn.Linear(6, 6)), torch.randn(4, 6)
    parametrize.register_parametrization(model[3], "weight", Doubled())
    with region():
        out = model(x)
    out.float().sum().backward()
    return out, gradients(model)


@PROGRAMS.add
def cached_parametrizations(region: Region) -> Any:
    """The weight is computed once and is no leaf: it is cast at each use, never taken from the cache."""
    model, x = nn.Sequential(*[nn.Linear(6, 6)] * 2), torch.randn(4, 6)
    parametrize.register_parametrization(model[0], "weight", Doubled())
    with region(), parametrize.cached():
        out = model(x)
    out.float().sum().backward()
    return out, gradients(model)


@PROGRAMS.add
def copied_in_the_region(region: Region) -> Any:
    """A copy made while its original's casts are cached has weights, and casts, of its own."""
    model, x = Net(), torch.randn(4, 6)
    with region():
        first = model(x)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(2)
        second = twin(x)
        third = pickle.loads(pickle.dumps(model))(x)
    (first + second).float().sum().backward()
    return first, second, third, gradients(model), gradients(twin)


@PROGRAMS.add
def weights_assigned_in_the_region(region: Region) -> Any:
    """`.data`, `load_state_dict` and new parameters: the next use sees the new weight."""
    model, x = nn.Linear(6, 6), torch.randn(4, 6)
    outs = []
    with region():
        outs.append(model(x))
        torch.clear_autocast_cache()
        ampkit.clear_autocast_cache()
        model.weight.data.mul_(2)
        outs.append(model(x))
        model.weight = nn.Parameter(torch.ones(6, 6))
        outs.append(model(x))
    return outs


@PROGRAMS.add
def optimizer_step_in_the_region(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(model.enter.parameters(), foreach=True), torch.optim.Adam(model.norm.parameters()),
        torch.optim.SGD(model.leave.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
    ]
    with region():
        model(x).float().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach() for p in model.parameters()], gradients(model)


@PROGRAMS.add
def encoder_fast_path(region: Region) -> Any:
    """Evaluation of torch's own transformer layers, where it may take a fused operator."""
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)
    with torch.inference_mode(), region():
        return encoder(x), attention(x, x, x, need_weights=False)[0]


@PROGRAMS.add
def quantised_linear(region: Region) -> Any:
    """An int8 weight beside the region's own: dequantised by hand, then cast like any other."""
    weight, scale, x = torch.randint(-127, 127, (3, 6), dtype=torch.int8), torch.rand(3, 1), torch.randn(4, 6)
    with region():
        return F.linear(x, weight * scale)


@PROGRAMS.add
def checkpoint_reentrant_and_not(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6, requires_grad=True)
    with region():
        parts = checkpoint(model, x, use_reentrant=True), checkpoint(model, x, use_reentrant=False)
    torch.stack(parts).float().sum().backward()
    return *parts, x.grad, gradients(model)


@PROGRAMS.add
def a_default_device_and_dtype(region: Region) -> Any:
    with torch.device("cpu"), region():
        model = Net()
        x = torch.randn(4, 6)
        return model(x), torch.ones(2, 2) @ torch.ones(2, 2)


@PROGRAMS.add
def a_profiled_region(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6)
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile, region():
        out = model(x)
        out.float().sum().backward()
    assert any(event.key == "aten::linear" for event in profile.key_averages())
    return out, gradients(model)


@PROGRAMS.add
def deterministic_algorithms(region: Region) -> Any:
    model, x = nn.Conv1d(3, 4, 3), torch.randn(2, 3, 8)
    torch.use_deterministic_algorithms(True)
    try:
        with region():
            out = model(x)
        out.float().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    return out, gradients(model)


@PROGRAMS.add
def traced_module(region: Region) -> Any:
    """`torch.jit.trace` in a region with its cache off, as torch demands; the trace has the casts."""
    model, x = Net(), torch.randn(4, 6)
    with region(), off_cache(), torch.no_grad():
        traced = cast("nn.Module", torch.jit.trace(model, x, check_trace=False))
    return traced(x)


@contextlib.contextmanager
def off_cache() -> Iterator[None]:
    """Weight casts are not kept in here, whoever makes them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@PROGRAMS.add
def scripted_module(region: Region) -> Any:
    """The result only: TorchScript's executor rounds its gradients otherwise once it has warmed up."""
    scripted: Any = torch.jit.script(Net())
    x = torch.randn(4, 6)
    with region():
        return scripted(x)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_have_torchs_bits(program: Program) -> None:
    program.check_bits()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_under_the_default_policy_stay_near_float32(program: Program) -> None:
    program.check_near_float32()


def test_models_saved_in_a_region_hold_weights_and_no_casts() -> None:
    model, x = Net(), torch.randn(4, 6)
    with default():
        model(x)
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert {value.dtype for value in loaded.values()} == {torch.float32}
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
