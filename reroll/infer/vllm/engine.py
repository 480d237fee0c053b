"""vLLM behind reroll's engine seam: stepped in this process, drawing as reroll draws."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from vllm import SamplingParams as VllmParams
from vllm import TokensPrompt
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor

from reroll.config.parts import LoraConfig
from reroll.config.parts import VllmEngine as VllmConfig
from reroll.infer.base import Engine, EngineCounts, Finished
from reroll.infer.draft import Draft, check_request, end_ids
from reroll.infer.embedded.sampler import Row
from reroll.infer.vllm.draw import Draw, instructions
from reroll.infer.vllm.steps import DrawingExecutor, Steps, Taken
from reroll.infer.whole import Weights
from reroll.models.load import DTYPES, Precision, load_model, load_tokenizer, resolve_base, resolve_model
from reroll.types import FinishReason, Request

_CPU_BLOCK_TOKENS = 32
"""The smallest blocks that vLLM's attention takes on a CPU: the smaller they are, the more of a context siblings share."""


class VllmEngine(Engine):
    """One vLLM engine on one device, or on several that share each layer.

    vLLM schedules, keeps the cache and runs the model. reroll draws the tokens (see `draw`), decides when a completion
    ends, and keeps what was written, so that requests outlive a sleep: they are handed in again with their tokens.

    On a GPU a step is launched before the tokens of the last are known (see `steps`). A request that ends or is aborted may
    have one more in flight, which is dropped. What is in flight when weights come or the engine sleeps is taken first.

    New weights also empty the cache: requests in flight are read again under them, where the embedded engine keeps their
    keys and values.
    """

    def __init__(
        self, llm: LLMEngine, tokenizer: PreTrainedTokenizerBase, weights: Weights, *, end_ids: frozenset[int]
    ) -> None:
        self._llm = llm
        self._tokenizer = tokenizer
        self._weights = weights
        self._end_ids = end_ids
        self._steps = Steps(llm)
        self._draws_here = llm.vllm_config.parallel_config.tensor_parallel_size == 1
        self._fills_in_place = weights.come_in_parts and _is_plain(llm)
        self._max_length: int = llm.model_config.max_model_len
        self._drafts: dict[str, Draft] = {}
        """By ticket."""
        self._tickets: dict[str, str] = {}
        """By request. vLLM knows a request by its ticket, which no other gets: what is in flight for one that ended must not
        go to a later one of its name."""
        self._serials = itertools.count()
        self._reports: list[Finished] = []
        self._version = 0
        self._asleep = False
        self._has_weights = True
        """Whether they are on the device: asleep they are not, until new ones come."""
        self.block_tokens = llm.vllm_config.cache_config.block_size
        self.counts = EngineCounts()

    @classmethod
    def open(
        cls, model: str, config: VllmConfig, *, precision: Precision, device: str, lora: LoraConfig | None = None
    ) -> VllmEngine:
        """Load `model` into a vLLM of its own, on `device` and, for tensor parallelism, those that follow it."""
        source = resolve_base(model)
        engine = cls(
            open_llm(source, config, precision=precision, device=device),
            load_tokenizer(model),
            Weights(model, lora=lora),
            end_ids=end_ids(source, load_tokenizer(model)),
        )
        if source != resolve_model(model):  # vLLM has read the base; what the adapter makes of it comes by push.
            policy = load_model(model, dtype=DTYPES[precision], device="cpu", lora=lora)
            engine.load_weights(dict(policy.named_parameters()), version=0)
        return engine

    def submit(self, request: Request) -> None:
        check_request(request, max_length=self._max_length)
        draft = Draft(request, self._end_ids | frozenset(request.sampling.stop_token_ids))
        ticket = f"{next(self._serials)}:{request.id}"
        self._tickets[request.id], self._drafts[ticket] = ticket, draft
        if not self._asleep:
            self._hand_in(ticket)

    def abort(self, request_id: str) -> None:
        ticket = self._tickets.get(request_id)
        if ticket is None:
            return
        if not self._asleep:
            self._llm.engine_core.abort_requests([ticket])
        self._end(ticket, FinishReason.ABORT)

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running, and ended ones not reported yet."""
        return len(self._drafts) + len(self._reports)

    def step(self) -> list[Finished]:
        if self._asleep:
            raise RuntimeError("the engine sleeps: wake it before stepping")
        if self._drafts:
            self._write(self._steps.take())
        reports, self._reports = self._reports, []
        return reports

    def load_part(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """In place where vLLM holds weights as they come; else they wait on the host."""
        if not self._fills_in_place:
            return super().load_part(weights)
        self._fill(self._weights.part(weights))
        return {}

    def load_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        self._fill(self._weights.whole(weights))
        self._forget()
        self.counts.num_prefill_tokens += sum(draft.length for draft in self._drafts.values() if draft.tokens)
        self._version = version

    def sleep(self) -> None:
        self._settle()
        self._llm.engine_core.abort_requests(list(self._drafts))
        self._forget()
        if self._can_sleep:
            self._llm.sleep(level=1)
            self._has_weights = False
        self._asleep = True

    def wake(self) -> None:
        if self._can_sleep:
            self._llm.wake_up(["kv_cache"] if self._has_weights else None)
            self._has_weights = True
        self._asleep = False
        for ticket in self._drafts:
            self._hand_in(ticket)

    def close(self) -> None:
        """Let vLLM's processes and memory go: this process may then open another engine."""
        close_llm(self._llm)
        del self._llm, self._steps

    @property
    def _can_sleep(self) -> bool:
        return bool(self._llm.model_config.enable_sleep_mode)

    def _fill(self, weights: Mapping[str, Tensor]) -> None:
        """Copy these into vLLM's own tensors, whose addresses its CUDA graphs know."""
        self._settle()
        if not self._has_weights:
            self._llm.wake_up(["weights"])
            self._has_weights = True
        if self._fills_in_place:
            self._llm.apply_model(lambda model: model.load_weights(weights.items()))
            return
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights.items())})
        if self._llm.vllm_config.device_config.device_type == "cpu":
            self._llm.apply_model(_repack_head)

    def _forget(self) -> None:
        """Empty the cache. Requests that run are queued again by vLLM, and read anew."""
        self._llm.reset_prefix_cache(reset_running_requests=True)

    def _hand_in(self, ticket: str) -> None:
        draft = self._drafts[ticket]
        sampling = draft.request.sampling
        row = Row(
            seed=sampling.seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            forbidden=tuple(sorted(draft.end_ids)),
        )
        params = VllmParams(
            temperature=0.0,  # The processor draws.
            max_tokens=min(sampling.max_tokens - len(draft.tokens), self._max_length - draft.length),
            ignore_eos=True,  # What ends a completion is decided here, once for all engines.
            logprobs=None if self._draws_here else 0,
            detokenize=False,
            extra_args=instructions(ticket, row, num_held_back=sampling.min_tokens - len(draft.tokens)),
            skip_clone=True,
        )
        # Past vLLM's front end, which makes an object of every token: what is made of them is a Draft.
        request = self._llm.input_processor.process_inputs(
            ticket,
            TokensPrompt(prompt_token_ids=list(draft.context)),
            params,
            supported_tasks=self._llm.get_supported_tasks(),
        )
        self._llm.engine_core.add_request(request)

    def _settle(self) -> None:
        """Take what is in flight: it was drawn under the weights that are there now."""
        for taken in self._steps.drain():
            self._write(taken)

    def _write(self, taken: Taken) -> None:
        ended = []
        for output in taken.outputs:
            ticket, [token] = output.request_id, output.new_token_ids
            draft = self._drafts[ticket]
            if not draft.tokens:
                self._count_context(draft, num_reused=output.prefill_stats.num_cached_tokens)
            draft.append(token, taken.logprobs[ticket], self._version)
            if (reason := draft.finish_reason(self._tokenizer, max_length=self._max_length)) is not None:
                self._end(ticket, reason)
                ended += [] if output.finished else [ticket]
        self._llm.engine_core.abort_requests(ended)
        self.counts.add_step(num_running=len(taken.outputs))

    def _end(self, ticket: str, reason: FinishReason) -> None:
        draft = self._drafts.pop(ticket)
        del self._tickets[draft.request.id]
        self._reports.append(draft.finish(reason))

    def _count_context(self, draft: Draft, *, num_reused: int) -> None:
        self.counts.num_reused_tokens += num_reused
        self.counts.num_prefill_tokens += draft.length - num_reused


def open_llm(folder: str, config: VllmConfig, *, precision: Precision, device: str) -> LLMEngine:
    """vLLM's engine with its core in this process. With tensor parallelism, vLLM starts a process per device."""
    where = torch.device(device)
    is_cuda = where.type == "cuda"
    arguments = EngineArgs(
        model=folder,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[precision],
        tensor_parallel_size=config.tensor_parallel,
        # In a Ray actor vLLM would ask Ray for workers of its own; the GPUs are this actor's already.
        distributed_executor_backend="mp" if config.tensor_parallel > 1 else None,
        device_ids=[(where.index or 0) + rank for rank in range(config.tensor_parallel)] if is_cuda else None,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_running,
        enforce_eager=config.enforce_eager,
        enable_prefix_caching=True,
        block_size=None if is_cuda else _CPU_BLOCK_TOKENS,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=None if is_cuda else int(config.cpu_cache_gib * 2**30),
        enable_sleep_mode=is_cuda,
        logits_processors=[Draw],
        logprobs_mode="processed_logits",
        async_scheduling=is_cuda and config.tensor_parallel == 1,  # On a CPU there is no other device to keep busy.
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    _hush()
    settings = arguments.create_engine_config(UsageContext.LLM_CLASS)  # Prompts are read in large batches.
    _hush()  # Again: some versions have set up logging anew.
    # The core in this process: steps are calls, and weights of the same device are passed by reference.
    executor = DrawingExecutor if config.tensor_parallel == 1 else Executor.get_class(settings)
    return LLMEngine(settings, executor, log_stats=False, multiprocess_mode=False)


def close_llm(llm: LLMEngine) -> None:
    """End vLLM's processes and free what it holds in this one."""
    for _ in Steps(llm).drain():  # It reads what is freed here.
        pass
    settings = llm.vllm_config
    if settings.model_config.enable_sleep_mode and settings.parallel_config.tensor_parallel_size == 1:
        # The shutdown lets go of the allocator that sleep mode has: by then there must be nothing left for it to free.
        llm._finalizer()  # It holds the model.
        llm.collective_rpc(lambda worker: worker.model_runner.shutdown())
        gc.unfreeze()
        gc.collect()
    llm.engine_core.shutdown()


def _is_plain(llm: LLMEngine) -> bool:
    """Whether vLLM's own tensors hold the weights as a folder has them, but for matrices that it puts side by side.

    On a CPU it packs them anew, and so it does with quantised and with latent attention's.
    """
    settings = llm.vllm_config
    return (
        settings.device_config.device_type == "cuda"
        and settings.parallel_config.tensor_parallel_size == 1
        and settings.model_config.quantization is None
        and not settings.model_config.use_mla
    )


def _hush() -> None:
    """vLLM reports every step of its start, and every push of weights."""
    logging.getLogger("vllm").setLevel(logging.ERROR)


def _repack_head(model: nn.Module) -> None:
    """A head tied to the embeddings has a copy of its own on a CPU, in a faster layout, which a reload leaves as it was."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
