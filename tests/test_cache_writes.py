"""Writes to static caches happen in place where nothing could notice, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from afd_graph.passes.cache_writes import write_caches_in_place

aten = torch.ops.aten
CUT, REQUESTS = 2, 5


class Writer:
    """Builds a graph over a cache ``[requests, places, width]``, rows and places to write to."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.cache, self.rows, self.places = map(self.graph.placeholder, ("cache", "rows", "at"))

    def __call__(self, target, *args):
        return self.graph.call_function(target, args)

    def write(self, base, rows=None, places=None):
        rows = self.rows if rows is None else rows
        return self(aten.index_copy.default, base, 1, places or self.places, rows)

    def requests(self, value, begin, end):
        return self(aten.slice.Tensor, value, 0, begin, end)

    def read(self, value):
        return self(aten.sum.dim_IntList, value, [-1])

    def pieces(self, bounds=((0, CUT), (CUT, REQUESTS))):
        return [
            self.write(self.requests(self.cache, *b), self.requests(self.rows, *b)) for b in bounds
        ]


def one(w):
    new = w.write(w.cache)
    return new, [w.read(new)]


def one_read_before(w):
    old = w.read(w.cache)
    new = w.write(w.cache)
    return new, [old, w.read(w(aten.unsqueeze.default, new, 1))]


def one_behind_the_other(w):
    first = w.write(w.cache)
    read = w.read(w(aten.slice.Tensor, first, 1, 0, 4))
    second = w.write(first, w(aten.neg.default, w.rows), w(aten.add.Tensor, w.places, 1))
    return second, [read, w.read(second)]


def side_by_side(w):
    pieces = w.pieces()
    return w(aten.cat.default, pieces, 0), [w.read(piece) for piece in pieces]


@pytest.mark.parametrize("build", [one, one_read_before, one_behind_the_other, side_by_side])
def test_in_place(build):
    assert run(build) == (1 if build in (one, one_read_before) else 2)


def old_value_is_read_later(w):
    new = w.write(w.cache)
    return new, [w.read(w.cache), w.read(new)]


def view_of_the_old_value_is_read_later(w):
    view = w(aten.transpose.int, w.cache, 0, 1)
    new = w.write(w.cache)
    return new, [w.read(view)]


def first_value_is_read_behind_the_second(w):
    first = w.write(w.cache)
    view = w(aten.reshape.default, first, [-1, 3])
    second = w.write(first, w(aten.neg.default, w.rows))
    return second, [w.read(view)]


def old_value_is_read_between_pieces(w):
    bounds = ((0, CUT), (CUT, REQUESTS))
    first = w.write(w.requests(w.cache, *bounds[0]), w.requests(w.rows, *bounds[0]))
    read = w.read(w.cache)
    second = w.write(w.requests(w.cache, *bounds[1]), w.requests(w.rows, *bounds[1]))
    return w(aten.cat.default, [first, second], 0), [read]


def value_leaves(w):
    new = w.write(w.cache)
    return new, [new]


def view_leaves(w):
    new = w.write(w.cache)
    return new, [w(aten.select.int, new, 0, 0)]


def rows_are_of_the_cache(w):
    new = w.write(w.cache, w(aten.slice.Tensor, w.cache, 1, 3, 5))
    return new, []


def pieces_in_another_order(w):
    return w(aten.cat.default, w.pieces()[::-1], 0), []


def pieces_overlap(w):
    return w(aten.cat.default, w.pieces(((0, 3), (0, 2))), 0), []


def pieces_joined_elsewhere(w):
    whole = w.write(w.cache)
    halves = [w(aten.slice.Tensor, whole, 1, 0, 3), w(aten.slice.Tensor, whole, 1, 3, 6)]
    return w(aten.cat.default, halves, 1), []


def something_else_is_copied(w):
    return w(aten.neg.default, w.write(w.cache)), []


@pytest.mark.parametrize(
    "build",
    [
        old_value_is_read_later,
        view_of_the_old_value_is_read_later,
        first_value_is_read_behind_the_second,
        old_value_is_read_between_pieces,
        value_leaves,
        view_leaves,
        rows_are_of_the_cache,
        pieces_in_another_order,
        pieces_overlap,
        pieces_joined_elsewhere,
        something_else_is_copied,
    ],
)
def test_stays_functional(build):
    assert run(build) == 0


def run(build) -> int:
    """Number of writes in place; what is returned and what the cache holds must be the same."""
    results = []
    edits = 0
    for rewrite in (False, True):
        writer = Writer()
        value, outputs = build(writer)
        writer(aten.copy_.default, writer.cache, value)
        writer.graph.output(tuple(outputs))
        if rewrite:
            edits = write_caches_in_place(writer.graph)
        writer.graph.lint()
        left = writer.graph.find_nodes(op="call_function", target=aten.index_copy.default)
        assert bool(left) != bool(edits)
        generator = torch.Generator().manual_seed(0)
        cache = torch.randn(REQUESTS, 6, 3, generator=generator)
        rows = torch.randn(REQUESTS, 2, 3, generator=generator)
        module = fx.GraphModule({}, writer.graph)
        outputs = [o.clone() for o in module(cache, rows, torch.tensor([1, 4]))]
        results.append((outputs, cache))
    (expected, wanted), (got, cache) = results
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(cache, wanted)
    return edits
