"""Random training programs with a `WeightCache`: bits are those of a run without.

The models tie, freeze and checkpoint weights; between steps weights are replaced, frozen, copied and evaluated in
every grad mode, and steps are skipped.
"""

import copy
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampkit.optim
from ampkit import GradScaler, WeightCache, autocast
from tests.hostile.budget import rounds

pytestmark = pytest.mark.timeout(300 + float(os.environ.get("AMPKIT_SOAK_SECONDS") or 0))

OPTIMIZERS: list[Callable[[Iterable[Tensor]], Any]] = [
    lambda params: ampkit.optim.AdamW(params, lr=1e-2),
    lambda params: ampkit.optim.SGD(params, lr=1e-2, momentum=0.9),
    lambda params: torch.optim.AdamW(params, lr=1e-2),
    lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    lambda params: torch.optim.SGD(params, lr=1e-2, foreach=True),
    lambda params: torch.optim.Adagrad(params, lr=1e-2),
]


class Model(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.width = rng.choice([4, 8, 12])
        self.layers = nn.ModuleList(
            nn.Linear(self.width, self.width, bias=rng.random() < 0.7) for _ in range(rng.randint(1, 4))
        )
        if len(self.layers) > 1 and rng.random() < 0.4:
            self.layers[1].weight = self.layers[0].weight
        for param in self.layers[0].parameters() if rng.random() < 0.4 else ():
            param.requires_grad_(False)
        self.norm = nn.LayerNorm(self.width) if rng.random() < 0.5 else nn.Identity()
        self.head = nn.Parameter(torch.randn(self.width, self.width)) if rng.random() < 0.5 else None
        self.checkpoint = rng.choice([None, None, "reentrant", "not reentrant"])

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoint is None:
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.checkpoint == "reentrant")  # type: ignore[assignment]
        x = self.norm(x)
        return x if self.head is None else x @ self.head


class Program:
    """A random program; two of one seed do the same, one of them with a cache."""

    def __init__(self, seed: int, *, cached: bool) -> None:
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        self.model = Model(rng)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = rng.choice(OPTIMIZERS)(trained) if trained else None
        self.cache = WeightCache() if cached else None
        self.dtype, self.policy = rng.choice(["float16", "bfloat16"]), rng.choice(["torch", "default"])
        self.micro_batches = rng.choice([1, 1, 2, 3])
        self.scaler = GradScaler("cpu", init_scale=8.0, enabled=rng.random() < 0.5)
        self.seen: list[Tensor] = []

    def run(self, n: int) -> list[Tensor]:
        """All that `n` events compute, and the parameters at the end."""
        for _ in range(n):
            self.rng.choice([
                self.train, self.train, self.train, self.evaluate, self.replace, self.load, self.freeze, self.deepcopy,
            ])()
        return [*self.seen, *self.copied(self.model.parameters())]

    @staticmethod
    def copied(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        return (tensor.detach().clone() for tensor in tensors)

    def region(self) -> autocast:
        return autocast("cpu", self.dtype, policy=self.policy, cache=self.cache)

    def batch(self) -> Tensor:
        return torch.randn(3, self.model.width, requires_grad=True)    # a reentrant checkpoint asks for it

    def grads(self) -> list[Tensor]:
        return [param.grad for param in self.model.parameters() if param.grad is not None]

    def train(self) -> None:
        backward_inside, evaluates, overflows = (self.rng.random() < 0.3 for _ in range(3))
        if self.optimizer is None:
            return
        self.optimizer.zero_grad(set_to_none=self.rng.random() < 0.5)
        for _ in range(self.micro_batches):
            x = self.batch()
            with self.region():
                if evaluates:
                    self.look(x, torch.no_grad)
                loss = self.model(x).float().pow(2).mean()
                if backward_inside:
                    self.scaler.scale(loss).backward()
            if not backward_inside:
                self.scaler.scale(loss).backward()
        grads = self.grads()
        self.seen += self.copied(grads)
        if overflows and grads and self.scaler.is_enabled():
            grads[0].flatten()[0] = torch.inf
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def look(self, x: Tensor, mode: Callable[[], Any]) -> Tensor:
        with mode():
            y = self.model(x)
        self.seen += self.copied([y])
        return y

    def evaluate(self) -> None:
        mode = self.rng.choice([torch.no_grad, torch.inference_mode])
        with self.region():
            for _ in range(self.rng.randint(1, 3)):
                self.look(self.batch(), mode)

    def replace(self) -> None:
        layer: Any = self.rng.choice(list(self.model.layers))
        if self.rng.random() < 0.5:
            layer.weight.data = layer.weight.data * 1.01
        else:
            layer.weight = nn.Parameter(layer.weight.detach() * 1.01, layer.weight.requires_grad)

    def load(self) -> None:
        self.model.load_state_dict({name: value * 0.99 for name, value in self.model.state_dict().items()})

    def freeze(self) -> None:
        param = self.rng.choice(list(self.model.parameters()))
        with self.region():
            self.look(self.batch(), torch.enable_grad)
            param.requires_grad_(not param.requires_grad)
            y = self.look(self.batch(), torch.enable_grad)
            y.float().sum().backward()
        self.seen += self.copied(self.grads())
        self.model.zero_grad()
        param.requires_grad_(not param.requires_grad)

    def deepcopy(self) -> None:
        with self.region():
            self.seen += self.copied([copy.deepcopy(self.model)(self.batch())])


@pytest.mark.filterwarnings("ignore:.* has found no gradients in its first 3 steps")     # all of its weights are frozen
def test_a_cache_changes_no_bit_of_random_training() -> None:
    hits = 0
    for rng in rounds("cached training", 40):
        seed = rng.randrange(2**32)
        expected = Program(seed, cached=False).run(20)
        program = Program(seed, cached=True)
        got = program.run(20)
        assert len(got) == len(expected)
        for n, (one, other) in enumerate(zip(got, expected, strict=True)):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=f"value {n} of seed {seed}")
        assert program.cache is not None
        hits += program.cache.info().hits
    assert hits > 100
