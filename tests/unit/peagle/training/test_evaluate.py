"""Measuring a head: the fast walk agrees with decoding for real, and the whole command on files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from peagle.drafter.export import save_flat
from peagle.drafter.head import DraftHead
from peagle.errors import ConfigError
from peagle.training.config import Method
from peagle.training.evaluate import EvaluateConfig, evaluate, measure
from peagle.training.evaluate_reference import reference_decode
from peagle.training.evaluation_data import AnswerSource
from peagle.training.target_answers import Exchange, answer_greedily
from tests.builders.head import tiny_head
from tests.builders.model import write_model
from tests.builders.tokenizer import IM_END_ID, build_tokenizer_directory
from tests.builders.trained_head import build_target, train_head

MAX_NEW_TOKENS = 24
K = 5  # one more than the head was trained for


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    target: Any
    head: DraftHead


@pytest.fixture(scope="module")
def pair() -> Pair:
    target = build_target()
    return Pair(target=target.double(), head=train_head(build_target()).double())


def random_prompts(num_prompts: int, *, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab_size, (2 + i % 4,), generator=generator).tolist() for i in range(num_prompts)]


@pytest.mark.parametrize("end_token_ids", [(), (7, 11)])
def test_the_walk_agrees_with_decoding_for_real(pair: Pair, end_token_ids: tuple[int, ...]) -> None:
    prompts = random_prompts(8, vocab_size=32)
    exchanges = answer_greedily(pair.target, prompts, max_new_tokens=MAX_NEW_TOKENS, end_token_ids=end_token_ids)
    lengths = []
    for prompt, exchange in zip(prompts, exchanges, strict=True):
        if len(exchange.answer_token_ids) < 2:
            continue
        report = measure(pair.target, pair.head, [exchange], num_speculative_tokens=K)
        for counts in report.by_num_speculative_tokens:
            decoded = reference_decode(
                pair.target,
                pair.head,
                prompt,
                num_speculative_tokens=counts.num_speculative_tokens,
                max_new_tokens=MAX_NEW_TOKENS,
                end_token_ids=end_token_ids,
            )
            assert decoded.answer_token_ids == exchange.answer_token_ids
            assert decoded.counts == counts
            lengths.append(counts.acceptance_length)
    assert 1.0 < sum(lengths) / len(lengths) < 1.0 + K  # some drafts were accepted, and some were not


def test_the_report_adds_answers_up(pair: Pair) -> None:
    exchanges = answer_greedily(pair.target, random_prompts(6, vocab_size=32), max_new_tokens=9, end_token_ids=())
    report = measure(pair.target, pair.head, exchanges, num_speculative_tokens=2, num_skipped=3)
    assert (report.num_answers, report.num_answer_tokens, report.num_skipped) == (6, 54, 3)
    assert report.target_agreement == 1.0
    for counts in report.by_num_speculative_tokens:
        assert counts.num_tokens == 48
        assert counts.num_checked[0] == counts.num_rounds
        alone = [measure(pair.target, pair.head, [one], num_speculative_tokens=2) for one in exchanges]
        k = counts.num_speculative_tokens
        assert counts.num_rounds == sum(one.by_num_speculative_tokens[k - 1].num_rounds for one in alone)
    assert report.table().splitlines()[2].startswith("K=2  acceptance length ")
    assert json.loads(json.dumps(report.as_json()))["by_num_speculative_tokens"][1]["num_speculative_tokens"] == 2


def test_the_method_decides_how_later_drafts_are_made(pair: Pair) -> None:
    exchanges = answer_greedily(pair.target, random_prompts(6, vocab_size=32), max_new_tokens=20, end_token_ids=())
    parallel, in_turn = (
        measure(pair.target, pair.head, exchanges, num_speculative_tokens=3, method=method).by_num_speculative_tokens
        for method in get_args(Method)
    )
    assert parallel[0] == in_turn[0]  # the first draft is the same
    assert parallel[2].acceptance_length > in_turn[2].acceptance_length  # the head was trained to draft in parallel


def test_another_models_answers_are_noticed(pair: Pair) -> None:
    exchange = answer_greedily(pair.target, [[1, 2, 3]], max_new_tokens=20, end_token_ids=())[0]
    wrong = tuple((token_id + 1) % 32 for token_id in exchange.answer_token_ids)
    strange = Exchange(prompt_token_ids=exchange.prompt_token_ids, answer_token_ids=wrong)
    report = measure(pair.target, pair.head, [strange], num_speculative_tokens=1)
    assert report.target_agreement < 0.5


def test_answers_of_one_token_leave_nothing_to_draft(pair: Pair) -> None:
    short = Exchange(prompt_token_ids=(1, 2), answer_token_ids=(3,))
    with pytest.raises(ConfigError, match="nothing to draft"):
        measure(pair.target, pair.head, [short], num_speculative_tokens=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a tokenizer, a random head, prompts and answers."""
    root = tmp_path_factory.mktemp("files")
    write_model(root / "target")
    build_tokenizer_directory(root / "target")
    save_flat(tiny_head(dtype=torch.float32), root / "head")
    records = [
        {
            "id": f"r{i}",
            "temperature": 0.7 * (i % 2),
            "finish_reason": "stop",
            "messages": [{"role": "user", "content": "hi" * i}, {"role": "assistant", "content": "hello"}],
        }
        for i in range(1, 11)
    ]
    (root / "answers.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return root


def config(files: Path, **options: Any) -> EvaluateConfig:
    paths: dict[str, Any] = {"target": files / "target", "head": files / "head", "data": files / "answers.jsonl"}
    return EvaluateConfig(**(paths | {"device": "cpu"} | options))


def test_the_target_answers_what_the_file_asks(files: Path) -> None:
    report = evaluate(config(files, max_new_tokens=6, batch_size=3, held_out=0.4, num_speculative_tokens=3))
    assert (report.num_answers, report.num_answer_tokens) == (4, 24)
    assert report.target_agreement == 1.0
    assert [counts.num_tokens for counts in report.by_num_speculative_tokens] == [20, 20, 20]


def test_recorded_greedy_answers_are_taken_as_they_are(files: Path) -> None:
    report = evaluate(config(files, answers=AnswerSource.RECORDED, num_speculative_tokens=2))
    assert (report.num_answers, report.num_skipped) == (5, 5)  # those at 0.7 are skipped
    assert report.num_answer_tokens == 5 * 2  # "hello" is one token, and the end token is said too
    assert report.by_num_speculative_tokens[0].num_tokens == 5
    assert IM_END_ID < 300
    limited = evaluate(config(files, answers=AnswerSource.RECORDED, num_speculative_tokens=1, limit=2))
    assert limited.num_answers == 1


def test_prompts_beyond_the_context_are_skipped(files: Path) -> None:
    with pytest.raises(ConfigError, match="has no prompt to measure on that fits the target's context"):
        evaluate(config(files, max_new_tokens=500))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1"),
        ({"held_out": 0.0}, "held_out must be more than 0"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"method": "medusa"}, "method must be one of peagle, eagle3"),
        ({"device": "tpu"}, "device must be one of"),
        ({"head": Path("/nowhere")}, "no head at /nowhere: config.json is missing"),
    ],
)
def test_impossible_settings_are_refused(files: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(files, **options)
