"""LoRA with PEFT: float32 adapters train next to frozen weights."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from ampkit import Policy, autocast


def main(steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    base = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)).to(device)
    policy = Policy.default(device.type).for_modules(model, {"**.lm_head": torch.float32})  # after get_peft_model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    codes = torch.randint(64, (8, 32), device=device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with autocast(device.type, torch.bfloat16, policy=policy):
            loss = model(input_ids=codes, labels=codes).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    count = sum(parameter.numel() for parameter in trained)
    print(
        f"{count} of {sum(p.numel() for p in model.parameters())} weights trained, loss {losses[0]:.3f} -> {loss:.3f}"
    )
    return losses


if __name__ == "__main__":
    main()
