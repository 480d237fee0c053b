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

from reroll_zoo.vllm.sampling import SamplingProcessor, StepLogprobs


@dataclass(frozen=True, slots=True)
class TakenStep:
    """What a step has written."""

    outputs: Sequence[EngineCoreOutput]
    """A token each. Those of requests that ended while the step was in flight are not among them."""
    logprobs: Mapping[str, float]
    """By the name under which vLLM knows the request."""


class SamplingExecutor(UniProcExecutor):
    """Runs the model in this process. A step's log-probs come to light with its tokens."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self.logprobs: StepLogprobs | None = None
        """The log-probs of the step whose tokens were taken last."""

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        tokens = super().sample_tokens(grammar_output, non_block=True)
        step = _StepFuture(self, tokens, self._processor.logprobs)
        return step if non_block else step.result()

    @property
    def _processor(self) -> SamplingProcessor:
        processors = self.driver_worker.worker.model_runner.input_batch.logitsprocs.all
        [processor] = [each for each in processors if isinstance(each, SamplingProcessor)]
        return processor


class _StepFuture(Future[Any]):
    """The tokens of a step, for which vLLM waits when it takes them."""

    def __init__(self, executor: SamplingExecutor, tokens: Future[Any], logprobs: StepLogprobs | None) -> None:
        super().__init__()
        self._executor, self._tokens, self._logprobs = executor, tokens, logprobs

    def result(self, timeout: float | None = None) -> Any:
        tokens = self._tokens.result(timeout)
        self._executor.logprobs = self._logprobs
        return tokens


class StepQueue:
    """The steps of one vLLM engine, in order: the next one is launched before the last one is taken."""

    def __init__(self, llm: LLMEngine) -> None:
        self._client = llm.engine_core
        core = self._client.engine_core
        self._scheduler, self._executor = core.scheduler, core.model_executor
        self._in_flight: Any = () if core.batch_queue is None else core.batch_queue
        """vLLM's own queue, the newest first. It has none where it does not launch ahead."""

    def take(self) -> TakenStep:
        """Take a step's tokens, with the next one launched."""
        outputs = self._client.get_output().outputs
        if not outputs and self._in_flight:  # It was the first, and has been launched only.
            outputs = self._client.get_output().outputs
        return self._taken(outputs)

    def drain(self) -> Iterator[TakenStep]:
        """Take what is in flight, and launch nothing."""
        while self._in_flight:
            tokens, scheduled, _ = self._in_flight.pop()
            outputs = self._scheduler.update_from_output(scheduled, tokens.result()).get(0)
            if outputs:
                yield self._taken(outputs.outputs)

    def _taken(self, outputs: Sequence[EngineCoreOutput]) -> TakenStep:
        if not outputs:
            return TakenStep(outputs, {})
        if isinstance(self._executor, SamplingExecutor):
            assert self._executor.logprobs is not None
            return TakenStep(outputs, self._executor.logprobs.by_name())
        return TakenStep(outputs, {output.request_id: float(output.new_logprobs.logprobs[0, 0]) for output in outputs})
