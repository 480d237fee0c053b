import re
from base64 import b64encode
from html.parser import HTMLParser
from io import BytesIO

import pytest
from episode_fakes import play
from PIL import Image

from reroll.errors import RunFolderError
from reroll.types import Message, Status
from reroll_zoo.show.page import Board, render_page, split_boards, write_page
from reroll_zoo.vision.store import PICTURES

ATTACK = """"'><script>alert(1)</script><img src=x onerror=alert(1)>&lt;</pre></style>"""


class Page(HTMLParser):
    """What a browser would make of a page: its tags, and the texts of each class."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append([tag, dict(attrs), ""])
        if tag not in ("meta",):
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        for element in self._open:
            element[2] += data

    def of(self, name):
        return [element for element in self.elements if name in (element[0], *element[1].get("class", "").split())]

    def texts(self, name):
        return [text for _, _, text in self.of(name)]


def page_of(episode, run="lake"):
    return Page(render_page(episode, run=run))


def test_nothing_that_a_model_or_an_environment_writes_is_markup():
    hostile = play(
        {
            "said": [ATTACK, "Up"],
            "shown": (Message(role=ATTACK, content=f"{ATTACK}\n< &\n> '", tools=[{"function": {"name": ATTACK}}]),),
            "info": {ATTACK: 1.0},
            "state": f"{ATTACK}!",
        },
        id=ATTACK,
        reason=ATTACK,
        reward_parts={ATTACK: 1.0},
    )
    page = page_of(hostile, run=ATTACK)
    tame = page_of(play({"said": ["x", "Up"], "shown": "x\nP G\n_ O", "state": "y"}))
    assert {tag for tag, _, _ in page.elements} == {tag for tag, _, _ in tame.elements}
    assert {name for _, attrs, _ in page.elements for name in attrs} == {
        name for _, attrs, _ in tame.elements for name in attrs
    }
    assert page.texts("words") == [ATTACK + "Up"]
    assert page.of("t")[-2][1]["data-tip"].startswith('"\\"')


def test_a_page_needs_nothing_from_elsewhere_and_runs_no_script():
    text = render_page(play({"said": ["Up"], "shown": "P G\n_ O"}), run="lake")
    assert not re.search(r"https?:|src=|url\(|@import|<script|<link", text)
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'\"" in text
    assert "prefers-color-scheme: dark" in text


def test_a_board_is_drawn_cell_by_cell():
    page = page_of(play({"said": ["Up"], "shown": "Reach G.\n# # #\n# P G\nGo."}))
    [board] = page.of("board")
    assert (board[1]["style"], board[1]["aria-label"], board[2]) == ("--columns:3", "# # #; # P G", "####PG")
    assert [attrs.get("class") for tag, attrs, _ in page.elements if tag == "i"] == ["wall"] * 4 + [None] * 2
    assert page.texts("pre")[:2] == ["Reach G.", "Go."]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("P _\n_ G", [Board((("P", "_"), ("_", "G")))]),
        ("###\n#P#\n###", [Board((tuple("###"), tuple("#P#"), tuple("###")))]),
        ("see:\n1 2 \n3 4\n\nbye", ["see:", Board((("1", "2"), ("3", "4"))), "\nbye"]),
        ("A _\n_ B\n1 2 3\n4 5 6", [Board((("A", "_"), ("_", "B"))), Board((tuple("123"), tuple("456")))]),
        ("yes\nnot\nbut", ["yes\nnot\nbut"]),
        ("P _ G", ["P _ G"]),
        ("a b\nwords here", ["a b\nwords here"]),
        ("##\n##", ["##\n##"]),
        ("", [""]),
    ],
)
def test_boards_are_told_from_words(text, parts):
    assert split_boards(text) == parts


def test_tokens_are_shaded_and_say_what_they_are():
    page = page_of(play({"said": ["go", "\n", "Up"], "logp": [0.0, -1.0, -9.0], "versions": ((3, 2), (4, 1))}))
    tokens = [(attrs["class"], attrs["data-tip"], text) for _, attrs, text in page.of("t") if "data-tip" in attrs]
    assert tokens == [
        ("t s0", '"go"  log-prob 0  weights v3', "go"),
        ("t s2", '"\\n"  log-prob -1  weights v3', "↵\n"),
        ("t s4", '"Up"  log-prob -9  weights v4', "Up"),
    ]


def test_bars_start_at_zero_and_share_a_scale():
    page = page_of(play({"said": ["a"], "reward": -1.0}, {"said": ["b"], "reward": 3.0}, {"said": ["c"]}))
    bars = [(attrs["class"], attrs["style"]) for _, attrs, _ in page.of("bar")]
    assert bars == [
        ("bar minus", "left:0.0%;width:25.0%"),
        ("bar plus", "left:25.0%;width:75.0%"),
        ("bar plus", "left:25.0%;width:0.0%"),
    ]
    assert [text for _, _, text in page.of("said")] == ["a", "b", "c"]


def test_a_state_is_told_only_where_it_was_not_shown():
    shown, hidden = {"said": ["a"], "shown": "P", "state": "P"}, {"said": ["a"], "shown": "P", "state": "cell 3"}
    assert page_of(play(shown)).of("details") == []
    assert page_of(play(hidden)).texts("details") == ["statecell 3"]


def test_a_sample_that_was_not_played_has_a_page_too():
    assert "no turn was played" in page_of(play(status=Status.FAILED)).texts("main")[0]


def test_a_page_is_written_into_the_run_unless_told_otherwise(tmp_path):
    episode = play({"said": ["Up"]}, id="../12/0")
    assert write_page(episode, tmp_path) == tmp_path / "episode-..-12-0.html"
    assert write_page(episode, tmp_path, file=tmp_path / "x.html").read_text().startswith("<!doctype html>")
    with pytest.raises(RunFolderError, match=r"cannot write .*nowhere/x\.html: .*--html"):
        write_page(episode, tmp_path, file=tmp_path / "nowhere" / "x.html")


def test_pictures_of_the_run_are_in_the_page_and_others_are_named(tmp_path):
    file = BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG")
    drawing = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    urls = [f"data:{kind};base64,{b64encode(data).decode()}" for kind, data in (("png", file.getvalue()), ("svg", drawing))]
    kept = [PICTURES.write(url, tmp_path / "pictures") for url in urls]
    shown = (Message(role="user", content="see \ufffc, \ufffc and \ufffc.", images=[*kept, "/somewhere/else.png"]),)
    page = write_page(play({"said": ["Up"], "shown": shown}), tmp_path).read_text()
    assert re.findall(r'src="([^"]*)', page) == [urls[0].replace("data:png", "data:image/png")]
    assert page.count("a picture that is not kept with the run") == 2  # Nor is one shown that is no raster image.
    assert "img-src data:" in page
