"""Graph passes: one idea a file, run in the order given by :mod:`afd_graph.pipeline`."""
