"""`python -m tests.builders.scripted_server PORT MODE`: the server process, around an engine that follows a script.

MODE is `slow` (answers take two seconds), `endless` (they never end) or `broken` (the model cannot be loaded).
"""

from __future__ import annotations

import sys

from peagle.engine.interface import PhaseListener
from peagle.errors import ModelLoadError
from server.engine_bundle import EngineBundle
from server.logging import configure_logging
from server.main import listen, serve
from server.settings import ServerConfig, Settings
from tests.builders.server import starter
from tests.fakes import Say, ScriptedEngine

_SCRIPTS = {"slow": [Say("done", delay_s=2.0)], "endless": [Say("x", delay_s=0.01, forever=True)]}


def _fail(on_phase: PhaseListener) -> EngineBundle:
    raise ModelLoadError("/models/x has no config.json: give --model a checkpoint directory")


def main() -> int:
    """Serve until a signal."""
    port, mode = int(sys.argv[1]), sys.argv[2]
    configure_logging("info")
    settings = Settings(server=ServerConfig(port=port, shutdown_timeout_s=30.0))
    start = _fail if mode == "broken" else starter(ScriptedEngine(script=_SCRIPTS[mode]))
    return serve(settings, start, listen("127.0.0.1", port))


if __name__ == "__main__":
    sys.exit(main())
