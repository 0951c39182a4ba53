"""AdaRound: each weight rounded up or down so that the layer's output errs least, by descent.

A value `alpha` a weight says how far it goes up; while it is sought, weights stand between codes,
and a term that grows sharper drives them to one end::

    h = clip(1.2 sigmoid(alpha) - 0.1, 0, 1)         0 down ... 1 up; begins where the weight is
    q = clip(floor(w / scale) + h, -128, 127)
    loss = mean over places of sum over channels (act(q scale x~ + b) - act(w x + b))^2
         + reg_param * sum(1 - |2 h - 1|^beta)       after warm_start; beta 20 -> 2 by a cosine

x are the float model's inputs, x~ those of the model whose earlier layers are rounded. Each
iteration takes 256 places of those that were kept (AMCT: all places of 32 images), and Adam one
step. No output channel's weights meet another's, so that channels are sought beside each other, in
blocks of 64; no sum depends on the number of threads.

Sources: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization" (ICML 2020);
hicann/amct, graph_based ada_round/ada_round_optimize.py and custom_op/ada_round_quant.py, for
loss, schedule and parameters; steps compared with torch's. AMCT deploys its weights as they round
in the end, which is done here at once.

The activation behind a layer, through which AdaRound's loss looks: its value and its slope.

Source: hicann/amct, graph_based ada_round/ada_round_groups.py, which knows GELU too.

A layer's weights and inputs in tiles, so that their products are the same for any threads.

::

    weight [G, M, K]     -->  [G, K/64, M, 64]      zeros behind K where 64 does not divide it
    inputs [P, G, K]     -->  at B places: [B/64, 64, G, K/64, 64]
    outputs              -->  [G, B/64, M, 64]

A product of 64 x 64 x 64 is as much as BLAS does in one thread; for more it wakes others, and adds
up in their order. Here tiles are added up in the order of their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.arq import ascend_range
from calibrators.errors import CalibrationError
from calibrators.rounding import products_of

FloatArray = NDArray[np.float32]

NONE, RELU, SIGMOID, TANH, LEAKY, RELU6 = "none", "relu", "sigmoid", "tanh", "leaky", "relu6"


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of each value by itself, of layers with G groups of M output channels.

    Attributes:
        kind: one of this module's names.
        slope: of negative values where it leaks, float32 [1, 1] or [G, M].
    """

    kind: str = NONE
    slope: FloatArray = field(default_factory=lambda: np.zeros((1, 1), np.float32))

    def of_part(self, groups: slice, rows: slice) -> Activation:
        """That of some groups and channels."""
        return Activation(
            self.kind, self.slope[groups, rows] if self.slope.size > 1 else self.slope
        )

    def value(self, x: FloatArray) -> FloatArray:
        """[G, B, M, P] -> what the next layer gets."""
        if self.kind == RELU:
            return np.maximum(x, np.float32(0))
        if self.kind == SIGMOID:
            return sigmoid(x)
        if self.kind == TANH:
            return np.tanh(x)
        if self.kind == LEAKY:
            return np.where(x > 0, x, x * self._leak)
        if self.kind == RELU6:
            return np.clip(x, np.float32(0), np.float32(6))
        return x

    def derivative(self, x: FloatArray) -> FloatArray | np.float32:
        """[G, B, M, P] -> its derivative there; at an edge that of the lower side, as in torch."""
        one = np.float32(1)
        if self.kind == RELU:
            return (x > 0).astype(np.float32)
        if self.kind == SIGMOID:
            found = sigmoid(x)
            return found * (one - found)
        if self.kind == TANH:
            return one - np.square(np.tanh(x))
        if self.kind == LEAKY:
            return np.where(x > 0, one, self._leak)
        if self.kind == RELU6:
            return ((x > 0) & (x < 6)).astype(np.float32)
        return one

    @property
    def _leak(self) -> FloatArray:
        return self.slope[:, None, :, None]


def sigmoid(x: FloatArray) -> FloatArray:
    """1 / (1 + e^-x), 0 far below."""
    with np.errstate(over="ignore"):
        return np.reciprocal(np.float32(1) + np.exp(-x))


TILE = 64
_MOST = 256  # places at a time


@dataclass(frozen=True, slots=True)
class Tiles:
    """At most 64 output channels of a layer.

    Attributes:
        weight: float32 [G, A, M, T], A tiles of T values of K.
        scale: float32 [G, 1, M, 1].
        bias: float32 [G, 1, M, 1].
        inputs: float32 [P, G, A * T].
        width: K.
        batch: (tiles, places of a tile) that are looked at at a time.
    """

    weight: FloatArray
    scale: FloatArray
    bias: FloatArray
    inputs: FloatArray
    width: int
    batch: tuple[int, int]

    @classmethod
    def of(
        cls, weight: FloatArray, scale: FloatArray, bias: FloatArray, inputs: FloatArray
    ) -> Tiles:
        """Of weight [G, M, K], scale [G, M, 1], bias [G, M] and inputs [P, G, K]."""
        groups, rows, width = weight.shape
        count, size = cut(width)
        more = count * size - width
        wide = np.pad(weight, ((0, 0), (0, 0), (0, more)))
        tiled = wide.reshape(groups, rows, count, size).transpose(0, 2, 1, 3)
        return cls(
            weight=np.ascontiguousarray(tiled, np.float32),
            scale=np.ascontiguousarray(scale[:, None], np.float32),
            bias=np.ascontiguousarray(bias[:, None, :, None], np.float32),
            inputs=np.pad(inputs, ((0, 0), (0, 0), (0, more))),
            width=width,
            batch=cut(min(len(inputs), _MOST), whole=True),
        )

    def wanted(self, targets: FloatArray, activation: Activation) -> FloatArray:
        """Targets [P, G, M] behind the activation, [G, M, P]."""
        return np.ascontiguousarray(activation.value(targets.transpose(1, 2, 0)[:, None])[:, 0])

    def draw(self, source: np.random.Generator) -> NDArray[np.int64]:
        """The places of one iteration, each at most once; all of them where they are few."""
        count = self.batch[0] * self.batch[1]
        if count == len(self.inputs):
            return np.arange(count)
        return source.choice(len(self.inputs), count, replace=False, shuffle=False)

    def at(self, places: NDArray[np.int64]) -> FloatArray:
        """The inputs there, [B, T, G, A, T']."""
        groups, count, _, size = self.weight.shape
        return self.inputs[places].reshape(*self.batch, groups, count, size)

    def among(self, wanted: FloatArray, places: NDArray[np.int64]) -> FloatArray:
        """[G, M, P] -> those values, laid out as `outputs`."""
        groups, rows, _ = wanted.shape
        return wanted[:, :, places].reshape(groups, rows, *self.batch).transpose(0, 2, 1, 3)

    def outputs(self, weight: FloatArray, inputs: FloatArray) -> FloatArray:
        """Weight [G, A, M, T] on `at`'s inputs, with the bias, [G, B, M, T]."""
        right = inputs.transpose(2, 0, 3, 4, 1)  # [G, B, A, T', T]
        return np.asarray((weight[:, None] @ right).sum(axis=2) + self.bias)

    def back(self, slope: FloatArray, inputs: FloatArray) -> FloatArray:
        """Slopes by the outputs [G, B, M, T] -> by the weight [G, A, M, T']."""
        right = inputs.transpose(2, 0, 3, 1, 4)  # [G, B, A, T, T']
        return np.asarray((slope[:, :, None] @ right).sum(axis=1))

    def rows(self, tiled: FloatArray) -> FloatArray:
        """[G, A, M, T] -> [G, M, K]."""
        groups, count, rows, size = tiled.shape
        wide = tiled.transpose(0, 2, 1, 3).reshape(groups, rows, count * size)
        return wide[:, :, : self.width]


def cut(count: int, *, whole: bool = False) -> tuple[int, int]:
    """(tiles, their size) for a count, each as large as the others.

    With `whole` no tile reaches beyond the count, so that a few at its end may be left out.
    """
    tiles = max(-(-count // TILE), 1)
    return tiles, max(count // tiles if whole else -(-count // tiles), 1)


_GAMMA, _ZETA = np.float32(-0.1), np.float32(1.1)
_ONE, _TWO = np.float32(1), np.float32(2)
_LOW, _HIGH = (np.float32(end) for end in ascend_range(8))
_LOOK = 100  # iterations between two looks whether all is finite
_RATE, _KEPT, _KEPT_SQUARES, _EPSILON = 0.001, 0.9, 0.999, np.float32(1e-8)  # torch's own Adam


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaParams:
    """AMCT's parameters of ada_quantize.

    Attributes:
        num_iteration: steps of the descent.
        reg_param: weight of the term that drives to the ends.
        beta_range: exponent of that term at its begin and at the end.
        warm_start: share of the iterations without that term.
    """

    num_iteration: int = 10000
    reg_param: float = 0.01
    beta_range: tuple[float, float] = (20.0, 2.0)
    warm_start: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaProblem:
    """What a layer's weights are rounded by; G groups of M output channels, P places.

    Attributes:
        weight: float32 [G, M, K].
        scale: of each channel, float32 [G, M, 1].
        inputs: of the layer behind rounded ones, float32 [P, G, K].
        targets: what the float layer gives, float32 [P, G, M].
        bias: that is in the targets, float32 [G, M].
        activation: behind the layer.
        share: what the output's error counts beside AMCT's mean over places.
    """

    weight: FloatArray
    scale: FloatArray
    inputs: FloatArray
    targets: FloatArray
    bias: FloatArray
    activation: Activation = field(default_factory=Activation)
    share: float = 1.0

    def blocks(self) -> list[AdaProblem]:
        """Parts of at most 64 output channels that do not meet."""
        groups, rows, _ = self.weight.shape
        wide = max(TILE // rows, 1)
        return [
            self._part(slice(g, g + wide), slice(m, m + TILE))
            for g in range(0, groups, wide)
            for m in range(0, rows, TILE)
        ]

    def _part(self, groups: slice, rows: slice) -> AdaProblem:
        return AdaProblem(
            weight=self.weight[groups, rows],
            scale=self.scale[groups, rows],
            inputs=self.inputs[:, groups],
            targets=self.targets[:, groups, rows],
            bias=self.bias[groups, rows],
            activation=self.activation.of_part(groups, rows),
            share=self.share,
        )


def adaround(
    problem: AdaProblem, params: AdaParams, *, step: Callable[[], None] = lambda: None
) -> NDArray[np.int8]:
    """The integers of a layer's weight, int8 [G, M, K]; `step` is called every iteration.

    Raises:
        CalibrationError: values whose squares are not finite.
    """
    return joined(problem, [searched(part, params, step=step) for part in problem.blocks()])


def joined(problem: AdaProblem, parts: Sequence[NDArray[np.int8]]) -> NDArray[np.int8]:
    """The integers of `problem.blocks()` as those of the whole, [G, M, K]."""
    across = -(-problem.weight.shape[1] // TILE)
    lines = [np.concatenate(parts[i : i + across], axis=1) for i in range(0, len(parts), across)]
    return np.concatenate(lines)


def searched(
    part: AdaProblem, params: AdaParams, *, step: Callable[[], None] = lambda: None
) -> NDArray[np.int8]:
    """The integers of one of a problem's blocks, int8 [G, M, K].

    Raises:
        CalibrationError: values whose squares are not finite.
    """
    tiles = Tiles.of(part.weight, part.scale, part.bias, part.inputs)
    wanted = tiles.wanted(part.targets, part.activation)
    low, alpha = beginning(tiles.weight, tiles.scale)
    adam, draw = Adam(alpha), np.random.default_rng(0)
    for iteration in range(params.num_iteration):
        places = tiles.draw(draw)
        up, rise = heights(alpha)
        slope = error_slope(part, tiles, low + up, wanted, places)
        if iteration >= params.num_iteration * params.warm_start:
            slope += drive(up, params.reg_param, beta_of(params, iteration))
        slope *= rise
        adam.step(alpha, slope)
        if iteration % _LOOK == 0 or iteration == params.num_iteration - 1:
            _check(adam.squares)
        step()
    codes = tiles.rows(np.rint(low + heights(alpha)[0]))
    return np.asarray(np.clip(codes, _LOW, _HIGH), np.int8)


def output_error(problem: AdaProblem, integers: NDArray[np.int8]) -> float:
    """Mean over all places of the squared error behind the activation, integers [G, M, K]."""
    weight = integers.astype(np.float32) * problem.scale
    made = products_of(weight, problem.inputs.transpose(1, 2, 0)) + problem.bias[:, :, None]
    both = made.astype(np.float32), problem.targets.transpose(1, 2, 0)
    now, wanted = (problem.activation.value(one[:, None]) for one in both)
    return float(np.square(now - wanted, dtype=np.float64).sum() / max(len(problem.inputs), 1))


def nearest(problem: AdaProblem) -> NDArray[np.int8]:
    """The integers without a search, [G, M, K]."""
    codes = np.rint(problem.weight / problem.scale)
    return np.asarray(np.clip(codes, _LOW, _HIGH), np.int8)


def _check(squares: FloatArray) -> None:
    if not np.isfinite(squares).all():
        raise CalibrationError(
            "AdaRound's loss must be finite, got a layer whose outputs have squares that are not"
        )


def beginning(weight: FloatArray, scale: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(floor of the weight in steps, the alpha whose height is the rest)."""
    steps = weight / scale
    low = np.floor(steps)
    rest = (_ZETA - _GAMMA) / (steps - low - _GAMMA)
    return low, np.asarray(-np.log(rest - _ONE), np.float32)


def heights(alpha: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(how far up, 0 to 1, and its derivative by alpha, which is 0 where it is cut off)."""
    part = sigmoid(alpha)
    free = part * (_ZETA - _GAMMA) + _GAMMA
    up = np.clip(free, np.float32(0), _ONE)
    part *= (_ONE - part) * (_ZETA - _GAMMA)
    part *= up == free
    return up, part


def beta_of(params: AdaParams, iteration: int) -> float:
    """The exponent at an iteration after the warm start."""
    begin = params.warm_start * params.num_iteration
    along = (iteration - begin) / (params.num_iteration - begin)
    first, last = params.beta_range
    return last + 0.5 * (first - last) * (1 + math.cos(along * math.pi))


def drive(up: FloatArray, reg_param: float, beta: float) -> FloatArray:
    """The derivative by the heights of reg_param * sum(1 - |2 h - 1|^beta)."""
    apart = up * _TWO - _ONE
    steep = np.power(np.abs(apart), np.float32(beta - 1))
    return np.asarray(np.copysign(steep, apart) * np.float32(-2 * reg_param * beta))


def error_slope(
    part: AdaProblem,
    tiles: Tiles,
    codes: FloatArray,
    wanted: FloatArray,
    places: NDArray[np.int64],
) -> FloatArray:
    """The derivative by the codes of the output's mean squared error at some places.

    Args:
        part: whose activation and share count.
        tiles: its weight and inputs.
        codes: between integers, laid out as the tiles.
        wanted: the float model's values behind the activation, at all places.
        places: those that are looked at.
    """
    inputs = tiles.at(places)
    made = tiles.outputs(np.clip(codes, _LOW, _HIGH) * tiles.scale, inputs)
    apart = part.activation.value(made) - tiles.among(wanted, places)
    apart *= part.activation.derivative(made)
    apart *= np.float32(2 * part.share / len(places))
    slope = tiles.back(apart, inputs)
    slope *= tiles.scale
    slope *= (codes >= _LOW) & (codes <= _HIGH)
    return slope


class Adam:
    """State of Adam's steps on one array."""

    def __init__(self, like: FloatArray) -> None:
        self.mean, self.squares, self.steps = np.zeros_like(like), np.zeros_like(like), 0

    def step(self, x: FloatArray, slope: FloatArray) -> None:
        """Move `x` against its slope, in place."""
        self.steps += 1
        self.mean *= np.float32(_KEPT)
        self.mean += np.float32(1 - _KEPT) * slope
        self.squares *= np.float32(_KEPT_SQUARES)
        with np.errstate(over="ignore"):
            self.squares += np.float32(1 - _KEPT_SQUARES) * slope * slope
        wide = np.sqrt(self.squares)
        wide /= np.float32(math.sqrt(1 - _KEPT_SQUARES**self.steps))
        wide += _EPSILON
        x -= np.float32(_RATE / (1 - _KEPT**self.steps)) * (self.mean / wide)
