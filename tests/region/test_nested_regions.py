"""Regions inside regions, and the errors where regions are left in the wrong order or thread."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ampkit import Policy, autocast, torch_private
from ampkit.dispatch import dispatcher
from tests.helpers.regions import BF16, FP16, FP32, REGIONS, both, product, state

# State


@both
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, StopIteration, GeneratorExit])
def test_exceptions_go_through(region, error):
    before = state()
    with pytest.raises(error), region("cpu"), region("cpu", enabled=False):
        raise error
    assert state() == before


@both
def test_torchs_state_that_code_in_a_region_sets_is_restored(region):
    before = state()
    with region("cpu", torch.get_autocast_dtype("cpu")):
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", FP16)
        torch.set_autocast_cache_enabled(False)
    assert state() == before


def test_one_object_inside_itself():
    """Entered while it is open, it restores both entries. torch.amp leaves autocast on afterwards."""
    made = torch.autocast("cpu", FP16)
    with made, made:
        pass
    assert torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", BF16)

    made = autocast("cpu", FP16)
    with made:
        with autocast("cpu", enabled=False):
            with made:
                assert product() is FP16
            assert product() is FP32
        assert product() is FP16


def test_function_that_calls_itself():
    """Each call of a decorated function restores its own entry. torch.amp leaves autocast on afterwards."""
    seen = []
    for region in REGIONS:
        seen.clear()

        @region("cpu")
        def count(n):
            seen.append(product())
            if n:
                count(n - 1)
                seen.append(product())

        count(2)
        assert seen == [BF16] * 5
        assert torch.is_autocast_enabled("cpu") is (region is torch.autocast)
        torch.set_autocast_enabled("cpu", False)


@both
def test_what_an_inner_region_takes_from_the_outer(region):
    """The dtype, unless it is given another; disabled it computes in float32, and sets the dtype all the same."""
    made = region("cpu", FP16)
    for _ in range(2):  # one object may be used again
        with made:
            with region("cpu") as inner:
                assert inner.fast_dtype is product() is FP16
            with region("cpu", BF16, enabled=False):
                assert torch.get_autocast_dtype("cpu") is BF16
                assert product() is FP32
                with region("cpu", BF16):
                    assert product() is BF16
                assert product() is FP32
            assert product() is FP16


@both
def test_cache_flag_comes_from_where_the_region_was_made(region):
    """cache_enabled=None is read when the region is constructed."""
    made_outside = region("cpu")
    with region("cpu", cache_enabled=False):
        with region("cpu"):
            assert not torch.is_autocast_cache_enabled()
        with made_outside:
            assert torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()


@both
def test_two_devices_each_by_its_own_region(region):
    """Operands follow the region of their own device, which switches the other's neither on nor off."""

    def here():
        return product(), product(device="cuda"), product(BF16), product(FP16, "cuda")

    cpu, cuda = lambda **options: region("cpu", **options), lambda **options: region("cuda:0", **options)
    with FakeTensorMode():
        with cpu():
            assert here() == (BF16, FP32, BF16, FP16)
        with cuda():
            assert here() == (FP32, FP16, BF16, FP16)
        for outer, inner in ((cpu, cuda), (cuda, cpu)):
            with outer(), inner():
                assert here() == (BF16, FP16, BF16, FP16)
                with cpu(enabled=False):
                    assert here() == (FP32, FP16, BF16, FP16)
                with cuda(enabled=False):
                    assert here() == (BF16, FP32, BF16, FP16)


def test_region_of_torch_inside_ours_and_ours_inside_torchs():
    """A library's own torch.autocast is seen, whichever is outside, and so are torch's deprecated constructors."""
    with pytest.warns(FutureWarning, match=r"torch.cpu.amp.autocast"):
        deprecated = torch.cpu.amp.autocast(dtype=FP16)
    with autocast("cpu"):
        with deprecated:
            assert product() is FP16
        with torch.autocast("cpu", enabled=False):
            assert product() is FP32
        with torch.autocast("cpu", FP16):
            assert product() is FP16
            with autocast("cpu", enabled=False):
                assert product() is FP32
                with torch.autocast("cpu", FP16):
                    assert product() is FP16
        assert product() is BF16
    with torch.autocast("cpu", FP16):
        with autocast("cpu"):
            assert product() is FP16
            assert torch.softmax(torch.ones(2, dtype=FP16), 0).dtype is FP32
        assert product() is FP16
        assert torch.softmax(torch.ones(2, dtype=FP16), 0).dtype is FP16, "torch.amp's list for the CPU again"


def test_regions_of_both_keys_inside_each_other():
    """Whatever is around a region, it computes by its own list, and leaving it restores both keys."""
    off = {"enabled": False}, (FP32, BF16)
    regions = [
        (autocast, {"policy": "default"}, (BF16, FP32)),
        (autocast, {"policy": "torch"}, (BF16, BF16)),
        (autocast, *off),
        (torch.autocast, *off),
    ]

    def here():
        return product(), torch.softmax(torch.ones(2, dtype=BF16), 0).dtype

    def keys():
        return [(torch_private.is_included(key), torch_private.is_excluded(key)) for key in dispatcher.KEY_NAMES]

    def walk(depth):
        before = keys()
        for region, options, dtypes in regions:
            with region("cpu", BF16, **options):
                assert here() == dtypes
                if depth:
                    walk(depth - 1)
                assert here() == dtypes
            assert keys() == before

    walk(2)


def test_inner_region_keeps_the_outer_policy():
    keeps = Policy.default("cpu").with_rules({"aten::mm": "keep"})
    with autocast("cpu", policy=keeps):
        with autocast("cpu", FP16):
            assert product() is FP32
        with autocast("cpu", FP16, policy=Policy.default("cpu")):
            assert product() is FP16
        with autocast("cuda:0"), autocast("cpu"):
            assert product() is FP32


# Leaving


def test_left_in_another_order_than_entered():
    before = state()
    outer, inner = autocast("cpu", BF16), autocast("cpu", FP16)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match=r"ended while autocast\('cpu', torch.float16.*the reverse order"):
        outer.__exit__(None, None, None)
    assert state() == before, "the inner one is left with the outer one"
    for region in (outer, inner):
        with pytest.raises(RuntimeError, match="exited it already"):
            region.__exit__(None, None, None)


@pytest.mark.parametrize("ended_by", [None, GeneratorExit, asyncio.CancelledError])
def test_left_twice_or_in_another_thread(ended_by):
    region, message = autocast("cpu"), "in a thread that has not entered it, or has exited it already; enter and"
    with pytest.raises(RuntimeError, match=message):
        region.__exit__(ended_by, None, None)
    with region:
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match=message):
            pool.submit(region.__exit__).result()
        assert product() is BF16
    with pytest.raises(RuntimeError, match=message):
        region.__exit__(ended_by, None, None)


def test_a_task_that_is_canceled_inside_a_region_raises():
    """Where another task has entered a region meanwhile, and is left in none."""

    async def inside(region):
        with region:
            await asyncio.sleep(60)

    async def cancel():
        tasks = [asyncio.create_task(inside(autocast("cpu", dtype))) for dtype in (BF16, FP16)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        with pytest.raises(RuntimeError, match="A generator or coroutine that is suspended"):
            await tasks[0]
        tasks[1].cancel()
        with pytest.raises(RuntimeError, match="exited it already"):
            await tasks[1]

    before = state()
    asyncio.run(cancel())
    assert state() == before


def test_a_generator_that_yields_inside_a_region_raises():
    """torch.amp says nothing and leaves the caller in the generator's region."""

    def leaks():
        with autocast("cpu"):
            yield

    generator, before = leaks(), state()
    next(generator)
    with pytest.raises(RuntimeError, match="decorate its function with autocast instead"), autocast("cpu", FP16):
        generator.close()
    assert state() == before


def test_a_second_copy_of_ampkit_raises():
    with autocast("cpu"):
        pass
    with pytest.raises(RuntimeError, match="another copy of ampkit"):
        dispatcher._fallthrough_library()
