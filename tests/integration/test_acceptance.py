"""What serving accepts, position by position, is what the same head accepts offline.

The offline figures are teacher-forced: the drafts of every place of an answer are made in one pass over the answer that
is known already, without a KV cache, without steps, and without the serving path. A head whose later positions were
fed wrongly in serving would show a cliff between positions that training never saw.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from peagle import LLMEngine, SpecConfig
from peagle.training.acceptance import AcceptanceCounts
from peagle.training.evaluate import measure
from peagle.training.target_answers import answer_greedily
from tests.builders.engine import ask, make_engine, make_request
from tests.builders.tokenizer import build_tokenizer_directory
from tests.builders.trained_head import VOCAB_SIZE, build_target, train_head, write_trained_pair

K = 4
NUM_PROMPTS = 32
NUM_TOKENS = 110


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB_SIZE, (3 + i % 5,), generator=generator).tolist() for i in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def offline(prompts: list[list[int]]) -> AcceptanceCounts:
    target = build_target().double()
    head = train_head(build_target()).double()
    exchanges = answer_greedily(target, prompts, max_new_tokens=NUM_TOKENS, end_token_ids=())
    return measure(target, head, exchanges, num_speculative_tokens=K).by_num_speculative_tokens[-1]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    pair = write_trained_pair(Path(tmp_path_factory.mktemp("pair")))
    build_tokenizer_directory(pair.target)
    spec = SpecConfig(model=str(pair.head), num_speculative_tokens=K, adaptive_verification=False)
    return make_engine(pair.target, spec=spec, dtype="float64", num_kv_blocks=2048, max_num_seqs=8, max_model_len=128)


def test_serving_accepts_what_the_head_accepts_offline(
    engine: LLMEngine, offline: AcceptanceCounts, prompts: list[list[int]]
) -> None:
    ask(engine, *[make_request(str(i), prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(prompts)])
    served = engine.stats().spec_decode
    assert served.num_drafts > 500
    reached = [served.num_drafts, *served.num_accepted_tokens_per_pos]
    for position in range(K):
        rate = reached[position + 1] / reached[position]
        expected = offline.conditional_rates[position]
        # Both decode the same answers greedily; only rounds at the end of an answer, where fewer drafts fit, differ.
        error = math.sqrt(max(expected * (1 - expected), 0.01) / reached[position])
        assert abs(rate - expected) < 2 * error, f"position {position}: {rate:.3f} served, {expected:.3f} offline"
    assert 1 + served.num_accepted_tokens / served.num_drafts == pytest.approx(offline.acceptance_length, rel=0.03)
    assert 0.2 < offline.conditional_rates[0] < 0.99, "a head that is always right or never would show nothing"
