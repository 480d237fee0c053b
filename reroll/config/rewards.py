"""How answers are judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from reroll.config.base import ImportPath, Node, Pattern
from reroll.config.reward_base import Extracting, InProcess, Judged
from reroll.config.reward_code import CodeReward
from reroll.config.reward_instructions import InstructionsReward
from reroll.config.reward_judge import HostedJudge, JudgeReward, ModelReward
from reroll.config.reward_match import ChoiceReward, F1Reward, JsonSchemaReward, MathReward, RegexReward, SubstringReward
from reroll.config.reward_penalties import LanguageReward, LengthReward, OverlongReward, RepetitionReward


class ExactReward(Extracting):
    """Equal to the reference answer after stripping spaces."""

    kind: Literal["exact"]
    ignore_case: bool = False


class NumericReward(Extracting):
    """The last number in the text equals the reference number."""

    kind: Literal["numeric"]
    tolerance: float = Field(default=1e-6, ge=0)
    """How far off the number may be."""
    relative_tolerance: float = Field(default=0.0, ge=0)
    """How far off, as a part of the reference: 0.01 accepts 99 to 101 for 100. The wider of the two counts."""


class ReasoningGymReward(InProcess):
    """The verifier of the reasoning-gym task that the prompt came from."""

    kind: Literal["reasoning_gym"]
    pattern: Pattern | None = None
    """As in the other kinds: what part of the text is the answer."""

    @property
    def verdict_on_hang(self) -> float | None:
        return 0.0


class ImportReward(InProcess):
    """Your own function: `(prompt, trajectory, **options) -> float | Score`, plain or async, run in worker processes."""

    kind: Literal["import"]
    path: ImportPath
    """`module:name`; the folder of the YAML and the working directory are importable."""
    options: dict[str, Any] = Field(default_factory=dict)
    memory_mb: int | None = Field(default=4096, ge=16)
    """What its process may allocate beyond what importing took; null: no limit. A call that wants more fails its sample."""


class EarnedReward(Judged):
    """What the episode earned by itself: the sum of its environment's rewards, or what its agent reported."""

    kind: Literal["earned"]


class StackReward(Judged):
    """Several rewards at once: their weighted sum. Each part is logged by its name, `outer.inner` where stacks are nested."""

    kind: Literal["stack"]
    parts: dict[str, RewardConfig]
    """By any name; each counts by its `weight`."""
    clip: tuple[float, float] | None = None
    """The lowest and the highest sum."""


class CascadeReward(Judged):
    """One judge after the other: the next is asked only about what the one before did not pass or could not judge."""

    kind: Literal["cascade"]
    steps: list[RewardConfig]
    """Cheap ones first: a rule, then a judge. The last one asked has the say."""
    threshold: float = 1.0
    """An answer with at least this reward passes."""


RewardConfig = Annotated[
    ExactReward
    | NumericReward
    | MathReward
    | ChoiceReward
    | F1Reward
    | SubstringReward
    | RegexReward
    | JsonSchemaReward
    | InstructionsReward
    | CodeReward
    | ReasoningGymReward
    | JudgeReward
    | ModelReward
    | ImportReward
    | OverlongReward
    | RepetitionReward
    | LanguageReward
    | LengthReward
    | EarnedReward
    | StackReward
    | CascadeReward,
    Field(discriminator="kind"),
]
StackReward.model_rebuild()
CascadeReward.model_rebuild()


class RewardWorkersConfig(Node):
    """Where rewards run that need processes of their own: verifiers that may hang, and your code."""

    num_workers: int = Field(default=1, ge=1)
    """Groups of processes; on Ray each is an actor that may live on a node of its own."""
    num_processes: int | None = Field(default=None, ge=1)
    """Processes that one domain may use at once in each group; default: one per core. Each further domain that is judged
    in processes may start one more, so that no domain waits for another."""


def walk(configs: Mapping[str, RewardConfig]) -> Iterator[tuple[str, RewardConfig]]:
    """Every reward node with its name path, nested ones included: `math`, `math.parts.answer`, `math.steps.0`."""
    for name, node in configs.items():
        yield name, node
        for part, nested in walk(nested_in(node)):
            yield f"{name}.{part}", nested


def nested_in(node: RewardConfig) -> dict[str, RewardConfig]:
    """The rewards that a stack or a cascade is made of, by their path below it; none for other kinds."""
    if isinstance(node, StackReward):
        return {f"parts.{name}": part for name, part in node.parts.items()}
    if isinstance(node, CascadeReward):
        return {f"steps.{index}": step for index, step in enumerate(node.steps)}
    return {}


def wants_host(node: RewardConfig) -> bool:
    """Whether it asks a model that the run must host."""
    return isinstance(node, ModelReward) or (isinstance(node, JudgeReward) and isinstance(node.model, HostedJudge))


def needs_process(node: RewardConfig) -> bool:
    """Whether it runs in worker processes: its kind does, or it searches by a pattern, which may take for ever."""
    return node.in_process or (isinstance(node, Extracting) and node.pattern is not None)
