"""`python -m tests.ops.faulty_server MODEL PORT`: the server with a runner that breaks when a prompt's seed says so.

The seed of a request is its fault: see `FAULTS`. Everything else is the server as it is.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from peagle.engine.async_engine import AsyncLLMEngine
from peagle.engine.engine import LLMEngine, Runner
from peagle.engine.interface import PhaseListener
from peagle.outputs import NOT_NUMBERS, ModelRunnerOutput, SchedulerOutput
from server.access import end_request
from server.engine_bundle import EngineBundle
from server.logging import configure_logging
from server.main import listen, serve
from server.settings import ServerConfig, Settings
from tests.builders.engine import make_engine, remake_engine
from tests.builders.server import tiny_tokenizer

EXCEPTION, OUT_OF_MEMORY, NOT_A_NUMBER, HANG = 901, 902, 903, 904
HANG_S = 4.0
HEARTBEAT_S = 1.0


class FaultyRunner:
    """A real runner that breaks for the seeds above."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        seeds = {scheduled.seed for scheduled in step.scheduled}
        if EXCEPTION in seeds:
            raise RuntimeError("index 7 is out of bounds in a kernel")
        if OUT_OF_MEMORY in seeds:
            raise MemoryError("cannot allocate 2 GiB")
        if HANG in seeds:
            time.sleep(HANG_S)
        output = self._inner.execute(step)
        if NOT_A_NUMBER not in seeds:
            return output
        broken = {scheduled.seq_id for scheduled in step.scheduled if scheduled.seed == NOT_A_NUMBER}
        return replace(
            output,
            outputs=tuple(
                replace(row, token_ids=(), error=NOT_NUMBERS) if row.seq_id in broken else row for row in output.outputs
            ),
        )


def main() -> int:
    """Serve until a signal."""
    model, port = Path(sys.argv[1]), int(sys.argv[2])
    configure_logging("info")

    def start(on_phase: PhaseListener) -> EngineBundle:
        loaded: LLMEngine = make_engine(model)
        engine = AsyncLLMEngine(
            remake_engine(loaded, wrap_runner=FaultyRunner), max_num_requests=64, on_end=end_request
        )
        tokenizer = tiny_tokenizer()
        return EngineBundle(engine=engine, tokenizer=tokenizer, chat_template=tokenizer.chat_template, model_id="tiny")

    settings = Settings(server=ServerConfig(port=port, heartbeat_timeout_s=HEARTBEAT_S))
    return serve(settings, start, listen("127.0.0.1", port))


if __name__ == "__main__":
    sys.exit(main())
