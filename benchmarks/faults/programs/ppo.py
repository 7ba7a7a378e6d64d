"""Trains a policy on rollouts of a made-up task, with the repository's policy, storage and distributions."""

import argparse
import sys
import types

import torch

envs = types.ModuleType("a2c_ppo_acktr.envs")
envs.VecNormalize = object
sys.modules["a2c_ppo_acktr.envs"] = envs

from a2c_ppo_acktr.model import Policy  # noqa: E402 - after the stub
from a2c_ppo_acktr.storage import RolloutStorage  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)


class Box:
    shape = (2,)


policy = Policy((6,), Box(), base_kwargs={"recurrent": False, "hidden_size": 32})
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3, eps=1e-5)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=options.dtype == "float16")
storage = RolloutStorage(8, 8, (6,), Box(), 1)
clip = 0.2


def collect():
    observations = torch.randn(8, 6)
    storage.obs[0].copy_(observations)
    returned = torch.zeros(())
    with torch.no_grad():
        for step in range(8):
            with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
                value, action, log_prob, hidden = policy.act(
                    storage.obs[step], storage.recurrent_hidden_states[step], storage.masks[step]
                )
            rewards = -(action.float() - storage.obs[step][:, :2]).square().sum(-1, keepdim=True)
            returned += rewards.mean()
            storage.insert(
                torch.randn(8, 6), hidden, action, log_prob, value, rewards, torch.ones(8, 1), torch.ones(8, 1)
            )
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            value = policy.get_value(storage.obs[-1], storage.recurrent_hidden_states[-1], storage.masks[-1])
    storage.compute_returns(value.float(), True, 0.9, 0.95)
    return returned.item()


losses, rewards = [], []
for _ in range(8):
    rewards.append(collect())
    advantages = storage.returns[:-1] - storage.value_preds[:-1]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-5)
    for sample in storage.feed_forward_generator(advantages, 2):
        observed, hidden, actions, old_values, returns, masks, old_log_probs, advantage = sample
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            values, log_probs, entropy, _ = policy.evaluate_actions(observed, hidden, masks, actions)
            ratio = torch.exp(log_probs.float() - old_log_probs)
            clipped = torch.clamp(ratio, 1.0 - clip, 1.0 + clip) * advantage
            action_loss = -torch.min(ratio * advantage, clipped).mean()
            value_loss = 0.5 * (returns - values.float()).pow(2).mean()
            loss = value_loss * 0.5 + action_loss - entropy * 0.01
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    storage.after_update()

model = policy
metrics = {"reward": sum(rewards[-3:]) / 3}
print(losses[0], losses[-1], metrics)
