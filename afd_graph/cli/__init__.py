"""The command line ``afd-graph``: one file a command, in this package.

A command is imported when it is called or asked for help, so that ``afd-graph --help`` starts at
once and a missing extra hurts only the commands that need it.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the script ``afd-graph``; exits with the codes of :mod:`.group`."""
    try:
        from afd_graph.cli.group import afd_graph
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("afd-graph: the command line needs click: pip install 'afd-graph[cli]'")
    afd_graph()
