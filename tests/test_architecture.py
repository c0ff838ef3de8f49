"""The import rules of docs/architecture.md, read off the syntax trees."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.source_tree import ROOT, Import, SourceFile, imports_of, source_files

# A part of peagle imports from lower levels and from itself. Level 0 is one part: plain data and errors.
LEVELS = {
    "config": 0,
    "config_field": 0,
    "spec_config": 0,
    "errors": 0,
    "outputs": 0,
    "grammar_spec": 0,
    "sampling_params": 0,
    "sequence": 0,
    "stats": 0,
    "text": 1,
    "kv_cache": 1,
    "layers": 1,
    "gguf_checkpoint": 1,
    "heads": 1,
    "scheduler": 2,
    "attention": 2,
    "fetch": 2,
    "grammar": 2,
    "models": 3,
    "sampling": 3,
    "drafter": 4,
    "verifier": 4,
    "cuda_graphs": 4,
    "runner": 5,
    "engine": 6,
}
BESIDE = {"benchmark", "training", "spec_benchmark"}  # not layers of serving: no layer imports them
FACADE = "peagle"

TORCH_FREE = {"server", "peagle.text", "peagle.scheduler", "peagle.kv_cache", "peagle.benchmark"} | {
    f"peagle.{part}" for part, level in LEVELS.items() if level == 0
}
TORCH_FREE_EXCEPT = "peagle.kv_cache.storage"
TORCH = {"torch", "transformers"}  # importing transformers imports torch
WEB = {"fastapi", "starlette", "pydantic", "uvicorn", "server"}

# What the server may import of peagle at the top of a module: the facade, plain data, text, and the engine's contract.
SERVER_MAY_IMPORT = {FACADE, "peagle.text", "peagle.engine.interface"} | {
    f"peagle.{part}" for part, level in LEVELS.items() if level == 0
}
# And inside a function, where the import is the start of the work (the loader imports torch).
SERVER_MAY_IMPORT_LAZILY = {
    "peagle.engine.loader",
    "peagle.fetch",
    "peagle.benchmark",
    "peagle.training",
    "peagle.spec_benchmark",
}

TRAINING_NEVER_IMPORTS = ("peagle.scheduler", "peagle.kv_cache", "peagle.runner", "peagle.engine")

PEAGLE = source_files("peagle")
SERVER = source_files("server")


def is_within(module: str, packages: set[str] | tuple[str, ...]) -> bool:
    """Whether `module` is one of `packages`, or inside one. The facade has nothing inside it."""
    return any(module == package or (package != FACADE and module.startswith(package + ".")) for package in packages)


def part_of(module: str) -> str:
    """`peagle.text.stop` is part `text`; the facade is part ``."""
    return module.split(".")[1] if "." in module else ""


def imports(sources: list[SourceFile]) -> Iterator[Import]:
    for source in sources:
        yield from imports_of(source)


def breaks_direction(entry: Import) -> bool:
    importer, imported = part_of(entry.importer), part_of(entry.imported)
    if importer == imported or importer in BESIDE:
        return False
    if imported not in LEVELS:  # the facade, or something beside the layers
        return True
    if LEVELS[importer] == 0:
        return LEVELS[imported] > 0
    return LEVELS[imported] >= LEVELS[importer]


def test_every_part_of_peagle_has_a_level() -> None:
    parts = {part_of(source.module) for source in PEAGLE} - {""}
    assert parts - BESIDE <= LEVELS.keys(), "give the new part a level here and in docs/architecture.md"


def test_peagle_imports_downwards_only() -> None:
    layers = [source for source in PEAGLE if part_of(source.module) != ""]
    ours = [entry for entry in imports(layers) if entry.imported.split(".")[0] == "peagle"]
    assert [str(entry) for entry in ours if breaks_direction(entry)] == []


def test_level_0_has_no_cycle() -> None:
    edges = {
        source.module: {entry.imported for entry in imports_of(source) if entry.imported.startswith("peagle.")}
        for source in PEAGLE
        if LEVELS.get(part_of(source.module)) == 0
    }
    while edges:
        free = [module for module, needs in edges.items() if not needs & edges.keys()]
        assert free, f"these import each other: {', '.join(sorted(edges))}"
        for module in free:
            del edges[module]


def test_peagle_knows_neither_the_server_nor_the_web() -> None:
    assert [str(entry) for entry in imports(PEAGLE) if entry.imported.split(".")[0] in WEB] == []


def test_the_server_imports_only_the_surface_of_peagle() -> None:
    ours = [entry for entry in imports(SERVER) if entry.imported.split(".")[0] == "peagle"]
    allowed = [
        is_within(entry.imported, SERVER_MAY_IMPORT)
        or (entry.is_lazy and is_within(entry.imported, SERVER_MAY_IMPORT_LAZILY))
        for entry in ours
    ]
    assert [str(entry) for entry, fine in zip(ours, allowed, strict=True) if not fine] == []


def test_torch_stays_where_it_belongs() -> None:
    free = [source for source in PEAGLE + SERVER if is_within(source.module, TORCH_FREE)]
    found = [entry for entry in imports(free) if entry.imported.split(".")[0] in TORCH]
    assert [str(entry) for entry in found if entry.importer != TORCH_FREE_EXCEPT] == []


def test_the_benchmark_imports_nothing_of_peagle() -> None:
    benchmark = [source for source in PEAGLE if part_of(source.module) == "benchmark"]
    ours = [entry for entry in imports(benchmark) if entry.imported.split(".")[0] in ("peagle", "server")]
    assert [str(entry) for entry in ours if not is_within(entry.imported, ("peagle.benchmark",))] == []


def test_training_shares_the_head_and_not_the_loops() -> None:
    training = [source for source in PEAGLE if part_of(source.module) == "training"]
    assert [str(entry) for entry in imports(training) if is_within(entry.imported, TRAINING_NEVER_IMPORTS)] == []


def test_torch_free_modules_import_without_torch() -> None:
    """Also what they import in turn. Runs in a fresh interpreter in which importing torch fails."""
    modules = [
        source.module
        for source in PEAGLE + SERVER
        if is_within(source.module, TORCH_FREE) and source.module != TORCH_FREE_EXCEPT
    ]
    blocked = "import sys; sys.modules['torch'] = None\n"
    code = blocked + "\n".join(f"import {module}" for module in modules if not module.endswith("__main__"))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("importer", "imported", "broken"),
    [
        ("peagle.scheduler.scheduler", "peagle.kv_cache", False),
        ("peagle.scheduler.scheduler", "peagle.attention", True),
        ("peagle.drafter.null", "peagle.verifier.layout", True),
        ("peagle.text.stop", "peagle.text.tokenizer", False),
        ("peagle.config", "peagle.errors", False),
        ("peagle.config", "peagle.text", True),
        ("peagle.runner.memory", "peagle.engine.engine", True),
        ("peagle.engine.engine", "peagle", True),
        ("peagle.engine.engine", "peagle.benchmark.load", True),
        ("peagle.training.trainer", "peagle.drafter.head", False),
    ],
)
def test_the_direction_rule_itself(importer: str, imported: str, broken: bool) -> None:
    entry = Import(importer=importer, imported=imported, line=1, is_lazy=False)
    assert breaks_direction(entry) is broken
