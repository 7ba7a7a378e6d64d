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
    if isinstance(func, type) or not callable(func):
        got = f"the class {func.__name__}: decorate its forward" if isinstance(func, type) else type(func).__name__
        raise TypeError(
            f"{name}()(func) takes a function or method to decorate, got {got}. "
            f"As a context manager: `with {name}(...):`"
        )
    run = in_pieces(func)
    if run is None:
        return in_place_of(func, _plain(region, func))
    return in_place_of(func, lambda *args, **kwargs: run(region, func(*args, **kwargs)))


def in_pieces(func: Callable[..., Any]) -> Callable[[Region, Any], Any] | None:
    """What runs, in a region, the generator or coroutine that `func` returns; None for a plain function.

    Raises `TypeError` for an asynchronous generator function.
    """
    body = func if inspect.isroutine(func) or isinstance(func, functools.partial) else type(func).__call__
    if inspect.isasyncgenfunction(body):
        raise TypeError(
            "expected a function, generator or coroutine function to decorate, got an asynchronous generator function: "
            "decorate what it calls"
        )
    return _awaited if inspect.iscoroutinefunction(body) else _stepped if inspect.isgeneratorfunction(body) else None


def in_place_of(func: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which returns what `func` does, as a function of the same kind and name."""
    run = in_pieces(func)
    wrapper: Any = call if run is None else _coroutine(call) if run is _awaited else _generator(call)
    functools.update_wrapper(wrapper, func, updated=("__dict__",) if getattr(func, "__dict__", None) else ())
    wrapper.__script_unsupported = "a function decorated with ampkit.autocast is not supported in script mode"
    return wrapper


def _coroutine(call: Callable[..., Any]) -> Any:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    return wrapper


def _generator(call: Callable[..., Any]) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return (yield from call(*args, **kwargs))

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
