"""Rule R1 on a tree: draw each row's token from the target, and descend while a child is the token drawn above it.

Terms: *node* j of a sequence is a drafted token, its *parent* the node before it, or the root (-1), which is the last
known token. Row 0 of a sequence is the root's, row j + 1 that of node j. A row's token stands at the position after the
row's own, first position + depth, and its noise is keyed by it: all rows of one depth share their noise. Hence the path
that is accepted, and the token after it, are those of plain decoding with the same seed, for any tree whatsoever.

Owns the descent. Refuses to know sequences and keys and values: it proposes what to commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.verifier.acceptance import VerifyResult
from peagle.verifier.layout import NO_TOKEN, padded_drafts

ROOT = -1
NO_NODE = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTrees:
    """Trees of N sequences, padded to B nodes. Children of one parent differ in their token."""

    token_ids: Tensor  # [N, B] int64, padded with -1
    parents: Tensor  # [N, B] int64, the node or -1 for the root; not read where padded
    max_depth: int  # D, of the deepest node; the root has depth 0

    @classmethod
    def build(
        cls,
        token_ids: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        *,
        device: torch.device | str = "cpu",
    ) -> TokenTrees:
        """Pad the trees of a step; parents come before their children."""
        return cls(
            token_ids=padded_drafts(token_ids, device=device),
            parents=padded_drafts(parents, device=device),  # its padding is the root's number
            max_depth=max((_max_depth(tree) for tree in parents), default=0),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeVerifyResult:
    """What N sequences emit, and where in their trees it was found."""

    emitted: VerifyResult  # with K = D
    accepted_nodes: Tensor  # [N, D] int64, the path from the root, then -1


def verify_tree(sampled_token_ids: Tensor, trees: TokenTrees, *, is_valid: Tensor | None = None) -> TreeVerifyResult:
    """Compare trees with the tokens drawn from the target.

    Args:
        sampled_token_ids: [N, B + 1] int64, one for each row; entries of padded nodes are not read.
        trees: N trees.
        is_valid: [N, B + 1] bool, whether a row had a distribution; None if all had.
    """
    if is_valid is None:
        is_valid = torch.ones_like(sampled_token_ids, dtype=torch.bool)
    num_seqs = sampled_token_ids.shape[0]
    node = torch.full((num_seqs, 1), ROOT, dtype=torch.int64, device=sampled_token_ids.device)
    stands = torch.ones_like(node, dtype=torch.bool)
    path, drawn, valid = [], [sampled_token_ids[:, :1]], [is_valid[:, :1]]
    for _ in range(trees.max_depth):
        is_next = (trees.parents == node) & (trees.token_ids == drawn[-1]) & (trees.token_ids != NO_TOKEN)  # [N, B]
        stands = stands & is_next.any(1, keepdim=True)
        node = is_next.long().argmax(1, keepdim=True)  # of any use only where `stands`
        path.append(torch.where(stands, node, NO_NODE))
        drawn.append(torch.where(stands, sampled_token_ids.gather(1, node + 1), NO_TOKEN))
        valid.append(is_valid.gather(1, node + 1) | ~stands)
    accepted = torch.cat(path, 1) if path else node[:, :0]
    return TreeVerifyResult(
        emitted=VerifyResult(
            num_accepted_tokens=(accepted != NO_NODE).sum(1),
            output_token_ids=torch.cat(drawn, 1),
            is_valid=torch.cat(valid, 1).all(1),
        ),
        accepted_nodes=accepted,
    )


def _max_depth(parents: Sequence[int]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return max(depths, default=0)
