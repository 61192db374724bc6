"""Artifacts of the tiny models, each written once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny_models
from afd_graph.artifact import save
from afd_graph.hf import PREFIX, ServingModule, serving_examples


@pytest.fixture(scope="session")
def module() -> ServingModule:
    """DeepSeek-V2 in small, as it is served."""
    return ServingModule(tiny_models.deepseek_v2().requires_grad_(False))


@pytest.fixture(scope="session")
def artifact(module, tmp_path_factory) -> Path:
    """A folder with all programs of that model, for two FFN ranks; not to be changed."""
    path = tmp_path_factory.mktemp("artifact") / "v2"
    save(path, module, dict(serving_examples(module, None)), ffn_ranks=2, prefix=PREFIX)
    return path


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, tiny_models.VOCABULARY, (1, 9), generator=torch.Generator())
