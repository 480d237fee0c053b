"""Kernels that Triton compiles for a GPU: kept in the user's cache folder, told of while they are made, and fetched by the next
process while its model loads.

Beside the kernels stands a list of those that each model needed. A process that loads the model again gets them ready on a
thread of its own, from the folder, or by compiling what is no longer there, so that its first step finds them.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.errors import TritonError
from triton.runtime import jit

FOLDER = "TRITON_CACHE_DIR"
"""Triton's variable for the folder: whoever sets it is obeyed."""

_MOST = 256
"""Kernels that are remembered for a model: the newest."""

_NOT_HERE = (AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError, TritonError)
"""What a kernel that was noted for other code, or for another GPU, raises when it is fetched: it is compiled when needed."""


def default_folder() -> Path:
    """`reroll/kernels` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reroll" / "kernels"


class KernelCache:
    """What Triton makes in this process, and made for the same model before."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._needed, self._lock = folder, folder / "needed", threading.Lock()
        self._model = ""
        self._noted: dict[str, set[str]] = {}
        self._under_way: set[int] = set()
        """Threads that wait for a kernel."""
        self._num_ready = self._num_known = self._num_compiled = 0

    def watch(self) -> None:
        """Keep what Triton compiles from now on in the folder, if it can be written, and tell of it. Hooks that others have set
        go on working."""
        try:
            self._needed.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        knobs.cache.dir = str(self._folder)
        jit.serialize_specialization_data = _written_if_it_can_be(jit.serialize_specialization_data)
        knobs.runtime.jit_cache_hook = _after(self._begins, knobs.runtime.jit_cache_hook)
        knobs.runtime.jit_post_compile_hook = _after(self._is_ready, knobs.runtime.jit_post_compile_hook)
        knobs.compilation.listener = _after(self._was_made, knobs.compilation.listener)

    def fetch(self, model: str, device: torch.device) -> threading.Thread:
        """Begin to get the kernels ready that this model needed before; what is compiled from now on is noted for it."""
        lines = self._lines(model)
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        with self._lock:
            self._model, self._noted[model] = model, set(lines)
            self._num_known += len(lines)
        thread = threading.Thread(target=self._fetch, args=(lines, device), name="kernels", daemon=True)
        thread.start()
        return thread

    def words(self) -> str:
        """`compiling kernels 3 of 14`, of what is known to be needed; without the end where that is not known. Empty when
        nothing is under way."""
        with self._lock:
            if not self._under_way:
                return ""
            number = self._num_ready + 1
            of = f" of {self._num_known}" if number <= self._num_known else ""
            return f"compiling kernels {number}{of}"

    def _fetch(self, lines: list[str], device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # Of this thread: kernels are loaded for the device that they run on.
        for line in lines:
            noted = json.loads(line)
            try:
                kernel = getattr(importlib.import_module(noted["module"]), noted["name"])
                is_same = kernel.cache_key == noted["source"]
                if is_same:
                    kernel.preload(noted["variant"])
            except _NOT_HERE:
                is_same = False
            with self._lock:
                self._num_known -= not is_same
                self._under_way.discard(threading.get_ident())

    def _begins(self, **_: Any) -> None:
        with self._lock:
            self._under_way.add(threading.get_ident())

    def _is_ready(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        kernel = fn.jit_function
        noted = {"module": fn.module, "name": fn.name.rpartition(".")[2], "source": kernel.cache_key}
        line = json.dumps({**noted, "variant": compile["specialization_data"]})
        with self._lock:
            self._under_way.discard(threading.get_ident())
            self._num_ready += 1
            if not compile["specialization_data"] or not self._model or line in self._noted[self._model]:
                return
            self._noted[self._model].add(line)
            with suppress(OSError), self._list_of(self._model).open("a", encoding="utf-8") as file:
                file.write(line + "\n")  # Where it cannot be written, the next process compiles what it needs.

    def _was_made(self, *, cache_hit: bool, **_: Any) -> None:
        with self._lock:
            self._num_compiled += not cache_hit
            is_first = not cache_hit and self._num_compiled == 1
        if is_first:
            print(f"compiling kernels for this GPU, which are kept in {self._folder}", file=sys.stderr, flush=True)

    def _lines(self, model: str) -> list[str]:
        """The newest that were noted for a model, each once."""
        file = self._list_of(model)
        if not file.is_file():
            return []
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        return list(dict.fromkeys(line for line in lines if _is_whole(line)))[-_MOST:]

    def _list_of(self, model: str) -> Path:
        name = "".join(character if character.isalnum() else "-" for character in model)
        return self._needed / f"{name[-100:]}-triton-{triton.__version__}.jsonl"


def _is_whole(line: str) -> bool:
    """Whether it was written to its end: a process may have been killed over it."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _after(hook: Callable[..., None], other: Callable[..., Any] | None) -> Callable[..., Any]:
    """Both, one after the other, with the answer of the other."""

    def both(**told: Any) -> Any:
        hook(**told)
        return other(**told) if other is not None else None

    return both


def _written_if_it_can_be(serialize: Callable[..., str]) -> Callable[..., str]:
    """Once somebody listens, Triton writes down every kernel's variant, also those of other packages: an empty text where a
    constant of it cannot be written, in place of an error in their launch."""

    def serialized(*parts: Any) -> str:
        try:
            return serialize(*parts)
        except TypeError:
            return ""

    return serialized


@functools.cache
def kernel_cache() -> KernelCache:
    """That of this process."""
    cache = KernelCache(Path(os.environ.get(FOLDER) or default_folder()))
    cache.watch()
    return cache
