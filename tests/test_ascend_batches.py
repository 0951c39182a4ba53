"""AMCT's batches of more than one image, through the command: HFMG, DMQ, IFMR and batch_num."""

import numpy as np
import onnx
import pytest

from deploy.targets.ascend.config import read_config
from deploy.targets.ascend.record import read_record

HFMG = "common_config { hfmg_quantize { num_of_bins: 1024 } }\n"
DMQ = "common_config { ifmr_quantize { } dmq_balancer { migration_strength: 0.5 } }\n"


@pytest.fixture(scope="module")
def fixed(small_cnn, tmp_path_factory):
    """The same model with a batch of 4."""
    model = onnx.load(small_cnn)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    path = tmp_path_factory.mktemp("fixed") / "small_cnn.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture
def made(run, tmp_path):
    """(model, rows, words, configuration) -> record, config, what was said; each in its folder."""
    count = 0

    def build(model, rows, *words, config="", again=False):
        nonlocal count
        count += not again
        folder = tmp_path / str(count)
        folder.mkdir(exist_ok=True)
        # brighter from image to image, so that it shows which of them make up a batch
        size = np.geomspace(1, 30, 12).reshape(12, 1, 1, 1)
        x = np.random.default_rng(1).normal(size=(12, 3, 16, 16)) * size
        np.save(folder / "x.npy", x[:rows].astype(np.float32))
        (folder / "a.cfg").write_text(config)
        given = ("--ascend-config", folder / "a.cfg") if config else ()
        target = ("--target", "ascend", "--effort", 0, "--duration", 0, *given)
        out = folder / "out"
        code, said, err = run(
            "build", model, "--images", folder / "x.npy", *target, "--out", out, *words
        )
        if code:
            return None, None, err
        record = read_record((out / "small_cnn_record.txt").read_text())
        settled = read_config((out / "small_cnn_config.json").read_text())
        return record, settled, " ".join((out / "report.md").read_text().split()) + said

    return build


def scales(record):
    return [float(one.scale_d) for one in record.values()]


@pytest.mark.parametrize("config", [HFMG, DMQ])
def test_four_images_are_the_batch_of_a_model_that_fixes_four(config, made, small_cnn, fixed):
    text = "batch_num: 2\n" + config
    joined, _, said = made(small_cnn, 8, "--amct-batch", 4, config=text)
    same, _, _ = made(fixed, 8, config=text)
    single, _, _ = made(small_cnn, 8, config=text.replace("2", "8", 1))
    assert scales(joined) == pytest.approx(scales(same), rel=1e-5)
    for name, one in joined.items():
        np.testing.assert_allclose(one.factors, same[name].factors, rtol=1e-5)
        assert one.offset_d == same[name].offset_d
    assert scales(joined) != pytest.approx(scales(single), rel=1e-3)
    assert "over 8 samples in 2 batches of 4." in said


@pytest.mark.parametrize("exact", [(), ("--exact-ifmr",)])
def test_batch_num_counts_batches(exact, made, small_cnn):
    text = "batch_num: 2\ncommon_config { ifmr_quantize { } }\n"
    some, _, said = made(small_cnn, 8, "--amct-batch", 3, *exact, config=text)
    first, _, _ = made(small_cnn, 6, *exact, config=text.replace("2", "6", 1))
    assert scales(some) == scales(first)  # IFMR sees all values at once, however they came
    assert "6 samples in 2 batches of 3" in said and "6 of 8 samples were used" in said
    _, _, err = made(small_cnn, 8, "--amct-batch", 5, config=text.replace("2", "3", 1))
    assert "needs batch_num batches, 3, got 2 of 5 images" in err


def test_a_last_batch_may_be_smaller(made, small_cnn):
    _, config, said = made(small_cnn, 10, "--amct-batch", 4)
    assert config.batch_num == 3
    assert "10 samples in 3 batches of 4, the last one of 2." in said
    text = "batch_num: 3\n" + HFMG
    partial, _, _ = made(small_cnn, 10, "--amct-batch", 4, config=text)
    short, _, _ = made(small_cnn, 8, "--amct-batch", 4, config=text.replace("3", "2", 1))
    assert scales(partial) != pytest.approx(scales(short), rel=1e-3)  # its images count
    threads, _, _ = made(small_cnn, 10, "--amct-batch", 4, "--threads", 3, config=text)
    assert scales(threads) == scales(partial)


def test_a_model_with_a_batch_takes_whole_ones(made, fixed):
    _, _, err = made(fixed, 8, "--amct-batch", 6)
    assert "the model's batch size, 4, got 6" in err
    _, config, said = made(fixed, 8, "--amct-batch", 8)
    assert config.batch_num == 1 and "8 samples in 1 batches of 8" in said
    _, config, said = made(fixed, 8)
    assert config.batch_num == 2 and "8 samples in 2 batches of 4" in said


@pytest.mark.parametrize("config", [HFMG, DMQ])
def test_a_cache_knows_the_batches(config, made, small_cnn):
    text = "batch_num: 2\n" + config
    first, _, _ = made(small_cnn, 8, "--amct-batch", 4, config=text)
    words = ("--amct-batch", 4, "--require-cache")
    again, _, _ = made(small_cnn, 8, *words, config=text, again=True)
    assert scales(again) == scales(first)
    words = ("--amct-batch", 2, "--require-cache")
    _, _, err = made(small_cnn, 8, *words, config=text.replace("2", "4", 1), again=True)
    assert "cache must fit" in err
