"""The parts of a run: where it runs, what it trains, what generates, how samples flow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticKnownError

from reroll.config.base import Node
from reroll.config.registry import KindConfig, entry_names
from reroll.config.strategy import StrategyConfig, TorchStrategyConfig
from reroll.errors import Violation

if TYPE_CHECKING:
    from reroll.config.cluster import MachinesConfig
    from reroll.config.tree import RlvrConfig


class DeviceSelectionConfig(Node):
    """The first so many GPUs of the nodes that match, instead of their indices. Needs `runtime: {kind: ray}`.

    Roles with the same selection get the same GPUs, and take turns on them.
    """

    gpus: int = Field(ge=1)
    """How many."""
    label: dict[str, str] = Field(default_factory=dict)
    """What a node must carry, e.g. `{pool: a100}` after `ray start --labels pool=a100`, or `{ray.io/accelerator-type: H100}`,
    which Ray sets by itself."""
    min_memory_gb: float | None = Field(default=None, gt=0)
    """Memory of each GPU, as it is sold: 80 takes an H100. Known by its kind, else by the node's label `gpu-memory-gb`."""
    skip: int = Field(default=0, ge=0)
    """Leave out so many of those that match, for another role to have them to itself."""


def _devices_form(value: object) -> str:
    return "selection" if isinstance(value, dict | DeviceSelectionConfig) else "indices"


ELASTIC = "elastic"
"""The devices of engines that come and go with the nodes of a cluster."""

_Indices = Annotated[str | int | list[int], Field(union_mode="left_to_right")]
Devices = Annotated[
    Annotated[_Indices, Tag("indices")] | Annotated[DeviceSelectionConfig, Tag("selection")],
    Discriminator(_devices_form),
    Field(
        description="`auto` (the GPUs if there are any, else the CPU), `cpu`, a GPU index, a range such as `0-3`, a list, or "
        "GPUs by what their nodes are: `{gpus: 4, label: {pool: a100}}`."
    ),
]


class RuntimeConfig(KindConfig):
    """Where a run's workers live. What a kind `runs` gives a `Runtime`."""

    group: ClassVar[str] = "reroll.runtimes"
    spans_nodes: ClassVar[bool] = False
    """Whether workers may live on several machines, so that their GPUs may be chosen by what their nodes are."""

    def num_gpus_in(self, cluster: MachinesConfig | None, *, here: int) -> int | None:
        """How many GPUs `devices` may name, where this machine has `here`; None if only the running cluster knows."""
        return here


class LocalRuntimeConfig(RuntimeConfig):
    """Workers are threads of this process. Nothing to install; breakpoints work."""

    runs: ClassVar[str] = "reroll.runtime.local:make_local"

    kind: Literal["local"] = "local"


class WatchedRuntimeConfig(RuntimeConfig):
    """What runtimes have in common whose workers can be ended."""

    watchdog_s: float | None = Field(default=600.0, gt=0)
    """A model's worker that trains, predicts or generates and shows no sign of life (a micro-batch, a step of an engine) within
    this time counts as lost: its stacks are printed, and it is ended. null: it is waited for."""


class ProcessesRuntimeConfig(WatchedRuntimeConfig):
    """Each worker is a process of its own on this machine. Nothing to install."""

    runs: ClassVar[str] = "reroll.runtime.processes:make_processes"

    kind: Literal["processes"]


class OptimConfig(Node):
    """AdamW and its schedule."""

    lr: float = Field(default=1e-6, gt=0)
    """The learning rate after warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled from the gradient, as AdamW has it."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: stay, or decay to `min_lr_ratio` over the run."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises to `lr`."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of `lr` at which a decay ends."""


class LoraConfig(Node):
    """Train low-rank adapters instead of the weights themselves."""

    rank: int = Field(default=16, ge=1)
    """Width of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the layers to adapt, e.g. [q_proj, v_proj]."""


class FixedModelConfig(Node):
    """A model that only answers, such as a teacher."""

    model: str
    """A Hugging Face folder or hub id, or the name of a model that `reroll models fetch` stored."""
    strategy: StrategyConfig = Field(default_factory=TorchStrategyConfig)
    """How it is computed: in one process, or over several."""
    devices: Devices = "auto"


class ModelConfig(FixedModelConfig):
    """A model that is trained."""

    lora: LoraConfig | None = None
    """null: every weight is trained."""
    train_vision: bool = False
    """Of a model that sees: whether its tower, and what joins that to its words, is trained too. false: they stay as they are,
    and a picture is looked at once (docs/images.md). An adapter (`lora`) is for the words alone."""
    swap: Literal["none", "optimizer", "all"] = "none"
    """What moves to the host's memory while another role holds the same devices: nothing, masters and optimizer, or the
    weights too. Has no effect where no device is shared."""
    optim: OptimConfig = Field(default_factory=OptimConfig)

    @property
    def replays_routes(self) -> bool:
        """Whether it takes the experts that the engine chose."""
        return False


class PolicyConfig(ModelConfig):
    """The model under training."""

    exact: bool = False
    """Trainer and embedded engine give every token log-probs that are equal to the bit, in fp32 and in bf16, whatever it is
    computed together with; the run ends if a single one differs. In one process; docs/engines.md."""
    replay_routes: bool | None = None
    """Of a model with experts: whether an update sends each token to the experts that it went to in the engine, instead of
    choosing anew. null: where the engine can tell of them (embedded) and the family is known (docs/moe.md)."""

    @property
    def replays_routes(self) -> bool:
        return self.replay_routes is not False


class EngineConfig(KindConfig):
    """What writes samples. An engine that names no kind is `embedded`.

    What any other `runs` is a class with `open(model, node, *, precision, device, lora)`, which gives an `infer.base.Engine`.
    """

    group: ClassVar[str] = "reroll.engines"
    default_kind: ClassVar[str | None] = "embedded"
    tells_routes: ClassVar[bool] = False
    """Whether it can tell to which experts each token went."""

    devices: Devices = "auto"
    """As of a model. Or `elastic` (on Ray): engines begin on GPUs that no model names, and others join while the run goes on,
    on every GPU that is free or comes with a new node (on a cluster without GPUs, one on each node); each leaves with its
    node."""
    num_workers: int = Field(default=1, ge=1)
    """Independent engines; samples are spread over them by load. Of elastic ones, how many the run begins with."""
    max_workers: int | None = Field(default=None, ge=1)
    """How many elastic engines there may be; null: as many as there is room for."""
    max_running: int = Field(default=64, ge=1)
    """Sequences decoded together."""
    precision: Literal["same", "fp32", "bf16", "fp8"] = "same"
    """`same` follows the policy's precision; equal ones on one device share the trainer's parameters. fp8 (docs/engines.md):
    layers hold 8-bit codes of their weights, made at every push, and samples are weighed by trainer / engine."""
    sleep: bool = False
    """While another role holds its device: true frees the KV cache, and requests in flight are prefilled again when the engine
    is back; false only pauses."""
    report_every: int = Field(default=64, ge=1)
    """The controller learns the tokens of an unfinished sample in blocks of so many: what an engine wrote since the last one is
    drawn again if the engine, or the run, is lost."""

    @property
    def gpus_per_worker(self) -> int:
        """GPUs that share each layer of one engine."""
        return 1

    @property
    def reads_again(self) -> bool:
        """Whether the contexts of requests in flight are read again by weights that come."""
        return True

    def ranks(self, devices: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """The devices of each worker: workers are dealt out over them, each taking as many as it is cut over."""
        width = self.gpus_per_worker
        parts = [devices[start : start + width] for start in range(0, len(devices) - width + 1, width)] or [devices]
        return tuple(parts[rank % len(parts)] for rank in range(self.num_workers))

    def violations(self, config: RlvrConfig) -> Iterator[Violation]:
        """What keeps this kind from running as asked."""
        yield from ()


class EmbeddedEngineConfig(EngineConfig):
    """reroll's own engine: continuous batching over the Hugging Face modules the trainer runs."""

    tells_routes: ClassVar[bool] = True

    kind: Literal["embedded"] = "embedded"
    cache_gib: float | None = Field(default=None, gt=0)
    """Memory for the keys and values of each engine, allocated once. When it is full, waiting requests wait and the youngest
    running ones give way; both then write what they would have written. null: what the requests of a step may come to need,
    and later more, up to 70 % of what the GPU has free when the engine first reads; on a CPU, all there is."""
    draft: Literal["off", "auto", "always"] = "off"
    """Whether steps check guesses at the next tokens, taken from siblings, earlier answers to the same prompt and the context:
    the same tokens in fewer steps. auto: where few run and the engine measures that it is quicker; always: at any price."""
    new_weights: Literal["keep", "read_again"] = "keep"
    """What becomes of the KV cache of requests in flight when weights come. read_again: the new weights
    compute it anew, which takes a prefill; then a token depends on the weights that wrote it and on nothing older, and
    `reroll replay --draw` can draw all of the run again."""

    @property
    def reads_again(self) -> bool:
        return self.new_weights == "read_again"


class DomainRolloutConfig(Node):
    """How the samples of one domain are drawn. What is left out is as `rollout` says."""

    group_size: int | None = Field(default=None, ge=1)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_total_tokens: int | None = Field(default=None, ge=2)
    min_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, gt=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop: list[str] | None = None


class RolloutConfig(Node):
    """How samples are drawn and admitted."""

    prompts_per_step: int = Field(default=8, ge=1)
    """Groups that one step is trained on."""
    group_size: int = Field(default=8, ge=1)
    """Siblings drawn for each prompt."""
    max_staleness: int = Field(default=0, ge=0)
    """How many weight versions a trained sample may lag behind: 0 is synchronous; more overlaps generation and training."""
    oversample: float = Field(default=1.0, ge=1.0)
    """Admit this many times the prompts a step needs; the rest is aborted when enough have finished. Their groups come first in
    the next step, with the seeds that they had: they go on where the staleness budget allows it and are drawn again where not,
    and `max_tries` bounds how often. So what is trained on is what was drawn, slow or quick."""
    long_rounds: bool = False
    """In synchronous steps, put off the surplus of `oversample` until a step's worth of prompts is, and give these a step of
    their own. Its surplus is put off to a longer one, until `max_tries` says to await all. So few steps are as slow as their
    slowest sample. Nothing is left out, but what is long is trained on some steps later, and together."""
    extra_samples: int = Field(default=0, ge=0)
    """Samples drawn for each group beyond `group_size`; when enough have ended well, the slowest are aborted. So
    short episodes are trained on more often than they are drawn, and where length and reward go together the policy is pulled
    towards the short ones: compare `rollout/early_tokens` and `early_reward` with `late_…` in the metrics."""
    take_window: int = Field(default=1, ge=1)
    """How many steps' worth of the oldest groups may be taken from: 1 is strictly oldest first. With more, a slow group is
    overtaken, until the coming steps could no longer train on it in time: then it is waited for."""
    drop_zero_variance_groups: bool = False
    """Dynamic filter: drop groups whose rewards are all equal and admit another prompt in their place."""
    max_drops: int = Field(default=20, ge=1)
    """Groups that a domain may drop for each one it owes a step. After that, what it still owes the step comes from the other
    domains, and a warning names it: a domain without signal cannot stall the run. Says nothing where there is one domain."""
    max_tries: int = Field(default=3, ge=1)
    """A prompt whose group was aborted is queued again, so often in all; the last try is waited for, or the slowest prompts
    would never be learned from."""
    max_failed_fraction: float = Field(default=0.5, gt=0, le=1)
    """Stop the run when more than this share of recent samples failed."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """A sample with a longer prompt fails."""
    max_tokens: int = Field(default=256, ge=1)
    """Tokens of a completion."""
    max_total_tokens: int | None = Field(default=None, ge=2)
    """All that an episode of several turns may hold; null: as much as a micro-batch."""
    min_tokens: int = Field(default=0, ge=0)
    """No completion ends sooner."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the draw. Log-probs are taken at the same temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw among the likeliest tokens that make up this share; 1: among all."""
    top_k: int = Field(default=0, ge=0)
    """Draw among so many of the likeliest tokens; 0: among all."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a completion."""
    domains: dict[str, DomainRolloutConfig] = Field(default_factory=dict)
    """What is different for a domain, e.g. `{math: {group_size: 16, max_tokens: 512}}`."""

    def of(self, domain: str) -> RolloutConfig:
        """The settings that hold for a domain."""
        return _narrowed(self, self.domains.get(domain))


class DomainEvalConfig(Node):
    """How one domain is evaluated. What is left out is as `eval` says."""

    samples: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    threshold: float | None = None


class EvalConfig(Node):
    """Held-out evaluation."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only before the first and after the last step."""
    samples: int = Field(default=1, ge=1)
    """Completions per prompt: pass@1 is their mean, pass@k and maj@k are reported up to this k."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    threshold: float = 1.0
    """A completion passes when its reward reaches this."""
    domains: dict[str, DomainEvalConfig] = Field(default_factory=dict)
    """What is different for a domain, e.g. `{math: {samples: 16, temperature: 0.6}}`."""

    def of(self, domain: str) -> EvalConfig:
        """The settings that hold for a domain."""
        return _narrowed(self, self.domains.get(domain))


C = TypeVar("C", bound=Node)


def _narrowed(config: C, changes: Node | None) -> C:
    """The config with what a domain sets for itself."""
    return config if changes is None else config.model_copy(update=changes.model_dump(exclude_none=True))


class CheckpointConfig(Node):
    """When state is written."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: only at the end, and when the run is interrupted."""
    keep: int = Field(default=2, ge=1)
    """How many of the newest to keep."""
    background: bool = True
    """Copy the state to the host's memory, and write the copy while the run goes on. The copy takes 12 to 16 bytes per trained
    parameter, shared out over the ranks, until it is written; false: the run waits for the disk, and no copy is made."""
    verify: bool = True
    """Before a run goes on from a checkpoint, read all of it and compare it with the sums it was written with; false: look at
    names and sizes only."""
    replica_share: float = Field(default=0.01, ge=0, le=1)
    """How much of the run's time replicas may take: further checkpoints, in this machine's memory, for when it loses a process.
    0: none. There are none under Ray, without `background`, or where memory lacks (docs/healing.md)."""


def _registered_tracker(name: str) -> str:
    if name not in (known := entry_names("reroll.trackers")):
        raise PydanticKnownError("literal_error", {"expected": ", ".join(f"'{one}'" for one in known)})
    return name


TrackerName = Annotated[
    str, AfterValidator(_registered_tracker), WithJsonSchema({"enum": entry_names("reroll.trackers"), "type": "string"})
]
"""One of the group `reroll.trackers`."""


def _folder_name(name: str) -> str:
    if name in (".", "..") or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError("a run is a folder of this name: use letters, digits, - and _, e.g. my-run_2")
    return name


class RunConfig(Node):
    """Where a run lives and how long it is."""

    name: Annotated[str, AfterValidator(_folder_name)] = "run"
    """Of its folder under `runs_dir`."""
    runs_dir: Path = Path("runs")
    """Where runs lie, seen from the working directory."""
    seed: int = 0
    """Of all that is drawn: prompts, samples, shuffles."""
    steps: int = Field(default=100, ge=1)
    """Batches to train on, those before a resume included."""
    restarts: int = Field(default=3, ge=0)
    """How often the run is started anew, and goes on from its last checkpoint and its journal, after a process or a machine was
    lost; those after which it got further do not count. 0: it ends."""
    trackers: list[TrackerName] = Field(default_factory=list)
    """Beside metrics.jsonl, which is always written: tensorboard, wandb, trackio, mlflow, opentelemetry, or one of another
    package's."""
    profile_steps: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Steps in which every rank of the policy records what it does (torch.profiler), for `reroll trace`; the first is 1."""
    journal_gib: float | None = Field(default=10.0, gt=0)
    """How much the journal may keep of what samples wrote, newest first, at 7 to 8 bytes a token,
    and where experts are replayed what these take (docs/moe.md), and a tenth as much of events; null:
    all. A resumed run needs what came after its checkpoint."""
