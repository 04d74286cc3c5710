"""TLS with a certificate made for the test."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_harness import Harness, read_until, serve

from llamasrv.http.config import HttpConfig
from llamasrv.http.server import HttpServer
from llamasrv.http.tls import TlsConfigError, make_context


def make_certificate(folder: Path, *extra: str) -> tuple[Path, Path]:
    """A key and a self-signed certificate for localhost."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl program to make a certificate with")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-keyout", key, "-out", cert, "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *names, *(extra or ["-nodes"])], check=True, capture_output=True)
    return key, cert


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def served(certificate: tuple[Path, Path]) -> Iterator[Harness]:
    key, cert = certificate
    with serve(HttpConfig(port=0, ssl_file_key=str(key), ssl_file_cert=str(cert))) as harness:
        yield harness


@pytest.fixture
def client_context(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate[1]))


def secure(served: Harness, context: ssl.SSLContext) -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    return context.wrap_socket(raw, server_hostname="localhost")


def test_requests_and_keep_alive_over_tls(served: Harness, client_context: ssl.SSLContext) -> None:
    assert served.server.addresses == [f"https://127.0.0.1:{served.port}"]
    connection = http.client.HTTPSConnection("localhost", served.port, context=client_context, timeout=60)
    for _ in range(3):
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read()) == {"status": "ok"}
    sock = connection.sock
    connection.request("GET", "/health")
    connection.getresponse().read()
    assert connection.sock is sock
    connection.close()


def test_curl_speaks_to_it(served: Harness) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl")
    url = f"https://127.0.0.1:{served.port}/echo"
    done = subprocess.run([curl, "-sk", url, "-d", "a" * 5000], capture_output=True, check=True, timeout=60)
    assert done.stdout == b'{"size":5000}'


def test_chunks_leave_at_once_over_tls(served: Harness, client_context: ssl.SSLContext) -> None:
    with secure(served, client_context) as sock:
        body = b'{"stream":true}'
        sock.sendall(
            b"POST /run HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n" + body
        )
        task = served.context.next_task()
        for text in ("one", "two"):
            served.context.part(task, text)
            assert f'data: "{text}"'.encode() in read_until(sock, b"\n\n\r\n")
        served.context.end(task)
        assert b"[END]" in read_until(sock, b"0\r\n\r\n")


def test_large_bodies_pass_both_ways_over_tls(served: Harness, client_context: ssl.SSLContext) -> None:
    connection = http.client.HTTPSConnection("localhost", served.port, context=client_context, timeout=60)
    connection.request("POST", "/echo", b"x" * 5_000_000)
    assert connection.getresponse().read() == b'{"size":5000000}'
    connection.request("POST", "/run", b'{"stream":true}', {"Content-Type": "application/json"})
    task = served.context.next_task()
    texts = [chr(97 + i % 26) * 100_000 for i in range(100)]
    for text in texts:
        served.context.part(task, text)
    served.context.end(task)
    response = connection.getresponse()
    body = response.read()
    expected = b"".join(b'data: "%s"\n\n' % text.encode() for text in texts) + b'data: ""\n\ndata: [END]\n\n'
    assert body == expected
    connection.close()


def test_hanging_up_over_tls_cancels(served: Harness, client_context: ssl.SSLContext) -> None:
    sock = secure(served, client_context)
    sock.sendall(b"POST /run HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
    task = served.context.next_task()
    sock.close()
    assert served.context.cancelled.get(timeout=60) == task.id


def test_a_peer_that_speaks_no_tls_disturbs_nobody(served: Harness, client_context: ssl.SSLContext) -> None:
    plain = served.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    silent = served.raw(b"")
    half = served.raw(b"\x16\x03\x01\x02\x00\x01")
    plain.settimeout(60)
    with contextlib.suppress(ConnectionResetError):
        assert b"200 OK" not in plain.recv(1000)
    connection = http.client.HTTPSConnection("localhost", served.port, context=client_context, timeout=60)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()
    silent.close()
    half.close()


def test_the_end_of_a_connection_is_announced(served: Harness, client_context: ssl.SSLContext) -> None:
    with secure(served, client_context) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = b""
        # without close_notify the last recv() raises ssl.SSLEOFError
        while part := sock.recv(65536):
            data += part
        assert data.endswith(b'{"status":"ok"}')


def test_bad_configurations_are_one_clear_error(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    key, cert = map(str, certificate)
    (tmp_path / "other").mkdir()
    other_key, _ = make_certificate(tmp_path / "other")
    (tmp_path / "locked").mkdir()
    locked_key, locked_cert = make_certificate(tmp_path / "locked", "-passout", "pass:secret")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no key")
    for config, message in [
        (HttpConfig(ssl_file_key=key), "--ssl-key-file and --ssl-cert-file must be given together"),
        (HttpConfig(ssl_file_cert=cert), "--ssl-key-file and --ssl-cert-file must be given together"),
        (HttpConfig(ssl_file_key="missing.pem", ssl_file_cert=cert), "cannot read 'missing.pem': No such file"),
        (HttpConfig(ssl_file_key=str(other_key), ssl_file_cert=cert), "cannot use key"),
        (HttpConfig(ssl_file_key=str(garbage), ssl_file_cert=cert), "cannot use key"),
        (HttpConfig(ssl_file_key=str(locked_key), ssl_file_cert=str(locked_cert)), "cannot use key"),
    ]:
        with pytest.raises(TlsConfigError, match=message):
            make_context(config)


def test_without_key_and_certificate_there_is_no_tls() -> None:
    assert make_context(HttpConfig()) is None


def test_a_bad_certificate_claims_no_address(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    config = HttpConfig(hostnames=(str(path),), ssl_file_key="missing.pem", ssl_file_cert="missing.pem")
    server = HttpServer(lambda environ, start_response: [], config, lambda method, path: False)
    with pytest.raises(TlsConfigError):
        server.bind()
    assert not path.exists()
    assert server.addresses == []
