"""How much of a client's prediction an answer has.

The answer is read once, token by token, against the prediction as the drafter follows it (`drafter.prediction`): a
token counts as accepted if the prediction said it. What was drafted and verified does not matter, so the count is
the same for every drafter, none included. Owns this count alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from peagle.drafter.lookup import TokenHistory
from peagle.drafter.prediction import PredictionLookup


def count_predicted(token_ids: Sequence[int], *, num_prompt_tokens: int, predicted_token_ids: Sequence[int]) -> int:
    """Tokens of the answer that the prediction said, at most as many as it has.

    Args:
        token_ids: prompt and answer.
        num_prompt_tokens: how many of them are the prompt.
        predicted_token_ids: the prediction.
    """
    if not predicted_token_ids:
        return 0
    lookup = PredictionLookup()
    seen: list[int] = []  # grows below the history
    history = TokenHistory(seq_id=0, committed=seen, new=(), num_prompt_tokens=0, predicted=predicted_token_ids)
    num_predicted = 0
    for token_id in token_ids[num_prompt_tokens:]:
        num_predicted += lookup.propose(history, max_num_drafts=1).token_ids == (token_id,)
        seen.append(token_id)
    return min(num_predicted, len(predicted_token_ids))
