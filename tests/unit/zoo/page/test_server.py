"""The page's server: what it answers, to whom, and under which rules a browser shows it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reroll.errors import RerollError
from reroll.pipeline.controls import Hands
from reroll_zoo.page.run_data import RunData
from reroll_zoo.page.server import TOKEN_HEADER, PageServer, static_files
from reroll_zoo.vision.store import name_of

TOKEN = "a-token-of-a-run"


@pytest.fixture
def server(run: Path) -> Iterator[PageServer]:
    with PageServer(RunData(run), port=0, token=TOKEN) as server, server.in_background():
        yield server


def ask(
    server: PageServer, path: str, *, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)  # type: ignore[arg-type]
    connection.request(method, path, headers=headers or {})
    response = connection.getresponse()
    return response, response.read()


def test_the_page_and_all_that_it_loads_come_from_here(server: PageServer) -> None:
    response, page = ask(server, "/")
    assert (response.status, response.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"http" not in page
    assert {"index.html", "page.css", "app.js"} <= static_files().keys()
    for name, (content, _) in static_files().items():
        response, body = ask(server, f"/{name}")
        assert (response.status, body) == (200, content)
        assert b"innerHTML" not in content
        assert b"eval(" not in content


def test_every_question_has_an_answer(server: PageServer) -> None:
    for path in (
        "run",
        "events?since=0&marks=0",
        "metrics",
        "samples?search=p1&limit=5",
        "sample/0.1",
        "config",
        "config?against=two",
    ):
        response, body = ask(server, f"/api/{path}")
        assert response.status == 200, (path, body)
        assert response.headers["Content-Type"] == "application/json; charset=utf-8"
        assert isinstance(json.loads(body), dict)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/nothing", 404),
        ("/api/sample/77.0", 404),
        ("/api/metrics?run=..", 404),
        ("/api/events?since=x", 400),
        ("/api/events?since=-1", 400),
        ("/../config.yaml", 404),
        ("/%2e%2e/config.yaml", 404),
        ("/server.py", 404),
    ],
)
def test_what_is_not_there_or_makes_no_sense_is_refused_in_words(server: PageServer, path: str, status: int) -> None:
    response, body = ask(server, path)
    assert response.status == status
    assert json.loads(body)["error"]


def test_a_browser_may_run_nothing_but_the_pages_own_files_and_show_it_to_no_other_site(server: PageServer) -> None:
    for path in ("/", "/app.js", "/api/run", "/api/nothing"):
        response, _ = ask(server, path, headers={"Origin": "https://evil.example"})
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["Access-Control-Allow-Origin"] is None
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", ""])
def test_a_name_that_was_made_to_point_here_is_refused(server: PageServer, host: str) -> None:
    response, body = ask(server, "/api/run", headers={"Host": host})
    assert response.status == 403
    assert b"one" not in body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:7860", "127.0.0.1:1", "[::1]:7860", "10.0.0.7:7860"])
def test_numbers_and_own_names_are_served(server: PageServer, host: str) -> None:
    assert ask(server, "/api/run", headers={"Host": host})[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(server: PageServer, method: str) -> None:
    assert ask(server, "/api/run", method=method)[0].status in (403, 405, 501)


@pytest.fixture
def asked(server: PageServer) -> list[str]:
    """What the run beside the page was asked for."""
    deeds: list[str] = []
    server.hands = Hands({"pause": lambda: deeds.append("pause")}, is_paused=lambda: bool(deeds))
    return deeds


def test_whoever_holds_the_token_may_act(server: PageServer, asked: list[str]) -> None:
    key = {TOKEN_HEADER: TOKEN}
    own = key | {"Origin": server.url.rstrip("/")}
    assert json.loads(ask(server, "/api/hands", headers=key)[1]) == {"may": True, "is_paused": False}
    assert ask(server, "/api/hands/pause", method="POST", headers=own)[0].status == 200
    assert asked == ["pause"]
    assert json.loads(ask(server, "/api/hands", headers=key)[1]) == {"may": True, "is_paused": True}
    assert ask(server, "/api/hands/dance", method="POST", headers=key)[0].status == 404
    assert ask(server, "/api/hands/pause", headers=key)[0].status == 404  # Looking does nothing.
    assert asked == ["pause"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {TOKEN_HEADER: "guess"},
        {TOKEN_HEADER: "ü"},
        {TOKEN_HEADER: TOKEN, "Origin": "https://evil.example"},
        {TOKEN_HEADER: TOKEN, "Host": "evil.example"},
        {TOKEN_HEADER: TOKEN, "Origin": "null"},
    ],
)
def test_nobody_else_may_act(server: PageServer, asked: list[str], headers: dict[str, str]) -> None:
    response, body = ask(server, f"/api/hands/pause?token={TOKEN}", method="POST", headers=headers)
    assert (response.status, asked) == (403, [])
    assert TOKEN.encode() not in body
    for path in ("/", "/api/run", "/api/hands"):
        assert TOKEN.encode() not in ask(server, path)[1]


def test_a_page_of_a_folder_alone_has_no_hands(server: PageServer) -> None:
    assert ask(server, "/api/hands/stop", method="POST", headers={TOKEN_HEADER: ""})[0].status == 403
    assert json.loads(ask(server, "/api/hands")[1]) == {"may": False, "is_paused": False}


def test_a_hundred_open_tabs_are_answered(server: PageServer) -> None:
    with ThreadPoolExecutor(100) as tabs:
        answers = list(tabs.map(lambda _: ask(server, "/api/events?since=0")[0].status, range(300)))
    assert answers == [200] * 300


def test_a_fault_is_told_and_the_next_question_answered(run: Path, server: PageServer) -> None:
    (run / "config.yaml").write_text("pipeline: {rlvr: [")
    assert ask(server, "/api/run")[0].status == 200  # As if it were just being written.
    (run.parent / "two" / "config.yaml").write_text("pipeline: {rlvr: [")
    response, body = ask(server, "/api/config?against=two")
    assert response.status == 500
    assert "cannot read" in json.loads(body)["error"]


def test_a_taken_port_is_named_with_the_fix(run: Path, server: PageServer) -> None:
    with pytest.raises(RerollError, match="--port"):
        PageServer(RunData(run), port=server.server_port)


def test_a_picture_that_was_shown_is_served_as_what_it_is(run: Path, server: PageServer, seen: str) -> None:
    response, body = ask(server, f"/api/image/{seen}")
    assert (response.status, response.headers["Content-Type"]) == (200, "image/png")
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert body == (run / "pictures" / seen).read_bytes()
    _, told = ask(server, "/api/sample/3.0")
    [first, second] = json.loads(told)["episode"]["turns"]
    assert (first["shown"][0]["images"], second["shown"][0]["images"]) == ([seen], [""])


def test_no_other_file_is_served_as_a_picture(run: Path, server: PageServer, seen: str) -> None:
    folder = run / "pictures"
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    bad = {
        name_of(svg): svg,
        name_of(b"x" * 99): b"x" * 99,
        "0" * 20: (folder / seen).read_bytes(),
    }
    for name, data in bad.items():
        (folder / name).write_bytes(data)
    secret = b"\x89PNG\r\n\x1a\n and a secret"
    (run.parent / "secret").write_bytes(secret)
    (folder / name_of(secret)).symlink_to(run.parent / "secret")
    asked = [*bad, name_of(secret), "../config.yaml", "..%2fconfig.yaml", "%2e%2e/config.yaml", seen.upper(), seen[:-1], ""]
    for name in asked:
        response, body = ask(server, f"/api/image/{name}")
        assert (response.status, response.headers["Content-Type"]) == (404, "application/json; charset=utf-8"), name
        assert b"secret" not in body
        assert b"<svg" not in body
