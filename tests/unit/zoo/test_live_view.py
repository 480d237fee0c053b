import io
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from reroll.observe.progress import TrainView, format_duration
from reroll_zoo.live_view.panel import SPARKS, sparkline

RL = {
    "reward/mean": 0.417,
    "rollout/completion_tokens": 135.0,
    "throughput/tokens_per_s": 12345.6,
    "train/loss": -0.0031,
    "train/grad_norm": 0.532,
    "rollout/staleness_max": 1.0,
    "time/step_s": 4.0,
    "time/wait_s": 2.4,
    "time/generate_s": 1.9,
    "time/score_s": 0.25,
    "time/train_s": 1.6,
    "time/push_s": 0.0,
}


def plain_console():
    return Console(file=io.StringIO(), width=100, force_terminal=False)


def screen(view, width=100):
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(view.panel.render())
    return console.export_text()


def test_outside_a_terminal_there_is_one_plain_line_a_step():
    console = plain_console()
    with TrainView(10, "demo", console=console) as view:
        view.note("loading [model]")
        view.update(0, {"eval/pass@1": 0.31})
        view.update(1, RL)
        view.update(10, {"train/loss": 0.5})
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "loading [model]"
    assert lines[1].startswith("step 0/10  held-out pass@1 31.0%")
    assert "reward 0.417  response 135 tokens  loss -0.0031" in lines[2]
    assert "12,346 tokens/s  4.00 s" in lines[2]
    assert lines[3] == "step 10/10  loss 0.5000  done"
    assert len(lines) == 4
    assert "\x1b" not in console.file.getvalue()


def test_a_terminal_gets_a_live_panel_with_notes_above_it():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with TrainView(10, "demo", console=console) as view:
        view.update(1, RL)
        view.note("checkpoint written")
    output = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert "checkpoint written" in output
    assert output.rindex("reroll · demo") > output.index("checkpoint written")


def test_the_panel_shows_what_is_known_and_keeps_it():
    view = TrainView(100, "demo [local]", console=plain_console())
    view.update(0, {"eval/pass@1": 0.31})
    view.update(1, RL)
    assert "→" not in screen(view)
    view.update(2, {"eval/pass@1": 0.5, "reward/mean": 0.6})
    text = screen(view)
    for expected in ("demo [local]", "step 2/100", "0.600", "31.0% → 50.0%", "135 tokens", "12,346 tokens/s", "at most 1"):
        assert expected in text
    assert "1.90 s a sample" in text
    assert "training\N{NO-BREAK SPACE}40%" in text


def test_a_resumed_run_shows_the_history_that_it_logged_before():
    rows = [
        {"step": 0, "eval/pass@1": 0.25},
        *({"step": step, "reward/mean": step / 4, "train/loss": None} for step in (1, 2, 3)),
    ]
    view = TrainView(10, "demo", start_step=3, console=plain_console())
    view.recall(rows)
    view.update(4, {"reward/mean": 1.0, "eval/pass@1": 0.5})
    assert "25.0% → 50.0%" in screen(view)
    assert sparkline([0.25, 0.5, 0.75, 1.0], width=24) in screen(view)
    assert "step 4/10" in screen(view)


def test_the_time_bar_is_cut_in_proportion():
    view = TrainView(100, "demo", console=Console(file=io.StringIO(), width=106))
    view.update(1, RL)
    console = Console(file=io.StringIO(), width=106, force_terminal=True, color_system="standard")
    console.print(view.panel.render())
    bar = next(line for line in console.file.getvalue().splitlines() if "█" * 5 in line)
    lengths = [len(run) for run in re.findall("█+", bar)]
    assert lengths == pytest.approx([60, 40], abs=1)


def test_supervised_runs_show_only_their_losses():
    view = TrainView(3, "sft", console=plain_console())
    for step in (1, 2, 3):
        view.update(step, {"train/loss": 3.0 - step})
    view.update(3, {"eval/loss": 0.25})
    text = screen(view)
    assert "held-out loss  0.2500" in text
    assert "0.0000  █▅▁" in text
    assert "reward" not in text
    assert "done" in text


@pytest.mark.parametrize("width", [40, 72, 100, 200])
def test_the_panel_fits_any_width(width):
    view = TrainView(100, "demo", console=Console(file=io.StringIO(), width=width))
    view.update(0, {"eval/pass@1": 0.3})
    view.update(1, RL)
    assert all(len(line) <= width for line in screen(view, width).splitlines())


def test_numbers_that_are_not_finite_are_left_out():
    view = TrainView(2, "demo", console=plain_console())
    view.update(1, {"reward/mean": float("nan"), "train/loss": 1.0})
    view.update(2, {"reward/mean": 0.5})
    assert "0.500  ▁ " in screen(view)


def test_time_left_follows_the_newest_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("reroll.observe.progress.time.monotonic", lambda: now[0])
    console = plain_console()
    with TrainView(100, "demo", start_step=10, console=console) as view:
        now[0] = 500.0  # the start-up and the first evaluation
        view.update(10, {"eval/pass@1": 0.1})
        for step in range(11, 51):
            now[0] += 2.0
            view.update(step, {})
    lines = console.file.getvalue().splitlines()
    assert lines[1].endswith("step 11/100  2 min 58 s left")
    assert lines[-1].endswith("step 50/100  1 min 40 s left")


def test_a_sparkline_spans_low_to_high_and_averages_long_histories():
    assert sparkline([], width=8) == ""
    assert sparkline([2.0, 2.0], width=8) == "▁▁"
    assert sparkline(list(range(8)), width=8) == SPARKS
    assert sparkline([0.0] * 50 + [1.0] * 50, width=4) == "▁▁██"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (200, "3 min 20 s"), (3600, "1 h 00 min"), (7530, "2 h 05 min")]
)
def test_durations_read_well(seconds, text):
    assert format_duration(seconds) == text


def test_the_panel_says_what_the_run_is_at_from_the_very_start():
    view = TrainView(3, "demo", console=plain_console())
    assert "loading models and workers" in screen(view)
    num_done = 11
    with view.doing(lambda: f"generating {num_done}/32"):
        assert "generating 11/32" in screen(view)
        num_done = 12
        assert "generating 12/32" in screen(view)
    assert "generating" not in screen(view)
    with view.task("evaluating", 4) as advance:
        advance()
        assert "evaluating 1/4" in screen(view)


def test_the_panel_tells_of_kernels_that_are_compiled_while_they_are(monkeypatch):
    view = TrainView(10, "demo", console=plain_console())
    cache = SimpleNamespace(words=lambda: "compiling kernels 3 of 14")
    monkeypatch.setitem(sys.modules, "reroll_zoo.kernel_cache", SimpleNamespace(kernel_cache=lambda: cache))
    assert "loading models and workers · compiling kernels 3 of 14" in screen(view)
    cache.words = lambda: ""
    assert "loading models and workers  " in screen(view)
    assert "·  " not in screen(view)


def test_the_panel_does_not_change_its_height_with_what_the_run_is_at():
    view = TrainView(3, "demo", console=plain_console())
    with view.doing(lambda: "training"):
        num_lines = len(screen(view).splitlines())
    assert len(screen(view).splitlines()) == num_lines


def test_the_panel_leaves_room_for_the_echo_of_ctrl_c():
    view = TrainView(3, "demo", console=plain_console())
    view.update(1, RL)
    assert max(len(line.rstrip()) for line in screen(view).splitlines()) == 100 - len("^C")


def test_a_held_out_set_whose_every_sample_failed_has_no_pass_rate():
    console = plain_console()
    view = TrainView(3, "demo", console=console)
    view.update(0, {"eval/pass@1": 0.0, "eval/failed": 1.0})
    assert "every sample failed" in screen(view)
    assert "held-out: every sample failed" in console.file.getvalue()
    assert "0.0%" not in screen(view) + console.file.getvalue()
    view.update(1, {"eval/pass@1": 0.25, "eval/failed": 0.5})
    assert "25.0%" in screen(view)


def test_a_remark_stays_until_the_next_step():
    console = plain_console()
    view = TrainView(3, "demo", console=console)
    view.update(1, RL, remark="the machine is busy: load 9 on 2 cores")
    assert "load 9 on 2 cores" in screen(view)
    assert console.file.getvalue().rstrip().endswith("load 9 on 2 cores")
    view.update(2, RL)
    assert "load 9" not in screen(view)
