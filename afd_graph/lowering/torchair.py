"""Hand the graph to torchair, which lowers it to Ascend.

1. dispatch and receive become the operators of the CAM package (:mod:`ascend.exchange`);
2. what torchair cannot convert is expressed in what it can (:mod:`ascend.plain_ops`);
3. communication goes to a stream of its own (:mod:`ascend.streams`);
4. ``torchair.get_compiler(config)`` makes a GE graph or a captured one.

The operators exchange rows on the device: the connector must be ``cam``, whose group they use.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import fx

from afd_graph import _compat
from afd_graph.connectors.cam import Traffic
from afd_graph.connectors.cam_group import CamGroup
from afd_graph.errors import ConfigError
from afd_graph.lowering.ascend.converters import register_converters
from afd_graph.lowering.ascend.exchange import exchange_in_graph
from afd_graph.lowering.ascend.paged_ops import lower_paged_attention
from afd_graph.lowering.ascend.plain_ops import lower_to_plain_ops
from afd_graph.lowering.ascend.register import register
from afd_graph.lowering.ascend.streams import put_on_stream, route_of
from afd_graph.passes.shapes import propagate_shapes
from afd_graph.passes.token_flow import DISPATCH
from afd_graph.runtime import Channel, channel


def lower(gm: fx.GraphModule, compiler_config: Any = None) -> Any:
    """Return a function over the list of inputs.

    Args:
        gm: a scheduled attention program.
        compiler_config: ``CompilerConfig`` of torchair, whose default compiles a GE graph, or of
            npugraph_ex, which captures.

    Raises:
        ConfigError: torchair is not installed, or the connector is not ``cam``.
        UnsupportedError: the graph cannot be expressed in operators that torchair converts.
    """
    torchair = import_torchair()
    config = torchair.CompilerConfig() if compiler_config is None else compiler_config
    prepared = fx.GraphModule(gm, _copied(gm.graph))
    used = _channel_of(prepared.graph)
    traffic = None
    if used is not None:
        traffic = _traffic(used, prepared.graph)
        prepare(prepared.graph, _group_of(used), used.num_experts.__getitem__, route_of(config))
    else:
        lower_paged_attention(prepared.graph, route_of(config))
        lower_to_plain_ops(prepared.graph)
    prepared.recompile()
    inputs = [node.meta["val"] for node in prepared.graph.nodes if node.op == "placeholder"]
    added: list[Any] = []
    if used is not None and _group_of(used).is_cann:
        connector: Any = used.connector
        with _compat.real_tensors():
            added.append(connector.schedule_context(traffic))
    compiled = _package_of(config).get_compiler(config)(prepared, inputs)

    def run(arguments: Sequence[Any]) -> Any:
        results = compiled(*arguments, *added)
        if used is not None:
            connector: Any = used.connector
            connector.exchanged(traffic)
        return results

    return run


def prepare(graph: fx.Graph, group: CamGroup, num_experts: Any, route: str) -> None:
    """Steps 1 to 3, in place."""
    if route == "ge":
        register_converters(group.package)
    else:
        register(group.package)
    crossings = exchange_in_graph(graph, group, num_experts)
    lower_paged_attention(graph, route)
    lower_to_plain_ops(graph)
    put_on_stream(graph, crossings, route)
    graph.lint()


def decompositions(compiler_config: Any = None) -> dict[Any, Any]:
    """The table that torchair itself gives to AOTAutograd."""
    torchair = import_torchair()
    config = torchair.CompilerConfig() if compiler_config is None else compiler_config
    package = _package_of(config).__name__
    compiler = importlib.import_module(f"{package}.npu_fx_compiler")
    return compiler._get_merged_decompositions(config)


def _package_of(config: Any) -> Any:
    """torchair, or npugraph_ex: the package that a configuration is of."""
    import_torchair()
    return importlib.import_module(type(config).__module__.split(".")[0])


def import_torchair() -> Any:
    """The torchair module, which torch_npu brings.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("torchair")
    except ImportError as error:
        raise ConfigError(
            f"lowering='torchair' needs torchair, which cannot be imported: {error}",
            remedy="install CANN and the torch_npu of this PyTorch version, with its requirements "
            "(pip install 'afd-graph[torchair]'), or use lowering='eager'",
        ) from error


def _channel_of(graph: fx.Graph) -> Channel | None:
    for node in graph.nodes:
        if node.target is DISPATCH:
            return channel(node.args[4])
    return None


def _group_of(used: Channel) -> CamGroup:
    group = getattr(used.connector, "group", None)
    if not isinstance(group, CamGroup):
        raise ConfigError(
            "lowering='torchair' exchanges rows with operators in the graph, and this connector "
            "has none",
            remedy="use connector='cam'",
        )
    return group


def _traffic(used: Channel, graph: fx.Graph) -> Traffic:
    propagate_shapes(graph)
    first = next(node for node in graph.nodes if node.target is DISPATCH)
    hidden, ids = (node.meta["val"] for node in first.args[:2])
    experts = used.num_experts[first.args[2]]
    return Traffic(int(hidden.shape[1]), int(ids.shape[1]), experts, hidden.dtype)


def _copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy
