"""The families that time kernels: lists, what a case compares, and that its two forms of clipping are what they say."""

import dataclasses
import itertools
import os

import pytest
import torch

from benchmarks import kernels, parameter_lists, tuning
from benchmarks.case import AMPKIT, TORCH_OPERATORS, UnavailableError, WrongAnswerError
from benchmarks.measure import measure
from tests.benchmarks.helpers import CPU

REHEARSED = [case for case in kernels.cases() if case.devices == ("cpu",) and "20 tiny" in case.name]


def kernel_case(job: str, **more) -> kernels.Kernel:
    return kernels.Kernel(name=job, job=job, shapes=lambda: [(3,), (40, 5)], **more)


def test_lists_are_the_models_they_name():
    def elements(name: str) -> tuple[int, int]:
        shapes = parameter_lists.LISTS[name]()
        return len(shapes), sum(torch.Size(shape).numel() for shape in shapes)

    assert elements("GPT-2 124M") == (148, 124_439_808)
    assert elements("GPT-2 1.5B") == (580, 1_557_611_200)
    assert elements("ResNet-50") == (161, 25_557_032)
    assert elements("5000 tiny")[0] == 5000


@pytest.mark.parametrize("case", REHEARSED, ids=lambda case: case.name)
def test_every_job_is_rehearsed_and_its_sides_agree(case: kernels.Kernel):
    row = measure(case, CPU, effort=0.01)
    assert row["clock"] == "host"
    for side in row["sides"].values():
        assert side["facts"]["bytes_moved"] > 0
    ours = row["sides"][AMPKIT]["facts"]["bytes_moved"]
    assert row["work"]["bytes"] == ours <= row["sides"][TORCH_OPERATORS]["facts"]["bytes_moved"]


def test_real_lists_have_every_kind_of_row_that_the_rehearsal_has():
    jobs = {device: {(case.job, case.dtype, case.moving) for case in kernels.cases() if case.devices == (device,)}
            for device in ("cpu", "cuda")}
    assert jobs["cpu"] == jobs["cuda"]


def test_every_aim_belongs_to_a_case():
    aimed = [(case.name, case.aims) for case in kernels.cases() if case.aims]
    assert len(aimed) == len(kernels.AIMS)
    assert ("unscale, GPT-2 1.5B, fp32", 2) in [(name, len(aims)) for name, aims in aimed]


def factors(case: kernels.Kernel, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The factor that ampkit multiplies by in three samples in a row."""
    seen = []
    multiply = kernels.kernels.multiply_
    monkeypatch.setattr(
        kernels.kernels, "multiply_",
        lambda grads, factor, *rest, **more: (seen.append(factor.item()), multiply(grads, factor, *rest, **more)),
    )
    side = case.sides(CPU)[AMPKIT]
    for _ in range(3):
        side.before()
        side.run(1)
    return seen


def test_a_clipped_list_is_clipped_again_in_every_round(monkeypatch: pytest.MonkeyPatch):
    """A list that stays clipped has factor 1 from the second round: no bytes to move, while they would be charged."""
    monkeypatch.setattr(kernels, "MAX_NORM", 0.05)
    case = dataclasses.replace(kernel_case("unscale + clip"), shapes=lambda: [(4000,)])
    seen = factors(case, monkeypatch)
    assert len(set(seen)) == 1
    assert 0.0 < seen[0] < 1.0
    assert factors(kernel_case("unscale + clip, factor 1"), monkeypatch)[-3:] == [1.0] * 3
    assert kernel_case("unscale + clip, factor 1").work().model == "4 bytes per element"
    assert kernel_case("unscale + clip").work().model == "12 bytes per element"


@pytest.mark.parametrize("name", parameter_lists.LISTS)
def test_real_lists_have_gradients_that_need_clipping(name: str):
    elements = sum(torch.Size(shape).numel() for shape in parameter_lists.LISTS[name]())
    assert 1e-2 * elements**0.5 > 2 * kernels.MAX_NORM


def test_moving_gradients_are_elsewhere_in_every_sample():
    case = kernel_case("AdamW step", moving=True)
    for side in case.sides(CPU).values():
        addresses = []
        for _ in range(4):
            side.before()
            addresses.append(tuple(grad.data_ptr() for grad in case_material(side).grads))
        assert all(a != b for a, b in itertools.pairwise(addresses))


def case_material(side) -> kernels.Material:
    """The material that a side works on, out of its closure."""
    held = [cell.cell_contents for cell in side.before.__closure__]
    return next(value for value in held if isinstance(value, kernels.Material))


def test_sides_that_disagree_are_not_timed():
    case = kernel_case("unscale + clip")
    sides = case.sides(CPU)
    right = sides[AMPKIT].result
    sides[AMPKIT].result = lambda: [right()[0] + 1]
    with pytest.raises(WrongAnswerError, match=r"unscale \+ clip: ampkit left other values than torch"):
        case.check(sides)


def test_configurations_stand_beside_the_one_that_is_shipped(monkeypatch: pytest.MonkeyPatch):
    """One that does not run is left out, and no further one is begun when time is up."""
    case = tuning.Tuning(name="norm", kernel="norm")

    def fails_at_four(config):
        if config.programs_per_multiprocessor == 4 and config.block == 1024:
            raise RuntimeError("out of resources")

    shipped = tuning.Config(2048)
    monkeypatch.setitem(tuning.LAUNCHERS, "norm", lambda material: (shipped, fails_at_four))
    monkeypatch.setattr(tuning.ampkit_kernels, "why_not_triton", lambda device: None)
    sides = case.sides(CPU)
    assert list(sides) == [tuning.SHIPPED, "block 1024, warps 4, programs 2"]
    assert sides[tuning.SHIPPED].facts() == {"configuration": "shipped: block 2048, warps 8, programs 4"}
    assert list(dataclasses.replace(case, compile_seconds=-1.0).sides(CPU)) == [tuning.SHIPPED]
    monkeypatch.setattr(tuning.ampkit_kernels, "why_not_triton", lambda device: "no Triton")
    with pytest.raises(UnavailableError, match="no Triton"):
        case.sides(CPU)


@pytest.mark.parametrize("kernel", tuning.LAUNCHERS)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_kernel_launches_with_a_configuration_of_choice(kernel: str):
    shipped, launch = tuning.LAUNCHERS[kernel](kernels.Material([(5,), (700,)], CPU, torch.float32))
    launch(shipped)
    launch(dataclasses.replace(shipped, block=256, chunk=1024))
