"""Decorates functions with a region: plain functions, generators and coroutines.

A generator's body runs in pieces, between which its caller runs. The region is entered for each piece and left at its
end, so neither side sees the other's autocast state.
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
    """Wrap `func` so that its body runs inside `region`.

    Raises `TypeError` for a class, an asynchronous generator function, or an object that cannot be called.
    """
    name = type(region).__name__
    if isinstance(func, type) or not callable(func):
        got = f"the class {func.__name__}: decorate its forward" if isinstance(func, type) else type(func).__name__
        raise TypeError(
            f"{name}()(func) takes a function or method to decorate, got {got}. "
            f"As a context manager: `with {name}(...):`"
        )
    runner = runner_for(func)
    if runner is None:
        return wrapper_for(func, _plain(region, func))
    return wrapper_for(func, lambda *args, **kwargs: runner(region, func(*args, **kwargs)))


def runner_for(func: Callable[..., Any]) -> Callable[[Region, Any], Any] | None:
    """The function that runs, inside a region, the generator or coroutine that `func` returns.

    Returns `_stepped` for a generator function, `_awaited` for a coroutine function, None for a plain function. Raises
    `TypeError` for an asynchronous generator function.
    """
    body = func if inspect.isroutine(func) or isinstance(func, functools.partial) else type(func).__call__
    if inspect.isasyncgenfunction(body):
        raise TypeError(
            "expected a function, generator or coroutine function to decorate, got an asynchronous generator function: "
            "decorate what it calls"
        )
    if inspect.iscoroutinefunction(body):
        return _awaited
    return _stepped if inspect.isgeneratorfunction(body) else None


def wrapper_for(func: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a replacement of `func`, as a function of the same kind (plain, generator, coroutine), name and doc."""
    runner = runner_for(func)
    wrapper: Any = call
    if runner is _awaited:
        wrapper = _coroutine(call)
    elif runner is _stepped:
        wrapper = _generator(call)
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
        region.__enter__()      # not `with`: torch.compile cannot trace a context manager that was made outside
        try:
            output = func(*args, **kwargs)
        except BaseException as error:
            region.__exit__(type(error), error, None)
            raise
        region.__exit__(None, None, None)
        return output

    return wrapper


def _stepped(region: Region, generator: Any) -> Generator[Any, Any, Any]:
    """Do `yield from generator`, with the region open only while the generator itself runs."""
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
    """Do `await awaitable`, with the region open only while the awaitable itself runs."""
    return (yield from _stepped(region, awaitable.__await__()))
