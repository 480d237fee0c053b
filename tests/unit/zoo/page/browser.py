"""Chromium without a window, driven by its own debugging protocol."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
IS_NEEDED = os.environ.get("REROLL_NEEDS_BROWSER") == "1"
"""A machine without a browser then fails the tests that need one, instead of skipping them (`make test-browser`)."""
_PATIENCE_S = 60.0


class Tab:
    """One open page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self.complaints: list[str] = []
        """What the page threw or logged as an error."""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=_PATIENCE_S)
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        about = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(about["exceptionDetails"]))
        if message["method"] == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.complaints.append(f"{about['entry']['text']} {about['entry'].get('url')}")

    async def evaluate(self, script: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until this is true of the page."""
        for _ in range(int(_PATIENCE_S / 0.05)):
            if await self.evaluate(f"(() => {{ try {{ return Boolean({script}); }} catch {{ return false; }} }})()"):
                return
            await asyncio.sleep(0.05)
        shown = await self.evaluate("document.body.innerText")
        raise AssertionError(f"never came true: {script}\n{shown}\n{self.complaints}")

    async def text(self) -> str:
        return str(await self.evaluate("document.body.innerText"))


@asynccontextmanager
async def opened(url: str, scratch: Path, *, width: int = 1280, dark: bool = False) -> AsyncIterator[Tab]:
    """A browser that shows this page."""
    assert CHROMIUM is not None, "no Chromium is installed: scripts/setup_browser.sh installs one"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0"]
    command = [CHROMIUM, *options, f"--user-data-dir={scratch}", "about:blank"]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file = scratch / "DevToolsActivePort"
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert browser.poll() is None, "the browser did not start"
            await asyncio.sleep(0.05)
        port = port_file.read_text().split("\n")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as response:
                [page] = [target for target in await response.json() if target["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                await tab.call(
                    "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 500
                )
                scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
                await tab.call("Emulation.setEmulatedMedia", features=[scheme])
                await tab.call("Page.navigate", url=url)
                yield tab
    finally:
        browser.terminate()
        browser.wait()
