"""An operator's schema as the parameters of a Python function, for entries and generated handlers."""

from __future__ import annotations

import functools
import keyword
import linecache
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ampkit.torch_internals.operators import OpOverload

__all__ = ["LIST", "OPTIONAL", "TENSOR", "Signature", "defined", "signature_of"]

TENSOR, OPTIONAL, LIST = "Tensor", "Optional[Tensor]", "List[Tensor]"
_BUILTINS = ("len", "map", "type")  # that sources call


class Signature(NamedTuple):
    """How a generated function takes an operator's arguments from the dispatcher, and passes them on."""

    name: str  # of the function
    params: str  # of `def`: "input, weight, bias=None"
    call: str  # arguments that pass the parameters on: "input, weight, bias"
    tensors: tuple[tuple[str, str], ...]  # the parameters that hold tensors: name, and TENSOR, OPTIONAL or LIST
    dtype: str | None  # the parameter that holds the dtype: "dtype", "_kwargs" or None


@functools.cache
def signature_of(op: OpOverload) -> Signature | None:
    """The parameters of functions for `op`; None if its schema is unusual, so that only the general handler serves it.

    Unusual are a tensor by keyword or in an optional list, and a named parameter with a default other than None. The
    dispatcher omits trailing defaults. Parameters up to the last tensor or dtype have names, since rules may need
    them; those after it pass through as `_rest`.
    """
    positional = [argument for argument in op._schema.arguments if not argument.kwarg_only]
    by_keyword = op._schema.arguments[len(positional) :]
    kinds = [str(argument.type) for argument in positional]
    tensors = [n for n, kind in enumerate(kinds) if "Tensor" in kind]
    dtypes = [n for n, argument in enumerate(positional) if argument.name == "dtype"]
    if (
        not tensors
        or any(kinds[n] not in (TENSOR, OPTIONAL, LIST) for n in tensors)
        or any("Tensor" in str(argument.type) for argument in by_keyword)
    ):
        return None
    named = positional[: max(tensors + dtypes) + 1]
    if any(argument.has_default_value() and argument.default_value is not None for argument in named):
        return None
    names = [_identifier(argument.name) for argument in named]
    params = [
        f"{name}=None" if argument.has_default_value() else name for name, argument in zip(names, named, strict=True)
    ]
    rest = ["*_rest"] if len(positional) > len(named) else []
    if by_keyword:
        rest.append("**_kwargs")
    dtype = None
    if dtypes:
        dtype = "dtype"
    elif any(argument.name == "dtype" for argument in by_keyword):
        dtype = "_kwargs"
    return Signature(
        _identifier(op._schema.name.partition("::")[2]),
        ", ".join([*params, *rest]),
        ", ".join([*names, *rest]),
        tuple((names[n], kinds[n]) for n in tensors),
        dtype,
    )


def _identifier(name: str) -> str:
    """A name that Python takes: with an underscore if it is a keyword, or sources use it for another variable."""
    is_taken = keyword.iskeyword(name) or name.startswith("_") or name in _BUILTINS
    return f"{name}_" if is_taken else name


def defined(name: str, text: str, filename: str, variables: Mapping[str, Any]) -> Callable[..., Any]:
    """Run a source text with `variables` as globals, and return the function of this name that it defines.

    Tracebacks show its lines as lines of a file called `filename`. Each function has code of its own: the interpreter
    caches look-ups of globals in the code, and functions with other globals would miss at every one.
    """
    namespace = dict(variables)
    linecache.cache[filename] = len(text), None, text.splitlines(keepends=True), filename
    exec(compile(text, filename, "exec"), namespace)
    return namespace[name]
