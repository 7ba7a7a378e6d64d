"""Every case there is: names, aims, time; what a kernel's case compares."""

import dataclasses
import os
from typing import Any

import pytest
import torch

from ampkit_kernels.configs import Config
from benchmarks import float8, kernels, parameter_lists, registry, report, trainer, training, tuning
from benchmarks.case import AMPKIT, TORCH_OPERATORS, Case, WrongAnswerError
from benchmarks.host import Host
from benchmarks.measure import measure
from benchmarks.regions import Operator, WeightCasts
from benchmarks.scaling import Scaling
from tests.benchmarks.helpers import CPU
from tests.kernels.launches import noted_launches


def test_families_patterns_and_time():
    """The default run fits in five minutes: timing takes its seconds, the rest most of as long; the gate a minute."""
    cases = registry.every_case()
    assert len({(case.family, case.name) for case in cases}) == len(cases)
    everyday = registry.choose("cpu")
    families = {case.family for case in everyday}
    micro = {"operators", "regions", "weights", "scaler"}
    assert families == micro | {"small", "compiled", "accumulation", "width", "training"}
    others = {"debugging", "float8", "host", "kernels", "tuning"}
    assert {case.family for case in cases} == families | others == set(report.QUESTIONS)
    assert sum(case.seconds for case in everyday) <= 130
    assert {case.family for case in registry.choose("cuda", ["width/*", "scaler/*"])} == {"width", "scaler"}
    assert [case.name for case in registry.choose("cuda", ["*/GPT-2*bf16 graph"])] == ["GPT-2 124M, bf16 graph"]
    with pytest.raises(ValueError, match="families are accumulation, compiled, debugging, float8"):
        registry.choose("cpu", ["nothing"])


def test_aims_are_between_sides_that_the_case_has():
    """And every case of a region or a scaler runs in every way, and leaves no region open."""
    for case in registry.every_case():
        for device in case.devices:
            names = sides_of(case, torch.device(device))
            assert case.base in names, case.name
            assert all({aim.side, aim.base} <= {*names} for aim in case.aims), case.name
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.is_autocast_enabled("cpu")


def sides_of(case: Case, device: torch.device) -> list[str]:
    """The names of a case's sides, from a small copy of it on the CPU."""
    if isinstance(case, training.Training):
        return trainer.ways(case.variant, device)
    if isinstance(case, tuning.Tuning):
        return [tuning.SHIPPED]         # the rest is what compiles
    if isinstance(case, kernels.Kernel):
        case = dataclasses.replace(case, shapes=lambda: [(3,)])
    elif isinstance(case, Host):
        case = dataclasses.replace(case, count=case.groups)
    elif isinstance(case, Scaling):
        case = dataclasses.replace(case, tensors=min(case.tensors, 2), elements=min(case.elements, 10))
    elif isinstance(case, float8.Quantize | float8.Linear):
        case = dataclasses.replace(case, rows=16, **{"width" if isinstance(case, float8.Linear) else "columns": 16})
    elif isinstance(case, WeightCasts):
        case = dataclasses.replace(case, weights=2)
    sides = case.sides(CPU)
    if isinstance(case, Operator) or case.family == "regions":
        for side in sides.values():
            side.run(2)
    return list(sides)


# --- kernels


def kernel_case(job: str, **more: Any) -> kernels.Kernel:
    return kernels.Kernel(name=job, job=job, shapes=lambda: [(3,), (40, 5)], **more)


def test_lists_are_the_models_they_name():
    sizes = {}
    for name, shapes in parameter_lists.LISTS.items():
        sizes[name] = len(shapes()), sum(torch.Size(shape).numel() for shape in shapes())
        assert 1e-2 * sizes[name][1] ** 0.5 > 2 * kernels.MAX_NORM, "gradients that need no clipping"
    assert sizes.pop("5000 tiny")[0] == 5000
    assert sizes == {
        "GPT-2 124M": (148, 124_439_808), "GPT-2 1.5B": (580, 1_557_611_200), "ResNet-50": (161, 25_557_032),
    }


def test_every_job_is_rehearsed_and_its_sides_agree():
    """On the CPU with a short list; a GPU has the same jobs."""
    rehearsed = [case for case in kernels.cases() if case.devices == ("cpu",) and "20 tiny" in case.name]
    for case in rehearsed:
        row = measure(case, CPU, effort=0.01)
        moved = {name: side["facts"]["bytes_moved"] for name, side in row["sides"].items()}
        assert 0 < moved[AMPKIT] <= moved[TORCH_OPERATORS], case.name
    jobs = {device: {(case.job, case.dtype, case.moving) for case in kernels.cases() if case.devices == (device,)}
            for device in ("cpu", "cuda")}
    assert jobs["cpu"] == jobs["cuda"]
    assert sum(bool(case.aims) for case in kernels.cases()) == len(kernels.AIMS)
    sides = kernel_case("unscale + clip").sides(CPU)
    right = sides[AMPKIT].result
    sides[AMPKIT].result = lambda: [right()[0] + 1]
    with pytest.raises(WrongAnswerError, match=r"unscale \+ clip: ampkit left other values than torch"):
        kernel_case("unscale + clip").check(sides)


def test_a_clipped_list_is_clipped_again_in_every_round(monkeypatch: pytest.MonkeyPatch):
    """A list that stays clipped has factor 1 from the second round: no bytes to move, while they would be charged."""
    seen = []
    multiply = kernels.kernels.multiply_
    monkeypatch.setattr(
        kernels.kernels, "multiply_",
        lambda grads, factor, *rest, **more: (seen.append(factor.item()), multiply(grads, factor, *rest, **more)),
    )
    monkeypatch.setattr(kernels, "MAX_NORM", 0.05)
    for job, bytes_moved in (("unscale + clip", 12), ("unscale + clip, factor 1", 4)):
        case = kernel_case(job)
        side = dataclasses.replace(case, shapes=lambda: [(4000,)]).sides(CPU)[AMPKIT]
        for _ in range(3):
            side.before()
            side.run(1)
        assert side.facts()["bytes_moved"] == 4000 * bytes_moved
    assert seen[:3] == [seen[0]] * 3
    assert 0.0 < seen[0] < 1.0
    assert seen[3:] == [1.0] * 3


@pytest.mark.parametrize("job", tuning.KERNELS)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
def test_every_kernel_launches_with_a_configuration_of_choice(job: str):
    case = tuning.Tuning(name=job, job=job)
    material = kernels.Material([(5,), (700,)], CPU, torch.float32, impl="triton")
    for config in (None, Config(block=256, chunk=1024)):
        with noted_launches() as found:
            case.side(material, config).run(1)
        blocks = {one.options["BLOCK"] for one in found if one.kernel == f"{tuning.KERNELS[job]}_kernel"}
        assert len(blocks) == 1
        assert (blocks == {256}) == (config is not None)
