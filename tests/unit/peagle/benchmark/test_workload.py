"""Prompts and bodies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peagle.benchmark import BenchmarkError
from peagle.benchmark.workload import GenerationSettings, built_in_prompts, choose_prompts, read_prompts


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return path


def test_the_three_kinds_of_rows(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    question = {"role": "user", "content": "Hi"}
    rows = [
        {"messages": [system, question]},
        {"messages": [question, {"role": "assistant", "content": "Hello"}]},
        {"prompt": "Two\u2028lines"},
        {"question_id": 81, "turns": ["First", "Second"]},
    ]
    assert read_prompts(write_rows(tmp_path / "rows.jsonl", *rows)) == [
        [system, question],
        [question],
        [{"role": "user", "content": "Two\u2028lines"}],
        [{"role": "user", "content": "First"}],
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"text": "x"},
        {"prompt": ""},
        {"prompt": 3},
        {"turns": []},
        {"messages": []},
        {"messages": ["hi"]},
        {"messages": [{"role": "assistant", "content": "x"}]},
        [1],
        {"prompt": "\ud800"},
    ],
)
def test_a_row_that_fits_none_is_named(tmp_path: Path, row: object) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "ok"}, row)
    with pytest.raises(BenchmarkError, match=r"rows\.jsonl:2: "):
        read_prompts(path)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "latin1").write_bytes(b'{"prompt": "\xe9"}')
    (tmp_path / "broken").write_text("{")
    with pytest.raises(BenchmarkError, match="has no rows"):
        read_prompts(tmp_path / "empty")
    with pytest.raises(BenchmarkError, match="cannot read"):
        read_prompts(tmp_path / "latin1")
    with pytest.raises(BenchmarkError, match="cannot read"):
        read_prompts(tmp_path / "missing")
    with pytest.raises(BenchmarkError, match="broken:1: "):
        read_prompts(tmp_path / "broken")


def test_only_the_seed_decides_the_order() -> None:
    prompts = built_in_prompts()
    chosen = choose_prompts(prompts, num_prompts=len(prompts), seed=1)
    assert chosen == choose_prompts(prompts, num_prompts=len(prompts), seed=1)
    assert chosen != choose_prompts(prompts, num_prompts=len(prompts), seed=2)
    assert chosen != prompts


def test_every_prompt_is_used_before_any_is_used_twice() -> None:
    prompts = built_in_prompts()
    chosen = choose_prompts(prompts, num_prompts=len(prompts) * 2 + 3, seed=0)
    assert len(chosen) == len(prompts) * 2 + 3
    for start in (0, len(prompts)):
        lap = chosen[start : start + len(prompts)]
        assert sorted(lap, key=str) == sorted(prompts, key=str)
    assert choose_prompts(prompts, num_prompts=3, seed=0) == chosen[:3]


def test_body() -> None:
    messages = built_in_prompts()[0]
    body = GenerationSettings(max_tokens=5, temperature=0.5, seed=10).body(messages, model="m", index=3)
    assert body == {
        "model": "m",
        "messages": messages,
        "max_tokens": 5,
        "temperature": 0.5,
        "seed": 13,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_extra_fields_win_and_ignore_eos_is_only_sent_when_asked() -> None:
    settings = GenerationSettings(max_tokens=5, ignore_eos=True, extra_body={"top_k": 1, "seed": None})
    body = settings.body([], model="m", index=0)
    assert (body["ignore_eos"], body["top_k"], body["seed"]) == (True, 1, None)


@pytest.mark.parametrize("name", ["model", "messages", "stream", "stream_options", "n"])
def test_fields_that_carry_the_measurement_are_refused(name: str) -> None:
    with pytest.raises(BenchmarkError, match=f"cannot set {name}:"):
        GenerationSettings(max_tokens=1, extra_body={name: 1})
