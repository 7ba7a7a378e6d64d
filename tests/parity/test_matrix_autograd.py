"""Regions beside autograd's other faces: grad modes, double backward, hooks, anomalies, checkpoints.
"""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit import Policy, Rule
from tests.helpers.matrix import QUIET, Net, Program, Programs, Region, gradients

PROGRAMS = Programs()
pytestmark = QUIET


@PROGRAMS.add
def no_grad_first_then_training(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6)
    with region():
        with torch.no_grad():
            evaluated = model(x)
        out = model(x)
    out.float().sum().backward()
    return evaluated, out, gradients(model)


@PROGRAMS.add
def inference_mode_first_then_training(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6)
    with region():
        with torch.inference_mode():
            evaluated = model(x)
        out = model(x)
    assert evaluated.is_inference()
    out.float().sum().backward()
    return evaluated.clone(), out, gradients(model)


@PROGRAMS.add
def region_in_inference_mode(region: Region) -> Any:
    model = Net()
    with torch.inference_mode():
        x = torch.randn(4, 6)
        with region():
            return model(x)


@PROGRAMS.add
def model_made_in_inference_mode(region: Region) -> Any:
    with torch.inference_mode():
        model, x = Net(), torch.randn(4, 6)
        with region():
            return model(x), model(x)


@PROGRAMS.add
def double_backward_inside(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6, requires_grad=True)
    with region():
        out = model(x).float().pow(2).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.norm()).backward()
    return slope, x.grad, gradients(model)


@PROGRAMS.add
def double_backward_outside(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6, requires_grad=True)
    with region():
        out = model(x)
    (slope,) = torch.autograd.grad(out.float().pow(2).sum(), x, create_graph=True)
    (out.float().sum() + slope.norm()).backward()
    return slope, x.grad, gradients(model)


@PROGRAMS.add
def gradient_penalty(region: Region) -> Any:
    """Gradient outside the region, its penalty inside: torch's own recipe."""
    model, x = Net(), torch.randn(4, 6)
    with region():
        loss = model(x).float().pow(2).sum()
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    with region():
        penalty = sum((slope.pow(2).sum() for slope in slopes), loss.new_zeros(())).sqrt()
        loss = loss + penalty
    loss.backward()
    return loss, gradients(model)


@PROGRAMS.add_where_torch_fails("expected m1 and m2 to have the same dtype")
def forward_mode_ad(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with region():
            out = model(dual)
        return list(torch.autograd.forward_ad.unpack_dual(out))


@PROGRAMS.add
def batched_gradients(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6, requires_grad=True)
    with region():
        out = model(x).float().sum(0)
        return torch.autograd.grad(out, x, torch.eye(3), is_grads_batched=True)


@PROGRAMS.add
def anomaly_mode(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
        with torch.autograd.detect_anomaly(), region():
            out = model(x).float().sum()
            out.backward()
    return out, gradients(model)


@PROGRAMS.add
def partly_frozen(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6)
    model.enter.requires_grad_(False)
    with region():
        out = model(x)
        model.enter.requires_grad_(True)
        again = model(x)
    (out + again).float().sum().backward()
    return out, again, gradients(model)


@PROGRAMS.add
def hooks_of_every_kind(region: Region) -> Any:
    model, x, seen = Net(), torch.randn(4, 6), []

    def keep(*values: Any) -> None:
        seen.extend(v.detach().clone() for v in tree_leaves(values) if isinstance(v, Tensor))

    model.enter.register_forward_pre_hook(lambda module, args: keep(args))
    model.enter.register_forward_hook(lambda module, args, out: keep(args, out))
    model.norm.register_full_backward_pre_hook(lambda module, grad: keep(grad))
    model.norm.register_full_backward_hook(lambda module, grad_in, grad_out: keep(grad_in, grad_out))
    model.leave.weight.register_hook(lambda grad: keep(grad))
    model.enter.weight.register_post_accumulate_grad_hook(lambda p: keep(p.grad))
    with region():
        out = model(x)
        out.register_hook(lambda grad: 2 * grad)
        hidden = out.float()
    assert out.grad_fn is not None
    out.grad_fn.register_prehook(lambda grads: keep(grads))
    hidden.sum().backward()
    return out, seen, gradients(model)


@PROGRAMS.add
def saved_tensor_hooks(region: Region) -> Any:
    """What autograd saves is packed by the user, in whatever dtype the casts have given it."""
    model, x, packed = Net(), torch.randn(4, 6), []

    def pack(value: Tensor) -> Tensor:
        packed.append(value.detach().clone())
        return value.clone()

    with saved_tensors_hooks(pack, lambda value: value), region():
        out = model(x)
    out.float().sum().backward()
    return out, packed, gradients(model)


@PROGRAMS.add
def saved_on_cpu(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6)
    with region(), save_on_cpu():
        out = model(x)
    out.float().sum().backward()
    return out, gradients(model)


@PROGRAMS.add
def parameters_and_casts_with_own_hooks(region: Region) -> Any:
    """A hook on the weight fires once, with the gradient of both uses of its cached cast."""
    model, x, seen = nn.Linear(6, 6), torch.randn(4, 6), []
    model.weight.register_hook(lambda grad: seen.append(grad.clone()))
    with region():
        out = model(model(x))
    out.float().sum().backward()
    assert len(seen) == 1
    return out, seen, gradients(model)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_have_torchs_bits(program: Program) -> None:
    program.check_bits()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_under_the_default_policy_stay_near_float32(program: Program) -> None:
    program.check_near_float32()


def test_reentrant_checkpoints_recompute_under_the_policy_of_their_forward() -> None:
    """And not under the policy of whoever calls backward, nor torch's list."""
    kept = Policy.default("cpu").with_rules({"aten::linear": Rule.FLOAT32})
    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(3, 6)
    seen = []

    def function(x: Tensor) -> Tensor:
        out = F.linear(x, w)
        seen.append(out.dtype)
        return out

    with ampkit.autocast("cpu", policy=kept):
        out = checkpoint(function, x, use_reentrant=True)
    with ampkit.autocast("cpu"):
        out.sum().backward()
    assert seen == [torch.float32] * 2
    seen.clear()
    out = checkpoint(function, x, use_reentrant=True)
    with ampkit.autocast("cpu", policy=kept):
        out.sum().backward()
    assert seen == [torch.float32] * 2
