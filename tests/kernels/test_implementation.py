"""The choice between Triton and PyTorch, and the messages where Triton cannot run."""

import functools
from pathlib import Path
from unittest import mock

import pytest
import torch

from ampkit_kernels import TritonUnavailable, implementation, unscale_

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")
ONE = [torch.ones(2)], torch.ones(()), torch.zeros(())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CUDA device of capability 7.5, no interpreter, and a Triton that can compile."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    monkeypatch.setattr(implementation, "_problem", lambda device: None, raising=False)
    monkeypatch.setattr(implementation, "_serves", functools.cache(implementation._serves.__wrapped__))
    return monkeypatch


def test_auto_never_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert [implementation.uses_triton(impl, CPU) for impl in implementation.IMPLS] == [False, True, False]
    assert not implementation.uses_triton("auto", CUDA)
    with pytest.raises(ValueError, match="unknown impl 'cuda'; expected 'auto', 'triton' or 'reference'"):
        unscale_(*ONE, impl="cuda")


def test_requests_that_cannot_be_met_raise_with_the_reason(gpu: pytest.MonkeyPatch) -> None:
    with pytest.raises(TritonUnavailable, match="the tensors are on the CPU: set TRITON_INTERPRET=1"):
        unscale_(*ONE, impl="triton")
    with pytest.raises(TritonUnavailable, match=r"Some GPU has compute capability 7.5; .* 8.0 or newer"):
        implementation.uses_triton("triton", CUDA)
    assert implementation.why_not_triton(META) == "the tensors are on meta; the kernels run on CUDA devices"
    for capability in ((8, 0), (9, 0), (10, 0)):
        gpu.setattr(torch.cuda, "get_device_capability", lambda index, capability=capability: capability)
        implementation._serves.cache_clear()
        assert implementation.uses_triton("auto", CUDA)
    gpu.setattr(torch.version, "hip", "6.4")
    assert implementation.why_not_triton(CUDA) == "the kernels have not been verified on ROCm"
    gpu.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(TritonUnavailable, match="TRITON_INTERPRET is set: the interpreter copies its arguments"):
        implementation.uses_triton("triton", CUDA)
    gpu.setattr(implementation, "HAS_TRITON", False)
    assert implementation.why_not_triton(CUDA) == "Triton is not installed: pip install 'triton>=3.6'"
    implementation._serves.cache_clear()
    assert not implementation.uses_triton("auto", CUDA)


def test_a_triton_that_cannot_compile_is_tried_once_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an image without a C compiler. Explicit requests raise; where the kernels would not run nothing is tried."""
    from ampkit_kernels import reference
    from ampkit_kernels.triton_ops import unscale

    tried = []

    def compile_one(device: torch.device) -> None:
        tried.append(device)
        raise RuntimeError("Failed to find C compiler.\nPlease specify")

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 - 2 * device.index, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(unscale, "compile_one", compile_one, raising=False)
    for name in ("_problem", "_serves", "_warn_of"):
        monkeypatch.setattr(implementation, name, functools.cache(getattr(implementation, name).__wrapped__))
    others = CPU, META, torch.device("cuda", 1)
    assert [implementation.uses_triton("auto", device) for device in others] == [False] * 3
    assert tried == []
    with pytest.raises(TritonUnavailable, match=r"cannot compile here \(RuntimeError: Failed to find C compiler. Pl"):
        implementation.uses_triton("triton", CUDA)
    with pytest.warns(UserWarning, match="PyTorch's operators instead .* it needs a C compiler, Python's") as warned:
        assert implementation.select("auto", CUDA) is reference
    for _ in range(2):  # warnings are errors here
        assert implementation.select("auto", CUDA) is reference
    assert (len(warned), tried) == (1, [CUDA])
    implementation._problem.cache_clear()
    implementation._serves.cache_clear()
    monkeypatch.setattr(implementation, "is_compiling", lambda: True)
    assert implementation.why_not_triton(CUDA) is None
    assert tried == [CUDA]
    monkeypatch.setattr(implementation, "is_compiling", lambda: False)
    monkeypatch.setattr(unscale, "compile_one", tried.append)
    assert implementation.uses_triton("auto", CUDA)
    assert implementation.uses_triton("triton", CUDA)
    assert tried == [CUDA, CUDA]


def test_a_cache_that_cannot_be_written_is_found_without_a_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from ampkit_kernels.triton_ops import unscale

    stand_in = mock.Mock(**{"get_current_target.return_value": GPUTarget("cuda", 90, 32)})
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(driver, "_active", stand_in)
    monkeypatch.setattr(unscale, "inverse_kernel", JITFunction(unscale.inverse_kernel.fn))  # not to be interpreted
    with pytest.raises(OSError, match="Not a directory"):
        unscale.compile_one(CPU)


def test_the_choice_is_kept_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step makes it several times. While code is traced, nothing is kept: no kernel is compiled on trial there."""
    from ampkit_kernels import reference, triton_ops

    asked: list[torch.device] = []
    monkeypatch.setattr(implementation, "AUTO", ("meta",))  # in place of "cuda"
    monkeypatch.setattr(implementation, "why_not_triton", asked.append)
    monkeypatch.setattr(implementation, "_serves", functools.cache(implementation._serves.__wrapped__))
    monkeypatch.setattr(implementation, "is_compiling", lambda: True)
    for calls in (1, 2):
        assert implementation.select("auto", META) is triton_ops
        assert len(asked) == calls
    monkeypatch.setattr(implementation, "is_compiling", lambda: False)
    for _ in range(2):
        assert implementation.select("auto", META) is triton_ops
        assert implementation.select("auto", CPU) is reference
        assert len(asked) == 3
