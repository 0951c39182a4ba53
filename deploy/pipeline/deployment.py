"""Write Ascend's files from existing scales, without calibrating.

::

    float model, record or cache --.
    Q/DQ model --------------------+--> Recipe --> Ascend.files --> folder, report, manifest
                                     (`deploy.targets.ascend.recipe`)

With images the result is measured: a record through the fake-quant model, compared with the float
model; a converted Q/DQ model in the NPU's integers, compared with the Q/DQ model itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from deploy.calibration.observation import CalibrationSubject, ObservedStatistics
from deploy.calibration.ranges import Ranges
from deploy.errors import ConfigError, ModelError
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
from deploy.metrics.accuracy import Comparison
from deploy.metrics.bench_inputs import Shapes, random_feeds
from deploy.pipeline.build_options import written_names
from deploy.pipeline.measure import measure_engines
from deploy.pipeline.results import (
    engine_rows,
    feed_part,
    file_rows,
    model_part,
    publish_build,
    write_pages,
)
from deploy.report import Report
from deploy.report.parts import EngineRow, TargetPart, node_rows
from deploy.report.report_rows import weight_rows
from deploy.report.verdict import Gates
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.executor import open_deploy
from deploy.targets.ascend.existing_files import recipe_from_cache, recipe_from_record
from deploy.targets.ascend.recipe import Recipe, recipe_from_qdq
from deploy.targets.ascend.target import Ascend
from deploy.targets.base import BuildRequest, BuildResult
from deploy.targets.options import changed_options
from deploy.tensors import Session
from deploy.terminal import phase
from deploy.version import __version__

_TRIED = 2  # random samples without images


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialInputs:
    """What the deployed model is run on.

    Attributes:
        dataset: images; None makes random samples.
        shapes: input name -> dimensions, of random samples where the model leaves them open.
    """

    dataset: Dataset | None = None
    shapes: Shapes | None = None

    def feed(self, loaded: LoadedModel) -> Feed:
        """The samples.

        Raises:
            FeedError: images that do not fit.
            ConfigError: a shape that does not fit, or that is missing.
        """
        if self.dataset is None:
            made = random_feeds(loaded.inputs, shapes=self.shapes, count=_TRIED)
            return open_feed(made, loaded.inputs)
        return self.dataset.open(loaded.inputs, metadata_preprocess=loaded.metadata_preprocess)


@guard_inputs()
def deploy(
    model: Path | str,
    record: Path | None = None,
    *,
    out: Path | str,
    cache: Path | None = None,
    config: Path | None = None,
    target: Ascend | None = None,
    inputs: TrialInputs | None = None,
    threads: int | None = None,
    force: bool = False,
) -> Report:
    """Write the files of a float model by the scales of a record or a TensorRT cache.

    `config`: configuration that the record was made with, where it kept BatchNormalization apart.
    `target`: with the options that do not calibrate.

    Raises:
        ConfigError: neither of record and cache, or both; a record that breaks a rule or is another
            model's.
        CacheError: a cache that knows none of the model's layers.
        ModelError, FeedError, ExportError, BackendError: as `deploy.pipeline.build`.
    """
    scales = _one_of(record, cache, config)
    ascend, samples = target or Ascend(), inputs or TrialInputs()
    _refuse_early(ascend, samples, Path(out), Path(model).stem, force=force)
    loaded = load(model)
    subject = CalibrationSubject(loaded=loaded, samples=0, user_model=model)
    recipe = (
        recipe_from_cache(subject, scales)
        if cache
        else recipe_from_record(subject, scales, config=config)
    )
    workers = worker_threads(threads)

    def rows(built: BuildResult, feed: Feed, stage: Stage) -> tuple[EngineRow, ...]:
        figures = measure_engines(
            loaded,
            [ascend],
            [built],
            calibration=EvaluationSubset(feed, feed.count),
            evaluation=feed,
            labels=None,
            duration_s=0,
            threads=workers,
        )
        return engine_rows(figures, [built], Gates(), stage, classes=loaded.classes)

    source = {"name": loaded.name, "sha256": loaded.digest}
    made = _Deployment(ascend, samples, subject, recipe, workers, rows)
    return made.written(Path(out), source, scales, force=force)


@guard_inputs()
def convert(
    model: Path | str,
    *,
    out: Path | str,
    target: Ascend | None = None,
    keep_rounding: bool = True,
    inputs: TrialInputs | None = None,
    threads: int | None = None,
    force: bool = False,
) -> Report:
    """Write the files of a Q/DQ model by its own scales.

    With images, the deploy model is run in integers beside `model` in ONNX Runtime.

    Args beyond those of `deploy`:
        keep_rounding: round what float operators read as the model's pairs do.

    Raises:
        ModelError: it is no ONNX model in the Q/DQ form.
        ExportError: Ascend can take over none of its layers.
        ConfigError, FeedError, BackendError: as `deploy`.
    """
    path, ascend, samples = Path(model), target or Ascend(), inputs or TrialInputs()
    _refuse_early(ascend, samples, Path(out), path.stem, force=force)
    quantized = read_model(path)
    loaded, recipe = recipe_from_qdq(quantized, path, keep_rounding=keep_rounding)
    subject = CalibrationSubject(loaded=loaded, samples=0, user_model=quantized)
    workers = worker_threads(threads)

    def rows(built: BuildResult, feed: Feed, stage: Stage) -> tuple[EngineRow, ...]:
        return _beside(quantized, path, built, feed, threads=workers)

    source = {"name": path.stem, "sha256": model_digest(quantized)}
    made = _Deployment(ascend, samples, subject, recipe, workers, rows)
    return made.written(Path(out), source, path, force=force)


@dataclass(frozen=True, slots=True)
class _Deployment:
    """A recipe that is being written."""

    target: Ascend
    inputs: TrialInputs
    subject: CalibrationSubject
    recipe: Recipe
    threads: int
    rows: Callable[[BuildResult, Feed, Stage], tuple[EngineRow, ...]]

    def written(self, out: Path, source: Mapping[str, str], scales: Path, *, force: bool) -> Report:
        """Write the files, measure them, and move them into the folder together."""
        feed = self.inputs.feed(self.subject.loaded)
        with stage_files(out) as stage:
            request = BuildRequest(
                subject=self.subject,
                folder=stage.temporary_folder,
                earlier_folder=stage.folder,
                ranges=Ranges(ObservedStatistics(), self.subject.method, {}),
                feed=feed,
                manifest=feed.manifest(),
                threads=self.threads,
            )
            built = self.target.write_files(self.recipe, request)
            report = self.report(built, feed, stage, scales)
            write_pages(report, stage)
            data = read_bytes(scales, what="a file of scales", error=ConfigError)
            made_from = {
                "versions": {"calib8": __version__},
                "model": source,
                "shapes": {name: array.shape for name, array in feed.first_samples(1)[0].items()},
                "scales": {"name": scales.name, "sha256": sha256(data)},
                "targets": [self.target.name],
            }
            publish_build(made_from, stage, replacing=None if force else ())
        return report

    def report(self, built: BuildResult, feed: Feed, stage: Stage, scales: Path) -> Report:
        """The report on the files."""
        images = None if self.inputs.dataset is None else self.inputs.dataset.source
        notes = feed.notes if images is not None else (_MADE_UP,)
        return Report(
            title=f"calib8: {self.subject.loaded.name} in int8 for {built.target}, by {scales}",
            model=model_part(self.subject.loaded),
            feed=None if images is None else feed_part(feed, str(images)),
            targets=(
                TargetPart(
                    name=built.target,
                    method=built.method,
                    options=changed_options(self.target),
                    nodes=node_rows(built.decisions),
                    weights=weight_rows(built.weights),
                    files=file_rows(built.files, stage),
                    runnable=str(stage.published_path(built.files["fake-quant model"])),
                    notes=built.notes,
                ),
            ),
            engines=() if images is None else self.rows(built, feed, stage),
            machine=this_machine(),
            notes=(*self.subject.loaded.cut_notes, *notes),
        )


_MADE_UP = (
    "No images were given: the deploy model was tried on made-up samples, and nothing tells how"
    " good its outputs are; --images does."
)


def _one_of(record: Path | None, cache: Path | None, config: Path | None) -> Path:
    """The file that holds the scales."""
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
    return scales


def _refuse_early(
    target: Ascend, inputs: TrialInputs, out: Path, name: str, *, force: bool
) -> None:
    """Refuse what shows before anything is read."""
    if (target.aipp or target.first_layer_int8) and inputs.dataset is None:
        raise ConfigError(
            "AIPP is written from how pictures become inputs, got no pictures; give --images and"
            " their preprocessing"
        )
    manifest.refuse_foreign(out, written_names([target], name), force=force)


def _beside(
    quantized: onnx.ModelProto, path: Path, built: BuildResult, feed: Feed, *, threads: int
) -> tuple[EngineRow, ...]:
    """Rows of the Q/DQ model in ONNX Runtime and of the deploy model, compared with it."""
    # computed in float as written: integer kernels of an older x86 CPU may saturate
    reference = OrtSession.open(quantized, threads=threads, int8_kernels=False)
    how = "Compared in integers, as the NPU computes."
    whom = f"What is called FP32's here is that of {path.name} in ONNX Runtime."
    try:
        deployed = read_model(built.files["deploy model"])
        candidate: Session = open_deploy(deployed, threads=threads)
    except ModelError as error:  # sums that the executor cannot add up exactly
        fake = built.files["fake-quant model"]
        candidate = OrtSession.open(fake, threads=threads, optimize=False)
        how = f"Compared as the fake-quant model: {error}."
    comparison = Comparison(reference, candidate)
    with phase("accuracy", len(feed), "samples") as step, feed.samples() as samples:
        for sample in samples:
            left, right = reference.run(sample), candidate.run(sample)
            comparison.add(sample, left, right, count=feed.unpadded_count)
            step()
    return (
        EngineRow(label="Q/DQ", reference=True, path=str(path)),
        EngineRow(
            label=built.precision,
            target=built.target,
            accuracy=comparison.result(),
            notes=(how, whom),
        ),
    )


__all__ = ["TrialInputs", "convert", "deploy"]
