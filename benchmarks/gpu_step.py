"""A whole GRPO step on one GPU, by every way in which policy and engine can share it, against TRL with vLLM, in one run.

A model of Qwen3's shape with random weights, 64 prompts × 8 siblings × 256 tokens: sampling, rewards, update, weights
published. `python benchmarks/gpu_step.py [--only embedded vllm-lease ...] [--shape 4b] [--rounds 1] [--busy 16]`; `--busy`
keeps so many cores of the host spinning beside it. `--only embedded trl --siblings 16 --prompt-tokens 1024 --prompts 16`: what
siblings share. The first round compiles its kernels, all others find them: `first_s` is the first step's time in the first
round and in the last. `--profile`: where the time of a step goes, phase by phase and kernel by kernel; `--folder F` keeps model
and kernels for the next call. vLLM and TRL must be installed in this environment for the contestants that need them;
REROLL_SGLANG_PYTHON names a Python that has sglang (scripts/setup_sglang.sh). Without a GPU a tiny model tries it out:
`python benchmarks/gpu_step.py --only embedded --prompts 2 --siblings 2 --tokens 8 --rounds 2`
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from gpu_shapes import add_work, default_shape, work_from
from gpu_work import Work
from report import arguments, report
from side_by_side import HERE, Contestant, own_python, run_once

EMBEDDED = ("embedded", "embedded-exact", "embedded-processes", "embedded-ipc")
CONTESTANTS = (*EMBEDDED, "vllm", "vllm-lease", "vllm-ipc", "sglang", "trl")


@contextmanager
def spinning(num: int) -> Iterator[None]:
    """So many processes that want a core each, all the time."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def contestant(name: str, folder: Path, work: Work, overrides: list[str], *, profile: bool = False) -> Contestant:
    """Its kernels are kept beside the model, so that its first round is a first run. With `profile` it leaves one there."""
    peers, shared = HERE / "peers", (str(folder), *([] if name == "trl" else [name]), work.as_argument())
    command = ("trl_gpu_step.py", *shared) if name == "trl" else ("reroll_gpu_step.py", *shared, *overrides)
    cache = str(folder.parent / f"cache-{name}")
    env = (("XDG_CACHE_HOME", cache), ("TORCHINDUCTOR_CACHE_DIR", f"{cache}/inductor"))
    if profile:
        env += (("REROLL_PROFILE", str(profile_of(folder, name))),)
    return Contestant(name, own_python(), (str(peers / command[0]), *command[1:]), env)


def profile_of(folder: Path, name: str) -> Path:
    return folder.parent / f"profile-{name}.txt"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0, help="processes that spin beside it")
    parser.add_argument("--profile", action="store_true", help="then print where the time of one step of the last round goes")
    parser.add_argument("--folder", type=Path, help="keep model and kernels here, for the next call with the same shape")
    add_work(parser)
    args = parser.parse_args()
    work, shape = work_from(args), args.shape or default_shape()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in args.only}
    with nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as scratch, spinning(args.busy):
        folder = Path(scratch).absolute() / f"model-{shape}"
        if not (folder / "config.json").exists():
            # The GPU's memory is watched: nothing of this process may lie there.
            subprocess.run([sys.executable, str(HERE / "gpu_shapes.py"), str(folder), shape], check=True)
        for number in range(args.rounds):
            for name in args.only:
                profile = args.profile and name != "trl" and number == args.rounds - 1
                results[name].append(
                    run_once(contestant(name, folder, work, args.set, profile=profile), settle_s=0.5, shows=True)
                )
                print(f"round {number + 1}: {name} {results[name][-1]}", flush=True)
                if profile:
                    print(profile_of(folder, name).read_text())
    report(
        f"gpu_step_{shape}_{work.prompts}x{work.siblings}x{work.prompt_tokens}",
        rows_of(results),
        title=(__doc__ or "").splitlines()[0],
        note=f"shape {shape}, {work.told()}; medians; {' '.join(args.set)}",
        facts={"results": results, "busy": args.busy},
        save=args.save,
    )


def rows_of(results: dict[str, list[dict[str, float]]]) -> list[dict[str, object]]:
    medians = {
        name: {key: statistics.median(round_[key] for round_ in rounds) for key in rounds[0]}
        for name, rounds in results.items()
    }
    trl_s = medians.get("trl", {}).get("seconds", math.nan)
    memory = ("generate_gib", "train_gib", "push_gib", "allocated_gib", "planned_gib")
    parts = ("wait_s", "busy_s", "swap_s", "train_s", "push_s", "sampler_gap", *memory)
    return [
        {
            "way": name,
            "step_s": told["seconds"],
            "trl_over_it": trl_s / told["seconds"],
            "first_s": f"{results[name][0]['first_s']:.2f}, {results[name][-1]['first_s']:.2f}",
        }
        | {part: told.get(part, math.nan) for part in parts}
        for name, told in medians.items()
    ]


if __name__ == "__main__":
    main()
