"""HTTPS on a real socket, errors of the wire included."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from server.cli import main
from tests.builders.server import DEADLINE_S, chat_body, live_server
from tests.fakes import ScriptedEngine


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not here")
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = f"{openssl} req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-out", cert, "-keyout", key], check=True, capture_output=True)
    return cert, key


def test_https_streams_and_refuses_as_http_does(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    context = ssl.create_default_context(cafile=str(cert))
    with live_server(ScriptedEngine(), ssl_certfile=str(cert), ssl_keyfile=str(key)) as server:
        url = server.url.replace("http:", "https:")
        body = chat_body(stream=True)
        response = httpx.post(f"{url}/v1/chat/completions", json=body, verify=context, timeout=DEADLINE_S)
        assert response.text.endswith("data: [DONE]\n\n")
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        plain = socket.create_connection(address, DEADLINE_S)
        with plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
            secure.sendall(b"no such thing\r\n\r\n")
            answer = b""
            while chunk := secure.recv(4096):
                answer += chunk
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"malformed_http"' in answer


def test_the_health_command_speaks_tls(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = certificate
    monkeypatch.setenv("PEAGLE_SSL_CERTFILE", str(cert))
    with live_server(ScriptedEngine(), ssl_certfile=str(cert), ssl_keyfile=str(key)) as server:
        assert main(["health", "--port", server.url.rsplit(":", 1)[1]]) == 0
