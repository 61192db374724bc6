"""The checker of GE graphs finds every fault that is put into a good graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import session
from ge_graph import GeGraph, faults

from afd_graph.connectors.cam_group import CamGroup
from afd_graph.lowering.torchair import prepare

warnings.filterwarnings("ignore")
torchair = session.start()


@pytest.fixture(scope="module")
def good() -> Any:
    gm = session.two_stages()
    inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    group = CamGroup(1, 1, 0, 64, group_name="group")
    prepare(gm.graph, group, lambda layer: 8, "ge")
    gm.recompile()
    program = session.Lowered(gm, inputs, None)
    program.result = program.compile_again(torchair, torchair.CompilerConfig())
    return program.ge()


def _broken(good: Any, change: Callable[[GeGraph], None]) -> list[str]:
    proto = type(good)()
    proto.CopyFrom(good)
    change(GeGraph(proto))
    return faults(GeGraph(proto))


def _drop(op: Any, *edges: str) -> None:
    kept = [edge for edge in op.input if edge not in edges]
    del op.input[:]
    op.input.extend(kept)


def _first(graph: GeGraph, kind: str, number: int = 0) -> Any:
    return graph.ops[[n for n in graph.communication() if graph.phase(n) == kind][number]]


def _any(graph: GeGraph, kind: str) -> Any:
    return next(op for op in graph.proto.op if op.type == kind)


def test_a_good_graph_has_no_faults(good):
    assert faults(GeGraph(good)) == []


def no_label(graph: GeGraph) -> None:
    del _first(graph, "dispatch_send").attr["_user_stream_label"]


def other_label(graph: GeGraph) -> None:
    _first(graph, "combine_recv").attr["_user_stream_label"].s = b"elsewhere"


def receive_not_after_dispatch(graph: GeGraph) -> None:
    receive, dispatch = _first(graph, "combine_recv"), _first(graph, "dispatch_send")
    _drop(receive, f"{dispatch.name}:-1")


def dispatch_not_after_receive(graph: GeGraph) -> None:
    dispatch = _first(graph, "dispatch_send", 1)
    _drop(dispatch, f"{_first(graph, 'combine_recv').name}:-1")


def never_received(graph: GeGraph) -> None:
    dispatch = _first(graph, "dispatch_send")
    dispatch.input[1] = _any(graph, "Data").name + ":0"


def dead_end(graph: GeGraph) -> None:
    last = _first(graph, "combine_recv", -1)
    join = next(op for op in graph.proto.op if op.type.startswith("Concat"))
    other = _first(graph, "combine_recv", -2)
    for i, edge in enumerate(join.input):
        if edge == f"{last.name}:0":
            join.input[i] = f"{other.name}:0"


def cycle(graph: GeGraph) -> None:
    first, last = _first(graph, "dispatch_send"), _first(graph, "combine_recv", -1)
    first.input.append(f"{last.name}:-1")


def edge_on_a_constant(graph: GeGraph) -> None:
    _any(graph, "Const").input.append(f"{_any(graph, 'Data').name}:-1")


def _overlapping_products(graph: GeGraph) -> list[Any]:
    """Products of stage 1 that may run while the first rows of stage 0 are away."""
    dispatch, second = _first(graph, "dispatch_send"), _first(graph, "dispatch_send", 1)
    work = graph.before(second.name, data_only=True) - graph.before(dispatch.name)
    return [graph.ops[n] for n in work if graph.ops[n].type.startswith("MatMul")]


def attention_waits(graph: GeGraph) -> None:
    dispatch = _first(graph, "dispatch_send")
    _overlapping_products(graph)[0].input.append(f"{dispatch.name}:-1")


def nothing_to_overlap(graph: GeGraph) -> None:
    for product in _overlapping_products(graph):
        product.type = "Add"


def not_converted(graph: GeGraph) -> None:
    _any(graph, "MatMul").type = "aten.mm.default"


def lost_attribute(graph: GeGraph) -> None:
    del _first(graph, "dispatch_send").attr["tpSize"]


def other_input(graph: GeGraph) -> None:
    _first(graph, "combine_recv").input_desc[2].name = "scales"


def other_output(graph: GeGraph) -> None:
    _first(graph, "combine_recv").output_desc[0].name = "y"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (no_label, "is not on stream afd_comm"),
        (other_label, "is not on stream afd_comm"),
        (receive_not_after_dispatch, "may run before"),
        (dispatch_not_after_receive, "needs more than 1 credits"),
        (dispatch_not_after_receive, "have no order"),
        (never_received, "is never received"),
        (dead_end, "does not reach the output"),
        (cycle, "the graph has a cycle"),
        (edge_on_a_constant, "control edge on the constant"),
        (attention_waits, "operators of the other stage wait for"),
        (nothing_to_overlap, "nothing overlaps"),
        (not_converted, "aten.mm.default was not converted"),
        (lost_attribute, "lacks attributes ['tpSize']"),
        (other_input, "has inputs"),
        (other_output, "has outputs"),
    ],
)
def test_faults_are_found(good, change, sentence):
    found = _broken(good, change)
    assert any(sentence in fault for fault in found), found


def test_two_orders_differ(good):
    proto = type(good)()
    proto.CopyFrom(good)
    graph = GeGraph(proto)
    reference = graph.order()
    dispatches = [graph.ops[e.dispatch] for e in graph.exchanges()]
    dispatches[0].attr["layerIndex"].i, dispatches[2].attr["layerIndex"].i = 1, 0
    assert GeGraph(proto).order() != reference
