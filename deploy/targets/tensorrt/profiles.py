"""Optimization profiles: the shapes of dynamic inputs that an engine accepts and is tuned for."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from deploy.graph.index import dims, runtime_inputs
from deploy.targets.base import BuildRequest
from deploy.targets.shape_ranges import Shape, ShapeRange, is_static, sample_shape_range

InputShapes = Mapping[str, Sequence[int | str | None]]


class InputShapeRange(NamedTuple):
    """Shapes of one dynamic input; the engine is tuned and calibrated for `opt_shape`."""

    min_shape: Shape
    opt_shape: Shape
    max_shape: Shape


def model_input_shapes(request: BuildRequest) -> InputShapes:
    """Return the shapes of the model's inputs; a dynamic dimension is a name, None or not > 0."""
    return {value.name: dims(value) or () for value in runtime_inputs(request.model.graph)}


def sample_profiles(
    request: BuildRequest, *, max_batch: int, fixed: bool, tuned_shapes: Mapping[str, Shape]
) -> dict[str, InputShapeRange]:
    """Return dynamic input -> the shapes that an engine accepts to run all samples of a request.

    Args:
        request: the build request.
        max_batch: largest batch, if the batch is dynamic.
        fixed: accept only the shapes that the engine is tuned for, as DLA does.
        tuned_shapes: input -> the shape that the engine is tuned for; empty to tune it for the
            sample of median size.
    """
    sample_range = sample_shape_range(request)
    return profiles_for(
        model_input_shapes(request),
        tuned_shapes or sample_range.median_sample,
        max_batch=max_batch,
        batch_inputs=request.batch_inputs,
        sample_range=sample_range,
        fixed=fixed,
    )


def profiles_for(
    input_shapes: InputShapes,
    opt_shapes: Mapping[str, Shape],
    *,
    max_batch: int,
    batch_inputs: Collection[str] | None = None,
    sample_range: ShapeRange | None = None,
    fixed: bool = False,
) -> dict[str, InputShapeRange]:
    """Return dynamic input -> its profile: the shapes that an engine accepts and is tuned for.

    Dynamic dimensions cover every size of the samples; a dynamic batch (dimension 0, see
    `deploy.feed.batch_axis`) covers 1 to `max_batch`.

    Args:
        input_shapes: input -> its shape in the model; a dynamic size is a name, None or not > 0.
        opt_shapes: input shapes that the engine is tuned for.
        max_batch: largest batch, if the batch is dynamic.
        batch_inputs: inputs whose first dimension is the batch; None for all.
        sample_range: smallest and largest shapes of all samples; None if all are `opt_shapes`.
        fixed: accept `opt_shapes` only, as DLA does.
    """
    profiles = {}
    for name, input_shape in input_shapes.items():
        opt_shape = opt_shapes[name]
        if all(map(is_static, input_shape)):  # such an input has no profile
            continue

        min_shape = max_shape = opt_shape
        if not fixed:
            if sample_range is not None:
                min_shape = sample_range.min_sizes[name]
                max_shape = sample_range.max_sizes[name]
            has_batch = batch_inputs is None or name in batch_inputs
            if has_batch and not is_static(input_shape[0]):  # a dynamic batch
                largest_batch = max(max_batch, opt_shape[0], max_shape[0])
                min_shape = (1, *min_shape[1:])
                max_shape = (largest_batch, *max_shape[1:])
        profiles[name] = InputShapeRange(min_shape, opt_shape, max_shape)
    return profiles
