"""GRPO steps with reroll on the shared work for a GPU. Usage: reroll_gpu_step.py MODEL_FOLDER MAP WORK [key=value ...]

With REROLL_PROFILE=FILE the last step is profiled, and what it did is written there.

Times of a step's parts, and the GPU's memory in each: the driver's number, so that all processes count. Beside it stand what
this process allocated at most, and what the planner foretells, both without what CUDA itself takes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from gpu_work import WARM_UP, Work, prompts, work_of
from step_timeline import timeline
from timed_pipeline import MARKS, STACKS, mark

from reroll.config.load import load_config
from reroll.pipeline.run import train
from reroll_zoo.plan.plan import cluster_here, make_plan

MAPS: dict[str, dict[str, Any]] = {
    "embedded": {},
    "embedded-exact": {"policy": {"exact": True}},
    "embedded-processes": {"runtime": {"kind": "processes"}},
    "embedded-ipc": {"runtime": {"kind": "ray"}, "weights": {"kind": "ipc"}},
    "vllm": {"engine": {"kind": "vllm"}},
    "vllm-lease": {"engine": {"kind": "vllm", "sleep": True}, "policy": {"swap": "optimizer"}},
    "vllm-ipc": {
        "runtime": {"kind": "ray"},
        "weights": {"kind": "ipc"},
        "engine": {"kind": "vllm", "sleep": True},
        "policy": {"swap": "optimizer"},
    },
    "sglang": {"engine": {"kind": "sglang", "python": os.environ.get("REROLL_SGLANG_PYTHON", "python")}},
}
"""Policy and engine share GPU 0, in one process or (processes, ipc) in two. Where memory is offloaded, who waits makes room."""

PARTS = ("wait", "swap", "train", "push")


def tree_of(folder: str, device_map: str, scratch: Path, work: Work) -> dict[str, Any]:
    (scratch / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts(work)))
    chosen = MAPS[device_map]
    length = max(1024, work.row_tokens + 64)
    pool = {"max_model_len": length, "gpu_memory_utilization": 0.3} if "kind" in chosen.get("engine", {}) else {}
    devices = 0 if work.device == "cuda" else "cpu"
    return {
        "pipeline": "timed_pipeline:TimedPipeline",
        "algorithm": "grpo",
        "run": {"name": "step", "runs_dir": str(scratch), "steps": work.steps},
        "policy": {
            "model": folder,
            "devices": devices,
            "strategy": {"kind": "torch", "precision": "bf16", "micro_batch_tokens": 32768, "logprob_chunk": 32768},
            "optim": {"lr": 1e-6},
            **chosen.get("policy", {}),
        },
        "engine": {"devices": devices, "max_running": work.num_samples, **pool, **chosen.get("engine", {})},
        **{key: value for key, value in chosen.items() if key in ("runtime", "weights")},
        # A replica is a hundredth of a long run, and all of one that takes half a minute.
        "checkpoint": {"replica_share": 0},
        "data": {"train": [{"kind": "jsonl", "path": str(scratch / "prompts.jsonl")}]},
        "rewards": {"default": {"kind": "import", "path": "gpu_work:score"}},
        "rollout": {
            "prompts_per_step": work.prompts,
            "group_size": work.siblings,
            "max_prompt_tokens": work.prompt_tokens + 64,
            "max_tokens": work.tokens,
            "min_tokens": work.tokens,
        },
    }


class Watch:
    """Looks at the GPU's memory and at the run's rows while the run goes on."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._memory: list[tuple[float, float]] = []
        self.rows: list[tuple[float, Mapping[str, float]]] = []
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0", "-lms", "50"]
        has_gpu = shutil.which(query[0]) is not None
        self._reader = subprocess.Popen(query, stdout=subprocess.PIPE, text=True) if has_gpu else None
        for work in (self._read_memory, self._read_rows):
            threading.Thread(target=work, daemon=True).start()

    def _read_memory(self) -> None:
        if self._reader is None:
            return
        assert self._reader.stdout is not None
        for line in self._reader.stdout:
            self._memory.append((time.perf_counter(), float(line) / 1024))

    def _read_rows(self) -> None:
        num_read = 0
        while True:
            lines = self._metrics.read_text().splitlines() if self._metrics.exists() else []
            new = [json.loads(line) for line in lines[num_read:]]
            num_read = len(lines)
            for row in new:
                if "time/step_s" in row:
                    self.rows.append((time.perf_counter(), row))
                    parts = {part: round(row[f"time/{part}_s"], 3) for part in ("step", *PARTS)}
                    print(f"step {len(self.rows)}: {parts} engine busy {row['engine/busy_s']:.3f}", flush=True)
            time.sleep(0.01)

    def gib(self) -> dict[str, float]:
        """Peak in each part of the counted steps; `generate` is while the trainer waits."""
        peaks: dict[str, float] = {}
        for ended_s, row in self.rows[WARM_UP:]:
            for name, start_s, end_s in _spans(ended_s, row):
                before = [used for when_s, used in self._memory if when_s < start_s][-1:]  # A push is short.
                inside = [used for when_s, used in self._memory if start_s <= when_s <= end_s]
                peaks[name] = max([peaks.get(name, 0.0), *(inside or before)])
        return {f"{name}_gib": peak for name, peak in peaks.items()}

    def close(self) -> None:
        if self._reader is not None:
            self._reader.terminate()


def _spans(ended_s: float, row: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """When the parts of a step were: first the wait, last the push."""
    began_s = ended_s - row["time/step_s"]
    pushed_s, waited_s = ended_s - row["time/push_s"], began_s + row["time/wait_s"]
    yield "generate", began_s, waited_s
    yield "train", waited_s, pushed_s
    yield "push", pushed_s, ended_s


def planned_gib(config: Any) -> float:
    """What the planner foretells of the fullest device, without what CUDA takes; nan where it does not know the cluster."""
    cluster = cluster_here(config)
    if cluster is None:
        return math.nan
    return sum(term.num_bytes for term in make_plan(config, cluster).fullest.terms if term.name != "CUDA context") / 2**30


def main() -> None:
    mark("imports")
    folder, device_map, argument, *overrides = sys.argv[1:]
    work, report = work_of(argument), os.environ.get("REROLL_PROFILE")
    overrides += [f"run.profile_steps=[{work.steps}]"] if report else []
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "step.yaml"
        file.write_text(json.dumps(tree_of(folder, device_map, Path(scratch), work)))  # JSON is YAML.
        config = load_config(file, overrides)
        watch = Watch(Path(scratch) / "step" / "metrics.jsonl")
        train(config, code_folder=Path(__file__).parents[1])
        mark("end")
        time.sleep(0.2)
        watch.close()
        if report:
            Path(report).write_text("\n".join(timeline(Path(scratch) / "step", work.steps, STACKS)) + "\n")
    steady = [row for _, row in watch.rows[WARM_UP : work.steps - bool(report)]]
    seconds = {f"{part}_s": statistics.median(row[f"time/{part}_s"] for row in steady) for part in PARTS}
    seconds["busy_s"] = statistics.median(row["engine/busy_s"] for row in steady)
    seconds["first_s"] = watch.rows[0][1]["time/step_s"]
    began_s = float(os.environ.get("REROLL_BEGAN_S", "nan"))
    ends = [began_s, *MARKS.values()]
    phases = {name: round(end - start, 1) for name, start, end in zip(MARKS, ends, ends[1:], strict=False)}
    threads = {"threads": steady[-1]["machine/threads"], "core_wait": steady[-1]["machine/core_wait"]}
    print(f"phases: {phases}, {threads}, cores {steady[-1]['machine/cores']}", flush=True)
    gap = statistics.median(row["train/sampler_gap"] for row in steady)
    step_s = statistics.median(row["time/step_s"] for row in steady)
    memory = watch.gib() | {"planned_gib": planned_gib(config)}
    if torch.cuda.is_available() and "runtime" not in MAPS[device_map]:  # Else another process holds the model.
        memory["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print("RESULT " + json.dumps({"seconds": step_s, "tokens": work.num_new_tokens, **seconds, **memory, "sampler_gap": gap}))


if __name__ == "__main__":
    main()
