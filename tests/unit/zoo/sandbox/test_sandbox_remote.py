"""The client of a remote sandbox, against a server that answers as SandboxFusion does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from reroll.errors import SandboxError
from reroll_zoo.sandbox import remote
from reroll_zoo.sandbox.base import Limits, Program
from reroll_zoo.sandbox.config import RemoteSandboxConfig
from reroll_zoo.sandbox.make import open_sandbox

FINISHED = {"status": "Finished", "execution_time": 0.25, "return_code": 0, "stdout": "42\n", "stderr": ""}


def answer(status: str, *, run: dict[str, Any] | None = None, compiled: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"status": status, "message": "", "compile_result": compiled, "run_result": run, "files": {}}


class Service:
    """A service that gives the answers it was told to, one after the other, the last one for ever."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any] | int | Callable[[], Awaitable[dict[str, Any]]]] = [answer("Success", run=FINISHED)]
        self.requests: list[dict[str, Any]] = []
        self.num_now = 0
        self.num_most = 0

    async def run_code(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        try:
            reply = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(reply, int):
                return web.Response(status=reply, text="overloaded")
            return web.json_response(reply if isinstance(reply, dict) else await reply())
        finally:
            self.num_now -= 1


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def url(service: Service, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(remote, "_FIRST_DELAY_S", 0.01)
    app = web.Application()
    app.router.add_post("/run_code", service.run_code)
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


def connect(url: str, **options: Any) -> remote.RemoteClient:
    sandbox = open_sandbox(RemoteSandboxConfig(kind="remote", url=url, **options), num_processes=1)
    assert isinstance(sandbox, remote.RemoteClient)
    return sandbox


async def test_a_program_travels_with_its_input_and_its_limits(url: str, service: Service) -> None:
    sandbox = connect(url)
    assert sandbox.level == "remote"
    ran = await sandbox.run(Program(source="print(42)", stdin="x", limits=Limits(wall_s=3, memory_mb=64)))
    await sandbox.close()
    assert (ran.status, ran.stdout, ran.exit_code, ran.wall_s) == ("ok", "42\n", 0, 0.25)
    (request,) = service.requests
    assert request["code"] == "print(42)"
    assert (request["language"], request["stdin"], request["run_timeout"], request["memory_limit_MB"]) == ("python", "x", 3, 64)


@pytest.mark.parametrize(
    ("reply", "status", "exit_code"),
    [
        (answer("Failed", run={**FINISHED, "return_code": 1, "stderr": "ValueError"}), "error", 1),
        (answer("Failed", run={"status": "TimeLimitExceeded", "execution_time": 10.0, "return_code": None}), "timeout", -9),
        (answer("Failed", compiled={**FINISHED, "return_code": 2, "stderr": "no main"}), "error", 2),
        (answer("Success", run={**FINISHED, "stdout": "x" * 300_000}), "output", 0),
    ],
)
async def test_what_a_program_does_comes_back_as_its_status(
    url: str, service: Service, reply: dict[str, Any], status: str, exit_code: int
) -> None:
    service.answers = [reply]
    sandbox = connect(url, retries=0)
    ran = await sandbox.run(Program(source="", language="cpp"))
    await sandbox.close()
    assert (ran.status, ran.exit_code) == (status, exit_code)
    assert len(ran.stdout) <= 256 * 1024


async def test_a_service_that_falters_is_asked_again(url: str, service: Service) -> None:
    service.answers = [503, answer("SandboxError"), answer("Success"), answer("Success", run=FINISHED)]
    sandbox = connect(url, retries=3)
    ran = await sandbox.run(Program(source="print(42)"))
    await sandbox.close()
    assert ran.ok
    assert len(service.requests) == 4


async def test_a_service_that_keeps_failing_is_an_error_that_names_it(url: str, service: Service) -> None:
    service.answers = [503]
    sandbox = connect(url, retries=2)
    with pytest.raises(SandboxError, match=r"127\.0\.0\.1.* failed 3 times, last: HTTP 503: overloaded"):
        await sandbox.run(Program(source=""))
    await sandbox.close()


async def test_no_answer_and_no_service_are_errors_too(url: str, service: Service) -> None:
    async def never() -> dict[str, Any]:
        await asyncio.sleep(30)
        return {}

    service.answers = [never]
    sandbox = connect(url, retries=0, timeout_s=0.1)
    with pytest.raises(SandboxError, match="no answer in time"):
        await sandbox.run(Program(source="", limits=Limits(wall_s=0.1)))
    await sandbox.close()
    nowhere = connect("http://127.0.0.1:9", retries=0)
    with pytest.raises(SandboxError, match="failed 1 times"):
        await nowhere.run(Program(source=""))
    await nowhere.close()


async def test_no_more_requests_are_in_flight_than_allowed(url: str, service: Service) -> None:
    async def soon() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return answer("Success", run=FINISHED)

    service.answers = [soon]
    sandbox = connect(url, max_in_flight=3)
    await asyncio.gather(*(sandbox.run(Program(source="")) for _ in range(9)))
    await sandbox.close()
    assert service.num_most == 3
