"""The same files of --path and the same settings of the page from the genuine llama-server and from ours."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from server_process import OURS, ServerProcess
from test_differential import Pair, start_pair

pytestmark = pytest.mark.reference

SITE = {"index.html": "<h1>mine</h1>", "app.js": "let a", "sub/index.html": "sub", "sub/x.css": "b{}", "plain": "text"}
SETTINGS = {"theme": "dark", "temperature": 0.5, "mcpServers": "[]", "nested": {"unicode": "é"}}


@pytest.fixture(scope="module")
def pair(
    reference_server: tuple[str, ...], tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    site = tmp_path_factory.mktemp("site")
    for name, text in SITE.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)
    settings = site.parent / "settings.json"
    settings.write_text(json.dumps(SETTINGS))
    with ExitStack() as stack:
        flags = ["-m", tiny_model_path, "-c", 512, "-np", 1, "--path", site, "--webui-config-file", settings]
        yield start_pair(reference_server, stack, *flags)


FOUND = ["/", "/index.html", "/app.js", "/app.js?v=1", "/sub/", "/sub/x.css", "/plain", "/sw.js"]
NOT_FOUND = ["/nope", "/app.js/", "/../settings.json", "/..%2fsettings.json", "/sub/../../settings.json"]


@pytest.mark.parametrize("path", FOUND)
def test_what_is_there(pair: Pair, path: str) -> None:
    theirs, ours = pair.request("GET", path)
    assert theirs.status == ours.status == 200
    if path != "/sw.js":  # a program of our own that does the same
        assert theirs.body == ours.body


@pytest.mark.parametrize("path", NOT_FOUND)
def test_what_is_not_there(pair: Pair, path: str) -> None:
    theirs, ours = pair.request("GET", path)
    assert theirs.status == ours.status == 404
    assert theirs.json() == ours.json()


def test_settings_of_the_page_are_passed_on(pair: Pair) -> None:
    props = pair.same("GET", "/props")
    assert props["ui_settings"] == SETTINGS
    assert props["ui"] is True


def test_without_the_page_only_the_worker_that_leaves_is_there(
    reference_server: tuple[str, ...], tiny_model_path: Path
) -> None:
    with ExitStack() as stack:
        pair = start_pair(reference_server, stack, "-m", tiny_model_path, "-c", 512, "-np", 1, "--no-webui")
        for path in ("/", "/index.html", "/favicon.ico"):
            pair.same("GET", path)
        theirs, ours = pair.request("GET", "/sw.js")
        assert theirs.status == ours.status == 200
        assert pair.same("GET", "/props")["ui"] is False


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--path", "/nonexistent/folder"], "static assets path not found: /nonexistent/folder"),
        (["--ui-config", "{broken"], "failed to parse UI config"),
    ],
)
def test_both_refuse_to_start_for_the_same_reason(
    reference_server: tuple[str, ...], tiny_model_path: Path, flags: list[str], words: str
) -> None:
    for command in (reference_server, OURS):
        server = ServerProcess("-m", tiny_model_path, "-c", 512, "--no-warmup", *flags, command=command)
        try:
            server.start(wait=False)
            assert server.process.wait(server.timeout) == 1
            assert words in server.log
        except subprocess.TimeoutExpired:
            pytest.fail(f"{command[0]} did not end")
        finally:
            server.kill()
