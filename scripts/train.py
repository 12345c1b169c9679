"""Train a drafter for a frozen target, or a small target from scratch.

    python scripts/train.py +experiment=quickstart
    python scripts/train.py +experiment=dflash_smollm2 data.sources=[runs/synthesis/mine] trainer.steps=4000
    python scripts/train.py +experiment=gated_lora_smollm2 adapter.rank=16 drafter.block_size=4
    python scripts/train.py +experiment=custom_target target.source=my/model --dry-run
    python scripts/train.py +experiment=reference_hybrid trainer.minutes=6
    mlx.launch -n 4 -- python scripts/train.py +experiment=dflash_smollm2     (as many ranks as GPUs, or hosts)

Experiments are the files of configs/experiment; every KEY=VALUE after one overrides it (keys: drafter/config.py).
Writes runs/NAME/RUN/: config.yaml, metrics.jsonl, step-N/, manifest.json; `latest` and `best` point at steps. An
interrupt saves the step and leaves; the same command with run=RUN resume=auto continues it to the same weights. Ranks
share out the rows of a step, take the same step as one process up to rounding, and only rank 0 writes and prints.
"""

import contextlib
import os
import sys

import edge
from kernels.errors import UserError
from pretraining import PretrainSession
from session import interruptible, last_good, open_features, open_run, run_folder, together
from tracking import Log


def parse(argv):
    """The command's options."""
    parser = edge.Parser(prog="train.py", description=__doc__)
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="+experiment=NAME, and any key of drafter/config.py"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration, sizes and memory; train nothing"
    )
    return parser.parse_intermixed_args(argv)


def main(argv):
    """Train; returns the closing figures."""
    options = parse(argv)
    os.environ.setdefault("MLX_CUDA_USE_CUDNN_SDPA", "0")  # packed rows need array masks, which cuDNN plans per shape
    from kernels import backend

    backend.load()
    from drafter import config as configuration
    from drafter import ranks

    job = ranks.join()
    if not job.writes:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for good: a command prints one card and one closing line)
    config = configuration.compose(options.overrides)
    kind = PretrainSession if isinstance(config, configuration.PretrainConfig) else Session
    run = run_folder(config, job)
    with together(job, run):
        session = kind(config, argv, run, job)
        return session.dry_run() if options.dry_run else session.train()


class Session:
    """One run of one configuration: what is loaded, where it writes, and how it ends."""

    def __init__(self, config, argv, run, job):
        import mlx.core as mx

        from drafter import checkpoint, recipes, target

        self.config, self.argv, self.run, self.job = config, argv, run, job
        self.stop = False
        self.warm_start = {}
        self.target = target.load(config.target.source, dtype=config.target.dtype, revision=config.target.revision)
        self.target.forward_packed(*[mx.ones((1, 2), mx.int32)] * 2)  # refuses what cannot be trained for, early
        self.recipe = recipes.RECIPES[config.drafter.kind](self.target, config)
        self.drafter = self.recipe.drafter()
        if config.init_from:
            warm = checkpoint.load_drafter(config.init_from, self.target, allow_mismatch=True)
            checkpoint.copy_weights(warm, self.drafter)
            self.warm_start = {"init_from": {"sha256": warm.sha256, "target_mismatch": warm.mismatch}}
        self.corpus = self.read_corpus()
        self.check_ranks()

    def check_ranks(self):
        """Refuse ranks that hold different things, and a batch of fewer rows than ranks."""
        from drafter import config as configuration

        rows = min(self.config.trainer.rows_per_step, len(self.corpus.train))
        if rows < self.job.size:
            raise UserError(
                f"a step has {rows} rows for {self.job.size} ranks; raise trainer.rows_per_step, or use fewer"
            )
        self.job.check_same("the configuration", configuration.digest(self.config))
        self.job.check_same("the target", self.target.fingerprint)
        self.job.check_same("the packed rows", self.corpus.train.sha256)

    def read_corpus(self):
        """The packed rows of the configured sources; refuses a side of the split that no block can be drawn from."""
        from drafter import anchors, corpus
        from drafter.documents import Source

        data = self.config.data
        sources = [Source(name, data.kind, data.split, data.column) for name in data.sources]
        read = corpus.rows(
            sources,
            self.target,
            length=data.row_tokens,
            seed=self.config.trainer.seed,
            validation=data.validation_fraction,
            max_documents=data.max_documents,
            allow_mismatch=data.allow_target_mismatch,
        )
        used = read.validation.loss_mask[: self.config.trainer.validation_rows]
        for side, rows, mask in (("training", read.train, read.train.loss_mask), ("held-out", read.validation, used)):
            if not anchors.valid_positions(mask, rows.documents[: len(mask)]).any():
                raise UserError(
                    f"{', '.join(data.sources)}: no {side} document has two answer tokens in a row, so no block can be "
                    "drawn from it; give more or longer documents"
                )
        return read

    def card(self):
        """Print what is about to run, on what, with digests."""
        from drafter import config as configuration
        from kernels import backend

        machine, train = backend.describe(), self.corpus.train
        mask, why = self.drafter.config.mask_token_id, "as configured"
        if self.config.drafter.mask_token_id is None:
            mask, why = self.target.spare_id()
        print(f"target       {self.target.source} {self.target.dtype}  fingerprint {self.target.fingerprint[:16]}…")
        print(f"device       {machine['device']} ({machine['reason']}), BLAS {machine['blas']['name']}")
        print(f"drafter      {self.recipe.describe(self.drafter)}, {self.recipe.size(self.drafter):,} parameters")
        print(f"mask token   {mask} ({why})")
        print(
            f"data         {train.counts['documents']:,} documents in {len(train):,} rows, "
            f"{train.counts['answer_tokens']:,} tokens under the loss  sha256 {train.sha256[:16]}…"
        )
        print(f"held out     {self.corpus.validation.counts['documents']:,} documents")
        print(
            f"steps        {self.config.trainer.steps:,} of {self.config.trainer.rows_per_step} rows, "
            f"{self.epochs():.2g} epochs  config {configuration.digest(self.config)[:16]}…"
        )
        if self.job.size > 1:
            print(f"ranks        {self.job.size}, each with its part of a step's rows")
        print(f"run          {self.run}", flush=True)

    def epochs(self):
        """How often the run sees the whole corpus."""
        from drafter import corpus

        return self.config.trainer.steps / corpus.batch_count(self.corpus.train, self.config.trainer.rows_per_step)

    def dry_run(self):
        """Print the card, the memory estimate and the resolved configuration; write nothing."""
        import yaml

        from drafter import config as configuration
        from drafter.features import sized

        self.card()
        memory = self.recipe.memory(self.drafter)
        parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in memory.items())
        print(f"memory       about {sum(memory.values()) / 2**30:.1f} GiB: {parts}")
        print("             less with smaller trainer.rows_per_step, trainer.anchors_per_row or data.row_tokens")
        if layout := self.recipe.layout(self.drafter, self.corpus.train):
            print(f"features     {self.config.features.mode}; a store of all rows takes {sized(layout.bytes)}")
        print(yaml.safe_dump(configuration.resolved(self.config), sort_keys=False), end="")
        return {
            "status": "done",
            "out": None,
            "parameters": self.recipe.size(self.drafter),
            "memory_bytes": sum(memory.values()),
            "config_digest": configuration.digest(self.config),
        }

    def train(self):
        """Run the steps that remain; returns the closing figures."""
        from drafter import trainer

        settings = self.config.trainer
        if self.job.writes:
            open_run(self.run, self.config)
        goal = self.recipe.objective()
        loop = trainer.Trainer(self.drafter, goal, self.config.optimizer, settings.steps, self.target.dtype, self.job)
        self.best = {}
        start = self.restore(loop)
        self.card()
        rows = self.corpus.train
        what = self.target, rows, self.recipe.layout(self.drafter, rows)
        store = open_features(self.config, self.run, self.job, what, self.argv)
        feed = self.recipe.feed(rows, store, self.job)
        if start < settings.steps:
            self.compile(loop, feed(start))
        before = self.target.live_digest()
        evaluators = [self.validation(goal), self.walk()] if self.job.writes else []
        with self.log(start) as log, interruptible(self, self.job):
            try:
                if self.warm_start and start == 0:  # where the curve of what adapting recovers begins
                    log({"step": 0, **trainer.evaluate(self.drafter, evaluators)})
                done = trainer.fit(
                    loop,
                    feed,
                    start=start,
                    options=settings,
                    evaluators=evaluators,
                    save=lambda step, figures: self.save(loop, step, figures, log),
                    log=log,
                    stopping=lambda: self.job.any(self.stop),
                )
            except trainer.Stopped as error:
                raise UserError(f"{error}; {last_good(self.run)}; {error.remedy}") from error
        self.job.wait()  # for rank 0 to have saved: a rank that leaves earlier looks like a lost one
        if self.target.live_digest() != before:
            raise UserError(f"target {self.target.source}: its parameters changed during training; this is a defect")
        return self.closing(done)

    def compile(self, loop, batch):
        """Compile the pieces of a step that are faster so for rank 0: all ranks alike, to hold the same weights."""
        found = self.recipe.pieces(loop, batch) if self.job.writes else ()
        loop.compile(self.job.told(" ".join(found)).split())

    def restore(self, loop):
        """Continue from the newest whole step when asked; returns the steps already done. All ranks hold rank 0's."""
        from drafter import checkpoint

        folder = checkpoint.newest_whole(self.run) if self.config.resume == "auto" and self.job.writes else None
        start = 0
        if folder:
            arrays, state = checkpoint.load_training(folder)
            loop.restore(arrays)
            self.best, start = state["best"], state["step"]
            print(f"continuing   {folder}")
        if self.job.size > 1:
            loop.restore(self.job.share(loop.state()))
        return int(self.job.told(str(start)))

    def log(self, start):
        """What records the metrics: nothing on a rank that does not write."""
        return Log(self.run, self.config, start) if self.job.writes else contextlib.nullcontext(lambda figures: None)

    def validation(self, goal):
        """An evaluator: loss and per-slot agreement on held-out rows, with anchors that never change."""
        import numpy as np

        from drafter import corpus

        rows = self.corpus.validation
        held = corpus.select(rows, np.arange(min(self.config.trainer.validation_rows, len(rows))))
        batch = self.recipe.held_out(held)
        return lambda drafter: goal.summary(goal.evaluate(drafter, batch))

    def walk(self):
        """An evaluator: walked tau over the target's own greedy answers to held-out prompts."""
        from decode.lab import walk

        settings, made = self.config.trainer, []

        def walked(drafter):
            if not made:  # once, and only when the first evaluation is due
                prompts = walk.held_out_prompts(self.corpus.validation, settings.walk_documents)
                made.append(walk.greedy_texts(self.target, prompts, settings.walk_tokens))
            tau = walk.walked_tau(self.target, drafter, made[0], self.config.drafter.block_size)
            return {
                "walked_tau": round(tau.pooled, 4),
                "walked_tau_per_prompt": round(tau.per_prompt, 4),
                "walked_tokens_per_forward": round(tau.pooled / walk.forwards(drafter), 4),
                "walk_texts": tau.texts,
                "walk_tokens": settings.walk_tokens,
            }

        return walked

    def save(self, loop, step, figures, log):
        """Save a step, point `best` at it if it walked further than any before, and drop old steps; rank 0 alone."""
        from drafter import checkpoint
        from drafter import config as configuration

        if not self.job.writes:
            return
        better = bool(figures) and figures["walked_tau"] >= self.best.get("walked_tau", 0)
        if better:
            self.best = {"step": step, **figures}
        record = {
            "target": self.target.identity(),
            "config_digest": configuration.digest(self.config),
            "data": [*self.corpus.train.sources, {"name": "packed rows", "sha256": self.corpus.train.sha256}],
            "argv": self.argv,
            "extra": {
                "step": step,
                "ranks": self.job.size,
                "row_tokens": self.config.data.row_tokens,
                "answer_tokens": self.corpus.train.counts["answer_tokens"],
            }
            | {**self.warm_start, **(figures or {})},
        }
        checkpoint.save_step(self.run, step, self.drafter, loop.state(), {"best": self.best}, **record)
        if better:
            checkpoint.point(self.run, "best", step)
        checkpoint.prune(self.run, self.config.trainer.keep)
        log.flush()
        self.write_manifest(record)

    def write_manifest(self, record):
        """Renew the run's own manifest; its steps answer for themselves."""
        from drafter import manifest

        manifest.write(self.run, kind="run", **record)

    def closing(self, done):
        """The closing figures: interrupted when steps remain."""
        finished = done == self.config.trainer.steps
        if not finished:
            print(f"stopped at step {done}; continue with the same command, run={self.run.name} and resume=auto")
        return {"status": "done" if finished else "interrupted", "out": str(self.run), "steps": done, "best": self.best}


if __name__ == "__main__":
    edge.run(main)
