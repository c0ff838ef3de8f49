from __future__ import annotations

from peagle.text import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart
from server.response_items import ResponseItems


def kinds(events: list[dict[str, object]]) -> list[str]:
    return [str(event["type"]).removeprefix("response.") for event in events]


def test_items_follow_one_another_and_each_is_done_before_the_next() -> None:
    items = ResponseItems()
    told = items.add([ReasoningDelta("Hm")], ["dropped"])
    told += items.add([ReasoningDelta("."), ContentDelta("Ye")], [])
    told += items.add([ContentDelta("s"), ToolCallStart(0, "call_1", "f"), ToolCallArguments(0, "{}")], [])
    told += items.close(status="incomplete")
    assert kinds(told) == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    assert [event["output_index"] for event in told] == [0] * 7 + [1] * 7 + [2] * 4
    reasoning, message, call = items.done
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Yes"
    assert (call["name"], call["arguments"], call["call_id"]) == ("f", "{}", "call_1")
    assert [item["status"] for item in items.done] == ["completed", "completed", "incomplete"]
    assert len({item["id"] for item in items.done}) == 3


def test_log_probabilities_wait_for_the_text_of_their_tokens() -> None:
    items = ResponseItems(has_logprobs=True)
    assert items.add([], ["a"]) == []
    told = items.add([ContentDelta("xy")], ["b"])
    assert told[-1]["logprobs"] == ["a", "b"]
    items.add([], ["c"])
    items.close()
    assert items.done[0]["content"][0]["logprobs"] == ["a", "b", "c"]


def test_an_answer_without_anything_has_no_items() -> None:
    items = ResponseItems()
    assert items.close() == []
    assert items.done == []
