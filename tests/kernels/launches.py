"""Note Triton launches instead of running them, with the contents of their tables at that moment."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor


class Noted(NamedTuple):
    """A launch: the kernel's name; grid, lists and numbers; constants and options."""

    kernel: str
    arguments: list[Any]
    options: dict[str, Any]


def _contents(argument: Any) -> Any:
    """The numbers in an integer tensor, such as addresses; of another tensor the shape; other arguments unchanged."""
    if not isinstance(argument, Tensor):
        return argument
    is_read = argument.dtype.is_signed and not argument.is_floating_point() and not argument.is_meta
    return argument.tolist() if is_read else tuple(argument.shape)


@contextmanager
def noted_launches() -> Iterator[list[Noted]]:
    """Note every Triton launch instead of running it; needs the interpreter, because the tensors are on the CPU."""
    from ampkit_kernels.triton_ops.unscale import unscale_kernel

    launches: list[Noted] = []

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            contents = [grid, *map(_contents, arguments)]
            named = {name: _contents(option) for name, option in options.items()}
            launches.append(Noted(kernel.fn.__name__, contents, named))

        return launch

    with mock.patch.object(type(unscale_kernel), "__getitem__", launcher):
        yield launches
