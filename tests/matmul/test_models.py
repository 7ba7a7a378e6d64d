"""Twelve families of Hugging Face's models, tiny and unmodified, forward and backward under an FP8 rule."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from ampkit import autocast, record_casts
from tests.helpers.float8 import BF16, GW_HP, OPERATORS, ROWWISE, RULES, TENSORWISE, fp8

transformers = pytest.importorskip("transformers", reason="it is in ampkit[dev]")

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = {"input_ids": torch.arange(16).reshape(2, 8) + 3}
TRANSLATION = {**IDS, "decoder_input_ids": IDS["input_ids"]}
IMAGES = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 256).reshape(2, 3, 16, 16)}
VISION = {**TEXT, "image_size": 16, "patch_size": 4, "num_labels": 10}
# Model, config, differences from TEXT, batch, number of linear layers in FP8, and numbers of others by reason.
MODELS = [
    ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 1, "n_head": 2}, IDS, 5, {}),
    ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 1}, IDS, 8, {}),
    ("MistralForCausalLM", "MistralConfig", {"num_key_value_heads": 1}, IDS, 8, {}),
    ("Qwen2ForCausalLM", "Qwen2Config", {"num_key_value_heads": 1}, IDS, 8, {}),
    ("GemmaForCausalLM", "GemmaConfig", {"num_key_value_heads": 1, "head_dim": 16}, IDS, 8, {}),
    ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}, IDS, 5, {}),
    ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}, IDS, 7, {}),
    ("BertForMaskedLM", "BertConfig", {}, IDS, 8, {}),
    ("RobertaForMaskedLM", "RobertaConfig", {}, IDS, 8, {}),
    (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 2},
        IDS,
        8,
        {},
    ),
    (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 1, "num_heads": 2},
        TRANSLATION,
        17,
        {},
    ),
    ("ViTForImageClassification", "ViTConfig", VISION, IMAGES, 6, {"N is 10, not a multiple of 16": 1}),
]


@pytest.mark.parametrize("case", MODELS, ids=[case[0] for case in MODELS])
def test_a_model_trains_and_what_ran_in_fp8(case):
    name, config, settings, batch, n_fp8, reasons = case
    rule = (TENSORWISE, ROWWISE, GW_HP)[MODELS.index(case) % 3]
    model = getattr(transformers, name)(getattr(transformers, config)(**{**TEXT, **settings})).train()
    with record_casts() as record, fp8(rule, *OPERATORS):
        logits = model(**batch).logits
    logits.float().square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert [name for name, gradient in gradients.items() if not gradient.isfinite().all()] == []
    counts = Counter(call.float8 for call in record.calls if call.op != "aten::matmul")
    assert (counts.pop(rule.name), {reason: n for reason, n in counts.items() if reason}) == (n_fp8, reasons)


def test_training_in_fp8_follows_bf16():
    """A model of characters learns what it does in bf16; longer runs are docs/float8.md's."""
    text = torch.tensor([ord(c) % 64 for c in "the quick brown fox jumps over the lazy dog. " * 40])
    windows, losses = text.unfold(0, 5, 1), []
    first = nn.Sequential(
        nn.Embedding(64, 32),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.GELU(),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Linear(64, 64),
    )
    for region in (autocast("cpu", BF16), *map(fp8, RULES)):
        torch.manual_seed(1)
        model, history = copy.deepcopy(first), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(60):
            batch = windows[torch.randint(len(windows), (32,))]
            with region:
                logits = model(batch[:, :4])
            loss = nn.functional.cross_entropy(logits.float(), batch[:, 4])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        losses.append(sum(history[-20:]) / 20)
    assert losses[0] < 0.5
    assert max(abs(loss - losses[0]) for loss in losses) < 0.02
