"""Resolve a path to files (a folder, list, pattern, COCO json or single file), and open raw files.

Raw files have no header: the user gives their shape and dtype. They hold arrays or uint8 images::

    float32 1x3x224x224 -> an input of that shape    like an .npy file
    float16 3x224x224   -> a float32 input           widened, which loses nothing
    uint8 480x640x3     -> a float32 input           an image, preprocessed like an image file
"""

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.feed.array_files import is_array_file, is_raw_file
from deploy.feed.arrays import ArraySource, Item, conversion_notes, count_samples, fit_array
from deploy.feed.file_list import FileList
from deploy.feed.images import (
    is_image,
    is_unsupported_image,
    join_suffixes,
    printable_name,
    read_list,
    summarize_names,
    walk_files,
)
from deploy.feed.loaders import to_opencv_channels
from deploy.feed.pixels import preprocess_image
from deploy.feed.preprocess import Preprocess, describe
from deploy.feed.sources import is_video
from deploy.files.reading import read_json
from deploy.tensors import TensorSpec

_IN_PATTERNS = frozenset("*?[")
_SOURCES = "a folder of images or arrays, a list file, a pattern such as 'photos/*.jpg', or a file"


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """Image files, or files of arrays.

    Attributes:
        files: in the order in which they are fed.
        name: of all of them, in messages.
        folder: that holds them; None if the source was no folder.
    """

    files: FileList
    name: str
    folder: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def are_arrays(self) -> bool:
        """Whether the files hold arrays.

        Raises:
            FeedError: some hold arrays and some are images.
        """
        with_arrays = [one.name for one in self.files if is_array_file(one.path)]
        if with_arrays and len(with_arrays) < len(self.files):
            raise FeedError(
                f"{self.name} must be of images or of arrays, got {len(with_arrays)} of"
                f" {len(self.files)} with arrays: {summarize_names(with_arrays)}; leave one kind"
                " out"
            )
        return bool(with_arrays)


def resolve_files(path: Path) -> SourceFiles:
    """Return the files that `path` resolves to.

    Raises:
        FeedError: the path does not exist, or the list is invalid.
    """
    if path.is_dir():
        return _in_folder(path)
    if not path.exists():
        if _IN_PATTERNS & set(str(path)):
            names = sorted(glob.iglob(str(path), recursive=True), key=os.fsencode)
            usable = [name for name in names if is_image(name) or is_array_file(name)]
            if not usable:
                raise FeedError(
                    f"the pattern {printable_name(str(path))} must match images or arrays, got none"
                    f" of {len(names)} files; ** stands for any folders"
                )
            return SourceFiles(FileList("", usable), printable_name(str(path)))
        raise FeedError(f"{printable_name(str(path))} does not exist; give {_SOURCES}")
    if is_image(path) or is_array_file(path) or is_video(path):
        return SourceFiles(FileList(path.parent, [path.name]), printable_name(path.name))
    if is_unsupported_image(path):
        raise FeedError(
            f"{printable_name(path.name)} is an image in an unsupported format; save it as .jpg"
            " or .png"
        )
    if path.suffix.lower() == ".json":
        data = read_json(path, what="COCO annotations", error=FeedError)
        images = data.get("images") if isinstance(data, dict) else None
        file_names = [one.get("file_name") for one in images or () if isinstance(one, dict)]
        names = [name for name in file_names if isinstance(name, str) and name and "\0" not in name]
        if not names or len(names) < len(file_names):
            raise FeedError(
                f"{printable_name(str(path))} must be COCO annotations with `images` that have a"
                " `file_name`, got others; give a folder or a list file"
            )
        inside = path.parent / "images"
        base = inside if (inside / names[0]).exists() else path.parent
        return SourceFiles(FileList(base, names), printable_name(str(path)))
    return SourceFiles(read_list(path), printable_name(str(path)))


def label_by_folder(files: SourceFiles) -> SourceFiles:
    """Label each file with the number of its folder: sorted by name, from 0.

    torchvision's ImageFolder numbers folders in the same way.

    Raises:
        FeedError: the source is no folder, a file is in no subfolder, or there is only one.
    """
    tops = [one.name.partition("/")[0] if "/" in one.name else "" for one in files.files]
    classes = sorted(set(tops))
    if files.folder is None or "" in classes or len(classes) < 2:
        loose = sum(not top for top in tops)
        raise FeedError(
            f"labels by folder need one folder per class, got {files.name} with"
            f" {len(set(tops) - {''})} folders and {loose} files in none; give a list file with"
            " labels, or --labels FILE"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    names = (one.name for one in files.files)
    listing = FileList(files.folder, names, map(numbers.__getitem__, tops))
    note = f"labels by folder: {len(classes)} classes, 0 is {printable_name(classes[0])}"
    return replace(files, files=listing, notes=(*files.notes, note))


def resolve_path_list(paths: Sequence[object]) -> SourceFiles | None:
    """Return the files of a list of paths; None for a list of anything else."""
    if not paths or not all(isinstance(one, str | os.PathLike) for one in paths):
        return None
    named = (str(Path(one)) for one in paths if isinstance(one, str | os.PathLike))
    return SourceFiles(FileList("", named), "the list")


def _in_folder(folder: Path) -> SourceFiles:
    names = walk_files(
        folder, lambda name: is_image(name) or is_array_file(name) or is_unsupported_image(name)
    )
    others = [name for name in names if is_unsupported_image(name)]
    names = [n for n in names if not (is_unsupported_image(n) or _is_of_a_cache(folder / n))]
    if not names:
        way = "give another folder or a list file"
        raise FeedError(
            f"{printable_name(str(folder))} must hold images (such as .jpg, .png) or arrays (.npy,"
            f" .npz, .bin, .raw), got {_unsupported(others) if others else f'none; {way}'}"
        )
    pictures = [name for name in names if is_image(name)]
    left = len(names) - len(pictures)
    notes = [
        f"{left} files of arrays among the images of {printable_name(folder.name)} are not fed"
    ]
    notes = notes if pictures and left else []
    if others:
        notes.append(f"in {printable_name(folder.name)} are {_unsupported(others)}")
    return SourceFiles(
        FileList(folder, pictures or names),
        printable_name(folder.name or str(folder)),
        folder,
        tuple(notes),
    )


def _is_of_a_cache(path: Path) -> bool:
    """Whether a file has the statistics of a cache `X`: it is `X.npz` beside `X` and `X.json`."""
    cache = path.with_suffix("")
    return path.suffix == ".npz" and all(Path(f"{cache}{end}").is_file() for end in ("", ".json"))


def _unsupported(names: Sequence[str]) -> str:
    """Describe images in unsupported formats, and how to feed them."""
    count = "1 picture" if len(names) == 1 else f"{len(names)} pictures"
    return f"{count} in unsupported formats ({join_suffixes(names)}); save them as .jpg or .png"


DTYPES = (
    *("float32", "float16", "float64", "uint8", "int8"),
    *("int16", "uint16", "int32", "uint32", "int64", "uint64"),
)
_MOST_DIMS = 8


@dataclass(frozen=True, slots=True)
class RawFiles:
    """A folder, pattern, list or file of `.bin` or `.raw`, with the shape and dtype of its values.

    Attributes:
        path: of the files.
        shape: of one sample, with or without the batch (a file may hold several); None for the
            input's shape. Images are [H, W, 3] RGB, [H, W, 1] or [H, W].
        dtype: a numpy name, little-endian; None for the input's dtype. uint8 values for an input
            of another dtype are images.

    Raises:
        ConfigError: an invalid shape or dtype.
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
                f"a raw shape must have 1 to {_MOST_DIMS} sides of 1 or more, got {list(shape)};"
                " give the shape of a sample, such as 1x3x224x224"
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"a raw dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    def __str__(self) -> str:
        return os.fspath(self.path)

    def are_images(self, spec: TensorSpec, *, asked: bool) -> bool:
        """Return whether the files are images for this input; `asked`: preprocessing is given."""
        return self.dtype == "uint8" and (asked or spec.dtype != "uint8")

    def file_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return dtype and shape of a file's values: an open batch, then the shape of a sample.

        Raises:
            FeedError: the input's shape is open, and the user gives no shape.
        """
        shape = spec.shape if self.shape is None else self.shape
        shape = shape[1:] if len(shape) == len(spec.shape) else shape
        if not all(isinstance(side, int) for side in shape):
            raise FeedError(
                f"files without a header need a shape, since the input {describe(spec)} leaves it"
                " open; give it (--raw-shape), or write .npy files, which store theirs"
            )
        return TensorSpec(spec.name, self.dtype or spec.dtype, (None, *shape))


def with_same_format(raw: RawFiles, path: str) -> RawFiles | str:
    """Return another path with the same shape and dtype if it has raw files; else the path."""
    try:
        files = resolve_files(Path(path)).files
    except FeedError:  # opening the path will report the error
        return path
    return replace(raw, path=path) if all(is_raw_file(one.path) for one in files) else path


def refuse_files_with_header(files: SourceFiles) -> None:
    """Refuse a raw shape and dtype for files with a header.

    Raises:
        ConfigError: a file is neither .bin nor .raw.
    """
    others = [one.name for one in files.files if not is_raw_file(one.path)]
    if others:
        raise ConfigError(
            "a raw shape and dtype apply to .bin and .raw files, got"
            f" {summarize_names(others, 2)} in {files.name}, which have their own; leave them out"
        )


def convert_arrays(source: ArraySource, spec: TensorSpec) -> ArraySource:
    """Convert samples to the input's dtype, see `fit_array`.

    Raises:
        FeedError: the shape or dtype does not fit the input.
    """
    (file_spec,) = source.specs
    example = np.broadcast_to(np.zeros((), file_spec.dtype), (1, *_sample_shape(file_spec)))
    item = {spec.name: example}
    count_samples(item, (spec,), f"each sample of {source.name}")
    return replace(
        source,
        notes=(*source.notes, *conversion_notes(item, (spec,))),
        convert=lambda one: {spec.name: fit_array(one[spec.name], spec)},
    )


def convert_images(source: ArraySource, spec: TensorSpec, how: Preprocess) -> ArraySource:
    """Preprocess samples that are images; `how` must be resolved.

    Raises:
        FeedError: the shape is not that of an image.
    """
    shape = _sample_shape(source.specs[0])
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3)):
        raise FeedError(
            "raw pictures must be of the shape HxWx3, HxWx1 or HxW, got"
            f" {'x'.join(map(str, shape))} in {source.name}; give the shape of one (--raw-shape)"
        )

    def make(one: Item) -> Item:
        picture = to_opencv_channels(one[spec.name].reshape(shape), how, source.name)
        return {spec.name: preprocess_image(picture, how).astype(spec.dtype, copy=False)}

    return replace(source, convert=make)


def _sample_shape(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(side for side in spec.shape[1:] if isinstance(side, int))
