"""Data sets by their hub name, read by the real client from a small hub of the test's own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from reroll.data.sources import load_source
from reroll.errors import DataError
from reroll_zoo.tables.config import DatasetsSourceConfig

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "main/train.jsonl": b'{"question": "3 + 4?", "answer": "add\\n#### 7"}\n{"question": "5 + 6?", "answer": "so\\n#### 11"}\n',
    "main/test.jsonl": b'{"question": "8 + 9?", "answer": "it is\\n#### 17"}\n',
    "README.md": b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
---
""",
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as the client asks for one data set, `reroll/sums`; everything else is not found."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/datasets/reroll/sums/resolve/"):
            self._send_file(path.split("/", 6)[6])
        elif path in ("/api/datasets/reroll/sums", f"/api/datasets/reroll/sums/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in FILES]
            self._send({"id": "reroll/sums", "sha": COMMIT, "private": False, "siblings": siblings, "tags": []})
        elif path.startswith("/api/datasets/reroll/sums/tree/"):
            below = path.split("/", 7)[7] if path.count("/") > 6 else ""
            self._send([_entry(name) for name in FILES if name.startswith(below)])
        else:
            self._send({"error": "Repository not found"}, status=404, error="RepoNotFound")

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}").get("paths", [])
        self._send([_entry(name) for name in FILES if name in asked])

    def _send_file(self, name: str) -> None:
        if name not in FILES:
            self._send({}, status=404, error="EntryNotFound")
            return
        self._reply(FILES[name], status=200, headers={"ETag": f'"{_digest(name)}"', "X-Repo-Commit": COMMIT})

    def _send(self, value: object, *, status: int = 200, error: str = "") -> None:
        headers = {"Content-Type": "application/json", **({"X-Error-Code": error} if error else {})}
        self._reply(json.dumps(value).encode(), status=status, headers=headers)

    def _reply(self, body: bytes, *, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Not among the test's output."""


def _digest(name: str) -> str:
    return hashlib.sha1(FILES[name]).hexdigest()


def _entry(name: str) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(FILES[name]), "oid": _digest(name)}


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


CODE = """
import json, sys
from reroll_zoo.tables.config import DatasetsSourceConfig
from reroll.data.sources import load_source
from reroll.errors import DataError

for options in map(json.loads, sys.argv[1:]):
    try:
        prompts = load_source(DatasetsSourceConfig(kind="datasets", **options))
        print(json.dumps([[prompt.messages[0]["content"], prompt.answer] for prompt in prompts]))
    except DataError as error:
        print(json.dumps(str(error)))
"""


def test_a_data_set_of_the_hub_is_read_by_name_split_and_columns(hub: str, tmp_path: Path) -> None:
    """By a process of its own, which may reach that hub: the client reads its settings on import."""
    gsm8k = {"path": "reroll/sums", "subset": "main", "prompt_key": "question", "answer_after": "####"}
    asked = [gsm8k | {"split": "train"}, gsm8k | {"split": "test"}, gsm8k, gsm8k | {"split": "dev"}, {"path": "reroll/nothing"}]
    settings = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", CODE, *map(json.dumps, asked)],
        env=os.environ | settings,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    train, test, no_split, wrong_split, wrong_name = map(json.loads, ran.stdout.splitlines())
    assert train == [["3 + 4?", "7"], ["5 + 6?", "11"]]
    assert test == [["8 + 9?", "17"]]
    assert "set `split` to one of: train, test" in no_split
    assert "check `subset`, `split`" in wrong_split
    assert "check the name" in wrong_name


def test_a_hub_that_is_not_reached_is_told_with_what_to_check() -> None:
    with pytest.raises(DataError, match=r"openai/gsm8k: .*HF_HUB_OFFLINE"):
        load_source(DatasetsSourceConfig(kind="datasets", path=Path("openai/gsm8k"), split="train"))


def test_a_folder_that_is_laid_out_as_on_the_hub_is_read(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    source = DatasetsSourceConfig(
        kind="datasets", path=tmp_path, subset="main", split="test", prompt_key="question", answer_after="####"
    )
    assert [(prompt.messages[0]["content"], prompt.answer) for prompt in load_source(source)] == [("8 + 9?", "17")]
    with pytest.raises(DataError, match="has no '%%%%'"):
        load_source(source.model_copy(update={"answer_after": "%%%%"}))
