"""A language model as a judge: it reads the answer and gives it a score."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from reroll.config.base import Node, Pattern
from reroll.config.reward_hosted import HostedJudgeConfig, OpenedRewardConfig, check_ascending
from reroll.errors import Violation

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


class EndpointJudgeConfig(Node):
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


JudgeModel = Annotated[EndpointJudgeConfig | HostedJudgeConfig, Field(discriminator="kind")]


class JudgeConfig(OpenedRewardConfig):
    """A language model reads the answer and gives it a score. An empty answer gets the worst one unread."""

    runs: ClassVar[str] = "reroll_zoo.judge.judge:open_judge"
    hosts: ClassVar[str] = "reroll_zoo.judge.hosted:host_judge"

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
    scale: Annotated[tuple[float, float], AfterValidator(check_ascending)] = (0.0, 10.0)
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

    @property
    def hosted(self) -> tuple[str, HostedJudgeConfig] | None:
        return ("model", self.model) if isinstance(self.model, HostedJudgeConfig) else None

    def violations(self, *, folder: Path) -> Iterator[Violation]:
        if self.votes > 1 and self.temperature == 0:
            problem = f"{self.votes} votes of a greedy judge are all the same"
            yield Violation("votes", problem, "set temperature above 0, or votes to 1")
        if self.template is not None and self.template_file is not None:
            yield Violation("template_file", "is set beside template", "keep one of them")
        try:
            self.read_template(folder)
        except (OSError, ValueError) as error:
            fix = "give a text file beside the YAML or in the working directory"
            yield Violation("template_file", f"{self.template_file} cannot be used: {error}", fix)
        if isinstance(self.model, EndpointJudgeConfig):
            variable = self.model.api_key_env
            if variable and not os.environ.get(variable):
                problem = f"the environment variable {variable} is not set"
                yield Violation("model.api_key_env", problem, f"export {variable}=…, or leave it out for a server without keys")
            if importlib.util.find_spec("aiohttp") is None:
                yield Violation("model.kind", "needs the package aiohttp", "pip install 'reroll[agents]'")

    def read_template(self, folder: Path) -> str | None:
        """The template, which may lie in `folder` or in the working directory; None for the built-in one.

        Raises OSError or ValueError for a file that cannot be one.
        """
        if self.template_file is None:
            return self.template
        beside = folder / self.template_file
        return check_template((beside if beside.is_file() else self.template_file).read_text(encoding="utf-8"))
