"""What an engine's speed is held against: a float engine of the same runtime and device.

A float model on the CPU tells nothing of int8 on a GPU, and its time is in no ratio with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from deploy.report.parts import EngineRow

_APART = 1.5  # times, from which two ways to tell the speed do not tell the same


def rivals(engines: Iterable[EngineRow], engine: EngineRow) -> tuple[EngineRow, ...]:
    """The measured float engines that an engine may be held against, the one that counts first.

    Those that were built beside it, the narrowest type first, since it is what one would use but
    for int8; else the float model, where it ran on the same kind of device.
    """
    if engine.reference or engine.baseline or engine.latency is None:
        return ()
    known = [each for each in engines if each.latency is not None]
    own = [each for each in known if each.baseline and each.target == engine.target]
    alike = [each for each in known if each.reference and each.on_device == engine.on_device]
    return tuple(reversed(own)) or tuple(alike)


def speed_up(rival: EngineRow, engine: EngineRow) -> float:
    """The rival's p50 over the engine's, as both stand in the report; both were measured."""
    return _p50(rival) / _p50(engine)


def slower_ms(rival: EngineRow, engine: EngineRow) -> float:
    """How much longer the engine takes than its rival, by p50, in ms."""
    return _p50(engine) - _p50(rival)


def by_fastest(rival: EngineRow, engine: EngineRow) -> float | None:
    """`speed_up` by the fastest runs, where p50 tells another; None where it does not.

    A run that waits for other programs takes a time slice of theirs, however short it is by itself;
    where most of one engine's runs wait and few of the other's, p50 compares the waiting.
    """
    usual = max(speed_up(rival, engine), 1e-6)
    best = _fastest(rival) / _fastest(engine)
    return best if max(usual / best, best / usual) > _APART else None


def in_doubt(engines: Iterable[EngineRow], engine: EngineRow) -> str:
    """What to say where the fastest runs tell another speed than p50; "" where they agree."""
    for rival in rivals(engines, engine)[:1]:
        best = by_fastest(rival, engine)
        if best is not None:
            return (
                f"by its fastest run {best:.2f}x, by p50 {speed_up(rival, engine):.2f}x as fast as"
                f" {rival.label}: other programs ran, or the inputs differ in size; measure again"
                " on a quiet machine"
            )
    return ""


def _fastest(engine: EngineRow) -> float:
    assert engine.latency is not None
    return max(engine.latency.latency.min, 1e-6)  # a clock that stands still


def _p50(engine: EngineRow) -> float:
    assert engine.latency is not None
    return engine.latency.latency.p50
