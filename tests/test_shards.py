"""Shards: parts of a calibration that are observed apart and merged to the bytes of one run."""

import itertools
import json
import shutil
import zipfile
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrators.statistics import HistogramOf
from deploy.calibration import shards
from deploy.calibration.store import files
from deploy.feed.sampling import Choice

TARGETS = ("--target", "onnxruntime,tensorrt", "--trt-version", "8.6.1")


def contents(cache: Path) -> list[bytes]:
    return [path.read_bytes() for path in files(cache)]


@pytest.fixture(scope="module")
def odd_pictures(pictures, tmp_path_factory) -> Path:
    """20 pictures, one of which outshines the others, in odd places of a folder."""
    folder = tmp_path_factory.mktemp("odd") / "pictures"
    shutil.copytree(pictures, folder)
    for path in folder.iterdir():
        cv2.imwrite(str(path), cv2.imread(str(path)) // 16)
    cv2.imwrite(str(folder / "07.png"), np.full((18, 20, 3), 255, np.uint8))
    return folder


@pytest.fixture
def shard(run, small_cnn, pictures, tmp_path):
    """(number, of, *words) -> the file of a shard."""

    def made(number, of, *words, model=small_cnn, images=pictures, name=None):
        path = tmp_path / (name or f"{number}-{of}.shard")
        code, _, err = run(
            "calibrate", model, "--images", images, "--shard", f"{number}/{of}", "-o", path, *words
        )
        assert code == 0, err
        return path

    return made


def test_shards_in_any_order_merge_to_the_bytes_of_one_run(
    run, shard, small_cnn, pictures, tmp_path
):
    whole = tmp_path / "whole.cache"
    run("calibrate", small_cnn, "--images", pictures, *TARGETS, "-o", whole)
    parts = [shard(number, 3, *TARGETS) for number in (1, 2, 3)]
    for order in itertools.permutations(parts):
        merged = tmp_path / "merged.cache"
        code, out, err = run("merge", small_cnn, *order, *TARGETS, "-o", merged, "--refresh")
        assert code == 0, err
        assert "of 20 images" in out
        assert contents(merged) == contents(whole)


def test_a_merged_cache_is_used_by_build_without_observing(
    run, shard, small_cnn, pictures, tmp_path
):
    parts = [shard(number, 2) for number in (1, 2)]
    run("merge", small_cnn, *parts, "-o", tmp_path / "m.cache")
    code, _, err = run(
        "build", small_cnn, "--images", pictures, "--cache", tmp_path / "m.cache",
        "--require-cache", "--effort", 0, "--duration", 0, "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0, err


def test_what_stands_out_is_told_of_shards_as_of_one_run(
    run, shard, small_cnn, odd_pictures, tmp_path
):
    words = ("--limit", 18)
    run("calibrate", small_cnn, "--images", odd_pictures, *words, "-o", tmp_path / "w.cache")
    assert json.loads((tmp_path / "w.cache.json").read_text())["outliers"]
    parts = [shard(number, 4, *words, images=odd_pictures) for number in (3, 1, 4, 2)]
    code, out, _ = run("merge", small_cnn, *parts, "-o", tmp_path / "m.cache")
    assert code == 0
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "w.cache")
    assert "stands far above the others" in out


def test_a_picture_that_is_skipped_is_skipped_in_its_shard(
    run, shard, small_cnn, pictures, tmp_path
):
    folder = tmp_path / "bad"
    shutil.copytree(pictures, folder)
    (folder / "04.png").write_bytes(b"no picture")
    run("calibrate", small_cnn, "--images", folder, "--skip-bad", "-o", tmp_path / "w.cache")
    parts = [shard(number, 3, "--skip-bad", images=folder) for number in (1, 2, 3)]
    code, out, err = run("merge", small_cnn, *parts, "-o", tmp_path / "m.cache")
    assert code == 0, err
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "w.cache")
    assert "of 19 images" in out and "1 skipped" in out


def test_only_the_pictures_of_the_shard_must_be_there(run, shard, small_cnn, pictures, tmp_path):
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"{path}\n" for path in sorted(pictures.iterdir())) + "gone.png\n")
    shard(2, 3, images=listed)  # gone.png is the 21st, of 3/3
    code, _, err = run(
        "calibrate", small_cnn, "--images", listed, "--shard", "3/3", "-o", tmp_path / "3.shard"
    )
    assert code == 1 and "gone.png" in err


def test_a_missing_shard_is_named(run, shard, small_cnn, tmp_path):
    code, _, err = run("merge", small_cnn, shard(2, 4), shard(3, 4), "-o", tmp_path / "m.cache")
    assert code == 1 and "got 2 of 4; missing: 1/4, 4/4" in err
    assert not (tmp_path / "m.cache").exists()


def test_a_shard_that_is_given_twice_is_named(run, shard, small_cnn, tmp_path):
    one, again = shard(1, 2), shard(1, 2, name="again.shard")
    code, _, err = run("merge", small_cnn, one, again, "-o", tmp_path / "m.cache")
    assert code == 1 and "got 1/2 twice" in err and "again.shard" in err


def test_shards_of_other_numbers_do_not_fit(run, shard, small_cnn, tmp_path):
    code, _, err = run("merge", small_cnn, shard(1, 2), shard(2, 3), "-o", tmp_path / "m.cache")
    assert code == 1 and "1/2" in err and "2/3" in err


def other_images(shard, pictures, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(pictures, folder)
    (folder / "19.png").rename(folder / "99.png")
    return shard(2, 2, images=folder), "the images changed (names)"


def fewer_images(shard, pictures, tmp_path):
    return shard(2, 2, "--limit", 10), "count 20 -> 10"


def other_preprocessing(shard, pictures, tmp_path):
    return shard(2, 2, "--preprocess", "imagenet"), "the preprocessing changed"


def other_model(shard, pictures, tmp_path):
    from tests.conftest import save_small_cnn

    path = save_small_cnn(tmp_path / "small_cnn.onnx")
    model = onnx.load(path)
    model.graph.initializer[0].float_data[:] = []
    values = onnx.numpy_helper.to_array(model.graph.initializer[0]) * 2
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(values, "w1"))
    onnx.save(model, path)
    return shard(2, 2, model=path), "the model (weights or graph) changed"


@pytest.mark.parametrize("how", [other_images, fewer_images, other_preprocessing, other_model])
def test_a_foreign_shard_is_named_with_what_differs(how, run, shard, small_cnn, pictures, tmp_path):
    path, said = how(shard, pictures, tmp_path)
    foreign = path.rename(tmp_path / "foreign.shard")
    code, _, err = run("merge", small_cnn, shard(1, 2), foreign, "-o", tmp_path / "m.cache")
    assert code == 1
    assert "foreign.shard" in err, err
    changed = said.replace("20 -> 10", "10 -> 20")  # whichever is taken for the first one
    assert said in err or changed in err, err


def test_a_shard_for_other_targets_is_named(run, shard, small_cnn, tmp_path):
    parts = [shard(number, 2, "--keep-float", "Conv_c1") for number in (1, 2)]
    code, _, err = run("merge", small_cnn, *parts, "-o", tmp_path / "m.cache")
    assert code == 1 and "1-2.shard lacks" in err and "merge for the targets" in err
    code, _, err = run(
        "merge", small_cnn, *parts, "--keep-float", "Conv_c1", "-o", tmp_path / "m.cache"
    )
    assert code == 0, err


def test_what_goes_by_the_order_is_refused_before_anything_is_run(
    run, small_cnn, pictures, tmp_path
):
    words = ("calibrate", small_cnn, "--images", pictures, "--shard", "1/2", "-o", tmp_path / "s")
    for more, said in (
        (("--target", "ascend"), "ifmr histogram"),
        (("--target", "tensorrt", "--method", "entropy-tensorrt"), "first batch of"),
    ):
        code, _, err = run(*words, *more)
        assert code == 1 and said in err and "in one run" in err
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3/2", "i from 1 to n"),
        ("0/2", "i from 1 to n"),
        ("two", "must read I/N"),
        ("1/", "must read I/N"),
        ("-1/2", "must read I/N"),
        ("21/40", "every shard must have a sample, got 40 shards of 20"),
    ],
)
def test_a_shard_that_is_none_is_a_sentence(text, said, run, small_cnn, pictures, tmp_path):
    code, _, err = run(
        "calibrate", small_cnn, "--images", pictures, f"--shard={text}", "-o", tmp_path / "s"
    )
    assert code == 1 and said in err


@pytest.mark.parametrize("flag", ["--refresh", "--require-cache", "--trust-cache"])
def test_flags_of_a_cache_are_not_ignored(flag, run, small_cnn, pictures, tmp_path):
    code, _, err = run(
        "calibrate", small_cnn, "--images", pictures, "--shard", "1/2", flag, "-o", tmp_path / "s"
    )
    assert code == 1 and flag in err


def test_merging_and_trusting_exclude_each_other(run, shard, small_cnn, tmp_path):
    code, _, err = run("merge", small_cnn, shard(1, 1), "--trust-cache", "-o", tmp_path / "m")
    assert code == 1 and "--trust-cache" in err


def test_a_model_with_a_fixed_batch_has_no_shards(run, small_cnn, pictures, tmp_path):
    model = onnx.load(small_cnn)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(model, tmp_path / "four.onnx")
    code, _, err = run(
        "calibrate", tmp_path / "four.onnx", "--images", pictures, "--shard", "1/2",
        "-o", tmp_path / "s",
    )  # fmt: skip
    assert code == 1 and "fixed batch of 4" in err


def test_a_shard_replaces_a_shard_and_nothing_else(run, shard, small_cnn, pictures, tmp_path):
    first = shard(1, 2).read_bytes()
    assert shard(1, 2).read_bytes() == first  # over itself, the same bytes
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    words = ("calibrate", small_cnn, "--images", pictures, "--shard", "1/2", "-o", notes)
    code, _, err = run(*words)
    assert code == 1 and "what calib8 did not write" in err and notes.read_text() == "mine"
    assert run(*words, "--force")[0] == 0 and notes.read_bytes() == first


def test_a_shard_is_called_after_its_model(run, small_cnn, pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("calibrate", small_cnn, "--images", pictures, "--shard", "2/3")[0] == 0
    assert (tmp_path / "small_cnn.2-of-3.shard").exists()


def rezipped(path: Path, change) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def more_samples(members):
    document = json.loads(members["shard.json"])
    document["digests"] += document["digests"]
    members["shard.json"] = json.dumps(document).encode()


def no_statistics(members):
    del members["statistics.npz"]


def other_statistics(members):
    members["statistics.npz"] += b" "


def no_json(members):
    members["shard.json"] = b"[" * 100_000


def restamped(members, change):
    """In earnest: with the digest that belongs to it."""
    document = json.loads(members["shard.json"])
    change(document)
    document["sha256"] = shards._digest(document)
    members["shard.json"] = json.dumps(document).encode()


def peaks_of_others(members):
    restamped(members, lambda document: document["peaks"][0][3].append([1.0, 99]))


def other_peaks(members):
    restamped(members, lambda document: document["peaks"].append([{}, [], "x"]))


def no_kind(members):
    restamped(members, lambda document: document["made_from"]["made_from"]["images"].pop("kind"))


@pytest.mark.parametrize(
    "change",
    [
        more_samples,
        no_statistics,
        other_statistics,
        no_json,
        peaks_of_others,
        other_peaks,
        no_kind,
    ],
)
def test_a_broken_shard_is_a_sentence(change, run, shard, small_cnn, tmp_path):
    path = shard(1, 1)
    rezipped(path, change)
    code, _, err = run("merge", small_cnn, path, "-o", tmp_path / "m.cache")
    assert code == 1 and str(path) in err
    assert not (tmp_path / "m.cache").exists()


@settings(max_examples=200)
@given(data=st.binary(max_size=400), place=st.integers(0, 10**6))
def test_no_change_of_a_shard_passes(data, place, changed_shard):
    changed_shard(data, place)


@pytest.fixture(scope="module")
def changed_shard(small_cnn, pictures, tmp_path_factory):
    """(bytes, place) -> writes them over a shard there, and reads it: equal, or a sentence."""
    from deploy import calibrate
    from deploy.calibration.shards import keep_shard
    from deploy.errors import CacheError

    path = tmp_path_factory.mktemp("changed") / "one.shard"
    keep_shard(calibrate(small_cnn, pictures, limit=Choice(most=2, shard=(1, 2))), path)
    whole = path.read_bytes()
    sound = shards.load(path)

    def check(data, place):
        at = place % len(whole)
        path.write_bytes(whole[:at] + data + whole[at + len(data) :])
        try:
            found = shards.load(path)
        except CacheError:
            return
        assert (found.share, found.made_from, found.digests) == (
            sound.share, sound.made_from, sound.digests,
        )  # fmt: skip

    return check


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 5))
def test_shards_share_the_choice_out(count, of, every):
    from deploy.feed.sampling import share_of

    places, _ = Choice(every=every).of(count)
    if of > len(places):
        return
    shares = [share_of((number, of), len(places), "") for number in range(1, of + 1)]
    taken = [place for share in shares for place in share.places]
    assert sorted(taken) == list(range(len(places)))
    assert max(len(s.places) for s in shares) - min(len(s.places) for s in shares) <= 1


@pytest.mark.parametrize("count", [1, 2])
def test_from_python(small_cnn, pictures, tmp_path, count):
    from deploy import calibrate, merge
    from deploy.calibration.shards import keep_shard

    paths = [tmp_path / f"{number}.shard" for number in range(count)]
    for number, path in enumerate(paths, 1):
        keep_shard(calibrate(small_cnn, pictures, limit=Choice(shard=(number, count))), path)
    merged = merge(small_cnn, paths)
    whole = calibrate(small_cnn, pictures)
    assert merged.found.scales == whole.found.scales
    assert not merged.runs and merged.feed.manifest() == whole.feed.manifest()
    assert HistogramOf().key in {key[2] for key in merged.ranges.observed}
