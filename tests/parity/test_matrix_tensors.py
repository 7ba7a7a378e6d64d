"""Regions over tensors that are not plain: sparse, complex, nested, subclasses, out= and in place.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.helpers.matrix import QUIET, Net, Program, Programs, Region, gradients

PROGRAMS = Programs()
pytestmark = QUIET


@PROGRAMS.add
def sparse_embedding_gradients(region: Region) -> Any:
    embedding, head = nn.Embedding(10, 6, sparse=True), nn.Linear(6, 3)
    with region():
        out = head(embedding(torch.tensor([1, 3, 3, 7])))
    out.float().sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse
    return out, embedding.weight.grad.to_dense(), gradients(head)


@PROGRAMS.add
def embedding_bag(region: Region) -> Any:
    bag, head = nn.EmbeddingBag(10, 6), nn.Linear(6, 3)
    with region():
        out = head(bag(torch.tensor([1, 2, 4, 5]), torch.tensor([0, 2])))
    out.float().sum().backward()
    return out, gradients(bag), gradients(head)


@PROGRAMS.add
def sparse_coo_times_dense_in_an_island(region: Region) -> Any:
    """Sparse products have no bfloat16 kernel; people step out of the region for them, and back in."""
    matrix, dense, head = torch.eye(6).to_sparse(), torch.randn(6, 4, requires_grad=True), nn.Linear(4, 3)
    with region():
        with torch.autocast("cpu", enabled=False):
            product = torch.sparse.mm(matrix, dense)
        out = head(product)
    out.float().sum().backward()
    return product, out, dense.grad


@PROGRAMS.add
def sparse_coo_elementwise(region: Region) -> Any:
    matrix = torch.eye(6).to_sparse()
    with region():
        return (matrix * 2).to_dense(), (matrix + matrix).coalesce().values(), torch.sparse.sum(matrix)


@PROGRAMS.add
def complex_numbers(region: Region) -> Any:
    """Complex tensors are not autocast's; the real ones beside them are."""
    z = torch.randn(4, 6, dtype=torch.complex64, requires_grad=True)
    model = Net()
    with region():
        product = z @ z.conj().T
        magnitude = model(torch.view_as_real(z).sum(-1))
        spectrum = torch.fft.fft(magnitude.float()).abs()
    (product.abs().sum() + spectrum.sum()).backward()
    assert z.grad is not None
    return torch.view_as_real(product.detach()), magnitude, spectrum, torch.view_as_real(z.grad), gradients(model)


@PROGRAMS.add
def conjugate_and_negative_views(region: Region) -> Any:
    z, w = torch.randn(4, 6, dtype=torch.complex64), torch.randn(3, 6)
    with region():
        return F.linear(z.conj().imag, w), F.linear(z.real, w)


@PROGRAMS.add
def double_precision_and_integers_pass(region: Region) -> Any:
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    n = torch.arange(12).view(3, 4)
    with region():
        return F.linear(x, w), n @ n.T, x.softmax(-1)


@PROGRAMS.add
def jagged_nested_tensors(region: Region) -> Any:
    model = nn.Linear(6, 3)
    rows = [torch.randn(2, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True)]
    ragged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    with region():
        out = model(ragged)
    out.values().float().sum().backward()
    return out.values(), [row.grad for row in rows], gradients(model)


@PROGRAMS.add
def jagged_attention(region: Region) -> Any:
    rows = [torch.randn(length, 2, 4) for length in (3, 5)]
    ragged = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    with region():
        heads = ragged.transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)
    out.values().float().sum().backward()
    return out.values()


@PROGRAMS.add
def strided_nested_tensors(region: Region) -> Any:
    model = nn.Linear(6, 3)
    rows = [torch.randn(2, 6), torch.randn(3, 6)]
    nested = torch.nested.nested_tensor(rows, requires_grad=True)
    with region():
        out = model(nested)
        padded = torch.nested.to_padded_tensor(out, 0.0)
    padded.float().sum().backward()
    return padded, gradients(model)


@PROGRAMS.add
def tensor_subclass(region: Region) -> Any:
    """A wrapper subclass stays one through casts, and the two tensors inside are cast alike."""
    x = TwoTensor(torch.randn(4, 6), torch.randn(4, 6))
    weight = torch.randn(3, 6, requires_grad=True)
    with region():
        out = F.linear(x, weight)
    assert isinstance(out, TwoTensor)
    out.float().sum().backward()
    return out.a, out.b, weight.grad.a if isinstance(weight.grad, TwoTensor) else weight.grad


@PROGRAMS.add
def torch_function_subclass(region: Region) -> Any:
    class Named(Tensor):
        pass

    x, model = torch.randn(4, 6).as_subclass(Named), Net()
    with region():
        out = model(x)
    assert type(out) is Named
    out.float().sum().backward()
    return out.as_subclass(Tensor), gradients(model)


@PROGRAMS.add
def out_and_in_place(region: Region) -> Any:
    """What the caller writes to keeps its dtype: those variants are never cast."""
    x, w = torch.randn(4, 6), torch.randn(6, 6)
    product, base = torch.empty(4, 6), torch.ones(4, 6)
    with region():
        torch.mm(x, w, out=product)
        base.addmm_(x, w)
        return product, base, base.exp_()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_have_torchs_bits(program: Program) -> None:
    program.check_bits()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_under_the_default_policy_stay_near_float32(program: Program) -> None:
    program.check_near_float32()
