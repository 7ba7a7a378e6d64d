"""Rules for modules in regions: which modules follow them, which rule wins, and regions around and inside them."""

import contextlib
import copy
import functools
import gc
import io
import pickle
import weakref
from collections import Counter
from unittest.mock import Mock

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from ampkit import Policy, autocast
from tests.helpers.module_rules import ALL, Block, Model, X, dtypes, only, rules
from tests.helpers.regions import BF16, FP16, FP32


@pytest.mark.parametrize(
    ("pattern", "bound"),
    [
        ("head", {"head"}),
        ("blocks.*.attn", {"blocks.0.attn", "blocks.1.attn"}),
        ("*", ALL),  # of `blocks`, a list that is never called, its modules
        (Block, ALL - {"head"}),
        (nn.Module, ALL),
    ],
)
def test_keys(pattern, bound):
    model = Model()
    assert dtypes(model, rules(model, {pattern: FP32})) == only(*bound)


def test_what_beats_what():
    class Special(nn.Linear):
        pass

    model = Model()
    model.head = Special(4, 4)
    policy = rules(model, {nn.Linear: FP32, Special: FP16, "blocks.*.attn": FP16, model.blocks[0].attn: BF16})
    assert dtypes(model, policy) == only(*ALL) | {"head": FP16, "blocks.0.attn": BF16, "blocks.1.attn": FP16}


LOWERS, WIDENS = Policy.default("cpu"), Policy.default("cpu").with_rules({"aten::linear": "float32"})


@pytest.mark.parametrize("inner", [BF16, FP32, LOWERS, WIDENS])
@pytest.mark.parametrize("outer", [FP32, FP16, WIDENS])
def test_inside_each_other_the_innermost_wins(outer, inner):
    """A dtype is that of a region with the operators' rules around it; a policy has the dtype around it."""
    model = Model()
    found = dtypes(model, rules(model, {"blocks.0": outer, "blocks.0.mlp": inner}))
    mlp = {BF16: FP32 if outer is WIDENS else BF16, LOWERS: FP16 if outer is FP16 else BF16}.get(inner, FP32)
    assert found == only() | {"blocks.0.attn": FP32 if outer is WIDENS else outer, "blocks.0.mlp": mlp}


def test_float32_computes_all_of_a_module_in_float32():
    """Its inputs are cast, by position, by name and in containers; autocast is off inside."""

    class Squares(nn.Module):
        def forward(self, x, *, more, skip=None):
            seen.update(x=x * x, more=more["h"][0] * 2, mm=x @ x, skip=skip, on=torch.is_autocast_enabled("cpu"))
            return x

    seen, net, half = {}, nn.Sequential(Squares()), torch.ones(2, 2, dtype=BF16)
    with autocast("cpu", policy=rules(net, {"0": FP32})):
        net[0](half, more={"h": [half.half()]}, skip=half.double())
        assert (half @ half).dtype is BF16
    assert [seen[name].dtype for name in ("x", "more", "mm", "skip")] == [FP32, FP32, FP32, torch.float64]
    assert seen["on"] is False


class Recursive(nn.Linear):
    """Calls itself, then computes."""

    def forward(self, x, n=2):
        return torch.softmax(super().forward(self(x, n - 1) if n else x), -1)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_rule_holds_after_a_module_has_called_itself(backend):
    model = nn.Sequential(Recursive(4, 4))
    call = model if backend is None else torch.compile(lambda x: model(x), backend=backend)
    with autocast("cpu", policy=rules(model, {"0": Policy.torch("cpu")})):
        assert call(X).dtype is BF16


def test_rules_add_up():
    model, other = Model(), Model()
    policy = rules(model, {"head": FP32}).for_modules(model, {"blocks.*.attn": FP16}).for_modules(other, {Block: FP32})
    policy = policy.with_rules({"aten::gelu": "float32"})
    assert dtypes(model, policy) == only("head") | {"blocks.0.attn": FP16, "blocks.1.attn": FP16}
    assert dtypes(other, policy) == only(*ALL - {"head"})


class Checkpointed(nn.Sequential):
    """Runs each of its modules in a checkpoint of its own."""

    def __init__(self, reentrant, *modules):
        super().__init__(*modules)
        self.checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)

    def forward(self, x):
        for module in self:
            x = self.checkpoint(module, x)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_recompute_follows_the_rules_of_its_forward(whole, reentrant):
    layers, seen = [nn.Linear(4, 4) for _ in range(5)], []
    first, *inner, third, last = layers
    modules = first, nn.Sequential(*inner), third, last
    model = Checkpointed(reentrant, nn.Sequential(*modules)) if whole else Checkpointed(reentrant, *modules)
    for n, layer in enumerate(layers):  # a recompute may stop before the hooks after a module
        layer.register_forward_pre_hook(lambda _, args, n=n: seen.append((n, args[0].dtype)))
    with autocast("cpu", BF16, policy=rules(model, {modules[1]: FP32})):
        loss = model(X.clone().requires_grad_()).sum()
    loss.backward()
    assert Counter(seen) == dict.fromkeys(enumerate([FP32, FP32, FP32, FP32, BF16]), 2)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("compiled_first", [False, True])
def test_a_recompute_inside_a_module_with_a_policy(reentrant, compiled_first):
    on, layer = [], nn.Linear(4, 4)
    layer.register_forward_pre_hook(lambda *_: on.append(torch.is_autocast_enabled("cpu")))
    model, x = nn.Sequential(Checkpointed(reentrant, layer)), X.clone().requires_grad_()
    policy = rules(model, {"0": WIDENS, layer: FP32})
    if compiled_first:
        torch.compile(lambda x: autocast("cpu", BF16, policy=policy)(lambda x: -x)(x), backend="eager")(x)
    with autocast("cpu", BF16, policy=policy):
        loss = model(x).sum()
    loss.backward()
    assert on == [False, False]


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt, SystemExit])
def test_exceptions_leave_every_region(error):
    model = Model()
    model.head.forward = Mock(side_effect=error)
    with pytest.raises(error), autocast("cpu", policy=rules(model, {"head": FP32, model: FP16})):
        model(X)


@pytest.mark.parametrize("where", ["forward", "pre-hook", "hook"])
def test_an_exception_caught_inside_the_region(where):
    model, fail = Model(), Mock(side_effect=LookupError)
    model.fails = nn.Sequential(nn.Identity())
    if where == "forward":
        model.fails[0].forward = fail
    else:
        (model.fails[0].register_forward_hook if where == "hook" else model.fails[0].register_forward_pre_hook)(fail)

    def call(x):
        with contextlib.suppress(LookupError):
            model.fails(x)
        return model(x)

    policy = rules(model, {"fails": FP16, "fails.0": FP32, "head": FP32})
    assert dtypes(model, policy, call) == only("head")


@pytest.mark.parametrize("region", [autocast, torch.autocast])
def test_a_disabled_region_has_no_module_rules(region):
    model = Model()
    with autocast("cpu", policy=rules(model, {"head": FP16})):
        with region("cpu", enabled=False):
            assert model.head(X).dtype is FP32
        assert model.head(X).dtype is FP16


def test_an_inner_region_with_another_policy_has_that_policys_rules():
    model = Model()
    with autocast("cpu", policy=rules(model, {"head": FP32})):
        assert dtypes(model, Policy.default("cpu")) == only()
        assert dtypes(model, rules(model, {"blocks.0": FP32})) == only("blocks.0.attn", "blocks.0.mlp")
        assert dtypes(model, None) == only("head")
        with autocast("cuda:0"):
            assert dtypes(model, None) == only("head")


# Copies, pickles, and models that are gone


def test_a_copy_follows_the_rules_of_its_original_until_it_has_its_own():
    model = Model()
    policy = rules(model, {model.head: FP32, "blocks.1": LOWERS, model.blocks[1].mlp: FP16})
    expected = only("head") | {"blocks.1.mlp": FP16}
    copied = copy.deepcopy(model)
    its_policy, another = copy.deepcopy((policy, copied))
    pickled = pickle.loads(pickle.dumps(model))
    for each in (model, copied, another, copy.deepcopy(copied), pickled):
        assert dtypes(each, its_policy) == expected
    both = policy.for_modules(copied, {"head": FP16})
    assert dtypes(copied, both) == expected | {"head": FP16}
    assert dtypes(model, both) == dtypes(model, policy) == dtypes(copied, policy) == expected
    assert rules(model, {"head": FP32}) != rules(copied, {"head": FP32})


def test_a_bound_model_is_copied_saved_and_scripted_as_before():
    model, again = Model(), io.BytesIO()
    state_dict = model.state_dict()
    policy = rules(model, {"head": FP32, nn.LayerNorm: FP16})
    assert dtypes(model, policy) == only("head")
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert list(model.state_dict()) == list(state_dict)
    torch.save(model, again)
    assert b"ampkit.autocast" not in again.getvalue()
    assert b"ampkit.policy" not in again.getvalue()
    torch.jit.script(nn.Sequential(model.head))(X)


def test_a_policy_keeps_no_model_alive():
    model = Model()
    policy, gone = rules(model, {"head": FP32}), weakref.ref(model)
    other = rules(Model(), {"head": FP32})
    assert dtypes(model, policy) == only("head")
    del model
    gc.collect()
    assert gone() is None
    assert policy == copy.deepcopy(policy)
    assert policy != other
    assert hash(policy) == hash(copy.copy(policy))
    assert str(policy.check()) == "'head': torch.float32: head; removed: head"
    assert policy.to_dict()["modules"] == [["head", "float32"]]
    model = Model()
    assert dtypes(model, policy.for_modules(model, {"head": FP32})) == only("head")


def test_rules_are_found_by_their_text_after_equal_ones_are_gone():
    """Graphs hold a policy as its text, and module rules in it as a number that equal rules share."""
    model = nn.Sequential(nn.Linear(2, 2))
    policy = Policy.default("cpu").for_modules(model, {"0": torch.float32})
    equal = Policy.from_dict(policy.to_dict(), model)
    assert equal == policy
    del equal
    gc.collect()
    assert Policy.from_text(policy.text).modules == policy.modules
