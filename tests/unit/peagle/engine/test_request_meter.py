"""Which moment of a request makes which observation. Time is whatever a test says."""

from __future__ import annotations

import pytest

from peagle.engine.request_meter import RequestMeter, RequestMoments
from peagle.outputs import SequenceCommit
from peagle.sampling_params import SamplingParams
from peagle.sequence import FinishReason, Sequence
from peagle.stats import EngineStats, RequestStats, SpecDecodeStats

ARRIVAL = 100.0


def moments(*, max_tokens: int | None = 8, num_cached_tokens: int | None = 4) -> RequestMoments:
    seq = Sequence(
        seq_id=0,
        request_id="r",
        token_ids=list(range(10)),
        num_prompt_tokens=10,
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        max_num_tokens=18,
        arrival_time=ARRIVAL,
        num_cached_tokens=num_cached_tokens,
        num_preemptions=2,
    )
    return RequestMoments(seq=seq, spec=SpecDecodeStats.for_depth(3))


def commit(num_draft_tokens: int, num_accepted_tokens: int) -> SequenceCommit:
    return SequenceCommit(
        seq_id=0,
        request_id="r",
        new_token_ids=(),
        finish_reason=None,
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=num_accepted_tokens,
    )


@pytest.fixture
def stats() -> EngineStats:
    return EngineStats(requests=RequestStats.up_to(100))


def test_a_whole_request(stats: EngineStats) -> None:
    meter, request = RequestMeter(stats), moments()
    meter.note_scheduled(request, ARRIVAL + 1)
    meter.note_scheduled(request, ARRIVAL + 2)  # after a preemption: its wait in the queue has been counted
    meter.note_committed(request, commit(0, 0))
    meter.note_tokens(request, 1, ARRIVAL + 3)
    meter.note_committed(request, commit(3, 2))
    meter.note_tokens(request, 3, ARRIVAL + 6)
    meter.note_committed(request, commit(3, 0))
    meter.note_tokens(request, 0, ARRIVAL + 7)  # held back: a stop string may have begun
    meter.note_tokens(request, 1, ARRIVAL + 8)
    times = meter.note_end(request, FinishReason.STOP, ARRIVAL + 8)
    assert (times.queue_s, times.first_token_s, times.total_s) == (1.0, 3.0, 8.0)
    assert (stats.queue_time_s.num_observed, stats.queue_time_s.total) == (1, 1.0)
    assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.generation_tokens) == (10, 4, 5)
    assert stats.time_to_first_token_s.total == 3.0
    # three tokens that share 3 s, then one that waited 2 s
    assert (stats.inter_token_latency_s.num_observed, stats.inter_token_latency_s.total) == (4, 5.0)
    observed = stats.requests
    assert observed.prefill_time_s.total == 2.0
    assert observed.decode_time_s.total == 5.0
    assert observed.inference_time_s.total == 7.0
    assert observed.time_per_output_token_s.total == pytest.approx(5 / 4)
    assert observed.num_prefill_computed_tokens.total == 6
    assert observed.num_preemptions.total == 2
    assert observed.max_tokens.total == 8
    assert observed.acceptance_length.total == 1 + 2 / 2
    spec = request.spec_stats
    assert spec is not None
    assert (spec.num_drafts, spec.num_draft_tokens, spec.num_accepted_tokens) == (2, 6, 2)
    assert spec.num_accepted_tokens_per_pos == (1, 1, 0)


def test_a_request_that_never_ran_has_an_end_and_little_else(stats: EngineStats) -> None:
    meter, request = RequestMeter(stats), moments(max_tokens=None, num_cached_tokens=None)
    times = meter.note_end(request, FinishReason.ABORT, ARRIVAL + 5)
    assert (times.queue_s, times.first_token_s, times.total_s) == (None, None, 5.0)
    assert request.spec_stats is None
    assert stats.requests_by_reason == {reason.value: int(reason is FinishReason.ABORT) for reason in FinishReason}
    observed = stats.requests
    for histogram in (observed.inference_time_s, observed.prefill_time_s, observed.max_tokens, observed.decode_time_s):
        assert histogram.num_observed == 0
    assert stats.prompt_tokens == 0


def test_one_token_has_no_time_per_token(stats: EngineStats) -> None:
    meter, request = RequestMeter(stats), moments()
    meter.note_scheduled(request, ARRIVAL)
    meter.note_tokens(request, 1, ARRIVAL + 1)
    meter.note_end(request, FinishReason.LENGTH, ARRIVAL + 1)
    assert stats.requests.time_per_output_token_s.num_observed == 0
    assert stats.requests.acceptance_length.num_observed == 0
