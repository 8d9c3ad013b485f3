"""The page's own files: small, self-contained, and without any way from text to code."""

import re
from pathlib import Path

import pytest

import viva.view

STATIC = Path(viva.view.__file__).parent / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))

TO_CODE = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\s*\(|new Function|srcdoc|DOMParser|javascript:"
    r"|createContextualFragment|setTimeout\(\s*['\"`]"
)


def mistakes(script: str) -> list[str]:
    found = TO_CODE.findall(script)
    addresses = [
        url for url in re.findall(r"https?://[^\s\"'`]+", script) if url != "http://www.w3.org/2000/svg"
    ]
    return [*found, *addresses]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_makes_no_code_of_text_and_names_no_other_host(path: Path) -> None:
    assert mistakes(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "script",
    ["a.innerHTML = b", "eval(a)", "setTimeout('a()')", "fetch('https://example.org/')", "new Function(a)"],
)
def test_the_guard_sees_what_it_is_for(script: str) -> None:
    assert mistakes(script)


def test_files_are_short_and_the_page_has_no_inline_script_or_style() -> None:
    for path in STATIC.iterdir():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 300, path.name
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>([^<]+)<", page) == []
    assert "style=" not in page
    assert re.findall(r" on\w+=", page) == []


def test_every_import_names_a_file_that_exports_it() -> None:
    for path in SCRIPTS:
        for names, source in re.findall(
            r"import \{([^}]+)\} from \"\./([\w.]+)\"", path.read_text(encoding="utf-8")
        ):
            exported = (STATIC / source).read_text(encoding="utf-8")
            for name in names.split(","):
                assert re.search(rf"export (async )?(function|class|const) {name.strip()}\b", exported), (
                    path.name,
                    name,
                )
