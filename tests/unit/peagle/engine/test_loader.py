"""From a configuration to an engine: the order of things, what is derived, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from peagle.engine.interface import EnginePhase
from peagle.engine.loader import load_engine, start_engine
from peagle.errors import ConfigError, EngineOverloadedError, ModelLoadError
from peagle.spec_config import SpecConfig
from tests.builders.async_engine import collect
from tests.builders.engine import ask, engine_config, greedy_reference, make_engine, make_request
from tests.builders.head import TINY_TARGET, write_tiny_head

PROMPTS = [list(range(5)), [250, 7, 9] * 6]


def spec(directory: Path, num_speculative_tokens: int = 3) -> SpecConfig:
    return SpecConfig(model=str(directory), num_speculative_tokens=num_speculative_tokens)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_tiny_head(tmp_path / "head", TINY_TARGET)


@pytest.mark.parametrize("has_head", [False, True])
def test_phases_come_in_their_order(checkpoint: Path, head: Path, has_head: bool) -> None:
    phases: list[EnginePhase] = []
    loaded = load_engine(
        engine_config(checkpoint, spec=spec(head) if has_head else None), lambda phase, _: phases.append(phase)
    )
    expected = [
        EnginePhase.LOADING_TOKENIZER,
        EnginePhase.LOADING_TARGET,
        EnginePhase.LOADING_DRAFTER,
        EnginePhase.ALLOCATING_KV_CACHE,
        EnginePhase.WARMING_UP,
    ]
    if not has_head:
        expected.remove(EnginePhase.LOADING_DRAFTER)
    assert list(dict.fromkeys(phases)) == expected  # warming up comes more than once: it tells how far it is
    assert loaded.directory == checkpoint
    assert loaded.tokenizer.vocab_size == 272


def test_a_loaded_engine_begins_with_clean_counters(checkpoint: Path, head: Path) -> None:
    engine = make_engine(checkpoint, spec=spec(head), num_kv_blocks=40)
    stats = engine.stats()
    assert (stats.num_kv_blocks, stats.block_size) == (40, 4)
    assert stats.num_steps == stats.generation_tokens == stats.prefix_cache.queries == 0, "warming up does not count"
    assert stats.spec_decode.num_accepted_tokens_per_pos == [0, 0, 0]
    assert stats.kv_cache_usage == 0.0
    engine.check_integrity()


def test_the_context_is_the_models_own_unless_it_is_configured_lower(checkpoint: Path) -> None:
    assert make_engine(checkpoint, max_model_len=None, num_kv_blocks=128).max_model_len == 512
    assert make_engine(checkpoint, max_model_len=40).max_model_len == 40
    with pytest.raises(ConfigError, match="max_model_len is 513, but the model's positions end at 512"):
        make_engine(checkpoint, max_model_len=513)


def test_a_long_context_is_not_taken_unasked(checkpoint: Path, tmp_path: Path) -> None:
    directory = tmp_path / "long"
    shutil.copytree(checkpoint, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131072}))
    options: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 256}
    assert make_engine(directory, max_model_len=None, **options).max_model_len == 8192
    assert make_engine(directory, max_model_len=10000, **options).max_model_len == 10000


def test_a_cache_that_is_too_small_names_the_context_that_fits(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="holds 60 tokens, less than max_model_len 64: set --max-model-len 60"):
        make_engine(checkpoint, num_kv_blocks=15)
    assert make_engine(checkpoint, num_kv_blocks=15, max_model_len=60).max_model_len == 60
    with pytest.raises(ConfigError, match=r"--kv-cache-memory [0-9]+ or higher"):
        make_engine(checkpoint, num_kv_blocks=None, kv_cache_memory="10KiB")


def test_the_memory_that_the_message_asks_for_is_enough(checkpoint: Path, head: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_engine(checkpoint, spec=spec(head), num_kv_blocks=None, kv_cache_memory="1KiB")
    memory = str(caught.value).split("--kv-cache-memory ")[1].split()[0]
    engine = make_engine(checkpoint, spec=spec(head), num_kv_blocks=None, kv_cache_memory=memory)
    assert engine.stats().num_kv_blocks == 16
    with pytest.raises(ConfigError):
        make_engine(checkpoint, spec=spec(head), num_kv_blocks=None, kv_cache_memory=str(int(memory) - 1))


def test_graphs_can_not_be_captured_on_a_cpu(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="graph_mode capture needs a CUDA device; use auto or eager"):
        make_engine(checkpoint, graph_mode="capture")


@pytest.mark.parametrize("sizes", [None, (1, 2, 4), (3,), (2, 8, 100)])
def test_batch_size_buckets_change_no_answer(checkpoint: Path, sizes: tuple[int, ...] | None) -> None:
    prompts = [[index * 7, *PROMPTS[1]] for index in range(7)]
    expected = greedy_reference(checkpoint, prompts, num_tokens=6)
    engine = make_engine(checkpoint, graph_batch_sizes=sizes, max_num_batched_tokens=40)
    answers = ask(engine, *(make_request(f"{i}", prompt, max_tokens=6) for i, prompt in enumerate(prompts)))
    assert [answer.token_ids for answer in answers.values()] == expected


@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 7])
def test_a_head_changes_no_answer(checkpoint: Path, head: Path, num_speculative_tokens: int) -> None:
    plain = make_engine(checkpoint)
    speculating = make_engine(checkpoint, spec=spec(head, num_speculative_tokens))
    requests = [make_request(f"{index}", prompt, max_tokens=20) for index, prompt in enumerate(PROMPTS)]
    requests += [
        make_request(f"sampled {index}", prompt, temperature=1.0, seed=index, max_tokens=20)
        for index, prompt in enumerate(PROMPTS)
    ]
    answers = [{name: answer.token_ids for name, answer in ask(e, *requests).items()} for e in (plain, speculating)]
    assert answers[0] == answers[1]
    assert plain.stats().spec_decode.num_drafts == 0
    counts = speculating.stats().spec_decode
    assert counts.num_drafts > 0
    assert counts.num_draft_tokens <= num_speculative_tokens * counts.num_drafts


def test_a_head_without_tables_takes_the_targets(checkpoint: Path, head: Path) -> None:
    weights = load_file(head / "model.safetensors")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        del weights[name]
    save_file(weights, head / "model.safetensors")
    request = make_request("x", PROMPTS[0])
    speculating = make_engine(checkpoint, spec=spec(head))
    assert ask(speculating, request)["x"].token_ids == ask(make_engine(checkpoint), request)["x"].token_ids
    assert speculating.stats().spec_decode.num_drafts > 0


def test_a_head_that_is_not_there_is_refused_before_the_target_is_loaded(checkpoint: Path, tmp_path: Path) -> None:
    phases: list[EnginePhase] = []
    config = engine_config(checkpoint, spec=spec(tmp_path / "nothing"))
    with pytest.raises(ModelLoadError, match=r"speculative_config\.model must be the directory .*nothing is none"):
        load_engine(config, lambda phase, _: phases.append(phase))
    assert phases == [EnginePhase.LOADING_TOKENIZER]


def test_a_directory_that_is_no_head_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        make_engine(checkpoint, spec=spec(tmp_path))


def test_a_head_with_damaged_weights_is_refused(checkpoint: Path, head: Path) -> None:
    (head / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelLoadError, match=r"cannot read .*model\.safetensors"):
        make_engine(checkpoint, spec=spec(head))


def test_a_head_for_another_target_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    directory = write_tiny_head(tmp_path / "other", TINY_TARGET | {"vocab_size": 290})
    with pytest.raises(ModelLoadError, match="290"):
        make_engine(checkpoint, spec=spec(directory))


async def test_a_started_engine_takes_as_many_requests_as_run_and_wait(checkpoint: Path) -> None:
    loaded = load_engine(engine_config(checkpoint, max_num_seqs=2, max_num_queued_reqs=3))
    engine = start_engine(loaded)
    started = [engine.generate(make_request(f"{index}", max_tokens=40)) for index in range(5)]
    with pytest.raises(EngineOverloadedError):
        engine.generate(make_request("one too many"))
    for outputs in started:
        assert len((await collect(outputs)).token_ids) == 40, "none of them is refused by the queue behind the door"
    engine.shutdown()
