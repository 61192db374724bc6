"""Graphs and programs survive the way through JSON, and nothing but operators comes back."""

from __future__ import annotations

import json
import math
import operator

import pytest
import torch
from expert_programs import aten, swiglu_program
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from afd_graph.connectors import WorkItem
from afd_graph.errors import AFDError
from afd_graph.ffn.executor import FFNExecutor
from afd_graph.ffn.serialize import program_from_dict, program_to_dict
from afd_graph.stored_graph import SerializeError, graph_from_dict, graph_to_dict


def through_json(graph: fx.Graph) -> fx.Graph:
    return graph_from_dict(json.loads(json.dumps(graph_to_dict(graph), allow_nan=False)))


def call(target, *args, **kwargs) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(target, (x, *args), kwargs))
    return graph


def stored_call(target: object, *args: object) -> dict:
    return {
        "format": 1,
        "nodes": [
            {"name": "x", "op": "placeholder", "target": "x"},
            {"name": "y", "op": "call_function", "target": target, "args": [{"node": "x"}, *args]},
            {"name": "output", "op": "output", "args": [{"node": "y"}]},
        ],
    }


@pytest.mark.parametrize("shared", [False, True])
def test_a_program_comes_back_the_same(shared):
    program = swiglu_program(layer=5, shared=shared, dtype=torch.bfloat16)
    stored, tensors = program_to_dict(program)
    again = program_from_dict(json.loads(json.dumps(stored)), tensors)
    for name in ("layer", "name", "num_experts", "hidden_size", "dtype", "key"):
        assert getattr(again, name) == getattr(program, name)
    for before, after in zip(program.expressions(), again.expressions(), strict=True):
        assert str(before.graph) == str(after.graph)
        assert [name for name, _ in before.weights] == [name for name, _ in after.weights]
        assert all(a is b for (_, a), (_, b) in zip(before.weights, after.weights, strict=True))

    rows, tokens = torch.randn(6, 16).bfloat16(), torch.randn(2, 16).bfloat16() if shared else None
    answers = []
    for one in (program, again):
        executor = FFNExecutor()
        executor.add(one)
        answers.append(executor.run(WorkItem(5, 0, rows, [1, 2, 3, 0], tokens)))
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "literal",
    [
        *(None, True, False, 0, -3, 2**40, 1.5, 1e-30, "text"),
        *(math.inf, -math.inf, [], [1, [2, None]], (1, (2.0,)), [(1,), (2,)]),
        *(torch.float16, torch.int64, torch.device("cpu"), torch.device("cuda", 1)),
        *(torch.contiguous_format, torch.channels_last, torch.strided),
    ],
    ids=repr,
)
def test_literals_come_back_with_value_and_type(literal):
    node = list(through_json(call(aten.clone.default, literal)).nodes)[1]
    value = node.args[1]
    if isinstance(literal, list):
        assert list(value) == literal
    else:
        assert value == literal
        assert type(value) is type(literal)


def test_nan_comes_back():
    node = list(through_json(call(aten.add.Scalar, math.nan)).nodes)[1]
    assert math.isnan(node.args[1])


def test_nested_nodes_and_keywords_come_back():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    cat = graph.call_function(aten.cat.default, ([x, y], 1))
    graph.output((graph.call_function(aten._to_copy.default, (cat,), {"dtype": torch.float64}), x))
    again = through_json(graph)
    assert str(again) == str(graph)
    inputs = torch.ones(2, 1), torch.zeros(2, 2)
    answer, first = fx.GraphModule(torch.nn.Module(), again)(*inputs)
    assert answer.dtype is torch.float64
    assert torch.equal(answer, torch.cat(inputs, 1).double())
    assert first is inputs[0]


def test_a_traced_graph_with_symbolic_sizes_comes_back():
    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0] * x.shape[1]
        top, _ = (x.reshape(tokens, -1) @ w).softmax(-1).topk(2)
        return top.view(tokens // 2, 4) + x.shape[1] - torch.ones(tokens // 2, 1)

    example = torch.randn(2, 6, 8), torch.randn(8, 5)
    graph = make_fx(model, tracing_mode="symbolic")(*example).graph
    assert any(node.target in (operator.mul, operator.floordiv) for node in graph.nodes)
    module = fx.GraphModule(torch.nn.Module(), through_json(graph))
    for shape in ((2, 6, 8), (4, 3, 8)):
        x = torch.randn(shape)
        assert torch.equal(module(x, example[1]), model(x, example[1]))


def test_operators_with_underscores_come_back():
    assert str(through_json(call(aten.__and__.Scalar, 1))) == str(call(aten.__and__.Scalar, 1))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (call(print), r"a call of <built-in function print> cannot be stored.*node=print"),
        (call(torch.relu), "no operator overload"),
        (call(aten.relu), "no operator overload"),
        (call(aten.clone.default, {1, 2}), r"argument \{1, 2\} of type set.*node=clone"),
        (call(aten.clone.default, slice(1, 2)), "of type slice"),
        (call(aten.clone.default, 1j), "of type complex"),
        (call(aten.clone.default, torch.ones(1)), "of type Tensor"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(graph, message):
    with pytest.raises(SerializeError, match=message) as caught:
        graph_to_dict(graph)
    assert isinstance(caught.value, AFDError)


@pytest.mark.parametrize("op", ["get_attr", "call_method", "call_module"])
def test_other_kinds_of_nodes_are_refused_by_name(op):
    graph = fx.Graph()
    graph.create_node(op, "constant", name="held")
    with pytest.raises(SerializeError, match=f"a {op} of 'constant'.*node=held.*placeholder"):
        graph_to_dict(graph)


@pytest.mark.parametrize(
    "target",
    [
        *("os.system.default", "aten.relu", "aten.no_such_op.default", "aten.relu.no_such"),
        *("aten.__class__.mro", "library.Library.define", "load_library.x.y", "operator.call"),
        *("builtins.eval.default", "torch.load", "", None, 3, ["aten.relu.default"]),
    ],
)
def test_unknown_operators_are_refused_by_name(target):
    with pytest.raises(SerializeError, match=r"is not known here.*node=y") as caught:
        graph_from_dict(stored_call(target))
    assert repr(target) in str(caught.value)


@pytest.mark.parametrize(
    "argument",
    [
        *({"node": "z"}, {"node": "y"}, {"dtype": "load"}, {"dtype": "no_such"}, {"layout": 1}),
        *({"float": "1"}, {"tuple": 1}, {"eval": "1"}, {}, {"node": "x", "dtype": "float32"}),
    ],
    ids=repr,
)
def test_malformed_arguments_are_refused(argument):
    with pytest.raises(SerializeError, match="node=y"):
        graph_from_dict(stored_call("aten.clone.default", argument))


def test_malformed_graphs_are_refused():
    good = stored_call("aten.relu.default")
    with pytest.raises(SerializeError, match="format 2; this version reads 1"):
        graph_from_dict({**good, "format": 2})
    with pytest.raises(SerializeError, match="'x' is missing, taken"):
        graph_from_dict({**good, "nodes": good["nodes"][:1] * 2})
    with pytest.raises(SerializeError, match="a 'get_attr'"):
        graph_from_dict({**good, "nodes": [{"name": "a", "op": "get_attr", "target": "a"}]})


def test_a_missing_weight_is_named():
    stored, tensors = program_to_dict(swiglu_program())
    del tensors["routed.1"]
    with pytest.raises(SerializeError, match=r"weight 'experts\.down' is missing"):
        program_from_dict(stored, tensors)
