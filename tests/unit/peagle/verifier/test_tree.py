"""R1 on trees: the reference, plain decoding with the same seed, and the exact distribution."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.sampling.noise import row_key
from peagle.sampling.race import as_int64, winners
from peagle.sampling_params import SamplingParams
from peagle.verifier.acceptance import verify
from peagle.verifier.layout import padded_drafts
from peagle.verifier.tree import TokenTrees, verify_tree
from peagle.verifier.tree_reference import reference_verify_tree
from tests.builders.markov import VOCAB_SIZE, count_strings, exact_strings, excess, probs_of, random_logits

Tree = tuple[list[int], list[int]]  # tokens and parents


@st.composite
def trees(draw: st.DrawFn, max_num_nodes: int = 8) -> Tree:
    """Parents before children, siblings with different tokens."""
    token_ids: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, max_num_nodes))):
        parent = draw(st.integers(-1, node - 1))
        taken = {token_ids[j] for j, other in enumerate(parents) if other == parent}
        free = sorted(set(range(VOCAB_SIZE)) - taken)
        if free:
            token_ids.append(draw(st.sampled_from(free)))
            parents.append(parent)
        else:
            break
    return token_ids, parents


def depths_of(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


@settings(deadline=None, max_examples=200)
@given(batch=st.lists(trees(), min_size=1, max_size=4), data=st.data())
def test_ragged_batch_equals_the_reference(batch: list[Tree], data: st.DataObject) -> None:
    sampled = [
        data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=len(tokens) + 1, max_size=len(tokens) + 1))
        for tokens, _ in batch
    ]
    result = verify_tree(
        padded_drafts([row + [0] * (max(len(t) for t, _ in batch) + 1 - len(row)) for row in sampled]),
        TokenTrees.build([tokens for tokens, _ in batch], [parents for _, parents in batch]),
    )
    for n, (tokens, parents) in enumerate(batch):
        wanted = reference_verify_tree(sampled[n], tokens, parents)
        width = len(wanted.token_ids)
        assert result.emitted.output_token_ids[n].tolist()[:width] == wanted.token_ids
        assert set(result.emitted.output_token_ids[n].tolist()[width:]) <= {-1}
        assert result.accepted_nodes[n].tolist()[: width - 1] == wanted.nodes
        assert set(result.accepted_nodes[n].tolist()[width - 1 :]) <= {-1}
        assert result.emitted.num_accepted_tokens[n] == width - 1
    assert result.emitted.is_valid.all()


@given(st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_a_tree_without_branches_is_a_chain(drafts: list[int], sampled: list[int]) -> None:
    tokens = torch.tensor([sampled[: len(drafts) + 1]])
    chain = verify(tokens, padded_drafts([drafts]))
    tree = verify_tree(tokens, TokenTrees.build([drafts], [list(range(-1, len(drafts) - 1))])).emitted
    assert torch.equal(tree.output_token_ids, chain.output_token_ids)
    assert torch.equal(tree.num_accepted_tokens, chain.num_accepted_tokens)


def test_only_visited_rows_can_spoil_a_sequence() -> None:
    tree = TokenTrees.build([[1, 2, 3, 4]] * 3, [[-1, -1, 0, 1]] * 3)  # 1 -> 3, 2 -> 4
    sampled = torch.tensor([[2, 9, 4, 9, 0]] * 3)  # accepts nodes 1 and 3
    is_valid = torch.ones(3, 5, dtype=torch.bool)
    is_valid[0, [1, 3]] = False  # nodes 0 and 2, beside the path
    is_valid[1, 4] = False  # the row of the bonus token
    is_valid[2, 0] = False
    result = verify_tree(sampled, tree, is_valid=is_valid)
    assert result.accepted_nodes.tolist() == [[1, 3]] * 3
    assert result.emitted.is_valid.tolist() == [True, False, False]


def test_padding_is_never_accepted() -> None:
    tree = TokenTrees.build([[1], []], [[-1], []])
    result = verify_tree(torch.tensor([[0, 0], [-1, -1]]), tree)
    assert result.emitted.num_accepted_tokens.tolist() == [0, 0]
    assert TokenTrees.build([[], []], [[], []]).max_depth == 0
    assert verify_tree(torch.tensor([[3]]), TokenTrees.build([[]], [[]])).accepted_nodes.shape == (1, 0)


class TreeDecoder:
    """Many sequences of a Markov target at once, all with the same tree in every step."""

    def __init__(self, params: SamplingParams) -> None:
        self.table = probs_of(random_logits(VOCAB_SIZE, VOCAB_SIZE, seed=3), params)

    def decode(self, tree: Tree, *, num_seqs: int, num_tokens: int) -> list[list[int]]:
        """Tokens after token 0 at position 0, with the seeds 0, 1, ..."""
        token_ids, parents = tree
        depths = [0, *depths_of(parents)]
        sequences = [[0] for _ in range(num_seqs)]
        batch = TokenTrees.build([token_ids] * num_seqs, [parents] * num_seqs)
        while min(len(tokens) for tokens in sequences) <= num_tokens:
            inputs = torch.tensor([[tokens[-1], *token_ids] for tokens in sequences])
            keys = [
                as_int64(row_key(seed, len(tokens) + depth))
                for seed, tokens in enumerate(sequences)
                for depth in depths
            ]
            probs = self.table[inputs].flatten(0, 1)
            sampled = winners(probs, torch.tensor(keys)[:, None], None).view(inputs.shape)
            result = verify_tree(sampled, batch)
            for tokens, emitted in zip(sequences, result.emitted.output_token_ids.tolist(), strict=True):
                tokens += [token_id for token_id in emitted if token_id != -1]
        return [tokens[1 : num_tokens + 1] for tokens in sequences]


@settings(deadline=None, max_examples=40)
@given(tree=trees(12), temperature=st.sampled_from([0.0, 0.7, 1.0]), top_k=st.sampled_from([0, 3]))
def test_trees_never_change_the_tokens(tree: Tree, temperature: float, top_k: int) -> None:
    decoder = TreeDecoder(SamplingParams(temperature=temperature, top_k=top_k))
    found = decoder.decode(tree, num_seqs=20, num_tokens=9)
    assert found == decoder.decode(([], []), num_seqs=20, num_tokens=9)


def test_triples_follow_the_exact_target() -> None:
    tree = ([1, 4, 3, 1, 2, 0], [-1, -1, 0, 0, 1, 2])
    for params in (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.8), SamplingParams(top_k=3)):
        decoder = TreeDecoder(params)
        found = torch.tensor(decoder.decode(tree, num_seqs=5000, num_tokens=3))
        assert excess(count_strings(found), exact_strings(decoder.table, 3)) < 5
