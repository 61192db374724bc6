"""Planning for clusters: what a deployment of many devices would reach, before it is rented.

1. :mod:`model` and :mod:`hardware` describe what runs and what it runs on, with sources;
2. :mod:`workload` makes requests, :mod:`deployment` puts the pieces together;
3. :mod:`costs` turns a stage's tokens into seconds and bytes;
4. :mod:`disaggregated` and :mod:`colocated` play the steps of all ranks against one another;
5. :mod:`simulation` runs one deployment, :mod:`search` compares many;
6. :mod:`published` holds measurements of others that the model is checked against.

docs/cluster.md has the formulas. Needs numpy (extra ``cluster``).
"""

from __future__ import annotations

from afd_graph.cluster.deployment import Deployment
from afd_graph.cluster.hardware import HARDWARE, Hardware, load_hardware
from afd_graph.cluster.model import MODELS, ModelShape, load_model
from afd_graph.cluster.simulation import Result, simulate_cluster
from afd_graph.cluster.workload import Workload

__all__ = [
    "HARDWARE",
    "MODELS",
    "Deployment",
    "Hardware",
    "ModelShape",
    "Result",
    "Workload",
    "load_hardware",
    "load_model",
    "simulate_cluster",
]
