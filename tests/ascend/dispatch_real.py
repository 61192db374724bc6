"""The dispatch of the real torch_npu: what it leaves in the graphs, matched and lowered as well.

Every tensor is a fake one on an NPU that does not exist, see ``cann_stand_ins.py``: graphs are
made and looked at, never run.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import cam_emulator
import captured_code
import loader
import pytest
import session
import torch
from ge_graph import GeGraph, faults
from paged_model import RANK, ROPE, Batch, PagedModel
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import afd_graph
import afd_graph.connectors.cam as cam
from afd_graph import AFDConfig
from afd_graph.connectors.cam_group import CamGroup
from afd_graph.connectors.cann_window import open_window
from afd_graph.lowering.ascend import streams
from afd_graph.lowering.torchair import prepare
from afd_graph.passes.recover_attention import recover_attention
from afd_graph.pipeline import Pipeline
from tiny_models import VOCABULARY, deepseek_v2

warnings.filterwarnings("ignore")
assert loader.has_torch_npu(), "run by test_dispatch.py, in its own environment"
torchair = session.start()
import npugraph_ex  # noqa: E402  (torch_npu first)

LAYERS = 2


@pytest.fixture(autouse=True)
def _clean():
    torch._dynamo.reset()
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def captured_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The operators of every graph that reaches our passes."""
    graphs: list[list[str]] = []
    original = Pipeline.run

    def run(self: Pipeline, gm: fx.GraphModule, *arguments: Any) -> Any:
        graphs.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
        return original(self, gm, *arguments)

    monkeypatch.setattr(Pipeline, "run", run)
    yield graphs


def model(mode: FakeTensorMode, experts: str, **config: Any) -> tuple[Any, torch.Tensor]:
    """A DeepSeek-V2 on the NPU, and a prompt."""
    torch.set_default_dtype(torch.bfloat16)
    with mode, torch.device("npu:0"):
        network = deepseek_v2(
            experts, num_hidden_layers=1 + LAYERS, first_k_dense_replace=1, **config
        )
        return network, torch.randint(0, VOCABULARY, (1, 12))


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_our_backend_matches_and_lowers(experts, monkeypatch):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    network, ids = model(mode, experts)
    recorder = session.Recorder(torchair)
    compiler = session.backend(cam_emulator.World(1, 1))
    with captured_graphs(monkeypatch) as graphs, mode, recorder.watching(), torch.no_grad():
        compiled = torch.compile(
            lambda ids: network(input_ids=ids, use_cache=False).logits,
            backend=compiler,
            dynamic=False,
            fullgraph=True,
        )
        with compiler, pytest.raises(Exception, match="get_npu_format"):  # where a run begins
            compiled(ids)
    (graph,) = graphs
    assert "aten.matmul.default" in graph  # not taken apart, as it is on the CPU
    assert "npu._npu_dtype_cast.default" in graph
    assert len(compiler.report().layers) == LAYERS
    unsplit, split = (GeGraph(program.ge()) for program in recorder.programs)
    assert faults(unsplit) == []
    assert faults(split) == []
    assert len(split.exchanges()) == 2 * LAYERS


def test_the_hook_recovers_fused_attention(monkeypatch):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    network, ids = model(mode, "grouped_mm")
    options = {
        "attention_ranks": 1,
        "ffn_ranks": 1,
        "rank": 0,
        "max_tokens": session.MAX_TOKENS,
        "group_name": "group",
    }
    hook = afd_graph.torchair_pre_pass_for(AFDConfig(connector="cam", connector_options=options))
    found: list[list[str]] = []
    programs: list[Any] = []

    def watched(gm: fx.GraphModule, inputs: Any, config: Any) -> None:
        found.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
        hook(gm, inputs, config)

    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = watched
    fx_compiler = torchair.npu_fx_compiler._NpuFxCompiler
    original = fx_compiler._gen_compiled_gm

    def kept(self: Any, *arguments: Any) -> Any:
        programs.append(original(self, *arguments))
        return programs[-1]

    monkeypatch.setattr(fx_compiler, "_gen_compiled_gm", kept)
    # Before any hook runs, torchair compiles C++ against CANN's headers for an operator without
    # converter. The headers are not here, and after our hook the operator is not either.
    scan = importlib.import_module("torchair._ge_concrete_graph.custom_op_pre_scan")
    monkeypatch.setattr(scan, "prescan_and_compile_custom_ops", lambda *_: None)
    backend = torchair.get_npu_backend(compiler_config=config)
    with mode, torch.no_grad(), pytest.raises(Exception, match="get_npu_format"):
        torch.compile(network, backend=backend, dynamic=False, fullgraph=True)(
            input_ids=ids, use_cache=False
        )
    fused = [name for name in found[0] if name.startswith("npu.npu_fusion_attention")]
    assert len(fused) == 1 + LAYERS
    graph = GeGraph(programs[0].graph._proto)
    assert faults(graph) == []
    assert len(graph.exchanges()) == 2 * LAYERS


def test_the_serving_form_lowers_over_operators_of_cann(monkeypatch):
    """Paged attention and the exchange, with the shapes and schemas of the real torch_npu."""
    monkeypatch.setattr(cam, "missing_kernel", lambda *_: None)
    context = torch.zeros(1024, dtype=torch.int8)
    monkeypatch.setattr(cam.CamConnector, "schedule_context", lambda *_: context)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    batch = Batch([(6, 1), (0, 10), (9, 1), (13, 4)], block_size=3, pad_tokens=4, pad_requests=4)
    torch.set_default_dtype(torch.bfloat16)
    with mode, torch.device("npu:0"):
        network = PagedModel(LAYERS)
        arguments = [
            torch.empty(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x
            for x in batch.arguments([])
        ]
        shape = (batch.num_blocks, batch.block_size, RANK + ROPE)
        arguments[2] = [torch.empty(shape) for _ in network.layers]
    recorder = session.Recorder(torchair)
    compiler = session.backend(cam_emulator.World(1, 1), operators="cann")
    with mode, recorder.watching(), torch.no_grad(), compiler:
        compiled = torch.compile(network, backend=compiler, dynamic=True, fullgraph=True)
        with contextlib.suppress(RuntimeError, NotImplementedError):  # where a run begins
            compiled(*arguments)
    unsplit, split = (GeGraph(program.ge()) for program in recorder.programs)
    assert faults(unsplit) == []
    assert faults(split) == []
    assert split.types()["FusedInferAttentionScore"] == 2 * LAYERS + 1
    assert split.types()["AttentionWorkerCombine"] == 2 * LAYERS


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_scaled_dot_product_attention_is_recovered(causal, heads):
    with FakeTensorMode(), torch.device("npu:0"):
        query, key = (torch.empty(1, n, 8, 16, dtype=torch.bfloat16) for n in heads)
        gm = make_fx(
            lambda q, k: torch.nn.functional.scaled_dot_product_attention(
                q, k, k, is_causal=causal, enable_gqa=heads[0] != heads[1]
            )
        )(query, key)
    gm.graph.eliminate_dead_code()
    assert any("npu_fusion_attention" in str(node.target) for node in gm.graph.nodes)
    assert recover_attention(gm.graph) == 1
    (attention,) = gm.graph.find_nodes(op="call_function", target=torch.ops.afd.attention.default)
    mask, is_causal, _, grouped = attention.args[3:]
    assert (mask, is_causal, grouped) == (None, causal, heads[0] != heads[1])


CONFIGURATIONS = {"aclgraph": torchair.CompilerConfig, "npugraph_ex": npugraph_ex.CompilerConfig}


def captured(route: str) -> str:
    """The code for a captured graph of two stages."""
    gm = session.two_stages("npu:0")
    inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    config = CONFIGURATIONS[route]()
    if route == "aclgraph":
        config.mode = "reduce-overhead"
    assert streams.route_of(config) == route
    prepare(gm.graph, CamGroup(1, 1, 0, 64, group_name="g"), lambda layer: 8, route)
    gm.recompile()
    package = npugraph_ex if route == "npugraph_ex" else torchair
    return session.Lowered(gm, inputs, None).compile_again(package, config).get_code()


@pytest.mark.parametrize("route", list(CONFIGURATIONS))
def test_captured_graphs_have_an_event_around_all_communication(route):
    code = captured(route)
    assert (
        captured_code.exchanges(code)
        == [
            "afd_async_dispatch_send",
            "afd_async_combine_recv",
        ]
        * 4
    )
    assert captured_code.faults(code) == []


def test_events_of_npugraph_ex_itself_are_lost(monkeypatch):
    """Why its ``record`` and ``wait`` are not used: they come out as nothing, and rows race."""
    original = streams._Writer.__init__

    def with_its_own(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        self.air = torch.ops.npugraph_ex

    monkeypatch.setattr(streams._Writer, "__init__", with_its_own)
    found = captured_code.faults(captured("npugraph_ex"))
    assert sum("does not wait for its rows" in fault for fault in found) == 8
    assert any("before it has arrived" in fault for fault in found)


def test_the_backend_takes_a_configuration_of_npugraph_ex(monkeypatch):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    network, ids = model(mode, "grouped_mm")
    compiler = session.backend(
        cam_emulator.World(1, 1),
        lowering_options={"compiler_config": npugraph_ex.CompilerConfig()},
    )
    recorder = session.Recorder(npugraph_ex)
    with mode, recorder.watching(), torch.no_grad(), compiler:
        compiled = torch.compile(
            lambda ids: network(input_ids=ids, use_cache=False).logits,
            backend=compiler,
            dynamic=False,
            fullgraph=True,
        )
        with contextlib.suppress(Exception):  # there is no device to capture on
            compiled(ids)
    codes = [program.result.get_code() for program in recorder.programs]
    assert [len(captured_code.exchanges(code)) for code in codes] == [2 * LAYERS, 4 * LAYERS]
    assert [captured_code.faults(code) for code in codes] == [[], []]


class ProcessGroup:
    """Hands out memory as the window of a rank."""

    def _window_register_and_exchange(self, size: int, ranks: list[int]) -> None:
        self.window = torch.empty(size, dtype=torch.int8, device="npu:0")

    def _get_window_mem(self) -> torch.Tensor:
        return self.window


@pytest.mark.parametrize("quant", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_torch_npu_makes_the_context_of_a_window(rank, quant):
    """It lays its areas out in the window and refuses one that is too small."""
    rows, top_k, hidden = 16, 2, 512
    group = CamGroup(2, 1, rank, rows, dynamic_quant=quant, operators="cann")
    process_group = ProcessGroup()
    sizes = {"hidden_size": hidden, "top_k": top_k, "num_experts": 8, "dtype": torch.bfloat16}
    window = open_window(group, process_group, **sizes)
    assert (window.context.shape, window.context.dtype) == ((1024,), torch.int8)
    told = dict(re.findall(r"(\w+)=(\d+)", window.holder.get_schedule_context_info()))
    places = rows * (top_k + 1)
    if rank == 0:
        expected = {"schedule_mode": 1, "token_info_buf_size": 4 * places}
        expected["token_data_buf_size"] = places * hidden * 2
    else:
        row = 1024  # 512 values of two bytes, or 512 bytes and a scale, aligned
        expected = {"schedule_mode": 0, "token_info_buf_size": 2 * 4 * (2 + places)}
        expected["token_data_buf_size"] = 2 * places * row
    assert {name: int(told[name]) for name in expected} == expected
    first, last = process_group.window.data_ptr(), int(told["token_data_buf"])
    assert last + expected["token_data_buf_size"] <= first + process_group.window.numel()
    window.close()
