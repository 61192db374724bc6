"""Connectors carry rows from the attention side to the experts and back."""

from afd_graph.connectors.base import Connector, WorkItem, connector_names, create_connector

__all__ = ["Connector", "WorkItem", "connector_names", "create_connector"]
