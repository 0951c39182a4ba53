"""`calib8 ascend check` on what AMCT, ATC and DVPP users have; chips; activations near nothing."""

from pathlib import Path

import numpy as np
import pytest

from deploy.errors import ConfigError
from deploy.targets.ascend.atc import chip

CASES = Path(__file__).parent / "golden" / "amct" / "cases"
RECORD = (CASES / "small_default" / "record.txt").read_text()

DVPP = """# from a camera, through DVPP
aipp_op {
  aipp_mode: static
  related_input_rank: 0
  related_input_name: "images"
  input_format: YUV420SP_U8
  csc_switch: true
  matrix_r0c0: 298
  matrix_r0c1: 0
  matrix_r0c2: 409
  matrix_r1c0: 298
  matrix_r1c1: -100
  matrix_r1c2: -208
  matrix_r2c0: 298
  matrix_r2c1: 516
  matrix_r2c2: 0
  input_bias_0: 16
  input_bias_1: 128
  input_bias_2: 128
  src_image_size_w: 1280
  src_image_size_h: 720
  crop: true
  crop_size_w: 640
  crop_size_h: 640
  mean_chn_3: 0
  var_reci_chn_3: 1.0
}
"""


def checked(run, tmp_path, text):
    path = tmp_path / "file.txt"
    path.write_text(text)
    return run("ascend", "check", path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DVPP, "a sound AIPP configuration"),
        ("aipp_op { aipp_mode: dynamic max_src_image_size: 6220800 support_rotation: false }", "a"),
        ("# a record\n\n" + RECORD, "a sound record of 8 layers"),
        (
            RECORD + 'prune_record { producer { name: "conv1" attr { name: "axis" i: 1 } } }',
            "a sound record of 8 layers; calib8 does not deploy the rest: 1 x pruning",
        ),
        (
            RECORD + 'record { key: "kv" kv_cache_value { scale: 0.5 offset: 0 } }\n',
            "8 layers; calib8 does not deploy the rest: 1 x KV cache",
        ),
        (
            'record { key: "lstm" value { scale_d: 0.1 offset_d: 0 scale_w: 0.1 offset_w: 0'
            " scale_h: 0.1 offset_h: 0 scale_r: 0.1 offset_r: 0 } }",
            "1 x recurrent layer",
        ),
        ("# all defaults\nbatch_num: 4\n", "a simplified configuration"),
    ],
)
def test_what_others_write_is_known(text, said, tmp_path, run):
    code, out, err = checked(run, tmp_path, text)
    assert (code, err) == (0, "") and said in " ".join(out.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DVPP.replace("r0c0", "r0c9"), "matrix_r0c9"),
        (
            'record { key: "kv" kv_cache_value { scale: 0.5 } }',
            "scale and offset of a KV cache must be as many, got 1 and 0",
        ),
        ('record { key: "kv" kv_cache_value { scale: 0 offset: 0 } }', "a scale must be in"),
        ('record { key: "l" value { scale_h: inf } }', "a scale must be in"),
        ("# record of nothing\nrecords { }", "no key 'records'"),
    ],
)
def test_what_is_wrong_in_them_is_told(text, said, tmp_path, run):
    code, _, err = checked(run, tmp_path, text)
    assert code == 1 and said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "spelt"),
    [
        ("ascend310p3", "Ascend310P3"),
        ("310P3", "Ascend310P3"),
        ("ASCEND910B2C", "Ascend910B2C"),
        ("910proa", "Ascend910ProA"),
        ("Ascend910_9391", "Ascend910_9391"),
        ("Ascend999X", "Ascend999X"),
    ],
)
def test_chips_are_spelt_as_atc_does(typed, spelt):
    assert chip(typed) == spelt


@pytest.mark.parametrize("typed", ["AscendXYZ", "Ascend", "", "310P3; rm -rf", "31", "３１０"])
def test_what_is_no_chip_is_refused(typed):
    with pytest.raises(ConfigError, match="Ascend310P3"):
        chip(typed)


def built(run, small_cnn, tmp_path, factor, *words):
    data = np.random.default_rng(0).normal(size=(4, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", data * np.float32(factor))
    settings = ("--target", "ascend", "--effort", 0, "--duration", 0, "--out", tmp_path / "b")
    return run("build", small_cnn, "--images", tmp_path / "x.npy", *settings, *words)


@pytest.mark.parametrize(("factor", "told"), [(1e-7, True), (1, False)])
def test_inputs_that_the_scale_rounds_to_nothing_are_told(factor, told, run, small_cnn, tmp_path):
    built(run, small_cnn, tmp_path, factor, "--accept")
    report = next((tmp_path / "b").glob("report.md")).read_text()
    assert ("rounds all of it to zero" in report) is told
