"""Files that appear together or not at all: a build, or a cache with what stands beside it.

::

    out/.calib8-k3v9/            all of it is written here, held by a lock of the living process
         |  publishing.json      the list of them: the commit point
         v  one rename a file, while `out` is locked
    out/model.int8.onnx ...

Killed before the commit point a run leaves what was there before it, after it the next run renames
the rest. A calibration that was whole before a run failed is kept in ``out/.calib8-kept`` until
the next one takes it up.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deploy.errors import ExportError
from deploy.files import atomic
from deploy.files.reading import read_json, refuse

_JOURNAL = "publishing.json"
_KEPT = f"{atomic.PREFIX}kept"
_CACHE = (".npz", "", ".json")  # endings of the three files of a cache, the last one written last
_GPU = ".gpu.cache"  # ends the name of TensorRT's own, which has no statistics


class Stage:
    """Where the files of one folder are written until they are published.

    Attributes:
        folder: where they will be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._inside: Path | None = None
        self._made: list[Path] = []
        self._handle = -1

    @property
    def inside(self) -> Path:
        """The folder to write to, made when it is first asked for.

        Raises:
            ExportError: it cannot be made.
        """
        if self._inside is None:
            self._inside = self._begun()
        return self._inside

    @property
    def begun(self) -> bool:
        """Whether anything may have been written."""
        return self._inside is not None

    def final(self, path: Path) -> Path:
        """Where a file will be that was written; any other path as it is."""
        return self.folder / path.name if path.parent == self._inside else path

    def publish(self, complete: Callable[[], object] = lambda: None) -> None:
        """Let the files appear, in place of those that were there under the same names.

        Args:
            complete: called when nobody else can change the folder any more; what it writes
                appears too.

        Raises:
            ExportError: one would replace an input, a folder or a device, or the disk refuses.
        """
        try:
            with atomic.alone(self.folder):
                complete()
                names = self.names()
                for name in names:
                    refuse(self.folder / name)
                atomic.write_text(self.inside / _JOURNAL, json.dumps(names))
                _move_all(self.inside, self.folder)
                _forget_kept(self.folder, names)
        except OSError as error:
            raise ExportError(
                f"{self.folder} must take the files of the run, got: {error.strerror or error};"
                " the next run into it goes on where this one stopped"
            ) from error

    def names(self) -> list[str]:
        """Names of the files that were written."""
        paths = self.inside.iterdir()
        return sorted(p.name for p in paths if p.is_file() and not p.name.startswith(atomic.PREFIX))

    def holds_calibration(self) -> bool:
        """Whether there is a whole one, which outlives a run that does not end."""
        return self._inside is not None and any(_calibrations(self._inside))

    def end(self) -> None:
        """Leave nothing behind but what was published, and a calibration that is whole."""
        if self._inside is None:
            return
        with suppress(OSError, ExportError), atomic.alone(self.folder):
            _settled(self._inside, self.folder)
        os.close(self._handle)
        for folder in self._made:  # nothing was written: neither is the folder
            with suppress(OSError):
                folder.rmdir()

    def _begun(self) -> Path:
        try:
            self._made = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            recover(self.folder)
            self._handle, inside = atomic.claimed_folder(self.folder, prefix=atomic.PREFIX)
        except OSError as error:
            raise ExportError(
                f"{self.folder} must be a folder to write to, got: {error.strerror or error}; give"
                " another --out"
            ) from error
        return inside


@contextmanager
def staged(folder: Path) -> Iterator[Stage]:
    """A stage for the files of a folder; what is not published when it ends is gone."""
    stage = Stage(folder)
    try:
        yield stage
    except Exception:
        raise
    except BaseException as ended:  # of the user, who is told what need not be done again
        if stage.holds_calibration():
            ended.args = (*ended.args, f"the calibration is kept for the next build into {folder}")
        raise
    finally:
        stage.end()


def recover(folder: Path) -> None:
    """Finish, or clean up after, runs that were killed while they wrote to the folder.

    Raises:
        ExportError: another process holds it.
    """
    if not any(path.name != _KEPT for path in folder.glob(f"{atomic.PREFIX}*")):
        return
    with suppress(OSError), atomic.alone(folder):  # where it cannot be written to, it stays
        atomic.remove_leftovers(folder)
        for stage in sorted(folder.glob(f"{atomic.PREFIX}*")):
            if stage.is_dir() and stage.name != _KEPT and not atomic.claimed(stage):
                _settled(stage, folder)


def kept(cache: Path) -> Path:
    """Where the calibration of a run that did not end stands, if there is one for this cache."""
    return cache.parent / _KEPT / cache.name


def _settled(stage: Path, folder: Path) -> None:
    """Publish the rest of what was committed, keep a whole calibration, remove the others."""
    if (stage / _JOURNAL).exists():
        _move_all(stage, folder)
    else:
        _keep(stage, folder)
    shutil.rmtree(stage, ignore_errors=True)


def _move_all(stage: Path, folder: Path) -> None:
    """Rename what the journal lists; once more where the system refused once."""
    names = _listed(stage / _JOURNAL)
    try:
        _move(names, stage, folder)
    except OSError:
        _move(names, stage, folder)
    (stage / _JOURNAL).unlink()


def _listed(journal: Path) -> list[str]:
    """Names in a journal; anybody may have put it there, so that none leads out of the folder."""
    listed = read_json(
        journal, what="the list of what a run publishes", error=ExportError, own=True
    )
    names = listed if isinstance(listed, list) else []
    return [n for n in names if isinstance(n, str) and n and n != ".." and Path(n).name == n]


def _move(names: Iterable[str], stage: Path, folder: Path) -> None:
    for name in names:
        source, goal = stage / name, folder / name
        if not source.exists():  # moved before
            continue
        if _same(source, goal):
            source.unlink()
            continue
        source.chmod(atomic.mode_at(goal))
        source.replace(goal)
    atomic.flush_names(folder)


def _same(source: Path, goal: Path) -> bool:
    """Whether the file is there already, byte for byte; it then stays as old as it is."""
    if not goal.is_file() or goal.stat().st_size != source.stat().st_size:
        return False
    return goal.read_bytes() == source.read_bytes()


def _keep(stage: Path, folder: Path) -> None:
    """Move a calibration whose last file was written out of a stage that was not published."""
    for names in _calibrations(stage):
        (folder / _KEPT).mkdir(exist_ok=True)
        for name in names:
            (stage / name).replace(folder / _KEPT / name)


def _calibrations(stage: Path) -> Iterator[list[str]]:
    """Names of the files of each whole calibration in a stage."""
    for last in list(stage.glob(f"*{_CACHE[-1]}")):
        stem = last.name.removesuffix(_CACHE[-1])
        names = [f"{stem}{ending}" for ending in (_CACHE[1:] if stem.endswith(_GPU) else _CACHE)]
        if all((stage / name).exists() for name in names):
            yield names


def _forget_kept(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / _KEPT / name).unlink(missing_ok=True)
    with suppress(OSError):  # not there, or of another model
        (folder / _KEPT).rmdir()
