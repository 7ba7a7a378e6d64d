"""ampkit in the training loops of other libraries: a module per library, which imports that library when it is used.

- `accelerate` and `transformers` set up an `Accelerator` and a `Trainer`;
- `lightning` and `fabric` have precision plugins;
- `timm` has a scaler;
- `checkpoint` has a planner for torch.distributed.checkpoint;
- `keep_in_fp32` has rules for the modules that a transformers model names.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampkit.integrations import accelerate, checkpoint, fabric, keep_in_fp32, lightning, timm, transformers

__all__ = ["accelerate", "checkpoint", "fabric", "keep_in_fp32", "lightning", "timm", "transformers"]

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Import a module of this package."""
        if name in __all__:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    """List the modules."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
