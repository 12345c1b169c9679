"""What a training run leaves to read: metrics.jsonl, a progress bar, and Weights & Biases when asked."""

import json
import os
import time


class Log:
    """Metrics to metrics.jsonl, a progress bar with rate and time left, and Weights & Biases when asked."""

    def __init__(self, run, config, start):
        import tqdm

        truncate(run / "metrics.jsonl", start)
        self.stream = open(run / "metrics.jsonl", "a")  # noqa: SIM115 (closed with the log)
        self.bar = tqdm.tqdm(
            total=config.trainer.steps, initial=start, unit="step", dynamic_ncols=True, mininterval=1.0
        )
        self.wandb = open_wandb(run, config) if config.tracking.wandb else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stream.close()
        self.bar.close()
        if self.wandb:
            self.wandb.finish()

    def __call__(self, figures):
        self.stream.write(json.dumps({"time": round(time.time(), 3), **figures}) + "\n")
        if self.wandb:
            self.wandb.log(figures, step=figures["step"])
        if "loss" in figures:
            rate = {"tok/s": f"{figures['tokens_per_second']:,}"} if "tokens_per_second" in figures else {}
            self.bar.set_postfix({"loss": f"{figures['loss']:.3f}"} | rate, refresh=False)
            self.bar.update(1)
        if "validation_bits_per_byte" in figures:
            self.bar.write(f"step {figures['step']}: {figures['validation_bits_per_byte']:.3f} bits a held-out byte")
        if "validation_loss" in figures:
            agreement = " ".join(f"{value:.2f}" for value in figures["agreement"][:7])
            self.bar.write(
                f"step {figures['step']}: validation loss {figures['validation_loss']:.4f}, "
                f"agreement {agreement}, walked τ {figures['walked_tau']:.3f}"
            )

    def flush(self):
        """Everything logged so far reaches the disk."""
        self.stream.flush()
        os.fsync(self.stream.fileno())


def truncate(path, start):
    """Drop lines of steps after `start` from an earlier attempt, and step 0, which comes again: each is logged once."""
    from drafter import manifest

    if not path.is_file():
        return
    kept = [line for line in path.read_text().splitlines() if start and line and json.loads(line)["step"] <= start]
    with manifest.atomic(path, "w") as stream:
        stream.write("".join(line + "\n" for line in kept))


def open_wandb(run, config):
    """A Weights & Biases run: offline unless WANDB_API_KEY is set. Its files change when they will, so they lie beside
    the run, whose manifest answers for every file in it."""
    import wandb

    from drafter import config as configuration

    mode = None if os.environ.get("WANDB_API_KEY") else "offline"
    return wandb.init(
        project=config.tracking.project, name=f"{config.name}/{run.name}", dir=str(run.parent), mode=mode,
        config=configuration.resolved(config),
    )  # fmt: skip
