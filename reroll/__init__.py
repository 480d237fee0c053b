"""RL post-training of language models, from one laptop CPU to a Ray cluster.

    import reroll

    run = reroll.train(model="smollm2-135m-instruct", data=rows, reward=score, steps=40)

Names are imported when they are first used: `import reroll` loads neither torch nor ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reroll.algo.episodes import Episodes
    from reroll.algo.losses import Tokens
    from reroll.api import Run, build, evaluate, make_config, train
    from reroll.config.data_base import RowSourceConfig
    from reroll.config.env_base import EnvConfig
    from reroll.config.load import load_config
    from reroll.config.parts import (
        CheckpointConfig,
        EvalConfig,
        LoraConfig,
        OptimConfig,
        PolicyConfig,
        RolloutConfig,
        RunConfig,
    )
    from reroll.config.reward_base import RewardConfig
    from reroll.config.tree import RlvrConfig
    from reroll.envs.base import Env, InvalidAction, StepResult
    from reroll.errors import (
        ConfigError,
        DataError,
        EnvError,
        ModelError,
        RerollError,
        RewardError,
        RunFolderError,
        SamplerMismatch,
        TooManyFailures,
        TrainingDiverged,
        Violation,
    )
    from reroll.pipeline.base import Pipeline
    from reroll.pipeline.rlvr import RlvrPipeline
    from reroll.tokens.batch import Batch, pack
    from reroll.tokens.samples import rows_of
    from reroll.training.loss import PolicyLoss
    from reroll.types import Completion, Group, Message, Prompt, Sample, Score, Status, Trajectory, Turn
    from reroll_zoo.offline.config import DistillConfig, SftConfig
    from reroll_zoo.offline.preference_config import DpoConfig, RewardModelConfig

__version__ = "0.1.0"

_HOMES = {
    "reroll.api": ["Run", "build", "evaluate", "make_config", "train"],
    "reroll.config.load": ["load_config"],
    "reroll.config.tree": ["RlvrConfig"],
    "reroll_zoo.offline.config": ["DistillConfig", "SftConfig"],
    "reroll_zoo.offline.preference_config": ["DpoConfig", "RewardModelConfig"],
    "reroll.config.parts": [
        "CheckpointConfig", "EvalConfig", "LoraConfig", "OptimConfig", "PolicyConfig", "RolloutConfig", "RunConfig",
    ],
    "reroll.config.env_base": ["EnvConfig"],
    "reroll.config.reward_base": ["RewardConfig"],
    "reroll.config.data_base": ["RowSourceConfig"],
    "reroll.types": ["Completion", "Group", "Message", "Prompt", "Sample", "Score", "Status", "Trajectory", "Turn"],
    "reroll.envs.base": ["Env", "InvalidAction", "StepResult"],
    "reroll.algo.losses": ["Tokens"],
    "reroll.algo.episodes": ["Episodes"],
    "reroll.pipeline.base": ["Pipeline"],
    "reroll.pipeline.rlvr": ["RlvrPipeline"],
    "reroll.tokens.batch": ["Batch", "pack"],
    "reroll.tokens.samples": ["rows_of"],
    "reroll.training.loss": ["PolicyLoss"],
    "reroll.errors": [
        "ConfigError", "DataError", "EnvError", "ModelError", "RerollError", "RewardError", "RunFolderError",
        "SamplerMismatch", "TooManyFailures", "TrainingDiverged", "Violation",
    ],
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 (by what one looks for, not by letter)
    # Runs.
    "train", "evaluate", "make_config", "load_config", "build", "Run",
    # What is under a config.
    "RlvrConfig", "SftConfig", "DpoConfig", "RewardModelConfig", "DistillConfig",
    "PolicyConfig", "OptimConfig", "LoraConfig", "RolloutConfig", "EvalConfig", "CheckpointConfig", "RunConfig",
    # What rewards, environments and agents are written against.
    "Prompt", "Trajectory", "Turn", "Completion", "Message", "Score", "Status", "Group", "Env", "StepResult", "InvalidAction",
    # What the nodes of a plug-in derive from.
    "EnvConfig", "RewardConfig", "RowSourceConfig",
    # What losses, advantages, loops and pipelines are written against.
    "Tokens", "Episodes", "Sample", "Batch", "rows_of", "pack", "PolicyLoss", "Pipeline", "RlvrPipeline",
    # What goes wrong.
    "RerollError", "ConfigError", "Violation", "DataError", "ModelError", "EnvError", "RewardError", "RunFolderError",
    "SamplerMismatch", "TooManyFailures", "TrainingDiverged",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'reroll' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
