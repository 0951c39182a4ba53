"""The files that a path stands for: a folder's, a list's, a pattern's, a COCO json's, or one.

Files without a header whose shape and dtype the user says: arrays, or pictures of uint8.

::

    float32 1x3x224x224 -> an input of that shape        as an .npy file of it
    float16 3x224x224   -> one of float32                widened, as that loses nothing
    uint8 480x640x3     -> one of float32                a picture, preprocessed as an image file
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.feed.array_files import is_arrays, is_raw
from deploy.feed.arrays import ArraySource, rows
from deploy.feed.images import is_image, is_other, kinds, read_list, shown, summary, walked
from deploy.feed.listing import Listing, Raw
from deploy.feed.loaders import channels
from deploy.feed.pixels import apply
from deploy.feed.preprocess import Preprocess, describe
from deploy.feed.sources import is_video
from deploy.files.reading import read_json
from deploy.tensors import Array, TensorSpec

_IN_PATTERNS = frozenset("*?[")
_SOURCES = "a folder of images or arrays, a list file, a pattern such as 'photos/*.jpg', or a file"


@dataclass(frozen=True, slots=True)
class Files:
    """Pictures, or files of arrays.

    Attributes:
        files: in the order in which they are fed.
        name: of all of them, in messages.
        folder: that they were found in, where one was given.
        notes: what the user should know.
    """

    files: Listing
    name: str
    folder: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def arrays(self) -> bool:
        """Whether they hold arrays.

        Raises:
            FeedError: some do, some are pictures.
        """
        held = [one.name for one in self.files if is_arrays(one.path)]
        if held and len(held) < len(self.files):
            raise FeedError(
                f"{self.name} must be of images or of arrays, got {len(held)} of"
                f" {len(self.files)} with arrays: {summary(held)}; leave one kind away"
            )
        return bool(held)


def files_of(path: Path) -> Files:
    """What the path stands for.

    Raises:
        FeedError: nothing, or a list that is amiss.
    """
    if path.is_dir():
        return _in_folder(path)
    if not path.exists():
        if _IN_PATTERNS & set(str(path)):
            return _matching(path)
        raise FeedError(f"{shown(str(path))} does not exist; give {_SOURCES}")
    if is_image(path) or is_arrays(path) or is_video(path):
        return Files(Listing(path.parent, [path.name]), shown(path.name))
    if is_other(path):
        raise FeedError(
            f"{shown(path.name)} is a picture of a kind that is not read; save it as .jpg or .png"
        )
    if path.suffix.lower() == ".json":
        return _in_coco(path)
    return Files(read_list(path), shown(str(path)))


def labelled(files: Files) -> Files:
    """The same, the number of its folder, by name, as the label of each file.

    As torchvision's ImageFolder numbers them: folders sorted by name, from 0.

    Raises:
        FeedError: no folder was given, a file stands in none of its folders, or there is but one.
    """
    tops = [one.name.partition("/")[0] if "/" in one.name else "" for one in files.files]
    classes = sorted(set(tops))
    if files.folder is None or "" in classes or len(classes) < 2:
        loose = sum(not top for top in tops)
        raise FeedError(
            f"labels by folder need a folder of one folder a class, got {files.name} with"
            f" {len(set(tops) - {''})} folders and {loose} files in none; give a list file with"
            " labels, or --labels FILE"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    names = (one.name for one in files.files)
    own = Listing(files.folder, names, map(numbers.__getitem__, tops))
    note = f"labels by folder: {len(classes)} classes, 0 is {shown(classes[0])}"
    return replace(files, files=own, notes=(*files.notes, note))


def listed(paths: Sequence[object]) -> Files | None:
    """A list that is of paths and nothing else; None where it is another."""
    if not paths or not all(isinstance(one, str | os.PathLike) for one in paths):
        return None
    named = (str(Path(one)) for one in paths if isinstance(one, str | os.PathLike))
    return Files(Listing("", named), "the list")


def _in_folder(folder: Path) -> Files:
    names = walked(folder, lambda name: is_image(name) or is_arrays(name) or is_other(name))
    others = [name for name in names if is_other(name)]
    names = [name for name in names if not is_other(name)]
    if not names:
        way = "give another folder or a list file"
        raise FeedError(
            f"{shown(str(folder))} must hold images (such as .jpg, .png) or arrays (.npy, .npz,"
            f" .bin, .raw), got {_unread(others) if others else f'none; {way}'}"
        )
    pictures = [name for name in names if is_image(name)]
    left = len(names) - len(pictures)
    notes = [f"{left} files of arrays among the images of {shown(folder.name)} are not fed"]
    notes = notes if pictures and left else []
    if others:
        notes.append(f"in {shown(folder.name)} are {_unread(others)}")
    return Files(
        Listing(folder, pictures or names),
        shown(folder.name or str(folder)),
        folder,
        tuple(notes),
    )


def _unread(names: Sequence[str]) -> str:
    """Pictures that are left out, and how to feed them."""
    count = "1 picture" if len(names) == 1 else f"{len(names)} pictures"
    return f"{count} of kinds that are not read ({kinds(names)}); save them as .jpg or .png"


def _matching(pattern: Path) -> Files:
    found = sorted(glob.iglob(str(pattern), recursive=True), key=os.fsencode)
    kept = [name for name in found if is_image(name) or is_arrays(name)]
    if not kept:
        raise FeedError(
            f"the pattern {shown(str(pattern))} must match images or arrays, got none of"
            f" {len(found)} files; ** stands for any folders"
        )
    return Files(Listing("", kept), shown(str(pattern)))


def _in_coco(path: Path) -> Files:
    """The pictures that a COCO json names, beside it or in a folder `images` there."""
    data = read_json(path, what="COCO annotations", error=FeedError)
    images = data.get("images") if isinstance(data, dict) else None
    given = [one.get("file_name") for one in images or () if isinstance(one, dict)]
    names = [name for name in given if isinstance(name, str) and name and "\0" not in name]
    if not names or len(names) < len(given):
        raise FeedError(
            f"{shown(str(path))} must be COCO annotations with `images` that have a `file_name`,"
            " got others; give a folder or a list file"
        )
    inside = path.parent / "images"
    base = inside if (inside / names[0]).exists() else path.parent
    return Files(Listing(base, names), shown(str(path)))


DTYPES = (
    *("float32", "float16", "float64", "uint8", "int8"),
    *("int16", "uint16", "int32", "uint32", "int64", "uint64"),
)
_MOST_DIMS = 8


@dataclass(frozen=True, slots=True)
class RawFiles:
    """A folder, pattern, list or file of `.bin` or `.raw`, and what its bytes are.

    Attributes:
        path: of it.
        shape: of what a file holds, or of each sample of several in one file, with or without the
            batch; None for the input's own. Of pictures [H, W, 3] (red, green, blue), [H, W, 1] or
            [H, W].
        dtype: numpy's name of it, little-endian; None for the input's own. uint8 for an input of
            another one are pictures.

    Raises:
        ConfigError: a shape or a dtype that is none.
    """

    path: str | os.PathLike[str]
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        shape = self.shape
        if shape is not None and not (
            1 <= len(shape) <= _MOST_DIMS
            and all(isinstance(side, int) and 0 < side < 1 << 31 for side in shape)
        ):
            raise ConfigError(
                f"a raw shape must be of 1 to {_MOST_DIMS} sides from 1, got {list(shape)}; give"
                " that of a sample, such as 1x3x224x224"
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"a raw dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    def __str__(self) -> str:
        return os.fspath(self.path)

    def pictures(self, spec: TensorSpec, *, asked: bool) -> bool:
        """Whether they are pictures for this input; `asked`: preprocessing is asked for."""
        return self.dtype == "uint8" and (asked or spec.dtype != "uint8")

    def held(self, spec: TensorSpec) -> TensorSpec:
        """What a file holds for this input: its dtype, and a sample's whole shape behind a batch.

        Raises:
            FeedError: the input leaves its shape open, and none is said.
        """
        shape = spec.shape if self.shape is None else self.shape
        shape = shape[1:] if len(shape) == len(spec.shape) else shape
        if not all(isinstance(side, int) for side in shape):
            raise FeedError(
                f"values without a header need a shape where the input {describe(spec)} leaves it"
                " open; say it (--raw-shape), or write .npy files, which say theirs"
            )
        return TensorSpec(spec.name, self.dtype or spec.dtype, (None, *shape))


def alike(raw: RawFiles, path: str) -> RawFiles | str:
    """Another path in the same form, where it is of raw files too; else as it is."""
    try:
        files = files_of(Path(path)).files
    except FeedError:  # whoever opens it says so
        return path
    return replace(raw, path=path) if all(is_raw(one.path) for one in files) else path


def refuse_others(files: Files) -> None:
    """Refuse a shape and a dtype for files that say theirs.

    Raises:
        ConfigError: one of the files is no raw one.
    """
    others = [one.name for one in files.files if not is_raw(one.path)]
    if others:
        raise ConfigError(
            "a raw shape and dtype are of .bin and .raw files, got"
            f" {summary(others, 2)} in {files.name}, which say theirs; leave them away"
        )


@dataclass(frozen=True)
class Formed:
    """Samples of raw files, each made an input.

    Attributes:
        source: of the values as they stand in the files, [1, ...] each.
        name: of the input.
        make: the values of a sample -> the input's array.
    """

    source: ArraySource
    name: str
    make: Callable[[Array], Array]

    @property
    def labels(self) -> tuple[int, ...] | None:
        """As of the files."""
        return self.source.labels

    def __len__(self) -> int:
        return len(self.source)

    def sample_name(self, index: int) -> str:
        """As of the files."""
        return self.source.sample_name(index)

    def told(self, index: int) -> str:
        """As of the files."""
        return self.source.told(index)

    def load(self, index: int) -> Raw:
        """The values, hashed, and what makes an input of them."""
        raw = self.source.load(index)
        return Raw(raw.digest, lambda: {self.name: self.make(raw.decode()[self.name])})


def as_arrays(source: ArraySource, spec: TensorSpec) -> Formed:
    """Samples that are arrays of the input; floats or integers of fewer bits are widened.

    Raises:
        FeedError: their shape or dtype is not the input's.
    """
    (held,) = source.specs
    ours, wanted = np.dtype(held.dtype), np.dtype(spec.dtype)
    widened = wanted if ours.kind == wanted.kind and np.can_cast(ours, wanted) else ours
    example = np.broadcast_to(np.zeros((), widened), (1, *_inner(held)))
    rows({spec.name: example}, (spec,), f"each sample of {source.name}")
    return Formed(source, spec.name, lambda values: values.astype(wanted, copy=False))


def as_pictures(source: ArraySource, spec: TensorSpec, how: Preprocess) -> Formed:
    """Samples that are pictures, preprocessed; `how` must be resolved.

    Raises:
        FeedError: their shape is that of no picture.
    """
    shape = _inner(source.specs[0])
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3)):
        raise FeedError(
            "raw pictures must be of the shape HxWx3, HxWx1 or HxW, got"
            f" {'x'.join(map(str, shape))} in {source.name}; say that of one (--raw-shape)"
        )

    def make(values: Array) -> Array:
        picture = channels(values.reshape(shape), how, source.name)
        return apply(picture, how).astype(spec.dtype, copy=False)

    return Formed(source, spec.name, make)


def _inner(held: TensorSpec) -> tuple[int, ...]:
    return tuple(side for side in held.shape[1:] if isinstance(side, int))
