"""Who may ask: API keys and cross-origin rules."""

from __future__ import annotations

import itertools
import json

import pytest
from flask import Response
from http_harness import Harness, plain_routes, serve

from llamasrv.http.config import HttpConfig
from llamasrv.http.cors import is_local_origin
from llamasrv.http.errors import json_response
from llamasrv.http.route import Route
from llamasrv.http.state import ServerState

KEYS = ("first-key", "zweiter-schlüssel")
ORIGIN = "http://attacker.example"


def routes(state: ServerState) -> list[Route]:
    return [
        *plain_routes(state),
        Route("GET", "/", lambda: Response("<!doctype html>", content_type="text/html")),
        Route("GET", "/v1/health", lambda: json_response({"status": "ok"}), is_short=True),
        Route("GET", "/models", lambda: json_response({"data": []}), is_short=True),
    ]


def served_with(**config: object):
    return serve(HttpConfig.from_params({"port": 0, **config}), routes)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer first-key"}, 200),
        ({"Authorization": "first-key"}, 200),
        ({"Authorization": "bearer first-key"}, 401),
        ({"Authorization": "Bearer first-key "}, 200),  # HTTP strips the white space around a value
        ({"Authorization": "Bearer first-ke"}, 401),
        ({"Authorization": "Bearer first-key2"}, 401),
        ({"X-Api-Key": "first-key"}, 200),
        ({"X-Api-Key": "Bearer first-key"}, 200),
        ({"X-Api-Key": "wrong"}, 401),
        ({"Authorization": "Bearer wrong", "X-Api-Key": "first-key"}, 401),
        ({"Authorization": "Bearer zweiter-schlüssel".encode().decode("latin-1")}, 200),
    ],
)
def test_a_key_is_taken_from_either_header(headers: dict[str, str], status: int) -> None:
    with served_with(api_keys=KEYS) as served:
        response, body = served.request("POST", "/echo", {}, headers)
        assert response.status == status
        if status == 401:
            assert json.loads(body) == {
                "error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}
            }


@pytest.mark.parametrize("prefix", ["", "/ai"])
def test_public_pages_need_no_key_with_and_without_a_prefix(prefix: str) -> None:
    with served_with(api_keys=KEYS, api_prefix=prefix) as served:
        for path in ["/", "/health", "/v1/health", "/models", "/v1/models"]:
            assert served.request("GET", prefix + path)[0].status == 200, path
        for method, path in [("POST", "/echo"), ("GET", "/nope"), ("POST", "/models"), ("GET", "/healthy")]:
            assert served.request(method, prefix + path)[0].status == 401, path
        key = {"X-Api-Key": "first-key"}
        assert served.request("GET", prefix + "/nope", headers=key)[0].status == 404
        if prefix:
            assert served.request("GET", "/health")[0].status == 404


def test_without_configured_keys_nobody_needs_one() -> None:
    with served_with() as served:
        assert served.request("POST", "/echo", {}, {"Authorization": "Bearer whatever"})[0].status == 200


def test_keys_of_a_file_with_windows_line_ends_work() -> None:
    with served_with(api_keys=["abc\r", "\r"]) as served:
        assert served.request("POST", "/echo", {}, {"X-Api-Key": "abc"})[0].status == 200
        assert served.request("POST", "/echo", {})[0].status == 401


def test_a_key_is_checked_before_the_path_is_looked_up_and_after_loading() -> None:
    with serve(HttpConfig.from_params({"port": 0, "api_keys": KEYS}), routes, is_ready=False) as served:
        assert served.request("POST", "/echo", {})[0].status == 503
        assert served.request("GET", "/")[0].status == 200


def cors_of(served: Harness, method: str, origin: str | None, headers: dict[str, str] | None = None) -> dict[str, str]:
    response, _ = served.request(method, "/health", None, {**({"Origin": origin} if origin else {}), **(headers or {})})
    assert response.status == 200
    prefix = "access-control-allow-"
    return {name.lower()[len(prefix) :]: value for name, value in response.getheaders() if prefix in name.lower()}


def test_by_default_the_origin_is_echoed_as_the_manual_says() -> None:
    with served_with() as served:
        assert cors_of(served, "GET", ORIGIN) == {"origin": ORIGIN}
        assert cors_of(served, "GET", None) == {}
        assert cors_of(served, "OPTIONS", ORIGIN) == {
            "origin": ORIGIN,
            "credentials": "true",
            "methods": "GET, POST, DELETE, OPTIONS",
            "headers": "*",
        }


def test_without_credentials_any_origin_gets_the_wildcard() -> None:
    with served_with(cors_credentials=False) as served:
        assert cors_of(served, "GET", ORIGIN) == {"origin": "*"}
        assert cors_of(served, "OPTIONS", ORIGIN)["credentials"] == "false"


def test_localhost_means_local_origins_only() -> None:
    with served_with(cors_origins="localhost") as served:
        assert cors_of(served, "GET", "http://localhost:3000") == {"origin": "http://localhost:3000"}
        assert cors_of(served, "GET", ORIGIN) == {}
        assert "origin" not in cors_of(served, "OPTIONS", ORIGIN)


def test_one_configured_origin_is_named_whoever_asks() -> None:
    with served_with(cors_origins="https://a.example", cors_methods="GET", cors_headers="X-A") as served:
        assert cors_of(served, "GET", ORIGIN) == {"origin": "https://a.example"}
        options = cors_of(served, "OPTIONS", ORIGIN)
        assert (options["methods"], options["headers"]) == ("GET", "X-A")


def test_of_several_configured_origins_the_asking_one_is_named() -> None:
    with served_with(cors_origins="https://a.example, https://b.example") as served:
        assert cors_of(served, "GET", "https://b.example") == {"origin": "https://b.example"}
        assert cors_of(served, "GET", ORIGIN) == {}


@pytest.mark.parametrize(
    ("origins", "credentials", "origin", "method"),
    list(itertools.product(["*", "localhost", "https://a.example", "https://a.example,*"], [True, False],
                           [None, ORIGIN, "http://localhost"], ["GET", "OPTIONS"])),
)  # fmt: skip
def test_a_wildcard_never_stands_beside_allowed_credentials(
    origins: str, credentials: bool, origin: str | None, method: str
) -> None:
    with served_with(cors_origins=origins, cors_credentials=credentials) as served:
        headers = cors_of(served, method, origin)
        assert not (headers.get("origin") == "*" and headers.get("credentials") == "true")


def test_a_preflight_needs_no_key_and_every_error_tells_the_origin() -> None:
    with served_with(api_keys=KEYS) as served:
        response, body = served.request("OPTIONS", "/echo", None, {"Origin": ORIGIN})
        assert (response.status, body) == (200, b"")
        assert response.headers["Content-Type"] == "text/html"
        for path, status in [("/echo", 401), ("/nope", 401)]:
            response, _ = served.request("POST", path, {}, {"Origin": ORIGIN})
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (status, ORIGIN)


@pytest.mark.parametrize(
    ("origin", "is_local"),
    [
        ("http://localhost", True),
        ("https://localhost:8443", True),
        ("http://127.0.0.1", True),
        ("http://127.0.0.1:3000", True),
        ("http://[::1]:3000", True),
        ("http://LOCALHOST", True),
        ("http://localhost.evil.com", False),
        ("http://notlocalhost", False),
        ("http://localhost@evil.com", False),
        ("http://evil.com/localhost", False),
        ("http://127.0.0.1.evil.com", False),
        ("http://localhost:80:80", False),
        ("file://localhost", False),
        ("localhost", False),
        ("null", False),
        ("", False),
    ],
)
def test_what_counts_as_a_local_origin(origin: str, is_local: bool) -> None:
    assert is_local_origin(origin) is is_local
