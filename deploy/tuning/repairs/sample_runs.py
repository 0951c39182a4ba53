"""Input patches of layers, from runs of the float model on a few samples.

Samples run in parallel, one thread each, and results are stored in sample order: no result depends
on the number of threads.
"""

import math
from collections.abc import Iterator, Sequence

import onnx

from calibrators.rounding import extract_patches
from deploy.feed.parallel import Sample, run_in_order
from deploy.graph.bounds import make_window
from deploy.graph.edit import copy_with_outputs
from deploy.graph.index import names_of
from deploy.runtimes.ort import OrtSession
from deploy.tensors import Array
from deploy.tuning.repairs.repair_layers import FloatArray, WeightedLayer

_MAX_VALUES = 1 << 25  # in memory at a time; further layers need another run of the model
_LARGE_PATCH = 64  # values of a patch from which a layer needs all patches
_MIN_PATCH_SHARE = 0.25  # of the patches, for smaller ones: a depthwise layer has few weights a row


def layer_patches(
    model: onnx.ModelProto,
    layers: Sequence[WeightedLayer],
    samples: Sequence[Sample],
    *,
    max_patches: int,
    threads: int,
) -> Iterator[tuple[WeightedLayer, list[FloatArray]]]:
    """Yield each layer with its input patches from the float model, an array for each sample.

    A patch holds the input values that one output value is made of. An array is [groups, K, P], of
    P patches with K values each; all samples together give a layer about `max_patches`, and fewer
    if they are small. Layers are left out that have no such patches here: a ConvTranspose whose
    pads follow from its output's size.
    """
    supported_layers = [layer for layer in layers if not _has_derived_pads(layer)]
    for portion in _split_by_memory(supported_layers, max_patches):
        patches_by_sample = _run_with_patches(
            model, portion, samples, max_patches / len(samples), threads
        )
        for index, layer in enumerate(portion):
            yield layer, [sample_patches[index] for sample_patches in patches_by_sample]


def _run_with_patches(
    model: onnx.ModelProto,
    layers: Sequence[WeightedLayer],
    samples: Sequence[Sample],
    max_sample_patches: float,
    threads: int,
) -> list[list[FloatArray]]:
    """Run the model; return, for each sample, the input patches of each layer.

    A patch holds the input values that one output value of a layer is made of. A layer has
    [groups, K, P] patches in a sample, with K values each and P at most `max_sample_patches`,
    rounded up; a layer that needs fewer has a share of that (`_patch_share`).
    """
    graph_inputs = names_of(model.graph.input)
    inner_tensors = dict.fromkeys(
        layer.input for layer in layers if layer.input not in graph_inputs
    )
    session = OrtSession.open(
        copy_with_outputs(model, inner_tensors),
        threads=1,
        spin=False,
        reuse_memory=True,
        int8_kernels=False,  # a Q/DQ model is computed as written, in float between its pairs
    )

    def run(_worker: int, number: int, sample: Sample) -> list[FloatArray]:
        values = {**sample, **session.run(sample)}
        sample_patches = []
        for layer in layers:
            count = math.ceil(_patch_share(layer) * max_sample_patches)
            # the number of the sample decides which of its patches are taken
            sample_patches.append(patches(layer, values[layer.input], number, count))
        return sample_patches

    patches_by_sample: list[list[FloatArray]] = []
    run_in_order(
        samples,
        run,
        lambda _number, sample_patches: patches_by_sample.append(sample_patches),
        threads=threads,
    )
    return patches_by_sample


def _patch_share(layer: WeightedLayer) -> float:
    """Return the share of the allowed patches (`max_patches`) that a layer needs.

    It is 1 for a layer with large patches, which has many weights a row, and less for others.
    """
    return min(max(layer.patch_size / _LARGE_PATCH, _MIN_PATCH_SHARE), 1.0)


def _has_derived_pads(layer: WeightedLayer) -> bool:
    """Whether it is a ConvTranspose whose pads follow from the size of its output."""
    has_auto_pad = layer.attributes.get("auto_pad", b"NOTSET") != b"NOTSET"
    return layer.is_transposed_conv and ("output_shape" in layer.attributes or has_auto_pad)


def _split_by_memory(
    layers: Sequence[WeightedLayer], max_patches: int
) -> Iterator[list[WeightedLayer]]:
    """Split the layers, in order, so that the patches of each portion fit into memory.

    `max_patches`: of a layer with large patches, over all samples; others need a share of it.
    """
    portion: list[WeightedLayer] = []
    portion_values = 0.0
    for layer in layers:
        patch_count = _patch_share(layer) * max_patches  # in each group
        values = patch_count * layer.groups * layer.patch_size
        if portion and portion_values + values > _MAX_VALUES:
            yield portion
            portion = []
            portion_values = 0.0
        portion.append(layer)
        portion_values += values
    if portion:
        yield portion


def patches(layer: WeightedLayer, value: Array, number: int, max_patches: int) -> FloatArray:
    """Return at most `max_patches` patches of one input of a layer (`calibrators.rounding`)."""
    window = None
    if layer.kind in ("Conv", "ConvTranspose"):
        kernel = layer.array.shape[2:]
        window = make_window(layer.attributes, kernel, transposed=layer.is_transposed_conv)
    return extract_patches(value, window, number, max_patches)
