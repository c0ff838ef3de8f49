"""Where responses are made, kept, and looked after in the background.

Owns the order of things for each way of asking: whole, as a stream, in the background. Refuses to know HTTP, and the
shapes of responses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import orjson

from peagle.errors import InvalidParameterError
from server.admission import Ticket, current_ticket
from server.errors import ResponseNotFoundError, describe, log_failure
from server.generation import Door, Generation
from server.response_answers import ResponseAnswer
from server.response_input import Message, input_messages, messages_of, to_chat
from server.response_items import new_id
from server.response_store import ResponseStore, StoredResponse
from server.schemas.responses import InputItem, ResponsesRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedResponse:
    """A response that has been admitted."""

    generation: Generation
    answer: ResponseAnswer


class ResponseDesk:
    """Responses of one server.

    Args:
        store: of those that clients may come back to.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._running: dict[str, asyncio.Task[None]] = {}

    async def start(self, body: ResponsesRequest, door: Door, client: str | None) -> StartedResponse:
        """Admit a request. Raises what `Door.start_chat` raises, and InvalidParameterError for an earlier response
        that is not there or not complete."""
        door.check_model(body.model)
        messages = [*self._earlier(body, client), *input_messages(body)]
        generation = await door.start_chat(to_chat(body, messages), prefix="resp")
        response_id = new_id("resp")
        is_stored = body.store is not False

        def keep(answer: ResponseAnswer) -> None:
            if is_stored:
                self._keep(answer, body, client, messages)

        answer = ResponseAnswer(body, generation, response_id=response_id, on_finished=keep)
        return StartedResponse(generation=generation, answer=answer)

    async def start_in_background(self, body: ResponsesRequest, door: Door, client: str | None) -> dict[str, Any]:
        """Admit a request, and go on with it when its client has been answered. Returns the response in progress."""
        ticket = _ticket_of_its_own()
        token = current_ticket.set(ticket)
        try:
            started = await self.start(body, door, client)
        except BaseException:
            _leave(ticket)
            raise
        finally:
            current_ticket.reset(token)
        answer = started.answer
        response = answer.with_status("in_progress")
        self._store.put(
            answer.response_id,
            StoredResponse(client=client, response=orjson.dumps(response), input_items=_input_items(body)),
        )
        task = asyncio.get_running_loop().create_task(self._run(started, ticket))
        self._running[answer.response_id] = task
        task.add_done_callback(lambda _: self._running.pop(answer.response_id, None))
        return response

    def get(self, response_id: str, client: str | None) -> StoredResponse:
        """A stored response.

        Raises:
            ResponseNotFoundError: there is none of this id.
        """
        return self._store.get(response_id, client)

    def delete(self, response_id: str, client: str | None) -> None:
        """Forget a response, and end it if it is in progress. Raises what `get` raises."""
        self._store.delete(response_id, client)
        task = self._running.get(response_id)
        if task is not None:
            task.cancel()

    async def cancel(self, response_id: str, client: str | None) -> bytes:
        """End a response that is in progress in the background; one that has ended stays as it is.

        Raises:
            ResponseNotFoundError: there is none of this id.
            InvalidParameterError: it was not made in the background.
        """
        stored = self._store.get(response_id, client)
        if not orjson.loads(stored.response)["background"]:
            raise InvalidParameterError("only a response in the background can be cancelled", param="response_id")
        task = self._running.get(response_id)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return self._store.get(response_id, client).response

    async def _run(self, started: StartedResponse, ticket: Ticket | None) -> None:
        answer = started.answer
        try:
            async with started.generation as outputs:
                async for item in outputs:
                    answer.add(item)
        except asyncio.CancelledError:
            self._store.update(answer.response_id, orjson.dumps(answer.with_status("cancelled")))
            raise
        except Exception as error:
            log_failure(error)
            reply = describe(error)
            failure = {"code": reply.code or "server_error", "message": reply.message}
            self._store.update(answer.response_id, orjson.dumps(answer.with_status("failed", failure)))
        finally:
            _leave(ticket)

    def _earlier(self, body: ResponsesRequest, client: str | None) -> list[Message]:
        """The conversation that the request goes on with."""
        if body.previous_response_id is None:
            return []
        try:
            stored = self._store.get(body.previous_response_id, client)
        except ResponseNotFoundError as error:
            raise InvalidParameterError(
                f"Previous response with id '{body.previous_response_id[:100]}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from error
        if not stored.messages:
            raise InvalidParameterError(
                "The previous response is not complete: wait for it to end, or go on from another one.",
                param="previous_response_id",
            )
        messages: list[Message] = orjson.loads(stored.messages)
        return messages

    def _keep(
        self, answer: ResponseAnswer, body: ResponsesRequest, client: str | None, messages: list[Message]
    ) -> None:
        said = messages_of([InputItem.model_validate(item) for item in answer.items.done])
        conversation = orjson.dumps([*messages, *said])
        response = orjson.dumps(answer.whole())
        if body.background:
            self._store.update(answer.response_id, response, conversation)
            return
        self._store.put(
            answer.response_id,
            StoredResponse(client=client, response=response, input_items=_input_items(body), messages=conversation),
        )


def _input_items(body: ResponsesRequest) -> bytes:
    """The input of a request as a list of items with ids."""
    if isinstance(body.input, str):
        part = {"type": "input_text", "text": body.input}
        items = [{"id": new_id("msg"), "type": "message", "role": "user", "content": [part], "status": "completed"}]
        return orjson.dumps(items)
    return orjson.dumps(
        [{"id": new_id("item"), "type": item.kind} | item.model_dump(exclude_none=True) for item in body.input]
    )


def _ticket_of_its_own() -> Ticket | None:
    """A place at the door that outlives the HTTP request, whose client may go."""
    ticket = current_ticket.get()
    if ticket is None:
        return None
    return Ticket(ticket.client, _never, ticket.door, time.monotonic())


async def _never() -> Any:
    await asyncio.Event().wait()


def _leave(ticket: Ticket | None) -> None:
    if ticket is not None:
        ticket.door.leave(ticket)
