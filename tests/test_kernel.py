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
from calibrators.errors import CalibrationError
from calibrators.histogram import BINS, ArrayRefused, Histogram, HistogramGroup, LocatedArrays
from deploy.cli import cli

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "cpp" / "src" / "kernel" / "count.c"
SOURCES = (SOURCE, SOURCE.with_name("round.c"))
CHUNK, BLOCK = 1 << 17, 1 << 12


def compiled(folder, *sources):
    """The kernel as setup.py builds it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler is installed")
    library = folder / "_count.so"
    words = [compiler, "-std=c11", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-o", library]
    subprocess.run([*words, *(sources or SOURCES)], check=True)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("kernel"))


@pytest.fixture(scope="module")
def ways(library):
    return kernel.load_kernels(library)


@pytest.fixture(autouse=True)
def forgetful():
    """What was chosen elsewhere is chosen anew here, and what is chosen here is elsewhere."""
    for cached in (kernel.kernel, kernel._load_own_kernel):
        cached.cache_clear()
    yield
    for cached in (kernel.kernel, kernel._load_own_kernel):
        cached.cache_clear()


def after(way, batches, base):
    """All that a histogram holds after the batches, or after that which was refused, and why."""
    seen, refused = Histogram(base=base), ""
    before, histogram.kernel = histogram.kernel, lambda: way
    try:
        for batch in batches:
            seen.observe(batch)
    except CalibrationError as error:
        refused = str(error)
    finally:
        histogram.kernel = before
    arrays = {name: value.tobytes() for name, value in seen.to_arrays().items()}
    return {**arrays, "latest": seen.latest, "refused": refused}


def agree(ways, batches, base=None):
    wanted = after(None, batches, base)
    for way in ways:
        found = after(way, batches, base)
        differ = [name for name in wanted if wanted[name] != found[name]]
        assert not differ, f"{way.name}: {differ} of {batches}"
    return wanted


def hostile():
    normal = np.random.default_rng(5).standard_normal(3 * CHUNK + 77).astype(np.float32)
    yield "nothing", [[], [1.0], []]
    yield "zeros", [[0.0], [-0.0, 0.0], np.zeros(9000), [-0.0]]
    yield "signless", [[-0.0, 0.0] * 40, [0.0, -0.0] * 40]
    yield "denormal", [[1e-45, -1e-45, 1e-38], np.full(5000, -3e-42), [2.0**-100, 2.0**-99]]
    yield "largest", [[3.4028235e38, -3.4028235e38, 1e-45], normal]
    yield "infinite", [[np.inf], [np.inf, -np.inf, 2.0], [*normal[:5000], np.inf], normal[:70]]
    yield "infinite alone", [[-np.inf] * 5000]
    yield "infinite later", [normal, np.where(np.arange(normal.size) == 2 * CHUNK, np.inf, normal)]
    for place in (0, 15, 16, 17, BLOCK - 1, BLOCK, CHUNK - 1, CHUNK, normal.size - 1):
        spoilt = normal.copy()
        spoilt[place] = np.nan
        spoilt[normal.size // 2] = -np.nan
        yield f"nan at {place}", [normal[:100], spoilt, normal]
    yield "nan and more", [[1.0, np.nan, np.inf, -np.inf, np.nan, 0.0]]
    near = (size + more for size in (16, 2048, BLOCK, CHUNK) for more in (-1, 0, 1))
    for size in (1, 31, *near):
        yield f"{size} values", [normal[:size], normal[-size:] * 3]
    yield "one bin", [np.full(2 * CHUNK, 0.7), np.full(CHUNK, -0.7)]
    for size in (CHUNK - 129, CHUNK - 128, CHUNK - 127, CHUNK - 1, CHUNK):
        full = np.full(size, 0.7)
        odd = np.where(np.arange(size) % BLOCK == 0, 0.0, full)  # of every block one is left out
        yield f"one bin of {size}", [[-1.0], full, odd, np.append(full[1:], 0.3)]
    yield "two bins", [np.tile(np.float32([0.7, 0.3, 0.0]), CHUNK)]
    yield "ends", [[-1, 1, 0.5, -0.5, 1 - 2.0**-24, 1 + 2.0**-23], np.full(CHUNK + 9, 1.0), [-2.0]]
    grows = np.full(2 * CHUNK, 0.5, np.float32)
    grows[::500] = np.linspace(0, 30, grows[::500].size)
    yield "grows in a chunk", [grows, -grows * 7]
    yield "grows at its end", [normal[:CHUNK], np.append(normal[: CHUNK - 1], 999.0)]
    yield "relu", [np.maximum(normal, 0), np.minimum(normal, 0), np.clip(normal, 0, 0.5)]


@pytest.mark.parametrize("base", [None, 0.0, 1.0, 0.7, 0.1, 1e-30, 3e38], ids=str)
def test_every_way_counts_what_numpy_counts(ways, base):
    for name, arrays in hostile():
        found = agree(ways, [np.asarray(batch, np.float32) for batch in arrays], base)
        assert bool(found["refused"]) == ("nan" in name), name


def test_any_form_of_array_is_counted_alike(ways):
    values = np.random.default_rng(1).standard_normal((3, 40, 50)).astype(np.float32)
    locked = values.copy()
    locked.flags.writeable = False
    odd = np.frombuffer(b"x" + values.tobytes(), np.float32, offset=1)
    assert not odd.flags.aligned
    forms = [values.T, values[:, ::3], np.asfortranarray(values), values.astype(np.float16), odd]
    forms += [values.astype(np.float64), values.astype(">f4"), locked, np.float32(2.5)]
    agree(ways, forms)


@given(
    st.lists(st.floats(width=32, allow_nan=False), max_size=60),
    st.integers(0, 60),
    st.sampled_from([None, 0.75, 2.0**-90, 1e30]),
)
@settings(max_examples=80)
def test_any_values_are_counted_alike(library, values, cut, base):
    x = np.asarray(values, np.float32)
    agree(kernel.load_kernels(library), [x[:cut], x[cut:], np.repeat(x, 70)], base)


def test_threads_count_beside_each_other(ways, monkeypatch):
    monkeypatch.setattr(histogram, "kernel", lambda: ways[-1])
    x = np.random.default_rng(2).standard_normal(200_000).astype(np.float32)
    alone, several = Histogram(), [Histogram() for _ in range(4)]
    alone.observe(x)
    with ThreadPoolExecutor(len(several)) as threads:
        list(threads.map(lambda one: one.observe(x), several))
    assert all(h.counts.tobytes() == alone.counts.tobytes() for h in several)


@pytest.mark.parametrize("broken", [1e-300, -1.0, float("nan"), float("inf")])
def test_a_range_that_no_histogram_has_is_refused(ways, broken, wording):
    seen = Histogram()
    seen.full_range = broken
    with pytest.raises(CalibrationError) as raised:
        seen.observe(np.zeros(9, np.float32))
    wording.check(raised.value)
    state, counts = kernel.HistogramState(full_range=broken), np.zeros(2 * BINS + 1, np.int64)
    values, scratch = np.full(9, 0.5, np.float32), ctypes.create_string_buffer(kernel.SCRATCH)
    given = (ctypes.byref(state), counts.ctypes.data, values.ctypes.data, 9, scratch)
    for way in (
        *(w.instruction_set for w in ways),
        -1,
        len(ways),
    ):  # nor does the kernel write beyond it
        assert ways[0].observe(way, *given) == -1 and not counts.any()


def said():
    kernel.kernel.cache_clear()
    result = CliRunner().invoke(cli, ["--version"])
    return result.output.splitlines()[-1] if result.exit_code == 0 else str(result.exception)


@pytest.fixture
def beside(library, monkeypatch, tmp_path):
    """The kernel as an installation has it."""
    place = tmp_path / "_count.so"
    shutil.copy(library, place)
    monkeypatch.setattr(kernel, "LIBRARY", place)
    monkeypatch.delenv(kernel.KERNEL_VARIABLE, raising=False)
    return place


def test_the_kernel_counts_where_it_is_here_unless_told(beside, ways, monkeypatch):
    assert said() == f"counting: C kernel ({ways[-1].name})"
    monkeypatch.setenv(kernel.KERNEL_VARIABLE, "opencv")
    assert said() == "counting: numpy and OpenCV (CALIB8_COUNTING=opencv)"
    monkeypatch.setenv(kernel.KERNEL_VARIABLE, "c")
    assert said() == f"counting: C kernel ({ways[-1].name})"
    monkeypatch.setenv(kernel.KERNEL_VARIABLE, "fortran")
    assert "must be c, opencv or unset, got 'fortran'" in said()
    kernel._load_own_kernel.cache_clear()
    monkeypatch.delenv(kernel.KERNEL_VARIABLE)
    beside.unlink()
    assert said() == "counting: numpy and OpenCV (the C kernel is not built here)"
    monkeypatch.setenv(kernel.KERNEL_VARIABLE, "c")
    assert "the C kernel" in said()


def test_a_wrong_word_is_told_as_such(run, refusal, small_cnn, pictures, monkeypatch, tmp_path):
    monkeypatch.setenv(kernel.KERNEL_VARIABLE, "fortran")
    kernel.kernel.cache_clear()
    words = ["build", small_cnn, "--images", pictures, "--effort", 0, "--duration", 0]
    err = refusal(*words, "--out", tmp_path / "out")
    assert err == "calib8: error: CALIB8_COUNTING must be c, opencv or unset, got 'fortran'"
    assert run("--version")[0] == 1


@pytest.mark.parametrize("text", ["", "int calib8_kernel_form(void) { return 1; }", "form 0"])
def test_another_library_is_not_used(beside, tmp_path, text):
    beside.unlink()
    if text == "form 0":
        text = SOURCE.read_text().replace("return CALIB8_KERNEL_FORM;", "return 0;")
        text = text.replace('"count.h"', f'"{SOURCE.with_name("count.h")}"')
    if text:
        (tmp_path / "other.c").write_text(text)
        compiled(tmp_path, tmp_path / "other.c", *SOURCES[1:])
    else:
        beside.write_bytes(b"no library")
    assert said().startswith("counting: numpy and OpenCV (the C kernel cannot be loaded: ")


def test_what_is_written_here_is_what_the_header_has():
    header = SOURCE.with_name("count.h").read_text()
    assert f"#define CALIB8_SCRATCH {kernel.SCRATCH} " in header
    assert f"#define CALIB8_KERNEL_FORM {kernel._INTERFACE_VERSION} " in header
    assert f"#define CALIB8_BINS {histogram.BINS} " in header


@given(
    st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 9), st.integers(1, 70), st.booleans()
)
@settings(max_examples=40)
def test_the_kernel_rounds_weights_as_numpy_does(ways, seed, groups, rows, columns, turned):
    rng = np.random.default_rng(seed)
    steps = rng.normal(0, 20, (groups, rows, columns))
    steps = np.asfortranarray(steps) if turned else steps
    products = rounding.gram(rng.uniform(0, 1, (groups, columns, 200)))
    fixed = rng.random(steps.shape) < 0.2
    found = []
    for way in (ways[-1], None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounding, "kernel", lambda way=way: way)
            found.append(rounding.round_by_output(steps, products, fixed=fixed, sweeps=3))
    assert (found[0] == found[1]).all()


WAYS = (None, *(kernel.load_kernels(kernel.LIBRARY) if kernel.LIBRARY.exists() else ()))


@pytest.fixture(params=WAYS, ids=lambda way: way.name if way else "numpy")
def way(request, monkeypatch):
    monkeypatch.setattr(histogram, "kernel", lambda: request.param)
    return request.param


def state(one):
    return {name: value.tobytes() for name, value in one.to_arrays().items()}, one.latest


def arrays(seed):
    """Of every size and form; some larger than what is seen of them at first."""
    rng = np.random.default_rng(seed)
    sizes = [0, 1, 7, 2048, 2049, 5000, 140_000]
    made = [rng.standard_normal(n).astype(np.float32) * (1 + seed) for n in sizes]
    turned = rng.standard_normal((3, 40, 50)).astype(np.float32).T
    odd = np.frombuffer(b"x" + made[4].tobytes(), np.float32, offset=1)
    infinite = np.where(made[5] > 2, np.inf, made[5]).astype(np.float32)
    half = made[3].astype(np.float16)
    return [*made, turned, odd, infinite, half, np.zeros(3000, np.float32), np.float32([[-0.0]])]


def test_each_counts_what_it_counts_alone(way):
    alone, beside = ([Histogram() for _ in arrays(0)] for _ in range(2))
    one = HistogramGroup(beside)
    for seed in range(3):
        for histogram_, x in zip(alone, arrays(seed), strict=True):
            histogram_.observe(x)
        one.observe(LocatedArrays(arrays(seed)))
        assert [state(h) for h in beside] == [state(h) for h in alone]


def test_memory_that_is_used_again_is_looked_up_once(way):
    rng = np.random.default_rng(3)
    lasting, alone = np.empty(5000, np.float32), [Histogram(), Histogram()]
    beside = [Histogram(), Histogram()]
    one, located = HistogramGroup(beside), LocatedArrays([lasting, lasting[:9]])
    for _ in range(3):
        lasting[:] = rng.standard_normal(5000)
        other = rng.standard_normal(2100).astype(np.float64)
        located.put(1, other)
        one.observe(located)
        alone[0].observe(lasting)
        alone[1].observe(other)
    assert [state(h) for h in beside] == [state(h) for h in alone]
    HistogramGroup([]).observe(LocatedArrays([]))


def test_what_is_refused_has_its_place_and_what_came_before_is_counted(way, wording):
    beside = [Histogram() for _ in range(3)]
    values = [np.ones(9, np.float32), np.float32([1, np.nan, np.nan]), np.ones(9, np.float32)]
    with pytest.raises(ArrayRefused) as refused:
        HistogramGroup(beside).observe(LocatedArrays(values))
    wording.check(refused.value)
    assert refused.value.index == 1 and [h.total for h in beside] == [9, 0, 0]
    beside[2].full_range = 1e-300
    values[1] = values[0]
    with pytest.raises(ArrayRefused) as refused:
        HistogramGroup(beside).observe(LocatedArrays(values))
    wording.check(refused.value)
    assert refused.value.index == 2 and isinstance(refused.value, CalibrationError)
    assert not beside[2].counts.any()


def test_a_state_that_no_values_gave_leads_nowhere(way):
    """Extremes beyond the range, as a spoilt cache may hold them, are no bins."""
    for low, high in ((-1e30, 1e30), (np.nan, np.nan), (np.inf, -np.inf), (0.5, -0.5)):
        seen = Histogram()
        seen.full_range, seen.minimum, seen.maximum = 1.0, low, high
        HistogramGroup([seen]).observe(LocatedArrays([np.full(3000, 0.25, np.float32)]))
        assert seen.counts[BINS + BINS // 4] == seen.counts.sum() == 3000
