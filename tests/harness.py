"""A compiled model next to its eager copy, compared at every MoE layer and at the logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from transformers import DynamicCache, StaticCache

from afd_graph import AFDBackend, AFDConfig, _compat
from afd_graph.attention import keep_attention_whole
from afd_graph.connectors import create_connector
from afd_graph.passes.graph_tools import clean_path
from afd_graph.pipeline import PassObserver, Pipeline, Programs
from afd_graph.runtime import Channel


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if not expected.numel():
        return 0.0
    expected = expected.double()
    scale = max(expected.abs().max().item(), 1e-30)
    return (got.double() - expected).abs().max().item() / scale


@dataclass
class Step:
    """What one step gave, compiled and eager.

    Attributes:
        logits, expected: of the compiled and of the eager model.
        layers, expected_layers: per MoE layer, the experts' result ``[batch, tokens, hidden]``.
        stages: stages that were received per layer.
        split: whether the step ran in two stages.
    """

    logits: torch.Tensor
    expected: torch.Tensor
    layers: list[torch.Tensor] = field(default_factory=list)
    expected_layers: list[torch.Tensor] = field(default_factory=list)
    stages: int = 1
    split: bool = False

    def errors(self) -> dict[str, float]:
        """Relative error by place."""
        found = {"logits": relative_error(self.logits, self.expected)}
        assert len(self.layers) == len(self.expected_layers)
        for i, (got, expected) in enumerate(zip(self.layers, self.expected_layers, strict=True)):
            found[f"MoE layer {i}"] = relative_error(got, expected)
        return found


class Pair:
    """A model compiled with a backend of its own, and an untouched eager copy of it.

    Args:
        model: compiled; the copy is made first.
        config: of the backend.
        observe: watch the experts of both sides; their modules are told by a parameter with one
            matrix an expert.
        dynamic: given to ``torch.compile``.

    Attributes:
        cut: extent of stage 0 in the following steps; None leaves it to the policy.
    """

    def __init__(
        self,
        model: nn.Module,
        config: AFDConfig | None = None,
        *,
        observe: bool = True,
        dynamic: bool | None = True,
    ) -> None:
        self.eager = copy.deepcopy(model)
        if next(model.parameters()).dtype is torch.float64 and hasattr(model, "config"):
            # The library's other spelling of the experts does not know fp64 in eager mode.
            self.eager.config._experts_implementation = "batched_mm"
        self.model = model
        self.config = config or AFDConfig()
        self.cut: int | None = None
        self.backend = AFDBackend(self.config, plan=self._plan)
        self.compiled = torch.compile(model, backend=self.backend, fullgraph=True, dynamic=dynamic)
        self._received: dict[tuple[int, int], torch.Tensor] = {}
        self._expected: dict[str, torch.Tensor] = {}
        self.observe = observe
        if observe:
            self._watch()

    def _plan(self, extent: int, tokens: int) -> int | str:
        return (extent + 1) // 2 if self.cut is None else self.cut

    def _watch(self) -> None:
        for name, module in self.eager.named_modules():
            if any(p.dim() == 3 for p in module.parameters(recurse=False)):
                module.register_forward_hook(self._hook(name))
        receive = self.backend.channel.receive

        def watched(ticket, hidden, topk_weights, layer, stage, *more):
            result = receive(ticket, hidden, topk_weights, layer, stage, *more)
            self._received[layer, stage] = result.clone()
            return result

        self.backend.channel.receive = watched  # type: ignore[method-assign]

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module, args, output):
            self._expected[name] = output.clone()

        return hook

    @property
    def report(self):
        return self.backend.report()

    def fill(self, cache: Any, ids: torch.Tensor, **options: Any) -> None:
        """Let the eager model fill a cache."""
        with torch.no_grad():
            self.eager(input_ids=ids, past_key_values=cache, use_cache=True, **options)

    def step(self, *args: Any, cut: int | None = None, **inputs: Any) -> Step:
        """Run both on equal inputs; a cache in ``inputs`` is copied for the eager model.

        Also compares the caches afterwards.
        """
        self._received.clear()
        self._expected.clear()
        self.cut = cut
        reference = copy.deepcopy(inputs)
        split_before = self.report.steps_split
        with torch.no_grad():
            expected = self.eager(*args, **reference)
            got = self.compiled(*args, **inputs)
        logits = got if isinstance(got, torch.Tensor) else got.logits
        wanted = expected if isinstance(expected, torch.Tensor) else expected.logits
        step = Step(logits, wanted, split=self.report.steps_split > split_before)
        if self.observe:
            ids = args[0] if args else inputs.get("input_ids", inputs.get("inputs_embeds"))
            step.layers, step.stages = self._layers(ids.shape[0], ids.shape[1], step.split)
            names = [layer.name for layer in self.report.layers]
            step.expected_layers = [
                self._expected[f"{name}.experts"].reshape(ids.shape[0], ids.shape[1], -1)
                for name in names
            ]
        cache, reference_cache = inputs.get("past_key_values"), reference.get("past_key_values")
        if cache is not None:
            _compare_caches(cache, reference_cache)
        return step

    def _layers(self, batch: int, length: int, split: bool) -> tuple[list[torch.Tensor], int]:
        by_batch = self.config.split == "request" or length == 1
        stages = {stage for _, stage in self._received}
        assert stages == ({0, 1} if split else {0}), stages
        layers = []
        for layer in sorted({layer for layer, _ in self._received}):
            rows = [self._received[layer, stage] for stage in sorted(stages)]
            if by_batch:
                pieces = [r.view(-1, length, r.shape[-1]) for r in rows]
                layers.append(torch.cat(pieces, dim=0))
            else:
                pieces = [r.view(batch, -1, r.shape[-1]) for r in rows]
                layers.append(torch.cat(pieces, dim=1))
            assert layers[-1].shape[:2] == (batch, length)
        return layers, len(stages)

    def close(self) -> None:
        self.backend.close()


def _compare_caches(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert got.get_seq_length() == expected.get_seq_length()
    wide = got.layers[0].keys.dtype in (torch.float32, torch.float64)
    for mine, theirs in zip(got.layers, expected.layers, strict=True):
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert relative_error(a, b) < (tolerance if wide else 0.2)


def new_cache(kind: str, config: Any, length: int = 40) -> Any:
    """An empty ``dynamic`` or ``static`` cache."""
    if kind == "dynamic":
        return DynamicCache(config=config)
    return StaticCache(config=config, max_cache_len=length)


@dataclass
class Captured:
    """A functional ATen graph and the parameters behind its inputs."""

    gm: fx.GraphModule
    weights: dict[str, tuple[str, torch.Tensor]]
    inputs: list[Any] = field(default_factory=list)

    def fresh(self, *, metadata: bool = True) -> fx.GraphModule:
        """A copy to transform, without what tells modules and source lines if so wanted."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.gm.graph, {}))
        for node in graph.nodes:
            if not metadata:
                node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
        return fx.GraphModule(self.gm, graph)

    def weight_of(self, node: fx.Node) -> tuple[str, torch.Tensor] | None:
        return self.weights.get(node.name)


def capture(model: nn.Module, *args: Any, dynamic: bool = True, **inputs: Any) -> Captured:
    """The graph that the pipeline gets, with attention kept whole."""
    found: list[Captured] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        keep_attention_whole(gm.graph)
        sources = [
            _compat.input_source(node) for node in gm.graph.nodes if node.op == "placeholder"
        ]

        def keep(aten: fx.GraphModule, _fakes: Any) -> Callable[..., Any]:
            names = [node.name for node in aten.graph.nodes if node.op == "placeholder"]
            weights = {
                name: (clean_path(str(source)), value)
                for name, source, value in zip(names, sources, example_inputs, strict=True)
                if isinstance(value, nn.Parameter) or "._buffers[" in str(source)
            }
            # Not int(): that would make the size a constant of the graph.
            concrete = [
                _compat.size_hint(v) if isinstance(v, torch.SymInt) else v for v in example_inputs
            ]
            found.append(Captured(aten, weights, concrete))
            forward = aten.forward
            return _compat.boxed(lambda flat: forward(*flat))

        return _compat.aot_compile(gm, example_inputs, keep)

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(*args, **inputs)
    assert len(found) == 1
    return found[0]


def transform(
    captured: Captured,
    config: AFDConfig | None = None,
    *,
    credits: int = 2,
    channel: str = "none",
    metadata: bool = True,
    observer: PassObserver | None = None,
) -> Programs:
    """Run the passes over a copy of a captured graph."""
    pipeline = Pipeline(config or AFDConfig(), channel=channel, credits=credits, observer=observer)
    gm = captured.fresh(metadata=metadata)
    return pipeline.run(gm, captured.weight_of, lambda match: match.index)


def run_programs(
    captured: Captured, inputs: list[Any], cut: int | None, config: AFDConfig | None = None, **more
) -> Any:
    """Transform, hand the experts to a connector of their own, run one step."""
    channel = Channel(create_connector("local", {}), credits=2, timeout_s=30)
    try:
        programs = transform(captured, config, channel=channel.name, **more)
        for program in programs.ffn:
            channel.connector.add_program(program)
            channel.num_experts[program.layer] = program.num_experts
            if program.shared is not None:
                channel.shared_layers.add(program.layer)
        with torch.no_grad():
            if cut is None:
                return programs.unsplit(*inputs)
            assert programs.split is not None, programs.unsplit_reason
            return programs.split(*inputs, cut)
    finally:
        channel.close()


def compact(graph: fx.Graph) -> str:
    """The skeleton of a graph, one line an event: dispatch, receive, attention, output.

    Layers count from 0 within a stage. ``keys=L.S,...`` names the attentions (layer, stage) whose
    own keys flow into this one.
    """
    afd = torch.ops.afd
    counted: dict[int | None, int] = {None: 0, 0: 0, 1: 0}
    place: dict[fx.Node, str] = {}
    lines, known_keys = [], {}
    layers: dict[int, int] = {}
    for node in graph.nodes:
        if node.target is afd.cam_dispatch.default:
            layer, stage = node.args[2:4]
            ordinal = layers.setdefault(layer, len(layers))
            lines.append(f"dispatch layer={ordinal} stage={stage}")
        elif node.target is afd.cam_receive.default:
            layer, stage = node.args[3:5]
            lines.append(f"receive layer={layers[layer]} stage={stage}")
        elif node.target is afd.attention.default:
            stage = node.meta.get("afd_stage")
            place[node] = f"{counted[stage]}.{stage}"
            known_keys[node.args[1]] = place[node]
            above = _own_work(node.args[1])
            keys = sorted(where for key, where in known_keys.items() if key in above)
            lines.append(f"attention layer={counted[stage]} stage={stage} keys={','.join(keys)}")
            counted[stage] += 1
        elif node.op == "output":
            lines.append("output")
    return "\n".join(lines) + "\n"


def _own_work(node: fx.Node) -> set[fx.Node]:
    """What a node is computed from since the last attention and the last experts."""
    stops = (torch.ops.afd.cam_receive.default, torch.ops.afd.attention.default)
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in found and current.target not in stops:
            found.add(current)
            stack += current.all_input_nodes
    return found
