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

from calibrators.amct.arq import ascend_range
from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array, Int8Array, Int64Array

NONE, RELU, SIGMOID, TANH, LEAKY, RELU6 = "none", "relu", "sigmoid", "tanh", "leaky", "relu6"
TILE = 64
_MAX_POSITIONS = 256  # positions per iteration
_GAMMA, _ZETA = np.float32(-0.1), np.float32(1.1)  # ends of the stretched sigmoid
_STRETCH = _ZETA - _GAMMA
_ONE = np.float32(1)
_MIN_CODE, _MAX_CODE = (np.float32(end) for end in ascend_range(8))
_CHECK_INTERVAL = 100  # iterations between checks for values that are not finite
# defaults of torch's Adam
_LEARNING_RATE, _BETA1, _BETA2, _EPSILON = 0.001, 0.9, 0.999, np.float32(1e-8)


@dataclass(frozen=True, slots=True)
class AdaActivation:
    """Elementwise activation of layers with G groups of M output channels.

    Attributes:
        kind: one of this module's names.
        slope: slope of negative values for LEAKY, float32 [1, 1] or [G, M].
    """

    kind: str = NONE
    slope: Float32Array = field(default_factory=lambda: np.zeros((1, 1), np.float32))

    def select(self, groups: slice, rows: slice) -> AdaActivation:
        """Return the activation of some groups and channels."""
        if self.slope.size == 1:
            return self
        return AdaActivation(self.kind, self.slope[groups, rows])

    def value(self, x: Float32Array) -> Float32Array:
        """Return the activation of x, [G, B, M, P]."""
        if self.kind == RELU:
            return np.maximum(x, np.float32(0))
        if self.kind == SIGMOID:
            return sigmoid(x)
        if self.kind == TANH:
            return np.tanh(x)
        if self.kind == LEAKY:
            return np.where(x > 0, x, x * self._broadcast_slope)
        if self.kind == RELU6:
            return np.clip(x, np.float32(0), np.float32(6))
        return x

    def derivative(self, x: Float32Array) -> Float32Array | np.float32:
        """Return the derivative at x, [G, B, M, P]; at a kink that from below, as in torch."""
        if self.kind == RELU:
            return (x > 0).astype(np.float32)
        if self.kind == SIGMOID:
            value = sigmoid(x)
            return value * (_ONE - value)
        if self.kind == TANH:
            return _ONE - np.square(np.tanh(x))
        if self.kind == LEAKY:
            return np.where(x > 0, _ONE, self._broadcast_slope)
        if self.kind == RELU6:
            return ((x > 0) & (x < 6)).astype(np.float32)
        return _ONE

    @property
    def _broadcast_slope(self) -> Float32Array:
        """The slope in a shape that broadcasts over values [G, B, M, P]."""
        return self.slope[:, None, :, None]


def sigmoid(x: Float32Array) -> Float32Array:
    """Return 1 / (1 + e^-x); an overflow gives 0."""
    with np.errstate(over="ignore"):
        return np.reciprocal(_ONE + np.exp(-x))


class Tiles:
    """At most 64 output channels of a layer, in AMCT's tiles, over which it sums in float32.

    G is the number of groups, M of output channels in a group, K of weights of a channel, P of
    positions (pixels of all samples). K is cut into A tiles of T values, the last padded with 0;
    the positions of an iteration into B tiles of S positions.

    Attributes:
        weight: float32 [G, A, M, T], A tiles of T values of K.
        scale: float32 [G, 1, M, 1].
        bias: float32 [G, 1, M, 1].
        inputs: float32 [P, G, A * T].
        row_width: K.
        position_layout: (B, S): tiles and positions per tile of an iteration.
    """

    def __init__(
        self, weight: Float32Array, scale: Float32Array, bias: Float32Array, inputs: Float32Array
    ) -> None:
        """Cut a layer with G groups of M output channels into tiles, over which AMCT sums in turn.

        The K weights of a channel become A tiles of T weights, the last one padded with 0.

        Args:
            weight: float32 [G, M, K].
            scale: scale of each channel, float32 [G, M, 1].
            bias: float32 [G, M].
            inputs: inputs of the layer at P positions, float32 [P, G, K].
        """
        groups, rows, self.row_width = weight.shape
        tile_count, tile_size = tile_layout(self.row_width)
        padding = tile_count * tile_size - self.row_width
        # each iteration draws some positions, and `inputs_at` cuts them into tiles too; these are
        # not padded: the few positions that do not fill a tile are not drawn
        position_count = min(len(inputs), _MAX_POSITIONS)
        self.position_layout = tile_layout(position_count, drop_remainder=True)
        padded = np.pad(weight, ((0, 0), (0, 0), (0, padding)))
        tiled = padded.reshape(groups, rows, tile_count, tile_size).transpose(0, 2, 1, 3)
        self.weight = np.ascontiguousarray(tiled, np.float32)
        self.scale = np.ascontiguousarray(scale[:, None], np.float32)
        self.bias = np.ascontiguousarray(bias[:, None, :, None], np.float32)
        self.inputs = np.pad(inputs, ((0, 0), (0, 0), (0, padding)))

    def draw_positions(self, source: np.random.Generator) -> Int64Array:
        """Draw the positions of one iteration without repetition; all if they are few."""
        count = math.prod(self.position_layout)
        if count == len(self.inputs):
            return np.arange(count)
        return source.choice(len(self.inputs), count, replace=False, shuffle=False)

    def inputs_at(self, positions: Int64Array) -> Float32Array:
        """Return the inputs at some positions, [B, S, G, A, T]."""
        groups, tile_count, _, tile_size = self.weight.shape
        return self.inputs[positions].reshape(*self.position_layout, groups, tile_count, tile_size)

    def targets_at(self, targets: Float32Array, positions: Int64Array) -> Float32Array:
        """Return the values of [G, M, P] at some positions, in the layout of `outputs`."""
        groups, rows, _ = targets.shape
        tiled = targets[:, :, positions].reshape(groups, rows, *self.position_layout)
        return tiled.transpose(0, 2, 1, 3)

    def outputs(self, weight: Float32Array, inputs: Float32Array) -> Float32Array:
        """Return weight [G, A, M, T] times inputs from `inputs_at`, plus bias: [G, B, M, S]."""
        input_tiles = inputs.transpose(2, 0, 3, 4, 1)  # [G, B, A, T, S]
        products = weight[:, None] @ input_tiles  # [G, B, A, M, S], one for each tile of weights
        return np.asarray(products.sum(axis=2) + self.bias)

    def weight_gradient(self, output_gradient: Float32Array, inputs: Float32Array) -> Float32Array:
        """Return the gradient by the weight [G, A, M, T] from that by the outputs [G, B, M, S]."""
        input_tiles = inputs.transpose(2, 0, 3, 1, 4)  # [G, B, A, S, T]
        products = output_gradient[:, :, None] @ input_tiles  # [G, B, A, M, T]
        return np.asarray(products.sum(axis=1))

    def untile(self, tiled: Float32Array) -> Float32Array:
        """Return values in tiles, [G, A, M, T], as rows of K values, [G, M, K]."""
        groups, tile_count, rows, tile_size = tiled.shape
        padded = tiled.transpose(0, 2, 1, 3).reshape(groups, rows, tile_count * tile_size)
        return padded[:, :, : self.row_width]


def tile_layout(count: int, *, drop_remainder: bool = False) -> tuple[int, int]:
    """Return (number of tiles, their size) for a count; all tiles have the same size.

    The tiles cover the count, or with `drop_remainder` do not reach beyond it, so that a few
    elements may be left out.
    """
    tiles = max(-(-count // TILE), 1)  # rounded up
    size = -(-count // tiles)
    if drop_remainder:
        size = count // tiles
    return tiles, max(size, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaParams:
    """AMCT's parameters of ada_quantize.

    Attributes:
        num_iteration: number of iterations.
        reg_param: factor of the regularizer.
        beta_range: exponent of the regularizer at its start and at the end.
        warm_start: share of the iterations without the regularizer.
    """

    num_iteration: int = 10000
    reg_param: float = 0.01
    beta_range: tuple[float, float] = (20.0, 2.0)
    warm_start: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaProblem:
    """Input of AdaRound for a layer with G groups of M output channels, at P positions.

    Attributes:
        weight: float32 [G, M, K].
        scale: scale of each channel, float32 [G, M, 1].
        inputs: inputs of the layer downstream of rounded layers, float32 [P, G, K].
        targets: outputs of the float layer, float32 [P, G, M].
        bias: bias included in the targets, float32 [G, M].
        activation: activation after the layer.
        error_factor: the error of the output is so many times AMCT's mean over positions.
    """

    weight: Float32Array
    scale: Float32Array
    inputs: Float32Array
    targets: Float32Array
    bias: Float32Array
    activation: AdaActivation = field(default_factory=AdaActivation)
    error_factor: float = 1.0

    def activated_targets(self) -> Float32Array:
        """Return the targets after the activation, [G, M, P]."""
        values = self.targets.transpose(1, 2, 0)[:, None]  # [G, 1, M, P]
        return np.ascontiguousarray(self.activation.value(values)[:, 0])

    def blocks(self) -> list[AdaProblem]:
        """Split into independent problems of at most 64 output channels."""
        groups, rows, _ = self.weight.shape
        groups_per_block = max(TILE // rows, 1)
        blocks = []
        for group in range(0, groups, groups_per_block):
            block_groups = slice(group, group + groups_per_block)
            for row in range(0, rows, TILE):
                blocks.append(self._select(block_groups, slice(row, row + TILE)))
        return blocks

    def _select(self, groups: slice, rows: slice) -> AdaProblem:
        """Return the problem of some groups and of some output channels of each."""
        return AdaProblem(
            weight=self.weight[groups, rows],
            scale=self.scale[groups, rows],
            inputs=self.inputs[:, groups],
            targets=self.targets[:, groups, rows],
            bias=self.bias[groups, rows],
            activation=self.activation.select(groups, rows),
            error_factor=self.error_factor,
        )


def join_blocks(problem: AdaProblem, blocks: Sequence[Int8Array]) -> Int8Array:
    """Join the integers of `problem.blocks()` to [G, M, K]."""
    blocks_per_group = -(-problem.weight.shape[1] // TILE)  # rounded up
    groups = []
    for start in range(0, len(blocks), blocks_per_group):
        groups.append(np.concatenate(blocks[start : start + blocks_per_group], axis=1))
    return np.concatenate(groups)


def round_block(
    problem: AdaProblem, params: AdaParams, *, step: Callable[[], None] = lambda: None
) -> Int8Array:
    """Round the weights of a block of a layer by AMCT's AdaRound; return integers, int8 [G, M, K].

    During the search a weight's code is ``floor(w / scale) + height``. The height, 0 to 1, is a
    clipped sigmoid of a variable, `alpha`, which gradient steps change so that the error of the
    layer's output falls. After the warm start a regularizer drives each height to 0 or 1: the
    weight is rounded down or up.

    Args:
        problem: the block, at most 64 output channels.
        params: parameters of the search.
        step: called after each iteration, to show the progress.

    Raises:
        CalibrationError: squares of the outputs are not finite.
    """
    tiles = Tiles(problem.weight, problem.scale, problem.bias, problem.inputs)
    targets = problem.activated_targets()
    floor_codes, alpha = initial_alpha(tiles.weight, tiles.scale)
    adam = Adam(alpha)
    generator = np.random.default_rng(0)
    for iteration in range(params.num_iteration):
        positions = tiles.draw_positions(generator)
        heights, height_slopes = heights_of(alpha)
        # derivative of the loss by the heights, then by alpha
        gradient = error_slope(problem, tiles, floor_codes + heights, targets, positions)
        if iteration >= params.num_iteration * params.warm_start:
            exponent = regularizer_exponent(params, iteration)
            gradient += regularizer_slope(heights, params.reg_param, exponent)
        gradient *= height_slopes
        adam.step(alpha, gradient)  # changes alpha

        is_checked = iteration % _CHECK_INTERVAL == 0 or iteration == params.num_iteration - 1
        if is_checked and not np.isfinite(adam.squares).all():
            raise CalibrationError(
                "AdaRound's loss must be finite, got a layer whose outputs have squares that are"
                " not"
            )
        step()
    heights, _ = heights_of(alpha)
    codes = tiles.untile(np.rint(floor_codes + heights))
    return np.asarray(np.clip(codes, _MIN_CODE, _MAX_CODE), np.int8)


def initial_alpha(weight: Float32Array, scale: Float32Array) -> tuple[Float32Array, Float32Array]:
    """Return (floor of weight / scale, alpha whose height is the fraction)."""
    steps = weight / scale
    floor_codes = np.floor(steps)
    fraction = steps - floor_codes
    # solves fraction = stretch * sigmoid(alpha) + gamma for alpha
    inverse_sigmoid = _STRETCH / (fraction - _GAMMA)
    return floor_codes, -np.log(inverse_sigmoid - _ONE)


def heights_of(alpha: Float32Array) -> tuple[Float32Array, Float32Array]:
    """Return (h, its derivative by alpha, which is 0 where h is clipped)."""
    sigmoids = sigmoid(alpha)
    unclipped_heights = sigmoids * _STRETCH + _GAMMA
    heights = np.clip(unclipped_heights, np.float32(0), _ONE)
    derivative = sigmoids * ((_ONE - sigmoids) * _STRETCH)
    derivative *= heights == unclipped_heights
    return heights, derivative


def regularizer_exponent(params: AdaParams, iteration: int) -> float:
    """Return the exponent at an iteration after the warm start."""
    warm_start_end = params.warm_start * params.num_iteration
    progress = (iteration - warm_start_end) / (params.num_iteration - warm_start_end)
    first_beta, last_beta = params.beta_range
    falling_cosine = 1 + math.cos(progress * math.pi)  # from 2 to 0
    return last_beta + 0.5 * (first_beta - last_beta) * falling_cosine


def regularizer_slope(heights: Float32Array, reg_param: float, beta: float) -> Float32Array:
    """Return the derivative of reg_param * sum(1 - |2 h - 1|^beta) by h."""
    distance = heights * np.float32(2) - _ONE
    powers = np.power(np.abs(distance), np.float32(beta - 1))
    signed_powers = np.copysign(powers, distance)
    return np.asarray(signed_powers * np.float32(-2 * reg_param * beta))


def error_slope(
    problem: AdaProblem,
    tiles: Tiles,
    codes: Float32Array,
    targets: Float32Array,
    positions: Int64Array,
) -> Float32Array:
    """Return the derivative of the output's mean squared error at some positions by the codes.

    The output is activation(clip(codes) * scale @ inputs + bias); its error is the difference from
    the targets.

    Args:
        problem: the layer, for its activation function and the factor of its error.
        tiles: weight and inputs of the layer, cut into tiles.
        codes: weight / scale between integers, during the search; in the layout of the tiles.
        targets: the float model's values after the activation, at all positions.
        positions: the positions of this iteration.
    """
    inputs = tiles.inputs_at(positions)
    outputs = tiles.outputs(np.clip(codes, _MIN_CODE, _MAX_CODE) * tiles.scale, inputs)

    # the chain rule: the derivative by the output of the layer
    gradient = problem.activation.value(outputs) - tiles.targets_at(targets, positions)
    gradient *= problem.activation.derivative(outputs)
    gradient *= np.float32(2 * problem.error_factor / len(positions))

    # by the weight, by weight / scale, and 0 where clipping makes the code constant
    code_gradient = tiles.weight_gradient(gradient, inputs)
    code_gradient *= tiles.scale
    code_gradient *= (codes >= _MIN_CODE) & (codes <= _MAX_CODE)
    return code_gradient


class Adam:
    """State of the Adam optimizer for one array.

    Attributes:
        mean: decaying mean of the gradients.
        squares: decaying mean of their squares.
        steps: number of steps.
    """

    def __init__(self, x: Float32Array) -> None:
        self.mean = np.zeros_like(x)
        self.squares = np.zeros_like(x)
        self.steps = 0

    def step(self, x: Float32Array, gradient: Float32Array) -> None:
        """Update `x` in place by one step against its gradient."""
        self.steps += 1
        self.mean *= np.float32(_BETA1)
        self.mean += np.float32(1 - _BETA1) * gradient
        self.squares *= np.float32(_BETA2)
        with np.errstate(over="ignore"):
            self.squares += np.float32(1 - _BETA2) * gradient * gradient
        # both means start at 0; these factors make up for it
        root = np.sqrt(self.squares)
        root /= np.float32(math.sqrt(1 - _BETA2**self.steps))
        root += _EPSILON
        step_size = np.float32(_LEARNING_RATE / (1 - _BETA1**self.steps))
        x -= step_size * (self.mean / root)
