"""Pictures are decoded by several threads; what comes of them is that of one."""

import threading

import cv2
import numpy as np
import pytest

from deploy.errors import FeedError
from deploy.feed import reader
from deploy.feed.feed import open_feed
from deploy.feed.listing import Changed
from deploy.feed.parallel import ahead
from deploy.tensors import TensorSpec

INPUT = (TensorSpec("x", "float32", (1, 3, 16, 16)),)


@pytest.fixture
def folder(tmp_path):
    made = np.random.default_rng(2)
    for number in range(24):
        pixels = made.integers(0, 256, (16 + number, 20, 3), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / f"{number:02}.png"), pixels)
    return tmp_path


def threads(monkeypatch, count):
    monkeypatch.setattr(reader, "default_threads", lambda: count)


def samples(folder, **options):
    feed = open_feed(folder, INPUT, **options)
    with feed.samples() as stream:
        return feed, [sample["x"] for sample in stream]


def test_results_come_in_the_items_order_and_few_are_ahead():
    begun, gate = [], threading.Event()

    def work(item):
        begun.append(item)
        assert item or gate.wait(300)  # the first is the last to be done
        return item * 10

    def items():
        for item in range(20):
            if item == 3:
                assert sorted(begun) <= [0, 1, 2]
                gate.set()
            yield item

    assert list(ahead(items(), work, threads=4)) == [(n, n * 10) for n in range(20)]


def test_leaving_early_ends_the_threads():
    before = threading.enumerate()
    made = ahead(range(1000), lambda item: item, threads=3)
    assert next(made) == (0, 0)
    made.close()
    assert not {one.name for one in threading.enumerate() if one not in before}


def test_threads_that_meet_are_needed(monkeypatch, folder):
    threads(monkeypatch, 3)
    meeting, fetched = threading.Barrier(3), reader._fetched

    def met(source, index):
        meeting.wait(300)  # nobody goes on before three are there
        return fetched(source, index)

    monkeypatch.setattr(reader, "_fetched", met)
    assert len(samples(folder)[1]) == 24


def test_any_number_of_threads_gives_the_same(monkeypatch, folder):
    (folder / "05.png").write_bytes(b"no picture")
    found = []
    for count in (1, 2, 4):
        threads(monkeypatch, count)
        feed, arrays = samples(folder, skip_bad=True)
        found.append((feed.manifest(), feed.notes, feed.decodes, [a.tobytes() for a in arrays]))
    assert found[0] == found[1] == found[2] and found[0][2] == 23


def test_a_bad_picture_is_told_in_its_turn(monkeypatch, folder):
    threads(monkeypatch, 4)
    for name in ("07.png", "06.png"):
        (folder / name).write_bytes(b"no picture")
    with pytest.raises(FeedError, match=r"06\.png"):
        samples(folder)


def test_a_picture_that_changed_is_told_though_it_is_none_any_more(monkeypatch, folder):
    threads(monkeypatch, 4)
    feed = open_feed(folder, INPUT, skip_bad=True)
    feed.manifest()
    (folder / "20.png").write_bytes(b"no picture")
    with pytest.raises(Changed, match=r"20\.png"), feed.samples() as stream:
        list(stream)
