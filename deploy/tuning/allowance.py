"""What a search may cost, in samples that it runs: so many calibrations, whatever it finds."""

from __future__ import annotations

from dataclasses import dataclass

_USUAL = 100  # images: of fewer, the search may cost more calibrations


@dataclass(slots=True)
class Allowance:
    """Samples that a search may run, and those that it has run.

    Attributes:
        most: samples; what the trials themselves need is far less.
        ran: samples, each as often as some model ran it.
    """

    most: float
    ran: int = 0

    @classmethod
    def of(cls, calibrations: float, samples: int) -> Allowance:
        """So many calibrations of a feed."""
        return cls(calibrations * max(samples, _USUAL))

    def spend(self, samples: int) -> None:
        """They are run."""
        self.ran += samples

    def holds(self, samples: int) -> bool:
        """Whether so many more may be run."""
        return self.ran + samples <= self.most
