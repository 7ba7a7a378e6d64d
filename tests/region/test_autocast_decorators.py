"""autocast as a decorator: functions, methods, generators, coroutines, and what is no function."""

import asyncio
import functools
import inspect
from unittest.mock import Mock

import pytest
import torch

from ampkit import autocast
from tests.helpers.regions import BF16, FP16, FP32, both, product, state


@both
def test_what_can_be_decorated(region):
    """Functions and methods of all kinds, which keep their names, and other callables; exceptions go through."""

    class Model:
        @region("cpu", FP16)
        def method(self, scale, *, offset=0):
            """What it does."""
            return product(), scale + offset

        static = staticmethod(region("cpu")(product))
        of_class = classmethod(region("cpu")(lambda cls: (cls, product())))

        def __call__(self):
            return product()

    assert Model().method(1, offset=2) == (FP16, 3)
    assert Model.static() is BF16
    assert Model.of_class() == (Model, BF16)
    assert (Model.method.__name__, Model.method.__doc__) == ("method", "What it does.")
    assert list(inspect.signature(Model.method).parameters) == ["self", "scale", "offset"]
    decorate = region("cpu")
    for callable_ in (Model(), functools.partial(product), region("cpu")(product)):
        assert decorate(callable_)() is BF16
    assert decorate(torch.mm)(torch.ones(2, 2), torch.ones(2, 2)).dtype is BF16
    with pytest.raises(LookupError):
        decorate(Mock(side_effect=LookupError))()


async def streams():
    yield


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (1, r"autocast\(\)\(func\) takes a function or method to decorate, got int"),
        (classmethod(product), "got classmethod"),
        (torch.nn.Linear, r"got the class Linear[:;] decorate its forward"),
        (streams, "an asynchronous generator function: decorate the functions that it calls"),
    ],
)
def test_message_for_what_cannot_be_called(func, message):
    with pytest.raises(TypeError, match=message):
        autocast("cpu")(func)


def test_generator_runs_inside_and_its_caller_outside():
    """torch.amp runs the body outside, because calling a generator function runs nothing."""

    def body():
        for _ in range(2):
            yield product()

    assert list(torch.autocast("cpu")(body)()) == [FP32, FP32]

    before = state()
    seen = []
    for dtype in autocast("cpu")(body)():
        assert state() == before
        assert product() is FP32
        seen.append(dtype)
    assert seen == [BF16, BF16]
    assert inspect.isgeneratorfunction(autocast("cpu")(body))


def test_generator_takes_what_is_sent_thrown_and_returned():
    @autocast("cpu", FP16)
    def body():
        got = yield "first"
        try:
            yield got, product()
        except LookupError as error:
            yield str(error), product()
        if got == "fails":
            raise LookupError("from the body")
        return product()

    def outer():
        return (yield from body())

    for sent in ("sent", "fails"):
        with autocast("cpu", enabled=False):
            generator = outer()
            assert next(generator) == "first"
            assert generator.send(sent) == (sent, FP16)
            assert product() is FP32
        assert generator.throw(LookupError("thrown")) == ("thrown", FP16)
        with pytest.raises(LookupError if sent == "fails" else StopIteration) as stop:
            next(generator)
        assert sent == "fails" or stop.value.value is FP16


@pytest.mark.parametrize("end", [lambda generator: generator.close(), lambda generator: None])
def test_generator_closed_or_abandoned_before_its_end(end):
    seen = []

    @autocast("cpu")
    def body():
        try:
            yield
        finally:
            seen.append(product())

    for start in (next, lambda generator: None):
        generator = body()
        start(generator)
        end(generator)
        del generator
    assert seen == [BF16]


def test_coroutine_runs_inside_and_others_outside():
    """Two coroutines take turns in one thread, each in its own region, the loop in none."""

    async def work():
        seen = set()
        for _ in range(3):
            seen.add(product())
            await asyncio.sleep(0)
            seen.add(product())
        return seen

    async def main(region):
        return await asyncio.gather(region("cpu", BF16)(work)(), region("cpu", FP16)(work)(), work())

    assert asyncio.run(main(torch.autocast)) == [{FP32}] * 3
    assert asyncio.run(main(autocast)) == [{BF16}, {FP16}, {FP32}]
    assert inspect.iscoroutinefunction(autocast("cpu")(work))
