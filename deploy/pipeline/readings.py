"""Other readings of the pictures: whether the float model is surer of another color order or scale.

Wrong preprocessing raises no error. But a detector finds fewer boxes, and a classifier is less
sure, so a few samples are run in other readings too, and compared by a sign test::

    sample    1    2    3    4 ... 16
    as RGB   1.7  0.0  0.9  2.1          squared scores of FP32's boxes, or its best probability
    as BGR   2.6  0.0  1.8  2.0
    better    +    =    +    -           13 of 16, or 6 of 6, are more than chance

A reading ends once the samples left cannot make it win, so right inputs take a few runs. A wrong
scale saturates scores, which looks sure: other scales are tried only for a detector that finds next
to nothing, and whose first layer does not contradict (`deploy.calibration.input_checks`). With
labels, readings are tried if most images are of another class than FP32's, and count by the images
that are right.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import sqrt
from typing import NamedTuple

import numpy as np

from deploy.calibration.calibration_result import CalibrationResult
from deploy.calibration.input_checks import check_input_samples, renormalize
from deploy.errors import ConfigError, FeedError, counted
from deploy.feed.preprocess import PRESETS, Preprocess, complete_preprocess, format_size
from deploy.feed.samples import Feed
from deploy.metrics.output_form import derive_from_first
from deploy.tasks import Metric
from deploy.tasks.boxes import BoxDetection
from deploy.tasks.detections import suppress_overlaps
from deploy.tasks.rows import Floats, activate, are_probabilities
from deploy.tasks.thresholds import BOX_SCORE
from deploy.tasks.vectors import Classes
from deploy.tensors import Array
from deploy.terminal import phase

SAMPLES = 16
MIN_DEVIATIONS = 2.4  # by which wins exceed losses: 2 % of chance
MIN_GAIN = 1.15  # confidence of a better reading, times that of the one in use
MAX_SILENT_BOXES = 4  # boxes in all samples up to which other scales are tried
MAX_BOXES = 20  # boxes a sample, on average, from which a better reading is noise
_SWAPPED_COLORS = {"rgb": "bgr", "bgr": "rgb"}
_TEXT_BY_PRESET = {
    "unit": "pixels / 255",
    "raw": "pixels of 0 to 255",
    "minus-one-to-one": "values of -1 to 1",
    "grey-half": "values of -1 to 1",
    "imagenet": "ImageNet's mean and std",
}
_AS_FED = "with the present preprocessing"

Outputs = Mapping[str, Array]
LabelledSample = tuple[Outputs, int | None]  # inputs in the reading in use, label or None


class Reading(NamedTuple):
    """A color order and scale of pixel values that the model may have learned from.

    Attributes:
        text, current_text: this reading and the one in use, as in the sentence "FP32 finds 14 boxes
            `text`, but 10 `current_text`", such as "as RGB" and "as BGR".
        remedy: what the user should check.
        preprocess: the preprocessing; its size and resize are not used.
    """

    text: str
    current_text: str
    remedy: str
    preprocess: Preprocess


def list_readings(
    calibration: CalibrationResult, current_preprocess: Preprocess, *, with_scales: bool
) -> Iterator[Reading]:
    """Yield other readings of the pictures: of the metadata, of swapped colors, of other scales.

    Args:
        calibration: the model and its calibration data.
        current_preprocess: the reading in use.
        with_scales: whether other scales are tried. A scale is left out if the model's first layer
            shows that it learned from another one.
    """
    # the reading that the model's metadata declare. If it does not fit the input, it is left out: a
    # note was made of that when the model was loaded
    spec = calibration.loaded.inputs[0]
    metadata = calibration.loaded.metadata_preprocess
    if metadata is not None and metadata.preprocess is not None:
        with suppress(ConfigError, FeedError):
            declared_preprocess, _ = complete_preprocess(metadata.preprocess, spec)
            yield Reading(
                text=f"as {metadata.source} says",
                current_text=_AS_FED,
                remedy="leave --preprocess, --color, --mean and --std out",
                preprocess=declared_preprocess,
            )

    # red and blue swapped
    color = current_preprocess.color
    if color in _SWAPPED_COLORS:
        other_color = _SWAPPED_COLORS[color]
        yield Reading(
            text=f"as {other_color.upper()}",
            current_text=f"as {color.upper()}",
            remedy=f"check --color {other_color}",
            preprocess=replace(current_preprocess, color=other_color),
        )

    # other scales. The first layer of the model may contradict one: it is read in the model before
    # cleaning, if the user's file can be read
    if not with_scales or not spec.dtype.startswith("float"):
        return
    model = calibration.subject.read_original() or calibration.subject.model
    (sample,) = calibration.feed.first_samples(1)
    for preset_name, scale_text in _TEXT_BY_PRESET.items():
        preset = PRESETS[preset_name]
        if preset.color is not None and preset.channels != current_preprocess.channels:
            continue  # it is of color pictures, and the model takes grey ones, or the reverse
        scaled_preprocess = replace(
            current_preprocess, scale=preset.scale, mean=preset.mean, std=preset.std
        )
        scaled_sample = {
            spec.name: renormalize(sample[spec.name], current_preprocess, scaled_preprocess)
        }
        contradictions = check_input_samples([scaled_sample], scaled_preprocess, model)
        if not contradictions:
            yield Reading(
                text=f"with {scale_text}",
                current_text=_AS_FED,
                remedy=f"check --preprocess {preset_name}",
                preprocess=scaled_preprocess,
            )


@phase("trying other colors and scales")
def find_better_reading(
    calibration: CalibrationResult, metric: Metric, evaluation: Feed | None
) -> str:
    """Return a sentence on another reading of the pictures that FP32 is clearly surer of.

    A reading is a color order and scale of pixel values.

    Args:
        calibration: the model, and the reading in use.
        metric: the task that the user set, if any, and what the model's file says of it.
        evaluation: evaluation images if the float model gets most of their labels wrong; None if it
            gets most of them right, or without labels.

    Returns:
        The sentence; "" if no reading is clearly better. If the labels are mostly missed in every
        reading, a sentence on how the pictures are cropped, if they seem cropped needlessly.
    """
    current_preprocess = calibration.feed.preprocess
    if current_preprocess is None or not _is_convertible(calibration):
        return ""

    evaluation_set = calibration.evaluation_set
    good_keys: list[int] = []  # of the samples that could be read

    def read_with_outputs() -> Iterator[tuple[Outputs, Outputs]]:
        """Yield (sample, its float outputs) in the reading in use; store the samples' keys."""
        for key, sample in evaluation_set.subset.spread_with_keys(SAMPLES):
            good_keys.append(key)
            yield sample, evaluation_set.reference_outputs.get(key, sample)

    # the task is recognised by the float model's outputs for the first samples
    output_form, samples_with_outputs = derive_from_first(read_with_outputs(), metric)
    task = output_form.task
    if not isinstance(task, BoxDetection | Classes):
        return ""
    if isinstance(task, Classes) and task.are_numbers:  # numbers of classes, without scores
        return ""

    def score(inputs: Outputs, label: int | None) -> Floats:
        """Run the float model on a sample's inputs; return the scores of its outputs."""
        outputs = evaluation_set.reference_outputs.recompute(inputs)
        return sample_scores(task, inputs, outputs, label)

    # the scores in the reading in use: with labels, of the images that have one
    is_detector = isinstance(task, BoxDetection)
    labelled_samples = [] if is_detector else read_labelled(evaluation)
    has_labels = bool(labelled_samples)
    if has_labels:
        current_scores = [score(inputs, label) for inputs, label in labelled_samples]
    else:
        current_scores = [
            sample_scores(task, inputs, outputs) for inputs, outputs in samples_with_outputs
        ]
    current_count = count_clear_scores(current_scores)

    # a wrong scale can saturate scores, which looks sure, so other scales are tried only if the
    # float model misses most labels (so it does if there are any here) or finds next to no boxes
    finds_few_boxes = is_detector and current_count <= MAX_SILENT_BOXES
    with_scales = finds_few_boxes or has_labels
    for reading in list_readings(calibration, current_preprocess, with_scales=with_scales):
        # without labels the same samples are read again, one at a time. `spread_with_keys` might
        # choose others, in place of those that proved to be bad
        good_samples = calibration.feed.samples_by_key(good_keys)
        scores = score_reading(
            labelled_samples or ((inputs, None) for _, inputs in good_samples),
            current_scores,
            score,
            current_preprocess,
            reading.preprocess,
        )
        if scores is None or not is_much_surer(scores, current_scores):
            continue
        # a detector that is surer, but finds no more boxes, would give a sentence of equal numbers
        if not is_detector or count_clear_scores(scores) > current_count:
            count_template = _count_template(len(labelled_samples), is_detector=is_detector)
            return describe_reading(reading, scores, current_scores, count_template)
    return describe_crop(calibration.feed, current_preprocess) if has_labels else ""


def _count_template(labelled_count: int, *, is_detector: bool) -> str:
    """Return the part of the sentence that counts what a reading gets right; {} is the number.

    A detector finds boxes. A classifier with labels gets images right; without labels it has only
    probabilities, and the part is "".
    """
    if labelled_count:
        return "gets {} of " + f"{counted(labelled_count, 'image')} right"
    return "finds {} boxes" if is_detector else ""


def _is_convertible(calibration: CalibrationResult) -> bool:
    """Whether samples can be converted to another reading: each is a single picture.

    A Q/DQ model was not calibrated on the pictures, so its preprocessing is not doubted.
    """
    loaded = calibration.loaded
    return loaded.qdq is None and len(loaded.inputs) == 1 and calibration.feed.batch == 1


def score_reading(
    samples: Iterable[LabelledSample],
    current_scores: Sequence[Floats],
    score: Callable[[Outputs, int | None], Floats],
    current_preprocess: Preprocess,
    other_preprocess: Preprocess,
) -> list[Floats] | None:
    """Return the scores of each sample in another reading, such as another order of the colors.

    None if the float model is not surer of more samples than chance would give (a sign test, see
    the module). As soon as the remaining samples cannot change that, they are not run.

    Args:
        samples: the samples.
        current_scores: scores of each sample in the reading in use.
        score: (inputs, label or None) -> `sample_scores` of the float model's outputs.
        current_preprocess: the reading in use.
        other_preprocess: the other one.
    """
    scores: list[Floats] = []
    surer_count = less_sure_count = 0
    for (sample, label), current_sample_scores in zip(samples, current_scores, strict=True):
        converted_sample = {
            name: renormalize(array, current_preprocess, other_preprocess)
            for name, array in sample.items()
        }
        other_scores = score(converted_sample, label)
        scores.append(other_scores)
        confidence = confidence_of(other_scores)
        current_confidence = confidence_of(current_sample_scores)
        surer_count += confidence > current_confidence
        less_sure_count += confidence < current_confidence
        remaining_count = len(current_scores) - len(scores)
        if not is_beyond_chance(surer_count + remaining_count, less_sure_count):
            return None
    return scores


def read_labelled(evaluation: Feed | None) -> list[LabelledSample]:
    """Return spread evaluation samples with their labels; none without labels of classes."""
    if evaluation is None or not evaluation.labels:
        return []
    keys = evaluation.spread_keys(evaluation.count)
    label_by_key = dict(zip(keys, evaluation.labels, strict=False))
    samples = evaluation.samples_by_key(evaluation.spread_keys(SAMPLES))
    return [(sample, label_by_key[key]) for key, sample in samples]


def sample_scores(
    task: BoxDetection | Classes, inputs: Outputs, outputs: Outputs, label: int | None = None
) -> Floats:
    """Return the scores of a sample's boxes; one score if the outputs are classes.

    That one is the probability of the best class. With a label it is 1.0 if the best class is the
    label, else 0.0.
    """
    if isinstance(task, BoxDetection):
        return suppress_overlaps(task.decoder.boxes(inputs, outputs)).scores
    class_scores = outputs[task.outputs[0]].reshape(1, -1).astype(np.float64)
    if label is not None:
        return np.array([float(class_scores.argmax() == label)])
    if not are_probabilities(class_scores):
        class_scores = activate(class_scores, "softmax")
    return np.array([class_scores.max()])


def confidence_of(scores: Floats) -> float:
    """Return how sure the float model is of a sample."""
    return float(np.square(scores).sum())


def count_clear_scores(scores: Sequence[Floats]) -> int:
    """Return the number of scores above `BOX_SCORE`: of boxes, or of images that are right."""
    return int((np.concatenate(scores) > BOX_SCORE).sum())


def is_much_surer(scores: Sequence[Floats], current_scores: Sequence[Floats]) -> bool:
    """Whether the float model is much surer of all samples together than in the reading in use.

    Args:
        scores: of each sample, in another reading of the pictures.
        current_scores: of each sample, in the reading in use.
    """
    confidence = np.sum(list(map(confidence_of, scores)))
    current_confidence = np.sum(list(map(confidence_of, current_scores)))
    has_too_many_boxes = count_clear_scores(scores) > MAX_BOXES * len(scores)  # they are noise
    return bool(confidence > MIN_GAIN * current_confidence and not has_too_many_boxes)


def is_beyond_chance(surer_count: int, less_sure_count: int) -> bool:
    """Whether the float model is surer of more samples than chance would give (a sign test).

    By chance the difference of the two numbers is about 0. Its deviation is the root of their sum,
    the number of samples of which the model is not equally sure.
    """
    deviation = sqrt(surer_count + less_sure_count)
    return surer_count - less_sure_count >= MIN_DEVIATIONS * deviation


def describe_crop(feed: Feed, preprocess: Preprocess) -> str:
    """Return a warning if pictures that have the input's size already are cropped; else ""."""
    sizes = set()
    for preview in feed.previews():
        sizes |= {preview.source_size, preview.input_size}
    if preprocess.resize != "short-side" or sizes != {preprocess.size}:
        return ""
    if preprocess.resized_short_side == min(preprocess.input_size):  # nothing is cut off
        return ""
    return (
        f"the pictures have the input's {format_size(preprocess.input_size)} already, and are"
        f" resized to {preprocess.resized_short_side} and cropped; check --resize stretch"
    )


def describe_reading(
    reading: Reading,
    scores: Sequence[Floats],
    current_scores: Sequence[Floats],
    count_template: str,
) -> str:
    """Return a sentence on a reading that is better than the one in use.

    Such as "FP32 finds 14 boxes as RGB, but 10 as BGR; check --color rgb".

    Args:
        reading: the better reading.
        scores: scores of each sample in it, see `sample_scores`.
        current_scores: scores of each sample in the reading in use.
        count_template: what the clear scores count, such as "finds {} boxes"; "" for scores that
            are probabilities, of which the mean is told.
    """
    if count_template:
        count_text = count_template.format(count_clear_scores(scores))
        current_text = str(count_clear_scores(current_scores))
    else:
        count_text = f"is {100 * np.mean(scores):.0f} % sure"
        current_text = f"{100 * np.mean(current_scores):.0f} %"
    better_text = f"{count_text} {reading.text}"
    return f"FP32 {better_text}, but {current_text} {reading.current_text}; {reading.remedy}"
