"""`peagle health`: asks the server beside it whether it is alive, for the health check of a container.

It reads the same variables and the same file as `peagle serve` does, so that it knocks at the right door: whichever
port they name, and over TLS where they name a certificate. Refuses to know what alive means; that is `/health`.
"""

from __future__ import annotations

import argparse
import os
import ssl
import sys
import urllib.error
import urllib.request
from typing import Any

from peagle.errors import ConfigError
from server.commands.command_parser import Once
from server.config_sources import CONFIG_FLAG, load_settings
from server.settings import ServerConfig

_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
_OPTIONS = {CONFIG_FLAG: "FILE", "--host": "ADDRESS", "--port": "PORT"}


def add_parser(subparsers: Any) -> None:
    """Describe the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "health",
        help="ask a running server whether it is alive, or ready",
        description="Ask the server on this machine whether it is alive. Where it listens is read from the variables "
        "and the file of `peagle serve`; what was given to `serve` as a flag has to be given here, too. Exit code: 0 "
        "yes, 1 no.",
    )
    for flag, metavar in _OPTIONS.items():
        parser.add_argument(flag, metavar=metavar, action=Once, default=argparse.SUPPRESS, help="as for serve")
    parser.add_argument("--ready", action="store_true", help="ask whether it takes requests, not whether it is alive")
    parser.add_argument("--timeout-s", metavar="SECONDS", type=float, default=4.0, help="default: 4")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask, and say on stderr what is wrong. Returns the exit code."""
    given = vars(args)
    flags: dict[str, Any] = {name: given[name] for name in ("config", "host", "port") if name in given}
    server = load_settings(flags=flags, environment=os.environ).settings.server
    if server.port == 0:
        raise ConfigError("port 0 is any free one: give --port, which the server's log names")
    url = health_url(server, path="/ready" if args.ready else "/health")
    problem = _ask(url, args.timeout_s)
    if problem is not None:
        sys.stderr.write(f"peagle: {url}: {problem}\n")
    return 0 if problem is None else 1


def health_url(server: ServerConfig, *, path: str) -> str:
    """Where a server with these settings answers on its own machine."""
    host = _EVERY_INTERFACE.get(server.host, server.host)
    scheme = "http" if server.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}{path}"


def _ask(url: str, timeout_s: float) -> str | None:
    """What is wrong with the server, or None."""
    context = ssl.create_default_context()  # the certificate is made out to a name, and this is an address
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read(500).decode(errors='replace')}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
