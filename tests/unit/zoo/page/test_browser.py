"""The page in a real browser: it opens, follows a run, survives its server, finds and shows a sample, and runs none of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from browser import CHROMIUM, IS_NEEDED, opened

from reroll.observe.journal import Journal, SampleState
from reroll.pipeline.controls import Hands
from reroll_zoo.folder_lock import RunLock
from reroll_zoo.page.run_data import RunData
from reroll_zoo.page.server import PageServer
from reroll_zoo.samples.activity import ACTIVITY

pytestmark = pytest.mark.skipif(CHROMIUM is None and not IS_NEEDED, reason="no Chromium is installed: make test-browser")


@contextmanager
def served(run: Path, *, port: int = 0) -> Iterator[PageServer]:
    with PageServer(RunData(run), port=port, token="secret") as server, server.in_background():
        yield server


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
async def test_every_view_opens_and_fits(run: Path, tmp_path: Path, width: int, dark: bool) -> None:
    words = {
        "now": "Samples in flight",
        "time": "4 samples",
        "curves": "Reward",
        "samples": "1 to 3 of 3",
        "samples/0.0": "siblings",
        "config": "policy.optim.lr",
    }
    with served(run) as server:
        async with opened(server.url, tmp_path / "browser", width=width, dark=dark) as tab:
            await tab.until("document.title.startsWith('one')")
            for view, shown in words.items():
                await tab.evaluate(f"location.hash = '{view}'")
                await tab.until(f"document.body.innerText.includes({shown!r})")
                assert await tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, view
            colour = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, colour.strip("rgb()").split(","))) < 384) == dark
            assert tab.complaints == []


async def test_it_follows_a_run_survives_its_server_and_comes_back(run: Path, tmp_path: Path) -> None:
    with RunLock(run):
        with served(run) as server:
            port = server.server_port
            opening = opened(f"{server.url}#now", tmp_path / "browser")
            tab = await opening.__aenter__()
            try:
                await tab.until("document.querySelector('#status').textContent === 'running'")
                with Journal(run / "journal") as journal:
                    for index in range(7):
                        journal.record(f"5.{index}", SampleState.QUEUED, prompt="p5", domain="sums", version=1)
                    journal.record("5.0", SampleState.GENERATING)
                counts = "[...document.querySelectorAll('.lane .count')].map((e) => e.textContent).join(' ')"
                await tab.until(f"{counts} === '6 1 0 0 0 0'")
            except BaseException:
                await opening.__aexit__(None, None, None)
                raise
        try:
            await tab.until("!document.querySelector('#trouble').hidden")
            assert "6" in await tab.evaluate(counts)  # What was known stays in sight.
            with Journal(run / "journal") as journal:
                journal.record("6.0", SampleState.QUEUED, prompt="p6", domain="sums", version=1)
            with served(run, port=port):
                await tab.until("document.querySelector('#trouble').hidden")
                await tab.until(f"{counts} === '1 0 0 0 0 0'")
        finally:
            await opening.__aexit__(None, None, None)


async def test_only_the_address_with_the_token_has_hands(run: Path, tmp_path: Path) -> None:
    asked: list[str] = []
    deeds = {name: partial(asked.append, name) for name in ("pause", "resume", "checkpoint", "stop")}
    with RunLock(run), served(run) as server:
        server.hands = Hands(deeds, is_paused=lambda: asked == ["pause"])
        async with opened(server.url, tmp_path / "looks") as tab:
            await tab.until("document.querySelector('#status').textContent === 'running'")
            await tab.until("document.querySelectorAll('.lane').length === 6")
            assert await tab.evaluate("document.querySelectorAll('#hands button').length") == 0
        async with opened(f"{server.url}?token=secret", tmp_path / "acts") as tab:
            await tab.until("document.querySelectorAll('#hands button').length === 3")
            assert "secret" not in await tab.evaluate("location.href")
            await tab.evaluate("document.querySelector('#hands button').click()")
            await tab.until("document.querySelector('#hands button').textContent === 'go on'")
            assert asked == ["pause"]
            stop = "[...document.querySelectorAll('#hands button')].at(-1)"
            await tab.evaluate(f"{stop}.click()")
            assert asked == ["pause"]  # It asks whether that was meant.
            await tab.evaluate(f"{stop}.click()")
            for _ in range(400):
                if asked == ["pause", "stop"]:
                    break
                await asyncio.sleep(0.05)
            assert asked == ["pause", "stop"]


async def test_a_sample_is_found_and_opened_and_what_it_was_shown_stays_text(run: Path, tmp_path: Path) -> None:
    with served(run) as server:
        async with opened(f"{server.url}#samples", tmp_path / "browser") as tab:
            await tab.until("document.querySelectorAll('tbody tr').length === 3")
            await tab.evaluate(
                "(() => { const box = document.querySelector('input[type=search]');"
                " box.value = 'onerror'; box.dispatchEvent(new Event('input')); })()"
            )
            await tab.until("document.querySelectorAll('tbody tr').length === 1")
            await tab.evaluate("document.querySelector('tbody tr').click()")
            await tab.until("document.querySelectorAll('.message').length === 2")
            assert "<script>document.title='owned'</script>" in await tab.text()
            assert await tab.evaluate("document.querySelectorAll('main script, main img').length") == 0
            assert await tab.evaluate("document.querySelectorAll('.policy .t').length") == 3
            assert await tab.evaluate("document.querySelectorAll('.siblings a').length") == 2
            await tab.evaluate("document.querySelector('.siblings a').click()")
            await tab.until("document.body.innerText.includes('sample 0.0')")
            assert await tab.evaluate("document.title") == "one · reroll"
            assert tab.complaints == []


async def test_a_sample_shows_its_pictures_its_advantages_and_what_is_masked(run: Path, seen: str, tmp_path: Path) -> None:
    with served(run) as server:
        async with opened(f"{server.url}#samples/3.0", tmp_path / "browser") as tab:
            await tab.until("document.querySelector('img.picture')?.naturalWidth === 24")
            assert await tab.evaluate("document.querySelectorAll('img').length") == 1
            assert "a picture that is not kept with the run" in await tab.text()
            for colouring in ("advantage", "mask"):
                await tab.evaluate(
                    "(() => { const box = document.querySelector('[aria-label=\"colour of tokens\"]');"
                    f" box.value = '{colouring}'; box.dispatchEvent(new Event('change')); }})()"
                )
                tokens = "[...document.querySelectorAll('.policy .t[data-at]')]"
                assert await tab.evaluate(f"{tokens}.map((e) => e.classList.contains('masked'))") == [False] * 3 + [True] * 3
                backgrounds = await tab.evaluate(f"{tokens}.map((e) => e.style.background)")
                assert len(set(backgrounds[:3])) == (2 if colouring == "advantage" else 1)
                assert backgrounds[3:] == [""] * 3
            assert "-0.5 to 1.5" in await tab.text()
            assert tab.complaints == []


async def test_roles_are_lanes_and_a_lost_engine_is_marked(run: Path, tmp_path: Path) -> None:
    with Journal(run / "journal") as journal:
        journal.record("", ACTIVITY, role="policy", is_on=True)
        journal.record("", ACTIVITY, busy=[0, 0], load=[2, 5])
        journal.record("", ACTIVITY, engine=1, fate="lost")
        journal.record("", ACTIVITY, busy=[50, 0], load=[1, 0])
    with served(run) as server:
        async with opened(f"{server.url}#now", tmp_path / "browser") as tab:
            names = "[...document.querySelectorAll('.role b')].map((e) => e.textContent).join()"
            await tab.until(f"{names} === 'engine 0,engine 1,trainer,rewards'")
            abouts = await tab.evaluate("[...document.querySelectorAll('.role .faint')].map((e) => e.textContent)")
            assert abouts[:2] == ["1 request", "0 requests"]
            await tab.evaluate(
                "CanvasRenderingContext2D.prototype.fillText = (text) => { (window.written ??= new Set()).add(text); }"
            )
            await tab.evaluate("location.hash = 'time'")
            await tab.until("window.written?.has('engine 1 lost')")
            assert tab.complaints == []


COMPARED = """
(async () => {
  const { Profile } = await import('/profile.js'), { Store, Life } = await import('/store.js');
  let seed = 1;
  const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  const store = new Store();
  store.run = { status: 'finished', first_s: 1, last_s: 0 };
  store.firstS = 0;
  let start = 0;
  for (let serial = 1; serial <= 500; serial++) {
    start += random();
    const times = [start, start + random(), start + 1 + random() * (serial % 50 ? 2 : 150)];
    const course = [0, times[0], 1, times[1], ...(serial % 9 ? [6, times[2]] : [])];
    store.take(new Life([serial, `${serial}.0`, 'd', 0, null, null, null, course]));
    store.run.last_s = Math.max(store.run.last_s, times[2]);
  }
  store.arrange();
  const faults = [];
  for (const [from, to] of [[0, store.nowS], [20, 90], [70.5, 70.9], [400, 500]]) {
    const wanted = store.ordered.filter((life) => life.start < to && life.end >= from);
    const found = store.within(from, to);
    const isSame = wanted.length === found.length && wanted.every((life) => found.includes(life));
    const num = store.numWithin(from, to);
    const isRight = isSame && new Set(found).size === found.length && num === wanted.length;
    if (!isRight) faults.push(`${wanted.length} lived from ${from} to ${to}`);
    const columns = new Float64Array(40), span = (to - from) / 40;
    store.profile.addTo(columns, 1, from, to, 40);
    for (let column = 0; column < 40; column++) {
      const left = from + column * span, right = left + span;
      let mean = 0;
      for (const { course, isOver } of store.ordered) {
        if (isOver) mean += Math.max(0, Math.min(right, course[5]) - Math.max(left, course[3])) / span;
      }
      const error = Math.abs(mean - columns[column]);
      if (error > 0.02 * mean + 4 * store.profile.width / span) faults.push(`${mean} became ${columns[column]}`);
    }
  }
  return [store.living.length, store.long.length < store.short.length, store.profile.width > 1 / 128, faults];
})()
"""


async def test_what_is_read_off_in_buckets_is_what_the_lives_say(run: Path, tmp_path: Path) -> None:
    with served(run) as server:
        async with opened(server.url, tmp_path / "browser") as tab:
            await tab.until("document.title.startsWith('one')")
            assert await tab.evaluate(COMPARED) == [55, True, True, []]
