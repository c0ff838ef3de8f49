"""The target outside serving: batches change nothing, and layers are tapped where the head expects them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peagle.errors import ModelLoadError
from peagle.training.target_answers import Exchange, answer_greedily, load_transformers_model, trace
from tests.builders.model import build_model, write_model

PROMPTS = [[5], [7, 8, 9, 10, 11, 12], [200, 3, 250]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_a_batch_answers_as_each_alone_without_cache(family: str) -> None:
    model = build_model(family)
    expected = []
    for prompt in PROMPTS:
        token_ids = list(prompt)
        while len(token_ids) < len(prompt) + 12:
            token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
        expected.append(Exchange(prompt_token_ids=tuple(prompt), answer_token_ids=tuple(token_ids[len(prompt) :])))
    assert answer_greedily(model, PROMPTS, max_new_tokens=12, end_token_ids=()) == expected


def test_an_answer_ends_with_its_end_token() -> None:
    model = build_model("llama")
    free = answer_greedily(model, PROMPTS, max_new_tokens=12, end_token_ids=())
    end = free[1].answer_token_ids[4]
    ended = answer_greedily(model, PROMPTS, max_new_tokens=12, end_token_ids={end})
    for before, after in zip(free, ended, strict=True):
        answer = before.answer_token_ids
        size = answer.index(end) + 1 if end in answer else len(answer)
        assert after.answer_token_ids == answer[:size]


def test_a_trace_taps_the_streams_entering_the_layers() -> None:
    model = build_model("llama")
    token_ids = torch.tensor([4, 9, 2])
    seen = trace(model, token_ids, (0, 2))
    assert torch.equal(seen.features[:, :32], model.get_input_embeddings()(token_ids))
    assert seen.features.shape == (3, 64)
    assert torch.equal(seen.next_token_ids, model(token_ids[None]).logits[0].argmax(-1))


def test_loading(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    model = load_transformers_model(directory, dtype=torch.float64, device=torch.device("cpu"))
    assert (model.dtype, model.training) == (torch.float64, False)
    (directory / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelLoadError):
        load_transformers_model(directory, dtype=torch.float64, device=torch.device("cpu"))
