"""The warning for patterns of `for_modules` that mean no module: when it comes, where it points, when it does not."""

import pytest
import torch
from torch import nn

from ampkit import Policy, autocast, wrap_forward
from ampkit.region import unused_patterns
from ampkit.region.thread_state import thread

FP32 = torch.float32
X = torch.ones(2, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 2)
        self.spare = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x))


def rules(*keys):
    return Policy.default("cpu").for_modules(dict.fromkeys(keys, FP32))


def run(policy, *models):
    with autocast("cpu", policy=policy):
        for model in models:
            model(X)


def test_a_misspelt_name_is_told_once_where_the_region_is_left():
    net, policy = Net(), rules("haed", "body.*")
    with pytest.warns(UserWarning, match="'haed'") as caught:
        run(policy, net)
    run(policy, net)
    run(rules("body.*", "haed"), net)       # the same rules, made anew
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message) == (
        "the pattern 'haed' of for_modules means no module of Net, called in this region; nearest: head. Paths count "
        "from the outermost module called; policy.check(model) says what each pattern means"
    )


def test_a_path_from_a_wrapper_has_the_right_one_nearest():
    with pytest.warns(UserWarning, match=r"'net.head' .* no module of Net, called in this region; nearest: head\."):
        run(rules("net.head"), Net())


@pytest.mark.parametrize("keys", [
    ("spare",),                     # there, and not run
    ("**.head", "body.0"),
    (nn.Conv2d,),                   # a class, for whatever model
    ("body.**", nn.LayerNorm),
])
def test_rules_that_mean_something_are_silent(keys):
    run(rules(*keys), Net())


def test_a_module_of_another_model_is_silent():
    run(rules(nn.Linear(4, 4)), Net())


def test_models_called_in_one_region_are_looked_at_together():
    run(rules("head"), nn.Sequential(nn.Linear(4, 4)), Net())
    with pytest.warns(UserWarning, match="'tail' of for_modules means no module of Sequential, Net, called"):
        run(rules("tail"), nn.Sequential(nn.Linear(4, 4)), Net())


def test_regions_without_a_model_wait_for_one():
    policy = rules("haed")
    run(policy)
    with autocast("cpu", policy=policy):
        torch.mm(X, X.T)
        nn.MSELoss()(X, X)
    with pytest.warns(UserWarning, match="'haed'"):
        run(policy, Net())


def test_a_module_called_inside_counts_from_the_outermost():
    run(rules("body.0"), Net())
    with pytest.warns(UserWarning, match="'body.0' .* means no module of Sequential"):
        run(rules("body.0", "0"), Net().body)


def test_a_wrapped_forward_and_a_decorated_function():
    with pytest.warns(UserWarning, match="'haed' .* means no module of Net") as caught:
        wrap_forward(Net(), "cpu", torch.bfloat16, policy=rules("haed"))(X)
    assert caught[0].filename == __file__

    @autocast("cpu", policy=rules("haed", "*"))
    def step(net):
        return net(X)

    with pytest.warns(UserWarning, match="'haed' .* means no module of Net") as caught:
        step(Net())
    assert caught[0].filename == __file__


def test_where_warnings_are_errors_the_region_is_left_all_the_same():
    net = Net()
    with pytest.raises(UserWarning, match="'haed'"):    # as they are in this suite
        run(rules("haed"), net)
    assert not torch.is_autocast_enabled("cpu")
    assert thread.regions == thread.followed == thread.modules == []
    assert net(X).dtype is FP32
    run(rules("haed"), net)


def test_other_regions_do_not_ask(monkeypatch):
    asked = []
    monkeypatch.setattr("ampkit.region.module_hooks.warn_of_unused", lambda *args: asked.append(args))
    run(Policy.default("cpu"), Net())
    assert asked == []
    run(rules("head"), Net())
    assert asked


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(unused_patterns, "_MOST", 3)
    for name in "abcdefg":
        with pytest.warns(UserWarning, match=f"'{name}'"):
            run(rules(name), Net())
    assert len(unused_patterns._settled) <= 3
    assert len(unused_patterns._seen) <= 3
