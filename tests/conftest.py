"""Fixtures that cost something to make: models, the reference server, running servers.

Environment: ``LLAMASRV_REFERENCE`` names a genuine llama-server for the differential tests. With ``CI=true`` nothing
that can be had is skipped: a missing reference or model is an error.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from make_tiny_models import make_all
from nativebuild.cache import cache_root

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() == "true"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "reference: compares with the genuine llama-server named by LLAMASRV_REFERENCE")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


def unavailable(reason: str) -> None:
    """Skip, or fail where everything has to run."""
    if in_ci():
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def tiny_models() -> dict[str, Path]:
    """Name -> file of every model of scripts/make_tiny_models.py, made once per version of that file."""
    source = SCRIPTS / "make_tiny_models.py"
    key = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    return make_all(cache_root() / "tiny-models" / key)


@pytest.fixture(scope="session")
def tiny_model_path(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["tiny-llama"]


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """SmolLM2-135M-Instruct, fetched on first use."""
    done = subprocess.run([sys.executable, SCRIPTS / "demo_model.py"], capture_output=True, text=True, check=False)
    path = Path(done.stdout.strip().rpartition("\n")[2])
    if done.returncode != 0 or not path.is_file():
        unavailable(f"the demo model cannot be fetched: {done.stderr.strip()[-500:]}")
    return path


@pytest.fixture(scope="session")
def reference_server() -> tuple[str, ...]:
    """Command of the genuine llama-server."""
    name = os.environ.get("LLAMASRV_REFERENCE", "")
    path = shutil.which(name) if name else None
    if path is None:
        unavailable(f"no reference server: LLAMASRV_REFERENCE is {name!r}" if name else "LLAMASRV_REFERENCE is not set")
    assert path is not None
    return (path,)
