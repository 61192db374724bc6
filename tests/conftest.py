"""One thread a test process, a quiet model library, and room for the graphs of many models."""

from __future__ import annotations

import gc
import logging
import os

# Before torch is imported: threads that a test starts take their number from here.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch._dynamo

logging.getLogger("transformers").setLevel(logging.ERROR)
# pytest listens to every logger that does not propagate; torch then prints every graph for it.
logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:.*past_key_values. is deprecated")
    config.addinivalue_line("filterwarnings", "ignore:Initializing zero-element tensors")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _fresh_dynamo():
    """Graphs of all models hang on the same few functions of the library: forget them by module.

    Without ``specialize_float`` every graph is compiled twice, which only takes time;
    ``test_equality`` has a test with the default.
    """
    torch._dynamo.reset()
    with torch._dynamo.config.patch(
        recompile_limit=512, accumulated_recompile_limit=512, specialize_float=True
    ):
        yield
    torch._dynamo.reset()
    gc.collect()
