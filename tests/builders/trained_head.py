"""A tiny target with a head that was trained on it, so that some drafts are accepted and some are not.

A random head's drafts are never accepted, and tests of speculation with one would test rejection only. Training takes
seconds on one core and is deterministic: the head learns the tiny target's most likely continuations from the dense
attention mask of P-EAGLE's training (an anchor's slots see the real slots up to the anchor, and their own chain).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.drafter.export import save_flat
from peagle.drafter.head import DraftHead
from tests.builders.head import tiny_head
from tests.builders.model import build_model

VOCAB_SIZE = 32
DEPTH = 4  # drafts that the head learns; it can be asked for more
PROMPT_LEN = 4
SEQ_LEN = 28
AUX_LAYER_IDS = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class TrainedPair:
    """Where the two checkpoints are."""

    target: Path
    head: Path


def write_eagle3_pair(directory: Path, *, seed: int = 0) -> TrainedPair:
    """As `write_trained_pair`, with a plain EAGLE-3 head. Its first drafts are good, and the others less and less."""
    target = build_target(seed)
    head = train_first_drafts(target, seed=seed)
    target.save_pretrained(str(directory / "target"))
    return TrainedPair(target=directory / "target", head=save_flat(head, directory / "head"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Continuations:
    """Sequences that the target wrote after random prompts."""

    token_ids: Tensor  # [B, S]
    features: Tensor  # [B, S, n_aux * H_t]
    next_token_ids: Tensor  # [B, S], the target's most likely token after each position


def write_trained_pair(directory: Path, *, seed: int = 0, num_steps: int = 120) -> TrainedPair:
    """Write a Llama with a vocabulary of 32 tokens, and a P-EAGLE head trained on it, both as published layouts."""
    target = build_target(seed)
    head = train_head(target, seed=seed, num_steps=num_steps)
    target.save_pretrained(str(directory / "target"))
    return TrainedPair(target=directory / "target", head=save_flat(head, directory / "head"))


def build_target(seed: int = 0) -> Any:
    """The tiny target, in float32, sharp enough that its samples at temperature 1 can be guessed."""
    target = build_model("llama", seed=seed, dtype=torch.float32, vocab_size=VOCAB_SIZE)
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(8.0)
    return target


@torch.no_grad()
def write_continuations(target: Any, *, num_seqs: int, seed: int, temperature: float = 0.0) -> Continuations:
    """Let the target continue random prompts, all at once."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(VOCAB_SIZE, (num_seqs, PROMPT_LEN), generator=generator)
    while token_ids.shape[1] < SEQ_LEN:
        logits = target(token_ids).logits[:, -1]
        if temperature:
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            drawn = logits.argmax(-1, keepdim=True)
        token_ids = torch.cat([token_ids, drawn], 1)
    output = target(token_ids, output_hidden_states=True)
    features = torch.cat([output.hidden_states[layer] for layer in AUX_LAYER_IDS], -1)
    return Continuations(token_ids=token_ids, features=features, next_token_ids=output.logits.argmax(-1))


def train_head(target: Any, *, seed: int = 0, num_steps: int = 120) -> DraftHead:
    """Train a head of one layer on greedy and sampled continuations."""
    head = tiny_head(
        seed=seed,
        dtype=torch.float32,
        num_hidden_layers=1,
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=VOCAB_SIZE,
        mask_token_id=VOCAB_SIZE - 1,
    )
    head.requires_grad_(True)
    data = [write_continuations(target, num_seqs=64, seed=seed + i, temperature=1.0 * (i % 2)) for i in range(4)]
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for step in range(num_steps):
        batch = data[step % len(data)]
        logits = training_logits(head, batch)  # [B, DEPTH, num_anchors, V_d]
        loss = F.cross_entropy(logits.flatten(0, 2), training_labels(batch).flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return head.requires_grad_(False)


def training_logits(head: DraftHead, batch: Continuations) -> Tensor:
    """Drafts of every anchor in one pass: [B, DEPTH, num_anchors, V_d]."""
    num_seqs, num_anchors = batch.token_ids.shape[0], SEQ_LEN - DEPTH
    anchors = torch.arange(num_anchors).repeat(DEPTH)  # [T]
    depths = torch.arange(DEPTH).repeat_interleave(num_anchors)  # [T]
    is_real = depths == 0
    mask_token_id = head.config.mask_token_id
    assert mask_token_id is not None
    token_ids = torch.where(is_real, batch.token_ids[:, anchors + 1], mask_token_id)  # [B, T]
    fused = torch.where(is_real[:, None], head.fuse(batch.features[:, anchors]), head.fused_mask())  # [B, T, H]
    sees_context = is_real[None] & (anchors[None] <= anchors[:, None])
    sees_chain = (anchors[None] == anchors[:, None]) & (depths[None] <= depths[:, None])
    visible = sees_context | sees_chain  # [T, T]

    def attend(layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (rows.view(num_seqs, -1, *rows.shape[1:]).transpose(1, 2) for rows in (query, key, value))
        output = F.scaled_dot_product_attention(q, k, v, visible, scale=head.scaling, enable_gqa=True)
        return output.transpose(1, 2).flatten(0, 1)

    hidden = head(token_ids.flatten(), fused.flatten(0, 1), (anchors + depths).repeat(num_seqs), attend)
    return head.logits(hidden).view(num_seqs, DEPTH, num_anchors, -1)


def training_labels(batch: Continuations) -> Tensor:
    """The target's most likely token where each draft stands: [B, DEPTH, num_anchors]."""
    num_anchors = SEQ_LEN - DEPTH
    return torch.stack([batch.next_token_ids[:, depth + 1 : depth + 1 + num_anchors] for depth in range(DEPTH)], 1)


def train_first_drafts(target: Any, *, seed: int = 0, num_steps: int = 80) -> DraftHead:
    """Train an EAGLE-3 head of one layer on real slots alone: what it feeds itself later is new to it."""
    head = tiny_head(
        seed=seed,
        dtype=torch.float32,
        num_hidden_layers=1,
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=VOCAB_SIZE,
        mask_token_id=None,
    )
    head.requires_grad_(True)
    data = [write_continuations(target, num_seqs=64, seed=seed + i, temperature=1.0 * (i % 2)) for i in range(4)]
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for step in range(num_steps):
        batch = data[step % len(data)]
        loss = F.cross_entropy(_first_draft_logits(head, batch), batch.next_token_ids[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return head.requires_grad_(False)


def _first_draft_logits(head: DraftHead, batch: Continuations) -> Tensor:
    """Of every real slot of every sequence: [B * (S - 1), V_d]."""
    num_seqs, num_slots = batch.token_ids.shape[0], SEQ_LEN - 1

    def attend(layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (rows.view(num_seqs, -1, *rows.shape[1:]).transpose(1, 2) for rows in (query, key, value))
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=head.scaling, enable_gqa=True)
        return output.transpose(1, 2).flatten(0, 1)

    fused = head.fuse(batch.features[:, :-1]).flatten(0, 1)
    positions = torch.arange(num_slots).repeat(num_seqs)
    return head.logits(head(batch.token_ids[:, 1:].flatten(), fused, positions, attend))
