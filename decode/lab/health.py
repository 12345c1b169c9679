"""The machine's state and the rule that flags a row: pulses beside every row, checks between prompts, snapshots around.

    pulse      counters from files only, read before and after every row; two of them give what happened in between
    check      what needs programs or a longer look (who else is busy, priority, heat, clocks), before and after all
               the arms of one prompt: what is wrong at either end flags every row of that prompt's round
    snapshot   everything, before and after the whole run, for the record

All of it stays outside the clock. What a platform does not offer is None and flags nothing.
"""

import dataclasses
import os
import time

from decode.lab import sensors

# Assumed bounds, all of them: chosen to catch a second busy process on a small machine, never fitted to results.
OTHERS_SHARE = 0.10  # of the machine's cores, in use by other processes during the row
HEAVY_SHARE = 0.50  # of one core, in use by one other process while a prompt's arms ran
STOLEN_SHARE = 0.02  # of the machine's cores, taken by the hypervisor
LEAST_MEMORY = 0.05  # of memory, still available
STALLED_SHARE = 0.10  # of the last ten seconds, in which some task waited for memory
LEAST_SPEED = 100  # percent: macOS's CPU_Speed_Limit where nothing is throttled
SLOW_CLASSES = ("utility", "background")  # macOS QoS classes that are kept to the slow cores
RULE = (
    f"a row is flagged when, while it ran, other processes used more than {OTHERS_SHARE:.0%} of all cores (without "
    f"/proc: load average above the core count), the hypervisor took more than {STOLEN_SHARE:.0%}, pages were "
    f"swapped, the CPU was throttled, or less than {LEAST_MEMORY:.0%} of memory stayed available; and when, around "
    f"its prompt's arms, one other process used more than {HEAVY_SHARE:.0%} of a core, this process had a lowered "
    "priority, the machine reported heat, throttling or memory pressure, or a GPU was slowed to protect it"
)


@dataclasses.dataclass(frozen=True)
class Pulse:
    """Counters at one moment; seconds and pages since boot, so that two pulses give what happened between them."""

    wall: float
    own: float  # CPU seconds of this process
    load: float | None
    cores: int
    busy: float | None = None  # CPU seconds of all processes, this one included
    stolen: float | None = None
    swapped: int | None = None  # pages in and out
    throttled: int | None = None  # events
    available: float | None = None  # share of memory


@dataclasses.dataclass(frozen=True)
class Check:
    """The state between two prompts, as `sensors` gives it; heavy and others need a check before to be known."""

    wall: float
    niceness: int | None = None
    qos: str | None = None
    thermal: str | None = None
    speed_limit: int | None = None
    hot_zones: list | None = None
    memory: str | float | None = None
    slow_gpus: list | None = None
    busiest: list | None = None  # macOS
    processes: dict | None = None  # Linux: {pid: (name, niceness, CPU seconds)}


def pulse():
    """A pulse now."""
    own = os.times()
    stat = sensors.parse_stat(sensors.read(sensors.PROC / "stat"))
    return Pulse(
        wall=time.perf_counter(),
        own=own.user + own.system,
        load=sensors.load_average()[0],
        cores=os.cpu_count() or 1,
        busy=stat and stat["busy"],
        stolen=stat and stat["stolen"],
        swapped=sensors.parse_swaps(sensors.read(sensors.PROC / "vmstat")),
        throttled=sensors.throttle_events(),
        available=available_share(sensors.parse_meminfo(sensors.read(sensors.PROC / "meminfo"))),
    )


def disturbance(before, after):
    """What disturbed the row between two pulses, by RULE: a list of reasons, empty for a quiet row."""
    reasons = crowding(before, after)
    if after.swapped is not None and after.swapped > before.swapped:
        reasons.append(f"{after.swapped - before.swapped} pages swapped")
    if after.throttled is not None and after.throttled > before.throttled:
        reasons.append(f"CPU throttled {after.throttled - before.throttled} times")
    if after.available is not None and after.available < LEAST_MEMORY:
        reasons.append(f"{after.available:.1%} of memory available")
    return reasons


def crowding(before, after):
    """Whether others wanted the processors: measured from /proc, else guessed from the load average."""
    if after.busy is None:
        crowded = after.load is not None and after.load > after.cores
        return [f"load average {after.load:.1f} on {after.cores} cores"] if crowded else []
    others = share(before, after, "busy") - share(before, after, "own")
    stolen = share(before, after, "stolen")
    reasons = [f"other processes used {others:.0%} of the cores"] if others > OTHERS_SHARE else []
    return reasons + ([f"hypervisor took {stolen:.0%} of the cores"] if stolen > STOLEN_SHARE else [])


def share(before, after, name):
    """A counter's CPU seconds between two pulses, as a share of all cores."""
    used = getattr(after, name) - getattr(before, name)
    return used / max(after.wall - before.wall, 1e-9) / after.cores


def check():
    """A check now; may run small programs, so never inside the clock."""
    return Check(
        wall=time.perf_counter(),
        niceness=sensors.niceness(),
        qos=sensors.qos_class(),
        thermal=sensors.thermal_pressure(),
        speed_limit=(sensors.speed_limits() or {}).get("CPU_Speed_Limit"),
        hot_zones=sensors.hot_zones(),
        memory=sensors.memory_pressure(),
        slow_gpus=[(gpu["name"], words) for gpu in sensors.gpus() or [] for words in sensors.slowdowns(gpu)],
        busiest=sensors.busiest(),
        processes=sensors.processes(),
    )


def ailments(before, after):
    """What was wrong at one of two checks, or between them: a list of reasons, by RULE."""
    found = [reason for state in (before, after) for reason in standing(state)]
    found += [f"{name} (niceness {nice}) used {used:.0%} of a core" for name, nice, used in heavy(before, after)]
    return list(dict.fromkeys(found))


def standing(state):
    """What is wrong at one check."""
    stalled = isinstance(state.memory, float) and state.memory > STALLED_SHARE
    said = {
        f"this process has niceness {state.niceness}": (state.niceness or 0) > 0,
        f"this process has QoS class {state.qos}": state.qos in SLOW_CLASSES,
        f"thermal pressure is {state.thermal}": state.thermal not in (None, "nominal"),
        f"CPU speed limited to {state.speed_limit} %": (state.speed_limit or LEAST_SPEED) < LEAST_SPEED,
        f"memory pressure is {state.memory}": stalled or state.memory in ("warning", "critical"),
    }
    hot = ["thermal zone {zone} at {celsius:.0f} °C, trip {trip:.0f}".format(**zone) for zone in state.hot_zones or []]
    return [words for words, holds in said.items() if holds] + hot + [": ".join(gpu) for gpu in state.slow_gpus or []]


def heavy(before, after):
    """[(name, niceness, share of one core)] of other processes above HEAVY_SHARE between two checks, busiest first."""
    span, own = max(after.wall - before.wall, 1e-9), os.getpid()
    earlier, later = before.processes or {}, after.processes or {}
    used = [
        (name, nice, (seconds - earlier.get(pid, (name, nice, 0.0))[2]) / span)  # a new process used all it has since
        for pid, (name, nice, seconds) in later.items()
        if pid != own
    ]
    return sorted((one for one in used + (after.busiest or []) if one[2] > HEAVY_SHARE), key=lambda one: -one[2])


def snapshot():
    """The machine's state in full, for a result file; may run small programs, so never near the clock."""
    return {
        "load": sensors.load_average(),
        "cores": os.cpu_count(),
        "niceness": sensors.niceness(),
        "qos": sensors.qos_class(),
        "cpu_mhz": sensors.clock(),
        "throttle_events": sensors.throttle_events(),
        "thermal": sensors.speed_limits(),
        "thermal_pressure": sensors.thermal_pressure(),
        "hot_zones": sensors.hot_zones(),
        "memory": sensors.memory(),
        "memory_pressure": sensors.memory_pressure(),
        "swap_activity_pages": sensors.parse_swaps(
            sensors.read(sensors.PROC / "vmstat") or (sensors.ask("vm_stat") if sensors.on_mac() else None)
        ),
        "swap_usage": sensors.ask("sysctl", "-n", "vm.swapusage") if sensors.on_mac() else None,
        "gpus": sensors.gpus(),
    }


def available_share(memory):
    """Available ÷ total."""
    return memory and memory["available"] / memory["total"]
