"""Whole training steps: every way of training gets to the same place."""

import pytest
import torch

from benchmarks import trainer
from benchmarks.case import AMPKIT, KEPT, SAME_LIST, TORCH, WrongAnswerError
from tests.benchmarks.helpers import CPU, TINY, tiny_case
from tests.helpers.regions import needs_16_bit_lstm


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_16_bit_lstm) if name == "lstm" else name for name in TINY]
)
def test_every_way_trains_every_workload(name: str):
    """A few steps of each way: torch.amp's list gives torch.amp's loss to the bit, and fp32 is near."""
    case = tiny_case(trainer.Variant(), TINY[name])
    sides = case.sides(CPU)
    case.check(sides)
    losses = {way: side.result()[0].item() for way, side in sides.items()}
    assert losses[SAME_LIST] == losses[TORCH]
    assert losses["fp32"] == pytest.approx(losses[TORCH], rel=0.1)
    assert losses["fp32"] != losses[TORCH]
    sides[SAME_LIST].result = lambda: [sides[TORCH].result()[0] + 1e-6]
    with pytest.raises(WrongAnswerError, match="after 3 steps the loss of ampkit, torch's list is"):
        case.check(sides)


@pytest.mark.parametrize("variant", [
    trainer.Variant(torch.bfloat16, 4), trainer.Variant(torch.float16, 2, clip=True),
    trainer.Variant(scaled=True, clip=True), trainer.Variant(scaled=True), trainer.Variant(torch.float16),
], ids=str)
def test_every_variant_trains(variant: trainer.Variant):
    """A cache saves all but one of the casts of the 17 weights and biases in torch's list: counted in a step."""
    case = tiny_case(variant, TINY["gpt"])
    sides = case.sides(CPU)
    case.check(sides)
    ways = (TORCH, SAME_LIST, KEPT) if variant.accumulation == 4 else (SAME_LIST,)
    facts = {way: sides[way].facts() for way in ways}
    assert facts[SAME_LIST]["peak_bytes"] > 0
    assert facts[SAME_LIST]["launches"] is None
    if variant.accumulation == 4:
        assert facts[SAME_LIST]["copies"] == facts[TORCH]["copies"]
        n_weights = 2 * 4 * 2 + 1       # two blocks of four linears with biases; the tied head
        assert facts[TORCH]["copies"] - facts[KEPT]["copies"] == 3 * n_weights
        again = sides[TORCH].facts()["peak_bytes"]
        assert again == pytest.approx(facts[TORCH]["peak_bytes"], rel=1e-3), "depends on what was counted before"


def test_compiled_training_gives_eager_losses(monkeypatch: pytest.MonkeyPatch):
    """Without code generation, which takes half a minute; that part is torch's."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, backend="eager": compile_(model, backend=backend))
    losses = []
    for run in ("eager", "compiled", "around"):
        one = trainer.Trainer(TINY["gpt"](), trainer.Variant(run=run), AMPKIT, CPU)
        one.step()
        one.step()
        losses.append(one.loss.item())
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_graph_and_compiled_steps_train_as_eager_ones(dtype: torch.dtype):
    device = torch.device("cuda")
    for way in (TORCH, AMPKIT):
        losses = []
        for run in ("eager", "graph", "compiled"):
            one = trainer.Trainer(TINY["gpt"](), trainer.Variant(dtype, 2, clip=True, run=run), way, device)
            for _ in range(4):
                one.step()
            losses.append(one.loss.item())
        assert losses[1:] == pytest.approx(losses[:1] * 2, rel=2e-2)
