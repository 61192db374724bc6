"""``python -m afd_graph.cli``: the same as the script ``afd-graph``."""

from afd_graph.cli import main

main()
