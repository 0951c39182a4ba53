"""How a convolution goes over its input, from its node's attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from calibrators.patches import Window


def window_of(
    given: Mapping[str, Any], kernel: Sequence[int], *, transposed: bool = False
) -> Window:
    """The window of a Conv or ConvTranspose.

    Args:
        given: the node's attributes.
        kernel: sizes of its weight's spatial axes.
        transposed: it is a ConvTranspose, without auto_pad and output_shape.
    """
    rank = len(kernel)

    def whole(name: str, otherwise: list[int]) -> tuple[int, ...]:
        return tuple(int(v) for v in given.get(name, otherwise))

    return Window(
        kernel=tuple(int(k) for k in kernel),
        strides=whole("strides", [1] * rank),
        dilations=whole("dilations", [1] * rank),
        pads=whole("pads", [0] * 2 * rank),
        auto=given.get("auto_pad", b"NOTSET").decode(),
        group=int(given.get("group", 1)),
        transposed=transposed,
        more=whole("output_padding", []),
    )
