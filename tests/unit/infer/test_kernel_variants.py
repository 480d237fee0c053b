"""Triton compiles a kernel anew for numbers, and for addresses, that 16 divides. Where these change from step to step, one
kernel must serve all: a step that waits for a compiler takes half a second longer."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from reroll_zoo.paged_cache.sample_kernel import _sample, _weigh
from reroll_zoo.paged_cache.kernels import _attend, _store
from reroll_zoo.fused_kernels import _rms_norm, _rms_norm_backward

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
BUFFER = torch.zeros(64, dtype=torch.int32)
CASES = {
    _attend: ["tables", "starts", "bounds", "block_sequence", "block_first", "table_row"],
    _store: ["rows"],
    _weigh: ["temperatures", "may_ends"],
    _sample: ["temperatures", "uniforms", "may_ends", "num_rows"],
    _rms_norm: ["num_rows"],
    _rms_norm_backward: ["num_rows"],
}
NUMBERS = {"epsilon", "scaling", "softcap", "window", "num_rows", "num_columns", "num_blocks", "vocabulary", "row_stride"}
NUMBERS |= {"table_row", "query_token", "query_head", "key_token", "key_head", "value_token", "value_head"}


def variant(kernel, name, *, is_even):
    bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
    values = {}
    for parameter in kernel.params:
        even = parameter.name != name or is_even
        is_number = parameter.is_constexpr or parameter.name in NUMBERS
        values[parameter.name] = (64 if even else 23) if is_number else BUFFER[0 if even else 1 :]
    return bind(**values, debug=False)[1]


for kernel, names in CASES.items():
    for name in names:
        same = variant(kernel, name, is_even=True) == variant(kernel, name, is_even=False)
        print(kernel.__name__, name, "one kernel" if same else "several")
print("control", variant(_attend, "query", is_even=True) == variant(_attend, "query", is_even=False))
"""


def test_what_changes_from_step_to_step_makes_no_new_kernel() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0"}  # Interpreted kernels have no variants.
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *lines, control = done.stdout.splitlines()
    assert len(lines) == 15
    assert [line for line in lines if not line.endswith("one kernel")] == []
    assert control == "control False"  # Where it does not say so, it does make one.
