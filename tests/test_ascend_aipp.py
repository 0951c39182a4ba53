"""AIPP for cameras and DVPP: what the hardware computes of YUV pictures, run in numpy."""

from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from deploy.feed.preprocess import Preprocess
from deploy.targets.ascend.aipp import (
    judged,
    matrix,
    run_aipp,
    to_yuv,
    write_aipp,
    write_aipp_files,
)
from deploy.targets.ascend.atc import COLORS, STANDARDS, Source
from deploy.targets.ascend.proto import parse_text

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}

# rows of the documents' tables for RGB: hicann/ge, atc, CSC_config
DOCUMENTED = {
    "bt601-narrow": ([(298, 0, 409), (298, -100, -208), (298, 516, 0)], 16),
    "bt601-full": ([(256, 0, 359), (256, -88, -183), (256, 454, 0)], 0),
    "bt709-narrow": ([(298, 0, 459), (298, -55, -136), (298, 541, 0)], 16),
    "bt709-full": ([(256, 0, 403), (256, -48, -120), (256, 475, 0)], 0),
}


def picture(height=32, width=48):
    """A picture without hard edges, whose chroma survives 4:2:0."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [127 + 120 * np.sin(y / 9 + c) * np.cos(x / (7 + c)) for c in range(3)]
    return np.stack(planes, axis=-1).astype(np.uint8)


def prepared(pixels, how):
    """What the calibration was fed for these pixels (RGB, of the model's size)."""
    if how.color == "grey":
        pixels = pixels[..., :1]
    ordered = pixels[..., ::-1] if how.color == "bgr" else pixels
    mean, std = (np.float32(v).reshape(-1, 1, 1) for v in (how.mean, how.std))
    values = np.float32(ordered.transpose(2, 0, 1)) * np.float32(how.scale)
    return np.float32((values - mean) / std)


@pytest.mark.parametrize("standard", STANDARDS)
def test_the_factors_are_those_of_the_documents(standard):
    rows, bias = DOCUMENTED[standard]
    assert matrix(standard, "rgb") == (tuple(rows), (bias, 128, 128))
    assert matrix(standard, "bgr")[0] == tuple(rows[::-1])


def test_yuv_is_that_of_opencv():
    """OpenCV writes BT.601 narrow, its own rounding and its own choice of chroma aside."""
    rgb = picture()
    wanted = cv2.cvtColor(rgb, cv2.COLOR_RGB2YUV_I420)
    got = to_yuv(rgb, "bt601-narrow")
    height = rgb.shape[0]
    luma = np.abs(got[:height].astype(int) - wanted[:height])
    assert luma.max() <= 1 and got.shape == wanted.shape
    planes = wanted[height:].reshape(2, height // 2, -1).transpose(1, 2, 0).reshape(height // 2, -1)
    assert np.abs(got[height:].astype(int) - planes).mean() < 2


@pytest.mark.parametrize("standard", STANDARDS)
@pytest.mark.parametrize("color", ["rgb", "bgr", "grey"])
@pytest.mark.parametrize("source", COLORS)
def test_the_om_gets_what_the_calibration_got(source, color, standard):
    if (source, color) == ("bgr", "grey"):
        return  # refused: test_what_aipp_does_not_do
    norms = {"mean": (0.4,), "std": (0.3,)} if color == "grey" else IMAGENET
    how = Preprocess(size=(32, 48), color=color, layout="nchw", **norms)
    given = Source(color=source, standard=standard)
    made = write_aipp(how, given)
    wanted = prepared(picture(), how)
    error = judged(made, how, given, {"x": wanted[None]})
    assert error is not None and error < (0.02 if given.yuv else 5e-4)
    if given.yuv and color != "grey":  # and not with V for U, nor with another standard's factors
        other = Source(color="nv21" if source == "nv12" else "nv12", standard=standard)
        swapped = judged(write_aipp(how, other), how, given, {"x": wanted[None]})
        assert swapped is not None and swapped > 3 * error


def test_the_wrong_standard_is_seen():
    how = Preprocess(size=(32, 48), color="rgb", layout="nchw")
    wanted = {"x": prepared(picture(), how)[None]}
    narrow, full = (Source(color="nv12", standard=f"bt601-{k}") for k in ("narrow", "full"))
    right = judged(write_aipp(how, full), how, full, wanted)
    wrong = judged(write_aipp(how, narrow), how, full, wanted)
    assert right is not None and wrong is not None and wrong > 2 * right


def test_a_frame_is_cropped_at_even_places():
    how = Preprocess(size=(32, 48), color="rgb", layout="nchw")
    made = write_aipp(how, Source(color="nv12", size=(38, 54), standard="bt709-full"))
    assert (made.op.load_start_pos_h, made.op.load_start_pos_w) == (2, 2)
    frame = np.zeros((38, 54, 3), np.uint8)
    frame[2:34, 2:50] = picture()
    got = run_aipp(made.op, to_yuv(frame, "bt709-full"))
    assert np.abs(got - prepared(picture(), how)).mean() < 0.02


def test_dynamic_aipp_leaves_the_values_to_the_host():
    how = Preprocess(size=(32, 48), color="rgb", layout="nchw", **IMAGENET)
    made = write_aipp(how, Source(color="nv12", size=(64, 64), dynamic=True))
    (op,) = parse_text("InsertNewOps", made.text, "it").aipp_op
    assert op.aipp_mode == 2 and op.max_src_image_size == 64 * 64 * 3 // 2
    assert not op.HasField("input_format") and not op.HasField("csc_switch")
    (said,) = [words for words in made.host if "aclmdlSetAIPP" in words]
    assert "matrix_r0c0: 298" in said and "mean_chn_0: 123" in said and "\n" not in said


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for k in range(3):
        cv2.imwrite(str(folder / f"{k}.png"), np.roll(picture(40, 40), k, axis=1))
    return folder


def aipp(run, small_cnn, pictures, out, *words):
    settings = ("--target", "ascend", "--effort", 0, "--duration", 0, "--out", out)
    return run("build", small_cnn, "--images", pictures, *settings, "--aipp", *words)


def test_the_command_writes_it_and_says_how_near_it_is(run, small_cnn, pictures, tmp_path):
    words = ("--source-color", "nv21", "--csc", "bt709-full", "--source-size", "20x24")
    code, _, err = aipp(run, small_cnn, pictures, tmp_path, *words, "--first-layer-int8")
    assert code == 0, err
    text = (tmp_path / "small_cnn_compression.cfg").read_text()
    assert parse_text("CompressionOptions", text, "it").enable_first_layer_quantization
    (op,) = parse_text("InsertNewOps", (tmp_path / "small_cnn_aipp.cfg").read_text(), "it").aipp_op
    assert (op.input_format, op.rbuv_swap_switch, op.csc_switch) == (1, True, True)
    assert (op.src_image_size_h, op.src_image_size_w, op.crop_size_w) == (20, 24, 16)
    assert op.matrix_r0c2[0] == 403
    readme = (tmp_path / "small_cnn_README.txt").read_text()
    assert "AIPP's arithmetic on 2 samples" in readme and "NV21" in readme
    code, out, _ = run("ascend", "check", tmp_path / "small_cnn_aipp.cfg")
    assert code == 0 and "sound AIPP" in out


def test_arrays_have_no_aipp_file():
    files = {}
    request = SimpleNamespace(manifest={"preprocess": None})
    said = write_aipp_files(request, files, Source(), first_layer_int8=False)
    assert said == ["No AIPP file: the calibration was fed arrays, not pictures."] and not files


def test_the_command_writes_dynamic_aipp(run, small_cnn, pictures, tmp_path):
    code, _, err = aipp(run, small_cnn, pictures, tmp_path, "--dynamic-aipp")
    assert code == 0, err
    assert "max_src_image_size: 768" in (tmp_path / "small_cnn_aipp.cfg").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--csc", "bt709-full"), "csc is for YUV images"),
        (("--source-size", "20"), "reads HxW"),
        (("--source-color", "hsv"), "nv12"),
    ],
)
def test_options_that_mean_nothing_are_refused(words, said, run, small_cnn, pictures, tmp_path):
    code, _, err = aipp(run, small_cnn, pictures, tmp_path / "b", *words)
    assert code != 0 and said in " ".join(err.split())


@pytest.mark.parametrize(
    ("color", "source", "said"),
    [
        ("grey", Source(color="bgr"), "makes grey of grey pictures"),
        ("rgb", Source(color="nv12", size=(33, 48)), "even sides"),
        ("rgb", Source(color="nv12", size=(30, 48)), "does not enlarge"),
    ],
)
def test_what_aipp_does_not_do(color, source, said):
    from deploy.errors import ExportError

    with pytest.raises(ExportError, match=said):
        write_aipp(Preprocess(size=(32, 48), color=color, layout="nchw"), source)
