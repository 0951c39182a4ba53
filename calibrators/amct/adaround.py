"""AdaRound: round each weight up or down by gradient descent for the least error of the output.

A variable `alpha` per weight decides how far it is rounded up. During the search weights lie
between codes, and a regularizer that grows steeper drives them to an end::

    h = clip(1.2 sigmoid(alpha) - 0.1, 0, 1)         0 down ... 1 up; starts at the weight
    q = clip(floor(w / scale) + h, -128, 127)
    loss = mean over positions of sum over channels (act(q scale x~ + b) - act(w x + b))^2
         + reg_param * sum(1 - |2 h - 1|^beta)       after warm_start; beta 20 -> 2 by a cosine

x are inputs in the float model, x~ those in the model whose earlier layers are rounded. Each
iteration is one Adam step on 256 of the sampled positions (AMCT: all positions of 32 images).
Output channels are independent, so they are searched in blocks of 64. The loss looks through the
activation after the layer (`AdaActivation`).

Sources: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization" (ICML 2020);
hicann/amct, graph_based ada_round/ada_round_optimize.py and custom_op/ada_round_quant.py, for
loss, schedule and parameters, and ada_round/ada_round_groups.py for activations, which has GELU
too; steps compared with torch's. AMCT deploys its weights as they round in the end, which is done
here at once.

Weights and inputs are tiled so that no sum depends on the number of threads. BLAS multiplies
64 x 64 x 64 in one thread; for larger products it uses more, which changes the order of the sums.
Here tiles are summed in the order of their index::

    weight [G, M, K]     -->  [G, K/64, M, 64]      zero-padded if 64 does not divide K
    inputs [P, G, K]     -->  at B positions: [B/64, 64, G, K/64, 64]
    outputs              -->  [G, B/64, M, 64]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.arq import ascend_range
from calibrators.errors import CalibrationError
from calibrators.rounding import block_products

FloatArray = NDArray[np.float32]

NONE, RELU, SIGMOID, TANH, LEAKY, RELU6 = "none", "relu", "sigmoid", "tanh", "leaky", "relu6"
TILE = 64
_MOST = 256  # positions per iteration
_GAMMA, _ZETA = np.float32(-0.1), np.float32(1.1)
_ONE, _TWO = np.float32(1), np.float32(2)
_LOW, _HIGH = (np.float32(end) for end in ascend_range(8))
_LOOK = 100  # iterations between checks for values that are not finite
_RATE, _BETA1, _BETA2, _EPSILON = 0.001, 0.9, 0.999, np.float32(1e-8)  # defaults of torch's Adam


@dataclass(frozen=True, slots=True)
class AdaActivation:
    """Elementwise activation of layers with G groups of M output channels."""

    kind: str = NONE  # one of this module's names
    # slope of negative values for LEAKY, float32 [1, 1] or [G, M]
    slope: FloatArray = field(default_factory=lambda: np.zeros((1, 1), np.float32))

    def of_part(self, groups: slice, rows: slice) -> AdaActivation:
        """Return the activation of some groups and channels."""
        return AdaActivation(
            self.kind, self.slope[groups, rows] if self.slope.size > 1 else self.slope
        )

    def value(self, x: FloatArray) -> FloatArray:
        """Return the activation of x, [G, B, M, P]."""
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
        """Return the derivative at x, [G, B, M, P]; at a kink that from below, as in torch."""
        one = np.float32(1)
        if self.kind == RELU:
            return (x > 0).astype(np.float32)
        if self.kind == SIGMOID:
            value = sigmoid(x)
            return value * (one - value)
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
    """Return 1 / (1 + e^-x); an overflow gives 0."""
    with np.errstate(over="ignore"):
        return np.reciprocal(np.float32(1) + np.exp(-x))


@dataclass(frozen=True, slots=True)
class Tiles:
    """At most 64 output channels of a layer."""

    weight: FloatArray  # float32 [G, A, M, T], A tiles of T values of K
    scale: FloatArray  # float32 [G, 1, M, 1]
    bias: FloatArray  # float32 [G, 1, M, 1]
    inputs: FloatArray  # float32 [P, G, A * T]
    width: int  # K
    batch: tuple[int, int]  # (tiles, positions per tile) of an iteration

    @classmethod
    def of(
        cls, weight: FloatArray, scale: FloatArray, bias: FloatArray, inputs: FloatArray
    ) -> Tiles:
        """Tile weight [G, M, K], scale [G, M, 1], bias [G, M] and inputs [P, G, K]."""
        groups, rows, width = weight.shape
        count, size = tile_layout(width)
        more = count * size - width
        wide = np.pad(weight, ((0, 0), (0, 0), (0, more)))
        tiled = wide.reshape(groups, rows, count, size).transpose(0, 2, 1, 3)
        return cls(
            weight=np.ascontiguousarray(tiled, np.float32),
            scale=np.ascontiguousarray(scale[:, None], np.float32),
            bias=np.ascontiguousarray(bias[:, None, :, None], np.float32),
            inputs=np.pad(inputs, ((0, 0), (0, 0), (0, more))),
            width=width,
            batch=tile_layout(min(len(inputs), _MOST), whole=True),
        )

    def wanted(self, targets: FloatArray, activation: AdaActivation) -> FloatArray:
        """Return the activation of targets [P, G, M], as [G, M, P]."""
        return np.ascontiguousarray(activation.value(targets.transpose(1, 2, 0)[:, None])[:, 0])

    def draw(self, source: np.random.Generator) -> NDArray[np.int64]:
        """Draw the positions of one iteration without repetition; all if they are few."""
        count = self.batch[0] * self.batch[1]
        if count == len(self.inputs):
            return np.arange(count)
        return source.choice(len(self.inputs), count, replace=False, shuffle=False)

    def at(self, places: NDArray[np.int64]) -> FloatArray:
        """Return the inputs at some positions, [B, T, G, A, T']."""
        groups, count, _, size = self.weight.shape
        return self.inputs[places].reshape(*self.batch, groups, count, size)

    def among(self, wanted: FloatArray, places: NDArray[np.int64]) -> FloatArray:
        """Return the values of [G, M, P] at some positions, in the layout of `outputs`."""
        groups, rows, _ = wanted.shape
        return wanted[:, :, places].reshape(groups, rows, *self.batch).transpose(0, 2, 1, 3)

    def outputs(self, weight: FloatArray, inputs: FloatArray) -> FloatArray:
        """Return weight [G, A, M, T] times inputs from `at`, plus bias: [G, B, M, T]."""
        right = inputs.transpose(2, 0, 3, 4, 1)  # [G, B, A, T', T]
        return np.asarray((weight[:, None] @ right).sum(axis=2) + self.bias)

    def back(self, slope: FloatArray, inputs: FloatArray) -> FloatArray:
        """Return the gradient by the weight [G, A, M, T'] from that by the outputs [G, B, M, T]."""
        right = inputs.transpose(2, 0, 3, 1, 4)  # [G, B, A, T, T']
        return np.asarray((slope[:, :, None] @ right).sum(axis=1))

    def rows(self, tiled: FloatArray) -> FloatArray:
        """Untile [G, A, M, T] to [G, M, K]."""
        groups, count, rows, size = tiled.shape
        wide = tiled.transpose(0, 2, 1, 3).reshape(groups, rows, count * size)
        return wide[:, :, : self.width]


def tile_layout(count: int, *, whole: bool = False) -> tuple[int, int]:
    """Return (number of tiles, their size) for a count; all tiles have the same size.

    With `whole` no tile reaches beyond the count, so that a few elements may be left out.
    """
    tiles = max(-(-count // TILE), 1)
    return tiles, max(count // tiles if whole else -(-count // tiles), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaParams:
    """AMCT's parameters of ada_quantize."""

    num_iteration: int = 10000
    reg_param: float = 0.01
    # exponent of the regularizer at its start and at the end
    beta_range: tuple[float, float] = (20.0, 2.0)
    warm_start: float = 0.2  # share of the iterations without the regularizer


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaProblem:
    """Input of AdaRound for a layer with G groups of M output channels, at P positions."""

    weight: FloatArray  # float32 [G, M, K]
    scale: FloatArray  # scale of each channel, float32 [G, M, 1]
    inputs: FloatArray  # inputs of the layer downstream of rounded layers, float32 [P, G, K]
    targets: FloatArray  # outputs of the float layer, float32 [P, G, M]
    bias: FloatArray  # bias included in the targets, float32 [G, M]
    activation: AdaActivation = field(default_factory=AdaActivation)
    share: float = 1.0  # factor of the output's error, relative to AMCT's mean over positions

    def blocks(self) -> list[AdaProblem]:
        """Split into independent problems of at most 64 output channels."""
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


def join_blocks(problem: AdaProblem, parts: Sequence[NDArray[np.int8]]) -> NDArray[np.int8]:
    """Join the integers of `problem.blocks()` to [G, M, K]."""
    across = -(-problem.weight.shape[1] // TILE)
    rows = [np.concatenate(parts[i : i + across], axis=1) for i in range(0, len(parts), across)]
    return np.concatenate(rows)


def round_block(
    part: AdaProblem, params: AdaParams, *, step: Callable[[], None] = lambda: None
) -> NDArray[np.int8]:
    """Return the integers of one block of a problem, int8 [G, M, K].

    Raises:
        CalibrationError: squares of the outputs are not finite.
    """
    tiles = Tiles.of(part.weight, part.scale, part.bias, part.inputs)
    wanted = tiles.wanted(part.targets, part.activation)
    low, alpha = initial_alpha(tiles.weight, tiles.scale)
    adam, draw = Adam(alpha), np.random.default_rng(0)
    for iteration in range(params.num_iteration):
        places = tiles.draw(draw)
        up, rise = alpha_heights(alpha)
        slope = error_slope(part, tiles, low + up, wanted, places)
        if iteration >= params.num_iteration * params.warm_start:
            slope += regularizer_slope(up, params.reg_param, beta_of(params, iteration))
        slope *= rise
        adam.step(alpha, slope)
        look = iteration % _LOOK == 0 or iteration == params.num_iteration - 1
        if look and not np.isfinite(adam.squares).all():
            raise CalibrationError(
                "AdaRound's loss must be finite, got a layer whose outputs have squares that are"
                " not"
            )
        step()
    codes = tiles.rows(np.rint(low + alpha_heights(alpha)[0]))
    return np.asarray(np.clip(codes, _LOW, _HIGH), np.int8)


def output_error(problem: AdaProblem, integers: NDArray[np.int8]) -> float:
    """Return the mean over positions of the squared error after the activation."""
    weight = integers.astype(np.float32) * problem.scale
    made = block_products(weight, problem.inputs.transpose(1, 2, 0)) + problem.bias[:, :, None]
    both = made.astype(np.float32), problem.targets.transpose(1, 2, 0)
    now, wanted = (problem.activation.value(one[:, None]) for one in both)
    return float(np.square(now - wanted, dtype=np.float64).sum() / max(len(problem.inputs), 1))


def round_to_nearest(problem: AdaProblem) -> NDArray[np.int8]:
    """Return the integers by rounding to nearest, [G, M, K]."""
    codes = np.rint(problem.weight / problem.scale)
    return np.asarray(np.clip(codes, _LOW, _HIGH), np.int8)


def initial_alpha(weight: FloatArray, scale: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return (floor of weight / scale, alpha whose height is the fraction)."""
    steps = weight / scale
    low = np.floor(steps)
    rest = (_ZETA - _GAMMA) / (steps - low - _GAMMA)
    return low, np.asarray(-np.log(rest - _ONE), np.float32)


def alpha_heights(alpha: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return (h, its derivative by alpha, which is 0 where h is clipped)."""
    part = sigmoid(alpha)
    free = part * (_ZETA - _GAMMA) + _GAMMA
    up = np.clip(free, np.float32(0), _ONE)
    part *= (_ONE - part) * (_ZETA - _GAMMA)
    part *= up == free
    return up, part


def beta_of(params: AdaParams, iteration: int) -> float:
    """Return the exponent at an iteration after the warm start."""
    begin = params.warm_start * params.num_iteration
    along = (iteration - begin) / (params.num_iteration - begin)
    first, last = params.beta_range
    return last + 0.5 * (first - last) * (1 + math.cos(along * math.pi))


def regularizer_slope(up: FloatArray, reg_param: float, beta: float) -> FloatArray:
    """Return the derivative of reg_param * sum(1 - |2 h - 1|^beta) by h."""
    distance = up * _TWO - _ONE
    steep = np.power(np.abs(distance), np.float32(beta - 1))
    return np.asarray(np.copysign(steep, distance) * np.float32(-2 * reg_param * beta))


def error_slope(
    part: AdaProblem, tiles: Tiles, codes: FloatArray, wanted: FloatArray, places: NDArray[np.int64]
) -> FloatArray:
    """Return the derivative of the output's mean squared error at some positions by the codes.

    Args:
        part: the problem, for its activation and share.
        tiles: its weight and inputs.
        codes: codes between integers, in the layout of the tiles.
        wanted: the float model's values after the activation, at all positions.
        places: the positions of this iteration.
    """
    inputs = tiles.at(places)
    made = tiles.outputs(np.clip(codes, _LOW, _HIGH) * tiles.scale, inputs)
    gradient = part.activation.value(made) - tiles.among(wanted, places)
    gradient *= part.activation.derivative(made)
    gradient *= np.float32(2 * part.share / len(places))
    slope = tiles.back(gradient, inputs)
    slope *= tiles.scale
    slope *= (codes >= _LOW) & (codes <= _HIGH)
    return slope


class Adam:
    """State of the Adam optimizer for one array."""

    def __init__(self, like: FloatArray) -> None:
        self.mean, self.squares, self.steps = np.zeros_like(like), np.zeros_like(like), 0

    def step(self, x: FloatArray, slope: FloatArray) -> None:
        """Update `x` in place by one step against its gradient."""
        self.steps += 1
        self.mean *= np.float32(_BETA1)
        self.mean += np.float32(1 - _BETA1) * slope
        self.squares *= np.float32(_BETA2)
        with np.errstate(over="ignore"):
            self.squares += np.float32(1 - _BETA2) * slope * slope
        root = np.sqrt(self.squares)
        root /= np.float32(math.sqrt(1 - _BETA2**self.steps))
        root += _EPSILON
        x -= np.float32(_RATE / (1 - _BETA1**self.steps)) * (self.mean / root)
