"""The options of a calibration and of a build, and a build that is ready to run.

`CalibrationOptions` and `BuildOptions` hold what the user asked for; the command line and the
Python API both make them. `prepare_build` loads the model and opens the evaluation images, and
refuses what can be refused before anything is run or written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from shlex import quote
from types import SimpleNamespace, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
import onnx

from deploy.calibration import one_pass, store
from deploy.calibration.calibration_result import find_reference_model, refuse_calibration_options
from deploy.calibration.cluster_jobs import Cluster
from deploy.calibration.reuse import CachePolicy
from deploy.errors import ConfigError, ExportError
from deploy.feed.calibrator import CalibratorScript
from deploy.feed.evaluation import BY_FOLDER, ImageLabels, apply_labels
from deploy.feed.feed import Dataset, FeedSource, is_array_dataset
from deploy.feed.preprocess import PreprocessRequest
from deploy.feed.samples import Feed
from deploy.feed.sampling import to_choice
from deploy.files import manifest
from deploy.files.reading import refuse_no_path
from deploy.frontends import LoadedModel, load_float_or_qdq
from deploy.frontends.input_shapes import is_torch_module
from deploy.machine import worker_threads
from deploy.method import Method
from deploy.metrics import DURATION_S
from deploy.metrics.precision import GroundTruth
from deploy.pipeline.results import find_earlier_report
from deploy.report.verdict import Gates
from deploy.targets import Target
from deploy.targets.tensorrt.cache_tools import method_of_calibrator
from deploy.tasks import Metric, make_metric
from deploy.tasks.metric import Function
from deploy.terminal import say_progress
from deploy.tuning import PREFERENCES, REPAIRS, ROUNDING, THIS_CPU
from deploy.tuning.search_options import Tuning
from deploy.tuning.tune import refuse_wrong_plan

if TYPE_CHECKING:
    from torch import nn


_Images = TypeVar("_Images", bound="FeedSource | None")
_P = ParamSpec("_P")
_T = TypeVar("_T")
UserModel = str | Path | onnx.ModelProto  # a file, or a model in memory
ModelSource = UserModel | LoadedModel

# torch is imported for type checkers only; this stands for it in annotations that are read
_TYPE_CHECKING_NAMES = {"nn": SimpleNamespace(Module=object)}
# what an argument may be in place of the class in its annotation: an integer for a float, a set
_WIDER_CLASSES = {
    bool: Integral,
    int: Integral,
    float: Real,
    Path: os.PathLike,
    Sequence: Iterable,
}


def check_arguments(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a public function, so that it refuses arguments that its annotations do not allow.

    The elements of lists and mappings are not checked. A path must not be an empty text or an
    address. A wrong argument raises `ConfigError`.
    """

    @wraps(function)
    def checked_function(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call the function, if its annotations allow these arguments."""
        types = get_type_hints(function, localns=_TYPE_CHECKING_NAMES)
        call = signature(function).bind(*args, **kwargs)  # arguments by their names
        for name, value in call.arguments.items():
            if isinstance(value, np.generic):  # a number of numpy, which JSON cannot hold
                value = value.item()
            if not _is_allowed(value, types[name]):
                raise ConfigError(
                    f"{name} must be {function.__annotations__[name]}, got"
                    f" {type(value).__name__}; help(calib8.{function.__name__}) explains it"
                )
            call.arguments[name] = value
        return function(*call.args, **call.kwargs)

    return checked_function


def _is_allowed(value: object, annotation: Any) -> bool:
    """Whether a value is of a type that an annotation allows.

    Raises:
        ConfigError: an empty text or an address, where a path is allowed.
    """
    classes = tuple(_classes_of(annotation))
    if os.PathLike in classes and isinstance(value, str):
        refuse_no_path(value)
    try:
        return isinstance(value, classes)
    except TypeError:  # a protocol, such as Target, has no class to check by
        return True


def _classes_of(annotation: Any) -> Iterator[type]:
    """Yield the classes of an annotation: those of `str | Sequence[str]` are str and Sequence."""
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _classes_of(part)
    else:
        kind = get_origin(annotation) or annotation
        yield _WIDER_CLASSES.get(kind, kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """Options of a calibration, as the arguments of `deploy.pipeline.calibrate`.

    Attributes:
        method: name of a search, or a `Method` with parameters; None is the default one.
        cache: file to keep the calibration in, and how it is used.
        until_stable: share by which the ranges of two halves may differ; None looks at all images.
        threads: worker threads, None for up to 4 cores.
        float_nodes: nodes to keep in float: names, patterns, `op:` types, `@` files.
        scheduler: address of a dask scheduler whose workers observe, or a `Cluster`.
        resume: whether an interrupted run continues from its checkpoint.
        checkpoint: file of the checkpoint; None for one beside the cache.

    Raises:
        ConfigError: a method, which a trusted cache overrides.
    """

    method: str | Method | None = None
    cache: CachePolicy
    until_stable: float | None = None
    threads: int | None = None
    float_nodes: tuple[str, ...] = ()
    scheduler: str | Cluster | None = None
    resume: bool = False
    checkpoint: Path | None = None

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        if self.method is not None and self.cache.trust:
            raise ConfigError(
                "--method chooses ranges, and --trust-cache takes those of the cache as they are;"
                " leave one of them out"
            )

    @property
    def workers(self) -> int:
        """Worker threads."""
        return worker_threads(self.threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Options of a build, as the arguments of `deploy.pipeline.build`.

    Attributes:
        calibration: options of the calibration.
        targets: the targets.
        out: output folder.
        float_model: float reference of a Q/DQ model; None compares accuracy with the Q/DQ model,
            and speed and size with that model without its pairs.
        evaluation: images for the accuracy figures; None takes calibration images.
        labels: classes of the evaluation images, annotated objects, or "folders".
        metric: metric of the user in place of the task's figure.
        task: name of the outputs' task; None recognises it.
        duration_s: seconds of measuring a model; None is 3, or 0 for another CPU than this one.
        tuning: options of the search, or the plan to obey.
        gates: demands on the engines.
        repairs: one of `REPAIRS`; None tries adaptive rounding where there is a search.
        settings: text of `calib8.toml`; None writes none.

    Raises:
        ConfigError: another name of a repair.
    """

    calibration: CalibrationOptions
    targets: Sequence[Target]
    out: Path
    float_model: UserModel | None
    evaluation: Dataset | None
    labels: ImageLabels | None
    metric: str | Function | None
    task: str | None
    duration_s: float | None
    tuning: Tuning
    gates: Gates
    repairs: str | None
    settings: str | None

    def __post_init__(self) -> None:
        """Refuse the name of an unknown repair."""
        if self.repairs not in (None, *REPAIRS):
            raise ConfigError(f"a repair is {' or '.join(REPAIRS)}, got {self.repairs!r}")

    @property
    def has_search(self) -> bool:
        """Whether anything is searched for a target, unless a plan is given."""
        return any(self.tuning.for_target(target).level > 0 for target in self.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBuild:
    """A build whose model is loaded and whose evaluation images are opened.

    Attributes:
        options: the user's options, completed: the cache has a path, a Q/DQ model no search.
        loaded: the model.
        user_model: the user's file or model, from which the graph before folding can be read.
        reference: the float model that engines are compared with.
        notes: sentences on the reference and on the labels.
        dataset: the calibration images, or those a Q/DQ model is measured on; None without images.
        evaluation: the evaluation images; None if some of the calibration images are used.
        annotated_objects: objects on the evaluation images; class numbers are the feed's own.
        metric: the user's metric or task. What the model's file declares of its outputs is added
            by `build_with`, when the calibration has shown which of them are states.
        duration_s: seconds of latency runs a model; 0 leaves them out.
    """

    options: BuildOptions
    loaded: LoadedModel
    user_model: UserModel | None
    reference: LoadedModel
    notes: tuple[str, ...]
    dataset: Dataset | None
    evaluation: Feed | None
    annotated_objects: GroundTruth | None
    metric: Metric
    duration_s: float

    def rounds_weights_of(self, target: Target) -> bool:
        """Whether a target tries adaptive rounding, by default if it is searched."""
        if self.options.repairs is None:
            return self.options.tuning.for_target(target).level > 0
        return self.options.repairs == ROUNDING

    @property
    def has_labels(self) -> bool:
        """Whether the evaluation images have labels; the samples of a search have none."""
        has_classes = self.evaluation is not None and self.evaluation.labels is not None
        return has_classes or self.annotated_objects is not None

    @property
    def search_metric(self) -> Metric:
        """The metric that a search goes by: the task alone where the user's would need labels."""
        return self.metric.without_function if self.has_labels else self.metric

    @property
    def external_cache(self) -> Path | None:
        """The calibration cache, if it is used and lies outside the build's folder."""
        path = self.options.calibration.cache.path
        if path is None or self.loaded.qdq is not None:
            return None
        is_inside = path.parent.resolve() in manifest.build_folders(self.options.out)
        return None if is_inside else path

    @property
    def unsaved_model(self) -> onnx.ModelProto | None:
        """The model that is built, if no file holds it: given in memory, or made from PyTorch."""
        model = self.user_model  # of PyTorch, the exported model
        return model if isinstance(model, onnx.ModelProto) and _is_unsaved(self.loaded) else None

    @property
    def cache_and_plan_names(self) -> tuple[str, ...]:
        """Names of the cache's files and of the plan, which say themselves that calib8 wrote."""
        cache = self.options.calibration.cache.path
        assert cache is not None
        names = [path.name for path in store.cache_files(cache)]
        records = [f"{manifest.RECORDS}/{name}" for name in names]
        return (*names, *records, plan_name(self.loaded))


def prepare_build(
    model: ModelSource,
    dataset: Dataset | None,
    options: BuildOptions,
) -> PreparedBuild:
    """Load the model, open the evaluation images, and check and complete the options of a build.

    Args:
        model: the float model, or a Q/DQ model.
        dataset: the calibration images; None for a Q/DQ model.
        options: the user's options.

    Raises:
        Calib8Error: an option, a path or a file does not fit; nothing has run yet.
    """
    metric = make_metric(options.metric, options.task)  # refuses a wrong one before loading
    loaded = load_float_or_qdq(model)
    evaluation = options.evaluation
    if loaded.qdq is not None:  # nothing is calibrated: images of either kind are measured on
        dataset, evaluation = dataset or evaluation, evaluation or dataset
    image_source = None if dataset is None else dataset.source
    reference, notes = find_reference_model(loaded, options.float_model, image_source)
    if dataset is None:
        _refuse_evaluation_options(options)
    if loaded.qdq is not None:  # its Q/DQ pairs are the calibration, and nothing is searched
        refuse_calibration_options(loaded.qdq, _calibration_flags(image_source, options))
        options = replace(options, tuning=replace(options.tuning, effort=0))
    calibration = with_calibrator_method(
        options.calibration,
        dataset,
        options.targets,
        is_tuned=options.has_search and options.tuning.plan is None,
    )
    options = replace(options, calibration=calibration)

    # files in the output folder that this build must not replace, or cannot use, are refused before
    # the evaluation images are opened
    options = _with_cache_path(options, loaded.name)
    _refuse_files_of_others(options, loaded)
    _refuse_less_effort_than_before(options, loaded)
    refuse_wrong_plan(
        options.out / plan_name(loaded),
        replace(options.tuning, fresh=options.calibration.cache.refresh),
        loaded,
        options.targets,
        options.calibration.method,
    )

    dataset, evaluation = _drop_preprocess_of_arrays(dataset, evaluation)
    evaluation_feed = None
    if evaluation is not None:
        evaluation_feed = loaded.open_samples(
            evaluation, labels_by_folder=options.labels == BY_FOLDER
        )
    # labels that are class numbers are set on the feed; those that are objects are returned
    annotated_objects = apply_labels(options.labels, evaluation_feed, loaded.classes)
    if annotated_objects is not None:
        notes = (*notes, *annotated_objects.notes)
    one_pass.refuse_full_disk(options.out, loaded.model, len(options.targets))
    for target in options.targets:
        for alert in target.option_alerts:
            say_progress(f"{target.name}: {alert}")
    return PreparedBuild(
        options=options,
        loaded=loaded,
        user_model=find_user_model(model),
        reference=reference,
        notes=notes,
        dataset=dataset,
        evaluation=evaluation_feed,
        annotated_objects=annotated_objects,
        metric=metric,
        duration_s=0.0 if dataset is None else _choose_duration(options),
    )


def with_calibrator_method(
    options: CalibrationOptions,
    dataset: Dataset | None,
    targets: Sequence[Target],
    *,
    is_tuned: bool = False,
) -> CalibrationOptions:
    """Return the options with the range method of a TensorRT calibrator, if one feeds the images.

    The base class of a calibrator names its method: IInt8EntropyCalibrator2 searches ranges by
    entropy. A method that the user named is left as it is. Notes on the choice are stored in the
    script, the dataset's source.

    Args:
        options: options of the calibration.
        dataset: the images, which may be batches of a calibrator.
        targets: the targets; some search ranges in their own way, whatever the method is.
        is_tuned: whether methods are to be compared; then the calibrator's is not taken, since a
            given method is not compared with others.
    """
    if dataset is None or not isinstance(dataset.source, CalibratorScript):
        return options
    script = dataset.source
    script.notes = ()  # an earlier run with this script may have left some
    method_and_reason = method_of_calibrator(script)
    if options.method is not None or method_and_reason is None:
        return options
    # the method would have no effect: a trusted cache has the ranges already, and a target with
    # searches of its own (`own_method`) takes no other
    if options.cache.trust or all(target.own_method for target in targets):
        return options

    method, reason = method_and_reason
    if is_tuned:
        script.notes = (
            f"{script} feeds the images, and the search chooses the method; --effort 0 keeps"
            f" {method.label}, that of its base class",
        )
        return options
    if to_choice(dataset.limit).shard is not None:  # the images are one shard of a calibration
        reason += "; give that --method to merge, too"
    script.notes = (reason,)
    return replace(options, method=method)


def _with_cache_path(options: BuildOptions, model_name: str) -> BuildOptions:
    """Return the options with a path for the cache, by default among the build's records.

    If the user names the cache of another build, it is read, and this build stores its own. One
    that is to be trusted is not stored again.
    """
    cache = options.calibration.cache
    own_path = options.out / manifest.RECORDS / f"{model_name}.cache"
    if cache.path is None:
        cache = replace(cache, path=own_path)
    elif not cache.trust:
        # a cache of this build is in its folder, or in the subfolder of its records
        is_in_this_build = cache.path.parent.resolve() in manifest.build_folders(options.out)
        if not is_in_this_build and manifest.is_of_build(cache.path):
            cache = replace(cache, path=own_path, source=cache.path)
    return replace(options, calibration=replace(options.calibration, cache=cache))


def _choose_duration(options: BuildOptions) -> float:
    """Return the seconds of measurement; another CPU than this one is not measured.

    Raises:
        ConfigError: a negative or infinite duration.
    """
    if options.duration_s is not None:
        if not 0 <= options.duration_s < math.inf:
            raise ConfigError(f"a duration is 0 s or more, and finite, got {options.duration_s}")
        return options.duration_s
    return DURATION_S if options.tuning.cpu == THIS_CPU else 0.0


def open_torch_module(
    model: ModelSource | nn.Module,
    images: _Images,
    preprocess: PreprocessRequest = None,
) -> tuple[ModelSource, _Images]:
    """Return (model, images); a PyTorch module is exported with the first of the images as input.

    Any other model is returned unchanged, with the images.

    Raises:
        ConfigError, FeedError, ModelError, ExportError: see `deploy.fx.open_model.open_module`.
        ConfigError: images that have to be preprocessed for a module.
    """
    if not is_torch_module(model):
        return model, images
    if preprocess is not None:
        raise ConfigError(
            "a PyTorch module is exported by inputs as its forward takes them, got preprocessing;"
            " leave it out, or give the model that calib8.torch.export(module, [example_input])"
            " makes"
        )
    from deploy.fx.open_model import open_module

    return open_module(model, images)


def find_user_model(
    model: ModelSource,
) -> UserModel | None:
    """Return the user's file or model, from which the graph before folding can be read.

    None for a file of another framework.
    """
    if not isinstance(model, LoadedModel):
        return model
    is_onnx_file = model.source is not None and model.source.suffix.lower() == ".onnx"
    return model.source if is_onnx_file else model.exported


def list_output_names(targets: Iterable[Target], name: str) -> list[str]:
    """Return the names of the files that a build may write, without its cache and plan."""
    target_files = [f"{name}{ending}" for target in targets for ending in target.writes]
    return [manifest.MANIFEST_NAME, *manifest.PAGES, *target_files]


def _drop_preprocess_of_arrays(
    dataset: Dataset | None, evaluation: Dataset | None
) -> tuple[Dataset | None, Dataset | None]:
    """Return (calibration data, evaluation data), without preprocessing of arrays beside pictures.

    The user sets the preprocessing once for both. If one of them is arrays, which are fed
    unchanged, and the other pictures, it is meant for the pictures.
    """
    if dataset is None or evaluation is None or dataset is evaluation:
        return dataset, evaluation
    if dataset.preprocess is None or evaluation.preprocess is None:
        return dataset, evaluation

    has_arrays = is_array_dataset(dataset)
    evaluation_has_arrays = is_array_dataset(evaluation)
    if has_arrays and not evaluation_has_arrays:
        dataset = replace(dataset, preprocess=None)
    elif evaluation_has_arrays and not has_arrays:
        evaluation = replace(evaluation, preprocess=None)
    return dataset, evaluation


def _is_unsaved(loaded: LoadedModel) -> bool:
    """Whether no file holds the model: it was given in memory, or made from PyTorch."""
    return loaded.source is None and loaded.resized_file is None


def saved_model_name(loaded: LoadedModel) -> str:
    """Return the path in the output folder under which a build saves an unsaved model."""
    return f"{manifest.RECORDS}/{loaded.name}.onnx"


def plan_name(loaded: LoadedModel) -> str:
    """Return the path of a model's plan in the output folder."""
    return f"{manifest.RECORDS}/{loaded.name}.plan.toml"


def _refuse_files_of_others(options: BuildOptions, loaded: LoadedModel) -> None:
    """Refuse to overwrite files that no build wrote, or another output."""
    cache = options.calibration.cache
    names = list_output_names(options.targets, loaded.name)
    if _is_unsaved(loaded):
        names.append(saved_model_name(loaded))
    if cache.refresh:  # else the plan is read, and must be one
        names.append(plan_name(loaded))
    if options.settings is not None:
        names.append(manifest.SETTINGS)
    manifest.refuse_foreign(options.out, names, force=cache.force)


def _refuse_less_effort_than_before(options: BuildOptions, loaded: LoadedModel) -> None:
    """Refuse to replace the files of a search by those of one with less effort.

    A build by a given plan or split is no new search. A target that failed before may be searched
    with less effort.
    """
    tuning = options.tuning
    is_given_plan = tuning.plan is not None or tuning.split is not None
    if options.calibration.cache.force or is_given_plan:
        return
    earlier = find_earlier_report(options.out, loaded.digest)
    if earlier is None or earlier.request is None:
        return
    failed_names = {target.name for target in earlier.targets if target.error}
    for target in options.targets:
        earlier_effort = earlier.request.effort.get(target.name, 0)
        effort = tuning.for_target(target).level
        if effort < earlier_effort and target.name not in failed_names:
            raise ExportError(
                f"a build must not replace one that was searched with more effort, got --effort"
                f" {effort} for {target.name} in {options.out}, which was built with --effort"
                f" {earlier_effort}; `calib8 check {quote(str(options.out))}` checks it as it is;"
                " else give another --out, or replace it with --force"
            )


def _refuse_evaluation_options(options: BuildOptions) -> None:
    """Refuse options on how a Q/DQ model is measured, since there are no images to measure on."""
    value_by_flag = {
        "--labels": options.labels,
        "--metric": options.metric,
        "--task": options.task,
    }
    for flag, value in value_by_flag.items():
        if value is not None:
            raise ConfigError(
                f"{flag} is for what is measured on images, which were not given; give --images"
                " too, or leave it out"
            )


def _calibration_flags(images: object, options: BuildOptions) -> list[str]:
    """Return the flags of calibration and search that the user gave for a Q/DQ model.

    They would do nothing: its pairs are its calibration, and nothing is searched.

    `images`: source of the images; None without images.
    """
    calibration = options.calibration
    tuning = options.tuning
    is_given_by_flag = {
        "--calibrator-script": isinstance(images, CalibratorScript),
        "--method": calibration.method is not None,
        "--cache": calibration.cache.path is not None,
        "--require-cache": calibration.cache.require,
        "--trust-cache": calibration.cache.trust,
        "--refresh": calibration.cache.refresh,
        "--keep-float": bool(calibration.float_nodes),
        "--effort": bool(tuning.effort),  # 0 is right for a Q/DQ model
        "--prefer": tuning.prefer != PREFERENCES[0],
        "--plan": tuning.plan is not None,
        "--split": tuning.split is not None,
        "--until-stable": calibration.until_stable is not None,
        "--repair": options.repairs == ROUNDING,
        "--scheduler": calibration.scheduler is not None,
        "--resume": calibration.resume,
    }
    return [flag for flag, is_given in is_given_by_flag.items() if is_given]
