"""What is said in several places about the package agrees."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import viva

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    named = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in named}


def test_the_version_is_the_same_in_package_project_and_changelog() -> None:
    versions = re.findall(
        r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert viva.__version__ == PROJECT["project"]["version"] == versions[0]


def test_every_text_names_the_package_by_its_name_on_the_index() -> None:
    assert PROJECT["project"]["name"] == "viva-rl"
    assert PROJECT["project"]["scripts"] == {"viva": "viva.cli:main"}
    folders = ("docs", "src", "examples", "benchmarks", "scripts")
    texts = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    texts += [
        path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in (".md", ".py", ".sh")
    ]
    extras = PROJECT["project"]["optional-dependencies"]
    found = []
    for path in texts:
        for name, extra in re.findall(
            r"""pip3? install[^\n`]*?['" ]viva([\w-]*)(?:\[(\w+)\])?""", path.read_text("utf-8")
        ):
            assert name == "-rl", f"{path} names another package of the index: viva{name}"
            assert not extra or extra in extras or not extra.isalpha(), f"{path}: {extra}"
            found.append(path)
    assert len(found) >= 4


def test_set_up_removes_the_package_under_its_old_name_first() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    removal, installation = (
        makefile.index("pip uninstall -qq --yes viva\n"),
        makefile.index("-c constraints.txt -e .\n"),
    )
    assert removal < installation


def test_every_requirement_is_pinned_inside_its_range() -> None:
    requirements = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    pinned = pins()
    for requirement in map(Requirement, requirements):
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, str(requirement)


def test_set_up_installs_the_torch_that_is_pinned() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"TORCH := torch=={pins()['torch']}\n" in makefile


def test_the_page_on_reliability_has_the_table_of_its_results() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(ROOT / "scripts" / "reliability_page.py"))
    assert page == script["page"]()
    assert "| 1 kill and resume |" in page


def plain(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", plain(page), re.MULTILINE)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower().strip() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


PAGES = [page for places in ("*.md", "docs/*.md", "benchmarks/**/*.md") for page in sorted(ROOT.glob(places))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", plain(page)):
        place, _, anchor = link.partition("#")
        other = page.parent / place if place else page
        if "://" not in link and not (other.exists() and (not anchor or anchor in anchors(other))):
            dead.append(link)
    assert not dead


def test_the_index_has_every_page() -> None:
    linked = set(re.findall(r"\]\((\w+\.md)\)", plain(ROOT / "docs" / "README.md")))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
