"""Huawei Ascend: AMCT's files from any machine, and the .om where CANN's `atc` is on the PATH.

::

    model -> config -> what to observe -> record -> deploy.onnx -> atc -> .om
                                             |-> fake_quant.onnx: the same numerics on a CPU
                                             '-> qdq.onnx: for AMCT's own `convert`

AMCT's searches are defined on its own statistics, of the model with fake-quantized weights: they
are observations like those of every other target. The .om itself runs through CANN's pyACL, which
is not covered here: `open` says so.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, ClassVar

from deploy.errors import ConfigError, SdkMissingError
from deploy.targets.ascend.atc import (
    COLORS,
    DEFAULT,
    NO_ATC,
    PARSERS,
    STANDARDS,
    Source,
    read_size,
    write_om,
    write_readme,
)
from deploy.targets.ascend.settled import (
    calibration_notes,
    chips,
    decided,
    planned,
    prepared,
    searches,
    unfused,
    without,
)
from deploy.targets.base import BuildRequest, Built
from deploy.targets.options import check, option

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.observation import Observation, Subject
    from deploy.frontends.base import Trained
    from deploy.graph.plan import FloatNodes, Plan
    from deploy.targets.ascend.amct_calibration import Recorded, RecordPlan
    from deploy.targets.ascend.atc import AtcOptions
    from deploy.targets.ascend.config_keys import QuantConfig
    from deploy.targets.ascend.layers import LayerGraph
    from deploy.targets.ascend.quant_layer import QuantLayer
    from deploy.targets.ascend.recipe import Recipe
    from deploy.tensors import Session


@dataclass(frozen=True, kw_only=True)
class Ascend:
    """The Ascend target.

    Attributes:
        soc: chip for `atc`, such as Ascend310P3; None writes everything but the .om.
        config: AMCT's simplified configuration (.cfg) or quant config JSON; None is AMCT's
            default over all samples of the feed.
        aipp: put the preprocessing into the .om where AIPP can express it.
        source_color: of the pictures that the .om gets: "rgb", "bgr", "nv12" or "nv21".
        source_size: "HxW" of these pictures, where AIPP is to crop the centre.
        csc: standard of nv12 and nv21, one of `deploy.targets.ascend.atc.STANDARDS`.
        dynamic_aipp: the program on the device sets AIPP's parameters.
        first_layer_int8: let AIPP and the first convolution run fused in int8.
        atc_flags: further flags of atc, '--name=value'.
        cann: version of CANN, a key of `deploy.targets.ascend.atc.PARSERS`.
        exact: keep every activation in memory and search IFMR on them, as AMCT does.
        amct_batch: images of one of AMCT's batches, by which HFMG, DMQ and batch_num are defined;
            None takes what the model is fed at once.
    """

    soc: str | None = option(
        None, metavar="CHIP", help="Chip for atc, such as Ascend310P3; without it no .om."
    )
    config: Path | None = option(
        None,
        flag="--ascend-config",
        metavar="FILE",
        help="AMCT's simplified .cfg, or its quant config JSON.",
        observes=True,
    )
    exact: bool = option(
        False,
        flag="--exact-ifmr",
        help="Keep every activation in memory and search IFMR on them, as AMCT does; by default"
        " on histograms.",
        observes=True,
    )
    amct_batch: int | None = option(
        None,
        metavar="N",
        least=1,
        help="Images of one of AMCT's batches, by which HFMG, DMQ and batch_num go; without it what"
        " the model is fed at once.",
        observes=True,
    )
    aipp: bool = option(False, flag="--aipp/--no-aipp", help="Preprocessing inside the .om (AIPP).")
    source_color: str = option(
        "rgb",
        choices=COLORS,
        help="Pictures that the .om with AIPP gets: packed, or YUV420SP of a camera or DVPP.",
    )
    source_size: str | None = option(
        None, metavar="HxW", help="Their size, where AIPP is to crop the centre."
    )
    csc: str | None = option(
        None, choices=STANDARDS, help="Standard of nv12 and nv21; without it bt601-narrow."
    )
    dynamic_aipp: bool = option(
        False, help="AIPP whose parameters the program on the device sets at every inference."
    )
    first_layer_int8: bool = option(
        False, help="AIPP and the first convolution fused in int8; brings --aipp."
    )
    atc_flags: tuple[str, ...] = option(
        (), flag="--atc-flag", metavar="--NAME=VALUE", help="A further flag of atc."
    )
    cann: str = option(
        DEFAULT,
        choices=tuple(PARSERS),
        help="CANN whose atc is to read the models: they are written in an opset that it knows.",
    )
    name: str = "ascend"
    engines: ClassVar[tuple[str, ...]] = (".om",)
    writes: ClassVar[tuple[str, ...]] = (
        "_config.json",
        "_quant.json",
        "_record.txt",
        "_deploy_model.onnx",
        "_fake_quant_model.onnx",
        "_modified_model.onnx",
        "_amct_qdq.onnx",
        "_aipp.cfg",
        "_compression.cfg",
        "_atc.sh",
        "_README.txt",
        ".om",
    )
    runs_here: ClassVar[bool] = False
    own_method: ClassVar[str] = "AMCT's own algorithms, which --ascend-config chooses"
    float_way: ClassVar[str] = "build the float model with atc"

    @property
    def alternatives(self) -> tuple[str, ...]:
        """IFMR without clipping, where no configuration says how to search."""
        from deploy.targets.ascend.amct_calibration import KEEPING

        return (KEEPING,) if self.config is None else ()

    def __post_init__(self) -> None:
        check(self)
        self._source()
        self._atc()  # a wrong chip or flag is told before anything is calibrated

    def _atc(self) -> AtcOptions:
        from deploy.targets.ascend.atc import AtcOptions

        return AtcOptions(soc=self.soc, extra=self.atc_flags)

    def _source(self) -> Source:
        """The pictures that the .om gets.

        Raises:
            ConfigError: told without AIPP, or a standard of pictures that are not YUV.
        """
        told = {
            "source_color": self.source_color != "rgb" and self.source_color,
            "source_size": self.source_size,
            "csc": self.csc,
            "dynamic_aipp": self.dynamic_aipp,
        }
        alone = [name for name, value in told.items() if value]
        if alone and not (self.aipp or self.first_layer_int8):
            raise ConfigError(
                f"a {alone[0]} is that of an .om with AIPP, got {told[alone[0]]!r} without aipp;"
                " give --aipp too"
            )
        made = Source(
            color=self.source_color,
            size=None if self.source_size is None else read_size(self.source_size),
            standard=self.csc or "bt601-narrow",
            dynamic=self.dynamic_aipp,
        )
        if self.csc is not None and not made.yuv:
            raise ConfigError(
                f"a csc is that of YUV pictures, got {self.csc} with source color"
                f" {self.source_color}; give --source-color nv12 or nv21, or leave --csc out"
            )
        return made

    def wanted(self, model: onnx.ModelProto, float_nodes: tuple[str, ...]) -> tuple[str, ...]:
        """Inputs of the layers; what is observed of them says `demand`."""
        from deploy.targets.ascend.recorded import read_any_config

        _, graph = prepared(model)
        asked: Collection[str] = graph.layers
        if self.config is not None:
            config = read_any_config(self.config, graph)  # a broken one is told before calibration
            asked = {*graph.layers, *without(config, float_nodes).entries()}
        layers = (one for one in graph.asked(asked).values() if one.node not in float_nodes)
        read = ((one.input, *(one.others if one.two_activations else ())) for one in layers)
        return tuple(dict.fromkeys(tensor for tensors in read for tensor in tensors))

    def plan(self, model: onnx.ModelProto, float_nodes: FloatNodes = ()) -> Plan:
        """The layers that AMCT quantizes by default, and why the others stay float."""
        return planned(model, float_nodes)

    def demand(self, subject: Subject) -> tuple[Observation, ...]:
        """What AMCT's searches want, on the model with fake-quantized weights.

        Raises:
            ConfigError: the configuration breaks a rule, or the method is none of AMCT's.
            FeedError: fewer samples than batch_num.
        """
        if subject.loaded.trained is not None:
            self._refuse_quantizing(subject.loaded.trained)
            return ()
        return self.record_plan(subject).observations

    def trial(self, request: BuildRequest) -> onnx.ModelProto:
        """The fake-quant model."""
        from deploy.targets.ascend.fake_quant import fake_quant_model

        plan, _, layers, _ = self._quantized(request)
        return fake_quant_model(plan.model, layers)

    def _recorded(self, request: BuildRequest) -> tuple[RecordPlan, Recorded, QuantConfig]:
        """The plan, what was recorded as it was chosen, and the config that says so."""
        from deploy.targets.ascend.amct_calibration import keeping, keeping_plan, kept_layers, mixed

        def made() -> tuple[onnx.ModelProto, RecordPlan, Recorded]:
            plan = self.record_plan(request.subject)  # kept with its model, which its id stands for
            return request.model, plan, plan.record(request.ranges.observed)

        key = self, id(request.model)
        _, plan, found = request.ranges.once(key, made)
        layers = kept_layers(plan, request.choices)
        if layers:
            kept: Recorded = request.ranges.once(
                (*key, "nothing clipped"),
                lambda: keeping_plan(plan).record(request.ranges.observed),
            )
            found = mixed(plan, found, kept, layers)
        return plan, found, keeping(plan.config, layers)

    def _quantized(
        self, request: BuildRequest
    ) -> tuple[RecordPlan, Recorded, dict[str, QuantLayer], QuantConfig]:
        """The plan, the records of the layers in int8, these layers, the config that says so.

        As AMCT's automatic calibration does, a layer that goes back to float leaves the scales of
        the others as they were found.
        """
        from deploy.targets.ascend.quant_layer import quantize_layers

        plan, found, config = self._recorded(request)
        back = frozenset(request.choices.float_nodes)
        records = {name: one for name, one in found.records.items() if name not in back}
        if not records:
            raise ConfigError(
                "an Ascend build must leave a layer in int8, got all of them kept in float;"
                f" {self.float_way}"
            )
        layers = quantize_layers(plan.model, plan.graph, records)
        config = without(config, tuple(back))
        return plan, replace(found, records=records), layers, config

    def build(self, request: BuildRequest) -> Built:
        """Write config, record, deploy, fake-quant and Q/DQ models, AIPP; run `atc` if it is here.

        Raises:
            ConfigError: the configuration, the chip or a flag of atc breaks a rule.
            CalibrationError: a layer has no sound scales.
            ExportError: a layer is outside what the hardware takes.
            BackendError: `atc` is here and failed.
        """
        if request.trained is not None:
            return self._of_trained(request.trained, request)
        plan, found, layers, config = self._quantized(request)
        from deploy.targets.ascend.recipe import Recipe

        recipe = Recipe(
            model=plan.model,
            graph=plan.graph,
            records=found.records,
            layers=layers,
            config=config,
            method=searches(plan.config),
            ranges=found.ranges,
            why=request.float_nodes,
            notes=tuple(calibration_notes(found, plan)),
        )
        return self.files(recipe, request)

    def _refuse_quantizing(self, trained: Trained) -> None:
        """Refuse options that say how a float model is quantized."""
        from deploy.targets.trained import refuse_options

        given = {
            "--ascend-config": self.config is not None,
            "--exact-ifmr": self.exact,
            "--amct-batch": self.amct_batch is not None,
        }
        refuse_options(trained, self.name, given)

    def _of_trained(self, trained: Trained, request: BuildRequest) -> Built:
        """The files of a Q/DQ model, by its own pairs."""
        from deploy.targets.ascend.recipe import from_qdq

        made = from_qdq(trained.model, Path(trained.name))
        own = request.subject.loaded
        loaded = replace(made.loaded, name=own.name, carried=own.carried)
        subject = replace(request.subject, loaded=loaded, given=trained.model)
        return self.files(made.recipe, replace(request, subject=subject))

    def files(self, recipe: Recipe, request: BuildRequest) -> Built:
        """Write the files of a recipe; the rest as `build`, which makes one of what was observed.

        Args:
            recipe: the layers and their scales.
            request: where to write, and samples to try what is written on.
        """
        from deploy.targets.ascend import recipe as told
        from deploy.targets.ascend.aipp import write_aipp_files
        from deploy.targets.ascend.executor import tried
        from deploy.targets.ascend.half import halves_of
        from deploy.targets.ascend.models import write_models
        from deploy.targets.ascend.quant_layer import stored_of
        from deploy.targets.ascend.settled import own_of

        halves = halves_of(request.subject)
        shared = own_of((one.layer for one in recipe.layers.values()), recipe.graph)
        files = write_models(
            recipe.model,
            recipe.layers,
            recipe.config,
            recipe.records,
            request.folder,
            request.subject,
            cann=self.cann,
            halves=halves,
            shared=shared,
        )
        of_widths = (*told.widths(recipe.records), *told.halves(recipe.layers, halves))
        narrow = told.narrow(recipe, self.atc_flags)
        notes = [*recipe.notes, *chips(recipe.layers), *of_widths, *narrow]
        notes += told.shared(shared, request.name)
        notes.append(tried(recipe.model, recipe.layers, request))
        host: list[str] = []
        if self.aipp or self.first_layer_int8:
            host = write_aipp_files(
                request, files, self._source(), first_layer_int8=self.first_layer_int8
            )
        engine, more = write_om(request, files, self._atc())
        write_readme(request, files, self._atc(), cann=self.cann, host=host)
        return Built(
            target=self.name,
            engine=engine,
            runnable=files["fake-quant model"],
            files=files,
            decisions=(
                *decided(recipe.model, recipe.graph, recipe.records, recipe.why),
                *request.kept,
            ),
            method=recipe.method,
            ranges=recipe.ranges,
            weights=stored_of(recipe.layers),
            notes=(*notes, *host, *more),
        )

    def at_hand(self) -> str:
        """CANN's atc, which builds; an NPU runs what it builds, elsewhere."""
        found = which("atc")
        if found is None:
            raise SdkMissingError(f"{NO_ATC}; install CANN's toolkit, source its set_env.sh")
        return f"{found} builds the .om, which CANN runs on the NPU"

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        """Refuse: an .om runs on the NPU only.

        Raises:
            SdkMissingError: always; the fake-quant model tells the accuracy on a CPU.
        """
        raise SdkMissingError(
            f"{engine.name} runs on an Ascend NPU through CANN (pyACL or ais_bench), which calib8"
            " does not drive; its fake-quant model has the same numerics and runs here"
        )

    def record_plan(self, subject: Subject) -> RecordPlan:
        """The layers, settled by the configuration and by what the user keeps in float."""
        from deploy.calibration.observation import FOLDED
        from deploy.targets.ascend.amct_calibration import RecordPlan

        model, graph = prepared(subject.model)
        config, base = self._config(graph, subject), FOLDED
        if not config.do_fusion or config.skip_fusion_layers:
            model, graph = unfused(subject, config)
            config = self._config(graph, subject)
            base = f"unfused {', '.join(config.skip_fusion_layers) if config.do_fusion else 'all'}"
        return RecordPlan(
            model=model,
            graph=graph,
            config=config,
            base=base,
            samples=subject.samples,
            images=subject.batch,
            together=self._together(subject),
            exact=self.exact,
        )

    def _together(self, subject: Subject) -> int:
        """Samples that make one of AMCT's batches.

        Raises:
            ConfigError: they do not make it whole.
        """
        wanted = self.amct_batch or subject.batch
        if wanted % subject.batch:
            raise ConfigError(
                f"a batch of AMCT's is made of whole batches of the model, whose batch is"
                f" {subject.batch}, got --amct-batch {wanted}; give a multiple of it"
            )
        return wanted // subject.batch

    def _config(self, graph: LayerGraph, subject: Subject) -> QuantConfig:
        from deploy.targets.ascend.config import default_config
        from deploy.targets.ascend.recorded import read_any_config

        if self.config is None:
            batches = -(-subject.samples // self._together(subject))
            config = default_config(graph, batch_num=max(batches, 1))
        else:
            config = read_any_config(self.config, graph)
        return without(config, subject.float_nodes)
