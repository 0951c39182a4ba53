"""The files that a path stands for: a folder's, a list's, a pattern's, a COCO json's, or one."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.errors import FeedError
from deploy.feed.array_files import is_arrays
from deploy.feed.images import is_image, is_other, kinds, read_list, shown, summary, walked
from deploy.feed.listing import Listing
from deploy.feed.sources import is_video
from deploy.files.reading import read_json

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
