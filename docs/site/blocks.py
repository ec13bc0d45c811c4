"""The set-up of each Python block of a page: what it needs of the blocks above it, no more."""

from __future__ import annotations

import ast
import builtins
import doctest
import re
import symtable
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_PARSER = doctest.DocTestParser()


class Block(NamedTuple):
    """A Python block of a page.

    Attributes:
        text: Text between the fences.
        setup: Statements of earlier blocks that it needs, as a program; empty if it needs none.
    """

    text: str
    setup: str


class _Statement(NamedTuple):
    source: str
    reads: frozenset[str]
    binds: frozenset[str]
    changes: frozenset[str]


def texts_of(page: str) -> list[str]:
    """Return the texts of the blocks of a page that are marked as ``python``."""
    return re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def blocks(texts: Iterable[str]) -> list[Block]:
    r"""Return the blocks of a page with their set-up.

    A statement belongs to the set-up of a block if it binds a name that is read later on the way
    to the block, or may change its value, as ``buffer.add(trajectory)`` does.

    Example:
        >>> [block.setup for block in blocks(["import math\nx, y = 1, 2", "math.sqrt(x)"])]
        ['', 'import math\nx, y = 1, 2\n']
    """
    found: list[Block] = []
    above: list[_Statement] = []
    for text in texts:
        own = [*_statements(code(text))]
        needed: frozenset[str] = frozenset()
        for statement in reversed(own):
            needed = (needed - statement.binds) | statement.reads
        setup: list[str] = []
        for statement in reversed(above):
            if needed & (statement.binds | statement.changes):
                setup.insert(0, statement.source)
                needed = (needed - statement.binds) | statement.reads
        found.append(Block(text, "".join(f"{source}\n" for source in setup)))
        above += own
    return found


def code(text: str) -> str:
    """Return a block as a program: of a session with prompts, what was typed."""
    if ">>>" not in text:
        return text
    return "".join(example.source for example in _PARSER.get_examples(text))


def _statements(source: str) -> Iterator[_Statement]:
    for node in ast.parse(source).body:
        piece = ast.get_source_segment(source, node) or ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node, *node.decorator_list], key=lambda part: part.lineno)
            piece = "\n".join(source.splitlines()[first.lineno - 1 : node.end_lineno])
        top = symtable.symtable(piece, "page", "exec")
        reads, binds = set(), set()
        for symbol in top.get_symbols():
            if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                binds.add(symbol.get_name())
            if symbol.is_referenced():
                reads.add(symbol.get_name())
        for table in _inner(top):
            for symbol in table.get_symbols():
                if symbol.is_global() and symbol.is_referenced():
                    reads.add(symbol.get_name())
        changes = {*_changed(node)} - {*dir(builtins)}
        if not isinstance(node, ast.Assign | ast.AnnAssign):  # what is bound inside is read after
            reads -= binds
        reads |= {*_augmented(node)}
        yield _Statement(piece, *map(frozenset, (reads | (changes - binds), binds, changes)))


def _inner(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _inner(child)


def _augmented(node: ast.stmt) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
            yield part.target.id


def _changed(node: ast.stmt) -> Iterator[str]:
    """Yield the names whose values a statement may change."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for part in ast.walk(node):
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call | ast.Await):
            call = part.value.value if isinstance(part.value, ast.Await) else part.value
            yield from _roots(getattr(call, "func", call))
            for argument in getattr(call, "args", []):
                yield from _roots(argument)
        elif isinstance(part, ast.withitem):  # often a file, which is not what it was afterwards
            for argument in getattr(part.context_expr, "args", []):
                yield from _roots(argument)
        elif isinstance(part, ast.Attribute | ast.Subscript) and not isinstance(part.ctx, ast.Load):
            yield from _roots(part)


def _roots(node: ast.expr) -> Iterator[str]:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        yield node.id
