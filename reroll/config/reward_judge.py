"""Models as judges: a language model that reads the answer and gives it a score, and a reward model with a scalar head."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from reroll.config.base import Node, Pattern
from reroll.config.parts import Devices, FixedModelConfig
from reroll.config.reward_base import RewardConfig

PLACEHOLDERS = ("question", "answer", "reference", "scale")
"""What a template may name: what was asked, what the policy said, the reference answer, and what a score looks like."""

PLACEHOLDER = re.compile(r"\{\{(?P<literal>\w+)\}\}|\{(?P<name>\w+)\}")
"""`{name}` is filled in, `{{name}}` is shown as `{name}`; other braces, as of JSON, are just braces."""


def check_template(text: str) -> str:
    """The template, if it names nothing unknown and shows the answer; else ValueError."""
    names = {match["name"] for match in PLACEHOLDER.finditer(text)} - {None}
    if unknown := sorted(names - set(PLACEHOLDERS)):
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise ValueError(f"unknown placeholder {{{unknown[0]}}}: use {known}, or {{{{{unknown[0]}}}}} for the word in braces")
    if "answer" not in names:
        raise ValueError("the template does not show the answer: put {answer} into it")
    return text


def _check_one_group(pattern: str) -> str:
    if re.compile(pattern).groups != 1:
        raise ValueError("the pattern needs exactly one group, around the score: write (?:…) for the others")
    return pattern


def _check_ascending(scale: tuple[float, float]) -> tuple[float, float]:
    if not scale[0] < scale[1]:
        raise ValueError("the scale must go from low to high, e.g. [0, 10]")
    return scale


def _undo_yaml(words: Any) -> Any:
    """YAML reads the keys yes, true and on as one and the same; so every word it may have been gets the score."""
    if not isinstance(words, dict):
        return words
    meant = {True: ("yes", "true", "on"), False: ("no", "false", "off")}
    return {
        name: score
        for key, score in words.items()
        for name in (meant[key] if isinstance(key, bool) else (str(key).casefold(),))
    }


class EndpointJudge(Node):
    """A model behind any server that speaks OpenAI's chat completions."""

    kind: Literal["endpoint"]
    url: str = Field(pattern=r"^https?://", examples=["http://localhost:8000/v1"])
    """The base URL as OpenAI's clients take it, e.g. https://api.openai.com/v1."""
    model: str
    """The server's name for it."""
    api_key_env: str | None = Field(default=None, pattern=r"^\w+$", examples=["OPENAI_API_KEY"])
    """The environment variable that holds the key; the key itself never stands in a config."""
    timeout_s: float = Field(default=120.0, gt=0)
    """For one request; a slower one is given up and tried again."""
    max_in_flight: int = Field(default=32, ge=1)
    """Requests under way at once."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Requests are spaced so that there are never more; null: no limit."""
    retries: int = Field(default=5, ge=0)
    """Further tries after an overloaded, failing, silent or unreachable server. A refused request is not tried again."""
    backoff_s: float = Field(default=1.0, gt=0)
    """The wait before the first retry; it doubles with each, up to a minute. A longer wait that the server asks for wins."""
    body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, e.g. {reasoning_effort: low}; null leaves out what would be sent, e.g. {seed: null}."""
    price_per_million_prompt_tokens: float = Field(default=0.0, ge=0)
    """In any currency: what was spent is then part of the metrics. So is the next."""
    price_per_million_completion_tokens: float = Field(default=0.0, ge=0)
    """In any currency: what was spent is then part of the metrics."""


class HostedJudge(Node):
    """A model that the run hosts itself, on engines of its own. Rewards that describe the same one share it."""

    kind: Literal["hosted"]
    model: str
    """A Hugging Face folder or hub id, or the name of a model that `reroll models fetch` stored."""
    devices: Devices = "auto"
    num_workers: int = Field(default=1, ge=1)
    """Independent engines; requests are spread over them by load."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Of its weights."""
    max_running: int = Field(default=64, ge=1)
    """Sequences decoded together by one engine."""


JudgeModel = Annotated[EndpointJudge | HostedJudge, Field(discriminator="kind")]


class JudgeReward(RewardConfig):
    """A language model reads the answer and gives it a score. An empty answer gets the worst one unread."""

    kind: Literal["judge"] = "judge"
    model: JudgeModel
    """Who judges: a model behind an endpoint, or one that the run hosts."""
    template: Annotated[str, AfterValidator(check_template)] | None = None
    """What the judge is told, with {question}, {answer}, {reference} and {scale} filled in; null: a built-in one. The answer
    stands between marks that it cannot have written itself."""
    template_file: Path | None = None
    """A file that holds the template instead, beside the YAML or in the working directory."""
    pattern: Annotated[Pattern, AfterValidator(_check_one_group)] = (
        r"(?i)^(?:[\s*_#-]*(?:(?:my|the|final|overall|total)\s+)*score|\s*(?:\{.*)?\"score\")[*_\s]*[:=]\s*(.*)$"
    )
    """Its one group is the score. It is looked for on the last line of the judge's own words, since what stands before may be
    quoted from the answer; several scores there are none. The default takes a line that begins with `Score:`, or JSON."""
    scale: Annotated[tuple[float, float], AfterValidator(_check_ascending)] = (0.0, 10.0)
    """The worst and the best score, which become 0 and 1; one outside is taken for unreadable."""
    words: Annotated[dict[str, float], BeforeValidator(_undo_yaml)] = Field(default_factory=dict)
    """Words instead of numbers, and what each is worth, e.g. {yes: 1, partly: 0.5, no: 0}."""
    votes: int = Field(default=1, ge=1)
    """How often each answer is judged."""
    aggregate: Literal["mean", "median", "majority"] = "mean"
    """What the votes come to. majority: the most frequent score, the lowest of those if several are."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy. Several votes need more, or they are all the same."""
    max_tokens: int = Field(default=1024, ge=1)
    """What the judge may write, its thinking included. A reply that is cut off has no score."""
    on_unparseable: Literal["fail"] | float = "fail"
    """When no reply holds a score, though each was asked for twice: the sample gets this score; or it fails, if the judge
    cannot score "I do not know." as an answer to the same question either. If it can, the answer is at fault and gets the
    lowest score: to confuse the judge must not be a way out. So does one that is too long for the judge, or refused."""
    cache: Path | None = None
    """The file that remembers what the judge said, for resumed and for other runs; null: a file in the run's folder."""


class ModelReward(RewardConfig, FixedModelConfig):
    """A reward model: a decoder with one scalar head, as the `reward_model` pipeline trains it or Hugging Face stores it."""

    kind: Literal["reward_model"] = "reward_model"
    output: Literal["raw", "sigmoid"] = "raw"
    """What becomes of the head's number first; sigmoid puts it between 0 and 1."""
    scale: float = 1.0
    """It is multiplied by this."""
    clip: Annotated[tuple[float, float], AfterValidator(_check_ascending)] | None = None
    """Then kept between these."""
    score_at: Literal["turn", "template"] = "turn"
    """Where the head is read: at the token that ends the answer, as reroll trains it, or where the chat template ends, often
    a newline later, as many published models were trained."""
    max_tokens: int = Field(default=4096, ge=2)
    """A longer conversation is cut at its end."""
