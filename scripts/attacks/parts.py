"""The parts of the attack, in the order in which they are tried: the longest cases first."""

from __future__ import annotations

from scripts.attacks import environments, faults, kills, libc, odd_models, outputs, races, soak
from scripts.attacks.part import Part
from scripts.attacks.readers import READERS

SKIPPED = {} if libc.COMPILER else {"faults-libc": "there is no C compiler (cc)"}
PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        *odd_models.PARTS,
        *faults.PARTS,
        *(() if "faults-libc" in SKIPPED else libc.PARTS),
        *kills.PARTS,
        *races.PARTS,
        *soak.PARTS,
        *environments.PARTS,
        *outputs.PARTS,
        *(reader.part for reader in READERS.values()),
    )
}
