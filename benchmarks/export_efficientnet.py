"""EfficientNet-Lite0 from its torch package to ONNX, once, into the cache folder.

`python benchmarks/export_efficientnet.py` prints the file. It needs torch and onnxscript (the
extra `torch`); code of the package efficientnet-lite-pytorch (Apache-2.0) runs. The model wants
[N, 3, 224, 224] RGB as (x - 127) / 128, from a 256 bicubic resize and a 224 centre crop, and
gives [N, 1000] logits.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fetch_models import cache_folder

NAME = "efficientnet-lite0"


def exported() -> Path:
    """Where the exported model is kept, whether or not it is there yet."""
    return cache_folder() / f"{NAME}.onnx"


def export() -> Path:
    """Export the model if it is not in the cache yet."""
    import torch

    target = exported()
    if target.is_file():
        return target
    from efficientnet_lite0 import make

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as folder:
        fresh = Path(folder) / target.name
        torch.onnx.export(
            make(),
            (torch.zeros(2, 3, 224, 224),),
            str(fresh),
            input_names=["image"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            external_data=False,
            dynamo=True,
        )
        os.replace(fresh, target)
    return target


if __name__ == "__main__":
    print(export())
