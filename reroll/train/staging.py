"""Copies of a model and its optimizer on the host, for another thread to write while training goes on."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from reroll.models.load import has_adapter


def on_host(state: Any) -> Any:
    """A state as torch's optimizers and checkpoints have it (dicts and lists), with a copy of every tensor on the host.

    Of a tensor that is spread over ranks, this rank's part is copied.
    """
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: on_host(value) for key, value in state.items()}
    if isinstance(state, list):
        return [on_host(value) for value in state]
    return state


def model_on_host(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with a copy of every tensor that is saved: tied weights stay tied, and are copied once.

    Of a model with an adapter, that is the adapter; the rest is the model's own.
    """
    parameters = {
        id(parameter): parameter
        if has_adapter(model) and not parameter.requires_grad
        else nn.Parameter(on_host(parameter), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    # `deepcopy` asks its memo first: it finds the tensors there, and makes nothing but modules.
    return copy.deepcopy(model, {**parameters, **{id(buffer): on_host(buffer) for buffer in model.buffers()}})


def in_background(work: Callable[[], None], *, name: str) -> Future[None]:
    """Run it on a thread that does not keep the process from exiting."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
