"""Casting of arguments, as pure functions: what is eligible, what comes back untouched, what promotion finds."""


import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from ampkit.policy import casting
from tests.helpers.regions import BF16, FP16, FP32, FP64

aten = torch.ops.aten


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
