"""A cache of a step takes no lists for others."""

import os
import threading
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from ampkit_kernels import StepCache, adamw_
from tests.kernels.launches import Noted, noted_launches

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
OPTIONS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0}


@pytest.fixture(autouse=True)
def launched() -> Iterator[list[Noted]]:
    with noted_launches() as found:
        yield found


def filled() -> tuple[StepCache, list[list[Tensor]]]:
    """A cache of one AdamW step, and its lists: parameters, gradients, moments, steps."""
    lists = [[torch.zeros(4, 4, dtype=torch.float16)] for _ in range(4)]
    lists.append([torch.zeros(())])
    return filled_with(lists), lists


def filled_with(lists: list[list[Tensor]]) -> StepCache:
    cache = StepCache()
    adamw_(*lists[:4], [], lists[4], cache=cache, impl="triton", **OPTIONS)
    return cache


def test_a_launch_from_the_cache_is_the_first_one_again(launched: list[Noted]) -> None:
    cache, lists = filled()
    lists[1] = [torch.ones(4, 4, dtype=torch.float16)]
    assert cache.fits(lists)
    cache.launch({**OPTIONS, "lr": 0.2, "maximize": True})
    first, again = launched[1], launched[3]
    assert [one.kernel for one in launched] == ["prepare_kernel", "adamw_kernel"] * 2
    assert again.arguments[1] == [tensor.data_ptr() for tensors in lists for tensor in tensors]
    assert (first.arguments[2:], first.options) == (again.arguments[2:], again.options)
    assert (launched[2].options["lr"], launched[2].options["MAXIMIZE"]) == (0.2, True)


# What becomes of a list of one float16 matrix, mostly at the same address: (column, new tensor).
OTHERS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
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
    "no tensor": (4, lambda t: 7.0),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("change", OTHERS)
def test_other_lists_do_not_fit(change: str) -> None:
    cache, lists = filled()
    column, become = OTHERS[change]
    others = [list(tensors) for tensors in lists]
    others[column][0] = become(others[column][0])
    assert not cache.fits(others)
    assert not cache.fits([tensors * 2 for tensors in lists])
    assert cache.fits(lists)


@pytest.mark.parametrize(("column", "data"), [
    (2, torch.zeros(4, 4, dtype=torch.bfloat16)), (2, torch.zeros(2, 4)), (2, torch.zeros(4, 8)[:, ::2]),
    (4, torch.zeros((), dtype=torch.int32)),
], ids=["dtype", "same bytes", "strides", "step"])
def test_moved_data_of_the_same_objects_is_examined(column: int, data: Tensor) -> None:
    cache, lists = filled()
    lists[column][0].data = data
    assert not cache.fits(lists)


def test_lazy_negation_and_another_order_of_dimensions_are_seen() -> None:
    single = [*[[torch.zeros(1)] for _ in range(4)], [torch.zeros(())]]
    cache = filled_with(single)
    negated = torch.view_as_complex(torch.ones(1, 2)).conj().imag
    assert not cache.fits([single[0], [negated], *single[2:]])
    permuted = [*[[torch.zeros(2, 3, 4).permute(2, 0, 1)] for _ in range(4)], [torch.zeros(())]]
    cache = filled_with(permuted)
    assert cache.fits(permuted)
    other = torch.zeros(3, 4, 2).permute(1, 2, 0)
    assert other.shape == permuted[1][0].shape
    assert not cache.fits([permuted[0], [other], *permuted[2:]])


def test_a_cache_is_of_one_thread_and_not_for_captures() -> None:
    cache, lists = filled()
    found = []
    thread = threading.Thread(target=lambda: found.append(cache.fits(lists)))
    thread.start()
    thread.join()
    with mock.patch("ampkit_kernels.step_cache.is_capturing", return_value=True):
        found.append(cache.fits(lists))
        captured = filled_with(lists)
    assert found == [False, False]
    assert not captured.fits(lists)
    assert cache.fits(lists)


@pytest.mark.parametrize("lists", [
    [[torch.zeros(4, 8)[:, ::2]] for _ in range(4)], [[torch.zeros(0)] for _ in range(4)],
    [[torch.zeros(4, 8)[:, ::2], torch.zeros(3)] for _ in range(4)],
], ids=["not dense", "empty", "one of two"])
def test_what_pytorch_steps_is_not_kept(lists: list[list[Tensor]], launched: list[Noted]) -> None:
    everything = [*lists, [torch.zeros(()) for _ in lists[0]]]
    assert not filled_with(everything).fits(everything)
    assert len(launched) == 2 * (len(lists[0]) - 1)
