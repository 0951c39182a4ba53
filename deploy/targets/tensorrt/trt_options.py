"""Options of the TensorRT target, and the names of precisions and file roles that it uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.errors import ConfigError
from deploy.files.usercode import refuse_foreign_code
from deploy.targets.options import check_options, option

if TYPE_CHECKING:
    from deploy.graph.placement import Placement


INT8, FP8 = "int8", "fp8"
FP16, BF16, FP32 = "fp16", "bf16", "fp32"
FLOAT_MODEL, CACHE_FILE = "float model of the TensorRT cache, with any repairs", "TensorRT cache"
CACHE_NOTE = "origin of the TensorRT cache"
QDQ_MODEL, TYPED_MODEL = "TensorRT Q/DQ model", "TensorRT typed model"
UNREPAIRED_MODEL = "TensorRT float model without repairs, to compare with"
FLOAT16_MODEL = "TensorRT float16 model, to compare with"
RUNNABLE_PART = "Q/DQ model up to its plugins"
Files = Mapping[str, Path]  # role of a file -> its path
NO_BASELINES, ALL_BASELINES = "none", f"{FP32},{FP16}"
# Flags that follow from the model, the calibration and other options.
_FLAGS_OF_CALIB8 = (
    *("--onnx", "--saveEngine", "--int8", "--fp16", "--bf16", "--fp8", "--best", "--calib"),
    *("--stronglyTyped", "--shapes", "--minShapes", "--optShapes", "--maxShapes", "--device"),
    *("--layerPrecisions", "--layerOutputTypes", "--precisionConstraints", "--plugins"),
    *("--useDLACore", "--allowGPUFallback", "--adjustForDLA", "--timingCacheFile"),
)


@dataclass(frozen=True, kw_only=True)
class TensorrtOptions:
    """Options of the TensorRT target; `deploy.targets.tensorrt.target.TensorRT` explains them."""

    version: str | None = None
    precision: str = option(
        INT8,
        choices=(INT8, FP8),
        help="Type of quantized tensors; fp8 is for GPUs from Ada and Hopper on.",
        changes_placement=True,
    )
    form: str = option(
        "auto",
        flag="--engine-from",
        choices=("auto", "cache", "qdq"),
        help="What the engine is built from. With auto it is the cache with TensorRT 8 and 9, and"
        " the typed model with newer versions.",
    )
    rest: str = option(
        FP16, choices=(FP16, BF16, FP32), help="Type of layers that are not quantized."
    )
    workspace_mib: int | None = option(
        None, flag="--workspace", metavar="MIB", minimum=1, help="Memory of the builder."
    )
    max_batch: int = option(8, minimum=1, help="Largest batch of a dynamic engine.")
    cuda_graph: bool = option(
        False, help="Run the engine from a captured CUDA graph.", changes_runs=True
    )
    calibrator: str | None = option(
        None,
        choices=("entropy2", "entropy", "minmax", "legacy"),
        help="Let TensorRT itself calibrate on the GPU, with the same images.",
    )
    float_behind_concat: bool = option(
        False,
        help="Keep the readers of a Concat of float tensors in float: TensorRT would quantize each"
        " of these tensors separately.",
        changes_placement=True,
    )
    pair_behind_deconv: bool = option(
        False,
        help="Give a ConvTranspose a Q/DQ pair before its activation too, for a TensorRT that does"
        " not fuse the two in int8.",
        changes_placement=True,
    )
    dla: bool = option(
        False,
        help="Build for DLA (TensorRT 11.4.1 or newer; up to 10.7 with the cache): every tensor of"
        " its layers gets a Q/DQ pair.",
        changes_placement=True,
    )
    baselines: str = option(
        ALL_BASELINES,
        choices=(ALL_BASELINES, FP32, FP16, NO_BASELINES),
        help="TensorRT float engines to build for comparing the speed.",
    )
    device: int = option(
        0,
        minimum=0,
        metavar="N",
        help="GPU to build and run on, counted from 0.",
        changes_runs=True,
    )
    plugins: tuple[Path, ...] = option(
        (),
        flag="--plugin",
        metavar="LIBRARY",
        help="Library of TensorRT plugins to load.",
        changes_runs=True,
    )
    timing_cache: Path | None = option(
        None,
        metavar="FILE",
        help="File of TensorRT's tactic timings to read and to add to, for faster builds."
        "  [default: tensorrt.timing]",
        writes="timing cache",
    )
    trtexec_flags: tuple[str, ...] = option(
        (),
        flag="--trtexec-flag",
        metavar="--NAME=VALUE",
        help="A further flag of trtexec, such as --builderOptimizationLevel=5, for the engine built"
        " here too.",
    )

    def __post_init__(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            ConfigError: two options exclude each other, or a flag of trtexec is calib8's own.
        """
        check_options(self)
        for flag in self.trtexec_flags:
            _check_trtexec_flag(flag)
            refuse_foreign_code(flag)  # a flag may load a library or write any file
        if self.dla:
            self._check_dla()
        if self.calibrator is not None and self.form == "qdq":
            raise ConfigError(
                f"an engine from the Q/DQ model takes its scales from the model, got calibrator"
                f" {self.calibrator!r}; leave it out, or build from the cache"
            )
        if self.precision == FP8 and (self.calibrator is not None or self.form == "cache"):
            flag = "--engine-from cache" if self.form == "cache" else "--calibrator"
            raise ConfigError(
                f"TensorRT's calibrators and caches are for int8, got {flag} with --precision"
                " fp8; leave one of them out"
            )
        if self.form == "cache" and (self.float_behind_concat or self.pair_behind_deconv):
            raise ConfigError(
                "pairs are placed in the Q/DQ model, got engine form cache, where TensorRT itself"
                " decides; leave the placement options out, or build from the Q/DQ model"
            )
        if self.precision == FP8 and self.pair_behind_deconv:
            raise ConfigError(
                "a ConvTranspose has no pair in fp8, got --pair-behind-deconv with --precision fp8;"
                " leave one of them out"
            )

    def _check_dla(self) -> None:
        """Refuse the options that contradict `dla`.

        Raises:
            ConfigError: such an option is set.
        """
        is_set_by_flag = {
            f"--precision {self.precision}": self.precision != INT8,
            f"--rest {self.rest}": self.rest != FP16,
            f"--engine-from {self.form}": self.form == "cache",
            "--calibrator": self.calibrator is not None,
            "--float-behind-concat": self.float_behind_concat,
            "--pair-behind-deconv": self.pair_behind_deconv,
        }
        for flag, is_set in is_set_by_flag.items():
            if is_set:
                raise ConfigError(
                    "a model for DLA has int8 pairs on all tensors and float16 elsewhere, got"
                    f" {flag} with --dla; leave one of them out"
                )

    @property
    def features(self) -> tuple[str, ...]:
        """Fields of `TensorrtFeatures` that the typed model needs."""
        features = ["typed"]
        if self.precision == FP8:
            features.append("fp8")
        if self.dla:
            features.append("dla")
        return tuple(features)

    @property
    def placement(self) -> Placement:
        """Placement of the Q/DQ pairs under these options."""
        from deploy.graph.placement import DLA, TENSORRT_BY_GRID

        if self.dla:
            return DLA
        return replace(
            TENSORRT_BY_GRID[self.precision],
            float_after_concat=self.float_behind_concat,
            separates_tail=frozenset({"ConvTranspose"} if self.pair_behind_deconv else ()),
        )


def _check_trtexec_flag(flag: str) -> None:
    """Refuse a text that is no flag of trtexec, or a flag that calib8 itself sets."""
    name = flag.partition("=")[0]
    if not name.startswith("--"):
        flaw = "must begin with --"
    elif name in _FLAGS_OF_CALIB8:
        flaw = "is what calib8 itself sets"
    else:
        return
    raise ConfigError(
        f"a flag of trtexec is a further one, --name=value, got {flag!r}, which {flaw}"
    )
