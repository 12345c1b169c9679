"""The exponential on a CPU, and what is made of it: SiLU and gates, in passes that the compiler makes vectors of.

MLX's own exp takes one number at a time on x86: 25 ns each, the larger part of a prompt's attention and MLPs. Here
exp(x) = 2^n e^r with n = round(x / ln 2): r by two subtractions (Cody and Waite), e^r by the polynomial of Cephes'
`expf` (Moshier), and 2^n by writing n where a float32 keeps its exponent. Reading bits is no elementwise operation to
`mx.compile`, so there are three passes: n and r, the shift, and the rest with whatever is made of the exponential.

For inference only: the shift has no gradient. Relative error below 2 ulp (2.4e-7) of float32, MLX's own 8.
"""

import functools
import shutil

import mlx.core as mx

shapeless = functools.partial(mx.compile, shapeless=True)  # one trace for all shapes: nothing in it may ask for one

LOW, HIGH = -88.0, 88.0  # arguments are cut to these: e^LOW comes out as 0, and so does all below -87.7
SHIFT = 1.5 * 2**23 + 127  # added to n, it leaves n + 127, the exponent field of 2^n, in the sum's lowest bits
LN2 = 0.693359375, -2.12194440e-4  # in two parts: the first times any n is exact
E_R = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
LEAST_ROWS = 64  # more than a verify has (assumed): steps and verifies keep MLX's own, and so round alike


def serves(x):
    """Whether x [R,T,...] is a prompt's: float32, of many rows, on a CPU that passes are compiled for."""
    return x.dtype == mx.float32 and x.ndim > 2 and x.shape[1] >= LEAST_ROWS and compiles()


def compiles():
    """Whether the default device is a CPU, and there is the compiler that MLX calls for its passes."""
    return mx.default_device() == mx.cpu and compiler() is not None


@functools.cache
def compiler():
    """Where g++ is, or None."""
    return shutil.which("g++")


def made_of(sign, answer):
    """The function answer(e^(sign · x), x, *others) of float32 arrays, `answer` of elementwise operations."""

    def run(x, *others):
        place, r = reduced(sign)(x)
        return finished(r, upwards(place.view(mx.int32)).view(mx.float32), x, *others)

    @shapeless
    def finished(r, power, x, *others):
        series = E_R[0]
        for coefficient in E_R[1:]:
            series = series * r + coefficient
        return answer((series * (r * r) + r + 1) * power, x, *others)

    return run


@functools.cache
def reduced(sign):
    """The pass that gives n + SHIFT and r of sign · x."""

    def both(x):
        y = mx.minimum(mx.maximum(x if sign > 0 else -x, LOW), HIGH)
        place = y * 1.4426950408889634 + SHIFT
        n = place - SHIFT
        return place, y - n * LN2[0] - n * LN2[1]

    return shapeless(both)


@shapeless
def upwards(bits):
    """The lowest nine bits as the highest: n + 127 as the float32 2^n."""
    return bits << 23


exp = made_of(1, lambda e, x: e)
silu = made_of(-1, lambda e, x: x / (1 + e))  # x σ(x)
swiglu = made_of(-1, lambda e, gate, x: gate / (1 + e) * x)  # silu(gate) x
gated = made_of(-1, lambda e, gate, x: x / (1 + e))  # σ(gate) x
