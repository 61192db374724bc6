"""vLLM's default mode: our passes run before vLLM cuts the graph in pieces and compiles those.

Attention, cache updates, dispatch and receive are *splitting operators*: they run between the
compiled pieces, in the order of the graph, which is how that order survives the compiler. Below
this split it is too late to overlap anything.

vLLM compiles both programs, the unsplit one in its own place and the two-stage one under a prefix
of its own. The two more inputs of the latter are plain sizes. The result is not stored in vLLM's
ahead-of-time cache: a second start runs the passes again, and the pieces come from the caches of
their compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from afd_graph import _compat
from afd_graph.errors import AFDError, ConfigError
from afd_graph.vllm import observe
from afd_graph.vllm.options import options_of
from afd_graph.vllm.programs import Programs, bind_channel, build_programs
from afd_graph.vllm.served import FFNSide, ServedModel
from afd_graph.vllm.split import CUT, TOKENS
from afd_graph.vllm.stage_ops import register_stage_ops

OURS = ("afd::cam_dispatch", "afd::cam_receive")
_STAGED_PREFIX = "_afd_two_stages"


class PiecewiseBackend:
    """Takes the place of vLLM's own backend for one model, and uses it.

    Args:
        backend: vLLM's.
        vllm_config: vLLM's configuration of the model.

    Raises:
        ConfigError: vLLM would compile the graph in one piece.
    """

    def __init__(self, backend: Any, vllm_config: Any) -> None:
        self._backend = backend
        self._vllm_config = vllm_config
        compilation = vllm_config.compilation_config
        if not compilation.splitting_ops or compilation.use_inductor_graph_partition:
            raise ConfigError(
                "vLLM compiles this model in one piece, where nothing holds the order of dispatch "
                "and attention",
                remedy="use piecewise compilation: leave splitting_ops unset, "
                "use_inductor_graph_partition false, and cudagraph_mode PIECEWISE or NONE",
            )
        for name in (*OURS, *register_stage_ops()):
            if name not in compilation.splitting_ops:
                compilation.splitting_ops.append(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_backend"], name)

    def __repr__(self) -> str:
        return "afd, then vLLM's piecewise compilation"

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> PiecewiseModel:
        """Called by ``torch.compile``."""
        config = options_of(self._vllm_config).config
        ffn = FFNSide(config, self._vllm_config)
        try:
            log = observe.GraphLog(self._vllm_config, config)
            programs = build_programs(gm, config, ffn.channel.credits, log.after_pass)
            log.finish(programs)
            bind_channel(programs, ffn.channel.name)
            return PiecewiseModel(programs, ffn, *self._compiled(programs, example_inputs))
        except BaseException:
            ffn.channel.close()
            raise

    def _compiled(self, programs: Programs, example_inputs: Sequence[Any]) -> tuple[Any, Any]:
        two_stages = programs.split
        if two_stages is not None:
            # Before vLLM works on the other graph, whose inputs have the values that these need.
            sizes = _give_values(two_stages, programs.unsplit)
        _give_values(programs.unsplit, programs.unsplit)
        unsplit = self._backend(programs.unsplit, example_inputs)
        if two_stages is None:
            return unsplit, None
        other = type(self._backend)(
            self._vllm_config,
            prefix=self._backend.prefix + _STAGED_PREFIX,
            is_encoder=self._backend.is_encoder,
        )
        # What the pieces' compiler learns about sizes of ours is nothing that Dynamo can check.
        with _compat.guards_on(sizes):
            return unsplit, other(two_stages, [*example_inputs, *sizes])


class PiecewiseModel(_compat.serializable_callable()):  # type: ignore[misc]
    """A model whose programs vLLM compiled in pieces."""

    def __init__(self, programs: Programs, ffn: FFNSide, unsplit: Any, split: Any) -> None:
        self.model = ServedModel(programs, ffn, unsplit, split)

    def __call__(self, *inputs: Any) -> Any:
        """Run one step."""
        return self.model.run(*inputs)

    @classmethod
    def serialize_compile_artifacts(cls, compiled: PiecewiseModel) -> bytes:
        """Not there yet.

        Raises:
            AFDError: always; vLLM says so and goes on.
        """
        raise AFDError(
            "a model that is compiled in pieces is not stored as a whole; "
            "the caches of its pieces are in use"
        )

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> PiecewiseModel:
        """Nothing is ever stored.

        Raises:
            AFDError: always.
        """
        raise AFDError("a model that is compiled in pieces is not stored as a whole")


def _give_values(gm: fx.GraphModule, captured: fx.GraphModule) -> list[torch.SymInt]:
    """Compute ``example_value`` of every node, which vLLM's split needs; new sizes are returned."""
    inputs = captured.graph.find_nodes(op="placeholder")
    known = {node.name: node.meta["example_value"] for node in inputs}
    tokens = next(value for value in known.values() if isinstance(value, torch.SymInt))
    hint = _compat.size_hint(tokens)
    hints = {TOKENS: hint, CUT: max(1, hint // 2)}
    new = [
        _compat.new_size_symbol(captured.graph, name, hints[name])
        for name in hints
        if gm is not captured
    ]
    known.update(zip(hints, new, strict=False))
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["example_value"] = known[node.name]
    _compat.propagate_example_values(gm)
    gm.recompile()
    return new
