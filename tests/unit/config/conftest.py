"""What the tests of configs begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    """A config that is fine: every test breaks one thing in it."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 512}')
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return {
        "pipeline": "rlvr",
        "policy": {"model": str(model), "devices": "cpu"},
        "engine": {"devices": "cpu"},
        "data": {"train": [{"kind": "jsonl", "path": str(prompts)}]},
        "rewards": {"default": {"kind": "exact"}},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_prompt_tokens": 64, "max_tokens": 64},
    }
