"""A training run of a small target from scratch: what scripts/train.py does with `kind: pretrain`."""

from kernels.errors import UserError
from session import interruptible, open_run
from tracking import Log


class PretrainSession:
    """One run of a small target from scratch."""

    def __init__(self, config, argv, run, job):
        from drafter import pretrain

        if job.size > 1:
            raise UserError(f"a target from scratch trains in one process, not {job.size}; start it without mlx.launch")
        self.config, self.argv, self.run, self.job = config, argv, run, job
        self.stop = False
        self.pretraining = pretrain.Pretraining(config, self.run)

    def card(self):
        """Print what is about to run, on what, with digests."""
        from kernels import backend

        machine = backend.describe()
        device = f"{machine['device']} ({machine['reason']}), BLAS {machine['blas']['name']}"
        for name, text in ({"device": device} | self.pretraining.facts() | {"run": self.run}).items():
            print(f"{name:12} {text}", flush=True)

    def dry_run(self):
        """Print the card and the resolved configuration; write nothing."""
        import yaml

        from drafter import config as configuration

        self.card()
        print(yaml.safe_dump(configuration.resolved(self.config), sort_keys=False), end="")
        return {"status": "done", "out": None, "config_digest": configuration.digest(self.config)}

    def train(self):
        """Take the steps that remain and, after the last one, write the target and its report."""
        open_run(self.run, self.config)
        self.card()
        with interruptible(self, self.job):
            with Log(self.run, self.config, self.pretraining.done) as log:
                steps, ended = self.pretraining.train(self.argv, log, lambda: self.stop)
            if not ended:
                print(f"stopped at step {steps}; continue with the same command, run={self.run.name} and resume=auto")
                return {"status": "interrupted", "out": str(self.run), "steps": steps}
            report = self.pretraining.finish(self.argv)
        return {"status": "done", "out": str(self.run), "steps": steps, **report}
