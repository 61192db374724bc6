"""Hugging Face models: configurations, checkpoints, and the programs that serving needs of them."""

from afd_graph.hf.checkpoint import open_checkpoint
from afd_graph.hf.config import load_config, model_name, preset_names, preset_source, read_config
from afd_graph.hf.model import (
    empty_model,
    load_tokenizer,
    load_without_experts,
    make_tensor_parallel,
)
from afd_graph.hf.serving import (
    PREFIX,
    PROGRAMS,
    ServingModule,
    check_program,
    serving_examples,
)

__all__ = [
    "PREFIX",
    "PROGRAMS",
    "ServingModule",
    "check_program",
    "empty_model",
    "load_config",
    "load_tokenizer",
    "load_without_experts",
    "make_tensor_parallel",
    "model_name",
    "open_checkpoint",
    "preset_names",
    "preset_source",
    "read_config",
    "serving_examples",
]
