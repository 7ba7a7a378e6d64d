"""The kernels compared with torch's operators on the gradients of whole models, timed by CUDA events.

The jobs are those of a training script: `unscale` is `GradScaler.unscale_`'s kernel work, `unscale + clip` adds
clipping that rewrites the gradients, `clip + AdamW` is everything from scaled gradients to parameters. Gradients that a
job changes are restored before every run, untimed: a clipped list would need no clipping the next time. On a CPU the
same cases run over small lists with PyTorch on both sides: a rehearsal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import ampkit_kernels as kernels
from benchmarks import byte_model, counts
from benchmarks.case import AMPKIT, TORCH_OPERATORS, Aim, Case, Side, WrongAnswerError
from benchmarks.parameter_lists import LISTS, REHEARSAL, Shape

Job = Callable[[], object]
Made = tuple[dict[str, Job], list[Tensor]]  # a job's sides, and the tensors that it writes and that can be compared
FOREACH, COPY = "torch foreach", "copy of as many bytes"
MAX_NORM = 1.0
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
IN_HALF = ("GPT-2 124M", *REHEARSAL)
MOVING = ("GPT-2 124M", "5000 tiny", *REHEARSAL)
# (list, job): (side, upper limit of ampkit's time over that side's), for float32 on one H200; set before measuring.
AIMS: dict[tuple[str, str], tuple[tuple[str, float], ...]] = {
    ("GPT-2 124M", "unscale"): ((TORCH_OPERATORS, 1.0),),
    ("GPT-2 1.5B", "unscale"): ((TORCH_OPERATORS, 1.0), (COPY, 1 / 0.9)),
    ("ResNet-50", "unscale"): ((TORCH_OPERATORS, 1.0),),
    ("5000 tiny", "unscale"): ((TORCH_OPERATORS, 0.5),),
    ("GPT-2 124M", "unscale + clip"): ((TORCH_OPERATORS, 0.62),),
    ("GPT-2 1.5B", "unscale + clip"): ((TORCH_OPERATORS, 0.62),),
    ("5000 tiny", "unscale + clip"): ((TORCH_OPERATORS, 0.5),),
    ("GPT-2 124M", "clip + AdamW"): ((TORCH_OPERATORS, 0.70), (FOREACH, 0.36)),
    ("GPT-2 1.5B", "clip + AdamW"): ((TORCH_OPERATORS, 0.70), (FOREACH, 0.36)),
}


class Material:
    """Parameters and gradients of one list in one dtype, and scalars for them."""

    def __init__(
        self, shapes: Sequence[Shape], device: torch.device, dtype: torch.dtype, impl: str | None = None
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def draw(shape: Shape) -> Tensor:
            return torch.randn(shape, device=device, generator=generator).to(dtype)

        self.device = device
        self.impl = impl or ("triton" if device.type == "cuda" else "reference")
        self.params = [torch.nn.Parameter(draw(shape)) for shape in shapes]
        self.use([draw(shape) * 1e-2 for shape in shapes])
        self.elements = sum(grad.numel() for grad in self.grads)
        # A factor of 1 keeps values where they are over many runs; unscaling rewrites them all the same.
        self.inv_scale = torch.ones((), device=device)
        self.found_inf = torch.zeros((), device=device)

    def use(self, grads: list[Tensor]) -> None:
        """Make these the parameters' gradients."""
        self.grads = grads
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad

    def states(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return a fresh tensor of zeros per parameter."""
        return [torch.zeros_like(param, dtype=dtype, requires_grad=False) for param in self.params]


def norm_of_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a job's result in few numbers: the norm of each tensor."""
    return [torch.stack(torch._foreach_norm(list(tensors))).float()]


def torch_unscale(m: Material) -> None:
    """torch's unscaling; with foreach operators for bfloat16, which its CUDA operator refuses."""
    if m.grads[0].dtype is torch.bfloat16:
        finite = torch.stack(torch._foreach_norm(m.grads, float("inf"))).isfinite().all()
        m.found_inf.copy_(torch.where(finite, m.found_inf, 1.0))
        torch._foreach_mul_(m.grads, m.inv_scale)
    else:
        torch._amp_foreach_non_finite_check_and_unscale_(m.grads, m.found_inf, m.inv_scale)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor of torch.nn.utils.clip_grad_norm_."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def unscale(m: Material) -> Made:
    """Unscaling in place."""
    return {
        AMPKIT: lambda: kernels.unscale_(m.grads, m.inv_scale, m.found_inf, impl=m.impl),
        TORCH_OPERATORS: lambda: torch_unscale(m),
    }, m.grads


def unscale_into(m: Material) -> Made:
    """Unscaling 16-bit gradients into float32 gradients of master weights."""
    masters = m.states(torch.float32)

    def theirs() -> None:
        torch._foreach_copy_(masters, m.grads)
        torch._amp_foreach_non_finite_check_and_unscale_(masters, m.found_inf, m.inv_scale)

    return {
        AMPKIT: lambda: kernels.unscale_into_(m.grads, masters, m.inv_scale, m.found_inf, impl=m.impl),
        TORCH_OPERATORS: theirs,
    }, masters


def clip(m: Material, max_norm: float | None = None) -> Made:
    """Unscaling and clipping."""
    max_norm = MAX_NORM if max_norm is None else max_norm

    def ours() -> None:
        norm = kernels.norm_and_check(m.grads, m.inv_scale, m.found_inf, impl=m.impl)
        kernels.multiply_(m.grads, clip_coefficient(norm, max_norm) * m.inv_scale, m.found_inf, impl=m.impl)

    def theirs() -> None:
        torch_unscale(m)
        torch.nn.utils.clip_grad_norm_(m.params, max_norm, foreach=True)

    return {AMPKIT: ours, TORCH_OPERATORS: theirs}, m.grads


def cast(m: Material) -> Made:
    """Casting master weights to float16 copies."""
    copies = m.states(torch.float16)
    masters = [param.detach() for param in m.params]
    return {
        AMPKIT: lambda: kernels.cast_(masters, copies, impl=m.impl),
        TORCH_OPERATORS: lambda: torch._foreach_copy_(copies, masters),
    }, copies


def sgd(m: Material) -> Made:
    """Return a step of SGD with momentum."""
    masters, buffers = [param.detach() for param in m.params], m.states()
    theirs = torch.optim.SGD(m.params, lr=1e-6, momentum=0.9, fused=True)

    def ours() -> None:
        kernels.sgd_(masters, m.grads, buffers, lr=1e-6, momentum=0.9, found_inf=m.found_inf, impl=m.impl)

    return {AMPKIT: ours, TORCH_OPERATORS: theirs.step}, []


def our_adamw(m: Material) -> Callable[[Tensor | None], None]:
    """ampkit's step, as a function of a factor on the gradients."""
    masters, first, second = [param.detach() for param in m.params], m.states(), m.states()
    steps = [torch.zeros((), device=m.device) for _ in m.params]

    def step(multiplier: Tensor | None) -> None:
        kernels.adamw_(
            masters,
            m.grads,
            first,
            second,
            [],
            steps,
            lr=1e-6,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.01,
            multiplier=multiplier,
            found_inf=m.found_inf,
            impl=m.impl,
        )

    return step


def adamw(m: Material) -> Made:
    """Return a step of AdamW."""
    ours = our_adamw(m)
    return {AMPKIT: lambda: ours(None), TORCH_OPERATORS: torch.optim.AdamW(m.params, lr=1e-6, fused=True).step}, []


def clip_adamw(m: Material) -> Made:
    """Unscaling, clipping and a step of AdamW."""
    step = our_adamw(m)

    def ours() -> None:
        norm = kernels.norm_and_check(m.grads, m.inv_scale, m.found_inf, impl=m.impl)
        step(clip_coefficient(norm, MAX_NORM) * m.inv_scale)

    def theirs(optimizer: torch.optim.Optimizer, on_device: bool) -> None:
        torch_unscale(m)
        torch.nn.utils.clip_grad_norm_(m.params, MAX_NORM, foreach=True)
        if on_device:
            optimizer.grad_scale, optimizer.found_inf = None, m.found_inf  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        elif not m.found_inf.item():
            optimizer.step()

    fused = torch.optim.AdamW(m.params, lr=1e-6, fused=True)
    foreach = torch.optim.AdamW(m.params, lr=1e-6, foreach=True)
    return {AMPKIT: ours, TORCH_OPERATORS: lambda: theirs(fused, True), FOREACH: lambda: theirs(foreach, False)}, []


# The job by name, and the dtypes of the gradients that it is measured with.
JOBS: dict[str, tuple[Callable[[Material], Made], tuple[str, ...]]] = {
    "unscale": (unscale, ("fp32", "fp16", "bf16")),
    "unscale into float32": (unscale_into, ("fp16", "bf16")),
    "unscale + clip": (clip, ("fp32", "fp16", "bf16")),
    "unscale + clip, factor 1": (lambda m: clip(m, float("inf")), ("fp32",)),
    "cast to half": (cast, ("fp32",)),
    "SGD step": (sgd, ("fp32",)),
    "AdamW step": (adamw, ("fp32",)),
    "clip + AdamW": (clip_adamw, ("fp32", "bf16")),
}


@dataclass(frozen=True, kw_only=True)
class Kernel(Case):
    """One job over the gradients of one list. `moving`: at new addresses each time, as after a backward."""

    job: str = "unscale"
    shapes: Callable[[], list[Shape]]
    dtype: torch.dtype = torch.float32
    moving: bool = False
    family: str = "kernels"
    base: str = TORCH_OPERATORS
    everyday: bool = False
    events: bool = True
    seconds: float = 0.6

    def sides(self, device: torch.device) -> dict[str, Side]:
        m = Material(self.shapes(), device, self.dtype)
        jobs, written = JOBS[self.job][0](m)
        changed = self.job.startswith("unscale + clip") or self.job == "clip + AdamW"
        saved = [grad.clone() for grad in m.grads] if changed else None
        sides = {name: self._side(m, name, job, written, saved) for name, job in jobs.items()}
        if any(aim.side == AMPKIT and aim.base == COPY for aim in self.aims):
            source = torch.empty(m.elements, dtype=self.dtype, device=device)
            target = torch.empty_like(source)
            sides[COPY] = self._side(m, COPY, lambda: target.copy_(source), [], None)
        return sides

    def _side(self, m: Material, name: str, job: Job, written: list[Tensor], saved: list[Tensor] | None) -> Side:
        sets = itertools.cycle([m.grads, [grad.clone() for grad in m.grads]]) if self.moving else None

        def before() -> None:
            if sets is not None:
                m.use(next(sets))
            if saved is not None:
                torch._foreach_copy_(m.grads, saved)

        def run(calls: int) -> None:
            for _ in range(calls):
                job()

        def result() -> list[Tensor]:
            return norm_of_all(m.grads if self.moving else written) if written else []

        def facts() -> dict[str, float | int | None]:
            before()
            return {"bytes_moved": self._bytes(name) * m.elements, "launches": counts.launches(job, m.device)}

        return Side(run, before=before, result=result, facts=facts)

    def _bytes(self, side: str) -> float:
        """Bytes per element that a side must move."""
        if side == FOREACH:
            total = byte_model.TORCH_FOREACH_CLIP_ADAMW
        else:
            total = (byte_model.OURS if side == AMPKIT else byte_model.TORCH)[self.job].total
        # The byte models are for float32, except for the job with two dtypes.
        return total if self.job == "unscale into float32" else total * self.dtype.itemsize / 4

    def check(self, sides: Mapping[str, Side]) -> None:
        """Every side leaves the values that the base leaves, to within rounding, if a job has a result."""
        results = {}
        for name, side in sides.items():
            if side.before is not None:
                side.before()
            side.run(1)
            results[name] = side.result()
        rtol = 1e-4 if self.dtype is torch.float32 else 2e-2
        for name, norms in results.items():
            for ours, theirs in zip(norms, results[self.base], strict=False):
                if not torch.allclose(ours, theirs, rtol=rtol):
                    raise WrongAnswerError(f"{self.name}: {name} computed other values than {self.base}")


def cases() -> list[Case]:
    """Every job on every list: real ones on a GPU, small ones to rehearse on a CPU.

    To keep a run to minutes, moving gradients and most of half precision are measured on a few lists only.
    """
    all_cases: list[Case] = []
    for device, lists in (("cuda", LISTS), ("cpu", REHEARSAL)):
        for name, shapes in lists.items():
            for job, (_, dtypes) in JOBS.items():
                for dtype in dtypes:
                    plain = dtype == "fp32" or job == "unscale"
                    if not plain and name not in IN_HALF:
                        continue
                    aims = AIMS.get((name, job), ()) if dtype == "fp32" else ()
                    case = Kernel(
                        name=f"{job}, {name}, {dtype}",
                        job=job,
                        shapes=shapes,
                        dtype=DTYPES[dtype],
                        devices=(device,),
                        aims=tuple(Aim(AMPKIT, limit, side) for side, limit in aims),
                    )
                    all_cases.append(case)
                    if dtype != "fp32" or name not in MOVING:
                        continue
                    if job in ("unscale", "unscale + clip", "AdamW step"):
                        all_cases.append(replace(case, name=f"{case.name}, moving gradients", moving=True, aims=()))
    return all_cases
