"""vLLM's default mode: our passes run before vLLM cuts the graph in pieces and compiles those.

Attention, cache updates, dispatch and receive are *splitting operators*: they run between the
compiled pieces, in the order of the graph, which is how that order survives the compiler
(:mod:`piece_order` checks it). Below this split it is too late to overlap anything.

vLLM compiles both programs, each under a prefix of its own, so that their caches are two. The
prefix holds a digest of everything that decides what is compiled, our source included, and so does
the key of PyTorch's own caches: what an older version left there is never found.

The result goes to vLLM's ahead-of-time cache: what vLLM stores for each program, in one envelope
with the digest and a checksum, as in :mod:`artifact`.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from afd_graph import _compat
from afd_graph.errors import AFDError, ConfigError, PassError
from afd_graph.report import GraphReport
from afd_graph.vllm import cache_entry, observe
from afd_graph.vllm.artifact import StoredModel, identity, new_programs, seal, unseal
from afd_graph.vllm.piece_inputs import keep_views_inside
from afd_graph.vllm.piece_order import (
    Call,
    check_order,
    compare_orders,
    cut_order,
    graph_order,
)
from afd_graph.vllm.piece_sizes import give_values, refuse_assumptions
from afd_graph.vllm.programs import ExpertSource, digest
from afd_graph.vllm.served import FFNSide, ServedModel
from afd_graph.vllm.stage_ops import register_stage_ops

OURS = ("afd::cam_dispatch", "afd::cam_receive")
_STORABLE = ("inductor_standalone", "inductor")
"""vLLM's names of the compilers whose pieces its ahead-of-time cache gives back."""


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
        """Called by ``torch.compile``.

        Raises:
            ConfigError: vLLM would compile pieces for fixed numbers of tokens.
            UnsupportedError: the graph cannot be split and ``on_unsupported`` is ``error``.
            PassError: vLLM's pieces do not run in the order of the schedule, or not for all lengths
                of the stages.
        """
        self._refuse_fixed_sizes()
        # vLLM's own backend puts another path where this one is read from.
        entry = cache_entry.entry_path(self._vllm_config)
        with new_programs(gm, self._vllm_config) as (programs, ffn):
            calls = digest(programs)
            # The values of the two-stage graph come first: vLLM works on the other in place.
            lengths: Sequence[torch.SymInt] = ()
            if programs.split is not None:
                lengths = give_values(programs.split, programs.unsplit)
            give_values(programs.unsplit, programs.unsplit)
            made_by = identity(self._vllm_config)
            with _compat.cache_tag(_tag(made_by)):
                unsplit = self._compiled(programs.unsplit, example_inputs, made_by, "unsplit")
                split = None
                if programs.split is not None:
                    inputs = [*example_inputs, *lengths]
                    with _compat.guards_on(lengths) as conditions:
                        split = self._compiled(programs.split, inputs, made_by, "two_stages")
                    refuse_assumptions(conditions, example_inputs, lengths)
            compiled = PiecewisePrograms(
                made_by, calls, programs.experts, programs.report, unsplit, split
            )
            return PiecewiseModel(compiled, self._vllm_config, ffn, entry)

    def _compiled(
        self, gm: fx.GraphModule, inputs: Sequence[Any], made_by: dict[str, str], name: str
    ) -> Pieces:
        splits = self._splits()
        keep_views_inside(gm.graph, splits)
        gm.recompile()
        order = graph_order(gm.graph, splits)
        backend = type(self._backend)(
            self._vllm_config,
            prefix=f"{self._backend.prefix}_afd_{_tag(made_by)}_{name}",
            is_encoder=self._backend.is_encoder,
        )
        # Inductor (2.13) may put the reader of a buffer before the operator that writes it here.
        backend.inductor_config["reorder_for_peak_memory"] = False
        pieces = Pieces(backend(gm, inputs), order)
        compare_orders(cut_order(backend.split_gm, backend.piecewise_graphs, splits), order)
        if hasattr(pieces.run, "execution_code"):
            pieces.check()
        return pieces

    def _splits(self) -> Any:
        from vllm.compilation.partition_rules import should_split

        names = self._vllm_config.compilation_config.splitting_ops
        return lambda node: should_split(node, names)

    def _refuse_fixed_sizes(self) -> None:
        compilation = self._vllm_config.compilation_config
        ranges = getattr(compilation, "get_compile_ranges", list)  # not in old versions
        if compilation.compile_sizes or len(ranges()) > 1:
            raise ConfigError(
                "vLLM would compile each piece for several numbers of tokens and choose by one, "
                "and a piece of two stages has two",
                remedy="leave compile_sizes and compile_ranges_endpoints unset",
            )


@dataclass
class Pieces:
    """One program that vLLM compiled in pieces.

    Attributes:
        run: what vLLM made; it can be stored.
        order: the calls of splitting operators in the graph that was cut.
    """

    run: Any
    order: list[Call]

    def check(self) -> None:
        """Hold the order in which vLLM runs the pieces against that of the graph.

        Raises:
            PassError: it is another, or vLLM does not tell.
        """
        code = getattr(self.run, "execution_code", None)
        if not code:
            raise PassError(
                "this vLLM does not tell in which order it runs the pieces of a graph",
                remedy="use a vLLM version of the table in docs/vllm.md",
            )
        check_order(code, self.order)


@dataclass
class PiecewisePrograms:
    """Both programs of a model, and what is needed to run and to store them.

    Attributes:
        made_by: see :func:`afd_graph.vllm.artifact.identity`.
        calls: :func:`afd_graph.vllm.programs.digest` of the programs.
        experts: where each layer's weights are.
        report: what was matched and what each pass took.
        unsplit: one stage.
        split: two stages; its last inputs are the tokens of each. None without one.
    """

    made_by: dict[str, str]
    calls: str
    experts: list[ExpertSource]
    report: GraphReport
    unsplit: Pieces
    split: Pieces | None

    @property
    def both(self) -> list[Pieces]:
        """The programs that there are."""
        return [self.unsplit] if self.split is None else [self.unsplit, self.split]

    def dump(self) -> bytes:
        """Store them, with the compiled pieces or what finds them in vLLM's cache.

        Raises:
            AFDError: the compiler of the pieces cannot store them; vLLM says so and goes on.
        """
        name = self.unsplit.run.vllm_backend.compiler_manager.compiler.name
        if name not in _STORABLE:
            raise AFDError(f"pieces that were compiled by {name!r} cannot be stored")
        stored = [(type(p.run).serialize_compile_artifacts(p.run), p.order) for p in self.both]
        return seal(pickle.dumps((self.calls, self.experts, self.report, stored)), self.made_by)

    @classmethod
    def load(cls, data: bytes, expected: dict[str, str]) -> PiecewisePrograms:
        """Read what :meth:`dump` stored, inside vLLM's current configuration.

        Raises:
            AFDError: it was made by something else than ``expected``, or is damaged.
        """
        from vllm.compilation.caching import VllmSerializableFunction

        calls, experts, report, stored = pickle.loads(unseal(data, expected))
        load = VllmSerializableFunction.deserialize_compile_artifacts
        unsplit, *split = (Pieces(load(compiled), order) for compiled, order in stored)
        return cls(expected, calls, experts, report, unsplit, split[0] if split else None)


class PiecewiseModel(StoredModel):
    """A model whose :class:`PiecewisePrograms` vLLM compiled in pieces."""

    def _serve(self, ffn: FFNSide) -> ServedModel:
        programs: PiecewisePrograms = self._programs
        split = programs.split
        return ServedModel(
            programs.experts,
            programs.report,
            programs.calls,
            ffn,
            programs.unsplit.run,
            None if split is None else split.run,
        )

    def finalize_loading(self, vllm_config: Any) -> None:
        """Called by vLLM when it has checked that the model's source is the same.

        Raises:
            PassError: the stored pieces do not run in the order of the schedule.
        """
        with _compat.cache_tag(_tag(self._programs.made_by)):
            for pieces in self._programs.both:
                pieces.run.finalize_loading(vllm_config)
                pieces.check()
        observe.loaded(self._programs.experts, self._programs.report)

    def _dump(self) -> bytes:
        programs: PiecewisePrograms = self._programs
        return programs.dump()

    @staticmethod
    def _load(data: bytes, expected: dict[str, str]) -> PiecewisePrograms:
        return PiecewisePrograms.load(data, expected)


def _tag(made_by: dict[str, str]) -> str:
    """Short digest of what programs are made by, for names and keys of caches."""
    return hashlib.sha256(repr(sorted(made_by.items())).encode()).hexdigest()[:12]
