"""The CAM connector and its FFN ranks against the emulated operators."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import cam_emulator
import pytest
import torch
from cam_emulator import World
from expert_programs import dense_layer, swiglu_program

from afd_graph.connectors import create_connector
from afd_graph.connectors.cam import (
    SHUTDOWN_LAYER,
    CamChannel,
    CamConnector,
    Traffic,
    say_goodbye,
)
from afd_graph.connectors.cam_group import CamGroup
from afd_graph.errors import ConfigError, ConnectorError
from afd_graph.ffn.cam_experts import CamExperts, share_of
from afd_graph.lowering.ascend import ir_table
from afd_graph.lowering.ascend.ir_table import PACKAGES

HIDDEN, EXPERTS, TOP_K, LAYERS, MAX_TOKENS = 16, 6, 2, 2, 32
DTYPE = torch.bfloat16
TOLERANCE = 0.03  # bf16 rows, experts and result


@pytest.fixture(scope="module", autouse=True)
def _emulated():
    cam_emulator.install()
    before = ir_table.MAX_ROWS
    ir_table.MAX_ROWS = 512
    yield
    ir_table.MAX_ROWS = before


class Running:
    """All ranks of one world: channels to drive from the test, FFN ranks on their threads."""

    def __init__(self, world: World, operators: str, *, quant: bool, shared: bool) -> None:
        self.world = world
        self.programs = [
            swiglu_program(layer, experts=EXPERTS, hidden=HIDDEN, dtype=DTYPE, shared=shared)
            for layer in range(LAYERS)
        ]
        self.channels = []
        for rank in range(world.attention_ranks):
            connector = create_connector("cam", options(world, rank, operators, quant))
            channel = CamChannel(connector, credits=1, timeout_s=10)
            for program in self.programs:
                connector.add_program(program)
                channel.num_experts[program.layer] = EXPERTS
            self.channels.append(channel)
        group = self.channels[0].connector.group
        self.experts = [
            CamExperts(
                dataclasses.replace(group, rank=world.attention_ranks + i),
                hidden_size=HIDDEN,
                top_k=TOP_K,
                num_experts=EXPERTS,
                dtype=DTYPE,
                device="cpu",
            )
            for i in range(world.ffn_ranks)
        ]
        for rank in self.experts:
            for program in self.programs:
                rank.add_program(program)
        self.failures: list[str] = []
        self.threads = [
            threading.Thread(target=self.serve, args=(rank,), daemon=True) for rank in self.experts
        ]

    def serve(self, rank: CamExperts) -> None:
        try:
            rank.serve()
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def close(self, failure: str | None = None) -> None:
        """End the world; of its FFN ranks all must have failed with ``failure``, or none."""
        together([channel.close for channel in self.channels])
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()
        assert self.failures == ([] if failure is None else [failure] * len(self.experts))


def options(world: World, rank: int, operators: str = "afd_ascend", quant: bool = False) -> dict:
    return {
        "attention_ranks": world.attention_ranks,
        "ffn_ranks": world.ffn_ranks,
        "rank": rank,
        "max_tokens": MAX_TOKENS,
        "tp_size": world.tp_size,
        "dynamic_quant": quant,
        "operators": operators,
        "group_name": world.name,
        "device": "cpu",
    }


@contextlib.contextmanager
def running(
    attention: int = 1,
    ffn: int = 2,
    tp: int = 1,
    operators: str = "afd_ascend",
    quant: bool = False,
    shared: bool = False,
    gives_up_s: float | None = None,
    **world: Any,
) -> Iterator[Running]:
    """A world that runs; with ``gives_up_s`` its FFN ranks wait so long, in vain at the end."""
    failure = None
    if gives_up_s is not None:
        world["patience_s"] = gives_up_s
        failure = f"RuntimeError: 507014: dispatch_recv timed out after {gives_up_s:g} s"
    ranks = Running(
        World(attention, ffn, tp_size=tp, **world), operators, quant=quant, shared=shared
    )
    for thread in ranks.threads:
        thread.start()
    yield ranks
    ranks.close(failure)


def together(calls: list[Any]) -> list[Any]:
    """Run every call on a thread of its own; returns their results, raises their first error."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def step(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(DTYPE)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(rows)])
    return hidden, ids, torch.rand(rows, TOP_K, generator=generator)


def exchange(channel: CamChannel, layer: int, rows: int, seed: int = 0) -> torch.Tensor:
    hidden, ids, weights = step(rows, seed)
    ticket = channel.dispatch(hidden, ids, layer, 0)
    return channel.receive(ticket, hidden, weights, layer, 0)


def check(got: torch.Tensor, program: Any, rows: int, seed: int = 0, loose: float = 1.0) -> None:
    hidden, ids, weights = step(rows, seed)
    expected = dense_layer(program, hidden, ids, weights)
    assert got.dtype is DTYPE
    assert (got.double() - expected).abs().max() < TOLERANCE * loose * expected.abs().max()


@pytest.mark.parametrize("operators", list(PACKAGES))
@pytest.mark.parametrize("quant", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_equals_the_dense_layer(operators, quant, shared):
    if shared and not PACKAGES[operators].carries_shared:
        with pytest.raises(ConnectorError, match="carries routed rows only"):
            Running(World(1, 2), operators, quant=quant, shared=True)
        return
    with running(operators=operators, quant=quant, shared=shared) as ranks:
        for layer in (0, 1, 0):
            got = exchange(ranks.channels[0], layer, rows=7, seed=layer)
            check(got, ranks.programs[layer], 7, layer, loose=2 if quant else 1)
        assert ranks.world.overwritten == 0


def test_every_rank_of_a_replica_is_served_together():
    with running(attention=4, ffn=2, tp=2) as ranks:
        for layer in range(LAYERS):
            calls = [
                lambda rank=rank, layer=layer: exchange(
                    ranks.channels[rank], layer, rows=3 + rank, seed=10 * layer + rank
                )
                for rank in range(4)
            ]
            for rank, got in enumerate(together(calls)):
                check(got, ranks.programs[layer], 3 + rank, 10 * layer + rank)


def test_a_replica_waits_for_its_last_rank():
    with running(attention=2, ffn=1, tp=2, gives_up_s=0.3) as ranks:
        hidden, ids, _ = step(2)
        ranks.channels[0].dispatch(hidden, ids, 0, 0)
        ranks.threads[0].join(10)  # the FFN rank gave up, as a device would
        assert not ranks.threads[0].is_alive()
        for channel in ranks.channels:
            channel.abandon()
            channel.connector.abandon()


def test_replicas_do_not_wait_for_each_other():
    with running(attention=2, ffn=1) as ranks:
        check(exchange(ranks.channels[1], 0, rows=4), ranks.programs[0], 4)
        check(exchange(ranks.channels[0], 0, rows=5), ranks.programs[0], 5)


@pytest.mark.parametrize("operators", list(PACKAGES))
def test_a_batch_in_several_chunks(operators):
    with running(operators=operators, ffn=1, chunk_rows=12) as ranks:
        check(exchange(ranks.channels[0], 1, rows=16), ranks.programs[1], 16)
        chunks = [entry for entry in ranks.world.log if entry[0] == "recv"]
        assert len(chunks) > 2
        assert sum(entry[3] for entry in chunks) == 16 * TOP_K


def test_an_ffn_rank_without_rows_answers():
    with running(ffn=2) as ranks:
        hidden, _, weights = step(3)
        ids = torch.tensor([[0, 1]] * 3)  # all of the first FFN rank
        channel = ranks.channels[0]
        out = channel.receive(channel.dispatch(hidden, ids, 0, 0), hidden, weights, 0, 0)
        assert (
            out.double() - dense_layer(ranks.programs[0], hidden, ids, weights)
        ).abs().max() < 0.1
        world = ranks.world
        with world.changed:  # the answer without rows may come after ours
            world.wait_for(
                lambda: {("combine", 1, 0), ("combine", 2, 0)} <= {e[:3] for e in world.log},
                "both answers",
            )


def test_experts_that_do_not_divide_evenly():
    with running(ffn=4) as ranks:  # two, two, two and none
        for layer in range(LAYERS):
            check(exchange(ranks.channels[0], layer, rows=9), ranks.programs[layer], 9)


def test_one_credit():
    with running() as ranks:
        channel = ranks.channels[0]
        hidden, ids, weights = step(4)
        ticket = channel.dispatch(hidden, ids, 0, 0)
        with pytest.raises(ConnectorError, match=r"without a credit.*one window"):
            channel.dispatch(hidden, ids, 0, 1)
        channel.receive(ticket, hidden, weights, 0, 0)
        assert channel.outstanding == 0


def test_a_second_dispatch_would_corrupt_the_first():
    """What the credit protects from: past the channel, the operators do not notice."""
    world = World(1, 1)
    channel = Running(world, "afd_ascend", quant=False, shared=False).channels[0]
    first, ids, _ = step(4, seed=1)
    second, _, _ = step(4, seed=2)
    for hidden in (first, second):
        channel.connector.dispatch_send(hidden, ids, 0, 0, EXPERTS)
    assert world.overwritten == 1
    assert torch.equal(world.slots[0, 0].rows[:1], second[world.slots[0, 0].places[:1] // TOP_K])


def test_wrong_pairing():
    with running() as ranks:
        channel = ranks.channels[0]
        hidden, ids, weights = step(4)
        ticket = channel.dispatch(hidden, ids, 0, 0)
        with pytest.raises(ConnectorError, match="does not match the dispatch"):
            channel.receive(ticket, hidden, weights, 1, 0)
        channel.receive(ticket, hidden, weights, 0, 0)


@pytest.mark.parametrize(("rows", "tp"), [(MAX_TOKENS + 1, 1), (MAX_TOKENS // 2 + 1, 2), (0, 1)])
def test_capacity(rows, tp):
    with running(attention=tp, tp=tp, gives_up_s=0.5) as ranks:
        hidden = torch.zeros(rows, HIDDEN, dtype=DTYPE)
        ids = torch.zeros(rows, TOP_K, dtype=torch.int64)
        with pytest.raises(ConnectorError, match=f"{rows} rows does not fit.*raise max_tokens"):
            ranks.channels[0].dispatch(hidden, ids, 0, 0)


def test_a_failed_step_loses_the_group():
    with running(gives_up_s=2.0) as ranks:
        channel = ranks.channels[0]
        hidden, ids, weights = step(4)
        ticket = channel.dispatch(hidden, ids, 0, 0)
        ranks.channels[0].connector.combine_recv(hidden, ids, weights, 0, 0, EXPERTS)
        channel.abandon()
        with pytest.raises(ConnectorError, match=r"the group is lost.*restart"):
            channel.dispatch(hidden, ids, 0, 0)
        with pytest.raises(ConnectorError, match="the group is lost"):
            channel.receive(ticket, hidden, weights, 0, 0)


def test_shutdown_says_goodbye_and_waits_for_the_answer():
    with running(attention=2, ffn=2, tp=2) as ranks:
        together([lambda c=channel: exchange(c, 0, 3) for channel in ranks.channels])
        ranks.close()
        layers = [entry[2] for entry in ranks.world.log if entry[0] == "combine"]
        assert layers.count(SHUTDOWN_LAYER) == 2  # one answer of each FFN rank
        ranks.channels[0].close()  # idempotent
        assert ranks.world.log[-1][0] in ("receive", "combine")


def test_goodbye_of_a_rank_that_has_no_connector():
    """Its graph was compiled with the hook."""
    ranks = Running(World(2, 2, tp_size=2), "umdk_cam_op_lib", quant=False, shared=True)
    for thread in ranks.threads:
        thread.start()
    traffic = Traffic(HIDDEN, TOP_K, EXPERTS, DTYPE)
    groups = [channel.connector.group for channel in ranks.channels]
    together([lambda group=group: say_goodbye(group, traffic, "cpu") for group in groups])
    for thread in ranks.threads:
        thread.join(20)
        assert not thread.is_alive()


def test_the_info_tensor_goes_back_as_it_came():
    """The emulator refuses any other; here it is changed on the way."""
    ranks = Running(World(1, 1), "afd_ascend", quant=False, shared=False)
    hidden, ids, _ = step(4)
    ranks.channels[0].dispatch(hidden, ids, 0, 0)
    expert = ranks.experts[0]
    send = expert.group.package.combine_send
    tensors = {
        "expandX": hidden,
        "commArgs": torch.zeros(1, dtype=torch.float16),
        "batchInfo": torch.zeros(ir_table.info_length(1, EXPERTS), dtype=torch.int64),
    }
    sizes = {"hidden_size": HIDDEN, "top_k": TOP_K, "num_experts": EXPERTS}
    with pytest.raises(RuntimeError, match="batch_info is not what dispatch_recv returned"):
        send.overload(*expert.group.arguments(send, tensors, **sizes))
    assert expert.serve_one() == 0


def test_profile_runs_exchange_real_rows():
    with running() as ranks:
        exchange(ranks.channels[0], 0, rows=1)
        kinds = [entry[0] for entry in ranks.world.log]
        assert kinds.count("dispatch") == kinds.count("receive") == 1


def test_shared_experts_need_the_package_that_carries_them():
    world = World(1, 1)
    connector = create_connector("cam", options(world, 0))
    with pytest.raises(
        ConnectorError, match=r"carries routed rows only.*shared_experts='attention'"
    ):
        connector.add_program(swiglu_program(shared=True))
    group = dataclasses.replace(connector.group, rank=1)
    sizes = {"hidden_size": HIDDEN, "top_k": TOP_K, "num_experts": EXPERTS, "device": "cpu"}
    experts = CamExperts(group, dtype=DTYPE, **sizes)
    program = swiglu_program(0, experts=EXPERTS, hidden=HIDDEN, dtype=DTYPE, shared=True)
    with pytest.raises(ConfigError, match=r"carries routed rows only.*shared_experts='attention'"):
        experts.add_program(program)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "rank 2 of 3 is an FFN rank"),
        ({"rank": 3}, "rank=3 is not in a group of 3"),
        ({"tp_size": 3}, "tp_size=3 does not divide attention_ranks=2"),
        ({"ffn_ranks": 0}, "ffn_ranks=0 is not a positive number"),
        ({"max_tokens": 10**6}, "max_tokens=1000000 is not in"),
        ({"operators": "none"}, "operators='none' is not known"),
        ({"colour": 1}, "do not fit connector 'cam'"),
    ],
)
def test_impossible_groups_are_refused(change, message):
    world = World(2, 1)
    with pytest.raises((ConfigError, ConnectorError), match=message):
        create_connector("cam", {**options(world, 0), **change})


def test_missing_operators_are_named():
    world = World(1, 1)
    with pytest.raises(ConnectorError, match=r"dispatch_send has no kernel for cuda.*docs"):
        create_connector("cam", {**options(world, 0), "device": "cuda"})
    with pytest.raises(ConnectorError, match=r"no device 'npu'.*import torch_npu"):
        create_connector("cam", {**options(world, 0), "device": "npu"})


def test_share_of_a_layer():
    program = swiglu_program(experts=EXPERTS)
    share = share_of(program, 4, 4)
    assert share.num_experts == 2
    for (_, part), (_, whole) in zip(share.routed.weights, program.routed.weights, strict=True):
        assert torch.equal(part, whole[4:])
        assert part.data_ptr() == whole[4].data_ptr()


ARGUMENTS = {
    "umdk_cam_op_lib::async_dispatch_send": "x expert_ids comm_args comm_id max_seq_len batch_size "
    "H K F A E rank W layer_index tp_size dynamic_quant group_name",
    "umdk_cam_op_lib::async_dispatch_recv": "x comm_args comm_id batch_size H K F A E rank W "
    "tp_size dynamic_quant group_name",
    "umdk_cam_op_lib::async_combine_send": "expand_x expand_x_shared comm_args expert_token_nums "
    "comm_id batch_size H K F A E rank W tp_size group_name",
    "umdk_cam_op_lib::async_combine_recv": "expand_x expert_ids expert_scales comm_args comm_id "
    "batch_size H K F A E rank W group_name",
    "afd_ascend::afd_async_dispatch_send": "x expert_ids comm_args comm_id max_seq_len batch_size "
    "H K F A E rank W layer_index tp_size dynamic_quant group_name",
    "afd_ascend::afd_async_dispatch_recv": "x comm_args comm_id max_seq_len H K F A E rank W "
    "tp_size dynamic_quant group_name",
    "afd_ascend::afd_async_combine_send": "expand_x comm_args batch_info comm_id max_seq_len H K F "
    "A E rank W tp_size group_name",
    "afd_ascend::afd_async_combine_recv": "expand_x expert_ids expert_scales comm_args comm_id "
    "batch_size H K F A E rank W group_name",
}
"""Argument order as the packages publish it, in the short names of docs/ascend.md."""

SHORT = {
    "H": {"hidden_size"},
    "K": {"topk", "top_k"},
    "F": {"expert_rank_size", "moe_rank_num"},
    "A": {"attention_rank_size", "attn_rank_num"},
    "E": {"expert_per_rank", "route_expert_num_per_moe"},
    "W": {"world_size"},
    "rank": {"rank", "attn_rank_id", "moe_rank_id"},
}


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_argument_order(name):
    package, _ = name.split("::")
    operator = next(o for o in PACKAGES[package].operators if o.name == name)
    expected = ARGUMENTS[name].split()
    assert len(operator.argument_names) == len(expected)
    for argument, short in zip(operator.argument_names, expected, strict=True):
        assert argument in SHORT.get(short, {short})
    named = {argument for argument, _ in operator.inputs}
    named |= {argument for argument, _ in operator.attributes if argument}
    assert named | {"comm_id"} == set(operator.argument_names)


@pytest.mark.parametrize("operators", list(PACKAGES))
@pytest.mark.parametrize("quant", [0, 1])
def test_fake_kernels_agree_with_the_emulator(operators, quant):
    world = World(1, 1)
    group = CamGroup(1, 1, 1, MAX_TOKENS, 1, bool(quant), operators, world.name)
    receive = group.package.dispatch_recv
    sizes = {"hidden_size": HIDDEN, "top_k": TOP_K, "num_experts": EXPERTS}
    channel = CamChannel(
        CamConnector(**options(world, 0, operators, bool(quant))), credits=1, timeout_s=5
    )
    channel.num_experts[0] = EXPERTS
    hidden, ids, _ = step(5)
    channel.dispatch(hidden, ids, 0, 0)
    anchor = torch.zeros(1, dtype=DTYPE)
    comm = torch.zeros(1, dtype=torch.float16)
    real = receive.overload(*group.arguments(receive, {"x": anchor, "commArgs": comm}, **sizes))
    with torch._subclasses.FakeTensorMode() as mode:
        tensors = {"x": mode.from_tensor(anchor), "commArgs": mode.from_tensor(comm)}
        fake = receive.overload(*group.arguments(receive, tensors, **sizes))
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


def test_rows_factor_of_the_environment(monkeypatch):
    monkeypatch.setenv("BATCH_SIZE_FACTOR", "0.5")
    assert ir_table.capacity() == 256
    for bad in ("0", "1.5", "many"):
        monkeypatch.setenv("BATCH_SIZE_FACTOR", bad)
        with pytest.raises(ConfigError, match=r"BATCH_SIZE_FACTOR.*is not in \(0, 1\]"):
            ir_table.capacity()
