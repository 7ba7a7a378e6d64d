"""initialize and scale_loss: each level against what it stands for, and everything that may be refused."""

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import Policy, amp, autocast, record_casts
from ampkit.optim import SGD, AdamW
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from ampkit.whole_model import levels
from ampkit.whole_model._level_options import LEVELS, resolve
from ampkit.whole_model.fp16_optimizer import FP16Optimizer
from ampkit.whole_model.levels import (
    amp_state_dict,
    initialize,
    load_amp_state_dict,
    loss_scalers,
    master_params,
    scale_loss,
)
from ampkit.whole_model.master_weights import MasterWeights

HALVES = [torch.float16, torch.bfloat16]
ids = {"ids": lambda value: str(value).removeprefix("torch.")}


@pytest.fixture(autouse=True)
def _forget_other_tests() -> None:
    """Start with no initialize in memory: functions without an optimizer mean the only one."""
    levels._sessions.clear()


class Net(nn.Module):
    """Convolution, batch norm, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.bn(self.conv(x))).flatten(1))


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batches(n: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 1, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator))
        for _ in range(n)
    ]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def backward(loss: Tensor, optimizer: object, **options: object) -> None:
    with scale_loss(loss, optimizer, **options) as scaled:  # type: ignore[arg-type]
        scaled.backward()


def set_up(opt_level: str, model: nn.Module | None = None, **options: object) -> tuple[nn.Module, torch.optim.SGD]:
    model = make() if model is None else model
    return initialize(model, sgd(model), opt_level, **{"verbosity": 0, **options})


# --- the levels' meaning


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("dtype", HALVES, **ids)
def test_properties_of_the_levels(opt_level: str, dtype: torch.dtype) -> None:
    """Apex's table, with no scale where bfloat16 needs none."""
    options = resolve(opt_level, dtype)
    fp16 = dtype is torch.float16
    dynamic = DynamicLossScale(max_scale=2.0**24) if fp16 else NoOpLossScale()
    expected = {
        "O0": (False, False, False, False, None),
        "O1": (False, True, False, False, dynamic),
        "O2": (True, False, True, True, dynamic),
        "O3": (True, False, False, False, NoOpLossScale()),
    }[opt_level]
    assert expected == (
        options.casts_model, options.has_region, options.keep_batchnorm_fp32, options.master_weights, options.loss_scale
    )
    assert options.cast_model_outputs is torch.float32
    assert opt_level in str(options)


@pytest.mark.parametrize("dtype", HALVES, **ids)
@pytest.mark.parametrize(
    ("opt_level", "conv", "bn", "stepped"),
    [("O0", None, None, None), ("O1", None, None, None), ("O2", "low", None, None), ("O3", "low", "low", "low")],
)
def test_dtypes_of_weights_and_of_what_is_stepped(
    opt_level: str, conv: str | None, bn: str | None, stepped: str | None, dtype: torch.dtype
) -> None:
    model, optimizer = set_up(opt_level, **({} if opt_level == "O0" else {"dtype": dtype}))

    def of(mark: str | None) -> torch.dtype:
        return dtype if mark else torch.float32

    assert model.conv.weight.dtype == model.head.weight.dtype == of(conv)
    assert model.bn.weight.dtype == model.bn.running_var.dtype == of(bn)
    assert {p.dtype for p in master_params(optimizer)} == {of(stepped)}
    output = model(batches(1)[0][0].double() if opt_level != "O1" else batches(1)[0][0])
    assert output.dtype is torch.float32
    seen = []
    model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    model(batches(1)[0][0])
    assert seen == [torch.float32 if opt_level == "O0" else dtype]


def test_the_device_decides_the_16_bit_type() -> None:
    model, _ = set_up("O2")
    assert model.conv.weight.dtype is torch.get_autocast_dtype("cpu") is torch.bfloat16


@pytest.mark.parametrize("make_optimizer", [sgd, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2)])
def test_o0_is_plain_float32_to_the_bit(make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    plain = make()
    plain_optimizer = make_optimizer(plain)
    model = make()
    model, optimizer = initialize(model, make_optimizer(model), "O0", verbosity=0)
    for x, y in batches(8):
        plain_optimizer.zero_grad()
        expected = F.cross_entropy(plain(x), y)
        expected.backward()
        plain_optimizer.step()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        backward(loss, optimizer)
        optimizer.step()
        assert torch.equal(loss, expected)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)
            assert torch.equal(p.grad, q.grad)


def test_o0_steps_on_whatever_it_is_given() -> None:
    """As plain torch: without a backward, and on gradients from anywhere."""
    model, optimizer = set_up("O0")
    optimizer.step()
    F.cross_entropy(model(batches(1)[0][0]), batches(1)[0][1]).backward()
    before = model.conv.weight.clone()
    optimizer.step()
    assert not torch.equal(model.conv.weight, before)


@pytest.mark.parametrize("dtype", HALVES, **ids)
@pytest.mark.parametrize(
    "optimizer_of", [sgd, lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9)], ids=["torch", "ampkit"]
)
def test_o1_is_autocast_and_a_scaler_to_the_bit(
    dtype: torch.dtype, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    """Losses, gradients, weights and scale of 12 steps, overflows and growths among them."""
    rule = DynamicLossScale(init_scale=2.0**22, growth_interval=3, max_scale=2.0**40)
    plain = make()
    plain_optimizer = optimizer_of(plain)
    scaler = GradScaler("cpu", loss_scale=rule)
    model = make()
    model, optimizer = initialize(
        model, optimizer_of(model), "O1", dtype=dtype, loss_scale=rule, verbosity=0, policy=Policy.default("cpu")
    )
    skips = 0
    for x, y in batches(12):
        plain_optimizer.zero_grad()
        with autocast("cpu", dtype):
            expected = F.cross_entropy(plain(x), y)
        scaler.scale(expected).backward()
        scaler.unscale_(plain_optimizer)
        scaler.step(plain_optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        backward(loss, optimizer)
        grads = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert torch.equal(loss, expected)
        assert loss_scalers(optimizer)[0].get_scale() == scaler.get_scale()
        for p, q, grad in zip(model.parameters(), plain.parameters(), grads, strict=True):
            assert torch.equal(p, q)
            assert torch.equal(grad, q.grad) or not torch.isfinite(q.grad).all()
        skips += scaler.stepped(plain_optimizer) is False
    stats = loss_scalers()[0].stats()
    assert (stats.steps, stats.skips) == (scaler.stats().steps, scaler.stats().skips)
    assert (skips > 0) is (dtype is torch.float16)
    assert stats.growths > 0


def gradient_error_bound(x: Tensor, y: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """How far a least-squares gradient computed in `dtype` may be from the exact one, elementwise, in float64.

    With unit roundoff u, x and w are rounded once each, the prediction once more: it is off by at most
    c3 |x||w|, where ck = k u / (1 - k u). The gradient of the loss is rounded, multiplied with rounded x, and
    rounded: x^T r (2/n) is off by at most c3 |x|^T |r| (2/n), and the prediction's error comes on top. Sums are
    accumulated in float32; float32's unit times the number of terms covers that and the loss itself.
    """
    n, d = x.shape
    u = torch.finfo(dtype).eps / 2 + (n + d + 4) * 2.0**-24
    c3 = 3 * u / (1 - 3 * u)
    residual = (x @ w - y).abs()
    prediction_error = c3 * (x.abs() @ w.abs())
    # what float16 rounds below its normal range is off by half its smallest number instead
    tiny = 2.0**-25 if dtype is torch.float16 else 0.0
    return 2 / n * (x.abs().T @ ((1 + c3) * prediction_error + c3 * residual)) + tiny * (1 + x.abs().sum(0))


@pytest.mark.parametrize("dtype", HALVES, **ids)
def test_o2_masters_stay_within_the_derived_bound_of_float32(dtype: torch.dtype) -> None:
    """A gradient step of a convex loss with lr <= 2/L moves two points no farther apart. So after T steps the masters
    are within lr * sum_t |error of the t-th gradient| of the float32 run, both from the same start."""
    torch.manual_seed(0)
    n, d, lr, steps = 32, 8, 0.05, 60
    x, truth = torch.randn(n, d), torch.randn(d)
    y = x @ truth + 0.5 * torch.randn(n)
    curvature = float(torch.linalg.matrix_norm(2 / n * x.T @ x, 2))
    assert lr <= 2 / curvature

    def model_of(seed: int) -> nn.Linear:
        torch.manual_seed(seed)
        return nn.Linear(d, 1, bias=False)

    plain, model = model_of(3), model_of(3)
    start = plain.weight.detach().clone()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=lr)
    scale = 64.0 if dtype is torch.float16 else 1.0
    model, optimizer = initialize(
        model, torch.optim.SGD(model.parameters(), lr=lr), "O2", dtype=dtype, loss_scale=scale, verbosity=0
    )
    (master,) = master_params(optimizer)
    allowed = 0.0
    distances = []
    for _ in range(steps):
        here = master.detach().double().flatten()
        allowed += lr * float(gradient_error_bound(x.double(), y.double(), here, dtype).norm())
        plain_optimizer.zero_grad()
        F.mse_loss(plain(x).flatten(), y).backward()
        plain_optimizer.step()
        optimizer.zero_grad()
        backward(F.mse_loss(model(x).flatten(), y), optimizer)
        optimizer.step()
        distance = float((master - plain.weight).detach().double().norm())
        distances.append(distance)
        # float32's own rounding of each update, on both sides
        assert distance <= allowed + 4 * len(distances) * 2.0**-24 * float(plain.weight.detach().norm())
        assert torch.equal(model.weight, master.to(dtype))
    assert max(distances) > 0.0
    travelled = float((plain.weight.detach() - start).norm())
    assert distances[-1] < 0.02 * travelled
    assert loss_scalers()[0].stats().skips == 0


def test_without_masters_small_updates_vanish() -> None:
    """The run that O2 follows within its bound is the one that O3 loses: a step below half a unit changes nothing."""
    ends = {}
    for opt_level in ("O0", "O2", "O3"):
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        low = {} if opt_level == "O0" else {"dtype": torch.bfloat16}
        model, optimizer = initialize(
            model, torch.optim.SGD(model.parameters(), lr=2.0**-12), opt_level, verbosity=0, **low
        )
        for _ in range(64):
            optimizer.zero_grad()
            backward(model(torch.ones(1, 4)).sum(), optimizer)
            optimizer.step()
        ends[opt_level] = next(master_params(optimizer)).detach().float().mean().item()
    assert ends["O0"] == ends["O2"] == 1.0 - 64 * 2.0**-12
    assert ends["O3"] == 1.0


@pytest.mark.parametrize("opt_level", LEVELS)
def test_memory_per_parameter(opt_level: str) -> None:
    """Bytes held for each weight after backward and after step with AdamW, as docs/levels.md has them."""
    model = nn.Linear(64, 64, bias=False)
    n = model.weight.numel()
    optimizer: torch.optim.Optimizer = AdamW(model.parameters())
    low = {} if opt_level == "O0" else {"dtype": torch.bfloat16}
    model, optimizer = initialize(model, optimizer, opt_level, verbosity=0, **low)

    def held() -> int:
        tensors = {model.weight, model.weight.grad, *master_params(optimizer)}
        tensors |= {p.grad for p in master_params(optimizer)}
        tensors |= {v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.ndim}
        return sum(t.nbytes for t in tensors if t is not None)

    for _ in range(2):
        optimizer.zero_grad()
        backward(model(torch.randn(4, 64)).square().mean(), optimizer)
        at_step = held()
        optimizer.step()
    after = held()
    expected = {"O0": (16, 16), "O1": (16, 16), "O2": (18, 14), "O3": (8, 8)}
    assert (at_step / n, after / n) == expected[opt_level]


def test_masters_start_from_the_float32_weights_themselves() -> None:
    model = make()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    model, optimizer = set_up("O2", model)
    for (name, param), master in zip(model.named_parameters(), master_params(optimizer), strict=True):
        assert torch.equal(master, start[name])
        assert master.data_ptr() == addresses[name]     # its storage, so that nothing is copied
        assert torch.equal(param, start[name].to(param.dtype))


def test_o2_in_bfloat16_trains_digits_on_a_cpu() -> None:
    from ampkit.demo.data import load_digits
    from ampkit.demo.models import DigitsNet

    digits = load_digits(torch.device("cpu"))
    model = DigitsNet()
    model, optimizer = initialize(model, AdamW(model.parameters(), lr=5e-3), "O2", dtype=torch.bfloat16, verbosity=0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        for rows in torch.randperm(len(digits.train_labels), generator=generator).split(64):
            optimizer.zero_grad()
            backward(F.cross_entropy(model(digits.train_images[rows]), digits.train_labels[rows]), optimizer)
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = model(digits.held_out_images).argmax(1) == digits.held_out_labels
    assert right.double().mean() >= 0.97


# --- losses, optimizers, accumulation


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", HALVES, **ids)
def test_losses_add_up_under_scales_of_their_own(opt_level: str, dtype: torch.dtype) -> None:
    """Two losses with static scales give the gradients of their sum with none, as far as rounding goes."""
    (x, y), = batches(1)
    grads = []
    for scales in ((1.0, 1.0), (64.0, 1024.0)):
        model, optimizer = set_up(opt_level, dtype=dtype, num_losses=2, loss_scale="2.0")
        for scaler, scale in zip(loss_scalers(optimizer), scales, strict=True):
            scaler.load_state_dict(GradScaler("cpu", loss_scale=StaticLossScale(scale)).state_dict())
        model.eval()
        backward(F.cross_entropy(model(x), y), optimizer, loss_id=0)
        backward(model(x).square().mean(), optimizer, loss_id=1)
        grads.append([p.grad.float() for p in master_params(optimizer)])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_accumulation_with_and_without_delay(opt_level: str) -> None:
    """Powers of two scale exactly, so that gradients unscaled one by one or all at once are the same at O1; at O2
    float32 masters add up without delay, and the 16-bit model with it."""
    results = []
    for delay in (False, True):
        model, optimizer = set_up(opt_level, dtype=torch.float16, loss_scale=256.0)
        model.eval()
        for _ in range(2):
            optimizer.zero_grad()
            for index, (x, y) in enumerate(batches(3)):
                backward(F.cross_entropy(model(x), y) / 3, optimizer, delay_unscale=delay and index < 2)
            optimizer.step()
        results.append([p.detach().clone() for p in master_params(optimizer)])
    for a, b in zip(*results, strict=True):
        if opt_level == "O1":
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_accumulation_over_gradients_that_view_ddps_buckets(opt_level: str, tmp_path: Path) -> None:
    def weights(wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        model, optimizer = set_up(opt_level, dtype=torch.bfloat16, loss_scale=128.0)
        wrapped = wrap(model)
        for x, y in batches(3):
            backward(F.cross_entropy(wrapped(x), y), optimizer)
        optimizer.step()
        return list(master_params(optimizer))

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        got = weights(lambda model: nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True))
    finally:
        torch.distributed.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(got, weights(lambda model: model), strict=True))


def test_masters_accumulate_in_float32() -> None:
    """Many small gradients are not lost beside a large one, as they would be in a float16 `.grad`."""
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", dtype=torch.float16, loss_scale=1.0, verbosity=0
    )
    backward(model(torch.full((1, 1), 64.0)).sum(), optimizer)
    for _ in range(16):
        backward(model(torch.full((1, 1), 2.0**-6)).sum(), optimizer)
    (master,) = master_params(optimizer)
    assert master.grad.item() == 64.25


def test_two_models_two_optimizers_three_losses() -> None:
    """As Apex's documentation has it: each loss with its id, one of them filling both optimizers."""
    first, second = make(0), make(1)
    models, optimizers = initialize(
        [first, second], [sgd(first), sgd(second)], "O2", dtype=torch.float16, num_losses=3, verbosity=0
    )
    assert isinstance(models, list)
    assert isinstance(optimizers, list)
    (x, y), = batches(1)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(F.cross_entropy(models[0](x), y), optimizers[0], loss_id=0)
        backward(F.cross_entropy(models[1](x), y), optimizers[1], loss_id=1)
        backward((models[0](x) - models[1](x)).square().mean(), optimizers, loss_id=2)
        before = [next(master_params(optimizer)).detach().clone() for optimizer in optimizers]
        for optimizer, old in zip(optimizers, before, strict=True):
            optimizer.step()
            assert not torch.equal(next(master_params(optimizer)), old)
    assert len(loss_scalers()) == 3


def overflowing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) * 1e30


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
@pytest.mark.parametrize(
    "optimizer_of",
    [sgd, lambda m: SGD(m.parameters(), 0.1, 0.9), lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9, fused=True)],
    ids=["torch", "ampkit", "fused"],
)
def test_an_overflow_skips_one_step_and_lowers_the_scale(
    opt_level: str, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer], capsys: pytest.CaptureFixture[str]
) -> None:
    model = make()
    model, optimizer = initialize(model, optimizer_of(model), opt_level, dtype=torch.float16, loss_scale="dynamic")
    assert capsys.readouterr().out.startswith(f"ampkit {opt_level} in float16")
    (x, y), = batches(1)
    scaler, = loss_scalers()
    for bad in (False, True, False):
        optimizer.zero_grad()
        before = copy.deepcopy([list(model.parameters()), list(optimizer.state.values())])
        scale = scaler.get_scale() if scaler._scale is not None else 2.0**16
        backward(overflowing(model, x, y) if bad else F.cross_entropy(model(x), y), optimizer)
        optimizer.step()
        now = [list(model.parameters()), list(optimizer.state.values())]
        same = all(torch.equal(a, b) for a, b in zip(now[0], before[0], strict=True))
        assert same is bad
        assert bool(scaler.skipped(optimizer)) is bad
        assert scaler.get_scale() == (scale / 2 if bad else scale)
        if bad:
            for old, new in zip(before[1], now[1], strict=True):
                assert torch.equal(old["momentum_buffer"], new["momentum_buffer"])
            assert not hasattr(optimizer, "found_inf")
            if optimizer_of is sgd:
                assert "step skipped; the loss scale is 32768 now" in capsys.readouterr().out
                assert 'head.weight' in str(scaler.overflow_report(model))
    assert (scaler.stats().steps, scaler.stats().skips) == (2, 1)


def test_a_skipped_step_leaves_gradients_to_look_at() -> None:
    model, optimizer = set_up("O1", dtype=torch.float16)
    (x, y), = batches(1)
    backward(overflowing(model, x, y), optimizer)
    optimizer.step()
    assert not torch.isfinite(model.head.weight.grad).all()


def test_one_overflow_among_several_backwards_skips_the_step() -> None:
    model, optimizer = set_up("O2", dtype=torch.float16, num_losses=2)
    (x, y), = batches(1)
    before = [p.detach().clone() for p in master_params(optimizer)]
    backward(overflowing(model, x, y), optimizer, loss_id=0)
    backward(F.cross_entropy(model(x), y), optimizer, loss_id=1)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, master_params(optimizer), strict=True))
    assert [scaler.get_scale() for scaler in loss_scalers()] == [2.0**15, 2.0**16]
    optimizer.zero_grad()
    backward(F.cross_entropy(model(x), y), optimizer, loss_id=1)
    optimizer.step()
    assert not torch.equal(before[0], next(master_params(optimizer)))


def test_model_zero_grad_is_enough() -> None:
    """Scripts that clear through the model: masters let go of their gradients at each step, skipped or not."""
    model, optimizer = set_up("O2", dtype=torch.float16)
    (x, y), = batches(1)
    for bad in (True, False, False):
        model.zero_grad()
        backward(overflowing(model, x, y) if bad else F.cross_entropy(model(x), y), optimizer)
        optimizer.step()
    assert loss_scalers()[0].stats().skips == 1
    for p in (p for p in master_params(optimizer) if p is not model.bn.weight and p is not model.bn.bias):
        assert p.grad is None


def test_an_exception_inside_puts_gradients_back() -> None:
    model, optimizer = set_up("O1", dtype=torch.float16)
    (x, y), = batches(1)
    backward(F.cross_entropy(model(x), y), optimizer)
    grads = [p.grad.clone() for p in model.parameters()]

    def interrupted() -> None:
        with scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    backward(F.cross_entropy(model(x), y), optimizer)
    optimizer.step()


def test_clipping_works_on_what_is_stepped() -> None:
    for opt_level in ("O1", "O2"):
        model, optimizer = set_up(opt_level, dtype=torch.float16)
        (x, y), = batches(1)
        backward(F.cross_entropy(model(x), y), optimizer)
        norm = torch.nn.utils.clip_grad_norm_(master_params(optimizer), 0.01)
        clipped = torch.nn.utils.get_total_norm([p.grad for p in master_params(optimizer)])
        assert 0.05 < norm < 50.0       # unscaled: the scale is 65536
        torch.testing.assert_close(clipped, torch.tensor(0.01), rtol=1e-4, atol=0.0)
        optimizer.step()


class HostReads(TorchDispatchMode):
    """Counts reads of a value from a tensor."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_backward_reads_nothing_and_an_ordinary_step_one_flag() -> None:
    for optimizer_of, expected in ((sgd, 1), (lambda m: SGD(m.parameters(), 0.1), 0)):
        model = make()
        model, optimizer = initialize(model, optimizer_of(model), "O2", dtype=torch.float16, verbosity=0)
        (x, y), = batches(1)
        with HostReads() as reads:
            backward(F.cross_entropy(model(x), y), optimizer)
            assert reads.count == 0
            optimizer.step()
        assert reads.count == expected


# --- where the model is called


def test_forward_called_directly_in_threads_and_in_copies() -> None:
    model, _ = set_up("O1", dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    x = batches(1)[0][0]
    twin = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    for each in (model, twin, loaded):
        each.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        assert each.forward(x).dtype is torch.float32
    thread = threading.Thread(target=lambda: model(x))
    thread.start()
    thread.join()
    assert seen == [torch.bfloat16] * 4
    assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_compiled_models_compute_the_same(opt_level: str) -> None:
    model, _ = set_up(opt_level, dtype=torch.bfloat16)
    x = batches(1)[0][0]
    model.eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(x), model(x))


def test_disable_casts_reaches_into_forward() -> None:
    model, _ = set_up("O1", dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with amp.disable_casts():
        model(batches(1)[0][0])
    model(batches(1)[0][0])
    assert seen == [torch.float32, torch.bfloat16]


def test_outputs_are_cast_to_what_was_asked() -> None:
    for opt_level in LEVELS:
        model, _ = set_up(opt_level, cast_model_outputs=torch.float16)
        assert model(batches(1)[0][0]).dtype is torch.float16


# --- checkpoints


@pytest.mark.parametrize("dtype", HALVES, **ids)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_checkpoints_are_float32_and_resume_to_the_bit(opt_level: str, dtype: torch.dtype) -> None:
    low = {} if opt_level == "O0" else {"dtype": dtype}
    data = batches(8)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, part: list[tuple[Tensor, Tensor]]) -> None:
        for x, y in part:
            optimizer.zero_grad()
            backward(F.cross_entropy(model(x), y), optimizer)
            optimizer.step()

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        return initialize(model, optimizer, opt_level, verbosity=0, **low)

    straight, straight_optimizer = start()
    train(straight, straight_optimizer, data)
    model, optimizer = start()
    train(model, optimizer, data[:4])
    file = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp_state_dict(optimizer)}, file
    )
    file.seek(0)
    saved = torch.load(file)
    assert {t.dtype for t in saved["model"].values() if t.is_floating_point()} == {torch.float32}
    assert list(saved["model"]) == list(make().state_dict())
    make().load_state_dict(saved["model"])
    model, optimizer = start()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    load_amp_state_dict(saved["amp"], optimizer)
    train(model, optimizer, data[4:])
    for a, b in zip(master_params(optimizer), master_params(straight_optimizer), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(model.parameters(), straight.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_wrapper_saves_and_loads_the_masters_too() -> None:
    """DDP adds a prefix; nn.Sequential stands for it here."""
    model, optimizer = set_up("O2", dtype=torch.bfloat16)
    saved = nn.Sequential(model).state_dict()
    assert saved["0.head.weight"].dtype is torch.float32
    other = {name: torch.full_like(t, 1.0 + 2.0**-20) if t.ndim else t for name, t in saved.items()}
    nn.Sequential(model).load_state_dict(other)
    assert all(bool((p == 1.0 + 2.0**-20).all()) for p in master_params(optimizer))
    (x, y), = batches(1)
    backward(F.cross_entropy(model(x), y), optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()        # nothing rounds the masters on the way
    assert bool((model.head.weight == 1.0).all())
    assert all(bool((p == 1.0 + 2.0**-20).all()) for p in master_params(optimizer))


def test_tied_weights_stay_one_tensor() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.out = nn.Linear(3, 5, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.embed(ids))

    for opt_level in ("O2", "O3"):
        model, optimizer = set_up(opt_level, Tied(), dtype=torch.bfloat16)
        assert model.out.weight is model.embed.weight
        assert len(list(master_params(optimizer))) == 1
        saved = model.state_dict()
        assert saved["embed.weight"].data_ptr() == saved["out.weight"].data_ptr()
        assert model(torch.arange(5)).dtype is torch.float32


def test_keep_vars_gives_the_models_own_parameters() -> None:
    model, _ = set_up("O2", dtype=torch.bfloat16)
    assert model.state_dict(keep_vars=True)["head.weight"] is model.head.weight


def test_copies_of_an_o2_model_hold_no_masters() -> None:
    model, optimizer = set_up("O2", dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    (x, y), = batches(1)
    backward(F.cross_entropy(model(x), y), optimizer)
    optimizer.step()
    for each in (twin, loaded):
        saved = each.state_dict()["head.weight"]
        assert torch.equal(saved, each.head.weight.float())
        assert not torch.equal(saved, model.state_dict()["head.weight"])


def test_scales_travel_in_apexs_form_and_more() -> None:
    model, optimizer = set_up("O1", dtype=torch.float16, num_losses=2)
    (x, y), = batches(1)
    backward(overflowing(model, x, y), optimizer, loss_id=1)
    optimizer.step()
    saved = amp.state_dict()
    assert {name: (s["loss_scale"], s["unskipped"]) for name, s in saved.items()} == {
        "loss_scaler0": (2.0**16, 0),
        "loss_scaler1": (2.0**15, 0),
    }
    model, optimizer = set_up("O1", dtype=torch.float16, num_losses=2)
    amp.load_state_dict(saved, optimizer)
    assert [s.state_dict()["scale"] for s in loss_scalers(optimizer)] == [2.0**16, 2.0**15]
    apex = {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}, "loss_scaler1": {"loss_scale": 4.0, "unskipped": 0}}
    load_amp_state_dict(apex, optimizer)
    assert [(s["loss_scale"], s["unskipped"]) for s in amp_state_dict(optimizer).values()] == [(512.0, 7), (4.0, 0)]
    with pytest.raises(ValueError, match=r"saved scales are \['loss_scaler0'\], this script's \['loss_scaler0', 'loss"):
        load_amp_state_dict({"loss_scaler0": apex["loss_scaler0"]}, optimizer)
    load_amp_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}}, optimizer, strict=False)
    assert amp_state_dict(optimizer)["loss_scaler0"]["loss_scale"] == 8.0


# --- disabled, and more than one call


def test_disabled_is_as_if_ampkit_were_not_there() -> None:
    model, optimizer = make(), None
    optimizer = sgd(model)
    same, same_optimizer = initialize(model, optimizer, "O2", enabled=False)
    assert (same, same_optimizer) == (model, optimizer)
    assert type(model) is Net
    loss = F.cross_entropy(model(batches(1)[0][0]), batches(1)[0][1])
    with scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    optimizer.step()
    assert amp_state_dict() == {}
    load_amp_state_dict({})


def test_inference_needs_no_optimizer() -> None:
    for opt_level in LEVELS:
        model = initialize(make(), opt_level=opt_level, verbosity=0)
        assert model(batches(1)[0][0]).dtype is torch.float32
    pair = initialize([make(), make()], opt_level="O3", verbosity=0)
    assert isinstance(pair, list)


def test_two_calls_are_told_apart() -> None:
    _, first = set_up("O1", dtype=torch.float16)
    _, second = set_up("O2", dtype=torch.float16, loss_scale=8.0)
    with pytest.raises(RuntimeError, match="initialize has been called 2 times; pass an optimizer"):
        amp_state_dict()
    assert amp_state_dict(second)["loss_scaler0"]["loss_scale"] == 8.0
    with pytest.raises(RuntimeError, match="come from different calls of initialize"):
        backward(torch.ones(()), [first, second])
    del second
    gc.collect()
    assert amp_state_dict()["loss_scaler0"]["loss_scale"] == 2.0**16


# --- what is refused


@pytest.mark.parametrize(
    ("opt_level", "match"),
    [
        ("01", r"unknown opt_level '01'; expected 'O0', 'O1', 'O2' or 'O3': did you mean 'O1', with the letter O"),
        ("o2", r"did you mean 'O2'"),
        ("00", r"did you mean 'O0'"),
        (1, r"unknown opt_level 1; expected 'O0', 'O1', 'O2' or 'O3'"),
        ("O4", r"unknown opt_level 'O4'; expected 'O0', 'O1', 'O2' or 'O3'$"),
        (None, r"unknown opt_level None"),
    ],
)
def test_unknown_levels(opt_level: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        initialize(make(), opt_level=opt_level)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("opt_level", "options", "match"),
    [
        ("O0", {"dtype": torch.float16}, "O0 computes in float32.*'O2' or 'O3'"),
        ("O0", {"cast_model_type": torch.float16}, "O0 computes in float32"),
        ("O1", {"cast_model_type": torch.bfloat16}, r"O1 leaves the weights in float32.*pass dtype=torch.bfloat16"),
        ("O2", {"cast_model_type": torch.float32}, r"O2 converts the model.*use opt_level 'O0'"),
        ("O2", {"dtype": torch.float16, "cast_model_type": torch.bfloat16}, "two names of one property; pass one"),
        ("O1", {"dtype": torch.float64}, r"expected torch.float16 or torch.bfloat16"),
        ("O2", {"patch_torch_functions": True}, "patch_torch_functions=True makes no sense at O2.*opt_level 'O1'"),
        ("O1", {"patch_torch_functions": False}, "patch_torch_functions=False makes no sense at O1.*opt_level 'O0'"),
        ("O1", {"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True makes no sense at O1.*'O2' or 'O3'"),
        ("O0", {"keep_batchnorm_fp32": "False"}, "makes no sense at O0"),
        ("O1", {"master_weights": True}, "master_weights=True makes no sense at O1.*use opt_level 'O2'"),
        ("O2", {"loss_scale": 0}, "expected a positive number, or 'dynamic', which older scripts write as 0"),
        ("O2", {"loss_scale": -2.0}, "expected a positive number"),
        ("O2", {"loss_scale": float("nan")}, "expected a positive number"),
        ("O2", {"loss_scale": "automatic"}, "loss_scale is 'automatic'; expected 'dynamic' or a number"),
        ("O2", {"loss_scale": 128.0, "min_loss_scale": 1.0}, "min_loss_scale=1.0 makes no sense beside the static"),
        ("O2", {"num_losses": 0}, "num_losses is 0; expected how many"),
        ("O2", {"num_losses": True}, "num_losses is True"),
        ("O2", {"policy": Policy.default("cpu")}, "policy makes no sense at O2.*use opt_level 'O1'"),
    ],
    ids=str,
)
def test_overrides_that_make_no_sense(opt_level: str, options: dict[str, object], match: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=match):
        initialize(model, sgd(model), opt_level, **options)  # type: ignore[arg-type]
    assert type(model) is Net
    initialize(model, sgd(model), "O0", verbosity=0)      # nothing was changed


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keep_batchnorm_fp32": 1}, "keep_batchnorm_fp32 is 1; expected True, False, 'True', 'False' or None"),
        ({"keep_batchnorm_fp32": "yes"}, "keep_batchnorm_fp32 is 'yes'"),
        ({"master_weights": "True"}, "master_weights is 'True'; expected True, False or None"),
        ({"loss_scale": True}, "loss_scale is True; expected 'dynamic'"),
        ({"cast_model_outputs": "half"}, "cast_model_outputs is 'half'; expected None or a dtype"),
    ],
    ids=str,
)
def test_overrides_of_wrong_types(options: dict[str, object], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        initialize(make(), opt_level="O2", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("opt_level", "options"),
    [
        ("O3", {"keep_batchnorm_fp32": "True"}),
        ("O2", {"keep_batchnorm_fp32": False}),
        ("O3", {"master_weights": True}),
        ("O2", {"master_weights": False}),
        ("O0", {"loss_scale": "128.0"}),
        ("O3", {"loss_scale": "dynamic"}),
        ("O1", {"cast_model_type": False}),
        ("O1", {"patch_torch_functions": True}),
        ("O0", {"master_weights": False}),
        ("O2", {"cast_model_type": torch.bfloat16, "loss_scale": "dynamic", "min_loss_scale": 4.0}),
    ],
    ids=str,
)
def test_overrides_that_make_sense_train(opt_level: str, options: dict[str, object]) -> None:
    low = {} if opt_level == "O0" or "cast_model_type" in options else {"dtype": torch.float16}
    model, optimizer = set_up(opt_level, **low, **options)
    losses = []
    (x, y), = batches(1)
    for _ in range(6):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    kept = options.get("keep_batchnorm_fp32") in (True, "True") or opt_level in ("O0", "O1")
    kept = kept or (opt_level == "O2" and "keep_batchnorm_fp32" not in options)
    assert (model.bn.running_mean.dtype is torch.float32) is kept


def test_models_that_are_refused() -> None:
    with pytest.raises(TypeError, match=r"models holds a str; expected a torch.nn.Module, or a list of them"):
        initialize("resnet50")
    with pytest.raises(RuntimeError, match=r"parameter conv.weight is torch.float16; expected a float32 model.*half"):
        initialize(make().half())
    with pytest.raises(RuntimeError, match=r"parameter conv.weight is torch.float64"):
        initialize(make().double(), opt_level="O0")
    model = make()
    model.register_buffer("mask", torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"buffer mask is torch.bfloat16"):
        initialize(model)
    with pytest.raises(RuntimeError, match=r"wrapped in DataParallel already; call ampkit.initialize on the bare"):
        initialize(nn.DataParallel(make()))
    model = make()
    with pytest.raises(ValueError, match="models holds one object twice"):
        initialize([model, model])
    model.forward = model.forward  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="given a forward of its own"):
        initialize(model)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_float64_buffer_makes_no_float64_model(opt_level: str) -> None:
    """It stays where weights stay float32, and goes with the model where that is converted."""
    model = make()
    model.register_buffer("table", torch.arange(3, dtype=torch.float64))
    model, optimizer = set_up(opt_level, model)
    converted = opt_level in ("O2", "O3")
    assert model.table.dtype is (torch.bfloat16 if converted else torch.float64)
    ((x, y),) = batches(1)
    backward(F.cross_entropy(model(x), y), optimizer)
    optimizer.step()


class Larc:
    """An optimizer around another, as Apex's LARC is: no `Optimizer`, and it shapes gradients before it steps."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim = optim
        self.steps = 0

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return self.optim.param_groups

    def zero_grad(self) -> None:
        self.optim.zero_grad()

    def step(self) -> None:
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(0.5)
        self.optim.step()


@pytest.mark.parametrize("opt_level", LEVELS)
def test_an_optimizer_around_another_is_taken(opt_level: str) -> None:
    """Same weights as with the inner one at half the rate; saved states and masters are reached through it too."""
    runs = []
    for wrap, lr in ((Larc, 0.25), (lambda optimizer: optimizer, 0.125)):
        model = make()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=lr))
        model, returned = initialize(model, optimizer, opt_level, loss_scale=128.0, verbosity=0)
        assert returned is optimizer
        for x, y in batches(3):
            optimizer.zero_grad()
            backward(F.cross_entropy(model(x), y), optimizer)
            optimizer.step()
        assert all(master.dtype is torch.float32 for master in master_params(optimizer)) or opt_level == "O3"
        load_amp_state_dict(amp_state_dict(optimizer), optimizer)
        assert loss_scalers(optimizer)[0].stats().updates == 3
        runs.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(run.values() for run in runs), strict=True))


def test_what_holds_no_optimizer_of_its_groups_is_refused() -> None:
    model = make()
    larc = Larc(sgd(model))
    larc.optim = None
    with pytest.raises(TypeError, match=r"holds a Larc; expected .* an object that holds one as `optim`"):
        initialize(model, larc)


def test_a_rule_for_a_module_is_about_the_copy_in_a_copied_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = Policy.default("cpu").for_modules({model[1]: torch.float32})
    model, _ = set_up("O1", model, policy=policy, cast_model_outputs=torch.float64)
    twin = copy.deepcopy(model)
    del model, policy, _
    gc.collect()
    with record_casts() as record:
        twin(torch.ones(2, 4))
    assert [call.computed_in for call in record.calls] == [(torch.bfloat16,) * 3, (torch.float32,) * 3]


def test_saved_scales_load_all_or_none() -> None:
    _model, optimizer = set_up("O2", dtype=torch.float16, num_losses=2)
    before = amp_state_dict(optimizer)
    other = copy.deepcopy(before)
    other["loss_scaler0"]["scaler"]["scale"] = 8.0
    for bad in (None, {}, {"scaler": None}, {"loss_scale": 8.0, "unskipped": "2"}):
        with pytest.raises((TypeError, RuntimeError), match=r"expected|source state dict is empty"):
            load_amp_state_dict({**other, "loss_scaler1": bad}, optimizer)
        assert amp_state_dict(optimizer) == before
    load_amp_state_dict(other, optimizer)
    assert loss_scalers(optimizer)[0].get_scale() == 8.0


def test_initialize_twice_is_refused() -> None:
    model, optimizer = set_up("O1")
    with pytest.raises(RuntimeError, match=r"this Net has been through ampkit.half or ampkit.initialize already"):
        initialize(model)
    with pytest.raises(RuntimeError, match="this SGD has been through initialize already; call it once"):
        initialize(make(), optimizer)


def test_optimizers_that_are_refused() -> None:
    model = make()
    with pytest.raises(TypeError, match=r"optimizers holds a str; expected a torch.optim.Optimizer"):
        initialize(model, "sgd")
    with pytest.raises(RuntimeError, match="SGD holds no parameter of the models given; make the optimizer from the"):
        initialize(model, sgd(make(1)))
    with pytest.raises(RuntimeError, match=r"conv.weight, bn.weight, bn.bias of this Net.*requires_grad_\(False"):
        initialize(model, torch.optim.SGD(model.head.parameters(), lr=0.1))
    for part in (model.conv, model.bn):
        part.requires_grad_(False)
    initialize(model, torch.optim.SGD(model.head.parameters(), lr=0.1), "O2", verbosity=0)
    half = nn.Linear(2, 2).half()
    other = make()
    wrapped = FP16Optimizer(sgd(half))
    with pytest.raises(RuntimeError, match="has master weights already; pass initialize a bare optimizer"):
        initialize(other, wrapped)
    optimizer = sgd(make())
    MasterWeights(optimizer)
    with pytest.raises(RuntimeError, match="has master weights already"):
        initialize(other, optimizer)


def test_calls_out_of_order_are_refused() -> None:
    model = make()
    optimizer = sgd(model)
    (x, y), = batches(1)
    with pytest.raises(RuntimeError, match="SGD has not been through initialize"):
        backward(torch.ones(()), optimizer)
    with pytest.raises(RuntimeError, match="no optimizer has been through initialize; call it first"):
        amp_state_dict()
    model, optimizer = initialize(model, optimizer, "O2", dtype=torch.float16, verbosity=0)
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) without a backward since the last step; call"):
        optimizer.step()
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) on gradients that did not come through scale_loss"):
        optimizer.step()
    optimizer.zero_grad()
    backward(F.cross_entropy(model(x), y), optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match=r"with delay_unscale=True are still scaled"):
        optimizer.step()
    backward(F.cross_entropy(model(x), y), optimizer)
    with pytest.raises(RuntimeError, match="got a closure, whose backward the level cannot see"):
        optimizer.step(lambda: None)
    optimizer.step()
    with pytest.raises(TypeError, match="scale_loss takes the loss tensor that backward is called on, got float"):
        backward(1.0, optimizer)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="loss_id is 1, and there are scales for 1 losses; expected 0 to 0: pass num"):
        backward(F.cross_entropy(model(x), y), optimizer, loss_id=1)


def test_delayed_gradients_meet_no_other_scale() -> None:
    model, optimizer = set_up("O1", dtype=torch.float16, num_losses=2)
    (x, y), = batches(1)

    def loss() -> Tensor:
        return F.cross_entropy(model(x), y)

    backward(loss(), optimizer, loss_id=0, delay_unscale=True)
    with pytest.raises(RuntimeError, match="waiting under another loss scale; end the accumulation with the same loss"):
        backward(loss(), optimizer, loss_id=1)
    backward(loss(), optimizer, loss_id=0)
    with pytest.raises(RuntimeError, match="delay_unscale=True after a backward whose gradients are unscaled already"):
        backward(loss(), optimizer, loss_id=0, delay_unscale=True)
    optimizer.step()
    optimizer.zero_grad()
    backward(loss(), optimizer, loss_id=0, delay_unscale=True)
    optimizer.zero_grad()       # gives the accumulation up
    backward(loss(), optimizer, loss_id=1)
    optimizer.step()


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, **ids)
@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_on_cuda_levels_train_without_waiting_for_the_device(opt_level: str, dtype: torch.dtype) -> None:
    """With an optimizer that skips on the device, an overflow among the steps included."""
    model = make().cuda()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = initialize(model, optimizer, opt_level, dtype=dtype, loss_scale="dynamic", verbosity=0)
    data = [(x.cuda(), y.cuda()) for x, y in batches(1) * 12]
    losses = []
    for index, (x, y) in enumerate(data):
        torch.cuda.set_sync_debug_mode("error" if index > 1 else "default")     # the first steps allocate and compile
        try:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            backward(loss * (torch.inf if index == 4 else 1.0), optimizer)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(loss.detach())
    assert losses[-1] < losses[0] / 2
    stats = loss_scalers(optimizer)[0].stats()
    assert (stats.steps, stats.skips) == (11, 1)
    if opt_level == "O2":
        assert torch.equal(model.head.weight, list(master_params(optimizer))[-2].to(dtype))


@pytest.mark.gpu
def test_on_cuda_o1_is_torchs_autocast_and_scaler_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    plain, model = make().cuda(), make().cuda()
    plain_optimizer, scaler = sgd(plain), torch.amp.GradScaler("cuda")
    model, optimizer = initialize(model, sgd(model), "O1", policy=Policy.torch("cuda"), verbosity=0)
    for x, y in batches(8):
        plain_optimizer.zero_grad()
        with torch.autocast("cuda"):
            expected = F.cross_entropy(plain(x.cuda()), y.cuda())
        scaler.scale(expected).backward()
        scaler.step(plain_optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        backward(loss, optimizer)
        optimizer.step()
        assert torch.equal(loss, expected)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_state_dict_of_torchs_distributed_checkpoint(level):
    """It makes an optimizer's state by a step on zeros at a learning rate of 0, which no backward precedes."""
    model = nn.Linear(4, 2)
    model, optimizer = amp.initialize(model, torch.optim.AdamW(model.parameters()), opt_level=level, verbosity=0)
    before = [param.clone() for param in model.parameters()]
    state = get_optimizer_state_dict(model, optimizer)
    assert set(state["state"]) == {name for name, _ in model.named_parameters()}
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert all(map(torch.equal, model.parameters(), before))
    set_optimizer_state_dict(model, optimizer, state)
    x, y = torch.randn(8, 4), torch.randint(2, (8,))
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))
