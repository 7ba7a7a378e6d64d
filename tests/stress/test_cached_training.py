"""Random training programs have the same bits with a `WeightCache` as without.

The models tie, freeze and checkpoint weights. Between steps weights are replaced, frozen, copied and evaluated in every
grad mode, and steps are skipped.
"""

import copy
import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampkit.optim
from ampkit import GradScaler, WeightCache, autocast
from ampkit.engine import weight_cache
from tests.stress.budget import rounds

pytestmark = pytest.mark.timeout(300 + float(os.environ.get("AMPKIT_SOAK_SECONDS") or 0))

OPTIMIZERS: list[Callable[[Iterable[Tensor]], Any]] = [
    lambda params: ampkit.optim.AdamW(params, lr=1e-2),
    lambda params: ampkit.optim.SGD(params, lr=1e-2, momentum=0.9),
    lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    lambda params: torch.optim.SGD(params, lr=1e-2, foreach=True),
    lambda params: torch.optim.Adagrad(params, lr=1e-2),
]


class Model(nn.Module):
    """Linear layers, some tied or frozen, with or without a checkpoint; the head is a bare parameter."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=draw.random() < 0.7) for _ in range(draw.randint(1, 4)))
        if draw.random() < 0.3:
            self.layers[-1].weight = self.layers[0].weight
        for param in self.layers[0].parameters() if draw.random() < 0.4 else ():
            param.requires_grad_(False)
        self.head = nn.Parameter(torch.randn(8, 8))
        self.checkpoint = draw.choice([None, None, True, False])

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoint is None:
            return self.body(x) @ self.head
        return checkpoint(self.body, x, use_reentrant=self.checkpoint) @ self.head  # type: ignore[operator]


def trained(seed: int, cache: WeightCache | None) -> list[Tensor]:
    """The results of 20 random events and the final parameters. The same seed gives the same events."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, seen = Model(draw), list[Tensor]()
    optimizer = draw.choice(OPTIMIZERS)([param for param in model.parameters() if param.requires_grad])
    scaler = GradScaler("cpu", init_scale=8.0, enabled=draw.random() < 0.5)
    settings: Any = {"dtype": draw.choice(["float16", "bfloat16"]), "policy": draw.choice(["torch", "default"])}

    def look(mode: Callable[[], Any] = torch.enable_grad, of: nn.Module = model) -> Tensor:
        with mode():
            y = of(torch.randn(3, 8, requires_grad=True))  # a reentrant checkpoint asks for it
        seen.append(y.detach().clone())
        return y

    def look_at_gradients() -> list[Tensor]:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        seen.extend(grad.clone() for grad in grads)
        return grads

    for event in draw.choices(["train", "evaluate", "replace", "load", "freeze", "copy"], [3, 1, 1, 1, 1, 1], k=20):
        layer: Any = draw.choice(list(model.layers))
        backward_inside, twice, flag = (draw.random() < 0.4 for _ in range(3))
        if event == "replace" and flag:
            layer.weight.data = layer.weight.data * 1.01
        elif event == "replace":
            layer.weight = nn.Parameter(layer.weight.detach() * 1.01, layer.weight.requires_grad)
        elif event == "load":
            model.load_state_dict({name: value * 0.99 for name, value in model.state_dict().items()})
        for _ in range(1 + twice):
            with autocast("cpu", cache=cache, **settings):
                if event in ("train", "evaluate") and flag:
                    look(torch.no_grad if twice else torch.inference_mode)
                if event == "freeze":
                    look()
                    layer.weight.requires_grad_(not layer.weight.requires_grad)
                loss = look(of=copy.deepcopy(model) if event == "copy" else model).float().pow(2).mean()
                if event == "train" and backward_inside:
                    scaler.scale(loss).backward()
            if event == "freeze" or (event == "train" and not backward_inside):
                scaler.scale(loss).backward()
        grads = look_at_gradients()
        if event == "train":
            if flag and scaler.is_enabled():
                grads[0].flatten()[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        model.zero_grad(set_to_none=flag)
    return [*seen, *(param.detach() for param in model.parameters())]


def test_a_cache_changes_no_bit_of_random_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether kept casts are connected to the weights, as those of large ones are, or weights are cast again."""
    hits = 0
    for draw in rounds("cached training", 40):
        monkeypatch.setattr(weight_cache, "SMALLEST_CONNECTED", draw.choice([0, 0, 1 << 16]))
        seed, cache = draw.randrange(2**32), WeightCache()
        for n, pair in enumerate(zip(trained(seed, cache), trained(seed, None), strict=True)):
            torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True, msg=f"value {n} of seed {seed}")
        hits += cache.info().hits
    assert hits > 100
