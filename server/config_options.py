"""The table of every configuration key, read off the fields of the configuration groups.

Owns the spelling of a key as a flag and as an environment variable, and which group it belongs to. A new field of a
group becomes a flag, a variable and a YAML key without a line here. Refuses to know values.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, get_type_hints

from peagle.config import EngineConfig
from peagle.spec_config import SpecConfig
from server.settings import ServerConfig

ENV_PREFIX = "PEAGLE_"
SPEC_KEY = "speculative_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """One key.

    Attributes:
        name: the field's name, and the key in YAML.
        group: the group that the field belongs to, such as `scheduler`.
        annotation: the field's resolved type; for the speculation group the group itself.
        default: the field's default.
    """

    name: str
    group: str
    annotation: Any
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """`max_num_seqs` is `--max-num-seqs`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """`max_num_seqs` is `PEAGLE_MAX_NUM_SEQS`."""
        return ENV_PREFIX + self.name.upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigGroup:
    """One configuration group. `title` is the first line of the group's docstring; `dataclass` builds its values."""

    name: str
    title: str
    dataclass: type
    keys: tuple[ConfigKey, ...]


def config_groups() -> tuple[ConfigGroup, ...]:
    """Every group: the server's, then the engine's in the order of `EngineConfig`."""
    engine_hints = get_type_hints(EngineConfig)
    groups: list[tuple[str, type]] = [("server", ServerConfig)]
    groups += [(group.name, engine_hints[group.name]) for group in fields(EngineConfig)]
    return tuple(_group(name, kind) for name, kind in groups)


def _group(name: str, kind: type) -> ConfigGroup:
    title = (kind.__doc__ or name).strip().splitlines()[0].rstrip(".")
    hints = get_type_hints(kind)
    keys = tuple(_key(field, name, hints[field.name]) for field in fields(kind))
    if kind is SpecConfig:  # one key as a whole, so that a vLLM `--speculative-config` can be pasted
        keys = (_spec_key(name, keys),)
    return ConfigGroup(name=name, title=title, dataclass=kind, keys=keys)


def _key(field: Field[Any], group: str, annotation: Any) -> ConfigKey:
    assert field.default is not MISSING, f"{group}.{field.name} needs a plain default"
    return ConfigKey(
        name=field.name, group=group, annotation=annotation, default=field.default, help=field.metadata["help"]
    )


def _spec_key(group: str, inner: tuple[ConfigKey, ...]) -> ConfigKey:
    parts = "; ".join(f"{key.name}: {key.help}" for key in inner)
    return ConfigKey(
        name=SPEC_KEY,
        group=group,
        annotation=SpecConfig,
        default=SpecConfig(),
        help=(
            "JSON object; without it the head that ships for the model drafts, if one does; "
            f'{{"num_speculative_tokens": 0}} turns speculation off. {parts}'
        ),
    )
