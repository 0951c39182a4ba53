"""What is told of layers that are not int8 throughout, and which chips take them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from deploy.graph.half import wide_nodes
from deploy.graph.index import Graph
from deploy.targets.ascend.bits import named

if TYPE_CHECKING:
    from deploy.targets.ascend.quant_layer import QuantLayer
    from deploy.targets.ascend.recipe import Recipe
    from deploy.targets.ascend.record import LayerRecord

# hicann/ge: SetM1OfQuant packs DT_INT16 for Ascend035 alone; its page on quantizable layers speaks
# of INT16 for IPV350 alone. hicann/ops-nn: AscendQuant makes int8 and int4, of fixed shapes.
_NANO = "which atc takes for Nano chips (Ascend035) alone"
_FOUR = "for which chips without AscendQuant to int4 have no .om (Ascend910B has it)"
# hicann/amct, PackInt4WeightPass; hicann/ge has nothing that unpacks it
_PACKED = (
    "two to a byte along the input channels: AMCT's own layout, which the open parts of atc do not"
    " read"
)
_TYPING = (
    *("--precision_mode", "--precision_mode_v2", "--keep_dtype", "--modify_mixlist"),
    "--customize_dtypes",
)
_FORCED = (
    "scale_d is held in float16, and scale_w * scale_d is cut to the 10 bits of mantissa that Nano"
    " chips (Ascend035) read"
)


def widths(records: Mapping[str, LayerRecord]) -> Iterator[str]:
    """Sentences on layers that are not int8 throughout, and who takes that."""
    for bits, whose in ((16, _NANO), (4, _FOUR)):
        names = [name for name, one in records.items() if one.act_bits == bits]
        if names:
            yield f"Activations of {named(names)} are of {bits} bits, {whose}."
    if any(one.act_bits != 8 for one in records.values()):
        yield "The Q/DQ model has those layers in float: AMCT's convert takes int8 alone."
    names = [name for name, one in records.items() if one.weighted and one.weight_bits == 4]
    if names:
        yield f"Weights of {named(names)} are of 4 bits, {_PACKED}."
    if any(one.force_fp16 for one in records.values()):
        yield f"FORCE_FP16_QUANT: {_FORCED}."


def narrow(recipe: Recipe, flags: Collection[str]) -> Iterator[str]:
    """A sentence on nodes that the .om computes in float16, which is too narrow for them.

    Args:
        recipe: what is built.
        flags: of atc; one that says in what it computes settles it.
    """
    if any(flag.partition("=")[0] in _TYPING for flag in flags):
        return
    known = {n: max(-one.observed_min, one.observed_max) for n, one in recipe.ranges.items()}
    why = wide_nodes(Graph(recipe.model), known, but=recipe.layers.keys())
    if why:
        yield (
            "atc computes in float16 what is not int8, which is too narrow for"
            f" {', '.join(why)}: {next(iter(why.values()))}; write these names to a file, a line"
            " each, and give --atc-flag=--keep_dtype=FILE"
        )


def shared(names: Collection[str], model: str) -> Iterator[str]:
    """A sentence on layers that share weights, and what AMCT is to be given.

    Args:
        names: of the layers.
        model: name of the files.
    """
    if names:
        yield (
            f"{named(names)} share weights with other nodes, and have their own in the files."
            " AMCT itself refuses such layers: with this config or record give it"
            f" {model}_modified_model.onnx."
        )


def halves(layers: Mapping[str, QuantLayer], names: Collection[str]) -> Iterator[str]:
    """A sentence on layers between float16 tensors, whose names are given."""
    found = [name for name, one in layers.items() if one.layer.output in names]
    if found:
        yield (
            f"{named(found)} read and give float16, as in the file; measured and judged in float32."
        )
