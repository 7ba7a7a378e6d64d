"""Public callables document each of their parameters, in a section `Args:` of their docstring or of their class's."""

import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

PACKAGES = ("ampkit", "ampkit.amp", "ampkit.debugging", "ampkit.optim", "ampkit_kernels")


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions and classes that the packages export, and the public methods that these classes have from ampkit."""
    for package in map(importlib.import_module, PACKAGES):
        for name in package.__all__:
            value = getattr(package, name)
            if not callable(value):
                continue
            yield f"{package.__name__}.{name}", value
            for method in dir(value) if inspect.isclass(value) else ():
                function = inspect.getattr_static(value, method)
                function = getattr(function, "__func__", function)  # of class and static methods
                ours = getattr(function, "__module__", None) or ""
                if not method.startswith("_") and inspect.isfunction(function) and ours.startswith("ampkit"):
                    yield f"{package.__name__}.{name}.{method}", function


def undocumented(value: Callable[..., Any]) -> list[str]:
    """The parameters of a callable that no line of its section `Args:` begins with."""
    docstring = inspect.getdoc(value) or ""
    if inspect.isclass(value) and issubclass(value, (Exception, enum.Enum)):
        return [] if docstring else ["everything"]
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", docstring, flags=re.MULTILINE)
    documented = re.findall(r"^    ((?:\*{0,2}\w+(?:, )?)+):", section[1], flags=re.MULTILINE) if section else []
    names = {name.strip("* ") for group in documented for name in group.split(",")}
    parameters = inspect.signature(value).parameters.values()
    names |= {"self", "cls"}
    return [each.name for each in parameters if each.name not in names and not each.name.startswith("_")]


def test_public_callables_document_each_parameter() -> None:
    missing = {name: found for name, value in public_callables() if (found := undocumented(value))}
    assert not missing, "\n".join(f"{name}: no line in Args for {', '.join(found)}" for name, found in missing.items())
