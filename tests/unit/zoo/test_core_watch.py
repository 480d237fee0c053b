"""Who waits for a core is noticed, and spins no longer."""

import json
import os
import subprocess
import sys
import time

import pytest

from reroll.runtime.devices import num_usable_cores
from reroll_zoo.core_watch import NUM_ROOMY_LOOKS, Crowding, Look, ThreadWatch, Use, longest_wait, wait_for_others

SECOND = 1_000_000_000


def test_the_thread_that_waits_most_decides():
    before = {"1": Use(0, 0), "2": Use(5 * SECOND, SECOND)}
    after = {"1": Use(SECOND, 0), "2": Use(5 * SECOND + SECOND // 4, SECOND + 3 * SECOND // 4)}
    assert longest_wait(before, after, seconds=1.0) == 0.75


def test_a_thread_that_hardly_wanted_a_core_tells_nothing():
    assert longest_wait({}, {"1": Use(SECOND // 100, SECOND // 50)}, seconds=1.0) is None


def test_a_thread_that_began_in_between_counts_from_its_beginning():
    assert longest_wait({}, {"1": Use(SECOND // 2, SECOND // 2)}, seconds=1.0) == 0.5


def test_threads_that_get_into_each_others_way_on_an_idle_machine_do_not_count():
    uses = {"1": Use(SECOND // 2, SECOND // 2)}
    before = Look(at_s=0.0, uses={}, own_s=0.0, machine_s=100.0)
    assert wait_for_others(before, Look(at_s=1.0, uses=uses, own_s=1.9, machine_s=102.0)) == 0.0
    assert wait_for_others(before, Look(at_s=1.0, uses=uses, own_s=1.0, machine_s=102.0)) == 0.5


def test_a_process_that_idles_beside_others_does_not_take_the_machine_for_roomy():
    before = Look(at_s=0.0, uses={}, own_s=0.0, machine_s=100.0)
    beside_others = wait_for_others(before, Look(at_s=1.0, uses={"1": Use(0, 0)}, own_s=0.0, machine_s=102.0))
    alone = wait_for_others(before, Look(at_s=1.0, uses={"1": Use(0, 0)}, own_s=0.0, machine_s=100.1))
    crowding = Crowding()
    crowding.see(0.5)
    for _ in range(2 * NUM_ROOMY_LOOKS):
        crowding.see(beside_others)
    assert crowding.is_on
    for _ in range(NUM_ROOMY_LOOKS):
        crowding.see(alone)
    assert not crowding.is_on


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the kernel does not tell how long threads wait")
def test_a_machine_with_more_work_than_cores_is_noticed():
    crowd = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * num_usable_cores())]
    watch = ThreadWatch()
    try:
        deadline_s = time.monotonic() + 60
        while not watch.is_crowded and time.monotonic() < deadline_s:
            sum(range(100_000))
        assert watch.is_crowded
        assert watch.take_wait() > 0
        assert watch.take_wait() == 0
    finally:
        for process in crowd:
            process.kill()
            process.wait()


SPIN = """
import json, os, time
from concurrent.futures import ThreadPoolExecutor
import torch
from reroll_zoo.core_watch import Brake, thread_uses

before = set(thread_uses())
numbers = torch.ones(200_000)
numbers + numbers
(helper,) = set(thread_uses()) - before

def spun_ms():
    # What the helper uses beyond its half of the work, which takes a tenth of a millisecond.
    used = []
    for _ in range(9):
        start = thread_uses()[helper].ran_ns
        numbers + numbers
        time.sleep(0.05)
        used.append((thread_uses()[helper].ran_ns - start) / 1e6)
    return sorted(used)[4]

brake, told = Brake(), [spun_ms()]
with ThreadPoolExecutor(1) as another:  # Its helpers are its own.
    for is_on in (True, False):
        another.submit(brake.set, is_on).result()
        told.append(spun_ms())
print(json.dumps(told))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux") or num_usable_cores() < 2, reason="needs GNU OpenMP and two cores")
def test_under_the_brake_a_helper_sleeps_where_it_would_spin():
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    bound = f"import os; os.sched_setaffinity(0, [{cores}])\n"
    done = subprocess.run([sys.executable, "-c", bound + SPIN], env=unset, capture_output=True, text=True, check=True)
    free, braked, loosed = json.loads(done.stdout)
    assert braked < free / 4
    assert braked < loosed / 4


def test_the_user_is_told_of_a_busy_machine_and_not_of_an_idle_one():
    assert ThreadWatch().remark(0.1) == ""
    assert f"on {num_usable_cores()} cores, 60% of the time" in ThreadWatch().remark(0.6)
