"""Kernels are declared so that run-time arguments never cause another compilation."""

import pytest
import triton
import triton.language as tl

from ampkit_kernels.triton_ops.entry import entry


def test_every_run_time_argument_is_left_unspecialised(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    monkeypatch.setattr(triton, "jit", lambda **options: lambda function: asked.update(options) or function)

    def kernel(pointer, n, lr: tl.float64, BLOCK: tl.constexpr) -> None: ...

    assert entry(kernel) is kernel
    assert asked == {"do_not_specialize": ["pointer", "n", "lr"]}
