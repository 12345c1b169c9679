"""What a target's forwards cost: plain steps, verifies, prefill, rollback and memory, beside mlx-lm's own on one model.

W rows of a forward. Arms are interleaved within one process, every timed unit ends in one wait for the argmax of all
its rows and for what it wrote to the caches, and medians are over units. A verify records what its rollback needs and
scores every row; the commit is apart. The stock arm is mlx-lm's model with its own caches, put back between units,
outside the clock.
"""

import functools
import statistics
import time

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from decode.transaction import Transaction
from drafter import hybrid, recurrent_cache, shapes, trial
from kernels import selfcheck

PIECE = 2048  # prompt rows of one forward, as mlx-lm feeds them
CHAIN = 10  # units of a pipelined measurement
PROMPTS = 7  # prompts of each arm whose prefill is timed
KEPT = 3  # rows kept of a verify where a rollback or memory is measured, of a narrower one all but one


class Ours:
    """Forwards through the project's own routes: compiled steps, tapes, kernels, wherever this machine may use them."""

    name = "foredraft"

    def __init__(self, target):
        self.target, self.caches = target, target.make_cache()
        self.transaction = Transaction(self.caches, None)

    def feed(self, tokens):
        """Feed tokens [1,T]; returns the argmax of every row, not waited for."""
        return mx.argmax(mx.squeeze(self.target.score(self.target.forward(tokens, self.caches).hidden), 0), -1)

    def prompt(self, tokens):
        """Feed a prompt [1,T] in pieces and wait; only its last row is scored."""
        for start in range(0, tokens.shape[1], PIECE):
            hidden = self.target.forward(tokens[:, start : start + PIECE], self.caches).hidden
            mx.eval(hidden, self.states())
        mx.eval(mx.argmax(self.target.score(hidden[:, -1:]), -1))

    def verify(self, tokens):
        """Feed rows that can be taken back."""
        self.transaction.begin(tokens.shape[1], tokens[0])
        return self.feed(tokens)

    def mark(self):
        """Nothing: a verify's transaction notes what it needs, inside the clock."""

    def undo(self):
        """Take back the rows of a verify."""
        self.transaction.abort()
        mx.eval(self.states())

    def keep(self):
        """Where the caches stand, for `put_back`: offsets of keys and values, which are not copied, and states."""
        return [entry.offset if hasattr(entry, "offset") else [*entry.cache] for entry in self.caches]

    def put_back(self, marks):
        """Put the caches back to where `keep` found them."""
        for entry, mark in zip(self.caches, marks, strict=True):
            if hasattr(entry, "offset"):
                entry.offset = mark
            else:
                entry.cache = [*mark]

    def states(self):
        """Every array of the caches."""
        return [recurrent_cache.arrays(entry) for entry in self.caches]


class Stock:
    """mlx-lm's own model and caches."""

    name = "mlx_lm"

    def __init__(self, target):
        self.target, self.caches = target, make_prompt_cache(target.model)

    def feed(self, tokens):
        """Feed tokens [1,T]; returns the argmax of every row, not waited for."""
        with hybrid.detached(self.target.model):
            return mx.argmax(mx.squeeze(self.target.model(tokens, cache=self.caches), 0), -1)

    def prompt(self, tokens):
        """Feed a prompt [1,T] in pieces and wait; only its last row is scored."""
        with hybrid.detached(self.target.model):
            for start in range(0, tokens.shape[1], PIECE):
                hidden = self.target.backbone(tokens[:, start : start + PIECE], cache=self.caches)
                mx.eval(hidden, self.states())
        mx.eval(mx.argmax(self.target.score(hidden[:, -1:]), -1))

    def verify(self, tokens):
        """Feed rows that `undo` takes back."""
        return self.feed(tokens)

    def mark(self):
        """Note where the caches stand."""
        self.marks = self.keep()

    def undo(self):
        """Put the caches back to the mark."""
        self.put_back(self.marks)

    keep, put_back, states = Ours.keep, Ours.put_back, Ours.states


def tokens(target, T, seed=0):
    """T random ids [1,T], in memory; uint32 as an argmax is, or a chain's first step would be traced apart."""
    drawn = mx.random.randint(0, target.vocab_size, (1, T), dtype=mx.uint32, key=mx.random.key(seed))
    mx.eval(drawn)
    return drawn


def timed(call):
    """(milliseconds until the result is there, milliseconds until MLX had handed all work to the device).

    MLX holds the host back while many graphs are in flight, so the second is an upper bound of the host's own time.
    """
    mx.synchronize()
    start = time.perf_counter()
    result = call()
    mx.async_eval(result)
    issued = time.perf_counter()
    mx.eval(result)
    return (time.perf_counter() - start) * 1e3, (issued - start) * 1e3


def widths(arms, context, sizes, rounds):
    """Milliseconds of a plain step (W = 1) and of verifies of W rows after `context` rows, arms interleaved.

    Returns {arm: {W: {"ms", "host_ms", "pipelined_ms", "spread_ms": [5 %, 95 %]}}}.
    """
    rows = {W: tokens(arms[0].target, W, seed=W) for W in (1, *sizes)}
    for arm in arms:
        arm.prompt(tokens(arm.target, context))
    found = {(arm.name, W): [] for arm in arms for W in rows}
    for turn in range(rounds + 2):  # the first two compile and fill caches
        for W, fed in rows.items():
            for arm in arms:
                arm.mark()
                sample = timed(functools.partial(unit, arm, fed))
                settle(arm, W)
                if turn > 1:
                    found[arm.name, W].append(sample)
    chained = {(arm.name, W): pipelined(arm, rows[W]) for arm in arms for W in rows}
    return {
        arm.name: {W: summary(found[arm.name, W]) | {"pipelined_ms": chained[arm.name, W]} for W in rows}
        for arm in arms
    }


def unit(arm, fed):
    """One timed unit: a plain step of one row, or a verify of more; what must be there when it ends."""
    return (arm.verify if fed.shape[1] > 1 else arm.feed)(fed), arm.states()


def settle(arm, W):
    """Outside the clock: take a verify back, or let a step's caches come to rest."""
    if W > 1:
        arm.undo()
    mx.eval(arm.states())


def pipelined(arm, rows):
    """Milliseconds of a unit in a chain that nothing waits for: each plain step is fed the one before it."""
    W, out = rows.shape[1], rows
    arm.mark()
    mx.synchronize()
    start = time.perf_counter()
    for _ in range(CHAIN):
        if W == 1:
            out = arm.feed(out)[None]
        else:
            out = arm.verify(rows)
            mx.async_eval(out)
            arm.transaction.abort() if isinstance(arm, Ours) else arm.undo()
        mx.async_eval(out)
    mx.eval(out)
    return (time.perf_counter() - start) * 1e3 / CHAIN


def summary(samples):
    """Median, host share and spread of (milliseconds, milliseconds on the host) samples."""
    whole, host = zip(*samples)
    cuts = statistics.quantiles(whole, n=20) if len(whole) > 1 else [whole[0]] * 19
    return {"ms": statistics.median(whole), "host_ms": statistics.median(host), "spread_ms": [cuts[0], cuts[-1]]}


def prefill(arms, T):
    """{arm: {"tok_s": the median, "runs": each}} of prompts of T rows, tokens a second from empty caches, in turns.

    mlx-lm's long prompts, which may take minutes, are fed once.
    """
    rates = {arm.name: [] for arm in arms}
    for turn in range(PROMPTS + 1):  # the first one compiles
        for arm in arms:
            if T > 2 * PIECE and isinstance(arm, Stock) and turn < PROMPTS:
                continue
            fresh, prompt = type(arm)(arm.target), tokens(arm.target, T, turn)
            mx.synchronize()
            start = time.perf_counter()
            fresh.prompt(prompt)
            if turn:
                rates[arm.name].append(T / (time.perf_counter() - start))
    return {name: {"tok_s": statistics.median(found), "runs": found} for name, found in rates.items()}


def rollback(target, context, W, rounds):
    """Milliseconds of cycles of W rows that keep KEPT of them, that keep all, and that cannot take any back; medians.

    A cycle is a verify, its wait, and the commit; what a commit leaves to later rows falls on the next cycle. The last
    kind, `free`, feeds its rows outside any transaction: nothing is recorded and nothing owed. The kinds alternate in
    runs of CHAIN cycles, all from the same context. `share` is what keeping KEPT costs over keeping all, `recorded`
    what it costs over `free`: medians over neighbouring runs of their difference ÷ the other's, with quartiles.
    """
    kept = min(KEPT, W - 1)
    arm, rows, found = Ours(target), tokens(target, W), {kept: [], W: [], None: []}
    arm.prompt(tokens(target, context))
    settle(arm, 1)
    start = arm.keep()
    for turn in range(rounds + 1):
        for n in found if turn % 2 else reversed(found):
            arm.put_back(start)
            found[n].append(chain(arm, rows, n))
    part, whole, free = (samples[1:] for samples in found.values())
    cycles = {"cycle_ms": part, "cycle_keeping_all_ms": whole, "cycle_free_ms": free}
    return (
        {"kept": kept, "of": W, "context": context}
        | {name: statistics.median(samples) for name, samples in cycles.items()}
        | over("share", part, whole)
        | over("recorded", part, free)
    )


def over(name, samples, others):
    """{name: the median of sample ÷ its neighbour − 1, name_spread: the quartiles}."""
    shares = [one / other - 1 for one, other in zip(samples, others, strict=True)]
    spread = statistics.quantiles(shares, n=4)[::2] if len(shares) > 1 else shares * 2
    return {name: statistics.median(shares), f"{name}_spread": spread}


def chain(arm, rows, n):
    """Milliseconds of a cycle that verifies `rows` and keeps n, or feeds them for good where n is None; of CHAIN."""
    mx.synchronize()
    start = time.perf_counter()
    for _ in range(CHAIN):
        mx.eval((arm.feed if n is None else arm.verify)(rows))
        if n is not None:
            arm.transaction.commit(n)
    return (time.perf_counter() - start) * 1e3 / CHAIN


def memory(target, T, W, cycles):
    """Peak bytes of a prompt of T rows, and of the last quarter of many cycles beside the second, growth taken off.

    A cycle verifies W rows and keeps KEPT; its peak is above what was held when it began.
    """
    arm = Ours(target)
    mx.clear_cache()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    arm.prompt(tokens(target, T))
    prompt = mx.get_peak_memory() - held
    del arm
    arm, rows, peaks = Ours(target), tokens(target, W), []
    arm.prompt(tokens(target, min(T, PIECE)))
    for _ in range(cycles):
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        mx.eval(arm.verify(rows))
        arm.transaction.commit(min(KEPT, W - 1))
        mx.eval(arm.states())
        mx.synchronize()
        peaks.append((mx.get_peak_memory() - held, held))
    quarter = cycles // 4
    second, last = (max(peak for peak, _ in part) for part in (peaks[quarter : 2 * quarter], peaks[-quarter:]))
    return {"prompt_rows": T, "prompt_bytes": prompt, "cycles": cycles, "second_quarter_bytes": second,
            "last_quarter_bytes": last, "held_bytes": [peaks[quarter][1], peaks[-1][1]]}  # fmt: skip


def bandwidth():
    """Bytes a second that this device reads and writes in one large addition: the median of five."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    values = mx.zeros((1 << (29 if on_gpu else 26),), mx.bfloat16)  # a gigabyte; far beyond a CPU's cache
    mx.eval(values)
    seconds = [timed(lambda: values + 1)[0] / 1e3 for _ in range(7)][2:]
    return 2 * values.nbytes / statistics.median(seconds)


def measure(target, sizes, contexts, prompts, rounds, cycles, save):
    """All of the above as one result; `save(result)` is called after every part, so that a cut run loses one part.

    sizes     widths W of verifies       contexts  rows before them: the first is the table's, at the others the widest
    prompts   lengths of prefills        rounds    timed units of each        cycles  of the memory run
    The kernels of a shape, which was never loaded, are chosen here as loading chooses those of a target.
    """
    selfcheck.ensure(selfcheck.dims_of(target.model))
    trial.ensure(target)
    context, result = contexts[0], {"weights_bytes": shapes.weight_bytes(target), "bandwidth": bandwidth()}
    result["floor_ms"] = result["weights_bytes"] / result["bandwidth"] * 1e3
    arms = Ours(target), Stock(target)
    result |= {"context": context, "widths": widths(arms, context, sizes, rounds)}
    result["headline"] = ratios(result["widths"])
    save(result)
    result["rollback"] = rollback(target, context, sizes[-1], 3 * rounds)
    save(result)
    result["contexts"] = {
        length: widths((Ours(target),), length, sizes[-1:], max(rounds // 2, 3))["foredraft"] for length in contexts
    }
    save(result)
    result["memory"] = memory(target, max((*contexts, *prompts)), sizes[-1], cycles)
    save(result)
    result["prefill"] = {}
    for T in sorted(prompts):
        found = result["prefill"][T] = prefill(arms, T)
        result["headline"][f"prefill_{T}_over_stock"] = found["foredraft"]["tok_s"] / found["mlx_lm"]["tok_s"]
        save(result)
    return result


def ratios(found):
    """The headline ratios of a table of widths: each arm's verifies over its own plain step, and plain over stock's."""
    ours, stock = found["foredraft"], found["mlx_lm"]
    over = {f"verify_{W}_over_plain": ours[W]["ms"] / ours[1]["ms"] for W in ours if W > 1}
    over |= {f"stock_verify_{W}_over_plain": stock[W]["ms"] / stock[1]["ms"] for W in stock if W > 1}
    return over | {"plain_over_stock": ours[1]["ms"] / stock[1]["ms"]}
