"""The ways of drafting that are compared.

Owns their names and configurations. Refuses to run anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peagle.spec_config import SpecConfig, TreeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way of drafting."""

    name: str
    spec: SpecConfig

    @property
    def remembers_answers(self) -> bool:
        """True if an answer helps to draft the same answer again: then no engine may see a prompt twice."""
        return self.spec.is_lookup or (self.spec.model is not None and self.spec.is_adaptive)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Directories of the draft heads; None leaves its variants out."""

    peagle: str | None = None
    eagle3: str | None = None


def plan_variants(heads: Heads, *, depths: Sequence[int], tree: TreeSpec | None, with_lookups: bool) -> list[Variant]:
    """Plain decoding first: everything else is compared with it.

    Args:
        heads: to be measured.
        depths: K of the chains.
        tree: of the P-EAGLE head; None leaves it out.
        with_lookups: also draft by n-grams and suffixes, without a head.
    """
    variants = [Variant(name="none", spec=SpecConfig(num_speculative_tokens=0))]
    for name, head in (("eagle3", heads.eagle3), ("peagle", heads.peagle)):
        if head is None:
            continue
        variants += [
            Variant(
                name=f"{name} K={depth}",
                spec=SpecConfig(model=head, num_speculative_tokens=depth, adaptive_verification=False),
            )
            for depth in depths
        ]
    if heads.peagle is not None and tree is not None:
        name = f"peagle tree {tree.num_branches}x{tree.depth}"
        variants.append(Variant(name=name, spec=SpecConfig(model=heads.peagle, parallel_drafting_spec=tree)))
    if with_lookups:
        variants.append(Variant(name="suffix", spec=SpecConfig(method="suffix", adaptive_verification=True)))
    if heads.peagle is not None:
        variants.append(Variant(name="adaptive", spec=SpecConfig(model=heads.peagle)))
    return variants
