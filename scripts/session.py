"""What every training run has: its folder, its recorded configuration, and how an interrupt or a lost rank ends it."""

import contextlib
import datetime
import json
import os
import pathlib
import signal
import sys
import threading

import edge
from kernels.errors import UserError

GRACE_SECONDS = 30  # from a SIGTERM to the end of a rank that waits for a dead one: a step and a save fit in (assumed)


def run_folder(config, job):
    """Where the run of all ranks writes, as rank 0 finds it."""
    return pathlib.Path(job.told(str(found_folder(config))))


def found_folder(config):
    """OUT/NAME/RUN; without a RUN, the newest one when resuming, else one named by the time."""
    base = pathlib.Path(config.out)
    base = (base if base.is_absolute() else edge.ROOT / base) / config.name
    if config.run:
        return base / config.run
    runs = sorted(path.parent for path in base.glob("*/config.yaml"))
    if config.resume == "auto" and runs:
        return runs[-1]
    return base / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")


def open_run(run, config):
    """Make a run's folder and write its configuration; refuse one that holds another run."""
    import yaml

    from drafter import checkpoint, manifest
    from drafter import config as configuration

    record = run / "config.yaml"
    if record.is_file() and checkpoint.steps_of(run):  # a run that saved no step has nothing to lose
        earlier = yaml.safe_load(record.read_text())
        now = json.loads(json.dumps(configuration.resolved(config)))
        differing = [key for key in now if key not in configuration.NOT_TRAINING and now[key] != earlier.get(key)]
        if config.resume != "auto":
            raise UserError(f"{run}: holds a run already; continue it with resume=auto, or choose another run=NAME")
        if differing:
            raise UserError(f"{run}: was begun with another {differing[0]}; give the same values, or another run=NAME")
        return
    run.mkdir(parents=True, exist_ok=True)
    with manifest.atomic(record, "w") as stream:
        yaml.safe_dump(configuration.resolved(config), stream, sort_keys=False)


def open_features(config, run, job, what, argv):
    """The store that features of the training rows are read from, filled as configured; None: all are computed.

    what: (target, rows, layout), as `features.open_store` takes them.
    """
    from drafter import features

    if config.features.mode == "online":
        return None
    folder = pathlib.Path(config.features.folder) if config.features.folder else run.parent / "features"
    store = fill_features(config, folder, what, argv) if job.writes else None
    job.wait()
    store = store or features.open_store(folder, *what)
    if not len(store):
        raise UserError(f"{folder}: holds no features yet; say with features.max_gib how much to keep there")
    print(f"features     {len(store):,} rows are read, {store.layout.rows - len(store):,} computed", flush=True)
    return store


def fill_features(config, folder, what, argv):
    """Write what the store is to hold and lacks; returns it."""
    import tqdm

    from drafter import features

    limit = None if config.features.mode == "cached" else (config.features.max_gib or 0) * 2**30
    with tqdm.tqdm(desc="features", unit="row", dynamic_ncols=True, mininterval=1.0, delay=2.0) as bar:

        def progress(rows, total):
            bar.total = total
            bar.update(rows)

        return features.fill(
            folder,
            *what,
            rows_at_once=config.trainer.rows_per_step,
            limit=limit,
            argv=argv,
            say=lambda line: print(f"features     {line}", flush=True),
            progress=progress,
        )


class interruptible:
    """While entered, a first SIGINT or SIGTERM asks the session to save and stop; a second one ends it at once.

    One rank's signal stops all, at the same step. Among several, a SIGTERM also starts a clock: see `Impatience`.
    """

    def __init__(self, session, job):
        self.session, self.job = session, job
        self.impatience = Impatience(session.run) if job.size > 1 else contextlib.nullcontext()

    def __enter__(self):
        self.before = {name: signal.signal(name, self.ask) for name in (signal.SIGINT, signal.SIGTERM)}
        self.impatience.__enter__()

    def __exit__(self, *error):
        self.impatience.__exit__(*error)
        for name, handler in self.before.items():
            signal.signal(name, handler)
        if self.job.size > 1 and error[0]:  # a lost rank, perhaps: the launcher's SIGTERM must not cut the message off
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def ask(self, *_):
        """Set the flag; restore the default so that a second signal is not held back."""
        self.session.stop = True
        for name, handler in self.before.items():
            signal.signal(name, handler)


class Impatience:
    """While entered, a process that got SIGTERM and does not leave within GRACE_SECONDS is ended with a message.

    mlx.launch sends SIGTERM to all ranks when one dies, and then waits for them. The ring's reductions raise then, but
    NCCL's wait for the dead rank for ever, outside of Python, whose handlers are not reached. A thread is: the signal
    itself writes to the descriptor that the thread reads.
    """

    def __init__(self, run):
        self.run = run
        self.left = threading.Event()

    def __enter__(self):
        heard, self.told = os.pipe()
        os.set_blocking(self.told, False)
        self.before = signal.set_wakeup_fd(self.told, warn_on_full_buffer=False)
        threading.Thread(target=self.listen, args=(heard,), daemon=True).start()

    def __exit__(self, *_):
        self.left.set()
        signal.set_wakeup_fd(self.before)
        os.close(self.told)

    def listen(self, heard):
        """Wait for the number of a signal, then for the process to leave."""
        with os.fdopen(heard, "rb", buffering=0) as stream:
            while number := stream.read(1):
                if number[0] == signal.SIGTERM and not self.left.wait(GRACE_SECONDS):
                    self.end()

    def end(self):
        """Print what there is to continue from, and end the process from a thread."""
        line = f"asked to end, and still waiting for another rank after {GRACE_SECONDS:g} s; {goes_on(self.run)}"
        print(f"error: {line}", file=sys.stderr, flush=True)
        print(json.dumps({"status": "interrupted", "error": line}), flush=True)
        os._exit(edge.EXIT["interrupted"])


@contextlib.contextmanager
def together(job, run):
    """Put the loss of another rank in one line that says how the job goes on."""
    from drafter import ranks

    try:
        yield
    except RuntimeError as error:
        if not ranks.lost(error):
            raise
        raise UserError(f"another rank of the job's {job.size} ended ({error}); {goes_on(run)}") from error


def goes_on(run):
    """How a run that was cut short is continued."""
    return f"{last_good(run)}; continue with the same command, run={run.name} and resume=auto"


def last_good(run):
    """Where a run could begin again, in words."""
    from drafter import checkpoint

    return f"the last good checkpoint is {checkpoint.newest_whole(run) or 'none: no step was saved yet'}"
