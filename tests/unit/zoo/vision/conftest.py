import pytest
from vision_fakes import picture

from reroll.models.load import load_tokenizer
from reroll.tokens.renderer import Renderer
from reroll_zoo.vision.parts import message
from reroll_zoo.vision.tiny import make_tiny_vision

FAMILIES = ("smolvlm", "idefics3", "qwen2_5_vl", "qwen3_vl", "gemma3")


@pytest.fixture(scope="session", params=FAMILIES)
def seeing(request, tmp_path_factory) -> str:
    """A tiny model of each family; Idefics3 cuts large pictures into tiles, Gemma 3 shows crops of long ones."""
    folder = tmp_path_factory.mktemp("seeing") / request.param
    return str(make_tiny_vision(folder, family=request.param, splits=request.param in ("idefics3", "gemma3"), seed=1))


@pytest.fixture(scope="session")
def prompts(seeing) -> list[tuple[int, ...]]:
    """Two siblings, a later turn of theirs with a third picture, one without any, one that differs in its second picture."""
    renderer = Renderer(load_tokenizer(seeing))
    first = renderer.start([message("user", "What? ", picture(0), " and ", picture(1, 40, 20), "!")])
    later = renderer.extend(first, renderer.start([message("user", "hm")]), [message("user", picture(2), "?")])
    words = renderer.start([message("user", "no picture")])
    other = renderer.start([message("user", "What? ", picture(0), " and ", picture(3, 40, 20), "!")])
    return [first, first, later, words, other]
