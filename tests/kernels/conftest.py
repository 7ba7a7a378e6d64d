"""Kernel tests run in Triton's interpreter, with blocks and chunks small enough to be crossed often."""

import os
from collections.abc import Callable

import pytest

from ampkit_kernels.configs import Config

SMALL = Config(block=256, chunk=1024)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter computes in NumPy, which warns of the overflows and NaNs that the tests contain."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Config], None]:
    """Run `impl="triton"` on CPU tensors with small launches; call the value with other launch parameters."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    from ampkit_kernels.triton_ops import pointer_table

    made_table = pointer_table.made_table

    def use(config: Config) -> None:
        monkeypatch.setattr(pointer_table, "made_table", lambda lists, _: made_table(lists, config))
        monkeypatch.setattr(pointer_table, "_per_thread", pointer_table._PerThread())

    use(SMALL)
    return use
