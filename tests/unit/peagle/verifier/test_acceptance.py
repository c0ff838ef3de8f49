from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.sampling.batch import SamplingMetadata, SamplingRow
from peagle.sampling.logits import target_probs
from peagle.sampling.sampler import sample
from peagle.sampling_params import SamplingParams
from peagle.verifier.acceptance import verify
from peagle.verifier.layout import padded_drafts, padded_rows
from peagle.verifier.reference import reference_verify

VOCAB_SIZE = 5
sequences = st.lists(st.integers(0, 2), max_size=4).flatmap(
    lambda drafts: st.tuples(
        st.lists(st.integers(0, 2), min_size=len(drafts) + 1, max_size=len(drafts) + 1), st.just(drafts)
    )
)


class MarkovTarget:
    """A target whose logits depend on the last token alone."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator, dtype=torch.float64) * 1.5

    def decode(self, params: SamplingParams, seed: int, num_tokens: int, drafts: list[list[int]]) -> list[int]:
        """Tokens after token 0 at position 0, with the drafts of each step (the last entry is used again)."""
        token_ids = [0]
        for step in itertools.count():
            if len(token_ids) > num_tokens:
                return token_ids[1 : num_tokens + 1]
            proposal = drafts[min(step, len(drafts) - 1)]
            inputs = [token_ids[-1], *proposal]
            rows = [SamplingRow(params=params, seed=seed, position=len(token_ids) + i) for i in range(len(inputs))]
            sampled = sample(self.logits[inputs], SamplingMetadata.build(rows)).token_ids
            result = verify(sampled[None], padded_drafts([proposal]))
            emitted = [token_id for token_id in result.output_token_ids[0].tolist() if token_id >= 0]
            assert len(emitted) == int(result.num_accepted_tokens) + 1
            token_ids += emitted
        raise AssertionError

    def probs(self, params: SamplingParams) -> Tensor:
        rows = [SamplingRow(params=params, seed=0, position=0)] * VOCAB_SIZE
        return target_probs(self.logits, SamplingMetadata.build(rows))


@given(st.lists(sequences, min_size=1, max_size=5))
def test_ragged_batch_equals_the_reference(batch: list[tuple[list[int], list[int]]]) -> None:
    packed = torch.tensor([token_id for sampled, _ in batch for token_id in sampled])
    rows = padded_rows([len(drafts) for _, drafts in batch])
    result = verify(packed[rows], padded_drafts([drafts for _, drafts in batch]))
    for i, (sampled, drafts) in enumerate(batch):
        emitted = [token_id for token_id in result.output_token_ids[i].tolist() if token_id != -1]
        assert emitted == reference_verify(sampled, drafts)
        assert result.output_token_ids[i, : len(emitted)].tolist() == emitted
        assert result.num_accepted_tokens[i] == len(emitted) - 1
    assert result.is_valid.all()


def test_only_emitted_rows_can_spoil_a_sequence() -> None:
    sampled = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 0, 3]])
    drafts = torch.tensor([[1, 9], [1, 2], [1, 0]])
    is_valid = torch.tensor([[True, True, False], [True, True, False], [True, False, True]])
    assert verify(sampled, drafts, is_valid).is_valid.tolist() == [True, False, False]


def test_padding_is_never_accepted() -> None:
    result = verify(torch.tensor([[-1, -1, -1]]), torch.tensor([[-1, -1]]))
    assert result.num_accepted_tokens.tolist() == [0]


@settings(deadline=None, max_examples=150)
@given(
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([1.0, 0.7]),
    st.sampled_from([0, 3]),
    st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=3, max_size=3), min_size=1, max_size=8),
)
def test_drafts_never_change_the_tokens(
    seed: int, temperature: float, top_p: float, top_k: int, drafts: list[list[int]]
) -> None:
    target = MarkovTarget(0)
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    assert target.decode(params, seed, 12, drafts) == target.decode(params, seed, 12, [[]])


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.8), SamplingParams(temperature=1.5, top_k=3)]
)
def test_triples_follow_the_exact_target(params: SamplingParams) -> None:
    target = MarkovTarget(1)
    best = target.logits.argmax(-1).tolist()
    drafts = [[best[0], best[best[0]], 1], [2, 2, 2]]
    num_draws = 4000
    counts = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)
    for seed in range(num_draws):
        counts[tuple(target.decode(params, seed, 3, drafts))] += 1
    step = target.probs(params)
    expected = step[0][:, None, None] * step[:, :, None] * step[None] * num_draws
    assert counts[expected == 0].sum() == 0
    common = expected >= 3
    statistic = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    rest, rest_expected = float(counts[~common].sum()), float(expected[~common].sum())
    if rest_expected > 0:
        statistic += (rest - rest_expected) ** 2 / rest_expected
    freedom = int(common.sum())
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5
