"""What was hashed is what was used: images read once, and the same whenever they are read again."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

import deploy.feed.feed
import deploy.pipeline
import deploy.pipeline.calibrating
import deploy.pipeline.observing
from deploy.calibration import fingerprint
from deploy.calibration.observation import Subject
from deploy.calibration.reuse import CachePolicy
from deploy.calibration.store import sidecars
from deploy.errors import FeedError, ModelError
from deploy.feed import images, pixels
from deploy.feed.feed import open_feed
from deploy.feed.listing import Changed
from deploy.feed.preprocess import Preprocess
from deploy.frontends import load
from deploy.pipeline import build, calibrate
from deploy.targets.ascend.target import Ascend
from deploy.tensors import TensorSpec
from deploy.tuning.search_options import Tuning

UNIT = Preprocess(size=(16, 16))
IMAGE = TensorSpec("x", "float32", ("n", 3, 16, 16))
ROWS = np.random.default_rng(3).standard_normal((20, 3, 16, 16)).astype(np.float32)


@pytest.fixture
def photos(pictures, tmp_path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(pictures, tmp_path / "photos"))


@pytest.fixture
def reads(monkeypatch) -> Counter:
    """File name -> how often it was read."""
    counted: Counter[str] = Counter()
    own = images.read

    def read(picture):
        counted[picture.path.name] += 1
        return own(picture)

    monkeypatch.setattr(images, "read", read)
    return counted


def swap(folder: Path, name: str = "11.png") -> None:
    """Another picture under the name of one."""
    shutil.copy(folder / "00.png", folder / name)


def between(monkeypatch, module, function: str, act) -> None:
    """Do something before a step of the line."""
    own = getattr(module, function)

    def step(*given, **named):
        act()
        return own(*given, **named)

    monkeypatch.setattr(module, function, step)


# ---- read once ------------------------------------------------------------------------------


def test_where_no_cache_is_judged_each_image_is_read_once(small_cnn, photos, tmp_path, reads):
    cache = tmp_path / "c"
    calibrate(small_cnn, photos, preprocess=UNIT, cache=cache)
    assert len(reads) == 20 and set(reads.values()) == {1}
    made = [p.read_bytes() for p in (cache, *sidecars(cache))]
    reads.clear()
    calibrate(small_cnn, photos, preprocess=UNIT, cache=CachePolicy(path=cache, refresh=True))
    assert len(reads) == 20 and set(reads.values()) == {1}
    assert made == [p.read_bytes() for p in (cache, *sidecars(cache))]
    reads.clear()
    assert calibrate(small_cnn, photos, preprocess=UNIT, cache=cache).reused
    assert len(reads) == 20 and sum(reads.values()) == 24  # for their digests, and four to look at


def test_a_whole_build_reads_each_image_once(small_cnn, photos, tmp_path, reads):
    build(small_cnn, photos, preprocess=UNIT, out=tmp_path / "o", duration_s=0)
    assert len(reads) == 20 and set(reads.values()) == {1}


def test_digests_of_the_pass_are_those_of_a_reading_beforehand(photos):
    early, late = (open_feed(photos, [IMAGE], preprocess=UNIT) for _ in range(2))
    before = early.manifest()
    with late.samples() as samples:
        assert len(list(samples)) == 20
    assert late.manifest() == before


# ---- changed meanwhile ----------------------------------------------------------------------

CHANGED = r"11\.png changed while calib8 ran.*run again"


def test_an_image_changed_between_hashing_and_decoding_is_told(photos):
    feed = open_feed(photos, [IMAGE], preprocess=UNIT)
    feed.manifest()
    swap(photos)
    with pytest.raises(FeedError, match="image " + CHANGED), feed.samples() as samples:
        list(samples)


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_second_pass_over_another_image_is_told(photos, skip_bad):
    feed = open_feed(photos, [IMAGE], preprocess=UNIT, skip_bad=skip_bad)
    with feed.samples() as samples:
        list(samples)
    (photos / "11.png").write_bytes(b"no picture")
    with pytest.raises(FeedError, match=CHANGED), feed.samples() as samples:
        list(samples)
    (photos / "11.png").unlink()
    with pytest.raises(FeedError, match=CHANGED):
        list(feed.spread(20))


def test_what_was_skipped_stays_skipped(photos):
    good = (photos / "11.png").read_bytes()
    (photos / "11.png").write_bytes(b"no picture")
    feed = open_feed(photos, [IMAGE], preprocess=UNIT, skip_bad=True)
    for _ in range(2):
        with feed.samples() as samples:
            assert len(list(samples)) == len(feed.names) == 19
        (photos / "11.png").write_bytes(good)
    (photos / "11.png").write_bytes(b"another one")
    other = open_feed(photos, [IMAGE], preprocess=UNIT, skip_bad=True)
    assert other.manifest()["sha256"] != feed.manifest()["sha256"]  # counts by its bytes


def test_a_cache_made_of_one_image_never_serves_another(small_cnn, photos, tmp_path, monkeypatch):
    cache = tmp_path / "c"
    calibrate(small_cnn, photos, preprocess=UNIT, cache=cache)
    between(monkeypatch, deploy.pipeline.observing, "_completed", lambda: swap(photos))
    with pytest.raises(FeedError, match=CHANGED):  # hashed to judge the cache, decoded later
        calibrate(
            small_cnn, photos, preprocess=UNIT, cache=cache, method="legacy", targets=["tensorrt"]
        )


def test_evaluation_images_are_held_to_it_too(small_cnn, photos, pictures, tmp_path, monkeypatch):
    feeds = []
    own = deploy.feed.feed.open_feed
    monkeypatch.setattr(
        deploy.feed.feed,
        "open_feed",
        lambda *a, **k: feeds.append(own(*a, **k)) or feeds[-1],
    )
    between(
        monkeypatch, deploy.pipeline, "search_targets", lambda: (feeds[0].manifest(), swap(photos))
    )
    with pytest.raises(FeedError, match=CHANGED):
        build(
            small_cnn, pictures, preprocess=UNIT, out=tmp_path / "o", eval_images=photos,
            duration_s=0, tuning=Tuning(effort=0),
        )  # fmt: skip


def of_changed(*_, **__):
    raise Changed("image 11.png changed while calib8 ran; run again")


def test_the_search_does_not_pass_over_it(small_cnn, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr("deploy.tuning.search_samples.observe", of_changed)
    with pytest.raises(FeedError, match=CHANGED):
        build(small_cnn, pictures, preprocess=UNIT, out=tmp_path / "o", duration_s=0)
    assert not list((tmp_path / "o").glob("*.onnx"))


def test_it_is_no_failure_of_one_target(small_cnn, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(Ascend, "build", of_changed)
    with pytest.raises(FeedError, match=CHANGED):
        build(
            small_cnn, pictures, preprocess=UNIT, out=tmp_path / "o", duration_s=0,
            targets=["onnxruntime", "ascend"], tuning=Tuning(effort=0),
        )  # fmt: skip


def test_arrays_are_copied_and_held_to_it(small_cnn):
    rows = [row.copy() for row in ROWS[:12]]
    feed = open_feed(rows, [IMAGE])
    (first,) = feed.first(1)
    rows[0][...] = 0
    assert np.array_equal(first["x"][0], ROWS[0])
    with feed.samples() as samples:
        list(samples)
    rows[11][...] = 0
    with (
        pytest.raises(FeedError, match="sample 11 of the iterable changed while calib8 ran"),
        feed.samples() as samples,
    ):
        list(samples)


# ---- order, names, folder or list -----------------------------------------------------------


@pytest.fixture
def turned(photos) -> Path:
    """A list of the same pictures under other names, in another order."""
    other = photos.parent / "others"
    other.mkdir()
    for path in photos.iterdir():
        shutil.copy(path, other / f"{99 - int(path.stem)}.png")
    listing = other / "list.txt"
    listing.write_text("".join(f"{p.name}\n" for p in sorted(other.glob("*.png"))))
    return listing


def test_order_names_and_listing_do_not_matter_to_what_has_no_order(
    small_cnn, photos, turned, tmp_path
):
    cache = tmp_path / "c"
    calibrate(small_cnn, photos, preprocess=UNIT, cache=cache)
    made = [p.read_bytes() for p in (cache, *sidecars(cache))]
    again = calibrate(small_cnn, turned, preprocess=UNIT, cache=cache)
    assert again.reused and "are the same" in again.reason
    assert made == [p.read_bytes() for p in (cache, *sidecars(cache))]


def test_what_goes_by_the_order_is_observed_again(small_cnn, photos, turned, tmp_path):
    cache, both = tmp_path / "c", ("onnxruntime", "ascend")
    first = calibrate(small_cnn, photos, preprocess=UNIT, cache=cache, targets=both)
    again = calibrate(small_cnn, turned, preprocess=UNIT, cache=cache, targets=both)
    assert not again.reused and set(again.observed_now) == {
        o for o in first.observations if o.statistic.ordered
    }
    assert "the order of the images" in again.reason
    fresh = calibrate(small_cnn, turned, preprocess=UNIT, cache=tmp_path / "d", targets=both)
    for o in fresh.observations:
        mine, theirs = (c.ranges.observed.of(o).to_arrays() for c in (again, fresh))
        assert all(np.array_equal(mine[key], theirs[key]) for key in theirs), o.key
    assert calibrate(small_cnn, turned, preprocess=UNIT, cache=cache, targets=both).reused


def test_no_observation_of_another_order_is_carried_along(small_cnn, photos, turned, tmp_path):
    cache = tmp_path / "c"
    calibrate(small_cnn, photos, preprocess=UNIT, cache=cache, targets=["ascend"])
    calibrate(small_cnn, photos, preprocess=UNIT, cache=cache)
    rule = {"method": "entropy-tensorrt", "targets": ["onnxruntime"]}
    calibrate(small_cnn, turned, preprocess=UNIT, cache=cache, **rule)  # goes by the new order
    assert calibrate(small_cnn, turned, preprocess=UNIT, cache=cache, **rule).reused
    assert calibrate(small_cnn, photos, preprocess=UNIT, cache=cache).reused  # a plain histogram
    ascend = calibrate(small_cnn, turned, preprocess=UNIT, cache=cache, targets=["ascend"])
    assert not ascend.reused  # kept of the first order alone, so no longer kept
    assert not calibrate(small_cnn, photos, preprocess=UNIT, cache=cache, **rule).reused


def test_a_cache_of_an_older_form_is_told_and_made_anew(small_cnn, photos, tmp_path):
    cache = tmp_path / "c"
    calibrate(small_cnn, photos, preprocess=UNIT, cache=cache)
    side = sidecars(cache)[0]
    document = json.loads(side.read_text())
    document["schema"] = 2
    side.write_text(json.dumps(document))
    again = calibrate(small_cnn, photos, preprocess=UNIT, cache=cache)
    assert not again.reused and "not a fingerprint" in again.reason


def test_another_decoder_is_told_and_arrays_have_none(small_cnn, photos, tmp_path, monkeypatch):
    calibrate(small_cnn, photos, preprocess=UNIT, cache=tmp_path / "p")
    calibrate(small_cnn, list(ROWS), cache=tmp_path / "r")
    monkeypatch.setattr(images.opencv(), "__version__", "9.9.9")  # which gives the same pixels
    again = calibrate(small_cnn, photos, preprocess=UNIT, cache=tmp_path / "p")
    assert again.reused and "decoder OpenCV 5" in again.reason
    other = {**pixels.digests(), "webp": "0" * 16}
    monkeypatch.setattr(pixels, "digests", lambda: other)
    again = calibrate(small_cnn, photos, preprocess=UNIT, cache=tmp_path / "p")
    assert not again.reused and "the decoder changed (" in again.reason and "webp" in again.reason
    monkeypatch.setattr(fingerprint, "DECODING", 99)
    again = calibrate(small_cnn, photos, preprocess=UNIT, cache=tmp_path / "p")
    assert not again.reused and again.reason.endswith("(decoding 1 -> 99)")
    assert calibrate(small_cnn, list(ROWS), cache=tmp_path / "r").reused


# ---- the model ------------------------------------------------------------------------------


def other_weights(path: Path) -> onnx.ModelProto:
    """The model with its weights negated."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = -onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return model


@pytest.fixture(params=["one file", "external data"])
def model(small_cnn, tmp_path, request) -> Path:
    path = tmp_path / "m.onnx"
    if request.param == "one file":
        shutil.copy(small_cnn, path)
    else:
        onnx.save(
            onnx.load(small_cnn), path, save_as_external_data=True, location="m.bin",
            size_threshold=0,
        )  # fmt: skip
    return path


def replaced(path: Path) -> None:
    """Other weights at the same place; the file itself stays where they are beside it."""
    beside = path.with_suffix(".bin")
    graph = path.read_bytes()
    if not beside.exists():
        return onnx.save(other_weights(path), path)
    other = other_weights(path)
    beside.unlink()
    onnx.save(other, path, save_as_external_data=True, location="m.bin", size_threshold=0)
    assert path.read_bytes() == graph
    return None


def test_a_model_replaced_while_it_is_built_is_told(model, pictures, tmp_path, monkeypatch):
    between(monkeypatch, deploy.pipeline, "build_targets", lambda: replaced(model))
    with pytest.raises(ModelError, match=r"m\.onnx changed while calib8 ran.*run again"):
        build(
            model, pictures, preprocess=UNIT, out=tmp_path / "o", duration_s=0,
            tuning=Tuning(effort=0),
        )  # fmt: skip


def test_a_model_replaced_before_it_is_read_unfolded_is_told(model, pictures, monkeypatch):
    between(monkeypatch, deploy.pipeline.calibrating, "_demands", lambda: replaced(model))
    with pytest.raises(ModelError, match="changed while calib8 ran"):
        calibrate(model, pictures, preprocess=UNIT, targets=["tensorrt"], method="legacy")


def test_the_graph_that_names_a_cache_is_the_one_that_was_loaded(small_cnn, tmp_path):
    path = Path(shutil.copy(small_cnn, tmp_path / "m.onnx"))
    before, after = (Subject(loaded=load(path), given=path, samples=1) for _ in range(2))
    assert len(before.original.graph.node) == len(onnx.load(path).graph.node)
    replaced(path)
    with pytest.raises(ModelError, match="changed while calib8 ran"):
        _ = after.original


def test_the_float_model_is_the_file_with_all_its_weights(model, pictures, tmp_path):
    report = build(
        model, pictures, preprocess=UNIT, out=tmp_path / "o", duration_s=0, tuning=Tuning(effort=0)
    )
    reference, engine = report.engines
    assert reference.size_bytes > engine.size_bytes > 0
    assert engine.accuracy.outputs[0].sqnr_db > 20
