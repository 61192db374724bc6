"""What the tests inside a torchair process share: the module, the emulator, the lowered graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
from afd_graph.lowering.ascend.ir_table import PACKAGES

MAX_TOKENS = 64


def start() -> Any:
    """Load torchair, let CANN know the operators of the table and nothing else."""
    torchair = loader.load()
    cam_emulator.install()
    ir_table.MAX_ROWS = 1024  # type: ignore[misc]
    for package in PACKAGES.values():
        for operator in package.operators:
            loader.native.declare(
                operator.ge_type,
                [ir for _, ir in operator.inputs],
                operator.outputs,
                [(ir, "VT_INT") for _, ir in operator.attributes],
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


@contextlib.contextmanager
def any_dtype() -> Iterator[None]:
    """Let the emulated operators carry fp32, so that equality can be tight."""
    before = dict(PACKAGES)
    for name, package in before.items():
        PACKAGES[name] = dataclasses.replace(package, dtypes=(*package.dtypes, torch.float32))
    try:
        yield
    finally:
        PACKAGES.update(before)
