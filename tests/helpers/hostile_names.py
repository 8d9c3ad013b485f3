"""Names that try to leave a folder, or to be something other than a name; 200 of them."""

import itertools


def hostile_names(outside: str) -> list[str]:
    """Distinct names; `outside` is a folder that exists and must not be touched, ``link`` a link to it."""
    plain = [
        *(
            "",
            " ",
            ".",
            "..",
            "...",
            "./",
            "../",
            "/",
            "//",
            "~",
            "~root",
            "-rf",
            "*",
            "?",
            "[a]",
            "{a,b}",
            "$HOME",
        ),
        *("%2e%2e", "%2e%2e%2foutside", "%2e%2e/outside", "..%2foutside", "..%c0%af", "%00", "%252e%252e"),
        *(
            "a\0b",
            "\0",
            "good\0.json",
            "good\n",
            "\ngood",
            "good\r\n",
            "a\tb",
            "\x7f",
            "\x1b[2J",
            "a\nb",
            "good\x85",
        ),
        *("a" * 129, "a" * 300, "ä" * 300, "../" * 100, "a/" * 150, "." * 300),
        *("\u2025", "\u2024\u2024/outside", "\uff0e\uff0e/outside", "..\u2215outside", "..\u2044outside"),
        *(
            "..\uff0foutside",
            "..\u29f8outside",
            "..\u200b/outside",
            "\u202etxt.exe",
            "\ufeff..",
            "\u0430dmin",
        ),
        *(
            "\uff10" * 5 + "\uff12",
            "00000\u0662",
            "good\u0301",
            "\ud800",
            "\udcff",
            "CON",
            "con",
            "NUL",
            "nul.txt",
            "AUX.json",
        ),
        *(
            "PRN",
            "com1",
            "COM9.x",
            "LPT1",
            "lpt9.safetensors",
            "good.",
            "good ",
            ".good",
            "a..b",
            "a/b",
            "a\\b",
        ),
        *(
            "..\\outside",
            "\\\\host\\share",
            "C:\\Windows",
            "C:outside",
            "file:///etc/passwd",
            "http://127.0.0.1:9/x",
        ),
        *("`id`", "$(id)", "; id", "| id", "&& id", "<x>", "'", '"', "a,b", "a=b", "@x", "#", "good:stream"),
        *(
            "link",
            "link/secret.json",
            "link/theirs",
            "link/..",
            "./link/theirs",
            "up/../link/theirs",
            "link/../link",
        ),
        *(
            outside,
            f"{outside}/secret.json",
            f"{outside}/theirs",
            "/etc/passwd",
            "/proc/self/environ",
            "/dev/zero",
        ),
    ]
    climbing = [
        f"{start}{steps}{end}"
        for start, steps, end in itertools.product(
            ("", "./", "a/", "good/", "000002/"),
            ("../", "../../", "../../../", "../" * 4, "../" * 5, "../" * 12),
            ("outside", "outside/secret.json", "outside/theirs", "etc/passwd"),
        )
    ]
    names = list(dict.fromkeys([*plain, *climbing]))
    return names[:200]
