"""What `--speculative-config` says: vLLM's JSON keys, checked.

Owns names, defaults, ranges and contradictions. Refuses to know heads (what a head can do is checked when it is
loaded), and torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from peagle.config_field import option, unknown_key_message
from peagle.errors import ConfigError

MAX_NUM_SPECULATIVE_TOKENS = 32
MAX_TREE_NODES = 64

SpecMethod = Literal["eagle", "eagle3", "peagle", "ngram", "suffix"]
DraftSampleMethod = Literal["greedy", "probabilistic"]
RejectionSampleMethod = Literal["standard", "block"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSpec:
    """A tree of drafts instead of a chain: at most `num_branches * depth` drafts, none deeper than `depth`."""

    num_branches: int
    depth: int

    def __post_init__(self) -> None:
        if self.num_branches < 1 or not 1 <= self.depth <= MAX_NUM_SPECULATIVE_TOKENS:
            raise ConfigError(
                "parallel_drafting_spec needs num_branches of at least 1 and a depth between 1 and "
                f"{MAX_NUM_SPECULATIVE_TOKENS}, got {self.num_branches} and {self.depth}"
            )
        if self.num_nodes > MAX_TREE_NODES:
            raise ConfigError(
                f"parallel_drafting_spec asks for {self.num_nodes} drafts (num_branches * depth); at most "
                f"{MAX_TREE_NODES} are verified in a step"
            )

    @property
    def num_nodes(self) -> int:
        """Most drafts of a sequence and step."""
        return self.num_branches * self.depth


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeRange:
    """Draft `num_speculative_tokens` while `first` to `last` sequences decode, both included."""

    first: int
    last: int
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """Speculative decoding, in the keys of vLLM's `--speculative-config`.

    Without any key: with the head that ships for the model, if one does (`peagle.heads`), and else plain decoding.
    With `num_speculative_tokens` 0 and no other key: plain decoding.
    """

    model: str | None = option(None, "directory or hub id of the draft head, or the name of one that ships with peagle")
    method: SpecMethod | None = option(None, "how to draft; default: read from the head")
    num_speculative_tokens: int | None = option(
        None, "K: most drafts a sequence and step; default: what the head's config.json says"
    )
    parallel_drafting: bool | None = option(None, "draft all K tokens in one pass (P-EAGLE); default: by the head")
    draft_sample_method: DraftSampleMethod = option(
        "greedy", "greedy, or probabilistic: sample drafts (then a seed repeats for the same K and load only)"
    )
    rejection_sample_method: RejectionSampleMethod = option(
        "standard", "for sampled drafts: token by token (standard) or as a block"
    )
    num_speculative_tokens_per_batch_size: tuple[BatchSizeRange, ...] | None = option(
        None, "table [[first, last, K], ...] of K by the number of decoding sequences"
    )
    adaptive_verification: bool | None = option(
        None, "verify as many drafts as pay under the present load; default: true unless K is given"
    )
    prompt_lookup_min: int | None = option(None, "ngram: shortest match")
    prompt_lookup_max: int | None = option(None, "ngram: longest match")
    parallel_drafting_spec: TreeSpec | None = option(None, 'a tree of drafts: {"num_branches": N, "depth": D}')

    def __post_init__(self) -> None:
        _check_choices(self)
        if self.num_speculative_tokens is not None and not (
            0 <= self.num_speculative_tokens <= MAX_NUM_SPECULATIVE_TOKENS
        ):
            raise ConfigError(
                f"num_speculative_tokens must be between 0 and {MAX_NUM_SPECULATIVE_TOKENS}, "
                f"got {self.num_speculative_tokens}"
            )
        if self.is_lookup:
            self._check_lookup()
        elif self.model is None:
            self._check_off()
        else:
            self._check_head()

    @property
    def is_unset(self) -> bool:
        """True if nothing was said."""
        return self == SpecConfig()

    @property
    def is_lookup(self) -> bool:
        """True if drafts are looked up in text, without a head."""
        return self.method in ("ngram", "suffix")

    @property
    def is_adaptive(self) -> bool:
        """True if the load decides how many drafts are verified."""
        if self.adaptive_verification is not None:
            return self.adaptive_verification
        return self.num_speculative_tokens is None and self.num_speculative_tokens_per_batch_size is None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SpecConfig:
        """Build from the parsed JSON of `--speculative-config`. Null is the same as leaving a key out.

        Raises:
            ConfigError: an unknown key (the nearest known one is named) or a value of the wrong type.
        """
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(unknown_key_message(key, known, "speculative_config"))
        given = {key: value for key, value in values.items() if value is not None}
        for key, value in given.items():
            wanted = _JSON_TYPES.get(key, str)
            if type(value) is not wanted:
                raise ConfigError(f"speculative_config.{key} must be {_JSON_NAMES[wanted]}, got {value!r}")
        if "parallel_drafting_spec" in given:
            given["parallel_drafting_spec"] = _tree_spec(given["parallel_drafting_spec"])
        if "num_speculative_tokens_per_batch_size" in given:
            given["num_speculative_tokens_per_batch_size"] = _ranges(given["num_speculative_tokens_per_batch_size"])
        return cls(**given)

    def to_mapping(self) -> dict[str, Any]:
        """The keys that were set, as `from_mapping` takes them."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.parallel_drafting_spec is not None:
            tree = self.parallel_drafting_spec
            values["parallel_drafting_spec"] = {"num_branches": tree.num_branches, "depth": tree.depth}
        if self.num_speculative_tokens_per_batch_size is not None:
            rows = self.num_speculative_tokens_per_batch_size
            values["num_speculative_tokens_per_batch_size"] = [
                [row.first, row.last, row.num_speculative_tokens] for row in rows
            ]
        defaults = {f.name: f.default for f in fields(self)}
        return {name: value for name, value in values.items() if value != defaults[name]}

    def _check_lookup(self) -> None:
        for name in ("model", "parallel_drafting", "parallel_drafting_spec"):
            if getattr(self, name) is not None:
                raise ConfigError(f"method {self.method} needs no draft head, so {name} has no meaning with it")
        if self.draft_sample_method != "greedy":
            raise ConfigError(
                f"drafts of method {self.method} are looked up, not sampled: leave draft_sample_method out"
            )
        if self.method == "suffix" and (self.prompt_lookup_min, self.prompt_lookup_max) != (None, None):
            raise ConfigError("prompt_lookup_min and prompt_lookup_max belong to method ngram")
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if (least is not None and least < 1) or (most is not None and most < (least or 1)):
            raise ConfigError(
                f"prompt_lookup_min to prompt_lookup_max must be a range from 1 on, got {least} to {most}"
            )

    def _check_off(self) -> None:
        for f in fields(self):
            if f.name not in ("num_speculative_tokens", "model") and getattr(self, f.name) != f.default:
                raise ConfigError(f"speculative_config sets {f.name} without `model`, the draft head")
        if self.num_speculative_tokens:
            raise ConfigError("num_speculative_tokens is set without a draft head: give `model`, its directory")

    def _check_head(self) -> None:
        if (self.prompt_lookup_min, self.prompt_lookup_max) != (None, None):
            raise ConfigError("prompt_lookup_min and prompt_lookup_max belong to method ngram, which needs no model")
        if self.num_speculative_tokens == 0:
            raise ConfigError(
                "a draft head is given with num_speculative_tokens 0: leave `model` out, or set it to 1 or more"
            )
        if self.draft_sample_method == "greedy" and self.rejection_sample_method == "block":
            raise ConfigError(
                "rejection_sample_method block gains nothing for greedy drafts: use draft_sample_method probabilistic"
            )
        if self.parallel_drafting_spec is not None and self.draft_sample_method != "greedy":
            raise ConfigError(
                "a tree of drafts is built from the most likely tokens: draft_sample_method must be greedy"
            )
        if self.parallel_drafting_spec is not None and self.num_speculative_tokens is not None:
            raise ConfigError("parallel_drafting_spec says how many drafts there are: leave num_speculative_tokens out")
        if self.parallel_drafting_spec is not None and self.parallel_drafting is False:
            raise ConfigError(
                "parallel_drafting_spec needs a head that drafts in parallel, and parallel_drafting is false"
            )
        if self.method == "peagle" and self.parallel_drafting is False:
            raise ConfigError("method peagle drafts in parallel: leave parallel_drafting out, or set it to true")
        if self.num_speculative_tokens_per_batch_size is not None and self.adaptive_verification:
            raise ConfigError("set adaptive_verification or num_speculative_tokens_per_batch_size, not both")


_JSON_TYPES: dict[str, type] = {
    "num_speculative_tokens": int,
    "parallel_drafting": bool,
    "num_speculative_tokens_per_batch_size": list,
    "adaptive_verification": bool,
    "prompt_lookup_min": int,
    "prompt_lookup_max": int,
    "parallel_drafting_spec": dict,
}
_JSON_NAMES: dict[type, str] = {
    str: "a string",
    int: "an integer",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _check_choices(spec: SpecConfig) -> None:
    choices = (
        ("method", SpecMethod),
        ("draft_sample_method", DraftSampleMethod),
        ("rejection_sample_method", RejectionSampleMethod),
    )
    for name, literal in choices:
        value = getattr(spec, name)
        if value is not None and value not in get_args(literal):
            raise ConfigError(f"speculative_config.{name} must be one of {', '.join(get_args(literal))}; got {value!r}")


def _tree_spec(values: Mapping[str, Any]) -> TreeSpec:
    known = ["num_branches", "depth"]
    for key in values:
        if key not in known:
            raise ConfigError(unknown_key_message(key, known, "parallel_drafting_spec"))
    if sorted(values) != sorted(known) or any(type(value) is not int for value in values.values()):
        raise ConfigError('parallel_drafting_spec must be {"num_branches": N, "depth": D} with whole numbers')
    return TreeSpec(**values)


def _ranges(rows: list[Any]) -> tuple[BatchSizeRange, ...]:
    """Rows [first, last, K]: ascending, from 1 on, without gaps."""
    found: list[BatchSizeRange] = []
    next_first = 1
    for row in rows:
        if not isinstance(row, list) or len(row) != 3 or any(type(value) is not int for value in row):
            raise ConfigError("num_speculative_tokens_per_batch_size must be a list of [first, last, K]")
        first, last, num_tokens = row
        if first != next_first or last < first or not 0 <= num_tokens <= MAX_NUM_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens_per_batch_size: {row} must begin at {next_first}, and its K lie between 0 "
                f"and {MAX_NUM_SPECULATIVE_TOKENS}"
            )
        found.append(BatchSizeRange(first=first, last=last, num_speculative_tokens=num_tokens))
        next_first = last + 1
    if not found:
        raise ConfigError("num_speculative_tokens_per_batch_size must not be empty")
    return tuple(found)
