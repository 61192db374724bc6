"""The loop of an FFN rank through torchair: nothing in it depends on data."""

from __future__ import annotations

import warnings

import loader
import pytest
import session
import torch
from expert_programs import swiglu_program
from ge_graph import GeGraph, faults, role_faults

from afd_graph.connectors.cam_group import CamGroup
from afd_graph.errors import ConfigError
from afd_graph.lowering.ascend.ffn_graph import ffn_graph
from afd_graph.lowering.ascend.ir_table import FORMS
from afd_graph.lowering.torchair import prepare

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


def lowered(of: CamGroup, shared: bool = False, turns=(0, 0, 1, 1)):
    layers = [
        swiglu_program(i, experts=EXPERTS, hidden=HIDDEN, dtype=torch.bfloat16, shared=shared)
        for i in range(LAYERS)
    ]
    steps = [layers[layer] for layer in turns]
    gm, weights = ffn_graph(steps, of, top_k=TOP_K, device="cpu")
    assert len(weights) == LAYERS * (4 if shared else 2)
    assert all(w.shape[0] == EXPERTS // 2 for w in weights if w.dim() == 3)
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    return compiled(gm, inputs)


def compiled(gm, inputs) -> GeGraph:
    config = torchair.CompilerConfig()
    config.experimental_config.pattern_fusion_pass = False  # it needs all operators of torch_npu
    program = session.Lowered(gm, inputs, None)
    program.result = program.compile_again(torchair, config)
    return GeGraph(program.ge())


@pytest.mark.parametrize("operators", list(FORMS))
@pytest.mark.parametrize("quant", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_loop_lowers(operators, quant, shared):
    if shared and not FORMS[operators].carries_shared:
        with pytest.raises(ConfigError, match="carries routed rows only"):
            lowered(group(operators=operators, dynamic_quant=quant), shared)
        return
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


# -- both roles -----------------------------------------------------------------------------------

REPLICA = {"attention_ranks": 2, "ffn_ranks": 2, "tp_size": 2}
WEIGHTS = {"weight_0": 0, "weight_1": 0, "weight_2": 1, "weight_3": 1}


def attention(rank: int) -> GeGraph:
    gm = session.two_stages()
    inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    prepare(gm.graph, group(**REPLICA, rank=rank), lambda layer: EXPERTS, "ge")
    gm.recompile()
    return compiled(gm, inputs)


@pytest.fixture(scope="module")
def replica() -> tuple[list[GeGraph], list[GeGraph]]:
    """Graphs of all ranks of one replica."""
    return (
        [attention(rank) for rank in (0, 1)],
        [lowered(group(**REPLICA, rank=rank)) for rank in (2, 3)],
    )


def test_both_roles_communicate_in_one_order(replica):
    attentions, experts = replica
    assert role_faults(attentions, experts, WEIGHTS) == []
    assert [layer for _, layer in attentions[0].order()] == [0] * 4 + [1] * 4


def test_an_ffn_rank_in_another_order_is_found(replica):
    attentions, experts = replica
    swapped = lowered(group(**REPLICA, rank=3), turns=(0, 1, 0, 1))
    assert role_faults(attentions, [experts[0], swapped], WEIGHTS) == [
        "FFN rank 1 does ('dispatch_recv', 1) where attention rank 0 wants ('dispatch_recv', 0)"
    ]


def test_an_ffn_rank_that_serves_less_is_found(replica):
    attentions, experts = replica
    short = lowered(group(**REPLICA, rank=2), turns=(0, 0, 1))
    assert role_faults(attentions, [short, experts[1]], WEIGHTS) == [
        "FFN rank 0 does None where attention rank 0 wants ('dispatch_recv', 1)"
    ]


def test_an_attention_rank_in_another_order_is_found(replica):
    attentions, experts = replica
    proto = type(attentions[1].proto)()
    proto.CopyFrom(attentions[1].proto)
    graph = GeGraph(proto)
    dispatches = [graph.ops[e.dispatch] for e in graph.exchanges()]
    dispatches[1].attr["layerIndex"].i, dispatches[2].attr["layerIndex"].i = 1, 0
    assert role_faults([attentions[0], GeGraph(proto)], experts, WEIGHTS) == [
        "attention rank 1 does ('dispatch_send', 1) where attention rank 0 wants "
        "('dispatch_send', 0)"
    ]
