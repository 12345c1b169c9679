"""What each platform tells of its state: readers of its files and programs, and parsers of what they print.

What a platform does not offer is None, never a guess. Linux: /proc and /sys; macOS: sysctl, vm_stat, pmset, notifyutil,
ps and the process's own QoS class; NVIDIA: nvidia-smi. Files are cheap enough to read beside every row; programs are
not, and are asked between prompts only.
"""

import contextlib
import ctypes
import os
import pathlib
import re
import subprocess
import sys

PROC = pathlib.Path("/proc")
CPU = pathlib.Path("/sys/devices/system/cpu")
THERMAL = pathlib.Path("/sys/class/thermal")

GPU_FIELDS = "name,clocks.sm,clocks.max.sm,temperature.gpu,utilization.gpu,power.draw,memory.used,memory.total"
GPU_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # what newer and older drivers call it
# Bits of NVML's nvmlClocksThrottleReasons that mean "slower than asked for to protect the chip" (cited: NVML's header).
# Its idle, application-clock and power-cap bits are a card's ordinary life and stand for no disturbance.
GPU_SLOWDOWNS = {0x08: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
                 0x80: "power brake"}  # fmt: skip
QOS_CLASSES = {0x21: "user-interactive", 0x19: "user-initiated", 0x15: "default", 0x11: "utility", 0x09: "background"}
PRESSURE_KEY = "com.apple.system.thermalpressurelevel"
THERMAL_LEVELS = ("nominal", "moderate", "heavy", "trapping", "sleeping")  # cited: macOS's OSThermalPressureLevel
MEMORY_LEVELS = {1: "normal", 2: "warning", 4: "critical"}  # cited: macOS's kern.memorystatus_vm_pressure_level


def on_mac():
    """Whether this is macOS."""
    return sys.platform == "darwin"


def load_average():
    """Load over 1, 5 and 15 minutes."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except (OSError, AttributeError):
        return [None, None, None]


def niceness():
    """This process's niceness: 0 is the ordinary priority, above it others go first."""
    return os.nice(0) if hasattr(os, "nice") else None


def qos_class():
    """The name of this thread's macOS QoS class, which decides between fast and slow cores; None elsewhere."""
    if not on_mac():
        return None
    with contextlib.suppress(OSError, AttributeError):
        return QOS_CLASSES.get(ctypes.CDLL(None).qos_class_self(), "unspecified")
    return None


def memory():
    """{total, available} bytes."""
    return parse_meminfo(read(PROC / "meminfo")) or parse_vm_stat(ask("vm_stat"), memory_total())


def memory_total():
    """Bytes of physical memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def memory_pressure():
    """The name of macOS's memory pressure level, or Linux's share of time that tasks stalled on memory (10 s, 0..1)."""
    if on_mac():
        return MEMORY_LEVELS.get(number(ask("sysctl", "-n", "kern.memorystatus_vm_pressure_level")))
    return parse_pressure(read(PROC / "pressure/memory"))


def clock():
    """{now, highest} of core 0 in MHz: from cpufreq, else from /proc/cpuinfo, which knows no highest."""
    now, highest = (number(read(CPU / f"cpu0/cpufreq/{name}")) for name in ("scaling_cur_freq", "cpuinfo_max_freq"))
    if now:
        return {"now": now / 1000, "highest": highest and highest / 1000}
    found = re.search(r"cpu MHz\s*:\s*([\d.]+)", read(PROC / "cpuinfo") or "")
    return {"now": float(found[1]), "highest": None} if found else None


def throttle_events():
    """How often core 0's package was throttled since boot."""
    return number(read(CPU / "cpu0/thermal_throttle/package_throttle_count"))


def thermal_pressure():
    """The name of macOS's thermal pressure level."""
    found = on_mac() and re.search(r"thermalpressurelevel (\d+)", ask("notifyutil", "-g", PRESSURE_KEY) or "")
    return THERMAL_LEVELS[min(int(found[1]), len(THERMAL_LEVELS) - 1)] if found else None


def speed_limits():
    """{name: percent} of the limits that macOS reports, such as CPU_Speed_Limit."""
    return parse_therm(ask("pmset", "-g", "therm")) if on_mac() else None


def hot_zones():
    """Linux's thermal zones at or above the first trip point that makes the kernel slow something down, in °C.

    Returns [{"zone", "celsius", "trip"}]; None where there is no zone to read.
    """
    zones = sorted(THERMAL.glob("thermal_zone*"))
    found = [zone_state(zone) for zone in zones]
    return [state for state in found if state["trip"] and state["celsius"] >= state["trip"]] if zones else None


def zone_state(zone):
    """{zone, celsius, trip} of one thermal zone; the trip is the lowest passive, hot or critical one, or None."""
    trips = []
    for kind in zone.glob("trip_point_*_type"):
        celsius = number(read(zone / kind.name.replace("_type", "_temp")))
        if (read(kind) or "").strip() in ("passive", "hot", "critical") and celsius:
            trips.append(celsius / 1000)
    celsius = number(read(zone / "temp")) or 0
    return {
        "zone": (read(zone / "type") or zone.name).strip(),
        "celsius": celsius / 1000,
        "trip": min(trips, default=None),
    }


def gpus():
    """One dict per NVIDIA GPU."""
    asked = (f"--query-gpu={GPU_FIELDS},{reasons}" for reasons in GPU_REASONS)
    answers = (ask("nvidia-smi", query, "--format=csv,noheader,nounits") for query in asked)
    return parse_gpus(next(filter(None, answers), None))  # a field that a driver does not know fails the whole query


def slowdowns(gpu):
    """Why a GPU runs slower than asked for, in words: [] where it does not or does not say."""
    try:
        bits = int(str(gpu.get("throttle_reasons")), 16)
    except ValueError:
        return []
    return [words for bit, words in GPU_SLOWDOWNS.items() if bits & bit]


def processes():
    """{pid: (name, niceness, CPU seconds so far)} of every process, this one and its threads included; Linux only."""
    found = {}
    for path in PROC.glob("[0-9]*/stat"):
        parsed = parse_process(read(path))
        if parsed:
            found[int(path.parent.name)] = parsed
    return found


def busiest():
    """[(name, niceness, share of one core)] of macOS's busiest processes, as ps averages them over the last minute."""
    lines = (ask("ps", "-Ao", "pid=,nice=,pcpu=,comm=", "-r") or "").splitlines() if on_mac() else []
    cells = [line.split(None, 3) for line in lines[:8]]
    others = [cell for cell in cells if len(cell) == 4 and cell[0] != str(os.getpid())]
    return [(pathlib.PurePath(name).name, int(nice), float(percent) / 100) for _, nice, percent, name in others]


def parse_process(text):
    """(name, niceness, CPU seconds) from a /proc/PID/stat; the name may hold spaces and brackets."""
    if not text:
        return None
    name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    return name, int(rest[16]), (int(rest[11]) + int(rest[12])) / os.sysconf("SC_CLK_TCK")


def parse_stat(text):
    """{busy, stolen} CPU seconds since boot, from /proc/stat's first line."""
    if not text:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, text.split("\n", 1)[0].split()[1:9])
    tick = os.sysconf("SC_CLK_TCK")
    return {"busy": (user + nice + system + irq + softirq) / tick, "stolen": steal / tick}


def parse_swaps(text):
    """Pages swapped in and out since boot, from /proc/vmstat or macOS's vm_stat."""
    found = re.findall(r"^(?:pswp(?:in|out)|Swap(?:ins|outs):)\s+(\d+)\.?$", text or "", re.MULTILINE)
    return sum(map(int, found)) if found else None


def parse_pressure(text):
    """Share of the last ten seconds in which some task waited, from a /proc/pressure file."""
    found = re.search(r"^some avg10=([\d.]+)", text or "")
    return float(found[1]) / 100 if found else None


def parse_meminfo(text):
    """{total, available} bytes, from /proc/meminfo."""
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", text or "", re.MULTILINE))
    if len(found) < 2:
        return None
    return {"total": int(found["MemTotal"]) * 1024, "available": int(found["MemAvailable"]) * 1024}


def parse_vm_stat(text, total):
    """{total, available} bytes, from macOS's vm_stat: free, inactive and speculative pages count as available."""
    page = re.search(r"page size of (\d+) bytes", text or "")
    if not page:
        return None
    pages = re.findall(r"^Pages (?:free|inactive|speculative):\s+(\d+)\.", text, re.MULTILINE)
    return {"total": total, "available": sum(map(int, pages)) * int(page[1])}


def parse_therm(text):
    """{name: value} of the limits that macOS's pmset prints, such as CPU_Speed_Limit (100 when not throttled)."""
    return {name: int(value) for name, value in re.findall(r"(\w+)\s*=\s*(\d+)", text or "")} or None


def parse_gpus(text):
    """One dict per GPU, from nvidia-smi's csv; numbers in MHz, °C, %, W and MiB, throttle reasons as NVML's bits."""
    if not text:
        return None
    names = [*GPU_FIELDS.split(","), "throttle_reasons"]
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [{name: as_number(cell) for name, cell in zip(names, row, strict=False)} for row in rows]


def as_number(cell):
    """A cell as a float, or as its text where it is none ("[N/A]")."""
    try:
        return float(cell)
    except ValueError:
        return cell


def number(text):
    """A text's whole number, or None."""
    return int(text) if text and text.strip().isdigit() else None


def read(path):
    """A file's text, or None where it is not there to be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def ask(*command):
    """A program's standard output, or None where it is missing, fails or takes over five seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
