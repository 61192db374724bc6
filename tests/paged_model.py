"""A small DeepSeek-V2 in the form that serving uses: flattened tokens, latent paged caches.

One dense layer, then MoE layers with a softmax gate, stacked experts and a shared expert. The model
returns its logits and what every attention and every MoE layer computed, so that each layer can be
compared.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

import afd_graph.paged_attention  # noqa: F401
from afd_graph.metadata import AttentionMetadata

VOCABULARY, HIDDEN, HEADS = 50, 24, 2
NOPE, ROPE, VALUE, RANK = 6, 4, 5, 8
EXPERTS, TOP_K, WIDTH = 5, 2, 12
MAX_POSITIONS = 256


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """MLA as in the paper: one latent and one rotated key part per token are cached."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a_proj = nn.Linear(HIDDEN, RANK + ROPE, bias=False)
        self.kv_a_norm = Norm(RANK)
        self.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        self.o_proj = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)
        self.scale = (NOPE + ROPE) ** -0.5

    def forward(self, x, cos, sin, cache, metadata):
        query = self.q_proj(x).view(-1, HEADS, NOPE + ROPE)
        q_nope, q_pe = query.split([NOPE, ROPE], -1)
        latent, k_pe = self.kv_a_proj(x).split([RANK, ROPE], -1)
        q_pe = rotated(q_pe, cos[:, None], sin[:, None])
        out = torch.ops.afd.paged_mla_attention(
            torch.cat([q_nope, q_pe], -1),
            self.kv_a_norm(latent),
            rotated(k_pe, cos, sin),
            cache,
            self.kv_b_proj.weight,
            *metadata,
            self.scale,
        )
        return self.o_proj(out.flatten(1))


def rotated(x, cos, sin):
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Dense(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(HIDDEN, 2 * width, bias=False)
        self.down = nn.Linear(width, HIDDEN, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * WIDTH**-0.5)
        self.shared = Dense(WIDTH)

    def forward(self, x):
        weights, ids = torch.topk(self.gate(x).softmax(-1), TOP_K, -1)
        rows = x.repeat_interleave(TOP_K, dim=0)
        chosen = ids.reshape(-1)
        gate, up = torch.bmm(self.gate_up[chosen], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        rows = torch.bmm(self.down[chosen], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        rows = rows * weights.reshape(-1, 1)
        return rows.view(-1, TOP_K, HIDDEN).sum(1) + self.shared(x)


class Layer(nn.Module):
    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = Dense(2 * WIDTH) if dense else MoE()
        self.before_attention, self.before_mlp = Norm(HIDDEN), Norm(HIDDEN)

    def forward(self, x, cos, sin, cache, metadata):
        attention = self.attention(self.before_attention(x), cos, sin, cache, metadata)
        x = x + attention
        mlp = self.mlp(self.before_mlp(x))
        return x + mlp, attention, mlp


class PagedModel(nn.Module):
    """``kv_caches`` is one tensor per layer, or all of them stacked."""

    def __init__(self, moe_layers: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(dense=i == 0) for i in range(1 + moe_layers))
        self.norm = Norm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        angles = torch.arange(MAX_POSITIONS)[:, None] / 100 ** (torch.arange(ROPE // 2) / 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.requires_grad_(False)

    def forward(self, ids, positions, kv_caches, starts, seq_lens, block_table, slots):
        x = self.embed(ids)
        cos, sin = self.cos[positions], self.sin[positions]
        layers = []
        for i, layer in enumerate(self.layers):
            metadata = (starts, seq_lens, block_table, slots)
            x, attention, mlp = layer(x, cos, sin, kv_caches[i], metadata)
            layers.append((attention, mlp))
        return self.head(self.norm(x)), layers


@dataclass
class Batch:
    """A step of requests, each with ``cached`` tokens of context and ``new`` ones.

    Attributes:
        requests: (cached, new) of each request.
        block_size: tokens per block.
        pad_tokens: rows behind the real ones.
        pad_requests: rows of the metadata behind the real ones.
        seed: of tokens and blocks.
        shared: requests that have the first ``n`` blocks of an earlier one: {request: (other, n)}.
    """

    requests: list[tuple[int, int]]
    block_size: int = 4
    pad_tokens: int = 0
    pad_requests: int = 0
    seed: int = 0
    shared: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chooser = random.Random(self.seed)
        needed = [-(-(cached + new) // self.block_size) for cached, new in self.requests]
        self.num_blocks = sum(needed) + 2
        free = list(range(1, self.num_blocks))
        chooser.shuffle(free)
        self.tables = [[free.pop() for _ in range(count)] for count in needed]
        for request, (other, count) in self.shared.items():
            self.tables[request][:count] = self.tables[other][:count]
        self.counts = [new for _, new in self.requests]
        self.tokens = sum(self.counts)
        generator = torch.Generator().manual_seed(self.seed)
        rows = self.tokens + self.pad_tokens
        self.ids = torch.randint(VOCABULARY, (rows,), generator=generator)
        self.positions = torch.zeros(rows, dtype=torch.int64)
        self.slots = torch.full((rows,), -1, dtype=torch.int64)
        starts = [0]
        for (cached, new), table in zip(self.requests, self.tables, strict=True):
            for position in range(cached, cached + new):
                row = starts[-1] + position - cached
                self.positions[row] = position
                block = table[position // self.block_size]
                self.slots[row] = block * self.block_size + position % self.block_size
            starts.append(starts[-1] + new)
        self.starts = torch.tensor(starts + starts[-1:] * self.pad_requests, dtype=torch.int32)
        lengths = [cached + new for cached, new in self.requests] + [0] * self.pad_requests
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        width = max(needed) + 1  # As in an engine, where the longest request decides.
        table = [row + [0] * (width - len(row)) for row in self.tables]
        self.block_table = torch.tensor(
            table + [[0] * width] * self.pad_requests, dtype=torch.int32
        )

    def metadata(self) -> AttentionMetadata:
        """What the host knows of the step."""
        return AttentionMetadata(
            query_start_loc_cpu=self.starts, seq_lens_cpu=self.seq_lens, num_reqs=len(self.counts)
        )

    def caches(self, model: PagedModel, seed: int = 1) -> list[torch.Tensor]:
        """Caches as earlier steps left them: the context of every request is arbitrary rows."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.num_blocks, self.block_size, RANK + ROPE)
        dtype = model.head.weight.dtype
        return [
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for _ in model.layers
        ]

    def arguments(self, caches: list[torch.Tensor] | torch.Tensor) -> tuple[object, ...]:
        """Arguments of the model."""
        return (
            self.ids,
            self.positions,
            caches,
            self.starts,
            self.seq_lens,
            self.block_table,
            self.slots,
        )
