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


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of a 16-bit type."""
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
def test_what_is_eligible(dtype):
    tensor = torch.ones(2).to(dtype)
    assert casting.is_eligible(tensor, "cpu") is (dtype in FLOATS)
    assert not casting.is_eligible(tensor, "cuda")
    assert not casting.is_eligible(torch.empty(2, dtype=dtype, device="meta"), "cpu")
    for target in (BF16, FP32):
        cast = casting.cast_to("cpu", target).tensor(tensor)
        if dtype in FLOATS and dtype is not target:
            assert cast.dtype is target
        else:
            assert cast is tensor


def test_what_is_no_tensor_is_not_eligible():
    for value in (1.0, "x", None, [torch.ones(1)], torch.float32):
        assert not casting.is_eligible(value, "cpu")
        assert casting.cast_to("cpu", BF16).value(value) is not None or value is None


@pytest.mark.parametrize("source", [FP16, BF16])
@pytest.mark.parametrize("target", [FP32, FP16, BF16])
def test_every_16_bit_value_as_torch_casts_it(source, target):
    values = every_pattern(source)
    cast = casting.cast_to("cpu", target).tensor(values)
    assert torch.equal(cast.view(torch.int16 if target is not FP32 else torch.int32),
                       values.to(target).view(torch.int16 if target is not FP32 else torch.int32))
    if source is target:
        assert cast is values


def test_devices():
    with FakeTensorMode():
        here, there = torch.ones(2), torch.ones(2, device="cuda")
        for device, eligible, not_eligible in (("cpu", here, there), ("cuda", there, here)):
            cast = casting.cast_to(device, BF16)
            assert cast.tensor(eligible).dtype is BF16
            assert cast.tensor(not_eligible) is not_eligible
            assert cast.args((eligible, not_eligible))[1] is not_eligible
    other = casting.cast_to("mps", BF16)
    assert other.tensor(torch.ones(2)).dtype is FP32


def test_nothing_to_cast_gives_back_the_very_arguments():
    cast = casting.cast_to("cpu", BF16)
    args = (torch.ones(2, dtype=BF16), [torch.ones(2, dtype=BF16), 1], (), 2.0, None, "x", torch.float32, [1, 2])
    assert cast.args(args) is args
    kwargs = {"a": args[0], "b": args[1]}
    assert cast.kwargs(kwargs) is kwargs
    assert cast.kwargs({}) == {}


def test_lists_and_tuples_are_looked_into():
    cast = casting.cast_to("cpu", BF16)
    x = torch.ones(2)
    args = (x, [x, 1, [x]], (x, None), 3)
    out = cast.args(args)
    assert out[0].dtype is out[1][0].dtype is out[1][2][0].dtype is out[2][0].dtype is BF16
    assert (type(out[1]), type(out[2]), out[1][1], out[2][1], out[3]) == (list, tuple, 1, None, 3)
    assert args[0] is x
    assert args[1][0] is x
    assert cast.kwargs({"a": x, "b": 2})["a"].dtype is BF16


def test_subclasses_are_tensors():
    class Sub(torch.Tensor):
        pass

    cast = casting.cast_to("cpu", BF16)
    assert type(cast.args((torch.ones(2).as_subclass(Sub),))[0]) is Sub
    assert cast.args((Parameter(torch.ones(2)),))[0].dtype is BF16


def test_lookup_is_asked_for_leaves_only():
    asked = []

    def lookup(leaf, dtype):
        asked.append(leaf)
        return leaf.to(dtype)

    cast = casting.cast_to("cpu", BF16)
    weight, frozen = Parameter(torch.ones(2)), Parameter(torch.ones(2), requires_grad=False)
    activation, double = weight * 2, Parameter(torch.ones(2, dtype=FP64))
    cast.args((weight, frozen, activation, double, [weight]), lookup)
    assert [id(leaf) for leaf in asked] == [id(weight), id(frozen), id(weight)]


def test_cast_is_one_object_per_device_and_dtype():
    assert casting.cast_to("cpu", BF16) is casting.cast_to("cpu", BF16)
    assert casting.cast_to("cpu", BF16) is not casting.cast_to("cpu", FP16)


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
    for a, b in itertools.product([FP32, FP16, BF16, FP64], repeat=2):
        found = casting.widest_dtype([torch.ones(1, dtype=a), torch.ones(1, dtype=b)], "cpu")
        if FP64 not in (a, b):
            assert found is torch.promote_types(a, b)
        else:
            assert found in ({a, b} - {FP64} or {None})


# dtype arguments


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "expected"),
    [
        (aten.softmax.int, (0,), {}, ((0, FP32), {})),
        (aten.softmax.int, (0, None), {}, ((0, FP32), {})),
        (aten.softmax.int, (0, FP16), {}, ((0, FP16), {})),
        (aten.sum.default, (), {}, ((), {"dtype": FP32})),
        (aten.sum.default, (), {"dtype": FP64}, ((), {"dtype": FP64})),
        (aten.sum.dim_IntList, ([0], True), {}, (([0], True), {"dtype": FP32})),
        (aten.cumsum.default, (0,), {"dtype": None}, ((0,), {"dtype": FP32})),
    ],
)
def test_dtype_argument(op, args, kwargs, expected):
    x = torch.ones(2, 2, dtype=BF16)
    target, new_args, new_kwargs = casting.with_float32_dtype(op, (x, *args), kwargs, "cpu")
    assert target is op
    assert new_args[0] is x
    got = (new_args[1:], dict(new_kwargs))
    if op is aten.softmax.int and len(args) == 1:
        assert got in (expected, (args, {"dtype": FP32}))
    else:
        assert got == expected
    dtype = expected[1].get("dtype") or expected[0][-1]
    assert target(*new_args, **new_kwargs).dtype is dtype


def test_dtype_argument_by_way_of_another_overload():
    x = torch.ones(2, 2, dtype=BF16)
    for op, args in ((aten.norm.Scalar, (x, 2)), (aten.norm.Scalar, (x,)), (aten.norm.ScalarOpt_dim, (x, 2, [0]))):
        target, new_args, kwargs = casting.with_float32_dtype(op, args, {}, "cpu")
        assert target is not op
        assert kwargs["dtype"] is FP32
        assert torch.equal(target(*new_args, **kwargs), op(x.float(), *args[1:]))


def test_dtype_argument_where_the_input_is_not_eligible():
    for x in (torch.ones(2, dtype=FP64), torch.ones(2, dtype=torch.int64), torch.ones(2, device="meta")):
        args = (x,)
        assert casting.with_float32_dtype(aten.sum.default, args, {}, "cpu") == (aten.sum.default, args, {})
    assert casting.with_float32_dtype(aten.sum.default, (), {}, "cpu")[0] is aten.sum.default


def test_operators_without_a_dtype_argument():
    assert casting.takes_dtype(aten.sum.default)
    assert casting.takes_dtype(aten.norm.Scalar)
    assert not casting.takes_dtype(aten.relu.default)
    with pytest.raises(ValueError, match="'aten::relu' cannot follow FLOAT32_DTYPE_ARG: no overload of it takes"):
        casting.with_float32_dtype(aten.relu.default, (torch.ones(2),), {}, "cpu")


def test_tensors_of_nested_arguments():
    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [t.numel() for t in casting.tensors((x, [y, (z, 1)], "text", None))] == [1, 2, 3]
