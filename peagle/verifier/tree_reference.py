"""Rule R1 on one tree as one would decode by hand: look for a child that is what the target drew. Slow on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePath:
    """What one sequence emits."""

    nodes: list[int]
    token_ids: list[int]  # of the nodes, then one more


def reference_verify_tree(
    sampled_token_ids: Sequence[int], token_ids: Sequence[int], parents: Sequence[int]
) -> ReferencePath:
    """Descend from the root.

    Args:
        sampled_token_ids: one for the root, then one for each node.
        token_ids: of the nodes.
        parents: of the nodes, -1 for the root.
    """
    path = ReferencePath(nodes=[], token_ids=[sampled_token_ids[0]])
    node: int | None = -1
    while node is not None:
        children = {token_ids[j]: j for j, parent in enumerate(parents) if parent == node}
        node = children.get(path.token_ids[-1])
        if node is not None:
            path.nodes.append(node)
            path.token_ids.append(sampled_token_ids[node + 1])
    return path
