"""What was found about a claim, case by case, and what the cases add up to. Knows no claim; standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Verdict(str, Enum):
    confirmed = "confirmed"
    not_seen = "not seen"
    opposite = "opposite here"
    not_measured = "not measured"


@dataclass(frozen=True)
class Case:
    """One run on one benchmark, or one sweep."""

    group: str  # what it is averaged with: runs that differ in their seed only
    where: str  # e.g. "block 64"
    figures: dict[str, tuple[float, str]]  # what is counted -> the number and how it is written (a format spec)
    verdict: Verdict
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claim:
    """cases: none where nothing measured it. any_opposite: one opposite case is enough for the whole."""

    letter: str
    title: str
    paper: str  # what the paper says
    criterion: str  # when it counts as confirmed, and when as the opposite
    cases: Sequence[Case] = field(default_factory=list)
    any_opposite: bool = False

    @property
    def verdict(self) -> Verdict:
        return self.of(self.cases)

    def of(self, cases: Iterable[Case]) -> Verdict:
        """Confirmed, or the opposite, where all cases are; mixed cases are `not_seen`, or the opposite with `any_opposite`."""
        found = {case.verdict for case in cases} - {Verdict.not_measured}
        if not found:
            return Verdict.not_measured
        if self.any_opposite and Verdict.opposite in found:
            return Verdict.opposite
        return found.pop() if len(found) == 1 else Verdict.not_seen

    def groups(self) -> dict[str, list[Case]]:
        """The cases by their group, in the order given."""
        found: dict[str, list[Case]] = {}
        for case in self.cases:
            found.setdefault(case.group, []).append(case)
        return found


def judged(*, confirmed: bool, opposite: bool) -> Verdict:
    return Verdict.confirmed if confirmed else Verdict.opposite if opposite else Verdict.not_seen


def spread(values: Iterable[float], spec: str) -> str:
    """The mean and, of several values, their range: "2.10 [1.95, 2.30]"; a dash for none."""
    found = list(values)
    if not found:
        return "-"
    mean = format(sum(found) / len(found), spec)
    return mean if len(found) == 1 else f"{mean} [{min(found):{spec}}, {max(found):{spec}}]"
