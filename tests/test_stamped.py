import json

import pytest

from deploy.errors import CacheError
from deploy.files.manifest import fitting, keep, note_of, read_stamped, sha256

MADE_FROM = {"model": "a", "batch": 8, "shape": (1, 3)}


def test_the_note_holds_what_the_file_was_made_from_and_its_digest(tmp_path):
    path = keep(tmp_path / "m.engine", b"plan", MADE_FROM, digest="engine_sha256")
    note = json.loads(note_of(path).read_text())
    assert note_of(path).name == "m.engine.json"
    assert note == {"model": "a", "batch": 8, "shape": [1, 3], "engine_sha256": sha256(b"plan")}
    assert fitting(path, MADE_FROM, digest="engine_sha256") == b"plan"
    assert fitting(path, MADE_FROM) is None


@pytest.mark.parametrize("change", [{"model": "b"}, {"batch": 4}, {"more": 1}])
def test_a_file_made_from_something_else_does_not_fit(tmp_path, change):
    path = keep(tmp_path / "m", b"data", MADE_FROM)
    assert fitting(path, MADE_FROM) == b"data"
    assert fitting(path, MADE_FROM | change) is None
    assert read_stamped(path) == (b"data", {"model": "a", "batch": 8, "shape": [1, 3]})


def test_what_was_changed_or_parted_since_is_not_believed(tmp_path):
    path = tmp_path / "m"
    assert fitting(path, MADE_FROM) is None
    keep(path, b"data", MADE_FROM)
    path.write_bytes(b"more data")
    with pytest.raises(CacheError, match="as it was written"):
        read_stamped(path)
    for note in ("{", "[]", "{}", "\udcff"):
        note_of(path).write_bytes(note.encode("utf-8", "surrogateescape"))
        assert fitting(path, MADE_FROM) is None
    keep(path, b"data", MADE_FROM)
    note_of(path).unlink()
    with pytest.raises(CacheError, match="must be the note of m, got nothing there"):
        read_stamped(path)
