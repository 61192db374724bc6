"""The loop of an FFN rank through torchair: nothing in it depends on data."""

from __future__ import annotations

import warnings

import loader
import pytest
import session
import torch
from expert_programs import swiglu_program
from ge_graph import faults

from afd_graph.connectors.cam_group import CamGroup
from afd_graph.errors import ConfigError
from afd_graph.lowering.ascend.ffn_graph import ffn_graph

warnings.filterwarnings("ignore")
torchair = session.start()
EXPERTS, HIDDEN, LAYERS, TOP_K = 8, 16, 2, 2
DATA_DEPENDENT = {"NonZero", "Where", "MaskedSelect", "Unique2", "Bincount"}


@pytest.fixture(scope="module", autouse=True)
def _npu_operators():
    loader.stand_in_torch_npu()


def group(**changes) -> CamGroup:
    values = {"attention_ranks": 1, "ffn_ranks": 2, "rank": 2, "max_tokens": 64, "group_name": "g"}
    return CamGroup(**{**values, **changes})


def lowered(of: CamGroup, shared: bool = False):
    layers = [
        swiglu_program(i, experts=EXPERTS, hidden=HIDDEN, dtype=torch.bfloat16, shared=shared)
        for i in range(LAYERS)
    ]
    turns = [program for program in layers for _ in range(2)]  # two stages
    gm, weights = ffn_graph(turns, of, top_k=TOP_K, device="cpu")
    assert len(weights) == LAYERS * (4 if shared else 2)
    assert all(w.shape[0] == EXPERTS // 2 for w in weights if w.dim() == 3)
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    program = session.Lowered(gm, inputs, None)
    config = torchair.CompilerConfig()
    config.experimental_config.pattern_fusion_pass = False  # it needs all operators of torch_npu
    program.result = program.compile_again(torchair, config)
    return session.GeGraph(program.ge())


@pytest.mark.parametrize("operators", ["afd_ascend", "umdk_cam_op_lib"])
@pytest.mark.parametrize("quant", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_loop_lowers(operators, quant, shared):
    if shared and operators == "afd_ascend":
        pytest.skip("carries routed rows only")
    graph = lowered(group(operators=operators, dynamic_quant=quant), shared)
    assert faults(graph) == []
    assert graph.types()["GroupedMatmul"] == 2 * 2 * LAYERS
    assert not DATA_DEPENDENT & set(graph.types())
    phases = [phase for phase, _ in graph.order()]
    assert phases == ["dispatch_recv", "combine_send"] * 2 * LAYERS


def test_the_answer_carries_the_info_that_came():
    graph = lowered(group())
    sends = [n for n in graph.communication() if graph.phase(n) == "combine_send"]
    receives = [n for n in graph.communication() if graph.phase(n) == "dispatch_recv"]
    for send, receive in zip(sends, receives, strict=True):
        assert graph.ops[send].input[2] == f"{receive}:2"


def test_several_replicas_are_refused():
    with pytest.raises(ConfigError, match="a graph serves one replica, this group has 2"):
        lowered(group(attention_ranks=2, rank=2))
