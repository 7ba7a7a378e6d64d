"""Launches that are noted in place of being run, with what their tables hold at that moment."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor


class Noted(NamedTuple):
    """A launch: the kernel's name, lists and numbers that it was given, and its constants and options."""

    kernel: str
    arguments: list[Any]
    options: dict[str, Any]


def _held(value: Any) -> Any:
    """What a tensor of addresses holds; of other tensors the shape."""
    if not isinstance(value, Tensor):
        return value
    is_read = value.dtype.is_signed and not value.is_floating_point() and not value.is_meta
    return value.tolist() if is_read else tuple(value.shape)


@contextmanager
def noted_launches() -> Iterator[list[Noted]]:
    """Replace every Triton launch; needs the interpreter, because the tensors are on the CPU."""
    from ampkit_kernels.triton_ops.unscale import unscale_kernel

    found: list[Noted] = []

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            held = [grid, *map(_held, arguments)]
            found.append(Noted(kernel.fn.__name__, held, {name: _held(value) for name, value in options.items()}))

        return launch

    with mock.patch.object(type(unscale_kernel), "__getitem__", launcher):
        yield found
