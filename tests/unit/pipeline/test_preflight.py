"""What `reroll check` and `reroll train` find before a model is loaded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reroll.config.check import notes_of
from reroll.config.load import parse_config
from reroll.config.tree import RlvrConfig
from reroll.errors import ConfigError
from reroll.pipeline.preflight import preflight
from reroll_zoo.rehearsal import code_problems

USER_CODE = """
print("modules may print what they like")


def score(prompt, trajectory):
    return 1.0


def score_without_trajectory(prompt):
    return 1.0


class NoStep:
    def reset(self, seed): ...

    def close(self): ...


def good(t, *, scale=1.0):
    return -scale * t.ratio * t.advantage


def scalar(t):
    return good(t).mean()


def fixed(t):
    return t.advantage


def raises(t):
    raise ZeroDivisionError("of the user's own")


def nan(t):
    return t.logp * float("nan")


def per_episode(episodes):
    return episodes.reward


def per_token(episodes):
    return episodes.spread(episodes.reward)
"""


@pytest.fixture
def tree(rlvr_tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "preflight_code.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    return rlvr_tree


def found(tree: dict[str, Any], tmp_path: Path) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        preflight(parse_config(tree, folder=tmp_path), code_folder=tmp_path)
    assert all(violation.fix for violation in caught.value.violations)
    return {violation.path: violation.problem for violation in caught.value.violations}


def test_a_sound_config_passes_without_torch_or_ray(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["rewards"]["default"]["path"] = "preflight_code:score"
    (tmp_path / "run.json").write_text(json.dumps(tree))
    script = (
        "import json, sys\nfrom pathlib import Path\n"
        "from reroll.config.load import parse_config\nfrom reroll.pipeline.preflight import preflight\n"
        "preflight(parse_config(json.loads(Path('run.json').read_text())), code_folder=Path())\n"
        "sys.exit(str({'torch', 'ray', 'transformers'} & set(sys.modules) or 0))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.strip() == "0"


def test_everything_is_found_at_once(tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "fine"}\n{"prompt": \n{"answer": 1}\n')
    tree["data"]["eval"] = [{"kind": "jsonl", "path": str(tmp_path / "bad.jsonl"), "domain": "math"}]
    tree["data"]["train"].append({"kind": "env", "domain": "game", "num": 3})
    tree["rollout"]["prompts_per_step"] = 14
    tree["envs"] = {"game": {"env": {"kind": "import", "path": "preflight_code:NoStep"}}}
    tree["rewards"] = {
        "default": {"kind": "import", "path": "preflight_code:missing"},
        "math": {"kind": "import", "path": "preflight_code:score_without_trajectory"},
    }
    tree["loss"] = {"kind": "import", "path": "preflight_code:good", "options": {"scael": 2.0}}
    tree["teachers"] = {"big": {"model": "reroll-tests/no-such-model"}}
    problems = found(tree, tmp_path)
    assert "line 2: broken JSON" in problems["data.eval.0"]
    assert "line 3: no `prompt`" in problems["data.eval.0"]
    assert "has no attribute 'missing'" in problems["rewards.default.path"]
    assert "cannot be called with (prompt, trajectory)" in problems["rewards.math.path"]
    assert "has no step: an environment has reset, step and close" in problems["envs.game.env.path"]
    assert "unexpected keyword argument 'scael'" in problems["loss.path"]
    assert "is not on this machine" in problems["teachers.big.model"]
    assert len(problems) == 6


def test_a_hub_that_cannot_be_reached_is_a_note_of_check_and_stops_train(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    tree["rewards"] = {"default": {"kind": "exact"}}
    tree["policy"]["model"] = "reroll-tests/no-such-model"
    [note] = preflight(parse_config(tree), code_folder=tmp_path, may_be_offline=True).notes
    assert note.startswith("policy.model: reroll-tests/no-such-model is not on this machine")
    assert note.endswith("could not be looked up, and train will need it")
    assert "is not on this machine" in found(tree, tmp_path)["policy.model"]


def test_a_step_that_asks_prompts_twice_is_pointed_out(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["rewards"] = {"default": {"kind": "exact"}}
    assert preflight(parse_config(tree), code_folder=tmp_path).notes == []
    tree["rollout"]["prompts_per_step"] = 11
    [note] = preflight(parse_config(tree), code_folder=tmp_path).notes
    assert "prompts_per_step is 11, and data.train has 10" in note


def test_a_module_that_ends_python_ends_only_the_process_that_tried_it(tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "preflight_ends.py").write_text("import os\nos._exit(7)\n")
    tree["rewards"]["default"]["path"] = "preflight_ends:score"
    assert "ends Python with exit code 7" in found(tree, tmp_path)["rewards.default.path"]


@pytest.mark.parametrize(
    ("part", "name", "says"),
    [
        ("loss", "scalar", r"gives a tensor of shape \[\] for 6 tokens: give one value a token"),
        ("loss", "fixed", "does not depend on the policy's log-probs"),
        ("loss", "raises", r"ZeroDivisionError: of the user's own .*preflight_code.py:\d+"),
        ("loss", "nan", "not finite"),
        ("loss", "per_episode", "'Tokens' object has no attribute 'reward'"),
        ("advantage", "per_episode", r"gives a tensor of shape \[4\] for 10 tokens"),
    ],
)
def test_a_loss_or_an_estimator_is_tried_on_a_few_tokens(tree: dict[str, Any], part: str, name: str, says: str) -> None:
    tree[part] = {"kind": "import", "path": f"preflight_code:{name}"}
    config = parse_config(tree, folder=Path(tree["run"]["runs_dir"]).parent)
    assert isinstance(config, RlvrConfig)
    assert re.search(says, code_problems(config)[f"{part}.path"])


def test_a_loss_and_an_estimator_that_keep_their_contract_pass(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["loss"] = {"kind": "import", "path": "preflight_code:good", "options": {"scale": 2.0}}
    tree["advantage"] = {"kind": "import", "path": "preflight_code:per_token"}
    config = parse_config(tree, folder=tmp_path)
    assert isinstance(config, RlvrConfig)
    assert not code_problems(config)


def test_a_warm_up_longer_than_the_run_is_pointed_out(tree: dict[str, Any], tmp_path: Path) -> None:
    assert not list(notes_of(parse_config(tree, folder=tmp_path)))
    tree["policy"]["optim"]["warmup_steps"] = 1000
    [note] = notes_of(parse_config(tree, folder=tmp_path))
    assert "warmup_steps is 1000 and the run has 3" in note
