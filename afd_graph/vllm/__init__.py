"""The backend inside vLLM: real requests over vLLM's own caches, metadata and kernels.

vLLM hands over the graph of its model as Dynamo captured it: attention and cache updates are
opaque operators that read their metadata from vLLM's *forward context*, and values are written in
place. The path of a graph:

    find the MoE layers (match) ▶ dispatch and receive (insert) ▶ one copy a stage (split)
        ▶ order by credits (the core's schedule, over dependences that see in-place writes)

and the path of a step:

    the runner builds metadata ▶ our hook plans the cut and builds one set a stage
        ▶ the program enters a stage's forward context around its attention

Nothing of vLLM is imported before it is needed; vLLM's source is not touched.
"""

from afd_graph.vllm.reports import report, report_as_dict

__all__ = ["report", "report_as_dict"]
