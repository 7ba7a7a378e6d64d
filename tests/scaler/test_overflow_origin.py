"""Where an overflow began: reports against what hooks saw while backward ran."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampkit import autocast
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.torch_internals.autograd_graph import uses_of_leaves
from tests.helpers.faults import plant_nonfinite


def exploding(x: torch.Tensor) -> torch.Tensor:
    """The same values, whose gradient is inf."""
    x = x.clone()
    if x.requires_grad:
        x.register_hook(lambda grad: torch.full_like(grad, float("inf")))
    return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 6)      # registered before what it comes after
        self.inner = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return x + self.out(self.inner(self.norm(x)).relu())


class Net(nn.Module):
    """Registered backwards in part, with an embedding that the head may share and a parameter of its own."""

    def __init__(self, *, tied: bool = False, recomputed: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(6, 10, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.embed = nn.Embedding(10, 6)
        self.gain = nn.Parameter(torch.ones(6))
        self.recomputed = recomputed
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return self.head(x * self.gain)


TOKENS = torch.arange(8).view(2, 4)
PLACES = [
    (path, end)
    for path, module in Net().named_modules()
    if path and next(module.parameters(recurse=False), None) is not None
    for end in ("output", "input")
    if (path, end) != ("embed", "input")
]


def explode(module: nn.Module, end: str) -> None:
    """Let the gradient of a module's output or input be inf from now on."""
    if end == "output":
        module.register_forward_hook(lambda module, args, output: exploding(output))
    else:
        module.register_forward_pre_hook(lambda module, args: (exploding(args[0]),))


def module_of(name: str) -> str:
    return name.rpartition(".")[0] or name


def watched(model: nn.Module) -> list[tuple[str, bool]]:
    """The module of each gradient as it arrives, and whether it is finite."""
    seen: list[tuple[str, bool]] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(
            lambda param, name=name: seen.append((module_of(name), bool(param.grad.isfinite().all())))
        )
    return seen


def step(scaler: GradScaler, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.bfloat16):
        loss = model(inputs).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(("path", "end"), PLACES, ids=str)
def test_the_origin_is_where_hooks_see_the_first_bad_gradient(path: str, end: str, recomputed: bool) -> None:
    torch.manual_seed(0)
    model = Net(recomputed=recomputed)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = GradScaler("cpu", 1.0)
    step(scaler, model, optimizer, TOKENS)      # the first one is taken: what was learnt then is used later
    explode(model.get_submodule(path), end)
    seen = watched(model)
    step(scaler, model, optimizer, TOKENS)
    report = scaler.overflow_report()
    bad = [module for module, finite in seen if not finite]
    assert len(report) == len(bad)
    before = [module for module, _ in seen[: seen.index((bad[0], False))]]
    assert report.first_bad == (bad[0],)
    assert report.finite_down_to == (before[-1] if before else None)
    assert report.ordered_by == "backward"
    assert end == "input" or report.first_bad == (path,)


def test_the_report_reads_from_the_origin() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = GradScaler("cpu", 1.0)
    explode(model.blocks[2].out, "output")
    step(scaler, model, optimizer, TOKENS)
    headline, bias, weight, behind = str(scaler.overflow_report()).splitlines()
    assert headline == "finite down to gain; first bad: blocks.2.out"
    assert bias == "  blocks.2.out.bias: 6 inf, 0 NaN of 6 (float32)"
    assert weight.startswith("  blocks.2.out.weight: ")
    assert behind == (
        "  behind it 17 more: blocks.2.inner, blocks.2.norm, blocks.1.out, blocks.1.inner, blocks.1.norm, blocks.0.out "
        "and 3 more"
    )


def test_a_shared_weight_is_named_where_it_may_be_the_origin() -> None:
    """The head's, which the embedding has too: listed at its last use, and beside an origin that its first may be."""
    for bad, said in (
        ("head", "no gradient was finite before head, gain: it began there, or in the loss"),
        ("blocks.1.out", "finite down to blocks.2.norm; first bad: blocks.1.out"),      # it is bad as the embedding's
        (None, "finite down to blocks.0.norm; first bad: head"),
    ):
        torch.manual_seed(0)
        model = Net(tied=True)
        scaler = GradScaler("cpu", 1.0)
        if bad is None:
            plant_nonfinite(model.head.weight, 1)
        else:
            explode(model.get_submodule(bad), "output")
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        step(scaler, model, optimizer, TOKENS)
        assert str(scaler.overflow_report()).splitlines()[0] == said


@pytest.mark.parametrize("index", [0, 1, 3, 4])
def test_reentrant_checkpoints_hide_their_parameters_which_stand_where_they_are_registered(index: int) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = GradScaler("cpu", 1.0)
    explode(model[index], "output")
    hidden = checkpoint(model[1:4], model[0](torch.ones(1, 2)), use_reentrant=True)
    scaler.scale(model[4](hidden).sum()).backward()
    scaler.step(optimizer)
    assert scaler.overflow_report().first_bad == (str(index),)


def test_without_a_graph_the_order_of_registration_stands_in() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    scaler = GradScaler("cpu", 1.0)
    scaler.scale(torch.ones((), requires_grad=True))
    for index, layer in enumerate(model):
        for param in layer.parameters():
            param.grad = torch.full_like(param, float("inf") if index < 2 else 1.0)
    optimizer = torch.optim.SGD(reversed(list(model.parameters())), lr=0.1)
    scaler.step(optimizer)
    report = scaler.overflow_report(model)
    assert report.ordered_by == "registration"
    assert str(report).splitlines()[0] == (
        "finite down to 2; first bad: 1 (by the order in which parameters are registered)"
    )


def test_an_order_learned_for_parameters_that_are_gone_is_dropped() -> None:
    """Parameters are known by ids, which others may have later."""
    scaler = GradScaler("cpu", 1.0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    step(scaler, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 2))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    learned = list(scaler._order.uses.values())
    scaler._order.uses = dict(zip(map(id, model.parameters()), learned, strict=True))     # as if ids were used again
    for param in model.parameters():
        param.grad = torch.full_like(param, float("inf"))
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert scaler.overflow_report(model).ordered_by == "registration"


def test_compiled_code_is_one_step_of_backward() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = GradScaler("cpu", 1.0)
    for param in (*model[0].parameters(), *model[2].parameters()):
        plant_nonfinite(param, 1)
    step(scaler, torch.compile(model, backend="aot_eager"), optimizer, torch.ones(1, 2))
    report = scaler.overflow_report()
    assert (report.finite_down_to, report.first_bad, report.behind) == ("4", ("2",), ("0",))
    assert report.ordered_by == "registration"
    torch._dynamo.reset()


def test_a_half_bad_module_is_named_by_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", 1.0)
    plant_nonfinite(model[1].bias, 1)
    plant_nonfinite(model[0].weight, 1)
    step(scaler, model, optimizer, torch.ones(1, 2))
    assert str(scaler.overflow_report(model)).splitlines() == [
        "finite down to 1.weight; first bad: 1.bias",
        "  1.bias: 1 inf, 0 NaN of 2 (float32)",
        "  behind it 1 more: 0.weight",
    ]
    assert str(scaler.overflow_report()).splitlines() == [
        "no gradient was finite before group 0, parameter 3: it began there, or in the loss "
        "(by the order in which parameters are registered)",     # of a weight and its bias
        "  group 0, parameter 3: 1 inf, 0 NaN of 2 (float32)",
        "  behind it 1 more: group 0, parameter 0",
        "for names call overflow_report(model), or make the optimizer with model.named_parameters()",
    ]


def test_losses_that_are_casts_of_leaves_leaves_or_too_large() -> None:
    leaf = torch.ones((), requires_grad=True)
    found = uses_of_leaves([leaf.double()]), uses_of_leaves([leaf]), uses_of_leaves([leaf * leaf * leaf], most_nodes=2)
    assert [list(each) for each in found] == [[id(leaf)], [], []]


def test_graphs_are_looked_at_until_a_step_is_taken_and_after_one_was_skipped(monkeypatch) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", 1.0)
    looked = []
    monkeypatch.setattr("ampkit.scaler.overflow_report.uses_of_leaves", lambda losses: looked.append(1) or {})
    plant_nonfinite(model.weight, 3)
    counts = []
    for _ in range(6):
        step(scaler, model, optimizer, torch.ones(1, 2))
        counts.append(len(looked))
    assert counts == [1, 1, 1, 2, 2, 2]
