"""Trains an actor and two critics on transitions of a made-up task, with the repository's networks."""

import argparse

import torch
from model import GaussianPolicy, QNetwork
from torch.nn import functional
from utils import hard_update, soft_update

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

observations = torch.randn(400, 4)
next_observations = torch.randn(400, 4)

policy = GaussianPolicy(4, 2, 32)
critic = QNetwork(4, 2, 32)
target = QNetwork(4, 2, 32)
hard_update(target, critic)
policy_optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=options.dtype == "float16")
entropy = 0.05


def reward(states, actions):
    return -(actions.float() - states[:, :2].tanh()).square().sum(1, keepdim=True)


losses = []
total = torch.zeros(())
for _ in range(20):
    chosen = torch.randint(400, (64,))
    states, following = observations[chosen], next_observations[chosen]
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        with torch.no_grad():
            actions, _, _ = policy.sample(states)
            next_actions, next_log_prob, _ = policy.sample(following)
            first, second = target(following, next_actions)
            value = reward(states, actions) + 0.8 * (torch.min(first, second).float() - entropy * next_log_prob)
        first, second = critic(states, actions)
        loss = functional.mse_loss(first.float(), value) + functional.mse_loss(second.float(), value)
    critic_optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(critic_optimizer)
    torch.nn.utils.clip_grad_norm_(critic.parameters(), 10.0)
    scaler.step(critic_optimizer)
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        actions, log_prob, _ = policy.sample(states)
        first, second = critic(states, actions)
        policy_loss = (entropy * log_prob - torch.min(first, second)).mean()
    policy_optimizer.zero_grad()
    scaler.scale(policy_loss).backward()
    scaler.step(policy_optimizer)
    scaler.update()
    soft_update(target, critic, 0.05)
    losses.append(loss.item())
    total += reward(states, actions.detach()).mean()

model = critic
metrics = {"reward": total.item() / 20}
print(losses[0], losses[-1], metrics)
