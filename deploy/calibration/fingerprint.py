"""What a calibration was made from, so that a stale one is told from a fitting one, part by part.

Three parts. The *observation* (model, images, preprocessing, versions) decides whether the
statistics still hold; the *order* of the images does for those statistics alone that show it; the
*search* (rule, method) says what is looked for, which may be found again in the stored statistics
without running the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deploy.errors import CacheError

_NAMES = {
    "model": "the model (weights or graph)",
    "images": "the images",
    "order": "the order of the images",
    "preprocess": "the preprocessing",
    "rule": "the range rule",
    "versions": "a version",
    "method": "the method",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Parts that decide a calibration, as plain JSON values.

    Attributes:
        model: sha256 of the model's graph and weights.
        images: {"count", "sha256", ...} of the feed, whatever the order and the names.
        order: sha256 of the images' digests in their order.
        preprocess: what was done to the images, field by field; {} for arrays.
        rule: "order-independent", or TensorRT's rule with its batch size.
        versions: format of the statistics and the version of the runtime that computed them; of
            images the decoder's too.
        method: search and its parameters.
    """

    model: str
    images: Mapping[str, Any]
    order: str
    preprocess: Mapping[str, Any]
    rule: str
    versions: Mapping[str, Any]
    method: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Fingerprint:
        """Inverse of `to_json`.

        Raises:
            CacheError: missing or mistyped parts.
        """
        texts, tables = ("model", "order", "rule", "method"), ("images", "preprocess", "versions")
        if (
            not isinstance(data, dict)
            or set(data) != {*texts, *tables}
            or not all(isinstance(data[key], str) for key in texts)
            or not all(isinstance(data[key], dict) for key in tables)
        ):
            raise CacheError("a fingerprint needs the parts " + ", ".join((*texts, *tables)))
        return cls(**data)

    def changes_since(self, old: Fingerprint) -> dict[str, str]:
        """Part -> what changed from `old` to this one, as a sentence's end; {} if nothing did."""
        changed: dict[str, str] = {}
        for part, noun in _NAMES.items():
            before, now = getattr(old, part), getattr(self, part)
            if before != now:
                detail = _difference(before, now)
                changed[part] = f"{noun} changed{f' ({detail})' if detail else ''}"
        return changed


def _difference(before: object, now: object) -> str:
    """The fields that differ, short; digests are only said to differ."""
    if isinstance(before, str) and isinstance(now, str):
        return "" if len(before) == 64 else f"{before} -> {now}"
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return ""
    fields = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    words = []
    for key in sorted(fields):
        old, new = before.get(key), now.get(key)
        short = all(len(str(value)) <= 40 for value in (old, new))
        words.append(f"{key} {old} -> {new}" if short else key)
    return ", ".join(words)
