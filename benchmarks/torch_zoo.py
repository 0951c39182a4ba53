"""Models of torchvision, timm and ultralytics through every command for PyTorch, as a table.

    python benchmarks/torch_zoo.py [NAME ...] [--short] [--out FILE.md]

Weights are random, so no figure says how good a model is; they say that it goes through, and that
what comes out computes what torch does. What starts as a constant is drawn too: a norm's statistics
and factors, biases, layer scales of 1e-6, a ViT's head of zeros. `--short` takes three models. A
model that is refused stands there with its sentence; the exit code is 1 where it should not be. It
wants the three packages beside torch; `torch_zoo.py:yolov8n` is a model for `calib8`.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from click.testing import CliRunner

from deploy.cli import cli
from deploy.errors import Calib8Error
from deploy.fx.capture import capture
from deploy.fx.comparison import tensors_of
from deploy.fx.export import ExportAgreement, compare_with_torch, to_onnx
from deploy.fx.fuse import fold_batch_norms
from deploy.fx.int8_layers import WEIGHTED, IntLayer
from deploy.fx.modes import measure_mode, quantize_model
from deploy.fx.profile import count_flops

SIZES = {
    "resnet18": 96,
    "mobilenet_v3_small": 96,
    "shufflenet_v2_x0_5": 96,
    "regnet_y_400mf": 96,
    "convnext_tiny": 96,
    "vit_b_32": 224,
    "swin_t": 96,
    "ssdlite320_mobilenet_v3_large": 320,
    "ssdlite320_heads": 320,
    "efficientnet_lite0": 96,
    "mobilenetv4_conv_small": 96,
    "repvgg_a0": 96,
    "fastvit_t8": 128,
    "yolov8n": 96,
    "yolo11n": 96,
}
TIMM = ("efficientnet_lite0", "mobilenetv4_conv_small", "repvgg_a0", "fastvit_t8")
REFUSED = ("ssdlite320_mobilenet_v3_large",)  # sorts and drops boxes by their scores
SHORT = ("efficientnet_lite0", "repvgg_a0", "yolov8n")
_INSTALLED = re.compile(r"\S*/site-packages/")
HEAD = (
    "model",
    "nodes",
    "BN folded / branches / left",
    "difference",
    "GFLOP",
    "ONNX, batch 1 and 3",
    "int8 layers",
    "against float",
    "ORT against torch",
    "build",
)


class Heads(torch.nn.Module):
    """What a detector of torchvision computes before it sorts its boxes: [N, boxes, 4] and scores.

    Args:
        detector: whose backbone and head are taken.
    """

    def __init__(self, detector: Any):
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, x: torch.Tensor) -> Any:
        """Boxes and scores by name."""
        return self.head(list(self.backbone(x).values()))


def make(name: str) -> torch.nn.Module:
    """The model of that name with random weights and statistics, in eval mode."""
    torch.manual_seed(0)
    model: torch.nn.Module = _made(name)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.numel() > 1 and _is_constant(tensor):
                tensor.add_(torch.empty_like(tensor).uniform_(-0.1, 0.1))
    return model.eval()


def _is_constant(tensor: torch.Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def __getattr__(name: str) -> Callable[[], torch.nn.Module]:
    """Every model is a factory of this file."""
    if name not in SIZES:
        raise AttributeError(name)
    return lambda: make(name)


def _made(name: str) -> Any:
    if name.startswith("yolo"):
        from ultralytics.nn.tasks import DetectionModel

        return DetectionModel(f"{name}.yaml", verbose=False)
    if name in TIMM:
        import timm

        return timm.create_model(name)
    import torchvision

    if name == "ssdlite320_heads":
        return Heads(_made("ssdlite320_mobilenet_v3_large"))
    options = {"weights_backbone": None} if "ssd" in name else {}
    return torchvision.models.get_model(name, weights=None, **options)


def row(name: str) -> tuple[str, ...]:
    """One line of the table.

    Raises:
        Calib8Error: the model is refused.
    """
    model, size = make(name), SIZES[name]
    x, wide = (_pictures(count, size) for count in (1, 3))
    captured = capture(model, [x])
    folded, report = fold_batch_norms(model, [x])
    counts = report.counts()
    norms = sum(count for pattern, count in counts.items() if "BN" in pattern)
    flops = sum(count_flops(captured, [x]).values())
    batches = [(x,), (wide,)]
    exported = to_onnx(model, [x])
    found = [compare_with_torch(exported, model, [batch]) for batch in batches]
    converted = quantize_model(model, [x], batches, mode="static")
    agreement = compare_with_torch(to_onnx(converted, [x]), converted, batches, optimized=False)
    layers = [m for m in converted.modules() if isinstance(m, (*WEIGHTED, IntLayer))]
    integers = [m for m in layers if isinstance(m, IntLayer)]
    return (
        name,
        str(len(captured.graph.nodes)),
        f"{norms} / {counts.get('Branches', 0)} / {report.norms_left}",
        f"{_difference(folded, model, wide):.1g}",
        f"{flops / 1e9:.2f}",
        ", ".join(map(_part, found)),
        f"{len(integers)} of {_count(integers, layers)}",
        f"{measure_mode('static', model, converted, batches).sqnr_db:.1f} dB",
        _part(agreement),
        _built(name, size),
    )


def _part(found: ExportAgreement) -> str:
    """The largest difference in parts of the largest output."""
    return (
        f"{found.max_difference / found.max_output:.1g}"
        if found.depends_on_input
        else "proves nothing"
    )


def _count(integers: list[Any], layers: list[Any]) -> int:
    """Layers in all: a layer in int8 holds the float one, without its weight."""
    return len(layers) - len(integers)


def _pictures(count: int, size: int) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(count))


def _difference(folded: torch.nn.Module, model: torch.nn.Module, x: torch.Tensor) -> float:
    """Largest difference of any output, in parts of its largest value."""
    with torch.no_grad():
        pairs = zip(tensors_of(folded(x)), tensors_of(model(x)), strict=True)
        return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in pairs)


def _built(name: str, size: int) -> str:
    """What `calib8 build` says of the nodes in int8."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "x.npy", _pictures(4, size).numpy())
        words = ["build", f"{__file__}:{name}", "--input", f"1x3x{size}x{size}"]
        words += ["--images", f"{folder}/x.npy", "--out", f"{folder}/out"]
        done = CliRunner().invoke(cli, [*words, "--effort", "0", "--duration", "0"])
    if isinstance(done.exception, Calib8Error):
        raise done.exception
    assert done.exit_code == 0, done.exception
    nodes = re.search(r"([0-9]+ of [0-9]+) nodes", done.output)
    return nodes[1] if nodes else "stays in float"


def main() -> int:
    """Print the table, each row when it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*SIZES, []], metavar="NAME")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    others = []
    for name in given.names or (SHORT if given.short else SIZES):
        try:
            lines.append("| " + " | ".join(row(name)) + " |")
            refused = False
        except Calib8Error as error:
            lines.append(f"| {name} | refused: {_INSTALLED.sub('', str(error))} |")
            refused = True
        others += [name] if refused != (name in REFUSED) else []
        print(lines[-1], flush=True)
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")
    if others:
        print(f"refused, or not, against what is known: {', '.join(others)}")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
