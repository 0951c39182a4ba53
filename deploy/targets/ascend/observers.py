"""What watches activations during the calibration pass: exact or streaming IFMR, or HFMG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.hfmg import HfmgHistogram, HfmgParams, hfmg
from calibrators.amct.ifmr import AscendScale, IfmrParams, ifmr
from calibrators.amct.ifmr_streaming import IfmrHistogram, ifmr_streaming
from calibrators.errors import CalibrationError
from deploy.targets.ascend.config_types import LayerConfig, QuantConfig
from deploy.targets.ascend.layers import Layer
from deploy.targets.ascend.record import LayerRecord

Array = NDArray[Any]


class Observer(Protocol):
    """Statistics of one tensor for one algorithm."""

    def observe(self, x: NDArray[np.floating]) -> None:
        """Add one batch.

        Raises:
            CalibrationError: NaN, Inf, nothing, or another dtype than float.
        """
        ...

    def result(self) -> AscendScale:
        """Search.

        Raises:
            CalibrationError: no sound scale.
        """
        ...


class Guard:
    """Names the layer in an error, or puts it aside."""

    def __init__(self, failed: dict[str, str], strict: bool) -> None:
        self.failed, self.strict = failed, strict

    def call(self, name: str, step: Callable[[], Any]) -> Any:
        """What `step` gives; None for a layer that failed now or before."""
        if name in self.failed:
            return None
        try:
            return step()
        except CalibrationError as error:
            if self.strict:
                raise in_layer(name, error) from None
            self.failed[name] = str(error)
            return None


def in_layer(name: str, error: CalibrationError) -> CalibrationError:
    """The error with the layer's name and the way out."""
    return CalibrationError(
        f"layer {name!r}: {error} (to leave it in float, put it under skip_layers or --keep-float)"
    )


class _Exact:
    """AMCT's IFMR: keeps the data of all batches."""

    def __init__(self, params: IfmrParams) -> None:
        self.params, self.kept = params, []  # type: IfmrParams, list[Array]

    def observe(self, x: NDArray[np.floating]) -> None:
        self.kept.append(np.array(x, copy=True).reshape(-1))

    def result(self) -> AscendScale:
        data = np.concatenate(self.kept)
        self.kept.clear()  # one tensor at a time is held twice
        return ifmr(data, self.params)


class _Streaming:
    def __init__(self, params: IfmrParams) -> None:
        self.params, self.histogram = params, IfmrHistogram()

    def observe(self, x: NDArray[np.floating]) -> None:
        self.histogram.observe(x)

    def result(self) -> AscendScale:
        return ifmr_streaming(self.histogram, self.params)


class _Hfmg:
    def __init__(self, params: HfmgParams) -> None:
        self.params, self.histogram = params, HfmgHistogram(params.nbins)

    def observe(self, x: NDArray[np.floating]) -> None:
        self.histogram.observe(x)

    def result(self) -> AscendScale:
        return hfmg(self.histogram, self.params)


@dataclass(slots=True)
class Plan:
    """One observer for each (tensor, parameters); layers that agree on both share it."""

    keys: dict[str, tuple[str, Any]]
    observers: dict[tuple[str, Any], Observer]
    bytes: int
    streamed: tuple[str, ...]
    troubles: dict[tuple[str, Any], CalibrationError]
    weighted: dict[str, bool]
    alive: set[tuple[str, Any]]

    @classmethod
    def of(
        cls,
        layers: Mapping[str, Layer],
        config: QuantConfig,
        tensors: Mapping[str, str],
        values: Mapping[str, Array],
        exact_bytes: int,
    ) -> Plan:
        """Observers for `layers`; sizes are judged by `values`, the first batch's tensors."""
        keys = {n: (tensors[n], params_of(config.layers[n])) for n in layers}
        exact = {key for key in keys.values() if isinstance(key[1], IfmrParams)}
        one = sum(values[tensor].nbytes for tensor, _ in exact)
        streams = one * config.batch_num > exact_bytes
        observers = {key: observer_of(key[1], streams) for key in keys.values()}
        streamed = tuple(n for n, k in keys.items() if streams and k in exact)
        weighted = {n: bool(layer.weight) for n, layer in layers.items()}
        return cls(keys, observers, 0 if streams else one, streamed, {}, weighted, set())

    def sentence(self, batch_num: int) -> str:
        """What will be kept, for the user, before it is."""
        if self.streamed:
            return (
                f"IFMR of {len(self.streamed)} layers runs on histograms: keeping their"
                " activations would pass the memory cap."
            )
        return f"IFMR keeps {self.bytes * batch_num / 2**20:.1f} MiB of activations."

    def observe(self, values: Mapping[str, Array], guard: Guard) -> None:
        """Show one batch's tensors to every observer.

        Raises:
            CalibrationError: an observer refused its tensor, and `guard` is strict.
        """
        for key, observer in self.observers.items():
            if key in self.troubles:
                continue
            if key not in self.alive and values[key[0]].any():
                self.alive.add(key)
            try:
                observer.observe(values[key[0]])
            except CalibrationError as error:
                self.troubles[key] = error
                if guard.strict:
                    name = next(n for n, k in self.keys.items() if k == key)
                    raise in_layer(name, error) from None

    def record(
        self,
        name: str,
        weights: tuple[NDArray[np.float32], NDArray[np.int32]],
        factors: Mapping[str, NDArray[np.float32]],
    ) -> LayerRecord:
        """The layer's record; an observer's search runs once however many layers share it."""
        key = self.keys[name]
        if key in self.troubles:
            raise self.troubles[key]
        observer = self.observers[key]
        if not isinstance(observer, _Done):
            observer = self.observers[key] = _Done(observer.result())
        found = observer.result()
        return LayerRecord(
            scale_d=found.scale,
            offset_d=found.offset,
            scale_w=weights[0],
            factors=factors.get(name, np.zeros(0, np.float32)),
            weighted=self.weighted[name],
        )


class _Done:
    def __init__(self, found: AscendScale) -> None:
        self.found = found

    def observe(self, x: NDArray[np.floating]) -> None:
        raise AssertionError("observed after the search")

    def result(self) -> AscendScale:
        return self.found


def params_of(entry: LayerConfig) -> IfmrParams | HfmgParams:
    """Parameters of a layer's activation search."""
    act = entry.activation
    affine = bool(act.asymmetric)
    if act.act_algo == "hfmg":
        return HfmgParams(nbins=act.num_of_bins, with_offset=affine)
    return IfmrParams(
        max_percentile=act.max_percentile,
        min_percentile=act.min_percentile,
        search_range=act.search_range,
        search_step=act.search_step,
        with_offset=affine,
    )


def observer_of(params: IfmrParams | HfmgParams, streams: bool) -> Observer:
    """A new observer for these parameters; `streams`: IFMR in flat memory."""
    if isinstance(params, HfmgParams):
        return _Hfmg(params)
    return _Streaming(params) if streams else _Exact(params)
