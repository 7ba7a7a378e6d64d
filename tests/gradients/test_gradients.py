"""What `collect` lists for every kind of gradient, and that writing the list writes the gradient."""

import pytest
import torch

from ampkit.gradients.collect import collect, parameters

CPU = torch.device("cpu")


def with_grad(grad: torch.Tensor) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    if grad.layout is torch.sparse_csr:
        param = torch.nn.Parameter(param.detach().to_sparse_csr())
    param.grad = grad
    return param


def listed(*params: torch.Tensor) -> list[torch.Tensor]:
    return [tensor for tensors in collect(params).by_device.values() for tensor in tensors]


def sparse(indices: list[int], values: list[float], size: int = 4, dtype=torch.float32) -> torch.Tensor:
    return torch.sparse_coo_tensor([indices], torch.tensor(values, dtype=dtype), (size,), check_invariants=True)


KINDS = {
    "float32": lambda: torch.tensor([1.0, 2.0]),
    "float64": lambda: torch.tensor([1.0, 2.0], dtype=torch.float64),
    "bfloat16": lambda: torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "float16": lambda: torch.tensor([1.0, 2.0], dtype=torch.float16),
    "complex64": lambda: torch.tensor([1 + 2j, 3 - 1j]),
    "complex128": lambda: torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "strided": lambda: torch.arange(12.0)[::3],
    "channels_last": lambda: torch.arange(16.0).view(1, 2, 2, 4).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.tensor([2.0]).expand(4),
    "expanded_row": lambda: torch.tensor([[1.0], [2.0]]).expand(2, 3),
    "empty": lambda: torch.zeros(0, 3),
    "scalar": lambda: torch.tensor(3.0),
    "sparse": lambda: sparse([0, 2], [1.0, 2.0]),
    "sparse_duplicates": lambda: sparse([0, 0, 2], [1.0, 4.0, 2.0]),
    "sparse_fp16_duplicates": lambda: sparse([0, 0, 2], [1.0, 4.0, 2.0], dtype=torch.float16),
    "sparse_complex": lambda: sparse([1, 1], [1.0, 2.0]).to(torch.complex64),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "with_a_graph": lambda: torch.ones(2, requires_grad=True) * 2.0,
}


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", KINDS)
def test_writing_the_list_writes_the_gradient(kind: str) -> None:
    param = with_grad(KINDS[kind]())
    before = dense(param.grad).clone()
    tensors = listed(param)
    assert torch.equal(dense(param.grad), before), "collecting changes no value"
    with torch.no_grad():
        for tensor in tensors:
            assert tensor.layout is torch.strided
            assert tensor.is_floating_point()
            tensor.mul_(0.5)
    assert torch.equal(dense(param.grad), before * 0.5)
    assert param.grad.dtype == param.dtype


def test_uncoalesced_gradients_stay_so_unless_asked() -> None:
    param = with_grad(sparse([0, 0], [1.0, 2.0]))
    gradients = collect([param])
    found = {CPU: torch.zeros(())}
    gradients.check(torch.ones(()), found)
    assert (found[CPU].item(), param.grad.is_coalesced()) == (0.0, False)
    gradients.check(torch.tensor(2e38), found)  # finite apart, not added up
    assert found[CPU].item() == 1.0
    found = {CPU: torch.zeros(())}
    collect([with_grad(sparse([0, 0], [6e4, 6e4], dtype=torch.float16))]).check(torch.ones(()), found)
    assert found[CPU].item() == 1.0
    assert collect([param], coalesce=True).duplicated == []
    assert param.grad.is_coalesced()
    assert param.grad.to_dense().tolist() == [3.0, 0.0, 0.0, 0.0]


def test_each_gradient_is_listed_once_in_order() -> None:
    """torch divides a gradient twice that stands in two places."""
    shared = torch.ones(2)
    a, b = with_grad(shared), torch.nn.Parameter(torch.zeros(2))
    b.grad = shared
    assert len(listed(a, b)) == len(listed(a, a)) == 1
    assert not collect([torch.nn.Parameter(torch.ones(1))]).by_device
    params = [with_grad(KINDS[kind]()) for kind in ("float32", "bfloat16", "complex64", "sparse")]
    dtypes = [tensor.dtype for tensor in listed(*params)]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32, torch.float32]


def test_what_is_no_gradient_and_no_parameter_is_refused() -> None:
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
    param.grad = torch.ones(2, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"dtype torch.int32 .*; expected a floating-point or complex"):
        collect([param])
    optimizer = torch.optim.SGD([param], lr=1.0)
    optimizer.param_groups[0]["params"] = [3.0]
    with pytest.raises(AssertionError, match=r"expected param to be torch\.Tensor, got float"):
        parameters(optimizer)
