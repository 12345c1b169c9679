"""What each platform's tools print, and the rule that flags a row."""

import dataclasses
import math

import pytest

from decode.lab import health, sensors

QUIET = health.Pulse(
    wall=10.0, own=5.0, load=0.5, cores=4, busy=100.0, stolen=1.0, swapped=7, throttled=2, available=0.6
)


def later(**changes):
    """Two seconds on, this process having used three CPU seconds and no one else anything; with changes."""
    calm = dataclasses.replace(QUIET, wall=12.0, own=8.0, busy=103.0)
    return dataclasses.replace(calm, **changes)


def test_a_quiet_row_is_not_flagged_however_busy_this_process_is():
    assert health.disturbance(QUIET, later()) == []


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"busy": 103.9}, "other processes used 11%"),  # .9 s of 2 s × 4 cores
        ({"stolen": 1.2}, "hypervisor took 2%"),
        ({"swapped": 9}, "2 pages swapped"),
        ({"throttled": 3}, "throttled 1"),
        ({"available": 0.04}, "4.0% of memory"),
    ],
)
def test_each_disturbance_is_flagged_with_its_reason(changes, words):
    (reason,) = health.disturbance(QUIET, later(**changes))
    assert words in reason


@pytest.mark.parametrize("changes", [{"busy": 103.7}, {"stolen": 1.1}, {"available": 0.06}])
def test_a_disturbance_below_its_bound_is_not_flagged(changes):
    assert health.disturbance(QUIET, later(**changes)) == []


def test_without_proc_the_load_average_decides():
    nothing = {"busy": None, "stolen": None, "swapped": None, "throttled": None, "available": None}
    before = dataclasses.replace(QUIET, **nothing)
    assert health.disturbance(before, later(**nothing, load=3.9)) == []
    assert "load average 4.5" in health.disturbance(before, later(**nothing, load=4.5))[0]
    assert health.disturbance(before, later(**nothing, load=None)) == []


def test_proc_stat_counts_every_kind_of_work_but_neither_idle_nor_waiting(monkeypatch):
    monkeypatch.setattr(sensors.os, "sysconf", lambda name: 100)
    text = "cpu  100 20 30 9000 800 4 6 50 70 70\ncpu0 1 1 1 1 1 1 1 1 1 1\n"  # guest time is inside user time
    assert sensors.parse_stat(text) == {"busy": pytest.approx(1.6), "stolen": pytest.approx(0.5)}


def test_linux_memory_and_swap():
    assert sensors.parse_meminfo("MemTotal:  2000 kB\nMemFree: 10 kB\nMemAvailable:  500 kB\n") == {
        "total": 2000 * 1024,
        "available": 500 * 1024,
    }
    assert sensors.parse_swaps("pgpgin 5\npswpin 3\npswpout 4\npswpfoo 9\n") == 7


def test_macos_memory_and_thermal_state():
    text = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10.
Pages active:                            900.
Pages inactive:                           20.
Pages speculative:                         3.
"""
    assert sensors.parse_vm_stat(text, total=77) == {"total": 77, "available": 33 * 16384}
    therm = "CPU Power notify\n\tCPU_Scheduler_Limit \t= 100\n\tCPU_Available_CPUs \t= 12\n\tCPU_Speed_Limit \t= 84\n"
    assert sensors.parse_therm(therm)["CPU_Speed_Limit"] == 84
    assert sensors.parse_therm("Note: No thermal warning level has been recorded") is None


def test_nvidia_state():
    (gpu,) = sensors.parse_gpus("NVIDIA H200, 1980, 1980, 35, 0, 79.63, 4, 143771, 0x0000000000000001\n")
    assert gpu["clocks.sm"] == 1980 and gpu["memory.total"] == 143771 and gpu["name"] == "NVIDIA H200"
    assert sensors.parse_gpus("NVIDIA X, [N/A], 1980, 35, 0, 79.63, 4, 9, 0x60")[0]["clocks.sm"] == "[N/A]"


def test_what_is_absent_is_none():
    assert sensors.read(sensors.PROC / "no-such-file") is None
    assert sensors.ask("no-such-program") is None
    parsers = (sensors.parse_stat, sensors.parse_swaps, sensors.parse_meminfo, sensors.parse_therm, sensors.parse_gpus)
    assert [parse(None) for parse in parsers] == [None] * 5


def test_this_machine_gives_a_pulse_and_a_snapshot():
    before = health.pulse()
    math.factorial(20_000)
    after = health.pulse()
    assert after.wall > before.wall and after.own >= before.own
    found = health.snapshot()
    assert found["cores"] >= 1 and len(found["load"]) == 3
