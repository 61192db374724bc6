"""The compiled two-stage program against the same loop written by hand.

    python benchmarks/against_handwritten.py

By hand means: the Hugging Face modules of a DeepseekV2 called one after the other, two token
stages with the keys of the first seen by the second, dispatch and receive on the same channel in
the same order. It is what a model developer would write, mask and rotary angles made once.

Both programs run in turn over the connector ``process``, one core a side. Exits with 1 when the
compiled one is more than 2 % slower on any shape. Other work on the two cores can only add, so
the fastest steps are compared; medians, and the processor time of the attention side (which other
work disturbs less), stand beside. A shape that is off gets more rounds, up to ``--most``.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.nn.functional as F
from _models import Compiled, deepseek_v2, half, one_core_a_side
from _verdict import verdict
from torch import nn
from transformers import DeepseekV2ForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb

from afd_graph.runtime import Channel

SIZES = {
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "moe_intermediate_size": 464,
    "num_hidden_layers": 4,
}
SHAPES = ((torch.float32, (64, 512, 1024)), (torch.bfloat16, (64, 512, 1024)))


@dataclass
class _Stage:
    """What one stage carries from layer to layer."""

    hidden: torch.Tensor
    angles: torch.Tensor
    mask: torch.Tensor | None
    after_attention: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    shared: torch.Tensor | None = None
    ticket: int = 0


class ByHand:
    """The two-stage loop over a model whose experts lie behind ``channel``."""

    def __init__(self, model: DeepseekV2ForCausalLM, channel: Channel) -> None:
        self._model = model
        self._channel = channel

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        stem, tokens = self._model.model, ids.shape[1]
        cut = half(tokens)
        hidden = stem.embed_tokens(ids)
        angles = stem.rotary_emb(hidden, torch.arange(tokens)[None])
        mask = torch.ones(tokens - cut, tokens, dtype=torch.bool).tril(cut)
        first = _Stage(hidden[:, :cut], angles[:, :cut], None)
        second = _Stage(hidden[:, cut:], angles[:, cut:], mask)
        last = len(stem.layers) - 1
        for number, layer in enumerate(stem.layers):
            seen: list[tuple[torch.Tensor, torch.Tensor]] = []
            self._begin(layer, number, 0, first, seen)
            if number:
                self._end(number - 1, 1, second)
            self._begin(layer, number, 1, second, seen)
            self._end(number, 0, first)
        self._end(last, 1, second)
        hidden = torch.cat([first.hidden, second.hidden], dim=1)
        return self._model.lm_head(stem.norm(hidden))

    def _begin(
        self,
        layer: nn.Module,
        number: int,
        index: int,
        stage: _Stage,
        seen: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Attention and gate; dispatch; shared experts while the rows are away."""
        attended = stage.hidden + self._attention(layer, stage, seen)
        normed = layer.post_attention_layernorm(attended)
        _, stage.weights, ids = layer.mlp.gate(normed)
        stage.rows = normed.view(-1, normed.shape[-1])
        stage.ticket = self._channel.dispatch(stage.rows, ids, number, index)
        stage.after_attention = attended
        stage.shared = layer.mlp.shared_experts(normed)

    def _end(self, number: int, index: int, stage: _Stage) -> None:
        assert stage.rows is not None
        assert stage.weights is not None
        assert stage.after_attention is not None
        routed = self._channel.receive(stage.ticket, stage.rows, stage.weights, number, index)
        stage.hidden = stage.after_attention + (routed.view_as(stage.hidden) + stage.shared)

    def _attention(
        self, layer: nn.Module, stage: _Stage, seen: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Multi-head latent attention; earlier stages' keys and values are in ``seen``."""
        attention = layer.self_attn
        normed = layer.input_layernorm(stage.hidden)
        batch, tokens = normed.shape[:2]
        query = attention.q_proj(normed).view(batch, tokens, -1, attention.qk_head_dim)
        nope, rope = query.transpose(1, 2).split(
            [attention.qk_nope_head_dim, attention.qk_rope_head_dim], dim=-1
        )
        latent, key_rope = attention.kv_a_proj_with_mqa(normed).split(
            [attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1
        )
        latent = attention.kv_a_layernorm(latent).view(batch, 1, tokens, -1)
        rope, key_rope = apply_rotary_emb(rope, key_rope.view(batch, 1, tokens, -1), stage.angles)
        seen.append(attention.expand_kv(latent, key_rope))
        keys, values = (
            parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
            for parts in zip(*seen, strict=True)
        )
        answer = F.scaled_dot_product_attention(
            torch.cat([nope, rope], dim=-1),
            keys,
            values,
            stage.mask,
            is_causal=stage.mask is None,
            scale=attention.scaling,
        )
        return attention.o_proj(answer.transpose(1, 2).reshape(batch, tokens, -1))


@dataclass
class Times:
    """Seconds of every step: on the clock, and of the attention side's processor."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def compare(
    compiled: Compiled, by_hand: ByHand, ids: torch.Tensor, limit: float, least: int, most: int
) -> tuple[Times, Times]:
    """Times of both programs, run in turn."""
    programs = (lambda: compiled(ids, split=True), lambda: by_hand(ids))
    results = [program() for program in programs]
    wide = results[0].dtype is torch.float32
    torch.testing.assert_close(*results, rtol=1e-4 if wide else 0.1, atol=1e-4 if wide else 0.1)
    times = (Times(), Times())
    while len(times[0].wall) < most:
        for program, seen in zip(programs, times, strict=True):
            begin, used = time.perf_counter(), time.thread_time()
            program()
            seen.wall.append(time.perf_counter() - begin)
            seen.processor.append(time.thread_time() - used)
        if len(times[0].wall) >= least and min(times[0].wall) <= limit * min(times[1].wall):
            break
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--least", type=int, default=10, help="rounds of every shape")
    parser.add_argument("--most", type=int, default=100, help="rounds of a shape that is off")
    parser.add_argument("--limit", type=float, default=1.02)
    options = parser.parse_args()
    _, theirs = one_core_a_side()
    print(
        f"{'dtype':>9} {'tokens':>6} {'compiled':>11} {'by hand':>11} {'ratio':>7} "
        f"{'of medians':>10} {'of processor':>12} {'rounds':>6}"
    )
    worst = 0.0
    for dtype, lengths in SHAPES:
        model = deepseek_v2(dtype, **SIZES)
        compiled = Compiled(
            model, connector="process", connector_options={"threads": 1, "cpus": theirs}
        )
        with torch.no_grad(), compiled.backend as backend:
            compiled(torch.randint(0, 256, (1, 32)), split=True)
            by_hand = ByHand(model, backend.channel)
            for tokens in lengths:
                ids = torch.randint(0, 256, (1, tokens))
                ours, hand = compare(
                    compiled, by_hand, ids, options.limit, options.least, options.most
                )
                ratio = min(ours.wall) / min(hand.wall)
                worst = max(worst, ratio)
                print(
                    f"{str(dtype).removeprefix('torch.'):>9} {tokens:>6} "
                    f"{min(ours.wall) * 1e3:>8.2f} ms {min(hand.wall) * 1e3:>8.2f} ms "
                    f"{ratio:>7.4f} {median(ours.wall) / median(hand.wall):>10.4f} "
                    f"{median(ours.processor) / median(hand.processor):>12.4f} "
                    f"{len(ours.wall):>6}{'' if ratio <= options.limit else '  too slow'}",
                    flush=True,
                )
        torch.compiler.reset()
    holds = worst <= options.limit
    verdict("compiled over the loop by hand", worst, f"at most {options.limit:g}", holds)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
