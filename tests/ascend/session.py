"""What the tests inside a torchair process share: the module, the emulator, the lowered graphs."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import operator
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cam_emulator
import loader
import torch
from ge_graph import GeGraph
from torch import fx
from torch._dynamo.utils import detect_fake_mode
from torch._guards import TracingContext, tracing

from afd_graph import AFDBackend, AFDConfig
from afd_graph.connectors.cam_group import CamGroup
from afd_graph.ffn.cam_experts import CamExperts
from afd_graph.lowering.ascend import ir_table
from afd_graph.lowering.ascend.ir_table import FORMS, PACKAGES
from afd_graph.passes.schedule import schedule

MAX_TOKENS = 64


def start() -> Any:
    """Load torchair, let CANN know the operators of the table and nothing else."""
    torchair = loader.load()
    cam_emulator.install()
    ir_table.MAX_ROWS = 1024  # type: ignore[misc]
    for package in FORMS.values():
        for entry in package.operators:
            loader.native.declare(
                entry.ge_type,
                [ir for _, ir in entry.inputs],
                entry.outputs,
                [(ir, "VT_INT") for _, ir in entry.attributes],
                entry.optional,
            )
    return torchair


@dataclass
class Lowered:
    """One program that went through torchair's compiler."""

    fx: fx.GraphModule
    inputs: list[Any]
    result: Any

    def compile_again(self, torchair: Any, config: Any) -> Any:
        """Hand the same graph to torchair with another configuration."""
        with tracing(TracingContext(detect_fake_mode(self.inputs))):
            return torchair.get_compiler(config)(self.fx, self.inputs)

    def ge(self) -> Any:
        """The GE graph, as it would be handed to the device."""
        return self.result.runner.graph._proto


_OUTSIDE_CONVERTERS = (
    "air.scope_enter.default",
    "air.scope_exit.default",
    "air.wait.default",
    "air.record.default",
)
"""Handled by torchair itself; its summary calls them unregistered."""


def not_converted(torchair: Any, program: Lowered) -> set[str]:
    """Operators that torchair's own summary finds unsupported; writes files to the directory."""
    config = torchair.CompilerConfig()
    config.debug.fx_summary.type = "csv"
    before = set(Path().rglob("*.csv"))
    program.compile_again(torchair, config)
    (written,) = set(Path().rglob("*.csv")) - before
    rows = list(csv.reader(written.open()))
    assert len(rows) > 20
    lacking = ("未注册", "未实现")  # not registered, not implemented
    return {row[0] for row in rows if row[2] in lacking} - set(_OUTSIDE_CONVERTERS)


def parsed(model: bytes) -> GeGraph:
    """The graph of a serialized model."""
    from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef

    definition = ModelDef()
    definition.ParseFromString(model)
    return GeGraph(definition.graph[0])


@dataclass
class Recorder:
    """Watches ``torchair.get_compiler``."""

    torchair: Any
    programs: list[Lowered] = field(default_factory=list)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        original = self.torchair.get_compiler

        def get_compiler(config: Any = None) -> Callable[..., Any]:
            compiler = original(config)

            def compile_it(gm: fx.GraphModule, inputs: list[Any]) -> Any:
                result = compiler(gm, inputs)
                self.programs.append(Lowered(gm, list(inputs), result))
                return result

            return compile_it

        self.torchair.get_compiler = get_compiler
        try:
            yield
        finally:
            self.torchair.get_compiler = original


def backend(world: cam_emulator.World, rank: int = 0, **changes: Any) -> AFDBackend:
    """A backend that lowers with torchair and exchanges rows in ``world``."""
    operators = changes.pop("operators", "afd_ascend")
    config = AFDConfig(
        lowering="torchair",
        connector="cam",
        connector_options={
            "attention_ranks": world.attention_ranks,
            "ffn_ranks": world.ffn_ranks,
            "rank": rank,
            "max_tokens": MAX_TOKENS,
            "tp_size": world.tp_size,
            "group_name": world.name,
            "device": "cpu",
            "operators": operators,
        },
        **changes,
    )
    return AFDBackend(config)


def lowered(
    torchair: Any,
    model: Callable[..., Any],
    *inputs: Any,
    dynamic: bool = False,
    rank: int = 0,
    ranks: tuple[int, int, int] = (1, 1, 1),
    **changes: Any,
) -> list[Lowered]:
    """The unsplit and the two-stage program of ``model``, lowered; nothing is run."""
    recorder = Recorder(torchair)
    attention, ffn, tp = ranks
    world = cam_emulator.World(attention, ffn, tp_size=tp)
    torch._dynamo.reset()
    with (
        recorder.watching(),
        backend(world, rank, **changes) as compiler,
        torch.no_grad(),
        contextlib.suppress(NotImplementedError),
    ):
        torch.compile(model, backend=compiler, dynamic=dynamic, fullgraph=True)(*inputs)
    return recorder.programs


@contextlib.contextmanager
def served(
    compiler: AFDBackend, *, width: int, top_k: int, experts: int, dtype: torch.dtype
) -> Iterator[None]:
    """FFN ranks on threads of their own, which get the experts that the backend finds."""
    group: CamGroup = compiler._connector.group  # type: ignore[attr-defined]
    ranks = [
        CamExperts(
            dataclasses.replace(group, rank=group.attention_ranks + i),
            hidden_size=width,
            top_k=top_k,
            num_experts=experts,
            dtype=dtype,
            device="cpu",
        )
        for i in range(group.ffn_ranks)
    ]
    compiler._connector.add_program = lambda program: [  # type: ignore[method-assign]
        rank.add_program(program) for rank in ranks
    ]
    threads = [threading.Thread(target=rank.serve, daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    yield
    compiler.close()  # says goodbye
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@contextlib.contextmanager
def any_dtype() -> Iterator[None]:
    """Let the emulated operators carry fp32, so that equality can be tight."""
    tables = (PACKAGES, FORMS)
    before = [dict(table) for table in tables]
    for table in tables:
        for name, form in list(table.items()):
            table[name] = dataclasses.replace(form, dtypes=(*form.dtypes, torch.float32))
    try:
        yield
    finally:
        for table, original in zip(tables, before, strict=True):
            table.update(original)


afd, aten = torch.ops.afd, torch.ops.aten
_LAYERS, _ROWS, _WIDTH = 2, 8, 16


def two_stages(device: str = "cpu") -> fx.GraphModule:
    """Two stages of two layers; "attention" is one matrix product."""
    graph = fx.Graph()
    shapes = {"stage_0": (_ROWS, _WIDTH), "stage_1": (_ROWS, _WIDTH), "weight": (_WIDTH, _WIDTH)}
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    inputs = {}
    for name, shape in shapes.items():
        inputs[name] = graph.placeholder(name)
        with mode:
            inputs[name].meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device=device)

    def call(stage: int, target: Any, *arguments: Any) -> fx.Node:
        node = graph.call_function(target, arguments)
        node.meta["afd_stage"] = stage
        return node

    hidden = [inputs["stage_0"], inputs["stage_1"]]
    for layer in range(_LAYERS):
        for stage in (0, 1):
            rows = call(stage, aten.mm.default, hidden[stage], inputs["weight"])
            weights, ids = (
                call(stage, operator.getitem, call(stage, aten.topk.default, rows, 2), i)
                for i in (0, 1)
            )
            handle = call(stage, afd.cam_dispatch.default, rows, ids, layer, stage, "none")
            hidden[stage] = call(
                stage, afd.cam_receive.default, handle, rows, weights, layer, stage, "none"
            )
    graph.output((call(0, aten.cat.default, hidden, 0),))
    schedule(graph, credits=1, num_stages=2)
    return fx.GraphModule(torch.nn.Module(), graph)
