"""What a worker of vLLM may no longer do with its weights, once the experts are elsewhere.

vLLM's parameters of the experts have no memory then. Writing new weights to them, or saving them,
would end the process without a word, or leave the FFN side with the old ones.
"""

from __future__ import annotations

from typing import Any

from afd_graph.errors import UnsupportedError
from afd_graph.vllm.wrapping import wrap

_TOUCH_WEIGHTS = {
    "reload_weights": "loads weights",
    "start_weight_update": "loads weights",
    "update_weights": "loads weights",
    "save_sharded_state": "saves weights",
    "save_tensorized_model": "saves weights",
}


def install() -> None:
    """Wrap those methods of vLLM's worker, each once."""
    from vllm.v1.worker.gpu_worker import Worker

    for name, what in _TOUCH_WEIGHTS.items():
        if hasattr(Worker, name):  # older versions have fewer
            wrap(Worker, name, _refusing(name, what))


def _refusing(name: str, what: str) -> Any:
    def wrapper(original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            from afd_graph.vllm.runner_hook import options_of_runner
            from afd_graph.vllm.served import served_models

            moved = any(model.report.layers for model in served_models())
            if moved and options_of_runner(self.model_runner) is not None:
                raise UnsupportedError(
                    f"{name} {what}, and those of the experts are on the FFN side",
                    remedy="start vLLM again on the new checkpoint, or without AFD to save one",
                )
            return original(self, *args, **kwargs)

        return method

    return wrapper
