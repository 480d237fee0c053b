"""The engines under contract, each with a tiny model of every family."""

import contextlib

import pytest
from engine_probe import ENGINES, engines_and_families, load, tiny_folder

from reroll.models.load import load_tokenizer


@pytest.fixture(scope="session", params=engines_and_families())  # For all files: some engines take long to start.
def setup(request, tmp_path_factory):
    kind, family = request.param
    hidden = 64 if kind in ("embedded", "drafting") else 128  # vLLM's and sglang's attention takes heads of 32 and more.
    folder = tiny_folder(tmp_path_factory.mktemp(family), family, hidden=hidden)
    with stand_ins(kind):
        yield ENGINES[kind], folder, load_tokenizer(folder)


def stand_ins(kind):
    """For what this machine lacks and the engine needs."""
    if kind != "vllm-ahead":
        return contextlib.nullcontext()
    from vllm_probe import launching_ahead  # Imports vllm.

    return launching_ahead()


@pytest.fixture
def oracle(setup):
    return load(setup[1])


@pytest.fixture
def make(setup):
    open_engine, folder, _ = setup
    return lambda max_running=8: open_engine(folder, max_running=max_running)
