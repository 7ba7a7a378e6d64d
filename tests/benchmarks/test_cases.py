"""Every case there is: its sides run on a CPU, agree, and are those that its aims name."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ampkit_kernels.configs import Config
from benchmarks import float8, host, kernels, registry, report, trainer, training, tuning, workloads
from benchmarks.case import AMPKIT, OUTER, SAME_LIST, TORCH, TORCH_OPERATORS, Case, WrongAnswerError
from benchmarks.regions import WeightCasts
from benchmarks.scaling import Scaling
from benchmarks.trainer import Variant
from tests.helpers.regions import LSTM_IN_16_BITS
from tests.kernels.launches import noted_launches

CPU = torch.device("cpu")
BF16, FP16 = torch.bfloat16, torch.float16


def gpt() -> workloads.Workload:
    return workloads.gpt(16, 2, 2, 8, 32, 2)


def test_a_run_is_a_choice_of_cases() -> None:
    """The default run fits in five minutes: timing takes its seconds, the rest most of as long; the gate a minute."""
    everyday = registry.choose("cpu")
    assert sum(case.seconds for case in everyday) <= 130
    assert {case.family for case in everyday} < {case.family for case in registry.every_case()} == set(report.QUESTIONS)
    assert [case.name for case in registry.choose("cuda", ["*/GPT-2*bf16 graph"])] == ["GPT-2 124M, bf16 graph"]
    with pytest.raises(
        ValueError, match="families are accumulation, bfloat16 weights, compiled, debugging, features, float8"
    ):
        registry.choose("cpu", ["nothing"])


def test_every_case_runs_in_every_way() -> None:
    """A small copy of it; kernels and training below. Aims are between sides that the case has."""
    for case in registry.every_case():
        for device in case.devices:
            names = sides_of(case, torch.device(device))
            assert {case.base, *(name for aim in case.aims for name in (aim.side, aim.base))} <= {*names}, case.name
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.is_autocast_enabled("cpu")


def sides_of(case: Case, device: torch.device) -> list[str]:
    """The names of a case's sides, from a small copy of it on the CPU."""
    if isinstance(case, training.Training):
        return trainer.ways(case.variant, device)
    if isinstance(case, tuning.Tuning):
        return [tuning.SHIPPED]  # the rest is what compiles
    small: dict[type[Case], dict[str, Any]] = {
        kernels.Kernel: {"shapes": lambda: [(3,)]},
        host.Host: {"count": getattr(case, "groups", 1)},
        Scaling: {"tensors": 2, "elements": 10},
        float8.Quantize: {"rows": 16, "columns": 16},
        float8.Linear: {"rows": 16, "width": 16},
        WeightCasts: {"weights": 2},
    }
    case = dataclasses.replace(case, **small.get(type(case), {}))
    sides = case.sides(CPU)
    if case.family not in ("kernels", "debugging"):
        for side in sides.values():
            side.run(2)
    return list(sides)


def spoil(case: Case, sides: dict[str, Any], name: str) -> None:
    """A side that gives other values is found out."""
    right = sides[name].result
    sides[name].result = lambda: [tensor * 1.1 for tensor in right()]
    with pytest.raises(WrongAnswerError):
        case.check(sides)


@pytest.mark.parametrize(
    ("workload", "variant"),
    [
        (lambda: workloads.digits(4), Variant()),
        (lambda: workloads.resnet(8, (1, 2, 2), 2, 64, 5), Variant()),
        pytest.param(
            lambda: workloads.lstm(16, 2, 2, 5, 32),
            Variant(),
            marks=pytest.mark.skipif(not LSTM_IN_16_BITS, reason="no 16-bit LSTM in oneDNN on this CPU"),
        ),
        (gpt, Variant(BF16, 4)),
        (gpt, Variant(FP16, 2, clip=True)),
        (gpt, Variant(scaled=True)),
        (gpt, Variant(low=True)),
        (gpt, Variant(run="inference")),
        (gpt, Variant(run="around")),
        (gpt, Variant(run="compiled")),
    ],
)
def test_every_way_of_training_gets_to_the_same_loss(
    workload: Callable[[], workloads.Workload], variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache saves all but one of the casts of the 17 weights and biases in torch's list: counted in a step."""
    compile_ = torch.compile  # to generate code takes minutes
    monkeypatch.setattr(torch, "compile", lambda model, backend="": compile_(model, backend="eager"))
    case = training.Training(name="tiny", variant=variant, workload=workload)
    sides = case.sides(CPU)
    case.check(sides)
    losses = {way: side.result()[0].item() for way, side in sides.items()}
    assert losses["fp32"] == pytest.approx(losses[TORCH], rel=0.1)
    assert losses["fp32"] != losses[TORCH]
    if variant.accumulation == 4:
        facts = {way: sides[way].facts() for way in (TORCH, SAME_LIST, OUTER)}
        n_weights = 2 * 4 * 2 + 1  # two blocks of four linears with biases; the tied head
        assert facts[SAME_LIST]["copies"] == facts[TORCH]["copies"] == facts[OUTER]["copies"] + 3 * n_weights
        assert facts[SAME_LIST]["peak_bytes"] > 0
    spoil(case, sides, SAME_LIST)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_graph_and_compiled_steps_train_as_eager_ones(dtype: torch.dtype) -> None:
    for way in (TORCH, AMPKIT):
        losses = []
        for run in ("eager", "graph", "compiled"):
            training = trainer.Trainer(gpt(), Variant(dtype, 2, clip=True, run=run), way, torch.device("cuda"))
            for _ in range(4):
                training.step()
            assert training.loss is not None
            losses.append(training.loss.item())
        assert losses[1:] == pytest.approx(losses[:1] * 2, rel=2e-2)


@pytest.mark.parametrize("job", ["unscale", "clip", "AdamW", "clip + AdamW"])
def test_scalers_agree(job: str) -> None:
    case = Scaling(name="tiny", job=job, tensors=3, elements=50)
    sides = case.sides(CPU)
    case.check(sides)
    spoil(case, sides, AMPKIT)


def test_every_job_of_kernels_is_rehearsed_and_its_sides_agree() -> None:
    """On the CPU with a short list; a GPU has the same jobs."""
    for case in kernels.cases():
        if case.devices == ("cpu",) and "20 tiny" in case.name:
            sides = case.sides(CPU)
            case.check(sides)
            moved = {name: side.facts()["bytes_moved"] for name, side in sides.items()}
            assert 0 < moved[AMPKIT] <= moved[TORCH_OPERATORS], case.name
    kernel_cases = [case for case in kernels.cases() if isinstance(case, kernels.Kernel)]
    jobs = {(case.job, case.dtype, case.moving, device) for case in kernel_cases for device in case.devices}
    assert jobs == {(*job, device) for *job, _ in jobs for device in ("cpu", "cuda")}


def test_a_clipped_list_is_clipped_again_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that stays clipped has factor 1 from the second round: no bytes to move, while they would be charged."""
    monkeypatch.setattr(kernels, "MAX_NORM", 0.05)
    case = kernels.Kernel(name="", job="unscale + clip", shapes=lambda: [(4000,)])
    side = case.sides(CPU)[AMPKIT]
    assert side.before is not None
    side.before()
    (before,) = side.result()
    side.run(1)
    assert side.result()[0] < before
    side.before()
    assert side.result()[0] == before


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
def test_kernels_launch_with_the_configuration_that_is_tuned() -> None:
    material = kernels.Material([(5,), (700,)], CPU, torch.float32, impl="triton")
    for job in tuning.KERNELS:
        with noted_launches() as launches:
            tuning.Tuning(name=job, job=job).side(material, Config(block=256, chunk=1024)).run(1)
        kernel = f"{tuning.KERNELS[job].removeprefix('optimizer_')}_kernel"
        assert {launch.options["BLOCK"] for launch in launches if launch.kernel == kernel} == {256}
