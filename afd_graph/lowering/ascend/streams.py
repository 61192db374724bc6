"""Put the communication of a graph on a stream of its own, in its order.

torchair has one notation for two kinds of graphs, and a second backend has another:

``ge``            GE graphs: a scope labels the operators in it, ``wait`` adds control edges.
``aclgraph``      captured graphs: a scope switches streams, ``record`` and ``wait`` are events.
``npugraph_ex``   the same under another name; its own ``record`` and ``wait`` emit nothing, so
                  torchair's are used within its scopes.

Every communication operator waits for the one before it, so all ranks issue them in one order,
a receive follows its dispatch, and with one credit the next dispatch follows the receive. Nothing
else waits: the attention of the other stage may run while the rows are away.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from afd_graph.lowering.ascend.exchange import Crossing

LABEL = "afd_comm"
"""Name of the stream."""

ROUTES = ("ge", "aclgraph", "npugraph_ex")


def route_of(config: Any) -> str:
    """The route of a compiler configuration of torchair or of npugraph_ex."""
    package = type(config).__module__.split(".")[0]
    if package == "npugraph_ex":
        return package
    return "ge" if config.mode.value == "max-autotune" else "aclgraph"


def put_on_stream(graph: fx.Graph, crossings: Sequence[Crossing], route: str) -> int:
    """Insert scopes, records and waits in place; returns how many nodes.

    Args:
        graph: the graph; torchair's operators must be registered.
        crossings: its communication, in order.
        route: one of :data:`ROUTES`.
    """
    if route != "ge":
        package = "npugraph_ex" if route == "npugraph_ex" else "torchair"
        importlib.import_module(f"{package}.ops._tagged_event")  # registers what is used below
    writer = _Writer(graph, route)
    before: Crossing | None = None
    for crossing in crossings:
        if route == "ge":
            writer.label(crossing, before)
        else:
            writer.fork(crossing)
        before = crossing
    return writer.inserted


def returns_nothing(node: fx.Node) -> bool:
    """Whether an operator has no result that another could wait for."""
    return not node.target._schema.returns  # type: ignore[union-attr]


class _Writer:
    def __init__(self, graph: fx.Graph, route: str) -> None:
        self.graph = graph
        self.air = torch.ops.air
        self.scopes = torch.ops.npugraph_ex if route == "npugraph_ex" else torch.ops.air
        self.inserted = 0
        self.records: dict[fx.Node, fx.Node] = {}

    def label(self, crossing: Crossing, before: Crossing | None) -> None:
        """A labelled scope; the wait in it reaches the operator, the first that it holds."""
        with self.graph.inserting_before(crossing.node):
            self._enter(crossing)
            if before is not None:
                self._call(self.air.wait.default, [self._done(before)])
        with self.graph.inserting_after(crossing.node):
            leave = self._call(self.scopes.scope_exit.default)
        if returns_nothing(crossing.node):
            with self.graph.inserting_before(leave):
                self.records[crossing.node] = self._call(self.air.record.default)

    def _done(self, crossing: Crossing) -> fx.Node:
        """What exists when a crossing is done: a tensor of it, or a record behind it."""
        return self.records.get(crossing.node) or crossing.result or crossing.node

    def fork(self, crossing: Crossing) -> None:
        """The stream waits for what the operator reads, and readers wait for the operator.

        On one stream the operators keep their order without an event.
        """
        with self.graph.inserting_before(crossing.node):
            ready = self._call(self.air.record.default)
            self._enter(crossing)
            self._call(self.air.wait.default, [ready])
        readers = [n for n in crossing.node.users if n.op == "call_function"]
        with self.graph.inserting_after(crossing.node):
            done = self._call(self.air.record.default)
        with self.graph.inserting_after(done):
            leave = self._call(self.scopes.scope_exit.default)
        with self.graph.inserting_before(leave):
            # Else their memory is given to the main stream while this one still reads it. Nobody
            # reads the constants.
            for tensor in crossing.node.all_input_nodes:
                if tensor.target is not torch.ops.aten.full.default:
                    self._call(self.scopes.record_tagged_stream.default, tensor, LABEL)
        if readers:
            position = {node: i for i, node in enumerate(self.graph.nodes)}
            first = min(readers, key=position.__getitem__)
            with self.graph.inserting_before(first):
                self._call(self.air.wait.default, [done])

    def _enter(self, crossing: Crossing) -> None:
        keys, values = ["_user_stream_label", "_user_stream_priority"], [LABEL, "0"]
        if crossing.kind == "receive" and self.scopes is self.air:
            # It blocks on the device until the experts have answered.
            keys, values = [*keys, "_op_exec_never_timeout"], [*values, "True"]
        self._call(self.scopes.scope_enter.default, keys, values)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        self.inserted += 1
        return self.graph.call_function(target, args)
