"""What GenPPL at equal entropy was matched to, and which figures of it can be compared."""

from collections.abc import Iterable
from dataclasses import dataclass

from rmdm.report.read import Row

TOLERANCE = 0.005
"""Nats by which two targets may differ and be called the same."""


@dataclass(frozen=True)
class Target:
    """An entropy, the tokens it is taken over, and whose tokens they are."""

    evaluator: str
    length: int | None
    entropy: float

    def apart(self, other: "Target") -> str | None:
        """Why figures matched to two targets do not compare; None where they do."""
        if self.evaluator != other.evaluator:
            return f"the evaluators differ ({self.evaluator}, {other.evaluator})"
        if self.length != other.length:
            return f"entropies are taken over {self.length} and {other.length} tokens"
        if abs(self.entropy - other.entropy) > TOLERANCE:
            return f"the matched entropies differ ({self.entropy:.3f} and {other.entropy:.3f} nats)"
        return None


def target_of(row: Row) -> Target:
    """Of a row of GenPPL at equal entropy."""
    return Target(row["evaluator"], row.get("entropy_length"), row["entropy"])


def by_target(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that can be compared, together: the same evaluator and length, entropies at most TOLERANCE apart."""
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row["entropy"]):
        own = target_of(row)
        home = next((group for group in groups if target_of(group[0]).apart(own) is None), None)
        if home is None:
            groups.append([row])
        else:
            home.append(row)
    return groups


def said_entropy(rows: Iterable[Row]) -> str:
    """The entropy of a group, or its ends."""
    values = sorted({f"{row['entropy']:.3f}" for row in rows})
    return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"
