"""vLLM's own benchmark against our server: what it reads from our metrics is what our counters say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peagle.config import DEFAULT_MODEL
from tests.builders.real_server import RealServer, real_model_directory, real_server
from tests.deploy.tools import TOOLS, run
from tests.source_tree import ROOT

NUM_PROMPTS, NUM_TOKENS = 8, 24
QUESTIONS = (
    "What is the capital of France?",
    "Count from one to ten.",
    "Write a haiku about rain.",
    "Why is the sky blue?",
)
# The wheel is installed without what it depends on, and its command line does not start then.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
COUNTERS = {
    "spec_decode_num_drafts": "vllm:spec_decode_num_drafts_total",
    "spec_decode_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "spec_decode_accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}


@pytest.fixture(scope="module")
def python() -> Path:
    path = TOOLS / "vllm" / "bin" / "python"
    if not path.exists():
        pytest.skip("vLLM is not here; `make deploy-check ARGS=--with-vllm` installs it, which takes 2 GB")
    return path


def bench_serve(python: Path, server: RealServer, directory: Path) -> dict[str, float]:
    """What `vllm bench serve` measures."""
    prompts = directory / "prompts.jsonl"
    rows = [{"prompt": QUESTIONS[i % len(QUESTIONS)], "output_tokens_count": NUM_TOKENS} for i in range(NUM_PROMPTS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "backend": "openai-chat",
        "base-url": server.url,
        "endpoint": "/v1/chat/completions",
        "model": server.model,
        "tokenizer": real_model_directory(),
        "dataset-name": "custom",
        "dataset-path": prompts,
        "custom-output-len": NUM_TOKENS,
        "num-prompts": NUM_PROMPTS,
        "max-concurrency": 2,
        "result-dir": directory,
        "result-filename": "result.json",
    }
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    done = run(python, "-c", BENCH_SERVE, *words, "--skip-chat-template", "--save-result", cwd=directory, timeout=300)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert "Speculative Decoding" in done.stdout, done.stdout
    result: dict[str, float] = json.loads((directory / "result.json").read_text())
    return result


def test_its_acceptance_is_that_of_our_counters(python: Path, tmp_path: Path) -> None:
    head = ROOT / "peagle" / "heads" / DEFAULT_MODEL
    spec = json.dumps({"model": str(head), "num_speculative_tokens": 3})
    with real_server("--speculative-config", spec) as server:
        before = {name: server.metric(counter) for name, counter in COUNTERS.items()}
        result = bench_serve(python, server, tmp_path)
        counted = {name: server.metric(counter) - before[name] for name, counter in COUNTERS.items()}
    assert result["completed"] == NUM_PROMPTS
    assert result["total_output_tokens"] > NUM_PROMPTS
    assert counted["spec_decode_num_drafts"] > 0
    assert {name: result[name] for name in COUNTERS} == counted
    accepted_per_draft = counted["spec_decode_accepted_tokens"] / counted["spec_decode_num_drafts"]
    assert result["spec_decode_acceptance_length"] == pytest.approx(1 + accepted_per_draft)
