"""Find image files, read lists of them, and read their bytes."""

import io
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from deploy.errors import FeedError, list_first
from deploy.feed.file_list import FileList, ImageFile
from deploy.files.reading import read_bytes
from deploy.terminal import visible

SUFFIXES = frozenset(
    (".bmp", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp")
)
# Image formats that not every build of OpenCV reads.
_UNSUPPORTED_SUFFIXES = frozenset((
    ".arw", ".avif", ".cr2", ".cr3", ".dng", ".gif", ".heic", ".heif", ".hif", ".j2k", ".jp2",
    ".jxl", ".nef", ".orf", ".psd", ".raf", ".rw2", ".tga",
))  # fmt: skip
_MAX_FILE_BYTES = 1 << 30
_MAX_LIST_BYTES = 256 << 20
_SOURCE_KINDS = "a folder of images, a UTF-8 list of them, an image, an .npy or an .npz file"


def printable_name(name: Path | str) -> str:
    """Return a file name for a message: one line, printable whatever its bytes."""
    return visible(str(name))


def summarize_names(names: Sequence[str], max_names: int = 5) -> str:
    """Return the first names and the number of the others."""
    return list_first(list(map(printable_name, names)), max_names)


def suffix_of(path: Path | str) -> str:
    """Return the suffix of a file name in lower case, with its dot; that of ".json" is ".json"."""
    _, dot, suffix = os.path.basename(path).rpartition(".")
    return f"{dot}{suffix}".lower() if dot else ""


def is_image(path: Path | str) -> bool:
    """Return whether the suffix, in any case, is that of a supported image format."""
    return suffix_of(path) in SUFFIXES


def is_unsupported_image(path: Path | str) -> bool:
    """Return whether the suffix, in any case, is that of an unsupported image format."""
    return suffix_of(path) in _UNSUPPORTED_SUFFIXES


def walk_files(folder: Path, is_selected: Callable[[str], bool]) -> list[str]:
    """Return the relative paths of the selected files in a folder tree, sorted by their bytes.

    Hidden files and folders (with a leading dot) are skipped. Of several paths to a folder, as by
    links, only the first is read.

    Raises:
        FeedError: a folder cannot be read.
    """
    paths: list[str] = []
    visited_folders = set()
    for root, folders, files in os.walk(folder, onerror=_refuse_folder, followlinks=True):
        real_path = os.path.realpath(root)
        if real_path in visited_folders:
            folders.clear()  # `os.walk` enters what is in this list
            continue
        visited_folders.add(real_path)
        # sorted, so that of several paths to a folder the same one is the first on every machine
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        subfolder = os.path.relpath(root, folder)
        prefix = "" if subfolder == "." else f"{subfolder}/"
        for name in files:
            if not name.startswith(".") and is_selected(name):
                paths.append(prefix + name)
    return sorted(paths, key=os.fsencode)


def _refuse_folder(error: OSError) -> None:
    raise FeedError(
        f"folder {printable_name(error.filename)} cannot be read: {error.strerror}; make it"
        " readable"
    ) from error


def read_list(path: Path) -> FileList:
    """Read a list file, one "path", "path label" or "path,label" per line.

    Paths are relative to the list's folder. The first line of a csv is a header, which is skipped,
    if it has a comma and neither a dot nor a label. A line may name one file per input, separated
    by spaces, as RKNN's dataset.txt does.

    UTF-8 with or without a byte order mark, LF or CRLF; empty lines and lines starting with
    ``#`` are skipped; paths may contain spaces. A line that is itself the path of a file has no
    label.

    Raises:
        FeedError: not a text file, no line, or labels that are missing or not whole numbers.
    """
    files = FileList(path.parent)
    unlabelled_count = 0
    first_unlabelled_line = 0
    for number, line in _iterate_lines(path):
        name, label = _parse_line(path, number, line)
        is_first_of_csv = number == 1 and suffix_of(path) == ".csv"
        may_be_header = is_first_of_csv and label is None and "," in line and "." not in line
        if may_be_header and not os.path.isfile(path.parent / line):
            continue  # such as "path,label"
        files.add(name, label)
        if label is None:
            unlabelled_count += 1
            first_unlabelled_line = first_unlabelled_line or number

    if not files:
        raise FeedError(
            f"{printable_name(path)} must list images, got no line; write one path per line"
        )
    if 0 < unlabelled_count < len(files):
        raise FeedError(
            f"every line of {printable_name(path)} or none must have a label, got"
            f" {unlabelled_count} of {len(files)} without, the first on line"
            f" {first_unlabelled_line}; add them or remove all labels"
        )
    return files


def _iterate_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each line that is neither empty nor a comment."""
    data = read_bytes(path, what=_SOURCE_KINDS, error=FeedError, max_bytes=_MAX_LIST_BYTES)
    if b"\0" in data:
        raise _not_a_list(path)
    # line by line: all at once would take more memory than the bytes
    lines = io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline="\n")
    try:
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if text and not text.startswith("#"):
                yield number, text
    except UnicodeDecodeError as error:
        raise _not_a_list(path) from error


def _not_a_list(path: Path) -> FeedError:
    return FeedError(
        f"{printable_name(path)} must be {_SOURCE_KINDS}, got a file that is none of these;"
        " check the path, or read the file in a loader (loader.py:function)"
    )


def _parse_line(list_path: Path, number: int, line: str) -> tuple[str, int | None]:
    """Return (name, label) of a line of a list; the label is None without one.

    A line is "path", "path label", "path,label", or one path per input, separated by spaces. Paths
    may contain spaces and commas too, so existing files decide which of these it is.
    """
    folder = list_path.parent
    if os.path.isfile(folder / line):
        return line, None
    path, last_word = ["", *line.rsplit(None, 1)][-2:]
    has_decimal_comma = re.fullmatch(r"\d+,\d+", last_word) and os.path.isfile(folder / path)
    for separator in (",", None):  # None stands for white space
        name, last_word = ["", *line.rsplit(separator, 1)][-2:]
        if separator:  # a csv may quote the path
            name, last_word = name.strip(' "'), last_word.strip()
            # in "a.jpg 1,5" the comma is that of a label, refused below, unless "a.jpg 1" is a file
            if has_decimal_comma and not os.path.isfile(folder / name):
                continue
        if name and re.fullmatch(r"\d{1,9}", last_word, re.ASCII):
            return name, int(last_word)
        if os.path.isfile(folder / name) and not os.path.isfile(folder / last_word):
            raise FeedError(
                f"a label must be a whole number from 0, got {last_word!r} on line {number} of"
                f" {printable_name(list_path)}; number the classes in the order of the model's"
                " outputs"
            )
    return line, None  # one path per input, or a single file that is missing


def read_image_file(file: ImageFile) -> bytes:
    """Return the bytes of an image file.

    Raises:
        FeedError: the file is missing, unreadable, empty or too large.
    """
    title = f"image {printable_name(file.name)}"
    try:
        state = file.path.stat()
        if not stat.S_ISREG(state.st_mode):  # reading a pipe would block forever
            raise FeedError(f"{title} cannot be read: it is no regular file")
        if state.st_size > _MAX_FILE_BYTES:
            raise FeedError(
                f"{title} must be of at most {_MAX_FILE_BYTES >> 30} GB,"
                f" got {state.st_size / 2**30:.1f} GB"
            )
        data = file.path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FeedError(f"{title} cannot be read: {reason}") from error
    if not data:
        raise FeedError(f"{title} is an empty file")
    return data
