"""Precedence, errors that name their source, and a printed configuration that reads back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle.config import Dtype, EngineConfig, ModelConfig
from peagle.errors import ConfigError
from peagle.spec_config import SpecConfig
from server.config_options import config_groups
from server.config_report import render_settings
from server.config_sources import LoadedSettings, load_settings
from server.settings import LogLevel, ServerConfig, Settings


def load(
    *, flags: dict[str, Any] | None = None, environment: dict[str, str] | None = None, yaml: Path | None = None
) -> LoadedSettings:
    file_flag = {} if yaml is None else {"config": str(yaml)}
    return load_settings(flags=file_flag | (flags or {}), environment=environment or {})


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "peagle.yaml"


def test_without_any_source_the_defaults_hold() -> None:
    loaded = load()
    assert loaded.settings == Settings()
    assert set(loaded.origins.values()) == {"default"}


def test_flags_beat_the_environment_which_beats_yaml_which_beats_the_default(yaml_file: Path) -> None:
    yaml_file.write_text("port: 1\nmax_num_seqs: 1\nseed: 1\n")
    loaded = load(
        flags={"port": "3"}, environment={"PEAGLE_PORT": "2", "PEAGLE_MAX_NUM_SEQS": "2", "HOME": "/"}, yaml=yaml_file
    )
    engine = loaded.settings.engine
    assert (loaded.settings.server.port, engine.scheduler.max_num_seqs, engine.model.seed) == (3, 2, 1)
    assert engine.cache.block_size == 16
    assert loaded.origins["port"] == "flag --port"
    assert loaded.origins["max_num_seqs"] == "variable PEAGLE_MAX_NUM_SEQS"
    assert loaded.origins["seed"] == f"{yaml_file}, key seed"
    assert loaded.origins["block_size"] == "default"


def test_no_two_groups_share_a_key() -> None:
    names = [key.name for group in config_groups() for key in group.keys]
    assert len(names) == len(set(names))


def test_the_speculation_group_is_one_key(yaml_file: Path) -> None:
    wanted = SpecConfig(model="head", num_speculative_tokens=3)
    text = '{"model": "head", "num_speculative_tokens": 3}'
    yaml_file.write_text("speculative_config: {model: head, num_speculative_tokens: 3}")
    assert load(flags={"speculative_config": text}).settings.engine.spec == wanted
    assert load(environment={"PEAGLE_SPECULATIVE_CONFIG": text}).settings.engine.spec == wanted
    assert load(yaml=yaml_file).settings.engine.spec == wanted
    yaml_file.write_text(f"speculative_config: '{text}'")
    assert load(yaml=yaml_file).settings.engine.spec == wanted


def test_the_environment_can_name_the_file(yaml_file: Path) -> None:
    yaml_file.write_text("port: 5")
    assert load(environment={"PEAGLE_CONFIG": str(yaml_file)}).settings.server.port == 5


def test_on_off_flags() -> None:
    assert load(flags={"enable_prefix_caching": False}).origins["enable_prefix_caching"] == (
        "flag --no-enable-prefix-caching"
    )
    assert load(environment={"PEAGLE_ENABLE_PREFIX_CACHING": "false"}).settings.engine.cache == (
        replace(EngineConfig().cache, enable_prefix_caching=False)
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PEAGLE_CACHE", "/somewhere"),
        ("PEAGLE_PORT", "tcp://10.0.0.7:8000"),
        ("PEAGLE_PORT", ""),
        ("PEAGLE_SERVICE_HOST", "10.0.0.7"),
        ("PEAGLE_SERVICE_PORT", "8000"),
        ("PEAGLE_SERVICE_PORT_HTTP", "8000"),
        ("PEAGLE_PORT_8000_TCP", "tcp://10.0.0.7:8000"),
        ("PEAGLE_PORT_8000_TCP_PROTO", "tcp"),
        ("PEAGLE_PORT_8000_TCP_PORT", "8000"),
        ("PEAGLE_PORT_8000_TCP_ADDR", "10.0.0.7"),
        ("PEAGLE_WEB_SERVICE_HOST", "10.0.0.7"),
        ("PEAGLE_WEB_PORT", "tcp://10.0.0.7:8000"),
        ("PEAGLE_WEB_PORT_9090_UDP_ADDR", "10.0.0.7"),
        ("PEAGLES", "1"),
    ],
)
def test_variables_that_are_not_for_us_change_nothing(variable: str, value: str) -> None:
    assert load(environment={variable: value}).settings == Settings()


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ({"port": "x"}, {}, "flag --port: wanted a whole number; got 'x'"),
        ({}, {"PEAGLE_PORT": "80a"}, "variable PEAGLE_PORT: wanted a whole number; got '80a'"),
        ({}, {"PEAGLE_PROT": "80"}, "unknown key 'PEAGLE_PROT' in the environment; did you mean 'PEAGLE_PORT'"),
        ({"port": "70000"}, {}, "between 0 and 65535, got 70000 .port is set by flag --port"),
        ({}, {"PEAGLE_MAX_NUM_SEQS": "0"}, "at least 1, got 0 .max_num_seqs is set by variable PEAGLE_MAX_NUM_SEQS"),
        ({"dtype": "int3"}, {}, "flag --dtype: wanted one of auto, float64, .*; got 'int3'"),
        ({"speculative_config": '{"modle": "a"}'}, {}, "flag --speculative-config: .*did you mean 'model'"),
        (
            {"max_num_seqs": "100"},
            {"PEAGLE_MAX_NUM_BATCHED_TOKENS": "50"},
            "max_num_seqs is set by flag --max-num-seqs; max_num_batched_tokens is set by variable PEAGLE_MAX_NUM_B",
        ),
    ],
)
def test_errors_name_source_key_value_and_what_is_wanted(
    flags: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(flags=flags, environment=environment)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot: 1", "unknown key 'prot' in .*peagle.yaml; did you mean 'port'"),
        ("max-num-seqs: 1", "did you mean 'max_num_seqs'"),
        ("1: 2", "unknown key '1'"),
        ("port: '80'", "peagle.yaml, key port: wanted a whole number; got '80'"),
        ("port: null", "key port: wanted a whole number; got None"),
        ("port: [1]", r"wanted a whole number; got \[1\]"),
        ("- port", "must be a mapping"),
        ("port: 1\nport: 2", "key 'port' is given twice.*line 2"),
        ("speculative_config: {model: a, model: b}", "key 'model' is given twice"),
        ("port: {", "is not YAML: .*line 1"),
        ("? [a]\n: 1", "is not YAML|unknown key"),
        ("port: !!python/object/apply:os.system [ls]", "is not YAML"),
        ("speculative_config: 4", "wanted a mapping"),
        ("model: https://me:pw@host/\nport: a", "key port"),
    ],
)
def test_yaml_errors(yaml_file: Path, content: str, message: str) -> None:
    yaml_file.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(yaml=yaml_file)
    assert "pw" not in str(caught.value)


def test_an_empty_file_is_no_configuration(yaml_file: Path) -> None:
    yaml_file.write_text("# nothing yet\n")
    assert load(yaml=yaml_file).settings == Settings()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml cannot be read: No such file"):
        load(yaml=tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(yaml=tmp_path)
    (tmp_path / "latin").write_bytes(b"host: \xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(yaml=tmp_path / "latin")


_names = st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, unique=True)
_server = st.builds(
    ServerConfig,
    host=st.text(st.characters(codec="utf-8"), min_size=1),
    port=st.integers(0, 65535),
    served_model_name=st.none() | _names.map(tuple),
    log_level=st.sampled_from(get_args(LogLevel)),
    keep_alive_s=st.floats(0, 1e9),
)
_model = st.builds(
    ModelConfig,
    model=st.text(st.characters(codec="utf-8", exclude_characters="@"), min_size=1),
    dtype=st.sampled_from(get_args(Dtype)),
    max_model_len=st.none() | st.integers(2),
    seed=st.integers(),
)
_spec = st.builds(
    SpecConfig, model=st.text(st.characters(codec="ascii"), min_size=1), num_speculative_tokens=st.integers(1, 32)
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(server=_server, model=_model, spec=st.just(SpecConfig()) | _spec)
def test_a_printed_configuration_reads_back_as_the_same_settings(
    yaml_file: Path, server: ServerConfig, model: ModelConfig, spec: SpecConfig
) -> None:
    wanted = Settings(server=server, engine=EngineConfig(model=model, spec=spec))
    origins = {key.name: "default" for group in config_groups() for key in group.keys}
    yaml_file.write_text(render_settings(LoadedSettings(settings=wanted, origins=origins)), encoding="utf-8")
    loaded = load(yaml=yaml_file)
    if "://" not in server.host + str(server.served_model_name) + str(spec.model):  # a masked URL cannot read back
        assert loaded.settings == wanted


def test_the_printout_masks_secrets_and_names_sources() -> None:
    loaded = load(flags={"model": "https://me:pw@host/m"}, environment={"PEAGLE_PORT": "81"})
    printed = render_settings(loaded)
    assert 'model: "https://***@host/m"  # flag --model\n' in printed
    assert "port: 81  # variable PEAGLE_PORT\n" in printed
    assert "pw" not in printed


@pytest.mark.parametrize("variable", ["SM_VLLM_SPECULATIVE_CONFIG", "OPTION_SPECULATIVE_CONFIG"])
def test_other_containers_names_of_the_speculative_config(variable: str) -> None:
    text = '{"method": "suffix", "num_speculative_tokens": 3}'
    loaded = load_settings(flags={}, environment={variable: text})
    assert loaded.settings.engine.spec == SpecConfig(method="suffix", num_speculative_tokens=3)
    assert loaded.origins["speculative_config"] == f"variable {variable}"
    own = load_settings(flags={}, environment={variable: text, "PEAGLE_SPECULATIVE_CONFIG": '{"method": "ngram"}'})
    assert own.settings.engine.spec == SpecConfig(method="ngram")


def test_two_names_that_differ_are_refused() -> None:
    values = {"SM_VLLM_SPECULATIVE_CONFIG": '{"method": "ngram"}', "OPTION_SPECULATIVE_CONFIG": '{"method": "suffix"}'}
    with pytest.raises(ConfigError, match="are both set, and differ"):
        load_settings(flags={}, environment=values)


def test_sagemakers_containers_settings_work_unchanged() -> None:
    environment = {
        "SM_VLLM_MAX_MODEL_LEN": "512",
        "OPTION_MAX_NUM_SEQS": "3",
        "OPTION_ROLLING_BATCH": "vllm",  # DJL's own
        "SAGEMAKER_BIND_TO_PORT": "9001",
        "PEAGLE_SAGEMAKER": "true",
    }
    settings = load_settings(flags={}, environment=environment).settings
    assert settings.engine.model.max_model_len == 512
    assert settings.engine.scheduler.max_num_seqs == 3
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", 9001)
    assert load_settings(flags={"port": "7"}, environment=environment).settings.server.port == 7
    assert load_settings(flags={"sagemaker": True}, environment={}).settings.server.port == 8080


def test_a_setting_of_sagemakers_that_is_none_of_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match="SM_VLLM_MAX_MODEL_LENGTH"):
        load_settings(flags={}, environment={"SM_VLLM_MAX_MODEL_LENGTH": "512"})
