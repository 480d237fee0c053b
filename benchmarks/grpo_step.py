"""A whole GRPO step on a CPU against TRL 1.16, in one run: sampling, rewards, update, weights published.

SmolLM2-135M-Instruct, 4 prompts × 8 siblings × 64 tokens. TRL runs in bf16 and in fp32, and the faster one counts.
`python benchmarks/grpo_step.py [--trl FOLDER]`; the peer's environment is made in FOLDER on first use.
"""

from __future__ import annotations

from pathlib import Path

from report import arguments, report
from side_by_side import HERE, Contestant, compete, model_folder, own_python, peer_python


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trl", type=Path, default=Path(".venv-trl"), help="where TRL's environment is or will be")
    args = parser.parse_args()
    model, peers = model_folder(), HERE / "peers"
    trl = peer_python("trl", args.trl)
    results = compete(
        [
            Contestant("reroll bf16", own_python(), (str(peers / "reroll_step.py"), model, "bf16")),
            Contestant("TRL 1.16 bf16", trl, (str(peers / "trl_step.py"), model, "bf16")),
            Contestant("TRL 1.16 fp32", trl, (str(peers / "trl_step.py"), model, "fp32")),
        ],
        rounds=args.rounds,
    )
    ours = results["reroll bf16"]["seconds"]
    rows = [
        {"library": name, "seconds_per_step": result["seconds"], "reroll_is_faster_by": result["seconds"] / ours}
        for name, result in results.items()
    ]
    title = "One GRPO step, SmolLM2-135M on CPU, 4 prompts x 8 samples x 64 tokens"
    report(
        "grpo_step",
        rows,
        title=title,
        note=f"median of {args.rounds} interleaved rounds",
        facts={"spread": results},
        save=args.save,
    )


if __name__ == "__main__":
    main()
