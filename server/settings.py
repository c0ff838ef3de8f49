"""The settings of one server process: the HTTP side's own group, beside the engine's.

Owns the names, defaults and ranges of what only the server needs. Refuses to know where a value came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from peagle.config import EngineConfig
from peagle.config_field import option
from peagle.errors import ConfigError
from peagle.text import AnswerFormat
from peagle.text.answer_format import AUTO

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, and how it treats its clients."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = option(8000, "port to listen on; 0 takes any free one")
    served_model_name: tuple[str, ...] | None = option(
        None, "names that clients may call the model by, comma-separated; the first is used in answers"
    )
    log_level: LogLevel = option("info", "least severe level that is logged")
    log_format: LogFormat = option("text", "lines for people, or a JSON object a line for machines")
    sagemaker: bool = option(
        False,
        "listen as SageMaker expects: on every interface, at SAGEMAKER_BIND_TO_PORT or 8080, if not set",
    )
    max_stored_response_bytes: int = option(
        64 * 2**20, "memory for responses that clients may come back to, in bytes or with a unit; the oldest make room"
    )
    strict_params: bool = option(
        False, "refuse requests with fields that this server does not know, instead of naming these in a header"
    )
    tool_call_parser: str = option(
        AUTO,
        "how the model writes tool calls: hermes (also Qwen), llama3_json, mistral, pythonic or harmony (gpt-oss); "
        "auto goes by the chat template, none serves no tools",
    )
    reasoning_parser: str = option(
        AUTO,
        "marks around the model's reasoning: think, mistral or harmony; auto goes by the chat template, none leaves "
        "reasoning in the content",
    )
    trust_request_chat_template: bool = option(
        False, "let requests bring a chat template of their own; it runs in a sandbox, without a limit of time"
    )
    keep_alive_s: float = option(15.0, "seconds of silence after which a stream gets an SSE comment; 0 sends none")
    max_body_bytes: int = option(4 * 2**20, "largest request body, in bytes or with a unit, such as 4MiB")
    request_head_timeout_s: float = option(
        30.0, "seconds that a client may take to send the head of a request, from connecting or from its first byte"
    )
    request_body_timeout_s: float = option(30.0, "seconds that a client may pause within the body of a request")
    shutdown_timeout_s: float = option(30.0, "seconds that running requests get to finish at shutdown")
    heartbeat_timeout_s: float = option(
        60.0, "seconds without an engine step, with work waiting, after which /health says 503"
    )
    stats_interval_s: float = option(
        10.0, "seconds between the log's lines about throughput and speculation, while there is work; 0 logs none"
    )
    otlp_traces_endpoint: str | None = option(
        None, "URL of an OpenTelemetry collector that takes spans over HTTP, such as http://localhost:4318/v1/traces"
    )
    api_key: tuple[str, ...] | None = option(
        None,
        "keys of which clients must send one as a bearer token, comma-separated; the variable or api_key_file "
        "keeps them out of the list of processes",
    )
    api_key_file: str | None = option(
        None, "file with more keys, each on a line, perhaps behind a name and a space; read again when it changes"
    )
    admin_api_key: tuple[str, ...] | None = option(None, "keys for /server_info, comma-separated")
    metrics_need_key: bool = option(False, "/metrics needs a key, too; /health and /ready never do")
    allowed_origins: tuple[str, ...] | None = option(
        None, "origins whose pages may call from a browser, comma-separated; * is all"
    )
    ssl_certfile: str | None = option(None, "certificate chain in PEM, to serve HTTPS")
    ssl_keyfile: str | None = option(None, "private key of ssl_certfile, unless that file holds it")
    max_queued_requests: int | None = option(
        None, "most requests that wait for their turn; more are refused with 503; default: max_num_queued_reqs"
    )
    max_queued_tokens: int | None = option(None, "most tokens of the prompts that wait; default: any number")
    queue_timeout_s: float = option(60.0, "seconds that a request may wait for its turn, then it is refused with 503")
    max_requests_per_client: int | None = option(
        None, "most requests of one client, by key or else address, under way; more are refused with 429; default: any"
    )
    max_tokens_per_minute: int | None = option(
        None,
        "tokens of prompts and answers that one client may use a minute, then it is refused with 429; default: any",
    )

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host must not be empty")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        names = self.served_model_name
        if names is not None and (not names or not all(names) or len(set(names)) != len(names)):
            raise ConfigError(f"served_model_name must be different, non-empty names, got {', '.join(names) or 'none'}")
        if self.log_level not in get_args(LogLevel):
            raise ConfigError(f"log_level must be one of {', '.join(get_args(LogLevel))}; got {self.log_level!r}")
        if self.log_format not in get_args(LogFormat):
            raise ConfigError(f"log_format must be one of {', '.join(get_args(LogFormat))}; got {self.log_format!r}")
        if self.keep_alive_s < 0:
            raise ConfigError(f"keep_alive_s must not be negative, got {self.keep_alive_s}")
        if self.max_body_bytes < 1024:
            raise ConfigError(f"max_body_bytes must be at least 1024, got {self.max_body_bytes}")
        if self.max_stored_response_bytes < 0:
            raise ConfigError(f"max_stored_response_bytes must not be negative, got {self.max_stored_response_bytes}")
        if self.request_head_timeout_s <= 0:
            raise ConfigError(f"request_head_timeout_s must be positive, got {self.request_head_timeout_s}")
        if self.request_body_timeout_s <= 0:
            raise ConfigError(f"request_body_timeout_s must be positive, got {self.request_body_timeout_s}")
        if self.shutdown_timeout_s < 0:
            raise ConfigError(f"shutdown_timeout_s must not be negative, got {self.shutdown_timeout_s}")
        if self.stats_interval_s < 0:
            raise ConfigError(f"stats_interval_s must not be negative, got {self.stats_interval_s}")
        if self.heartbeat_timeout_s <= 0:
            raise ConfigError(f"heartbeat_timeout_s must be positive, got {self.heartbeat_timeout_s}")
        AnswerFormat.choose(
            tool_call_parser=self.tool_call_parser, reasoning_parser=self.reasoning_parser, chat_template=None
        )
        self._check_access()

    def _check_access(self) -> None:
        """The values that say who may call, and how much."""
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile needs ssl_certfile")
        for name in ("api_key", "admin_api_key"):
            keys = getattr(self, name)
            if keys is not None and not all(key and key.isascii() and key.isprintable() for key in keys):
                raise ConfigError(f"{name} must be keys of printable ASCII characters, none of them empty")
        for name in ("max_queued_tokens", "queue_timeout_s", "max_requests_per_client", "max_tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive, got {value}")
        if self.max_queued_requests is not None and self.max_queued_requests < 0:
            raise ConfigError(f"max_queued_requests must not be negative, got {self.max_queued_requests}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a server process is started with."""

    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
