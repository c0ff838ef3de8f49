from __future__ import annotations

from peagle.drafter.interface import Drafter
from peagle.drafter.null import NullDrafter
from tests.builders.draft_history import draft_batch
from tests.builders.head import tiny_head
from tests.unit.peagle.drafter.test_peagle import make_drafter, make_histories


def test_proposes_nothing() -> None:
    head = tiny_head()
    history = make_histories(1, seed=0, head=head)[0]
    drafters: list[Drafter] = [NullDrafter(), make_drafter(head)]
    null = drafters[0]
    proposal = null.propose(draft_batch([history.step(num_rows=30, num_drafts=0, max_next_drafts=0)]))
    assert proposal.indices == ()
    assert proposal.draft_token_ids.shape == (0, 0)
    assert (null.num_speculative_tokens, null.num_layers, null.aux_layer_ids) == (0, 0, ())
