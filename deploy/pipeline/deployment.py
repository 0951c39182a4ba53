"""Write Ascend's files from existing scales, without calibrating.

::

    float model, record or cache --.
    Q/DQ model --------------------+--> Recipe --> Ascend.files --> folder, report, manifest
                                     (`deploy.targets.ascend.recipe`)

With images the result is measured: a record through the fake-quant model, compared with the float
model; a converted Q/DQ model in the NPU's integers, compared with the Q/DQ model itself.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from deploy.calibration.observation import CalibrationSubject, ObservedStatistics
from deploy.calibration.ranges import Ranges
from deploy.calibration.reference_outputs import find_random_outputs, make_evaluation_set
from deploy.errors import ConfigError
from deploy.feed.bench_inputs import Shapes, random_feeds
from deploy.feed.evaluation import EvaluationSubset
from deploy.feed.feed import Dataset, open_feed
from deploy.feed.samples import Feed
from deploy.files import manifest
from deploy.files.guard import guard_inputs
from deploy.files.manifest import sha256
from deploy.files.reading import read_bytes
from deploy.files.staging import Stage, stage_files
from deploy.frontends import LoadedModel, load
from deploy.frontends.base import model_digest
from deploy.frontends.onnx_reader import read_model
from deploy.machine import this_machine, worker_threads
from deploy.pipeline.build_options import list_output_names
from deploy.pipeline.evaluate import compare_sessions
from deploy.pipeline.measure import measure_engines
from deploy.pipeline.results import (
    engine_rows,
    feed_part,
    files_part,
    model_part,
    publish_build,
    sample_shapes,
    write_pages,
)
from deploy.report import Report
from deploy.report.parts import EngineRow
from deploy.report.verdict import Gates
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.executor import open_deploy
from deploy.targets.ascend.existing_files import recipe_from_cache, recipe_from_record
from deploy.targets.ascend.recipe import Recipe, recipe_from_qdq
from deploy.targets.ascend.target import Ascend
from deploy.targets.base import BuildRequest, BuildResult
from deploy.targets.options import changed_options
from deploy.version import __version__

_RANDOM_SAMPLES = 2  # samples to run the models on, without images
_REPEATED_SAMPLES = 2  # samples that show whether the float model draws random numbers
_NO_IMAGES = (
    "No images were given: the deploy model was run on random samples, and its accuracy was not"
    " measured; --images measures it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialInputs:
    """Inputs that the deployed model is run on.

    Attributes:
        dataset: images; None for random samples.
        shapes: input name -> dimensions, for random samples of inputs with dynamic dimensions.
    """

    dataset: Dataset | None = None
    shapes: Shapes | None = None

    def feed(self, loaded: LoadedModel) -> Feed:
        """Open the samples.

        Raises:
            FeedError: images that do not fit.
            ConfigError: a shape that does not fit, or that is missing.
        """
        if self.dataset is None:
            samples = random_feeds(loaded.inputs, shapes=self.shapes, count=_RANDOM_SAMPLES)
            return open_feed(samples, loaded.inputs)
        return loaded.open_samples(self.dataset)


@guard_inputs()
def deploy(
    model: Path | str,
    record: Path | str | None = None,
    *,
    out: Path | str,
    cache: Path | str | None = None,
    config: Path | str | None = None,
    target: Ascend | None = None,
    inputs: TrialInputs | None = None,
    threads: int | None = None,
    force: bool = False,
) -> Report:
    """Write Ascend's files of a float model by the scales of a record or a TensorRT cache.

    Args:
        model: the float model, an ONNX file.
        record: AMCT's text file of the scales and offsets of each layer.
        out: output folder.
        cache: TensorRT's calibration cache, instead of a record.
        config: AMCT's configuration by which the record was made; needed if the configuration turns
            off the folding of BatchNormalization.
        target: target with options; those for calibrating have no effect. None for the defaults.
        inputs: samples to run the files on; None for random ones.
        threads: worker threads, None for up to 4 cores.
        force: replace files that calib8 did not write.

    Raises:
        ConfigError: both record and cache are given, or none; the record is invalid or of another
            model.
        CacheError: the cache has none of the model's layers.
        ModelError, FeedError, ExportError, BackendError: as `deploy.pipeline.build`.
    """
    config = None if config is None else Path(config)
    scales_path = _choose_scales(record, cache, config)
    target = target or Ascend()
    inputs = inputs or TrialInputs()
    _refuse_early(target, inputs, Path(out), Path(model).stem, force=force)
    loaded = load(model)
    subject = CalibrationSubject(loaded=loaded, sample_count=0, user_model=model)
    if cache:
        recipe = recipe_from_cache(subject, scales_path)
    else:
        recipe = recipe_from_record(subject, scales_path, config=config)
    return _write_files(
        target,
        inputs,
        subject,
        recipe,
        scales_path=scales_path,
        model_sha256=loaded.digest,
        qdq_model=None,
        out=Path(out),
        threads=worker_threads(threads),
        force=force,
    )


@guard_inputs()
def convert(  # noqa: D417
    model: Path | str,
    *,
    out: Path | str,
    target: Ascend | None = None,
    keep_rounding: bool = True,
    inputs: TrialInputs | None = None,
    threads: int | None = None,
    force: bool = False,
) -> Report:
    """Write Ascend's files of a Q/DQ model by the scales of its own Q/DQ pairs.

    With images the deploy model is run and compared with `model` in ONNX Runtime.

    The arguments that are not listed are those of `deploy`.

    Args:
        model: an ONNX file with QuantizeLinear and DequantizeLinear pairs.
        keep_rounding: whether float operators that read a tensor with a pair read its rounded
            values, as in `model`; False lets them read the values before rounding.

    Raises:
        ModelError: it is no ONNX model in the Q/DQ form.
        ExportError: Ascend can take over none of its layers.
        ConfigError, FeedError, BackendError: as `deploy`.
    """
    path = Path(model)
    target = target or Ascend()
    inputs = inputs or TrialInputs()
    _refuse_early(target, inputs, Path(out), path.stem, force=force)
    qdq_model = read_model(path)
    loaded, recipe = recipe_from_qdq(qdq_model, path, keep_rounding=keep_rounding)
    return _write_files(
        target,
        inputs,
        CalibrationSubject(loaded=loaded, sample_count=0, user_model=qdq_model),
        recipe,
        scales_path=path,
        model_sha256=model_digest(qdq_model),
        qdq_model=qdq_model,
        out=Path(out),
        threads=worker_threads(threads),
        force=force,
    )


def _write_files(
    target: Ascend,
    inputs: TrialInputs,
    subject: CalibrationSubject,
    recipe: Recipe,
    *,
    scales_path: Path,
    model_sha256: str,
    qdq_model: onnx.ModelProto | None,
    out: Path,
    threads: int,
    force: bool,
) -> Report:
    """Write the files of a recipe, measure them, and move them into the folder together.

    Args:
        target: the target, with its options.
        inputs: what the deployed model is run on.
        subject: the float model, which is not calibrated.
        recipe: model, layers and scales that the files are made of.
        scales_path: file that the scales were read from.
        model_sha256: digest of the user's model, for the manifest.
        qdq_model: the user's Q/DQ model, to compare the accuracy with; None compares it with the
            float model.
        out: output folder.
        threads: worker threads.
        force: replace files that calib8 did not write.
    """
    loaded = subject.loaded
    feed = inputs.feed(loaded)
    with stage_files(out) as stage:
        request = BuildRequest(
            subject=subject,
            folder=stage.temporary_folder,
            earlier_folder=stage.folder,
            ranges=Ranges(ObservedStatistics(), subject.method, {}),  # empty: the recipe has scales
            feed=feed,
            manifest=feed.manifest(),
            threads=threads,
        )
        result = target.write_files(recipe, request)
        # also if atc failed, the fake-quant model can be run
        fake_quant_path = str(stage.published_path(result.files["fake-quant model"]))
        target_part = replace(
            files_part(result, loaded.model, stage),
            options=changed_options(target),
            runnable=fake_quant_path,
        )
        report = Report(
            title=f"calib8: {loaded.name} in int8 for {result.target}, by {scales_path}",
            model=model_part(loaded),
            targets=(target_part,),
            machine=this_machine(),
            notes=(*loaded.alerts, _NO_IMAGES),
        )
        if inputs.dataset is not None:
            if qdq_model is None:
                engines = _compare_with_float_model(loaded, target, result, feed, stage, threads)
            else:
                engines = _compare_with_qdq_model(qdq_model, scales_path, result, feed, threads)
            report = replace(
                report,
                feed=feed_part(feed, str(inputs.dataset.source)),
                engines=engines,
                notes=(*loaded.alerts, *feed.notes),
            )
        write_pages(report, stage)
        scale_bytes = read_bytes(scales_path, what="a file of scales", error=ConfigError)
        origin = {
            "versions": {"calib8": __version__},
            "model": {"name": loaded.name, "sha256": model_sha256},
            "shapes": sample_shapes(feed),
            "scales": {"name": scales_path.name, "sha256": sha256(scale_bytes)},
            "targets": [target.name],
        }
        publish_build(origin, stage, replaceable=None if force else ())  # None: every file
    return report


def _choose_scales(
    record: Path | str | None, cache: Path | str | None, config: Path | None
) -> Path:
    """Return the file that holds the scales: a record, or a TensorRT cache.

    Args:
        record: AMCT's file of scales; None without.
        cache: TensorRT's calibration cache; None without.
        config: configuration that the record was made with; None without.

    Raises:
        ConfigError: both or neither, or a cache with a configuration.
    """
    if record is not None and cache is not None:
        raise ConfigError(
            f"scales come from a record or from a cache, got {record} and {cache}; leave one of"
            " them out"
        )
    scales = record or cache
    if scales is None:
        raise ConfigError("scales come from a record or from a cache, got neither; give RECORD")
    if cache is not None and config is not None:
        raise ConfigError(
            f"a configuration goes with the record that was made with it, got {config} and the"
            f" cache {cache}; leave the configuration out"
        )
    return Path(scales)


def _refuse_early(
    target: Ascend, inputs: TrialInputs, out: Path, name: str, *, force: bool
) -> None:
    """Refuse AIPP without pictures, and to overwrite files that no build wrote.

    AIPP is the NPU's own preprocessing of pictures.

    `name`: of the model, with which the names of the files begin.
    """
    if (target.aipp or target.first_layer_int8) and inputs.dataset is None:
        raise ConfigError(
            "AIPP is written from how pictures become inputs, got no pictures; give --images and"
            " their preprocessing"
        )
    manifest.refuse_foreign(out, list_output_names([target], name), force=force)


def _compare_with_float_model(
    loaded: LoadedModel, target: Ascend, result: BuildResult, feed: Feed, stage: Stage, threads: int
) -> tuple[EngineRow, ...]:
    """Return the report's rows of the float model, and of the fake-quant model compared with it.

    A fake-quant model computes in float what the int8 engine computes in integers. Only accuracy is
    measured: both models run on this machine, whose speed says nothing of the NPU.

    Args:
        loaded: the float model.
        target: the target that the files are for.
        result: the files that were written of it.
        feed: the samples to compare on.
        stage: folder of the files until they are published.
        threads: worker threads.
    """
    all_samples = EvaluationSubset(feed, feed.count)
    figures = measure_engines(
        loaded,
        [target],
        [result],
        calibration_samples=all_samples,  # would be the samples of latency runs, if there were some
        evaluation_feed=feed,
        objects=None,
        duration_s=0,
        threads=threads,
    )
    evaluation_set = make_evaluation_set(feed, loaded.model, _REPEATED_SAMPLES)
    return engine_rows(
        figures,
        [result],
        Gates(),
        stage,
        classes=loaded.classes,
        has_random_outputs=bool(find_random_outputs(loaded.model, evaluation_set)),
    )


def _compare_with_qdq_model(
    qdq_model: onnx.ModelProto, path: Path, result: BuildResult, feed: Feed, threads: int
) -> tuple[EngineRow, ...]:
    """Return the rows of the Q/DQ model and of the deploy model, which is compared with it.

    Args:
        qdq_model: the user's model.
        path: its file.
        result: the files that were written of it.
        feed: the samples to compare on.
        threads: worker threads.
    """
    # the pairs are computed in float: integer kernels of an older x86 CPU may saturate
    reference = OrtSession.open(qdq_model, threads=threads, int8_kernels=False)
    candidate = open_deploy(read_model(result.files["deploy model"]), threads=threads)
    fp32_note = f"Here FP32 means {path.name} in ONNX Runtime."
    return (
        EngineRow(label="Q/DQ", reference=True, path=str(path)),
        EngineRow(
            label=result.precision,
            target=result.target,
            accuracy=compare_sessions(reference, candidate, feed),
            notes=("Compared with the deploy model's integers, as the NPU computes.", fp32_note),
        ),
    )
