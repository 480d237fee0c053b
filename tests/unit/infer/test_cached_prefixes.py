import pytest
import torch

from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.load import load_model, load_tokenizer
from reroll.types import Request, SamplingParams
from reroll_zoo.tiny_models import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), max_positions=128))


def read(engine, name, prompt):
    engine.submit(Request(id=name, prompt_ids=tuple(prompt), sampling=SamplingParams(max_tokens=2)))
    while engine.num_unfinished:
        engine.step()


def engine_with_room(folder, max_cached):
    model = load_model(folder, dtype=torch.float32, device="cpu")
    return EmbeddedEngine(model, load_tokenizer(folder), max_running=4, max_cached=max_cached)


def test_cached_prefixes_are_bounded_and_the_oldest_go_first(folder):
    engine = engine_with_room(folder, 2)
    prompts = [range(10 + i, 40 + i) for i in range(3)]
    for i, prompt in enumerate(prompts):
        read(engine, str(i), prompt)
    for i, num_reused in ((0, 0), (2, 30)):
        read(engine, f"again {i}", [*prompts[i], 5, 5])
        assert engine.counts.num_reused_tokens == num_reused


def test_without_room_nothing_is_cached(folder):
    engine = engine_with_room(folder, 0)
    read(engine, "a", range(10, 40))
    read(engine, "b", [*range(10, 40), 5, 5])
    assert engine.counts.num_reused_tokens == 0
