"""Tensors on the host: moved out of a GPU and back, and copied for another thread to write while training goes on."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from reroll.models.load import has_adapter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


class PinnedBuffers:
    """Page-locked host buffers, one for each key: copies to and from a GPU run at the speed of the bus.

    Such memory is slow to allocate, so a buffer is kept for the next tensor of its key.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    def filled(self, key: Hashable, tensor: Tensor) -> Tensor:
        """Start copying a GPU tensor into the key's buffer; returns the buffer, which is valid once the GPU is synchronized."""
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return buffer.copy_(tensor, non_blocking=True)


class PinnedOffload:
    """Moves tensors out of a GPU into pinned memory, and back on a stream of its own, beside what the GPU computes."""

    def __init__(self) -> None:
        self._buffers = PinnedBuffers()
        self._prefetch: torch.cuda.Stream | None = None

    def moved(self, key: Hashable, tensor: Tensor, device: torch.device) -> Tensor:
        """This tensor on the device; `key` names its buffer. Its contents are there after `synchronize`, or, for what the
        GPU computes, after `wait_for_prefetch`."""
        if tensor.device.type == device.type:
            return tensor
        if device.type == "cpu":
            return self._buffers.filled(key, tensor)
        if device.type != "cuda":
            return tensor.to(device)
        if self._prefetch is None:
            self._prefetch = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        there = torch.empty_like(tensor, device=device)
        self._prefetch.wait_stream(torch.cuda.current_stream(device))  # Whose memory it was until now.
        with torch.cuda.stream(self._prefetch):
            return there.copy_(tensor, non_blocking=True)

    def wait_for_prefetch(self) -> None:
        """Have the GPU wait for the copies back to it. The host does not wait."""
        if self._prefetch is not None:
            torch.cuda.current_stream(self._prefetch.device).wait_stream(self._prefetch)


def synchronize(device: torch.device) -> None:
    """Have the host wait for a GPU, copies included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class HostCopies:
    """Copies of what is trained on `device`. Beside a GPU they keep their memory, so the next ones replace these."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = PinnedBuffers() if device.type == "cuda" else None

    def of_state(self, state: Any) -> Any:
        """A state as torch's optimizers and checkpoints have it (dicts and lists), with a copy of every tensor.

        Of a tensor that is spread over ranks, this rank's part is copied.
        """
        copies = self._of_part(state, key=("state",))
        synchronize(self._device)
        return copies

    def of_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """The same model with a copy of every tensor that is saved: tied weights stay tied, and are copied once.

        Of a model with an adapter, that is the adapter; the rest is the model's own.
        """
        parameters = {
            id(parameter): parameter
            if has_adapter(model) and not parameter.requires_grad
            else nn.Parameter(self.of_tensor(("model", name), parameter), requires_grad=parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
        buffers = {id(buffer): self.of_tensor(("model", name), buffer) for name, buffer in model.named_buffers()}
        synchronize(self._device)
        # `deepcopy` asks its memo first: it finds the tensors there, and makes nothing but modules.
        return copy.deepcopy(model, {**parameters, **buffers})

    def of_tensor(self, key: Hashable, tensor: Tensor) -> Tensor:
        """A copy that is valid once the GPU is synchronized; `key` names its buffer."""
        tensor = tensor.detach()
        if self._buffers is None:
            return tensor.to("cpu", copy=True)
        if hasattr(tensor, "to_local"):
            return as_shard_of(tensor, self._buffers.filled(key, tensor.to_local()))  # type: ignore[arg-type]
        return self._buffers.filled(key, tensor)

    def _of_part(self, state: Any, *, key: tuple[Hashable, ...]) -> Any:
        if isinstance(state, Tensor):
            return self.of_tensor(key, state)
        if isinstance(state, dict):
            return {name: self._of_part(value, key=(*key, name)) for name, value in state.items()}
        if isinstance(state, list):
            return [self._of_part(value, key=(*key, number)) for number, value in enumerate(state)]
        return state


def as_shard_of(parameter: DTensor, local: Tensor) -> DTensor:
    """A rank's own part of a tensor that is spread as `parameter` is, by reference."""
    from torch.distributed.tensor import DTensor

    # Not `from_local`, which would copy a part that is kept on the host to the mesh's devices: read into, it would be lost.
    return DTensor(local, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def in_background(work: Callable[[], T], *, name: str) -> Future[T]:
    """Run it on a thread that does not keep the process from exiting."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
