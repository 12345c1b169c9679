"""The machine's state: a full snapshot before and after an experiment, a cheap pulse around every row.

What a platform does not offer is None, never a guess. Linux: /proc and /sys; macOS: sysctl, vm_stat and pmset; NVIDIA:
nvidia-smi. Pulses read files only and stay outside the clock.
"""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import time

PROC = pathlib.Path("/proc")
CPU = pathlib.Path("/sys/devices/system/cpu")

# Assumed bounds, all of them: chosen to catch a second busy process on a small machine, never fitted to results.
OTHERS_SHARE = 0.10  # of the machine's cores, in use by other processes during the row
STOLEN_SHARE = 0.02  # of the machine's cores, taken by the hypervisor
LEAST_MEMORY = 0.05  # of memory, still available
RULE = (
    f"a row is flagged when, while it ran, other processes used more than {OTHERS_SHARE:.0%} of all cores (without "
    f"/proc: load average above the core count), the hypervisor took more than {STOLEN_SHARE:.0%}, pages were "
    f"swapped, the CPU was throttled, or less than {LEAST_MEMORY:.0%} of memory stayed available"
)
GPU_FIELDS = "name,clocks.sm,clocks.max.sm,temperature.gpu,utilization.gpu,power.draw,memory.used,memory.total"


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


def pulse():
    """A pulse now."""
    own = os.times()
    stat = parse_stat(read(PROC / "stat"))
    return Pulse(
        wall=time.perf_counter(),
        own=own.user + own.system,
        load=load_average()[0],
        cores=os.cpu_count() or 1,
        busy=stat and stat["busy"],
        stolen=stat and stat["stolen"],
        swapped=parse_swaps(read(PROC / "vmstat")),
        throttled=number(read(CPU / "cpu0/thermal_throttle/package_throttle_count")),
        available=available_share(parse_meminfo(read(PROC / "meminfo"))),
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


def snapshot():
    """The machine's state in full, for a result file; may run small programs, so never near the clock."""
    memory = parse_meminfo(read(PROC / "meminfo")) or parse_vm_stat(ask("vm_stat"), memory_total())
    return {
        "load": load_average(),
        "cores": os.cpu_count(),
        "niceness": os.nice(0) if hasattr(os, "nice") else None,
        "cpu_mhz": clock(),
        "throttle_events": number(read(CPU / "cpu0/thermal_throttle/package_throttle_count")),
        "thermal": parse_therm(ask("pmset", "-g", "therm")) if sys.platform == "darwin" else None,
        "memory": memory,
        "swap_activity_pages": parse_swaps(read(PROC / "vmstat")),
        "swap_usage": ask("sysctl", "-n", "vm.swapusage") if sys.platform == "darwin" else None,
        "gpus": parse_gpus(ask("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits")),
    }


def load_average():
    """Load over 1, 5 and 15 minutes."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except (OSError, AttributeError):
        return [None, None, None]


def memory_total():
    """Bytes of physical memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def clock():
    """{now, highest} of core 0 in MHz: from cpufreq, else from /proc/cpuinfo, which knows no highest."""
    now, highest = (number(read(CPU / f"cpu0/cpufreq/{name}")) for name in ("scaling_cur_freq", "cpuinfo_max_freq"))
    if now:
        return {"now": now / 1000, "highest": highest and highest / 1000}
    found = re.search(r"cpu MHz\s*:\s*([\d.]+)", read(PROC / "cpuinfo") or "")
    return {"now": float(found[1]), "highest": None} if found else None


def parse_stat(text):
    """{busy, stolen} CPU seconds since boot, from /proc/stat's first line."""
    if not text:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, text.split("\n", 1)[0].split()[1:9])
    tick = os.sysconf("SC_CLK_TCK")
    return {"busy": (user + nice + system + irq + softirq) / tick, "stolen": steal / tick}


def parse_swaps(text):
    """Pages swapped in and out since boot, from /proc/vmstat."""
    found = re.findall(r"^pswp(?:in|out) (\d+)$", text or "", re.MULTILINE)
    return sum(map(int, found)) if found else None


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
    """One dict per GPU, from nvidia-smi's csv; numbers in MHz, °C, %, W and MiB."""
    if not text:
        return None
    names = GPU_FIELDS.split(",")
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [{name: as_number(cell) for name, cell in zip(names, row, strict=False)} for row in rows]


def available_share(memory):
    """Available ÷ total."""
    return memory and memory["available"] / memory["total"]


def as_number(cell):
    """A cell as a float, or as its text where it is none ("[N/A]")."""
    try:
        return float(cell)
    except ValueError:
        return cell


def number(text):
    """A file's whole number, or None."""
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
