"""autocast as a decorator: functions, methods, generators, coroutines, and what is no function."""

import asyncio
import functools
import inspect

import pytest
import torch

from ampkit import autocast
from tests.helpers.regions import BF16, FP16, FP32, state

REGIONS = [torch.autocast, autocast]
both = pytest.mark.parametrize("region", REGIONS, ids=["torch", "ampkit"])


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


@both
def test_function_and_method(region):
    """Both run inside and keep their names."""
    class Model:
        @region("cpu", FP16)
        def method(self, scale, *, offset=0):
            """What it does."""
            return product(), scale + offset

    @region(device_type="cpu")
    def function(*args, **kwargs):
        return product(), args, kwargs

    assert Model().method(1, offset=2) == (FP16, 3)
    assert function(1, key=2) == (BF16, (1,), {"key": 2})
    assert (Model.method.__name__, Model.method.__doc__) == ("method", "What it does.")
    assert function.__wrapped__.__name__ == "function"
    assert list(inspect.signature(Model.method).parameters) == ["self", "scale", "offset"]
    assert product() is FP32


@both
@pytest.mark.parametrize("what", [1, "forward", None, staticmethod], ids=repr)
def test_what_cannot_be_called(region, what):
    """A TypeError."""
    what = classmethod(product) if what is staticmethod else what
    # torch.autocast before torch 2.12 finds out when the result is called.
    decorate = region("cpu") if region is autocast else lambda what: region("cpu")(what)()
    with pytest.raises(TypeError):
        decorate(what)


def test_message_for_what_cannot_be_called():
    with pytest.raises(TypeError, match=r"autocast\(\)\(func\) takes a function or method to decorate, got int"):
        autocast("cpu")(1)
    with pytest.raises(TypeError, match=r"got the class Linear[:;] decorate its forward"):
        autocast("cpu")(torch.nn.Linear)


@both
def test_callables_that_are_no_functions(region):
    class Callable:
        def __call__(self):
            return product()

    assert region("cpu")(Callable())() is BF16
    assert region("cpu")(functools.partial(product))() is BF16
    assert region("cpu")(lambda: product())() is BF16
    assert region("cpu")(torch.mm)(torch.ones(2, 2), torch.ones(2, 2)).dtype is BF16


@both
def test_static_and_class_methods(region):
    class Model:
        @staticmethod
        @region("cpu")
        def static():
            return product()

        @classmethod
        @region("cpu")
        def of_class(cls):
            return cls, product()

    assert Model.static() is BF16
    assert Model.of_class() == (Model, BF16)


@both
def test_exception_in_a_decorated_function(region):
    before = state()

    @region("cpu")
    def fails():
        raise LookupError

    with pytest.raises(LookupError):
        fails()
    assert state() == before


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


def test_generator_inside_another_region_sees_its_own():
    @autocast("cpu", FP16)
    def inner():
        yield product()
        yield product()

    with autocast("cpu", BF16):
        generator = inner()
        assert next(generator) is FP16
        with autocast("cpu", enabled=False):
            assert next(generator) is FP16
            assert product() is FP32
        assert product() is BF16


def test_generator_takes_what_is_sent_thrown_and_returned():
    before = state()

    @autocast("cpu")
    def body():
        got = yield "first"
        assert product() is BF16
        try:
            yield got
        except LookupError as error:
            assert product() is BF16
            yield str(error)
        return product()

    def outer():
        return (yield from body())

    generator = outer()
    assert next(generator) == "first"
    assert generator.send("sent") == "sent"
    assert generator.throw(LookupError("thrown")) == "thrown"
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value is BF16
    assert state() == before


def test_generator_closed_before_its_end():
    before, seen = state(), []

    @autocast("cpu")
    def body():
        try:
            yield
        finally:
            seen.append(product())

    generator = body()
    next(generator)
    generator.close()
    assert seen == [BF16]
    assert state() == before

    never_started = body()
    never_started.close()
    assert seen == [BF16]

    abandoned = body()
    next(abandoned)
    del abandoned
    assert seen == [BF16, BF16]


def test_generator_that_raises():
    before = state()

    @autocast("cpu")
    def body():
        yield 1
        raise LookupError("from the body")

    generator = body()
    next(generator)
    with pytest.raises(LookupError, match="from the body"):
        next(generator)
    with pytest.raises(StopIteration):
        next(generator)
    assert state() == before


def test_coroutine_runs_inside_and_others_outside():
    """Two coroutines take turns in one thread, each in its own region, the loop in none."""
    before = state()

    def worker(region, dtypes):
        @region
        async def work():
            for _ in range(3):
                dtypes.append(product())
                await asyncio.sleep(0)
                dtypes.append(product())
            return product()
        return work

    async def plain(dtypes):
        for _ in range(3):
            assert state() == before
            dtypes.append(product())
            await asyncio.sleep(0)

    async def main(make):
        a, b, c = [], [], []
        results = await asyncio.gather(worker(make(BF16), a)(), worker(make(FP16), b)(), plain(c))
        return set(a), set(b), set(c), results

    assert asyncio.run(main(lambda dtype: torch.autocast("cpu", dtype))) == ({FP32}, {FP32}, {FP32}, [FP32, FP32, None])
    assert asyncio.run(main(lambda dtype: autocast("cpu", dtype))) == ({BF16}, {FP16}, {FP32}, [BF16, FP16, None])
    assert inspect.iscoroutinefunction(worker(autocast("cpu"), []))


def test_coroutine_cancelled_or_failing():
    before, seen = state(), []

    @autocast("cpu")
    async def waits():
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            seen.append(product())
            raise

    @autocast("cpu")
    async def fails():
        await asyncio.sleep(0)
        raise LookupError

    async def main():
        task = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(LookupError):
            await fails()
        assert state() == before

    asyncio.run(main())
    assert seen == [BF16]


def test_asynchronous_generator():
    """The body runs inside the region wherever it is resumed."""
    before, seen = state(), []

    @autocast("cpu")
    async def body():
        try:
            got = yield product()
            await asyncio.sleep(0)
            seen.append((got, product()))
            try:
                yield product()
            except LookupError:
                yield product()
        finally:
            seen.append(("closed", product()))

    async def main():
        generator = body()
        assert await generator.__anext__() is BF16
        assert state() == before
        assert await generator.asend("sent") is BF16
        assert await generator.athrow(LookupError()) is BF16
        await generator.aclose()
        assert [dtype async for dtype in body()] == [BF16, BF16]
        assert state() == before

    asyncio.run(main())
    assert seen == [("sent", BF16), ("closed", BF16), (None, BF16), ("closed", BF16)]
    assert inspect.isasyncgenfunction(body)


def test_one_decorator_object_on_many_functions():
    region = autocast("cpu")
    first = region(lambda: (product(), second()))
    second = region(lambda: product())
    assert first() == (BF16, BF16)
    assert product() is FP32
