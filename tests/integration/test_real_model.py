"""The default model behind the real server, against `transformers` on the same weights and type.

50 MT-Bench prompts, greedy, 32 tokens, through the OpenAI SDK: one at a time, eight in flight, and with chunked prefill
of 16 tokens. Equal text is wanted; where float32 sums in another order made another choice, the two most likely tokens
must have been a near-tie. Their number is printed.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from peagle.text import Tokenizer
from tests.builders.head import write_tiny_head
from tests.builders.real_server import RealServer, real_model_directory, real_server

PROMPTS = Path(__file__).resolve().parents[3] / "shared" / "data" / "eval" / "mt_bench.jsonl"
NUM_PROMPTS = 50
MAX_TOKENS = 32
FREQUENT = (" the", ",", ".", " and", " of", " to", "\n", " a")
NEAR_TIE = 0.01  # largest difference of two logits that counts as a tie; logits here span about 30

pytestmark = pytest.mark.real_model


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What `transformers` answers to a prompt."""

    messages: list[dict[str, str]]
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """The unmodified model, and its answers."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    truths: list[Truth]

    def gap(self, truth: Truth, answer: str) -> float:
        """Difference of the two largest logits at the first token in which `answer` differs from the truth."""
        for num_tokens in range(1, len(truth.token_ids) + 1):
            text = self.tokenizer.decode(truth.token_ids[:num_tokens], skip_special_tokens=True)
            if not answer.startswith(text.rstrip("\ufffd")):
                break
        context = truth.prompt_token_ids + truth.token_ids[: num_tokens - 1]
        with torch.inference_mode():
            top = self.model(torch.tensor([context])).logits[0, -1].topk(2).values
        return float(top[0] - top[1])


@pytest.fixture(scope="module")
def reference() -> Reference:
    if not PROMPTS.is_file():
        pytest.skip("the MT-Bench prompts are not beside this checkout")
    directory = real_model_directory()
    tokenizer = Tokenizer.from_directory(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:NUM_PROMPTS]
    return Reference(
        model=model,
        tokenizer=tokenizer,
        truths=[_answer(model, tokenizer, json.loads(line)["turns"][0]) for line in lines],
    )


def _answer(model: Any, tokenizer: Tokenizer, prompt: str) -> Truth:
    messages = [{"role": "user", "content": prompt}]
    prompt_token_ids = tokenizer.encode(tokenizer.chat_template.render(messages), add_special_tokens=False)
    ids = torch.tensor([prompt_token_ids])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS)
    token_ids = output[0, len(prompt_token_ids) :].tolist()
    return Truth(
        messages=messages,
        prompt_token_ids=prompt_token_ids,
        token_ids=token_ids,
        text=tokenizer.decode(token_ids, skip_special_tokens=True),
    )


def check(reference: Reference, answers: list[str], report: list[str], how: str) -> None:
    """Every answer is the truth, or left it at a near-tie."""
    gaps = [
        reference.gap(truth, answer)
        for truth, answer in zip(reference.truths, answers, strict=True)
        if answer != truth.text
    ]
    line = f"{how}: {len(answers) - len(gaps)} of {len(answers)} equal, {len(gaps)} near-ties, gaps {gaps}"
    report.append(line)
    assert all(gap < NEAR_TIE for gap in gaps), line


def ask(client: openai.OpenAI, server: RealServer, truth: Truth) -> str:
    """One whole answer, with its usage checked."""
    messages: Any = truth.messages
    completion = client.chat.completions.create(
        model=server.model,
        messages=messages,
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(truth.prompt_token_ids)
    return completion.choices[0].message.content or ""


def write_random_head(directory: Path, target: Path, tokenizer: Tokenizer) -> Path:
    """A head with random weights that can only draft eight frequent tokens, so that it is right now and then."""
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    write_tiny_head(directory, config, draft_vocab_size=8)
    frequent = [tokenizer.encode(text, add_special_tokens=False)[0] for text in FREQUENT]
    weights = load_file(directory / "model.safetensors")
    weights["d2t"] = torch.tensor(sorted(frequent)) - torch.arange(len(frequent))
    weights["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, torch.tensor(frequent), True)
    save_file(weights, directory / "model.safetensors")
    return directory


async def ask_streaming(client: openai.AsyncOpenAI, server: RealServer, truth: Truth) -> str:
    """One streamed answer."""
    messages: Any = truth.messages
    stream = await client.chat.completions.create(
        model=server.model,
        messages=messages,
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def test_one_at_a_time(reference: Reference, report_line: list[str]) -> None:
    with real_server() as server, openai.OpenAI(base_url=server.api, api_key="-") as client:
        check(reference, [ask(client, server, truth) for truth in reference.truths], report_line, "one at a time")


async def test_eight_in_flight(reference: Reference, report_line: list[str]) -> None:
    with real_server() as server:
        limit = asyncio.Semaphore(8)

        async def one(client: openai.AsyncOpenAI, truth: Truth) -> str:
            async with limit:
                return await ask_streaming(client, server, truth)

        async with openai.AsyncOpenAI(base_url=server.api, api_key="-") as client:
            answers = await asyncio.gather(*(one(client, truth) for truth in reference.truths))
    check(reference, answers, report_line, "eight in flight, streamed")


def test_chunked_prefill_of_16_tokens(reference: Reference, report_line: list[str]) -> None:
    flags = ("--max-num-batched-tokens", "16", "--max-num-seqs", "8")
    with real_server(*flags) as server, openai.OpenAI(base_url=server.api, api_key="-") as client:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda truth: ask(client, server, truth), reference.truths))
    check(reference, answers, report_line, "chunked prefill of 16 tokens, four in flight")


def test_with_a_draft_head(reference: Reference, report_line: list[str], tmp_path: Path) -> None:
    """Verification of real drafts, mostly wrong ones: nothing of them may show."""
    head = write_random_head(tmp_path / "head", real_model_directory(), reference.tokenizer)
    flags = ("--speculative-config", json.dumps({"model": str(head), "num_speculative_tokens": 3}))
    with real_server(*flags) as server, openai.OpenAI(base_url=server.api, api_key="-") as client:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda truth: ask(client, server, truth), reference.truths))
        num_drafts = server.metric("vllm:spec_decode_num_draft_tokens_total")
        num_accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < num_accepted < num_drafts
    check(reference, answers, report_line, f"K=3, {num_accepted:.0f} of {num_drafts:.0f} drafts accepted")
