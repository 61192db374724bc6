"""A compile or a run as one self-contained HTML page: no network, no external scripts.

1. :mod:`content` collects what is known: the report, the traces of the ranks, dumped graphs;
2. :mod:`page` puts it in one file with the style and the script that lie beside this module.

``afd_graph.report(compiled).html("run.html")``, or ``afd-graph report DIR -o run.html``.
"""

from __future__ import annotations

from afd_graph.html.content import Content, from_files, from_report
from afd_graph.html.page import to_html, write_html

__all__ = ["Content", "from_files", "from_report", "to_html", "write_html"]
