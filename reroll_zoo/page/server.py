"""Serves the page of one run: a few static files, and what `RunData` answers. Beside a run, a token lets it ask for more."""

from __future__ import annotations

import gzip
import ipaddress
import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from reroll.errors import RerollError
from reroll.observe.files import to_line
from reroll.pipeline.controls import Hands
from reroll_zoo.page.run_data import RunData, Unknown
from reroll_zoo.samples.pictures import RASTER_KINDS

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 7860
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Nothing that a model wrote can become a script, and no other site can read or frame the page."""
_MIN_GZIP_BYTES = 1 << 14
_POLL_S = 0.1
"""How often it is asked whether to close."""
TOKEN_HEADER = "X-Reroll-Token"
"""One that no form can send: another site's script would have to ask first, and is refused."""


class PageServer(ThreadingHTTPServer):
    """`with PageServer(data) as server: server.serve_forever()`. Port 0 takes a free one."""

    daemon_threads = True
    request_queue_size = 256
    """A hundred open tabs may ask at once."""

    def __init__(self, data: RunData, *, host: str = DEFAULT_HOST, port: int = DEFAULT_PORT, token: str = "") -> None:
        """Without a token nobody may act."""
        self.data = data
        self.token = token
        self.hands: Hands | None = None
        """What the page may ask of the run; None beside a folder alone."""
        self.names = {"localhost", host.lower(), socket.gethostname().lower()}
        """What this server may be called in a browser's address, beside numbers."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise RerollError(
                f"the page cannot listen on {host}:{port} ({error.strerror}): choose another --port, or 0"
            ) from None

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """While this is open, a thread answers."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": _POLL_S}, name="page", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            thread.join()

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        host, port = str(self.server_address[0]), self.server_address[1]
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.gethostname()
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def server_bind(self) -> None:
        """As the base class, but no name server is asked what this machine is called."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def is_called(self, host: str) -> bool:
        """Whether a request's Host is this server: else a name of somebody else's was made to point here."""
        name = urlsplit(f"//{host}").hostname or ""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower() in self.names
        return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hung up is no error; anything else was answered with one."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "reroll", ""
    timeout = 30

    def do_GET(self) -> None:
        """A file, or an answer."""
        if not self._is_welcome():
            return
        url = urlsplit(self.path)
        if url.path.startswith("/api/"):
            self._answer(
                unquote(url.path.removeprefix("/api/")), {key: values[-1] for key, values in parse_qs(url.query).items()}
            )
        elif (name := url.path.removeprefix("/") or "index.html") in static_files():
            content, kind = static_files()[name]
            self._send(HTTPStatus.OK, content, kind)
        else:
            self._send_json(HTTPStatus.NOT_FOUND, {"error": f"there is no {url.path}"})

    def do_POST(self) -> None:
        """Have the run do something. Whoever holds no token may only look."""
        if not self._is_welcome():
            return
        hands, deed = self.server.hands, urlsplit(self.path).path.removeprefix("/api/hands/")
        origin, host = self.headers.get("Origin"), self.headers.get("Host")
        if hands is None or not self._holds_token() or origin not in (None, f"http://{host}"):
            problem = "only the address that the run printed, with its token, may do that; without it the page is read-only"
            self._send_json(HTTPStatus.FORBIDDEN, {"error": problem})
        elif deed not in hands.deeds:
            self._send_json(HTTPStatus.NOT_FOUND, {"error": f"there is no {urlsplit(self.path).path}"})
        else:
            hands.deeds[deed]()
            self._send_json(HTTPStatus.OK, {"asked": deed})

    def _is_welcome(self) -> bool:
        is_called = self.server.is_called(self.headers.get("Host", ""))
        if not is_called:
            self._send_json(HTTPStatus.FORBIDDEN, {"error": "this server is not known by that name: use 127.0.0.1"})
        return is_called

    def _answer(self, path: str, query: Mapping[str, str]) -> None:
        try:
            if path.startswith("image/"):
                self._send(HTTPStatus.OK, *self.server.data.picture(path.removeprefix("image/")))
                return
            self._send_json(HTTPStatus.OK, self._hands() if path == "hands" else answer(self.server.data, path, query))
        except Unknown as error:
            self._send_json(HTTPStatus.NOT_FOUND, {"error": str(error)})
        except ValueError as error:
            self._send_json(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except ConnectionError:  # The browser hung up.
            raise
        except Exception as error:  # A fault of ours, or a folder that is damaged: the page says so and goes on.
            self._send_json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"})

    def _hands(self) -> dict[str, Any]:
        """Whether whoever asks may do more than look, and whether the run is paused."""
        hands = self.server.hands
        return {"may": hands is not None and self._holds_token(), "is_paused": hands is not None and hands.is_paused()}

    def _holds_token(self) -> bool:
        shown, wanted = self.headers.get(TOKEN_HEADER, ""), self.server.token
        return bool(wanted) and secrets.compare_digest(shown.encode(), wanted.encode())

    def _send_json(self, status: HTTPStatus, answer: Mapping[str, Any]) -> None:
        try:
            text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except ValueError:  # Rare: to look for what JSON cannot say takes longer than all the rest.
            text = to_line(answer)
        self._send(status, text.encode(errors="backslashreplace"), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        if len(content) > _MIN_GZIP_BYTES and kind not in RASTER_KINDS and "gzip" in self.headers.get("Accept-Encoding", ""):
            content = gzip.compress(content, compresslevel=1)
            self.send_header("Content-Encoding", "gzip")
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind if kind in RASTER_KINDS else f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is the run's."""


def answer(data: RunData, path: str, query: Mapping[str, str]) -> dict[str, Any]:
    """What the page is told. Raises Unknown where there is nothing of that name, ValueError where a number is none."""
    number = partial(_number, query)
    routes: dict[str, Callable[[], dict[str, Any]]] = {
        "run": data.run,
        "events": lambda: data.events(since=number("since"), marks=number("marks"), activity=number("activity")),
        "metrics": lambda: data.metrics(run=query.get("run", ""), since=number("since"), generation=number("generation")),
        "samples": lambda: data.samples(
            sort=query.get("sort", "newest"),
            domain=query.get("domain", ""),
            phase=query.get("phase", ""),
            step=number("step") if query.get("step") else None,
            search=query.get("search", ""),
            offset=number("offset"),
            limit=number("limit", 50),
        ),
        "config": lambda: data.config(against=query.get("against", "")),
    }
    if path.startswith("sample/"):
        return data.sample(path.removeprefix("sample/"))
    if path not in routes:
        raise Unknown(f"there is no /api/{path}")
    return routes[path]()


def _number(query: Mapping[str, str], name: str, default: int = 0) -> int:
    """A count that the page asks with."""
    value = int(query.get(name) or default)
    if value < 0:
        raise ValueError(f"{name} is {value}: it should be 0 or more")
    return value


@cache
def static_files() -> dict[str, tuple[bytes, str]]:
    """The page's own files by name, with their types. Nothing else is ever served."""
    folder = files("reroll_zoo.page").joinpath("static")
    return {
        file.name: (file.read_bytes(), _TYPES[f".{file.name.rpartition('.')[2]}"])
        for file in folder.iterdir()
        if f".{file.name.rpartition('.')[2]}" in _TYPES
    }
