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


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, width)      # registered before what it comes after
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q @ k.mT).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.n2 = nn.LayerNorm(width)
        self.n1 = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Transformer(nn.Module):
    """Registered backwards in part, with an embedding that the head shares and a parameter of its own."""

    def __init__(self, *, tied: bool = False, recompute: str | None = None) -> None:
        super().__init__()
        self.head = nn.Linear(6, 10, bias=False)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.embed = nn.Embedding(10, 6)
        self.norm = nn.LayerNorm(6)
        self.gain = nn.Parameter(torch.ones(6))
        self.recompute = recompute
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(self.norm(x) * self.gain)


MODELS = {
    "transformer": (Transformer, lambda: torch.arange(8).view(2, 4)),
    "recomputed": (lambda: Transformer(recompute="frames"), lambda: torch.arange(8).view(2, 4)),
}
PLACES = [
    (name, path, end)
    for name, (model, _) in MODELS.items()
    for path, module in model().named_modules()
    if next(module.parameters(recurse=False), None) is not None and path
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


@pytest.mark.parametrize(("name", "path", "end"), PLACES, ids=str)
def test_the_origin_is_where_hooks_see_the_first_bad_gradient(name: str, path: str, end: str) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = GradScaler("cpu", 1.0)
    step(scaler, model, optimizer, inputs())    # the first one is taken: what was learnt then is used later
    explode(model.get_submodule(path), end)
    seen = watched(model)
    step(scaler, model, optimizer, inputs())
    report = scaler.overflow_report()
    bad = [module for module, finite in seen if not finite]
    assert len(report) == len(bad)
    if not bad:     # the first layer's input is no parameter
        return
    before = [module for module, _ in seen[: seen.index((bad[0], False))]]
    assert report.first_bad == (bad[0],)
    assert report.finite_down_to == (before[-1] if before else None)
    assert report.ordered_by == "backward"
    if end == "output":
        assert report.first_bad == (path,)


def test_the_report_reads_from_the_origin() -> None:
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = GradScaler("cpu", 1.0)
    explode(model.blocks[1].attn.out, "output")
    step(scaler, model, optimizer, torch.arange(8).view(2, 4))
    headline, bias, weight, behind = str(scaler.overflow_report()).splitlines()
    assert headline == "finite down to blocks.1.n2; first bad: blocks.1.attn.out"
    assert bias == "  blocks.1.attn.out.bias: 6 inf, 0 NaN of 6 (float32)"
    assert weight.startswith("  blocks.1.attn.out.weight: ")
    assert behind == (
        "  behind it 17 more: blocks.1.attn.qkv, blocks.1.n1, blocks.0.mlp.2, blocks.0.mlp.0, blocks.0.n2, "
        "blocks.0.attn.out and 3 more"
    )


def tied_step(**plant) -> str:
    torch.manual_seed(0)
    model = Transformer(tied=True)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = GradScaler("cpu", 1.0)
    if "path" in plant:
        explode(model.get_submodule(plant["path"]), "output")
    else:
        plant_nonfinite(model.head.weight, 1)
    step(scaler, model, optimizer, torch.arange(8).view(2, 4))
    return str(scaler.overflow_report()).splitlines()[0]


def test_a_shared_weight_is_named_where_it_may_be_the_origin() -> None:
    # bad at the head: the head's weight, which the embedding has too, comes before everything
    assert tied_step(path="head") == "no gradient was finite before head, gain: it began there, or in the loss"
    # bad in the middle: it is bad as the embedding's, far behind the origin
    assert tied_step(path="blocks.2.n2") == "finite down to blocks.2.mlp.0; first bad: blocks.2.n2"
    assert tied_step() == "finite down to blocks.0.n1; first bad: head"


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
    assert list(uses_of_leaves([leaf.double()])) == [id(leaf)]
    assert uses_of_leaves([leaf]) == {}
    assert uses_of_leaves([leaf * leaf * leaf], most_nodes=2) == {}


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
