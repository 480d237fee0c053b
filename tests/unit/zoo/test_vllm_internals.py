"""What is used of vLLM's inside is listed in one place, and missed there with the version that has it; without vLLM."""

import ast
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import reroll_zoo.vllm
from reroll.errors import ModelError
from reroll_zoo.vllm import internals
from reroll_zoo.vllm.internals import CheckedVllm, check_engine, checked_options


def imported() -> set[str]:
    """All that the package takes from vLLM, by the imports in its files."""
    found = set()
    for file in Path(reroll_zoo.vllm.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_import_from_vllm_is_looked_for_before_an_engine_opens() -> None:
    assert imported() == {f"{module}.{name}" for module, names in internals._CLASSES.items() for name in names.split()}


@pytest.fixture
def other_vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Modules of a vLLM that has all of it."""
    modules = {}
    for module, names in internals._CLASSES.items():
        modules[module] = ModuleType(module)
        for name in names.split():
            setattr(modules[module], name, object())
        monkeypatch.setitem(sys.modules, module, modules[module])
    return modules


def test_a_version_that_lacks_something_is_told_what_and_which_one_has_it(other_vllm: dict[str, ModuleType]) -> None:
    internals.find_inside()
    del other_vllm["vllm.v1.sample.logits_processor"].BatchUpdate
    with pytest.raises(ModelError, match=r"lacks .*logits_processor.BatchUpdate\).*pip install 'vllm==0.32.0'.*embedded"):
        CheckedVllm.open("a-model", None)


def test_a_module_that_has_gone_is_named(other_vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.executor.abstract", None)
    with pytest.raises(ModelError, match=r"lacks .*vllm.v1.executor.abstract \("):
        internals.find_inside()


def test_an_engine_that_is_put_together_otherwise_is_refused() -> None:
    llm = SimpleNamespace()
    for path in internals._PARTS:
        part = llm
        for name in path.split("."):
            part.__dict__.setdefault(name, SimpleNamespace())
            part = getattr(part, name)
    check_engine(llm)
    del llm.engine_core.engine_core.batch_queue
    with pytest.raises(ModelError, match=r"lacks .*\(LLMEngine.engine_core.engine_core.batch_queue\)"):
        check_engine(llm)


@dataclass
class Arguments:
    """Stands for vLLM's."""

    kv_cache_dtype: str = "auto"
    seed: int = 0


def test_options_go_to_vllm_and_names_that_it_does_not_have_are_refused() -> None:
    assert checked_options({"kv_cache_dtype": "fp8"}, Arguments) == {"kv_cache_dtype": "fp8"}
    with pytest.raises(ModelError, match=r"engine.options: vLLM .* no setting kv_cache_type, did you mean kv_cache_dtype\?"):
        checked_options({"kv_cache_type": "fp8"}, Arguments)


def test_the_extra_asks_for_no_version_older_than_the_one_that_is_tested() -> None:
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["vllm"] == [f"vllm>={internals.TESTED}"]
