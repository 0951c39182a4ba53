"""Resolve a path to files (a folder, list, pattern, COCO json, data.yaml or file), and raw files.

Raw files have no header: the user gives their shape and dtype::

    float32 1x3x224x224 -> an input of that shape    like an .npy file
    float16 3x224x224   -> a float32 input           widened, which loses nothing
"""

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from deploy.errors import ConfigError, FeedError, counted
from deploy.feed.array_files import is_array_file, is_raw_file
from deploy.feed.file_list import FileList
from deploy.feed.images import (
    is_image,
    is_unsupported_image,
    printable_name,
    read_list,
    suffix_of,
    summarize_names,
    walk_files,
)
from deploy.feed.preprocess import describe
from deploy.feed.sources import is_video
from deploy.feed.temporary_arrays import Shape
from deploy.files.reading import convert, read_json, read_yaml
from deploy.tensors import TensorSpec

_WILDCARDS = frozenset("*?[")
_SOURCES = "a folder of images or arrays, a list file, a pattern such as 'photos/*.jpg', or a file"
Split = Literal["train", "val"]


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """Image files, or files of arrays.

    Attributes:
        file_list: the files, in the order in which they are fed.
        name: of all of them, in messages.
        folder: that holds them; None if the source was no folder.
        notes: for the user.
    """

    file_list: FileList
    name: str
    folder: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def are_arrays(self) -> bool:
        """Whether the files hold arrays.

        Raises:
            FeedError: some hold arrays and some are images.
        """
        array_files = list(filter(is_array_file, self.file_list.names))
        if array_files and len(array_files) < len(self.file_list):
            raise FeedError(
                f"{self.name} must be of images or of arrays, got {len(array_files)} of"
                f" {len(self.file_list)} with arrays: {summarize_names(array_files)}; leave one"
                " kind out"
            )
        return bool(array_files)


def resolve_files(path: Path, *, split: Split = "train") -> SourceFiles:
    """Return the files of images, arrays or a video that a path stands for.

    Args:
        path: a folder, a pattern, one of these files, or a file that lists some: a text file, COCO
            annotations, or a data.yaml.
        split: the images of a data.yaml: "train" or "val".

    Raises:
        FeedError: the path does not exist, or the list is invalid.
    """
    title = printable_name(path)
    if path.is_dir():
        return _resolve_folder(path)
    if not path.exists():
        if _WILDCARDS & set(str(path)):
            return _resolve_pattern(path)
        raise FeedError(f"{title} does not exist; give {_SOURCES}")
    if is_image(path) or is_array_file(path) or is_video(path):
        return SourceFiles(FileList(path.parent, [path.name]), printable_name(path.name))
    if is_unsupported_image(path):
        raise FeedError(
            f"{printable_name(path.name)} is an image in an unsupported format; save it as .jpg"
            " or .png"
        )
    if suffix_of(path) == ".json":
        return SourceFiles(_read_coco_files(path), title)
    if is_data_yaml(path):
        return SourceFiles(_list_yaml_images(path, split), f"{split} of {title}")
    return SourceFiles(read_list(path), title)


def _resolve_pattern(pattern: Path) -> SourceFiles:
    """Return the images and files of arrays that a pattern matches.

    Raises:
        FeedError: there are none.
    """
    title = printable_name(pattern)
    names = sorted(glob.iglob(str(pattern), recursive=True), key=os.fsencode)
    usable_names = [name for name in names if is_image(name) or is_array_file(name)]
    if not usable_names:
        raise FeedError(
            f"the pattern {title} must match images or arrays, got none of"
            f" {counted(len(names), 'file')}; ** stands for any folders"
        )
    return SourceFiles(FileList("", usable_names), title)


@dataclass(frozen=True, slots=True)
class _CocoFileName:
    file_name: str


@dataclass(frozen=True, slots=True)
class _CocoFileNames:
    images: list[_CocoFileName]


def _read_coco_files(path: Path) -> FileList:
    """Return the images that COCO annotations list, by their names in the file.

    They are in the folder `images` beside the annotations if the first one is there, else directly
    beside the annotations.
    """
    values = read_json(path, what="COCO annotations", error=FeedError)
    rule = f"{printable_name(path)} must be COCO annotations with `images` that have a `file_name`"
    way_out = "give a folder or a list file"
    data = convert(values, _CocoFileNames, rule=rule, error=FeedError, way_out=way_out)
    names = [image.file_name for image in data.images]
    if not names or not all(map(_is_file_name, names)):
        raise FeedError(f"{rule}, got none or no name of a file; {way_out}")
    folder = path.parent
    if (folder / "images" / names[0]).exists():
        folder = folder / "images"
    return FileList(folder, names)


def _is_file_name(value: str) -> bool:
    """Return whether a text of a JSON or YAML file can be the name of a file."""
    if not value or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def is_data_yaml(path: Path | str) -> bool:
    """Return whether the suffix is that of a data set's description, as Ultralytics reads it."""
    return suffix_of(path) in (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataYaml:
    """Ultralytics' description of a data set.

    Attributes:
        path: root of the images, relative to the file or to the working folder; None for the file's
            folder.
        train: folders or list files of images, relative to the root.
        val: likewise.
        names: class names, in order or by number.
        nc: number of classes.
        kpt_shape: shape of an object's key points; None without key points.

    Source: docs.ultralytics.com, datasets/detect; `check_det_dataset` of its data/utils.py.
    """

    path: str | None = None
    train: str | list[str] | None = None
    val: str | list[str] | None = None
    names: list[str] | dict[str, str] = field(default_factory=list)
    nc: int | None = None
    kpt_shape: Any = None

    @property
    def class_count(self) -> int | None:
        """Number of classes; None if the file does not say it."""
        return self.nc or len(self.names) or None


def read_data_yaml(path: Path) -> DataYaml:
    """Return the contents of a data.yaml.

    Raises:
        FeedError: it cannot be read, or has other values.
    """
    what = "a data.yaml of Ultralytics with `train`, `val` and `names`"
    values = read_yaml(path, what=what, error=FeedError)
    rule = f"{printable_name(path)} must be {what}"
    return convert(values, DataYaml, rule=rule, error=FeedError, strict=False)


def _list_yaml_images(path: Path, split: Split) -> FileList:
    """Return the images of "train" or "val" that a data.yaml names, by paths relative to it."""
    data = read_data_yaml(path)
    image_sources = data.train if split == "train" else data.val
    if isinstance(image_sources, str):
        image_sources = [image_sources] if image_sources else []
    if not image_sources:
        raise FeedError(
            f"{printable_name(path)} must say where the images of `{split}` are, got no"
            f" `{split}`; add it, or give a folder or a list file"
        )
    files = FileList(path.parent)
    for source in image_sources:
        source_path = _locate_yaml_images(path, data.path or "", source)
        for file in resolve_files(source_path).file_list:
            files.add(os.path.relpath(file.path, path.parent))
    return files


def _locate_yaml_images(path: Path, root: str, source: str) -> Path:
    """Return the path of a folder or list file of images that a data.yaml names.

    As Ultralytics does, a `../` at its beginning is dropped if the images are there only then.

    Args:
        path: of the data.yaml.
        root: its `path`: the folder of the images, relative to the file or the working folder.
        source: the folder or list file, relative to the root.

    Raises:
        FeedError: there is no such folder or list file.
    """
    # a text of a YAML file may be no path at all: the system would raise other errors for it
    if _is_file_name(source) and (not root or _is_file_name(root)):
        candidates = []
        # relative to the file, to the working folder, and without the root
        for folder in (path.parent / root, Path(root), path.parent):
            candidates += [folder / source, folder / source.removeprefix("../")]
        for candidate in candidates:
            if candidate.is_dir() or (suffix_of(candidate) == ".txt" and candidate.is_file()):
                return candidate
    raise FeedError(
        f"{printable_name(path)} must name folders or list files (.txt) of images that exist,"
        f" got {source[:200]!r} under {root[:200] or '.'!r}; correct `path` or the folder"
    )


def _resolve_folder(folder: Path) -> SourceFiles:
    """Return the images of a folder and its subfolders; its files of arrays if there are no images.

    Raises:
        FeedError: there are neither.
    """
    names = walk_files(folder, _is_image_or_arrays)
    images = list(filter(is_image, names))
    unsupported_images = list(filter(is_unsupported_image, names))
    arrays = [
        name for name in filter(is_array_file, names) if not _is_statistics_of_cache(folder / name)
    ]
    if not images and not arrays:
        got = "none; give another folder or a list file"
        if unsupported_images:
            got = _describe_unsupported(unsupported_images)
        raise FeedError(
            f"{printable_name(folder)} must hold images (such as .jpg, .png) or arrays (.npy,"
            f" .npz, .bin, .raw), got {got}"
        )

    notes = []
    folder_name = printable_name(folder.name or folder)  # "/" and "." have no name
    if images and arrays:
        predicate = "is" if len(arrays) == 1 else "are"
        array_text = f"{counted(len(arrays), 'file')} of arrays"
        notes.append(f"{array_text} among the images of {folder_name} {predicate} not fed")
    if unsupported_images:
        predicate = "is" if len(unsupported_images) == 1 else "are"
        notes.append(f"in {folder_name} {predicate} {_describe_unsupported(unsupported_images)}")
    return SourceFiles(FileList(folder, images or arrays), folder_name, folder, tuple(notes))


def _is_image_or_arrays(name: str) -> bool:
    return is_image(name) or is_unsupported_image(name) or is_array_file(name)


def _is_statistics_of_cache(path: Path) -> bool:
    """Whether a file has the statistics of a cache `X`: it is `X.npz` beside `X` and `X.json`."""
    cache = path.with_suffix("")
    return path.suffix == ".npz" and cache.is_file() and Path(f"{cache}.json").is_file()


def _describe_unsupported(names: Sequence[str]) -> str:
    """Describe images in unsupported formats, and how to feed them."""
    suffixes = ", ".join(sorted(set(map(suffix_of, names))))
    return (
        f"{counted(len(names), 'picture')} in unsupported formats ({suffixes}); save them as .jpg"
        " or .png"
    )


def resolve_path_list(paths: Sequence[object]) -> SourceFiles | None:
    """Return the files of a list of paths; None for a list of anything else."""
    names = [str(Path(path)) for path in paths if isinstance(path, str | os.PathLike)]
    if not names or len(names) < len(paths):
        return None
    return SourceFiles(FileList("", names), "the list")


def label_by_folder(files: SourceFiles) -> SourceFiles:
    """Return the files, each labelled with the number of its subfolder, the topmost one.

    The subfolders, also those without images, are classes, numbered from 0 by their sorted names
    as in torchvision's ImageFolder; hidden ones are left out.

    Raises:
        FeedError: the source is no folder, a file is in no subfolder, or there are fewer than two.
    """
    subfolders = []  # the topmost folder of each file; "" for a file in none
    for name in files.file_list.names:
        folder, separator, _ = name.partition("/")
        subfolders.append(folder if separator else "")
    classes: list[str] = []
    if files.folder is not None:
        folder_names = glob.glob("*/", root_dir=files.folder)  # without hidden ones
        classes = sorted(name.removesuffix("/") for name in folder_names)
    if files.folder is None or "" in subfolders or len(classes) < 2:
        raise FeedError(
            f"labels by folder need one folder per class, got {files.name} with"
            f" {counted(len(classes), 'folder')} and {counted(subfolders.count(''), 'file')} in"
            " none; give a list file with labels, or --labels FILE"
        )
    label_by_class = {name: label for label, name in enumerate(classes)}
    # each subfolder is a class: hidden ones are left out of the files too
    labels = [label_by_class[subfolder] for subfolder in subfolders]
    labelled_files = FileList(files.folder, files.file_list.names, labels)
    note = f"labels by folder: {len(classes)} classes, 0 is {printable_name(classes[0])}"
    return replace(files, file_list=labelled_files, notes=(*files.notes, note))


DTYPES = (
    *("float32", "float16", "float64", "uint8", "int8"),
    *("int16", "uint16", "int32", "uint32", "int64", "uint64"),
)
_MAX_DIMENSIONS = 8
_MAX_RAW_SIDE = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class RawFiles:
    """A folder, pattern, list or file of `.bin` or `.raw`, with the shape and dtype of its values.

    Attributes:
        path: the folder, pattern, list or file.
        shape: of one sample, with or without the batch (a file may hold several); None for the
            input's shape.
        dtype: a numpy name, little-endian; None for the input's dtype.

    Raises:
        ConfigError: an invalid shape or dtype.
    """

    path: str | os.PathLike[str]
    shape: Shape | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.shape is not None and not _is_raw_shape(self.shape):
            raise ConfigError(
                f"a raw shape must have 1 to {_MAX_DIMENSIONS} sides of 1 or more, got"
                f" {self.shape}; give the shape of a sample, such as 1x3x224x224"
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"a raw dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    def __str__(self) -> str:
        return os.fspath(self.path)

    def sample_shape(self, spec: TensorSpec) -> Shape:
        """Return the shape of one sample in the files, for an input; without its batch dimension.

        Raises:
            FeedError: the input's shape is open, and the user gives no shape.
        """
        shape = spec.shape if self.shape is None else self.shape
        if spec.has_batch and len(shape) == len(spec.shape):
            shape = shape[1:]
        sample_shape = tuple(side for side in shape if isinstance(side, int))
        if len(sample_shape) < len(shape):
            raise FeedError(
                f"files without a header need a shape, since the input {describe(spec)} leaves it"
                " open; give it (--raw-shape), or write .npy files, which store theirs"
            )
        return sample_shape


def _is_raw_shape(shape: object) -> bool:
    if not isinstance(shape, tuple | list) or not 1 <= len(shape) <= _MAX_DIMENSIONS:
        return False
    return all(isinstance(side, int) and 0 < side <= _MAX_RAW_SIDE for side in shape)


def with_same_format(raw_files: RawFiles, path: str) -> RawFiles | str:
    """Return another path with the same shape and dtype if it has raw files; else the path."""
    try:
        files = resolve_files(Path(path)).file_list
    except FeedError:  # opening the path will report the error
        return path
    if not all(map(is_raw_file, files.names)):
        return path
    return replace(raw_files, path=path)


def refuse_files_with_header(files: SourceFiles) -> None:
    """Refuse a raw shape and dtype for files with a header.

    Raises:
        ConfigError: a file is neither .bin nor .raw.
    """
    names = [name for name in files.file_list.names if not is_raw_file(name)]
    if names:
        raise ConfigError(
            "a raw shape and dtype apply to .bin and .raw files, got"
            f" {summarize_names(names, 2)} in {files.name}, which have their own; leave them out"
        )
