import json
import re
import sys
from pathlib import Path

import pytest

from reroll.config.data import DataConfig, ImportSourceConfig, JsonlSourceConfig
from reroll.data.sources import load_eval, load_source, load_train
from reroll.errors import DataError
from reroll_zoo.reasoning_gym.config import ReasoningGymSourceConfig
from reroll_zoo.tables.config import DatasetsSourceConfig, ParquetSourceConfig


def write_jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows))
    return path


def load(path: Path, *rows: object, **options: object):
    return load_source(JsonlSourceConfig(path=write_jsonl(path / "rows.jsonl", *rows), **options))


def error_of(path: Path, *rows: object, **options: object) -> str:
    with pytest.raises(DataError) as error:
        load(path, *rows, **options)
    return str(error.value)


def test_a_prompt_column_becomes_one_user_message_and_other_columns_are_kept(tmp_path):
    (prompt,) = load(tmp_path, {"prompt": "1+1?", "answer": 2, "level": "easy", "tags": ["a"]}, domain="math")
    assert prompt.id == "math/0"
    assert prompt.messages == ({"role": "user", "content": "1+1?"},)
    assert (prompt.domain, prompt.answer) == ("math", "2")
    assert prompt.extra == {"level": "easy", "tags": ["a"]}


def test_columns_can_have_other_names(tmp_path):
    (prompt,) = load(tmp_path, {"question": "1+1?", "gold": 2.5, "prompt": "x"}, prompt_key="question", answer_key="gold")
    assert prompt.messages[0]["content"] == "1+1?"
    assert prompt.answer == "2.5"
    assert prompt.extra == {"prompt": "x"}


def test_a_rows_own_system_message_stands_in_place_of_the_sources(tmp_path):
    prompts = load(
        tmp_path,
        {"prompt": "hi"},
        {"prompt": "hi", "system": "row"},
        {"messages": [{"role": "system", "content": "inside"}, {"role": "user", "content": "hi"}]},
        system="source",
    )
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["source", "row", "inside"]
    assert all(len(prompt.messages) == 2 for prompt in prompts)


def test_blank_lines_do_not_count_as_rows_but_keep_line_numbers_true(tmp_path):
    message = error_of(tmp_path, {"prompt": "a"}, "", "  ", '{"prompt": ')
    assert "line 4: broken JSON at column" in message
    assert "rows.jsonl" in message


def test_the_first_few_bad_rows_are_reported_at_once(tmp_path):
    message = error_of(
        tmp_path,
        '{"prompt" 1}',
        {"question": "a", "answer": "b"},
        {"prompt": 3},
        {"prompt": "  "},
        {"prompt": "fine"},
        [1, 2],
        {"prompt": 4},
        {"prompt": 5},
    )
    assert "line 1: broken JSON" in message
    assert "line 2: no `prompt` and no `messages`; it has: question, answer (set `prompt_key`" in message
    assert "line 3: `prompt` is a number, not a string" in message
    assert "line 4: `prompt` is empty" in message
    assert "line 6: a JSON list, not an object" in message
    assert "line 7" not in message


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": "hi"}, "`messages` is a string, not a list"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": ["hi"]}, "`messages[0]` is a string, not {role, content}"),
        ({"messages": [{"role": "user"}]}, "`messages[0]` has no `content`; it has: role"),
        ({"messages": [{"role": "human", "content": "hi"}]}, "`messages[0].role` is 'human', not one of system"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "`messages[0].content`: part 0 is 'hi': give"),
        ({"messages": [{"role": "user", "content": "hi", "tool_calls": [1]}]}, "would be lost: tool_calls"),
        ({"messages": [{"role": "system", "content": "be kind"}]}, "only a system message"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "ends with an assistant message"),
        ({"prompt": [{"role": "user", "content": "hi"}]}, "set `messages_key: prompt`"),
        ({"prompt": "hi", "answer": ["a", "b"]}, "`answer` is a list, not a string or a number"),
        ({"prompt": "hi", "answer": True}, "`answer` is a boolean"),
        ({"prompt": "hi", "answer": float("nan")}, "`answer` is nan"),
        ('{"prompt": "\\ud800"}', "lone surrogate"),
        ({}, "it has no keys"),
    ],
)
def test_a_bad_row_is_told_what_is_wrong_with_it(tmp_path, row, problem):
    message = error_of(tmp_path, row)
    assert "line 1" in message
    assert problem in message


def test_bytes_that_are_not_utf8_are_named_by_line(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "ok"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        load_source(JsonlSourceConfig(path=path))


def test_windows_files_with_a_byte_order_mark_are_read(tmp_path):
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [prompt.messages[0]["content"] for prompt in load_source(JsonlSourceConfig(path=path))] == ["a", "b"]


def test_an_empty_source_is_an_error(tmp_path):
    assert "is empty" in error_of(tmp_path)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load_source(JsonlSourceConfig(path=tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataError, match="is a folder"):
        load_source(JsonlSourceConfig(path=tmp_path))


def test_limit_reads_the_first_rows_only(tmp_path):
    assert len(load(tmp_path, {"prompt": "a"}, {"prompt": "b"}, "broken", limit=2)) == 2


def test_parquet_rows_read_as_jsonl_rows_do_and_errors_name_the_row(tmp_path):
    from datasets import Dataset

    rows = [{"prompt": "a", "answer": 1, "level": "x"}, {"prompt": "b", "answer": 2, "level": None}]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    (tmp_path / "jsonl").mkdir()
    assert load_source(ParquetSourceConfig(kind="parquet", path=tmp_path / "rows.parquet")) == load(tmp_path / "jsonl", *rows)

    Dataset.from_list([{"prompt": "a"}, {"prompt": None}]).to_parquet(str(tmp_path / "bad.parquet"))
    with pytest.raises(DataError, match="row 1: no `prompt`"):
        load_source(ParquetSourceConfig(kind="parquet", path=tmp_path / "bad.parquet"))
    (tmp_path / "text.parquet").write_text("not parquet at all")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        load_source(ParquetSourceConfig(kind="parquet", path=tmp_path / "text.parquet"))


def test_a_saved_datasets_folder_is_read_with_and_without_splits(tmp_path):
    from datasets import Dataset, DatasetDict

    message = [{"role": "user", "content": "hi"}]
    one = Dataset.from_list([{"messages": message, "answer": "a"}])
    one.save_to_disk(str(tmp_path / "one"))
    DatasetDict(train=one, test=one).save_to_disk(str(tmp_path / "two"))

    def source(name: str, split: str | None = None) -> DatasetsSourceConfig:
        return DatasetsSourceConfig(kind="datasets", path=tmp_path / name, split=split)

    assert load_source(source("one"))[0].messages == tuple(message)
    assert load_source(source("two", "test")) == load_source(source("one"))
    with pytest.raises(DataError, match="set `split` to one of: train, test"):
        load_source(source("two"))
    with pytest.raises(DataError, match="has no split 'dev'"):
        load_source(source("two", "dev"))
    with pytest.raises(DataError, match="remove `split: train`"):
        load_source(source("one", "train"))
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="save_to_disk"):
        load_source(source("other"))
    with pytest.raises(DataError, match="no such folder"):
        load_source(source("nowhere"))


def test_reasoning_gym_prompts_carry_what_their_verifier_needs():
    import reasoning_gym

    source = ReasoningGymSourceConfig(kind="reasoning_gym", name="chain_sum", domain="sums", size=5, options={"max_terms": 3})
    prompts = load_source(source)
    assert [prompt.id for prompt in prompts] == [f"sums/{number}" for number in range(5)]
    task = prompts[2].extra["reasoning_gym"]
    assert (task["name"], task["options"]) == ("chain_sum", {"max_terms": 3})
    assert task["entry"]["question"] == prompts[2].messages[0]["content"]
    assert reasoning_gym.get_score_answer_fn("chain_sum")(prompts[2].answer, task["entry"]) == 1.0
    assert prompts == load_source(source)
    assert prompts != load_source(source.model_copy(update={"seed": 1}))


def test_an_unknown_reasoning_gym_name_is_answered_with_close_ones():
    with pytest.raises(DataError, match="did you mean countdown"):
        load_source(ReasoningGymSourceConfig(kind="reasoning_gym", name="countdwn"))
    with pytest.raises(DataError, match=r"options .*nope.* are refused"):
        load_source(ReasoningGymSourceConfig(kind="reasoning_gym", name="chain_sum", options={"nope": 1}))


@pytest.mark.parametrize("package", ["pyarrow", "datasets", "reasoning_gym"])
def test_a_missing_optional_package_names_the_install_command(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "file").touch()
    source = {
        "pyarrow": ParquetSourceConfig(kind="parquet", path=tmp_path / "file"),
        "datasets": DatasetsSourceConfig(kind="datasets", path=tmp_path),
        "reasoning_gym": ReasoningGymSourceConfig(kind="reasoning_gym", name="chain_sum"),
    }[package]
    with pytest.raises(DataError, match=r"pip install 'reroll\[data\]'"):
        load_source(source)


def test_ids_are_unique_across_sources_of_one_domain_and_across_train_and_eval(tmp_path):
    first = JsonlSourceConfig(domain="math", path=write_jsonl(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b"}))
    second = JsonlSourceConfig(domain="math", path=write_jsonl(tmp_path / "b.jsonl", {"prompt": "c"}))
    other = JsonlSourceConfig(domain="logic", path=write_jsonl(tmp_path / "c.jsonl", {"prompt": "d"}))
    data = DataConfig(train=[first, second, other], eval=[second], shuffle=False)
    sampler = load_train(data, seed=0, rows={})
    assert {sampler.next(sampler.next_domain()).id for _ in range(12)} == {"math/0", "math/1", "math/2", "logic/0"}
    assert [prompt.id for prompt in load_eval(data, rows={})] == ["eval/math/0"]


ROWS = """
from collections.abc import Iterator

TABLE = [{"prompt": "1 + 1", "answer": 2}]
NUMBER = 3

def sums(limit: int, *, ask: str = "question") -> Iterator[dict[str, object]]:
    for number in range(limit):
        yield {ask: f"{number} + 1", "answer": number + 1, "level": number}

class Sums:
    def __init__(self, limit: int) -> None:
        self.limit = limit
    def __iter__(self) -> Iterator[dict[str, object]]:
        return sums(self.limit, ask="prompt")

def torn() -> Iterator[object]:
    yield {"prompt": "1"}
    yield ["2"]
    raise OSError("the disk is gone")
"""


@pytest.fixture
def own_rows(tmp_path, monkeypatch):
    (tmp_path / "own_rows.py").write_text(ROWS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rows", raising=False)


def test_rows_come_from_a_function_a_class_or_a_list_of_the_users(own_rows):
    columns = {"prompt_key": "question", "options": {"limit": 3}}
    called = load_source(ImportSourceConfig(path="own_rows:sums", domain="sums", **columns))
    assert [prompt.id for prompt in called] == ["sums/0", "sums/1", "sums/2"]
    assert [prompt.answer for prompt in called] == ["1", "2", "3"]
    assert called[1].messages == ({"role": "user", "content": "1 + 1"},)
    assert called[2].extra == {"level": 2}
    made = load_source(ImportSourceConfig(path="own_rows:Sums", options={"limit": 2}))
    assert [prompt.messages[0]["content"] for prompt in made] == ["0 + 1", "1 + 1"]
    assert [prompt.answer for prompt in load_source(ImportSourceConfig(path="own_rows:TABLE"))] == ["2"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sums", "own_rows:sums does not take these options: missing a required argument: 'limit'"),
        ("NUMBER", "own_rows:NUMBER: gives no rows: TypeError: 'int' object is not iterable"),
        ("torn", "own_rows:torn: gives no rows: OSError: the disk is gone"),
        ("nothing", "own_rows:nothing: gives no rows: AttributeError"),
    ],
)
def test_rows_that_cannot_be_had_are_told_with_the_name_that_the_config_gives(own_rows, name, problem):
    with pytest.raises(DataError, match=re.escape(problem)):
        load_source(ImportSourceConfig(path=f"own_rows:{name}"))


def test_what_is_no_mapping_is_a_bad_row(own_rows):
    with pytest.raises(DataError, match=r"own_rows:torn: bad rows\n  row 1: a list, not a mapping"):
        load_source(ImportSourceConfig(path="own_rows:torn", limit=2))
