"""Which of the target's tokens a head can propose: the frequent ones, and those that end an answer.

A draft vocabulary makes the head's last product smaller; a token outside it is never drafted, only emitted by the
target. Owns the choice and its measure, the coverage. Refuses to know files and tokenizers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftVocabulary:
    """A choice of target tokens, ascending, and how well it fits the tokens it was chosen by."""

    offsets: Tensor  # [V_d] int64, `d2t`: draft id + offset = target id
    is_drafted: Tensor  # [V] bool, `t2d`
    num_tokens: int  # tokens that were counted
    num_covered: int  # those of them that are in the vocabulary

    @property
    def target_ids(self) -> Tensor:
        """The target id of each draft id, [V_d] int64, ascending."""
        return self.offsets + torch.arange(len(self.offsets))

    @property
    def coverage(self) -> float:
        """Share of the counted tokens that the head can propose; a bound on every acceptance rate."""
        return self.num_covered / self.num_tokens

    def summary(self) -> str:
        """One line for the terminal."""
        return (
            f"draft vocabulary: {len(self.offsets):,} of {len(self.is_drafted):,} tokens, "
            f"which cover {self.coverage:.2%} of {self.num_tokens:,} counted ones"
        )


def count_tokens(sequences: Iterable[Sequence[int]], *, vocab_size: int) -> Tensor:
    """How often each token of the target occurs, [V] int64.

    Raises:
        ConfigError: a token is outside the vocabulary.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for token_ids in sequences:
        ids = torch.tensor(token_ids, dtype=torch.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise ConfigError(
                f"the data has tokens between {int(ids.min())} and {int(ids.max())}, outside the target's vocabulary "
                f"of {vocab_size}: it was made with another tokenizer"
            )
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def build_draft_vocabulary(counts: Tensor, size: int, *, always: Collection[int]) -> DraftVocabulary:
    """The `size` most frequent tokens; of equally frequent ones the smaller ids, which stand for commoner pieces.

    Args:
        counts: of each target token, [V].
        size: V_d.
        always: tokens that are in whatever their count, such as those that end an answer.

    Raises:
        ConfigError: the size does not fit, or nothing was counted.
    """
    vocab_size, num_tokens = len(counts), int(counts.sum())
    if size > vocab_size:
        raise ConfigError(f"a draft vocabulary of {size} is larger than the target's, which has {vocab_size} tokens")
    if size < max(1, len(always)):
        raise ConfigError(
            f"a draft vocabulary of {size} has no room for the {len(always)} tokens that end an answer; make it larger"
        )
    if num_tokens == 0:
        raise ConfigError("no tokens were counted, so no draft vocabulary can be chosen: the data has no answers")
    ranks = counts.clone()
    ranks[torch.tensor(sorted(always), dtype=torch.int64)] = num_tokens + 1
    chosen = ranks.sort(descending=True, stable=True).indices[:size].sort().values  # [V_d]
    return DraftVocabulary(
        offsets=chosen - torch.arange(size),
        is_drafted=torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, chosen, True),
        num_tokens=num_tokens,
        num_covered=int(counts[chosen].sum()),
    )
