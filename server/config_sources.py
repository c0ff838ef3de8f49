"""Merges the command line, the environment, a YAML file and the defaults into `Settings`, in that order of strength.

Owns precedence, which source a value came from, and the errors that name it. Refuses to know any single key: the
table in `server.config_options` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from peagle.config import EngineConfig
from peagle.config_field import unknown_key_message
from peagle.errors import ConfigError
from server.config_options import ENV_PREFIX, ConfigGroup, ConfigKey, config_groups
from server.config_values import parse_text, parse_yaml
from server.container_variables import container_values
from server.masking import masked
from server.settings import Settings

CONFIG_FLAG = "--config"
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
DEFAULT_ORIGIN = "default"

_RESERVED_VARIABLES = {ENV_PREFIX + "CACHE"}
# As SageMaker runs a container: it is reached from outside, at this port unless a variable names another one.
_SAGEMAKER_HOST, _SAGEMAKER_PORT = "0.0.0.0", 8080
# Kubernetes tells a pod about every Service by variables that start with the Service's name. For one called `peagle`
# (or `peagle-web`) they carry our prefix, so they are recognised by their shape and passed over.
_SERVICE_LINK_NAME = re.compile(r".*(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?)")
_SERVICE_LINK_VALUE = re.compile(r"(?:tcp|udp|sctp)://.*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings:
    """The effective settings.

    Attributes:
        origins: where each key's value came from, such as `flag --port` or `default`; every key is present.
    """

    settings: Settings
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """A value that some source gives, and the source's name."""

    value: Any
    origin: str


def load_settings(*, flags: Mapping[str, Any], environment: Mapping[str, str]) -> LoadedSettings:
    """Merge all sources.

    Args:
        flags: what was given on the command line, by key: text, or a bool for an on/off flag. `config` is the YAML
            file's path; without it, the variable `PEAGLE_CONFIG` is.
        environment: all environment variables; those that are not ours are left alone.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of range, or a file that cannot be read. The
            message names the source, the key, the value and what is wanted.
    """
    groups = config_groups()
    keys = {key.name: key for group in groups for key in group.keys}
    config_path = flags.get("config", environment.get(CONFIG_VARIABLE) or None)
    given = _from_yaml(Path(config_path), keys) if config_path is not None else {}
    given |= _from_containers(environment, keys)
    given |= _from_environment(environment, keys)
    given |= _from_flags(flags, keys)
    given = _for_sagemaker(given) | given
    built = {group.name: _build(group, given) for group in groups}
    server = built.pop("server")
    origins = {name: given[name].origin if name in given else DEFAULT_ORIGIN for name in keys}
    return LoadedSettings(settings=Settings(server=server, engine=EngineConfig(**built)), origins=origins)


def _from_flags(flags: Mapping[str, Any], keys: Mapping[str, ConfigKey]) -> dict[str, _Given]:
    given = {}
    for name, raw in flags.items():
        if name not in keys:
            continue
        flag = keys[name].flag if raw is not False else "--no-" + keys[name].flag.removeprefix("--")
        origin = f"flag {flag}"
        value = raw if isinstance(raw, bool) else _parsed(keys[name], raw, parse_text, origin)
        given[name] = _Given(value=value, origin=origin)
    return given


def _from_environment(environment: Mapping[str, str], keys: Mapping[str, ConfigKey]) -> dict[str, _Given]:
    """Variables of ours. An empty one counts as not set: that is what `${VALUE:-}` in a compose file makes of it."""
    by_variable = {key.variable: key for key in keys.values()}
    given = {}
    for variable, text in environment.items():
        if not variable.startswith(ENV_PREFIX) or variable in _RESERVED_VARIABLES | {CONFIG_VARIABLE}:
            continue
        if _is_service_link(variable, text):
            continue
        if variable not in by_variable:
            raise ConfigError(unknown_key_message(variable, [*by_variable, CONFIG_VARIABLE], "the environment"))
        if text:
            key, origin = by_variable[variable], f"variable {variable}"
            given[key.name] = _Given(value=_parsed(key, text, parse_text, origin), origin=origin)
    return given


def _from_containers(environment: Mapping[str, str], keys: Mapping[str, ConfigKey]) -> dict[str, _Given]:
    """Under the names of other servers' containers."""
    given = {}
    for name, named in container_values(environment, keys).items():
        origin = f"variable {named.variable}"
        given[name] = _Given(value=_parsed(keys[name], named.text, parse_text, origin), origin=origin)
    return given


def _for_sagemaker(given: Mapping[str, _Given]) -> dict[str, _Given]:
    """What `sagemaker` means for keys that nothing else gives."""
    switch = given.get("sagemaker")
    if switch is None or not switch.value:
        return {}
    return {
        "host": _Given(value=_SAGEMAKER_HOST, origin=switch.origin),
        "port": _Given(value=_SAGEMAKER_PORT, origin=switch.origin),
    }


def _is_service_link(variable: str, text: str) -> bool:
    if _SERVICE_LINK_NAME.fullmatch(variable.removeprefix(ENV_PREFIX)):
        return True
    return variable.endswith("PORT") and _SERVICE_LINK_VALUE.fullmatch(text) is not None


def _from_yaml(path: Path, keys: Mapping[str, ConfigKey]) -> dict[str, _Given]:
    given = {}
    for name, raw in _read_yaml(path).items():
        if name not in keys:
            raise ConfigError(unknown_key_message(str(name), list(keys), str(path)))
        origin = f"{path}, key {name}"
        given[name] = _Given(value=_parsed(keys[name], raw, parse_yaml, origin), origin=origin)
    return given


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration file {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"the configuration file {path} must be a mapping of keys to values")
    return content


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice, where PyYAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return super().construct_mapping(node, deep=deep)


def _parsed(key: ConfigKey, raw: Any, parse: Callable[[ConfigKey, Any], Any], origin: str) -> Any:
    try:
        return parse(key, raw)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}; got {masked(key.name, raw)!r}") from error


def _build(group: ConfigGroup, given: Mapping[str, _Given]) -> Any:
    values = {key.name: given[key.name].value for key in group.keys if key.name in given}
    if group.name == "spec":  # its single key already holds the whole group
        return next(iter(values.values()), group.dataclass())
    try:
        return group.dataclass(**values)
    except ConfigError as error:
        raise ConfigError(f"{error}{_blame(str(error), group, given)}") from error


def _blame(message: str, group: ConfigGroup, given: Mapping[str, _Given]) -> str:
    """Where the keys that a range error names were set. The groups themselves do not know."""
    named = [key.name for key in group.keys if key.name in given and re.search(rf"\b{key.name}\b", message)]
    if not named:
        return ""
    return " (" + "; ".join(f"{name} is set by {given[name].origin}" for name in named) + ")"
