"""Pictures that agents send to the endpoint, as OpenAI's clients do."""

import base64
import io
import struct
import zlib

import numpy as np
import openai
import pytest
from agent_fakes import SAMPLING, Policy, serving
from PIL import Image

from reroll.models.load import load_tokenizer
from reroll.tokens.pictures import FIRST_ID
from reroll.tokens.renderer import Renderer
from reroll.types import SamplingParams
from reroll_zoo.agents import openai_protocol
from reroll_zoo.agents.conversation import Conversation, RequestRefused
from reroll_zoo.agents.openai_protocol import parse_chat_request
from reroll_zoo.vision.parts import MAX_PIXELS
from reroll_zoo.vision.store import MARK, PICTURES
from reroll_zoo.vision.tiny import make_tiny_vision


def encoded(seed, *, kind="PNG", size=16):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=np.uint8)).save(file, format=kind)
    return file.getvalue()


def url_of(data, *, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def shows(*urls, text="What?"):
    pictures = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": text}, *pictures]}


def png_of_size(width, height):
    """A header that claims a size, over next to nothing."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def parsed(*messages):
    return parse_chat_request({"messages": list(messages)}).messages


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif"])
def test_a_data_url_is_kept_under_the_hash_of_its_bytes(kind):
    data = encoded(1, kind=kind.upper())
    (message,) = parsed(shows(url_of(data, kind=kind), text=f"What{MARK}?"))
    assert message["content"] == f"What?{MARK}"
    (image,) = message["images"]
    assert PICTURES.find(PICTURES.read(image)) == data


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.org/cat.png", "nothing is fetched"),
        ("http://127.0.0.1:1/cat.png", "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("/etc/passwd", "nothing is fetched"),
        ("picture:0123456789abcdef0123", "nothing is fetched"),
        ("data:image/png,rawbytes", "no data URL in base64"),
        ("data:image/png;base64,%%%", "is broken"),
        (url_of(b"no picture at all"), "cannot be decoded"),
        (url_of(encoded(1, size=64)[:200]), "cannot be decoded"),
        (url_of(encoded(1, kind="TIFF")), "cannot be decoded"),
        (url_of(png_of_size(4096, MAX_PIXELS // 4096 + 1)), "pixels, and 16,777,216 are taken"),
        (url_of(png_of_size(2**31 - 1, 2**31 - 1)), "cannot be decoded"),
        (url_of(png_of_size(300, 300)), "cannot be decoded"),
    ],
)
def test_what_is_no_picture_or_too_large_or_elsewhere_is_refused_with_the_reason(url, reason):
    before = len(PICTURES._held)
    with pytest.raises(RequestRefused, match=reason) as refused:
        parsed(shows(url))
    assert (refused.value.status, refused.value.code) == (400, "invalid_request")
    assert len(PICTURES._held) == before, "nothing of it is kept"


def test_whatever_bytes_come_they_are_a_picture_or_refused():
    rng = np.random.default_rng(0)
    refused = 0
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        for _ in range(60):
            data = bytearray(encoded(1, kind=kind))
            for place in rng.integers(0, len(data), size=5):
                data[place] = rng.integers(256)
            try:
                parsed(shows(url_of(bytes(data))))
            except RequestRefused:
                refused += 1
    assert 50 < refused < 240


def test_too_many_pictures_are_refused_before_one_is_decoded(monkeypatch):
    monkeypatch.setattr(openai_protocol, "MAX_PICTURES", 3)
    good = url_of(encoded(1))
    assert len(parsed(shows(good, good), shows(good))) == 2
    with pytest.raises(RequestRefused, match="4 pictures are sent, and 3 are taken"):
        parsed(shows("no picture", good), shows(good, good))


def test_the_policys_own_messages_have_no_pictures():
    with pytest.raises(RequestRefused, match="assistant message must be text"):
        parsed({**shows(url_of(encoded(1))), "role": "assistant"})


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    folder = make_tiny_vision(tmp_path_factory.mktemp("models") / "seeing", image_size=16, hidden=16, vision_hidden=16)
    return Renderer(load_tokenizer(str(folder)))


async def test_an_agent_shows_pictures_and_two_pictures_are_two_conversations(renderer):
    policy = Policy("ok")
    talk = Conversation(policy, renderer, SAMPLING, id="3.1", max_turns=8)
    async with (
        serving() as endpoint,
        openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.open(talk), max_retries=0, timeout=60) as agent,
    ):

        async def ask(*messages):
            answer = await agent.chat.completions.create(model="any", messages=list(messages))
            return {"role": "assistant", "content": answer.choices[0].message.content}

        first, other = shows(url_of(encoded(1))), shows(url_of(encoded(2)))
        said = await ask(first)
        await ask(first, said, {"role": "user", "content": "more"})
        await ask(other, said, {"role": "user", "content": "more"})
    one, continued, apart = (turn.prompt_ids for turn in talk.turns)
    assert sum(token >= FIRST_ID for token in one) == 4
    written = (*one, *talk.turns[0].completion.token_ids)
    assert continued[: len(written)] == written, "what continues a conversation continues its tokens"
    assert apart[: len(one)] != one, "the same words about another picture do not"
    assert [request.prompt_ids for request in policy.requests] == [one, continued, apart]


async def test_a_model_that_reads_text_only_refuses_a_picture_and_the_run_goes_on(tiny_model):
    reads = Renderer(load_tokenizer(str(tiny_model)))
    talk = Conversation(Policy("ok"), reads, SamplingParams(max_tokens=8), id="1.1", max_turns=8)
    with pytest.raises(RequestRefused, match="are shown no pictures, since it reads text only") as refused:
        talk._prepare(parse_chat_request({"messages": [shows(url_of(encoded(1)))]}))
    assert refused.value.code == "invalid_messages"
    assert not talk.broken.done()
