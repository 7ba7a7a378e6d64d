"""Rules by module: by path, by class, by instance; what goes over what; and regions as modules run."""

import contextlib
import copy

import pytest
import torch
import torch.package
from torch import nn
from torch.nn.modules import module as hooked
from torch.utils.checkpoint import checkpoint

from ampkit import Policy, autocast
from ampkit.policy.module_paths import path_of
from tests.helpers.module_rules import ALL, Block, Model, X, dtypes, only, rules
from tests.helpers.regions import BF16, FP16, FP32, state


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("head", {"head"}),
        ("blocks.1.mlp", {"blocks.1.mlp"}),
        ("blocks.*.attn", {"blocks.0.attn", "blocks.1.attn"}),
        ("blocks.0", {"blocks.0.attn", "blocks.0.mlp"}),
        ("blocks.*", ALL - {"head"}),
        ("**.mlp", {"blocks.0.mlp", "blocks.1.mlp"}),
        ("**", ALL),
        ("*", {"head"}),
        ("blocks.*.m*", {"blocks.0.mlp", "blocks.1.mlp"}),
        ("**.head", {"head"}),
        ("blocks.**.mlp", {"blocks.0.mlp", "blocks.1.mlp"}),
        ("blocks.**", ALL - {"head"}),
    ],
)
def test_paths(pattern, meant):
    assert dtypes(Model(), rules({pattern: FP32})) == only(*meant)


@pytest.mark.parametrize("pattern", ["mlp", "Head"])
def test_paths_that_there_are_not(pattern):
    with pytest.warns(UserWarning, match=f"the pattern '{pattern}' of for_modules means no module of Model"):
        assert dtypes(Model(), rules({pattern: FP32})) == only()


def test_classes():
    assert dtypes(Model(), rules({nn.Linear: FP32})) == only(*ALL)
    assert dtypes(Model(), rules({Block: "float32"})) == only(*ALL - {"head"})
    assert dtypes(Model(), rules({nn.Conv2d: FP32})) == only()
    assert dtypes(Model(), rules({nn.Module: FP32})) == only(*ALL)


def test_nearer_base_class_wins():
    class Special(nn.Linear):
        pass

    model = Model()
    model.head = Special(4, 4)
    assert dtypes(model, rules({nn.Linear: FP32, Special: FP16})) == only(*ALL - {"head"}) | {"head": FP16}


def test_instances():
    model = Model()
    assert dtypes(model, rules({model.head: FP32, model.blocks[1].mlp: "float32"})) == only("head", "blocks.1.mlp")
    assert dtypes(copy.deepcopy(model), rules({model.head: FP32})) == only()


def test_instance_over_path_over_class():
    model = Model()
    found = dtypes(model, rules({nn.Linear: FP32, "blocks.*.attn": FP16, model.blocks[0].attn: BF16}))
    assert found == only(*ALL) | {"blocks.0.attn": BF16, "blocks.1.attn": FP16}


def test_inner_rule_inside_an_outer_one():
    found = dtypes(Model(), rules({"blocks.0": FP32, "blocks.0.mlp": BF16}))
    assert found == only("blocks.0.attn")


def test_policy_for_a_module():
    keeps = Policy.default("cpu").with_rules({"aten::linear": "keep"})
    assert dtypes(Model(), rules({"head": keeps})) == only("head")
    inner = keeps.for_modules({"mlp": FP16}).with_rules({"aten::linear": "lower"})
    with pytest.warns(UserWarning, match="the pattern 'mlp' of for_modules means no module of Model"):
        found = dtypes(Model(), rules({"blocks.0": inner}))
    assert found == only(), "its paths count from the outermost module as well"
    inner = keeps.for_modules({"blocks.0.attn": FP16}).with_rules({"aten::linear": "lower"})
    assert dtypes(Model(), rules({"blocks.0": inner})) == only() | {"blocks.0.attn": FP16}


def test_float32_takes_in_low_precision():
    """A float32 island alone would meet bfloat16 input with float32 weights."""
    with autocast("cpu", policy=rules({"1": FP32})):
        assert nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))(X).dtype is FP32


def test_gradients_flow_through_mixed_modules():
    model = Model()
    with autocast("cpu", policy=rules({"blocks.0": FP32, "head": FP16})):
        loss = model(X).float().pow(2).sum()
    loss.backward()
    assert all(p.grad.dtype is FP32 for p in model.parameters())
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_rules_add_up():
    policy = rules({"head": FP32}).for_modules({"blocks.*.attn": FP16}).with_rules({"aten::gelu": "float32"})
    assert dtypes(Model(), policy) == only("head") | {"blocks.0.attn": FP16, "blocks.1.attn": FP16}


@pytest.mark.parametrize("run", ["a submodule", "twice", "nested region"])
def test_paths_count_from_the_outermost_module_called(run):
    model = Model()
    policy = rules({"attn": FP32})
    if run == "a submodule":
        assert dtypes(model, policy, model.blocks[0])["blocks.0.attn"] is FP32
    elif run == "twice":
        found = dtypes(model, policy, lambda x: (model(x), model.blocks[1](x)))
        assert (found["blocks.0.attn"], found["blocks.1.attn"]) == (BF16, FP32)
    else:
        with autocast("cpu", policy=policy):
            assert dtypes(model, None, model.blocks[0])["blocks.0.attn"] is FP32


def test_what_torch_wraps_around_a_module_is_not_counted():
    model = nn.DataParallel(Model())
    assert {n.removeprefix("module."): d for n, d in dtypes(model, rules({"head": FP32})).items()} == only("head")
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Model()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    found = dtypes(model, rules({"blocks.0.mlp": FP32}))
    assert {n.replace("_checkpoint_wrapped_module.", ""): d for n, d in found.items()} == only("blocks.0.mlp")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("run", [checkpoint])
@pytest.mark.parametrize("whole", [True])       # paths of a part would count from it: rules that bind to a model will not
def test_a_recompute_follows_the_rules_of_its_forward(whole, run, reentrant):
    class Checkpointed(Model):
        def forward(self, x):
            for block in self.blocks:
                x = run(block, x, use_reentrant=reentrant)
            return run(self.head, x, use_reentrant=reentrant)

    model = Model() if whole else Checkpointed()
    seen = {name: [] for name in ("blocks.0.mlp", "blocks.1.mlp", "head")}
    for name, found in seen.items():
        model.get_submodule(name).register_forward_pre_hook(
            lambda *_, found=found: found.append(torch.get_autocast_dtype("cpu"))
        )
    x = X.clone().requires_grad_()
    with autocast("cpu", policy=rules({"head": FP32, "blocks.1": FP32})):
        loss = (run(model, x, use_reentrant=reentrant) if whole else model(x)).sum()
    before = state()
    loss.backward()
    assert seen == {"blocks.0.mlp": [BF16] * 2, "blocks.1.mlp": [FP32] * 2, "head": [FP32] * 2}
    assert state() == before
    assert not hooked._global_forward_pre_hooks


def test_an_interrupted_recompute_leaves_the_regions_of_modules():
    model, before = Model(), state()
    with autocast("cpu", policy=rules({"head": FP32})):
        loss = checkpoint(model, X, use_reentrant=False).sum()

    def interrupt(*_):
        raise KeyboardInterrupt

    model.head.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert state() == before
    assert not hooked._global_forward_pre_hooks


def test_modules_that_change_place():
    model = Model()
    policy = rules({"head": FP32})
    assert dtypes(model, policy) == only("head")
    model.head, model.blocks[0].mlp = model.blocks[0].mlp, model.head
    assert dtypes(model, policy) == only("head")
    for _ in range(20):
        model.blocks[0].attn = nn.Linear(4, 4)
        model.head = nn.Linear(4, 4)
        assert dtypes(model, policy) == only("head")
    model.tail, model.head = model.head, nn.Identity()
    assert path_of(model, model.tail) == "tail"


def test_shared_module_has_its_first_name():
    model = Model()
    model.head = model.blocks[0].mlp
    assert path_of(model, model.head) == "blocks.0.mlp"
    assert path_of(model, model) == ""
    assert path_of(model, nn.ReLU()) == "ReLU"


def test_module_that_calls_itself():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, depth=2):
            return self(x, depth - 1) if depth else self.layer(x)

    assert dtypes(Recursive(), rules({"layer": FP32})) == {"layer": FP32}
    assert dtypes(Recursive(), rules({Recursive: FP32})) == {"layer": FP32}


class Fails(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt, SystemExit])
def test_exceptions_leave_every_region(error):
    before = state()
    model = nn.Sequential(nn.Sequential(Fails(error)))
    with pytest.raises(error):
        with autocast("cpu", policy=rules({Fails: FP32, "0": FP16})):
            model(X)
    assert state() == before
    assert not nn.modules.module._global_forward_hooks


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_exceptions_caught_inside_the_region(error):
    """Whoever catches them inside goes on in the outer region, with paths counted afresh."""
    class Catches(Model):
        def forward(self, x):
            with contextlib.suppress(error):
                self.fails(x)
            return super().forward(x)

    model = Catches()
    model.fails = Fails(error)
    policy = rules({"fails": FP16, "head": FP32})
    with autocast("cpu", policy=policy):
        with pytest.raises(error):
            model.fails(X)
    for _ in range(2):
        assert dtypes(model, rules({"head": FP32})) == only("head")
        assert dtypes(model, policy) == only("head")
    assert torch.is_autocast_enabled("cpu") is False


def test_hooks_are_there_only_while_needed():
    assert not nn.modules.module._global_forward_pre_hooks
    with autocast("cpu", policy=rules({"head": FP32})):
        assert len(nn.modules.module._global_forward_pre_hooks) == 1
        with autocast("cpu"), autocast("cpu", policy=rules({"head": FP16})):
            assert len(nn.modules.module._global_forward_pre_hooks) == 1
    assert not nn.modules.module._global_forward_pre_hooks
    with autocast("cpu"):
        assert not nn.modules.module._global_forward_pre_hooks


def test_island_has_no_module_rules():
    model = Model()
    with autocast("cpu", policy=rules({"head": BF16})):
        with autocast("cpu", enabled=False):
            assert model(X).dtype is FP32


def test_island_of_torch_has_no_module_rules():
    class HasIsland(Model):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                x = self.head(x)
            return super().forward(x)

    model, seen = HasIsland(), []
    model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with autocast("cpu", policy=rules({"head": FP16})):
        model(X)
    assert seen == [FP32, FP16]


def test_inner_region_with_another_policy_has_that_policys_rules():
    model = Model()
    with autocast("cpu", policy=rules({"head": FP32})):
        assert dtypes(model, Policy.default("cpu")) == only()
        assert dtypes(model, rules({"blocks.0": FP32})) == only("blocks.0.attn", "blocks.0.mlp")
        assert dtypes(model, None) == only("head")
        with autocast("cuda:0"):
            assert dtypes(model, None) == only("head")


def test_inner_region_counts_paths_from_where_the_outer_one_does():
    class Opens(Model):
        @autocast("cpu", policy=rules({"head": FP32}))
        def forward(self, x):
            with autocast("cpu", FP16):
                return self.head(super().forward(x))

    assert Opens()(X).dtype is FP32
    assert nn.Sequential(Opens())(X).dtype is FP32


def test_inner_region_with_other_rules_counts_paths_from_the_outermost_module_called_in_it():
    class Opens(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x):
            with autocast("cpu", policy=rules({"0": FP16})):
                return self.layers(x)

    for outer in (Policy.default("cpu"), rules({nn.LayerNorm: FP32})):
        with autocast("cpu", policy=outer):
            assert Opens()(X).dtype is FP16
