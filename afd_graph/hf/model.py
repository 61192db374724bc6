"""Hugging Face models without their weights, and those that an attention rank needs.

A model of any size is built in a second: its parameters have no values, its tables (rotary
frequencies) are computed. An attention rank then maps everything from the checkpoint but the
routed experts, which keep shape and type, so that the model is captured as ever, and no memory:
the FFN ranks hold the values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from afd_graph import _compat
from afd_graph.checkpoint import Checkpoint, is_routed
from afd_graph.errors import ConfigError
from afd_graph.hf.config import library, load_config


def meta_model(config: Any, dtype: torch.dtype | None = None) -> Any:
    """A ``PreTrainedModel`` in evaluation mode: its tables on the CPU, all else on ``meta``.

    Args:
        config: of :func:`load_config`; changed: attention and experts in the forms that we match.
        dtype: of the parameters; the configuration's when None.

    Raises:
        ConfigError: the library has no causal language model of this kind.
    """
    config._attn_implementation = "sdpa"
    config._experts_implementation = "grouped_mm"
    config.use_cache = True
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device("meta"):
            model = library().AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ConfigError(
            f"transformers has no causal language model for {config.model_type!r}",
            remedy="name the configuration of a language model",
        ) from error
    _compute_tables(model)
    return model.eval()


def empty_model(config: Any, dtype: torch.dtype | None = None) -> tuple[nn.Module, Any]:
    """:func:`meta_model` with fake tensors, and the mode in which they live."""
    model = meta_model(config, dtype)
    mode = _compat.new_fake_mode()
    with mode:
        known: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in known:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    known[id(parameter)] = nn.Parameter(empty, requires_grad=False)
                module._parameters[name] = known[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model, mode


def _compute_tables(model: Any) -> None:
    """Give buffers that are in no checkpoint their values."""
    for module in model.modules():
        tables = {
            name: buffer
            for name, buffer in module._buffers.items()
            if buffer is not None and name in module._non_persistent_buffers_set
        }
        if not tables:
            continue
        for name, buffer in tables.items():
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        with torch.no_grad():
            model._init_weights(module)


def load_without_experts(checkpoint: Checkpoint) -> Any:
    """The ``PreTrainedModel`` of a checkpoint of :func:`~afd_graph.hf.open_checkpoint`.

    Raises:
        ConfigError: transformers is missing, or does not know the kind of model.
    """
    model = meta_model(load_config(str(checkpoint.folder)), checkpoint.dtype)
    values = {}
    for name, tensor in model.state_dict().items():
        if is_routed(name):
            values[name] = torch.empty_like(tensor, device="cpu")
            values[name].untyped_storage().resize_(0)
        else:
            values[name] = checkpoint.whole(name)
    model.load_state_dict(values, assign=True)
    model.tie_weights()
    return model.requires_grad_(False)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder, or None when there is none."""
    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if not any((folder / name).exists() for name in files):
        return None
    return library().AutoTokenizer.from_pretrained(folder)


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
