import json
import os
import sqlite3
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from reroll.config.load import parse_config
from reroll.config.parts import RunConfig
from reroll.errors import ConfigError
from reroll.observe.files import read_jsonl
from reroll.observe.journal import Journal, SampleState
from reroll.observe.run_folder import RunFolder
from reroll.observe.trackers import make_tracker
from reroll.pipeline.preflight import preflight
from reroll_zoo.trackers.opentelemetry import ENDPOINTS
from reroll_zoo.trackers.wandb import login_violations


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(RunConfig(name="demo", runs_dir=tmp_path), resolved={"seed": 0})


def test_metrics_are_written_as_json_lines_at_once(folder):
    tracker = make_tracker([], folder, config={})
    tracker.log(1, {"reward/mean": 0.5})
    tracker.log(2, {"reward/mean": float("nan")})
    assert read_jsonl(folder.metrics_path) == [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": None}]
    tracker.close()


def test_tensorboard_gets_every_number(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = make_tracker(["tensorboard"], folder, config={})
    for step in range(1, 6):
        tracker.log(step, {"reward/mean": step / 10})
    tracker.close()
    tracker = make_tracker(["tensorboard"], folder, config={}, start_step=3)
    tracker.log(4, {"reward/mean": 9.0})
    tracker.close()
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    seen = {event.step: event.value for event in events.Scalars("reward/mean")}
    assert seen == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3, 4: 9.0})
    assert len(read_jsonl(folder.metrics_path)) == 6


def test_wandb_runs_offline_inside_the_run_folder_without_a_login(folder, monkeypatch, capfd):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    tracker = make_tracker(["wandb"], folder, config={"seed": 0})
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close()
    assert list(folder.path.glob("wandb/offline-run-*/run-*.wandb"))
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def without_a_key(tmp_path, monkeypatch):
    """Whatever the user of this machine has for wandb, nothing of it is found."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.usefixtures("without_a_key")
def test_wandb_online_without_a_key_is_refused_with_the_fix(folder, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match=r"run.trackers: wandb does not start: No API key.*set WANDB_API_KEY"):
        make_tracker(["wandb"], folder, config={})
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("without_a_key")
def test_the_key_that_wandb_lacks_is_missed_before_the_run(rlvr_tree, tmp_path, monkeypatch, capfd):
    def problems(mode):
        monkeypatch.setenv("WANDB_MODE", mode)
        return [str(violation) for violation in login_violations(parse_config(rlvr_tree), opens=True)]

    rlvr_tree["rewards"] = {"default": {"kind": "exact"}}
    assert problems("online") == []  # Nobody asked for wandb.
    rlvr_tree["run"]["trackers"] = ["wandb"]
    assert ["WANDB_API_KEY" in problem for problem in problems("online")] == [True]
    assert problems("offline") == problems("dryrun") == []
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        preflight(parse_config(rlvr_tree), code_folder=tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("without_a_key")
@pytest.mark.parametrize(
    ("variables", "problem"),
    [({"WANDB_MODE": "upside-down"}, "mode: Input should be"), ({"WANDB_MODE": "online", "WANDB_API_KEY": "k" * 40}, "")],
)
def test_wandb_s_variables_are_read_as_it_reads_them(rlvr_tree, tmp_path, variables, problem):
    """In a process of its own: wandb reads them once, and keeps the key."""
    rlvr_tree["run"]["trackers"] = ["wandb"]
    rlvr_tree["rewards"] = {"default": {"kind": "exact"}}
    (tmp_path / "run.json").write_text(json.dumps(rlvr_tree))
    script = (
        "import json, sys; from reroll.config.load import parse_config\n"
        "from reroll_zoo.trackers.wandb import login_violations\n"
        f"config = parse_config(json.load(open({str(tmp_path / 'run.json')!r})))\n"
        "print(*(violation.problem for violation in login_violations(config, opens=True)))"
    )
    env = os.environ | variables
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert (problem in done.stdout, bool(done.stdout.strip()), done.stderr) == (True, bool(problem), "")


def test_mlflow_keeps_a_run_over_a_resume_in_a_database_beside_the_runs(folder, monkeypatch, capfd):
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for step in (1, 2):  # The second one resumes.
        tracker = make_tracker(["mlflow"], folder, config={"seed": 0})
        tracker.log(step, {"eval/pass@1": step / 10})
        tracker.close()
    client = MlflowClient(tracking_uri=f"sqlite:///{folder.path.parent / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("reroll").experiment_id])
    assert run.info.run_name == "demo"
    history = client.get_metric_history(run.info.run_id, "eval/pass_at_1")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2)]
    assert list(folder.path.parent.glob(f"mlflow-artifacts/{run.info.run_id}/artifacts/config.json"))
    assert capfd.readouterr() == ("", "")


def test_trackio_keeps_a_run_over_a_resume_and_says_nothing(tmp_path):
    code = """
import sys
from pathlib import Path
from reroll.config.load import parse_config
from reroll.config.parts import RunConfig
from reroll.observe.run_folder import RunFolder
from reroll.observe.trackers import make_tracker
folder = RunFolder(Path("demo"))
folder.path.mkdir()
for step in (1, 2):
    tracker = make_tracker(["trackio"], folder, config={"seed": 0})
    tracker.log(step, {"reward/mean": step / 10})
    tracker.close()
"""
    settings = {"TRACKIO_DIR": str(tmp_path / "trackio")}  # Read on import.
    ran = subprocess.run([sys.executable, "-c", code], env=os.environ | settings, cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    with sqlite3.connect(tmp_path / "trackio" / "reroll.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step, json.loads(values)["reward/mean"]) for name, step, values in rows] == [
        ("demo", 1, 0.1),
        ("demo", 2, 0.2),
    ]


@pytest.fixture
def trained_sample(folder, unaudited):
    """What a run has in its journal after a step with one sample."""
    unaudited.add(folder.path)
    with Journal(folder.journal_path) as journal:
        journal.record_group(7, [0], SampleState.QUEUED, prompt="p/1", domain="sums", version=0)
        journal.record("7.0", SampleState.GENERATING)
        journal.record("7.0", SampleState.SCORING, tokens=5)
        journal.record("7.0", SampleState.DONE, reward=0.5)
        journal.taken([7])
        journal.record("7.0", SampleState.TRAINED, version=1)
        journal.stepped(version=1)


STEP = {"time/step_s": 2.0, "time/wait_s": 1.2, "time/train_s": 0.6, "time/push_s": 0.1, "reward/mean": 0.5}


def test_opentelemetry_gets_a_trace_a_step_with_its_parts_and_samples(folder, trained_sample, monkeypatch):
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    tracker = make_tracker(["opentelemetry"], folder, config={"pipeline": "rlvr"})
    tracker.log(1, STEP)
    tracker.log(1, {"eval/pass@1": 0.25})
    tracker.close()
    spans = {span["name"]: span for span in read_jsonl(folder.path / "spans.jsonl")}
    assert set(spans) == {"step 1", "wait", "train", "push", "sample 7.0", "evaluation"}
    step, sample = spans["step 1"], spans["sample 7.0"]
    assert step["resource"]["attributes"]["reroll.run"] == "demo"
    assert step["attributes"]["reward/mean"] == 0.5
    for name in ("wait", "train", "push", "sample 7.0"):
        assert spans[name]["parent_id"] == step["context"]["span_id"]
        assert spans[name]["context"]["trace_id"] == step["context"]["trace_id"]
    assert spans["evaluation"]["parent_id"] is None
    assert (spans["wait"]["start_time"], spans["wait"]["end_time"]) == (step["start_time"], spans["train"]["start_time"])
    assert sample["attributes"] == {
        "sample": "7.0", "prompt": "p/1", "domain": "sums", "version": 0, "tokens": 5, "reward": 0.5, "status": "",
    }  # fmt: skip
    phases = [event["name"] for event in sample["events"]]
    assert phases == ["queued", "generating", "scoring", "done", "ready", "training", "trained"]


def test_opentelemetry_sends_its_spans_to_the_collector_that_the_environment_names(folder, trained_sample, monkeypatch):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = ExportTraceServiceRequest.FromString(body)
            received.extend(span.name for one in request.resource_spans for scope in one.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        tracker = make_tracker(["opentelemetry"], folder, config={})
        tracker.log(1, STEP)
        tracker.close()
        server.shutdown()
    assert sorted(received) == ["push", "sample 7.0", "step 1", "train", "wait"]
    assert not (folder.path / "spans.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("tensorboard", "torch.utils.tensorboard"),
        ("wandb", "wandb"),
        ("trackio", "trackio"),
        ("mlflow", "mlflow.entities"),
        ("opentelemetry", "opentelemetry.sdk.trace"),
    ],
)
def test_a_missing_package_is_named_with_its_fix_at_the_start(folder, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ConfigError, match=rf"run.trackers: {name} is not installed \(pip install 'reroll\[(trackers|mlflow|opentelemetry)\]'"
    ):
        make_tracker([name], folder, config={})
