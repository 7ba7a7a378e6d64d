"""Questions about a device are answered for that device, whichever one is current."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from ampkit_kernels import is_capturing


def test_a_capture_is_of_the_device_that_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures on the current device, on another, on both and on none."""
    current = 0

    @contextlib.contextmanager
    def switched(device: torch.device) -> Iterator[None]:
        nonlocal current
        before, current = current, device.index
        yield
        current = before

    capturing = set[int]()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", switched)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current in capturing)
    for captured in ({0}, {1}, {0, 1}, set()):
        capturing = captured
        answers = [is_capturing(torch.device("cuda", i)) for i in range(2)]
        assert answers == [i in captured for i in range(2)]
        assert not is_capturing(torch.device("cpu"))
        assert current == 0
