"""Several answers as one stream.

Each *group* is one prompt and its answers. Its first request is admitted at once; the others when the first one's first
token is there, so that they find its prompt in the prefix cache and the prompt is computed once. Greedy answers are
equal, so one request serves all of them. Owns the order of admission, the merging, and the end of all when one is left.
Refuses to know what is made of the outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from peagle import Engine, RequestInput, RequestOutput
from peagle.errors import EngineOverloadedError

_RETRY_S = 0.05
_SEEDS = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOutput:
    """An output, and the answers that it belongs to."""

    choices: tuple[int, ...]  # indices over all prompts
    prompt_index: int
    output: RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One request to the engine."""

    choices: tuple[int, ...]
    prompt_index: int
    request: RequestInput


def members_of(request: RequestInput, *, prompt_index: int, num_choices: int) -> list[Member]:
    """The requests of one group.

    Args:
        request: of the first answer.
        prompt_index: which prompt it is.
        num_choices: answers to it.
    """
    first = prompt_index * num_choices
    params = request.params
    if params.is_greedy or num_choices == 1:
        every = tuple(range(first, first + num_choices))
        return [Member(choices=every, prompt_index=prompt_index, request=request)]
    members = [Member(choices=(first,), prompt_index=prompt_index, request=request)]
    for index in range(1, num_choices):
        seed = None if params.seed is None else _wrapped(params.seed + index)
        other = replace(
            request, request_id=f"{request.request_id}-{index}", params=replace(params, seed=seed, prompt_logprobs=None)
        )
        members.append(Member(choices=(first + index,), prompt_index=prompt_index, request=other))
    return members


class FanOut:
    """See the module. To be closed with `aclose`.

    Args:
        engine: where the requests go.
        groups: the requests of each prompt.

    Raises:
        RequestError, EngineOverloadedError, EngineDeadError: a first request can't be admitted; then none is.
    """

    def __init__(self, engine: Engine, groups: Sequence[Sequence[Member]]) -> None:
        self._engine = engine
        self._open: dict[str, AsyncIterator[RequestOutput]] = {}
        self._queue: asyncio.Queue[ChoiceOutput | BaseException] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_left = sum(len(group) for group in groups)
        try:
            for group in groups:
                self._open[group[0].request.request_id] = engine.generate(group[0].request)
        except BaseException:
            for request_id in self._open:
                engine.abort(request_id)
            raise
        for group in groups:
            self._start(self._pump(group[0], followers=group[1:]))

    def __aiter__(self) -> AsyncIterator[ChoiceOutput]:
        return self

    async def __anext__(self) -> ChoiceOutput:
        """The next output of any of them."""
        if self._num_left == 0:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, BaseException):
            raise item
        if item.output.is_finished:
            self._num_left -= 1
        return item

    async def aclose(self) -> None:
        """End whatever has not ended."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request_id, outputs in self._open.items():
            await close(outputs, self._engine, request_id)
        self._open = {}

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pump(self, member: Member, *, followers: Sequence[Member] = ()) -> None:
        request_id = member.request.request_id
        try:
            async for output in self._open[request_id]:
                self._queue.put_nowait(
                    ChoiceOutput(choices=member.choices, prompt_index=member.prompt_index, output=output)
                )
                for follower in followers:
                    self._start(self._follow(follower))
                followers = ()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._queue.put_nowait(error)

    async def _follow(self, member: Member) -> None:
        """Admit a later answer. Its request has been admitted, so it waits where others are refused."""
        try:
            while True:
                try:
                    self._open[member.request.request_id] = self._engine.generate(member.request)
                    break
                except EngineOverloadedError:
                    await asyncio.sleep(_RETRY_S)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._queue.put_nowait(error)
            return
        await self._pump(member)


class Single:
    """One request, with no task or queue of its own: the outputs go straight through."""

    def __init__(self, engine: Engine, member: Member) -> None:
        self._engine = engine
        self._member = member
        self._outputs = engine.generate(member.request)

    def __aiter__(self) -> AsyncIterator[ChoiceOutput]:
        return self

    async def __anext__(self) -> ChoiceOutput:
        """The next output."""
        output = await self._outputs.__anext__()
        return ChoiceOutput(choices=self._member.choices, prompt_index=self._member.prompt_index, output=output)

    async def aclose(self) -> None:
        """End it if it has not ended."""
        await close(self._outputs, self._engine, self._member.request.request_id)


async def close(outputs: AsyncIterator[RequestOutput], engine: Engine, request_id: str) -> None:
    """Leave outputs early; what has ended is left alone."""
    aclose = getattr(outputs, "aclose", None)  # an `AsyncIterator` need not have it
    if aclose is not None:
        await aclose()
    else:
        engine.abort(request_id)


def _wrapped(seed: int) -> int:
    """A seed beyond 64 bits, sign included, begins again at the other end."""
    return (seed + _SEEDS // 2) % _SEEDS - _SEEDS // 2
