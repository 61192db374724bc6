"""The model as a planner sees it: widths, counts, and what they cost per token.

Presets are the sizes in the ``config.json`` that is published with each model; any other model
comes from such a file (:func:`load_model`). Operations are counted as two per multiplication.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from afd_graph.errors import PlanError
from afd_graph.validation import check_choice

_GATED = 3  # matrices of a gated feed-forward layer: gate, up, down


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with mixture-of-experts layers.

    Attributes:
        name: for reports.
        layers: all decoder layers.
        dense_layers: how many of them have a plain feed-forward layer; they come first.
        hidden: width of the residual stream.
        heads: query heads.
        qk_dim: width of a query head, rotary part included.
        v_dim: width of a value head.
        kv_heads: key and value heads; not used with a latent cache.
        q_rank: width of the latent query, 0 for a direct projection.
        kv_rank: width of the latent key and value (MLA), 0 for plain or grouped attention.
        rope_dim: rotary part of a key in MLA, shared by all heads.
        experts: routed experts of a layer.
        top_k: experts of a token.
        expert_width: inner width of one expert.
        shared_width: inner width of all shared experts of a layer together.
        dense_width: inner width of a dense layer's feed-forward.
        groups: groups that the experts are chosen from, 1 for none.
        top_groups: groups that one token may choose from.
        sparse_keys: keys that a token attends to at most (sparse attention), 0 for all.
        index_width: heads times width of the indexer that chooses them.
        vocabulary: rows of the embedding.
    """

    name: str
    layers: int
    dense_layers: int
    hidden: int
    heads: int
    qk_dim: int
    v_dim: int
    kv_heads: int
    q_rank: int
    kv_rank: int
    rope_dim: int
    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    dense_width: int
    vocabulary: int
    groups: int = 1
    top_groups: int = 1
    sparse_keys: int = 0
    index_width: int = 0

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    @property
    def attention_weights(self) -> int:
        """Values in the projections of one layer."""
        if not self.kv_rank:
            queries = self.hidden * self.heads * self.qk_dim
            return (
                queries
                + self.hidden * self.kv_heads * (self.qk_dim + self.v_dim)
                + self.heads * self.v_dim * self.hidden
            )
        query_in = self.q_rank or self.hidden
        nope = self.qk_dim - self.rope_dim
        return (
            self.hidden * self.q_rank
            + query_in * self.heads * self.qk_dim
            + self.hidden * (self.kv_rank + self.rope_dim)
            + self.kv_rank * self.heads * (nope + self.v_dim)
            + self.heads * self.v_dim * self.hidden
            + self.q_rank * self.index_width
        )

    @property
    def expert_weights(self) -> int:
        """Values in one routed expert."""
        return _GATED * self.hidden * self.expert_width

    @property
    def shared_weights(self) -> int:
        """Values in the shared experts of one layer."""
        return _GATED * self.hidden * self.shared_width

    @property
    def dense_weights(self) -> int:
        """Values in the feed-forward of one dense layer."""
        return _GATED * self.hidden * self.dense_width

    @property
    def gate_weights(self) -> int:
        """Values in the gate of one layer."""
        return self.hidden * self.experts

    @property
    def cache_values(self) -> int:
        """Values in the KV cache per token and layer."""
        if self.kv_rank:
            return self.kv_rank + self.rope_dim
        return self.kv_heads * (self.qk_dim + self.v_dim)

    def pair_operations(self, *, absorbed: bool) -> int:
        """Operations of core attention for one query and one key, all heads.

        Args:
            absorbed: the latent cache is attended to as it is, as decoding does; otherwise keys
                and values are expanded first, as prefill does.
        """
        if self.kv_rank and absorbed:
            return 2 * self.heads * (2 * self.kv_rank + self.rope_dim)
        return 2 * self.heads * (self.qk_dim + self.v_dim)

    @property
    def attention_values(self) -> int:
        """Intermediate values per token and layer on the attention side, each written once.

        Two norms, the residual (twice), latent and full queries, expanded keys and values,
        attention output, projected output.
        """
        keys_and_values = (
            self.heads * (self.qk_dim + self.v_dim)
            if self.kv_rank
            else self.kv_heads * (self.qk_dim + self.v_dim)
        )
        return (
            5 * self.hidden
            + self.q_rank
            + self.heads * (self.qk_dim + self.v_dim)
            + self.cache_values
            + keys_and_values
        )

    @property
    def expert_values(self) -> int:
        """Intermediate values per row and expert: rows, gate and up, their product, result."""
        return 2 * self.hidden + _GATED * self.expert_width


_MLA = {"heads": 128, "qk_dim": 192, "v_dim": 128, "kv_heads": 128, "kv_rank": 512, "rope_dim": 64}

_V3 = ModelShape(
    name="deepseek-v3",
    layers=61,
    dense_layers=3,
    hidden=7168,
    q_rank=1536,
    experts=256,
    top_k=8,
    expert_width=2048,
    shared_width=2048,
    dense_width=18432,
    vocabulary=129280,
    groups=8,
    top_groups=4,
    **_MLA,
)

MODELS: dict[str, ModelShape] = {
    "deepseek-v2-lite": ModelShape(
        name="deepseek-v2-lite",
        layers=27,
        dense_layers=1,
        hidden=2048,
        q_rank=0,
        experts=64,
        top_k=6,
        expert_width=1408,
        shared_width=2816,
        dense_width=10944,
        vocabulary=102400,
        **{**_MLA, "heads": 16, "kv_heads": 16},
    ),
    "deepseek-v2": ModelShape(
        name="deepseek-v2",
        layers=60,
        dense_layers=1,
        hidden=5120,
        q_rank=1536,
        experts=160,
        top_k=6,
        expert_width=1536,
        shared_width=3072,
        dense_width=12288,
        vocabulary=102400,
        groups=8,
        top_groups=3,
        **_MLA,
    ),
    "deepseek-v3": _V3,
    "deepseek-v3.2": ModelShape(
        **{**vars(_V3), "name": "deepseek-v3.2", "sparse_keys": 2048, "index_width": 64 * 128}
    ),
}
"""Sizes from the ``config.json`` of deepseek-ai/DeepSeek-V2-Lite, -V2, -V3 and -V3.2-Exp."""


def load_model(source: str | PathLike[str]) -> ModelShape:
    """A preset by name, or the model that a Hugging Face ``config.json`` (or its folder) describes.

    Raises:
        PlanError: neither a preset nor a readable configuration of a model with experts.
    """
    if isinstance(source, str) and source.lower() in MODELS:
        return MODELS[source.lower()]
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        check_choice("model", str(source), tuple(MODELS))  # raises, and names the nearest preset
        raise
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{path} is not a readable model configuration: {error}",
            remedy="give a preset name, a config.json or the folder that holds one",
        ) from error
    return from_config(config, name=path.parent.name or path.stem)


def from_config(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """Read the names that the Hugging Face DeepSeek, Mixtral and Qwen-MoE configurations use.

    Raises:
        PlanError: a size is missing, or the model has no experts.
    """

    def read(*names: str, default: int | None = None) -> int:
        for key in names:
            if config.get(key) is not None:
                return int(config[key])
        if default is None:
            raise PlanError(
                f"the configuration of {name!r} has none of {names}",
                remedy="give the config.json of a DeepSeek, Mixtral or Qwen mixture of experts",
            )
        return default

    hidden, heads = read("hidden_size"), read("num_attention_heads")
    layers = read("num_hidden_layers")
    kv_rank = read("kv_lora_rank", default=0)
    rope = read("qk_rope_head_dim", default=0)
    head = read("head_dim", default=hidden // heads)
    experts = read("n_routed_experts", "num_local_experts", "num_experts")
    width = read("moe_intermediate_size", "intermediate_size")
    dense = read("first_k_dense_replace", default=len(config.get("mlp_only_layers") or ()))
    shared = read("shared_expert_intermediate_size", default=0) or width * read(
        "n_shared_experts", default=0
    )
    index = read("index_n_heads", default=0) * read("index_head_dim", default=0)
    return ModelShape(
        name=name,
        layers=layers,
        dense_layers=min(dense, layers),
        hidden=hidden,
        heads=heads,
        qk_dim=read("qk_nope_head_dim", default=0) + rope if kv_rank else head,
        v_dim=read("v_head_dim", default=head) if kv_rank else head,
        kv_heads=read("num_key_value_heads", default=heads),
        q_rank=read("q_lora_rank", default=0),
        kv_rank=kv_rank,
        rope_dim=rope,
        experts=experts,
        top_k=read("num_experts_per_tok"),
        expert_width=width,
        shared_width=shared,
        dense_width=read("intermediate_size", default=width),
        vocabulary=read("vocab_size"),
        groups=max(1, read("n_group", default=1)),
        top_groups=max(1, read("topk_group", default=1)),
        sparse_keys=read("index_topk", default=0),
        index_width=index,
    )
