"""The examination of an engine as a page and as a record for machines."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from viva.doctor.bench import Finding
from viva.doctor.examination import FEATURES, barred

_PACKAGES = ("viva-rl", "tinker", "tinker-cookbook", "torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings about one engine, and what they were made with."""

    engine: str
    """``local``, ``Tinker``, or the server's name with its address."""
    server: str
    """How the server names itself and its version; empty where it says nothing, or there is none."""
    model: str
    settings: Mapping[str, str | float]
    findings: Sequence[Finding]

    @property
    def is_conformant(self) -> bool:
        """Whether every answer was yes."""
        return all(finding.answer == "yes" for finding in self.findings)

    def record(self) -> dict[str, Any]:
        """The examination ready for JSON; ``format`` rises when a field changes its meaning."""
        return {
            "format": 1,
            "engine": self.engine,
            "server": self.server,
            "model": self.model,
            "settings": dict(self.settings),
            "versions": versions(),
            "conformant": self.is_conformant,
            "findings": [asdict(finding) for finding in self.findings],
            "features": [
                {"name": feature.name, "missing": barred(feature, self.findings)} for feature in FEATURES
            ],
        }

    def page(self) -> str:
        """The examination as Markdown."""
        count = sum(finding.answer == "yes" for finding in self.findings)
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        known = ", ".join(f"{name} {found}" for name, found in versions().items())
        lines = [
            f"# {_cell(self.engine)}: {count} of {len(self.findings)} answers are yes",
            "",
            f"Model {_cell(self.model)}; server: {_cell(self.server) or 'says nothing of itself'}; {_cell(settings)}; "
            f"{known}. What is asked: docs/doctor.md.",
            "",
            "| question | answer | what was seen |",
            "|---|---|---|",
            *(f"| {each.name} | {_mark(each.answer)} | {_cell(each.detail)} |" for each in self.findings),
            "",
            "| feature | works | what is missing |",
            "|---|---|---|",
        ]
        for feature in FEATURES:
            missing = barred(feature, self.findings)
            lines.append(
                f"| {feature.name} | {'**no**' if missing else 'yes'} | {_cell('; '.join(missing))} |"
            )
        return "\n".join(lines) + "\n"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that an examination depends on; those that are not there are left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _mark(answer: str) -> str:
    return answer if answer == "yes" else f"**{answer}**"


def _cell(text: str) -> str:
    """Text of a server in a cell: one line, and no markup."""
    for sign in "\\|`*_<>[]":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
