"""The plugin: loading it twice, the line that says when the backend is not called, options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from afd_graph.errors import ConfigError


@pytest.fixture
def registered() -> None:
    from afd_graph.vllm import plugin

    plugin.register()
    plugin.register()


def test_registering_twice_wraps_once(registered: None) -> None:
    from vllm.config import CompilationConfig, VllmConfig

    for method in (CompilationConfig.init_backend, VllmConfig.__post_init__):
        assert method._afd_wrapped
        assert not getattr(method.__wrapped__, "_afd_wrapped", False)


@pytest.mark.parametrize(
    ("compilation", "said"),
    [
        ({"mode": 0}, "compilation mode NONE, backend .* without --enforce-eager"),
        ({"mode": 1, "backend": "afd"}, "compilation mode STOCK_TORCH_COMPILE, backend 'afd'"),
        ({"mode": 2, "backend": "inductor"}, "mode DYNAMO_TRACE_ONCE, backend 'inductor'"),
        ({"mode": 2, "backend": "afd"}, None),
        ({"mode": 3, "backend": "inductor"}, None),
    ],
)
def test_says_when_it_will_not_be_called(compilation: dict[str, Any], said: str | None) -> None:
    import re

    from vllm.config import CompilationMode

    from afd_graph.vllm.plugin import why_not_called

    mode = CompilationMode(compilation["mode"])
    config = SimpleNamespace(
        additional_config={"afd": {}},
        compilation_config=SimpleNamespace(mode=mode, backend=compilation.get("backend", "")),
    )
    answer = why_not_called(config)
    if said is None:
        assert answer is None
    else:
        assert re.search(said, answer or "")
        assert '"backend": "afd"' in (answer or "")
    config.additional_config = {"afd": {"enabled": False}}
    assert why_not_called(config) is None


@pytest.mark.parametrize(
    ("backend", "additional", "custom_ops"),
    [
        ("afd", {}, ["-rotary_embedding"]),
        ("afd", {"afd": {"enabled": False}}, ["-rotary_embedding"]),
        ("inductor", {}, []),
    ],
)
def test_switching_off_leaves_the_wrong_kernel_out(
    backend: str, additional: dict[str, Any], custom_ops: list[str]
) -> None:
    """Else the backend would look like the cause of what the kernel does."""
    from vllm.config import CompilationMode

    from afd_graph.vllm.plugin import _saying_what_is_missing

    mode = CompilationMode.DYNAMO_TRACE_ONCE
    config = SimpleNamespace(
        additional_config=additional,
        compilation_config=SimpleNamespace(mode=mode, backend=backend, custom_ops=[]),
        model_config=None,
    )
    _saying_what_is_missing(lambda self: None)(config)
    assert config.compilation_config.custom_ops == custom_ops


RANKS = {"connector": "torch_distributed", "connector_options": {"address": "h:1", "ffn_ranks": 2}}


@pytest.mark.parametrize(
    ("section", "experts", "given", "message"),
    [
        ({}, 8, {"data_parallel_size": 2}, "data_parallel_size is 2"),
        ({}, 8, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, "expert parallelism"),
        ({}, 8, {"enable_expert_parallel": True}, None),
        ({}, 0, {"data_parallel_size": 2}, None),
        ({"enabled": False}, 8, {"data_parallel_size": 2}, None),
        (RANKS, 5, {}, "num_experts=5, num_ffn_ranks=2"),
        (RANKS, 8, {"method": "mtp"}, "'mtp' has a second one"),
        (RANKS, 8, {"method": "ngram"}, None),
        ({}, 5, {"method": "mtp"}, None),
    ],
)
def test_engines_that_cannot_be_served_are_refused_before_the_model_is_loaded(
    section: dict[str, Any], experts: int, given: dict[str, Any], message: str | None
) -> None:
    from vllm.config import CompilationMode, ModelConfig, SpeculativeConfig

    from afd_graph.vllm.plugin import _saying_what_is_missing

    model = ModelConfig.__new__(ModelConfig)
    model.model_arch_config = SimpleNamespace(num_experts=experts)
    drafts = SpeculativeConfig.__new__(SpeculativeConfig)
    drafts.method = given.get("method")
    one = {"data_parallel_size": 1, "tensor_parallel_size": 1, "enable_expert_parallel": False}
    config = SimpleNamespace(
        additional_config={"afd": section},
        compilation_config=SimpleNamespace(
            mode=CompilationMode.DYNAMO_TRACE_ONCE, backend="afd", custom_ops=[]
        ),
        model_config=model,
        parallel_config=SimpleNamespace(**{**one, **given}),
        speculative_config=drafts if "method" in given else None,
    )
    checked = _saying_what_is_missing(lambda self: None)
    if message is None:
        checked(config)
    else:
        with pytest.raises(ConfigError, match=message):
            checked(config)


def test_steps_with_kv_transfer_are_not_cut() -> None:
    """A connector that saves a layer as soon as it may would save it without the second stage."""
    from afd_graph.vllm.runner_hook import _can_stage

    vllm_config = SimpleNamespace(kv_transfer_config=None)
    runner = SimpleNamespace(
        vllm_config=vllm_config,
        parallel_config=SimpleNamespace(data_parallel_size=1),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
    )
    assert _can_stage(runner, {}, [], {})
    vllm_config.kv_transfer_config = object()
    assert not _can_stage(runner, {}, [], {})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"splt": "token"}, "splt"),
        ({"enable": False}, "did you mean 'enabled'"),
        ({"enabled": "yes"}, "not true or false"),
        ({"connector": "local"}, "connector='process'"),
        ({"lowering": "inductor"}, "lowering='eager'"),
        ({"exact": True}, "leave both False"),
        ({"shared_experts": "ffn"}, "shared_experts='attention'"),
        ({"costs": {"liner": 1}}, "CostModel"),
        ("token", "give an object"),
        ({"credits": 3}, "holds \\(2\\)"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"disabled_passes": 5}, "not a list of names"),
        ({"disabled_passes": ["verify"]}, "no effect inside vLLM"),
        ({"lowering_options": {"a": 1}}, "no effect inside vLLM"),
        ({"connector": "procss"}, "'procss' is not known"),
        ({"connector_options": "x"}, "must be a mapping"),
        ({"connector_options": {"threds": 1}}, "threds"),
        ({"connector_options": {"threads": "2"}}, "threads='2'"),
        ({"connector_options": {"cpus": "0-1"}}, "list of CPU numbers"),
        ({"connector_options": {"cpus": [-1]}}, "names \\[-1\\]"),
        ({"connector_options": {"imports": "x"}}, "list of modules"),
        ({"connector_options": {"start_timeout_s": "x"}}, "start_timeout_s='x'"),
        ({"connector": "torch_distributed"}, "needs an address"),
        (
            {"connector": "torch_distributed", "connector_options": {"address": "nohost"}},
            "not HOST:PORT",
        ),
        (
            {"connector": "torch_distributed", "connector_options": {"address": 5}},
            "not HOST:PORT",
        ),
        (
            {
                "connector": "torch_distributed",
                "connector_options": {"address": "h:1", "ffn_ranks": "a"},
            },
            "ffn_ranks='a'",
        ),
    ],
)
def test_wrong_options_are_refused(section: Any, message: str) -> None:
    from afd_graph.vllm.options import options_of

    with pytest.raises(ConfigError, match=message):
        options_of(SimpleNamespace(additional_config={"afd": section}))


def test_engines_of_one_process_are_asked_by_their_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    from afd_graph.errors import AFDError
    from afd_graph.report import Report
    from afd_graph.vllm import report, report_as_dict, reports
    from afd_graph.vllm.served import ServedModel

    def engine() -> Any:
        return SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=object()))

    def model(worker: Any, splits: int) -> Any:
        found = ServedModel.__new__(ServedModel)
        found._ffn = SimpleNamespace(vllm_config=worker.vllm_config)
        found.report = Report(steps_split=splits)
        return found

    first, second, other = engine(), engine(), engine()
    models = [model(first, 1), model(second, 2)]
    monkeypatch.setattr(reports, "served_models", lambda: models)
    assert [report_as_dict(worker)["steps_split"] for worker in (first, second)] == [1, 2]
    with pytest.raises(
        AFDError, match=r"2 models .* in this process.*ask the worker of one engine"
    ):
        report()
    with pytest.raises(AFDError, match=r"0 models .* this worker.*will not be called"):
        report_as_dict(other)
    models.append(model(second, 3))
    with pytest.raises(AFDError, match=r"2 models .* this worker.*served_models\(\)"):
        report_as_dict(second)
    del models[1:]
    assert report() is models[0].report
