"""OpenTelemetry."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from reroll.observe.run_folder import RunFolder
from reroll.observe.trackers import Tracker
from reroll_zoo.page.journal_follower import JournalFollower
from reroll_zoo.samples.lifecycles import Lifecycle, Lifecycles
from reroll_zoo.trackers.missing import missing_package

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MAX_WAITING = 1 << 16
"""Spans that wait for the collector; further ones are dropped."""
_PARTS = ("wait", "train", "push")
_JOURNAL_BYTES = 1 << 26


class OpentelemetryTracker(Tracker):
    """Spans: a trace for each step, in it the step's parts and the samples that it trained on, which began before it.

    They go to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names (OTLP over HTTP); else to `spans.jsonl` in the run's folder.
    """

    packages: ClassVar[Mapping[str, str]] = {
        "opentelemetry.sdk": "reroll[opentelemetry]",
        "opentelemetry.exporter.otlp.proto.http": "reroll[opentelemetry]",
    }

    def __init__(self, folder: RunFolder, *, config: Mapping[str, Any], start_step: int) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SimpleSpanProcessor
            from opentelemetry.trace import set_span_in_context
        except ImportError as error:
            raise missing_package("opentelemetry", extra="opentelemetry") from error
        self._inside = set_span_in_context
        about = {"service.name": "reroll", "reroll.run": folder.path.name, "reroll.pipeline": str(config.get("pipeline", ""))}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._file = None
        if any(os.environ.get(name) for name in ENDPOINTS):
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=MAX_WAITING))
        else:
            self._file = (folder.path / "spans.jsonl").open("a", encoding="utf-8")
            exporter = ConsoleSpanExporter(out=self._file, formatter=lambda span: span.to_json(indent=None) + "\n")
            self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("reroll")
        self._journal = JournalFollower(folder.journal_path, max_bytes=_JOURNAL_BYTES)
        self._lives = Lifecycles()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        end_s = time.time()
        if "time/step_s" not in values:  # An evaluation, or what a checkpoint took.
            name = "evaluation" if any(one.startswith("eval/") for one in values) else "checkpoint"
            start_s = end_s - values.get("time/checkpoint_s", 0.0)
            self._span(name, start_s, end_s, {"step": step, **values})
            return
        start_s = end_s - values["time/step_s"]
        root = self._tracer.start_span(f"step {step}", start_time=_ns(start_s), attributes={"step": step, **values})
        inside = self._inside(root)
        part_s = start_s
        for part in _PARTS:
            if (took_s := values.get(f"time/{part}_s")) is not None:
                self._span(part, part_s, part_s + took_s, {}, inside)
                part_s += took_s
        for life in self._trained(step):
            self._sample(life, inside)
        root.end(end_time=_ns(end_s))

    def close(self) -> None:
        self._provider.shutdown()
        if self._file is not None:
            self._file.close()

    def _trained(self, step: int) -> list[Lifecycle]:
        """The samples that this step trained on, as the journal tells of them by now."""
        known = self._lives.revision
        self._lives.take(self._journal.new_events(_JOURNAL_BYTES))
        changed = self._lives.changed_since(known, limit=len(self._lives))
        return [life for life in changed if life.trained_version == step]

    def _sample(self, life: Lifecycle, inside: Any) -> None:
        about = {
            "sample": life.id,
            "prompt": life.prompt,
            "domain": life.domain,
            "version": life.version,
            "tokens": life.tokens,
            "reward": life.reward,
            "status": life.status,
        }
        known = {name: value for name, value in about.items() if value is not None}
        span = self._tracer.start_span(f"sample {life.id}", inside, start_time=_ns(life.times_s[0]), attributes=known)
        for phase, time_s in zip(life.phases, life.times_s, strict=True):
            span.add_event(phase.name.lower(), timestamp=_ns(time_s))
        span.end(end_time=_ns(life.times_s[-1]))

    def _span(self, name: str, start_s: float, end_s: float, about: Mapping[str, float], inside: Any = None) -> None:
        self._tracer.start_span(name, inside, start_time=_ns(start_s), attributes=dict(about)).end(end_time=_ns(end_s))


def _ns(time_s: float) -> int:
    return int(time_s * 1e9)
