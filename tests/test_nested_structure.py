"""Nested inputs and outputs survive the way through a template; what does not fit says where."""

from __future__ import annotations

import json

import pytest
import torch

from afd_graph.structure import StructureError, count_leaves, fit, flatten, unflatten

VALUE = {
    "ids": torch.tensor([0]),
    "cache": [(torch.tensor([1]), torch.tensor([2])), (torch.tensor([3]), None)],
    "none": None,
}


def test_there_and_back():
    template, leaves = flatten(VALUE)
    template = json.loads(json.dumps(template))
    assert [leaf.item() for leaf in leaves] == [0, 1, 2, 3]
    assert count_leaves(template) == 4
    back = unflatten(template, leaves)
    assert back == VALUE
    assert type(back["cache"][0]) is tuple
    assert fit(template, VALUE) == leaves


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": 1}, "ids must be a tensor, got int"),
        ({"cache": []}, "cache must be a list of 2, got 0"),
        ({"cache": [VALUE["cache"][0], 5]}, r"cache\[1\] must be a list of 2, got int"),
        ({"none": torch.tensor(1)}, "none must be None"),
        ({"more": torch.tensor(1)}, "must have .* got"),
    ],
)
def test_what_does_not_fit_says_where(change, message):
    template, _ = flatten(VALUE)
    with pytest.raises(StructureError, match=message):
        fit(template, VALUE | change)


@pytest.mark.parametrize("template", ["x", 1.5, True, {"a": 1}, [0, 0], {"tuple": 0}, {"a": "b"}])
def test_malformed_templates_are_refused(template):
    with pytest.raises(StructureError):
        count_leaves(template)


def test_other_containers_are_refused():
    for value in ({"a": {1, 2}}, {1: torch.tensor(1)}, {"tuple": torch.tensor(1)}):
        with pytest.raises(StructureError):
            flatten(value)
    deep: object = torch.tensor(1)
    for _ in range(30):
        deep = [deep]
    with pytest.raises(StructureError, match="deep"):
        flatten(deep)
