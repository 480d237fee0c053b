import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from reroll.config.parts import RunConfig
from reroll.errors import RunFolderError
from reroll.observe.files import append_jsonl, read_jsonl, write_json
from reroll.observe.manifest import find_damage, sums_of
from reroll.observe.run_folder import RunFolder
from reroll_zoo.folder_lock import RunLock

CONFIG = {"pipeline": "rlvr", "run": {"steps": 3}}


def make(tmp_path, *, resolved=None, **options):
    run = RunConfig(name="demo", runs_dir=tmp_path / "runs")
    folder = RunFolder.create(run, resolved=resolved or CONFIG, **options)
    folder.go_on()
    return folder


def save(folder, step, *, keep=2):
    with folder.checkpoint(step, keep=keep) as path:
        (path / "weights.txt").write_text(f"weights of {step}")


def names(folder):
    return sorted(path.name for path in folder.checkpoints_path.iterdir())


def test_a_new_run_writes_its_resolved_config(tmp_path):
    folder = make(tmp_path)
    assert yaml.safe_load(folder.config_path.read_text()) == CONFIG
    assert folder.path == tmp_path / "runs" / "demo"
    assert folder.latest_checkpoint() is None


def test_a_run_that_is_there_is_never_overwritten_by_accident(tmp_path):
    folder = make(tmp_path)
    append_jsonl(folder.metrics_path, {"step": 1})
    with pytest.raises(RunFolderError, match=r"already holds a run \(add --resume .* choose another run.name"):
        make(tmp_path)
    assert read_jsonl(folder.metrics_path) == [{"step": 1}]


def test_overwrite_starts_from_nothing(tmp_path):
    folder = make(tmp_path)
    append_jsonl(folder.metrics_path, {"step": 1})
    save(folder, 1)
    folder = make(tmp_path, overwrite=True)
    assert read_jsonl(folder.metrics_path) == []
    assert folder.latest_checkpoint() is None


@pytest.mark.parametrize("option", ["resume", "overwrite"])
def test_a_folder_that_is_not_a_run_is_never_touched(tmp_path, option):
    other = tmp_path / "runs" / "demo" / "thesis.tex"
    other.parent.mkdir(parents=True)
    other.write_text("years of work")
    with pytest.raises(RunFolderError, match="is not a run of reroll"):
        make(tmp_path, **{option: True})
    assert other.read_text() == "years of work"


def test_resuming_what_was_never_started_is_an_error(tmp_path):
    with pytest.raises(RunFolderError, match="holds no run to resume"):
        make(tmp_path, resume=True)


def test_resuming_forgets_rows_after_the_last_checkpoint(tmp_path):
    folder = make(tmp_path)
    for step in range(6):
        append_jsonl(folder.metrics_path, {"step": step})
    with folder.metrics_path.open("a") as file:
        file.write('{"step": 6, "rew')
    save(folder, 2)
    save(folder, 4)
    folder.write_result({"steps": 5})
    folder = make(tmp_path, resume=True)
    assert [row["step"] for row in read_jsonl(folder.metrics_path)] == [0, 1, 2, 3, 4]
    assert not folder.result_path.exists()


def test_resuming_without_a_checkpoint_starts_the_curve_anew(tmp_path):
    append_jsonl(make(tmp_path).metrics_path, {"step": 0})
    assert read_jsonl(make(tmp_path, resume=True).metrics_path) == []


def test_a_resumed_run_with_another_config_keeps_the_earlier_one(tmp_path):
    save(make(tmp_path), 3)
    folder = make(tmp_path, resume=True, resolved={"steps": 9})
    assert yaml.safe_load(folder.config_path.read_text()) == {"steps": 9}
    assert yaml.safe_load((folder.path / "config.until-step-000003.yaml").read_text()) == CONFIG


def test_the_newest_checkpoints_are_kept(tmp_path):
    folder = make(tmp_path)
    for step in (8, 9, 10, 11):
        save(folder, step, keep=2)
    assert names(folder) == ["step-000010", "step-000011"]
    assert folder.latest_checkpoint() == (11, folder.checkpoints_path / "step-000011")


def test_a_checkpoint_that_fails_leaves_the_last_one_intact(tmp_path):
    folder = make(tmp_path)
    save(folder, 1, keep=1)

    def save_and_fail(step):
        with folder.checkpoint(step, keep=1) as path:
            (path / "weights.txt").write_text("half")
            raise KeyboardInterrupt

    for step in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            save_and_fail(step)
    assert names(folder) == ["step-000001"]
    assert (folder.latest_checkpoint().path / "weights.txt").read_text() == "weights of 1"


def test_a_process_that_dies_in_a_checkpoint_leaves_nothing_that_looks_complete(tmp_path):
    folder = make(tmp_path)
    save(folder, 1)
    child = os.fork()
    if child == 0:
        try:
            with folder.checkpoint(2, keep=1) as path:
                (path / "weights.txt").write_text("half")
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    assert folder.latest_checkpoint().step == 1
    assert names(make(tmp_path, resume=True)) == ["step-000001"]


def test_a_step_can_be_saved_again(tmp_path):
    folder = make(tmp_path)
    save(folder, 1, keep=1)
    with folder.checkpoint(1, keep=1) as path:
        (path / "weights.txt").write_text("newer")
    assert names(folder) == ["step-000001"]
    assert (folder.latest_checkpoint().path / "weights.txt").read_text() == "newer"


@contextmanager
def file_size_limit(num_bytes):
    """The kernel refuses longer files: a real failing write, without a disk to fill."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_write_that_the_system_refuses_leaves_the_last_checkpoint_and_result_intact(tmp_path):
    folder = make(tmp_path)
    save(folder, 1, keep=1)
    folder.write_result({"pass": 0.5})

    def save_too_much():
        with folder.checkpoint(2, keep=1) as path:
            (path / "weights.bin").write_bytes(bytes(1 << 20))

    with file_size_limit(1 << 16):
        with pytest.raises(RunFolderError, match=r"cannot write .*step-000002: File too large"):
            save_too_much()
        with pytest.raises(RunFolderError, match=r"cannot write .*result.json"):
            folder.write_result({"text": "x" * (1 << 20)})
    assert names(folder) == ["step-000001"]
    assert json.loads(folder.result_path.read_text()) == {"pass": 0.5}
    assert not list(folder.path.glob(".unfinished*"))


@pytest.fixture
def tiny_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting a disk of 1 MiB needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("writer", ["python", "torch", "safetensors"])
def test_a_full_disk_is_named_with_its_fix_and_keeps_the_last_checkpoint(tiny_disk, writer):
    import torch
    from safetensors.torch import save_file

    folder = make(tiny_disk)
    save(folder, 1, keep=1)
    tensor = torch.zeros(1 << 20)

    def fill():
        with folder.checkpoint(2, keep=1) as path:
            if writer == "python":
                (path / "weights.bin").write_bytes(bytes(4 << 20))
            elif writer == "torch":
                torch.save(tensor, path / "trainer.pt")
            else:
                save_file({"a": tensor}, path / "model.safetensors")

    with pytest.raises(RunFolderError, match=r"No space left on device .free some space"):
        fill()
    assert names(folder) == ["step-000001"]
    assert (folder.latest_checkpoint().path / "weights.txt").read_text() == "weights of 1"


def test_a_full_disk_seen_by_a_single_row_is_explained(tmp_path, monkeypatch):
    folder = make(tmp_path)
    if Path("/dev/full").exists():
        with pytest.raises(RunFolderError, match=r"No space left on device .free some space"):
            append_jsonl(Path("/dev/full"), {"step": 1})

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RunFolderError, match=r"result.json: No space left on device"):
        folder.write_result({})


def test_a_place_that_cannot_hold_a_folder_is_named(tmp_path):
    (tmp_path / "runs").write_text("a file, not a folder")
    with pytest.raises(RunFolderError, match=r"cannot write .*runs/demo: Not a directory .*run.runs_dir"):
        make(tmp_path)


def test_an_unwritable_place_is_named(tmp_path):
    if os.geteuid() == 0:
        place = RunConfig(name="demo", runs_dir="/proc/nowhere")
    else:
        (tmp_path / "runs").mkdir(mode=0o500)
        place = RunConfig(name="demo", runs_dir=tmp_path / "runs")
    with pytest.raises(RunFolderError, match=r"cannot write .*demo: .*run.runs_dir"):
        RunFolder.create(place, resolved=CONFIG)


def test_json_never_holds_numbers_that_other_readers_refuse(tmp_path):
    write_json(tmp_path / "a.json", {"a": [float("inf"), {"b": float("nan")}], "c": 1.5})
    assert json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail) == {"a": [None, {"b": None}], "c": 1.5}


def test_damage_in_the_middle_of_a_file_is_named_by_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunFolderError, match="line 2 is damaged"):
        read_jsonl(tmp_path / "rows.jsonl")


def killed_at(tmp_path, call, number, act):
    """Whether a process that does this is killed in front of its nth such call to the system; if not, it was done.

    Python tells of every change of the file system before it is made.
    """
    child = os.fork()
    if child == 0:
        num_calls = 0

        def die_at(event, args):
            nonlocal num_calls
            if event == call and (str(tmp_path) in str(args[0]) or not os.path.isabs(str(args[0]))):
                num_calls += 1
                if num_calls == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(die_at)
            act(tmp_path)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def write_third(tmp_path):
    folder = make(tmp_path, resume=True)
    with folder.checkpoint(3, keep=1) as path:
        for name in ("a", "b", "c"):
            (path / name).write_text("new")


def go_on_with_another_config(tmp_path):
    make(tmp_path, resume=True, resolved={"steps": 3})


def start_anew(tmp_path):
    make(tmp_path, overwrite=True)


def write_many(folder, step):
    with folder.checkpoint(step, keep=5) as path:
        for name in ("a", "b", "c"):
            (path / name).write_text(f"{name} of {step}")


@pytest.mark.parametrize("call", ["os.rename", "os.remove", "os.rmdir", "os.mkdir"])
def test_whenever_it_is_killed_what_is_named_a_checkpoint_is_whole(tmp_path, call):
    folder = make(tmp_path)
    for step in (1, 2):
        write_many(folder, step)
    number = 1
    while killed_at(tmp_path, call, number, write_third):
        number += 1
        assert folder.all_checkpoints()
        for checkpoint in folder.all_checkpoints():
            assert find_damage(checkpoint.path) == []
            assert {path.name for path in checkpoint.path.iterdir()} == {"a", "b", "c", "manifest.json"}
    assert number > 1
    assert names(make(tmp_path, resume=True)) == ["step-000003"]


@pytest.mark.parametrize("call", ["os.rename", "open"])
def test_whenever_it_is_killed_a_resumed_run_with_another_config_has_one_and_the_earlier(tmp_path, call):
    save(make(tmp_path), 2)
    number, config = 1, tmp_path / "runs" / "demo" / "config.yaml"
    while killed_at(tmp_path, call, number, go_on_with_another_config):
        number += 1
        make(tmp_path, resume=True, resolved=yaml.safe_load(config.read_text()))
        assert yaml.safe_load(config.read_text()) in (CONFIG, {"steps": 3})
    assert number > 1
    assert yaml.safe_load(config.read_text()) == {"steps": 3}
    assert yaml.safe_load((config.parent / "config.until-step-000002.yaml").read_text()) == CONFIG


@pytest.mark.parametrize("call", ["os.rename", "os.remove", "os.rmdir", "os.mkdir"])
def test_whenever_it_is_killed_a_run_that_is_overwritten_can_be_overwritten_again(tmp_path, call):
    number = 1
    while True:
        folder = make(tmp_path, overwrite=True)
        append_jsonl(folder.metrics_path, {"step": 2})
        write_many(folder, 2)
        if not killed_at(tmp_path, call, number, start_anew):
            break
        number += 1
    assert number > 1
    assert sorted(path.name for path in folder.path.iterdir()) == ["checkpoints", "config.yaml", "metrics.jsonl"]


def test_a_killed_replacement_leaves_the_checkpoint_that_was_to_be_replaced(tmp_path):
    folder = make(tmp_path)
    write_many(folder, 3)
    number = 1
    while killed_at(tmp_path, "os.rename", number, write_third):
        number += 1
        latest = make(tmp_path, resume=True).latest_checkpoint()
        assert latest.step == 3
        assert find_damage(latest.path) == []
    assert (latest.path / "a").read_text() == "new"


def test_the_config_that_ran_is_kept_not_one_that_never_did(tmp_path):
    save(make(tmp_path), 3)
    make(tmp_path, resume=True, resolved={"steps": 8})
    folder = make(tmp_path, resume=True, resolved={"steps": 9})
    assert yaml.safe_load((folder.path / "config.until-step-000003.yaml").read_text()) == CONFIG


def test_a_resume_that_comes_to_nothing_changes_nothing(tmp_path):
    folder = make(tmp_path)
    save(folder, 1)
    append_jsonl(folder.metrics_path, {"step": 2})
    folder.write_result({"status": "failed"})
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    RunFolder.create(RunConfig(name="demo", runs_dir=tmp_path / "runs"), resolved={"steps": 9}, resume=True)
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before


def test_a_run_whose_checkpoints_were_deleted_is_still_a_run(tmp_path):
    folder = make(tmp_path)
    append_jsonl(folder.metrics_path, {"step": 2})
    shutil.rmtree(folder.checkpoints_path)
    with pytest.raises(RunFolderError, match="already holds a run"):
        make(tmp_path)
    save(make(tmp_path, resume=True), 1)
    assert names(folder) == ["step-000001"]


def test_resume_and_overwrite_exclude_each_other(tmp_path):
    save(make(tmp_path), 1)
    with pytest.raises(RunFolderError, match="give one of them"):
        make(tmp_path, resume=True, overwrite=True)


def test_a_folder_that_somebody_else_put_beside_the_checkpoints_is_none(tmp_path):
    folder = make(tmp_path)
    save(folder, 1)
    (folder.checkpoints_path / "step-000002.bak").mkdir()
    assert folder.latest_checkpoint().step == 1


def damaged(path, kind):
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("missing", "b is missing"),
        ("truncated", "b has 5 bytes instead of 6"),
        ("flipped", "b holds other bytes than were written"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_kept_and_an_older_one_that_is_whole_is_gone_on_from(tmp_path, kind, told):
    folder = make(tmp_path)
    for step in (1, 2):
        write_many(folder, step)
    damaged(folder.latest_checkpoint().path / "b", kind)
    assert folder.set_damaged_aside() == [f"{folder.checkpoints_path}/step-000002 is damaged: {told}"]
    assert names(folder) == ["damaged-step-000002", "step-000001"]
    assert folder.set_damaged_aside() == []


def test_where_no_checkpoint_is_whole_all_are_named_and_none_is_touched(tmp_path):
    folder = make(tmp_path)
    for step in (1, 2):
        write_many(folder, step)
        damaged(folder.latest_checkpoint().path / "a", "flipped")
    with pytest.raises(RunFolderError, match=r"(?s)step-000002 is damaged.*000001 is damaged.*no checkpoint .* is whole"):
        folder.set_damaged_aside()
    assert names(folder) == ["step-000001", "step-000002"]


def test_sizes_alone_can_be_looked_at(tmp_path):
    folder = make(tmp_path)
    for step in (1, 2):
        write_many(folder, step)
    damaged(folder.latest_checkpoint().path / "a", "flipped")
    assert folder.set_damaged_aside(sums=False) == []
    damaged(folder.latest_checkpoint().path / "a", "truncated")
    assert len(folder.set_damaged_aside(sums=False)) == 1


def test_a_damaged_manifest_damages_its_checkpoint(tmp_path):
    folder = make(tmp_path)
    for step in (1, 2):
        write_many(folder, step)
    (folder.latest_checkpoint().path / "manifest.json").write_text("{")
    assert "manifest.json cannot be read" in folder.set_damaged_aside()[0]


def test_what_a_writer_says_of_its_files_is_believed_and_checked_later(tmp_path):
    folder = make(tmp_path)
    sums = {}
    with folder.checkpoint(1, keep=1, sums=sums) as path:
        (path / "a").write_text("as it was written")
        sums |= sums_of(path, [path / "a"])
        (path / "a").write_text("as the disk has it")
    assert find_damage(folder.latest_checkpoint().path) == ["a has 18 bytes instead of 17"]


def test_a_run_whose_folder_was_taken_names_no_checkpoint(tmp_path):
    path = tmp_path / "runs" / "demo"
    with RunLock(path) as lock:
        folder = make(tmp_path, lock=lock)
        save(folder, 1)
        (path / ".lock").unlink()
        with pytest.raises(RunFolderError, match="was taken from this run"):
            save(folder, 2)
    assert names(folder) == ["step-000001"]
