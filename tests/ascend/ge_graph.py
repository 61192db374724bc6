"""A GE graph to ask questions of, and the rules that ours must keep.

:func:`faults` returns one sentence for every rule that a graph breaks; a graph without faults

* is acyclic, has only operators that torchair really converted, and no control edge on a constant;
* has each communication operator on its stream, with the inputs and attributes of the IR table,
  on the way to the output, and all of them in one order;
* receives what it dispatched, in order, before the next dispatch where there is one credit;
* leaves the attention of the other stage free to run while rows are away;
* writes paged caches in place, and orders what reads a cache and what writes it next.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from afd_graph.lowering.ascend.ir_table import CANN, FORMS, Operator
from afd_graph.lowering.ascend.streams import LABEL

OPERATORS = {o.ge_type: o for package in FORMS.values() for o in package.operators}
_PHASE = {
    o.ge_type: phase
    for package in FORMS.values()
    for phase in ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
    for o in (getattr(package, phase),)
}
_CONSTANTS = ("Const", "FileConstant", "Data")


@dataclass(frozen=True)
class Exchange:
    """One dispatch and its receive."""

    layer: int
    stage: int
    dispatch: str
    receive: str | None


@dataclass
class GeGraph:
    """A serialized graph, by operator name."""

    proto: Any
    ops: dict[str, Any] = field(init=False)
    sources: dict[str, set[str]] = field(init=False)
    data_sources: dict[str, set[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.ops = {op.name: op for op in self.proto.op}
        self.sources, self.data_sources = {}, {}
        for op in self.proto.op:
            edges = [edge.rsplit(":", 1) for edge in op.input if edge]
            self.sources[op.name] = {name for name, _ in edges}
            self.data_sources[op.name] = {name for name, output in edges if output != "-1"}

    def types(self) -> Counter[str]:
        return Counter(op.type for op in self.proto.op)

    def phase(self, name: str) -> str | None:
        return _PHASE.get(self.ops[name].type)

    def before(self, name: str, data_only: bool = False) -> set[str]:
        """Everything that happens before an operator."""
        edges = self.data_sources if data_only else self.sources
        found: set[str] = set()
        stack = list(edges[name])
        while stack:
            current = stack.pop()
            if current not in found:
                found.add(current)
                stack.extend(edges[current])
        return found

    def label(self, name: str) -> str:
        attributes = self.ops[name].attr
        return attributes["_user_stream_label"].s.decode() if self._has(name) else ""

    def _has(self, name: str) -> bool:
        return "_user_stream_label" in self.ops[name].attr

    def has_cycle(self) -> bool:
        missing = {name: len(sources) for name, sources in self.sources.items()}
        users: dict[str, list[str]] = {name: [] for name in self.ops}
        for name, sources in self.sources.items():
            for source in sources:
                users[source].append(name)
        ready = [name for name, count in missing.items() if not count]
        done = 0
        while ready:
            done += 1
            for user in users[ready.pop()]:
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user)
        return done != len(self.ops)

    def communication(self) -> list[str]:
        """Communication operators in the order of what happens before what."""
        names = [name for name in self.ops if self.phase(name)]
        depth = {name: len(self.before(name) & set(names)) for name in names}
        return sorted(names, key=depth.__getitem__)

    def order(self) -> list[tuple[str, int]]:
        """What the communication is, in its order: phase and layer."""
        layers: dict[str, int] = {e.receive: e.layer for e in self.exchanges() if e.receive}
        found = []
        for name in self.communication():
            found.append((str(self.phase(name)), layers.get(name, self.layer(name))))
        return found

    def served(self, layers: Mapping[str, int]) -> list[tuple[str, int]]:
        """As :meth:`order` for an FFN rank, whose layers are told by the weights they multiply.

        Args:
            layers: from the name of a weight input to its layer.
        """
        found = []
        for name in self.communication():
            before = self.before(name, data_only=True)
            received = [n for n in before if self.phase(n) == "dispatch_recv"]
            if self.phase(name) == "combine_send":
                used = {layers[n] for n in before if n in layers}
                assert len(used) == len(received) == 1
                (layer,) = used
                found += [("dispatch_recv", layer), ("combine_send", layer)]
        return found

    def layer(self, name: str) -> int:
        """MoE layer of a dispatch: an attribute, or the constant that CANN's own one reads."""
        op = self.ops[name]
        if "layerIndex" in op.attr:
            return int(op.attr["layerIndex"].i)
        if op.type != CANN.dispatch_send.ge_type:
            return -1
        source = self.ops[op.input[3].rsplit(":", 1)[0]]
        while source.type != "Const":
            source = self.ops[source.input[-1].rsplit(":", 1)[0]]
        return int.from_bytes(source.attr["value"].t.data[:4], "little")

    def exchanges(self) -> list[Exchange]:
        """Dispatches in order; a receive reads the same expert ids as its dispatch.

        Those of CANN's own operators have no tensor in common, and are taken in order.
        """
        chain = self.communication()
        kinds = {self.ops[name].type for name in chain}
        if CANN.dispatch_send.ge_type in kinds:
            sends = [n for n in chain if self.phase(n) == "dispatch_send"]
            answers = [n for n in chain if self.phase(n) == "combine_recv"]
            layers = [self.layer(n) for n in sends]
            return [
                Exchange(layer, layers[:i].count(layer), *pair)
                for i, (layer, pair) in enumerate(
                    zip(layers, itertools.zip_longest(sends, answers), strict=True)
                )
            ]
        receives = {
            self._ids(name, 1): name for name in self.ops if self.phase(name) == "combine_recv"
        }
        seen: Counter[int] = Counter()
        found = []
        for name in self.communication():
            if self.phase(name) == "dispatch_send":
                layer = self.layer(name)
                receive = receives.get(self._ids(name, 1))
                found.append(Exchange(layer, seen[layer], name, receive))
                seen[layer] += 1
        return found

    def _ids(self, name: str, position: int) -> str:
        return self.ops[name].input[position]


def faults(graph: GeGraph, *, credits: int = 1) -> list[str]:
    """The rules that ``graph`` breaks, one sentence each."""
    if graph.has_cycle():
        return ["the graph has a cycle"]
    return [
        *_conversion_faults(graph),
        *_operator_faults(graph),
        *_order_faults(graph, credits),
        *_overlap_faults(graph),
        *_cache_faults(graph),
    ]


_OTHER_SIDE = {"dispatch_send": "dispatch_recv", "combine_recv": "combine_send"}


def role_faults(
    attention: Sequence[GeGraph], ffn: Sequence[GeGraph], layers: Mapping[str, int]
) -> list[str]:
    """Where ranks of one replica communicate in different orders: they would wait for ever.

    Args:
        attention: graphs of the attention ranks.
        ffn: graphs of the FFN ranks.
        layers: from the name of a weight input of the FFN graphs to its layer.
    """
    expected = attention[0].order()
    answers = [(_OTHER_SIDE[phase], layer) for phase, layer in expected]
    orders = [(f"attention rank {i}", g.order(), expected) for i, g in enumerate(attention)]
    orders += [(f"FFN rank {i}", g.served(layers), answers) for i, g in enumerate(ffn)]
    found = []
    for who, order, wanted in orders:
        differences = (
            f"{who} does {ours} where attention rank 0 wants {theirs}"
            for ours, theirs in itertools.zip_longest(order, wanted)
            if ours != theirs
        )
        found += list(itertools.islice(differences, 1))
    return found


def _conversion_faults(graph: GeGraph) -> list[str]:
    found = [f"{op.type} was not converted" for op in graph.proto.op if "." in op.type]
    found += [
        f"control edge on the constant {op.name}"
        for op in graph.proto.op
        if op.type in _CONSTANTS and any(edge.endswith(":-1") for edge in op.input)
    ]
    return found


def _operator_faults(graph: GeGraph) -> list[str]:
    output = next(op.name for op in graph.proto.op if op.type == "NetOutput")
    alive = graph.before(output)
    found = []
    for name in graph.communication():
        if graph.label(name) != LABEL:
            found.append(f"{name} is not on stream {LABEL}")
        if name not in alive:
            found.append(f"{name} does not reach the output")
        found += _signature_faults(graph.ops[name], OPERATORS[graph.ops[name].type])
    return found


def _signature_faults(op: Any, operator: Operator) -> list[str]:
    found = []
    given = [edge for edge in op.input if not edge.endswith(":-1")]
    inputs = [ir for _, ir in operator.inputs]
    while inputs and inputs[-1] in operator.optional and len(inputs) > len(given):
        inputs.pop()  # left out
    described = [desc.name for desc in op.input_desc][: len(given)]
    if len(given) != len(inputs) or described != inputs:
        found.append(f"{op.name} has inputs {described}, the table says {inputs}")
    attributes = {ir for _, ir in operator.attributes}
    missing = attributes - set(op.attr) - operator.defaulted
    if missing:
        found.append(f"{op.name} lacks attributes {sorted(missing)}")
    outputs = [desc.name for desc in op.output_desc]
    if outputs != list(operator.outputs):
        found.append(f"{op.name} has outputs {outputs}, the table says {list(operator.outputs)}")
    return found


def _order_faults(graph: GeGraph, credits: int) -> list[str]:
    found = []
    chain = graph.communication()
    before = {name: graph.before(name) for name in chain}
    for first, second in itertools.pairwise(chain):
        if first not in before[second]:
            found.append(f"{first} and {second} have no order")
    exchanges = graph.exchanges()
    for exchange in exchanges:
        if exchange.receive is None:
            found.append(f"{exchange.dispatch} is never received")
        elif exchange.dispatch not in before[exchange.receive]:
            found.append(f"{exchange.receive} may run before {exchange.dispatch}")
    for i, exchange in enumerate(exchanges):
        for later in exchanges[i + 1 :]:
            if later.stage == exchange.stage and exchange.receive not in before[later.dispatch]:
                found.append(
                    f"stage {later.stage} dispatches layer {later.layer} before it received "
                    f"layer {exchange.layer}"
                )
                break
        if i >= credits and exchanges[i - credits].receive not in before[exchange.dispatch]:
            found.append(f"{exchange.dispatch} needs more than {credits} credits")
    return found


def _overlap_faults(graph: GeGraph) -> list[str]:
    """Between two dispatches of different stages lies compute that the first does not hold up."""
    found = []
    exchanges = graph.exchanges()
    for current, following in itertools.pairwise(exchanges):
        if current.stage == following.stage:
            continue
        work = graph.before(following.dispatch, data_only=True)
        work -= graph.before(current.dispatch)
        work = {n for n in work if graph.ops[n].type not in _CONSTANTS and not graph.phase(n)}
        held = {n for n in work if current.dispatch in graph.before(n)}
        if held:
            found.append(f"{len(held)} operators of the other stage wait for {current.dispatch}")
        if not any(graph.ops[n].type in ("BatchMatMul", "BatchMatMulV2", "MatMul") for n in work):
            found.append(f"nothing overlaps {current.dispatch}")
    return found


def _cache_faults(graph: GeGraph) -> list[str]:
    """Attention reads what the last write of its cache made, and the next write waits for it."""
    found = []
    writes = {name for name, op in graph.ops.items() if op.type == "ScatterNdUpdate"}
    into = {name: graph.ops[name].input[0].rsplit(":", 1)[0] for name in writes}
    for write in writes:
        base = write
        while base in writes:
            base = into[base]
        if graph.ops[base].type not in ("Data", "RefData"):
            found.append(f"{write} writes into a copy of the cache: {graph.ops[base].type}")
    for name, op in graph.ops.items():
        if op.type != "FusedInferAttentionScore":
            continue
        key = op.input[1].rsplit(":", 1)[0]
        while graph.ops[key].type.startswith("StridedSlice"):
            key = graph.ops[key].input[0].rsplit(":", 1)[0]
        if key not in writes:
            found.append(f"{name} may read its cache before it is written")
        found += [
            f"{later} may overwrite what {name} reads"
            for later in writes
            if into[later] == key and name not in graph.before(later)
        ]
    return found
