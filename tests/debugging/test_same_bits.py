"""Every operator that torch has samples for, and its derivative, with and without an examination: same bits."""

import contextlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit.debugging import Examination
from tests.helpers.op_samples import op_db_calls, run

pytest.importorskip("expecttest", reason="torch's operator database imports it; it is in ampkit[dev]")
# The samples call deprecated operators on purpose.
pytestmark = pytest.mark.filterwarnings("ignore")

# Memory that nobody wrote.
UNREPEATABLE = ("empty", "new_empty")
# torch computes these gradients by other formulas under any dispatch mode, by isTensorSubclassLike in its
# FunctionsManual.cpp: of a product with zeros, of the number that fills a mask by another order of additions, and of
# eigenvectors without the check that they determine the loss; of cumulative products in torch 2.11.
OTHERWISE_UNDER_A_MODE = {"prod", "masked_fill", "linalg.eig", "cumprod", "masked.cumprod"}


class Mode(TorchDispatchMode):
    """A mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def bits(outcome: list[Any] | Exception) -> Any:
    """Dtypes, shapes and bytes of tensors, the text of anything else, the class of an error; and random numbers."""
    if isinstance(outcome, Exception):
        return type(outcome)
    found = []
    for out in outcome:
        if isinstance(out, torch.Tensor):
            dense = out.detach().to_dense() if out.layout is not torch.strided else out.detach()
            plain = dense.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
            found.append((out.dtype, out.layout, out.shape, plain.reshape(-1).view(torch.uint8).numpy().tobytes()))
        else:
            found.append(repr(out))
    return found, torch.default_generator.get_state().numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_and_gradients_under_an_examination(dtype: torch.dtype) -> None:
    seen, apart, wrong = 0, set(), []
    for call in op_db_calls(dtype, 2):
        if call.name.startswith(UNREPEATABLE):
            continue
        without = run(call, contextlib.nullcontext(), backward="inside")
        want = bits(without)
        got = bits(run(call, Examination(), backward="inside"))
        seen += not isinstance(without, Exception)
        if got != want and (name := call.name.split()[0]) in OTHERWISE_UNDER_A_MODE:
            apart.add(name)
            want = bits(run(call, Mode(), backward="inside"))
        if got != want:
            wrong.append(call.name)
    assert not wrong
    assert seen > 800
    assert "prod" in apart
