"""`ampkit.integrations.accelerate` with the real library: torch.amp's training, skips that are seen, refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ampkit.optim
from ampkit import GradScaler, NoOpLossScale, Policy

accelerate = pytest.importorskip("accelerate", reason="it is in ampkit[dev]")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import AutocastKwargs, GradScalerKwargs  # noqa: E402

from ampkit.integrations.accelerate import use_ampkit  # noqa: E402

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "ampkit": lambda params: ampkit.optim.AdamW(params, lr=0.1),
}


def make(precision: str, *handlers: Any, **kwargs: Any) -> Accelerator:
    return Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=list(handlers), **kwargs)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))


def batches(count: int) -> torch.Tensor:
    return torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(1))


def train(accelerator: Accelerator, which: str, *, spoil: int | None = None, steps: int = 4) -> dict[str, Any]:
    """A plain loop of Accelerate's documentation."""
    model = network()
    optimizer = OPTIMIZERS[which](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    seen: dict[str, Any] = {"norms": [], "skipped": [], "lr": [], "losses": [], "dtypes": set()}
    model[0].register_forward_hook(lambda *call: seen["dtypes"].add(call[-1].dtype))
    for step, batch in enumerate(batches(steps)):
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            seen["losses"].append(loss.item())
            if accelerator.sync_gradients:
                if step == spoil:
                    model[2].bias.grad[0] = torch.inf
                seen["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen["skipped"].append(accelerator.optimizer_step_was_skipped)
            seen["lr"].append(scheduler.get_last_lr()[0])
    seen["weights"] = [param.detach().clone() for param in model.parameters()]
    return seen


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_float16_skips_are_seen_and_schedulers_wait(which: str) -> None:
    """Of fused optimizers too, whose `step` is always called."""
    accelerator = use_ampkit(make("fp16", GradScalerKwargs(init_scale=256.0)))
    seen = train(accelerator, which, spoil=2)
    assert seen["dtypes"] == {torch.float16}
    assert seen["skipped"] == [False, False, True, False]
    assert seen["lr"] == [0.05, 0.025, 0.025, 0.0125]
    assert accelerator.scaler.get_scale() == 128.0
    AcceleratorState._reset_state(reset_partial_state=True)
    true = train(make("no"), which)
    assert seen["norms"][:2] == pytest.approx(true["norms"][:2], rel=1e-2)  # unscaled when they are clipped


def test_bfloat16_with_torchs_policy_is_accelerates_own_training_to_the_bit() -> None:
    """Nothing but the casts changes hands, and a scaler skips the steps of a large norm alone."""
    plain = train(make("bf16"), "foreach")
    for limit in (None, 0.7, 0.12):  # the norms are 0.22 to 0.63, and clipped to 0.1
        AcceleratorState._reset_state(reset_partial_state=True)
        scaler = None if limit is None else GradScaler("cpu", loss_scale=NoOpLossScale(), skip_above=limit)
        ours = train(use_ampkit(make("bf16"), policy=Policy.torch("cpu"), scaler=scaler), "foreach")
        assert ours["skipped"] == [limit == 0.12] * 4
        if limit != 0.12:
            assert ours["losses"] == plain["losses"]
            torch.testing.assert_close(ours["weights"], plain["weights"], rtol=0, atol=0)
        assert ours["dtypes"] == {torch.bfloat16}


def test_handlers_are_read() -> None:
    """The region's settings and the scaler's."""
    accelerator = use_ampkit(make("fp16", AutocastKwargs(enabled=False), GradScalerKwargs(64.0, 4.0, 0.25, 3)))
    scaler = accelerator.scaler
    assert isinstance(scaler, GradScaler)
    assert (scaler.get_scale(), scaler.get_growth_factor()) == (64.0, 4.0)
    assert (scaler.get_backoff_factor(), scaler.get_growth_interval()) == (0.25, 3)
    assert train(accelerator, "foreach")["dtypes"] == {torch.float32}
    ones = torch.ones(2, 2)
    with accelerator.autocast():
        assert (ones @ ones).dtype is torch.float32
    with accelerator.autocast(AutocastKwargs(enabled=True)):
        assert (ones @ ones).dtype is torch.float16


def test_accumulated_batches_are_clipped_and_stepped_once() -> None:
    """Two micro-batches give one step."""
    accelerator = use_ampkit(make("fp16", GradScalerKwargs(256.0), gradient_accumulation_steps=2))
    assert len(train(accelerator, "ampkit", steps=8)["norms"]) == accelerator.scaler.stats().steps == 4


def test_autocast_keeps_in_float32_what_prepared_models_want() -> None:
    """Of modules that are called by themselves; a region that runs other models is no reason to warn."""
    accelerator = use_ampkit(make("fp16"))
    models: list[Any] = [network(), network()]
    models[0]._keep_in_fp32_modules, models[1]._keep_in_fp32_modules = ["0"], ["2"]
    accelerator.prepare(*models)
    batch = batches(1)[0]
    for other in (network(), *models):
        with accelerator.autocast():
            other(batch)
    with accelerator.autocast():
        assert [model[0](batch).dtype for model in models] == [torch.float32, torch.float16]
        assert [model[2](torch.ones(1, 8)).dtype for model in models] == [torch.float16, torch.float32]


def test_unwrapped_models_compute_as_before() -> None:
    """`keep_fp32_wrapper=False` takes the region away with Accelerate's own wrapper."""
    accelerator = use_ampkit(make("bf16"))
    model = accelerator.prepare(network())
    assert model(batches(1)[0]).dtype is torch.float32
    assert accelerator.prepare(model) is model  # not wrapped a second time
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert torch.equal(plain(batches(1)[0]), network()(batches(1)[0]))


@pytest.mark.parametrize("ours_saves", [True, False])
def test_the_scale_resumes_both_ways_with_torchs(tmp_path: Path, ours_saves: bool) -> None:
    """`save_state` and `load_state`, between ampkit's scaler and torch's."""
    scales = []
    for ours in (ours_saves, not ours_saves):
        accelerator = make("fp16")
        if ours:
            use_ampkit(accelerator, scaler=GradScaler("cpu", init_scale=256.0))
        else:
            accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=256.0), True
        model = network()
        model, optimizer = accelerator.prepare(model, OPTIMIZERS["foreach"](model.parameters()))
        if scales:
            accelerator.load_state(str(tmp_path))
        else:
            accelerator.backward(model(batches(1)[0]).square().mean())
            model[0].weight.grad[0, 0] = torch.nan
            optimizer.step()
            accelerator.save_state(str(tmp_path))
        scales.append(accelerator.scaler.get_scale())
        AcceleratorState._reset_state(reset_partial_state=True)
    assert scales == [128.0, 128.0]


def test_refusals_leave_the_accelerator_as_it_was() -> None:
    """Each says what to do."""
    assert type(use_ampkit(make("no"), policy="torch")) is Accelerator  # a baseline of the same script
    AcceleratorState._reset_state(reset_partial_state=True)
    late, by_hand, odd = make("bf16"), make("bf16"), make("bf16")
    late.prepare(network())
    by_hand.scaler = torch.amp.GradScaler("cpu")
    for accelerator, options, error, message in (
        (make("bf16"), {"policy": "defalt"}, ValueError, "policy is 'defalt'; expected a Policy for 'cpu'"),
        (by_hand, {}, TypeError, "expected an ampkit.GradScaler"),
        (late, {}, RuntimeError, r"call use_ampkit\(accelerator\) first"),
        (network(), {}, TypeError, r"takes an accelerate\.Accelerator; got Sequential"),
        # FP8, which Accelerate itself takes only where a library for it is installed; last, as they share their state.
        (odd, {}, ValueError, r"='fp8'; expected .* or 'no'; for FP8, pass .*FLOAT8_TENSORWISE"),
    ):
        if accelerator is odd:
            odd.state._mixed_precision = "fp8"
        with pytest.raises(error, match=message):
            use_ampkit(accelerator, **options)
        assert type(accelerator) in (Accelerator, torch.nn.Sequential)
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(TypeError, match=r"expected an ampkit.GradScaler"):
        use_ampkit(make("fp16"), scaler=torch.amp.GradScaler("cpu"))  # pyright: ignore[reportArgumentType]
