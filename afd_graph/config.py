"""The configuration: one frozen dataclass, validated on construction, hashed into every cache key.

This is the only module that reads the environment.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from afd_graph._version import __version__
from afd_graph.cost_model import CostModel
from afd_graph.errors import ConfigError
from afd_graph.validation import (
    check_choice,
    check_integer,
    check_known_keys,
    check_mapping,
    check_num_stages,
    check_seconds,
    normalise_split,
    parse_bool,
)

SPLITS = ("none", "token", "request", "cost", "auto")
LOWERINGS = ("eager", "inductor", "torchair")
SHARED_EXPERTS = ("attention", "ffn")
ON_UNSUPPORTED = ("error", "fallback")

OPTIONAL_PASSES = ("normalize", "shard_dispatch", "verify")

LAYOUT_LOG_VARIABLE = "AFD_ASYNC_MOE_LAYOUT_LOG"
RECEIVED_ROWS_VARIABLE = "BATCH_SIZE_FACTOR"
HOOK_VARIABLE = "AFD_OPTIONS"
ASCEND_HOME_VARIABLE = "ASCEND_HOME_PATH"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True)
class AFDConfig:
    """Options of the compiler and of its runtime.

    Attributes:
        split: where a step is cut in two stages. ``token`` cuts in the middle of the token axis
            (through requests where needed), ``request`` at the best request boundary, ``cost``
            where the attention work is halved, ``auto`` at whichever of these is predicted to be
            the fastest, if any beats the unsplit step; ``none`` never cuts (unsplit AFD).
        costs: what ``cost`` and ``auto`` reckon with; its context lengths are those of each step.
        num_stages: number of token stages; exactly two.
        min_split_tokens: steps with fewer tokens than this run unsplit, counted with that reason.
        connector: name of the connector between attention and experts (:mod:`connectors`).
        connector_options: options of that connector, validated by it.
        credits: un-received dispatches allowed per attention rank; lowers what the connector
            offers. ``None`` takes the connector's own number.
        sequence_parallel: keep one rank's rows between the sums of a tensor-parallel model, stage
            by stage (:mod:`passes.sequence_parallel`).
        shared_experts: side that computes the shared experts.
        lowering: what the transformed graph is handed to.
        lowering_options: options of that lowering, validated by it.
        on_unsupported: what to do with a graph that cannot be split: raise, or run it unsplit
            and count the reason.
        assume_causal: accept attention masks whose causality cannot be proven from the graph.
        exact: give every token the same bits in a split and in an unsplit step
            (:mod:`passes.exact_rows`); refused where kernels here cannot hold it.
        check_answers: look for NaN in every received result.
        check_values: check at every split step that masks taken as causal are causal, and that
            padding rows are zero where they are dropped; reads tensor values.
        timeout_s: seconds after which a receive without an answer is an error.
        disabled_passes: names of :data:`OPTIONAL_PASSES` to leave out, to find which one a fault
            comes from.
        layout_log: log one line per boundary crossing.
        trace: keep begin and end of every boundary node and of the experts' work on it, for the
            last steps (:mod:`afd_graph.tracing`); ``AFDBackend.trace`` hands them out, and
            ``dump_dir`` gets them when the backend is closed.
        dump_dir: directory for graphs before and after each pass, match report, schedule picture
            and trace; ``None`` writes nothing.
    """

    split: str = "token"
    costs: CostModel | None = None
    num_stages: int = 2
    min_split_tokens: int = 2
    connector: str = "local"
    connector_options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    credits: int | None = None
    sequence_parallel: bool = False
    shared_experts: str = "attention"
    lowering: str = "eager"
    lowering_options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    on_unsupported: str = "error"
    assume_causal: bool = False
    exact: bool = False
    check_answers: bool = True
    check_values: bool = False
    timeout_s: float = 60.0
    disabled_passes: tuple[str, ...] = ()
    layout_log: bool = False
    trace: bool = False
    dump_dir: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", normalise_split(self.split, policies=SPLITS))
        check_choice("lowering", self.lowering, LOWERINGS)
        check_choice("shared_experts", self.shared_experts, SHARED_EXPERTS)
        check_choice("on_unsupported", self.on_unsupported, ON_UNSUPPORTED)
        if self.costs is None and self.split in ("cost", "auto"):
            raise ConfigError(
                f"split={self.split!r} needs costs, and there is no default that fits a machine",
                remedy="measure them with `afd-graph costs`, pass costs=CostModel(linear=..., "
                "quadratic=...), or use split='token'",
            )
        if self.costs is not None and not isinstance(self.costs, CostModel):
            raise ConfigError(
                f"costs={self.costs!r} is not a CostModel",
                remedy="pass afd_graph.cost_model.CostModel(...)",
            )
        if self.costs is not None and self.costs.context_lens is not None:
            raise ConfigError(
                f"costs.context_lens={self.costs.context_lens!r} belongs to one step",
                remedy="leave it None; the context lengths of each step are filled in",
            )
        check_num_stages(self.num_stages)
        check_integer("min_split_tokens", self.min_split_tokens, least=2)
        if self.credits is not None:
            check_integer("credits", self.credits, least=1)
        if not isinstance(self.connector, str) or not self.connector:
            raise ConfigError(
                f"connector={self.connector!r} is not a name",
                remedy="name a registered connector such as 'local' or 'process'",
            )
        for name in ("connector_options", "lowering_options"):
            options = check_mapping(name, getattr(self, name))
            object.__setattr__(self, name, MappingProxyType(dict(options)))
        for name in (
            *("sequence_parallel", "assume_causal", "exact"),
            *("check_answers", "check_values", "layout_log", "trace"),
        ):
            object.__setattr__(self, name, parse_bool(name, getattr(self, name)))
        if self.exact and (self.lowering != "eager" or self.sequence_parallel):
            what = (
                f"lowering={self.lowering!r} chooses kernels by shape"
                if self.lowering != "eager"
                else "sequence_parallel=True sums over ranks in an order that depends on the rows"
            )
            raise ConfigError(
                f"exact=True cannot be promised: {what}",
                remedy="use lowering='eager' and sequence_parallel=False, or exact=False",
            )
        check_seconds(
            "timeout_s",
            self.timeout_s,
            "set the longest time that an expert answer may take, such as 60",
        )
        if self.dump_dir is not None and not isinstance(self.dump_dir, (str, os.PathLike)):
            raise ConfigError(f"dump_dir={self.dump_dir!r} is not a path", remedy="pass a path")
        if not isinstance(self.disabled_passes, (tuple, list)):
            raise ConfigError(
                f"disabled_passes={self.disabled_passes!r} is not a list of names",
                remedy=f"pass a list of {', '.join(OPTIONAL_PASSES)}",
            )
        object.__setattr__(self, "disabled_passes", tuple(self.disabled_passes))
        for name in self.disabled_passes:
            check_choice("disabled_passes", name, OPTIONAL_PASSES)

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None = None) -> AFDConfig:
        """Build a configuration from ``torch.compile(options=...)`` and the environment.

        Raises:
            ConfigError: an unknown key (the message names the nearest known one) or a bad value.
        """
        options = check_mapping("options", options or {})
        check_known_keys("AFDConfig", options, [f.name for f in dataclasses.fields(cls)])
        return cls(**{**_from_environment(), **options})

    def replace(self, **changes: Any) -> AFDConfig:
        """Return a copy with ``changes``, validated again."""
        return dataclasses.replace(self, **changes)

    def digest(self) -> str:
        """Hex digest over everything that changes the emitted graph, and our version."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("connector_options", "lowering_options"):
            values[name] = dict(getattr(self, name))
        for cosmetic in ("layout_log", "trace", "dump_dir"):
            del values[cosmetic]
        text = json.dumps([__version__, values], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def hook_options() -> str:
    """Options for :func:`afd_graph.torchair_pre_pass`, a JSON object; empty when not set."""
    return os.environ.get(HOOK_VARIABLE, "")


def ascend_home() -> str:
    """Where CANN is, if it is installed: its own variable, else its usual place."""
    return os.environ.get(ASCEND_HOME_VARIABLE) or "/usr/local/Ascend"


def received_rows_factor() -> float:
    """Share of the rows that a CAM dispatch_recv allocates; the operators read the same variable.

    Raises:
        ConfigError: the variable is not a number in (0, 1].
    """
    text = os.environ.get(RECEIVED_ROWS_VARIABLE, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0.0 < factor <= 1.0:
        raise ConfigError(
            f"{RECEIVED_ROWS_VARIABLE}={text!r} is not in (0, 1]",
            remedy="set it to the share of 262144 rows that one chunk may hold, on all ranks",
        )
    return factor


def _from_environment() -> dict[str, Any]:
    value = os.environ.get(LAYOUT_LOG_VARIABLE, "").strip()
    if value.lower() in _FALSE:
        return {}
    if value.lower() in _TRUE:
        return {"layout_log": True}
    return {"layout_log": True, "dump_dir": value}
