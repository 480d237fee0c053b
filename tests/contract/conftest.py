"""The engines under contract, each with a tiny model of every family."""

import pytest
from engine_probe import ENGINES, engines_and_families, load, tiny_folder

from reroll.models.load import load_tokenizer


@pytest.fixture(scope="module", params=engines_and_families())
def setup(request, tmp_path_factory):
    kind, family = request.param
    hidden = 128 if kind == "vllm" else 64  # vLLM's attention takes heads of 32 and more.
    folder = tiny_folder(tmp_path_factory.mktemp(family), family, hidden=hidden)
    return ENGINES[kind], folder, load_tokenizer(folder)


@pytest.fixture
def oracle(setup):
    return load(setup[1])


@pytest.fixture
def make(setup):
    open_engine, folder, _ = setup
    return lambda max_running=8: open_engine(folder, max_running=max_running)
