"""The cluster simulator: golden table, an event-by-event twin, costs by hand, refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import json
import math
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_graph.cli.group import afd_graph
from afd_graph.cluster import (
    HARDWARE,
    MODELS,
    Deployment,
    Workload,
    load_hardware,
    load_model,
    simulate_cluster,
)
from afd_graph.cluster.costs import StageLoad, StepCosts, attention_seconds, reached
from afd_graph.cluster.disaggregated import Fleet
from afd_graph.cluster.measured import Curves, Sample, fit, pairs_between, predict, samples
from afd_graph.cluster.published import ROWS, TOLERANCE
from afd_graph.cluster.routing import VARIANTS, draw_shares
from afd_graph.cluster.search import best_division, where_split_pays
from afd_graph.cluster.steps import StepSource, cut_points, stage_loads
from afd_graph.efficiency import Efficiency
from afd_graph.errors import AFDError, ConfigError, PlanError
from afd_graph.schedule_ir import StageCosts, by_credits
from afd_graph.simulate import REFERENCE_COSTS, closed_form, simulate

# T1, send-first, receive-first of docs/pipeline.md for 58 layers, one row per reference cost.
GOLDEN = (
    (232, 117, 117),
    (232, 117, 117),
    (255.2, 128.6, 140.2),
    (290, 146, 175),
    (197.2, 116.7, 139.7),
    (301.6, 151.8, 186.6),
    (348, 175.5, 233),
)
LITE = MODELS["deepseek-v2-lite"]
V3 = MODELS["deepseek-v3"]


def plain(costs: StageCosts, stages: int) -> StepCosts:
    """Costs of a stage as those of docs/pipeline.md: one rank, links that only delay."""
    a, f, c, d = costs.uniform()
    none = [0.0] * stages
    return StepCosts(
        *(0, 0, [a] * stages, none, none, none, none, [f] * stages, 0, none, none, c, d),
    )


def fleet(steps: list[StepCosts], ranks: int = 1, layers: int = 58, **options) -> Fleet:
    """One replica per entry of ``steps``, one step each."""
    left = dict(enumerate(steps))

    def next_step(replica, _now):
        costs = left.pop(replica, None)
        return costs and SimpleNamespace(ready_s=0.0, costs=costs)

    settings = {
        "shares": np.full((layers, VARIANTS, ranks), 1 / ranks),
        "replica_slowness": np.ones(len(steps)),
        "rank_slowness": np.ones(ranks),
        **options,
    }
    played = Fleet(
        layers=layers,
        stages=max(costs.stages for costs in steps),
        next_step=next_step,
        end_step=lambda replica, now: None,
        **settings,
    )
    played.run()
    return played


class TestGoldenTable:
    @pytest.mark.parametrize(
        ("costs", "expected"), list(zip(REFERENCE_COSTS, GOLDEN, strict=True)), ids=str
    )
    def test_one_replica_one_rank(self, costs, expected):
        orders = (
            fleet([plain(costs.scaled(2), 1)], credits=1),
            fleet([plain(costs, 2)], credits=2),
            fleet([plain(costs, 2)], credits=1),
        )
        assert [played.end_s[0] for played in orders] == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize(("stages", "credits"), [(3, 1), (3, 2), (3, 3), (4, 2), (2, 5)])
    def test_more_stages_as_the_simulator_of_one_replica(self, stages, credits):
        for costs in REFERENCE_COSTS:
            played = fleet([plain(costs, stages)], layers=7, credits=credits)
            one = simulate(by_credits(7, credits, stages), costs)
            assert played.end_s[0] == pytest.approx(one.total_s, rel=1e-12)
            assert played.attention_busy_s[0] == pytest.approx(one.busy_s("attention"))
            assert played.ffn_busy_s[0] == pytest.approx(one.busy_s("ffn"))

    def test_the_recorded_step_is_the_timeline_of_one_replica(self):
        costs = REFERENCE_COSTS[3]
        played = fleet([plain(costs, 2)], layers=5, credits=1, watch=(0, 1))
        one = simulate(by_credits(5, 1, 2), costs)
        seen = {(i.engine, i.layer, i.stage): (i.begin_s, i.end_s) for i in played.intervals}
        for interval in one.intervals:
            found = seen[interval.engine, interval.layer, interval.stage]
            # A dispatch that waits for a credit counts as its link's time here.
            assert found[1] == pytest.approx(interval.end_s)


def event_by_event(steps: list[StepCosts], shares, slow, layers: int, credits: int) -> list[float]:
    """The same model with one event at a time and no arrays."""
    ranks = shares.shape[2]
    into, engine, outof = ([0.0] * ranks for _ in range(3))
    ends = [0.0] * len(steps)
    queue: list[tuple[float, int, int]] = []

    def replica(number, costs):
        stages = costs.stages
        held = min(credits, stages)
        now, sending = costs.head, 0.0
        answers: dict[int, float] = {}
        for item in range(layers * stages):
            due = answers[item - held] if item >= held else -math.inf
            stage = item % stages
            if held == stages:
                now = max(now, due) + costs.attention[stage]
            else:
                now = max(now + costs.attention[stage], due)
            sending = max(now, sending) + costs.out[stage]
            now += costs.after[stage]
            heapq.heappush(queue, (sending + costs.latency_out, number, item))
            needed = item + 1 - held
            while needed >= 0 and needed not in answers:
                done, answer = yield
                answers[done] = answer
        while len(answers) < layers * stages:
            done, answer = yield
            answers[done] = answer
        last = max(answers[i] for i in range(layers * stages - held, layers * stages))
        ends[number] = max(now, last) + costs.tail

    walkers = [replica(number, costs) for number, costs in enumerate(steps)]
    for walker in walkers:
        next(walker, None)
    taking = [0.0] * len(steps)
    while queue:
        arrival, number, item = heapq.heappop(queue)
        costs = steps[number]
        layer, stage = divmod(item, costs.stages)
        share = shares[layer, (number + stage) % VARIANTS]
        last = 0.0
        for rank in range(ranks):
            into[rank] = max(arrival, into[rank] + share[rank] * costs.take_in[stage])
            work = max(share[rank] * costs.ffn[stage], costs.ffn_floor[stage]) + costs.ffn_fixed
            engine[rank] = max(engine[rank], into[rank]) + work * slow[rank]
            outof[rank] = max(outof[rank], engine[rank]) + share[rank] * costs.give_back[stage]
            last = max(last, outof[rank])
        answer = max(last + costs.latency_back, taking[number] + costs.back[stage])
        taking[number] = answer
        with contextlib.suppress(StopIteration):
            walkers[number].send((item, answer))
    return ends


seconds = st.floats(0.01, 2.0)


@st.composite
def replica_steps(draw):
    stages = draw(st.integers(1, 3))
    each = st.lists(seconds, min_size=stages, max_size=stages)
    return StepCosts(
        draw(seconds),
        draw(seconds),
        *(draw(each) for _ in range(6)),
        draw(seconds),
        draw(each),
        draw(each),
        draw(seconds),
        draw(seconds),
    )


class TestAgainstEventByEvent:
    @given(
        steps=st.lists(replica_steps(), min_size=1, max_size=5),
        ranks=st.integers(1, 4),
        credits=st.integers(1, 4),
        seed=st.integers(0, 99),
    )
    @settings(max_examples=150, deadline=None)
    def test_batches_change_nothing(self, steps, ranks, credits, seed):
        generator = np.random.default_rng(seed)
        shares = draw_shares(4, ranks, min(1.5, ranks), generator)
        slow = 1 + generator.random(ranks)
        played = fleet(steps, ranks, layers=4, credits=credits, shares=shares, rank_slowness=slow)
        expected = event_by_event(steps, shares, slow, 4, credits)
        assert played.end_s == pytest.approx(expected, rel=1e-9)


class TestModel:
    def test_v3_has_the_published_number_of_parameters(self):
        """671 billion, 37 billion of them active: the model card of DeepSeek-V3."""
        attention = V3.layers * V3.attention_weights
        fixed = V3.dense_layers * V3.dense_weights + 2 * V3.vocabulary * V3.hidden
        each = V3.moe_layers * V3.expert_weights
        shared = V3.moe_layers * V3.shared_weights
        assert attention + fixed + shared + V3.experts * each == pytest.approx(671e9, rel=0.01)
        assert attention + fixed + shared + V3.top_k * each == pytest.approx(37e9, rel=0.03)

    def test_a_configuration_of_hugging_face(self, tmp_path):
        from transformers import DeepseekV2Config, MixtralConfig, Qwen2MoeConfig

        config = DeepseekV2Config(
            first_k_dense_replace=1, n_shared_experts=2, num_experts_per_tok=6
        )
        (tmp_path / "config.json").write_text(config.to_json_string())
        read = load_model(tmp_path)
        assert (read.kv_rank, read.qk_dim, read.dense_layers) == (512, 192, 1)
        assert read.shared_width == 2 * config.moe_intermediate_size
        for config in (MixtralConfig(), Qwen2MoeConfig()):
            path = tmp_path / "other.json"
            path.write_text(config.to_json_string())
            read = load_model(path)
            assert read.kv_rank == 0
            assert read.experts > 1
        assert read.shared_width == config.shared_expert_intermediate_size

    def test_refusals(self, tmp_path):
        with pytest.raises(ConfigError, match=r"model is not supported.*deepseek-v3"):
            load_model("deepseek-v9")
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(PlanError, match="not a readable model configuration"):
            load_model(tmp_path)
        (tmp_path / "config.json").write_text(
            json.dumps({"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1})
        )
        with pytest.raises(PlanError, match=r"has none of .*num_experts"):
            load_model(tmp_path)


class TestHardware:
    @pytest.mark.parametrize("name", HARDWARE)
    def test_every_number_of_a_preset_has_a_source(self, name):
        fields = {entry.name for entry in dataclasses.fields(HARDWARE[name])}
        assert fields - {"name", "sources"} == set(HARDWARE[name].sources)

    def test_a_file_may_start_from_a_preset(self, tmp_path):
        path = tmp_path / "mine.json"
        path.write_text(json.dumps({"base": "h800", "dispatch_bandwidth": 1e9}))
        read = load_hardware(path)
        assert (read.name, read.dispatch_bandwidth) == ("mine", 1e9)
        assert read.flops_8bit == HARDWARE["h800"].flops_8bit

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"base": "h800", "memory": -1}', "memory=-1 must be positive"),
            ('{"base": "h800", "gemm_efficiency": 2}', "gemm_efficiency=2 is a share"),
            ('{"base": "h800", "memory": "big"}', "is not a number"),
            ('{"base": "h800", "memroy": 1}', "memory"),
            ('{"memory": 1}', "does not say flops_16bit"),
            ("[", "not a readable hardware description"),
        ],
    )
    def test_refusals(self, tmp_path, text, message):
        path = tmp_path / "hardware.json"
        path.write_text(text)
        with pytest.raises(AFDError, match=message):
            load_hardware(path)


class TestCosts:
    def test_attention_by_hand(self):
        """V3, 16 tokens with 100 pairs each on one H800: every term written out."""
        deployment = Deployment(V3, HARDWARE["h800"])
        load = StageLoad(tokens=1024, pairs=1e9, scanned=1e9, cached=4096, requests=1)
        h = HARDWARE["h800"]
        weights = V3.attention_weights + 7168 * 256
        expected = (
            2 * 1024 * weights / (1979e12 * 0.59)
            + 1e9 * 2 * 128 * (192 + 128) / (989e12 * 0.65)
            + 1024 * V3.attention_values * 4 / (3.35e12 * 0.8)
        )
        assert h.call_overhead_s == 0
        assert attention_seconds(deployment, load, decoding=False) == pytest.approx(expected)

    def test_small_stages_read_their_weights(self):
        deployment = Deployment(V3, HARDWARE["h800"])
        load = StageLoad(tokens=1, pairs=1, scanned=1, cached=1, requests=1)
        least = V3.attention_weights / (3.35e12 * 0.8)
        assert attention_seconds(deployment, load, decoding=True) > least

    @pytest.mark.parametrize(("groups", "chosen", "domains"), [(1, 1, 4), (8, 4, 4), (8, 4, 32)])
    def test_expected_copies_are_those_of_a_draw(self, groups, chosen, domains):
        model = dataclasses.replace(V3, groups=groups, top_groups=chosen)
        generator = np.random.default_rng(0)
        seen = []
        for _ in range(3000):
            allowed = generator.permutation(groups)[:chosen]
            experts = np.arange(256)
            experts = experts[np.isin(experts * groups // 256, allowed)]
            picked = generator.permutation(experts)[: model.top_k]
            seen.append(len(set(picked * domains // 256)))
        assert reached(model, domains) == pytest.approx(np.mean(seen), rel=0.05)

    @given(ranks=st.sampled_from([2, 8, 64]), hottest=st.floats(1.0, 2.0), seed=st.integers(0, 20))
    @settings(max_examples=25, deadline=None)
    def test_the_fullest_rank_is_as_full_as_asked(self, ranks, hottest, seed):
        shares = draw_shares(3, ranks, hottest, np.random.default_rng(seed))
        assert shares.sum(axis=-1) == pytest.approx(1)
        assert shares.max(axis=-1) * ranks == pytest.approx(hottest, rel=1e-6)


class TestSteps:
    @given(
        counts=st.lists(st.integers(1, 50), min_size=1, max_size=6),
        stages=st.integers(1, 4),
        cut=st.sampled_from(["token", "request", "cost"]),
        data=st.data(),
    )
    @settings(max_examples=100, deadline=None)
    def test_stages_hold_the_step(self, counts, stages, cut, data):
        contexts = [data.draw(st.integers(0, 100)) for _ in counts]
        stages = min(stages, 2) if cut == "request" else stages
        deployment = Deployment(LITE, HARDWARE["h800"], stages=stages, cut=cut)
        cuts, reason = cut_points(deployment, counts, contexts)
        assert (reason is None) == (len(cuts) == stages - 1)
        loads = stage_loads(LITE, counts, contexts, cuts)
        assert all(load.tokens > 0 for load in loads)
        assert sum(load.tokens for load in loads) == sum(counts)
        every_pair = sum(
            position + 1
            for count, context in zip(counts, contexts, strict=True)
            for position in range(context, context + count)
        )
        assert sum(load.pairs for load in loads) == every_pair

    def test_cost_cuts_halve_the_attention(self):
        spread = {}
        for cut in ("cost", "token"):
            deployment = Deployment(LITE, HARDWARE["h800"], stages=3, cut=cut)
            cuts, _ = cut_points(deployment, [30000], [0])
            times = [
                attention_seconds(deployment, load, decoding=False)
                for load in stage_loads(LITE, [30000], [0], cuts)
            ]
            spread[cut] = max(times) / min(times)
        # The planner's curve leaves out what moves between kernels.
        assert spread["cost"] < 1.15 < 2 < spread["token"]

    def test_sparse_attention_counts_at_most_its_keys(self):
        model = dataclasses.replace(LITE, sparse_keys=10)
        (load,) = stage_loads(model, [4], [8], [])
        assert load.pairs == 9 + 10 + 10 + 10
        assert load.scanned == 9 + 10 + 11 + 12

    def test_prompts_are_continued_and_waited_for(self):
        deployment = Deployment(LITE, HARDWARE["h800"], replicas=2)
        source = StepSource(deployment, Workload("fixed:1500", 1000, rate=10.0))
        step = source.next_step(0, 0.0)
        first_arrival = step.ready_s
        assert first_arrival > 0
        assert step.tokens == 1000
        source.end_step(0, 5.0)
        assert source.waits_s == []
        assert source.next_step(0, 5.0).tokens == 1000
        source.end_step(0, 9.0)
        assert source.waits_s == [pytest.approx(9.0 - first_arrival)]

    def test_lengths_from_a_file(self, tmp_path):
        for text in ("7\n9\n", "[7, 9]"):
            path = tmp_path / "lengths"
            path.write_text(text)
            requests = Workload(f"file:{path}", 10).requests()
            assert {next(requests)[1] for _ in range(50)} == {7, 9}

    @pytest.mark.parametrize(
        "lengths", ["fixed", "fixed:0", "uniform:9:3", "normal:3:4", "fixed:x"]
    )
    def test_no_distribution(self, lengths):
        with pytest.raises(PlanError, match=r"not a distribution of lengths.*lognormal"):
            Workload(lengths)

    def test_refusals(self, tmp_path):
        with pytest.raises(PlanError, match="cannot be read"):
            Workload(f"file:{tmp_path / 'none'}")
        (tmp_path / "bad").write_text("3 0")
        with pytest.raises(PlanError, match="not positive"):
            Workload(f"file:{tmp_path / 'bad'}")
        with pytest.raises(PlanError, match="takes no rate"):
            Workload(phase="decode", rate=3.0)


class TestSimulation:
    small = Deployment(LITE, HARDWARE["h800"], replicas=4, tensor_parallel=2, expert_ranks=4)
    load = Workload("lognormal:700:0.7", 2048)

    def run(self, steps=6, load=None, **changes):
        return simulate_cluster(
            dataclasses.replace(self.small, **changes), load or self.load, steps=steps
        )

    def test_is_deterministic_by_seed(self):
        changes = {"hottest": 1.3, "jitter": 0.1, "stragglers": 0.25, "slowdown": 1.3}
        assert self.run(**changes) == self.run(**changes)
        other = dataclasses.replace(self.load, seed=1)
        assert self.run(**changes).tokens_per_s != self.run(load=other, **changes).tokens_per_s

    @pytest.mark.parametrize(
        ("placement", "changes"),
        [
            ("disaggregated", {"hottest": 2.0}),
            ("disaggregated", {"stragglers": 0.25, "slowdown": 2.0}),
            ("disaggregated", {"credits": 1}),
            ("colocated", {"hottest": 2.0}),
            ("colocated", {"stragglers": 0.25, "slowdown": 2.0}),
            ("colocated", {"stages": 1}),
        ],
        ids=str,
    )
    def test_what_costs_time_costs_throughput(self, placement, changes):
        load = Workload("fixed:2048", 8192)
        before = self.run(placement=placement, load=load)
        after = self.run(placement=placement, load=load, **changes)
        assert after.tokens_per_s < before.tokens_per_s

    def test_a_deployment_serves_what_arrives_until_it_is_full(self):
        full = self.run(steps=30).tokens_per_s
        mean = math.exp(math.log(700) + 0.7**2 / 2)
        quiet = self.run(steps=60, load=dataclasses.replace(self.load, rate=0.2 * full / mean))
        busy = self.run(steps=60, load=dataclasses.replace(self.load, rate=3 * full / mean))
        assert quiet.tokens_per_s == pytest.approx(0.2 * full, rel=0.25)
        assert busy.tokens_per_s == pytest.approx(full, rel=0.15)
        assert quiet.first_token_s["p99"] < busy.first_token_s["p50"]

    def test_decoding(self):
        few = self.run(load=Workload("fixed:1000", 8, phase="decode"))
        many = self.run(load=Workload("fixed:1000", 128, phase="decode"))
        assert few.first_token_s is None
        assert few.step_s < many.step_s < 16 * few.step_s

    def test_unsplit_steps_are_counted_with_their_reason(self):
        result = self.run(min_split_tokens=10**6)
        assert result.split_steps == 0
        assert result.unsplit == {"below_min_tokens": result.steps}

    def test_other_hardware_for_the_experts(self):
        slow = dataclasses.replace(HARDWARE["h800"], memory_bandwidth=1e11)
        assert self.run(ffn_hardware=slow).ffn_busy > self.run().ffn_busy

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"replicas": 0}, "replicas=0 must be at least 1"),
            ({"expert_ranks": 5}, "expert_ranks=5 does not divide 64 experts and 0 copies"),
            ({"hottest": 9.0}, "hottest=9.0 must be 1 to 4"),
            ({"cut": "request", "stages": 3}, "must be 2 where requests stay whole"),
            ({"placement": "colocated", "expert_ranks": 16}, "must divide the number of devices"),
            ({"weights_bits": 4}, "weights_bits=4 must be 8 or 16"),
            ({"model": dataclasses.replace(LITE, dense_layers=27)}, "has no MoE layer"),
            ({"model": V3}, "need .* GB on FFN device, h800 has 80.0 GB.*raise expert_ranks"),
        ],
        ids=str,
    )
    def test_refusals(self, changes, message):
        with pytest.raises(PlanError, match=message):
            self.run(**changes)


class TestSearch:
    def test_the_best_division_beats_all_others(self):
        deployment = Deployment(LITE, HARDWARE["h800"])
        found = best_division(deployment, Workload("fixed:1024", 4096), 16)
        assert [c.replicas + c.expert_ranks + c.idle_devices for c in found] == [16] * len(found)
        assert {c.expert_ranks for c in found} == {1, 2, 4, 8}
        rates = [c.tokens_per_s for c in found]
        assert rates == sorted(rates, reverse=True)

    def test_too_few_devices(self):
        with pytest.raises(PlanError, match="no division of 4 devices holds deepseek-v3"):
            best_division(Deployment(V3, HARDWARE["h800"]), Workload(), 4)

    def test_small_steps_lose_and_large_ones_gain(self):
        deployment = Deployment(LITE, HARDWARE["h800"], replicas=2, expert_ranks=2)
        small, large = where_split_pays(deployment, Workload("fixed:512"), [16, 16384])
        assert small.speedup < 1 < large.speedup
        assert large.colocated_tokens_per_device_s > 0


class TestPublished:
    @pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
    def test_reproduced_or_explained(self, row):
        error = row.error()
        assert (abs(error) > TOLERANCE) == bool(row.gap), f"{error:+.1%}"

    def test_the_named_imbalance_closes_its_gap(self):
        deployment = Deployment(
            V3,
            HARDWARE["h800"],
            replicas=32,
            expert_ranks=32,
            redundant_experts=32,
            placement="colocated",
            hottest=1.65,
        )
        layer_s = simulate_cluster(deployment, Workload("fixed:4096"), steps=2).layer_s
        assert layer_s == pytest.approx(42.7e-3, rel=0.02)


class TestCommand:
    def run(self, *args):
        return CliRunner().invoke(afd_graph, ["simulate", *args])

    small = ("deepseek-v2-lite", "--hardware", "h800", "--attention", "2", "--ffn", "2")

    def test_one_deployment(self):
        answer = self.run(*self.small, "--steps", "2")
        assert answer.exit_code == 0, answer.output
        assert "2 replicas x 1 attend, 2 hold experts" in answer.stdout
        assert "attention busy" in answer.stdout

    def test_as_json(self):
        answer = self.run(*self.small, "--steps", "2", "--rate", "50", "--json")
        found = json.loads(answer.stdout)
        assert found["devices"] == 4
        assert found["steps"] == 4
        assert set(found["first_token_s"]) == {"p50", "p90", "p99"}

    def test_best_ratio_and_sweep(self):
        answer = self.run("deepseek-v2-lite", "--attention", "1x1", "--best-ratio", "8", "--json")
        divisions = json.loads(answer.stdout)["divisions"]
        assert divisions[0]["tokens_per_s"] == max(d["tokens_per_s"] for d in divisions)
        answer = self.run(*self.small, "--sweep", "16,16384")
        assert "the split pays at 16384 tokens" in answer.stdout

    @pytest.mark.parametrize("suffix", [".svg", ".png", ".json"])
    def test_pictures(self, tmp_path, suffix):
        path = tmp_path / f"step{suffix}"
        answer = self.run(*self.small, "--steps", "1", "--picture", str(path))
        assert answer.exit_code == 0, answer.output
        assert path.stat().st_size > 1000

    @pytest.mark.parametrize(
        ("args", "code", "message"),
        [
            (("--attention", "8by8"), 2, "'8by8' is not DPxTP"),
            (("--sweep", "1,x"), 2, "not a list of positive numbers"),
            (("--hardware", "tpu"), 1, "hardware is not supported"),
            (("nothing",), 1, "model is not supported"),
            (("--ffn", "3"), 1, "does not divide 256 experts"),
            ((*small, "--colocated", "--steps", "1", "--picture", "x.svg"), 1, "cannot be drawn"),
            ((*small, "--steps", "1", "--picture", "x.gif"), 1, "cannot be drawn"),
        ],
    )
    def test_misuse(self, args, code, message):
        answer = self.run(*args)
        assert answer.exit_code == code
        assert message in answer.output

    def test_without_numpy(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "numpy", None)
        answer = self.run()
        assert answer.exit_code == 1
        assert "afd-graph[cluster]" in answer.output


class TestMeasured:
    curves = Curves((1e-3, 2e-5, 3e-8), (5e-4, 4e-5), (1e-4, 1e-6), (2e-4, 2e-6), (1e-3, 1e-6))

    def sample(self, low: int, high: int) -> Sample:
        tokens, pairs = high - low, pairs_between(low, high)
        a0, a1, a2 = self.curves.attention
        straight = {
            f"{name}_s": getattr(self.curves, name)[0] + getattr(self.curves, name)[1] * tokens
            for name in ("ffn", "out", "back", "around")
        }
        return Sample(tokens, pairs, a0 + a1 * tokens + a2 * pairs, **straight)

    def test_fit_finds_the_curves(self):
        found = fit([self.sample(*s) for s in ((0, 64), (64, 128), (0, 500), (100, 400))])
        for name in ("attention", "ffn", "out", "back", "around"):
            assert getattr(found, name) == pytest.approx(getattr(self.curves, name))

    def test_prediction_is_the_closed_form(self):
        flat = dataclasses.replace(self.curves, attention=(0.0, 5e-5, 0.0), around=(0.0, 0.0))
        costs = StageCosts(5e-3, 5e-4 + 4e-3, 1e-4 + 1e-4, 2e-4 + 2e-4)
        for credits, order in ((1, "receive-first"), (2, "send-first")):
            seconds = predict(flat, (0, 100, 200), 9, credits)
            assert seconds == pytest.approx(closed_form(9, costs, order).split_s)

    def test_samples_of_a_measured_step(self):
        costs = StageCosts(2.0, 1.0, 0.25, 0.5)
        timeline = simulate(by_credits(5, 2, 2), costs)
        step = Efficiency(timeline.total_s + 3, timeline.total_s, costs, timeline, timeline, 3.0)
        first, second = samples(step, (0, 10, 30))
        assert (first.tokens, second.tokens) == (10, 20)
        assert (first.attention_s, second.ffn_s) == pytest.approx((2.0, 1.0))
        assert first.around_s + second.around_s == pytest.approx(3.0)

    @pytest.mark.parametrize(("name", "stages"), [("unsplit AFD", 1), ("two stages", 2)])
    def test_recorded_runs_of_this_repository(self, name, stages):
        """docs/benchmarks.md, real_compute.py: 8 MoE layers, with what lies around them."""
        text = (Path(__file__).parents[1] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
        number = r" ([\d.]+) (?:ms )?\|"
        row = re.search(
            rf"^\| {name} \|{number}{number}{number}{number}{number}{number}", text, re.M
        )
        wall_ms, _, *costs_ms = map(float, row.groups())
        played = fleet([plain(StageCosts(*costs_ms), stages)], layers=8, credits=2)
        assert played.end_s[0] == pytest.approx(wall_ms, rel=0.05)

    def test_too_few_sizes(self):
        with pytest.raises(PlanError, match="fewer than three different stages"):
            fit([self.sample(0, 10)] * 5)


class TestDocs:
    docs = Path(__file__).parents[1] / "docs"

    def test_tables_and_figure_are_up_to_date(self):
        made = runpy.run_path(str(self.docs / "make_cluster_figures.py"))
        text = (self.docs / "cluster.md").read_text(encoding="utf-8")
        assert made["with_tables"](text) == text
        figure = self.docs / "figures" / "cluster-step.svg"
        assert figure.read_text(encoding="utf-8") == made["step_figure"]()
