"""Every case there is: names, aims, time."""

import dataclasses

import pytest
import torch

from benchmarks import kernels, registry, report, trainer, training, tuning
from benchmarks.case import Case
from benchmarks.host import Host
from benchmarks.regions import WeightCasts
from benchmarks.scaling import Scaling
from tests.benchmarks.helpers import CPU


def test_names_are_unique_and_every_device_has_cases():
    cases = registry.every_case()
    assert len({(case.family, case.name) for case in cases}) == len(cases)
    assert {device for case in cases for device in case.devices} == {"cpu", "cuda"}
    families = {case.family for case in registry.choose("cpu")}
    assert families == {"operators", "regions", "weights", "scaler", "accumulation", "width", "training"}
    others = {"debugging", "host", "kernels", "tuning"}
    assert {case.family for case in cases} == families | others == set(report.TITLES)


def test_the_everyday_cpu_run_fits_in_five_minutes():
    """Timing takes its seconds, building and counting about as long again; the gate has a minute."""
    seconds = [case.seconds for case in registry.choose("cpu")]
    assert sum(seconds) <= 150


def test_patterns_choose_and_a_wrong_one_names_the_families():
    assert {case.family for case in registry.choose("cuda", ["width/*", "scaler/*"])} == {"width", "scaler"}
    assert [case.name for case in registry.choose("cuda", ["*/GPT-2*bf16 graph"])] == ["GPT-2 124M, bf16 graph"]
    with pytest.raises(ValueError, match="families are accumulation, debugging, host, kernels, operators"):
        registry.choose("cpu", ["nothing"])


def test_aims_are_between_sides_that_the_case_has():
    for case in registry.every_case():
        for device in case.devices:
            names = sides_of(case, torch.device(device))
            assert case.base in names, case.name
            assert all({aim.side, aim.base} <= {*names} for aim in case.aims), case.name


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
    elif isinstance(case, WeightCasts):
        case = dataclasses.replace(case, weights=2)
    return list(case.sides(CPU))
