"""The ONNX Runtime CPU target: the default, and the reference for all other targets.

The engine is a Q/DQ model: uint8 activations (with int8 ones the CPU kernels cannot fuse a Relu and
gain nothing), int8 weights per channel, int32 biases, a pair after every int8 node. ONNX Runtime
fuses it into QLinearConv, QGemm and similar kernels when it loads the file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from deploy.errors import ConfigError, ExportError
from deploy.files import atomic
from deploy.targets.base import BuildRequest, BuildResult
from deploy.targets.options import check_options, option

if TYPE_CHECKING:
    import onnx

    from calibrators.scales import Scale
    from deploy.calibration.observation import CalibrationSubject, Observation
    from deploy.frontends.base import QdqCalibration
    from deploy.graph.placement import Placement
    from deploy.graph.plan import Decision, FloatNodes, ModelAnalysis, Plan
    from deploy.targets.stored_weights import StoredWeight
    from deploy.tensors import Session


_ANEW = (
    "ONNX Runtime's are uint8: the same codes 128 higher, and where a tensor of zero point 0 is"
    " never negative, all 255 steps over the same real range"
)
_SATURATES = (
    "x86 CPUs without VNNI{here} add two products in 16 bits and can saturate in {count} layer{s}"
    " of the int8 model, since {why}"
)
_ASKED = "--full-weights lets weights take all of int8"
_TRAINED = "weights are kept as the given model has them"


@dataclass(frozen=True, kw_only=True)
class OnnxRuntime:
    """The ONNX Runtime CPU target.

    Attributes:
        int8_stem: run the first Conv in int8 even where float is faster.
        weight_bits: 8, or 7.
        full_weights: let weights use the complete int8 range, so that sums of two products may
            saturate on x86 CPUs without VNNI.
        dynamic_matmul: compute the activation scale of MatMuls with constant weights at run time,
            for each input.
    """

    int8_stem: bool = option(
        False,
        help="Run the first Conv in int8 even where float is faster.",
        changes_observations=True,
        changes_placement=True,
    )
    weight_bits: int = option(
        8,
        help="Bits of weights; 7 where a runtime other than ONNX Runtime saturates.",
        minimum=7,
        maximum=8,
    )
    full_weights: bool = option(
        False,
        help="Let weights take all of int8: slightly more accurate on CPUs with VNNI and on Arm,"
        " wrong on x86 CPUs without VNNI, which saturate.",
    )
    dynamic_matmul: bool = option(
        False,
        help="Quantize the activations of MatMuls with constant weights at run time, for each"
        " input; may suit attention models.",
        changes_placement=True,
    )
    name: str = "onnxruntime"
    engines: ClassVar[tuple[str, ...]] = (".onnx", ".ort")
    writes: ClassVar[tuple[str, ...]] = (".int8.onnx", ".float.onnx", "_run.py")
    runs_here: ClassVar[bool] = True
    own_method: ClassVar[str] = ""
    alternatives: ClassVar[tuple[str, ...]] = ()
    configured: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self)
        if self.full_weights and self.weight_bits < 8:
            raise ConfigError(
                "weights take all of int8 or fewer bits, got --full-weights and --weight-bits"
                f" {self.weight_bits}; leave one of them out"
            )

    @property
    def placement(self) -> Placement:
        """The rules for this target's pairs."""
        from deploy.graph.placement import ONNXRUNTIME

        placement = replace(ONNXRUNTIME, fits_pairs=not self.full_weights)
        return replace(placement, min_products=0) if self.int8_stem else placement

    def scaled_tensors(
        self, model: onnx.ModelProto, float_nodes: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Return the tensors that need a scale: inputs and outputs of int8 nodes."""
        from deploy.graph.plan import analyse

        return analyse(model, self.placement, float_nodes=float_nodes).activations

    def plan(self, model: onnx.ModelProto, float_nodes: FloatNodes = ()) -> Plan:
        """Return the decisions of the graph analysis, which needs no calibration."""
        from deploy.graph.plan import analyse, reasons_by_node

        why = reasons_by_node(float_nodes)
        plan = analyse(model, self._static, float_nodes=why)
        dynamic = self._dynamic(model, tuple(why))
        return replace(plan, decisions=self._with_dynamic(plan.decisions, dynamic))

    @property
    def _static(self) -> Placement:
        """The placement of the nodes that calibrated ranges quantize."""
        placement = self.placement
        if not self.dynamic_matmul:
            return placement
        return replace(placement, heavy=placement.heavy - {"MatMul"})

    def _dynamic(self, model: onnx.ModelProto, float_nodes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the MatMuls that are quantized dynamically."""
        from deploy.targets.onnxruntime.dynamic import find_dynamic_matmuls

        return find_dynamic_matmuls(model, float_nodes) if self.dynamic_matmul else ()

    def _with_dynamic(
        self, decisions: tuple[Decision, ...], dynamic: tuple[str, ...]
    ) -> tuple[Decision, ...]:
        grid = self.placement.grid.name
        chosen = frozenset(dynamic)
        return tuple(
            replace(d, precision=grid, reason="") if d.node in chosen else d for d in decisions
        )

    def demand(self, subject: CalibrationSubject) -> tuple[Observation, ...]:
        """Return the method's statistic for every tensor that needs a scale."""
        if subject.loaded.cut_off is not None:
            raise ExportError(
                "onnxruntime must know every operator, got"
                f" {subject.loaded.cut_off.first_unknown_text}; build with --target tensorrt or"
                " ascend, whose files keep it, or export the model with standard ONNX operators"
            )
        if subject.loaded.qdq is not None:
            return self._every_tensor(subject, subject.loaded.qdq)
        return subject.histogram_observations(
            self.scaled_tensors(subject.model, subject.float_nodes)
        )

    def _every_tensor(
        self, subject: CalibrationSubject, trained: QdqCalibration
    ) -> tuple[Observation, ...]:
        """Return observations of all tensors, since any may lack a scale in a Q/DQ model."""
        from deploy.targets.prequantized import refuse_options

        given = {
            "--int8-stem": self.int8_stem,
            "--weight-bits": self.weight_bits != 8,
            "--full-weights": self.full_weights,
            "--dynamic-matmul": self.dynamic_matmul,
        }
        refuse_options(trained, self.name, given)
        graph = subject.model.graph
        outputs = (name for node in graph.node for name in node.output if name)
        return subject.histogram_observations([*(value.name for value in graph.input), *outputs])

    def trial(self, request: BuildRequest) -> onnx.ModelProto:
        """Return the engine itself."""
        return self._paired(request).engine(request.cpu)

    def _paired(self, request: BuildRequest) -> _Paired:
        """Return the model with its pairs, before the rewrites for fast kernels."""
        from calibrators.grids import signed_grid
        from deploy.graph.plan import ModelAnalysis, analyse
        from deploy.targets.onnxruntime.dynamic import write_dynamic
        from deploy.targets.onnxruntime.qdq import write_qdq
        from deploy.targets.prequantized import qdq_decisions

        ranges, trained = request.ranges_of(self), request.trained
        if trained is not None and self._keeps(request):
            decisions = qdq_decisions(trained, request.model, self.placement)
            return _Paired(
                trained.model,
                decisions,
                dict(ranges.scales),
                request.model,
                ModelAnalysis(request.model),
            )
        once = partial(request.ranges.compute_once, of=request.model)
        read: ModelAnalysis = once("read", lambda: ModelAnalysis(request.model))
        in_float = tuple(request.float_nodes.items()), tuple(ranges.reasons.items())
        plan: Plan = once(
            ("plan", self, *in_float),
            lambda: analyse(
                request.model,
                self._static if trained is None else replace(self._static, min_products=0),
                float_nodes=request.float_nodes,
                float_tensors=ranges.reasons,
                analysis=read,
            ),
        )
        model = write_qdq(
            request.model,
            plan,
            ranges.scales,
            weight_bits=self.weight_bits,
            trained_scales={} if trained is None else trained.weight_scales,
            memoize=once,
        )
        dynamic = self._dynamic(request.model, tuple(request.float_nodes))
        if dynamic:
            fits = self.placement.fits_pairs
            model = write_dynamic(model, dynamic, signed_grid(self.weight_bits), fits_pairs=fits)
        clipped = {gate.source for gate in plan.bias_shifts.values()}
        scales = {name: ranges.scales[name] for name in plan.activations if name not in clipped}
        decisions = self._with_dynamic(plan.decisions, dynamic)
        return _Paired(model, decisions, scales, request.model, read, plan)

    def build(self, request: BuildRequest) -> BuildResult:
        """Write `<name>.int8.onnx`, or `<name>.float.onnx` if all nodes stay float, and a program.

        The program, `<name>_run.py`, runs it on pictures.
        """
        from deploy.feed.preprocess import Preprocess
        from deploy.targets.onnxruntime.dynamic import dynamic_weights
        from deploy.targets.onnxruntime.rewrites import store_halves
        from deploy.targets.onnxruntime.run_script import run_program
        from deploy.targets.stored_weights import read_stored_weights

        paired = self._paired(request)
        decisions, weights = paired.decisions, read_stored_weights(paired.model, on_cpus=True)
        kind = "int8" if any(d.quantized for d in decisions) else "float"
        notes = self._of_trained(request, paired.model, decisions)
        model = paired.engine(request.cpu)  # rewrites that model itself
        if request.subject.loaded.was_float16:
            store_halves(model.graph)
        weights = (*weights, *dynamic_weights(model))
        notes = (*self._notes(decisions, weights), *notes)
        data = model.SerializeToString(deterministic=True)
        path = request.folder / f"{request.name}.{kind}.onnx"
        files = {f"{kind} engine": atomic.write_bytes(path, data)}
        fed = request.manifest.get("preprocess")
        program = request.folder / f"{request.name}_run.py"
        how = None if fed is None else Preprocess.from_json(fed)
        loaded = request.subject.loaded
        text = run_program(path.name, loaded.inputs, how, loaded.classes)
        if text is not None:
            files["program that runs it"] = atomic.write_text(program, text)
        return BuildResult(
            target=self.name,
            engine=path,
            runnable=path,
            files=files,
            decisions=decisions,
            method=request.chosen_ranges.chosen_by,
            ranges=paired.ranges,
            weights=weights,
            notes=notes,
        )

    def _keeps(self, request: BuildRequest) -> bool:
        """Whether a Q/DQ model suits ONNX Runtime's kernels unchanged."""
        trained = request.trained
        return (
            trained is not None
            and trained.all_pairs_are("uint8")
            and not request.subject.loaded.was_float16
        )

    def _of_trained(
        self, request: BuildRequest, written: onnx.ModelProto, decisions: tuple[Decision, ...]
    ) -> tuple[str, ...]:
        """Return the notes on the pairs of a Q/DQ model."""
        from deploy.targets.prequantized import rewritten_notes, unchanged_note

        if request.trained is None:
            return ()
        if self._keeps(request):
            return (unchanged_note(request.trained),)
        return tuple(rewritten_notes(request.trained, written, decisions, self.name, _ANEW))

    def _notes(
        self, decisions: tuple[Decision, ...], weights: tuple[StoredWeight, ...]
    ) -> tuple[str, ...]:
        from deploy.runtimes.ort import cpu_kind

        int8 = any(d.quantized for d in decisions)
        notes = [] if int8 else ["the entire model stays in float; the nodes say why"]
        count = sum(one.saturates for one in weights)
        if count:
            here = ", of which this is one," if cpu_kind() == "avx2" else ""
            why = _ASKED if self.full_weights else _TRAINED
            notes.append(_SATURATES.format(here=here, count=count, s="s" * (count > 1), why=why))
        return tuple(notes)

    def describe_sdk(self) -> str:
        """Describe ONNX Runtime, which is always installed."""
        from deploy.runtimes.ort import runtime_version

        return runtime_version()

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        """Load an engine with ONNX Runtime on the CPU."""
        from deploy.runtimes.ort import OrtSession

        return OrtSession.open(engine, threads=threads)


@dataclass(frozen=True, slots=True)
class _Paired:
    """A model with pairs, and the float model and plan it was made from.

    Attributes:
        model: model with pairs.
        decisions: precision of each node.
        ranges: tensor -> range of its pair.
        like: the float model.
        read: analysis of the float model.
        plan: the plan of the pairs; None for a Q/DQ model that is kept unchanged.
    """

    model: onnx.ModelProto
    decisions: tuple[Decision, ...]
    ranges: dict[str, Scale]
    like: onnx.ModelProto
    read: ModelAnalysis
    plan: Plan | None = None

    def engine(self, cpu: str) -> onnx.ModelProto:
        """The model, rewritten for ONNX Runtime's kernels on a CPU of `BuildRequest.cpu`."""
        from deploy.runtimes.ort import cpu_kind
        from deploy.targets.onnxruntime.rewrite_base import KERNELS, RewriteContext
        from deploy.targets.onnxruntime.rewrites import apply_rewrites

        gates = () if self.plan is None else self.plan.gates
        context = RewriteContext(
            float_graph=self.read.graph,
            float_nodes=frozenset(d.node for d in self.decisions if not d.quantized),
            float_gates=tuple(gate for gate in self.read.gates if gate not in gates),
            has_given_pairs=self.plan is None,
            kernels=KERNELS.get(cpu_kind() if cpu == "this" else cpu, KERNELS["avx2"]),
        )
        return apply_rewrites(self.model, context)
