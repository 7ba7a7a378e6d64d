"""Which implementation handles a call, and what is said when one cannot."""

import functools

import pytest
import torch

import ampkit_kernels
from ampkit_kernels import TritonUnavailable, dispatch, unscale_

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")
ONE = [torch.ones(2)], torch.ones(()), torch.zeros(())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CUDA device of capability 7.5, and no interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    return monkeypatch


def test_auto_never_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert [dispatch.uses_triton(impl, CPU) for impl in dispatch.IMPLS] == [False, True, False]
    assert not dispatch.uses_triton("auto", CUDA)
    with pytest.raises(ValueError, match="unknown impl 'cuda'; expected 'auto', 'triton' or 'reference'"):
        unscale_(*ONE, impl="cuda")


def test_requests_that_cannot_be_met_raise_with_the_reason(gpu: pytest.MonkeyPatch) -> None:
    with pytest.raises(TritonUnavailable, match="the tensors are on the CPU: set TRITON_INTERPRET=1"):
        unscale_(*ONE, impl="triton")
    with pytest.raises(TritonUnavailable, match=r"Some GPU has compute capability 7.5; .* 8.0 or newer"):
        dispatch.uses_triton("triton", CUDA)
    assert dispatch.why_not_triton(META) == "the tensors are on meta; the kernels run on CUDA devices"
    for capability in ((8, 0), (9, 0), (10, 0)):
        gpu.setattr(torch.cuda, "get_device_capability", lambda index, found=capability: found)
        assert dispatch.uses_triton("auto", CUDA)
    gpu.setattr(torch.version, "hip", "6.4")
    assert dispatch.why_not_triton(CUDA) == "the kernels have not been verified on ROCm"
    gpu.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(TritonUnavailable, match="TRITON_INTERPRET is set: the interpreter copies its arguments"):
        dispatch.uses_triton("triton", CUDA)
    gpu.setattr(dispatch, "HAS_TRITON", False)
    assert dispatch.why_not_triton(CUDA) == "Triton is not installed: pip install 'triton>=3.6'"
    assert not dispatch.uses_triton("auto", CUDA)


def test_backends_are_the_modules_by_device_and_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    from ampkit_kernels import reference, triton_ops

    monkeypatch.setattr(dispatch, "_backend", functools.cache(dispatch._backend.__wrapped__))
    device = torch.ones(1, device="meta")       # in place of a CUDA device's
    for auto, found in ((True, triton_ops), (False, triton_ops)):
        monkeypatch.setattr(dispatch, "uses_triton", lambda impl, device, auto=auto: auto and impl == "auto")
        assert ampkit_kernels.backend(device) is found
        assert ampkit_kernels.backend(torch.ones(1)) is reference
    dispatch._backend.cache_clear()
    assert ampkit_kernels.backend(device) is reference
