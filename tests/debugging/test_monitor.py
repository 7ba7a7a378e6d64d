"""The monitor's numbers are counted by hand here, and a run does not know that it is monitored."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ampkit import GradScaler, autocast
from ampkit.__main__ import main
from ampkit.debugging import TensorMonitor
from tests.debugging.models import loss_of, make


def n_hooks() -> int:
    return len(torch_module._global_forward_hooks) + len(torch_module._global_forward_pre_hooks)


class Fixed(nn.Module):
    """Returns what it was made with."""

    def __init__(self, *values: float, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values, dtype=dtype))

    def forward(self, factor: float) -> torch.Tensor:
        return self.values * factor


def test_headroom_underflow_and_broken_elements_are_counted() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Fixed(1024.0, 1e-5, 0.0, -3e-6)

        def forward(self) -> torch.Tensor:
            return self.inner(1.0) + self.inner(2.0)

    model = Scale()
    nothing = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with TensorMonitor(model) as monitor:
        (model().float() * torch.tensor([32.0, 1e-6, 1.0, 0.0])).sum().backward()
        nothing.step()
    assert monitor.last is not None
    inner = monitor.last["outputs"]["inner"]
    assert inner["headroom"] == pytest.approx(math.log2(65504 / 2048))      # of the two calls, the nearer
    assert inner["underflow"] == 0.5
    gradient = monitor.last["gradients"]["inner"]
    assert gradient["headroom"] == pytest.approx(math.log2(65504 / 32))
    assert gradient["underflow"] == 0.25
    assert monitor.last["lost_updates"] == {}
    with torch.no_grad():
        model.inner.values[0] = math.inf
    with TensorMonitor(model) as monitor:
        model()
        nothing.step()
    assert monitor.last is not None
    assert monitor.last["outputs"]["inner"] == {"headroom": 0.0, "underflow": 0.5}


def test_updates_that_are_lost_are_counted() -> None:
    """1 and 256 have bfloat16 neighbours 2**-7 and 2 apart: an update of 0.1 moves one of them."""
    model = Fixed(1.0, 256.0, 256.0, 1.0, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TensorMonitor(model) as monitor:
        (model(1.0) * torch.tensor([1.0, 1.0, 1.0, 0.0])).float().sum().backward()
        optimizer.step()
    assert monitor.last is not None
    assert monitor.last["lost_updates"] == {"values": pytest.approx(2 / 3)}
    assert "updates      66.7% lost of values" in str(monitor)
    large = nn.Linear(1000, 300, bias=False).bfloat16()     # evenly spaced elements are looked at
    with torch.no_grad():
        large.weight.fill_(256.0)
        large.weight[:75] = 1.0
    optimizer = torch.optim.SGD(large.parameters(), lr=0.1)
    with TensorMonitor(large) as monitor:
        large.weight.grad = torch.ones_like(large.weight)
        large(torch.ones(1, 1000).bfloat16())
        optimizer.step()
    assert monitor.last is not None
    assert monitor.last["lost_updates"]["weight"] == pytest.approx(0.75, abs=1e-3)


def test_hooks_are_there_on_sampled_steps_only(tmp_path: Path) -> None:
    model, batch = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    before, seen = n_hooks(), []
    file = tmp_path / "run.jsonl"
    with TensorMonitor(model, every=3, path=file):
        for _ in range(7):
            seen.append(n_hooks() > before)
            with autocast("cpu", dtype=torch.float16):
                loss = loss_of(model(batch))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert seen == [True, False, False, True, False, False, True]
    assert n_hooks() == before
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["step"] for one in samples] == [0, 3, 6]
    assert set(samples[0]["outputs"]) == {"0", "1", "2", "Sequential"}
    assert set(samples[0]["lost_updates"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_results_are_the_same_to_the_bit(name: str) -> None:
    def train(monitored: bool) -> tuple[dict[str, Any], torch.Tensor]:
        model, batch = make(name)
        model = nn.Sequential(model, nn.Identity() if name.startswith("gpt") else nn.Dropout(0.2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        monitor = TensorMonitor(model, every=1)
        with monitor if monitored else torch.enable_grad():
            for _ in range(3):
                with autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_of(model(batch))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return model.state_dict(), torch.get_rng_state()

    plain, random = train(False)
    watched, random_after = train(True)
    assert torch.equal(random, random_after)
    assert all(torch.equal(plain[key], watched[key]) for key in plain)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="every is 0; expected a number of steps, 1 or more"):
        TensorMonitor(every=0)
    with pytest.raises(TypeError, match=r"model is int; expected a torch\.nn\.Module"):
        TensorMonitor(3)        # type: ignore[arg-type]
    assert str(TensorMonitor()) == "no step was sampled"


SCRIPT = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(2, 4)).float().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_script_is_monitored_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that compiles, and refuses graph breaks; a former run's lines are none of this one's."""
    script, out = tmp_path / "train.py", tmp_path / "out.jsonl"
    script.write_text(SCRIPT.replace("optimizer =", "run = torch.compile(model, backend='aot_eager', fullgraph=True)\n"
                                     "optimizer =").replace("loss = model", "loss = run"))
    assert main(["debug", "monitor", "--every", "2", "--out", str(out), str(script), "3"]) == 0
    assert "updates" in capsys.readouterr().out
    script.write_text(SCRIPT)
    assert main(["debug", "monitor", "--every", "2", "--out", str(out), str(script), "5"]) == 0
    samples = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["step"] for one in samples] == [0, 2, 4]
    assert all(set(one["lost_updates"]) == {"0.weight", "0.bias", "1.weight", "1.bias"} for one in samples)
    assert all(set(one["gradients"]) == {"0", "1", "Sequential"} for one in samples)
    assert "step 4\n  outputs" in capsys.readouterr().out
    assert main(["debug", "monitor", "--out", str(out), str(script), "0"]) == 3
    assert main(["debug", "monitor", "--every", "0", str(script), "5"]) == 2
