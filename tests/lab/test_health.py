"""What each platform's tools print, and the rule that flags a row."""

import dataclasses
import math
import os
import subprocess
import sys
import time

import pytest

from decode.lab import health, sensors, timing

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


def test_an_older_driver_is_asked_by_the_older_name(monkeypatch):
    line = "NVIDIA X, 900, 1980, 35, 0, 79.63, 4, 9, 0x60"
    answer = lambda program, query, form: line if "clocks_throttle_reasons.active" in query else None
    monkeypatch.setattr(sensors, "ask", answer)
    assert sensors.slowdowns(sensors.gpus()[0]) == ["software thermal slowdown", "hardware thermal slowdown"]


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


def test_a_gpu_slowed_to_protect_it_is_flagged_and_one_at_its_power_cap_or_idle_is_not():
    reasons = lambda bits: sensors.slowdowns({"throttle_reasons": bits})
    assert reasons("0x0000000000000005") == []
    assert reasons("0x0000000000000068") == [
        "hardware slowdown",
        "software thermal slowdown",
        "hardware thermal slowdown",
    ]
    assert reasons("[N/A]") == reasons(None) == []
    state = health.Check(wall=0.0, slow_gpus=[("H200", "power brake")])
    assert health.standing(state) == ["H200: power brake"]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"niceness": 4}, "niceness 4"),
        ({"qos": "background"}, "QoS class background"),
        ({"thermal": "heavy"}, "thermal pressure is heavy"),
        ({"speed_limit": 84}, "limited to 84 %"),
        ({"memory": "warning"}, "memory pressure is warning"),
        ({"memory": 0.3}, "memory pressure is 0.3"),
        ({"hot_zones": [{"zone": "x86_pkg", "celsius": 97.0, "trip": 95.0}]}, "x86_pkg at 97 °C, trip 95"),
    ],
)
def test_each_bad_state_at_either_end_of_a_round_is_an_ailment(state, words):
    bad, good = health.Check(wall=0.0, **state), health.Check(wall=5.0)
    for pair in ((bad, good), (good, bad), (bad, bad)):
        (reason,) = health.ailments(*pair)
        assert words in reason


def test_a_good_state_is_none():
    fine = {"niceness": -3, "qos": "user-interactive", "thermal": "nominal", "speed_limit": 100, "memory": "normal"}
    one = health.Check(wall=0.0, hot_zones=[], slow_gpus=[], **fine)
    assert health.ailments(one, dataclasses.replace(one, wall=1.0, memory=0.02)) == []


def test_a_process_that_used_a_core_is_named_with_its_niceness_and_this_one_is_not():
    before = health.Check(wall=10.0, processes={1: ("init", 0, 5.0), 7: ("cc1", 19, 50.0), os.getpid(): ("py", 0, 0.0)})
    after = {1: ("init", 0, 5.5), 7: ("cc1", 19, 53.6), 9: ("ld", 0, 2.4), os.getpid(): ("py", 0, 4.0)}
    found = health.heavy(before, health.Check(wall=14.0, processes=after))
    assert [(name, nice, round(share, 2)) for name, nice, share in found] == [("cc1", 19, 0.9), ("ld", 0, 0.6)]
    mac = health.Check(wall=14.0, busiest=[("WindowServer", 0, 0.8), ("Dock", 0, 0.1)])
    assert [name for name, *_ in health.heavy(health.Check(wall=10.0), mac)] == ["WindowServer"]


def test_a_process_line_is_read_whatever_its_name():
    text = "4242 (a (b) c) R 1 2 3 4 5 6 7 8 9 10 700 300 0 0 39 19 1 0 5 6 7\n"
    name, nice, seconds = sensors.parse_process(text)
    assert (name, nice, seconds) == ("a (b) c", 19, 1000 / os.sysconf("SC_CLK_TCK"))
    assert sensors.parse_process(None) is None


def test_pressure_and_macos_swaps_are_read():
    assert sensors.parse_pressure("some avg10=12.50 avg60=1.00 avg300=0.00 total=9\nfull avg10=1.00\n") == 0.125
    assert sensors.parse_pressure("") is None
    assert sensors.parse_swaps("Swapins:                                 11.\nSwapouts:                   31.\n") == 42


def test_on_macos_the_levels_and_the_class_have_names(monkeypatch):
    said = {"notifyutil": "com.apple.system.thermalpressurelevel 2", "sysctl": "4", "pmset": "CPU_Speed_Limit = 70"}
    monkeypatch.setattr(sensors, "on_mac", lambda: True)
    monkeypatch.setattr(sensors, "ask", lambda program, *words: said.get(program))
    monkeypatch.setattr(sensors.ctypes, "CDLL", lambda name: type("C", (), {"qos_class_self": lambda self: 0x09})())
    found = health.standing(health.check())
    for words in ("thermal pressure is heavy", "memory pressure is critical", "limited to 70 %", "class background"):
        assert any(words in line for line in found), words


def zone(folder, celsius, trip=95, kind="passive"):
    """A thermal zone as Linux lays one out."""
    folder = folder / "thermal_zone0"
    folder.mkdir(exist_ok=True)
    for name, text in (("type", "x86_pkg_temp"), ("temp", celsius * 1000), ("trip_point_0_temp", trip * 1000)):
        (folder / name).write_text(f"{text}\n")
    (folder / "trip_point_0_type").write_text(f"{kind}\n")
    return folder.parent


def flagged():
    """The reasons that a round of one arm and one prompt is flagged with, by the runner's own pass."""
    arm = type("Arm", (), {"name": "mlx_lm", "part": None, "run": lambda self, tokens, most: time.sleep(0.4)})()
    prompt = type("Prompt", (), {"id": "p", "part": None, "tokens": (1,)})()
    ((_, _, ((*_, alone),), ailments),) = timing.rounds([arm], [prompt], timing.Plan(1))
    return alone + ailments


BUSY = "while True: pass"
linux = pytest.mark.skipif(not sensors.PROC.joinpath("stat").exists(), reason="reads /proc")


@linux
@pytest.mark.parametrize("niceness", [0, 12])
def test_a_busy_loop_flags_the_rows_by_name_even_when_it_is_nice(niceness, monkeypatch):
    monkeypatch.setattr(health, "HEAVY_SHARE", 0.05)  # a nice loop gets little of a machine that others use
    command = ["nice", "-n", str(niceness), sys.executable, "-c", BUSY]
    with subprocess.Popen(command) as loop:
        try:
            time.sleep(0.3)
            reasons = flagged()
        finally:
            loop.kill()
    name = sensors.parse_process(sensors.read(sensors.PROC / "self/stat"))[0]
    assert any(f"{name} (niceness {niceness}) used" in reason for reason in reasons), reasons


@linux
def test_a_niced_run_flags_its_own_rows():
    code = (
        "import sys; sys.path[:0] = ['.', 'tests', 'tests/lab']\n"
        "from kernels import backend; backend.load()\n"
        "import test_health; print(test_health.flagged())"
    )
    run = subprocess.run(["nice", "-n", "7", sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "this process has niceness 7" in run.stdout


def test_a_faked_thermal_file_flags_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(sensors, "THERMAL", zone(tmp_path, celsius=96))
    assert any("x86_pkg_temp at 96 °C, trip 95" in reason for reason in flagged())
    for cool in ({"celsius": 60}, {"celsius": 96, "kind": "active"}):  # a fan's trip slows nothing down
        monkeypatch.setattr(sensors, "THERMAL", zone(tmp_path, **cool))
        assert not any("°C" in reason for reason in flagged())


def test_a_throttle_count_that_rises_flags_the_row(tmp_path, monkeypatch):
    monkeypatch.setattr(sensors, "CPU", tmp_path)
    (tmp_path / "cpu0/thermal_throttle").mkdir(parents=True)
    count = tmp_path / "cpu0/thermal_throttle/package_throttle_count"
    count.write_text("3\n")
    before = health.pulse()
    count.write_text("5\n")
    assert "CPU throttled 2 times" in health.disturbance(before, health.pulse())
