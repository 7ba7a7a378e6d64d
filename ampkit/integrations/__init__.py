"""ampkit in other people's training loops: a module per library, which imports that library when it is asked for.

`accelerate` and `transformers` set up an `Accelerator` and a `Trainer`; `lightning` and `fabric` have precision
plugins; `timm` has its scaler.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampkit.integrations import accelerate, fabric, lightning, timm, transformers

__all__ = ["accelerate", "fabric", "lightning", "timm", "transformers"]

if not TYPE_CHECKING:       # which would take every name for one of these

    def __getattr__(name: str) -> Any:
        """A module of this package, imported."""
        if name in __all__:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    """The libraries."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
