"""What a build tells its user to do: the speed of other splits, and the next step."""

import math
from dataclasses import replace

import pytest

from deploy.calibration.sample_checks import HalvesAgreement
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.latency import SpeedUp
from deploy.metrics.levels import MIN_OBJECTS
from deploy.pipeline.results import compare_with_earlier
from deploy.report import Report, to_screen
from deploy.report.parts import (
    CalibrationPart,
    EngineRow,
    FeedPart,
    FileRow,
    ModelPart,
    NodeRow,
    RequestPart,
    SearchPart,
    TargetPart,
)
from deploy.report.screen import find_alternative, next_steps, speed_texts
from deploy.report.verdict import Gates, Verdict
from deploy.report.verdict import verdict as judge
from deploy.tasks.evaluation_task import TaskFigure
from deploy.tuning.plan_file import SplitRow


def split(number, time, level, sqnr_db, figure="", **changed):
    """A split of a front."""
    fields = {"float_layers": 4 * number, "layers": 64, "size": 0.3, **changed}
    return SplitRow(number=number, time=time, level=level, sqnr_db=sqnr_db, figure=figure, **fields)


# as the review saw it: "good" with most layers in float, and no word of what one more box costs
DETECTOR = (
    split(1, 0.70, "unusable", 9.0, "12 of 28 boxes"),
    split(2, 0.72, "doubtful", 15.0, "25 of 28 boxes"),
    split(3, 0.735, "good", 21.0, "27 of 28 boxes"),
    split(4, 0.84, "good", 30.0, "28 of 28 boxes", taken=True),
)


def speed_lines(*fronts, speed=None, names=("tensorrt", "ascend"), level="good"):
    """The texts of the line `Speed` after searches that ended in these fronts."""
    targets, engines = [], [EngineRow(label="FP32", reference=True)]
    for name, front in zip(names, fronts, strict=False):
        search = SearchPart(reused=False, probes=9, settled="16 of 64", front=front)
        targets.append(TargetPart(name=name, search=search))
        engines.append(EngineRow(label=name, target=name, verdict=Verdict(level, ()), speed=speed))
    report = Report(targets=tuple(targets), engines=tuple(engines))
    screen = " ".join(to_screen(report).split())
    texts = list(speed_texts(report))
    assert all(text in screen for text in texts)
    return texts


def test_screen_tells_what_is_built_and_what_else_could_be():
    (line,) = speed_lines(DETECTOR)
    built = "about 1.19x FP32 (estimated) with 28 of 28 boxes"
    assert line == f"{built}; 1.36x with 27 of 28 boxes: --split 3"


def test_screen_counts_layers_where_a_search_did():
    target = detector("good", front=DETECTOR, split_number=4).targets[0]
    nodes = (NodeRow(name="a", op="Conv"), NodeRow(name="b", op="Relu"))
    report = detector("good", front=DETECTOR, split_number=4)
    report = replace(report, targets=(replace(target, nodes=nodes),))
    assert "In int8       48 of 64 layers" in to_screen(report)


def test_screen_counts_skipped_images():
    feed = FeedPart(source="photos", samples=6, skipped=("no image: 2.png", "no image: 5.png"))
    assert "6 samples (2 more skipped) from photos" in to_screen(
        replace(detector("good"), feed=feed)
    )


@pytest.mark.parametrize(("differing_count", "is_shown"), [(4, False), (10, True)])
def test_screen_names_ranges_that_need_more_images(differing_count, is_shown):
    differences = {f"t{number}": 0.5 for number in range(differing_count)}
    agreement = HalvesAgreement(samples=64, within=0.2, tensors=93, differences=differences)
    report = replace(detector("good"), calibration=CalibrationPart(agreement=agreement))
    assert ("Ranges        10 of 93 ranges differ" in to_screen(report)) == is_shown


def test_each_target_has_its_own_line():
    first, second = speed_lines(DETECTOR, DETECTOR)
    assert first.startswith("tensorrt: about 1.19x")
    assert second.startswith("ascend: about 1.19x")


@pytest.mark.parametrize(
    ("others", "number"),
    [
        ([], None),
        ([(1, 0.75, "good", 20.0)], 1),
        ([(1, 0.755, "good", 20.0)], None),  # less than 8 % faster
        ([(1, 0.70, "doubtful", 20.0)], 1),
        ([(1, 0.70, "unusable", 20.0)], None),
        ([(1, 0.70, "", 20.0)], None),  # nobody knows what it keeps
        ([(1, 0.70, "doubtful", 20.0), (2, 0.72, "good", 22.0)], 2),
        ([(4, 0.85, "good", 33.0)], 4),
        ([(4, 0.85, "good", 32.9)], None),
        ([(4, 0.90, "good", 60.0)], None),  # too slow for its decibels
        ([(4, 0.85, "", math.inf)], 4),
    ],
)
def test_another_split_is_named_if_it_is_worth_knowing(others, number):
    taken = split(3, 0.81, "good", 30.0, taken=True)
    front = sorted([taken, *(split(*other) for other in others)], key=lambda row: row.number)
    other = find_alternative(front, taken)
    assert (other and other.number) == number


@pytest.mark.parametrize(("level", "figure"), [("good", "28 of 28 boxes"), ("", "")])
def test_price_is_the_sqnr_without_two_different_figures(level, figure):
    front = (
        split(1, 0.7, level, 20.0, figure, taken=True),
        split(2, 0.71, "good", 33.0, "28 of 28 boxes"),
    )
    (line,) = speed_lines(front)
    assert line.endswith("(estimated) with 20.0 dB; 1.41x with 33.0 dB: --split 2")


def test_split_that_was_not_judged_has_no_level():
    front = (split(1, 0.7, "good", 20.0, taken=True), split(2, 0.71, "", 33.0))
    (line,) = speed_lines(front)
    assert line.endswith("with 20.0 dB; 1.41x with 33.0 dB: --split 2")


@pytest.mark.parametrize(("time", "is_named"), [(0.9, True), (0.96, False)])
def test_better_verdict_is_named_while_it_wins_time(time, is_named):
    taken = split(1, 0.7, "doubtful", 15.0, taken=True)
    front = (taken, split(2, time, "good", 16.0))
    assert bool(find_alternative(front, taken)) == is_named


def test_measured_engine_has_a_line_only_for_another_split():
    speed = SpeedUp(ratio=1.25, low=1.2, high=1.3)
    assert speed_lines(DETECTOR[3:], speed=speed) == []
    (line,) = speed_lines(DETECTOR, speed=speed)
    assert line.endswith("1.25x FP32 with 28 of 28 boxes; 1.43x with 27 of 28 boxes: --split 3")


def test_front_without_the_built_split_says_nothing():
    assert speed_lines(DETECTOR[:3]) == []
    assert speed_lines((split(1, 0.0, "good", 9.0, taken=True),)) == []


BUILD = "calib8 build --config o/calib8.toml"


def detector(level, kept=26, *, front=(), split_number=None, boxes=60, samples=40, **changed):
    """A report of a detector of these boxes, and of the split with this number."""
    front = tuple(replace(row, taken=row.number == split_number) for row in front)
    task = TaskFigure(
        task="boxes",
        figure="boxes kept",
        value=kept / boxes,
        words=f"{kept} of {boxes} boxes",
        count=f"{kept} of {boxes}",
        samples=samples,
        found=boxes,
    )
    missing_samples = "7 more photos with objects" if boxes < MIN_OBJECTS else ""
    engine = EngineRow(
        label="int8",
        target="tensorrt",
        accuracy=Accuracy(outputs=(), samples=samples, task=task),
        verdict=Verdict(
            level,
            (task.words,),
            gated=changed.pop("gated", False),
            missing_samples=missing_samples,
        ),
    )
    search = SearchPart(reused=False, probes=9, settled="16 of 64", front=front)
    script = FileRow(role="script of trtexec", path="o/run.sh")
    files = tuple(
        FileRow(role=role, path=f"o/{name}")
        for role, name in (("options", "calib8.toml"), ("report", "report.html"))
    )
    return Report(
        model=ModelPart(path="m.onnx"),
        feed=FeedPart(source="photos", samples=samples),
        targets=(TargetPart(name="tensorrt", search=search, files=(script,)),),
        engines=(EngineRow(label="FP32", reference=True), engine),
        files=files,
        request=RequestPart(effort={"tensorrt": 1}, **changed),
    )


@pytest.mark.parametrize(
    ("number", "line"),
    [(4, "about 1.19x FP32 (if int8 takes 0.7 of the time) with 28 of 28 boxes;"), (None, "")],
)
def test_assumed_speed_only_compares_splits(number, line):
    """A model all in int8 would get a figure that no chip was asked for."""
    front = DETECTOR if number else (split(1, 0.7, "good", 21.0, float_layers=0),)
    text = to_screen(detector("good", front=front, split_number=number or 1))
    assert line in text
    assert ("Speed" in text) == bool(line)


def first_step(report):
    return next(next_steps(report))


def test_steps_for_a_doubtful_engine_never_repeat():
    """Each step is followed, and the engine stays doubtful."""
    front = DETECTOR[1:3]
    few = {"boxes": 30, "samples": 20, "front": front, "split_number": 2}
    report = compare_with_earlier(detector("doubtful", **few), None)
    images = f"with the present images and 7 more photos with objects: {BUILD}"
    assert first_step(report) == f"{images} --images FOLDER"

    report = compare_with_earlier(
        detector("doubtful", **few | {"boxes": 35, "samples": 27}), report
    )
    assert first_step(report) == f"with other images to judge by: {BUILD} --eval-images FOLDER"

    own = few | {"has_evaluation": True, "boxes": 60}
    report = compare_with_earlier(detector("doubtful", **own), report)
    assert first_step(report) == f"for 27 of 28 boxes at about 1.36x: {BUILD} --split 3"

    own["split_number"] = 3
    report = compare_with_earlier(detector("doubtful", **own, has_method=True), report)
    line = "without the line of method in o/calib8.toml"
    assert first_step(report) == f"{line}: {BUILD} --effort 1"

    report = compare_with_earlier(detector("doubtful", **own), report)
    assert first_step(report) == f"{BUILD} --prefer accuracy --effort 2"

    more = own | {"prefer": "accuracy", "is_module": True}
    searched = detector("doubtful", **more)
    request = replace(searched.request, effort={"tensorrt": 2})
    report = compare_with_earlier(replace(searched, request=request), report)
    assert first_step(report) == "train it with int8: calib8.torch.qat or `calib8 qat`"

    report = compare_with_earlier(detector("doubtful", **own, prefer="accuracy"), report)
    assert first_step(report) == "use the float model: m.onnx"


@pytest.mark.parametrize(
    ("preprocess", "options"),
    [
        ({"size": [224, 224]}, "--preprocess NAME, or --mean, --std, --scale, --color"),
        ({}, "--images PATH"),
    ],
)
def test_wrong_inputs_are_to_be_prepared_as_in_training(preprocess, options):
    """Options of preprocessing are refused beside arrays."""
    report = detector("good")
    verdict = Verdict("doubtful", (), blames_float=True)
    engines = (report.engines[0], replace(report.engines[1], verdict=verdict))
    feed = replace(report.feed, preprocess=preprocess)
    step = first_step(replace(report, engines=engines, feed=feed))
    assert step.endswith(f"{BUILD} {options}")


def test_random_model_is_exported_again_or_labelled():
    report = detector("good")
    accuracy = report.engines[1].accuracy
    drawn = judge(accuracy=accuracy, speed=None, int8=True, gates=Gates(), has_random_outputs=True)
    engines = (report.engines[0], replace(report.engines[1], verdict=drawn))
    step = first_step(replace(report, engines=engines))
    assert "evaluation mode" in step and "--preprocess" not in step
    assert step.endswith(f"{BUILD} --eval-images FOLDER --labels FILE")


def test_assumed_preprocessing_is_named_before_the_use():
    report = detector("good")
    verdict = replace(report.engines[1].verdict, assumes_inputs=True)
    engines = (report.engines[0], replace(report.engines[1], verdict=verdict))
    steps = list(next_steps(replace(report, engines=engines)))
    assert steps == [
        f"unless the model was trained with pixels / 255: {BUILD} --preprocess NAME",
        *next_steps(report),
    ]


def test_quantized_model_is_not_searched_next():
    report = detector("doubtful", boxes=60, samples=60, is_quantized=True)
    assert "calib8 build FLOAT.onnx" in first_step(report)


def test_next_build_names_the_model_of_float():
    report = detector("doubtful", boxes=60, samples=60, is_quantized=True)
    reference = replace(report.engines[0], path="net.onnx")  # --float net.onnx
    report = replace(report, engines=(reference, *report.engines[1:]))
    assert "calib8 build net.onnx" in first_step(report)


@pytest.mark.parametrize(("effort", "flags"), [(0, "--effort 1"), (1, "--prefer accuracy")])
def test_followed_effort_is_not_the_next_step(effort, flags):
    """Even if nothing was searched, as for a model without a choice."""
    report = detector("doubtful")
    request = RequestPart(effort={"tensorrt": effort})
    report = replace(report, targets=(replace(report.targets[0], search=None),), request=request)
    assert first_step(report).startswith(f"{BUILD} {flags}")


def test_cure_comes_before_the_device_and_an_unusable_engine_goes_to_none():
    doubtful = [*next_steps(detector("doubtful", front=DETECTOR, split_number=2))]
    assert "--split 3" in doubtful[0]
    assert doubtful[1] == "on the GPU machine: sh o/run.sh"
    unusable = [*next_steps(detector("unusable", front=DETECTOR, split_number=1))]
    assert unusable == [f"for 27 of 28 boxes at about 1.36x: {BUILD} --split 3"]
    assert [*next_steps(detector("good"))] == ["on the GPU machine: sh o/run.sh"]


def test_missed_limit_of_the_user_asks_for_another_split_alone():
    front = {"front": DETECTOR, "gated": True}
    assert "--split 3" in first_step(detector("unusable", split_number=1, **front))
    assert first_step(detector("unusable", split_number=4, **front)) == "calib8 explain o"


def test_worse_build_names_the_split_of_the_one_before():
    before = compare_with_earlier(detector("doubtful", 56, front=DETECTOR, split_number=3), None)
    worse = compare_with_earlier(detector("doubtful", 53, front=DETECTOR, split_number=4), before)
    assert first_step(worse) == f"as before: {BUILD} --split 3"
    text = " ".join(to_screen(worse).split())
    assert "tensorrt: worse than the build before it in this folder, doubtful: 56 of 60" in text


def test_worse_build_of_another_search_has_no_split_to_name():
    before = compare_with_earlier(detector("good", 60, front=DETECTOR[:3], split_number=3), None)
    other_front = tuple(replace(row, time=row.time + 0.2) for row in DETECTOR)
    worse = compare_with_earlier(
        detector("doubtful", 53, front=other_front, split_number=2), before
    )
    assert "worse than the build before it in this folder" in " ".join(to_screen(worse).split())
    assert "as before" not in first_step(worse)


@pytest.mark.parametrize(
    "changed",
    [
        {"kept": 58},  # better
        {"kept": 1110, "boxes": 1200},  # the same but for chance
        {"split_number": 1},  # a trade: faster, and fewer boxes
        {"boxes": 61},  # judged by other images
    ],
)
def test_build_that_is_not_worse_says_nothing(changed):
    boxes = {"kept": 1120, "boxes": 1200} if changed.get("boxes") == 1200 else {"kept": 56}
    before = compare_with_earlier(
        detector("doubtful", front=DETECTOR, split_number=3, **boxes), None
    )
    fields = {"kept": 53, "split_number": 4, "front": DETECTOR, **changed}
    report = compare_with_earlier(detector("doubtful", **fields), before)
    assert report.earlier == ()
    assert "as before" not in first_step(report)


def test_same_build_again_has_the_same_report():
    first = compare_with_earlier(detector("doubtful", front=DETECTOR, split_number=3), None)
    assert (
        compare_with_earlier(detector("doubtful", front=DETECTOR, split_number=3), first) == first
    )


def test_split_is_built_for_its_target_and_more_effort_for_all():
    def next_step(front):
        report = detector("doubtful", front=front, split_number=2)
        return first_step(replace(report, targets=(*report.targets, TargetPart(name="ascend"))))

    assert f"{BUILD} --target tensorrt --split 3" in next_step(DETECTOR)
    assert next_step(DETECTOR[:2]) == f"{BUILD} --prefer accuracy --effort 2"
