"""What is measured: each job as ampkit does it and as torch does it, over one list of shapes.

The forms compared are the ones a training script gets: `unscale` is `GradScaler.unscale_`'s kernel work, `unscale +
clip` adds gradient clipping that rewrites the gradients, `clip + AdamW` is the whole way from scaled gradients to new
parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import ampkit_kernels as kernels

Job = Callable[[], object]
MAX_NORM = 1.0


@dataclass(frozen=True)
class Comparison:
    """One job on one list: ours first, then each of torch's forms."""

    job: str
    sides: dict[str, Job]
    elements: int


class Material:
    """Parameters and gradients of one list, and what optimizers keep for them."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.device = device
        self.params = [
            torch.nn.Parameter(torch.randn(shape, device=device, generator=generator)) for shape in shapes
        ]
        self.grads = [
            torch.randn(shape, device=device, generator=generator).to(dtype) * 1e-2 for shape in shapes
        ]
        if dtype is torch.float32:
            for param, grad in zip(self.params, self.grads, strict=True):
                param.grad = grad
        self.elements = sum(grad.numel() for grad in self.grads)
        # A factor of 1 keeps values where they are over many runs; both sides rewrite the gradients all the same.
        self.inv_scale = torch.ones((), device=device)
        self.found_inf = torch.zeros((), device=device)

    def states(self) -> list[Tensor]:
        """A fresh moment per parameter."""
        return [torch.zeros_like(param, requires_grad=False) for param in self.params]


def clip_coefficient(norm: Tensor) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_ computes it."""
    return (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)


def comparisons(material: Material, impl: str, with_foreach: bool = True) -> Iterator[Comparison]:
    """Every job over this material. Lazy: states are freed between jobs."""
    yield _unscale(material, impl)
    if material.grads[0].dtype is not torch.float32:
        return
    yield _clip(material, impl)
    yield _cast(material, impl)
    yield _sgd(material, impl)
    yield from _adamw(material, impl, with_foreach)


def _torch_unscale(m: Material) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_(m.grads, m.found_inf, m.inv_scale)


def _unscale(m: Material, impl: str) -> Comparison:
    sides: dict[str, Job] = {
        "ampkit": lambda: kernels.unscale_(m.grads, m.inv_scale, m.found_inf, impl=impl),
    }
    try:
        _torch_unscale(m)
        sides["torch"] = lambda: _torch_unscale(m)
    except RuntimeError:
        pass  # bfloat16 gradients, which torch's CUDA operator refuses: ours is shown alone
    return Comparison("unscale", sides, m.elements)


def _clip(m: Material, impl: str) -> Comparison:
    def ours() -> None:
        norm = kernels.norm_and_check(m.grads, m.inv_scale, m.found_inf, impl=impl)
        kernels.multiply_(m.grads, clip_coefficient(norm) * m.inv_scale, m.found_inf, impl=impl)

    def theirs() -> None:
        _torch_unscale(m)
        torch.nn.utils.clip_grad_norm_(m.params, MAX_NORM, foreach=True)

    return Comparison("unscale + clip", {"ampkit": ours, "torch": theirs}, m.elements)


def _cast(m: Material, impl: str) -> Comparison:
    copies = [torch.empty_like(param, dtype=torch.float16, requires_grad=False) for param in m.params]
    masters = [param.detach() for param in m.params]
    sides: dict[str, Job] = {
        "ampkit": lambda: kernels.cast_(masters, copies, impl=impl),
        "torch": lambda: torch._foreach_copy_(copies, masters),
    }
    return Comparison("cast to half", sides, m.elements)


def _sgd(m: Material, impl: str) -> Comparison:
    masters, buffers = [param.detach() for param in m.params], m.states()
    optimizer = torch.optim.SGD(m.params, lr=1e-6, momentum=0.9, fused=True)
    sides: dict[str, Job] = {
        "ampkit": lambda: kernels.sgd_(
            masters, m.grads, buffers, lr=1e-6, momentum=0.9, found_inf=m.found_inf, impl=impl
        ),
        "torch": optimizer.step,
    }
    return Comparison("SGD step", sides, m.elements)


def _adamw(m: Material, impl: str, with_foreach: bool) -> Iterator[Comparison]:
    masters, first, second = [param.detach() for param in m.params], m.states(), m.states()
    steps = [torch.zeros((), device=m.device) for _ in m.params]
    fused = torch.optim.AdamW(m.params, lr=1e-6, fused=True)

    def our_step(multiplier: Tensor | None) -> None:
        kernels.adamw_(
            masters, m.grads, first, second, [], steps, lr=1e-6, beta1=0.9, beta2=0.999, eps=1e-8,
            weight_decay=0.01, multiplier=multiplier, found_inf=m.found_inf, impl=impl,
        )  # fmt: skip

    def ours() -> None:
        norm = kernels.norm_and_check(m.grads, m.inv_scale, m.found_inf, impl=impl)
        our_step(clip_coefficient(norm) * m.inv_scale)

    def torch_clipped(optimizer: torch.optim.Optimizer, on_device: bool) -> Job:
        def job() -> None:
            _torch_unscale(m)
            torch.nn.utils.clip_grad_norm_(m.params, MAX_NORM, foreach=True)
            if on_device:
                optimizer.grad_scale, optimizer.found_inf = None, m.found_inf  # type: ignore[attr-defined]
                optimizer.step()
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            elif not m.found_inf.item():
                optimizer.step()

        return job

    yield Comparison("AdamW step", {"ampkit": lambda: our_step(None), "torch": fused.step}, m.elements)
    sides = {"ampkit": ours, "torch": torch_clipped(fused, True)}
    if with_foreach:
        foreach = torch.optim.AdamW(m.params, lr=1e-6, foreach=True)
        sides["torch foreach"] = torch_clipped(foreach, False)
    yield Comparison("clip + AdamW", sides, m.elements)
