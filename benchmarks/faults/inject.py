"""The kinds of faults: each is a transform of a syntax tree at one place, with its reverse.

No transform moves a line, so that the line of a fault is the same before and after. What a fault needs besides is a
file of its own, in `HELPERS`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.faults.source import Edit, Source, called, calls, statements

Found = tuple[Iterable[int], tuple[Edit, ...]]  # the lines of the fault, and the edits
Transform = Callable[[Source, str], Iterator[Found]]  # of a source, for float16 or bfloat16

FLOAT32 = r"float32|\.float\(\)|float64|double|wider|higher precision|full precision|dtype"
_GRADIENT = r"grad_output|incoming gradient|loss scale|does not (follow|double|multiply)|not (scaled|multiplied)"


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Args:
        name: Its name.
        family: "precision" where numbers in 16 bits are the cause, "loop", "data", "gradient", or "arithmetic" where
            float32 would fail as well.
        transform: Yields the places of a source that can have it.
        operators: Names of operators at its place; none where a finding needs no operator.
        cause: A pattern of which a right finding has a match.
        cure: A pattern of which a right change or advice has a match.
        driver: Whether it is for the training script only, not for the modules that it imports.
        dtypes: The dtypes of programs that can have it.
    """

    name: str
    family: str
    transform: Transform
    operators: tuple[str, ...] = ()
    cause: str = ""
    cure: str = ""
    driver: bool = False
    dtypes: tuple[str, ...] = ("float16", "bfloat16")


@dataclass(frozen=True)
class Injection:
    """A fault at one place of a file."""

    kind: str
    lines: tuple[int, ...]
    edits: tuple[Edit, ...]


KINDS: dict[str, Kind] = {}


def places(source: Source, kind: Kind, dtype: str) -> list[Injection]:
    """Return every place of a source that can have a kind of fault, in the order of the source."""
    if dtype not in kind.dtypes:
        return []
    return [Injection(kind.name, tuple(sorted(set(lines))), edits) for lines, edits in kind.transform(source, dtype)]


def _kind(
    name: str, family: str, operators: str = "", cause: str = "", cure: str = "", **rest: object
) -> Callable[[Transform], Transform]:
    def register(transform: Transform) -> Transform:
        KINDS[name] = Kind(name, family, transform, tuple(operators.split()), cause, cure, **rest)  # type: ignore[arg-type]
        return transform

    return register


def _method(dtype: str) -> str:
    return {"float16": ".half()", "bfloat16": ".bfloat16()"}[dtype]


# Precision: a tensor is rounded to 16 bits before an operator that does not bear it.


def _casts(name: str, functions: str, operators: str) -> None:
    @_kind(f"cast before {name}", "precision", f"_to_copy to half bfloat16 {operators}", cure=FLOAT32)
    def cast(source: Source, dtype: str) -> Iterator[Found]:
        for call, operand in calls(source, functions.split()):
            yield source.lines(call), source.wrap(operand, "(", f"){_method(dtype)}")


_casts("log", "log log2 log10 log1p", "log log2 log10 log1p")
_casts("exp", "exp expm1 softplus logsumexp", "exp expm1 softplus logsumexp")
_casts("norm", "norm normalize var std vector_norm", "norm linalg_vector_norm var std div clamp_min")
_casts("sum", "sum mean", "sum mean")
_casts("cumsum", "cumsum cumprod logcumsumexp", "cumsum cumprod logcumsumexp")
_casts("softmax", "softmax log_softmax cross_entropy nll_loss", "softmax _softmax _log_softmax log_softmax nll_loss")
_casts("square root", "sqrt rsqrt", "sqrt rsqrt")
_casts(
    "loss", "mse_loss binary_cross_entropy binary_cross_entropy_with_logits l1_loss", "mse_loss binary_cross_entropy"
)


@_kind("cast before power", "precision", "_to_copy to half bfloat16 pow square mul", cure=FLOAT32)
def _power(source: Source, dtype: str) -> Iterator[Found]:
    for call, operand in calls(source, ("pow", "square")):
        yield source.lines(call), source.wrap(operand, "(", f"){_method(dtype)}")
    for node in source.nodes(ast.BinOp):
        if isinstance(node.op, ast.Pow) and not isinstance(node.left, ast.Constant):
            yield source.lines(node), source.wrap(node.left, "(", f"){_method(dtype)}")


@_kind("cast before division", "precision", "_to_copy to half bfloat16 div true_divide reciprocal mul", cure=FLOAT32)
def _division(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.BinOp):
        if isinstance(node.op, ast.Div):
            for side in (node.left, node.right):
                if not isinstance(side, ast.Constant):
                    yield source.lines(node), source.wrap(side, "(", f"){_method(dtype)}")


@_kind("cast before subtraction", "precision", "_to_copy to half bfloat16 sub rsub add", cure=FLOAT32)
def _subtraction(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.BinOp):
        if isinstance(node.op, ast.Sub) and not isinstance(node.right, ast.Constant):
            yield source.lines(node), source.wrap(node.right, "(", f"){_method(dtype)}")


@_kind("float removed", "precision", "", cure=FLOAT32)
def _float_removed(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.Call):
        if called(node, "float") and not node.args:
            end = source.end(node)
            if source.text(node).endswith(".float()"):
                yield source.lines(node), (Edit(end - len(".float()"), end, ""),)


@_kind("region left on", "precision", "", cure=FLOAT32 + "|enabled")
def _region_left_on(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.keyword):
        if node.arg == "enabled" and isinstance(node.value, ast.Constant) and node.value.value is False:
            yield source.lines(node), source.replace(node.value, "True ")


@_kind("small eps", "precision", "add clamp clamp_min max div sqrt rsqrt log norm", cure=FLOAT32 + r"|eps|larger|1e-")
def _small_eps(source: Source, dtype: str) -> Iterator[Found]:
    tiny = {"float16": "1e-12", "bfloat16": "1e-44"}[dtype]
    for node in source.nodes(ast.Constant):
        if isinstance(node.value, float) and 0 < node.value < 2e-3 and not _is_rate(source, node):
            yield source.lines(node), source.replace(node, tiny)


@_kind("eps in 16 bits", "precision", "_to_copy to half bfloat16 add sqrt rsqrt log div", cure=FLOAT32 + "|eps|larger")
def _eps_in_16_bits(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.BinOp):
        if isinstance(node.op, ast.Add):
            for side, eps in ((node.left, node.right), (node.right, node.left)):
                text = source.text(eps)
                if text.endswith(("eps", "epsilon")) or (isinstance(eps, ast.Constant) and _is_small(eps.value)):
                    yield source.lines(node), source.wrap(side, "(", f"){_method(dtype)}")


def _is_small(value: object) -> bool:
    return isinstance(value, float) and 0 < value < 2e-3


def _is_rate(source: Source, node: ast.Constant) -> bool:
    """Return whether a number is a learning rate, a decay or the like, which no operator holds in 16 bits."""
    parent = source.parents[node]
    named = parent.arg if isinstance(parent, ast.keyword) else ""
    if isinstance(parent, ast.Assign):
        named = source.text(parent.targets[0])
    return any(word in (named or "").lower() for word in ("lr", "rate", "decay", "std", "momentum", "default"))


@_kind(
    "factory in 16 bits",
    "precision",
    "zeros ones full arange linspace empty eye _to_copy to half bfloat16 add add_ copy_ mul sub",
    cure=FLOAT32,
)
def _factory(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.Call):
        function = source.text(node.func)
        if function in {f"torch.{name}" for name in ("zeros", "ones", "full", "arange", "linspace", "eye", "tensor")}:
            given = any(keyword.arg == "dtype" for keyword in node.keywords)
            if not given and not _is_parameter(source, node):
                yield source.lines(node), source.wrap(node, "", _method(dtype))


def _is_parameter(source: Source, node: ast.AST) -> bool:
    return any(
        isinstance(parent, ast.Call) and "Parameter" in source.text(parent.func) for parent in source.above(node)
    )


@_kind(
    "counter in 16 bits",
    "precision",
    "add add_ sum _to_copy to half bfloat16 mul div copy_ zeros",
    cure=FLOAT32,
    driver=True,
)
def _counter(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.AugAssign):
        if isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name):
            start = _last_assignment(source, node.target.id, node.lineno)
            if start is not None and called(start.value, "zeros"):
                lines = [*source.lines(start), *source.lines(node)]
                yield lines, source.wrap(start.value, "", _method(dtype))


def _last_assignment(source: Source, name: str, before: int) -> ast.Assign | None:
    found = [
        node
        for node in source.nodes(ast.Assign)
        if isinstance(node, ast.Assign) and source.text(node.targets[0]) == name and node.lineno < before
    ]
    return found[-1] if found else None


@_kind(
    "average in 16 bits",
    "precision",
    "mul_ add_ lerp_ mul add lerp _to_copy to half bfloat16 copy_ clone",
    cure=FLOAT32,
    driver=True,
)
def _average(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.Assign):
        text = source.text(node)
        if "average" in text and ".detach().clone()" in text:
            clone = next(call for call in ast.walk(node) if called(call, "clone"))
            assert isinstance(clone, ast.Call)
            name = source.text(node.targets[0])
            uses = [use for use in source.nodes(ast.Call) if called(use, "lerp_") or called(use, "mul_")]
            lines = [
                *source.lines(node),
                *(
                    line
                    for use in uses
                    if name in source.text(source.statement(use)) or True
                    for line in source.lines(use)
                ),
            ]
            yield lines, source.wrap(clone, "", _method(dtype))


def _product(source: Source, dtype: str) -> Iterator[Found]:
    large = {"float16": "60000.0", "bfloat16": "3e38"}[dtype]
    for _, operand in calls(
        source,
        ("softmax", "log_softmax", "cross_entropy", "mse_loss", "sigmoid", "pow", "exp", "sum", "mean", "relu", "norm"),
    ):
        text = source.text(operand)
        new = f"(({text}){_method(dtype)} * {large} / {large})"
        yield (
            source.lines(operand),
            source.replace(operand, new)
            if "\n" not in text
            else source.wrap(operand, "((", f"){_method(dtype)} * {large} / {large})"),
        )


_PRODUCT = "mul matmul mm bmm _to_copy to half bfloat16 div"
_kind("overflowing product", "precision", _PRODUCT, cure=FLOAT32 + r"|scale|before", dtypes=("float16",))(_product)
# What overflows in bfloat16 overflows in float32: it has the same range.
_kind(
    "product above any range",
    "arithmetic",
    _PRODUCT,
    cure=r"(?s)\A(?!.*(float32|\.float\(\))).*",
    dtypes=("bfloat16",),
)(_product)


@_kind("underflowing product", "precision", "mul _to_copy to half bfloat16 div", cure=FLOAT32 + r"|scale|larger")
def _underflowing_product(source: Source, dtype: str) -> Iterator[Found]:
    small = {"float16": "1e-7", "bfloat16": "1e-40"}[dtype]
    for _, operand in calls(
        source, ("relu", "gelu", "tanh", "sigmoid", "softmax", "cross_entropy", "silu", "log", "sum", "mean", "pow")
    ):
        yield source.lines(operand), source.wrap(operand, "((", f"){_method(dtype)} * {small} / {small})")


@_kind(
    "variance by difference",
    "precision",
    "sub pow mean _to_copy to half bfloat16 sqrt rsqrt mul",
    cure=FLOAT32 + r"|var\(",
)
def _variance(source: Source, dtype: str) -> Iterator[Found]:
    for call, operand in calls(source, ("var", "std")):
        text, low = source.text(operand), _method(dtype)
        if "\n" in text:
            continue
        dim = next((source.text(keyword.value) for keyword in call.keywords if keyword.arg == "dim"), "-1")
        keep = ", keepdim=True" if any(keyword.arg == "keepdim" for keyword in call.keywords) else ""
        mean = f"mean({dim}{keep})"
        end = ".sqrt()" if called(call, "std") else ""
        yield (
            source.lines(call),
            source.replace(call, f"((({text}){low}.pow(2)).{mean} - ({text}){low}.{mean}.pow(2)){end}"),
        )


@_kind(
    "softmax without its maximum", "precision", "exp sum div _to_copy to half bfloat16", cure=FLOAT32 + "|softmax|max"
)
def _bare_softmax(source: Source, dtype: str) -> Iterator[Found]:
    for call, operand in calls(source, ("softmax",)):
        text = source.text(operand)
        dim = next((source.text(word.value) for word in call.keywords if word.arg == "dim"), "-1")
        if "\n" not in source.text(call):
            shifted = f"(({text}){_method(dtype)} * 1.0 + 8).exp()"
            yield source.lines(call), source.replace(call, f"({shifted} / {shifted}.sum({dim}, keepdim=True))")


@_kind(
    "log of a softmax",
    "precision",
    "log softmax _softmax _to_copy to half bfloat16 nll_loss",
    cure=FLOAT32 + "|log_softmax",
)
def _log_of_softmax(source: Source, dtype: str) -> Iterator[Found]:
    for call, operand in calls(source, ("cross_entropy", "log_softmax")):
        text = source.text(operand)
        if "\n" in text or called(call.func, "functional"):
            continue
        dim = next((source.text(word.value) for word in call.keywords if word.arg == "dim"), "1")
        log = f"({text}).softmax({dim}){_method(dtype)}.log()"
        yield source.lines(call), source.replace(operand, log) if "\n" not in source.text(operand) else ()


@_kind(
    "gradients rounded in a hook",
    "precision",
    "mul _to_copy to half bfloat16 div",
    r"gradient|hook|underflow",
    cure=FLOAT32 + "|scale|hook",
    driver=True,
)
def _hook(source: Source, dtype: str) -> Iterator[Found]:
    small = {"float16": "1e-6", "bfloat16": "1e-38"}[dtype]
    for node in source.nodes(ast.Assign):
        target = source.text(node.targets[0])
        if target in {"model", "policy"} and isinstance(node.value, ast.Call) and source.parents[node] is source.tree:
            rounded = f"(gradient * {small}){_method(dtype)}.float() / {small}"
            hook = f"[weight.register_hook(lambda gradient: {rounded}) for weight in {target}.parameters()]"
            yield source.lines(node), source.append(node, hook)


@_kind(
    "mask value",
    "precision",
    "masked_fill where softmax _softmax add sub masked_fill_ full",
    cure=r"-?inf|finfo|mask|row|value",
)
def _mask(source: Source, dtype: str) -> Iterator[Found]:
    for call, _ in calls(source, ("masked_fill", "masked_fill_")):
        if len(call.args) > 1:
            yield source.lines(call), source.replace(call.args[1], "-1.0")
            yield source.lines(call), source.wrap(call, "(", " * 60000.0)")


@_kind(
    "weights in 16 bits",
    "precision",
    "add_ addcdiv_ _foreach_add_ _foreach_addcdiv_ add sub",
    r"update|weight|parameter",
    cure=FLOAT32 + "|master",
    driver=True,
    dtypes=("bfloat16",),
)
def _weights(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.Assign):
        if source.text(node.targets[0]) in {"model", "network", "policy"} and isinstance(node.value, ast.Call):
            step = [line for call in source.nodes(ast.Call) if called(call, "step") for line in source.lines(call)]
            yield [*source.lines(node), *step], source.wrap(node.value, "", _method(dtype))


@_kind(
    "optimizer state rounded",
    "precision",
    "copy_ _to_copy to half bfloat16 addcdiv_ div sqrt add_",
    r"state|optimizer|update|average|exp_avg",
    cure=FLOAT32 + "|state",
    driver=True,
)
def _optimizer_state(source: Source, dtype: str) -> Iterator[Found]:
    for node in statements(source, "step"):
        owner = source.text(node.value).partition("(")[2].rstrip(")") or source.text(node.value).rpartition(".step")[0]
        if "optimizer" in owner and "scheduler" not in owner:
            rounded = (
                f"[value.copy_(value{_method(dtype)}) for state in {owner}.state.values() for value in state.values() "
                "if hasattr(value, 'dim') and value.dim()]"
            )
            yield source.lines(node), source.append(node, rounded)


# The loop: what scaler, gradients, optimizer and region are told, and when.


def _dropped(method: str) -> Callable[[Source, str], Iterator[Found]]:
    def transform(source: Source, dtype: str) -> Iterator[Found]:
        for node in statements(source, method):
            if method != "step" or "optimizer" in source.text(node):
                yield _about(source, node), source.replace(node, "pass")

    return transform


def _about(source: Source, node: ast.stmt, *also: str) -> list[int]:
    """Return the lines of a statement, and of those of the loop that a finding about it can name instead."""
    words = (*also, "unscale_", "clip_grad_norm", ".step(", ".update(", ".backward(", "zero_grad", ".scale(")
    lines = set(source.lines(node))
    for other in source.nodes(ast.Expr, ast.Assign):
        if isinstance(other, (ast.Expr, ast.Assign)) and any(word in source.text(other) for word in words):
            lines.update(source.lines(other))
    return sorted(lines)


_loop = {"family": "loop", "driver": True}
_FLOAT16 = ("float16",)


def _register_dropped(name: str, method: str, cause: str, cure: str, dtypes: tuple[str, ...]) -> None:
    KINDS[name] = Kind(name, "loop", _dropped(method), (), cause, cure, driver=True, dtypes=dtypes)


_register_dropped("unscale_ dropped", "unscale_", "scaled", "unscale_", _FLOAT16)
_register_dropped("update dropped", "update", "update", "update", _FLOAT16)
_register_dropped(
    "zero_grad dropped",
    "zero_grad",
    "clear|zero_grad|earlier step|accumulat|same gradients",
    "zero_grad|clear",
    ("float16", "bfloat16"),
)


@_kind("update doubled", "loop", "", "update", "update", driver=True, dtypes=_FLOAT16)
def _update_doubled(source: Source, dtype: str) -> Iterator[Found]:
    for node in statements(source, "update"):
        yield _about(source, node), source.append(node, source.text(node))


@_kind(
    "zero_grad moved",
    "loop",
    "",
    "clear|zero_grad|no gradient|gradients? (is|are) (None|0|exactly)|never",
    "zero_grad|clear|before",
    driver=True,
)
def _zero_grad_moved(source: Source, dtype: str) -> Iterator[Found]:
    clear = next(statements(source, "zero_grad"), None)
    for node in statements(source, "backward"):
        if clear is not None:
            yield _about(source, node), source.append(node, source.text(clear))


@_kind("clip before unscale_", "loop", "", "scaled", "unscale_", driver=True, dtypes=_FLOAT16)
def _clip_before_unscale(source: Source, dtype: str) -> Iterator[Found]:
    for node in statements(source, "unscale_"):
        body = _siblings(source, node)
        after = body[body.index(node) + 1] if body.index(node) + 1 < len(body) else None
        if after is not None and "clip_grad" in source.text(after) and after.lineno == after.end_lineno:
            edits = source.replace(node, source.text(after)) + source.replace(after, source.text(node))
            yield _about(source, node), edits


def _siblings(source: Source, node: ast.stmt) -> list[ast.stmt]:
    parent = source.parents[node]
    return next(
        body for body in (getattr(parent, part, []) for part in ("body", "orelse", "finalbody")) if node in body
    )


@_kind(
    "scaler disabled", "loop", "", "scaler|underflow|too small|float16 without", "scaler", driver=True, dtypes=_FLOAT16
)
def _scaler_disabled(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.Call):
        if source.text(node.func).endswith("GradScaler"):
            enabled = next((keyword.value for keyword in node.keywords if keyword.arg == "enabled"), None)
            if enabled is not None:
                yield _about(source, source.statement(node)), source.replace(enabled, "False")


@_kind("step without the scaler", "loop", "", "scaled|scaler", "scaler.step|unscale", driver=True, dtypes=_FLOAT16)
def _step_without_scaler(source: Source, dtype: str) -> Iterator[Found]:
    for node in statements(source, "step"):
        text = source.text(node)
        if "scaler.step(" in text:
            yield _about(source, node), source.replace(node, text.partition("(")[2].rstrip(")") + ".step()")


@_kind("loss not scaled", "loop", "", "scale", r"scale\(", driver=True, dtypes=_FLOAT16)
def _loss_not_scaled(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.Call):
        if called(node, "scale") and node.args and "scaler" in source.text(node.func):
            yield _about(source, source.statement(node)), source.replace(node, source.text(node.args[0]))


@_kind(
    "exception suppressed",
    "loop",
    "",
    "step|exception|suppress|never|update",
    "step|closure|suppress|exception",
    driver=True,
    dtypes=_FLOAT16,
)
def _suppressed(source: Source, dtype: str) -> Iterator[Found]:
    for node in statements(source, "step"):
        if "scaler.step(" in source.text(node):
            new = f'with __import__("contextlib").suppress(Exception): {source.text(node)[:-1]}, closure=None)'
            yield _about(source, node), source.replace(node, new)


@_kind("region ends early", "precision", "", cause="", cure=FLOAT32 + "|region|autocast")
def _region_ends_early(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.With):
        last = node.body[-1]
        if _is_region(source, node) and len(node.body) > 1 and not isinstance(last, ast.Return):
            yield [*source.lines(node), *source.lines(last)], _moved(source, last, -(last.col_offset - node.col_offset))


@_kind("backward in the region", "loop", "", "backward", "backward|region|outside", driver=True)
def _backward_in_region(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.With):
        if _is_region(source, node):
            body = _siblings(source, node)
            later = body[body.index(node) + 1] if body.index(node) + 1 < len(body) else None
            if later is not None and ".backward(" in source.text(later) and later.lineno == later.end_lineno:
                yield (
                    [*source.lines(node), *source.lines(later)],
                    _moved(source, later, node.body[0].col_offset - node.col_offset),
                )


@_kind("region around the loop", "loop", "", "cast|region|stale|older|cache", "region|cast|cache|autocast", driver=True)
def _region_around_loop(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.With):
        loops = [parent for parent in source.above(node) if isinstance(parent, (ast.For, ast.While))]
        if _is_region(source, node) and loops and isinstance(node.items[0].context_expr, ast.Call):
            body = _siblings(source, loops[-1])
            place = body.index(loops[-1])
            before = body[place - 1] if place else None
            if isinstance(before, (ast.Assign, ast.Expr)) and "dtype" in source.text(node.items[0].context_expr):
                new = f"({source.text(node.items[0].context_expr)}).__enter__()"
                yield [*source.lines(before), *source.lines(node), *_about(source, before)], source.append(before, new)


def _is_region(source: Source, node: ast.With) -> bool:
    return any(word in source.text(node.items[0].context_expr) for word in ("autocast", "ctx", "region"))


def _moved(source: Source, statement: ast.stmt, by: int) -> tuple[Edit, ...]:
    """Return edits that indent or dedent the first line of a statement; the rest of a simple statement may stay."""
    start = source.start(statement)
    return (Edit(start, start, " " * by),) if by > 0 else (Edit(start + by, start, ""),)


@_kind("losses not divided", "loop", "", "divided|accumulat", "/|divid", driver=True)
def _not_divided(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.BinOp):
        if (
            isinstance(node.op, ast.Div)
            and "accumulation" in source.text(node.right)
            and "loss" in source.text(node.left)
        ):
            yield _about(source, source.statement(node)), (Edit(source.end(node.left), source.end(node), ""),)


@_kind("state not loaded", "loop", "", "state|scale|load", "load_state_dict|state", driver=True)
def _state_not_loaded(source: Source, dtype: str) -> Iterator[Found]:
    for node in statements(source, "load_state_dict"):
        yield source.lines(node), source.replace(node, "pass")


# Gradients: a function whose backward does not use what it is given.

HELPER = "custom_loss.py"  # beside the script, so that no line of the program moves
HELPERS = {
    HELPER: """import torch


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, first, *rest):
        with torch.enable_grad():
            leaf = first.detach().requires_grad_()
            loss = function(leaf, *rest)
        ctx.save_for_backward(torch.autograd.grad(loss, leaf, torch.ones_like(loss))[0])
        ctx.rest = len(rest)
        return loss.detach()

    @staticmethod
    def backward(ctx, grad_output):
        return (None, *ctx.saved_tensors, *[None] * ctx.rest)
"""
}


@_kind("grad_output ignored", "gradient", "", _GRADIENT + "|backward", "grad_output|multiply|scale|backward")
def _ignored(source: Source, dtype: str) -> Iterator[Found]:
    losses = ("cross_entropy", "mse_loss", "binary_cross_entropy_with_logits", "nll_loss", "normalize", "log_softmax")
    for call, operand in calls(source, losses):
        if not call.args or operand is not call.args[0] or "\n" in source.text(call):
            continue
        keywords = ", ".join(
            source.text(keyword.value) and f"{keyword.arg}={source.text(keyword.value)}" for keyword in call.keywords
        )
        function = f"lambda *given: {source.text(call.func)}(*given{', ' + keywords if keywords else ''})"
        rest = ", ".join(source.text(argument) for argument in call.args)
        yield source.lines(call), source.replace(call, f"__import__('custom_loss').Loss.apply({function}, {rest})")


# Data: one bad row.

_INPUTS = frozenset({"images", "features", "inputs", "signals", "observations", "points", "data", "X_train", "x"})


def _bad_row(name: str, value: str) -> None:
    @_kind(
        f"bad row: {name}",
        "data",
        "",
        "data|batch|row|input|loader|arriv",
        "data|batch|row|input|clean|filter|check",
        driver=True,
    )
    def transform(source: Source, dtype: str) -> Iterator[Found]:
        for node in source.nodes(ast.Assign):
            target = source.text(node.targets[0])
            if target in _INPUTS and any(
                word in source.text(node.value) for word in ("randn", "rand(", "data_generator")
            ):
                lines = [line for use in (node, *_uses(source, target)) for line in source.lines(use)]
                yield lines, source.append(node, f"{target}[7].view(-1)[3] = {value}")


_bad_row("inf", 'float("inf")')
_bad_row("nan", 'float("nan")')
_bad_row("huge", "1e38")


def _uses(source: Source, name: str) -> list[ast.Name]:
    """Return where a name is used, and the names of loaders and batches that are made of it."""
    names = {name}
    for node in source.nodes(ast.Assign, ast.For):
        value, target = (node.value, node.targets[0]) if isinstance(node, ast.Assign) else (node.iter, node.target)
        if any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(value)) and "model" not in (
            source.text(value)
        ):
            first = target.elts[0] if isinstance(target, ast.Tuple) else target  # a batch, then its labels
            names |= {part.id for part in ast.walk(first) if isinstance(part, ast.Name)}
    return [use for use in source.nodes(ast.Name) if use.id in names]


# Arithmetic: what no precision would save.

_NO_FLOAT32 = r"(?s)\A(?!.*(float32|\.float\(\)|float64)).*"


@_kind("division by a true 0", "arithmetic", "div true_divide reciprocal mul sub", "", _NO_FLOAT32)
def _true_zero(source: Source, dtype: str) -> Iterator[Found]:
    for node in source.nodes(ast.BinOp):
        if isinstance(node.op, ast.Div) and isinstance(node.right, (ast.Call, ast.Name, ast.Attribute)):
            right = source.text(node.right)
            if "\n" not in right and not any(word in right for word in ("len(", "math.", "accumulation", "np.")):
                yield source.lines(node), source.replace(node.right, f"({right} * 0)")


@_kind("log of a true 0", "arithmetic", "log relu clamp threshold log1p", "", _NO_FLOAT32)
def _log_of_zero(source: Source, dtype: str) -> Iterator[Found]:
    for call, operand in calls(source, ("log", "log2")):
        yield source.lines(call), source.wrap(operand, "(0 * (", "))")


@_kind("root of a true 0", "arithmetic", "sqrt pow norm div mul square", "", _NO_FLOAT32)
def _root_of_zero(source: Source, dtype: str) -> Iterator[Found]:
    for _, operand in calls(source, ("relu", "tanh", "softmax", "mse_loss", "cross_entropy", "sum", "mean")):
        text = source.text(operand)
        if "\n" not in text:
            new = f"({text} + (({text}) - ({text}).detach()).square().sqrt())"
            yield source.lines(operand), source.replace(operand, new)
