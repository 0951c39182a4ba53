"""The scale of a layer's input, and what range it stands for: IFMR or HFMG, as its entry says."""

from __future__ import annotations

from calibrators.amct.grid import ascend_clip_range
from calibrators.amct.hfmg import HfmgHistogram, HfmgParams, hfmg
from calibrators.amct.ifmr import AscendScale, IfmrParams
from calibrators.amct.ifmr_streaming import IfmrHistogram, ifmr_streaming
from calibrators.amct.recorders import Exact
from calibrators.scales import Scale
from calibrators.statistics import Recorder
from deploy.targets.ascend.config_types import LayerConfig
from deploy.targets.ascend.record import LayerRecord


def params_of(entry: LayerConfig) -> IfmrParams | HfmgParams:
    """Parameters of a layer's activation search."""
    act = entry.activation
    affine = bool(act.asymmetric)
    if act.act_algo == "hfmg":
        return HfmgParams(nbins=act.num_of_bins, bits=act.num_bits, with_offset=affine)
    return IfmrParams(
        bits=act.num_bits,
        max_percentile=act.max_percentile,
        min_percentile=act.min_percentile,
        search_range=act.search_range,
        search_step=act.search_step,
        with_offset=affine,
    )


def searched(recorder: Recorder, params: IfmrParams | HfmgParams) -> AscendScale:
    """What a layer's search finds in what was observed for it."""
    if isinstance(recorder, HfmgHistogram) and isinstance(params, HfmgParams):
        return hfmg(recorder, params)
    if isinstance(recorder, Exact) and isinstance(params, IfmrParams):
        return recorder.search(params)
    assert isinstance(recorder, IfmrHistogram) and isinstance(params, IfmrParams)
    return ifmr_streaming(recorder, params)


def dead(recorder: Recorder) -> bool:
    """Whether every value that was seen is zero."""
    assert isinstance(recorder, HfmgHistogram | IfmrHistogram | Exact)
    return recorder.dead


def faint(record: LayerRecord, recorder: Recorder) -> bool:
    """Whether every value that was seen is rounded to zero."""
    assert isinstance(recorder, HfmgHistogram | IfmrHistogram | Exact)
    assert record.scale_d is not None
    return max(map(abs, recorder.extremes)) < 0.5 * float(record.scale_d)


def range_of(record: LayerRecord, recorder: Recorder, entry: LayerConfig) -> Scale:
    """The clip range that a record's activation scale stands for."""
    assert isinstance(recorder, HfmgHistogram | IfmrHistogram | Exact)
    assert record.scale_d is not None
    lo, hi = ascend_clip_range(record.scale_d, record.offset_d, record.act_bits)
    least, most = recorder.extremes
    return Scale(
        lo=lo,
        hi=hi,
        amax=max(-lo, hi),
        observed_min=least,
        observed_max=most,
        method=entry.activation.act_algo,
    )
