"""A step cache fits no lists that differ; `tests/optim/test_known_steps.py` has the changes that programs make."""

import threading
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from ampkit_kernels import StepCache, adamw_
from tests.kernels.launches import noted_launches

pytestmark = pytest.mark.usefixtures("interpreted")
OPTIONS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0}


@pytest.fixture(autouse=True)
def _nothing_runs() -> Iterator[None]:
    with noted_launches():
        yield


def filled() -> tuple[StepCache, list[list[Tensor]]]:
    """A cache of one AdamW step, and its lists: parameters, gradients, moments, steps."""
    lists = [*([torch.zeros(4, 4, dtype=torch.float16)] for _ in range(4)), [torch.zeros(())]]
    cache = StepCache()
    adamw_(*lists[:4], [], lists[4], cache=cache, impl="triton", **OPTIONS)
    return cache, lists


# Changes of a list of one float16 matrix, mostly at the same address: its column, and the function of the new tensor.
CHANGES: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "parameter of another dtype": (0, lambda t: t.view(torch.bfloat16)),
    "gradient of another dtype": (1, lambda t: t.view(torch.bfloat16)),
    "integer gradient": (1, lambda t: t.view(torch.int16)),
    "shorter parameter": (0, lambda t: t[:2]),
    "shorter gradient": (1, lambda t: t[:2]),
    "transposed parameter": (0, Tensor.t),
    "transposed gradient": (1, Tensor.t),
    "shorter moment": (2, lambda t: t[:2]),
    "moment of another dtype": (3, lambda t: t.view(torch.bfloat16)),
    "unaligned gradient": (1, lambda t: torch.zeros(17, dtype=torch.float16)[1:].view(4, 4)),
    "sparse gradient": (1, lambda t: torch.ones(4, 4).to_sparse()),
    "subclass": (1, lambda t: t.as_subclass(torch.nn.Buffer)),
    "steps of another dtype": (4, Tensor.int),
    "no tensor": (4, lambda t: 7.0),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_lists_do_not_fit(change: str) -> None:
    cache, lists = filled()
    column, changed = CHANGES[change]
    others = [list(tensors) for tensors in lists]
    others[column][0] = changed(others[column][0])
    twice_as_long = [tensors * 2 for tensors in lists]
    assert [cache.fits(each) for each in (others, twice_as_long, lists)] == [False, False, True]


def test_moved_data_of_the_same_objects_is_examined() -> None:
    steps = torch.zeros((), dtype=torch.int32)
    for column, data in ((2, torch.zeros(4, 4).bfloat16()), (2, torch.zeros(4, 8).half()[:, ::2]), (4, steps)):
        cache, lists = filled()
        lists[column][0].data = data
        assert not cache.fits(lists), f"list {column} is {data.dtype} of strides {data.stride()}"


def test_a_cache_is_of_one_thread_and_not_for_captures() -> None:
    cache, lists = filled()
    fits = []
    thread = threading.Thread(target=lambda: fits.append(cache.fits(lists)))
    thread.start()
    thread.join()
    with mock.patch("ampkit_kernels.step_cache.is_capturing", return_value=True):
        fits.append(cache.fits(lists))
        captured, others = filled()
    fits += [captured.fits(others), cache.fits(lists)]
    assert dict(zip(("other thread", "capture", "filled in a capture", "same thread"), fits, strict=True)) == {
        "other thread": False,
        "capture": False,
        "filled in a capture": False,
        "same thread": True,
    }
