"""Names, inodes and digests of very many images, in about the bytes that they have."""

import gc
import tracemalloc
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy import calibrate
from deploy.calibration import one_pass
from deploy.errors import ExportError
from deploy.feed.listing import Listing, Picture, Seen
from deploy.feed.sampling import names_digest
from deploy.files.reading import are_read, guarded, refuse

MOST = 130  # bytes an image, of which the name has 12; half a kilobyte and more were taken once

names = st.lists(st.text(st.characters(), max_size=12), max_size=9)


@given(names, st.booleans())
def test_a_listing_is_the_files_that_it_was_given(given_names, labelled):
    labels = [number * 7 for number in range(len(given_names))] if labelled else None
    listing = Listing("there", given_names, labels)
    wanted = [
        Picture(Path("there") / name, name, None if labels is None else labels[number])
        for number, name in enumerate(given_names)
    ]
    assert list(listing) == wanted and len(listing) == len(wanted) and listing[1:] == wanted[1:]
    assert listing.labels == (tuple(labels) if labels else None if given_names else ())
    if wanted:
        assert listing[-1] == wanted[-1] and listing.path(0) == wanted[0].path


def test_a_name_that_is_no_text_comes_back():
    odd = [b"\xff\xfe.png".decode(errors="surrogateescape"), "\ud800", "/whole/path.png", ""]
    listing = Listing("there", odd)
    assert [listing.name(k) for k in range(4)] == odd and str(listing.path(2)) == odd[2]
    with pytest.raises(IndexError):
        listing[4]


def test_one_label_that_lacks_is_none_of_all():
    listing = Listing("", ["a", "b"], [3, 4])
    assert listing.labels == (3, 4)
    listing.add("c")
    assert listing.labels is None and listing[2].label is None


def test_digests_are_combined_in_their_order_and_sorted():
    """As hashing them one behind the other gave, so that a cache stays fitting."""
    import hashlib

    digests = [hashlib.sha256(bytes([n])).digest() for n in range(40)]
    digests[7] = digests[7][:-1] + b"\0"  # what numpy's strings leave out at the end
    seen, order = Seen(60), [3, 7, 0, 39, 12]
    for number, digest in enumerate(digests):
        seen.note(number, digest, "it")
    for by_size, wanted in ((False, list), (True, sorted)):
        own = b"".join(wanted(digests[n] for n in order))
        assert seen.combined(order, by_size=by_size) == hashlib.sha256(own).hexdigest()
    assert list(seen.hex(order)) == [digests[n].hex() for n in order]
    assert 39 in seen and 40 not in seen


def test_names_have_one_digest_however_they_are_joined():
    import hashlib

    listed = ["a/b.png", "c.png", "b\udcff.png"]
    text = "b.png\nc.png\nb\udcff.png".encode(errors="surrogateescape")
    assert names_digest(iter(listed)) == hashlib.sha256(text).hexdigest()


def test_of_many_inputs_none_is_written_and_a_lost_one_is_none(tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    for path in paths[:4]:
        path.write_bytes(b"x")
    with guarded():
        with guarded():
            are_read(5, paths.__getitem__)
        (tmp_path / "link").hardlink_to(paths[2])
        for path in (paths[0], paths[3], tmp_path / "link"):
            with pytest.raises(ExportError, match="must not be an input"):
                refuse(path)
        refuse(paths[4])
        (tmp_path / "moved").hardlink_to(paths[1])
        paths[1].unlink()
        refuse(tmp_path / "moved")  # no input leads to it any more
    refuse(paths[0])


def held(model, listing, monkeypatch):
    """Bytes that Python holds at the end of the pass over the images of a list."""
    found = []
    whole = one_pass._Pass.whole

    def looked(self):
        gc.collect()
        traces = tracemalloc.take_snapshot().traces
        # the table of interned strings, which now and then is made anew as a whole
        found.append(sum(t.size for t in traces if "pathlib" not in str(t) or t.size < 1 << 17))
        return whole(self)

    with monkeypatch.context() as patched:
        patched.setattr(one_pass._Pass, "whole", looked)
        tracemalloc.start()
        try:
            calibrate(model, listing, threads=1)
        finally:
            tracemalloc.stop()
    return found[0]


@pytest.mark.slow
def test_memory_hardly_grows_with_the_images(small_cnn, tmp_path, monkeypatch):
    few, many = 100, 700
    rng = np.random.default_rng(0)
    for number in range(8):
        made = rng.integers(0, 255, (16, 16, 3), np.uint8)
        cv2.imwrite(str(tmp_path / f"{number}.png"), made)
    for number in range(many):
        (tmp_path / f"{number:08}.png").hardlink_to(tmp_path / f"{number % 8}.png")
    lists = []
    for count in (few, many):
        lists.append(tmp_path / f"{count}.txt")
        lists[-1].write_text("".join(f"{number:08}.png\n" for number in range(count)))
    held(small_cnn, lists[0], monkeypatch)  # what is imported and cached but once
    less, more = (held(small_cnn, one, monkeypatch) for one in lists)
    assert (more - less) / (many - few) < MOST
