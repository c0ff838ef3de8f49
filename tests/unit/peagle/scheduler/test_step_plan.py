from __future__ import annotations

from peagle.scheduler.step_plan import Grant, StepPlan
from tests.builders.scheduler import make_kv, make_sequence


def test_few_row_sampling_comes_first_and_chunks_last() -> None:
    kv, plan = make_kv(), StepPlan(budget_left=100)
    seqs = [make_sequence(i, range(20)) for i in range(4)]
    for seq in seqs:
        kv.allocate_slots(seq, num_new_tokens=20)
    seqs[2].num_computed_tokens = seqs[3].num_computed_tokens = 19
    plan.add(Grant(seq=seqs[0], num_known_tokens=10, max_next_drafts=3))
    plan.add(Grant(seq=seqs[1], num_known_tokens=20, max_next_drafts=3))
    plan.add(Grant(seq=seqs[2], num_known_tokens=1, draft_token_ids=[7, 8, 9], max_next_drafts=3))
    plan.add(Grant(seq=seqs[3], num_known_tokens=1, max_next_drafts=3))
    output = plan.to_output(kv, num_speculative_tokens=3)
    assert [s.seq_id for s in output.scheduled] == [2, 3, 1, 0]
    assert output.num_scheduled_tokens == 35
    assert plan.budget_left == 65
    decode, chunk = output.scheduled[0], output.scheduled[3]
    assert (list(decode.token_ids), decode.num_known_tokens, decode.start) == ([19, 7, 8, 9], 1, 19)
    assert (chunk.is_sampling, chunk.next_token_id, chunk.max_next_drafts) == (False, 10, 0)
