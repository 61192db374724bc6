"""CANN's own operators as the form of the exchange: lowered, checked, refused where they cannot."""

from __future__ import annotations

import dataclasses
import inspect
import os
import threading
import types
import warnings
from typing import Any

import cam_emulator
import cann_emulator
import loader
import pytest
import session
import torch
from ge_graph import GeGraph, faults

import afd_graph.connectors.cam as cam
from afd_graph import AFDConfig, torchair_pre_pass_for
from afd_graph.connectors.cam_group import CamGroup
from afd_graph.connectors.cann_window import open_window
from afd_graph.errors import ConfigError, ConnectorError
from afd_graph.lowering.ascend.cann_exchange import window_shapes
from afd_graph.lowering.ascend.ffn_graph import ffn_graph
from afd_graph.lowering.ascend.ir_table import CANN
from tiny_models import VOCABULARY, deepseek_v2

warnings.filterwarnings("ignore")
torchair = session.start()
LAYERS, TOP_K, ROWS = 2, 2, session.MAX_TOKENS


@pytest.fixture(autouse=True)
def window(monkeypatch):
    """Windows in an emulated world, or in none."""

    def open_window(group: CamGroup, *_: Any, **__: Any) -> Any:
        world = cann_emulator._by_name.get(group.group_name)
        context = torch.zeros(1024, dtype=torch.int8) if world is None else world.context(0)
        return types.SimpleNamespace(context=context, close=lambda: None)

    monkeypatch.setattr(cam, "open_window", open_window)
    monkeypatch.setattr(cam, "missing_kernel", lambda *_: None)


def model(dtype: torch.dtype = torch.bfloat16) -> Any:
    network = deepseek_v2(num_hidden_layers=1 + LAYERS, first_k_dense_replace=1).to(dtype)
    return lambda ids: network(input_ids=ids, use_cache=False).logits


def lowered(dynamic: bool = False) -> list[GeGraph]:
    programs = session.lowered(
        torchair,
        model(),
        torch.randint(0, VOCABULARY, (1, 12)),
        dynamic=dynamic,
        operators="cann",
        ranks=(1, 2, 1),
    )
    return [GeGraph(program.ge()) for program in programs]


@pytest.mark.parametrize("dynamic", [False, True])
def test_programs_lower_and_keep_the_rules(dynamic):
    unsplit, split = lowered(dynamic)
    assert faults(unsplit) == []
    assert faults(split) == []
    assert [(e.layer, e.stage) for e in split.exchanges()] == [
        (layer, stage) for layer in range(LAYERS) for stage in (0, 1)
    ]
    for exchange in split.exchanges():
        attributes = split.ops[exchange.dispatch].attr
        shapes = window_shapes(CamGroup(1, 2, 0, ROWS, operators="cann"), 64, TOP_K)
        for name in ("ffn_token_info_table_shape", "ffn_token_data_shape"):
            assert list(attributes[name].list.i) == shapes[name]
        assert attributes["ffn_start_rank_id"].i == 1


def test_without_the_edge_that_we_add_combine_may_run_first():
    _, split = lowered()
    first = split.exchanges()[0]
    receive = split.ops[first.receive]
    kept = [edge for edge in receive.input if edge != f"{first.dispatch}:-1"]
    assert len(kept) < len(receive.input)
    del receive.input[:]
    receive.input.extend(kept)
    found = faults(GeGraph(split.proto))
    assert f"{first.receive} may run before {first.dispatch}" in found


@pytest.mark.parametrize("operator", CANN.operators, ids=lambda o: o.ge_type)
def test_the_table_is_what_torch_npu_and_torchair_say(operator):
    version = os.environ.get("AFD_TORCH_NPU", "2.13.0")
    schema = loader.npu_schemas(version)[operator.name.split("::")[1]]
    assert f"npu::{schema}" == operator.schema
    declared = inspect.signature(getattr(loader.ge_operators(), operator.ge_type)).parameters
    names = [name for name in declared if name not in ("dependencies", "node_name")]
    assert names == [ir for _, ir in (*operator.inputs, *operator.attributes)]


@pytest.mark.newest
def test_equals_the_model_against_emulated_operators(monkeypatch):
    """Both sides run: the attention program behind torchair's passes, the graphs of FFN ranks."""
    cann_emulator.install()
    monkeypatch.setattr("afd_graph.lowering.ascend.cann_exchange._TOKEN_DTYPES", _any_dtype())
    world = cann_emulator.World(1, 2)
    config = torchair.CompilerConfig()
    config.debug.run_eagerly = True
    torch._dynamo.reset()
    network, ids = model(torch.float32), torch.randint(0, VOCABULARY, (2, 11))
    compiler = session.backend(
        cam_emulator.World(1, 2, name=world.name),
        operators="cann",
        lowering_options={"compiler_config": config},
    )
    programs: list[Any] = []
    monkeypatch.setattr(compiler._connector, "add_program", programs.append)
    threads: list[threading.Thread] = []

    def serve(rank: int) -> None:
        group = dataclasses.replace(compiler._connector.group, rank=rank)
        turns = [program for program in programs for _ in range(2)]
        gm, weights = ffn_graph(turns, group, top_k=TOP_K, device="cpu")
        gm(*weights, world.context(rank))

    opened = compiler._connector.schedule_context

    def context(traffic: Any) -> torch.Tensor:
        if not threads:  # all programs are there
            threads.extend(threading.Thread(target=serve, args=(r,), daemon=True) for r in (1, 2))
            for thread in threads:
                thread.start()
        return opened(traffic)

    monkeypatch.setattr(compiler._connector, "schedule_context", context)
    with session.any_dtype(), compiler, torch.no_grad():
        got = torch.compile(network, backend=compiler, fullgraph=True)(ids)
        expected = network(ids)
        assert compiler.report().steps_split == 1
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


def _any_dtype() -> dict[torch.dtype, int]:
    return {torch.float16: 0, torch.bfloat16: 1, torch.int8: 2, torch.float32: 1}


def test_shapes_of_a_quantised_window():
    group = CamGroup(3, 2, 0, 8, dynamic_quant=True, operators="cann")
    shapes = window_shapes(group, 7168, 6)
    assert shapes["ffn_token_data_shape"] == [3, 1, 8, 7, 7680]
    assert shapes["ffn_token_info_table_shape"] == [3, 1, 2 + 8 * 7]
    assert shapes["token_data_shape"] == [1, 8, 7, 7168]


def test_a_hook_is_refused():
    options = {"operators": "cann", "group_name": "g"}
    with pytest.raises(ConfigError, match="a hook cannot add to the inputs"):
        torchair_pre_pass_for(AFDConfig(connector="cam", connector_options=options))


def test_a_group_of_somebody_else_is_refused():
    sizes = {"hidden_size": 64, "top_k": 2, "num_experts": 8, "dtype": torch.bfloat16}
    with pytest.raises(ConfigError, match="pass host and port instead of group_name"):
        open_window(CamGroup(1, 1, 0, 8, operators="cann", group_name="g"), None, **sizes)


def test_without_a_graph_they_are_refused():
    options = {"attention_ranks": 1, "ffn_ranks": 1, "rank": 0, "max_tokens": 8, "device": "cpu"}
    connector = cam.CamConnector(**options, operators="cann", group_name="g")
    rows, ids = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ConnectorError, match="run in graphs only"):
        connector.dispatch_send(rows, ids, 0, 0, 8)


def test_a_window_is_opened_for_one_model():
    options = {"attention_ranks": 1, "ffn_ranks": 1, "rank": 0, "max_tokens": 8, "device": "cpu"}
    connector = cam.CamConnector(**options, operators="cann", group_name="g")
    context = connector.schedule_context(cam.Traffic(64, 2, 8))
    assert connector.schedule_context(cam.Traffic(64, 2, 8)) is context
    with pytest.raises(ConfigError, match="the window was opened for"):
        connector.schedule_context(cam.Traffic(32, 2, 8))
