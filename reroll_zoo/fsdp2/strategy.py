"""One model over many processes: PyTorch's fully sharded data parallelism, with sequence and tensor parallelism inside it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reroll.config.parts import OptimConfig
from reroll.models.load import DTYPES, without_adapter
from reroll.models.recurrent import is_recurrent
from reroll.observe.metrics import Stats
from reroll.tokens.batch import Batch
from reroll.training.base import Loss, Needs, Predictions, Strategy
from reroll.training.offload import HostCopies, PinnedOffload, synchronize
from reroll.training.optimizer import adamw, prepare_step
from reroll.training.saved import refuse_other_adapter
from reroll.training.torch_strategy import enable_gradient_checkpointing
from reroll.weights.slices import Slice
from reroll_zoo.fsdp2.build import shard
from reroll_zoo.fsdp2.checkpoint import load_shards, save_shards, sharded_state
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.fsdp2.layout import slice_of
from reroll_zoo.fsdp2.mesh import SHARD, TP, build_mesh
from reroll_zoo.fsdp2.tensor import has_partial_gradient
from reroll_zoo.ranks.export import Export
from reroll_zoo.ranks.group import COLLECTIVE_TIMEOUT, DataParallelRanks
from reroll_zoo.ranks.sharded import ShardedStrategy


def make_fsdp2(
    make_empty: Callable[[], PreTrainedModel],
    read: Callable[..., PreTrainedModel | None],
    tokenizer: PreTrainedTokenizerBase,
    config: Fsdp2StrategyConfig,
    optim: OptimConfig,
    *,
    device: str,
    total_steps: int,
) -> Strategy:
    """The strategy of one rank. The first one reads the model as it is stored, and sends the others their parts."""
    full = read(as_stored=True)
    return Fsdp2Strategy(make_empty, full, tokenizer, config, optim, device=device, total_steps=total_steps)


class Fsdp2Strategy(ShardedStrategy):
    """Trains a model of which every rank of the process group holds a part. All ranks call every verb.

    What is trained is held in fp32 shards, on which AdamW works; layers are gathered, and computed, in the config's
    precision, and gradients are summed over ranks and micro-batches in fp32. `make_empty` gives the model without weights;
    the first rank brings them in `full`, on the host.
    """

    def __init__(
        self,
        make_empty: Callable[[], PreTrainedModel],
        full: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase,
        config: Fsdp2StrategyConfig,
        optim: OptimConfig,
        *,
        device: str,
        total_steps: int,
    ) -> None:
        self._make_empty, self._tokenizer, self._optim_config = make_empty, tokenizer, optim
        self._total_steps, self._step, self._device = total_steps, 0, torch.device(device)
        self._offloads, self._dtype = config.cpu_offload, str(DTYPES[config.precision]).removeprefix("torch.")
        self._mesh = build_mesh(config, device=device)
        self.data_parallel = DataParallelRanks(ranks_per_share=config.ranks_per_share)
        self._model = make_empty()
        self.merges_prefixes = not is_recurrent(self._model)
        if total_steps == 0:
            self._model.requires_grad_(False)
        if config.gradient_checkpointing:
            enable_gradient_checkpointing(self._model)
        self._root, self._units = shard(self._model, full, config, self._mesh, device=device)
        self._local = {name: nn.Parameter(parameter.to_local()) for name, parameter in self._trained().items()}
        self._optimizer = _with_state(adamw(self._local.values(), optim))
        self._offload, self._copies = PinnedOffload(), HostCopies(self._device)
        # Checkpoints are written on a thread of their own, whose collectives must not mix with those of training.
        self._writers = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def forward(self, batch: Batch, needs: Needs) -> Predictions:
        with torch.no_grad():
            answers = self._predict(batch.to(self._device), needs)
        for unit in self._units:
            unit.reshard()  # Without a backward pass nothing else would, and the next step would not be seen.
        return answers

    def forward_backward(self, batch: Batch, loss: Loss) -> Stats:
        batch = batch.to(self._device)
        value, stats = loss(batch, self._predict(batch, loss.needs))
        value.backward()  # type: ignore[no-untyped-call]
        return stats

    def scale_gradients(self, factor: float) -> None:
        for parameter in self._trained().values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def optim_step(self) -> Stats:
        self._offload.wait_for_prefetch()
        trained = self._trained()
        for name, parameter in trained.items():
            self._local[name].grad = None if parameter.grad is None else parameter.grad.to_local()  # type: ignore[attr-defined]
            parameter.grad = None
        norm = self._sum_gradients_over_tp(trained)
        stats = prepare_step(self._optimizer, norm, self._optim_config, step=self._step, total_steps=self._total_steps)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._step += 1
        return stats

    def iter_full_params(self, *, frozen: bool = False) -> Generator[tuple[str, Tensor]]:
        """On the device and in the model's precision, one layer gathered at a time."""
        trained = set(self._local)
        for unit, names in self._units.items():
            wanted = [name for name in names if (name not in trained) == frozen]
            if not wanted:
                continue
            unit.unshard()
            try:
                for name in wanted:
                    parameter = self._model.get_parameter(name).detach()
                    yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            finally:  # Whoever stops half-way too: the next step would not be seen.
                unit.reshard()

    def parts(self) -> Mapping[str, Tensor]:
        return {name: parameter.to_local() for name, parameter in self._sharded().items()}

    def slices(self) -> Mapping[str, Slice]:
        return {name: slice_of(name, parameter, dtype=self._dtype) for name, parameter in self._trained().items()}

    def to(self, device: str, *, weights: bool = True) -> None:
        if self._offloads:
            return  # It is at home on the host, whoever has the device.
        if weights:
            nn.Module.to(self._root, device)
            for name, parameter in self._trained().items():
                self._local[name].data = parameter.to_local()
        self._offload.wait_for_prefetch()
        for number, state in enumerate(self._optimizer.state.values()):
            for key, value in state.items():
                state[key] = self._offload.moved((number, key), value, torch.device(device))
        if device == "cpu":
            synchronize(self._device)

    def save(self, folder: Path) -> list[Path]:
        return self._write(self._state(), self._export(self._staged), folder)

    def stage(self, folder: Path) -> Callable[[], list[Path]]:
        return partial(self._write, self._copies.of_state(self._state()), self._export(self._staged), folder)

    def load(self, folder: Path) -> None:
        refuse_other_adapter(self._model, folder)
        self._step = load_shards(self._state(), folder)

    def _write(self, state: dict[str, object], export: Export, folder: Path) -> list[Path]:
        files = save_shards(state, folder, group=self._writers)
        return files + export.write(self._tokenizer, folder, group=self._writers)

    def _staged(self, name: str, tensor: Tensor) -> Tensor:
        copied = self._copies.of_tensor(("whole", name), tensor)
        synchronize(self._device)  # What is gathered goes when the next is asked for.
        return copied

    def _sharded(self) -> dict[str, DTensor]:
        """The parameters as FSDP holds them between passes. Not those of a tower, which every rank has whole."""
        return {
            name: parameter.detach()  # type: ignore[misc]
            for name, parameter in self._model.named_parameters()
            if isinstance(parameter, DTensor)
        }

    def _trained(self) -> dict[str, DTensor]:
        return {
            name: parameter  # type: ignore[misc]
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }

    def _state(self) -> dict[str, object]:
        self._offload.wait_for_prefetch()
        # A model that is only held may follow another: then every weight is what it has to remember.
        weights = self._trained() or self._sharded()
        return sharded_state(weights, self._local, self._optimizer, step=self._step)

    def _predict(self, batch: Batch, needs: Needs) -> Predictions:
        with nullcontext() if needs.adapter else without_adapter(self._model):
            return Predictions(**self._root(batch, needs))

    def _sum_gradients_over_tp(self, trained: Mapping[str, DTensor]) -> Tensor:
        """Complete the gradients that are parts of a sum, and return the norm over all ranks' shards."""
        tp = self._mesh[TP]
        split: list[Tensor] = []
        whole: list[Tensor] = []
        for name, parameter in trained.items():
            gradient = self._local[name].grad
            if gradient is None:
                continue
            if tp.size() > 1 and has_partial_gradient(name):
                dist.all_reduce(gradient, group=tp.get_group())
            is_split = TP in (parameter.device_mesh.mesh_dim_names or ())
            (split if is_split else whole).append(gradient)
        squares = torch.stack([nn.utils.get_total_norm(part).to(self._device).square() for part in (split, whole)])
        dist.all_reduce(squares, group=self._mesh[SHARD].get_group())
        if tp.size() > 1:
            dist.all_reduce(squares[:1], group=tp.get_group())
        return squares.sum().sqrt()


def _with_state(optimizer: torch.optim.AdamW) -> torch.optim.AdamW:
    """The same with its state there from the start, so that a checkpoint can be read into it."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter.detach()),
            "exp_avg_sq": torch.zeros_like(parameter.detach()),
        }
    return optimizer
