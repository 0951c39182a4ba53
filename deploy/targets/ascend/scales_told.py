"""What a build says of how AMCT's searches found the scales, and on what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.targets.ascend.amct_calibration import Recorded, RecordPlan
    from deploy.targets.ascend.config_types import QuantConfig
    from deploy.targets.ascend.quant_layer import QuantLayer


def searches(config: QuantConfig) -> str:
    """The searches that gave the scales, in words."""
    from deploy.targets.ascend.weight_rounding import algorithms

    enabled = config.entries().values()
    searches = sorted({layer.activation.act_algo.upper() for layer in enabled})
    return f"AMCT's {algorithms(config)} and {' and '.join(searches)}"


def calibration_notes(found: Recorded, plan: RecordPlan) -> Iterator[str]:
    """Sentences on what was searched, on how much, and on layers whose scale says nothing."""
    yield f"Scales: {searches(plan.config)} over {_batches(plan)}."
    yield from _rounding_notes(found, plan)
    yield from plan.config.told
    if found.kept_bytes:
        yield f"Exact IFMR kept {found.kept_bytes / 2**20:.1f} MiB of activations in memory."
    if found.dead:
        yield (
            f"The input of {len(found.dead)} layers was zero on every sample, so their scale says"
            f" nothing: {', '.join(found.dead[:3])}."
        )
    if found.faint:
        yield (
            f"The input of {len(found.faint)} layers is so small (under 1.2e-7 a code) that AMCT's"
            " searches give it scale 1, which rounds all of it to zero:"
            f" {', '.join(found.faint[:3])}; --keep-float keeps them in float."
        )
    if plan.used < plan.samples:
        of = plan.samples * plan.images
        yield (
            f"batch_num {plan.config.batch_num} of the configuration:"
            f" {plan.used * plan.images} of {of} samples were used."
        )


def _batches(plan: RecordPlan) -> str:
    """What was used, in images, and how they were put together."""
    images = plan.used * plan.images
    size = plan.images * plan.together
    if size == 1:
        return f"{images} samples"
    last = images % size
    partial = f", the last one of {last}" if last else ""
    return f"{images} samples in {plan.config.batch_num} batches of {size}{partial}"


def _rounding_notes(found: Recorded, plan: RecordPlan) -> Iterator[str]:
    from deploy.targets.ascend.weight_rounding import MOST_PLACES, MOST_SAMPLES

    if found.adaround is None:
        return
    least, most = (f"{100 * share:.0f} %" for share in found.adaround)
    yield (
        f"AdaRound rounded the weights of {len(plan.adaround)} layers by at most {MOST_PLACES}"
        f" places of the first {min(plan.used, MOST_SAMPLES)} samples; their outputs"
        f" err there by {least} to {most} of what the nearest codes would. The rounding is in the"
        " models, not in the record: `calib8 ascend deploy` takes it from the modified model."
    )


def chips(layers: Mapping[str, QuantLayer]) -> Iterator[str]:
    """A sentence where it depends on the chip whether int8 is of use."""
    count = sum(one.layer.two_activations for one in layers.values())
    if count:
        yield (
            f"MatMuls of two activations in int8: {count}. Huawei says that this gains on Atlas A2,"
            " A3 and 200I/500 A2 alone, and loses accuracy on other chips."
        )
