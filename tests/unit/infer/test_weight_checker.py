"""Weights against the model that is to take them."""

import pytest
import torch
from torch import nn

from reroll.infer.embedded.model_runner import WeightChecker


@pytest.fixture
def model():
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "frozen": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 3)})
    model["b"].weight = model["a"].weight
    model["frozen"].requires_grad_(False)
    return model


def weights(model, *names):
    return {name: parameter for name, parameter in model.named_parameters(remove_duplicate=False) if name in names}


def test_what_is_trained_must_come_and_a_tied_weight_counts_once(model):
    given = weights(model, "a.weight", "b.weight", "a.bias", "b.bias")
    taken = WeightChecker(model).rest(given)
    assert taken.keys() == {"a.weight", "a.bias", "b.bias"}
    assert not any(tensor.requires_grad for tensor in taken.values())


def test_parts_count_until_they_are_whole(model):
    checker = WeightChecker(model)
    assert checker.part({}) == {}
    checker.part(weights(model, "a.weight", "a.bias"))
    assert checker.received == {"a.weight", "a.bias"}
    assert checker.rest(weights(model, "b.bias")).keys() == {"b.bias"}
    with pytest.raises(ValueError, match=r"missing \['a.bias', 'a.weight'\]"):
        checker.rest(weights(model, "b.bias"))


def test_unknown_and_misshapen_weights_are_refused(model):
    checker = WeightChecker(model)
    with pytest.raises(ValueError, match=r"unknown \['c'\]"):
        checker.part({"c": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"a.bias has shape \(4,\), the model needs \(3,\)"):
        checker.part({"a.bias": torch.zeros(4)})
    assert checker.received == frozenset()
