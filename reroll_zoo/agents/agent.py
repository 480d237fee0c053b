"""One episode played by an agent: a program of its own that reaches the policy only through the endpoint."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from reroll.config.agents import EndpointConfig
from reroll.config.imports import import_object
from reroll.errors import RerollError, RewardError, SampleError, short_error
from reroll.rollout.play import AgentEpisode, Generate
from reroll.runtime.subprocesses import kill_group
from reroll.types import Prompt, SamplingParams, Status, Trajectory
from reroll_zoo.agents.config import CommandAgentConfig, EndpointAgentConfig, FunctionAgentConfig
from reroll_zoo.agents.conversation import Conversation
from reroll_zoo.agents.endpoint import Endpoint
from reroll_zoo.agents.openai_protocol import reported_score

if TYPE_CHECKING:  # It loads transformers, which a simulated run does not need.
    from reroll.tokens.renderer import Renderer

_GRACE_S = 5.0
"""How long a cancelled agent gets to clean up before it is left behind."""
_STDERR_BYTES = 500
"""How much of what a program said last goes into its sample's reason."""
_TOLD = ("id", "messages", "domain", "answer", "extra")
"""The fields of a prompt that a program is given."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How an agent reaches the policy for one episode."""

    sample_id: str
    base_url: str
    api_key: str


Agent = Callable[[Prompt, Access], Awaitable[object]]
"""Plays one episode and returns its reward (a number, a Score, or `{"reward": …, "parts": …}`) or None. What it raises
fails the sample; cancelling it stops it."""


class AgentFailed(SampleError):
    """An agent that ended badly. The message is the sample's reason."""


async def play_agent(
    agent: Agent,
    endpoint: Endpoint,
    prompt: Prompt,
    generate: Generate,
    renderer: Renderer,
    sampling: SamplingParams,
    *,
    id: str,
    timeout_s: float,
    max_turns: int,
    max_total_tokens: int | None = None,
) -> Trajectory:
    """Let `agent` play to its end, and stop it whatever happens.

    What goes wrong with the agent becomes the sample's status; what goes wrong with the engine is raised. A reward that
    the agent reported is the trajectory's, and its parts are then never empty: one that came without parts is the part
    `agent`. Without a report both are zero and empty.
    """
    conversation = Conversation(generate, renderer, sampling, id=id, max_turns=max_turns, max_total_tokens=max_total_tokens)
    key = endpoint.open(conversation)
    work = asyncio.ensure_future(agent(prompt, Access(sample_id=id, base_url=endpoint.base_url, api_key=key)))
    try:
        ends: set[asyncio.Future[Any]] = {work, conversation.broken}
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        is_over = work.done()
    finally:
        await endpoint.revoke(key)
        await _stop(work, id)
    if conversation.broken.done():
        raise conversation.broken.result()
    failure = _failure(work, conversation) if is_over else f"the agent did not end within {timeout_s:g} s"
    status, reason = _status(conversation, failure, is_over=is_over)
    ended = Trajectory(id=id, turns=conversation.turns, status=status, reason=reason)
    score = conversation.score
    if score is None:
        return ended
    return ended.scored(score if score.parts else replace(score, parts={"agent": score.value}))


@asynccontextmanager
async def open_agents(
    nodes: Mapping[str, EndpointAgentConfig], endpoint: EndpointConfig
) -> AsyncIterator[dict[str, AgentEpisode]]:
    """How the agent of each domain plays an episode, while the endpoint is open that all of them share."""
    agents = {domain: node.make() for domain, node in nodes.items()}
    async with Endpoint(endpoint) as opened:
        yield {
            domain: partial(play_agent, agents[domain], opened, timeout_s=node.timeout_s, max_turns=node.max_turns)
            for domain, node in nodes.items()
        }


def function_agent(config: FunctionAgentConfig) -> Agent:
    """The user's function as an agent. Raises RerollError if there is none."""
    try:
        function = import_object(config.path)
    except (ImportError, AttributeError) as error:
        raise RerollError(f"the agent {config.path} cannot be imported: {error}") from error
    if not callable(function):
        raise RerollError(f"the agent {config.path} is no function: name a function, as module:function")
    return partial(_call_function, function, config.options)


def command_agent(config: CommandAgentConfig) -> Agent:
    """The user's program as an agent. Raises RerollError if there is none."""
    environment = {**os.environ, **config.env}
    if shutil.which(config.argv[0], path=environment.get("PATH")) is None:
        raise RerollError(f"the agent's program {config.argv[0]!r} is not installed here: install it or give its whole path")
    return partial(_run_command, config.argv, environment)


def _status(conversation: Conversation, failure: str, *, is_over: bool) -> tuple[Status, str]:
    if conversation.is_aborted:
        return Status.ABORTED, "the engine aborted the request"
    if not conversation.exchanges:
        return Status.FAILED, conversation.limit or failure or "the agent made no request: is it given the endpoint's address?"
    if is_over and conversation.limit:  # An agent may well fall over a request that is refused.
        return Status.TRUNCATED, conversation.limit
    if failure:
        return Status.FAILED, failure
    if conversation.exchanges[-1].is_cut:
        return Status.TRUNCATED, "the last completion reached its token limit (rollout.max_tokens)"
    return Status.COMPLETED, ""


def _failure(work: asyncio.Future[object], conversation: Conversation) -> str:
    """What went wrong in an agent that ended; empty if nothing did, and then its verdict is taken down."""
    if work.cancelled():
        return "the agent was cancelled from within"
    error = work.exception()
    if isinstance(error, AgentFailed):
        return str(error)
    if error is not None:
        return f"the agent raised {short_error(error)}"
    try:
        if (report := work.result()) is not None:
            conversation.score = reported_score(report)
    except RewardError as problem:
        return str(problem)
    except Exception as problem:  # A verdict of its own making, which nobody has looked at yet.
        return f"the agent's verdict cannot be read: {short_error(problem)}"
    return ""


async def _stop(work: asyncio.Future[object], sample_id: str) -> None:
    work.cancel()
    _, left = await asyncio.wait({work}, timeout=_GRACE_S)
    if left:
        _log.warning("sample %s: its agent does not stop and is left behind; its key is void", sample_id)
    elif not work.cancelled():
        work.exception()  # Seen here, or asyncio reports it as forgotten.


async def _call_function(function: Callable[..., Any], options: Mapping[str, Any], prompt: Prompt, access: Access) -> object:
    call = partial(function, prompt, base_url=access.base_url, api_key=access.api_key, **options)
    if not inspect.iscoroutinefunction(function):
        return await _in_thread(call, access.sample_id)
    try:
        return await call()
    except SystemExit as error:  # Else it would end the run.
        raise AgentFailed(f"the agent raised {short_error(error)}") from error


async def _in_thread(call: Callable[[], object], sample_id: str) -> object:
    """Run `call` in a thread of its own: a hung one takes no pool's place, and does not keep the process alive."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[object] = loop.create_future()

    def settle(set_result: Callable[[], None]) -> None:
        if not result.done():
            set_result()

    def work() -> None:
        try:
            outcome = partial(result.set_result, call())
        except BaseException as error:
            outcome = partial(result.set_exception, AgentFailed(f"the agent raised {short_error(error)}"))
        with suppress(RuntimeError):  # The run is over: nobody listens.
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name=f"agent {sample_id}", daemon=True).start()
    try:
        return await result
    except asyncio.CancelledError:
        _log.warning("sample %s: its agent's thread cannot be stopped and goes on until its next request fails", sample_id)
        raise


async def _run_command(argv: Sequence[str], environment: Mapping[str, str], prompt: Prompt, access: Access) -> None:
    """One process in a group of its own, which is killed as a whole when the process ended or is to end."""
    # Files, not pipes: a child that outlives the program and holds its pipe would be waited for.
    with tempfile.TemporaryFile() as task, tempfile.TemporaryFile() as stderr:
        task.write(json.dumps({name: getattr(prompt, name) for name in _TOLD}, default=str).encode())
        task.seek(0)
        said = prompt.messages[-1]["content"] if prompt.messages else ""
        process = await asyncio.create_subprocess_exec(
            *(word.replace("{prompt}", said) for word in argv),
            stdin=task,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
            env={**environment, "OPENAI_BASE_URL": access.base_url, "OPENAI_API_KEY": access.api_key},
        )
        try:
            code = await process.wait()
        finally:
            kill_group(process.pid)
            await process.wait()
        if code:
            how = f"exited with code {code}" if code > 0 else f"was killed by signal {-code}"
            raise AgentFailed(f"the agent's program {how}: {_tail(stderr) or 'it wrote nothing to stderr'}")


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _STDERR_BYTES))
    return file.read().decode(errors="replace").strip()
