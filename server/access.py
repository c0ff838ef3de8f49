"""Keys, limits and the door of one server, made from its settings.

Owns which settings become which object. Refuses to know how these work (`guard`, `admission`, `api_keys`).
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from peagle import RequestOutput
from server.admission import Admission, AdmissionLimits, Ticket, current_ticket
from server.api_keys import ApiKeys
from server.guard import AuthMiddleware
from server.lifespan import Lifecycle
from server.request_log import log_request
from server.settings import ServerConfig, Settings
from server.tracing import trace_answer

SPARE_PLACES = 4  # one more request is let in for so many that can run


def create_admission(settings: Settings, lifecycle: Lifecycle) -> Admission:
    """The door of a server. A few more than can run are let in, so that a place in a step is not left empty."""
    server, scheduler = settings.server, settings.engine.scheduler
    max_waiting = scheduler.max_num_queued_reqs
    if server.max_queued_requests is not None:
        max_waiting = min(max_waiting, server.max_queued_requests)
    limits = AdmissionLimits(
        num_places=scheduler.max_num_seqs + max(1, scheduler.max_num_seqs // SPARE_PLACES),
        max_waiting=max_waiting,
        max_waiting_tokens=server.max_queued_tokens,
        queue_timeout_s=server.queue_timeout_s,
        max_requests_per_client=server.max_requests_per_client,
        tokens_per_minute=server.max_tokens_per_minute,
    )

    def note(ticket: Ticket, is_waiting: bool) -> None:
        name = f"waiting-{id(ticket)}"
        if is_waiting:
            lifecycle.enter(name)
        else:
            lifecycle.leave(name)

    admission = Admission(limits, on_wait=note)
    lifecycle.on_abort = admission.close
    return admission


def add_access(app: FastAPI, config: ServerConfig) -> None:
    """Keys, and browsers' questions outside of them: a preflight request has no key.

    Raises:
        ConfigError: the file of keys can't be read.
    """
    app.add_middleware(
        AuthMiddleware,
        keys=ApiKeys(config.api_key or (), None if config.api_key_file is None else Path(config.api_key_file)),
        admin_keys=ApiKeys(config.admin_api_key or (), None),
        metrics_need_key=config.metrics_need_key,
    )
    if config.allowed_origins is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "retry-after-ms", "x-should-retry"],
        )


def end_request(output: RequestOutput) -> None:
    """A request of the engine has ended, in the context of its HTTP request."""
    log_request(output)
    trace_answer(output)
    ticket = current_ticket.get()
    if ticket is not None:
        ticket.door.charge(ticket.client, output.usage.completion_tokens)
