"""Attention and FFN ranks of one torch.distributed world (gloo).

The worlds run in processes of their own; each of the scripts in ``distributed/`` runs several.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from distributed.handshake import CASES as HANDSHAKES

from afd_graph.connectors.row_quantisation import pack_rows, packed_size, unpack_rows
from afd_graph.connectors.torch_distributed_wire import (
    GarbageError,
    Header,
    Kind,
    arm,
    is_whole,
)
from afd_graph.connectors.torch_distributed_world import Ranks, WorldConfig
from afd_graph.errors import ConfigError
from afd_graph.results import read_results
from afd_graph.tracing import Trace, merge
from tiny_models import deepseek_v2

HERE = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(HERE),
    "OMP_NUM_THREADS": "1",
}
pytestmark = pytest.mark.timeout(1200)


def run(script: str, *args: str):
    """What a script of ``distributed/`` found."""
    done = subprocess.run(
        [sys.executable, str(HERE / "distributed" / script), *args],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.rsplit("RESULT ", 1)[1])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, str]:
    """One model, its experts stored in both forms."""
    paths = {}
    for name, original in (("matrices", True), ("stacked", False)):
        paths[name] = str(tmp_path_factory.mktemp(name))
        deepseek_v2().save_pretrained(paths[name], save_original_format=original)
    return paths


MODELS = {
    "matrices": {
        "two replicas": (4, {"ffn_ranks": 2}, {"shared_experts": "ffn", "trace": True}),
    },
    "stacked": {
        "sequence parallel": (3, {"ffn_ranks": 1, "tp_size": 2}, {"sequence_parallel": True}),
        "plain": (4, {"ffn_ranks": 2, "tp_size": 2, "credits": 1}, {"split": "request"}),
    },
}


@pytest.mark.parametrize("form", MODELS)
def test_logits_equal_one_unsplit_process(checkpoints, form):
    results = run("models.py", checkpoints[form], json.dumps(MODELS[form]))
    for name, (ranks, settings, _) in MODELS[form].items():
        found = results[name]
        attention, ffn = found[: -settings["ffn_ranks"]], found[-settings["ffn_ranks"] :]
        assert len(found) == ranks
        assert [rank.get("error") for rank in found] == [None] * ranks
        for rank in attention:
            assert rank["difference"] < 1e-5
            assert (rank["split"], rank["unsplit"]) == (1, {})
            assert rank["expert_bytes"] == 0, "the experts' weights are on the FFN ranks alone"
            # Other replicas may not have come so far, or farther.
            assert [int(r) for r in rank["told"]] == list(range(len(attention), ranks))
            assert all(items >= 4 for items in rank["told"].values())
        replicas = len(attention) // settings.get("tp_size", 1)
        # Two layers, two stages; each of 22 tokens goes to two experts, wherever they are.
        assert [rank["items"] for rank in ffn] == [replicas * 4] * len(ffn)
        traces = sorted(Path(checkpoints[form]).glob("trace.rank*.json"))
        if name == "two replicas":
            check_traces([Trace.read(path) for path in traces])
        padding = 2 * 2 * 2 * 2 if settings.get("tp_size") else 0
        rows = sum(rank["rows"] for rank in ffn)
        assert replicas * 2 * 22 * 2 <= rows <= replicas * 2 * 22 * 2 + padding


def check_traces(traces: list[Trace]) -> None:
    """Both replicas' steps on one clock, each item's experts behind its attention."""
    assert [trace.rank for trace in traces] == [0, 1]
    (timeline,) = merge(traces)
    for rank in (0, 1):
        items = sorted(interval.item for interval in timeline.lane("ffn", rank))
        assert items == [(layer, stage) for layer in range(2) for stage in range(2)]
        sent: dict[tuple[int, int], float] = {}
        for interval in timeline.lane("attention", rank):
            sent.setdefault(interval.item, interval.begin_s)
        assert all(i.begin_s >= sent[i.item] for i in timeline.lane("ffn", rank))


def test_every_row_is_computed_once_for_each_of_its_experts():
    for world in run("conservation.py", json.dumps(list(range(8)))):
        assert not world["errors"], world
        assert world["rows"] > 100
        assert not world["lost or made up"], world
        assert not world["twice"], world


def test_faults_end_every_rank_with_the_cause():
    found = run("faults.py", "--cases", "6", "--seed", "0")
    assert found["cases"] == 6
    assert not found["bad"]


def test_many_steps_and_a_long_pause_leave_nothing_behind():
    found = run("soak.py", "--steps", "300", "--idle", "25")
    assert not found["errors"]
    assert len(found["held"]) == 4
    assert not found["grown"]


@pytest.fixture(scope="module")
def handshakes() -> dict[str, list[str]]:
    return run("handshake.py")


@pytest.mark.parametrize("case", [c for c in HANDSHAKES if c not in ("absent", "gave up")])
def test_ranks_that_differ_fail_everywhere_with_one_message(handshakes, case):
    said = handshakes[case]
    assert len(set(said)) == 1, said
    if case == "nothing":
        assert said[0] == "agreed"
        return
    odd, how = HANDSHAKES[case]
    setting = case.removeprefix("ffn ")
    assert f"ranks disagree on {setting}: " in said[0]
    assert f"rank {odd}" in said[0]
    value = how.get("split", how.get(setting))
    assert str(value) in said[0]


def test_ranks_that_do_not_come(handshakes):
    said = handshakes["absent"]
    assert said[1] == "absent"
    assert all(
        "did not come to the handshake within 2 s: rank 1 (attention 1)" in s
        for s in (said[0], said[2])
    )
    gave_up = handshakes["gave up"]
    assert all(
        "rank 2 (ffn 0) failed before the handshake: no such checkpoint" in s for s in gave_up[:2]
    )


class TestServe:
    """The command line, under torchrun."""

    COMMAND = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")

    def test_greedy_tokens_and_what_every_step_did(self, checkpoints, tmp_path):
        prompts, output = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
        asked = [[1, 2, 3, 4, 5, 6, 7], [5, 6, 7], [9, 8, 7, 6]]
        lines = [{"id": f"p{i}", "prompt_tokens": tokens} for i, tokens in enumerate(asked)]
        prompts.write_text("\n".join(json.dumps(line) for line in lines))
        serve = ("-m", "afd_graph.cli", "serve", "--model", checkpoints["matrices"])
        done = subprocess.run(
            [
                *(*self.COMMAND, "2", *serve, "--ffn-ranks", "1", "--prompts", str(prompts)),
                *("--output", str(output), "--max-new-tokens", "3", "--batch", "3"),
            ],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "rank 1 (ffn 0): loaded experts 0 to 7 of 2 layers" in done.stderr
        results = read_results(output)
        assert [d.id for d in results.documents] == ["p0", "p1", "p2"]
        model = deepseek_v2()
        for tokens, document in zip(asked, results.documents, strict=True):
            ids = torch.tensor([tokens])
            for token in document.tokens:
                with torch.no_grad():
                    expected = int(model(ids, use_cache=False).logits[0, -1].argmax())
                assert token == expected
                ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
            assert 0 < len(document.tokens) == len(document.steps)
            assert all(step.split and step.policy for step in document.steps)

    def test_a_signal_ends_all_ranks(self, checkpoints, tmp_path):
        """Rank 0 waits for prompts that never come; the FFN rank waits for rank 0."""
        serve = ("-m", "afd_graph.cli", "serve", "--model", checkpoints["stacked"])
        process = subprocess.Popen(
            [*self.COMMAND, "2", *serve, "--ffn-ranks", "1", "--prompts", "-"],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if "loaded experts" in line:
                break
        process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        said = process.stderr.read()
        process.wait(120)
        assert process.returncode != 0
        assert "told to stop by SIGTERM" in said
        assert time.monotonic() - begin < 100  # not the timeouts of a world that waits for ever


class TestHeader:
    def header(self) -> Header:
        return Header(Kind.ITEM, 7, 3, 1, 5, 2, counts=[0, 2, 3, 0])

    def test_comes_back(self):
        header = self.header()
        assert Header.decode(header.encode()) == header
        error = Header(Kind.ERROR, 7, 3, 1, text="the experts are on strike: ü")
        assert Header.decode(error.encode()) == error

    @pytest.mark.parametrize("damage", ["bit", "cut", "noise", "kind"])
    def test_damage_is_seen(self, damage):
        encoded = torch.zeros(4096, dtype=torch.uint8)
        whole = self.header().encode()
        encoded[: whole.numel()] = whole
        if damage == "bit":
            encoded[whole.numel() - 12] ^= 1
        elif damage == "cut":
            encoded[whole.numel() - 9 :] = 0
        elif damage == "noise":
            encoded.random_(0, 256)
        else:
            encoded[8] = 99
        with pytest.raises(GarbageError):
            Header.decode(encoded)

    @pytest.mark.parametrize("size", [1, 7, 8, 4000])
    def test_a_message_that_was_cut_short_is_seen(self, size):
        buffer = torch.zeros(size, dtype=torch.uint8)
        canary = arm(buffer)
        assert not is_whole(buffer, canary)
        buffer[: size - 1] = 0
        buffer[-1] ^= 255
        assert is_whole(buffer, canary)


class TestQuantisedRows:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_error_is_half_a_level(self, dtype):
        rows = (torch.randn(9, 40) * torch.logspace(-6, 6, 9)[:, None]).to(dtype)
        packed = torch.empty(packed_size(9, 40), dtype=torch.uint8)
        pack_rows(rows, packed)
        back = torch.empty_like(rows)
        unpack_rows(packed, back)
        level = rows.float().abs().amax(1, keepdim=True) / 127
        rounding = 2**-7 * rows.float().abs() if dtype is torch.bfloat16 else 1e-6 * level
        assert ((back.float() - rows.float()).abs() <= 0.5001 * level + rounding).all()

    def test_rows_without_a_scale(self):
        rows = torch.zeros(3, 8)
        rows[1, 3], rows[2, 0] = torch.inf, torch.nan
        packed = torch.empty(packed_size(3, 8), dtype=torch.uint8)
        pack_rows(rows, packed)
        back = torch.full_like(rows, 5.0)
        unpack_rows(packed, back)
        assert torch.equal(back[0], torch.zeros(8))
        assert back[1:].isnan().all()


class TestRanks:
    def test_of_the_reference_topology(self):
        ranks = Ranks(attention=6, ffn=2, tp=2)
        assert [ranks.name(r) for r in (0, 5, 6, 7)] == [
            *("rank 0 (attention 0)", "rank 5 (attention 5)"),
            *("rank 6 (ffn 0)", "rank 7 (ffn 1)"),
        ]
        assert [list(ranks.replica_ranks(r)) for r in range(3)] == [[0, 1], [2, 3], [4, 5]]
        assert [ranks.expert_range(r, 64) for r in (6, 7)] == [(0, 32), (32, 64)]

    def test_experts_that_do_not_come_out_even(self):
        with pytest.raises(ConfigError, match="num_experts=64, num_ffn_ranks=3"):
            Ranks(2, 3, 1).expert_range(2, 64)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"ffn_ranks": 0}, "ffn_ranks"),
            ({"ffn_ranks": 1, "tp_size": 2, "max_tokens": 7}, "set max_tokens to 8"),
            ({"ffn_ranks": 1, "tp_size": 2, "attention_ranks": 3}, "tp_size=2 does not divide"),
            ({"ffn_ranks": 1, "device": "gpu"}, "device='gpu' is not known"),
            ({"ffn_ranks": 1, "dtype": "float99"}, "dtype='float99' is not a dtype"),
            ({"ffn_ranks": 1, "timeout_s": 0.1}, "timeout_s=0.1 is too small"),
            ({"ffn_ranks": 1, "dynamic_quant": "perhaps"}, "dynamic_quant"),
        ],
    )
    def test_impossible_options(self, options, message):
        with pytest.raises(ConfigError, match=message):
            WorldConfig(**options)
