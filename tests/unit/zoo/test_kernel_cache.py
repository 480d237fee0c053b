"""Kernels outlive the process that compiled them, and the next one has them ready. Compiled for a GPU that is not here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton import knobs
from triton.runtime import jit

from reroll_zoo.kernel_cache import KernelCache

SCRIPT = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class NoGpu:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(NoGpu())
import triton
from triton import knobs
from reroll_zoo import fused_kernels
from reroll_zoo.kernel_cache import kernel_cache

cache = kernel_cache()
tell = knobs.compilation.listener
def listen(**told):
    print("words:", cache.words(), "from the folder" if told["cache_hit"] else "compiled")
    tell(**told)
knobs.compilation.listener = listen

cache.fetch("a/model", torch.device("cpu")).join()
print("ready")
for dtype in (torch.bfloat16, torch.float32):
    fused_kernels._add.warmup(torch.float32, dtype, 1024, BLOCK=4096, grid=(1,))
print("words at rest:", cache.words())
"""


def process(folder: Path) -> list[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "XDG_CACHE_HOME": str(folder)}
    environment.pop("TRITON_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = "compiling kernels for this GPU" in done.stderr
    return [*done.stdout.splitlines(), f"told: {told}"]


@pytest.mark.slow
def test_a_later_process_has_them_ready_before_it_needs_them_and_compiles_what_is_lost(tmp_path: Path) -> None:
    assert process(tmp_path) == [
        "ready",
        "words: compiling kernels 1 compiled",
        "words: compiling kernels 2 compiled",
        "words at rest: ",
        "told: True",
    ]
    fetched = ["words: compiling kernels 1 of 2 {}", "words: compiling kernels 2 of 2 {}", "ready", "words at rest: "]
    assert process(tmp_path) == [*(line.format("from the folder") for line in fetched), "told: False"]
    for file in (tmp_path / "reroll" / "kernels").rglob("*.cubin"):
        file.unlink()
    for file in (tmp_path / "reroll" / "kernels").rglob("__grp__*"):
        file.unlink()
    assert process(tmp_path) == [*(line.format("compiled") for line in fetched), "told: True"]


@pytest.fixture
def _triton_s_own_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cache that watches has set is taken back."""
    monkeypatch.setattr(jit, "serialize_specialization_data", jit.serialize_specialization_data)
    for knobs_of, name in ((knobs.cache, "dir"), (knobs.compilation, "listener")):
        monkeypatch.setattr(knobs_of, name, getattr(knobs_of, name))
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(knobs.runtime, name, getattr(knobs.runtime, name))


def compiled(variant: str) -> dict[str, Any]:
    """What Triton tells of a kernel that it has compiled."""
    function = SimpleNamespace(jit_function=SimpleNamespace(cache_key="k"), module="m", name="k")
    return {"fn": function, "compile": {"specialization_data": variant}}


@pytest.mark.usefixtures("_triton_s_own_knobs")
def test_what_was_noted_for_other_code_is_left_alone(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.watch()
    lines = [
        '{"module": "reroll_zoo.fused_kernels", "name": "_gone", "source": "", "variant": "{}"}',
        '{"module": "reroll_zoo.fused_kernels", "name": "_add", "source": "of old", "variant": "{}"}',
        '{"module": "reroll_zoo.fus',
    ]
    (tmp_path / "needed" / f"a-triton-{triton.__version__}.jsonl").write_text("\n".join(lines))
    cache.fetch("a", torch.device("cpu")).join()
    assert cache.words() == ""
    knobs.runtime.jit_cache_hook()  # As Triton calls it when it begins to compile.
    assert cache.words() == "compiling kernels 1"


@pytest.mark.usefixtures("_triton_s_own_knobs")
def test_a_kernel_of_others_whose_constants_cannot_be_written_is_launched_and_not_noted(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.watch()
    options = SimpleNamespace(num_warps=4)
    variant = jit.serialize_specialization_data("m.k", {"x": "fp32"}, {(0,): object()}, {}, options, "k", options)
    assert variant == ""
    cache.fetch("a", torch.device("cpu")).join()
    knobs.runtime.jit_post_compile_hook(**compiled(variant))
    assert not list((tmp_path / "needed").iterdir())
    knobs.runtime.jit_post_compile_hook(**compiled("{}"))
    assert len(list((tmp_path / "needed").iterdir())) == 1


@pytest.mark.usefixtures("_triton_s_own_knobs")
def test_a_folder_that_cannot_be_written_is_triton_s_own_affair(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = knobs.runtime.jit_post_compile_hook
    KernelCache(tmp_path / "file" / "kernels").watch()
    assert knobs.runtime.jit_post_compile_hook is before
    cache = KernelCache(tmp_path / "gone")
    cache.watch()
    cache.fetch("a", torch.device("cpu")).join()
    shutil.rmtree(tmp_path / "gone")
    knobs.runtime.jit_post_compile_hook(**compiled("{}"))
    assert cache.words() == ""
