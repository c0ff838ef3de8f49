"""The server as an application of Ray Serve: `serve run server.ray_app:build model=NAME num_replicas=2`.

Owns the translation: arguments to settings, the drain's time to Ray's, and that a replica counts as started once its
model is loaded. The engine runs in the replica's process and speaks the same API. Ray is an extra and imported when an
application is built. Refuses to know what Ray decides: placement, the number of replicas, and who gets which request.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from peagle.errors import ConfigError
from server.config_sources import load_settings
from server.engine_bundle import EngineBundle
from server.logging import configure_logging
from server.main import LIBRARY_SETTINGS, create_app, loader_starter
from server.settings import Settings

if TYPE_CHECKING:
    from ray.serve import Application

SPARE_S = 5.0  # that Ray waits longer than the server's own drain
_OWN = ("num_replicas", "num_cpus", "num_gpus")


def build(args: Mapping[str, Any]) -> Application:
    """The application.

    Args:
        args: keys of `peagle serve --config`, as text or as they are in YAML, and beside them `num_replicas`,
            `num_cpus` and `num_gpus` of each replica. PEAGLE_* variables of the driver count as well.

    Raises:
        ConfigError: a key or a value is wrong, or Ray is not installed.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError("Ray Serve is not installed: pip install 'peagle[ray]'") from error
    flags = {key: str(value) for key, value in args.items() if key not in _OWN}
    settings = load_settings(flags=flags, environment=os.environ).settings
    resources = {key: float(args[key]) for key in ("num_cpus", "num_gpus") if key in args}
    deployment = serve.deployment(serve.ingress(lambda: replica_app(settings))()).options(
        name="peagle",
        num_replicas=int(args.get("num_replicas", 1)),
        max_ongoing_requests=settings.engine.scheduler.max_num_seqs + settings.engine.scheduler.max_num_queued_reqs,
        graceful_shutdown_timeout_s=settings.server.shutdown_timeout_s + SPARE_S,
        ray_actor_options=resources or None,
    )
    return deployment.bind()


def replica_app(settings: Settings) -> FastAPI:
    """The app of one replica. Returns once the model is loaded, so that Ray sends nothing earlier."""
    configure_logging(settings.server.log_level, settings.server.log_format)
    for variable, value in LIBRARY_SETTINGS.items():
        os.environ.setdefault(variable, value)
    bundle = loader_starter(settings.engine, settings.server)(lambda phase, detail: None)

    def loaded(_: object) -> EngineBundle:
        return bundle

    return create_app(settings, loaded)
