"""What a module's instance is given or produces during one call: taps, embeddings, a head fed by hand.

Instances get a subclass of their own class for the length of the call: no class or module global changes, parameter
names stay, and a second model in the process is never touched.
"""

import contextlib
import contextvars
import functools

HELD = contextvars.ContextVar("what the watched modules of the running call produced or are to return")


class Reached(Exception):
    """Carries a watched module's input out of the forward that reached it."""

    def __init__(self, value):
        self.value = value


@contextlib.contextmanager
def watched(modules, variant):
    """Give each module a subclass of its own class while the block runs; yields what they hold, by id(module)."""
    bases = [(module, type(module)) for module in modules]
    held = {}
    token = HELD.set(held)
    try:
        for module, base in bases:
            module.__class__ = variant(base)
        yield held
    finally:
        for module, base in bases:
            module.__class__ = base
        HELD.reset(token)


@functools.cache
def recording(base):
    """A subclass of a layer's class that keeps the layer's output."""

    def call(self, *args, **kwargs):
        output = base.__call__(self, *args, **kwargs)
        HELD.get()[id(self)] = output[0] if isinstance(output, tuple) else output
        return output

    return type(base.__name__, (base,), {"__call__": call})


@functools.cache
def stopping(base):
    """A subclass of a layer's class that ends the forward with the layer's input."""

    def call(self, value, *args, **kwargs):
        raise Reached(value)

    return type(base.__name__, (base,), {"__call__": call})


@functools.cache
def returning(base):
    """A subclass of a backbone's class that returns the hidden state it was given to hold."""

    def call(self, *args, **kwargs):
        return HELD.get()[id(self)]

    return type(base.__name__, (base,), {"__call__": call})
