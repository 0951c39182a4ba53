"""Publish the files of a build together or not at all, also a cache with its sidecar files.

::

    out/.calib8-k3v9/            all files are written here, locked by the running process
         |  publishing.json      list of the files: the commit point
         v  one rename per file, while `out` is locked
    out/model.int8.onnx ...      files to ship or to read
    out/calib8/model.cache ...   records: what the next build reuses and `verify` checks

A run killed before the commit point leaves the old files; after it, the next run renames the rest.
If a run fails after its calibration was complete, the calibration is moved to a folder
``.calib8-kept`` beside its final path, for the next run.

A folder may come from somebody else. Only real folders of this user with that prefix are taken for
stages, so a link that is called so leads nowhere.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from deploy.errors import ExportError, Terminated
from deploy.files import atomic
from deploy.files.guard import refuse_output
from deploy.files.manifest import RECORDS, is_build_name
from deploy.files.reading import read_json

_JOURNAL = "publishing.json"
_SAVED_FOLDER = f"{atomic.PREFIX}kept"
_TENSORRT_CACHE_SUFFIX = ".gpu.cache"  # suffix of TensorRT's own cache, which has no statistics


class Stage:
    """The temporary folder in which the files of one folder are written until published.

    Attributes:
        folder: where the files will be published.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._temporary_folder: Path | None = None
        self._created_folders: list[Path] = []
        self._handle = -1

    @property
    def temporary_folder(self) -> Path:
        """The temporary folder, created on first use.

        Raises:
            ExportError: it cannot be created.
        """
        if self._temporary_folder is None:
            self._temporary_folder = self._create_temporary_folder()
        return self._temporary_folder

    @property
    def records(self) -> Path:
        """The temporary folder of the files that are published in the subfolder `calib8`.

        Raises:
            ExportError: it cannot be created.
        """
        folder = self.temporary_folder / RECORDS
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def has_files(self) -> bool:
        """Whether any file may have been written."""
        return self._temporary_folder is not None

    def published_path(self, path: Path) -> Path:
        """Return the published path of a staged file; any other path unchanged."""
        if self._temporary_folder is None or self._temporary_folder not in path.parents:
            return path
        return self.folder / path.relative_to(self._temporary_folder)

    def staged_path(self, path: Path) -> Path | None:
        """Return where a file that will be published as `path` is staged; None if it is not."""
        parent = path.parent.resolve()
        if parent == (self.folder / RECORDS).resolve():
            return self.records / path.name
        return self.temporary_folder / path.name if parent == self.folder.resolve() else None

    def publish(self, write_last_files: Callable[[], object] = lambda: None) -> None:
        """Move the written files into `folder`, replacing those of the same names.

        The journal, a list of the files, is written first: if this run is killed then, the next run
        moves the rest.

        Args:
            write_last_files: writes into `temporary_folder` the files whose content depends on
                those in `folder`; called while other runs are locked out of `folder`.

        Raises:
            ExportError: a file would replace an input, a folder or a device, or the disk refuses.
        """
        try:
            with atomic.lock_folder(self.folder):
                write_last_files()
                names = self.file_names()
                if (self.folder / RECORDS).is_symlink():
                    raise ExportError(
                        f"{self.folder / RECORDS} must be a folder, got a symbolic link; remove it,"
                        " or give another --out"
                    )
                for name in names:
                    refuse_output(self.folder / name)
                atomic.write_text(self.temporary_folder / _JOURNAL, json.dumps(names))
                _move_all(self.temporary_folder, self.folder)
                # one of the files may be a cache. An earlier run that failed may have saved its
                # calibration for it, which is of no use now that the cache is written
                for name in names:
                    _remove_saved_calibration(self.folder / name)
        except OSError as error:
            raise ExportError(
                f"{self.folder} must take the files of the run, got: {error.strerror or error};"
                " the next run into it finishes the publication"
            ) from error

    def file_names(self) -> list[str]:
        """Return the names of the files written, those of records as `calib8/name`."""
        stage = self.temporary_folder
        paths = [*stage.iterdir(), *(stage / RECORDS).glob("*")]
        return sorted(
            path.relative_to(stage).as_posix()
            for path in paths
            if path.is_file() and not path.name.startswith(atomic.PREFIX)  # it is complete
        )

    def discard(self, names: Iterable[str]) -> None:
        """Remove the written files of these names; a complete calibration stays."""
        saved_names = chain.from_iterable(_find_calibrations(self.temporary_folder))
        for name in set(names).intersection(self.file_names()).difference(saved_names):
            (self.temporary_folder / name).unlink()

    def close(self) -> None:
        """Remove the temporary folder; keep a complete calibration for the next run."""
        if self._temporary_folder is None:
            return
        with suppress(OSError, ExportError), atomic.lock_folder(self.folder):
            _finish_stage(self._temporary_folder, self.folder)
        os.close(self._handle)
        for folder in self._created_folders:  # folders of a run that wrote nothing
            with suppress(OSError):
                folder.rmdir()

    def _create_temporary_folder(self) -> Path:
        """Finish what killed runs left in the folder; return a new temporary folder in it.

        Until its handle is closed, other processes take the temporary folder for one in use.
        """
        try:
            # folders that this run makes; they are removed again if nothing is published
            self._created_folders = [
                folder for folder in (self.folder, *self.folder.parents) if not folder.exists()
            ]
            self.folder.mkdir(parents=True, exist_ok=True)
            recover(self.folder)
            self._handle, temporary_folder = atomic.create_claimed_folder(
                self.folder, prefix=atomic.PREFIX
            )
        except OSError as error:
            raise ExportError(
                f"{self.folder} must be a folder to write to, got: {error.strerror or error}; give"
                " another --out"
            ) from error
        return temporary_folder


@contextmanager
def stage_files(folder: Path) -> Iterator[Stage]:
    """Yield a stage for the files of a folder; files not published at the end are removed."""
    stage = Stage(folder)
    try:
        yield stage
    except (KeyboardInterrupt, Terminated) as interruption:  # tell the user what is saved
        if stage.has_files and any(_find_calibrations(stage.temporary_folder)):
            note = f"the calibration is kept for the next build into {folder}"
            interruption.args = (*interruption.args, note)
        raise
    finally:
        stage.close()


def recover(folder: Path) -> None:
    """Complete the publication of runs that were killed in it; remove what other killed runs left.

    A killed run leaves its stage, a temporary folder in `folder`, and temporary files in `folder`
    or its subfolder of records; their names begin with `atomic.PREFIX`.

    Raises:
        ExportError: another process holds the folder.
    """
    folders = [folder]
    if atomic.is_real_folder(folder / RECORDS):
        folders.append(folder / RECORDS)
    leftovers = chain.from_iterable(parent.glob(f"{atomic.PREFIX}*") for parent in folders)
    # a calibration that a failed run saved stays; without other leftovers nothing is to be done
    if all(path.name == _SAVED_FOLDER for path in leftovers):
        return
    with suppress(OSError), atomic.lock_folder(folder):  # a read-only folder stays as it is
        for parent in folders:
            atomic.remove_leftovers(parent)
        for stage in _find_dead_stages(folder):
            _finish_stage(stage, folder)


def has_unfinished_publication(folder: Path) -> bool:
    """Whether a run was killed while it moved its files into this folder; nothing is changed."""
    return any((stage / _JOURNAL).exists() for stage in _find_dead_stages(folder))


def saved_calibration_path(cache: Path) -> Path:
    """Return where a failed run's calibration for this cache is kept; it may not exist."""
    return cache.parent / _SAVED_FOLDER / cache.name


def find_saved_calibration(cache: Path) -> Path | None:
    """Return the calibration that a failed run of this user kept for this cache, if it exists."""
    saved_cache = saved_calibration_path(cache)
    is_there = atomic.is_real_folder(saved_cache.parent) and saved_cache.exists()
    return saved_cache if is_there else None


def _remove_saved_calibration(cache: Path) -> None:
    """Remove a failed run's calibration for a cache that is published now."""
    saved_cache = find_saved_calibration(cache)
    if saved_cache is not None:
        saved_cache.unlink()
        with suppress(OSError):  # it holds another model's calibration too
            saved_cache.parent.rmdir()


def _find_dead_stages(folder: Path) -> list[Path]:
    """Return the stages of runs of this user that ended without cleaning up."""
    paths = folder.glob(f"{atomic.PREFIX}*")
    stages = [path for path in paths if path.name != _SAVED_FOLDER and path.is_dir()]
    own_stages = filter(atomic.belongs_to_user, stages)
    return sorted(path for path in own_stages if not atomic.is_claimed(path))


def _finish_stage(stage: Path, folder: Path) -> None:
    """Publish what was committed, keep a complete calibration, remove everything else."""
    if (stage / _JOURNAL).exists():
        _move_all(stage, folder)
    else:
        for names in _find_calibrations(stage):
            for name in names:
                saved_path = saved_calibration_path(folder / name)
                # the folder of the cache, which is `folder` or its subfolder, and the one in it
                _make_folder(saved_path.parent.parent, folder)
                _make_folder(saved_path.parent, folder)
                (stage / name).replace(saved_path)
    shutil.rmtree(stage, ignore_errors=True)


def _move_all(stage: Path, folder: Path) -> None:
    """Move the files listed in a stage's journal into `folder`, and remove the journal."""
    journal = read_json(
        stage / _JOURNAL,
        what="the list of what a run publishes",
        error=ExportError,
        rewritable=True,
    )
    # only names that a build gives its files, since anybody may have written the journal
    entries = journal if isinstance(journal, list) else []
    names = [name for name in entries if isinstance(name, str) and is_build_name(name)]
    for name in names:
        source = stage / name
        target = folder / name
        if not atomic.is_real_file(source):  # moved by an earlier run, or a link
            continue
        _make_folder(target.parent, folder)
        if target.exists():  # its permissions stay
            shutil.copymode(target, source)
        source.replace(target)
    for parent in {(folder / name).parent for name in names}:
        atomic.flush_folder(parent)
    (stage / _JOURNAL).unlink()


def _make_folder(path: Path, top: Path) -> None:
    """Make a folder below `top` unless it is there.

    Raises:
        FileExistsError: it is a file or a link, which may lead out of `top`.
    """
    if path != top and not atomic.is_real_folder(path):
        path.mkdir()


def _find_calibrations(stage: Path) -> Iterator[list[str]]:
    """Yield the names of the files of each complete calibration in a stage."""
    for sidecar in [*stage.glob("*.json"), *stage.glob(f"{RECORDS}/*.json")]:
        cache = sidecar.relative_to(stage).as_posix().removesuffix(".json")
        names = [cache, f"{cache}.json"]
        if not cache.endswith(_TENSORRT_CACHE_SUFFIX):  # the statistics are moved first
            names.insert(0, f"{cache}.npz")
        if all(atomic.is_real_file(stage / name) for name in names):
            yield names
