"""What models hold that nothing was tuned for: tensors given twice, split parameters."""

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from deploy.cli import cli  # noqa: E402

torch.set_num_threads(1)


def run(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.fixture
def quantize(tmp_path):
    """What `export --qdq` shows of a factory of a file with these lines."""

    def call(source, shape="2x3x16x16"):
        (tmp_path / "net.py").write_text(f"import torch\nfrom torch import nn\n{source}")
        sizes = [4, *map(int, shape.split("x")[1:])]
        np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=sizes).astype("f4"))
        words = ("export", f"{tmp_path}/net.py:make", "--input", shape, "-o", tmp_path / "q.onnx")
        return run(*words, "--qdq", "--images", tmp_path / "x.npy", "--int8-stem")

    return call


TWICE = """
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
    def forward(self, x):
        x = self.stem(x).relu()
        out = self.head(x)
        return {"one": out, "many": out.detach(), "maps": [x, x.detach(), out]}
make = Twice
"""


def test_a_tensor_may_be_given_twice(quantize):
    shown = quantize(TWICE)
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert "int8: 2 of 2 layers with weights" in shown.output


SPLIT = """
class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.places = nn.Linear(8, 4), nn.Parameter(torch.rand(2, 8))
    def forward(self, x):
        first, second = self.places.split(1)
        return self.head(x * first + second)
make = Split
"""


def test_placing_shows_nothing_of_the_exporters_own_notes(quantize, caplog):
    shown = quantize(SPLIT, "2x8")
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert not [told for told in caplog.messages if "Skipping" in told]
