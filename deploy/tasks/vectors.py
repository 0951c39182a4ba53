"""A vector per sample [N, C]: scores of classes, labels, or an embedding.

`find_classes`: probabilities (rows that sum to 1) and their logarithms are certain, also beside
other numbers, which are compared by value. Raw scores are accepted if the best one stands out as no
direction of an embedding does; or if there are few, they exceed a Tanh's range, and their mean
hardly changes from sample to sample. Very few may be angles of a pose: these must move against each
other. Several outputs of few raw scores each, such as the characters of
a licence plate, must all be confident of their class.

`find_ranked`: the class numbers of a TopK or an ArgMax.

`find_labels`: independent probabilities, nearly all near 0 or 1, of labels or of steps, such as the
beginnings of words or a wake word. They count by their side of 0.5.

`find_embeddings`: vectors of unit length, which no classifier's scores have, or of numbers
symmetric about zero, none of which stands out; or a picture's features, means of channels after an
activation. The vectors of the first 64 samples are stored; each one's nearest neighbour among them
should be the float model's.
"""

import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from deploy.tasks.evaluation_task import (
    ClassExample,
    EvaluationTask,
    Form,
    TaskFigure,
    TaskTally,
)
from deploy.tasks.first_samples import FirstSamples, sort_by_size
from deploy.tasks.indices import NO_CLASS, PlaceTask
from deploy.tasks.rows import (
    Flags,
    Floats,
    Integers,
    Outputs,
    activate,
    are_comparable,
    are_probabilities_or_logs,
    are_undecided,
    is_vector,
    may_be_logits,
    missing_sigmoid,
    order_by_step,
)
from deploy.tasks.slices import OutputSlice, SlicesByOutput, split_output
from deploy.tasks.thresholds import (
    FEATURE_FACTOR,
    LOW,
    MAX_COMMON_MOTION,
    MAX_MEAN_SHARE,
    MAX_NORMAL_PEAK,
    MAX_POSE_NUMBERS,
    MAX_SIDE_RATIO,
    MAX_UNDECIDED_SHARE,
    MIN_ACTIVATION,
    MIN_COUNT,
    MIN_EMBEDDING_SIZE,
    MIN_L1_NORM,
    MIN_NEIGHBOUR_VECTORS,
    MIN_ORDER,
    MIN_STAND_OUT,
    SUM_ROUNDING,
    UNIT_TOLERANCE,
)
from deploy.tasks.top1 import read_classes
from deploy.tensors import Array

_MIN_DIFFERENCE = 1e-12  # another class is a difference, even if both scores are equal
_MAX_VECTORS = 64  # vectors stored


def _read_vectors(samples: FirstSamples) -> dict[str, Floats]:
    """Return the outputs that are one finite vector a sample, the largest first, [samples, C].

    Further dimensions are 1. All samples have vectors of one length.
    """
    rows_by_name = {}
    for name in sort_by_size(samples):
        values = samples.arrays(name)
        has_equal_shapes = len({value.shape for value in values}) == 1
        if has_equal_shapes and is_vector(values[0]) and values[0].ndim > 1:
            rows_by_name[name] = np.stack(values).reshape(len(values), -1).astype(np.float64)
    return rows_by_name


def fit_classes(samples: FirstSamples) -> "Classes | None":
    """Return the classes of all vectors, which the user or the file says to hold such."""
    vectors = _read_vectors(samples)
    counts = {name: rows.shape[1] for name, rows in vectors.items() if rows.shape[1] > 1}
    return Classes(tuple(counts), tuple(counts.values())) if counts else None


def fit_labels(name: str, samples: FirstSamples) -> "Labels | None":
    """Return the labels of an output that the user or the file says to hold such; else None.

    Only a Sigmoid tells scores of several labels at each step from features.
    """
    values = samples.arrays(name)
    has_sigmoid = samples.declared.ends.get(name) == "sigmoid"
    if values[0].ndim not in (1, 2, 3) or not (has_sigmoid or all(map(is_vector, values))):
        return None
    scores = np.concatenate([value.reshape(-1) for value in values])
    return Labels(name, activation=missing_sigmoid(scores))


def fit_embeddings(name: str, samples: FirstSamples) -> "Embeddings | None":
    """Return the embeddings of an output that the user or the file says to hold such."""
    rows = _read_vectors(samples).get(name)
    if rows is None or rows.shape[1] < 2:
        return None
    return Embeddings(name, rows.shape[1])


@dataclass(slots=True)
class _ClassTally(TaskTally["Classes"]):
    """Counts outputs of samples with equal classes."""

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Compare the classes of one sample; where they differ, offer it to be shown.

        Samples with the largest margin between both classes in FP32's scores are shown first.
        """
        for name in self.task.outputs:
            self.total += 1
            reference_class, candidate_class = read_classes(reference[name], candidate[name])
            if reference_class is None or candidate_class is None:
                continue
            if reference_class == candidate_class:
                self.kept += 1
            elif not self.task.are_numbers:
                reference_scores = reference[name].reshape(-1)
                scores = candidate[name].reshape(-1)
                example = ClassExample(
                    number=self.samples - 1,  # `add` has counted this sample already
                    output=name,
                    reference=(reference_class, float(reference_scores[reference_class])),
                    candidate=(candidate_class, float(scores[candidate_class])),
                )
                margin = reference_scores[reference_class] - reference_scores[candidate_class]
                # `offer` drops a difference of 0; only samples that differ are examples here
                self.offer(example, difference=max(margin, _MIN_DIFFERENCE), predictions=0)

    def result(self) -> TaskFigure:
        # several outputs of each sample
        unit = "samples" if self.total == self.samples else "outputs"
        text = f"{unit} keep FP32's top-1 class"
        return self.share("top-1 agreement", text)


@dataclass(frozen=True, slots=True)
class Classes(EvaluationTask):
    """Classification in one output or several heads.

    Attributes:
        outputs: names of the outputs.
        counts: number of classes of each, or of the class numbers that it lists.
        are_numbers: whether outputs are class numbers, the best one first, and not scores.
    """

    outputs: tuple[str, ...]
    counts: tuple[int, ...]
    are_numbers: bool = False
    name = "classes"
    tally_type = _ClassTally

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        counts = " and ".join(str(count) for count in dict.fromkeys(self.counts))
        classes = f"{counts} classes"
        if self.are_numbers:
            classes = "the best class" if counts == "1" else f"the best {classes}"
        return f"{', '.join(self.outputs)}: {classes}"


RANKED = Form(
    shape="integers [N, k] (the k best classes) or [N], alone or with scores of the same shape",
    values="class numbers, such as those of a TopK or ArgMax at the end of the graph",
    figure="same best class",
    source="TopK, ArgMax",
)


def find_ranked(samples: FirstSamples) -> Classes | None:
    """Return the class numbers of a TopK at the end of the graph, or a single class; else None.

    They are the only output, or beside one output of the same shape, their scores.
    """
    names = samples.names
    first_outputs = samples.outputs[0]
    if len(names) > 2 or len({first_outputs[name].shape for name in names}) != 1:
        return None
    for name in names:
        value = first_outputs[name]
        # a single integer is the best class, such as an ArgMax's, whatever operator computes it
        is_ranking = value.size == 1 or samples.declared.ends.get(name) == "ranked"
        if not is_ranking or not value.ndim or value.dtype.kind not in "iu":
            continue
        # the scores are compared by value, and class numbers are not
        parts: SlicesByOutput = {other: (OutputSlice(other),) for other in names}
        parts[name] = ()
        return Classes((name,), (value.size,), are_numbers=True, parts=parts)
    return None


CLASSES = Form(
    shape="[N, C], in one output or several",
    values="probabilities, their logarithms, or scores before a Softmax",
    figure="same best class",
    source="ImageNet's classifiers",
)


def find_classes(samples: FirstSamples) -> Classes | None:
    """Return the classes of outputs that are a vector of scores per sample; None without such.

    All of these outputs are probabilities, or all are raw scores in front of a Softmax. Every
    output of the model must be such; only a model of pictures may have other vectors beside its
    probabilities, such as an age or features.
    """
    vectors = _read_vectors(samples)
    candidates = {}  # output -> rows [samples, C] that may be scores
    for name in samples.names:
        rows = vectors.get(name)
        if rows is None or rows.shape[1] < 2:
            continue
        # TopK's values, whose places are not the numbers of classes
        if samples.declared.ends.get(name) == "ranked":
            continue
        if samples.has_pictures and are_features(rows):
            continue
        candidates[name] = rows

    # the outputs of classes: those of probabilities or, if there are none, of raw scores
    class_outputs = [name for name, rows in candidates.items() if are_probabilities_or_logs(rows)]
    has_probabilities = bool(class_outputs)
    # if any output is labels (independent probabilities), raw scores beside it are no classes: the
    # model is left to `find_labels`, which is tried later
    if not class_outputs and find_labels(samples) is None:
        for name, rows in candidates.items():
            # exporters call raw scores of classes "logits"
            if name == "logits" or are_raw_scores(rows, is_single=len(samples.names) == 1):
                class_outputs.append(name)
    if not class_outputs:
        return None
    if len(class_outputs) < len(samples.names):
        has_only_vectors = len(vectors) == len(samples.names)
        if not (has_probabilities and samples.has_pictures and has_only_vectors):
            return None
    class_counts = tuple(candidates[name].shape[1] for name in class_outputs)
    return Classes(tuple(class_outputs), class_counts)


def are_raw_scores(rows: Floats, *, is_single: bool) -> bool:
    """Whether vectors [samples, C] are raw scores of classes, in front of a Softmax.

    Of many numbers, as many as an embedding has, the best must stand out as in no embedding, and
    the vectors must not all have length 1. A few numbers must not be a position, a size or a pose;
    and, if there are other outputs, their Softmax must be sure of its class.

    `is_single`: whether the model has no other output.
    """
    if rows.shape[1] >= MIN_EMBEDDING_SIZE:
        return bool(_stand_out(rows).all()) and not all(map(has_unit_length, rows))
    values = [*rows[:, None]]  # each vector as the output of one sample, [1, C]
    # columns of different units, such as a position and a rotation, are several slices
    slices = split_output("", values)  # the name of the output only labels them
    if len(slices) > 1 or not _are_scores_of_few(rows):
        return False
    confidence = activate(rows, "softmax").max(axis=1).mean()
    return is_single or (confidence > 0.5)


def _stand_out(rows: Floats) -> Flags:
    """Return for which vectors [samples, C] the best score is clear.

    It exceeds the expected maximum of normal numbers, and is farther from the mean than the worst.
    """
    mean = rows.mean(axis=1)
    high = rows.max(axis=1) - mean
    low = mean - rows.min(axis=1)
    is_clear = high > MIN_STAND_OUT * _normal_maximum(rows.shape[1]) * rows.std(axis=1)
    return np.asarray(is_clear & (high > MIN_STAND_OUT * low))


def _normal_maximum(count: int) -> float:
    """Return the expected maximum of so many normal numbers, in standard deviations."""
    return math.sqrt(2 * math.log(count))


def _are_scores_of_few(rows: Floats) -> bool:
    """Whether a few numbers [samples, C] may be in front of a Softmax, and are no pose."""
    if not may_be_logits(rows, 1):
        return False
    if rows.shape[1] > MAX_POSE_NUMBERS:
        return True
    # angles of a pose change each for itself, scores of classes against each other
    changes = rows - rows.mean(axis=0)
    independent_variance = changes.var(axis=1).mean() / (rows.shape[1] - 1)
    common_variance = changes.mean(axis=1).var()
    return bool(common_variance < MAX_COMMON_MOTION * independent_variance)


@dataclass(frozen=True, slots=True)
class Labels(PlaceTask):
    """Independent probabilities of labels or steps, each of which is on one side of a half.

    Attributes:
        activation: "sigmoid" if the output lacks it; "" for probabilities.
    """

    classes: int = 2
    activation: str = ""
    name = "labels"
    reads = "scores of steps or labels, each its own"
    figure_name = "labels kept"
    agreement = "scores on FP32's side of 0.5"

    def read_classes(self, outputs: Outputs) -> Integers:
        """Return the side of each score of one sample, 0 or 1."""
        shares = activate(outputs[self.output].reshape(-1), self.activation)
        return np.where(np.isnan(shares), NO_CLASS, (shares > 0.5).astype(np.int64))


LABELS = Form(
    shape="[N, 1], [N, 4 or more labels], [N, T] or [N, T, C]",
    values="independent probabilities, most near 0 or 1, from a Sigmoid (with `--task` from any"
    " node)",
    figure="probabilities on the same side of 0.5",
    source="taggers, voice activity, wake words",
)


def find_labels(samples: FirstSamples) -> Labels | None:
    """Return the first output of independent probabilities; None without such.

    Others must be one vector a sample, such as a size; they are compared by value.
    """
    float_outputs = samples.float_outputs
    names = [name for name in float_outputs if _are_labels(name, samples)]
    other_arrays = [float_outputs[name] for name in float_outputs if name not in names]
    if not names or not all(map(is_vector, itertools.chain.from_iterable(other_arrays))):
        return None
    return fit_labels(names[0], samples)


def _are_labels(name: str, samples: FirstSamples) -> bool:
    """Whether an output is independent probabilities, most of them near 0 or 1.

    A Sigmoid computes them, as the graph shows: values alone would not tell them from others. Some
    must be near 0, and some above 0.5.
    """
    has_sigmoid = samples.declared.ends.get(name) == "sigmoid"
    if not has_sigmoid or fit_labels(name, samples) is None:
        return False
    values = samples.arrays(name)
    sizes = {value.size for value in values}
    if sizes == {1}:  # a single probability a sample
        max_undecided_share = 0.5
    else:
        max_undecided_share = MAX_UNDECIDED_SHARE
        # an output in the shape of an input may be an autoencoder's copy of it
        if min(sizes) < MIN_COUNT or _is_input_shape(values[0], samples):
            return False
    probabilities = np.concatenate([value.reshape(-1) for value in values])
    has_low_and_high = probabilities.min() < LOW and probabilities.max() > 0.5
    return bool(has_low_and_high and are_undecided(probabilities).mean() <= max_undecided_share)


def _is_input_shape(value: Array, samples: FirstSamples) -> bool:
    """Whether the first sample has an input of this array's shape."""
    return any(source.shape == value.shape for source in samples.inputs[0].values())


@dataclass(slots=True)
class _EmbeddingTally(TaskTally["Embeddings"]):
    """Compares the vectors of both models, and which samples have the nearest vectors.

    Attributes:
        cosines: sum of the samples' cosines between FP32's vector and the candidate's.
        vectors: both vectors of each of the first samples, of length 1.
    """

    cosines: float = 0.0
    vectors: list[tuple[Floats, Floats]] = field(default_factory=list)

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        reference_vector = _normalize(reference[self.task.output])
        vector = _normalize(candidate[self.task.output])
        if not are_comparable(reference_vector, vector):
            vector = np.zeros_like(reference_vector)
        self.cosines += float(reference_vector @ vector)
        if len(self.vectors) < _MAX_VECTORS:
            self.vectors.append((reference_vector, vector))

    def result(self) -> TaskFigure:
        cosine = self.cosines / self.samples
        text = f"mean cosine {cosine:.4f}"
        vector_count = len(self.vectors)
        if vector_count < MIN_NEIGHBOUR_VECTORS:
            return self.figure("mean cosine", cosine, f"{cosine:.4f}", text)

        references, candidates = zip(*self.vectors, strict=True)
        reference_neighbours = _find_nearest(np.stack(references))
        neighbours = _find_nearest(np.stack(candidates))
        self.total = vector_count
        self.kept = int((reference_neighbours == neighbours).sum())
        text = f"nearest neighbours as FP32's, {text}"
        return self.share("neighbours alike", text)


def _normalize(value: Array) -> Floats:
    """Return an array as a vector of length 1; of zeros if it has none."""
    vector = value.astype(np.float64).reshape(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return vector / max(float(np.linalg.norm(vector)), 1e-30)


def _find_nearest(rows: Floats) -> Integers:
    """Return the index of each row's nearest other row by cosine."""
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, -np.inf)
    return np.asarray(cosines.argmax(axis=1), np.int64)


@dataclass(frozen=True, slots=True)
class Embeddings(EvaluationTask):
    """One embedding per sample.

    Attributes:
        output: name of the output.
        length: numbers of an embedding.
    """

    output: str
    length: int
    name = "embeddings"
    reads = "embeddings of {0.length} numbers"
    tally_type = _EmbeddingTally


EMBEDDINGS = Form(
    shape="[N, D] with D of 32 or more",
    values="vectors of length 1; or values normally distributed around 0; or, for pictures,"
    " values of 0 or more",
    figure="same nearest neighbour; cosine",
    source="faces, sentences, CLIP",
)


def find_embeddings(samples: FirstSamples) -> Embeddings | None:
    """Return the only output of one vector a sample, if it is an embedding; else None.

    Other outputs may be vectors of tokens.
    """
    names = [name for name, values in samples.float_outputs.items() if values[0].ndim != 3]
    lengths = _embedding_lengths(samples)
    if len(names) != 1 or names[0] not in lengths:
        return None
    return Embeddings(names[0], lengths[names[0]])


def find_embeddings_beside(samples: FirstSamples) -> frozenset[str]:
    """Return the outputs of embeddings, if there are others beside them; else none."""
    names = frozenset(_embedding_lengths(samples))
    return frozenset() if len(names) == len(samples.names) else names


def _embedding_lengths(samples: FirstSamples) -> dict[str, int]:
    """Return output -> numbers of a vector, for the outputs that may be embeddings."""
    lengths = {}
    for name, rows in _read_vectors(samples).items():
        length = rows.shape[1]
        if length < MIN_EMBEDDING_SIZE or _are_smooth(rows):
            continue
        if _is_input_shape(samples.outputs[0][name], samples):
            continue  # as the signal that an autoencoder gives back
        is_embedding = samples.has_pictures and are_features(rows)
        is_embedding |= all(map(has_unit_length, rows)) or all(map(is_about_zero, rows))
        if is_embedding:
            lengths[name] = length
    return lengths


def are_features(rows: Floats) -> bool:
    """Whether [N, D] are means of channels after an activation; a classifier's scores go lower.

    Scores after a ReLU, as SqueezeNet's, do not, but their number is that of the classes.
    """
    length = rows.shape[1]
    is_width = length >= MIN_EMBEDDING_SIZE and length % FEATURE_FACTOR == 0
    is_activated = rows.min() >= MIN_ACTIVATION
    exceeds_one = rows.max(axis=1).min() > 1 + UNIT_TOLERANCE
    return bool(is_width and is_activated and exceeds_one)


def has_unit_length(vector: Floats) -> bool:
    """Whether a vector was normalised to L2 length 1, and is not a few probabilities."""
    deviation = abs(np.linalg.norm(vector) - 1)
    is_wide = np.abs(vector).sum() > MIN_L1_NORM
    return bool(is_wide and deviation < SUM_ROUNDING)


def _are_smooth(rows: Floats) -> bool:
    """Whether numbers correlate with those 1 to 3 before them, as of a signal or of points."""
    return any(order_by_step(rows, step) > MIN_ORDER for step in (1, 2, 3))


def is_about_zero(vector: Floats) -> bool:
    """Whether numbers are spread about 0 as normal ones, to both sides alike."""
    spread = vector.std()
    high = vector.max()
    low = -vector.min()
    is_centred = abs(vector.mean()) < MAX_MEAN_SHARE * spread
    is_symmetric = max(high, low) < MAX_SIDE_RATIO * min(high, low)
    peak = MAX_NORMAL_PEAK * _normal_maximum(len(vector)) * spread
    return bool(is_centred and is_symmetric and max(high, low) < peak)
