"""Findings of an audit, and the report that collects them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from moe_ffn import notebook_cards
from moe_ffn.config.numbers import counted

Verdict = Literal["pass", "warn", "fail", "skip"]

VERDICTS: tuple[Verdict, ...] = ("fail", "warn", "pass", "skip")
"""Verdicts in the order of a report; `skip` means that the check could not be made."""

WHOLE_MODEL = "model"
"""Place of a finding that concerns no single layer."""

MAX_PLACES = 3
"""Maximum number of layers that a row of a report names."""


@dataclass(frozen=True)
class Finding:
    """The result of one check at one place."""

    check: str
    """Kind of check, such as `learning`."""
    place: str
    """Name of the layer, such as `layer_03`, or `model`."""
    verdict: Verdict
    sentence: str
    """The measurement, with its numbers."""
    advice: str = ""
    """A remedy; empty if nothing is wrong."""


@dataclass(frozen=True)
class Check:
    """A kind of check at one place, by default the whole model; its methods make findings."""

    name: str
    place: str = WHOLE_MODEL

    def at(self, place: str) -> Check:
        """Return the same check in a layer."""
        return replace(self, place=place)

    def finding(self, verdict: Verdict, sentence: str, advice: str = "") -> Finding:
        return Finding(self.name, self.place, verdict, sentence, advice)

    def passes(self, sentence: str) -> Finding:
        return self.finding("pass", sentence)

    def skips(self, sentence: str) -> Finding:
        return self.finding("skip", sentence)

    def warns(self, sentence: str, advice: str) -> Finding:
        return self.finding("warn", sentence, advice)

    def fails(self, sentence: str, advice: str) -> Finding:
        return self.finding("fail", sentence, advice)

    def requires(
        self, is_met: bool, sentence: str, advice: str, otherwise: Verdict = "fail"
    ) -> Finding:
        """Return a pass if the condition is met, else a failure or a warning."""
        return self.passes(sentence) if is_met else self.finding(otherwise, sentence, advice)


LOADING = Check("loading")
STRUCTURE = Check("structure")
LEFT_OUT = Check("left out")
LEARNING = Check("learning")
BALANCING = Check("balancing")
PRECISION = Check("precision")
KERNELS = Check("kernels")
CAUSALITY = Check("causality")
DETERMINISM = Check("determinism")
HEALTH = Check("health")
ORDER = Check("order")
NUMBERS = Check("numbers")
"""Numbers that cannot be computed: on the meta device, or in a layer that the batch does not reach."""


@dataclass(frozen=True)
class AuditReport:
    """All findings of an audit, which `print(report)` shows."""

    model: str
    """Name of the model's class."""
    facts: Mapping[str, str]
    """Name -> value of what was audited: layers, experts, parameters, dtype, batch."""
    layers: tuple[str, ...]
    """Names of the sparse layers."""
    findings: tuple[Finding, ...]
    """In the order of the checks."""

    @property
    def ok(self) -> bool:
        """True if no check failed; there may be warnings."""
        return not self.failures

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "fail"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "warn"]

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        rows = self.rows()
        counts = Counter(row.verdict for row in rows)
        if not counts["fail"] and not counts["warn"]:
            return f"No problem found: {counted(counts['pass'], 'check')} passed."
        problems: list[str] = []
        for verdict, noun in (("fail", "failure"), ("warn", "warning")):
            if counts[verdict]:
                checks = dict.fromkeys(row.check for row in rows if row.verdict == verdict)
                problems.append(f"{counted(counts[verdict], noun)} ({', '.join(checks)})")
        return f"{' and '.join(problems)}; {counted(counts['pass'], 'check')} passed."

    def rows(self) -> list[Finding]:
        """Return the findings with equal ones of several layers merged, failures first."""
        groups: dict[tuple[str, ...], list[Finding]] = {}
        for finding in self.findings:
            is_problem = finding.verdict in ("fail", "warn")
            # Layers that pass differ in their numbers only.
            same = finding.advice if is_problem else finding.sentence
            if finding.verdict == "pass" and finding.place != WHOLE_MODEL:
                same = ""
            groups.setdefault((finding.check, finding.verdict, same), []).append(finding)
        rows: list[Finding] = []
        for first, *others in groups.values():  # one row, with the numbers of the first
            names = [finding.place for finding in (first, *others)]
            is_everywhere = len(self.layers) > 1 and set(self.layers) <= set(names)
            place = f"all {len(self.layers)} sparse layers" if is_everywhere else places(names)
            differ = any(other.sentence != first.sentence for other in others)
            sentence = f"{first.place}: {first.sentence}" if differ else first.sentence
            rows.append(replace(first, place=place, sentence=sentence))
        return sorted(rows, key=lambda row: VERDICTS.index(row.verdict))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "model": self.model,
            "ok": self.ok,
            "summary": self.summary,
            "facts": dict(self.facts),
            "findings": [asdict(finding) for finding in self.findings],
        }

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.summary}"]
        for row in self.rows():
            lines.append(f"{row.verdict:5} {row.check:12} {row.place}: {row.sentence}")
            if row.advice:
                lines.append(f"{'':19}{row.advice}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        notes = [
            notebook_cards.note(
                f"{row.verdict}, {row.check}, {row.place}: {row.sentence}; {row.advice}"
            )
            for row in self.rows()
            if row.verdict in ("fail", "warn")
        ]
        title = f"{self.model}: {self.summary}"
        rest = notebook_cards.folded("all checks", str(self))
        return notebook_cards.card(title, dict(self.facts), *notes, rest)


def places(found: Iterable[object]) -> str:
    """Return `layer_00, layer_01, layer_02 and 21 more`, for names or numbers of experts."""
    names = list(dict.fromkeys(map(str, found)))
    rest = len(names) - MAX_PLACES
    return ", ".join(names[:MAX_PLACES]) + (f" and {rest} more" if rest > 0 else "")
