"""What would stop a run before its first step, found before a model is loaded: by `reroll check`, and by every `train`.

Beyond `config.check`, which reads the config and the names of files, this reads the rows, asks the hub for models that are not
here, reckons whether the GPUs are large enough, and asks what packages registered in the group `reroll.preflight`: functions
`(config, *, opens) -> Iterable[Violation]`. Loads neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reroll.config.check import notes_of
from reroll.config.host import model_folder
from reroll.config.imports import import_object, search_in
from reroll.config.pipeline import PipelineConfig
from reroll.config.registry import entry_names, load_entry
from reroll.config.tree import RlvrConfig
from reroll.data.sources import SourceRows
from reroll.errors import ConfigError, DataError, Violation
from reroll.pipeline.planner import memory_violations

GET_THE_MODEL = "go online, give a folder, or a model of `reroll models fetch`"


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known of a config that would run."""

    notes: list[str]
    """What runs, and is hardly what was meant."""
    rows: SourceRows
    """Of all sources, as the config's `reads` gives them, for the run that follows: they are read once."""


def preflight(config: PipelineConfig, *, code_folder: Path, only_checks: bool = False, again: bool = False) -> Checked:
    """Raise ConfigError with everything that is wrong; else tell what is to be known of the config.

    Modules are looked for in `code_folder` and the working directory. With `only_checks` no run follows: then
    models and environments are opened as a run would open them, and a hub that does not answer is no fault of the config's, but
    something to know. With `again` the same config has passed before, and nothing is looked at twice.
    """
    search_in([code_folder, Path()])
    if again:
        return Checked([], {})
    is_replay = isinstance(config, RlvrConfig) and config.recorded is not None  # It reads no rows and judges nothing.
    rows, found = ({}, []) if is_replay else _rows(config)
    absent, unseen = _hub_models(config)
    too_large, tight = memory_violations(config)
    found += [*absent, *_damaged_models(config), *too_large]
    if not only_checks:
        found += [Violation(where, problem, GET_THE_MODEL) for where, problem in unseen.items()]
    for name in () if is_replay else entry_names("reroll.preflight"):
        found += load_entry("reroll.preflight", name)(config, opens=only_checks)
    if found:
        raise ConfigError(found)
    not_seen = [f"{where}: {problem}; it could not be looked up, and train will need it" for where, problem in unseen.items()]
    repeats = () if is_replay else _repeats(config, rows)
    return Checked([*notes_of(config), *repeats, *tight, *not_seen], rows)


def _rows(config: PipelineConfig) -> tuple[SourceRows, list[Violation]]:
    """The rows of all sources that can be read, and what is wrong with the others."""
    read, rows, found = import_object(config.reads), {}, []
    for where, source in config.data.named():
        try:
            rows[where] = read(source)
        except DataError as error:
            found.append(Violation(where, str(error), "mend it, then check again"))
    return rows, found


def _repeats(config: PipelineConfig, rows: SourceRows) -> Iterator[str]:
    num_rows = sum(len(found) for where, found in rows.items() if where.startswith("data.train"))
    if isinstance(config, RlvrConfig) and config.rollout.prompts_per_step > num_rows:
        wanted = config.rollout.prompts_per_step
        yield (
            f"rollout.prompts_per_step is {wanted}, and data.train has {num_rows}: each step asks some of them twice "
            "(to draw more samples of each, raise rollout.group_size)"
        )


def _damaged_models(config: PipelineConfig) -> Iterator[Violation]:
    """Of the models on this disk: weights that a download or a disk cut short."""
    from safetensors import SafetensorError, safe_open

    for where, node in config.named_models():
        folder = model_folder(node.model) if node.model else None
        for file in sorted(folder.glob("*.safetensors")) if folder else ():
            try:
                with safe_open(file, framework="numpy"):
                    pass  # It has compared the file's length with what its head says.
            except (OSError, SafetensorError) as error:
                yield Violation(f"{where}.model", f"{file} is damaged: {error}", "get the model's files again")


def _hub_models(config: PipelineConfig) -> tuple[list[Violation], dict[str, str]]:
    """Of the models that are not on this disk: those that are not to be had, and {path: problem} where the hub was silent."""
    names = {
        f"{where}.model": node.model for where, node in config.named_models() if node.model and model_folder(node.model) is None
    }
    absent: list[Violation] = []
    unseen: dict[str, str] = {}
    if not names:
        return absent, unseen
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    # The root of what the hub's HTTP client raises, whichever it uses.
    no_connection: type[Exception] = HfHubHTTPError.__mro__[1]
    silent: Exception | None = None
    for where, name in names.items():
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            continue
        try:
            if silent is None:  # One time-out is enough.
                HfApi().model_info(name, timeout=10)
        except RepositoryNotFoundError:
            fix = "check the name; where it is private or gated, `hf auth login`"
            absent.append(Violation(where, f"the hub has no {name}, or not for you", fix))
        except (no_connection, OSError) as error:
            silent = error
        if silent is not None:
            unseen[where] = f"{name} is not on this machine, and the hub does not answer: {silent}"
    return absent, unseen
