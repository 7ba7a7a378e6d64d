"""Python source that can be edited at the places of its syntax tree, without moving a line."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

MODULES = frozenset({"torch", "F", "functional", "nn.functional", "torch.nn.functional", "nn.init", "torch.linalg"})
OTHERS = frozenset({"np", "numpy", "math", "random", "os", "time", "sys", "string", "json", "plt", "self", "optim"})


@dataclass(frozen=True)
class Edit:
    """Bytes from `start` to `end` of a source are replaced by `new`."""

    start: int
    end: int
    new: str


class Source:
    """The source of a file, its syntax tree and the byte offsets of nodes."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.tree = ast.parse(text)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt) -> int:
        """Return the offset of a node's first byte."""
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        """Return the offset after a node's last byte."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        """Return the source of a node."""
        return self.data[self.start(node) : self.end(node)].decode()

    def nodes(self, *kinds: type) -> Iterator[Any]:
        """Yield the nodes of given kinds, in the order of the source, without defaults, annotations and decorators."""
        found: list[Any] = [node for node in ast.walk(self.tree) if isinstance(node, kinds)]
        for node in sorted(found, key=lambda node: (node.lineno, node.col_offset)):
            if not any(isinstance(parent, (ast.arguments, ast.arg, ast.JoinedStr)) for parent in self.above(node)):
                yield node

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that contain a node, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that contains a node, or the node itself if it is one."""
        if isinstance(node, ast.stmt):
            return node
        return next(parent for parent in self.above(node) if isinstance(parent, ast.stmt))

    def lines(self, node: ast.AST) -> range:
        """Return the lines of a node's statement; of one with a body, those of its header."""
        statement = self.statement(node)
        body = getattr(statement, "body", None)
        last = body[0].lineno - 1 if isinstance(body, list) and body else statement.end_lineno
        return range(statement.lineno, max(statement.lineno, last or 0) + 1)

    def wrap(self, node: ast.expr, before: str, after: str) -> tuple[Edit, ...]:
        """Return edits that put text before and after an expression."""
        start, end = self.start(node), self.end(node)
        return Edit(start, start, before), Edit(end, end, after)

    def replace(self, node: ast.expr | ast.stmt, new: str) -> tuple[Edit, ...]:
        """Return the edit that replaces a node; lines that it took stay, as line breaks in parentheses would."""
        lost = self.text(node).count("\n") - new.count("\n")
        if lost and isinstance(node, ast.stmt):
            new += "\n" * lost
        elif lost:
            new = f"({new}" + "\n" * lost + ")"
        return (Edit(self.start(node), self.end(node), new),)

    def append(self, statement: ast.stmt, new: str) -> tuple[Edit, ...]:
        """Return the edit that puts a statement behind one, on its last line."""
        return (Edit(self.end(statement), self.end(statement), f"; {new}"),)


def edited(text: str, edits: Iterable[Edit]) -> str:
    """Return a text with edits applied, which must not overlap."""
    data, end = text.encode(), len(text.encode())
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
        if edit.end > end:
            raise ValueError(f"{edit} overlaps the edit behind it, which begins at byte {end}")
        data, end = data[: edit.start] + edit.new.encode() + data[edit.end :], edit.start
    return data.decode()


def reverse(text: str, edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """Return the edits that take the edited text back to `text`."""
    data, moved, back = text.encode(), 0, []
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        new = edit.new.encode()
        start = edit.start + moved
        back.append(Edit(start, start + len(new), data[edit.start : edit.end].decode()))
        moved += len(new) - (edit.end - edit.start)
    return tuple(back)


def calls(source: Source, names: Iterable[str]) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield the calls of functions and methods of tensors with one of these names, and the tensor that they take."""
    wanted = set(names)
    for node in source.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in wanted:
            continue
        owner = source.text(node.func.value)
        if owner in MODULES:
            if node.args and not isinstance(node.args[0], (ast.Constant, ast.Starred, ast.List, ast.Tuple)):
                yield node, node.args[0]
        elif owner not in OTHERS and not (owner.startswith("self.") and node.args):
            yield node, node.func.value


def called(node: ast.AST, name: str) -> bool:
    """Return whether a node is a call of a method with this name."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


def statements(source: Source, name: str) -> Iterator[ast.Expr]:
    """Yield the statements on one line that only call a method with this name."""
    for node in source.nodes(ast.Expr):
        if isinstance(node, ast.Expr) and called(node.value, name) and node.lineno == node.end_lineno:
            yield node
