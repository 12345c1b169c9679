"""What every training run has: its folder, its recorded configuration, and how an interrupt ends it."""

import datetime
import json
import pathlib
import signal

import edge
from kernels.errors import UserError


def run_folder(config):
    """Where the run writes: OUT/NAME/RUN; without a RUN, the newest one when resuming, else one named by the time."""
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


class interruptible:
    """While entered, a first SIGINT or SIGTERM asks the session to save and stop; a second one ends it at once."""

    def __init__(self, session):
        self.session = session

    def __enter__(self):
        self.before = {name: signal.signal(name, self.ask) for name in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_):
        for name, handler in self.before.items():
            signal.signal(name, handler)

    def ask(self, *_):
        """Set the flag; restore the default so that a second signal is not held back."""
        self.session.stop = True
        for name, handler in self.before.items():
            signal.signal(name, handler)
