"""What vLLM gets for its model, and stores in its ahead-of-time compile cache.

vLLM saves a compiled model right after compiling and loads it at the next start without asking the
backend, when its own key is the same: versions, configuration (ours included), the model's source.
That key knows nothing of our code, and nobody checks that the file of a key is that key's. So a
stored model carries its own digest over our version and source, PyTorch, the processor, vLLM with
its configuration, the options and the rank; on any difference loading raises with both digests'
parts, and vLLM says so and compiles again. The file as a whole has a checksum
(:mod:`cache_entry`).

Both programs are stored as graphs; the experts' weights are inputs and never stored.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import pickle
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from afd_graph import _compat
from afd_graph._version import __version__
from afd_graph.errors import AFDError
from afd_graph.vllm import cache_entry, observe
from afd_graph.vllm.options import options_of
from afd_graph.vllm.programs import Programs, build_programs, digest
from afd_graph.vllm.served import FFNSide, ServedModel
from afd_graph.vllm.stage_ops import register_stage_ops

_FORMAT = 2
_CHECK_SIZE = 32


class StoredModel(_compat.serializable_callable()):  # type: ignore[misc]
    """A model that vLLM calls with its own inputs, and may store after compiling it.

    Args:
        programs: compiled, or loaded.
        vllm_config: vLLM's configuration of the model.
        ffn: where its experts go, if it was just compiled. What was loaded meets the FFN side with
            its first step: vLLM may still find that it is of another source, and compile again.
        entry: where vLLM will store it, if it was just compiled.

    Attributes:
        stored: what vLLM was given to store, until the entry has its checksum.
    """

    def __init__(
        self,
        programs: Any,
        vllm_config: Any,
        ffn: FFNSide | None = None,
        entry: Path | None = None,
    ) -> None:
        self._programs = programs
        self._vllm_config = vllm_config
        self._model = None if ffn is None else self._serve(ffn)
        self.stored: bytes | None = None
        self._unsealed = entry

    @abstractmethod
    def _serve(self, ffn: FFNSide) -> ServedModel:
        """What runs the steps, with experts at ``ffn``."""

    @abstractmethod
    def _dump(self) -> bytes:
        """The programs, and what they were made by."""

    @staticmethod
    @abstractmethod
    def _load(data: bytes, expected: dict[str, str]) -> Any:
        """The programs that :meth:`_dump` stored.

        Raises:
            AFDError: they were made by something else than ``expected``, or are damaged.
        """

    def __call__(self, *inputs: Any) -> Any:
        """Run one step."""
        if self._unsealed is not None and self.stored is not None:
            # vLLM stores a model after compiling it, and then runs it.
            cache_entry.seal(self._unsealed, self.stored)
            self._unsealed = self.stored = None
        if self._model is None:
            config = options_of(self._vllm_config).config
            self._model = self._serve(FFNSide(config, self._vllm_config))
        return self._model.run(*inputs)

    @staticmethod
    def opening() -> Any:
        """vLLM's current configuration, whose entry is whole and whose operators are there.

        Raises:
            AFDError: the entry is damaged.
        """
        from vllm.config import get_current_vllm_config

        vllm_config = get_current_vllm_config()
        cache_entry.check(cache_entry.entry_path(vllm_config))
        register_stage_ops()
        return vllm_config

    @classmethod
    def serialize_compile_artifacts(cls, compiled: StoredModel) -> bytes:
        """Called by vLLM, which stores what this returns."""
        compiled.stored = compiled._dump()
        return compiled.stored

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> StoredModel:
        """Build a stored model, inside vLLM's current configuration.

        Raises:
            AFDError: it was stored by something else than what runs now, or is damaged.
        """
        from afd_graph.vllm import runner_hook

        vllm_config = cls.opening()
        programs = cls._load(data, identity(vllm_config))
        runner_hook.install(vllm_config)
        return cls(programs, vllm_config)


class CompiledModel(StoredModel):
    """A compiled model whose :class:`Programs` run as plain PyTorch."""

    def _serve(self, ffn: FFNSide) -> ServedModel:
        programs: Programs = self._programs
        return ServedModel(
            programs.experts,
            programs.report,
            digest(programs),
            ffn,
            programs.unsplit.forward,
            None if programs.split is None else programs.split.forward,
        )

    @classmethod
    def compile(cls, gm: fx.GraphModule, vllm_config: Any) -> CompiledModel:
        """Run the passes on the graph that vLLM captured.

        Raises:
            UnsupportedError: the graph cannot be split and ``on_unsupported`` is ``error``.
        """
        register_stage_ops()
        with new_programs(gm, vllm_config) as (programs, ffn):
            return cls(programs, vllm_config, ffn, cache_entry.entry_path(vllm_config))

    def finalize_loading(self, vllm_config: Any) -> None:
        """Called by vLLM when it has checked that the model's source is the same."""
        observe.loaded(self._programs.experts, self._programs.report)

    def _dump(self) -> bytes:
        return dump_programs(self._programs, identity(self._vllm_config))

    @staticmethod
    def _load(data: bytes, expected: dict[str, str]) -> Programs:
        return load_programs(data, expected)


@contextlib.contextmanager
def new_programs(gm: fx.GraphModule, vllm_config: Any) -> Iterator[tuple[Programs, FFNSide]]:
    """Programs of a captured graph, and the FFN side for them, which an error inside ends.

    Raises:
        UnsupportedError: the graph cannot be split and ``on_unsupported`` is ``error``.
    """
    config = options_of(vllm_config).config
    ffn = FFNSide(config, vllm_config)
    try:
        log = observe.GraphLog(vllm_config, config)
        programs = build_programs(gm, config, ffn.channel.credits, log.after_pass)
        log.finish(programs.experts, programs.report)
        ffn.check(programs)
        yield programs, ffn
    except BaseException as error:
        ffn.give_up(error)
        raise


def identity(vllm_config: Any) -> dict[str, str]:
    """Everything that decides what a graph is compiled to, by name."""
    import vllm

    return {
        "format": str(_FORMAT),
        "afd-graph": __version__,
        "source": source_digest(),
        "torch": torch.__version__,
        # Which kernels there are decides how weights are packed, and what is in compiled pieces.
        "processor": _compat.processor(),
        "vllm": vllm.__version__,
        "configuration": vllm_config.compute_hash(),
        "rank": str(vllm_config.parallel_config.rank),
        "options": _options_digest(vllm_config),
    }


def _options_digest(vllm_config: Any) -> str:
    config = options_of(vllm_config).config
    # Where the experts run decides nothing, and by default depends on the CPUs that a start gets.
    placed = {name: value for name, value in config.connector_options.items() if name != "cpus"}
    return config.replace(connector_options=placed).digest()


@functools.cache
def source_digest() -> str:
    """Hash of this package's Python source."""
    digest = hashlib.sha256()
    for package in ("afd_graph", "afd_graph.passes"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(str(path.relative_to(folder)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def dump_programs(programs: Programs, made_by: dict[str, str]) -> bytes:
    """Store programs with what they were made by."""
    graphs = [
        None if gm is None else _compat.pickled_graph(_bare(gm))
        for gm in (programs.unsplit, programs.split)
    ]
    return seal(pickle.dumps((graphs, programs.experts, programs.report)), made_by)


def load_programs(data: bytes, expected: dict[str, str]) -> Programs:
    """Read what :func:`dump_programs` stored.

    Raises:
        AFDError: it was made by something else than ``expected``, or is damaged.
    """
    graphs, experts, report = pickle.loads(unseal(data, expected))
    unsplit, split = (None if g is None else _compat.unpickled_graph(g) for g in graphs)
    assert unsplit is not None
    return Programs(unsplit, split, experts, report)


def seal(content: bytes, made_by: dict[str, str]) -> bytes:
    """``content`` with what it was made by and a checksum over both."""
    body = pickle.dumps((made_by, content))
    return hashlib.sha256(body).digest() + body


def unseal(data: bytes, expected: dict[str, str]) -> bytes:
    """The content that :func:`seal` was given.

    Raises:
        AFDError: it was made by something else than ``expected``, or is damaged.
    """
    # The checksum comes first: nothing damaged reaches the unpickler.
    check, body = data[:_CHECK_SIZE], data[_CHECK_SIZE:]
    if hashlib.sha256(body).digest() != check:
        raise AFDError("the stored model is damaged: its checksum differs")
    made_by, content = pickle.loads(body)
    if made_by != expected:
        differ = [
            f"{name} was {made_by.get(name)}, is {value}"
            for name, value in expected.items()
            if made_by.get(name) != value
        ]
        raise AFDError(f"the stored model was compiled by something else: {'; '.join(differ)}")
    assert isinstance(content, bytes)
    return content


def _bare(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of ``gm`` without what belongs to the capture."""
    graph = fx.Graph()
    answer = graph.graph_copy(gm.graph, {})
    graph.output(answer)
    for node in graph.nodes:
        node.meta = {k: v for k, v in node.meta.items() if k == "afd_stage"}
    return fx.GraphModule(torch.nn.Module(), graph)
