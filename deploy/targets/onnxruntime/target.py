"""The ONNX Runtime CPU target: the default, and the reference for all other targets.

The engine is a Q/DQ model: uint8 activations (with int8 ones the CPU kernels cannot fuse a Relu and
gain nothing), int8 weights per channel, int32 biases, a pair after every int8 node. ONNX Runtime
fuses it into QLinearConv, QGemm and similar kernels when it loads the file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from deploy.errors import ExportError, counted
from deploy.targets.base import PROGRAM, BuildRequest, BuildResult, Target
from deploy.targets.options import check_options, option

if TYPE_CHECKING:
    import onnx

    from calibrators.scales import Scales
    from deploy.calibration.observation import CalibrationSubject, Observation
    from deploy.calibration.ranges import RangeSet
    from deploy.frontends.base import QdqCalibration
    from deploy.graph.placement import Placement
    from deploy.graph.plan import Decision, FloatNodes, Plan
    from deploy.tasks.evaluation_task import EvaluationTask
    from deploy.tasks.rows import Outputs
    from deploy.tensors import Session


_REQUANTIZED = (
    "ONNX Runtime's are uint8: the same integers plus 128; a tensor of zero point 0 that is never"
    " negative gets 255 steps from 0 to the end of its range"
)


@dataclass(frozen=True, kw_only=True)
class OnnxRuntime(Target):
    """The ONNX Runtime CPU target.

    Attributes:
        int8_stem: run the first Conv in int8 even where float is faster.
        full_weights: let weights use the complete int8 range, so that sums of two products may
            saturate on x86 CPUs without VNNI.
        name: "onnxruntime", the target's name in files, reports and on the command line.
    """

    int8_stem: bool = option(
        False,
        help="Run the first Conv in int8 even where float is faster.",
        changes_observations=True,
        changes_placement=True,
    )
    full_weights: bool = option(
        False,
        help="Let weights take all of int8: slightly more accurate on CPUs with VNNI and on Arm,"
        " wrong on x86 CPUs without VNNI, which saturate.",
    )
    name: str = "onnxruntime"
    engines: ClassVar[tuple[str, ...]] = (".onnx", ".ort")
    writes: ClassVar[tuple[str, ...]] = (".int8.onnx", ".float.onnx", "_run.py")
    runs_here: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def placement(self) -> Placement:
        """The rules for this target's Q/DQ pairs."""
        from deploy.graph.placement import ONNXRUNTIME

        placement = replace(ONNXRUNTIME, limits_pair_sums=not self.full_weights)
        if self.int8_stem:
            placement = replace(placement, min_products=0)
        return placement

    def plan(self, model: onnx.ModelProto, float_nodes: FloatNodes = ()) -> Plan:
        """Return the decisions of the graph analysis, which needs no calibration."""
        from deploy.graph.plan import analyse

        return analyse(model, self.placement, float_nodes=float_nodes)

    def demand(self, subject: CalibrationSubject) -> tuple[Observation, ...]:
        """Return the method's statistic for every tensor that needs a scale."""
        if subject.loaded.cut_off is not None:
            raise ExportError(
                "onnxruntime must know every operator, got"
                f" {subject.loaded.cut_off.first_unknown_text}; build with --target tensorrt or"
                " ascend, whose files keep it, or export the model with standard ONNX operators"
            )
        if subject.loaded.qdq is not None:
            return self._observe_every_tensor(subject, subject.loaded.qdq)
        return subject.histogram_observations(
            self.scaled_tensors(subject.model, subject.float_nodes)
        )

    def _observe_every_tensor(
        self, subject: CalibrationSubject, trained: QdqCalibration
    ) -> tuple[Observation, ...]:
        """Return observations of all tensors of a Q/DQ model, since any may lack a scale in it.

        Options that would change the model's own pairs or weights are refused first.

        Raises:
            ConfigError: such an option is set.
        """
        from deploy.graph.index import Graph
        from deploy.targets.prequantized import refuse_options

        refuse_options(trained, self, ("--int8-stem", "--full-weights"))
        graph = Graph(subject.model)
        node_outputs = graph.producer  # tensor -> the node that makes it
        return subject.histogram_observations([*graph.inputs, *node_outputs])

    def trial(self, request: BuildRequest) -> onnx.ModelProto:
        """Return the engine itself."""
        return self._write_pairs(request).rewrite_for(request)

    evaluated = trial

    def _write_pairs(self, request: BuildRequest) -> _PairedModel:
        """Return the model with its Q/DQ pairs, before it is rewritten for ONNX Runtime's kernels.

        A Q/DQ model of the user is kept if its pairs suit these kernels. Any other model gets pairs
        with the calibrated ranges.
        """
        from deploy.graph.edit import copy_message
        from deploy.targets.onnxruntime.qdq import write_qdq
        from deploy.targets.prequantized import qdq_decisions

        ranges = request.ranges_of(self)  # calibrated, or those of the pairs of a user's Q/DQ model
        trained = request.trained  # the user's Q/DQ model; None if the model has no pairs
        # a file that computes in float16 between its pairs gets new pairs, around float32
        was_float16 = request.subject.loaded.was_float16
        if trained is not None and trained.all_pairs_are("uint8") and not was_float16:
            decisions = qdq_decisions(trained, request.model, self.placement)
            model = copy_message(trained.model)  # `_PairedModel.rewrite_for` changes it
            return _PairedModel(model, decisions, ranges.scales)

        plan = self._plan_pairs(request, ranges)
        model = write_qdq(
            request.model,
            plan,
            ranges.scales,
            trained_scales={} if trained is None else trained.weight_scales,
            memoize=request.compute_once,
        )
        pair_ranges = _ranges_of_pairs(plan, ranges)
        return _PairedModel(model, plan.decisions, pair_ranges, plan)

    def _plan_pairs(self, request: BuildRequest, ranges: RangeSet) -> Plan:
        """Return which nodes run in int8, and which tensors get pairs, with these ranges.

        The plan depends on the nodes and tensors that stay float, not on the values of the ranges.
        """
        from deploy.graph.plan import analyse

        placement = self.placement
        if request.trained is not None:  # a layer that was trained in int8 stays, however small
            placement = replace(placement, min_products=0)
        plan_key = ("plan", self, tuple(request.float_nodes.items()), tuple(ranges.reasons.items()))
        plan: Plan = request.compute_once(
            plan_key,
            lambda: analyse(
                request.model,
                placement,
                float_nodes=request.float_nodes,
                float_tensors=ranges.reasons,  # tensor -> why it has no scale
                analysis=request.model_analysis,
            ),
        )
        return plan

    def build(self, request: BuildRequest) -> BuildResult:
        """Write `<name>.int8.onnx`, or `<name>.float.onnx` if all nodes stay float, and a program.

        The program, `<name>_run.py`, runs it on pictures.
        """
        from deploy.targets.onnxruntime.rewrites import store_halves
        from deploy.targets.stored_weights import find_saturating_layers

        paired = self._write_pairs(request)  # the model with Q/DQ pairs, and its decisions
        decisions = paired.decisions
        # these two read the planned pairs, which `rewrite_for` changes in place
        saturating_nodes = find_saturating_layers(paired.model)
        pair_notes = self._pair_notes(request, paired)
        model = paired.rewrite_for(request)
        if request.subject.loaded.was_float16:
            store_halves(model.graph)

        kind = "int8" if any(decision.quantized for decision in decisions) else "float"
        engine = request.write(f".{kind}.onnx", model)
        files = {f"{kind} engine": engine}
        program = _write_program(request, engine)
        if program is not None:
            files[PROGRAM] = program
        return BuildResult(
            target=self.name,
            engine=engine,
            runnable=engine,
            files=files,
            decisions=decisions,
            method=request.chosen_ranges.chosen_by,
            ranges=paired.ranges,
            notes=(*self._engine_notes(decisions, len(saturating_nodes)), *pair_notes),
        )

    def _pair_notes(self, request: BuildRequest, paired: _PairedModel) -> tuple[str, ...]:
        """Return the notes on the pairs of a Q/DQ model of the user."""
        from deploy.targets.prequantized import rewritten_notes, unchanged_note

        trained = request.trained
        if trained is None:
            return ()
        if paired.plan is None:  # it is kept
            return (unchanged_note(trained),)
        return tuple(
            rewritten_notes(trained, paired.model, paired.decisions, self.name, _REQUANTIZED)
        )

    def _engine_notes(self, decisions: tuple[Decision, ...], saturating_count: int) -> list[str]:
        """Return notes on a model that stays float, and on the layers that may saturate."""
        notes = []
        if not any(decision.quantized for decision in decisions):
            notes.append("the entire model stays in float; the nodes say why")
        if saturating_count:
            reason = "weights are kept as the given model has them"
            if self.full_weights:
                reason = "--full-weights lets weights take all of int8"
            notes.append(
                "x86 CPUs without VNNI add two products in 16 bits and can saturate in"
                f" {counted(saturating_count, 'layer')} of the int8 model, since {reason}"
            )
        return notes

    def describe_sdk(self) -> str:
        """Describe ONNX Runtime, which is always installed."""
        from deploy.runtimes.ort import runtime_version

        return runtime_version()

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        """Load an engine with ONNX Runtime on the CPU."""
        from deploy.runtimes.ort import OrtSession

        return OrtSession.open(engine, threads=threads)


def _ranges_of_pairs(plan: Plan, ranges: RangeSet) -> Scales:
    """Return tensor -> range, for the tensors that get a pair."""
    # the layer upstream adds the shift of a gate (such as Hard-Swish, which adds 3) to its bias;
    # the sum has a pair, and the source alone has none
    shifted_sources = {gate.source for gate in plan.bias_shift_gates.values()}
    names = [name for name in plan.activations if name not in shifted_sources]
    return {name: ranges.scales[name] for name in names}


def _write_program(request: BuildRequest, engine: Path) -> Path | None:
    """Write the program that runs the engine on pictures; None if its inputs are no pictures."""
    from deploy.feed.preprocess import Preprocess
    from deploy.targets.onnxruntime.run_script import read_characters, run_program
    from deploy.tasks.sequences import Text

    recorded = request.manifest.get("preprocess")
    if recorded is None:  # the model is fed arrays
        return None
    preprocess = Preprocess.from_json(recorded)
    loaded = request.subject.loaded
    task, outputs = _recognise_task(request)
    classes = loaded.classes  # class number -> name
    if isinstance(task, Text) and not classes:  # its classes are characters
        classes = read_characters(request.model, task)
    text = run_program(engine.name, loaded.inputs, preprocess, classes, task, outputs)
    return None if text is None else request.write("_run.py", text)


def _recognise_task(request: BuildRequest) -> tuple[EvaluationTask | None, Outputs]:
    """Return the task of the float model's outputs, and the outputs of a sample by name.

    (None, {}) without evaluation samples; the task is also None if no task fits the outputs.
    """
    from deploy.metrics.output_form import derive_from_first
    from deploy.tasks import make_metric
    from deploy.tasks.thresholds import MAX_FORM_SAMPLES

    if request.evaluation_set is None:
        return None, {}
    pairs = request.evaluation_set.samples_with_outputs(MAX_FORM_SAMPLES)
    subject = request.subject
    # a metric of the user's own would say nothing of the task, so it is left out
    metric = make_metric(
        metric=None, task=subject.task or None, declared=subject.loaded.declaration
    )
    form, samples = derive_from_first(pairs, metric)
    _, outputs = next(iter(samples))
    return form.task, outputs


@dataclass(frozen=True, slots=True)
class _PairedModel:
    """A model with pairs, and the plan it was made from.

    Attributes:
        model: model with pairs.
        decisions: precision of each node.
        ranges: tensor -> range of its pair.
        plan: the plan of the pairs; None for a Q/DQ model that is kept unchanged.
    """

    model: onnx.ModelProto
    decisions: tuple[Decision, ...]
    ranges: Scales
    plan: Plan | None = None

    def rewrite_for(self, request: BuildRequest) -> onnx.ModelProto:
        """Return the engine: the model rewritten for ONNX Runtime's kernels on a kind of CPU.

        Call it last: the rewrites change `self.model`, which has the planned pairs.

        `request`: has the kind of CPU, and the analysis of the float model.
        """
        from deploy.runtimes.ort import cpu_kind
        from deploy.targets.onnxruntime.rewrite_base import KERNELS, RewriteContext
        from deploy.targets.onnxruntime.rewrites import apply_rewrites

        # gates: products with a Hard-Sigmoid, as in Hard-Swish; the plan has some of them in int8
        int8_gates = () if self.plan is None else self.plan.gates
        analysis = request.model_analysis
        float_gates = [gate for gate in analysis.gates if gate not in int8_gates]
        float_nodes = {decision.node for decision in self.decisions if not decision.quantized}
        cpu = request.cpu  # "this" for this machine's kind, or a key of `KERNELS`, such as "vnni"
        kind = cpu_kind() if cpu == "this" else cpu
        context = RewriteContext(
            float_graph=analysis.graph,
            float_nodes=frozenset(float_nodes),
            float_gates=tuple(float_gates),
            has_given_pairs=self.plan is None,  # without a plan, the pairs are the user's
            # a kind without measured times counts as avx2, on which the rewrites gain least
            kernels=KERNELS.get(kind, KERNELS["avx2"]),
        )
        apply_rewrites(self.model, context)
        return self.model
