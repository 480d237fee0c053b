"""Programs in a service elsewhere, over the HTTP interface of SandboxFusion."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from reroll.errors import SandboxError
from reroll_zoo.sandbox.base import Program, Ran, Status
from reroll_zoo.sandbox.config import RemoteSandboxConfig

_COMPILE_TIMEOUT_S = 40.0
_FIRST_DELAY_S = 0.5
_STDERR_CHARS = 16 * 1024


class RemoteClient:
    """Sends every program as one request. The service is told wall time and memory; its own settings hold the other limits."""

    level = "remote"

    def __init__(self, config: RemoteSandboxConfig) -> None:
        self._config = config
        self._places = asyncio.Semaphore(config.max_in_flight)
        self._session: aiohttp.ClientSession | None = None

    async def run(self, program: Program) -> Ran:
        async with self._places:
            problem = ""
            for attempt in range(self._config.retries + 1):
                if attempt:
                    await asyncio.sleep(_FIRST_DELAY_S * 2 ** (attempt - 1))
                try:
                    return _as_ran(await self._post(program), program)
                except (aiohttp.ClientError, TimeoutError, SandboxError) as error:
                    problem = str(error) or "no answer in time"
            raise SandboxError(f"the sandbox at {self._config.url} failed {self._config.retries + 1} times, last: {problem}")

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    async def _post(self, program: Program) -> dict[str, Any]:
        """The service's answer. Raises SandboxError where the service itself failed."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        limits = program.limits
        body = {
            "language": program.language,
            "code": program.source,
            "stdin": program.stdin,
            "compile_timeout": _COMPILE_TIMEOUT_S,
            "run_timeout": limits.wall_s,
            "memory_limit_MB": limits.memory_mb,
        }
        total_s = self._config.timeout_s + limits.wall_s + (_COMPILE_TIMEOUT_S if program.language == "cpp" else 0)
        url = f"{self._config.url.rstrip('/')}/run_code"
        async with self._session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=total_s)) as response:
            if response.status != 200:
                raise SandboxError(f"HTTP {response.status}: {(await response.text())[:200]}")
            try:
                answer = await response.json(content_type=None)
            except ValueError:
                raise SandboxError("the answer is not JSON") from None
        if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
            raise SandboxError(f"the service could not run it: {str(answer)[:200]}")
        return answer


def _as_ran(answer: dict[str, Any], program: Program) -> Ran:
    """The run's part of an answer, or the compiler's where there was no run."""
    part = answer.get("run_result") or answer.get("compile_result")
    if not isinstance(part, dict):
        raise SandboxError(f"the answer has no result: {str(answer)[:200]}")
    code = part.get("return_code")
    stdout, stderr = str(part.get("stdout") or ""), str(part.get("stderr") or "")
    status: Status = "ok" if answer["status"] == "Success" else "error"
    if part.get("status") == "TimeLimitExceeded":
        status = "timeout"
    max_bytes = program.limits.output_kb * 1024
    if len(stdout.encode()) > max_bytes:
        status, stdout = "output", stdout.encode()[:max_bytes].decode(errors="replace")
    return Ran(
        status=status,
        stdout=stdout,
        stderr=stderr[-_STDERR_CHARS:],
        exit_code=int(code) if isinstance(code, int) else (0 if status == "ok" else -9),
        wall_s=float(part.get("execution_time") or 0.0),
    )
