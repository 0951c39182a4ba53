"""Training the bundled Fashion-MNIST network for int8: the table of docs/torch.md.

    apt-get install dataset-fashion-mnist
    python benchmarks/qat_fashion.py [--images 30000] [--epochs 3] > table.txt

One thread, up to a minute a row of training. `calib8 qat benchmarks/qat_fashion.py:setup` trains
one of the rows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import fashion
import onnx
import onnxruntime
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, not installed

from deploy.fx.convert import calibrate, convert
from deploy.fx.export import compare_with_torch, to_onnx
from deploy.fx.prepare import prepare
from deploy.fx.qat import Task, train
from deploy.fx.range_search import search_for
from deploy.targets import OnnxRuntime

STEM = OnnxRuntime(int8_stem=True)  # all eleven Convs, though the first is faster in float
RATES = {8: 0.0005, 4: 0.01}
ROWS: dict[str, dict[str, Any]] = {
    "PTQ, minmax": {"method": "minmax"},
    "PTQ, mse": {"method": "mse"},
    "QAT": {},
    "QAT, ranges follow": {"ranges": "follow"},
    "QAT, ranges learned": {"ranges": "learned"},
    "QAT, distilled": {"distil": True},
}


def setup(
    images: int = 30000,
    epochs: int = 3,
    bits: int = 8,
    *,
    ranges: str = "kept",
    distil: bool = False,
) -> Task:
    """The task that `calib8 qat` trains: the bundled network on Fashion-MNIST."""
    x, y = (tensor[:images] for tensor in fashion.images("train"))
    test = fashion.images("t10k")
    return Task(
        model=fashion.make(),
        inputs=[x[:2]],
        batches=lambda epoch: fashion.shuffled(x, y, epoch),
        loss=nn.functional.cross_entropy,
        evaluate=lambda model: fashion.accuracy(model, *test),
        calibration=lambda: x[:1024].split(128),
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, RATES[bits], 0.9, nesterov=True, weight_decay=1e-4
        ),
        epochs=epochs,
        ranges=ranges,
        distil_weight=0.2,
        teacher=fashion.make() if distil else None,
    )


def post_training(bits: int, method: str) -> tuple[float, nn.Module]:
    """Accuracy after calibration alone, and the model."""
    x, _ = fashion.images("train")
    model = prepare(fashion.make(), [x[:2]], bits=bits, target=STEM)
    calibrate(model, x[:1024].split(128), search=search_for(STEM, method))
    converted = convert(model)
    return fashion.accuracy(converted, *fashion.images("t10k")), converted


def in_onnxruntime(converted: nn.Module) -> str:
    """What the exported file runs, and how often it decides as torch does."""
    x, _ = fashion.images("t10k")
    exported = to_onnx(converted, [x[:2]])
    found = compare_with_torch(exported, converted, [(part,) for part in x.split(500)])
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = f"{folder}/optimized.onnx"
        options.log_severity_level = 3
        onnxruntime.InferenceSession(
            exported.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        nodes = onnx.load(f"{folder}/optimized.onnx").graph.node
    ran = Counter(node.op_type for node in nodes)
    return f"{100 * found.argmax:.2f} % | {ran['QLinearConv']} of 11"


def main() -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=30000)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    float_accuracy = fashion.accuracy(fashion.make(), *fashion.images("t10k"))
    print("| model | bits | top-1 | against float | same arg-max | int8 Conv | CPU time |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print(f"| float | 32 | {100 * float_accuracy:.2f} | | | | |", flush=True)
    for bits in (8, 4):
        for name, how in ROWS.items():
            started = time.process_time()
            if name.startswith("PTQ"):
                accuracy, converted = post_training(bits, **how)
            else:
                task = setup(arguments.images, arguments.epochs, bits, **how)
                trained = train(
                    task, bits=bits, target=STEM, report=lambda line: print(line, file=sys.stderr)
                )
                accuracy, converted = float(trained.score_after or 0), trained.converted
            seconds = time.process_time() - started
            checked = in_onnxruntime(converted) if bits == 8 else "| "
            print(
                f"| {name} | {bits} | {100 * accuracy:.2f} |"
                f" {100 * (accuracy - float_accuracy):+.2f} | {checked} | {seconds:.0f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
