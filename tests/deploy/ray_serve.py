"""Runs where Ray is installed: two replicas of a tiny model, a few requests, one JSON line of what came of them."""

from __future__ import annotations

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve

from server.ray_app import build
from tests.builders.engine import write_checkpoint

NUM_REQUESTS = 24
DEADLINE_S = 120.0


def main() -> int:
    """The first argument is an empty directory."""
    model = write_checkpoint(Path(sys.argv[1]) / "tiny", max_position_embeddings=512)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = {"max_model_len": 256, "num_kv_blocks": 128, "num_threads": 1, "dtype": "float32"}
    args = {"model": str(model), "served_model_name": "tiny", "num_replicas": 2, "num_cpus": 0.5, **options}
    serve.run(build(args), route_prefix="/")
    url = f"http://127.0.0.1:{port}"
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda index: ask(url, stream=index % 2 == 0), range(NUM_REQUESTS)))
    states = serve.status().applications["default"].deployments["peagle"].replica_states
    report = {
        "num_answers": len(texts),
        "num_different": len(set(texts)),
        "replicas": {getattr(state, "value", str(state)): count for state, count in states.items()},
        "health": httpx.get(f"{url}/health", timeout=DEADLINE_S).status_code,
        "refused": httpx.post(f"{url}/v1/chat/completions", json={}, timeout=DEADLINE_S).status_code,
    }
    serve.shutdown()
    ray.shutdown()
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


def ask(url: str, *, stream: bool) -> str:
    """The text of one greedy answer."""
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
    body |= {"ignore_eos": True, "temperature": 0, "stream": stream}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=DEADLINE_S)
    reply.raise_for_status()
    if not stream:
        return str(reply.json()["choices"][0]["message"]["content"])
    lines = [line[6:] for line in reply.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines
    return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1])


if __name__ == "__main__":
    sys.exit(main())
