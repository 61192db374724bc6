"""Our pipeline as torchair's own hook: in its backend, in its cache, in its export."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import loader
import pytest
import session
import torch
from ge_graph import GeGraph, faults

import afd_graph
import afd_graph.lowering.ascend.hook as hook_module
from afd_graph import AFDConfig
from afd_graph.errors import ConfigError
from tiny_models import VOCABULARY, deepseek_v2

warnings.filterwarnings("ignore")
torchair = session.start()
LAYERS = 2


def config(**changes: Any) -> AFDConfig:
    options = {
        "attention_ranks": 1,
        "ffn_ranks": 1,
        "rank": 0,
        "max_tokens": session.MAX_TOKENS,
        "group_name": "group",
        "device": "cpu",
    }
    return AFDConfig(connector="cam", connector_options={**options, **changes})


def compiled(hook: Any, dynamic: bool = False, **inputs: Any) -> GeGraph:
    """The graph that torchair makes of a DeepSeek-V2 with the hook."""
    network = deepseek_v2(num_hidden_layers=1 + LAYERS, first_k_dense_replace=1).bfloat16()
    compiler_config = torchair.CompilerConfig()
    compiler_config.post_grad_custom_pre_pass = hook
    before = len(loader.native.loaded)
    torch._dynamo.reset()
    backend = torchair.get_npu_backend(compiler_config=compiler_config)
    run = torch.compile(network, backend=backend, dynamic=dynamic, fullgraph=True)
    with torch.no_grad(), pytest.raises(NotImplementedError):
        run(use_cache=False, **inputs)
    assert len(loader.native.loaded) == before + 1
    return session.parsed(loader.native.loaded[-1][0])


def ids(length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (1, length))


def is_dynamic(graph: GeGraph) -> bool:
    data = [op for op in graph.proto.op if op.type == "Data"]
    return any(-1 in op.output_desc[0].shape.dim for op in data)


@pytest.mark.parametrize("dynamic", [False, True])
def test_torchair_compiles_two_stages_with_the_hook(dynamic):
    graph = compiled(afd_graph.torchair_pre_pass_for(config()), dynamic, input_ids=ids(12))
    assert faults(graph) == []
    assert is_dynamic(graph) is dynamic
    assert [(e.layer, e.stage) for e in graph.exchanges()] == [
        (layer, stage) for layer in range(LAYERS) for stage in (0, 1)
    ]


def test_a_single_token_is_not_split():
    graph = compiled(afd_graph.torchair_pre_pass_for(config()), input_ids=ids(1))
    assert faults(graph) == []
    assert [e.stage for e in graph.exchanges()] == [0] * LAYERS


def test_the_hook_is_idempotent():
    hook = afd_graph.torchair_pre_pass_for(config())

    def twice(gm: Any, example_inputs: Any, compiler_config: Any) -> None:
        hook(gm, example_inputs, compiler_config)
        before = str(gm.graph)
        hook(gm, example_inputs, compiler_config)
        assert str(gm.graph) == before

    assert len(compiled(twice, input_ids=ids(12)).exchanges()) == 2 * LAYERS


def digest(hook: Any) -> str:
    from torchair.inference._cache_compiler import _get_code_digest

    return _get_code_digest(hook)


def test_the_cache_key_changes_with_version_and_options(monkeypatch):
    one = digest(afd_graph.torchair_pre_pass_for(config()))
    assert digest(afd_graph.torchair_pre_pass_for(config())) == one
    assert digest(afd_graph.torchair_pre_pass_for(config(max_tokens=32))) != one
    monkeypatch.setattr("afd_graph.lowering.ascend.hook.__version__", "another")
    assert digest(afd_graph.torchair_pre_pass_for(config())) != one


def process(code: str, *arguments: str) -> str:
    here = Path(__file__).parent
    code = code.replace("{paths}", repr([str(here), str(here.parent)]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_options_from_the_environment_are_in_the_key(monkeypatch):
    keys = []
    for options in ('{"split": "none"}', '{"split": "none"}', "{}"):
        monkeypatch.setenv("AFD_OPTIONS", options)
        keys.append(digest(importlib.reload(hook_module).torchair_pre_pass))
    assert keys[0] == keys[1] != keys[2]


def test_options_from_the_environment_are_used(monkeypatch):
    ours = config()
    options = {"connector": "cam", "connector_options": dict(ours.connector_options)}
    monkeypatch.setenv("AFD_OPTIONS", json.dumps(options))
    assert len(compiled(afd_graph.torchair_pre_pass, input_ids=ids(12)).exchanges()) == 2 * LAYERS


def test_other_connectors_are_refused():
    with pytest.raises(ConfigError, match="use AFDConfig\\(connector='cam'"):
        afd_graph.torchair_pre_pass_for(AFDConfig())


@pytest.mark.parametrize("dynamic", [False, True])
def test_dynamo_export_writes_our_graph(dynamic, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = deepseek_v2(num_hidden_layers=1 + LAYERS, first_k_dense_replace=1)
            self.network.bfloat16()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.network(input_ids=tokens, use_cache=False).logits

    compiler_config = torchair.CompilerConfig()
    compiler_config.post_grad_custom_pre_pass = afd_graph.torchair_pre_pass_for(config())
    torch._dynamo.reset()
    with torch.no_grad():
        torchair.dynamo_export(
            ids(12),
            model=Logits().eval(),
            export_path="exported",
            export_name="afd",
            dynamic=dynamic,
            config=compiler_config,
        )
    assert (tmp_path / "exported" / "dynamo.pbtxt").exists()
    graph = session.parsed(loader.native.exported[-1][0])
    assert faults(graph) == []
    assert is_dynamic(graph) is dynamic
    assert len(graph.exchanges()) == 2 * LAYERS


CACHED = """
import sys
sys.path[:0] = {paths}
import session
torchair = session.start()
import loader, torch
from inside_hook import config
from tiny_models import deepseek_v2
import afd_graph

class Server(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.network = deepseek_v2(num_hidden_layers=1).bfloat16()
        c = torchair.CompilerConfig()
        c.post_grad_custom_pre_pass = afd_graph.torchair_pre_pass_for(config())
        self.cached = torchair.inference.cache_compile(
            self.prefill, config=c, dynamic=bool(int(sys.argv[1])), cache_dir="cache"
        )
    def prefill(self, tokens):
        return self.network(input_ids=tokens, use_cache=False).logits

import afd_graph.lowering.ascend.hook as hook
runs = []
original = hook.run_pre_pass
hook.run_pre_pass = lambda *a: (runs.append(1), original(*a))
server = Server().eval()
with torch.no_grad():
    try:
        server.cached(torch.zeros(1, 12, dtype=torch.int64))
    except NotImplementedError:
        pass
graph = session.parsed(loader.native.loaded[-1][0])
print(len(runs), len(graph.exchanges()))
"""


@pytest.mark.parametrize("dynamic", ["0", "1"])
def test_cache_compile_in_a_second_process_hits(dynamic, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (process(CACHED, dynamic).split()[-2:] for _ in range(2))
    assert first == ["1", "2"]
    assert second == ["0", "2"]  # compiled before: our pass did not run again
