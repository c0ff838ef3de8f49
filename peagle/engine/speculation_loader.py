"""From the speculative configuration to which head drafts, who drafts beside it, and who decides how much is verified.

Owns these choices. Refuses to know heads (`drafter_loader`) and how anything is drafted.
"""

from __future__ import annotations

import logging
from pathlib import Path

from peagle.drafter.head_config import HeadConfig
from peagle.drafter.interface import Drafter
from peagle.drafter.lookup import TokenLookup
from peagle.drafter.mixed import MixedDrafter
from peagle.drafter.ngram import NGramLookup
from peagle.drafter.prediction import PredictionLookup
from peagle.drafter.suffix import SuffixLookup
from peagle.heads.shipped import ShippedHead, expected_survivals, head_for
from peagle.scheduler.depth_policy import AdaptiveDepth, DepthByBatchSize, DepthPolicy, FixedDepth
from peagle.scheduler.speculation import Speculation
from peagle.spec_config import SpecConfig
from peagle.stats import NO_DRAFTER

logger = logging.getLogger(__name__)

_DEFAULT_LOOKUP_DRAFTS = 8
_NGRAM_LENGTHS = (2, 4)


def choose_spec(spec: SpecConfig, checkpoint: Path, heads: tuple[ShippedHead, ...]) -> SpecConfig:
    """The configuration that holds: if nothing was said, the head of `heads` that was trained for the checkpoint."""
    head = head_for(checkpoint, heads) if spec.is_unset else None
    if head is None:
        return spec
    logger.info(
        "Drafting with %s, the head that ships for this model; "
        """--speculative-config '{"num_speculative_tokens": 0}' turns speculation off""",
        head.name,
    )
    return SpecConfig(model=str(head.directory))


def num_lookup_drafts(spec: SpecConfig) -> int:
    """Most drafts that are looked up for a sequence and step; 0 if nothing is looked up."""
    if spec.is_lookup:
        return spec.num_speculative_tokens or _DEFAULT_LOOKUP_DRAFTS
    if spec.model is None or spec.draft_sample_method != "greedy":
        return 0
    return _DEFAULT_LOOKUP_DRAFTS if spec.is_adaptive else spec.num_speculative_tokens or 0


def add_lookups(spec: SpecConfig, head: Drafter, *, max_num_seqs: int) -> Drafter:
    """The head's drafter with the lookups beside it that the configuration wants.

    A fixed K beside a head means that the head alone drafts, except for requests that bring a prediction.
    """
    count = num_lookup_drafts(spec)
    if not count:
        return head
    return MixedDrafter(head, _lookups(spec), num_speculative_tokens=count, max_remembered=2 * max_num_seqs)


def _lookups(spec: SpecConfig) -> list[TokenLookup]:
    lookups: list[TokenLookup] = [PredictionLookup()]
    if spec.method == "ngram":
        shortest = spec.prompt_lookup_min or min(_NGRAM_LENGTHS[0], spec.prompt_lookup_max or _NGRAM_LENGTHS[0])
        longest = spec.prompt_lookup_max or max(_NGRAM_LENGTHS[1], shortest)
        lookups.append(NGramLookup(shortest=shortest, longest=longest))
    elif spec.method == "suffix" or spec.is_adaptive:
        lookups.append(SuffixLookup())
    return lookups


def drafter_name(spec: SpecConfig, head: HeadConfig | None) -> str:
    """Who drafts, as metrics and logs call it: `peagle`, `eagle3+suffix`, `ngram`, `none`."""
    names = []
    if head is not None:
        names.append("peagle" if head.is_parallel else "eagle" if head.merges_embedding else "eagle3")
    if num_lookup_drafts(spec):
        # The client's own predictions are always looked up, and no way of drafting that is chosen.
        names += [lookup.name for lookup in _lookups(spec) if not isinstance(lookup, PredictionLookup)]
    return "+".join(names) or NO_DRAFTER


def build_speculation(spec: SpecConfig, drafter: Drafter) -> Speculation:
    """Limits and policy for a drafter."""
    return Speculation(
        num_speculative_tokens=drafter.num_speculative_tokens,
        num_mask_slots=drafter.num_mask_slots,
        has_head=drafter.num_layers > 0,
        has_lookups=num_lookup_drafts(spec) > 0,
        policy=_policy(spec, drafter.num_speculative_tokens),
    )


def _policy(spec: SpecConfig, num_speculative_tokens: int) -> DepthPolicy:
    if spec.num_speculative_tokens_per_batch_size is not None:
        return DepthByBatchSize(spec.num_speculative_tokens_per_batch_size)
    if spec.is_adaptive and num_speculative_tokens:
        expected = () if spec.model is None else expected_survivals(Path(spec.model))
        return AdaptiveDepth(num_speculative_tokens, expected)
    return FixedDepth(num_speculative_tokens)
