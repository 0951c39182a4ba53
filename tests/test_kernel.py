"""The C kernel counts what numpy and OpenCV count, in every way that this CPU knows."""

import ctypes
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrators import histogram, kernel, rounding
from calibrators.amct import ifmr
from calibrators.errors import CalibrationError
from calibrators.histogram import BINS, ArrayRefused, Histogram, HistogramGroup
from deploy.cli import cli

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "cpp" / "src" / "kernel" / "count.c"
SOURCES = (SOURCE, SOURCE.with_name("round.c"), SOURCE.with_name("sums.c"))
CHUNK, BLOCK = 1 << 17, 1 << 12


def compile_kernel(folder, *sources):
    """The kernel as setup.py builds it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler is installed")
    library = folder / "_count.so"
    command = [compiler, "-std=c11", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-o", library]
    subprocess.run([*command, *(sources or SOURCES)], check=True)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_kernel(tmp_path_factory.mktemp("kernel"))


@pytest.fixture(scope="module")
def counting_kernels(library):
    return kernel.load_kernels(library)


@pytest.fixture(autouse=True)
def uncached_kernel():
    """Choose the kernel again in this test, and again after it."""
    for cached in (kernel.kernel, kernel._load_own_kernel):
        cached.cache_clear()
    yield
    for cached in (kernel.kernel, kernel._load_own_kernel):
        cached.cache_clear()


def observe_with(counting_kernel, batches, base):
    """All that a histogram holds after the batches, or after that which was refused, and why."""
    recorder, message = Histogram(initial_range=base), ""
    usual_kernel, histogram.kernel = histogram.kernel, lambda: counting_kernel
    try:
        for batch in batches:
            recorder.observe(batch)
    except CalibrationError as error:
        message = str(error)
    finally:
        histogram.kernel = usual_kernel
    arrays = {name: value.tobytes() for name, value in recorder.to_arrays().items()}
    return {**arrays, "batch_amax": recorder.batch_amax, "refused": message}


def check_equal_states(counting_kernels, batches, base=None):
    expected = observe_with(None, batches, base)
    for counting_kernel in counting_kernels:
        state = observe_with(counting_kernel, batches, base)
        differ = [name for name in expected if expected[name] != state[name]]
        assert not differ, f"{counting_kernel.name}: {differ} of {batches}"
    return expected


def hostile_batches():
    normal = np.random.default_rng(5).standard_normal(3 * CHUNK + 77).astype(np.float32)
    yield "nothing", [[], [1.0], []]
    yield "zeros", [[0.0], [-0.0, 0.0], np.zeros(9000), [-0.0]]
    yield "signless", [[-0.0, 0.0] * 40, [0.0, -0.0] * 40]
    yield "denormal", [[1e-45, -1e-45, 1e-38], np.full(5000, -3e-42), [2.0**-100, 2.0**-99]]
    yield "largest", [[3.4028235e38, -3.4028235e38, 1e-45], normal]
    yield "infinite", [[np.inf], [np.inf, -np.inf, 2.0], [*normal[:5000], np.inf], normal[:70]]
    yield "infinite alone", [[-np.inf] * 5000]
    yield "infinite later", [normal, np.where(np.arange(normal.size) == 2 * CHUNK, np.inf, normal)]
    for position in (0, 15, 16, 17, BLOCK - 1, BLOCK, CHUNK - 1, CHUNK, normal.size - 1):
        spoilt = normal.copy()
        spoilt[position] = np.nan
        spoilt[normal.size // 2] = -np.nan
        yield f"nan at {position}", [normal[:100], spoilt, normal]
    yield "nan and more", [[1.0, np.nan, np.inf, -np.inf, np.nan, 0.0]]
    sizes_near_limits = (
        size + offset for size in (16, 2048, BLOCK, CHUNK) for offset in (-1, 0, 1)
    )
    for size in (1, 31, *sizes_near_limits):
        yield f"{size} values", [normal[:size], normal[-size:] * 3]
    yield "one bin", [np.full(2 * CHUNK, 0.7), np.full(CHUNK, -0.7)]
    for size in (CHUNK - 129, CHUNK - 128, CHUNK - 127, CHUNK - 1, CHUNK):
        full = np.full(size, 0.7)
        with_gaps = np.where(
            np.arange(size) % BLOCK == 0, 0.0, full
        )  # of every block one is left out
        yield f"one bin of {size}", [[-1.0], full, with_gaps, np.append(full[1:], 0.3)]
    yield "two bins", [np.tile(np.float32([0.7, 0.3, 0.0]), CHUNK)]
    yield "ends", [[-1, 1, 0.5, -0.5, 1 - 2.0**-24, 1 + 2.0**-23], np.full(CHUNK + 9, 1.0), [-2.0]]
    grows = np.full(2 * CHUNK, 0.5, np.float32)
    grows[::500] = np.linspace(0, 30, grows[::500].size)
    yield "grows in a chunk", [grows, -grows * 7]
    yield "grows at its end", [normal[:CHUNK], np.append(normal[: CHUNK - 1], 999.0)]
    yield "relu", [np.maximum(normal, 0), np.minimum(normal, 0), np.clip(normal, 0, 0.5)]


@pytest.mark.parametrize("base", [None, 0.0, 1.0, 0.7, 0.1, 1e-30, 3e38], ids=str)
def test_every_kernel_counts_like_numpy(counting_kernels, base):
    for name, arrays in hostile_batches():
        state = check_equal_states(
            counting_kernels, [np.asarray(batch, np.float32) for batch in arrays], base
        )
        assert bool(state["refused"]) == ("nan" in name), name


def test_array_layout_changes_no_count(counting_kernels):
    values = np.random.default_rng(1).standard_normal((3, 40, 50)).astype(np.float32)
    locked = values.copy()
    locked.flags.writeable = False
    unaligned = np.frombuffer(b"x" + values.tobytes(), np.float32, offset=1)
    assert not unaligned.flags.aligned
    forms = [
        values.T,
        values[:, ::3],
        np.asfortranarray(values),
        values.astype(np.float16),
        unaligned,
    ]
    forms += [values.astype(np.float64), values.astype(">f4"), locked, np.float32(2.5)]
    check_equal_states(counting_kernels, forms)


@given(
    st.lists(st.floats(width=32, allow_nan=False), max_size=60),
    st.integers(0, 60),
    st.sampled_from([None, 0.75, 2.0**-90, 1e30]),
)
@settings(max_examples=80)
def test_random_values_are_counted_alike(library, values, cut, base):
    x = np.asarray(values, np.float32)
    check_equal_states(kernel.load_kernels(library), [x[:cut], x[cut:], np.repeat(x, 70)], base)


def test_threads_do_not_disturb_each_other(counting_kernels, monkeypatch):
    monkeypatch.setattr(histogram, "kernel", lambda: counting_kernels[-1])
    x = np.random.default_rng(2).standard_normal(200_000).astype(np.float32)
    expected, recorders = Histogram(), [Histogram() for _ in range(4)]
    expected.observe(x)
    with ThreadPoolExecutor(len(recorders)) as threads:
        list(threads.map(lambda recorder: recorder.observe(x), recorders))
    assert all(h.counts.tobytes() == expected.counts.tobytes() for h in recorders)


@pytest.mark.parametrize("broken", [1e-300, -1.0, float("nan"), float("inf")])
def test_impossible_range_is_refused(counting_kernels, broken, wording):
    recorder = Histogram()
    recorder.full_range = broken
    with pytest.raises(CalibrationError) as raised:
        recorder.observe(np.zeros(9, np.float32))
    wording.check(raised.value)
    state, counts = kernel.HistogramState(full_range=broken), np.zeros(2 * BINS + 1, np.int64)
    values, scratch = np.full(9, 0.5, np.float32), ctypes.create_string_buffer(kernel.SCRATCH)
    arguments = (ctypes.byref(state), counts.ctypes.data, values.ctypes.data, 9, scratch)
    for counting_kernel in (
        *(w.instruction_set for w in counting_kernels),
        -1,
        len(counting_kernels),
    ):  # nor does the kernel write beyond it
        assert counting_kernels[0].observe(counting_kernel, *arguments) == -1
        assert not counts.any()


def counting_line():
    kernel.kernel.cache_clear()
    result = CliRunner().invoke(cli, ["--version"])
    return result.output.splitlines()[-1] if result.exit_code == 0 else str(result.exception)


@pytest.fixture
def installed_kernel(library, monkeypatch, tmp_path):
    """The kernel as an installation has it."""
    library_path = tmp_path / "_count.so"
    shutil.copy(library, library_path)
    monkeypatch.setattr(kernel, "LIBRARY", library_path)
    monkeypatch.delenv(kernel.KERNEL_VARIABLE, raising=False)
    return library_path


def test_kernel_choice_is_reported(installed_kernel, counting_kernels, monkeypatch):
    assert counting_line() == f"counting: C kernel ({counting_kernels[-1].name})"
    monkeypatch.setenv(kernel.KERNEL_VARIABLE, "opencv")
    assert counting_line() == "counting: numpy and OpenCV (CALIB8_COUNTING=opencv)"
    monkeypatch.setenv(kernel.KERNEL_VARIABLE, "fortran")
    assert "must be opencv or unset, got 'fortran'" in counting_line()
    kernel._load_own_kernel.cache_clear()
    monkeypatch.delenv(kernel.KERNEL_VARIABLE)
    installed_kernel.unlink()
    assert counting_line() == "counting: numpy and OpenCV (the C kernel is not built here)"


def test_unknown_kernel_name_is_refused(run, refusal, small_cnn, pictures, monkeypatch, tmp_path):
    monkeypatch.setenv(kernel.KERNEL_VARIABLE, "fortran")
    kernel.kernel.cache_clear()
    command = ["build", small_cnn, "--images", pictures, "--effort", 0, "--duration", 0]
    err = refusal(*command, "--out", tmp_path / "out")
    assert err == "calib8: error: CALIB8_COUNTING must be opencv or unset, got 'fortran'"
    assert run("--version")[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "int calib8_kernel_form(void) { return 1; }", "form 0"])
def test_foreign_library_is_not_used(installed_kernel, tmp_path, text):
    installed_kernel.unlink()
    if text == "form 0":
        text = SOURCE.read_text().replace("return CALIB8_KERNEL_FORM;", "return 0;")
        text = text.replace('"count.h"', f'"{SOURCE.with_name("count.h")}"')
    if text:
        (tmp_path / "other.c").write_text(text)
        compile_kernel(tmp_path, tmp_path / "other.c", *SOURCES[1:])
    else:
        installed_kernel.write_bytes(b"no library")
    assert counting_line().startswith("counting: numpy and OpenCV (the C kernel cannot be loaded: ")


def test_constants_equal_the_header():
    header = SOURCE.with_name("count.h").read_text()
    assert f"#define CALIB8_SCRATCH {kernel.SCRATCH} " in header
    assert f"#define CALIB8_KERNEL_FORM {kernel._INTERFACE_VERSION} " in header
    assert f"#define CALIB8_BINS {histogram.BINS} " in header


@given(
    st.integers(0, 10_000),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 70),
    st.booleans(),
    st.sampled_from((np.float64, np.float32)),
)
@settings(max_examples=40)
def test_kernel_rounds_weights_like_numpy(
    counting_kernels, seed, groups, rows, columns, is_column_major, dtype
):
    rng = np.random.default_rng(seed)
    steps = rng.normal(0, 20, (groups, rows, columns)).astype(dtype)
    steps = np.asfortranarray(steps) if is_column_major else steps
    products = rounding.gram(rng.uniform(0, 1, (groups, columns, 200)))
    fixed = rng.random(steps.shape) < 0.2
    rounded_weights = []
    for counting_kernel in (counting_kernels[-1], None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                rounding, "kernel", lambda counting_kernel=counting_kernel: counting_kernel
            )
            rounded_weights.append(rounding.round_by_output(steps, products, fixed=fixed))
    assert (rounded_weights[0] == rounded_weights[1]).all()


def test_kernel_sums_bins_like_numpy(counting_kernels, monkeypatch):
    rng = np.random.default_rng(5)
    signed = rng.normal(0, 1, 300_000).astype(np.float32)
    batches = [signed, np.maximum(signed, 0), 3 * signed[::2], np.float32([0.0, 1e-30, -8.0])]
    histograms = []
    for counting_kernel in (None, counting_kernels[-1]):
        monkeypatch.setattr(ifmr, "kernel", lambda counting_kernel=counting_kernel: counting_kernel)
        fine_histogram = ifmr.IfmrHistogram()
        for batch in batches:
            fine_histogram.observe(batch)
        histograms.append(fine_histogram)
    by_numpy, by_kernel = histograms
    assert by_kernel.counts.sum() == sum(batch.size for batch in batches)
    np.testing.assert_array_equal(by_kernel.counts, by_numpy.counts)
    np.testing.assert_array_equal(by_kernel.sums, by_numpy.sums)


COUNTING_KERNELS = (None, *(kernel.load_kernels(kernel.LIBRARY) if kernel.LIBRARY.exists() else ()))


@pytest.fixture(
    params=COUNTING_KERNELS,
    ids=lambda counting_kernel: counting_kernel.name if counting_kernel else "numpy",
)
def counting_kernel(request, monkeypatch):
    monkeypatch.setattr(histogram, "kernel", lambda: request.param)
    return request.param


def state(recorder):
    return {
        name: value.tobytes() for name, value in recorder.to_arrays().items()
    }, recorder.batch_amax


def arrays(seed):
    """Yield arrays of every size and form; some are larger than their first look."""
    rng = np.random.default_rng(seed)
    sizes = [0, 1, 7, 2048, 2049, 5000, 140_000]
    plain_arrays = [rng.standard_normal(n).astype(np.float32) * (1 + seed) for n in sizes]
    transposed = rng.standard_normal((3, 40, 50)).astype(np.float32).T
    unaligned = np.frombuffer(b"x" + plain_arrays[4].tobytes(), np.float32, offset=1)
    infinite = np.where(plain_arrays[5] > 2, np.inf, plain_arrays[5]).astype(np.float32)
    half = plain_arrays[3].astype(np.float16)
    return [
        *plain_arrays,
        transposed,
        unaligned,
        infinite,
        half,
        np.zeros(3000, np.float32),
        np.float32([[-0.0]]),
    ]


def test_group_counts_like_single_histograms(counting_kernel):
    expected = [Histogram() for _ in arrays(0)]
    grouped = [Histogram() for _ in arrays(0)]
    group = HistogramGroup(grouped)
    for seed in range(3):
        for histogram_, x in zip(expected, arrays(seed), strict=True):
            histogram_.observe(x)
        group.observe(arrays(seed))
        assert [state(h) for h in grouped] == [state(h) for h in expected]


def test_empty_group_counts_nothing(counting_kernel):
    HistogramGroup([]).observe([])


def test_refused_array_is_named(counting_kernel):
    histograms = [Histogram() for _ in range(3)]
    values = [np.ones(9, np.float32), np.float32([1, np.nan, np.nan]), np.ones(9, np.float32)]
    with pytest.raises(ArrayRefused, match="got 2 NaN") as refusal:
        HistogramGroup(histograms).observe(values)
    assert refusal.value.index == 1
    assert [histogram.total for histogram in histograms] == [9, 0, 0]

    histograms[2].full_range = 1e-300
    values[1] = values[0]
    with pytest.raises(ArrayRefused, match="got 1e-300") as refusal:
        HistogramGroup(histograms).observe(values)
    assert refusal.value.index == 2
    assert isinstance(refusal.value, CalibrationError)
    assert not histograms[2].counts.any()


def test_impossible_extremes_are_survived(counting_kernel):
    """Extremes beyond the range, as a spoilt cache may hold them, are no bins."""
    for low, high in ((-1e30, 1e30), (np.nan, np.nan), (np.inf, -np.inf), (0.5, -0.5)):
        recorder = Histogram()
        recorder.full_range, recorder.minimum, recorder.maximum = 1.0, low, high
        HistogramGroup([recorder]).observe([np.full(3000, 0.25, np.float32)])
        assert recorder.counts[BINS + BINS // 4] == recorder.counts.sum() == 3000
