"""Our pipeline as torchair's own hook, for who compiles with torchair and not with our backend.

    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = torchair_pre_pass_for(AFDConfig(connector="cam", ...))

torchair keeps compiled models on disk, under a key that hashes the *byte code* of the hook. A
closure or a callable object would give the same key for every configuration, so each configuration
gets a function of its own, whose byte code contains our version and the digest of the options.

One graph comes out: two stages where the step can be cut, one where it cannot. The FFN ranks hold
the experts; their weights are no longer inputs that the graph reads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import types
from collections.abc import Callable
from typing import Any

from torch import fx

from afd_graph import _compat
from afd_graph._version import __version__
from afd_graph.config import AFDConfig, hook_options
from afd_graph.connectors.cam import group_from_options
from afd_graph.errors import ConfigError
from afd_graph.lowering.ascend.ir_table import FORMS
from afd_graph.lowering.ascend.streams import route_of
from afd_graph.passes.recover_attention import recover_attention
from afd_graph.passes.sizes import product, shape_of
from afd_graph.passes.token_flow import DISPATCH
from afd_graph.pipeline import Pipeline, Programs
from afd_graph.step import CACHES_DIFFER, StepChooser, StepSizes

log = logging.getLogger(__name__)

PrePass = Callable[[fx.GraphModule, Any, Any], None]

_configurations: dict[str, AFDConfig] = {}


def torchair_pre_pass_for(config: AFDConfig) -> PrePass:
    """The hook for one configuration; its byte code contains the version and the options.

    Raises:
        ConfigError: the connector is not ``cam``.
    """
    if config.connector != "cam":
        raise ConfigError(
            f"connector={config.connector!r} does not exchange rows with operators in the graph",
            remedy="use AFDConfig(connector='cam', connector_options=...)",
        )
    if config.connector_options.get("operators") == "cann":
        raise ConfigError(
            "operators='cann' read a tensor that a hook cannot add to the inputs of a graph",
            remedy="compile with AFDBackend(AFDConfig(lowering='torchair', ...))",
        )
    digest = config.digest()
    _configurations[digest] = config
    return _stamped(digest)


def _template(gm, example_inputs, config):  # type: ignore[no-untyped-def]
    run_pre_pass(gm, config, "key")


def _stamped(digest: str) -> PrePass:
    key = f"afd_graph {__version__} {digest}"
    code = _template.__code__
    constants = tuple(key if constant == "key" else constant for constant in code.co_consts)
    return types.FunctionType(
        code.replace(co_consts=constants, co_name="torchair_pre_pass"), globals()
    )


torchair_pre_pass: PrePass = _stamped(hashlib.sha256(hook_options().encode()).hexdigest()[:16])
"""The hook for the options in the environment variable ``AFD_OPTIONS``, a JSON object."""


def _configuration(key: str) -> AFDConfig:
    found = _configurations.get(key.rsplit(" ", 1)[-1])
    if found is None:
        found = AFDConfig.from_options(json.loads(hook_options() or "{}"))
        torchair_pre_pass_for(found)  # the same checks
    return found


def run_pre_pass(gm: fx.GraphModule, config: Any, key: str) -> None:
    """Transform the functional graph ``gm`` in place; a transformed one is left alone.

    Args:
        gm: what torchair got from AOTAutograd.
        config: torchair's ``CompilerConfig``.
        key: of a configuration that :func:`torchair_pre_pass_for` was called with.
    """
    from afd_graph.lowering.torchair import prepare

    if _is_done(gm.graph):
        return
    ours = _configuration(key)
    group = group_from_options(ours.connector_options)
    recover_attention(gm.graph)
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    static = _compat.static_inputs()
    weights = {n: (n.name, n.meta["val"]) for i, n in enumerate(inputs) if i in static}
    numbers: dict[Any, int] = {}

    def number(match: Any) -> int:
        return numbers.setdefault(match.index, len(numbers))

    pipeline = Pipeline(ours, channel=key, credits=1, cut_is_input=False)
    programs = pipeline.run(gm, weights.get, number)
    if not programs.ffn:
        return
    chosen, why = _chosen(programs, ours)
    experts = {program.layer: program.num_experts for program in programs.ffn}
    prepare(chosen.graph, group, experts.__getitem__, route_of(config))
    gm.graph = chosen.graph
    gm.recompile()
    log.info("%d MoE layers in a torchair graph: %s", len(experts), why)


def _chosen(programs: Programs, config: AFDConfig) -> tuple[fx.GraphModule, str]:
    """Two stages, or the reason for one. A size that is not known yet is at least two."""
    flow = programs.flow
    if programs.split is None or flow is None:
        return programs.unsplit, f"unsplit: {programs.unsplit_reason}"
    if programs.sizes is not None:
        return programs.unsplit, "unsplit: the stages of a paged step are planned on the host"
    if any(bool(a.meta["val"] != b.meta["val"]) for a, b in flow.equal_inputs):
        return programs.unsplit, f"unsplit: {CACHES_DIFFER}"
    if flow.checked_masks:
        return programs.unsplit, "unsplit: the attention mask is an input, see assume_causal"
    sizes = [flow.axis.extent, product(shape_of(flow.seed.meta["val"])[:-1])]
    if not any(size.factors() for size in sizes):
        chooser = StepChooser(StepSizes.of(programs.unsplit.graph, flow), config)
        cut, _ = chooser.decide(*(size.coefficient for size in sizes))
        if isinstance(cut, str):
            return programs.unsplit, f"unsplit: {cut}"
    return programs.split, "two stages"


def _is_done(graph: fx.Graph) -> bool:
    names = {operator.name for package in FORMS.values() for operator in package.operators}
    return any(
        node.target is DISPATCH
        or str(node.target).removesuffix(".default").replace(".", "::") in names
        for node in graph.nodes
    )
