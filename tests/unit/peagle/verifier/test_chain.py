"""R2 and R3 against their references, on ragged batches and in the corners of p and q."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.sampling.noise import Stream, row_key, step_key, uniform
from peagle.sampling.race import as_int64, winners
from peagle.verifier.acceptance import VerifyResult
from peagle.verifier.block import verify_block
from peagle.verifier.chain import ChainNoise, DrawnChains
from peagle.verifier.chain_reference import reference_block, reference_standard
from peagle.verifier.rejection import verify_standard

FastRule = Callable[[DrawnChains, ChainNoise], VerifyResult]
SlowRule = Callable[[DrawnChains, ChainNoise, int], list[int]]
RULES: list[tuple[FastRule, SlowRule]] = [(verify_standard, reference_standard), (verify_block, reference_block)]
FAST = [fast for fast, _ in RULES]


@st.composite
def drawn_chains(draw: st.DrawFn) -> DrawnChains:
    """Distributions that are sharp, flat, equal or without common tokens; drafts that q may not know."""
    num_seqs, num_drafts, vocab_size = draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(2, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    target = torch.randn(num_seqs, num_drafts + 1, vocab_size, generator=generator, dtype=torch.float64)
    noise = torch.randn(num_seqs, num_drafts, vocab_size, generator=generator, dtype=torch.float64)
    drawn = target[:, :-1] + draw(st.sampled_from([0.0, 0.3, 2.0])) * noise
    sharpness = draw(st.sampled_from([0.5, 2.0, 50.0]))
    holes = draw(st.sampled_from([0.0, 0.4]))
    tensors = []
    for logits in (target, drawn):
        is_hole = torch.rand(logits.shape, generator=generator, dtype=torch.float64) < holes
        is_hole[..., 0] = False
        tensors.append(torch.softmax((logits * sharpness).masked_fill(is_hole, float("-inf")), -1))
    target, drawn = tensors
    drafts = torch.randint(0, vocab_size, (num_seqs, num_drafts), generator=generator)
    if draw(st.booleans()) and drafts.numel():
        drafts = torch.multinomial(drawn.flatten(0, 1), 1, generator=generator).view(drafts.shape)
    lengths = torch.tensor(draw(st.lists(st.integers(0, num_drafts), min_size=num_seqs, max_size=num_seqs)))
    drafts = torch.where(torch.arange(num_drafts) < lengths[:, None], drafts, -1)
    return DrawnChains(target_probs=target, draft_token_ids=drafts, draft_probs=drawn)


def noise_for(chains: DrawnChains, seed: int = 0) -> ChainNoise:
    num_seqs, num_drafts = chains.draft_token_ids.shape
    return ChainNoise.build(
        [seed + n for n in range(num_seqs)], [5 * n for n in range(num_seqs)], num_drafts=num_drafts
    )


def emitted(result: VerifyResult) -> list[list[int]]:
    return [[token_id for token_id in row if token_id != -1] for row in result.output_token_ids.tolist()]


@pytest.mark.parametrize(("fast", "slow"), RULES)
@settings(deadline=None, max_examples=200)
@given(chains=drawn_chains(), seed=st.integers(-(2**63), 2**63 - 5))
def test_equals_the_reference(fast: FastRule, slow: SlowRule, chains: DrawnChains, seed: int) -> None:
    noise = noise_for(chains, seed)
    result = fast(chains, noise)
    num_seqs = len(chains.draft_token_ids)
    wanted = [slow(chains, noise, n) for n in range(num_seqs)]
    assert emitted(result) == wanted
    assert result.num_accepted_tokens.tolist() == [len(tokens) - 1 for tokens in wanted]
    for n, tokens in enumerate(wanted):
        assert result.output_token_ids[n, : len(tokens)].tolist() == tokens, "padding comes last"
    assert result.is_valid.all()


@pytest.mark.parametrize("rule", FAST)
@settings(deadline=None, max_examples=50)
@given(chains=drawn_chains())
def test_what_is_emitted_can_be_said(rule: FastRule, chains: DrawnChains) -> None:
    """Every emitted token has a probability, and no sequence depends on its neighbours."""
    noise = noise_for(chains)
    rows = emitted(rule(chains, noise))
    for n, tokens in enumerate(rows):
        for i, token_id in enumerate(tokens):
            assert chains.target_probs[n, i, token_id] > 0
        one = slice(n, n + 1)
        alone = DrawnChains(
            target_probs=chains.target_probs[one],
            draft_token_ids=chains.draft_token_ids[one],
            draft_probs=chains.draft_probs[one],
        )
        assert emitted(rule(alone, ChainNoise(coins=noise.coins[one], keys=noise.keys[one]))) == [tokens]


@pytest.mark.parametrize("rule", FAST)
@settings(deadline=None, max_examples=50)
@given(chains=drawn_chains())
def test_without_drafts_it_is_plain_decoding(rule: FastRule, chains: DrawnChains) -> None:
    noise = noise_for(chains)
    result = rule(replace(chains, draft_token_ids=torch.full_like(chains.draft_token_ids, -1)), noise)
    assert emitted(result) == winners(chains.target_probs[:, 0], noise.keys[:, :1], None)[:, None].tolist()


@pytest.mark.parametrize("rule", FAST)
def test_a_row_without_a_distribution_spoils_only_those_who_reach_it(rule: FastRule) -> None:
    """q = p, so that all drafts are accepted until the row that is broken; a draft without probability stops before."""
    probs = torch.full((3, 3, 4), 0.25, dtype=torch.float64)
    drafts = torch.tensor([[1, 2], [1, 2], [0, 2]])
    chains = DrawnChains(target_probs=probs.clone(), draft_token_ids=drafts, draft_probs=probs[:, :2].clone())
    chains.target_probs[2, 0] = torch.tensor([0.0, 0.5, 0.5, 0.0])
    chains.target_probs[[0, 2], 1] = float("nan")
    is_valid = torch.tensor([[True, False, True], [True, True, True], [True, False, True]])
    result = rule(chains, noise_for(chains), is_valid=is_valid)  # type: ignore[call-arg]
    assert result.is_valid.tolist() == [False, True, True]
    assert result.num_accepted_tokens.tolist() == [1, 2, 0]


@pytest.mark.parametrize("rule", FAST)
def test_a_certain_draft_is_accepted_as_often_as_the_target_says_it(rule: FastRule) -> None:
    num_seqs = 4000
    target = torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64)
    drafts = torch.ones(num_seqs, 1, dtype=torch.int64)
    for drawn in ([0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 0.0]):
        q = torch.tensor(drawn, dtype=torch.float64).expand(num_seqs, 1, 3)
        chains = DrawnChains(target_probs=target.expand(num_seqs, 2, 3), draft_token_ids=drafts, draft_probs=q)
        result = rule(chains, ChainNoise.build(range(num_seqs), [7] * num_seqs, num_drafts=1))
        assert float(result.num_accepted_tokens.double().mean()) == pytest.approx(0.6, abs=0.04)
        recovered = result.output_token_ids[result.num_accepted_tokens == 0, 0]
        assert (recovered != 1).all()


@pytest.mark.parametrize("rule", FAST)
def test_extreme_probabilities_stay_finite(rule: FastRule) -> None:
    """A q so small that p / q overflows, after a draft that the target cannot say."""
    target = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]], dtype=torch.float64)
    drawn = torch.tensor([[[1.0, 0.0], [5e-324, 1.0]]], dtype=torch.float64)
    chains = DrawnChains(target_probs=target, draft_token_ids=torch.tensor([[0, 0]]), draft_probs=drawn)
    assert emitted(rule(chains, noise_for(chains))) == [[1]]


@pytest.mark.parametrize("rule", FAST)
def test_rounding_leaves_a_token_to_draw(rule: FastRule) -> None:
    """p = q but for a factor that rounding could leave: even if the coin fails, the token comes from p."""
    target = torch.tensor([[[0.0, 0.5, 0.5]] * 2], dtype=torch.float64)
    drawn = target[:, :1] * (1 + 1e-9)
    chains = DrawnChains(target_probs=target, draft_token_ids=torch.tensor([[1]]), draft_probs=drawn)
    coins = torch.full((1, 1), 1 - 1e-12, dtype=torch.float64)
    result = rule(chains, replace(noise_for(chains), coins=coins))
    assert result.num_accepted_tokens.tolist() == [0]
    assert emitted(result)[0][0] in (1, 2)


def test_noise_is_keyed_by_sequence_step_and_row() -> None:
    noise = ChainNoise.build([4, -9], [10, 3], num_drafts=2)
    for n, (seed, position) in enumerate([(4, 10), (-9, 3)]):
        assert noise.coins[n].tolist() == [uniform(step_key(seed, position, Stream.COINS), i) for i in range(2)]
        assert noise.keys[n].tolist() == [as_int64(row_key(seed, position + i)) for i in range(3)]
    empty = ChainNoise.build([], [], num_drafts=0)
    assert (empty.coins.shape, empty.keys.shape) == ((0, 0), (0, 1))
