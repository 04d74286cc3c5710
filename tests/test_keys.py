"""API keys and cross-origin rules of a running server, beside those of the genuine one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import OURS, ServerProcess

from llamasrv.binding import Params
from llamasrv.http.config import HttpConfig

SERVERS = [
    pytest.param("ours", id="ours"),
    pytest.param("theirs", id="reference", marks=pytest.mark.reference),
]
KEY_FILE = "# keys of the house\n\nfile-key-1\n#file-key-2\n  spaced  \nfile,key\n\n"
#: Header -> whether it opens the door.
HEADERS: list[tuple[dict[str, str], bool]] = [
    ({}, False),
    ({"Authorization": "Bearer first"}, True),
    ({"Authorization": "Bearer second"}, True),
    ({"Authorization": "Bearer quoted,key"}, True),
    ({"Authorization": "Bearer file-key-1"}, True),
    ({"Authorization": "Bearer file,key"}, True),
    ({"Authorization": "Bearer #file-key-2"}, False),
    ({"Authorization": "Bearer file-key-2"}, False),
    ({"Authorization": "Bearer # keys of the house"}, False),
    ({"Authorization": "Bearer spaced"}, False),
    ({"Authorization": "first"}, True),
    ({"Authorization": "bearer first"}, False),
    ({"Authorization": "BEARER first"}, False),
    ({"Authorization": "Bearer  first"}, False),
    ({"Authorization": "Bearer first,second"}, False),
    ({"Authorization": "Bearer FIRST"}, False),
    ({"Authorization": "Bearer "}, False),
    ({"Authorization": "Basic Zmlyc3Q="}, False),
    ({"X-Api-Key": "first"}, True),
    ({"X-Api-Key": "Bearer first"}, True),
    ({"x-api-key": "file-key-1"}, True),
    ({"X-Api-Key": "wrong"}, False),
    ({"Authorization": "wrong", "X-Api-Key": "first"}, False),
    ({"Authorization": "", "X-Api-Key": "first"}, True),
]


@pytest.fixture(scope="module", params=SERVERS)
def command(request: pytest.FixtureRequest) -> tuple[str, ...]:
    found: tuple[str, ...] = OURS if request.param == "ours" else request.getfixturevalue("reference_server")
    return found


@pytest.fixture(scope="module")
def locked(
    command: tuple[str, ...], tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text(KEY_FILE)
    flags = ["-m", tiny_model_path, "-c", 256, "-np", 1, "-t", 1, "--api-prefix", "/ai"]
    flags += ["--api-key", 'first,,second,"quoted,key"', "--api-key-file", file]
    server = ServerProcess(*flags, command=command)
    # /health has a prefix here, so that the usual wait would be in vain
    server.start(wait=False)
    try:
        _wait(server, "/ai/health")
        yield server
    finally:
        server.kill()


def _wait(server: ServerProcess, path: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            if server.get(path, {"X-Api-Key": "first"}, timeout=2).status == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"the server did not start\n{server.log[-2000:]}")


def test_which_keys_open_the_door(locked: ServerProcess) -> None:
    found = [(headers, locked.post("/ai/tokenize", {"content": "a"}, headers).status) for headers, _ in HEADERS]
    assert found == [(headers, 200 if opens else 401) for headers, opens in HEADERS]


def test_a_refusal_says_so(locked: ServerProcess) -> None:
    response = locked.post("/ai/completion", {})
    error = response.json()["error"]
    assert (response.status, error["code"], error["type"]) == (401, 401, "authentication_error")
    assert error["message"] == "Invalid API Key"


def test_public_paths_are_those_below_the_prefix(locked: ServerProcess) -> None:
    key = {"X-Api-Key": "first"}
    if locked.is_ours:  # the reference wants a key for these once there is a prefix
        public = ("/health", "/v1/health", "/models", "/v1/models", "/openapi.json", "/docs")
        assert [locked.get(f"/ai{path}").status for path in public] == [200] * 6
    assert locked.get("/health").status == 404
    assert locked.get("/ai/props").status == 401
    assert locked.get("/ai/props", key).status == 200
    assert locked.post("/tokenize", {"content": "a"}, key).status == 404
    assert locked.get("/ai/slots").status == 401


def test_a_preflight_needs_no_key(locked: ServerProcess) -> None:
    for path in ("/ai/completion", "/ai/v1/chat/completions", "/ai/nope"):
        response = locked.request("OPTIONS", path, headers={"Origin": "http://a.example"})
        assert response.status == 200
        assert response.headers["access-control-allow-origin"] == "http://a.example"
        assert response.headers["access-control-allow-credentials"] == "true"


def test_keys_of_a_file_with_windows_line_ends(tiny_model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_bytes(KEY_FILE.replace("\n", "\r\n").encode())
    flags = ["-m", tiny_model_path, "-c", 256, "-t", 1, "--api-key-file", file]
    with ServerProcess(*flags) as server:
        for key, status in (("file-key-1", 200), ("file,key", 200), ("", 401), ("#file-key-2", 401), ("wrong", 401)):
            assert server.post("/tokenize", {"content": "a"}, {"X-Api-Key": key}).status == status, key
        for path in ("/", "/openapi.json", "/docs", "/health", "/v1/models"):
            assert server.get(path).status in (200, 404), path
        assert "file-key-1" not in server.log
        assert "file,key" not in server.log


def test_a_missing_key_file_stops_the_start(tiny_model_path: Path, tmp_path: Path) -> None:
    server = ServerProcess("-m", tiny_model_path, "--api-key-file", tmp_path / "none.txt").start(wait=False)
    assert server.process.wait(60) == 1
    assert "none.txt" in server.log


def test_keys_that_are_all_empty_do_not_leave_the_door_open() -> None:
    with pytest.raises(ValueError, match="empty"):
        HttpConfig.from_params({"api_keys": ["\r", ""]})


ORIGINS = ["", "http://attacker.example", "http://localhost:3000", "https://a.example", "null", "http://localhost.evil"]
CORS = [
    [],
    ["--cors-origins", "localhost"],
    ["--cors-origins", "https://a.example"],
    ["--no-cors-credentials"],
    ["--cors-origins", "localhost", "--no-cors-credentials", "--cors-methods", "GET", "--cors-headers", "X-A"],
]


@pytest.mark.reference
@pytest.mark.parametrize("flags", CORS, ids=lambda flags: " ".join(flags) or "default")
def test_cross_origin_headers_equal_those_of_the_reference(
    reference_server: tuple[str, ...], tiny_model_path: Path, flags: list[str]
) -> None:
    base = ["-m", tiny_model_path, "-c", 256, "-np", 1, "-t", 1, *flags]

    def ask(server: ServerProcess) -> list[dict[str, str]]:
        out = []
        for origin, method in itertools.product(ORIGINS, ("GET", "OPTIONS")):
            headers = server.request(method, "/health", headers={"Origin": origin} if origin else {}).headers
            found = {name: value for name, value in headers.items() if name.startswith("access-control-")}
            # an empty value is none
            out.append({name: value for name, value in found.items() if value})
        return out

    with ServerProcess(*base, command=reference_server) as theirs, ServerProcess(*base) as ours:
        for mine, other in zip(ask(ours), ask(theirs), strict=True):
            assert mine == other


@pytest.mark.parametrize(
    ("flags", "origins"),
    [
        ([], "*"),
        (["--tools", "all"], "localhost"),
        (["--tools", "all", "--cors-origins", "https://a.example"], "https://a.example"),
        (["--cors-origins", "*", "--tools", "all"], "*"),
    ],
)
def test_with_tools_only_local_origins_are_allowed(tiny_model_path: Path, flags: list[str], origins: str) -> None:
    with Params.parse(["llamasrv", "-m", str(tiny_model_path), *flags]) as params:
        assert HttpConfig.from_params(params.to_dict()).cors_origins == origins
