"""Several models, optimizers and losses under `initialize`: a generator against a discriminator.

Each loss has its own scale, by `num_losses` and `loss_id`. Both losses of the discriminator add up in one optimizer;
the generator's backward runs through the discriminator without changing its gradients.

    python examples/levels_several.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampkit import amp


def real_points(n: int) -> Tensor:
    """Points around a circle of radius 2."""
    angle = torch.rand(n) * 2 * torch.pi
    return 2.0 * torch.stack((angle.cos(), angle.sin()), 1) + 0.05 * torch.randn(n, 2)


def main(opt_level: str = "O1", steps: int = 600) -> float:
    """Train, and return how far generated points are from the circle, on average."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
    [generator, critic], [opt_g, opt_c] = amp.initialize(
        [generator, critic], [opt_g, opt_c], opt_level=opt_level, num_losses=3, verbosity=0
    )
    real, fake = torch.ones(64, 1), torch.zeros(64, 1)
    for _ in range(steps):
        opt_c.zero_grad()
        made = generator(torch.randn(64, 4))
        loss_real = F.binary_cross_entropy_with_logits(critic(real_points(64)), real)
        with amp.scale_loss(loss_real, opt_c, loss_id=0) as scaled:
            scaled.backward()
        loss_fake = F.binary_cross_entropy_with_logits(critic(made.detach()), fake)
        with amp.scale_loss(loss_fake, opt_c, loss_id=1) as scaled:
            scaled.backward()
        opt_c.step()

        opt_g.zero_grad()
        critic.requires_grad_(False)
        loss_generator = F.binary_cross_entropy_with_logits(critic(made), real)
        with amp.scale_loss(loss_generator, opt_g, loss_id=2) as scaled:
            scaled.backward()
        critic.requires_grad_(True)
        opt_g.step()
    with torch.no_grad():
        distance = (generator(torch.randn(1000, 4)).norm(dim=1) - 2.0).abs().mean().item()
    print(f"{opt_level}: generated points are {distance:.2f} from the circle on average")
    return distance


if __name__ == "__main__":
    main()
