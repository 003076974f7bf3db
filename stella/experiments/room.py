"""Room: can a setting tell rehearsal methods apart? By Finetune, ER, DER++ and Multitask alone.

DER++ with unlimited memory (as many places as the stream has clips) is what a memory without limit would be worth. A
method's share of room is how much of the distance from DER++ to it the method wins.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stella.experiments.results import Rows, spread
from stella.runs.record import Spread

NEEDED = ("finetune", "derpp", "derpp-unlimited", "multitask")
GAP = 5.0  # least points between DER++ with unlimited memory and DER++
RATIO = 1.4  # least Multitask / DER++
FORGOTTEN = 3.0  # least Multitask / Finetune
DEVIATION = 0.7  # largest sample deviation over seeds


@dataclass(frozen=True)
class Room:
    spreads: dict[str, Spread]  # of the variants that room is judged by: those needed, and ER

    def share(self, mean: float) -> float:
        """The share of room, in percent, that a mean A wins: 0 for DER++, 100 for DER++ with unlimited memory."""
        low, high = self.spreads["derpp"].mean, self.spreads["derpp-unlimited"].mean
        return 100 * (mean - low) / (high - low)

    def criteria(self) -> list[tuple[str, bool]]:
        """Each criterion with its figures, and whether it is met."""
        finetune, derpp, unlimited, multitask = (self.spreads[name].mean for name in NEEDED)
        deviation = max(spread.deviation or 0.0 for spread in self.spreads.values())
        return [
            (
                f"Finetune {finetune:.1f} ≤ Multitask / 3 = {multitask / FORGOTTEN:.1f}",
                multitask >= FORGOTTEN * finetune,
            ),
            (f"unlimited − DER++ = {unlimited - derpp:.1f} ≥ {GAP:g}", unlimited - derpp >= GAP),
            (f"Multitask / DER++ = {multitask / derpp:.2f} ≥ {RATIO}", multitask >= RATIO * derpp),
            (f"largest deviation {deviation:.2f} ≤ {DEVIATION}", deviation <= DEVIATION),
        ]

    def __str__(self) -> str:
        return "; ".join(f"{text}: {'met' if met else 'missed'}" for text, met in self.criteria())


def room(found: Mapping[str, Rows], figure: str = "A") -> Room | None:
    """Room by the results of these variants, or None if one that is needed has no run."""
    spreads = {name: spread(found.get(name, []), figure) for name in (*NEEDED, "er")}
    if not all(spreads[name].values for name in NEEDED):
        return None
    return Room({name: each for name, each in spreads.items() if each.values})
