"""How the pictures of a feed became inputs, in words."""

from __future__ import annotations

from deploy.feed.presets import in_words
from deploy.feed.samples import Feed


def prepared(feed: Feed) -> str:
    """What was done to pictures, and what said so where it was the model; empty for arrays."""
    if feed.preprocess is None:
        return ""
    return f"{in_words(feed.preprocess)}{f'; from {feed.origin}' if feed.origin else ''}"


def as_read(feed: Feed) -> tuple[str, ...]:
    """`prepared` and the notes, where no report has a place of its own for them."""
    how = prepared(feed)
    return (*((f"pictures: {how}",) if how else ()), *feed.notes)
