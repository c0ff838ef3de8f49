"""The server's own group: ranges."""

from __future__ import annotations

from typing import Any

import pytest

from peagle.errors import ConfigError
from server.settings import ServerConfig, Settings


def test_the_defaults_listen_on_this_machine_only() -> None:
    assert (Settings().server.host, Settings().server.port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"host": ""}, "host must not be empty"),
        ({"port": -1}, "port must be between 0 and 65535, got -1"),
        ({"port": 65536}, "got 65536"),
        ({"served_model_name": ()}, "served_model_name"),
        ({"served_model_name": ("a", "")}, "non-empty"),
        ({"served_model_name": ("a", "a")}, "different"),
        ({"log_level": "loud"}, "log_level must be one of debug, info, warning, error; got 'loud'"),
        ({"log_format": "xml"}, "log_format must be one of text, json; got 'xml'"),
        ({"keep_alive_s": -0.1}, "keep_alive_s"),
        ({"max_body_bytes": 10}, "at least 1024"),
        ({"request_head_timeout_s": 0.0}, "request_head_timeout_s must be positive"),
        ({"request_body_timeout_s": -1.0}, "request_body_timeout_s must be positive"),
        ({"shutdown_timeout_s": -1.0}, "shutdown_timeout_s"),
        ({"heartbeat_timeout_s": 0.0}, "heartbeat_timeout_s"),
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile needs ssl_certfile"),
        ({"api_key": ("a", "")}, "api_key must be keys"),
        ({"admin_api_key": ("\u00fc",)}, "admin_api_key must be keys of printable ASCII"),
        ({"max_queued_tokens": 0}, "max_queued_tokens must be positive, got 0"),
        ({"queue_timeout_s": 0.0}, "queue_timeout_s"),
        ({"max_requests_per_client": 0}, "max_requests_per_client"),
        ({"max_tokens_per_minute": -5}, "max_tokens_per_minute must be positive, got -5"),
        ({"max_queued_requests": -1}, "max_queued_requests must not be negative"),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**values)
