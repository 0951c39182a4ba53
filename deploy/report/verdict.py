"""The verdict on each engine: good, doubtful, unusable or "keep FP32", with reasons.

The verdict recommends: an int8 engine is written whatever it says.

Limits of the loss are in `deploy.metrics.levels`, which the search uses too; those of the speed are
here. The user's limits (`Gates`) override both.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.errors import ConfigError, too_few
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.latency import MIN_GAIN, SpeedUp
from deploy.metrics.levels import (
    DOUBTFUL,
    FLOAT,
    FLOAT_MODEL,
    GOOD,
    LEVELS,
    MIN_OBJECTS,
    ORDER_LABELS,
    SHIFT_LABELS,
    UNUSABLE,
    check_max_loss,
    finds_objects,
    judge_accuracy,
    question_reference,
)
from deploy.report.figures import size_change_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """The user's limits.

    Attributes:
        max_loss: largest loss of accuracy, or of the task figure, 0 to 1; None uses the default
            limits.
        min_speedup: least speed-up over FP32, on a GPU over its FP16; None sets no limit.
        accept: whether the command succeeds even if an engine is unusable.

    Raises:
        ConfigError: a limit out of its range.
    """

    max_loss: float | None = None
    min_speedup: float | None = None
    accept: bool = False

    def __post_init__(self) -> None:
        """Refuse limits out of their ranges."""
        check_max_loss(self.max_loss)
        if self.min_speedup is not None and not self.min_speedup >= 0:
            raise ConfigError(f"the least speed-up is 0 or more, got {self.min_speedup}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Level of one engine, and why.

    Attributes:
        level: "good", "doubtful", "unusable" or "keep FP32".
        reasons: sentences, the most serious first.
        gated: whether a limit that the user set is missed.
        blames_float: whether the float model or its inputs are at fault, and not int8.
        blames_labels: whether the labels of the evaluation images are at fault.
        blames_randomness: whether the float model's random numbers hide what int8 loses.
        missing_calibration: number of samples to calibrate with, such as "32 or more"; "" if there
            are enough.
        missing_samples: how many more samples to judge by, such as "20 more"; "" if there are
            enough.
        assumes_inputs: whether nothing but calib8's default says how images become inputs.
    """

    level: str
    reasons: tuple[str, ...]
    gated: bool = False
    blames_float: bool = False
    blames_labels: bool = False
    blames_randomness: bool = False
    missing_calibration: str = ""
    missing_samples: str = ""
    assumes_inputs: bool = False

    @property
    def has_few_samples(self) -> bool:
        """Whether it is doubtful, and there are too few samples to tell."""
        return self.level == DOUBTFUL and bool(self.missing_calibration or self.missing_samples)

    @property
    def is_in_question(self) -> bool:
        """Whether it may be wrong: the float model, its inputs or too few samples are at fault."""
        return self.blames_float or self.has_few_samples

    @property
    def reasons_text(self) -> str:
        """The reasons as text; one on the float model begins a sentence."""
        text = "; ".join(self.reasons)
        return text.replace(f"; {FLOAT_MODEL}", f". {FLOAT_MODEL.capitalize()}")

    @property
    def text(self) -> str:
        """Level and reasons as text."""
        return ": ".join(filter(None, (self.level, self.reasons_text)))


MIN_SHRINK = 4 / 3  # size of the float file over the engine's from which the size is a gain
MIN_SAMPLES = 30  # fewer samples hide that of one class in 30
# sentences of `_describe_too_few`, `question_reference` and `deploy.calibration.input_checks`
_TOO_FEW = re.compile(r"\d+ (?P<things>.+) (?:is|are) too few; (?P<missing>.+) would do")
_TOO_NOISY = ", too noisy to be sure of"
_ASSUMED_INPUTS = (
    "pixels / 255 are calib8's default: if the model was trained with others, FP32 and int8 are"
    " wrong alike"
)
_RANDOM = f"{FLOAT_MODEL} itself draws random numbers, so what int8 loses cannot be told"
_KEPT = " kept"  # ending of the name of a figure that counts things, such as "boxes kept"
_Finding = tuple[str, str]  # level, and the reason as a sentence


def verdict(
    *,
    accuracy: Accuracy | None,
    speed: SpeedUp | None,
    int8: bool,
    gates: Gates,
    size_ratio: float | None = None,
    rival: str = "FP32",
    device_kind: str = "CPU",
    doubts: Sequence[str] = (),
    has_assumed_inputs: bool = False,
    has_random_outputs: bool = False,
    calibrated: str = "",
) -> Verdict:
    """Return the verdict on one engine: the level of its worst finding, and the reasons.

    Too few samples or objects add a reason and turn "good" into "doubtful"; no other level changes.

    Args:
        accuracy: against the float model; None if not measured.
        speed: its speed-up over its rival; None if one of them was not measured.
        int8: whether any of its nodes is quantized.
        gates: the user's limits.
        size_ratio: size of its rival's file over that of its own; None if one is not known.
        rival: name of the float engine that its speed is compared with.
        device_kind: "CPU" or "device".
        doubts: sentences on calibration data that is bad, or unlike the model's training data;
            ignored if labels show that the float model is mostly right.
        has_assumed_inputs: whether the preprocessing is calib8's default. The reasons end with a
            sentence on that, unless the float model is at fault, or labels show it mostly right.
        has_random_outputs: whether the float model itself gives other outputs at each run. Only
            figures by labels can then show what int8 loses.
        calibrated: how many of the evaluation images calibrated, as text; "" for none.
    """
    # a finding is (level, reason); `LEVELS` begins with the best level
    causes, losses = _find_causes_and_losses(accuracy, gates.max_loss, doubts, has_random_outputs)
    findings = [*losses]
    if gates.min_speedup is not None:
        findings.append(_judge_speed_limit(speed, gates.min_speedup, rival))
    elif int8 and speed is not None:  # two float engines differ only by noise
        findings.append(_judge_gain(speed, size_ratio, rival, device_kind))
    if not int8:
        findings.append((FLOAT, "no layer could be int8, the report says why"))
    findings.sort(key=lambda finding: -LEVELS.index(finding[0]))
    # what puts the float model in question comes before all other findings, even worse ones
    findings = [*causes, *findings]
    if not findings:
        return Verdict(DOUBTFUL, ("nothing was measured of it",))

    level = max((finding_level for finding_level, _ in findings), key=LEVELS.index)  # the worst
    reasons, too_few_sentences = _order_reasons(findings, level)

    loss_index = _find_loss(reasons, losses)
    if loss_index is not None and calibrated:
        reasons[loss_index] += f" ({calibrated})"

    # the samples of the accuracy are counted only if a reason is about it or about its samples
    has_accuracy_reason = bool(too_few_sentences) or loss_index is not None
    too_few_sentence = _choose_too_few(too_few_sentences, accuracy if has_accuracy_reason else None)
    if too_few_sentence:
        # it follows the figure of the loss, which it puts in question
        place = 0 if loss_index is None else loss_index + 1
        reasons.insert(place, too_few_sentence)
        if level == GOOD:
            level = DOUBTFUL

    blames_float = any(reason.startswith(FLOAT_MODEL) for reason in reasons)
    blames_labels = any(reason.endswith((SHIFT_LABELS, ORDER_LABELS)) for reason in reasons)
    assumes_inputs = has_assumed_inputs and not blames_float and not _is_mostly_right(accuracy)
    if assumes_inputs:
        reasons.append(_ASSUMED_INPUTS)

    missing_calibration, missing_samples = _read_missing(too_few_sentence)
    has_limits = gates.min_speedup is not None or gates.max_loss is not None
    return Verdict(
        level,
        tuple(reasons),
        gated=has_limits and level == UNUSABLE,
        blames_float=blames_float,
        blames_labels=blames_labels,
        blames_randomness=_RANDOM in reasons,
        missing_calibration=missing_calibration,
        missing_samples=missing_samples,
        assumes_inputs=assumes_inputs,
    )


def _find_loss(reasons: Sequence[str], losses: Sequence[_Finding]) -> int | None:
    """Return the index of the first reason that is a figure on the loss of int8; None if none is.

    `losses`: findings on int8; one that begins with the float model is a sentence, no figure.
    """
    figures = {reason for _, reason in losses if not reason.startswith(FLOAT_MODEL)}
    return next((index for index, reason in enumerate(reasons) if reason in figures), None)


def _read_missing(too_few_sentence: str) -> tuple[str, str]:
    """Return how many more samples a sentence wants, (to calibrate with, to judge by); "" for 0."""
    sentence_match = _TOO_FEW.fullmatch(too_few_sentence)
    if sentence_match is None:
        return "", ""
    missing = sentence_match["missing"]
    return (missing, "") if "calibration" in sentence_match["things"] else ("", missing)


def _choose_too_few(sentences: Sequence[str], accuracy: Accuracy | None) -> str:
    """Return the one sentence on too few samples that a verdict has; "" if there are enough.

    Too few calibration samples matter more than too few samples to measure on.

    Args:
        sentences: those of the findings.
        accuracy: the accuracy, if it or its number of samples is among the reasons; else None.
    """
    has_few_calibration_samples = any("calibration" in sentence for sentence in sentences)
    if accuracy is not None and not has_few_calibration_samples:
        sentences = [*_describe_too_few(accuracy), *sentences]
    return next(iter(sentences), "")


def _order_reasons(findings: Sequence[_Finding], verdict_level: str) -> tuple[list[str], list[str]]:
    """Return (reasons, sentences on too few samples), in the order of the findings, each once.

    A good figure is no reason of a doubtful or unusable engine, so it is left out there.

    Args:
        findings: (level, reason as a sentence) of each.
        verdict_level: level of the engine.
    """
    reasons = []
    too_few_sentences = []
    for level, reason in findings:
        is_irrelevant = level == GOOD and verdict_level not in (GOOD, FLOAT)
        if is_irrelevant or reason in reasons:
            continue
        if _TOO_FEW.fullmatch(reason):
            too_few_sentences.append(reason)
        else:
            reasons.append(reason)
    return reasons, too_few_sentences


def _find_causes_and_losses(
    accuracy: Accuracy | None,
    max_loss: float | None,
    doubts: Sequence[str],
    has_random_outputs: bool,
) -> tuple[list[_Finding], list[_Finding]]:
    """Return (causes, losses): what puts the float model in question, and what int8 loses.

    Each is a list of (level, reason). A cause doubts the inputs that the float model got, or says
    that its outputs can be of no use. The arguments are those of `verdict`; `doubts` are sentences
    on the calibration data.
    """
    causes: list[_Finding] = []
    losses: list[_Finding] = []
    if accuracy is not None:
        causes += question_reference(accuracy)
        losses += judge_accuracy(accuracy, max_loss)

    if has_random_outputs:
        # what looks like a cause may come from the random numbers, so it counts as a loss
        losses = [*causes, *losses]
        causes = []
        # Good figures are believed: random numbers can only make them worse. Figures by labels are
        # believed too. Any others prove nothing, so one sentence on the random numbers replaces
        # them.
        is_good = bool(losses) and all(level == GOOD for level, _ in losses)
        was_labelled = accuracy is not None and accuracy.top1_reference is not None
        if not is_good and not was_labelled:
            losses = [(DOUBTFUL, _RANDOM)]

    if not _is_mostly_right(accuracy):  # a model that is right has the right inputs
        causes = [*map(_judge_doubt, doubts), *causes]
    return causes, losses


def _judge_doubt(doubt: str) -> _Finding:
    """Return the finding on calibration data that a sentence puts in question."""
    if _TOO_FEW.fullmatch(doubt):
        return DOUBTFUL, doubt
    return DOUBTFUL, f"{FLOAT_MODEL}'s inputs are in question: {doubt}"


def _describe_too_few(accuracy: Accuracy) -> Iterator[str]:
    """Yield a sentence on how many more samples are needed, if the accuracy is of too few things.

    Such as "12 boxes are too few; about 70 more photos with objects would do". New samples are
    assumed to hold as many objects each as the present ones.
    """
    counted_things, count = _find_counted(accuracy)
    if count == 0:
        return
    if counted_things == "samples":
        missing = MIN_SAMPLES - count
        sample_text = ""
    else:  # so many samples as hold the missing objects
        missing = math.ceil((MIN_OBJECTS - count) * accuracy.samples / count)
        sample_text = " samples"
        if counted_things in ("boxes", "objects"):
            sample_text = " photos with objects"
    if missing <= 0:
        return
    missing_text = str(missing)
    if missing > 20:
        missing_text = f"about {math.ceil(missing / 10) * 10}"
    yield f"{too_few(count, counted_things)}; {missing_text} more{sample_text} would do"


def _find_counted(accuracy: Accuracy) -> tuple[str, int]:
    """Return (things, number): the accuracy is the share of so many things that are right.

    Things are "samples", "objects", or what the task counts, such as "boxes" or "labels". The
    number is 0 if the accuracy is a mean or a value.
    """
    task = accuracy.task
    if accuracy.top1_reference is not None:
        return "samples", accuracy.samples
    # a user's metric is judged in place of the precision on annotated objects
    has_user_metric = task is not None and task.task == "metric"
    if accuracy.precision is not None and not has_user_metric:
        return "objects", accuracy.precision.objects
    if task is None:
        return "", 0
    if task.figure.endswith(_KEPT):
        return task.figure.removesuffix(_KEPT), task.counted
    return "samples", task.counted  # 0 if the figure is a mean or value


def _is_mostly_right(accuracy: Accuracy | None) -> bool:
    """Whether labels show that the float model is right more often than wrong."""
    if accuracy is None:
        return False
    return (accuracy.top1_reference or 0.0) > 0.5 or finds_objects(accuracy)


def _judge_speed_limit(speed: SpeedUp | None, min_speedup: float, rival: str) -> _Finding:
    """Return whether a speed meets the user's own limit, `min_speedup` times the rival's."""
    if speed is None:
        reason = f"its speed, {min_speedup:g}x that of {rival} at least, is not measured"
        return DOUBTFUL, reason
    is_below = speed.ratio < min_speedup
    place = "below" if is_below else "within"
    text = f"{speed.text} the speed of {rival}, {place} the limit of {min_speedup:g}x"
    if speed.low < min_speedup <= speed.high:
        text += _TOO_NOISY
    return UNUSABLE if is_below else GOOD, text


def _judge_gain(speed: SpeedUp, size_ratio: float | None, rival: str, device_kind: str) -> _Finding:
    """Return the finding on what int8 gains: time, or size without a clear loss of time.

    If it gains neither, the finding is that FP32 is better. Int8 gains time if it is `MIN_GAIN`
    times as fast as its rival, and clearly loses time if the rival is `MIN_GAIN` times as fast.

    Args:
        speed: its speed-up over its rival; the middle of its interval counts.
        size_ratio: size of the rival's file over that of the int8 engine; None if unknown.
        rival: name of the float engine that it is compared with.
        device_kind: "CPU" or "device".
    """
    text = f"{speed.text} the speed of {rival}"
    noise_text = _TOO_NOISY if speed.is_noisy else ""
    if speed.ratio >= MIN_GAIN:
        return GOOD, text + noise_text

    size_ratio = size_ratio or 1.0
    size_text = size_change_text(size_ratio)  # "" for files of one size
    is_clearly_slower = speed.ratio * MIN_GAIN < 1
    if size_ratio >= MIN_SHRINK and not is_clearly_slower:
        return GOOD, f"{text}{noise_text}, {size_text}"
    reason = f"int8 has {text} on this {device_kind}{noise_text}"
    if size_text:
        reason += f", and its file is {size_text}"
    return FLOAT, reason
