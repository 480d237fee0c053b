"""vLLM's steps: the next one is launched before the tokens of the last are taken, so that the device need not wait.

vLLM schedules a step without knowing the tokens of the one before, which never leave the device on their way into it. What
the host does for a step is then hidden behind the device's work on the next one. At most one step is in flight between two
calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from reroll.infer.vllm.draw import Draw, Drawn


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step has written."""

    outputs: Sequence[EngineCoreOutput]
    """A token each. Those of requests that ended while the step was in flight are not among them."""
    logprobs: Mapping[str, float]
    """By the name under which vLLM knows the request."""


class DrawingExecutor(UniProcExecutor):
    """Runs the model in this process. A step's log-probs come to light with its tokens."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self.drawn: Drawn | None = None
        """Of the step whose tokens were taken last."""

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        tokens = super().sample_tokens(grammar_output, non_block=True)
        step = _Step(self, tokens, self._draw.drawn)
        return step if non_block else step.result()

    @property
    def _draw(self) -> Draw:
        processors = self.driver_worker.worker.model_runner.input_batch.logitsprocs.all
        [draw] = [each for each in processors if isinstance(each, Draw)]
        return draw


class _Step(Future[Any]):
    """The tokens of a step, for which vLLM waits when it takes them."""

    def __init__(self, executor: DrawingExecutor, tokens: Future[Any], drawn: Drawn | None) -> None:
        super().__init__()
        self._executor, self._tokens, self._drawn = executor, tokens, drawn

    def result(self, timeout: float | None = None) -> Any:
        tokens = self._tokens.result(timeout)
        self._executor.drawn = self._drawn
        return tokens


class Steps:
    """Of one engine, in order."""

    def __init__(self, llm: LLMEngine) -> None:
        self._client = llm.engine_core
        core = self._client.engine_core
        self._scheduler, self._executor = core.scheduler, core.model_executor
        self._in_flight: Any = () if core.batch_queue is None else core.batch_queue
        """vLLM's own queue, the newest first. It has none where it does not launch ahead."""

    def take(self) -> Taken:
        """Take a step's tokens, with the next one launched."""
        outputs = self._client.get_output().outputs
        if not outputs and self._in_flight:  # It was the first, and has been launched only.
            outputs = self._client.get_output().outputs
        return self._taken(outputs)

    def drain(self) -> Iterator[Taken]:
        """Take what is in flight, and launch nothing."""
        while self._in_flight:
            tokens, scheduled, _ = self._in_flight.pop()
            outputs = self._scheduler.update_from_output(scheduled, tokens.result()).get(0)
            if outputs:
                yield self._taken(outputs.outputs)

    def _taken(self, outputs: Sequence[EngineCoreOutput]) -> Taken:
        if not outputs:
            return Taken(outputs, {})
        if isinstance(self._executor, DrawingExecutor):
            assert self._executor.drawn is not None
            return Taken(outputs, self._executor.drawn.logprobs())
        return Taken(outputs, {output.request_id: float(output.new_logprobs.logprobs[0, 0]) for output in outputs})
