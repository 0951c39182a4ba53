"""The parts of the attack, in the order in which they are tried."""

from __future__ import annotations

from scripts.attacks import environments, faults, kills, outputs, races, soak
from scripts.attacks.part import Part
from scripts.attacks.readers import READERS

PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        *(reader.part for reader in READERS.values()),
        *faults.PARTS,
        *kills.PARTS,
        *races.PARTS,
        *soak.PARTS,
        *environments.PARTS,
        *outputs.PARTS,
    )
}
