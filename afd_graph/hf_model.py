"""A Hugging Face model for an attention rank: everything but the routed experts' weights.

The experts' parameters have their shape and type, so that the model is captured as ever, but no
memory: the FFN ranks hold the values. All other weights are memory-mapped from the checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from afd_graph.errors import ConfigError
from afd_graph.ffn.checkpoint import Checkpoint


def load_without_experts(checkpoint: Checkpoint) -> Any:
    """Build the model of ``checkpoint`` for inference; returns a ``PreTrainedModel``.

    Raises:
        ConfigError: transformers is missing, or the checkpoint does not hold all weights.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights
    except ImportError as error:
        raise ConfigError(
            f"loading a model needs transformers: {error}",
            remedy="pip install 'afd-graph[hf]'",
        ) from error
    config = AutoConfig.from_pretrained(checkpoint.path)
    dtype = checkpoint.dtype or config.dtype or torch.float32
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", experts_implementation="grouped_mm"
        ).eval()
    routed = set()
    for name, parameter in model.named_parameters():
        if checkpoint.is_routed(name):
            parameter.untyped_storage().resize_(0)
            routed.add(name)
    values = {
        name: checkpoint.whole(name)
        for name in checkpoint.names()
        if not checkpoint.is_routed(name)
    }
    result = model.load_state_dict(values, strict=False, assign=True)
    model.tie_weights()
    tied = set(getattr(model, "all_tied_weights_keys", ()))
    missing = set(result.missing_keys) - routed - tied
    if missing:
        raise ConfigError(
            f"the checkpoint {checkpoint.path} has no values for {sorted(missing)[:5]}",
            remedy="name the directory of a complete checkpoint",
        )
    return model.requires_grad_(False)


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The tokenizer of a checkpoint, or None when it has none."""
    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if not any((checkpoint.path / name).exists() for name in files):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint.path)


def make_tensor_parallel(model: nn.Module, mesh: Any) -> None:
    """Shard the attention heads of a decoder over ``mesh``, in place.

    Query, key and value projections column-wise, the output row-wise, the way PyTorch's
    ``parallelize_module`` does it; everything else stays whole on every rank.

    Raises:
        ConfigError: the heads cannot be divided, or a projection is not known.
    """
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    ranks = mesh.size()
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise ConfigError(
            f"{type(model).__name__} has no model.layers",
            remedy="parallelize the model yourself with parallelize_module",
        )
    config: Any = model.config
    odd = {
        name: getattr(config, name)
        for name in ("num_attention_heads", "num_key_value_heads")
        if getattr(config, name, ranks) % ranks
    }
    for layer in layers:
        attention = layer.self_attn
        # Latent attention projects queries and keys up from a latent that every rank has whole.
        column = [
            name
            for name in ("q_proj", "q_b_proj", "k_proj", "v_proj", "kv_b_proj")
            if getattr(attention, name, None) is not None
        ]
        if odd or not column or not hasattr(attention, "o_proj"):
            raise ConfigError(
                f"{type(attention).__name__} cannot be shared by {ranks} ranks: "
                f"{odd or 'unknown projections'}",
                remedy="choose a tensor-parallel size that divides the heads",
            )
        plan: dict[str, Any] = {name: ColwiseParallel() for name in column}
        parallelize_module(attention, mesh, {**plan, "o_proj": RowwiseParallel()})
        for name in ("num_heads", "num_key_value_heads"):
            if hasattr(attention, name):
                setattr(attention, name, getattr(attention, name) // ranks)
