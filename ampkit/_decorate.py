"""Running a function's body inside a region: plain functions, generators, coroutines, asynchronous generators.

A generator's body runs in pieces, between which its caller runs: the region is entered for each piece and left with
it, so neither side sees the other's autocast state.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from torch.nn import Module

if TYPE_CHECKING:
    from ampkit.autocast import autocast


def in_region(region: autocast, func: Callable[..., Any]) -> Callable[..., Any]:
    """`func` wrapped so that its body runs inside `region`. Raises `TypeError` for what cannot be called, or a class."""
    if isinstance(func, type) or not callable(func):
        raise TypeError(
            f"{type(region).__name__}()(func) takes a function or method to decorate, got "
            f"{f'the class {func.__name__}; decorate its forward' if isinstance(func, type) else type(func).__name__}. "
            f"As a context manager: `with {type(region).__name__}(...):`"
        )
    kind = func if inspect.isroutine(func) or isinstance(func, functools.partial) else type(func).__call__
    if inspect.isasyncgenfunction(kind):

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            agen = func(*args, **kwargs)
            step = agen.__anext__()
            while True:
                try:
                    item = await _Stepped(region, step)
                except StopAsyncIteration:
                    return
                try:
                    sent = yield item
                except GeneratorExit:
                    await _Stepped(region, agen.aclose())
                    raise
                except BaseException as error:
                    step = agen.athrow(error)
                else:
                    step = agen.asend(sent)

    elif inspect.iscoroutinefunction(kind):

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await _Stepped(region, func(*args, **kwargs))

    elif inspect.isgeneratorfunction(kind):

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return (yield from _stepped(region, func(*args, **kwargs)))

    else:

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if region.policy is not None and region.policy.modules and args and isinstance(args[0], Module):
                region.enter(args[0])
                try:
                    return func(*args, **kwargs)
                finally:
                    region.__exit__(None, None, None)
            with region:
                return func(*args, **kwargs)

    functools.update_wrapper(wrapper, func, updated=() if not hasattr(func, "__dict__") else ("__dict__",))
    wrapper.__script_unsupported = "a function decorated with ampkit.autocast is not supported in script mode"  # type: ignore[attr-defined]
    return wrapper


class _Stepped:
    """An awaitable whose every step runs inside a region."""

    def __init__(self, region: autocast, awaitable: Any) -> None:
        self.region = region
        self.awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from _stepped(self.region, self.awaitable.__await__()))


def _stepped(region: autocast, generator: Any) -> Generator[Any, Any, Any]:
    """`yield from generator`, with the region open only while the generator itself runs."""
    resume: Callable[[], Any] = functools.partial(next, generator)
    while True:
        try:
            with region:
                item = resume()
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield item
        except GeneratorExit:
            with region:
                generator.close()
            raise
        except BaseException as error:
            resume = functools.partial(generator.throw, error)
        else:
            resume = functools.partial(next, generator) if sent is None else functools.partial(generator.send, sent)
