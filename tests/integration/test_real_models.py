"""Models as people use them: Hugging Face's architectures, tiny, with random weights, built in code.

Under `Policy.torch("cpu")` everything they compute has torch.amp's bits: training, evaluation, generation, and
training with gradient checkpointing. Their own `autocast(enabled=False)` and dtype look-ups run inside our region
unchanged.
"""

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ampkit import Policy, Rule, autocast, record_casts
from tests.helpers.regions import like_torch as ours
from tests.helpers.training import Region, native, train, trains_as_torch

transformers = pytest.importorskip("transformers", reason="it is in ampkit[dev]")

TOKENS = 64


class Real(NamedTuple):
    """A model of a library: its type and what it is for, as the library names them, and a batch with labels."""

    kind: str
    task: str
    settings: dict[str, Any]
    batch: Callable[[], dict[str, Tensor]]
    generates: bool = False

    def build(self) -> Any:
        """The model with random weights from the current seed, in training mode."""
        config = transformers.AutoConfig.for_model(self.kind, **self.settings)
        return getattr(transformers, f"AutoModelFor{self.task}").from_config(config).train()

    def loss_of(self, model: Any) -> Tensor:
        """The loss of a model on a new batch."""
        return model(**self.batch()).loss


def _text() -> dict[str, Tensor]:
    ids = torch.randint(3, TOKENS, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def _images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}


def _speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 32), "labels": torch.randint(3, TOKENS, (2, 6))}


_SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {"vocab_size": TOKENS, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
REAL = (
    Real("gpt2", "CausalLM", _SMALL | _TEXT, _text, generates=True),
    Real("llama", "CausalLM", {**_SMALL, **_TEXT, "num_key_value_heads": 1}, _text, generates=True),
    Real("bert", "MaskedLM", _SMALL | _TEXT, _text),
    Real(
        "t5",
        "Seq2SeqLM",
        {
            "vocab_size": TOKENS,
            "d_model": 16,
            "d_ff": 32,
            "d_kv": 8,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        _text,
        generates=True,
    ),
    Real("vit", "ImageClassification", {**_SMALL, "image_size": 16, "patch_size": 4, "num_labels": 4}, _images),
    Real(
        "whisper",
        "SpeechSeq2Seq",
        {
            **_TEXT,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "decoder_start_token_id": 1,
        },
        _speech,
    ),
)
every_model = pytest.mark.parametrize("real", REAL, ids=lambda real: real.kind)


@pytest.mark.parametrize("how", ["bfloat16", "float16", "frames", "reentrant"])
@every_model
def test_training_equals_torchs(real: Real, how: str) -> None:
    """Under gradient checkpointing the recompute in backward, outside the region, is cast as the forward was."""

    def build() -> Any:
        model = real.build()
        if how in ("frames", "reentrant"):
            # 5.20 renames the switch.
            switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            switch({"use_reentrant": how == "reentrant"})
            assert [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)] != []
        return model

    trains_as_torch(build, real.loss_of, torch.float16 if how == "float16" else torch.bfloat16, steps=2)


@every_model
def test_default_policy_trains(real: Real) -> None:
    """Losses within bfloat16's error of float32's, every gradient float32 and finite."""

    def build() -> Any:
        model = real.build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    plain = train(build, real.loss_of, contextlib.nullcontext, steps=2)
    mixed = train(build, real.loss_of, lambda: autocast("cpu"), steps=2)
    assert mixed.keys() == plain.keys()
    assert mixed["loss 0.0"] != plain["loss 0.0"], "the region changed nothing"
    for name, value in mixed.items():
        assert value.dtype is torch.float32, name
        assert value.isfinite().all(), name
    torch.testing.assert_close(mixed["loss 0.0"], plain["loss 0.0"], rtol=5e-3, atol=0)
    torch.testing.assert_close(mixed["loss 1.0"], plain["loss 1.0"], rtol=1e-2, atol=0)


@every_model
def test_evaluation_equals_torchs(real: Real) -> None:
    """Whichever of the two contexts is outside; and the weights' casts do not get in the way of training after."""
    model, batch = real.build().eval(), real.batch()

    def outputs(region: Region, mode: Callable[[], Any]) -> list[Any]:
        with region():
            with mode():
                inside = model(**batch)
            trained = model(**batch)
        with mode(), region():
            return [inside, trained, model(**batch)]

    for mode in (torch.no_grad, torch.inference_mode):
        for output, wanted in zip(outputs(ours, mode), outputs(native, mode), strict=True):
            assert output.logits.dtype is wanted.logits.dtype
            assert torch.equal(output.logits, wanted.logits)
            assert torch.equal(output.loss, wanted.loss)
            assert output.logits.is_inference() == wanted.logits.is_inference()


@pytest.mark.parametrize("real", [real for real in REAL if real.generates], ids=lambda real: real.kind)
def test_generation_equals_torchs(real: Real) -> None:
    """`generate()` with beams and its key-value cache: the same tokens and the same scores."""
    model, batch = real.build().eval(), real.batch()
    settings = {
        "max_new_tokens": 6,
        "do_sample": False,
        "num_beams": 2,
        "pad_token_id": 0,
        "eos_token_id": None,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with native():
        expected = model.generate(**inputs, **settings)
    with ours():
        got = model.generate(**inputs, **settings)
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.scores) == 6
    torch.testing.assert_close(got.scores, expected.scores, rtol=0, atol=0)


def test_generation_of_a_wrapped_model_casts_weights_once() -> None:
    """A region per token: with a cache of its own, casts outlive them."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=4,
        n_embd=128,
        n_head=4,
        vocab_size=1000,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.arange(8).view(1, 8)

    model.forward = autocast("cpu")(model.forward)

    def generated() -> tuple[Tensor, float]:
        """The tokens, and the megabytes that casts read and wrote."""
        with record_casts() as record, torch.no_grad():
            tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        return tokens, round(record.nbytes / 1e6, 1)

    expected, without = generated()
    assert without == 88.9
    with autocast("cpu", enabled=False):
        tokens, moved = generated()
    assert torch.equal(tokens, expected)
    assert moved == 6.2


@pytest.mark.parametrize("rule", [Rule.LOWER, Rule.FLOAT8_ROWWISE])
def test_merged_adapters_are_seen_inside_a_region(rule: Rule) -> None:
    """PEFT merges by `weight.data += ...`, also in a forward, where adapters that were merged are disabled."""
    peft = pytest.importorskip("peft", reason="it is in ampkit[dev]")
    config = peft.LoraConfig(r=16, target_modules=["0", "2"], init_lora_weights=False)
    initial: Any = peft.get_peft_model(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), config)
    x, policy = torch.randn(4, 32), Policy.torch("cpu").with_rules({"aten::linear": rule})

    def outputs(outer: Any, region: Callable[[], Any]) -> list[Tensor]:
        model, found = copy.deepcopy(initial), []  # merging and unmerging rounds the weights
        with outer:
            for merge in (False, True):
                if merge:
                    model.merge_adapter()
                with region():
                    for _ in range(2):  # `disable_adapter` unmerges, and the next forward computes with the base
                        found.append(model(x))
                        with model.disable_adapter():
                            found.append(model(x))
        return found

    def mine() -> autocast:
        return autocast("cpu", policy=policy)

    expected = outputs(contextlib.nullcontext(), native if rule is Rule.LOWER else mine)
    assert not torch.equal(expected[0], expected[1])
    for got, want in zip(outputs(autocast("cpu", enabled=False), mine), expected, strict=True):
        assert torch.equal(got, want)


def test_a_record_lists_inputs_that_adapters_upcast() -> None:
    """PEFT casts the input of an adapter to float32, its weights' dtype, and the region casts it back."""
    peft = pytest.importorskip("peft", reason="it is in ampkit[dev]")
    config = peft.LoraConfig(r=2, target_modules=["0", "1"], lora_dropout=0.1)
    model: Any = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config)

    def undone() -> list[tuple[str, str, int]]:
        with record_casts() as record, autocast("cpu"):
            model(torch.ones(16, 8))
        return [(call.module, call.upcast_by, call.upcast_nbytes) for call in record.calls if call.upcast_by]

    assert undone() == [("base_model.model.1.lora_A.default", "Mul", 4 * 16 * 8)]
    with peft.helpers.disable_input_dtype_casting(model):
        assert undone() == []
