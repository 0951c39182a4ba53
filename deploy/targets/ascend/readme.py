"""<model>_README.txt: what the machine with the NPU does with the folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.targets.ascend.atc import CHIP, AtcOptions


def readme(
    name: str, files: Mapping[str, Path], options: AtcOptions, *, cann: str, notes: Sequence[str]
) -> str:
    """The text.

    Args:
        name: stem of the files.
        files: role -> path of everything else that was written.
        options: those of atc.
        cann: version whose parser the models are written for.
        notes: what the host has to do before the .om.
    """
    script, om = shlex.quote(f"{name}_atc.sh"), shlex.quote(f"{name}.om")
    chip = options.soc or f"{CHIP}: name it with --soc, or edit {name}_atc.sh"
    lines = [
        f"{name} in int8 for Ascend, chip {chip}, CANN {cann} or newer.",
        "",
        "On a machine with CANN, in this folder (any copy of it, anywhere):",
        "",
        "1. Compile the .om",
        f"       sh {script}",
        "2. Measure it on the NPU",
        f"       python3 -m ais_bench --model {om} --loop 100",
        "3. Compare its tensors with the float model's (MindStudio's msit)",
        f"       msit debug compare -gm MODEL.onnx -om {om} -q {shlex.quote(name + '_quant.json')}"
        " -o compare",
        "   MODEL.onnx is the model that was given to calib8.",
        "",
        *(f"Note: {note}" for note in notes),
        *([""] if notes else []),
        "Files:",
        *(f"   {path.name}: {role}" for role, path in files.items()),
    ]
    return "\n".join(lines) + "\n"
