"""Ten times the load that can be served: what is taken is served as well as ever, the rest is told so at once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.ops.process import DEADLINE_S, PATH, Server, body, check_envelope, running, serve_command

NUM_SEQS = 2
MAX_QUEUED = 4
NUM_TOKENS = 300
CAPACITY_S = 12.0
FACTOR = 10
GOODPUT = 0.9
MEMORY_MB = 48.0


@dataclass(slots=True)
class Tally:
    """What clients saw."""

    num_done: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    first_token_s: list[float] = field(default_factory=list)


def overload(model: Path, directory: Path, *, seconds: float) -> str:
    """Goodput stays above 90 % of capacity, first tokens come in time, memory is flat, and it ends with the load."""
    flags = ("--max-num-seqs", str(NUM_SEQS), "--max-queued-requests", str(MAX_QUEUED))
    with running(serve_command(model, *flags), directory / "log") as server:
        return asyncio.run(_measure(server, seconds))


async def _measure(server: Server, seconds: float) -> str:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S, limits=limits) as client:
        capacity = await _capacity(client)
        memory = server.rss_mb()
        tally = await _flood(client, capacity * FACTOR, seconds)
        goodput = tally.num_done / seconds
        began_at = time.monotonic()
        assert (await client.post(PATH, json=body(max_tokens=1))).status_code == 200
        recovery_s = time.monotonic() - began_at
    growth = server.rss_mb() - memory
    service_s = NUM_SEQS / capacity
    # Behind it are at most the places, of which one is to spare, and the queue.
    bound_s = 1.5 * service_s * (1 + (NUM_SEQS + 1 + MAX_QUEUED) / NUM_SEQS)
    worst = max(tally.first_token_s)
    server.becomes_idle()
    assert goodput >= GOODPUT * capacity, f"{goodput:.2f} of {capacity:.2f} requests/s"
    assert worst <= bound_s, f"a first token after {worst:.1f} s, more than {bound_s:.1f} s"
    assert growth < MEMORY_MB, f"{growth:.0f} MB more"
    assert recovery_s < bound_s
    assert set(tally.refusals) == {"server_overloaded"}, tally.refusals
    return (
        f"{FACTOR} x {capacity:.2f} requests/s for {seconds:.0f} s: goodput {goodput / capacity:.0%} of capacity, "
        f"first token at most {worst:.2f} s (bound {bound_s:.2f}), {sum(tally.refusals.values())} refusals, all whole, "
        f"memory {growth:+.1f} MB, recovered in {recovery_s * 1e3:.0f} ms"
    )


async def _capacity(client: httpx.AsyncClient) -> float:
    """Requests a second when there is always just enough to do."""
    tally, end = Tally(), time.monotonic() + CAPACITY_S

    async def work() -> None:
        while time.monotonic() < end:
            await _ask(client, tally)

    began_at = time.monotonic()
    await asyncio.gather(*(work() for _ in range(NUM_SEQS + 1)))
    return tally.num_done / (time.monotonic() - began_at)


async def _flood(client: httpx.AsyncClient, rate: float, seconds: float) -> Tally:
    tally, tasks, began_at = Tally(), [], time.monotonic()
    for index in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began_at + index / rate - time.monotonic()))
        tasks.append(asyncio.create_task(_ask(client, tally)))
    await asyncio.sleep(max(0.0, began_at + seconds - time.monotonic()))
    done = tally.num_done  # what is still under way came too late to count
    await asyncio.gather(*tasks)
    tally.num_done = done
    return tally


async def _ask(client: httpx.AsyncClient, tally: Tally) -> None:
    began_at = time.monotonic()
    async with client.stream("POST", PATH, json=body(stream=True, max_tokens=NUM_TOKENS)) as response:
        if response.status_code != 200:
            await response.aread()
            code = check_envelope(response)
            tally.refusals[code] = tally.refusals.get(code, 0) + 1
            return
        last, is_first = "", True
        async for line in response.aiter_lines():
            if is_first and line.startswith("data: "):
                tally.first_token_s.append(time.monotonic() - began_at)
                is_first = False
            last = line or last
    assert last == "data: [DONE]", last
    tally.num_done += 1
