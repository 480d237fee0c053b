"""`reroll models check`: a user's own folder beside Hugging Face's own code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reroll.errors import ModelError
from reroll_zoo.model_check import contract, room
from reroll_zoo.tiny_models import make_tiny


def test_a_folder_that_works_is_told_so_with_its_gaps(tmp_path: Path, reroll: Callable[..., Any]) -> None:
    make_tiny(tmp_path / "mine", layers=2)

    result = reroll("models", "check", "mine", cwd=tmp_path)

    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("works") == 8
    for part in ("packed", "beginnings", "gradients", "training step", "LoRA", "engine", "push", "4 of 4 prompts"):
        assert part in result.stdout
    assert "fails" not in result.stdout


def test_a_family_that_is_refused_is_told_with_the_reason(tmp_path: Path, reroll: Callable[..., Any]) -> None:
    make_tiny(tmp_path / "mine", family="diffllama")  # type: ignore[arg-type]

    result = reroll("models", "check", "mine", cwd=tmp_path)

    assert result.returncode == 1
    assert "attends twice" in " ".join(result.stdout.replace("│", " ").split())


def test_a_model_that_computes_otherwise_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = str(make_tiny(tmp_path, layers=2))
    load = contract.load_model

    def bent(*words: Any, **settings: Any) -> Any:
        model = load(*words, **settings)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.01)
        return model

    monkeypatch.setattr(contract, "load_model", bent)
    found = contract.measure(name, training=True)

    assert not found.agrees
    assert found.step is not None
    assert found.lora is not None
    assert min(found.packed, found.siblings, found.gradient, found.engine, found.step, found.lora) > contract.TOLERANCE


def test_what_the_last_bits_of_the_weights_do_is_rounding() -> None:
    assert contract.is_rounding(contract.TOLERANCE)
    assert not contract.is_rounding(3 * contract.TOLERANCE)
    assert contract.is_rounding(3 * contract.TOLERANCE, rounding=contract.TOLERANCE)
    assert not contract.is_rounding(1.0, rounding=contract.TOLERANCE)


def test_what_memory_does_not_hold_is_refused_and_can_be_checked_with_fewer_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = str(make_tiny(tmp_path / "mine", layers=3))
    monkeypatch.setattr(room, "BYTES_PER_PARAMETER", 1 << 40)
    with pytest.raises(ModelError, match="--layers"):
        room.check_room(name)

    short = room.shortened(name, tmp_path / "short", num_layers=1)

    assert contract.measure(short).agrees
    with pytest.raises(ModelError, match="3 layers"):
        room.shortened(name, tmp_path / "long", num_layers=4)


@pytest.mark.parametrize("name", ["nowhere/at/all", "empty", "broken"])
def test_a_folder_without_a_model_is_refused(tmp_path: Path, reroll: Callable[..., Any], name: str) -> None:
    for folder in ("empty", "broken"):
        (tmp_path / folder).mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")

    result = reroll("models", "check", name, cwd=tmp_path)

    assert result.returncode != 0
    assert "folder" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
