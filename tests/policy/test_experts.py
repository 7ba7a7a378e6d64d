"""Experts of a mixture in transformers' models: their grouped products follow the region, as loops over experts do."""

import pytest
import torch

from ampkit import Policy, Rule, autocast, record_casts

transformers = pytest.importorskip("transformers", reason="it is in ampkit[dev]")

TOKENS = torch.arange(32).reshape(2, 16)


def model(family: str, experts: str) -> torch.nn.Module:
    """A model of one layer, with the same weights for each implementation of its experts."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}ForCausalLM")(config)
    made.set_experts_implementation(experts)
    return made


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_grouped_products_compute_what_a_loop_over_experts_computes(family: str) -> None:
    grads = {}
    for experts in ("grouped_mm", "eager"):
        network = model(family, experts)
        with record_casts() as record, autocast("cpu", torch.bfloat16):
            loss = network(TOKENS, labels=TOKENS).loss
        loss.backward()
        grads[experts] = [loss.detach(), *(param.grad for param in network.parameters())]
        grouped = [call for call in record.calls if call.op == "aten::_grouped_mm"]
        assert all(call.rule is Rule.LOWER and call.computed_in[0] is torch.bfloat16 for call in grouped)
        assert bool(grouped) is (experts == "grouped_mm")
    for ours, looped in zip(*grads.values(), strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours, looped, rtol=0.03, atol=2e-4)


def test_torch_amp_s_list_leaves_them_in_float32() -> None:
    with record_casts() as record, autocast("cpu", torch.bfloat16, policy=Policy.torch("cpu")):
        model("Mixtral", "grouped_mm")(TOKENS)
    assert "aten::_grouped_mm" not in {call.op for call in record.calls}
