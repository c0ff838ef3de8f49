"""The source files as syntax trees, for the tests that judge the code's shape.

Owns where the sources lie and what counts as an import. Refuses to know the rules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One Python file. `module` is its dotted name (a package's `__init__` is the package's)."""

    path: Path
    module: str
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module, wherever in the file it stands. `is_lazy`: inside a function."""

    importer: str
    imported: str
    line: int
    is_lazy: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def source_files(*packages: str) -> list[SourceFile]:
    """Every Python file of the given top-level packages, in order."""
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return [_read(path) for path in paths]


def imports_of(source: SourceFile) -> Iterator[Import]:
    """Every import of a file. `from a import b` counts as `a.b` where that is a module of ours, else as `a`."""
    lazy = {
        id(node)
        for function in ast.walk(source.tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(source.tree):
        for name in _imported_names(node):
            yield Import(importer=source.module, imported=name, line=node.lineno, is_lazy=id(node) in lazy)  # type: ignore[attr-defined]


def _imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, f"relative import in line {node.lineno}: write the whole name"
    base = node.module or ""
    return [f"{base}.{alias.name}" if _is_module(f"{base}.{alias.name}") else base for alias in node.names]


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


def _read(path: Path) -> SourceFile:
    text = path.read_text(encoding="utf-8")
    parts = path.relative_to(ROOT).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return SourceFile(path=path, module=module, text=text, tree=ast.parse(text))
