"""The program as people start it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from http_harness import wait_for
from server_process import ROOT, ServerProcess, free_port


def run(*args: str, env: dict[str, str] | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("LLAMA_ARG_", "LLAMASRV_MAX"))}
    return subprocess.run(
        [sys.executable, "-m", "llamasrv", *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**clean, "PYTHONPATH": str(ROOT), **(env or {})},
        check=False,
    )


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines of the server's log that are errors."""
    return [line for line in done.stderr.splitlines() if re.match(r"[\d.]+ E srv ", line)]


def test_version_and_help_come_from_the_native_parser_with_our_flags_below() -> None:
    version = run("--version")
    assert version.returncode == 0
    assert "11549" in version.stdout + version.stderr
    usage = run("--help")
    assert usage.returncode == 0
    assert "--threads-http" in usage.stdout
    assert "--max-body-mib N" in usage.stdout
    assert re.search(r"--port PORT\s+port to listen \(default: 8080\)", usage.stdout)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--port", "many"], "port"),
        (["--max-body-mib", "0"], "error: invalid value '0' for --max-body-mib: must be at least 1"),
        (["--max-body-mib"], "error: expected a value for --max-body-mib"),
    ],
)
def test_a_bad_command_line_is_said_and_exits_with_1(args: list[str], message: str) -> None:
    done = run(*args)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_model_there_is_one_clear_line() -> None:
    done = run()
    assert done.returncode == 1
    assert len(errors(done)) == 1
    assert "no model given" in errors(done)[0]


def test_a_model_that_cannot_be_loaded_is_one_clear_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"this is no model")
    for path in (bad, tmp_path / "missing.gguf"):
        done = run("-m", str(path), "--port", "0")
        assert done.returncode == 1
        assert [line for line in errors(done) if "failed to load model" in line]
        assert "Traceback" not in done.stderr


def test_a_taken_address_is_one_clear_line(tiny_model_path: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("-m", str(tiny_model_path), "--port", str(port))
    assert done.returncode == 1
    assert [line.partition("llama_server: ")[2] for line in errors(done)] == [
        f"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {port}: Address already in use"
    ]
    done = run("-m", str(tiny_model_path), "--ssl-key-file", "missing.pem", "--port", "0")
    assert done.returncode == 1
    assert "must be given together" in errors(done)[0]


def test_it_listens_says_so_and_ends_with_code_0(tiny_model_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with ServerProcess("-m", tiny_model_path) as server:
            line = f"listening on http://127.0.0.1:{server.port}\n"
            assert wait_for(lambda line=line, server=server: line in server.log)
            server.process.send_signal(number)
            assert server.process.wait(60) == 0
            assert "cleaning up before exit" in server.log


def test_port_0_is_told_in_the_log(tiny_model_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "llamasrv", "-m", str(tiny_model_path), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stderr is not None
        port = 0
        for line in process.stderr:
            if found := re.search(r"listening on http://127\.0\.0\.1:(\d+)$", line):
                port = int(found[1])
                break
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert b"200 OK" in sock.recv(1000)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_unix_socket_goes_away_also_at_the_second_signal(tiny_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "llama.sock"
    for signals in (1, 2):
        process = subprocess.Popen(
            [sys.executable, "-m", "llamasrv", "-m", str(tiny_model_path), "--host", str(path)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if f"listening on unix://{path}" in line:
                    break
            assert path.is_socket()
            for _ in range(signals):
                process.send_signal(signal.SIGTERM)
            assert process.wait(60) in ((0,) if signals == 1 else (0, 1))
            assert not path.exists()
        finally:
            process.kill()
            process.wait()


def test_a_body_limit_can_be_set(tiny_model_path: Path) -> None:
    with ServerProcess("-m", tiny_model_path, "--max-body-mib", "1") as server:
        assert server.post("/tokenize", {"content": "a" * 1000}).status == 200
        response = server.post("/tokenize", b'{"content":"' + b"a" * (2 << 20) + b'"}')
        assert (response.status, response.json()["error"]["code"]) == (413, 413)


#: The server with a model that never finishes loading unless it is told to stop.
SLOW_LOAD = """
import sys, time
from llamasrv.engine.server_context import LoadError, ServerContext

def load_model(self, params, progress=None, options=None):
    print("loading", flush=True)
    while progress is None or progress(0.5):
        time.sleep(0.01)
    raise LoadError("loading was stopped")

ServerContext.load_model = load_model
from llamasrv.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_while_the_model_loads_health_says_so_and_a_stop_is_obeyed(tiny_model_path: Path) -> None:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_LOAD, "-m", str(tiny_model_path), "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert b" 503 Service Unavailable\r\n" in sock.recv(1000)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert not re.search(r"^[\d.]+ E ", err, re.MULTILINE)
    finally:
        process.kill()
        process.wait()


#: A worker that is inside a call from which nothing brings it back.
STUCK_WORKER = """
import sys, time
from llamasrv.http.routes import tokens

def tokenize_json(vocab, data):
    print("stuck", flush=True)
    time.sleep(3600)

tokens.tokenize_json = tokenize_json
from llamasrv.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_worker_that_never_returns_does_not_keep_the_process(tiny_model_path: Path) -> None:
    with ServerProcess("-m", tiny_model_path, command=(sys.executable, "-c", STUCK_WORKER)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
            sock.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            assert wait_for(lambda: "stuck" in server.log)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
        assert "HTTP workers are still at work" in server.log
