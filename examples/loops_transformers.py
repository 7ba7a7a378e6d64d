"""transformers' Trainer in float16: one call, and `grad_norm` is the norm of the unscaled gradients."""

import tempfile
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from ampkit import Policy
from ampkit.integrations.transformers import use_ampkit


def main(steps: int = 8) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    model = BertForSequenceClassification(config)
    rows = [{"input_ids": torch.randint(1, 64, (12,)), "labels": torch.tensor(row % 2)} for row in range(64)]
    cpu = not torch.cuda.is_available()
    policy = Policy.default("cpu" if cpu else "cuda").for_modules(model, {"classifier": "float32"})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, fp16=True, use_cpu=cpu, logging_steps=1, report_to=[], save_strategy="no"
        )
        trainer = use_ampkit(Trainer(model, arguments, train_dataset=rows), policy=policy)
        trainer.train()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
