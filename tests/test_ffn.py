"""The FFN executor and the grouped product, against a dense loop over the experts."""

from __future__ import annotations

import pytest
import torch
from expert_programs import (
    aten,
    dense_experts,
    dense_shared,
    echo_program,
    failing_program,
    one_op_program,
    swiglu_program,
)
from torch.utils._python_dispatch import TorchDispatchMode

from afd_graph.connectors import WorkItem
from afd_graph.errors import ConnectorError
from afd_graph.ffn import grouped_mm as kernel
from afd_graph.ffn.executor import FFNExecutor

COUNTS = {
    "even": [5, 5, 5, 5],
    "empty experts": [0, 7, 0, 3],
    "one hot": [0, 0, 11, 0],
    "one row": [0, 0, 0, 1],
    "no rows": [0, 0, 0, 0],
}
# Largest error relative to the largest value, against the dense loop in fp64.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


class CountOps(TorchDispatchMode):
    """Collects what is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def executor_of(*programs) -> FFNExecutor:
    executor = FFNExecutor()
    for program in programs:
        executor.add(program)
    return executor


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.numel():
        return 0.0
    return float((actual.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("transposed", [False, True], ids=["ekn", "enk"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_routed_experts_equal_the_dense_loop(dtype, transposed, counts):
    program = swiglu_program(dtype=dtype, transposed=transposed)
    rows = torch.randn(sum(counts), 16).to(dtype)
    answer, shared = executor_of(program).run(WorkItem(0, 1, rows, counts))
    assert shared is None
    assert answer.shape == rows.shape
    assert answer.dtype == dtype
    assert not answer.requires_grad
    assert error_of(answer, dense_experts(program, rows, counts)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_shared_experts_equal_the_dense_product(dtype):
    program = swiglu_program(dtype=dtype, shared=True)
    rows, tokens = torch.randn(9, 16).to(dtype), torch.randn(3, 16).to(dtype)
    _, shared = executor_of(program).run(WorkItem(0, 0, rows, [9, 0, 0, 0], tokens))
    assert error_of(shared, dense_shared(program, tokens)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fast", [True, False])
def test_sixteen_bit_products_hold_with_and_without_a_kernel_of_their_own(monkeypatch, dtype, fast):
    monkeypatch.setattr(kernel, "_widened", lambda _: not fast)
    rows, weight = torch.randn(6, 8).to(dtype), torch.randn(2, 8, 5).to(dtype)
    out = torch.full((6, 5), torch.nan, dtype=dtype)
    kernel.grouped_mm_into(rows, weight, torch.tensor([4, 2]), out)
    expected = torch.cat(
        [rows[:4].double() @ weight[0].double(), rows[4:].double() @ weight[1].double()]
    )
    assert error_of(out, expected) <= torch.finfo(dtype).eps


def test_answers_are_written_to_the_memory_given():
    for program in (swiglu_program(shared=True), echo_program()):
        rows, counts = torch.randn(5, 16), [1, 1, 1, 2]
        tokens = torch.randn(2, 16) if program.shared is not None else None
        expected, expected_shared = executor_of(program).run(WorkItem(0, 0, rows, counts, tokens))
        out, shared_out = torch.zeros(5, 16), torch.zeros(2, 16)
        answer, shared = executor_of(program).run(
            WorkItem(0, 0, rows, counts, tokens), out, shared_out
        )
        assert answer is out
        assert torch.equal(out, expected)
        if tokens is not None:
            assert shared is shared_out
            assert torch.equal(shared_out, expected_shared)


def test_an_item_without_rows_launches_nothing():
    executor = executor_of(swiglu_program(shared=True))
    item = WorkItem(0, 0, torch.empty(0, 16), [0] * 4, torch.empty(0, 16))
    with CountOps() as ops:
        answer, shared = executor.run(item)
    assert answer.shape == shared.shape == (0, 16)
    assert ops.names == []


def test_weights_stay_where_they_are():
    program = swiglu_program()
    executor = executor_of(program)
    rows = torch.randn(4, 16)
    before, _ = executor.run(WorkItem(0, 0, rows, [4, 0, 0, 0]))
    with torch.no_grad():
        program.routed.weights[1][1].mul_(2)
    after, _ = executor.run(WorkItem(0, 0, rows, [4, 0, 0, 0]))
    torch.testing.assert_close(after, 2 * before)


def test_a_program_is_taken_once():
    executor = FFNExecutor()
    assert executor.add(swiglu_program())
    assert not executor.add(swiglu_program())
    other = swiglu_program()
    other.key = "another"
    with pytest.raises(
        ConnectorError, match=r"already has other experts .*layer0.*another.*layer=0"
    ):
        executor.add(other)


def test_a_graph_that_does_not_fit_its_weights_is_refused():
    program = swiglu_program(layer=3)
    program.routed.weights = program.routed.weights[:1]
    with pytest.raises(ConnectorError, match=r"4 placeholders for 2 inputs and 1 weights.*layer=3"):
        FFNExecutor().add(program)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (WorkItem(7, 1, torch.zeros(1, 16), [1, 0, 0, 0]), r"no experts.*layers here: \[0\]"),
        (WorkItem(0, 1, torch.zeros(1, 8), [1, 0, 0, 0]), r"rows \(1, 8\) are not \[m, 16\]"),
        (
            WorkItem(0, 1, torch.zeros(1, 16).half(), [1, 0, 0, 0]),
            "float16, the experts torch.float32",
        ),
        (WorkItem(0, 1, torch.zeros(1, 16), [1, 0, 0]), "3 counts for 4 experts"),
        (WorkItem(0, 1, torch.zeros(2, 16), [1, 0, 0, 0]), "counts sum to 1 for 2 rows"),
        (WorkItem(0, 1, torch.zeros(1, 16), [2, -1, 0, 0]), "counts sum to 1 for 1 rows"),
        (
            WorkItem(0, 1, torch.zeros(1, 16), [1, 0, 0, 0], torch.zeros(1, 16)),
            "shared experts are not",
        ),
    ],
)
def test_an_item_that_does_not_fit_is_refused_with_layer_and_stage(item, message):
    with pytest.raises(ConnectorError, match=message) as caught:
        executor_of(swiglu_program()).run(item)
    assert (caught.value.layer, caught.value.stage) == (item.layer, 1)


def test_failing_experts_are_named():
    executor = executor_of(failing_program(layer=2))
    item = WorkItem(2, 1, torch.zeros(1, 16), [1, 0, 0, 0])
    with pytest.raises(
        ConnectorError,
        match=r"experts of layers.2.mlp failed: .*on strike.*\[layer=2, stage=1\]",
    ):
        executor.run(item)


def test_experts_that_answer_another_shape_are_refused():
    program = one_op_program(
        lambda graph, rows: graph.call_function(aten.slice.Tensor, (rows, 0, 0, 1))
    )
    item = WorkItem(0, 0, torch.zeros(3, 16), [3, 0, 0, 0])
    with pytest.raises(ConnectorError, match=r"answered \(1, 16\) .* for \(3, 16\)"):
        executor_of(program).run(item, torch.zeros(3, 16))


@pytest.mark.parametrize("counts", [[1, 1], [1, 1, 1], [3, 3]])
def test_counts_that_do_not_fit_are_refused(counts):
    with pytest.raises(RuntimeError, match="do not fit 5 rows and 2 experts"):
        torch.ops.afd.grouped_mm(torch.ones(5, 4), torch.ones(2, 4, 3), torch.tensor(counts))
