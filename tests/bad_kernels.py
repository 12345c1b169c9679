"""Kernels that selfcheck must refuse, and two that it must not: bodies for the host build, checks that measure them.

Every kernel is to compute x + 1 on 32 elements. A verdict on them needs a child process that finds this module.
"""

import time

import mlx.core as mx

from kernels.portable import Kernel
from kernels.verdicts import Check

BODIES = {
    "right": "y[LANE] = x[LANE] + 1.0f;",
    "close": "y[LANE] = x[LANE] + 1.00001f;",
    "wrong": "y[LANE] = x[LANE] + 1.001f;",
    "incomplete": "if (LANE < 31) y[LANE] = x[LANE] + 1.0f;",
    "slow": "volatile int n = 0; while (n < 20000) n = n + 1; y[LANE] = x[LANE] + 1.0f;",
    "hanging": "volatile int n = 0; while (n == 0) {} y[LANE] = x[LANE] + 1.0f;",
    "crashing": "volatile float* nowhere = y; nowhere[1L << 44] = 1.0f;",
    "broken": "y[LANE] = x[LANE] + nonsense;",
}


def checks(dims):
    """One check for each body that `dims` names."""
    return [check(name) for name in dims["bodies"]]


def check(name):
    kernel = Kernel(name, inputs=("x",), outputs=("y",), body=BODIES[name])

    def run(x):
        call = {"groups": (1, 1, 1), "threads": (32, 1, 1), "shapes": [(32,)], "dtypes": [mx.float32]}
        return kernel([x], **call, build="host")

    def slowly(x):
        time.sleep(0.005)  # so that any kernel that is not slow itself is the faster one
        return [x + 1]

    return Check(
        kernel=f"bad_kernels.{name}",
        case="float32",
        kernel_fn=run,
        stock_fn=(lambda x: [x + 1]) if name == "slow" else slowly,
        inputs_fn=lambda: (mx.random.normal((32,)),),
        tolerance=1e-5,
    )
