"""Casting of arguments, as pure functions: what is eligible, what comes back untouched, what promotion finds."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from ampkit.policy import casting
from tests.helpers.regions import BF16, FP16, FP32, FP64

FLOATS = [FP32, FP16, BF16, torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [FP64, torch.int8, torch.int64, torch.bool, torch.complex64, torch.complex128]
aten = torch.ops.aten


@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
def test_what_is_eligible(dtype):
    tensor = torch.ones(2).to(dtype)
    assert casting.is_eligible(tensor, "cpu") is (dtype in FLOATS)
    for elsewhere in (casting.is_eligible(tensor, "cuda"), casting.is_eligible(tensor.to("meta"), "cpu")):
        assert not elsewhere
    for target in (BF16, FP32):
        cast = casting.cast_to("cpu", target).tensor(tensor)
        assert cast.dtype is target if dtype in FLOATS and dtype is not target else cast is tensor


@pytest.mark.parametrize("source", [FP16, BF16])
@pytest.mark.parametrize("target", [FP32, FP16, BF16])
def test_every_16_bit_value_as_torch_casts_it(source, target):
    values = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(source)
    cast = casting.cast_to("cpu", target).tensor(values)
    bits = torch.int32 if target is FP32 else torch.int16
    assert torch.equal(cast.view(bits), values.to(target).view(bits))
    assert (cast is values) is (source is target)


def test_devices():
    with FakeTensorMode():
        here, there = torch.ones(2), torch.ones(2, device="cuda")
        for device, eligible, not_eligible in (("cpu", here, there), ("cuda", there, here)):
            first, second = casting.cast_to(device, BF16).args((eligible, not_eligible))
            assert first.dtype is BF16
            assert second is not_eligible
    assert casting.cast_to("mps", BF16).tensor(torch.ones(2)).dtype is FP32


def test_containers_and_what_is_no_tensor():
    class Sub(torch.Tensor):
        pass

    cast, x, low = casting.cast_to("cpu", BF16), torch.ones(2), torch.ones(2, dtype=BF16)
    untouched = (low, [low, 1], (), 2.0, None, "x", torch.float32, [1, 2])
    assert cast.args(untouched) is untouched
    given = (x, [x, 1, [x]], (x, None), 3, x.as_subclass(Sub), Parameter(x))
    for out in (cast.args(given), tuple(cast.kwargs(dict(zip("abcdef", given, strict=True))).values())):
        assert [t.dtype for t in casting.tensors(out)] == [BF16] * 6
        assert (type(out[1]), type(out[2]), out[1][1], out[2][1], out[3]) == (list, tuple, 1, None, 3)
        assert type(out[4]) is Sub
    assert given[1][0] is x
    assert [t.numel() for t in casting.tensors((x, [low, (torch.ones(3), 1)], "text", None))] == [2, 2, 3]


def test_lookup_is_asked_for_leaves_only_the_last_first():
    asked = []

    def lookup(leaf, dtype):
        asked.append(leaf)
        return leaf.to(dtype)

    cast = casting.cast_to("cpu", BF16)
    weight, frozen = Parameter(torch.ones(2)), Parameter(torch.ones(2), requires_grad=False)
    cast.args((weight, frozen, weight * 2, Parameter(torch.ones(2, dtype=FP64))), lookup)
    cast.kwargs({"a": weight, "b": [frozen]}, lookup)
    assert [id(leaf) for leaf in asked] == [id(frozen), id(weight)] * 2


# Promotion


values = st.lists(
    st.one_of(
        st.sampled_from([FP32, FP16, BF16, FP64, torch.int64, torch.bool]).map(lambda kind: torch.ones(1, dtype=kind)),
        st.sampled_from([1, 2.0, None, "x"]),
    ),
    max_size=5,
)


@given(values, st.randoms(use_true_random=False))
def test_promotion_does_not_depend_on_order_or_nesting(args, random):
    eligible = {a.dtype for a in args if isinstance(a, torch.Tensor)} & {FP32, FP16, BF16}
    expected = None if not eligible else next(iter(eligible)) if len(eligible) == 1 else FP32
    shuffled = list(args)
    random.shuffle(shuffled)
    cut = random.randint(0, len(args))
    for variant in (args, shuffled, [args[:cut], tuple(args[cut:])], [args]):
        assert casting.widest_dtype(variant, "cpu") is expected
    first, rest = args[:cut], args[cut:]
    assert casting.widest_dtype(rest, "cpu", casting.widest_dtype(first, "cpu")) is expected
    assert casting.widest_dtype(args, "cuda") is None


def test_promotion_agrees_with_torch_where_torch_has_an_answer():
    for a, b in itertools.product([FP32, FP16, BF16], repeat=2):
        found = casting.widest_dtype([torch.ones(1, dtype=a), torch.ones(1, dtype=b)], "cpu")
        assert found is torch.promote_types(a, b)


# dtype arguments


@pytest.mark.parametrize(("op", "args", "kwargs", "dtype"), [
    (aten.softmax.int, (0,), {}, FP32),
    (aten.softmax.int, (0, None), {}, FP32),
    (aten.softmax.int, (0, FP16), {}, FP16),
    (aten.sum.default, (), {}, FP32),
    (aten.sum.default, (), {"dtype": FP64}, FP64),
    (aten.sum.dim_IntList, ([0], True), {}, FP32),
    (aten.cumsum.default, (0,), {"dtype": None}, FP32),
    (aten.norm.Scalar, (2,), {}, FP32),         # by way of the overload that takes a dtype
    (aten.norm.Scalar, (), {}, FP32),
    (aten.norm.ScalarOpt_dim, (2, [0]), {}, FP32),
])
def test_dtype_argument(op, args, kwargs, dtype):
    x = torch.ones(2, 2, dtype=BF16)
    target, new_args, new_kwargs = casting.with_float32_dtype(op, (x, *args), kwargs, "cpu")
    assert new_args[0] is x
    got = target(*new_args, **new_kwargs)
    assert got.dtype is dtype
    torch.testing.assert_close(got, op(x.to(dtype), *args, **kwargs), check_dtype=False)


def test_dtype_argument_where_the_input_is_not_eligible():
    double, integers, meta = torch.ones(2, dtype=FP64), torch.ones(2, dtype=torch.int64), torch.ones(2, device="meta")
    for args in ((double,), (integers,), (meta,), ()):
        assert casting.with_float32_dtype(aten.sum.default, args, {}, "cpu") == (aten.sum.default, args, {})
