"""Policies: layers, changes, errors that name the operator, and the way to a dict and back."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampkit import Policy, Rule, autocast, register_op
from ampkit.policy.default_lists import DEFAULT_EXTRA
from ampkit.policy.operators import checked_rule, fold
from ampkit.policy.torch_lists import TORCH
from tests.helpers.module_rules import Model
from tests.helpers.regions import BF16, FP16, FP32

aten = torch.ops.aten
MODEL = Model()


def test_bases_are_their_lists():
    for device in TORCH:
        torchs, extra = fold(TORCH[device]), fold(DEFAULT_EXTRA[device])
        assert Policy.torch(device).rules() == {op: rule for op, (rule, _) in torchs.items()}
        assert Policy.default(device).rules() == {op: rule for op, (rule, _) in (torchs | extra).items()}


def test_explain_names_the_layer():
    policy = Policy.default("cpu").with_rules({"aten::mm": Rule.KEEP, "aten::gelu": "keep"})
    policy = policy.with_rules({"aten::gelu": "float32"})
    for op, rule, layer in (
        ("linear", Rule.LOWER, "torch"),
        ("softmax.int", Rule.FLOAT32_DTYPE_ARG, "default"),
        ("mm", Rule.KEEP, "with_rules[0]"),
        ("gelu", Rule.FLOAT32, "with_rules[1]"),
        ("relu", Rule.KEEP, "unlisted"),
        ("flatten.using_ints", Rule.DECOMPOSE, "unlisted"),
    ):
        assert policy.explain(f"aten::{op}")[:3] == (f"aten::{op}", rule, layer)
    assert "float32" in policy.explain("linear").why
    assert str(policy.explain("gelu")) == "aten::gelu: FLOAT32 (set by with_rules[1]): set by the user"
    assert [policy.explain(op).op for op in ("sum", "softmax")] == ["aten::sum", "aten::softmax.int"]
    with pytest.raises(ValueError, match=r"aten::norm follow different rules: aten::norm.Scalar FLOAT32_DTYPE_ARG, .*"):
        policy.explain("aten::norm")


KEYS = {
    aten.gelu.default: "aten::gelu",
    aten.gelu: "aten::gelu",
    "gelu": "aten::gelu",
    "aten::gelu.default": "aten::gelu",
    torch.softmax: "aten::softmax.int",
    F.softmax: "aten::softmax.int",
    torch.Tensor.mm: "aten::mm",
    F.gelu: "aten::gelu",
    F.layer_norm: "aten::layer_norm",
    torch.fft.fft: "aten::fft_fft",
    torch.norm: "aten::linalg_vector_norm",
    torch.Tensor.norm: "aten::linalg_vector_norm",
    F.cross_entropy: "aten::cross_entropy_loss",
    "torch.matmul": "aten::matmul",
    "torch.nn.functional.linear": "aten::linear",
}


def test_ways_to_name_an_operator():
    policy = Policy.default("cpu")
    for key, name in KEYS.items():
        assert policy.explain(key) == policy.explain(name)
        for rule in (Rule.DECOMPOSE, "decompose"):
            assert policy.with_rules({key: rule}).explain(name).rule is Rule.DECOMPOSE


def test_overloads_that_only_torchscript_knows_are_not_meant():
    """`aten::add` also names additions of plain numbers, which never reach a region."""
    assert Policy.default("cpu").explain("add").op == "aten::add.Tensor"
    chosen = Policy.default("cpu").with_rules({"aten::add": Rule.FLOAT32})
    assert {op for op, _ in chosen.overrides[0]} == {aten.add.Tensor, aten.add.Scalar}


# with_rules


def test_packet_means_every_overload_but_out():
    policy = Policy.torch("cpu").with_rules({aten.mean: Rule.FLOAT32})
    assert {op._overloadname for op in policy.rules() if op.overloadpacket is aten.mean} == {"default", "dim"} | (
        {"names_dim"} if hasattr(aten.mean, "names_dim") else set()
    )


def test_each_rule_does_what_it_says():
    x = torch.ones(2)
    low, half = x.bfloat16(), x.half()
    for rule, args, expected in (
        (Rule.LOWER, (x, x, x), BF16),
        (Rule.FLOAT32, (half, half, half), FP32),
        (Rule.PROMOTE, (half, half, low), FP32),
        (Rule.KEEP, (x, x, x), FP32),
    ):
        with autocast("cpu", policy=Policy.torch("cpu").with_rules({"aten::addcmul": rule})):
            assert torch.addcmul(*args).dtype is expected


def test_decompose_opens_a_composite_and_keep_closes_it():
    x, y = torch.ones(2, 3, dtype=BF16), torch.zeros(2, dtype=torch.long)
    for rule, dtype in (("keep", BF16), ("decompose", FP32)):
        with autocast("cpu", policy=Policy.default("cpu").with_rules({"cross_entropy_loss": rule})):
            assert F.cross_entropy(x, y).dtype is dtype
    opened = Policy.default("cpu").with_rules({"linear": "decompose"})
    closed = opened.with_rules(dict.fromkeys(("addmm", "mm", "matmul"), "keep"))
    for policy, dtype in ((opened, BF16), (closed, FP32)):
        with autocast("cpu", policy=policy):
            assert F.linear(torch.ones(2, 3), torch.ones(4, 3)).dtype is dtype


def test_policy_is_left_as_it_was():
    policy = Policy.default("cpu")
    policy.with_rules({"mm": "keep"})
    policy.for_modules(MODEL, {"head": FP32})
    assert policy == Policy.default("cpu")
    with pytest.raises(AttributeError, match="cannot assign to field 'base'"):
        policy.base = "torch"


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"aten::sofmax.int": "keep"}, ValueError, r"unknown operator 'aten::sofmax.int'.*nearest: .*softmax"),
        ({"aten::sofmax": "keep"}, ValueError, r"unknown operator 'aten::sofmax'.*nearest: .*softmax"),
        ({"aten::softmax.float": "keep"}, ValueError, r"'aten::softmax' has no overload 'float'; expected one of"),
        ({"nolib::op": "keep"}, ValueError, r"unknown operator 'nolib::op'"),
        ({"aten::mm.__class__": "keep"}, ValueError, r"operator 'aten::mm' has no overload '__class__'; expected one"),
        ({F.interpolate: "keep"}, ValueError, r"unknown operator 'aten::interpolate'.*nearest: "),
        ({"aten::Bool.int": "keep"}, ValueError, r"'aten::Bool.int' is TorchScript's, .*; it never reaches a region"),
        ({torch.ops.aten.len: "keep"}, ValueError, r"'aten::len.t' is TorchScript's"),
        ({"aten::mm": torch.ones(2)}, ValueError, r"unknown rule tensor\(.*\) for operator 'aten::mm'"),
        ({"aten::mm": "half"}, ValueError, r"unknown rule 'half' for operator 'aten::mm'; expected a Rule or one of"),
        ({"gelu": "keep", aten.gelu: "lower"}, ValueError, r"operator 'aten::gelu' is named twice, as KEEP and"),
        ({print: "keep"}, TypeError, r"an operator is an OpOverload, a packet, a name such as 'aten::softmax.int'"),
        ({1: "keep"}, TypeError, r"or a function of torch such as torch.softmax; got 1"),
        ([("aten::mm", "keep")], TypeError, r"with_rules takes a dict of operator to Rule, got list"),
        ({"aten::mm": "float32_dtype_arg"}, ValueError, r"'aten::mm.*' cannot follow FLOAT32_DTYPE_ARG.*Rule.FLOAT32"),
        ({"aten::add_.Tensor": "float32"}, ValueError, r"'aten::add_.Tensor' writes to its arguments and cannot"),
        ({"aten::batch_norm": "lower"}, ValueError, r"'aten::batch_norm' writes to its arguments"),
        ({"aten::detach": "keep"}, ValueError, r"'aten::detach' cannot have a rule: torch makes parameters"),
        ({"nolib::op": "keep"}, ValueError, r"nearest: none\. Import the module that defines 'nolib' first"),
        ({nn.GELU: "keep"}, TypeError, r"GELU is a module, not an operator: name the function .* policy\.for_modules"),
        ({MODEL: "keep"}, TypeError, r"\w+ is a module, not an operator: name"),
        ({"aten::mm": BF16}, ValueError, r"unknown rule torch\.bfloat16 .* Rule\.LOWER in the dtype of the region"),
    ],
)
def test_wrong_rules_are_refused(rules, error, message):
    with pytest.raises(error, match=message):
        Policy.default("cpu").with_rules(rules)


@pytest.mark.parametrize("rule", Rule)
def test_rules_by_the_names_that_explain_prints(rule):
    assert checked_rule(rule.name, "aten::mm") is checked_rule(rule.value, "aten::mm") is rule
    assert str(Policy.default("cpu").with_rules({"aten::mm": "KEEP"}).explain("aten::mm")).startswith("aten::mm: KEEP ")


def test_questions_of_the_wrong_type():
    policy = Policy.default("cpu")
    with pytest.raises(KeyError, match=r"'aten::gelu' is not a key; keys are .* policy\.rule_for takes any name"):
        policy.rules()["aten::gelu"]
    with pytest.raises(KeyError, match=r"'aten::relu' has no rule of its own"):
        policy.rules()[aten.relu.default]
    assert policy.rules().get("aten::gelu") is None


def test_operators_that_write_may_be_kept():
    policy = Policy.torch("cpu").with_rules({"aten::add_.Tensor": "keep", "aten::batch_norm": "float32"})
    with autocast("cpu", policy=policy):
        x = torch.ones(2, 3, dtype=BF16)
        x.add_(1)
        assert x[0, 0] == 2
        norm = nn.BatchNorm1d(3)
        assert norm(x).dtype is FP32
        assert norm.num_batches_tracked == 1
        assert norm.running_mean[0] != 0


def test_device_that_has_no_lists():
    with pytest.raises(ValueError, match=r"no operator lists for device type 'meta'; expected one of 'cpu', 'cuda'"):
        Policy.torch("meta")
    with pytest.raises(ValueError, match=r"unknown policy base 'apex'; expected 'default' or 'torch'"):
        Policy("apex", "cpu")


# Equality, text, dict


def test_equality():
    policy = Policy.default("cpu").with_rules({"relu": "keep", "gelu": "lower"})
    same = Policy.default("cpu").with_rules({"gelu": Rule.LOWER, aten.relu.default: Rule.KEEP})
    assert policy == same
    assert len({policy, same}) == 1
    assert policy != Policy.torch("cpu").with_rules({"relu": "keep", "gelu": "lower"})
    assert policy != Policy.default("cuda").with_rules({"relu": "keep", "gelu": "lower"})
    assert policy != "Policy"


def test_text_is_the_code_that_makes_the_policy():
    policy = Policy.torch("cpu").with_rules({"aten::gelu": "keep"}).for_modules(MODEL, {"head": FP32, nn.Linear: FP16})
    assert repr(policy) == (
        "Policy.torch('cpu').with_rules({'aten::gelu': Rule.KEEP})"
        ".for_modules(model, {'head': torch.float32, 'class torch.nn.modules.linear:Linear': torch.float16})"
    )
    assert eval(repr(Policy.default("cpu").with_rules({"mm": "keep"})), {"Policy": Policy, "Rule": Rule}) == (
        Policy.default("cpu").with_rules({"mm": "keep"})
    )


def test_dict_is_plain():
    modules = {"head": FP32, nn.Linear: Policy.torch("cpu")}
    policy = Policy.torch("cpu").with_rules({"mm": "keep", "gelu": "lower"}).for_modules(MODEL, modules)
    assert policy.to_dict() == {
        "base": "torch",
        "device_type": "cpu",
        "rules": [{"aten::gelu": "lower", "aten::mm.default": "keep", "aten::mm.dtype": "keep"}],
        "modules": [["head", "float32"], ["class torch.nn.modules.linear:Linear", Policy.torch("cpu").to_dict()]],
    }


def test_dict_that_is_no_policy():
    """`stress/test_policy_data.py` draws many more."""
    for changes, message in (
        ({"version": 2}, r"not a policy: unknown keys \['version'\]; expected 'base'"),
        ({"base": ["torch"]}, r"unknown policy base \['torch'\]"),
        ({"rules": ["keep"]}, r"with_rules takes a dict of operator to Rule, got str"),
        ({"modules": ["ab"]}, r"a list of a module and its rule, got 'ab'"),
        ({"modules": [["head", "float32"]] * 2}, r"module 'head' already has a rule"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            Policy.from_dict({**Policy.torch("cpu").to_dict(), **changes}, MODEL)


def test_what_is_left_out_of_a_dict_has_a_default():
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert Policy.from_dict({"base": "torch"}) == Policy.torch("cpu" if accelerator is None else accelerator.type)
    assert Policy.from_dict({"base": "default", "device_type": "xpu"}) == Policy.default("xpu")


def test_dtypes_as_configuration_files_name_them():
    for names, dtype in (
        (("bfloat16", "bf16", "bf16-mixed"), BF16),
        (("float16", "fp16", "16-mixed"), FP16),
        (("float32", "fp32"), FP32),
    ):
        for name in names:
            assert Policy.torch("cpu").for_modules(MODEL, {"head": name}).check().rules[0].value is dtype
            if dtype is not FP32:
                assert autocast("cpu", name).fast_dtype is dtype


# register_op


def test_operator_of_a_library():
    """Also in policies and regions that were made before."""

    @torch.library.custom_op("ampkit_tests::scaled", mutates_args=())
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    scaled.register_autograd(lambda ctx, gradient: (gradient * 2.0, None))
    x, policy = torch.ones(2, requires_grad=True), Policy.torch("cpu")
    region = autocast("cpu", FP16, policy=policy)
    with region:
        assert scaled(x, 2.0).dtype is FP32
    for op in (scaled, "ampkit_tests::scaled", torch.ops.ampkit_tests.scaled, torch.ops.ampkit_tests.scaled.default):
        for rule, dtype in (("lower", FP16), (Rule.FLOAT32, FP32)):
            register_op(op, rule)
            for entered in (region, autocast("cpu", FP16)):
                with entered:
                    y = scaled(x.half() if dtype is FP32 else x, 2.0)
                assert y.dtype is dtype
            (gradient,) = torch.autograd.grad(y.float().sum(), x)
            assert gradient.dtype is FP32
    assert policy.explain("ampkit_tests::scaled")[1:3] == (Rule.FLOAT32, "register_op")
    kept = policy.with_rules({"ampkit_tests::scaled": "keep"})
    assert kept.explain("ampkit_tests::scaled").rule is Rule.KEEP


@pytest.mark.parametrize("policy", [Policy.default("cpu"), Policy.torch("cpu")], ids=["default", "torch"])
def test_a_librarys_own_autocast_holds_where_no_rule_names_the_operator(policy):
    """Also once another policy of the process has named it."""
    name = f"ampkit_tests::low_{policy.base}"

    @torch.library.custom_op(name, mutates_args=())
    def low(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    torch.library.register_autocast(name, "cpu", BF16)
    dtypes = []
    for region_policy in (policy, policy.with_rules({name: "float32"}), policy):
        with autocast("cpu", policy=region_policy):
            dtypes.append(low(torch.ones(2)).dtype)
    assert dtypes == [BF16, FP32, BF16]


def test_keyword_only_tensors_follow_the_rule():
    torch.library.define("ampkit_tests::blend", "(Tensor x, *, Tensor other) -> Tensor")
    torch.library.impl("ampkit_tests::blend", "cpu", lambda x, *, other: torch.stack([x, other.to(x.dtype)]))
    blend = torch.ops.ampkit_tests.blend
    half, single = torch.ones(2, dtype=BF16), torch.ones(2)
    for rule, x, other, expected in (
        ("lower", single, single, BF16),
        ("float32", half, half, FP32),
        ("promote", half, single, FP32),
        ("promote", half, half, BF16),
        ("keep", half, single, BF16),
    ):
        register_op(blend, rule)
        with autocast("cpu"):
            assert blend(x, other=other).dtype is expected
