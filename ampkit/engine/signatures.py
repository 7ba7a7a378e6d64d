"""An operator's schema as the parameters of a Python function, for functions that are generated per operator."""

from __future__ import annotations

import functools
import keyword
import linecache
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, NamedTuple

from ampkit.torch_internals.operators import OpOverload

__all__ = ["LIST", "OPTIONAL", "TENSOR", "Signature", "defined", "signature_of"]

TENSOR, OPTIONAL, LIST = "Tensor", "Optional[Tensor]", "List[Tensor]"


class Signature(NamedTuple):
    """How a generated handler takes an operator's arguments from the dispatcher, and passes them on."""

    name: str
    params: str
    call: str
    tensors: tuple[tuple[str, str], ...]    # of the parameters that hold tensors: name, and TENSOR, OPTIONAL or LIST
    dtype: str | None                       # what `dtype` is, if the operator has it: a parameter, or one of _kwargs


@functools.cache
def signature_of(op: OpOverload) -> Signature | None:
    """None if a tensor comes by keyword or in an optional list, or if a named parameter has a default other than None.

    The dispatcher omits trailing defaults. Parameters up to the last that may matter to a rule, a tensor or the dtype,
    have names; those after it pass through as `_rest`.
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
    names = [argument.name + "_" * keyword.iskeyword(argument.name) for argument in named]
    params = [
        f"{name}=None" if argument.has_default_value() else name for name, argument in zip(names, named, strict=True)
    ]
    rest = ["*_rest"] * (len(positional) > len(named)) + ["**_kwargs"] * bool(by_keyword)
    dtype = None
    if dtypes:
        dtype = "dtype"
    elif any(argument.name == "dtype" for argument in by_keyword):
        dtype = "_kwargs"
    name = op._schema.name.partition("::")[2]
    return Signature(
        name + "_" * keyword.iskeyword(name), ", ".join([*params, *rest]), ", ".join([*names, *rest]),
        tuple((names[n], kinds[n]) for n in tensors), dtype,
    )


def defined(name: str, text: str, filename: str, variables: Mapping[str, Any]) -> Callable[..., Any]:
    """The function of this name that a source text defines, with `variables` as its globals.

    Tracebacks show its lines as those of a file called `filename`.
    """
    namespace = dict(variables)
    exec(_code(text, filename), namespace)
    return namespace[name]


@functools.cache
def _code(text: str, filename: str) -> CodeType:
    linecache.cache[filename] = len(text), None, text.splitlines(keepends=True), filename
    return compile(text, filename, "exec")
