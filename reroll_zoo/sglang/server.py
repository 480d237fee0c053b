"""The process that holds sglang. It runs in sglang's own Python environment, in which reroll is not installed.

sglang's loop asks for new requests before each step. Here it asks for the engine's messages: so it takes a step when the
engine wants one, and other messages are handled between two steps. sglang schedules, keeps the KV cache, runs the model and
talks to the other ranks of tensor parallelism; tokens are sampled as the embedded engine samples them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import traceback
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import GPU_MEMORY_TYPE_CUDA_GRAPH, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.layers.sampler import Sampler
from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
from sglang.srt.managers.io_struct import (
    AbortReq,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs, set_global_server_args_for_scheduler
from sglang.utils import TypeBasedDispatcher
from torch import Tensor

from reroll.weights.buckets import IpcHandle, Mapped, unpack
from reroll_zoo.sglang.messages import (
    CloseServer,
    LoadWeights,
    Message,
    OpenServer,
    Ready,
    ResetCache,
    RunStep,
    ServerError,
    SetMaxRunning,
    Sleep,
    StartRequest,
    StepOutput,
    Wake,
)
from reroll_zoo.sglang.sampling import RequestTable

_SLACK_TOKENS = 8
"""sglang refuses prompts that are a few tokens shorter than what the model takes; the engine counts by itself."""

_PATIENCE_S = 7 * 24 * 3600
"""For which sglang may stand still: as long as a trainer may keep its devices."""


class SeededSampler(Sampler):
    """Draws as the embedded engine does. Log-probs are those of the whole distribution at the request's temperature."""

    def __init__(self) -> None:
        super().__init__()
        self._batches: deque[RequestTable] = deque(maxlen=3)
        """Of the batch that runs, the last one. A step in flight still reads those before it."""

    def set_batch(self, starts: Sequence[StartRequest], device: torch.device) -> None:
        """The requests of the next batch, in order."""
        if not self._batches or not self._batches[-1].is_of(starts):
            self._batches.append(RequestTable(starts, device=device))

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
    ) -> Tensor:
        tokens, logits_output.next_token_logprobs = self._batches[-1].sample(logits_output.next_token_logits, positions + 1)
        return tokens


class OutputBuffer:
    """Stands where sglang sends tokens to the process that makes text of them."""

    def __init__(self) -> None:
        self._written: list[tuple[str, int, float]] = []
        self._num_reused: dict[str, int] = {}
        self._finished: set[str] = set()

    @property
    def is_empty(self) -> bool:
        return not self._written and not self._finished

    def stream_output(self, reqs: Iterable[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        for req in reqs:
            if req is skip_req or (req.finished() and req.finished_output):
                continue  # A prompt read in part; or one more token for a request that has ended.
            if req.finished():
                req.finished_output = True
                self._finished.add(req.rid)
            logprobs = req.logprob.output_token_logprobs_val
            for index in range(req.send_token_offset, len(logprobs)):
                self._written.append((req.rid, req.output_ids[index], logprobs[index]))
            if req.send_token_offset == 0 and logprobs:
                self._num_reused[req.rid] = req.cached_tokens
            req.send_token_offset = len(logprobs)

    def taken(self) -> StepOutput:
        external_ids, tokens, logprobs = zip(*self._written, strict=True) if self._written else ((), (), ())
        answer = StepOutput(external_ids, tokens, logprobs, self._num_reused, frozenset(self._finished))
        self._written, self._num_reused, self._finished = [], {}, set()
        return answer


class MessageQueue:
    """The engine's messages, each answered before the next. Only rank 0 has them: sglang passes them on to the other ranks."""

    def __init__(self, connection: Connection, output: OutputBuffer) -> None:
        self._connection, self._output = connection, output
        self._last: Message | None = None

    def next(self, *, is_idle: bool) -> list[Message]:
        """What came, once what was asked for last is done. A step is done when it has written something."""
        if isinstance(self._last, RunStep) and self._output.is_empty and not is_idle:
            return []
        try:
            if self._last is not None:
                self._connection.send(self._output.taken())
            self._last = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):  # The engine is gone.
            self._last = CloseServer()
        return [self._last]


class Receiver(SchedulerRequestReceiver):
    """Takes the engine's messages where sglang would take from its own processes."""

    def _pull_raw_reqs(self) -> list[Message] | None:
        return None if self.recv_from_tokenizer is None else self.recv_from_tokenizer()


class SteppedScheduler(Scheduler):
    """sglang's scheduler, which takes a step per message."""

    def __init__(self, *arguments: Any, connection: Connection | None) -> None:
        self._output = OutputBuffer()
        self._max_running = sys.maxsize
        self._messages = MessageQueue(connection, self._output) if connection is not None else None
        super().__init__(*arguments)

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        nobody = SenderWrapper(None)
        self.load_snapshot_writer = None
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=None if self._messages is None else partial(self._next_messages, self._messages),
            recv_from_rpc=None,
            send_to_tokenizer=nobody,
            send_to_detokenizer=nobody,
            send_metrics_from_scheduler=None,
        )

    def _next_messages(self, messages: MessageQueue) -> list[Message]:
        return messages.next(is_idle=self.is_fully_idle())

    def init_model_worker(self) -> None:
        super().init_model_worker()
        self.tp_worker.model_runner.sampler = SeededSampler()

    def init_request_receiver(self) -> None:
        super().init_request_receiver()
        self.request_receiver: SchedulerRequestReceiver = Receiver(
            **{field.name: getattr(self.request_receiver, field.name) for field in fields(self.request_receiver)}
        )

    def init_output_streamer(self) -> None:
        self.output_streamer = self._output

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher(
            [
                (RunStep, self._step),
                (ResetCache, lambda _: self._forget()),
                (LoadWeights, self._fill),
                (SetMaxRunning, self._limit),
                (Sleep, lambda _: self._sleep()),
                (Wake, self._wake),
                (CloseServer, lambda _: self._close()),
            ]
        )

    def process_input_requests(self, recv_reqs: list[Message]) -> None:
        for message in recv_reqs:
            self._engine_paused = not isinstance(message, RunStep)
        super().process_input_requests(recv_reqs)

    def get_num_allocatable_reqs(self, running_bs: int) -> int:
        return min(int(super().get_num_allocatable_reqs(running_bs)), self._max_running - running_bs)

    def run_batch(self, batch: ScheduleBatch, *arguments: Any) -> Any:
        starts = [req.sampling_params.custom_params["start"] for req in batch.reqs]
        self.tp_worker.model_runner.sampler.set_batch(starts, torch.device(batch.device))
        return super().run_batch(batch, *arguments)

    def ready(self) -> Ready:
        model = self.tp_worker.model_runner.model
        room = self.max_total_num_tokens - 2 * self.page_size
        return Ready(
            max_length=min(self.model_config.context_len - _SLACK_TOKENS, room),
            block_tokens=self.page_size,
            takes_parts=self.model_config.quantization is None and not hasattr(model, "post_load_weights"),
        )

    def _step(self, step: RunStep) -> None:
        for external_id in step.ends:
            self.abort_request(AbortReq(rid=external_id))
        for start in step.starts:
            self.handle_generate_request(_request(start))

    def _forget(self) -> None:
        self.pause_generation(PauseGenerationReqInput(mode="retract"))
        self.waiting_queue.clear()
        if not self.flush_cache():
            raise RuntimeError("sglang could not empty its cache")

    def _fill(self, fill: LoadWeights) -> None:
        self._synchronize()  # A step may be in flight, under the weights that are there.
        with torch.no_grad():
            self.tp_worker.model_runner.model.load_weights(list(unpack(self._opened(fill), fill.entries).items()))
        self._synchronize()  # They are lent for as long as this takes.

    def _synchronize(self) -> None:
        if self.device != "cpu":
            torch.get_device_module(self.device).synchronize()

    def _opened(self, fill: LoadWeights) -> Tensor:
        match fill.payload:
            case Mapped(path):
                return torch.from_file(path, shared=True, size=fill.num_bytes, dtype=torch.uint8)
            case IpcHandle(rebuild, arguments):
                tensor: Tensor = rebuild(*arguments)
                return tensor
            case _:
                raise TypeError(f"weights came as {type(fill.payload).__name__}")

    def _limit(self, limit: SetMaxRunning) -> None:
        self._max_running = limit.max_running

    def _sleep(self) -> None:
        self.weight_updater.release_memory_occupation(ReleaseMemoryOccupationReqInput())

    def _wake(self, wake: Wake) -> None:
        tags = [GPU_MEMORY_TYPE_WEIGHTS] if wake.weights else []
        tags += [GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_CUDA_GRAPH] if wake.cache else []
        self.weight_updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))

    def _close(self) -> None:
        self.gracefully_exit = True


def _request(start: StartRequest) -> TokenizedGenerateReqInput:
    params = SamplingParams(
        max_new_tokens=start.max_tokens,
        ignore_eos=True,  # What ends a completion is decided by the engine, as for all others.
        custom_params={"start": start},
    )
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=start.external_id,
        input_text=None,
        input_ids=array("q", start.context),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=True,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=True,
    )


def _server_args(server_options: OpenServer) -> ServerArgs:
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    settings = dict(server_options.server) | {
        "skip_tokenizer_init": True,
        "watchdog_timeout": _PATIENCE_S,
        "dist_timeout": _PATIENCE_S,
    }
    where = torch.device(server_options.device)
    if where.type == "cuda":
        free, total = torch.cuda.mem_get_info(where)
        settings |= {"base_gpu_id": where.index or 0, "mem_fraction_static": server_options.memory_share * total / free}
        if settings["mem_fraction_static"] > 1:
            raise RuntimeError(
                f"{server_options.device} has {free / 2**30:.0f} of {total / 2**30:.0f} GiB free, which is less than its share "
                f"{server_options.memory_share}: lower engine.gpu_memory_utilization"
            )
    arguments = ServerArgs(**settings)
    longest = server_options.max_length or ModelConfig.from_server_args(arguments).context_len
    return ServerArgs(**settings | {"context_length": longest + _SLACK_TOKENS})


def _run(arguments: ServerArgs, ports: PortArgs, rank: int, connection: Connection | None) -> None:
    """One rank, until the engine closes it."""
    gpu = arguments.base_gpu_id + rank
    if rank:
        configure_scheduler_process(arguments, gpu, rank, 0, 0, 0, 0, None)
    if arguments.dtype == "float32":
        MultiPlatformOp.dispatch_forward = lambda self: self.forward_native  # sglang's kernels are for 16 bits.
    set_global_server_args_for_scheduler(arguments)
    host = SteppedScheduler(arguments, ports, gpu, rank, 0, 0, 0, 0, None, connection=connection)
    gc.freeze()  # What stays need not be looked through again and again.
    if connection is not None:
        connection.send(host.ready())
    host.run_event_loop()


def main(descriptor: int) -> None:
    """Answer the messages that come through the socket with this file descriptor."""
    connection = Connection(descriptor)
    ranks: list[Any] = []
    try:
        server_options: OpenServer = connection.recv()
        arguments = _server_args(server_options)
        ports = PortArgs.init_new(arguments)
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=_run, args=(arguments, ports, rank, None), daemon=True)
            for rank in range(1, arguments.tp_size)
        ]
        for process in ranks:
            process.start()
        _run(arguments, ports, 0, connection)
    except BaseException:
        connection.send(ServerError(traceback.format_exc()))
        sys.exit(1)
    finally:
        for process in ranks:
            process.kill()
