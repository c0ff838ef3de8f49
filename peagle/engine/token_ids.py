"""Whether the token ids that a request names exist in the model's vocabulary."""

from __future__ import annotations

from collections.abc import Iterable

from peagle.errors import InvalidParameterError
from peagle.sampling_params import SamplingParams


def check_token_ids(params: SamplingParams, *, vocab_size: int) -> None:
    """Refuse what could never be sampled: accepted and ignored, it would only hide a mistake.

    Raises:
        InvalidParameterError: with the name of the field and the first id that does not exist.
    """
    fields: dict[str, Iterable[int]] = {
        "logit_bias": (token_id for token_id, _ in params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": (token_id for word in params.bad_words for token_id in word),
        "stop_token_ids": params.stop_token_ids,
    }
    for name, token_ids in fields.items():
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidParameterError(
                    f"{name} has token id {token_id}, but the vocabulary ends at {vocab_size - 1}", param=name
                )
