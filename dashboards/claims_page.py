"""The ten claims as markdown: what was found, in one table, then claim by claim with its figures and the rule it was judged by."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards.table import Columns, markdown_table
from dashboards.verdicts import Case, Claim, Verdict, spread

_SUMMARY: Columns = [
    ("claim", lambda row: f"({row['claim'].letter}) {row['claim'].title}", True),
    ("found", lambda row: row["found"], True),
    ("verdict", lambda row: f"**{row['claim'].verdict.value}**", True),
]
_FOUND: Columns = [
    ("what", lambda row: row["group"], True),
    ("runs", lambda row: str(len(row["cases"])), False),
    ("where", lambda row: ", ".join(dict.fromkeys(case.where for case in row["cases"])), True),
    ("figures", lambda row: figures(row["cases"]), True),
    ("verdict", lambda row: row["verdict"].value, True),
]
_JUDGED_BY = {"e": 3, "g": 2, "i": 2}  # how many figures it takes to see a verdict, where it is not one


def claims_markdown(claims: Sequence[Claim], *, measured: str) -> str:
    """measured: what was given, one sentence."""
    parts = [
        "# The paper's claims, measured",
        f"{measured} Figures are means over the runs that differ in their seed only, in brackets the range over them. A verdict is confirmed, or "
        "opposite, where every single run or sweep is, and else not seen (of (a) and (i) one that is opposite is enough). The limits stand in "
        "`dashboards/claims.py`; they were fixed on 30 November 2026.",
        markdown_table([{"claim": claim, "found": _headline(claim)} for claim in claims], _SUMMARY),
        *(_section(claim) for claim in claims),
    ]
    return "\n\n".join(parts) + "\n"


def figures(cases: Sequence[Case]) -> str:
    """Every figure of these cases by name: its mean and range."""
    names = dict.fromkeys(name for case in cases for name in case.figures)
    return "; ".join(f"{name} {_figure(cases, name)}" for name in names)


def _figure(cases: Sequence[Case], name: str) -> str:
    found = [case.figures[name] for case in cases if name in case.figures]
    return spread([number for number, _ in found], found[0][1])


def _headline(claim: Claim) -> str:
    """The figure that is judged, of every group: it stands first."""
    if claim.verdict is Verdict.not_measured:
        return "-"
    shown = _JUDGED_BY.get(claim.letter, 1)
    groups = claim.groups().items()
    return ". ".join(f"{group}: {'; '.join(f'{name} {_figure(cases, name)}' for name in list(cases[0].figures)[:shown])}" for group, cases in groups)


def _section(claim: Claim) -> str:
    groups = claim.groups()
    parts = [f"## ({claim.letter}) {claim.title}: {claim.verdict.value}", f"* The paper: {claim.paper}\n* {claim.criterion}"]
    if groups:
        rows = [{"group": group, "cases": cases, "verdict": claim.of(cases)} for group, cases in groups.items()]
        parts.append(markdown_table(rows, _FOUND))
    notes = dict.fromkeys(f"{group}: {note}" for group, cases in groups.items() for case in cases for note in case.notes)
    if notes:
        parts.append("\n".join(f"* {note}" for note in notes))
    return "\n\n".join(parts)
