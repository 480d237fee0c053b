"""A model in DeepSpeed's hands: from a Hugging Face model to an engine. The only file that imports DeepSpeed."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, redirect_stdout
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from reroll.config.parts import OptimConfig
from reroll.models.fused import fuse
from reroll.training.optimizer import adamw
from reroll_zoo.deepspeed.config import DeepspeedConfig
from reroll_zoo.ranks.empty_model import PredictingModel

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
"""What is remembered of a trained parameter, in fp32."""
BUCKET_SIZE = 50_000_000
"""Numbers that ranks exchange at once. DeepSpeed holds a buffer of this size; its own default is ten times larger."""


def build_engine(root: PredictingModel, config: DeepspeedConfig, optim: OptimConfig, *, device: str, is_fixed: bool) -> Any:
    """What is called in place of `root`, whose model the first rank has filled; the others' may be empty.

    Stages 1 and 2 cut up what training adds: a fixed model is then held whole by every rank, and `root` is what is called.
    """
    _prepare(device)
    settings = engine_settings(root.model, config, optim)
    if torch.device(device).type == "cuda":
        fuse(root.model)
    if config.stage == 3:
        _partition(root.model, settings, device=device)
    else:
        _place(root.model, device=device)
        root.model.tie_weights()
    for buffer in root.model.buffers():
        dist.broadcast(buffer, src=0)
    if is_fixed and config.stage < 3:
        for parameter in root.model.parameters():
            dist.broadcast(parameter.detach(), src=0)
        return root
    optimizer = None if is_fixed else _adamw(root.model, optim)
    with redirect_stdout(io.StringIO()):  # Some of its parts print what they do.
        engine, *_ = deepspeed.initialize(model=root, optimizer=optimizer, config=settings)
    if not is_fixed:
        _make_moments(engine)
    return engine


def engine_settings(model: PreTrainedModel, config: DeepspeedConfig, optim: OptimConfig) -> dict[str, Any]:
    """DeepSpeed's own config."""
    host = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,  # It must be told; what it reads from it is not used here.
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # A step is taken when it is asked for, after any number of passes.
        "gradient_clipping": optim.clip_norm,
        "bf16": {"enabled": config.precision == "bf16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_force_ds_cpu_optimizer": False,  # Its own would have to be compiled; torch's gives the same numbers everywhere.
        "zero_optimization": {
            "stage": config.stage,
            "overlap_comm": False,
            "reduce_bucket_size": BUCKET_SIZE,
            "memory_efficient_linear": False,  # It would replace torch's for every model of the process.
            # Norms and biases stay whole: they are not worth an exchange.
            "stage3_param_persistence_threshold": model.config.get_text_config().hidden_size,
        }
        | ({"offload_optimizer": host} if config.cpu_offload else {})
        | ({"offload_param": host} if config.cpu_offload and config.stage == 3 else {}),
    }


def fp32_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    """The master and the moments of a parameter, whole, on every rank. All ranks ask."""
    state = {MASTER: deepspeed.utils.safe_get_full_fp32_param(parameter)}
    return state | {key: deepspeed.utils.safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}


def set_fp32_state(parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
    """Go on from such a state: each rank keeps its part, and the weight is set from the master. All ranks call."""
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")), torch.no_grad():
        parameter.copy_(state[MASTER])
    if not hasattr(parameter, "ds_id"):
        deepspeed.utils.safe_set_full_fp32_param(parameter, state[MASTER])
        for key in MOMENTS:
            deepspeed.utils.safe_set_full_optimizer_state(parameter, state[key], key)
        return
    size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
    for key, value in state.items():
        padded = nn.functional.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
        part = padded.narrow(0, size * dist.get_rank(), size)
        if key == MASTER:
            deepspeed.utils.safe_set_local_fp32_param(parameter, part)
        else:
            deepspeed.utils.safe_set_local_optimizer_state(parameter, part, key)


def gathered(parameters: list[nn.Parameter]) -> AbstractContextManager[None]:
    """Parameters are whole inside the block, on every rank. All ranks enter."""
    cut = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    return deepspeed.zero.GatheredParameters(cut, enabled=bool(cut))  # type: ignore[no-any-return]


def _prepare(device: str) -> None:
    """What DeepSpeed wants to find, and what it should leave alone."""
    os.environ["LOCAL_RANK"] = str(torch.device(device).index or 0)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)  # Its calls, in torch's newest.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # On a CPU every process would compile it.
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_init_required=False)


def _partition(model: PreTrainedModel, settings: dict[str, Any], *, device: str) -> None:
    """Cut the model up layer by layer: no device ever holds more of the whole than one layer, or the two ends."""
    units: Iterable[nn.Module] = [*model.base_model.get_submodule("layers").children(), model]
    for unit in units:
        _place(unit, device=device)
        if unit is model:
            model.tie_weights()
        deepspeed.zero.Init(module=unit, config_dict_or_path=settings, mem_efficient_linear=False, dtype=model.dtype)


def _place(module: nn.Module, *, device: str) -> None:
    """Put what is not cut up yet on the device. What is empty stays so: the first rank's weights are sent there next."""
    for part in module.modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own):
            part.to_empty(device=device, recurse=False)
        elif not any(hasattr(tensor, "ds_id") for tensor in own):
            part._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]


def _make_moments(engine: Any) -> None:
    """Have AdamW's state there from the start, so that a checkpoint can be read into it."""
    optimizer = engine.basic_optimizer
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    if engine.zero_optimization_stage() == 3:
        masters = engine.optimizer.fp32_partitioned_groups_flat
    for master in masters:
        optimizer.state[master] = {
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            **{key: torch.zeros_like(master.detach()) for key in MOMENTS},
        }
    if engine.zero_optimization_stage() < 3:
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # Which part of them belongs to which parameter.


def _adamw(model: PreTrainedModel, optim: OptimConfig) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return adamw(trained, optim, ndim_of=lambda parameter: len(getattr(parameter, "ds_shape", parameter.shape)))
