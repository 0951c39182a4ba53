"""Arrays in the C++ library and in this one: the same samples, digests, notes and refusals."""

import json
import subprocess

import numpy as np
import pytest

from deploy.feed.feed import open_feed
from deploy.tensors import TensorSpec
from tests.test_cpp_parity import answer_of, ask_feed, outcome, scale_of

pytestmark = pytest.mark.slow

IMAGE = TensorSpec("image", "float32", ("n", 3, 4, 5))
STATE = TensorSpec("state", "int64", ("n", 2))
SCALES = TensorSpec("scales", "float16", (3, 2))


def batch(dtype="float32", shape=(4, 3, 4, 5), seed=1):
    return (np.random.default_rng(seed).normal(size=shape) * 50).astype(dtype)


def ours(source, specs, **options):
    """Return this library's answer for a feed of arrays, and the bytes of its samples."""
    data = b""

    def answer():
        nonlocal data
        feed = open_feed(source, specs, **options)
        with feed.samples() as stream:
            tensors = [s[spec.name] for s in stream for spec in specs]
        data = b"".join(t.tobytes() for t in tensors)
        return answer_of(feed, [list(t.shape) for t in tensors])

    return outcome(answer), data


def theirs(cpp, out, source, specs, **options):
    out.unlink(missing_ok=True)
    answer = ask_feed(cpp, out, source, *specs, **options)
    return answer, out.read_bytes() if out.exists() and "error" not in answer else b""


def test_function_samples_equal_file_samples(cpp, tmp_path):
    arrays = {"image": batch(), "state": batch("int64", (4, 2)), "scales": batch("float16", (3, 2))}
    np.savez(tmp_path / "a.npz", **arrays)
    fixed = [TensorSpec("image", "float32", (3, 3, 4, 5)), TensorSpec("state", "int64", (3, 2))]
    for specs, limit in (([IMAGE, STATE, SCALES], None), ([IMAGE], None), (fixed, 2)):
        np.savez(tmp_path / "a.npz", **{spec.name: arrays[spec.name] for spec in specs})
        options = {"limit": limit, "scales": True}
        files, data = theirs(cpp, tmp_path / "o", tmp_path / "a.npz", specs, **options)
        memory, memory_data = theirs(
            cpp, tmp_path / "o", tmp_path / "a.npz", specs, memory=True, **options
        )
        items = iter([{spec.name: arrays[spec.name] for spec in specs}])
        answer, expected = ours(items, specs, limit=limit)
        scales = memory.pop("scales")
        memory_text = json.dumps(memory).replace("the function", "the iterable")
        assert json.loads(memory_text) == answer
        assert memory_data == expected
        if limit:  # of the files spread evenly over all
            continue
        assert (memory["manifest"], scales, memory_data) == (
            files["manifest"],
            files["scales"],
            data,
        )
        base = float(np.abs(arrays["image"][0]).max())
        for name, theirs_scale in scales["image"].items():
            scale = scale_of(name, {}, list(arrays["image"]), base)
            assert theirs_scale == {key: getattr(scale, key) for key in theirs_scale}, name


def test_bad_function_samples_have_equal_messages(cpp, tmp_path):
    to = {"name": IMAGE.name, "dtype": IMAGE.dtype, "shape": IMAGE.shape}
    for array in (batch(shape=(4, 3, 4, 6)), batch(shape=(4, 4))):
        np.save(tmp_path / "a.npy", array)
        form = [TensorSpec("image", "float32", ("n", *array.shape[1:]))]
        answer, _ = theirs(cpp, tmp_path / "o", tmp_path / "a.npy", form, memory=True, to=to)
        answer = json.loads(json.dumps(answer).replace("the function", "the iterable"))
        assert answer["message"].startswith("item 0 of ")
        assert "must fit the input" in answer["message"]
        assert answer == ours(iter(np.split(array, 4)), [IMAGE])[0]


@pytest.fixture
def agree(cpp, tmp_path):
    def check(source, *specs, **options):
        answer = ours(source, list(specs), **options)
        assert theirs(cpp, tmp_path / "out.f", source, specs, **options) == answer
        return answer[0]

    return check


def test_file_of_samples_agrees(agree, tmp_path):
    path = tmp_path / "a.npy"
    for array in (
        batch(),
        batch(shape=(5, 1, 3, 4, 5)),
        batch(shape=(2, 2, 3, 4, 5)),
        np.asfortranarray(batch()),
        batch(">f4"),
        np.asfortranarray(batch(">f4")),
        batch()[:1],
    ):
        np.save(path, array)
        assert agree(path, IMAGE)["manifest"]["kind"] == "arrays"
        agree(path, IMAGE, limit=3)
    np.save(path, batch(shape=(5, 3, 4, 5)))
    filled = agree(path, TensorSpec("image", "float32", (2, 3, 4, 5)))
    assert filled["size"] == 3
    assert "filled" in filled["notes"][-1]
    several = agree(path, TensorSpec("image", "float32", (12, 3, 4, 5)))
    assert "the 5 samples" in several["notes"][-1]
    assert "again and again" in several["notes"][-1]
    np.save(path, batch(shape=(1, 3, 4, 5)))
    single = agree(path, TensorSpec("image", "float32", (4, 3, 4, 5)))
    assert "the only sample" in single["notes"][-1]
    np.save(path, batch())
    path.write_bytes(path.read_bytes() + b"more")
    assert agree(path, IMAGE)["size"] == 4
    agree(path.rename(tmp_path / "A.NPY"), IMAGE)


@pytest.mark.parametrize(
    ("input_shape", "shape"),
    [
        (("n", 3, 4, 5), (3, 4, 5)),  # a sample without the batch dimension
        ((2, 3), (3,)),
        ((2, 3, 4, 5), (5, 2, 3, 4, 5)),  # samples stacked with their batch dimension
        ((3, 4, 5), (2, 3, 4, 5)),  # images of an input without a batch dimension
        ((3, 4, 5), (3, 4, 5)),
        ((3,), (3,)),
    ],
)
def test_first_dimensions_agree(agree, tmp_path, input_shape, shape):
    np.save(tmp_path / "a.npy", batch(shape=shape))
    assert agree(tmp_path / "a.npy", TensorSpec("x", "float32", input_shape))["size"] >= 1


def test_linked_folders_agree(agree, tmp_path):
    (tmp_path / "far" / "below").mkdir(parents=True)
    (tmp_path / "near").mkdir()
    np.save(tmp_path / "far" / "below" / "a.npy", batch(seed=2))
    np.save(tmp_path / "near" / "b.npy", batch(seed=3)[:1])
    for name, target in (("y", "far"), ("x", "far"), ("z", "near")):  # the last one is a loop
        (tmp_path / "near" / name).symlink_to(tmp_path / target)
    assert agree(tmp_path / "near", IMAGE)["names"][-1] == "sample 3 of x/below/a.npy"


@pytest.mark.parametrize(
    "dtype", ["float16", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "bool"]
)
def test_every_dtype_agrees(agree, tmp_path, dtype):
    path = tmp_path / "a.npy"
    spec = TensorSpec("x", dtype, ("n", 3))
    np.save(path, batch(dtype, (4, 3)))
    assert agree(path, spec)["size"] == 4
    other_spec = TensorSpec("x", "uint8" if spec.dtype in ("bool", "uint16") else "bool", ("n", 3))
    assert "the dtype" in agree(path, other_spec)["message"]
    np.save(path, batch(np.dtype(dtype).newbyteorder(">"), (4, 3)))
    assert agree(path, spec)["size"] == 4


def test_arrays_that_python_converts_are_refused(cpp, tmp_path):
    np.save(tmp_path / "a.npy", batch("float64"))
    answer, _ = theirs(cpp, tmp_path / "out.f", tmp_path / "a.npy", [IMAGE])
    assert "got float64 [4, 3, 4, 5]; convert it with" in answer["message"]
    assert ours(tmp_path / "a.npy", [IMAGE])[0]["size"] == 4


def test_remedy_for_channels_at_the_end_agrees(agree, tmp_path):
    np.save(tmp_path / "a.npy", batch().transpose(0, 2, 3, 1))
    assert "turn it with .transpose(0, 3, 1, 2)" in agree(tmp_path / "a.npy", IMAGE)["message"]


def test_folders_lists_and_labels_agree(agree, tmp_path):
    folder = tmp_path / "arrays"
    (folder / "sub").mkdir(parents=True)
    np.save(folder / "b.npy", batch(seed=2)[:1])
    np.save(folder / "sub" / "a.npy", batch(seed=3))
    np.savez(folder / "c.npz", image=batch(seed=4)[:2], labels=np.array([3, 1], ">i2"))
    batch(seed=5).tofile(folder / "d.raw")
    (folder / ".hidden.npy").write_bytes(b"x")
    assert agree(folder, IMAGE)["size"] == 11
    agree(folder, IMAGE, limit=5)
    (tmp_path / "list.txt").write_text("arrays/b.npy 2\narrays/sub/a.npy 0\n")
    assert agree(tmp_path / "list.txt", IMAGE)["labels"] == [2, 0, 0, 0, 0]
    np.savez(tmp_path / "single.npz", image=batch()[0], target=np.array(3))
    assert agree(tmp_path / "single.npz", IMAGE)["labels"] == [3]
    (tmp_path / "one.txt").write_text("arrays/c.npz\n")
    assert agree(tmp_path / "one.txt", IMAGE)["labels"] == [3, 1]
    (tmp_path / "mixed.txt").write_text("arrays/b.npy\nx.png\n")
    assert "or of arrays" in agree(tmp_path / "mixed.txt", IMAGE)["message"]
    (folder / "x.npy").write_bytes(b"x")
    bad = batch(seed=6)
    bad[1, 2, 3] = np.nan
    bad[1, 1, 0, 0] = -np.inf
    np.save(folder / "nan.npy", bad)
    (tmp_path / "bad.txt").write_text("arrays/nan.npy\narrays/b.npy\n")
    assert "6 NaN or Inf" in agree(tmp_path / "bad.txt", IMAGE)["message"]
    assert agree(tmp_path / "bad.txt", IMAGE, skip_bad=True)["size"] == 4
    (tmp_path / "empty").mkdir()
    assert "must hold images" in agree(tmp_path / "empty", IMAGE)["message"]


def test_several_inputs_agree(agree, tmp_path):
    specs = [IMAGE, STATE, SCALES]
    arrays = {"image": batch(), "state": batch("int64", (4, 2)), "scales": batch("float16", (3, 2))}
    np.savez(tmp_path / "a.npz", **arrays)
    assert agree(tmp_path / "a.npz", *specs)["size"] == 4
    folder = tmp_path / "side"
    for name, array in arrays.items():
        (folder / name).mkdir(parents=True)
        np.save(folder / name / "0.npy", array)
        np.savez(folder / name / "1.npz", anything=array)
    assert agree(folder, *specs)["size"] == 8
    np.save(folder / "beside.npy", batch())
    assert agree(folder, *specs)["size"] == 8
    np.save(folder / "state" / "1.npy", arrays["state"])
    assert "one file of a name" in agree(folder, *specs)["message"]
    (folder / "state" / "1.npy").unlink()
    (folder / "state" / "1.npz").unlink()
    assert "the same names" in agree(folder, *specs)["message"]
    assert "exactly the inputs" in agree(tmp_path / "a.npz", IMAGE, STATE)["message"]
    assert "exactly the inputs" in agree(folder / "state" / "0.npy", *specs)["message"]
    listing = folder / "list.txt"  # of one file for each input
    listing.write_text("image/0.npy state/0.npy\tscales/0.npy\n")
    assert agree(listing, *specs)["size"] == 4
    assert "one for each of" in agree(listing, IMAGE, STATE)["message"]
    np.savez(tmp_path / "few.npz", **arrays | {"state": batch("int64", (3, 2))})
    assert "equally many samples" in agree(tmp_path / "few.npz", *specs)["message"]


def test_compressed_archive_is_refused(cpp, tmp_path, wording):
    np.savez_compressed(tmp_path / "a.npz", image=batch())
    answer, _ = theirs(cpp, tmp_path / "out.f", tmp_path / "a.npz", [IMAGE])
    assert answer["message"].startswith(f"{tmp_path}/a.npz cannot be read")
    wording.check(answer["message"])


def test_the_tool_writes_arrays(calib8_cache, tmp_path):
    arrays = {"image": batch(), "state": batch("int64", (4, 2))}
    np.savez(tmp_path / "a.npz", **arrays)
    options = ["--input", "image:nx3x4x5", "--input", "state:nx2:int64", "-o", tmp_path / "out"]
    command = [*calib8_cache, "feed", tmp_path / "a.npz", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    answer, data = ours(tmp_path / "a.npz", [IMAGE, STATE])
    assert (tmp_path / "out").read_bytes() == data, done.stderr
    assert json.loads(done.stdout)["manifest"] == answer["manifest"]


@pytest.mark.parametrize("shape", [(), (7,), (0, 3, 4, 5), (4, 3, 5, 4), (4, 3, 4)])
def test_unfit_shapes_have_equal_messages(agree, tmp_path, shape):
    np.save(tmp_path / "a.npy", batch(shape=shape))
    assert "error" in agree(tmp_path / "a.npy", IMAGE)


def test_refusals_have_equal_messages(agree, tmp_path):
    np.savez(tmp_path / "a.npz", image=batch(), y=np.array([1.0, 2, 3, 4]))
    assert "from 0, got float64" in agree(tmp_path / "a.npz", IMAGE)["message"]
    np.savez(tmp_path / "b.npz", image=batch(), y=np.array([0, -3, 2, -1], "<i2"))
    assert "from 0, got -3" in agree(tmp_path / "b.npz", IMAGE)["message"]
    np.savez(tmp_path / "a.npz", image=batch(), y=np.array([1, 2]))
    assert "label per sample" in agree(tmp_path / "a.npz", IMAGE)["message"]
    np.save(tmp_path / "a.npy", np.full((2, 2), "abc"))
    assert "got <U3 [2, 2]" in agree(tmp_path / "a.npy", IMAGE)["message"]
    np.save(tmp_path / "a.npy", batch(shape=(2, 3, 4, 5)))
    open_size = TensorSpec("image", "float32", (2, 3, "h", "w"))
    np.save(tmp_path / "b.npy", batch(shape=(1, 3, 4, 6)))
    (tmp_path / "l.txt").write_text("b.npy\na.npy\n")
    assert "one shape" in agree(tmp_path / "l.txt", open_size)["message"]


def damaged(good, rng):
    """One file with a few bytes changed, cut or put in, most of them in its header."""
    data = bytearray(good)
    for _ in range(rng.integers(1, 4)):
        position = int(rng.integers(0, min(len(data), 160) if rng.random() < 0.8 else len(data)))
        kind = rng.integers(0, 4)
        if kind == 0:
            data[position] = int(rng.integers(0, 256))
        elif kind == 1:
            data[position] = b"0123456789(),'<>|fiu "[rng.integers(0, 21)]
        elif kind == 2:
            del data[position : position + int(rng.integers(1, 9))]
        else:
            data[position:position] = bytes(rng.integers(0, 256, int(rng.integers(1, 5)), np.uint8))
    return bytes(data)


def test_damaged_files_agree_or_are_refused(cpp, tmp_path):
    np.save(tmp_path / "a.npy", batch())
    np.savez(tmp_path / "b.npz", image=batch())
    rng = np.random.default_rng(5)
    for name in ("a.npy", "b.npz"):
        good = (tmp_path / name).read_bytes()
        for _ in range(100):
            (tmp_path / name).write_bytes(damaged(good, rng))
            answer = theirs(cpp, tmp_path / "out.f", tmp_path / name, [IMAGE])
            if "error" in answer[0]:
                assert answer[0]["error"] == "FeedError"
                continue
            our_answer = ours(tmp_path / name, [IMAGE])
            # an archive says some things twice, and not all of them are looked at by both
            assert answer == our_answer or (name != "a.npy" and "error" in our_answer[0])


def test_headers_larger_than_files_are_refused(agree, cpp, tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, batch())
    good = path.read_bytes()
    for wrong in (b"(9, 3, 4, 5)", b"(4, 3, 4, 5" + b"0" * 17 + b")", b"(4,-3, 4, 5)"):
        longer = len(wrong) - len(b"(4, 3, 4, 5)")
        head = good[:128].replace(b"(4, 3, 4, 5)", wrong).replace(b" " * longer + b"\n", b"\n")
        path.write_bytes(head + good[128:])
        answer, _ = theirs(cpp, tmp_path / "out.f", path, [IMAGE])
        assert answer["message"].startswith(f"{path} cannot be read ")
        assert ours(path, [IMAGE])[0]["error"] == answer["error"]
