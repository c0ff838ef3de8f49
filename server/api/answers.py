"""How a generation is answered, as a stream or whole.

Owns both ways for all kinds of completions. Refuses to know their shapes.
"""

from __future__ import annotations

from typing import Any, Protocol

import orjson
from fastapi import Request
from starlette.responses import Response

from server.fan_out import ChoiceOutput
from server.generation import Generation, until_disconnect
from server.json_bodies import ignored_header
from server.schemas.client_model import ClientModel
from server.schemas.sampling_fields import SamplingFields
from server.streaming import AnswerStream, Chunks


class Answer(Protocol):
    """Gathers outputs into a whole answer: `chat_answers` and `text_answers`."""

    def add(self, item: ChoiceOutput) -> None:
        """Take the next output."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer, once every choice has ended."""
        ...


def stream_answer(body: SamplingFields, generation: Generation, chunks: Chunks, request: Request) -> Response:
    """The event stream of a request that has been admitted.

    Args:
        body: what was asked.
        generation: not yet entered.
        chunks: writes its outputs.
        request: whose client may go away.
    """
    keep_alive_s: float = request.app.state.settings.server.keep_alive_s
    return AnswerStream(generation, chunks, keep_alive_s=keep_alive_s, headers=ignored_header(body))


async def whole_answer(body: ClientModel, generation: Generation, answer: Answer, request: Request) -> Response:
    """As `stream_answer`, all at once."""
    whole = await until_disconnect(request.receive, _collect(generation, answer))
    return Response(orjson.dumps(whole), headers=dict(ignored_header(body)), media_type="application/json")


async def _collect(generation: Generation, answer: Answer) -> dict[str, Any]:
    async with generation as outputs:
        async for item in outputs:
            answer.add(item)
    return answer.whole()
