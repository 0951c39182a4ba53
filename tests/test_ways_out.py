"""What a new user types or feeds first, and is told a way on, through the command."""

import shutil

import onnx
import pytest
from onnx import helper


@pytest.fixture
def phone(pictures, tmp_path):
    """A folder of pictures and of others that a phone saves as they are not read."""
    shutil.copytree(pictures, folder := tmp_path / "phone")
    for name in ("a.HEIC", "b.heic", "c.dng"):
        (folder / name).write_bytes(b"\0\0\0\x18ftypheic")
    return folder


def test_pictures_of_kinds_that_are_not_read_are_told(small_cnn, phone, run, tmp_path):
    words = ("build", small_cnn, "--effort", 0, "--duration", 0, "--accept", "--size", "16x16")
    code, out, err = run(*words, "--images", phone, "--out", tmp_path / "o")
    assert code == 0, err
    said = "in phone are 3 pictures of kinds that are not read (.dng, .heic); save them as .jpg or"
    assert said in " ".join(out.split()) and "20 samples" in out


def test_a_folder_of_pictures_that_are_not_read_is_refused_by_their_kind(
    small_cnn, phone, run, tmp_path
):
    for file in phone.glob("*.png"):
        file.unlink()
    words = ("build", small_cnn, "--out", tmp_path / "o", "--images")
    code, _, err = run(*words, phone)
    assert code == 1 and "got 3 pictures of kinds that are not read (.dng, .heic)" in err
    code, _, err = run(*words, phone / "b.heic")
    assert code == 1 and "b.heic is a picture of a kind that is not read" in err


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (("build", "m.onnx", "photos/"), "(photos/); images go behind --images (`"),
        (("bench", "m.int8.onnx", "m.onnx"), "(m.onnx); a second model goes behind --against (`"),
        (("build", "m.onnx", "--images", "p", "--target", "onnxruntime", "tensorrt"),
         "(tensorrt); several targets are separated by commas (`"),
        (("build", "m.onnx", "--images", "p", "more"), "(more) (`calib8 build --help` tells more)"),
        (("verify", "a", "b"), "(b) (`calib8 verify --help` tells more)"),
    ],
)  # fmt: skip
def test_an_argument_too_many_is_told_where_it_goes(words, way, run):
    code, _, err = run(*words)
    assert code == 2 and "Got unexpected extra argument" in err and way in err


def test_a_pattern_that_the_shell_has_expanded_is_told_to_be_quoted(pictures, run):
    code, _, err = run("build", "m.onnx", "--images", *sorted(pictures.glob("*.png"))[:3])
    assert code == 2 and "'photos/*.jpg'" in err


def test_a_model_that_ascends_atc_alone_reads_is_told_what_runs_in_its_place(
    small_cnn, run, pictures, tmp_path
):
    model = onnx.load(small_cnn)
    model.graph.node[0].input[0] = "q"
    node = helper.make_node("AscendQuant", ["x"], ["q"], name="q", scale=1.0, offset=0.0)
    model.graph.node.insert(0, node)
    onnx.save(model, path := tmp_path / "net_deploy_model.onnx")
    words = ("--images", pictures, "--size", "16x16")
    for command in (("build", path, *words), ("inspect", path), ("bench", path)):
        code, _, err = run(*command)
        assert code == 1 and "its fake-quant model" in err, err
        assert "atc alone reads" in err
