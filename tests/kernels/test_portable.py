"""Every word of the bodies' language against NumPy in the host build, its mistakes caught, the device builds' texts.

R groups, L = 32 lanes. Tolerances: what rounds once is compared exactly; library functions within two units in the last
place of float32; sums of products in float32 within 2e-6 of the sum of their magnitudes.
"""

import pathlib
import subprocess
import sys
import tomllib

import mlx.core as mx
import numpy as np
import pytest

from kernels import host, nvrtc, portable
from kernels.errors import UserError
from kernels.portable import Kernel

LANES = 32
ULPS = 2  # float32 library functions against float64
SUMS = 2e-6


def run(body, arrays=(), shape=(LANES,), dtype=mx.float32, groups=(1, 1, 1), threads=(LANES, 1, 1), **options):
    """The one output `y` of a body with inputs a, b, c and scalars N, M, in the host build."""
    scalars = options.pop("scalars", ())
    kernel = Kernel(
        "trial",
        inputs="abc"[: len(arrays)],
        scalars=("N", "M")[: len(scalars)],
        outputs=("y",),
        body=body,
        header=options.pop("header", ""),
    )
    call = {"groups": groups, "threads": threads, "shapes": [shape], "dtypes": [dtype], "build": "host"}
    return kernel([mx.array(a) for a in arrays], scalars=scalars, **call, **options)[0]


def floats(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def same_bits(found, expected):
    return np.array_equal(np.asarray(found).view(np.uint32), np.asarray(expected, np.float32).view(np.uint32))


# --- places


def test_every_thread_of_every_group_has_its_own_place():
    body = """
    int at = ((GROUP_Z * 3 + GROUP_Y) * 2 + GROUP_X) * 96 + THREAD;
    y[at] = at * 100 + SIMDGROUP * 32 + LANE;
    """
    found = run(body, shape=(5, 3, 2, 96), dtype=mx.int32, groups=(2, 3, 5), threads=(96, 1, 1))
    at = np.arange(5 * 3 * 2 * 96)
    assert np.array_equal(np.asarray(found).ravel(), at * 100 + at % 96)


def test_threads_of_several_dimensions_are_counted_in_one():
    found = run("y[THREAD] = THREAD;", shape=(96,), dtype=mx.int32, threads=(3, 16, 2))
    assert found.tolist() == list(range(96))


# --- the threadgroup


def test_shared_memory_is_seen_by_all_after_a_barrier():
    body = """
    SHARED(float, tile, 96);
    for (int turn = 0; turn < 3; ++turn) {
      tile[THREAD] = a[GROUP_X * 96 + THREAD] + turn;
      BARRIER();
      y[(turn * 2 + GROUP_X) * 96 + THREAD] = tile[95 - THREAD];
      BARRIER();
    }
    """
    a = floats(2, 96)
    found = run(body, [a], shape=(3, 2, 96), groups=(2, 1, 1), threads=(96, 1, 1))
    assert same_bits(found, [a[:, ::-1] + np.float32(turn) for turn in range(3)])


def test_shared_memory_is_not_a_number_until_written_in_every_group():
    body = "SHARED(float, tile, 32); y[GROUP_X * 32 + THREAD] = tile[THREAD]; tile[THREAD] = 1.0f;"
    assert np.isnan(np.asarray(run(body, shape=(3, LANES), groups=(3, 1, 1)))).all()


def butterfly(x, combine):
    """[..., 32] folded with itself at distances 16, 8, 4, 2, 1."""
    for mask in (16, 8, 4, 2, 1):
        x = combine(x, x[..., np.arange(LANES) ^ mask])
    return x


@pytest.mark.parametrize(("word", "combine"), [("SIMD_SUM", np.add), ("SIMD_MAX", np.maximum)])
def test_reductions_follow_the_butterfly_bit_for_bit(word, combine):
    a = floats(2, 3, LANES)
    at = "(GROUP_X * 3 + SIMDGROUP) * 32 + LANE"
    found = run(f"y[{at}] = {word}(a[{at}]);", [a], shape=a.shape, groups=(2, 1, 1), threads=(96, 1, 1))
    assert same_bits(found, butterfly(a, combine))


def test_shuffles_read_any_lane_of_the_own_simdgroup():
    body = """
    int from = (LANE * 7 + 3) % 32;
    float one = SIMD_SHUFFLE(a[THREAD], from), other = SIMD_SHUFFLE_XOR(a[THREAD], 5);
    y[2 * THREAD] = one;
    y[2 * THREAD + 1] = other;
    """
    a = floats(2, LANES)
    lanes = np.arange(LANES)
    expected = np.stack([a[:, (lanes * 7 + 3) % 32], a[:, lanes ^ 5]], axis=-1)
    assert same_bits(run(body, [a], shape=expected.shape, threads=(64, 1, 1)), expected)


def test_one_simdgroup_may_shuffle_while_another_waits_at_the_barrier():
    body = """
    SHARED(float, sum, 1);
    if (SIMDGROUP == 1) {
      float total = SIMD_SUM(a[LANE]);
      if (LANE == 0) sum[0] = total;
    }
    BARRIER();
    y[THREAD] = sum[0];
    """
    a = floats(LANES)
    assert same_bits(run(body, [a], shape=(96,), threads=(96, 1, 1)), np.full(96, butterfly(a, np.add)[0]))


# --- elements and arithmetic


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_every_16_bit_pattern_widens_as_mlx_widens_it(dtype):
    bits = mx.arange(1 << 16).astype(mx.uint16)
    place = "GROUP_X * 32 + LANE"
    found = run(f"y[{place}] = F32(a[{place}]);", [bits.view(dtype)], shape=bits.shape, groups=(2048, 1, 1))
    expected = np.asarray(bits.view(dtype).astype(mx.float32))
    assert np.array_equal(np.asarray(found), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_narrowing_rounds_to_the_nearest_even_as_mlx_does(dtype):
    ties = np.asarray([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 3 * 2**-25, 65519.9, 65520, 1e-40])
    wide = floats(6, LANES) * np.float32(10) ** np.arange(-9, 9, 3).reshape(6, 1)
    a = np.concatenate([ties, -ties, [np.inf, -np.inf, 0, -0.0], wide.ravel()])[: 6 * LANES].astype(np.float32)
    place = "GROUP_X * 32 + LANE"
    found = run(f"y[{place}] = CAST(T, a[{place}]);", [a], a.shape, dtype, groups=(6, 1, 1), template={"T": dtype})
    assert same_bits(found.astype(mx.float32), mx.array(a).astype(dtype).astype(mx.float32))
    assert np.isnan(run("y[LANE] = CAST(T, INF - INF);", dtype=dtype, template={"T": dtype}).astype(mx.float32)).all()


@pytest.mark.parametrize(
    ("word", "function"),
    [
        ("EXP", np.exp),
        ("LOG", np.log),
        ("LOG1P", np.log1p),
        ("SQRT", np.sqrt),
        ("RSQRT", lambda x: 1 / np.sqrt(x)),
        ("SIN", np.sin),
        ("COS", np.cos),
    ],
)
def test_functions_are_precise(word, function):
    a = np.abs(floats(LANES)) * np.float32(10) ** np.linspace(-6, 1.5, LANES, dtype=np.float32)
    expected = function(a.astype(np.float64)).astype(np.float32)
    found = np.asarray(run(f"y[LANE] = {word}(a[LANE]);", [a]))
    assert np.abs(found.view(np.int32) - expected.view(np.int32)).max() <= ULPS


def test_infinity_behaves():
    assert run("y[LANE] = LANE ? EXP(-INF) : INF;").tolist() == [float("inf")] + [0.0] * 31


def test_products_and_sums_round_as_written():
    a, b, c = floats(LANES), floats(LANES, seed=1), floats(LANES, seed=2)
    fused = run("y[LANE] = FMA(a[LANE], b[LANE], c[LANE]);", [a, b, c])
    apart = run("y[LANE] = MUL(a[LANE], b[LANE]) + c[LANE];", [a, b, c])
    exact = a.astype(np.float64) * b + c  # 48 bits of product, and a sum that fits into float64's 53 for such sizes
    assert same_bits(fused, exact.astype(np.float32))
    assert same_bits(apart, a * b + c)
    assert not same_bits(fused, apart)


@pytest.mark.parametrize("word", ["LOAD16", "LOAD16_ONCE"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_a_16_byte_load_holds_eight_elements_in_order(dtype, word):
    body = """
    Words words = LOAD(a + 8 * LANE);
    for (int i = 0; i < 4; ++i) {
      y[8 * LANE + 2 * i] = PAIR_LO(T, words.w[i]);
      y[8 * LANE + 2 * i + 1] = PAIR_HI(T, words.w[i]);
    }
    """
    a = mx.array(floats(LANES, 8)).astype(dtype)
    found = run(body.replace("LOAD(", f"{word}("), [a], a.shape, template={"T": dtype})
    assert same_bits(found, a.astype(mx.float32))


def test_an_8_byte_load_holds_two_words_and_no_more():
    body = "Words words = LOAD8_ONCE(a + 2 * LANE); for (int i = 0; i < 4; ++i) y[4 * LANE + i] = words.w[i];"
    a = mx.arange(2 * LANES).astype(mx.uint32).reshape(LANES, 2) + 1
    found = run(body, [a], (LANES, 4), mx.uint32)
    assert mx.array_equal(found, mx.pad(a, ((0, 0), (0, 2))))


def test_a_word_is_read_as_the_float_with_its_bits():
    a = floats(LANES)
    assert same_bits(run("y[LANE] = FLOAT_OF_BITS(a[LANE]);", [mx.array(a).view(mx.uint32)]), a)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_packing_rounds_two_floats_into_a_word(dtype):
    body = "y[LANE] = PACK(T, a[2 * LANE], a[2 * LANE + 1]);"
    a = mx.array(floats(LANES, 2))
    found = run(body, [a], dtype=mx.uint32, template={"T": dtype})
    assert mx.array_equal(found, a.astype(dtype).view(mx.uint32).reshape(-1))


def words(tile, places):
    """[lanes, words] of unsigned; `places(lane)` gives the (row, column) of the low and high half of each word."""
    bits = np.asarray(tile.view(mx.uint16)).astype(np.uint32)
    pairs = [[(bits[lo], bits[hi]) for lo, hi in places(lane)] for lane in range(LANES)]
    return np.asarray([[lo | hi << 16 for lo, hi in row] for row in pairs], np.uint32)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_the_matrix_product_has_the_layout_of_ptx(dtype):
    """Fragments as the PTX manual lays them out for mma.m16n8k16: groupID = lane >> 2, threadID_in_group = lane % 4."""

    def a_places(lane):
        group, thread = lane >> 2, lane % 4
        rows = [group if i < 2 or 4 <= i < 6 else group + 8 for i in range(8)]
        columns = [thread * 2 + (i & 1) + (8 if i >= 4 else 0) for i in range(8)]
        return [((rows[i], columns[i]), (rows[i + 1], columns[i + 1])) for i in (0, 2, 4, 6)]

    def b_places(lane):
        group, thread = lane >> 2, lane % 4
        rows = [thread * 2 + (i & 1) + (8 if i >= 2 else 0) for i in range(4)]
        return [((rows[i], group), (rows[i + 1], group)) for i in (0, 2)]

    left, right, start = floats(16, 16), floats(16, 8, seed=1), floats(LANES, 4, seed=2)
    left, right = mx.array(left).astype(dtype), mx.array(right).astype(dtype)
    body = """
    float acc[4];
    unsigned left[4], right[2];
    for (int i = 0; i < 4; ++i) acc[i] = c[4 * LANE + i], left[i] = a[4 * LANE + i];
    for (int i = 0; i < 2; ++i) right[i] = b[2 * LANE + i];
    MMA_16x8x16(T, acc, left, right);
    for (int i = 0; i < 4; ++i) y[4 * LANE + i] = acc[i];
    """
    arrays = [words(left, a_places), words(right, b_places), start]
    found = np.asarray(run(body, arrays, (LANES, 4), template={"T": dtype}))
    one, other = (np.asarray(each.astype(mx.float32), np.float64) for each in (left, right))
    for lane in range(LANES):
        for i in range(4):
            row, column = (lane >> 2) + (8 if i >= 2 else 0), (lane % 4) * 2 + (i & 1)
            expected = start[lane, i] + one[row] @ other[:, column]
            bound = SUMS * (abs(start[lane, i]) + np.abs(one[row]) @ np.abs(other[:, column]))
            assert abs(found[lane, i] - expected) <= bound, (lane, i)


# --- arguments


def test_scalars_are_ints_or_arrays_of_one():
    scalars = [5, mx.array([7], mx.int32)]
    assert run("y[LANE] = SCALAR(N) * 10 + SCALAR(M);", dtype=mx.int32, scalars=scalars).tolist() == [57] * LANES


def test_template_values_are_constants_and_types():
    body = (
        "y[LANE] = CAST(T, FLAG ? float(COUNT) : 0.0f); int sized[COUNT]; if (sizeof(sized) != COUNT * 4) y[0] = y[1];"
    )
    for flag in (True, False):
        found = run(body, dtype=mx.bfloat16, template={"T": mx.bfloat16, "COUNT": 3, "FLAG": flag})
        assert found.tolist() == [3.0 * flag] * LANES


def test_inputs_that_do_not_lie_in_rows_are_brought_into_rows():
    a = mx.array(floats(LANES, 3))
    found = run("y[LANE] = a[LANE] - b[LANE];", [a.T, a[::2, ::-1].T])
    assert same_bits(found, (a.T.reshape(-1)[:LANES] - a[::2, ::-1].T.reshape(-1)[:LANES]))


def test_helper_functions_take_pointers_of_every_kind():
    header = """
    HELPER float first(DEVICE_IN(float) p, LANE_ARRAY(float) q) { return p[0] + q[1]; }
    HELPER void put(DEVICE_OUT(float) p, float x) { p[0] = x; }
    """
    body = "float pair[2] = {0.0f, 2.0f}; put(y + LANE, first(a + LANE, pair));"
    a = floats(LANES)
    assert same_bits(run(body, [a], header=header), a + np.float32(2))


@pytest.mark.parametrize("dtype", portable.C_TYPES)
def test_every_dtype_passes_through(dtype):
    a = mx.array(np.arange(LANES) % 2).astype(dtype)
    assert mx.array_equal(run("y[LANE] = a[LANE];", [a], dtype=dtype), a)


def test_what_a_body_does_not_write_is_not_a_number():
    found = np.asarray(run("if (LANE < 3) y[LANE] = 1.0f;"))
    assert (np.isnan(found) == (np.arange(LANES) >= 3)).all()


def test_an_empty_grid_writes_nothing():
    assert np.isnan(np.asarray(run("y[LANE] = 1.0f;", groups=(0, 1, 1)))).all()


# --- mistakes


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "y[LANE] = 0;\nif (LANE < 9)\n  y[LANE] = SIMD_SHUFFLE(1.0f, 0);",
            r"lane 0 is at a shuffle \(line 3\), lane 9 at its",
        ),
        (
            "SHARED(float, s, 4);\nif (THREAD < 64)\n  BARRIER();",
            r"lane 0 is at a barrier \(line 3\), lane 64 at its end",
        ),
        ("if (THREAD < 32)\n  BARRIER();\nelse\n  BARRIER();", r"line 2\), lane 32 at a barrier \(line 4\)"),
        ("SHARED(float, a, 8000); SHARED(float, b, 5000);", "52000 bytes of shared memory; at most 49152"),
        ("y[THREAD + (THREAD == 95)] = 1.0f;", "wrote outside y"),
        ("if (THREAD == 0) y[-1] = 1.0f;", "wrote outside y"),
        ("Words words = LOAD16(y + 1); y[0] = words.w[0];", "LOAD16 of an address that is 4 past a multiple of 16"),
        ("Words words = LOAD8_ONCE(y + 3); y[0] = words.w[0];", "LOAD8 of an address that is 4 past a multiple of 8"),
    ],
    ids=["shuffle", "barrier", "two barriers", "shared", "past the end", "before", "unaligned", "unaligned 8"],
)
def test_a_mistake_of_the_body_is_found(body, words):
    with pytest.raises(RuntimeError, match=words):
        run(body, shape=(96,), threads=(96, 1, 1))


def test_a_body_runs_well_after_one_that_failed():
    for _ in range(2):
        with pytest.raises(RuntimeError, match="part ways"):
            run("if (LANE) BARRIER();")
        assert run("y[LANE] = SIMD_SUM(1.0f);").tolist() == [32.0] * LANES


def test_a_body_that_does_not_compile_names_its_line():
    with pytest.raises(RuntimeError, match=r"trial body:2:.*nonsense"):
        run("y[LANE] = 1.0f;\ny[LANE] = nonsense;")


def test_arithmetic_on_16_bit_elements_is_refused():
    with pytest.raises(RuntimeError, match="operator"):
        run("y[LANE] = a[LANE] * a[LANE];", [mx.zeros(LANES, mx.bfloat16)])


@pytest.mark.parametrize("threads", [(31, 1, 1), (0, 1, 1), (1056, 1, 1)])
def test_a_threadgroup_is_whole_simdgroups(threads):
    with pytest.raises(RuntimeError, match="a multiple of 32 up to 1024"):
        run("y[0] = 1.0f;", threads=threads)


def test_names_that_mlx_would_take_for_arguments_are_refused():
    with pytest.raises(ValueError, match="q_shape"):
        Kernel("trial", inputs=("q",), outputs=("y",), body="y[0] = q_shape[0];")


def test_without_a_compiler_the_host_build_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"no C\+\+ compiler .*set CXX"):
        run("y[LANE] = 123456.0f;")


def test_the_host_build_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    assert run("y[LANE] = 77.0f;").tolist() == [77.0] * LANES
    (built,) = tmp_path.iterdir()
    host.build.cache_clear()  # as a later process finds it
    monkeypatch.setattr(subprocess, "run", None)
    assert run("y[LANE] = 77.0f;").tolist() == [77.0] * LANES
    assert list(tmp_path.iterdir()) == [built]


# --- the device builds


ARCHITECTURE = "sm_31"  # of no machine


@pytest.fixture
def made(monkeypatch):
    """What is compiled, and what `mx.fast` is asked to run, on a machine that seems to have a GPU."""
    calls = []
    monkeypatch.setattr(TRIAL, "functions", {})

    def metal_kernel(name, inputs, outputs, body, header):
        text = {"name": name, "arguments": (inputs, outputs), "text": header + body, "body": body}
        return lambda **call: ran("metal", text, call)

    def machine_code(name, source, architecture):
        texts[name] = {"name": name, "text": source, "architecture": architecture}
        return f"code of {name}".encode()

    def ran(build, text, call):
        calls.append({"build": build, "call": call} | text)
        return [mx.zeros(shape, dtype) for shape, dtype in zip(call["output_shapes"], call["output_dtypes"])]

    def precompiled(**call):
        assert call["compiled_source"] == f"code of {call['name']}".encode()
        return ran("cuda", texts[call["name"]], call)

    texts = {}
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", precompiled)
    monkeypatch.setattr(nvrtc, "machine_code", machine_code)
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": ARCHITECTURE})
    return calls


TRIAL = Kernel(
    "trial",
    inputs=("a", "b"),
    scalars=("N",),
    outputs=("y",),
    header="HELPER float twice(float x) { return 2.0f * x; }",
    body="y[THREAD] = CAST(T, twice(F32(a[THREAD])) + F32(b[LANE % 3]) + float(SCALAR(N)));",
)


def call(build, dtype=mx.float32, scalars=(3,), kernel=None, Dk=5, threads=(64, 1, 1)):
    options = {"template": {"T": dtype, "Dk": Dk}, "groups": (2, 3, 1), "threads": threads}
    arrays = [mx.zeros((2, 64), dtype), mx.zeros(3, dtype)]
    return (kernel or TRIAL)(arrays, scalars=scalars, **options, shapes=[(64,)], dtypes=[dtype], build=build)


@pytest.mark.parametrize("build", ["cuda", "metal"])
def test_a_device_build_passes_grid_template_and_outputs_as_mlx_counts_them(made, build):
    (y,) = call(build)
    passed = made[0]["call"]
    assert (y.shape, y.dtype) == ((64,), mx.float32)
    assert (passed["grid"], passed["threadgroup"]) == ((128, 3, 1), (64, 1, 1))
    assert TRIAL.body in made[0]["text"] and TRIAL.header in made[0]["text"]


def test_metal_is_given_names_and_template_values(made):
    call("metal")
    assert made[0]["call"]["template"] == [("T", mx.float32), ("Dk", 5)]
    assert made[0]["arguments"] == (["a", "b", "N"], ["y"])


def test_cudas_text_is_whole_inputs_then_outputs_then_scalars_by_value(made):
    call("cuda", mx.bfloat16)
    text, name = made[0]["text"], made[0]["name"]
    arrays = "const bfloat16* __restrict__ a, const bfloat16* __restrict__ b, bfloat16* __restrict__ y"
    assert f'extern "C" __global__ void __launch_bounds__(64) {name}({arrays}, const int N) {{' in text
    assert "using T = bfloat16;" in text and "constexpr int Dk = 5;" in text and "#include" not in text
    assert made[0]["architecture"] == ARCHITECTURE
    assert made[0]["call"]["scalars"] == [3] and made[0]["call"]["ensure_row_contiguous"]
    assert [array.shape for array in made[0]["call"]["inputs"]] == [(2, 64), (3,)]


def test_cuda_reads_a_scalar_that_is_an_array_from_its_first_element(made):
    call("cuda", scalars=[mx.array([3, 9], mx.int32)])
    assert "const int* __restrict__ N_at, float* __restrict__ y)" in made[0]["text"]
    assert "const int N = N_at[0];" in made[0]["text"]
    assert made[0]["call"]["scalars"] == [] and made[0]["call"]["inputs"][2].tolist() == [3, 9]


@pytest.mark.parametrize("build", ["cuda", "metal"])
def test_dtypes_and_source_are_in_the_name_that_mlx_caches_by(made, build):
    other = Kernel("trial", inputs=("a", "b"), scalars=("N",), outputs=("y",), body="y[THREAD] = a[THREAD];")
    for dtype, kernel in ((mx.float32, TRIAL), (mx.bfloat16, TRIAL), (mx.float32, other), (mx.float32, TRIAL)):
        call(build, dtype, kernel=kernel)
    names = [each["name"] for each in made]
    assert len(set(names)) == 3 and names[0] == names[3]
    assert all(name.startswith("trial_") and name.isidentifier() for name in names)


def test_cudas_name_also_holds_template_threads_and_how_scalars_come(made):
    call("cuda")
    call("cuda", scalars=[mx.array([3], mx.int32)])
    call("cuda", Dk=6)
    call("cuda", threads=(32, 1, 1))
    call("cuda", scalars=(4,))
    names = [each["name"] for each in made]
    assert len(set(names)) == 4 and names[0] == names[4]


def test_metal_gets_scalars_without_dimension_and_no_array_in_constant_memory(made):
    call("metal", scalars=[mx.array([3], mx.int32)])
    a, b, n = made[0]["call"]["inputs"]
    assert (a.shape, b.shape, n.shape, n.item()) == ((2, 64), (8,), (), 3)


@pytest.mark.parametrize(
    ("build", "needed", "foreign"),
    [
        ("metal", ["thread_index_in_simdgroup", "threadgroup_position_in_grid", "metal::precise::exp"], "__shfl_sync"),
        ("cuda", ["threadIdx.x", "blockIdx.z", "mma.sync.aligned.m16n8k16", "cvt.rn.bf16.f32"], "simd_shuffle"),
    ],
)
def test_a_source_holds_its_own_builds_words_only(made, build, needed, foreign):
    call(build)
    text = made[0]["text"]
    assert all(word in text for word in needed)
    assert foreign not in text and "ucontext" not in text


def test_metal_attributes_are_in_the_body_where_mlx_looks_for_them(made):
    call("metal")
    assert "thread_index_in_threadgroup" in made[0]["body"]


def test_the_prologues_are_packaged():
    project = tomllib.loads((pathlib.Path(portable.__file__).parent.parent / "pyproject.toml").read_text())
    assert "prologue/*.h" in project["tool"]["setuptools"]["package-data"]["kernels"]


def test_the_digest_covers_body_header_and_names():
    same = {"inputs": ("a",), "outputs": ("y",), "body": "y[0] = a[0];"}
    variants = [same, same | {"body": "y[0] = 1;"}, same | {"header": "//"}, same | {"inputs": ("b",)}, same]
    digests = [Kernel("trial", **each).digest for each in variants]
    assert len(set(digests)) == 4 and digests[0] == digests[4]


@pytest.mark.parametrize(("platform", "build"), [("darwin", "metal"), ("linux", "cuda")])
def test_the_default_device_decides_the_build(made, monkeypatch, platform, build):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    call(None)
    assert made[0]["build"] == build


def test_on_a_cpu_a_kernel_is_a_dispatchers_mistake():
    if mx.default_device().type == mx.DeviceType.gpu:
        pytest.skip("the default device is a GPU")
    with pytest.raises(RuntimeError, match="the default device is the CPU"):
        call(None)
