"""Running a function's body inside a region: plain functions, generators, coroutines.

A generator's body runs in pieces, between which its caller runs: the region is entered for each piece and left with
it, so neither side sees the other's autocast state.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

Region = AbstractContextManager[Any]


def in_region(region: Region, func: Callable[..., Any]) -> Callable[..., Any]:
    """`func` with its body run inside `region`.

    Raises `TypeError` for a class, for an asynchronous generator function, and for what cannot be called.
    """
    name = type(region).__name__
    body = func if inspect.isroutine(func) or isinstance(func, functools.partial) else type(func).__call__
    if isinstance(func, type) or not callable(func) or inspect.isasyncgenfunction(body):
        got = type(func).__name__
        if isinstance(func, type):
            got = f"the class {func.__name__}: decorate its forward"
        elif callable(func):
            got = "an asynchronous generator function: decorate what it calls"
        raise TypeError(
            f"{name}()(func) takes a function or method to decorate, got {got}. "
            f"As a context manager: `with {name}(...):`"
        )
    if inspect.iscoroutinefunction(body):
        wrapper = _coroutine(region, func)
    elif inspect.isgeneratorfunction(body):
        wrapper = _generator(region, func)
    else:
        wrapper = _plain(region, func)
    functools.update_wrapper(wrapper, func, updated=("__dict__",) if getattr(func, "__dict__", None) else ())
    wrapper.__script_unsupported = "a function decorated with ampkit.autocast is not supported in script mode"
    return wrapper


def _plain(region: Region, func: Callable[..., Any]) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        region.__enter__()      # not `with`: torch.compile traces no context manager that was made outside
        try:
            output = func(*args, **kwargs)
        except BaseException as error:
            region.__exit__(type(error), error, None)
            raise
        region.__exit__(None, None, None)
        return output

    return wrapper


def _generator(region: Region, func: Callable[..., Any]) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return (yield from _stepped(region, func(*args, **kwargs)))

    return wrapper


def _coroutine(region: Region, func: Callable[..., Any]) -> Any:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await _awaited(region, func(*args, **kwargs))

    return wrapper


def _stepped(region: Region, generator: Any) -> Generator[Any, Any, Any]:
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


@types.coroutine
def _awaited(region: Region, awaitable: Any) -> Generator[Any, Any, Any]:
    """`await awaitable`, with the region open only while it runs."""
    return (yield from _stepped(region, awaitable.__await__()))
