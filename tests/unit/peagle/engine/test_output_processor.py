"""Where an answer ends, in text, token ids, usage and counters alike, however its tokens came in steps."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.engine.output_processor import OutputProcessor
from peagle.outputs import RequestOutput, SequenceCommit
from peagle.sampling_params import SamplingParams
from peagle.scheduler.commit import cut_at_end
from peagle.sequence import FinishReason, Sequence
from peagle.stats import EngineStats, Histogram
from tests.builders.engine import Answer
from tests.builders.scheduler import make_sequence
from tests.builders.server import tiny_tokenizer
from tests.builders.tokenizer import IM_END_ID

FACE = list("🙂".encode())  # the tiny tokenizer's ids of bytes are the bytes
ARRIVAL = 100.0


def ids(text: str) -> list[int]:
    return list(text.encode())


class Speaker:
    """A processor with one sequence, fed with steps of tokens as the scheduler would commit them."""

    def __init__(self, *, max_tokens: int = 100, **params: object) -> None:
        self.stats = EngineStats()
        self.processor = OutputProcessor(tiny_tokenizer(), self.stats)
        self.seq: Sequence = make_sequence(
            prompt=ids("hello"),
            max_tokens=max_tokens,
            eos_token_ids=[IM_END_ID],
            params=SamplingParams(**params),  # type: ignore[arg-type]
        )
        self.seq.arrival_time = ARRIVAL
        self.processor.add(self.seq)
        self.answer = Answer()
        self.stopped_seq_ids: list[int] = []

    def step(self, token_ids: SequenceOf[int], *, now: float = ARRIVAL + 1.0) -> RequestOutput:
        cut = cut_at_end(self.seq, token_ids)
        self.seq.token_ids.extend(cut.token_ids)
        commit = SequenceCommit(
            seq_id=self.seq.seq_id,
            request_id=self.seq.request_id,
            new_token_ids=cut.token_ids,
            finish_reason=cut.finish_reason,
        )
        processed = self.processor.process([commit], now)
        self.stopped_seq_ids += processed.stopped_seq_ids
        (output,) = processed.outputs
        self.answer.outputs.append(output)
        assert self.processor.num_requests == (0 if output.is_finished else 1)
        return output

    def say(self, *steps: SequenceOf[int]) -> Answer:
        """Feed steps until the answer ends."""
        for token_ids in steps:
            if self.step(token_ids).is_finished:
                break
        return self.answer


def check(answer: Answer, text: str, token_ids: list[int], reason: FinishReason, stop_reason: str | int | None) -> None:
    assert answer.text == text
    assert answer.token_ids == token_ids
    assert answer.finish_reason is reason
    assert answer.last.stop_reason == stop_reason
    assert answer.last.usage.completion_tokens == len(token_ids)
    assert answer.last.usage.prompt_tokens == len("hello")


def test_a_stop_string_in_the_middle_of_a_step_drops_the_rest_of_the_step() -> None:
    speaker = Speaker(stop=("END",))
    check(speaker.say(ids("abEN"), ids("Dxyz")), "ab", ids("abEND"), FinishReason.STOP, "END")
    assert speaker.stopped_seq_ids == [0], "the scheduler thinks that it goes on"
    assert speaker.stats.generation_tokens == 5


def test_text_that_may_become_a_stop_string_is_held_back_until_it_is_certain() -> None:
    speaker = Speaker(stop=("END",))
    assert [speaker.step(ids(text)).text for text in ("aE", "N", "xE", "b")] == ["a", "", "ENx", "Eb"]
    assert [output.usage.completion_tokens for output in speaker.answer.outputs] == [2, 3, 5, 6]


def test_a_stop_string_that_ends_with_a_character_of_several_tokens_ends_at_its_last_byte() -> None:
    check(
        Speaker(stop=("!🙂",)).say([*ids("hi!"), *FACE[:2]], [*FACE[2:], 65]),
        "hi",
        ids("hi!🙂"),
        FinishReason.STOP,
        "!🙂",
    )


def test_a_stop_string_that_wins_over_a_stop_token_later_in_the_step() -> None:
    speaker = Speaker(stop=("b",))
    check(speaker.say([*ids("abc"), IM_END_ID]), "a", ids("ab"), FinishReason.STOP, "b")
    assert speaker.stopped_seq_ids == [], "the scheduler has ended it already"


def test_the_end_of_sequence_token_counts_but_is_not_spoken() -> None:
    check(Speaker().say([*ids("ok"), IM_END_ID, 65]), "ok", [*ids("ok"), IM_END_ID], FinishReason.STOP, IM_END_ID)


def test_an_ignored_end_of_sequence_token_goes_by_unheard() -> None:
    answer = Speaker(ignore_eos=True, max_tokens=4).say([65, IM_END_ID, 66, 67])
    check(answer, "ABC", [65, IM_END_ID, 66, 67], FinishReason.LENGTH, None)


def test_a_stop_token_id_that_is_a_letter_is_not_part_of_the_text() -> None:
    check(Speaker(stop_token_ids=frozenset({66})).say([65, 66, 67]), "A", [65, 66], FinishReason.STOP, 66)


def test_the_limit_gives_out_what_was_held_back() -> None:
    answer = Speaker(stop=("END",), max_tokens=4).say(ids("abEN"))
    check(answer, "abEN", ids("abEN"), FinishReason.LENGTH, None)


def test_the_limit_in_the_middle_of_a_character_ends_the_text_before_it() -> None:
    answer = Speaker(max_tokens=3).say([65, *FACE[:2]])
    check(answer, "A", [65, *FACE[:2]], FinishReason.LENGTH, None)


def test_ending_from_outside_gives_out_what_was_held_back_and_keeps_the_count() -> None:
    speaker = Speaker(stop=("END",))
    speaker.step([*ids("abE"), FACE[0]])
    output = speaker.processor.end(0, FinishReason.ERROR, ARRIVAL + 2, error="broken")
    assert output is not None
    assert (output.text, output.token_ids, output.error) == ("E", [], "broken")
    assert output.usage.completion_tokens == 4
    assert speaker.stats.requests_by_reason == {"stop": 0, "length": 0, "abort": 0, "error": 1}
    assert speaker.processor.end(0, FinishReason.ABORT, ARRIVAL + 3) is None
    assert speaker.stats.requests_by_reason["abort"] == 0


TEXTS = st.lists(st.sampled_from([*FACE, *ids("ENDaé"), 256, 257, 258, IM_END_ID, 299]), min_size=1, max_size=14)


@given(
    token_ids=TEXTS,
    cuts=st.sets(st.integers(1, 13)),
    stop=st.lists(st.sampled_from(["END", "D", "NE", "🙂", "é a", "\ufffd", "a the"]), max_size=3, unique=True),
    stop_token_ids=st.sets(st.sampled_from([97, 257]), max_size=1),
    max_tokens=st.integers(1, 14),
    ignore_eos=st.booleans(),
)
def test_how_tokens_fall_into_steps_never_shows(
    token_ids: list[int],
    cuts: set[int],
    stop: list[str],
    stop_token_ids: set[int],
    max_tokens: int,
    ignore_eos: bool,
) -> None:
    def speaker() -> Speaker:
        return Speaker(
            stop=tuple(stop),
            stop_token_ids=frozenset(stop_token_ids),
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
        )

    bounds = [0, *sorted(cut for cut in cuts if cut < len(token_ids)), len(token_ids)]
    steps = [token_ids[start:end] for start, end in pairwise(bounds)]
    one_by_one, split = speaker(), speaker()
    expected = one_by_one.say(*([token_id] for token_id in token_ids))
    actual = split.say(*steps)
    for answer, said in ((expected, one_by_one), (actual, split)):
        if answer.finish_reason is None:  # the client goes
            output = said.processor.end(0, FinishReason.ABORT, ARRIVAL + 9)
            assert output is not None
            answer.outputs.append(output)
    assert actual.text == expected.text
    assert actual.token_ids == expected.token_ids
    assert actual.last.finish_reason is expected.last.finish_reason
    assert actual.last.stop_reason == expected.last.stop_reason
    assert actual.last.usage == expected.last.usage
    assert split.stats.generation_tokens == one_by_one.stats.generation_tokens == len(actual.token_ids)
    assert not any(text in actual.text for text in stop if actual.last.finish_reason is FinishReason.STOP)


def count(histogram: Histogram) -> int:
    return sum(histogram.counts)


def test_latencies_of_one_request() -> None:
    speaker = Speaker(stop=("END",))
    speaker.processor.mark_scheduled([0], ARRIVAL + 0.25)
    speaker.processor.mark_scheduled([0], ARRIVAL + 0.75)  # preempted, and scheduled again
    speaker.step(ids("abc"), now=ARRIVAL + 1.0)
    speaker.step(ids("de"), now=ARRIVAL + 1.5)
    speaker.step(ids("fENDxyz"), now=ARRIVAL + 3.5)
    stats = speaker.stats
    assert (count(stats.queue_time_s), stats.queue_time_s.total) == (1, 0.25)
    assert (count(stats.time_to_first_token_s), stats.time_to_first_token_s.total) == (1, 1.0)
    # one observation for every token after those of the first step, and a step's wait is shared by its tokens
    assert count(stats.inter_token_latency_s) == 2 + 4
    assert stats.inter_token_latency_s.total == pytest.approx(2.5)
    assert stats.inter_token_latency_s.counts[stats.inter_token_latency_s.bounds.index(0.3)] == 2  # 0.5 s / 2
    assert stats.inter_token_latency_s.counts[stats.inter_token_latency_s.bounds.index(0.5)] == 4  # 2 s / 4
    assert (count(stats.e2e_request_latency_s), stats.e2e_request_latency_s.total) == (1, 3.5)
    assert stats.generation_tokens == 9
    assert stats.prompt_tokens == 5
    assert stats.requests_by_reason == {"stop": 1, "length": 0, "abort": 0, "error": 0}


def test_every_reason_is_counted_under_its_own_name() -> None:
    stats = EngineStats()
    processor = OutputProcessor(tiny_tokenizer(), stats)
    assert stats.requests_by_reason == {"stop": 0, "length": 0, "abort": 0, "error": 0}, "series exist from the start"
    for seq_id, reason in enumerate(FinishReason):
        seq = make_sequence(seq_id)
        processor.add(seq)
        commit = SequenceCommit(seq_id=seq_id, request_id=seq.request_id, new_token_ids=[65], finish_reason=reason)
        processor.process([commit], ARRIVAL)
        assert processor.process([commit], ARRIVAL).outputs == [], "it has ended"
    assert stats.requests_by_reason == {"stop": 1, "length": 1, "abort": 1, "error": 1}
