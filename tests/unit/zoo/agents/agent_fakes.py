"""Around an agent: a policy that says what a test wants, an endpoint to reach it by, and a watch for what is left behind."""

import asyncio
import contextlib
import os

from reroll.config.agents import EndpointConfig
from reroll.tokens.renderer import Renderer
from reroll.types import Completion, FinishReason, Prompt, SamplingParams
from reroll_zoo.agents.conversation import Conversation
from reroll_zoo.agents.endpoint import Endpoint
from reroll_zoo.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer(words=("ok",))
RENDERER = Renderer(TOKENIZER)
SAMPLING = SamplingParams(max_tokens=64, temperature=0.7, top_p=0.9, stop=("STOP",), seed=5)
PROMPT = Prompt(id="p/0", messages=({"role": "user", "content": "say it"},), domain="d", answer="7", extra={"level": 2})


def say(role, content):
    return {"role": role, "content": content}


def spelled(text):
    """Ids of single characters, though `ok` is a token of its own: ids that no tokenizer would give for these words."""
    return tuple(TOKENIZER.convert_tokens_to_ids(TOKENIZER.tokenize(character))[0] for character in text)


class Policy:
    """Says its words in order, the last ones again and again, spelled out. With `gate`, only once that is set."""

    def __init__(self, *words, finish=FinishReason.STOP, gate=None, error=None):
        self.words = list(words or ("ok",))
        self.finish = finish
        self.gate = gate
        self.error = error
        self.requests = []
        self.cancelled = []

    async def __call__(self, request):
        self.requests.append(request)
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled.append(request.id)
                raise
        if self.error is not None:
            raise self.error
        words = self.words.pop(0) if len(self.words) > 1 else self.words[0]
        ids = spelled(words)[: request.sampling.max_tokens]
        if self.finish is FinishReason.STOP:
            ids = (*ids, RENDERER.stop_token_ids[-1])
        logprobs = tuple(-0.5 - 0.25 * place for place in range(len(ids)))
        return Completion(token_ids=ids, logprobs=logprobs, finish_reason=self.finish, versions=((0, len(ids)),))


def conversation(policy, *, id="3.1", max_turns=8, sampling=SAMPLING, max_total_tokens=None):
    return Conversation(policy, RENDERER, sampling, id=id, max_turns=max_turns, max_total_tokens=max_total_tokens)


@contextlib.asynccontextmanager
async def serving(**config):
    """A running endpoint, which leaves neither tasks nor sockets behind."""
    tasks, sockets = asyncio.all_tasks(), open_sockets()
    async with Endpoint(EndpointConfig(**config), model_name="tiny") as endpoint:
        yield endpoint
    await until(lambda: not (asyncio.all_tasks() - tasks) and open_sockets() <= sockets)


def open_sockets():
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {link for link in links if link.startswith("socket:")}


async def until(condition, *, within_s=60.0):
    """Wait for something that must happen."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def pass_time(seconds):
    """Let the event loop believe that so much time has passed: whatever was to happen until then is due."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
