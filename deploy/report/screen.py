"""The report as text: one screen of a build, or everything; labels in the margin.

The screen of a build has what a user decides by: verdict, speed, size, task, what the images were
taken for, the files to ship, warnings that need an action, and the next command. All else is on the
page and in report.md, and `-v` prints it in place of the screen.

The front of a search in one line::

    about 1.19x FP32 (estimated); 1.36x with 27 of 28 boxes: --split 3
          what was built                another split, its price, how to build it

The next step, the first that applies and was not followed yet::

    worse than the build before it   -> that build again
    doubtful or unusable, too few    -> more images, then other images to judge by
                          otherwise  -> a split of a better level -> a search -> without the user's
                                        method -> more effort and repairs, once -> training with
                                        int8 (PyTorch) -> the float model
                        of a Q/DQ model  -> the float model that it was made from
    else                             -> measure it, or run it
"""

import shlex
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import PurePath

from deploy.errors import counted
from deploy.metrics.latency import MIN_GAIN
from deploy.metrics.levels import DOUBTFUL, FLOAT, GOOD, UNUSABLE
from deploy.metrics.output_form import BY_VALUES
from deploy.report import figures
from deploy.report.charts import sweep_table
from deploy.report.figures import engine_layers_text
from deploy.report.model import Findings, find_rivals
from deploy.report.parts import EngineRow, FileRow, RequestPart, TargetPart
from deploy.report.tables import (
    KERNEL_HEADS,
    OPTIONS,
    REPORT,
    ComparisonLine,
    built_targets,
    calibration_text,
    coverage,
    engine_lines,
    failure_texts,
    kernel_rows,
    kind_table,
    path_of,
    remaining_kernels,
    task_label,
    timed_engines,
)
from deploy.report.verdict import Verdict
from deploy.targets.base import (
    ATC_SCRIPT,
    CHIP_ATC_SCRIPT,
    DEVICE_SCRIPTS,
    NEWER_TRTEXEC_SCRIPT,
    PROGRAM,
    RTX_SCRIPT,
    TRTEXEC_SCRIPT,
    TRTEXEC_SCRIPT_WITH,
)
from deploy.terminal import join_visible
from deploy.tuning.plan_file import SplitRow
from deploy.tuning.prices import ASSUMED_INT8_TIME

WIDTH = 98
MARGIN = 14


def entry(label: str, text: str) -> Iterator[str]:
    """Yield a label in the margin and its text, wrapped in its own column."""
    lines = textwrap.wrap(text, WIDTH - MARGIN, break_long_words=False, break_on_hyphens=False)
    yield from _with_label(label, lines or [""])


def entries(label: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield the entries of several texts, only the first with the label."""
    for text in texts:
        yield from entry(label, text)
        label = ""


def _with_label(label: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines beside a margin, which has the label in the first one."""
    for line in lines:
        yield f"{label:<{MARGIN}}{line}"
        label = ""


def align_columns(
    rows: Sequence[Sequence[str]], left_columns: Collection[int], *, max_width: int | None = None
) -> Iterator[str]:
    """Yield rows as lines of text, in which every column has one width.

    Cells are aligned to the right, those of the columns with an index in `left_columns` to the
    left. A cell longer than `max_width` moves the cells behind it in its own row only.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    if max_width is not None:
        widths = [min(width, max_width) for width in widths]
    for row in rows:
        cells = []
        for index, cell in enumerate(row):
            align = str.ljust if index in left_columns else str.rjust
            cells.append(align(cell, widths[index]))
        yield "  ".join(cells).rstrip()


def labelled_table(
    label: str, heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> Iterator[str]:
    """Yield the lines of a table beside a label.

    The first column has the names of the rows; it is moved to the right end. Columns that are empty
    in every row are left out. Without rows nothing is yielded.

    Args:
        label: in the margin.
        heads: head of each column.
        rows: cells of each row, the name first.
    """
    if not rows:
        return

    name_column, *value_columns = zip(heads, *rows, strict=False)  # each with its head first
    columns = [column for column in (*value_columns, name_column) if any(column[1:])]
    lines = align_columns(list(zip(*columns, strict=True)), left_columns=(len(columns) - 1,))
    yield from _with_label(label, lines)


_MAX_NOTES = 8
_MAX_ALERTS = 3
_MAX_KERNELS = 10


def to_screen(report: Findings) -> str:
    """Return plain text without colours, at most `WIDTH` columns if names allow.

    The report of a build has verdicts. It is shortened to what a user decides by; any other report
    is printed in full.
    """
    if any(engine.verdict for engine in report.engines):
        lines = (
            report.title,
            *_verdicts(report),
            *_table(report, main_lines(report)),
            *_decision_lines(report),
        )
        return join_visible(lines) + "\n"
    blocks = (
        (report.title,),
        (*_failures(report), *_int8_nodes(report)),
        tuple(_table(report, engine_lines(report))),
        tuple(labelled_table("Batches", *sweep_table(report.engines))),
        tuple(_kernels(report)),
        tuple(_machine(report)),
        tuple(_notes(report)),
    )
    return "\n\n".join(join_visible(block) for block in blocks if block) + "\n"


def serious_findings(report: Findings) -> Iterator[str]:
    """Yield failures, verdicts that are not good, and warnings, for runs that show no report."""
    yield from failure_texts(report)
    for engine in report.engines:
        if engine.verdict is not None and engine.verdict.level in (DOUBTFUL, UNUSABLE):
            yield f"{engine.label}: {engine.verdict.text}"
    for text in _urgent_texts(report):
        yield f"warning: {text}"


def _verdicts(report: Findings) -> Iterator[str]:
    """Yield each verdict, with the names of its engines if there are several engines."""
    labels_by_text: dict[str, list[str]] = {}
    for engine in report.engines:
        if engine.verdict:
            labels_by_text.setdefault(engine.verdict.text, []).append(engine.label)
    engine_count = sum(map(len, labels_by_text.values()))
    texts = []
    for text, labels in labels_by_text.items():
        texts.append(text if engine_count == 1 else f"{', '.join(labels)}: {text}")
    yield from entries("Verdict", texts)


# labels of the lines that one screen shows
_ALWAYS_SHOWN = ("Size", "Latency p50", "CPU time p50")
_TASKS_WITH_LABELS = ("Top-1", "mAP .50:.95")
_SHOWN_WITHOUT_TASK = ("Top-1 agreement", "SQNR", "SQNR, worst part")


def main_lines(report: Findings) -> list[ComparisonLine]:
    """Return size, speed and the task's figures, or the error of the outputs without a task."""
    lines = engine_lines(report)
    labels = set(_TASKS_WITH_LABELS)
    for engine in report.engines:
        if engine.accuracy:
            labels.add(task_label(engine.accuracy))
    if not any(line.label in labels for line in lines):
        labels.update(_SHOWN_WITHOUT_TASK)
    labels.update(_ALWAYS_SHOWN)
    return [line for line in lines if line.label in labels]


def _decision_lines(report: Findings) -> Iterator[str]:
    """Yield the lines below the short table, down to the files to ship and what to do next."""
    # `why` is a text on how the task was recognised. A task that the model's file or the user names
    # is certain; by values alone, scores of classes may have been taken for embeddings
    guess_text = f"embeddings, {BY_VALUES}"
    if any(engine.accuracy and engine.accuracy.why == guess_text for engine in report.engines):
        text = "taken for embeddings by the values; --task classes if they are scores of classes"
        yield from entry("Task", text)
    yield from entries("Speed", speed_texts(report))
    yield from entries("Device", report.device_texts)
    if report.feed:
        text = counted(report.feed.samples, "sample")
        if report.feed.skipped:
            text += f" ({len(report.feed.skipped)} more skipped)"
        text += f" from {report.feed.source}"
        if report.feed.prepared:
            text += f": {report.feed.prepared}"
        yield from entry("Images", text)
        reasons = report.feed.evaluation_skipped
        if reasons:
            more = "; ..." if len(reasons) > 1 else ""
            count_text = counted(len(reasons), "evaluation image")
            yield from entry("Skipped", f"{count_text}: {reasons[0]}{more}")
    if report.calibration:
        yield from entry("Calibration", calibration_text(report))
        agreement = report.calibration.agreement  # of the ranges of two halves of the images
        if agreement is not None and not (agreement.is_enough or agreement.stopped):
            # more images would change the ranges, and no rule of the user's ended the calibration
            yield from entry("Ranges", agreement.sentence)
    yield from _int8_nodes(report)
    yield from _failures(report)

    if report.written:  # a check writes nothing: its files are those of a build
        yield from entries("Ship", dict.fromkeys(_shipped_files(report)))  # each file once
    yield from entries("Warning", _urgent_texts(report)[:_MAX_ALERTS])
    note_count = counted(len(report.warnings), "note")  # `warnings` has all alerts and notes
    page = path_of(report.files, REPORT)
    if page:
        yield from entry("Report", f"{page}  (all figures and {note_count}; as text: report.md)")
    yield from entries("Next", dict.fromkeys(next_steps(report)))


def _urgent_texts(report: Findings) -> tuple[str, ...]:
    """Return the warnings that no verdict quotes."""
    verdicts = [engine.verdict for engine in report.engines if engine.verdict]
    reasons_text = "\n".join(chain.from_iterable(verdict.reasons for verdict in verdicts))
    alerts = [alert for alert in report.all_alerts if alert not in reasons_text]
    return (*earlier_texts(report), *_lost_layers(report), *alerts)


def _shipped_files(report: Findings) -> Iterator[str]:
    """Yield for each quantized engine which files to ship, as text: its own, or the float model's.

    An engine that was not built here has no file. Then the files are shipped from which the device
    builds it (`shipped`). The text that recommends the float model names the files of the engine
    too.
    """
    for engine in report.engines:
        target = report.target_of(engine)
        paths: Iterable[str | None] = (engine.path,)  # None if it was not built here
        if target and not engine.path:
            paths = target.shipped
        engine_files = " with ".join(filter(None, paths))
        if engine.is_float or not engine_files:
            continue
        level = engine.verdict.level if engine.verdict else ""
        float_path = _float_path(report)
        if level in (FLOAT, UNUSABLE) and float_path:
            yield f"{float_path}  (the float model; the engine is {engine_files})"
        else:
            yield engine_files


def _int8_nodes(report: Findings) -> Iterator[str]:
    """Yield how many layers of each target are int8, or nodes if no search counted layers."""
    texts = []
    for target in built_targets(report):
        text = coverage(target)
        split = target.built_split
        if split is not None:
            text = f"{split.layers - split.float_layers} of {counted(split.layers, 'layer')}"
        if len(report.targets) > 1:
            text = f"{target.name} {text}"
        texts.append(text)
    if texts:
        yield from entry("In int8", ", ".join(texts))


def _lost_layers(report: Findings) -> Iterator[str]:
    """Yield how an engine differs from its plan, if layers run in float against it."""
    for engine in report.engines:
        if engine.ran and engine.ran.lost:
            yield f"{engine.label} runs {engine_layers_text(engine.ran)}"


# by accuracy alone, the best first
_RANKS = {GOOD: 0, FLOAT: 0, DOUBTFUL: 1, UNUSABLE: 2}
_UNKNOWN_RANK = 3  # of a split that was not judged
_MIN_FASTER = 1.08  # speed over the built split's from which a noisier split is worth knowing
_MIN_MORE_DB = 3.0  # SQNR over the built split's from which a split is worth its price
_MAX_SLOWER = 1.08  # time over the built split's that this SQNR may cost


def find_alternative(front: Sequence[SplitRow], built_split: SplitRow) -> SplitRow | None:
    """Return the split that is most worth knowing beside the one that was built.

    A split says which layers are int8 and which float; the front has those that no other split
    beats in both time and error. A level is the verdict that the search expects, such as "good".

    The split that is returned is faster than the float model, and better than the built one in the
    first of these ways that any split is: its level is better; it is clearly faster, and its level
    at most one worse; it has clearly more SQNR for little time. None if there is no such split.

    Args:
        front: the splits, whose times are multiples of the float model's.
        built_split: the one of them that was built.
    """
    built_rank = rank_of(built_split.level)  # 0 is the best level
    max_rank = min(built_rank + 1, _RANKS[DOUBTFUL])
    better = []
    faster = []
    more_exact = []
    for split in front:
        is_faster_than_float = 0 < split.time <= 1 / MIN_GAIN
        if not is_faster_than_float:
            continue
        if rank_of(split.level) < built_rank:
            better.append(split)
        if split.time * _MIN_FASTER <= built_split.time and rank_of(split.level) <= max_rank:
            faster.append(split)
        has_more_sqnr = split.sqnr_db >= built_split.sqnr_db + _MIN_MORE_DB
        if has_more_sqnr and split.time <= built_split.time * _MAX_SLOWER:
            more_exact.append(split)
    return min(better or faster or more_exact, key=_rank_and_time, default=None)


def rank_of(level: str) -> int:
    """Return the rank of a level by accuracy alone, 0 for the best."""
    return _RANKS.get(level, _UNKNOWN_RANK)


def _rank_and_time(split: SplitRow) -> tuple[int, float]:
    """Return what splits are chosen by: the best level, then the fastest."""
    return rank_of(split.level), split.time


def speed_texts(report: Findings) -> Iterator[str]:
    """Yield a line for each target with a speed that the table of engines does not show.

    That is the expected speed of an engine that was not timed, or the speed of any engine beside
    the speed and accuracy of another split that may be the better choice. A split says which layers
    are int8 and which float.
    """
    for target in report.targets:
        built_split = target.built_split
        if built_split is None:
            continue
        measured_speed = _measured_speed(report, target)
        speed, text = measured_speed or _expected_speed(target, built_split)
        # a target with a device script is not timed here: the time of its int8 layers is assumed.
        # If all layers are int8, the expected speed is that assumption and nothing else
        is_mere_assumption = _has_device_script(target) and built_split.float_layers == 0
        alternative = find_alternative(target.front, built_split)
        if alternative is not None:
            # `time` of both splits comes from the search, `speed` may be measured
            alternative_speed = figures.ratio(speed * built_split.time / alternative.time)
            built_accuracy = _accuracy_text(built_split, alternative)
            accuracy = _accuracy_text(alternative, built_split)
            text += f" with {built_accuracy}; {alternative_speed} with {accuracy}"
            text += f": --split {alternative.number}"
        elif measured_speed or is_mere_assumption:
            continue  # the speed alone tells nothing new: the table of engines shows a measured one
        if len(report.targets) > 1:
            text = f"{target.name}: {text}"
        yield text


def _measured_speed(report: Findings, target: TargetPart) -> tuple[float, str] | None:
    """Return (a target's speed over a float engine's, its text); None if it was not measured."""
    engine = report.engine_by_target.get(target.name)
    if engine is None or engine.speed is None:
        return None
    rivals = find_rivals(report.engines, engine)
    rival_label = rivals[0].label if rivals else "FP32"
    return engine.speed.ratio, f"{figures.ratio(engine.speed.ratio)} {rival_label}"


def _expected_speed(target: TargetPart, built_split: SplitRow) -> tuple[float, str]:
    """Return (speed over FP32 that the search expects of a target's engine, its text)."""
    speed = 1 / built_split.time
    source = "estimated"
    if _has_device_script(target):
        # the device is not here: each int8 layer was assumed to take this share of its time
        source = f"if int8 takes {ASSUMED_INT8_TIME} of the time"
    return speed, f"about {figures.ratio(speed)} FP32 ({source})"


def _accuracy_text(split: SplitRow, other_split: SplitRow) -> str:
    """Return the accuracy of a split in the terms in which it differs from the other split's."""
    # figure and level are "" for a split that was not judged: then only SQNR can be compared
    has_figures = split.figure and other_split.figure
    has_levels = split.level and other_split.level
    text = split.figure
    if not has_figures or split.figure == other_split.figure:
        text = figures.decibels(split.sqnr_db)
    if has_levels and split.level != other_split.level:
        text += f" ({split.level})"
    return text


# role of a script -> where it is to be run, and with which arguments
_SCRIPT_STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    TRTEXEC_SCRIPT: ("on the GPU machine", ()),
    TRTEXEC_SCRIPT_WITH.format("typed"): ("on the GPU machine", ("typed",)),
    RTX_SCRIPT: ("on the GPU machine", ()),
    ATC_SCRIPT: ("where atc is", ()),
    CHIP_ATC_SCRIPT: ("where atc is, for its chip", ("Ascend310P3",)),
}
IMAGES, EFFORT = "images", "effort"  # names of steps that are offered once


def next_steps(report: Findings) -> Iterator[str]:
    """Yield what to do next: the most promising step for each engine, then the scripts to run.

    The scripts are run on the devices. An unusable engine's script is left out: the engine has to
    be built again first.
    """
    unusable_targets = set()
    for engine in report.engines:
        target = report.target_of(engine)
        verdict = engine.verdict
        if target is None or verdict is None:
            continue
        if verdict.level == UNUSABLE:
            unusable_targets.add(target.name)
        command = _repeat_command(report)
        if verdict.assumes_inputs and command:
            yield f"unless the model was trained with pixels / 255: {command} --preprocess NAME"
        steps = list(_rebuild_steps(report, target, verdict))
        # an engine is not used while its verdict may be wrong
        if not steps and not verdict.is_in_question:
            steps += _use_steps(report, engine, target)
        yield from steps[:1]  # the most promising
    for target in report.targets:
        if target.name not in unusable_targets:
            yield from _script_steps(report, target)


def _script_steps(report: Findings, target: TargetPart) -> Iterator[str]:
    """Yield how to run a target's scripts; for a model that its TensorRT cannot read, a build."""
    command = _repeat_command(report, target)
    for file in target.files:
        if file.role in _SCRIPT_STEPS:
            machine, arguments = _SCRIPT_STEPS[file.role]
            yield f"{machine}: {shlex.join(('sh', file.path, *arguments))}"
        elif file.role.startswith(NEWER_TRTEXEC_SCRIPT):
            version = file.role.removeprefix(NEWER_TRTEXEC_SCRIPT)
            step = f"for TensorRT {version} or newer, which reads the model"
            if command:
                step += f": {command} --trt-version {version}"
            yield step


def _rebuild_steps(report: Findings, target: TargetPart, verdict: Verdict) -> Iterator[str]:
    """Yield the steps that may give a better engine of a target, the most promising first.

    A step is a command, with words on when or why to use it. A good engine has none, unless the
    build before it was better. Commands that repeat the build need its file of options; a build of
    a model in memory has no such file.

    Args:
        report: the results of the build.
        target: the target of the engine.
        verdict: on the engine.
    """
    request = report.request or RequestPart()
    command = _repeat_command(report)
    target_command = _repeat_command(report, target)
    if command:
        for earlier in report.earlier:
            if earlier.target == target.name and earlier.split is not None:
                yield f"as before: {target_command} --split {earlier.split}"
    if verdict.level not in (DOUBTFUL, UNUSABLE):
        return

    if command:
        takes_pictures = bool(report.feed and report.feed.preprocess)
        yield from _data_steps(verdict, request, command, takes_pictures=takes_pictures)
    if verdict.is_in_question:
        return  # another build with the same data would be no better
    split = _better_split(target, verdict, request)
    if command and split is not None:
        speed = figures.ratio(1 / split.time)  # times are multiples of the float model's
        # the task's figure, such as "27 of 28 boxes"; "" if the search did not judge the split
        accuracy = split.figure or figures.decibels(split.sqnr_db)
        yield f"for {accuracy} at about {speed}: {target_command} --split {split.number}"
    engine = report.engine_by_target.get(target.name)
    if command and request.is_quantized and engine is not None and engine.accuracy is None:
        yield f"measure it: {command} --images PATH"
    if request.is_quantized:
        float_path = _float_path(report) or "FLOAT.onnx"
        float_build = f"calib8 build {shlex.quote(float_path)} --images FOLDER"
        yield f"the float model that it was made from: {float_build}"
    elif command and not verdict.gated:  # gated: the engine misses a limit of the user's
        effort = request.effort.get(target.name, 0)  # of the target's search, 0 for none
        options_file = path_of(report.files, OPTIONS)
        yield from _effort_steps(request, effort, options_file, command)
        if report.model:
            yield f"use the float model: {report.model.path}"
    page = path_of(report.files, REPORT)
    if page:
        yield f"calib8 explain {shlex.quote(str(PurePath(page).parent))}"


def _repeat_command(report: Findings, target: TargetPart | None = None) -> str:
    """Return the command that repeats the build; "" without its file of options.

    `target`: the only one that is built; None builds all.
    """
    options_file = path_of(report.files, OPTIONS)
    if not options_file:
        return ""
    command = f"calib8 build --config {shlex.quote(options_file)}"
    if target is not None and len(report.targets) > 1:
        command += f" --target {target.name}"
    return command


def _data_steps(
    verdict: Verdict, request: RequestPart, command: str, *, takes_pictures: bool
) -> Iterator[str]:
    """Yield steps, builds with other data: more images, labels, or the training's preprocessing.

    Args:
        verdict: on the engine.
        request: what the user asked for.
        command: the command that repeats the build.
        takes_pictures: whether the samples are pictures, and not arrays, which are used unchanged.
    """
    if verdict.missing_calibration:
        yield f"with {verdict.missing_calibration} images: {command} --images FOLDER"
    if verdict.missing_samples:
        yield from _image_steps(verdict.missing_samples, request, command)
    if verdict.blames_labels:
        yield f"with corrected labels: {command} --labels FILE"
    elif verdict.blames_randomness:
        yield (
            "export the model in evaluation mode, or with its random numbers as an input; or judge"
            f" by labels: {command} --eval-images FOLDER --labels FILE"
        )
    elif verdict.blames_float:
        preprocessing = "--images PATH"
        if takes_pictures:
            preprocessing = "--preprocess NAME, or --mean, --std, --scale, --color"
        yield f"with the preprocessing that the model was trained with: {command} {preprocessing}"


def _effort_steps(
    request: RequestPart, effort: int, options_file: str, command: str
) -> Iterator[str]:
    """Yield the next steps to suggest: a longer search, or training for a PyTorch model.

    If the user fixed the method of the ranges, its line in the file of options must be removed
    first: else there is nothing to search.

    Args:
        request: what the user asked for.
        effort: that of the target's search so far.
        options_file: path of the build's options.
        command: the command that repeats the build.
    """
    if effort == 0:
        yield f"{command} --effort 1"
    if request.has_method:
        edit = f"without the line of method in {shlex.quote(options_file)}"
        yield f"{edit}: {command} --effort {max(effort, 1)}"
    # the steps above differ from the last build; this one may be the one that was followed
    if EFFORT not in request.followed:
        yield f"{command} --prefer accuracy --effort {max(effort, 2)}"
    if request.is_module:
        yield "train it with int8: calib8.torch.qat or `calib8 qat`"


def _image_steps(missing_samples: str, request: RequestPart, command: str) -> Iterator[str]:
    """Yield a step, a build with more images to judge by; if it was followed, with other ones.

    `missing_samples`: how many are needed, such as "20 more".
    """
    if IMAGES not in request.followed:
        flag = "--eval-images" if request.has_evaluation else "--images"
        yield f"with the present images and {missing_samples}: {command} {flag} FOLDER"
    elif not request.has_evaluation:
        yield f"with other images to judge by: {command} --eval-images FOLDER"


def _better_split(target: TargetPart, verdict: Verdict, request: RequestPart) -> SplitRow | None:
    """Return a slower split of the front whose expected level is better than the engine's.

    A split says which layers are int8 and which float; those of the front can be built without
    another search. None without such a split, or if the builds before have tried it.

    Args:
        target: the target, with the front of its search.
        verdict: on the engine that was built.
        request: what the user asked for, with the steps that earlier builds followed.
    """
    built_split = target.built_split
    if built_split is None:
        return None

    better = []
    for split in target.front:
        # times are multiples of the float model's, which the split must still beat
        is_slower = built_split.time < split.time <= 1 / MIN_GAIN
        was_tried = split_name(target, split) in request.followed
        is_better = rank_of(split.level) < rank_of(verdict.level)  # 0 is the best level
        if is_better and is_slower and not was_tried:
            better.append(split)
    return min(better, key=_rank_and_time, default=None)


def _use_steps(report: Findings, engine: EngineRow, target: TargetPart) -> Iterator[str]:
    """Yield how to measure or run an engine, the most useful step first."""
    if engine.latency is None and _has_device_script(target):
        return  # it runs on its device only
    bench = _bench_command(report, engine)
    if bench and engine.verdict and engine.verdict.level == FLOAT:
        yield f"on the CPU that will run it: {bench}"
    if bench and engine.speed and engine.speed.is_noisy:
        yield f"on a quiet machine: {bench} --duration 30"
    if program := path_of(target.files, PROGRAM):
        yield f"python {shlex.quote(program)} PICTURE"
    if bench:
        yield bench


def _has_device_script(target: TargetPart) -> bool:
    """Whether a target's files include a script to be run on its device."""
    return any(file.role.startswith(DEVICE_SCRIPTS) for file in target.files)


def _bench_command(report: Findings, engine: EngineRow) -> str:
    """Return the command that measures an engine beside its float model; "" without files."""
    if not report.model or not engine.path:
        return ""
    command = f"calib8 bench {shlex.quote(engine.path)}"
    float_path = _float_path(report)
    # a model in memory has a name, but no file. With `shapes`, the inputs of the engine have other
    # sizes than those of the float model's file, so that their times cannot be compared
    if PurePath(float_path).suffix and not report.model.shapes:
        command += f" --against {shlex.quote(float_path)}"
    return command


def _float_path(report: Findings) -> str:
    """Return the path of the float model; "" for a Q/DQ model without a float reference."""
    path = report.model.path if report.model else ""
    if not report.request or not report.request.is_quantized:
        return path
    # the model of the report is the Q/DQ model; the reference is that too if the user gave no other
    reference_path = report.reference.path if report.reference else None
    return "" if reference_path in (None, path) else reference_path


def split_name(target: TargetPart, split: SplitRow) -> str:
    """Return a name of a split that also holds after another search."""
    return f"{target.name}: {split.float_layers} of {split.layers} layers in float"


def earlier_texts(report: Findings) -> Iterator[str]:
    """Yield a sentence for each engine that came out worse than the build before it."""
    for earlier in report.earlier:
        yield f"{earlier.target}: worse than the build before it in this folder, {earlier.text}"


def _failures(report: Findings) -> Iterator[str]:
    """Yield why targets could not be built."""
    for target in report.targets:
        if target.error:
            yield from entry("Failed", f"{target.name}: {target.error}")


def _table(report: Findings, lines: Sequence[ComparisonLine]) -> Iterator[str]:
    """Yield the lines as a table with a column for each engine."""
    if not lines:
        return
    heads = (" " * MARGIN, *(engine.label for engine in report.engines), "")
    rows = [(line.label, *line.cells, f" {line.change}") for line in lines]
    yield from align_columns([heads, *rows], (0, len(heads) - 1))


def _kernels(report: Findings) -> Iterator[str]:
    """Yield an engine's slowest kernels; for several engines the kinds of kernels, if known."""
    engines = timed_engines(report.engines)
    heads, kind_rows = kind_table(engines)
    if len(engines) > 1 and kind_rows:
        yield from labelled_table("Kernels", heads, kind_rows[:_MAX_KERNELS])
        return
    for engine in engines:
        label = "Kernels" if len(engines) == 1 else engine.label
        yield from labelled_table(label, KERNEL_HEADS, kernel_rows(engine, _MAX_KERNELS))
        if remaining_text := remaining_kernels(engine, _MAX_KERNELS):
            yield from entry("", remaining_text)


def _machine(report: Findings) -> Iterator[str]:
    """Yield the devices, the CPU with its threads and int8 instructions, and the files."""
    yield from entries("Device", report.device_texts)
    if report.machine:
        text = report.machine.cpu_text
        threads = [engine.threads for engine in report.engines if engine.threads is not None]
        if threads:
            text += f", {counted(max(threads), 'thread')} used"
        int8 = ", ".join(report.machine.int8) or "no int8 dot product"
        yield from entry("Machine", f"{text}, {int8}")
    yield from entries("Files", map(_file_text, report.written))


def _file_text(file: FileRow) -> str:
    """Return a file's path, purpose and size as text."""
    size = "" if file.size_bytes is None else f", {figures.size(file.size_bytes)}"
    return f"{file.path}  ({file.role}{size})"


def _notes(report: Findings) -> Iterator[str]:
    """Yield the first notes, and how many more there are."""
    warnings = report.warnings
    yield from entries("Notes", warnings[:_MAX_NOTES])
    if len(warnings) > _MAX_NOTES:
        yield from entry("", f"and {len(warnings) - _MAX_NOTES} more; the report has all")
