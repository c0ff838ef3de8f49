"""`peagle bench spec` on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peagle.spec_benchmark.__main__ import main
from peagle.spec_benchmark.measure import Round
from peagle.spec_benchmark.plan import Heads, plan_variants
from peagle.spec_benchmark.report import Row, render_table
from peagle.spec_config import TreeSpec
from tests.builders.engine import write_checkpoint
from tests.builders.head import TINY_TARGET, write_tiny_head


def a_round(*, tokens: int, seconds: float, drafts: int = 0, accepted: tuple[int, ...] = ()) -> Round:
    return Round(
        num_tokens=tokens,
        seconds=seconds,
        num_steps=10,
        num_drafts=drafts,
        num_draft_tokens=drafts * len(accepted),
        num_accepted_tokens=sum(accepted),
        accepted_per_position=accepted,
        answers=((1, 2),),
    )


def test_rows_compare_the_best_rounds() -> None:
    plain = (a_round(tokens=100, seconds=2.0), a_round(tokens=100, seconds=1.0))
    rounds = (
        a_round(tokens=100, seconds=0.5, drafts=40, accepted=(30, 10)),
        a_round(tokens=100, seconds=4.0, drafts=40, accepted=(30, 10)),
    )
    row = Row(variant="peagle K=2", concurrency=4, rounds=rounds, plain=plain)
    assert (row.tokens_per_s, row.ratio, row.acceptance_length) == (200.0, 2.0, 2.0)
    assert row.rates == [0.75, 0.25]
    assert row.num_different == 0
    assert "2.00x    2.00  0.75 0.25" in render_table([row])


def test_every_way_is_planned_and_plain_decoding_comes_first() -> None:
    tree = TreeSpec(num_branches=2, depth=3)
    variants = plan_variants(Heads(peagle="p", eagle3="e"), depths=(1, 3), tree=tree, with_lookups=True)
    names = [variant.name for variant in variants]
    assert names == [
        "none",
        "eagle3 K=1",
        "eagle3 K=3",
        "peagle K=1",
        "peagle K=3",
        "peagle tree 2x3",
        "suffix",
        "adaptive",
    ]
    assert [variant.spec.is_adaptive for variant in variants if variant.spec.model] == [False] * 4 + [True] * 2
    assert [one.name for one in plan_variants(Heads(), depths=(1,), tree=None, with_lookups=False)] == ["none"]


def test_it_runs_on_any_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_checkpoint(tmp_path / "target")
    head = write_tiny_head(tmp_path / "head", TINY_TARGET)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "b", "c", "d", "e")))
    words = ["--model", str(target), "--peagle", str(head), "--dataset", str(prompts), "--num-prompts", "4"]
    words += ["--max-tokens", "8", "--concurrency", "1,2", "--k", "1,3", "--lookups", "--rounds", "1"]
    assert main(words) == 0
    table, _, line = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    report = json.loads(line)
    assert [row["variant"] for row in report["rows"]] == ["none", "peagle K=1", "peagle K=3", "suffix", "adaptive"] * 2
    assert all(row["num_different_answers"] == 0 for row in report["rows"])
    assert all(row["num_tokens"] == report["rows"][0]["num_tokens"] for row in report["rows"])
    assert "peagle K=3" in table


def test_what_cannot_be_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path), "--dataset", str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.rstrip().splitlines()[-1].startswith("error: ")
