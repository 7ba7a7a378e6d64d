"""Alternating steps of a GAN, with a scaler for each network: an overflow of one leaves the scale of the other."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from ampkit import GradScaler, autocast


def main(steps: int = 20) -> dict[str, int]:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    generator = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).to(device)
    critic = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(device)
    create = torch.optim.Adam(generator.parameters(), lr=1e-3)
    judge = torch.optim.Adam(critic.parameters(), lr=1e-3)
    create_scaler, judge_scaler = (GradScaler(device, init_scale=2.0**10) for _ in range(2))
    ones, zeros = torch.ones(32, 1, device=device), torch.zeros(32, 1, device=device)

    for _ in range(steps):
        real = torch.randn(32, 2, device=device) + 3.0
        noise = torch.randn(32, 4, device=device)

        judge.zero_grad()
        with autocast(device.type, dtype=torch.float16):
            fake = generator(noise)
            verdict = bce(critic(real), ones) + bce(critic(fake.detach()), zeros)
        judge_scaler.scale(verdict).backward()
        judge_scaler.step(judge)
        judge_scaler.update()

        create.zero_grad()
        with autocast(device.type, dtype=torch.float16):
            deception = bce(critic(generator(noise)), ones)
        create_scaler.scale(deception).backward()
        create_scaler.step(create)
        create_scaler.update()

    stats = [scaler.stats() for scaler in (judge_scaler, create_scaler)]
    print(f"critic {verdict.item():.4f}, generator {deception.item():.4f}; scales {[each.scale for each in stats]}")
    return {"updates": sum(each.updates for each in stats), "steps": sum(each.steps for each in stats)}


if __name__ == "__main__":
    main()
