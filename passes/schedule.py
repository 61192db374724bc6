"""Put the nodes of a graph in the order that keeps both sides busy.

Before: an unsplit or a two-stage AFD graph in any topological order. After: the same nodes, in
the order given by the credits (:func:`afd_graph.schedule_ir.by_credits`)::

    one credit     A(0,0) D(0,0)  A(0,1) R(0,0) D(0,1)  A(1,0) R(0,1) D(1,0) ...
    two or more    A(0,0) D(0,0)  A(0,1) D(0,1)  R(0,0) A(1,0) D(1,0)  R(0,1) ...

where ``A(l, s)`` stands for all nodes that the dispatch of layer ``l``, stage ``s`` needs. What a
stage can compute while its rows are away (shared experts) follows its dispatch.

1. emit the nodes that each step needs, in their old order;
2. behind each dispatch and each last receive, emit what else of that stage became computable;
   behind the last dispatch also what the whole batch can compute by then (the shared experts of
   the last layer);
3. emit the rest, in the old order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from torch import fx

from afd_graph.errors import PassError
from afd_graph.passes.graph_tools import ancestors
from afd_graph.passes.token_flow import DISPATCH, RECEIVE
from afd_graph.schedule_ir import Step, by_credits


def schedule(
    graph: fx.Graph,
    *,
    credits: int,
    num_stages: int,
    needs: Mapping[fx.Node, Collection[fx.Node]] | None = None,
) -> list[Step]:
    """Reorder ``graph`` in place; returns the order of its steps.

    Args:
        graph: the graph.
        credits: un-received dispatches allowed.
        num_stages: token stages of the graph.
        needs: what nodes must come after besides their inputs, for graphs that are not functional.

    Raises:
        PassError: the graph's dependences contradict the order.
    """
    return _Scheduler(graph, credits, num_stages, needs or {}).run()


class _Scheduler:
    def __init__(
        self,
        graph: fx.Graph,
        credits: int,
        num_stages: int,
        needs: Mapping[fx.Node, Collection[fx.Node]],
    ) -> None:
        self.graph = graph
        self.needs = needs
        self.nodes = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        # Layers are numbered per connector; the order of a graph counts its own.
        self.ordinal: dict[int, int] = {}
        for node in self.nodes:
            if node.target is DISPATCH:
                self.ordinal.setdefault(node.args[-3], len(self.ordinal))
        self.dispatches = {self._place(n): n for n in self.nodes if n.target is DISPATCH}
        self.receives = {self._place(n): n for n in self.nodes if n.target is RECEIVE}
        self.layers = len(self.dispatches) // num_stages
        self.num_stages = num_stages
        self.steps = by_credits(self.layers, credits, num_stages)
        self.order: list[fx.Node] = []
        self.emitted: set[fx.Node] = set()

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        return [*node.all_input_nodes, *self.needs.get(node, ())]

    def _place(self, node: fx.Node) -> tuple[int, int]:
        layer, stage = node.args[-3:-1]
        assert isinstance(layer, int)
        assert isinstance(stage, int)
        return self.ordinal[layer], stage

    def run(self) -> list[Step]:
        """Emit in order, then rearrange the graph."""
        self._emit(node for node in self.nodes if node.op == "placeholder")
        waiting = self._by_readiness()
        received = dict.fromkeys(range(self.num_stages), -1)
        for step in self.steps:
            place = (step.layer, step.stage)
            if step.kind == "attention":
                self._emit_needs(self.dispatches[place])
            elif step.kind == "dispatch":
                self._emit([self.dispatches[place]])
                self._emit_ready(waiting, step.stage, step.layer - 1, received)
                if self.num_stages > 1 and place == (self.layers - 1, self.num_stages - 1):
                    for layer in range(-1, step.layer):
                        self._emit_ready(waiting, None, layer, received)
            else:
                self._emit_needs(self.receives[place])
                self._emit([self.receives[place]])
                received[step.stage] = step.layer
                if step.layer == self.layers - 1:
                    self._emit_ready(waiting, step.stage, step.layer, received)
        self._emit(node for node in self.nodes if node not in self.emitted)
        self._rearrange()
        return self.steps

    def _by_readiness(self) -> dict[tuple[int | None, int], list[tuple[fx.Node, tuple[int, ...]]]]:
        """Nodes by (stage, last layer of that stage whose answer they need).

        Those of the whole batch stand under the stage None and the last layer of any stage.
        """
        needs: dict[fx.Node, tuple[int, ...]] = {}
        none = (-1,) * self.num_stages
        ready = defaultdict(list)
        for node in self.nodes:
            need = list(none)
            for source in self._inputs(node):
                need = [max(pair) for pair in zip(need, needs[source], strict=True)]
            if node.target is RECEIVE:
                layer, stage = self._place(node)
                need[stage] = max(need[stage], layer)
            needs[node] = tuple(need)
            stage = node.meta.get("afd_stage", 0 if self.num_stages == 1 else None)
            if node.op == "call_function":
                last = max(need) if stage is None else need[stage]
                ready[stage, last].append((node, tuple(need)))
        return ready

    def _emit_ready(
        self,
        waiting: dict[tuple[int | None, int], list[tuple[fx.Node, tuple[int, ...]]]],
        stage: int | None,
        layer: int,
        received: dict[int, int],
    ) -> None:
        for node, need in waiting.get((stage, layer), ()):
            if node in self.emitted or node.target in (DISPATCH, RECEIVE):
                continue
            if self.num_stages == 1 and layer == self.layers - 1:
                continue  # An unsplit graph ends in its own order.
            if all(need[s] <= received[s] for s in received):
                self._emit_needs(node)
                self._emit([node])

    def _emit_needs(self, node: fx.Node) -> None:
        missing = ancestors(
            self._inputs(node), within=_Without(self.emitted), inputs_of=self._inputs
        )
        self._emit(sorted(missing, key=self.position.__getitem__))

    def _emit(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            for source in self._inputs(node):
                if source not in self.emitted:
                    raise PassError(
                        f"the order needs {node.name} before its input {source.name}",
                        node=node.name,
                    )
            self.emitted.add(node)
            self.order.append(node)

    def _rearrange(self) -> None:
        last = self.graph._root
        for node in self.order:
            last.append(node)
            last = node


class _Without(set[fx.Node]):
    """The complement of a set, as a membership test."""

    def __init__(self, excluded: set[fx.Node]) -> None:
        super().__init__()
        self._excluded = excluded

    def __contains__(self, node: object) -> bool:
        return node not in self._excluded
