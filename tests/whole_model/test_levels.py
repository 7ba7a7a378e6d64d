"""initialize and scale_loss: each level against what it stands for."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampkit import Policy, autocast
from ampkit.amp import loss_scalers, master_params
from ampkit.containers import SIXTEEN_BIT
from ampkit.optim import SGD, AdamW
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.loss_scale import DynamicLossScale, NoOpLossScale
from ampkit.whole_model.half import half
from ampkit.whole_model.levels import LEVELS
from ampkit.whole_model.master_weights import MasterWeights
from tests.helpers.whole_model import BATCH, OPTIMIZERS, backward, batches, both_dtypes, loss_of, make, set_up


@both_dtypes
@pytest.mark.parametrize(
    ("opt_level", "low", "scales"), [("O0", "", []), ("O1", "", ["grows"]), ("O2", "conv", ["grows"]),
                                     ("O3", "conv bn stepped", [None])],
)
def test_what_a_level_is(opt_level: str, low: str, scales: list[str | None], dtype: torch.dtype) -> None:
    """Apex's table of dtypes and scales, with no scale where bfloat16 needs none."""
    model, optimizer = set_up(opt_level, **({} if opt_level == "O0" else {"dtype": dtype}))

    def of(what: str) -> torch.dtype:
        return dtype if what in low else torch.float32

    assert model.conv.weight.dtype == model.head.weight.dtype == of("conv")
    assert model.bn.weight.dtype == model.bn.running_var.dtype == of("bn")
    assert {p.dtype for p in master_params(optimizer)} == {of("stepped")}
    strategy = {"grows": DynamicLossScale(max_scale=2.0**24) if dtype is torch.float16 else NoOpLossScale()}
    assert [s.loss_scale for s in loss_scalers(optimizer)] == [strategy.get(scale, NoOpLossScale()) for scale in scales]
    seen = []
    model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    x = BATCH[0]
    assert model(x if opt_level == "O1" else x.double()).dtype is torch.float32
    assert seen == [torch.float32 if opt_level == "O0" else dtype]
    if opt_level != "O0":
        model, _ = set_up(opt_level, cast_model_outputs=torch.float16)      # dtype: the device's own
        model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        assert model(x).dtype is torch.float16
        assert seen[1:] == [torch.get_autocast_dtype("cpu")]


@pytest.mark.parametrize("kind", ["torch-sgd", "ampkit-sgd"])
@pytest.mark.parametrize(("opt_level", "dtype"), [("O0", None), *itertools.product(("O1", "O2"), SIXTEEN_BIT)])
def test_a_level_is_its_parts_to_the_bit(opt_level: str, dtype: torch.dtype | None, kind: str) -> None:
    """O0: float32; O1: `autocast` and `GradScaler`; O2: `half`, `MasterWeights` from float32, and `GradScaler`.

    Losses, gradients, weights and scale of 12 steps, overflows and growths among them.
    """
    scaled = opt_level != "O0"
    rule = DynamicLossScale(init_scale=2.0**22, growth_interval=3, max_scale=2.0**40)
    scaler, by_hand = GradScaler("cpu", enabled=scaled, loss_scale=rule, allow_fp16=True), make()
    start = {p: p.detach().clone() for p in by_hand.parameters()}
    if opt_level == "O2":
        half(by_hand, dtype, cast_outputs=torch.float32, in_place=True)
    by_hand_optimizer = OPTIMIZERS[kind](by_hand.parameters())
    if opt_level == "O2":
        masters = MasterWeights(by_hand_optimizer)
        masters.load_state_dict({"masters": [value for p, value in start.items() if p.dtype is dtype]})
    model, optimizer = set_up(
        opt_level, optimizer_of=lambda model: OPTIMIZERS[kind](model.parameters()), dtype=dtype,
        loss_scale=rule if scaled else None, policy=Policy.default("cpu") if opt_level == "O1" else None,
    )
    for batch in batches(12):
        by_hand_optimizer.zero_grad()
        with autocast("cpu", dtype, enabled=opt_level == "O1"):
            expected = loss_of(by_hand, batch)
        scaler.scale(expected).backward()
        scaler.unscale_(by_hand_optimizer)
        expected_grads = [p.grad.clone() for p in master_params(by_hand_optimizer)]
        scaler.step(by_hand_optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        backward(loss, optimizer)
        for grad, p in zip(expected_grads, master_params(optimizer), strict=True):
            assert torch.equal(grad, p.grad) or not torch.isfinite(grad).all()
        optimizer.step()
        assert torch.equal(loss, expected)
        assert [one.get_scale() for one in loss_scalers(optimizer)] == [scaler.get_scale()] * scaled
        assert all(map(torch.equal, master_params(optimizer), master_params(by_hand_optimizer)))
        assert all(map(torch.equal, model.parameters(), by_hand.parameters()))
    for one in loss_scalers(optimizer):
        stats = one.stats()
        assert (stats.steps, stats.skips) == (scaler.stats().steps, scaler.stats().skips)
        assert (stats.skips > 0) is (dtype is torch.float16)
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


@both_dtypes
def test_o2_masters_stay_within_the_derived_bound_of_float32(dtype: torch.dtype) -> None:
    """A gradient step of a convex loss with lr <= 2/L moves two points no farther apart. So after T steps the masters
    are within lr * sum_t |error of the t-th gradient| of the float32 run, both from the same start."""
    n, d, lr = 32, 8, 0.05
    x, truth = torch.randn(n, d), torch.randn(d)
    y = x @ truth + 0.5 * torch.randn(n)
    assert lr <= 2 / float(torch.linalg.matrix_norm(2 / n * x.T @ x, 2))
    plain = nn.Linear(d, 1, bias=False)
    start, plain_optimizer = plain.weight.detach().clone(), torch.optim.SGD(plain.parameters(), lr=lr)
    model, optimizer = set_up(
        "O2", copy.deepcopy(plain), lambda model: torch.optim.SGD(model.parameters(), lr=lr), dtype=dtype,
        loss_scale=64.0 if dtype is torch.float16 else 1.0,
    )
    (master,) = master_params(optimizer)
    allowed = distance = 0.0
    for step in range(1, 61):
        here = master.detach().double().flatten()
        allowed += lr * float(gradient_error_bound(x.double(), y.double(), here, dtype).norm())
        plain_optimizer.zero_grad()
        F.mse_loss(plain(x).flatten(), y).backward()
        plain_optimizer.step()
        optimizer.zero_grad()
        backward(F.mse_loss(model(x).flatten(), y), optimizer)
        optimizer.step()
        distance = float((master - plain.weight).detach().double().norm())
        # float32's own rounding of each update, on both sides
        assert distance <= allowed + 4 * step * 2.0**-24 * float(plain.weight.detach().norm())
        assert torch.equal(model.weight, master.to(dtype))
    assert 0.0 < distance < 0.02 * float((plain.weight.detach() - start).norm())
    assert loss_scalers(optimizer)[0].stats().skips == 0


@pytest.mark.parametrize("opt_level", LEVELS)
def test_memory_per_parameter(opt_level: str) -> None:
    """Bytes held for each weight after backward and after step with AdamW, as docs/levels.md has them."""
    model, optimizer = set_up(
        opt_level, nn.Linear(64, 64, bias=False), lambda model: AdamW(model.parameters()),
        dtype=None if opt_level == "O0" else torch.bfloat16,
    )

    def held() -> float:
        tensors = {model.weight, model.weight.grad, *master_params(optimizer)}
        tensors |= {p.grad for p in master_params(optimizer)}
        tensors |= {v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.ndim}
        return sum(t.nbytes for t in tensors if t is not None) / model.weight.numel()

    for _ in range(2):
        optimizer.zero_grad()
        backward(model(torch.randn(4, 64)).square().mean(), optimizer)
        at_step = held()
        optimizer.step()
    assert (at_step, held()) == {"O0": (16, 16), "O1": (16, 16), "O2": (18, 14), "O3": (8, 8)}[opt_level]


@pytest.mark.gpu
@both_dtypes
@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_on_cuda_levels_train_without_waiting_for_the_device(opt_level: str, dtype: torch.dtype) -> None:
    """With an optimizer that skips on the device, an overflow among the steps included."""
    model, optimizer = set_up(
        opt_level, make().cuda(), lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9), dtype=dtype,
        loss_scale="dynamic",
    )
    x, y = (one.cuda() for one in BATCH)
    losses = []
    for index in range(12):
        torch.cuda.set_sync_debug_mode("error" if index > 1 else "default")     # the first steps allocate and compile
        try:
            optimizer.zero_grad()
            losses.append(loss_of(model, (x, y)))
            backward(losses[-1] * (torch.inf if index == 4 else 1.0), optimizer)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert losses[-1] < losses[0] / 2
    stats = loss_scalers(optimizer)[0].stats()
    assert (stats.steps, stats.skips) == (11, 1)
    if opt_level == "O2":
        assert torch.equal(model.head.weight, list(master_params(optimizer))[-2].to(dtype))
