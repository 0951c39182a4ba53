"""The Huawei Ascend target: AMCT's files on any machine, and the .om if CANN's `atc` is installed.

::

    model -> config -> observations -> record -> deploy.onnx -> atc -> .om
                                          |-> fake_quant.onnx: the same numerics on a CPU
                                          '-> qdq.onnx: for AMCT's own `convert`

AMCT defines its searches on statistics of the model with fake-quantized weights; calib8 records
these as observations, like those of all other targets. The .om runs through CANN's pyACL, which
calib8 does not drive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, ClassVar

from deploy.errors import ConfigError, ExportError, SdkMissingError
from deploy.targets.ascend.atc import (
    COLORS,
    DEFAULT_CANN,
    NO_ATC,
    PARSERS,
    STANDARDS,
    AippSource,
    AtcOptions,
    parse_size,
    refuse_other_domains,
    write_om,
    write_readme,
)
from deploy.targets.ascend.preparation import (
    calibration_alerts,
    calibration_notes,
    decide_precisions,
    describe_algorithms,
    disable_layers,
    find_amct_unfolded_layers,
    find_weight_sharers,
    make_default_plan,
    prepare_model,
    unfuse_batchnorms,
)
from deploy.targets.base import BuildRequest, BuildResult, Target
from deploy.targets.options import check_options, option

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.observation import CalibrationSubject, Observation
    from deploy.frontends.base import QdqCalibration
    from deploy.graph.plan import FloatNodes, Plan
    from deploy.targets.ascend.amct_calibration import CalibrationRecord, RecordPlan
    from deploy.targets.ascend.config_keys import QuantConfig
    from deploy.targets.ascend.layers import LayerGraph
    from deploy.targets.ascend.quant_layer import QuantLayers
    from deploy.targets.ascend.recipe import Recipe
    from deploy.tensors import Session

# roles of the files that the command of atc names
_ATC_INPUTS = ("deploy model", "AIPP configuration", "compression options")


@dataclass(frozen=True, kw_only=True)
class Ascend(Target):
    """The Ascend target.

    Attributes:
        soc: chip for `atc`, such as Ascend310P3; None writes everything but the .om.
        config: AMCT's simplified configuration (.cfg) or quant config JSON; None for AMCT's
            default over all calibration samples.
        aipp: put the preprocessing into the .om if AIPP can express it.
        source_color: format of the .om's input images: "rgb", "bgr", "nv12" or "nv21".
        source_size: "HxW" of the frames, if it is not the size of the input: AIPP crops their
            center, or the report says how to resize them before AIPP.
        csc: color standard of nv12 and nv21, one of `deploy.targets.ascend.atc.STANDARDS`.
        first_layer_int8: run AIPP and the first convolution fused in int8.
        atc_flags: further flags of atc, '--name=value'.
        cann: CANN version, a key of `deploy.targets.ascend.atc.PARSERS`.
        exact: keep all activations in memory and search IFMR on them, as AMCT does.
        amct_batch: images in one AMCT batch, the unit of HFMG, DMQ and batch_num; None for the
            model's batch size.
        name: the target's name, "ascend".
    """

    soc: str | None = option(
        None, metavar="CHIP", help="Chip for atc, such as Ascend310P3; without it no .om."
    )
    config: Path | None = option(
        None,
        flag="--ascend-config",
        metavar="FILE",
        help="AMCT's simplified .cfg, or its quant config JSON.",
        changes_observations=True,
    )
    exact: bool = option(
        False,
        flag="--exact-ifmr",
        help="Keep all activations in memory and search IFMR on them, as AMCT does; the default"
        " searches on histograms.",
        changes_observations=True,
    )
    amct_batch: int | None = option(
        None,
        metavar="N",
        minimum=1,
        help="Images in a batch of HFMG, DMQ and batch_num; default: the model's batch size, or 1.",
        changes_observations=True,
    )
    aipp: bool = option(False, flag="--aipp/--no-aipp", help="Preprocessing inside the .om (AIPP).")
    source_color: str = option(
        "rgb",
        choices=COLORS,
        help="Input images of the .om with AIPP: packed, or YUV420SP from a camera or DVPP.",
    )
    source_size: str | None = option(
        None,
        metavar="HxW",
        help="Size of the frames, if it is not the input's: AIPP crops their center, or the report"
        " says how to resize them before.",
    )
    csc: str | None = option(
        None, choices=STANDARDS, help="Color standard of nv12 and nv21; default: bt601-narrow."
    )
    first_layer_int8: bool = option(
        False, help="Run AIPP and the first convolution fused in int8; implies --aipp."
    )
    atc_flags: tuple[str, ...] = option(
        (), flag="--atc-flag", metavar="--NAME=VALUE", help="A further flag of atc."
    )
    cann: str = option(
        DEFAULT_CANN,
        choices=tuple(PARSERS),
        help="CANN version whose atc reads the models; it decides their opset.",
    )
    name: str = "ascend"
    engines: ClassVar[tuple[str, ...]] = (".om",)
    writes: ClassVar[tuple[str, ...]] = (
        "_config.json", "_quant.json", "_record.txt", "_deploy_model.onnx",
        "_fake_quant_model.onnx", "_modified_model.onnx", "_amct_qdq.onnx", "_aipp.cfg",
        "_compression.cfg", "_atc.sh", "_README.txt", ".om",
    )  # fmt: skip
    own_method: ClassVar[str] = "AMCT's own algorithms, which --ascend-config chooses"

    @property
    def alternatives(self) -> tuple[str, ...]:
        """IFMR without clipping, if no configuration file sets the search."""
        from deploy.targets.ascend.layer_searches import UNCLIPPED_METHOD

        return () if self.configured else (UNCLIPPED_METHOD,)

    @property
    def configured(self) -> bool:
        """Whether the user gave AMCT's configuration."""
        return self.config is not None

    def __post_init__(self) -> None:
        check_options(self)
        self._image_format()  # options for AIPP without AIPP are refused
        self._atc_options()  # a wrong chip or flag is refused before the calibration

    @property
    def option_alerts(self) -> tuple[str, ...]:
        """Sentences on a size of frames and a chip that may be wrong."""
        return (*self._image_format().alerts, *self._atc_options().alerts)

    def _atc_options(self) -> AtcOptions:
        """Return the options of atc; refuse a wrong chip or flag."""
        return AtcOptions(soc=self.soc, extra=self.atc_flags)

    def _image_format(self) -> AippSource:
        """Return the format of the .om's input images.

        Raises:
            ConfigError: an option for AIPP (preprocessing in the .om) without AIPP, or a standard
                of YUV colors for other images.
        """
        has_aipp = self.aipp or self.first_layer_int8
        for name in ("source_color", "source_size", "csc"):
            value = getattr(self, name)
            default = getattr(Ascend, name)
            if value != default and not has_aipp:
                raise ConfigError(
                    f"{name} is for an .om with AIPP, got {value!r} without aipp; give --aipp too"
                )
        source = AippSource(
            color=self.source_color,
            size=None if self.source_size is None else parse_size(self.source_size),
            standard=self.csc or "bt601-narrow",
        )
        if self.csc is not None and not source.is_yuv:  # csc: the standard of YUV colors
            raise ConfigError(
                f"csc is for YUV images, got {self.csc} with source color"
                f" {self.source_color}; give --source-color nv12 or nv21, or leave --csc out"
            )
        return source

    def scaled_tensors(
        self, model: onnx.ModelProto, float_nodes: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Return the input tensors of the layers that can be in int8.

        `demand` decides which statistics of them are observed.

        `float_nodes`: names of the nodes that stay in float.
        """
        from deploy.targets.ascend.existing_files import read_any_config

        _, graph = prepare_model(model)
        names = set(graph.layers)
        if self.config is not None:
            config = read_any_config(self.config, graph)  # refuse a bad one before calibration
            # a configuration may add MatMuls of two activations, and inputs of other nodes (by the
            # setting tensor_quantize)
            names.update(disable_layers(config, float_nodes).enabled_entries())
        tensors: list[str] = []
        for layer in graph.select(names).values():
            if layer.node not in float_nodes:
                # both inputs of a MatMul of two activations, else the first one
                tensors += layer.activations if layer.two_activations else (layer.input,)
        return tuple(dict.fromkeys(tensors))

    def plan(self, model: onnx.ModelProto, float_nodes: FloatNodes = ()) -> Plan:
        """Return the layers that AMCT quantizes, and why the others stay float.

        Layers stay float by `float_nodes`, or by the user's configuration.
        """
        from deploy.graph.plan import FLOAT_BY_USER, reasons_by_node
        from deploy.targets.ascend.existing_files import read_any_config

        float_reasons = reasons_by_node(float_nodes)
        if self.config is not None:
            _, graph = prepare_model(model)
            config = read_any_config(self.config, graph)
            disabled_names = graph.layers.keys() - config.enabled_layers()
            float_reasons = {**dict.fromkeys(disabled_names, FLOAT_BY_USER), **float_reasons}
        return make_default_plan(model, float_reasons)

    def demand(self, subject: CalibrationSubject) -> tuple[Observation, ...]:
        """Return the observations to make: the statistics that AMCT's searches need.

        They are of the model with fake-quantized weights.

        Raises:
            ConfigError: the configuration breaks a rule, or the method is not one of AMCT's.
            ExportError: the model has operators that atc does not read.
            FeedError: fewer batches than batch_num.
        """
        from deploy.frontends.checks import refuse_optimized

        refuse_optimized(subject.model, self.name)
        refuse_other_domains(subject.loaded)
        if subject.loaded.qdq is not None:  # a Q/DQ model has its scales: nothing is observed
            from deploy.targets.prequantized import refuse_options

            flags = ("--ascend-config", "--exact-ifmr", "--amct-batch")
            refuse_options(subject.loaded.qdq, self, flags)
            return ()
        return self.record_plan(subject).observations

    def trial(self, request: BuildRequest) -> onnx.ModelProto:
        """Return the fake-quant model."""
        from deploy.targets.ascend.fake_quant import fake_quant_model

        plan, _, layers, _ = self.quantize(request)
        return fake_quant_model(plan.model, layers)

    evaluated = trial

    def search_all_layers(
        self, request: BuildRequest, search: str
    ) -> tuple[RecordPlan, CalibrationRecord]:
        """Return the default search's plan, and all layers' records by a search; computed once.

        A search is a way to a layer's scales, one of `layer_searches.SEARCHES`.
        """
        from deploy.targets.ascend.layer_searches import make_search_plan

        plan: RecordPlan = request.compute_once(self, lambda: self.record_plan(request.subject))
        record = request.compute_once(
            (self, search),
            lambda: make_search_plan(plan, search).record(request.ranges.observed),
        )
        return plan, record

    def _search_layers(
        self, request: BuildRequest
    ) -> tuple[RecordPlan, CalibrationRecord, QuantConfig]:
        """Search the scales of all layers, each by the search that the request chooses for it.

        A search is a way to a layer's scales, one of `layer_searches.SEARCHES`.

        Returns:
            The plan of the default search; the records (scales and offsets) of all layers; the
            config that makes AMCT run these searches.
        """
        from deploy.targets.ascend import layer_searches as searches

        plan, default_calibration = self.search_all_layers(request, searches.DEFAULT_SEARCH)
        # layers with another search than the default one
        search_by_layer = searches.chosen_searches(plan, request.choices)
        calibration_by_search = {}
        for search in set(search_by_layer.values()):
            _, calibration_by_search[search] = self.search_all_layers(request, search)
        calibration_record = searches.merge_records(
            plan, default_calibration, calibration_by_search, search_by_layer
        )
        all_searches = {
            name: search_by_layer.get(name, searches.DEFAULT_SEARCH) for name in plan.layers
        }
        return plan, calibration_record, searches.apply_searches(plan.config, all_searches)

    def quantize(
        self, request: BuildRequest
    ) -> tuple[RecordPlan, CalibrationRecord, QuantLayers, QuantConfig]:
        """Quantize the layers that the request's choices leave in int8, and that fit the hardware.

        Layers that do not fit stay in float; those of a user's configuration are refused.

        The scales of all layers are searched, as in AMCT's automatic calibration. So the scales of
        a layer do not depend on which other layers are kept in float.

        Returns:
            The plan of all layers; the records of the int8 layers; layer -> its integers; the
            config, in which the float layers are disabled.
        """
        from deploy.targets.ascend.quant_layer import quantize_fitting_layers, refused_layers_error

        plan, calibration_record, config = self._search_layers(request)
        float_nodes = request.choices.float_nodes
        records = {
            name: record
            for name, record in calibration_record.records.items()
            if name not in float_nodes
        }
        if not records:
            raise ConfigError(
                "an Ascend build must leave a layer in int8, got all of them kept in float; build"
                " the float model with atc"
            )
        layers, refusals = quantize_fitting_layers(plan.model, plan.graph, records)
        if not layers:
            remedy = "no other layer is int8: build the float model with atc"
            raise refused_layers_error(refusals, remedy)
        if refusals and self.configured:  # the user's configuration demands these layers in int8
            raise refused_layers_error(refusals)
        # in AMCT's order, in which the layers that DMQ balances come first
        records = {name: record for name, record in records.items() if name in layers}
        config = disable_layers(config, {**float_nodes, **refusals})
        calibration_record = replace(calibration_record, records=records, refusals=refusals)
        return plan, calibration_record, layers, config

    def build(self, request: BuildRequest) -> BuildResult:
        """Quantize the model and write all files; compile them to an .om if `atc` is installed.

        The files are the config, the record of scales, the deploy, fake-quant and Q/DQ models, and
        the AIPP configuration.

        Raises:
            ConfigError: the configuration, the chip or a flag of atc breaks a rule.
            CalibrationError: a layer has no valid scales.
            ExportError: a layer exceeds the limits of the hardware.
            BackendError: `atc` is installed and failed.
        """
        if request.trained is not None:  # the user's Q/DQ model
            return self._build_from_qdq(request.trained, request)
        from deploy.targets.ascend.recipe import Recipe

        # `plan.config` calibrates all layers by the default search, which `method` names. `config`,
        # which is written, has other searches for single layers, and disables the float ones
        plan, calibration_record, layers, config = self.quantize(request)
        recipe = Recipe(
            model=plan.model,
            graph=plan.graph,
            records=calibration_record.records,
            layers=layers,
            config=config,
            method=describe_algorithms(plan.config),
            ranges=calibration_record.ranges,
            float_reasons={**request.float_nodes, **calibration_record.refusals},  # node -> reason
            notes=tuple(calibration_notes(calibration_record, plan)),
            alerts=calibration_alerts(plan),
        )
        return self.write_files(recipe, request)

    def _build_from_qdq(self, qdq: QdqCalibration, request: BuildRequest) -> BuildResult:
        """Write the files of a Q/DQ model with the scales of its own pairs."""
        from deploy.targets.ascend.recipe import recipe_from_qdq

        # in the request, the float model of the Q/DQ model takes the place of the user's own
        float_loaded, recipe = recipe_from_qdq(qdq.model, Path(qdq.name))
        user_loaded = request.subject.loaded
        float_loaded = replace(
            float_loaded,
            name=user_loaded.name,
            metadata_preprocess=user_loaded.metadata_preprocess,
        )
        subject = replace(request.subject, loaded=float_loaded, user_model=qdq.model)
        return self.write_files(recipe, replace(request, subject=subject))

    def write_files(self, recipe: Recipe, request: BuildRequest) -> BuildResult:
        """Write the files of a recipe: models, record, AIPP, atc script, README; check the models.

        Args:
            recipe: the float model and the scales of its int8 layers.
            request: folder, name and samples of the build.

        Raises:
            As in `build`.
        """
        from deploy.targets.ascend.executor import CHECKED_SAMPLES, compare_deploy_model
        from deploy.targets.ascend.float16 import find_float16_tensors
        from deploy.targets.ascend.models import write_models
        from deploy.targets.ascend.recipe import precision_notes, shared_weight_notes

        float16_tensors = find_float16_tensors(request.subject)
        layers = [quant_layer.layer for quant_layer in recipe.layers.values()]
        weight_sharers = find_weight_sharers(layers, recipe.graph)  # layers that read one weight
        files = write_models(
            recipe,
            request,
            cann=self.cann,
            float16_tensors=float16_tensors,
            weight_sharers=weight_sharers,
        )
        samples = request.feed.first_samples(CHECKED_SAMPLES)
        comparison = compare_deploy_model(
            recipe.model, recipe.layers, samples, threads=request.threads
        )
        notes = [
            *recipe.notes,
            *precision_notes(recipe, float16_tensors),
            *shared_weight_notes(weight_sharers, request.name),
            comparison.sentence(),
        ]
        host_notes, aipp_alerts = self._write_aipp(request, files)
        engine, atc_notes, atc_error = write_om(request, files, self._atc_options())
        write_readme(request, files, self._atc_options(), cann=self.cann, host_notes=host_notes)
        decisions = decide_precisions(
            recipe.model, recipe.graph, recipe.records, recipe.float_reasons
        )
        runnable = None  # if atc failed, nothing is there to be run or shipped
        shipped = []
        if not atc_error:
            runnable = files["fake-quant model"]  # on a CPU, in place of the .om
            shipped = [files[role] for role in _ATC_INPUTS if role in files]
        return BuildResult(
            target=self.name,
            engine=engine,
            runnable=runnable,
            shipped=tuple(shipped),
            files=files,
            decisions=(*decisions, *request.plugin_decisions),
            method=recipe.method,
            ranges=recipe.ranges,
            notes=(*notes, *host_notes, *atc_notes),
            alerts=(*self._alerts(recipe), *aipp_alerts),
            error=atc_error,
        )

    def _write_aipp(
        self, request: BuildRequest, files: dict[str, Path]
    ) -> tuple[list[str], list[str]]:
        """Write the AIPP files, if they are asked for, and add them to `files`, role -> path.

        If AIPP cannot express the preprocessing, no AIPP file is written, and the build goes on.

        Returns:
            (notes on the steps before AIPP, which the device's program has to do; alerts: why there
            is no AIPP file).
        """
        from deploy.targets.ascend.aipp import write_aipp_files

        if not (self.aipp or self.first_layer_int8):
            return [], []
        try:
            host_notes = write_aipp_files(
                request, files, self._image_format(), first_layer_int8=self.first_layer_int8
            )
        except ExportError as error:
            return [], [f"no AIPP file: {error}"]
        return host_notes, []

    def _alerts(self, recipe: Recipe) -> tuple[str, ...]:
        """Return sentences on what the user must know before the files are used."""
        from deploy.targets.ascend.recipe import float16_overflow_alerts

        alerts = [*recipe.alerts, *self.option_alerts]
        alerts += float16_overflow_alerts(recipe, self.atc_flags)
        inputs = {value.name for value in recipe.model.graph.input}
        int8_conv_inputs = [
            quant_layer.layer.input
            for quant_layer in recipe.layers.values()
            if quant_layer.layer.kind == "Conv"
        ]
        if self.first_layer_int8 and inputs.isdisjoint(int8_conv_inputs):
            alerts.append(
                "--first-layer-int8 has no effect: no convolution that reads the model's input is"
                " in int8"
            )
        return tuple(alerts)

    def describe_sdk(self) -> str:
        """Describe CANN's atc, which builds the .om; running it takes an NPU."""
        atc = which("atc")
        if atc is None:
            raise SdkMissingError(f"{NO_ATC}; install CANN's toolkit, source its set_env.sh")
        return f"{atc} builds the .om, which CANN runs on the NPU"

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        """Refuse: an .om runs only on the NPU.

        Raises:
            SdkMissingError: always; the fake-quant model gives the accuracy on a CPU.
        """
        raise SdkMissingError(
            f"{engine.name} runs on an Ascend NPU through CANN (pyACL or ais_bench), which calib8"
            " does not drive; its fake-quant model has the same numerics and runs here"
        )

    def record_plan(self, subject: CalibrationSubject) -> RecordPlan:
        """Return the plan of the calibration: which layers are quantized, what is observed.

        The configuration and --keep-float choose the layers. In `subject.model` every
        BatchNormalization is folded into its layer, in `subject.unfolded` none; the plan's model
        keeps those that AMCT would not fold.
        """
        from deploy.calibration.observation import FOLDED
        from deploy.targets.ascend.amct_calibration import RecordPlan

        model, graph = prepare_model(subject.model)
        config = self._resolve_config(graph, subject)
        model_key = FOLDED  # models with equal keys share their stored statistics
        unfolded_layers = []  # whose BatchNormalization AMCT does not fold
        if self.configured:  # with a configuration of AMCT, which folds into a Conv only
            unfolded_layers = find_amct_unfolded_layers(subject.unfolded.model)
        if not config.do_fusion or config.skip_fusion_layers or unfolded_layers:
            model, graph = unfuse_batchnorms(subject, config, unfolded_layers=unfolded_layers)
            # again for the new layers, on which the defaults and the checks depend
            config = self._resolve_config(graph, subject)
            unfused_names = ["all"]
            if config.do_fusion:
                unfused_names = [*config.skip_fusion_layers, *unfolded_layers]
            model_key = f"unfused {', '.join(unfused_names)}"
        return RecordPlan(
            model=model,
            graph=graph,
            config=config,
            model_key=model_key,
            samples=subject.sample_count,
            images_per_sample=subject.batch,
            samples_per_batch=self._samples_per_batch(subject),
            exact=self.exact,
        )

    def _samples_per_batch(self, subject: CalibrationSubject) -> int:
        """Return the number of samples in one AMCT batch."""
        images = self.amct_batch or subject.batch
        if images % subject.batch:
            raise ConfigError(
                "--amct-batch must be a multiple of the model's batch size,"
                f" {subject.batch}, got {images}"
            )
        return images // subject.batch

    def _resolve_config(self, graph: LayerGraph, subject: CalibrationSubject) -> QuantConfig:
        """Return the user's or the default config, with the --keep-float layers disabled."""
        from deploy.targets.ascend.config import default_config
        from deploy.targets.ascend.existing_files import read_any_config

        if self.config is None:
            batches = -(-subject.sample_count // self._samples_per_batch(subject))
            config = default_config(graph, batch_num=max(batches, 1))
        else:
            config = read_any_config(self.config, graph)
        return disable_layers(config, subject.float_nodes)
