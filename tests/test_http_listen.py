"""Addresses: many hosts, port 0, unix sockets, and what is said when one cannot be had."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from http_harness import read_all, serve

from llamasrv.http.config import HttpConfig
from llamasrv.http.listen import BindError, Listener, open_listeners


def ipv6_works() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not ipv6_works(), reason="no IPv6 loopback on this machine")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def close(listeners: list[Listener]) -> None:
    for listener in listeners:
        listener.close()


def get_health(sock: socket.socket) -> bytes:
    sock.settimeout(60)
    sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return read_all(sock)


def connect_unix(path: Path | str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(path))
    return sock


def test_port_0_becomes_a_real_port_in_the_address() -> None:
    listeners = open_listeners(HttpConfig(port=0))
    try:
        assert listeners[0].port > 0
        assert listeners[0].address == f"http://127.0.0.1:{listeners[0].port}"
    finally:
        close(listeners)


def test_port_0_with_two_tcp_hosts_is_refused() -> None:
    with pytest.raises(BindError, match="--port 0 is not supported with multiple TCP addresses"):
        open_listeners(HttpConfig(hostnames=("127.0.0.1", "127.0.0.2"), port=0))


def test_a_taken_port_is_named_with_the_reason() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        expected = f"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {port}: Address already in use"
        with pytest.raises(BindError, match=expected):
            open_listeners(HttpConfig(port=port))


@pytest.mark.parametrize(
    ("host", "port", "reason"),
    [
        ("192.0.2.1", 0, "Cannot assign requested address"),
        ("no-such-host.invalid", 0, "."),
        ("127.0.0.1", 70000, "the port must be between 0 and 65535"),
        ("127.0.0.1", -1, "the port must be between 0 and 65535"),
    ],
)
def test_an_address_that_cannot_be_had_is_one_error(host: str, port: int, reason: str) -> None:
    with pytest.raises(
        BindError, match=f"couldn't bind HTTP server socket, hostname: {host}, port: {port}: .*{reason}"
    ):
        open_listeners(HttpConfig(hostnames=(host,), port=port))


def test_when_the_second_host_fails_the_first_is_given_back(tmp_path: Path) -> None:
    port = free_port()
    path = tmp_path / "a.sock"
    with pytest.raises(BindError):
        open_listeners(HttpConfig(hostnames=(str(path), "127.0.0.1", "192.0.2.1"), port=port))
    assert not path.exists()
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


@needs_ipv6
def test_all_hosts_answer() -> None:
    with serve(HttpConfig(hostnames=("127.0.0.1", "::1"), port=free_port())) as served:
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, served.port)) as sock:
                assert get_health(sock).endswith(b'{"status":"ok"}')
        assert served.server.addresses == [f"http://127.0.0.1:{served.port}", f"http://[::1]:{served.port}"]


@needs_ipv6
def test_the_ipv6_wildcard_leaves_ipv4_alone_among_several_hosts() -> None:
    port = free_port()
    close(open_listeners(HttpConfig(hostnames=("::", "0.0.0.0"), port=port)))


def test_two_servers_share_a_port_only_when_asked() -> None:
    first = open_listeners(HttpConfig(port=0, reuse_port=True))
    try:
        port = first[0].port
        close(open_listeners(HttpConfig(port=port, reuse_port=True)))
        with pytest.raises(BindError):
            open_listeners(HttpConfig(port=port))
    finally:
        close(first)


def test_a_unix_socket_answers_and_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "llama.sock"
    with serve(HttpConfig(hostnames=(str(path), "127.0.0.1"), port=free_port())) as served:
        assert served.server.addresses[0] == f"unix://{path}"
        with connect_unix(path) as sock:
            assert get_health(sock).endswith(b'{"status":"ok"}')
    assert not path.exists()


def test_a_dead_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "llama.sock"
    code = (
        "import socket, sys, os, signal\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print('up', flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"up\n"
        with pytest.raises(BindError, match="Address already in use"):
            open_listeners(HttpConfig(hostnames=(str(path),)))
        other.send_signal(signal.SIGKILL)
    assert stat.S_ISSOCK(path.stat().st_mode)
    listeners = open_listeners(HttpConfig(hostnames=(str(path),)))
    connect_unix(path).close()
    close(listeners)
    assert not path.exists()


def test_a_live_unix_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "llama.sock"
    first = open_listeners(HttpConfig(hostnames=(str(path),)))
    with pytest.raises(BindError, match="Address already in use"):
        open_listeners(HttpConfig(hostnames=(str(path),)))
    connect_unix(path).close()
    close(first)


def test_a_regular_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious.sock"
    path.write_text("keep me")
    with pytest.raises(BindError, match="not a socket"):
        open_listeners(HttpConfig(hostnames=(str(path),)))
    assert path.read_text() == "keep me"


def test_a_link_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("keep me")
    path = tmp_path / "link.sock"
    path.symlink_to(target)
    with pytest.raises(BindError, match="not a socket"):
        open_listeners(HttpConfig(hostnames=(str(path),)))
    assert path.is_symlink()


def test_a_missing_folder_and_a_long_path_are_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(BindError, match="No such file or directory"):
        open_listeners(HttpConfig(hostnames=(str(tmp_path / "missing" / "a.sock"),)))
    with pytest.raises(BindError, match="too long"):
        open_listeners(HttpConfig(hostnames=(str(tmp_path / ("x" * 200 + ".sock")),)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_named_with_the_reason(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(BindError, match="Permission denied"):
            open_listeners(HttpConfig(hostnames=(str(tmp_path / "a.sock"),)))
    finally:
        tmp_path.chmod(0o755)


def test_the_file_of_a_successor_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "llama.sock"
    first = open_listeners(HttpConfig(hostnames=(str(path),)))
    path.unlink()
    second = open_listeners(HttpConfig(hostnames=(str(path),)))
    close(first)
    connect_unix(path).close()
    close(second)
    assert not path.exists()


def test_of_servers_that_start_together_over_a_dead_socket_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "llama.sock"
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        won: list[Listener] = []
        lost: list[BindError] = []
        gate = threading.Barrier(4)

        def start(won: list[Listener] = won, lost: list[BindError] = lost, gate: threading.Barrier = gate) -> None:
            gate.wait()
            try:
                won.extend(open_listeners(HttpConfig(hostnames=(str(path),))))
            except BindError as exc:
                lost.append(exc)

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 3)
        connect_unix(path).close()
        close(won)
