"""Proofs that a mask is causal: what is claimed must hold, and the common forms must be proven."""

from __future__ import annotations

import functools
import math

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from afd_graph.passes.causality import CheckedMask, Offset, Verdict, prove_causal

QUERIES, KEYS = 5, 8

Build = tuple  # an expression: (name, *operands)


def index_column(kind: str, size: int, shift: int) -> torch.Tensor:
    """Positions as models write them; all but the last two forms are ``index + shift``."""
    if kind == "plain":
        return torch.arange(size) + shift
    if kind == "started":
        return torch.arange(shift, shift + size)
    if kind == "looked up":
        return (torch.arange(size + 4) + shift)[torch.arange(size)]
    if kind == "one for all":
        return torch.arange(1).expand(size) + shift
    if kind == "truth":
        return torch.arange(size).to(torch.bool).to(torch.int64) + shift
    raise AssertionError(kind)


COLUMNS = ("plain", "started", "looked up", "one for all", "truth")


def evaluate(expression: Build) -> torch.Tensor:
    """Build the mask ``[1, 1, QUERIES, KEYS]`` of an expression."""
    name, *rest = expression
    if name in ("le", "lt", "ge", "gt", "eq"):
        swapped, key_kind, query_kind, key_shift, query_shift = rest
        keys = index_column(key_kind, KEYS, key_shift)[None, None, None, :]
        queries = index_column(query_kind, QUERIES, query_shift)[None, None, :, None]
        pair = (queries, keys) if swapped else (keys, queries)
        return getattr(torch, name)(*pair)
    if name == "tril":
        return torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(rest[0])[None, None]
    if name == "everything":
        return torch.ones(1, 1, QUERIES, KEYS, dtype=torch.bool)
    if name == "and":
        return evaluate(rest[0]) & evaluate(rest[1])
    if name == "or":
        return evaluate(rest[0]) | evaluate(rest[1])
    if name == "not":
        return ~evaluate(rest[0])
    if name == "times":
        return evaluate(rest[0]) * evaluate(rest[1])
    if name == "expand":
        return evaluate(rest[0]).expand(2, 1, QUERIES, KEYS)
    raise AssertionError(name)


FINISHES = {
    "as it is": lambda mask: mask,
    "additive": lambda mask: torch.where(mask, 0.0, -math.inf),
    "additive, a low number": lambda mask: torch.where(mask, 0.0, torch.finfo(torch.float32).min),
    "additive, the wrong way": lambda mask: torch.where(mask, -math.inf, 0.0),
    "numbers": lambda mask: mask.to(torch.float32),
    "negated": lambda mask: torch.where(mask, 0.0, -math.inf) * torch.full((1,), -1.0),
    "to truth": lambda mask: torch.where(mask, 0.0, -math.inf).to(torch.bool),
    "plus a bias": lambda mask: torch.where(mask, 0.0, -math.inf) + torch.full((1,), 2.0),
}


def proof(build, offset: int) -> tuple[Verdict, torch.Tensor]:
    """The verdict on a mask, and the mask."""
    gm = make_fx(lambda: build(), tracing_mode="fake")()
    output = next(node for node in gm.graph.nodes if node.op == "output")
    result = output.args[0]
    assert isinstance(result, fx.Node)
    return prove_causal(result, Offset(sympy.Integer(offset))), build()


def visible(mask: torch.Tensor) -> torch.Tensor:
    """What attention lets through."""
    return mask if mask.dtype is torch.bool else mask > -1e30


def is_causal(mask: torch.Tensor, offset: int) -> bool:
    i, j = torch.arange(QUERIES)[:, None], torch.arange(KEYS)[None, :]
    return not (visible(mask) & (j > i + offset)).any()


shifts = st.integers(-3, 3)
comparisons = st.tuples(
    st.sampled_from(["le", "lt", "ge", "gt", "eq"]),
    st.booleans(),
    st.sampled_from(COLUMNS),
    st.sampled_from(COLUMNS),
    shifts,
    shifts,
)
leaves = st.one_of(
    comparisons, st.tuples(st.just("tril"), shifts), st.tuples(st.just("everything"))
)
masks = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["and", "or", "times"]), inner, inner),
        st.tuples(st.sampled_from(["not", "expand"]), inner),
    ),
    max_leaves=3,
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(mask=masks, finish=st.sampled_from(sorted(FINISHES)), offset=st.integers(-2, 4))
def test_what_is_proven_holds(mask, finish, offset):
    verdict, value = proof(lambda: FINISHES[finish](evaluate(mask)), offset)
    if verdict.causal:
        assert is_causal(value, offset), (mask, finish)
    else:
        assert verdict.reason


@pytest.mark.parametrize("finish", ["as it is", "additive", "plus a bias"])
@pytest.mark.parametrize(
    ("mask", "reach"),
    [
        (("le", False, "plain", "plain", 0, 2), 2),
        (("lt", False, "plain", "plain", 0, 3), 2),
        (("ge", True, "plain", "started", 1, 3), 2),
        (("gt", True, "looked up", "looked up", 0, 3), 2),
        (("tril", 2), 2),
        (("and", ("everything",), ("le", False, "plain", "plain", 0, 2)), 2),
        (("and", ("tril", 2), ("gt", False, "plain", "plain", 0, 0)), 2),
        (("expand", ("le", False, "plain", "started", 0, 2)), 2),
    ],
)
def test_common_forms_are_proven_up_to_what_they_reach(mask, reach, finish):
    for offset in (reach, reach + 1):
        verdict, value = proof(lambda: FINISHES[finish](evaluate(mask)), offset)
        assert verdict.causal, verdict.reason
        assert is_causal(value, offset)
    verdict, value = proof(lambda: FINISHES[finish](evaluate(mask)), reach - 1)
    assert not verdict.causal
    assert not is_causal(value, reach - 1)


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        # A row that is masked as a whole would see every key.
        ("additive, a low number", "does not show that the mask is causal"),
        # Ones and zeros added to the scores mask nothing.
        ("numbers", "does not show that the mask is causal"),
        ("negated", "does not show that the mask is causal"),
        ("to truth", "does not show that the mask is causal"),
    ],
)
def test_causal_comparisons_in_the_wrong_clothes(finish, reason):
    verdict, _ = proof(lambda: FINISHES[finish](evaluate(("tril", 0))), 0)
    assert not verdict.causal
    assert reason in verdict.reason


def test_an_offset_that_is_an_input_must_be_the_same_input_or_be_checked():
    """Caches of several layers count their tokens separately."""

    def mask(mine: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        queries = torch.arange(QUERIES) + mine
        return torch.arange(KEYS)[None, None, None, :] <= queries[None, None, :, None]

    gm = make_fx(mask, tracing_mode="fake")(torch.tensor(2), torch.tensor(2))
    mine, other = (node for node in gm.graph.nodes if node.op == "placeholder")
    result = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    same = prove_causal(result, Offset(sympy.Integer(0), (mine,)))
    assert same.causal
    assert same.equal_inputs == ()
    differs = prove_causal(result, Offset(sympy.Integer(0), (other,)))
    assert differs.causal
    assert differs.equal_inputs == ((mine, other),)
    assert not prove_causal(result, Offset(sympy.Integer(-1), (mine,))).causal
    assert not prove_causal(result, Offset(sympy.Integer(7))).causal


def test_a_prompt_that_sees_only_itself_is_causal_wherever_it_is_written():
    """A fresh static cache counts its tokens in a tensor; the prompt's mask takes them as none."""

    def mask(shift: int, written_at: torch.Tensor) -> torch.Tensor:
        queries = torch.arange(QUERIES) + shift
        return torch.arange(KEYS)[None, None, None, :] <= queries[None, None, :, None]

    for shift, causal in ((0, True), (-1, True), (1, False)):
        traced = make_fx(functools.partial(mask, shift), tracing_mode="fake")
        gm = traced(torch.tensor(0))
        written_at = next(node for node in gm.graph.nodes if node.op == "placeholder")
        result = next(node for node in gm.graph.nodes if node.op == "output").args[0]
        offset = Offset(sympy.Integer(0), (written_at,))
        assert prove_causal(result, offset).causal is causal


def test_all_reasons_are_told():
    build = ("and", ("everything",), ("le", False, "plain", "plain", 0, 3))
    verdict, _ = proof(lambda: evaluate(build), 1)
    assert "does not show that the mask is causal; " in verdict.reason
    assert "lets a query see 3 keys beyond its own index, 1 are known" in verdict.reason


def test_a_mask_from_outside_is_to_be_checked():
    gm = make_fx(lambda mask: mask.clone(), tracing_mode="fake")(torch.ones(1, 1, 4, 4) > 0)
    mask = next(node for node in gm.graph.nodes if node.op == "placeholder")
    result = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    offset = Offset(sympy.Integer(3))
    verdict = prove_causal(result, offset)
    assert verdict.causal
    assert verdict.checked == (CheckedMask(mask, offset),)


def test_what_can_be_proven_is_not_checked():
    def mask(given):
        return given & (torch.arange(4)[None, :] <= torch.arange(4)[:, None])

    gm = make_fx(mask, tracing_mode="fake")(torch.ones(4, 4) > 0)
    result = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    verdict = prove_causal(result, Offset(sympy.Integer(0)))
    assert verdict.causal
    assert not verdict.checked


@pytest.mark.parametrize("shape", [(1, 1, 4, 1), (4,)])
def test_a_mask_without_a_key_of_its_own_is_refused(shape):
    gm = make_fx(lambda mask: mask.expand(1, 1, 4, 4), tracing_mode="fake")(torch.ones(shape) > 0)
    result = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    verdict = prove_causal(result, Offset(sympy.Integer(0)))
    assert not verdict.causal
    assert "comes from outside the graph" in verdict.reason
