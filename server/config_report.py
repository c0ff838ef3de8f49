"""Prints effective settings as YAML that `--config` reads back, each value with its source as a comment.

Owns the layout. Secrets are masked, so a printout with one must have it filled in before it is read back.
"""

from __future__ import annotations

from typing import Any

import yaml

from server.config_options import SPEC_KEY, ConfigKey, config_groups
from server.config_sources import LoadedSettings
from server.masking import masked
from server.settings import Settings


class _OneLineDumper(yaml.SafeDumper):
    """YAML in which all text is quoted: no character in it can then start a new line, or be read as another type."""


_OneLineDumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


def render_settings(loaded: LoadedSettings) -> str:
    """The text of `--print-config`."""
    lines = []
    for group in config_groups():
        lines.append(f"# {group.title}")
        lines += [f"{key.name}: {_value(loaded, key)}  # {loaded.origins[key.name]}" for key in group.keys]
        lines.append("")
    return "\n".join(lines)


def _value(loaded: LoadedSettings, key: ConfigKey) -> str:
    value = effective_value(loaded.settings, key)
    text = yaml.dump(
        masked(key.name, value), Dumper=_OneLineDumper, default_flow_style=True, width=10**6, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def effective_value(settings: Settings, key: ConfigKey) -> Any:
    """What a key is set to."""
    if key.name == SPEC_KEY:
        return settings.engine.spec.to_mapping()
    group = settings.server if key.group == "server" else getattr(settings.engine, key.group)
    return getattr(group, key.name)
