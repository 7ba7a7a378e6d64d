"""Regions entered, nested, left and left wrongly."""

import asyncio
import contextlib
import sys
import threading
import types
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import Policy, WeightCache, autocast
from ampkit.torch_internals import dispatcher, kernels
from tests.helpers.autocasting import both, product
from tests.helpers.regions import BF16, FP16, FP32, state

# State


@both
def test_inner_region_takes_the_outer_dtype(region):
    """A nested region without a dtype goes on in float16."""
    with region("cpu", FP16):
        with region("cpu"):
            assert product() is FP16
        with torch.autocast("cpu") as inner:
            assert inner.fast_dtype is FP16


@both
def test_disabled_region_sets_the_dtype(region):
    """And puts back the one it found."""
    before = state()
    with region("cpu", FP16, enabled=False):
        assert torch.get_autocast_dtype("cpu") is FP16
        assert product() is FP32
    assert state() == before


@both
def test_entering_gives_the_region_and_leaving_restores(region):
    """Enabled, dtype and the cache flag."""
    torch.set_autocast_dtype("cpu", FP16)
    torch.set_autocast_cache_enabled(False)
    try:
        before = state()
        made = region("cpu", BF16, cache_enabled=True)
        with made as entered:
            assert entered is made
            assert state() != before
        assert state() == before
    finally:
        torch.set_autocast_dtype("cpu", BF16)
        torch.set_autocast_cache_enabled(True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_that_kept_an_inner_region_from_being_left_comes_out_as_itself(error):
    """And takes the inner region with it: `except Exception` must not swallow a Ctrl-C as a RuntimeError."""
    before = state()

    def interrupted():
        with autocast("cpu", policy=Policy.torch("cpu")):
            autocast("cpu", enabled=False).__enter__()
            raise error

    with pytest.raises(error):
        interrupted()
    assert state() == before
    with autocast("cpu"):
        assert dispatcher.current().policies == (("cpu", Policy.default("cpu")),)


@pytest.mark.parametrize("error", [GeneratorExit, asyncio.CancelledError])
def test_end_of_a_generator_leaves_no_region_that_somebody_else_may_still_be_in(error):
    """A generator or task that ends is no reason to close what was opened since, perhaps by another."""
    inner = autocast("cpu", enabled=False)

    def ended():
        with autocast("cpu"):
            inner.__enter__()
            raise error

    with pytest.raises(RuntimeError, match="entered after it, is still open") as raised:
        ended()
    assert type(raised.value.__context__) is error
    assert not torch.is_autocast_enabled("cpu")
    inner.__exit__(None, None, None)


@both
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, StopIteration, GeneratorExit])
def test_exceptions_go_through(region, error):
    """And the state is restored."""
    before = state()

    def fails():
        with region("cpu"):
            with region("cpu", enabled=False):
                raise error

    with pytest.raises(error):
        fails()
    assert state() == before
    assert product() is FP32


@both
def test_one_object_again_and_again(region):
    """One after another, an instance may be used any number of times."""
    before, made = state(), region("cpu", FP16)
    for _ in range(3):
        with made:
            assert product() is FP16
        assert state() == before


def test_one_object_inside_itself():
    """Entered while it is open, it restores both entries. torch.amp leaves autocast on afterwards."""
    before = state()
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
    assert state() == before
    assert product() is FP32


def test_function_that_calls_itself():
    """Each call of a decorated function restores its own entry. torch.amp leaves autocast on afterwards."""
    def counting(region, seen):
        @region("cpu")
        def count(n):
            seen.append(product())
            if n:
                count(n - 1)
                seen.append(product())
        return count

    before = state()
    counting(torch.autocast, [])(2)
    assert torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)

    seen = []
    counting(autocast, seen)(3)
    assert seen == [BF16] * 7
    assert state() == before


@both
def test_island_and_region_inside_it(region):
    """Products are float32 in the disabled region, low again in the one inside it."""
    with region("cpu"):
        with region("cpu", enabled=False):
            assert product() is FP32
            with region("cpu", FP16):
                assert product() is FP16
            assert product() is FP32
        assert product() is BF16


@both
def test_new_thread_is_outside(region):
    """Off, with the default dtype and the cache on."""
    seen = []
    with region("cpu", FP16, cache_enabled=False):
        thread = threading.Thread(target=lambda: seen.extend([product(), state()]))
        thread.start()
        thread.join()
    assert seen == [FP32, state()]


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
def test_devices_do_not_switch_each_other_on(region):
    """A CPU region leaves CUDA's autocast off, and the other way round."""
    with region("cpu"):
        assert not torch.is_autocast_enabled("cuda")
    with region("cuda:0"):
        assert not torch.is_autocast_enabled("cpu")
        assert product() is FP32


def test_two_devices_each_by_its_own_region():
    """Nested regions of two devices: operands follow the region of their own device."""
    def both_devices(cpu, cuda):
        with FakeTensorMode(), cpu, cuda:
            return product(), product(device="cuda"), product(BF16), product(FP16, "cuda")

    def with_torch(cpu, cuda):
        return both_devices(
            torch.autocast("cpu", BF16) if cpu else contextlib.nullcontext(),
            torch.autocast("cuda:0", FP16) if cuda else contextlib.nullcontext(),
        )

    def with_ampkit(cpu, cuda):
        return both_devices(
            autocast("cpu", BF16) if cpu else contextlib.nullcontext(),
            autocast("cuda:0", FP16) if cuda else contextlib.nullcontext(),
        )

    assert with_torch(True, True) == with_ampkit(True, True) == (BF16, FP16, BF16, FP16)
    assert with_torch(True, False) == with_ampkit(True, False) == (BF16, FP32, BF16, FP16)
    assert with_torch(False, True) == with_ampkit(False, True) == (FP32, FP16, BF16, FP16)


def test_island_for_one_of_two_devices():
    with FakeTensorMode(), autocast("cpu"), autocast("cuda:0"):
        with autocast("cpu", enabled=False):
            assert (product(), product(device="cuda")) == (FP32, FP16)
        with autocast("cuda", enabled=False):
            assert (product(), product(device="cuda")) == (BF16, FP32)
        assert (product(), product(device="cuda")) == (BF16, FP16)


def test_deprecated_regions_of_torch_inside_ours():
    """Those warn. ampkit has no deprecated constructors; torch's warn and change our region as they would torch's."""
    with autocast("cpu", BF16):
        with pytest.warns(FutureWarning, match=r"torch.cpu.amp.autocast"):
            inner = torch.cpu.amp.autocast(dtype=FP16)
        with inner:
            assert product() is FP16
        assert product() is BF16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autocast("cpu")


def test_region_of_torch_inside_ours_and_ours_inside_torchs():
    """A library's own torch.autocast is seen, whichever is outside."""
    with autocast("cpu"):
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


def test_inner_region_keeps_the_outer_policy():
    keeps = Policy.default("cpu").with_rules({"aten::mm": "keep"})
    with autocast("cpu", policy=keeps):
        with autocast("cpu", FP16):
            assert product() is FP32
        with autocast("cpu", FP16, policy=Policy.default("cpu")):
            assert product() is FP16
        with autocast("cuda:0"), autocast("cpu"):
            assert product() is FP32
    with autocast("cpu"):
        assert product() is BF16


# Leaving


def test_left_in_another_order_than_entered():
    before = state()
    outer, inner = autocast("cpu", BF16), autocast("cpu", FP16)
    outer.__enter__()
    inner.__enter__()
    inside = state()
    with pytest.raises(RuntimeError, match=r"being left while autocast\('cpu', torch.float16.*reverse of the order"):
        outer.__exit__(None, None, None)
    assert state() == inside
    with pytest.raises(RuntimeError, match="left twice"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert state() == before, "the outer one is left with the inner one"
    assert product() is FP32


def test_one_object_left_too_early_and_entered_again():
    before = state()
    region = autocast("cpu", BF16)
    region.__enter__()
    with autocast("cpu", FP16):
        with pytest.raises(RuntimeError, match="is being left while"):
            region.__exit__(None, None, None)
        with region:
            assert product() is BF16
        assert product() is FP16
    assert state() == before


def test_left_without_having_been_entered():
    region = autocast("cpu")
    with pytest.raises(RuntimeError, match="in a thread that never entered it, or left twice"):
        region.__exit__(None, None, None)
    with region:
        pass
    with pytest.raises(RuntimeError, match="left twice"):
        region.__exit__(None, None, None)


def test_left_in_another_thread():
    errors = []

    def leave():
        try:
            region.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    with autocast("cpu") as region:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert product() is BF16
    assert "enter and leave a region in one thread" in errors[0]


def test_generator_that_yields_inside_a_region_is_told():
    """torch.amp says nothing and leaves the caller in the generator's region."""
    def leaks():
        with autocast("cpu"):
            yield

    before = state()
    generator = leaks()
    next(generator)
    with autocast("cpu", FP16):
        with pytest.raises(RuntimeError, match="decorate its function with autocast instead"):
            generator.close()
    assert state() == before


def test_coroutines_that_take_turns_inside_their_regions_are_told():
    before = state()

    async def work(dtype):
        with autocast("cpu", dtype):
            await asyncio.sleep(0)

    async def main():
        return await asyncio.gather(work(BF16), work(FP16), return_exceptions=True)

    first, second = asyncio.run(main())
    assert "decorate its function with autocast instead" in str(first)
    assert second is None
    assert state() == before


def test_caches_are_accepted_by_islands_and_other_devices():
    cache = WeightCache()
    weight = torch.nn.Linear(2, 2)
    with autocast("cuda:0", cache=cache), autocast("cpu", enabled=False, cache=cache):
        weight(torch.ones(1, 2))
    assert cache.info().misses == 0


def test_region_while_another_thread_imports_dynamo(monkeypatch):
    """The module is in `sys.modules` before its names are."""
    before = state()
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", types.ModuleType("torch._dynamo.callback"))
    with autocast("cpu"):
        assert product() is BF16
    assert state() == before


def test_second_copy_of_ampkit_is_told():
    with autocast("cpu"):
        pass
    with pytest.raises(RuntimeError, match="another copy of ampkit"):
        kernels._prepare()


def test_open_mode_is_a_dispatch_mode_that_cannot_be_pushed_below_autograd():
    with autocast("cpu"):
        mode = dispatcher.current()
    assert isinstance(mode, TorchDispatchMode)
    assert mode.__torch_dispatch__(torch.ops.aten.relu.default, (), (torch.ones(2),)) is NotImplemented
    with pytest.raises(RuntimeError, match=r"its casts would escape autograd. Use ampkit.autocast"), mode:
        pass
