"""Hugging Face `generate` on the shared work. Usage: hf_generate.py MODEL_FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from work import NUM_SIBLINGS, NUM_TOKENS, QUESTIONS, messages, report

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
prompts = [tokenizer.apply_chat_template(messages(q), tokenize=False, add_generation_prompt=True) for q in QUESTIONS]
inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)


@torch.inference_mode()
def run() -> int:
    out = model.generate(
        **inputs,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        num_return_sequences=NUM_SIBLINGS,
        min_new_tokens=NUM_TOKENS,
        max_new_tokens=NUM_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
    )
    tokens = out.sequences[:, inputs.input_ids.shape[1] :]
    for place, logits in enumerate(out.logits):  # the log-prob of each sampled token, as RL needs it
        torch.log_softmax(logits.float(), dim=-1).gather(1, tokens[:, place : place + 1])
    return tokens.numel()


report(run)
