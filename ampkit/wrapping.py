"""wrap_forward: a region around the forward of a module whose source one cannot decorate."""

from __future__ import annotations

from typing import Any, TypeVar

from torch.nn import Module

from ampkit.autocast import autocast

__all__ = ["wrap_forward"]

M = TypeVar("M", bound=Module)


class _Region:
    """The two hooks of a wrapped module. Replicas and copies of the module share it; it holds no per-call state."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.region = autocast(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Region, (self.args, self.kwargs)

    def enter(self, module: Module, args: Any) -> None:
        self.region.enter(module)

    def leave(self, module: Module, args: Any, output: Any) -> None:
        if self.region.is_innermost():      # not where a hook before ours raised
            self.region.__exit__(None, None, None)


def wrap_forward(module: M, *args: Any, **kwargs: Any) -> M:
    """Run `module`'s forward, from now on and in every replica and copy, inside `autocast(*args, **kwargs)`.

    As decorating `forward` with `autocast`, for modules one cannot edit: threads of `nn.DataParallel` or
    `parallel_apply` each enter the region themselves. Returns `module`. Raises `TypeError` for anything but a module,
    `RuntimeError` if it is wrapped already, and what `autocast` raises.
    """
    if not isinstance(module, Module):
        raise TypeError(
            f"wrap_forward takes an nn.Module, got {type(module).__name__}; decorate a function with autocast"
        )
    if any(isinstance(getattr(hook, "__self__", None), _Region) for hook in module._forward_pre_hooks.values()):
        raise RuntimeError(f"this {type(module).__name__} is wrapped already; once is enough")
    region = _Region(args, kwargs)
    module.register_forward_pre_hook(region.enter, prepend=True)
    module.register_forward_hook(region.leave, always_call=True)
    return module
