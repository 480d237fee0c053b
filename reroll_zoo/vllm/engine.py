"""vLLM behind reroll's engine seam: stepped in this process, with reroll's sampling."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from vllm import SamplingParams as VllmParams
from vllm import TokensPrompt
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor

from reroll.config.parts import LoraConfig
from reroll.infer.sequence import sampling_until_min_tokens
from reroll.models.load import Precision, load_tokenizer, resolve_base
from reroll_zoo.external_engine.engine import ExternalEngine, end_ids_of
from reroll_zoo.external_engine.weights import HFWeightAssembler
from reroll_zoo.vllm.config import VllmEngineConfig
from reroll_zoo.vllm.internals import check_engine, checked_options
from reroll_zoo.vllm.sampling import SamplingProcessor, sampling_args
from reroll_zoo.vllm.steps import SamplingExecutor, StepQueue, TakenStep

_CPU_BLOCK_TOKENS = 32
"""The smallest blocks that vLLM's attention takes on a CPU: the smaller they are, the more of a context siblings share."""


class VllmEngine(ExternalEngine):
    """vLLM in this process. See `sampling` for how tokens are sampled, and `steps` for how a step is launched ahead."""

    def __init__(
        self, llm: LLMEngine, tokenizer: PreTrainedTokenizerBase, weights: HFWeightAssembler, *, end_ids: frozenset[int]
    ) -> None:
        self._llm, self._is_plain = llm, _is_plain(llm)
        super().__init__(
            tokenizer,
            weights,
            end_ids=end_ids,
            max_length=llm.model_config.max_model_len,
            block_tokens=llm.vllm_config.cache_config.block_size,
            takes_parts=self._is_plain,
            can_sleep=bool(llm.model_config.enable_sleep_mode),
        )
        self._steps = StepQueue(llm)
        self._draws_here = llm.vllm_config.parallel_config.tensor_parallel_size == 1

    @classmethod
    def open(
        cls, model: str, config: VllmEngineConfig, *, precision: Precision, device: str, lora: LoraConfig | None = None
    ) -> VllmEngine:
        """Load `model` into a vLLM of its own, on `device` and, for tensor parallelism, those that follow it."""
        source, tokenizer = resolve_base(model), load_tokenizer(model)
        llm = open_llm(source, config, precision=precision, device=device)
        check_engine(llm)
        engine = cls(
            llm,
            tokenizer,
            HFWeightAssembler(model, lora=lora),
            end_ids=end_ids_of(source, tokenizer),
        )
        engine._adapt(model, precision=precision, lora=lora)
        return engine

    def close(self) -> None:
        """Let vLLM's processes and memory go: this process may then open another engine."""
        close_llm(self._llm)
        del self._llm, self._steps

    def _submit_external(self, external_id: str) -> None:
        state = self._states[external_id]
        num_held_back = state.request.sampling.min_tokens - len(state.tokens)
        params = VllmParams(
            temperature=0.0,  # The processor draws.
            max_tokens=self._num_left(state),
            ignore_eos=True,  # What ends a completion is decided here, once for all engines.
            logprobs=None if self._draws_here else 0,
            detokenize=False,
            extra_args=sampling_args(external_id, sampling_until_min_tokens(state), num_held_back=num_held_back),
            skip_clone=True,
        )
        # Past vLLM's front end, which makes an object of every token: here they go to a SequenceState.
        request = self._llm.input_processor.process_inputs(
            external_id,
            TokensPrompt(prompt_token_ids=list(state.context)),
            params,
            supported_tasks=self._llm.get_supported_tasks(),
        )
        self._llm.engine_core.add_request(request)

    def _abort_external(self, external_ids: Sequence[str]) -> None:
        self._llm.engine_core.abort_requests(list(external_ids))

    def _step_external(self) -> None:
        self._write(self._steps.take())

    def _clear(self) -> None:
        self._take_in_flight()
        self._abort_external(list(self._states))
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not empty its cache: what old weights have read must not be used again")

    def _copy_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._take_in_flight()
        if self._is_plain:
            self._llm.apply_model(lambda model: model.load_weights(weights.items()))
            return
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights.items())})
        if self._llm.vllm_config.device_config.device_type == "cpu":
            self._llm.apply_model(_repack_head)

    def _free(self) -> None:
        self._llm.sleep(level=1)

    def _occupy(self, *, weights: bool, cache: bool) -> None:
        self._llm.wake_up(["weights"] * weights + ["kv_cache"] * cache)

    def _take_in_flight(self) -> None:
        """Take what is in flight: it was drawn under the weights that are there now."""
        for taken in self._steps.drain():
            self._write(taken)

    def _write(self, taken: TakenStep) -> None:
        ended = []
        for output in taken.outputs:
            external_id, [token] = output.request_id, output.new_token_ids
            if output.prefill_stats is not None:  # With the first token since it was handed in.
                self._count_context(external_id, num_reused=output.prefill_stats.num_cached_tokens)
            if self._append(external_id, token, taken.logprobs[external_id]) and not output.finished:
                ended.append(external_id)
        self._abort_external(ended)
        self.counts.add_step(num_tokens=len(taken.outputs))


def open_llm(folder: str, config: VllmEngineConfig, *, precision: Precision, device: str) -> LLMEngine:
    """vLLM's engine with its core in this process. With tensor parallelism, vLLM starts a process per device."""
    where = torch.device(device)
    is_cuda = where.type == "cuda"
    made: dict[str, Any] = {
        "model": folder,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[precision],
        "tensor_parallel_size": config.tp,
        # In a Ray actor vLLM would ask Ray for workers of its own; the GPUs are this actor's already.
        "distributed_executor_backend": "mp" if config.tp > 1 else None,
        "device_ids": [(where.index or 0) + rank for rank in range(config.tp)] if is_cuda else None,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_running,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": True,
        "block_size": None if is_cuda else _CPU_BLOCK_TOKENS,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if is_cuda else int(config.cpu_cache_gib * 2**30),
        "enable_sleep_mode": is_cuda,
        "logits_processors": [SamplingProcessor],
        "logprobs_mode": "processed_logits",
        "async_scheduling": is_cuda and config.tp == 1,  # On a CPU there is no other device to keep busy.
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    arguments = EngineArgs(**made | checked_options(config.options, EngineArgs))
    _hush()
    settings = arguments.create_engine_config(UsageContext.LLM_CLASS)  # Prompts are read in large batches.
    _hush()  # Again: some versions have set up logging anew.
    # The core in this process: steps are calls, and weights of the same device are passed by reference.
    executor = SamplingExecutor if config.tp == 1 else Executor.get_class(settings)
    return LLMEngine(settings, executor, log_stats=False, multiprocess_mode=False)


def close_llm(llm: LLMEngine) -> None:
    """End vLLM's processes and free what it holds in this one."""
    for _ in StepQueue(llm).drain():  # It reads what is freed here.
        pass
    settings = llm.vllm_config
    if settings.model_config.enable_sleep_mode and settings.parallel_config.tensor_parallel_size == 1:
        # The shutdown lets go of the allocator that sleep mode has: by then there must be nothing left for it to free.
        llm._finalizer()  # It holds the model.
        llm.collective_rpc(lambda worker: worker.model_runner.shutdown())
        LAYERWISE_INFO.clear()  # What it knows for reloading a layer holds the layer.
        gc.unfreeze()
        gc.collect()
    llm.engine_core.shutdown()


def _is_plain(llm: LLMEngine) -> bool:
    """Whether vLLM's own tensors hold the weights as a folder has them, but for matrices that it puts side by side.

    On a CPU it packs them anew, and so it does with quantised ones, with latent attention's and, on some GPUs, with experts.
    """
    settings = llm.vllm_config
    return (
        settings.device_config.device_type == "cuda"
        and settings.parallel_config.tensor_parallel_size == 1
        and settings.model_config.quantization is None
        and not settings.model_config.use_mla
        and not settings.model_config.is_moe
    )


def _hush() -> None:
    """vLLM reports every step of its start, and every push of weights."""
    logging.getLogger("vllm").setLevel(logging.ERROR)


def _repack_head(model: nn.Module) -> None:
    """A head tied to the embeddings has a copy of its own on a CPU, in a faster layout, which a reload leaves as it was."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
