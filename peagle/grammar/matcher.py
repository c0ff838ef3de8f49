"""Follows one answer through its grammar.

Owns the state: how far the answer has come. It advances by committed tokens only; to look ahead, it goes a few tokens
on and comes back. Refuses to know where tokens come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

_WORD_BITS = 32


class GrammarMatcher:
    """One answer. Belongs to one thread.

    Args:
        matcher: at the beginning.
        vocab_size: of the tokenizer.
        end_token_ids: that end an answer.
    """

    def __init__(self, matcher: LLMatcher, *, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_token_ids = end_token_ids
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // _WORD_BITS)

    @property
    def error(self) -> str | None:
        """Why nothing can be said of this answer any more: following it takes more work than is allowed."""
        return (self._matcher.get_error() or "unknown") if self._matcher.is_error() else None

    @property
    def is_complete(self) -> bool:
        """True if the answer may end here."""
        return bool(self._matcher.is_accepting())

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Go on by committed tokens; one that ends the answer is no part of it.

        Returns:
            False if they do not belong to the language, which the masks exclude.
        """
        return bool(self._matcher.consume_tokens([one for one in token_ids if one not in self._end_token_ids]))

    def allowed_nodes(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Which of some drafts may come where they are: each behind its parent, and the parent too.

        Args:
            token_ids: drafts.
            parents: of each draft, its parent among the drafts, -1 for none.
        """
        allowed: list[int] = []
        for node, parent in enumerate(parents):
            # A model may have more rows than its tokenizer has tokens; those spell nothing.
            if token_ids[node] >= self._vocab_size or (parent >= 0 and parent not in allowed):
                continue
            path = [token_ids[index] for index in (*_ancestors(parent, parents), node)]
            if self._end_token_ids.isdisjoint(path[:-1]) and self._matcher.validate_tokens(path) == len(path):
                allowed.append(node)
        return allowed

    def masks(self, token_ids: Sequence[int], parents: Sequence[int]) -> NDArray[np.int32]:
        """Which tokens may come next here, and after each of some drafts. Behind a draft that is not allowed, or that
        ends the answer, nothing will be said: there the mask allows everything.

        Args:
            token_ids: drafts.
            parents: of each draft, its parent among the drafts, -1 for none.

        Returns:
            [1 + len(token_ids), ceil(V / 32)], one bit a token, lowest bit first.
        """
        masks = np.full((1 + len(token_ids), self._num_words), -1, dtype=np.int32)
        self._fill(masks[0])
        path: list[int] = []  # drafts that the matcher has gone on by
        for node in self.allowed_nodes(token_ids, parents):
            if token_ids[node] in self._end_token_ids:
                continue
            wanted = [*_ancestors(parents[node], parents), node]
            shared = 0
            while shared < min(len(path), len(wanted)) and path[shared] == wanted[shared]:
                shared += 1
            self._back(len(path) - shared)
            self._matcher.consume_tokens([token_ids[index] for index in wanted[shared:]])
            path = wanted
            self._fill(masks[1 + node])
        self._back(len(path))
        return masks

    def _fill(self, row: NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def _back(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)


def _ancestors(node: int, parents: Sequence[int]) -> list[int]:
    found: list[int] = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]
