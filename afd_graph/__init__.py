"""Attention-FFN disaggregation as a compiler: a ``torch.compile`` backend for MoE models.

    torch.compile(model, backend=afd_backend)                         # defaults and environment
    torch.compile(model, backend="afd", options={"split": "token"})   # by name
    torch.compile(model, backend=AFDBackend(AFDConfig(...)))          # explicit

    load("model.afd")                                                 # compiled ahead of time

:func:`report` says what was matched, split and scheduled, and how the steps ran.
"""

from afd_graph._version import __version__
from afd_graph.artifact import load
from afd_graph.backend import AFDBackend, afd_backend, close_default_backends, report
from afd_graph.config import AFDConfig
from afd_graph.errors import (
    AFDError,
    ConfigError,
    ConnectorError,
    PassError,
    PlanError,
    TrainingError,
    UnsupportedError,
)
from afd_graph.lowering.ascend.hook import torchair_pre_pass, torchair_pre_pass_for
from afd_graph.report import Report

__all__ = [
    "AFDBackend",
    "AFDConfig",
    "AFDError",
    "ConfigError",
    "ConnectorError",
    "PassError",
    "PlanError",
    "Report",
    "TrainingError",
    "UnsupportedError",
    "__version__",
    "afd_backend",
    "close_default_backends",
    "load",
    "report",
    "torchair_pre_pass",
    "torchair_pre_pass_for",
]
