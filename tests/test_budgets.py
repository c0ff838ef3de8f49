"""Files and functions stay small enough to read in one sitting. Deleting code is always welcome."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.source_tree import SourceFile, source_files

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_CONSTRUCTOR_ARGUMENTS = 10
DOCSTRING_FROM_LINES = 16
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc", "base"}

PRODUCT = source_files("peagle", "server")
SOURCES = [*PRODUCT, *source_files("tests")]

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: SourceFile) -> Iterator[Function]:
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def num_arguments(function: Function) -> int:
    """Without `self`."""
    return len(function.args.posonlyargs) + len(function.args.args) + len(function.args.kwonlyargs) - 1


def num_lines(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_files_are_small() -> None:
    long = [f"{source.module}: {source.num_lines} lines" for source in SOURCES if source.num_lines > MAX_FILE_LINES]
    assert long == [], "split it by what it owns"


def test_functions_are_small() -> None:
    long = [
        f"{source.module}.{function.name}: {num_lines(function)} lines"
        for source in SOURCES
        for function in functions(source)
        if num_lines(function) > MAX_FUNCTION_LINES
    ]
    assert long == [], "a function this long does more than one thing"


def test_constructors_are_narrow() -> None:
    wide = [
        f"{source.module}, line {function.lineno}: {num_arguments(function)} arguments"
        for source in SOURCES
        for function in functions(source)
        if function.name == "__init__" and num_arguments(function) > MAX_CONSTRUCTOR_ARGUMENTS
    ]
    assert wide == [], "a constructor this wide wants a dataclass for what belongs together"


def test_modules_say_what_they_own() -> None:
    silent = [
        source.module
        for source in PRODUCT
        if source.num_lines >= DOCSTRING_FROM_LINES and not ast.get_docstring(source.tree)
    ]
    assert silent == [], "begin with what the module owns, and what it refuses to know"


def test_file_names_say_something() -> None:
    vague = [source.module for source in SOURCES if source.path.stem in NAMES_THAT_SAY_NOTHING]
    assert vague == [], "name the thing, or put it beside its only caller"
