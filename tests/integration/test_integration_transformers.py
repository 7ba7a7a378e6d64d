"""`ampkit.integrations.transformers` with the real Trainer: gradients are clipped as they are, scaled ones never."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ampkit import GradScaler, NoOpLossScale, Policy, StaticLossScale
from tests.helpers.faults import plant_nonfinite

pytest.importorskip("transformers", reason="it is in ampkit[dev]")
pytest.importorskip("accelerate", reason="it is in ampkit[dev]")

from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments

from ampkit.integrations.transformers import use_ampkit


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layers(x)
        self.dtypes.add(out.dtype)
        return {"loss": (out - labels).float().square().mean(), "logits": out}


def trainer(folder: Path, model: Network | None = None, **settings: Any) -> Trainer:
    draw = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(8, generator=draw), "labels": torch.ones(1)} for _ in range(64)]
    settings = {"max_steps": 4, "save_strategy": "no", **settings}
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=8,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    return Trainer(model or Network(), args, train_dataset=rows)


def logged(trained: Trainer, name: str) -> list[float]:
    return [row[name] for row in trained.state.log_history if name in row]


def small_scale() -> GradScaler:
    return GradScaler("cpu", init_scale=256.0)


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused"])
def test_norms_are_those_of_float32_training(tmp_path: Path, optimizer: str) -> None:
    """`grad_norm` and the losses: nothing is clipped while it is scaled."""
    plain = trainer(tmp_path, optim=optimizer)
    plain.train()
    model = Network()
    ours = use_ampkit(trainer(tmp_path, model, optim=optimizer, fp16=True), scaler=small_scale())
    ours.train()
    assert model.dtypes == {torch.float16}
    assert logged(ours, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=2e-2)
    assert logged(ours, "loss") == pytest.approx(logged(plain, "loss"), rel=2e-2)


def test_bfloat16_with_torchs_policy_is_the_trainers_own_to_the_bit(tmp_path: Path) -> None:
    """Losses and norms."""
    model = Network()
    plain, ours = trainer(tmp_path, bf16=True), trainer(tmp_path, model, bf16=True)
    use_ampkit(ours, policy=Policy.torch("cpu"))
    plain.train()
    ours.train()
    assert model.dtypes == {torch.bfloat16}
    assert logged(ours, "loss") == logged(plain, "loss")
    assert logged(ours, "grad_norm") == logged(plain, "grad_norm")


def test_a_skipped_step_is_logged_and_not_scheduled_and_checkpoints_bring_the_scale_back(tmp_path: Path) -> None:
    """The scale falls, the learning rate waits; of a fused optimizer, whose `step` is always called."""
    model = Network()
    fused = {"fp16": True, "optim": "adamw_torch_fused"}
    ours = use_ampkit(trainer(tmp_path, model, **fused, save_strategy="steps", save_steps=2), scaler=small_scale())
    plant_nonfinite(model.layers[0].weight, 2)
    ours.train()
    assert logged(ours, "loss_scale") == [256.0, 128.0, 128.0, 128.0]
    assert logged(ours, "skipped_steps") == [0, 1, 1, 1]
    rates = logged(ours, "learning_rate")
    assert len(set(rates)) == 3
    assert rates[1] == rates[2]
    resumed = use_ampkit(trainer(tmp_path, **fused, max_steps=5))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.accelerator.scaler.get_scale() == 128.0
    assert resumed.accelerator.scaler.stats().skips == 1


@pytest.mark.parametrize(("dtype", "scale"), [("fp16", StaticLossScale(256.0)), ("bf16", NoOpLossScale())])
def test_steps_of_a_large_norm_are_skipped_logged_and_not_scheduled(tmp_path: Path, dtype: str, scale: Any) -> None:
    """Although the Trainer clips their gradients."""
    scaler = GradScaler("cpu", loss_scale=scale, skip_above=0.2)
    model = Network()
    ours = use_ampkit(trainer(tmp_path, model, max_grad_norm=0.1, **{dtype: True}), scaler=scaler)
    ours.train()
    assert logged(ours, "skipped_steps") == [1, 2, 3, 4]
    assert len(set(logged(ours, "learning_rate"))) == 1
    torch.testing.assert_close(list(model.parameters()), list(Network().parameters()), rtol=0, atol=0)


def t5() -> Any:
    """A small T5 whose feed-forward layers give numbers above float16's largest, as those of the large ones do."""
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    rest: Any = {"decoder_start_token_id": 0, "dropout_rate": 0.0}
    model: Any = T5ForConditionalGeneration(T5Config(**sizes, **rest))
    with torch.no_grad():
        for block in (*model.encoder.block, *model.decoder.block):
            block.layer[-1].DenseReluDense.wo.weight *= 3e5
    return model


@pytest.mark.parametrize(("policy", "skips"), [(None, 0), (Policy.default("cpu"), 0), ("torch", 12)])
def test_t5_trains_in_float16_by_what_it_wants_in_float32(tmp_path: Path, policy: Any, skips: int) -> None:
    """Without them, as under torch's own policy, every step overflows."""
    draw = torch.Generator().manual_seed(1)
    rows = [dict(zip(("input_ids", "labels"), torch.randint(1, 64, (2, 8), generator=draw), strict=True))] * 8
    args = TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=8,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        max_steps=12,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        fp16=True,
        save_strategy="no",
        logging_nan_inf_filter=False,
    )
    ours = use_ampkit(Trainer(t5(), args, train_dataset=rows), policy=policy)
    ours.train()
    losses = logged(ours, "loss")
    assert logged(ours, "skipped_steps")[-1] == skips
    if skips:
        assert [loss for loss in losses if not math.isnan(loss)] == []
    else:
        assert losses[-1] < losses[0] / 2


def test_refusals(tmp_path: Path) -> None:
    """Each says what to do."""
    plain = trainer(tmp_path)
    assert use_ampkit(plain) is plain  # for a script's float32 baseline
    with pytest.raises(ValueError, match=r"a scaler with mixed_precision='no'.*fp16=True or bf16=True to TrainingArg"):
        use_ampkit(plain, scaler=small_scale())
    by_hand, trained = trainer(tmp_path, bf16=True), trainer(tmp_path, bf16=True, max_steps=1)
    by_hand.accelerator.scaler = torch.amp.GradScaler("cpu")
    trained.train()
    for argument, options, error, message in (
        (by_hand, {}, TypeError, "expected an ampkit.GradScaler"),
        (trainer(tmp_path, bf16=True), {"policy": "defalt"}, ValueError, "policy is 'defalt'; expected a Policy"),
        (Network(), {}, TypeError, r"takes a transformers.Trainer; got Network"),
        (trained, {}, RuntimeError, "has prepared models or optimizers"),
    ):
        with pytest.raises(error, match=message):
            use_ampkit(argument, **options)  # pyright: ignore[reportArgumentType]
