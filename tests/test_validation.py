"""Every check: what it accepts, and that its message names the key, the value and the remedy."""

from __future__ import annotations

import pytest
from host_cases import load

from afd_graph import validation as v
from afd_graph.errors import AFDError, ConfigError
from afd_graph.layout import StageLayout
from afd_graph.planner import StagePlan, plan_stages


def worker(**facts):
    return lambda: v.check_worker(v.WorkerFacts(**facts))


def topology(**changes):
    values = {"role": "attention", "role_rank": 0, "num_attention_ranks": 6, "num_ffn_ranks": 2}
    return lambda: v.check_topology(**(values | changes))


def capacity(**changes):
    values = {"max_tokens": 8000, "tensor_parallel_size": 2, "receive_capacity": 262144}
    return lambda: v.check_capacity(**(values | changes))


REFUSALS = [
    # 7.1
    (lambda: v.check_mapping("connector_options", 3), v.ConfigTypeError, "connector_options=3"),
    (lambda: v.check_mapping("options", {1: 2}), v.ConfigTypeError, "options={1: 2}"),
    (
        lambda: v.check_known_keys("options", ["zeta", "splt"], ["split", "role"]),
        ConfigError,
        "unknown options field(s): splt, zeta",
    ),
    (
        lambda: v.resolve_aliases({"afd_role": "ffn", "role": "ffn"}, {"afd_role": "role"}),
        ConfigError,
        "duplicate field: 'afd_role' and 'role'",
    ),
    (lambda: v.check_choice("role", "expert", v.ROLES), ConfigError, "role='expert'"),
    (lambda: v.check_choice("connector", "smoke", ["local"]), ConfigError, "connector='smoke'"),
    (lambda: v.check_integer("credits", True), v.ConfigTypeError, "credits=True"),
    (lambda: v.check_integer("credits", 1.0), v.ConfigTypeError, "credits=1.0"),
    (
        lambda: v.check_integer("attn_ranks_per_dp", 0, least=1),
        ConfigError,
        "attn_ranks_per_dp must be positive: attn_ranks_per_dp=0",
    ),
    (lambda: v.check_integer("min", 1, least=2), ConfigError, "min must be at least 2: min=1"),
    (lambda: v.parse_bool("log", "maybe"), v.ConfigTypeError, "log='maybe'"),
    (lambda: v.parse_bool("log", 2), v.ConfigTypeError, "log=2"),
    (lambda: v.parse_bool("log", 1.0), v.ConfigTypeError, "log=1.0"),
    (lambda: v.parse_bool("log", None), v.ConfigTypeError, "log=None"),
    (lambda: v.normalise_split(1), v.ConfigTypeError, "split=1"),
    (lambda: v.normalise_split("tokens"), ConfigError, "split='tokens'"),
    (lambda: v.check_endpoint(" ", 1239), ConfigError, "host=' '"),
    (lambda: v.check_endpoint("::1", 65536), ConfigError, "port=65536"),
    (lambda: v.check_endpoint("::1", 0), ConfigError, "port=0"),
    (lambda: v.check_endpoint("::1", "1239"), v.ConfigTypeError, "port='1239'"),
    (topology(role="expert"), ConfigError, "role='expert'"),
    (topology(num_ffn_ranks=0), ConfigError, "num_ffn_ranks=0"),
    (topology(num_attention_ranks=-1), ConfigError, "num_attention_ranks=-1"),
    (topology(role_rank=6), ConfigError, "role_rank=6, ranks=6"),
    (topology(role="ffn", role_rank=2), ConfigError, "role_rank=2, ranks=2"),
    (topology(role_rank=-1), ConfigError, "role_rank=-1"),
    # 7.2
    (worker(native_ubatching=True), ConfigError, "native_ubatching=True"),
    (worker(gate_on_attention=False), ConfigError, "gate_on_attention=False"),
    (worker(num_stages=3), ConfigError, "num_stages=3"),
    (worker(num_stages="2"), v.ConfigTypeError, "num_stages='2'"),
    (worker(split="tokens"), ConfigError, "split='tokens'"),
    (worker(role="expert"), ConfigError, "role='expert'"),
    (worker(decode_context_parallel_size=2), ConfigError, "decode_context_parallel_size=2"),
    (worker(prefill_context_parallel_size=8), ConfigError, "prefill_context_parallel_size=8"),
    (
        worker(attn_ranks_per_dp=1, tensor_parallel_size=2),
        ConfigError,
        "attn_ranks_per_dp=1, tensor_parallel_size=2",
    ),
    (worker(require_tensor_parallel=True), ConfigError, "tensor_parallel_size=1"),
    (worker(dynamic_quant=2), ConfigError, "dynamic_quant=2"),
    (worker(dynamic_quant=True), v.ConfigTypeError, "dynamic_quant=True"),
    # 7.3
    (
        lambda: v.check_runtime_sequence_parallel(planned=False, running=True),
        ConfigError,
        "planned=False, running=True",
    ),
    # unchecked by the reference
    (
        lambda: v.check_ranks_agree(
            {
                "attention 0": {"max_tokens": 8000, "split": "token"},
                "attention 1": {"max_tokens": 8000, "split": "token"},
                "ffn 0": {"max_tokens": 4000},
            }
        ),
        ConfigError,
        "ranks disagree on max_tokens: 8000 on attention 0, attention 1, 4000 on ffn 0; "
        "split: 'token' on attention 0, attention 1, missing on ffn 0",
    ),
    (lambda: v.check_expert_partition(64, 6), ConfigError, "num_experts=64, num_ffn_ranks=6"),
    (lambda: v.check_expert_partition(0, 6), ConfigError, "num_experts=0"),
    (capacity(max_tokens=7999), ConfigError, "max_tokens=7999, tensor_parallel_size=2"),
    (capacity(receive_capacity=4096), ConfigError, "max_tokens=8000, receive_capacity=4096"),
    (capacity(max_tokens=300000), ConfigError, "max_tokens=300000, max_sequence_rows=262144"),
    (
        lambda: v.check_moe_layers([False, True, False, False, True]),
        ConfigError,
        "dense layers [2, 3] follow MoE layer 1",
    ),
    (
        lambda: v.check_recurrent_attention("token", {4, 2}),
        ConfigError,
        "recurrent_layers=[2, 4]",
    ),
]


@pytest.mark.parametrize(
    ("act", "kind", "fragment"), REFUSALS, ids=[fragment for *_, fragment in REFUSALS]
)
def test_refusal(act, kind, fragment):
    with pytest.raises(ConfigError) as error:
        act()
    assert type(error.value) is kind
    assert isinstance(error.value, TypeError) == (kind is v.ConfigTypeError)
    assert isinstance(error.value, (AFDError, ValueError))
    assert fragment in error.value.what
    assert error.value.remedy


def test_unknown_keys_suggest_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'split'"):
        v.check_known_keys("options", ["splt"], ["split", "role"])


@pytest.mark.parametrize("text", [True, 1, "1", "true", "YES", " on "])
def test_true(text):
    assert v.parse_bool("log", text) is True


@pytest.mark.parametrize("text", [False, 0, "0", "False", "no", "off"])
def test_false(text):
    assert v.parse_bool("log", text) is False


def test_accepted_options_are_returned():
    assert v.normalise_split("  Token ") == "token"
    assert v.check_integer("port", 1239, least=1) == 1239
    assert v.check_mapping("options", {"a": 1}) == {"a": 1}
    assert v.resolve_aliases({"afd_role": "ffn"}, {"afd_role": "role"}) == {"role": "ffn"}
    v.check_known_keys("options", ["split"], ["split", "role"])
    v.check_endpoint("127.0.0.1", 1239)
    topology(role_rank=5)()
    topology(role="ffn", role_rank=1)()


def test_worker_checks_come_in_the_recorded_order():
    """Each fact is repaired in turn; the next one is the one refused."""
    facts = {
        "native_ubatching": True,
        "gate_on_attention": False,
        "num_stages": 3,
        "split": "tokens",
        "decode_context_parallel_size": 2,
        "attn_ranks_per_dp": 2,
        "require_tensor_parallel": True,
        "dynamic_quant": 3,
    }
    for name, repaired in {
        "native_ubatching": False,
        "gate_on_attention": True,
        "num_stages": 2,
        "split": "token",
        "decode_context_parallel_size": 1,
        "attn_ranks_per_dp": 1,
        "require_tensor_parallel": False,
        "dynamic_quant": 1,
    }.items():
        named = "tensor_parallel_size" if name == "require_tensor_parallel" else name
        with pytest.raises(ConfigError, match=named):
            worker(**facts)()
        facts[name] = repaired
    worker(**facts)()


def test_expert_rank_may_have_any_shape():
    worker(role="ffn", tensor_parallel_size=4, decode_context_parallel_size=2)()


def test_unsplit_worker_needs_no_stage_options():
    worker(split="none", num_stages=1, gate_on_attention=False)()


def test_step_that_runs_without_sequence_parallelism_is_replanned():
    assert v.check_runtime_sequence_parallel(planned=True, running=False)
    assert not v.check_runtime_sequence_parallel(planned=True, running=True)
    plan = plan_stages([5], split="token", sequence_parallel=True, tensor_parallel_size=4)
    assert isinstance(plan, StagePlan)
    StageLayout(plan.without_sequence_parallel(), 8, 4, 0, False)


def test_agreeing_ranks_pass():
    settings = {"max_tokens": 8000, "split": "token"}
    v.check_ranks_agree({"attention 0": settings, "ffn 0": dict(settings)})


def test_partition_and_capacity_return_what_a_rank_gets():
    assert v.check_expert_partition(64, 2) == 32
    assert capacity()() == 4000


def test_moe_layers_span():
    assert v.check_moe_layers([False, True, True]) == range(1, 3)
    with_suffix = [False, True, False, True, False]
    assert v.check_moe_layers(with_suffix, allow_dense_after=True) == range(1, 4)
    assert v.check_moe_layers([False]) is None


@pytest.mark.parametrize(
    "case", load("schedule_traces"), ids=lambda case: "-".join(case["input"]["layers"])
)
def test_recorded_layer_patterns(case):
    """Without dense layers allowed, exactly the patterns are refused that the reference refuses."""
    is_moe = [layer == "moe" for layer in case["input"]["layers"]]
    if any(case["errors"]):
        with pytest.raises(ConfigError, match="a dense prefix followed by contiguous MoE layers"):
            v.check_moe_layers(is_moe)
    else:
        assert len(v.check_moe_layers(is_moe)) == sum(is_moe)


def test_recurrent_layers_allow_request_boundaries():
    v.check_recurrent_attention("request", {2})
    v.check_recurrent_attention("token", set())
