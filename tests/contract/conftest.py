"""The engines under contract, each with a tiny model of every family."""

import itertools

import pytest
from engine_probe import ENGINES, FAMILIES, load, tiny_folder

from reroll.models.load import load_tokenizer


@pytest.fixture(scope="module", params=[*itertools.product(ENGINES, FAMILIES)], ids=lambda param: "-".join(param))
def setup(request, tmp_path_factory):
    kind, family = request.param
    folder = tiny_folder(tmp_path_factory.mktemp(family), family)
    return ENGINES[kind], folder, load_tokenizer(folder)


@pytest.fixture
def oracle(setup):
    return load(setup[1])


@pytest.fixture
def make(setup):
    kind, folder, tokenizer = setup
    return lambda max_running=8: kind(load(folder), tokenizer, max_running=max_running)
