"""Checks that need a CUDA device: torch's own operators, streams, graphs, sizes, FP8."""

import copy
import itertools
from collections.abc import Sequence

import torch

import ampkit_kernels as kernels
from ampkit import Policy, Rule, autocast
from benchmarks.float8 import FORMS, RECIPES
from tests.gpu_checks.tools import FLOATS, Registry, close, gradients, same, scalar
from tests.helpers.float8 import fp8, step

CHECKS = Registry()
check = CHECKS.add


@check
def unscale_has_torchs_bits(device: torch.device) -> None:
    """In every dtype that torch's operator takes, and over 5,000 tiny tensors."""
    assert kernels.uses_triton("auto", device), kernels.why_not_triton(device)
    tiny = [torch.randn(1 + i % 200, device=device) for i in range(5000)]
    for grads in (tiny, *(gradients(dtype, scale=8.0, device=device) for dtype in FLOATS[:3])):
        want, flags = [g.clone() for g in grads], [scalar(0.0, device), scalar(0.0, device)]
        torch._amp_foreach_non_finite_check_and_unscale_(want, flags[0], scalar(0.001, device))
        kernels.unscale_(grads, scalar(0.001, device), flags[1])
        same([*grads, flags[1]], [*want, flags[0]], str(grads[0].dtype))


@check
def moving_gradients_on_two_streams(device: torch.device) -> None:
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    running = []
    for i in range(60):
        with torch.cuda.stream(streams[i % 2]):
            # New tensors in every round: addresses change while earlier launches may still be running.
            grads = [torch.full((n,), float(i), device=device) for n in (5, 70_000, 300)]
            kernels.unscale_(grads, scalar(0.5, device), torch.zeros((), device=device))
            running.append((i, grads))
        if len(running) > 8:
            running.pop(0)
    torch.cuda.synchronize(device)
    for i, grads in running:
        same(grads, [torch.full_like(g, i / 2) for g in grads], f"round {i}")


@check
def float32_results_of_16_bit_products(device: torch.device) -> None:
    """Products of small integers are exact, so the order of sums makes no difference."""
    policy = Policy.default("cuda").with_rules(dict.fromkeys(("aten::linear", "aten::bmm"), Rule.LOWER_FLOAT32_OUT))
    for dtype in (torch.bfloat16, torch.float16):
        x, w = (torch.randint(-9, 9, (3, 64, 64), device=device).float().requires_grad_() for _ in range(2))
        with autocast("cuda", dtype, policy=policy):
            products = torch.bmm(x, w), torch.nn.functional.linear(x, w[0])
        want = torch.bmm(x, w), torch.nn.functional.linear(x, w[0])
        same(products, want, str(dtype))
        for ours, theirs in zip(products, want, strict=True):
            wanted = [grad.to(dtype).float() for grad in torch.autograd.grad(theirs.sum(), (x, w))]
            same(torch.autograd.grad(ours.sum(), (x, w)), wanted, f"gradients, {dtype}")


@check
def captured_operations_replay(device: torch.device) -> None:
    """The graph's tables are copied from memory that no other launch gets."""
    from ampkit_kernels.triton_ops import pointer_table

    grads, others = (gradients(torch.float32, scale=8.0, device=device) for _ in range(2))
    flag, inv, graph = scalar(0.0, device), scalar(0.5, device), torch.cuda.CUDAGraph()

    def work() -> torch.Tensor:
        flag.zero_()
        norm = kernels.norm_and_check(grads, inv, flag)
        kernels.unscale_(grads, inv, flag)
        return norm

    work()  # compiles
    with torch.cuda.graph(graph):
        norm = work()
    for i in range(4):
        # Host and device memory of the eager path is freed or rewritten.
        pointer_table._per_thread = pointer_table._PerThread()
        kernels.unscale_([g.clone() for g in others], inv, scalar(0.0, device))
        values = [torch.randn_like(g) for g in grads]
        if i == 3:
            values[2][0] = float("inf")
        torch._foreach_copy_(grads, values)
        graph.replay()
        same(grads, [v * 0.5 for v in values], f"replay {i}")
        assert flag.item() == float(i == 3)
        if i < 3:
            close(norm, torch.cat(values).double().norm() * 0.5, 1e-5, f"norm of replay {i}")


@check
def more_than_two_to_the_31_elements(device: torch.device) -> None:
    n = 2**31 + 4099
    if torch.cuda.mem_get_info(device)[0] < 3 * n * 2:
        return  # for the tensor, and as much again to read elements of it
    grad = torch.ones(n, dtype=torch.float16, device=device)
    grad[-1] = 4.0
    flag = torch.zeros((), device=device)
    kernels.unscale_([grad], scalar(0.5, device), flag)
    assert flag.item() == 0.0
    assert (grad[0].item(), grad[2**31 + 1].item(), grad[-1].item()) == (0.5, 0.5, 2.0)


@check
def adamw_stays_beside_torchs_fused(device: torch.device) -> None:
    from ampkit.optim import AdamW

    ours = [torch.nn.Parameter(torch.randn(n, device=device)) for n in (1, 17, 5000, 300_000)]
    theirs = copy.deepcopy(ours)
    mine, fused = AdamW(ours, lr=1e-3), torch.optim.AdamW(theirs, lr=1e-3, fused=True)
    for _ in range(100):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = q.grad = torch.randn_like(p)
        mine.step()
        fused.step()
    for p, q in zip(ours, theirs, strict=True):
        assert (p - q).abs().max().item() <= 100 * 2.0**-21  # each step within an ulp of numbers around 4


def same_forms(x: torch.Tensor, forms: Sequence[kernels.Scaling | None], device: torch.device) -> None:
    """The FP8 kernels beside PyTorch's operators on the CPU."""
    got, want = kernels.quantize(x.to(device), *forms, impl="triton"), kernels.quantize(x, *forms)
    for form, expected in zip(got, want, strict=True):
        assert (form is None) is (expected is None)
        if form is not None and expected is not None:
            assert form.data.dtype is expected.data.dtype
            tensors = [form.data.float(), form.scale], [expected.data.float(), expected.scale]
            same(*tensors, f"{forms} of {x.dtype} {tuple(x.shape)}")


@check
def float8_casts_have_the_reference_bits(device: torch.device) -> None:
    """On compute capability 8.9 Triton rounds some values twice: nothing is compared there."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return
    for (*forms, _), shape, dtype in itertools.product(
        FORMS.values(), ((64, 128), (1000, 4096), (13, 48), (3, 9)), (torch.float32, torch.bfloat16)
    ):
        x = (torch.randn(shape) * torch.randn(shape[0], 1).exp()).to(dtype)
        x[0, 1], x[-1, 0] = float("nan"), float("inf")
        same_forms(x, forms, device)


@check
def float8_linear_layers_follow_the_cpu(device: torch.device) -> None:
    """With the layouts of `scaled_mm`, fast accumulation and padded rows."""
    if torch.cuda.get_device_capability(device) < (8, 9):
        return
    for rule, rows in itertools.product(RECIPES, (16, 33, 512)):
        layer, x, grad = torch.nn.Linear(256, 128), torch.randn(rows, 256), torch.randn(rows, 128)
        want = step(layer, x, grad, fp8(rule))
        region = fp8(rule, device_type=device.type)
        got = step(copy.deepcopy(layer).to(device), x.to(device), grad.to(device), region)
        for result, expected in zip(got, want, strict=True):
            close(result, expected, 0.02, f"{rule.name}, {rows} rows")
