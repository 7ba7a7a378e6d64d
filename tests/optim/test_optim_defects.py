"""What torch's own fused step gets wrong on a CPU, default devices, and tensors without values."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from ampkit.optim import SGD, AdamW

FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "SGD": (SGD, torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD nesterov": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD dampening": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "AdamW": (AdamW, torch.optim.AdamW, {"lr": 0.01}),
    "AdamW amsgrad": (AdamW, torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
}


def steps(optimizer: Callable[..., Any], dtype: torch.dtype, options: dict[str, Any], compute: torch.dtype) -> Tensor:
    """The parameters after four steps from the same values of `dtype`, held in `compute`."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype).to(compute)) for n in (1, 16, 40, 1000)]
    one = optimizer(params, **options)
    for _ in range(4):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(dtype).to(compute)
        one.step()
    return torch.cat([param.detach() for param in params])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_fused_steps_on_a_cpu_update_every_element(form: str, dtype: torch.dtype) -> None:
    """torch's fused SGD leaves whole vectors of 16-bit parameters as they were."""
    ours, theirs, options = FORMS[form]
    got = steps(ours, dtype, {**options, "fused": True}, dtype)
    if ours is SGD:
        assert torch.equal(got, steps(theirs, dtype, options, dtype))
    else:
        yardstick = steps(theirs, dtype, {**options, "foreach": False}, torch.float64)
        assert ((got.double() - yardstick).abs() <= 8 * torch.finfo(dtype).eps * yardstick.abs().clamp(min=1.0)).all()


@pytest.mark.parametrize("fused", [False, True])
def test_momentum_may_begin_at_different_steps(fused: bool) -> None:
    """A parameter that had no gradient in the first steps, one of which is skipped."""
    ours = [torch.nn.Parameter(torch.ones(20)) for _ in range(2)]
    theirs = [torch.nn.Parameter(torch.ones(20)) for _ in range(2)]
    mine = SGD(ours, lr=0.5, momentum=0.9, dampening=0.3, fused=fused)
    other = torch.optim.SGD(theirs, lr=0.5, momentum=0.9, dampening=0.3)
    for i, skipped in enumerate((True, False, False, True, False)):
        for params in (ours, theirs):
            for param in params[: 1 if i < 2 else 2]:
                param.grad = torch.full((20,), 1.0 + i)
        mine.found_inf = torch.tensor(float(skipped))
        mine.step()
        if not skipped:
            other.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("impl", ["auto", "triton", "reference"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_default_device_changes_no_state(form: str, impl: str) -> None:
    """Every tensor that an optimizer makes is where its parameter is."""
    ours, _, options = FORMS[form]
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = ours([param], impl=impl, **options)
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(2.0)
    param.grad = torch.ones(3)
    with torch.device("meta"):
        optimizer.step()
        optimizer.step()
    assert all(value.device.type == "cpu" for value in optimizer.state[param].values())
    assert not torch.equal(param, torch.ones(3))


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("form", FORMS)
def test_steps_of_tensors_without_values(form: str, fused: bool | None) -> None:
    """FakeTensorMode, which sizes a training step without memory: nothing reads a value."""
    ours, theirs, options = FORMS[form]
    if ours is AdamW and not fused:
        pytest.skip("torch's AdamW reads its step counts, unless it is fused")
    states = []
    for optimizer in (ours, theirs):
        with FakeTensorMode():
            param = torch.nn.Parameter(torch.ones(20))
            one = optimizer([param], fused=fused, **options)
            if optimizer is ours:
                one.found_inf, one.grad_scale = torch.zeros(()), torch.tensor(2.0)
            for _ in range(2):
                param.grad = torch.ones(20)
                one.step()
        states.append({name: value.shape for name, value in one.state[param].items() if value is not None})
    assert states[0] == states[1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("form", FORMS)
def test_views_of_one_buffer_at_any_alignment(form: str) -> None:
    """A parameter that PyTorch steps is among them, and dampening: nothing is kept for the next step then."""
    ours, theirs, options = FORMS[form]
    results = []
    for optimizer, arguments in ((ours, {"impl": "triton"}), (theirs, {})):
        buffer = torch.zeros(32)
        params = [torch.nn.Parameter(buffer[i : i + 3]) for i in (0, 5, 12, 21)]
        params.append(torch.nn.Parameter(torch.zeros(2, 2)))
        one = optimizer(params, **options, **arguments)
        for step in range(3):
            for number, param in enumerate(params):
                param.grad = torch.full(param.shape, float((number - 1) * 3**number + step))
            params[-1].grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t()
            one.step()
        results.append([buffer, params[-1].detach()])
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_flags_of_momenta_after_loading(dtype: torch.dtype) -> None:
    """load_state_dict converts every entry of state to the parameter's dtype, the flag included."""
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "impl": "triton"}
    params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2)]
    first, loaded = (SGD([param], **options) for param in params)
    for step in range(4):
        for param in params:
            param.grad = torch.full_like(param, step + 1.0)
        first.found_inf = loaded.found_inf = torch.tensor(float(step == 0))   # a skipped step leaves the flag at 0
        first.step()
        loaded.step()
        loaded.load_state_dict(copy.deepcopy(first.state_dict()))
        assert torch.equal(*params)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("changes", [[{}, {"momentum": 0.0}, {}, {"momentum": 0.9}], [{}, {"dampening": 0.3}, {}]])
def test_nesterov_in_a_group_that_changes_is_torchs(changes: list[dict[str, Any]]) -> None:
    """torch looks at nesterov only where a group has momentum, and then with any dampening."""
    results = []
    for cls, arguments in ((SGD, {"impl": "triton"}), (torch.optim.SGD, {})):
        param = torch.nn.Parameter(torch.ones(3))
        optimizer: Any = cls([param], lr=0.1, momentum=0.9, nesterov=True, **arguments)
        for change in changes:
            optimizer.param_groups[0].update(change)
            param.grad = torch.ones(3)
            optimizer.step()
        results.append(param.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("optimizer", [SGD, AdamW])
@pytest.mark.parametrize("lazy", [lambda: torch._neg_view(torch.ones(3)), lambda: torch.ones(3).cfloat().conj()])
def test_parameters_that_are_lazily_negated_are_refused(optimizer: Callable[..., Any], lazy: Any) -> None:
    """A kernel writes memory, which holds the values with another sign."""
    param = torch.nn.Parameter(lazy())
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="lazily negated or conjugated view"):
        optimizer([param], lr=0.1, impl="triton").step()
    assert torch.equal(param, lazy())
