"""The web page as it is served: from a packed bundle, from a folder of --path, and what stands in for it."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
import os
import socket
import ssl
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from http_harness import Harness, plain_routes, read_until, serve
from test_http_tls import make_certificate

from llamasrv.http.config import HttpConfig
from llamasrv.http.routes import ui as ui_routes
from llamasrv.http.server import HIGH_WATERMARK
from llamasrv.http.state import ServerState
from llamasrv.http.ui import FolderError, StaticFolder, load_bundle, mime_type
from nativebuild.ui import pack

#: A script of more than the system and the server queue for one reader, gzipped too.
SCRIPT = os.urandom(HIGH_WATERMARK + 6_000_000)
TREE = {
    "index.html": b"<!doctype html><title>page</title>",
    "sw.js": b"// the page's own worker",
    "build.json": b'{"version":"1"}',
    "manifest.webmanifest": b"{}",
    "favicon.ico": b"\0\0icon",
    "favicon.svg": b"<svg/>",
    "_app/version.json": b'{"version":"1"}',
    "_app/immutable/bundle.x.js": SCRIPT,
    "_app/immutable/assets/bundle.y.css": b"body{}",
}
GZIP = {"Accept-Encoding": "gzip, deflate, br"}
KEY = {"Authorization": "Bearer secret"}


def write_tree(folder: Path, files: Mapping[str, bytes] = TREE) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def bundle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    pack(write_tree(folder / "tree"), folder / "packed")
    return folder / "packed"


def page_of(folder: Path, is_ready: bool = True, **config: object) -> AbstractContextManager[Harness]:
    """A server with the bundle in ``folder``, or without any if there is none."""

    def routes(state: ServerState):
        return [*plain_routes(state), *ui_routes.routes(state, load_bundle(folder) or {})]

    return serve(HttpConfig.from_params({"port": 0, **config}), routes, is_ready)


@pytest.fixture(autouse=True)
def no_installed_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui_routes, "load_bundle", lambda: None)


# -- the bundle


def test_every_file_is_sent_gzipped_with_its_type_and_caching_rule(bundle_folder: Path) -> None:
    types = {
        "index.html": "text/html; charset=utf-8",
        "sw.js": "text/javascript; charset=utf-8",
        "build.json": "application/json",
        "manifest.webmanifest": "application/manifest+json",
        "favicon.ico": "image/x-icon",
        "favicon.svg": "image/svg+xml",
        "_app/version.json": "application/json",
        "_app/immutable/bundle.x.js": "text/javascript; charset=utf-8",
        "_app/immutable/assets/bundle.y.css": "text/css; charset=utf-8",
    }
    fresh = {"index.html", "sw.js", "build.json", "manifest.webmanifest", "_app/version.json"}
    with page_of(bundle_folder) as served:
        for name, data in TREE.items():
            response, body = served.request("GET", f"/{name}", headers=GZIP)
            assert (response.status, response.headers["Content-Type"]) == (200, types[name]), name
            assert response.headers["Content-Encoding"] == "gzip"
            assert int(response.headers["Content-Length"]) == len(body)
            assert gzip.decompress(body) == data
            rule = "no-cache" if name in fresh else "public, max-age=31536000, immutable"
            assert response.headers["Cache-Control"] == rule, name
            assert response.headers["ETag"] == f'"{hashlib.sha256(body).hexdigest()}"'
            assert "Accept-Encoding" in response.headers["Vary"]


def test_the_root_is_the_page_and_isolated(bundle_folder: Path) -> None:
    with page_of(bundle_folder) as served:
        for path in ("/", "/index.html", "/?q=x"):
            response, body = served.request("GET", path)
            assert (response.status, body) == (200, TREE["index.html"])
            assert response.headers["Cross-Origin-Embedder-Policy"] == "require-corp"
            assert response.headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert "Cross-Origin-Opener-Policy" not in served.request("GET", "/favicon.ico")[0].headers


@pytest.mark.parametrize("accepts", [None, "identity", "br", "gzip;q=0", "gzip;q=0, *"])
def test_a_client_without_gzip_gets_the_file_inflated(bundle_folder: Path, accepts: str | None) -> None:
    with page_of(bundle_folder) as served:
        sock = served.raw(
            b"GET /favicon.svg HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            + (f"Accept-Encoding: {accepts}\r\n".encode() if accepts else b"")
            + b"\r\n"
        )
        head, _, body = read_until(sock, b"never").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"Content-Encoding" not in head
        assert body == TREE["favicon.svg"]


@pytest.mark.parametrize("accepts", ["gzip", "*", "br, gzip;q=0.1", "GZIP"])
def test_gzip_is_recognized(bundle_folder: Path, accepts: str) -> None:
    with page_of(bundle_folder) as served:
        response, _ = served.request("GET", "/favicon.svg", headers={"Accept-Encoding": accepts})
        assert response.headers["Content-Encoding"] == "gzip"


def test_who_has_the_file_is_told_so_but_not_with_the_tag_of_another_encoding(bundle_folder: Path) -> None:
    with page_of(bundle_folder) as served:
        tags = {}
        for encoding in ("gzip", "identity"):
            accept = {"Accept-Encoding": encoding}
            tag = tags[encoding] = served.request("GET", "/favicon.svg", headers=accept)[0].headers["ETag"]
            for given in (tag, f"W/{tag}", f'"other", {tag}', "*"):
                response, body = served.request("GET", "/favicon.svg", headers={**accept, "If-None-Match": given})
                assert (response.status, body) == (304, b""), given
                assert response.headers["ETag"] == tag
                assert response.headers["Cache-Control"] == "public, max-age=31536000, immutable"
        assert tags["gzip"] != tags["identity"]
        response, body = served.request("GET", "/favicon.svg", headers={"If-None-Match": tags["gzip"]})
        assert (response.status, body) == (200, TREE["favicon.svg"])
        response, _ = served.request("GET", "/", headers={**GZIP, "If-None-Match": '"another"'})
        assert response.status == 200


def test_head_is_answered_without_a_body(bundle_folder: Path) -> None:
    with page_of(bundle_folder) as served:
        response, body = served.request("HEAD", "/_app/immutable/bundle.x.js", headers=GZIP)
        assert (response.status, body) == (200, b"")
        assert int(response.headers["Content-Length"]) > HIGH_WATERMARK


@pytest.mark.parametrize("path", ["/nope.js", "/_app", "/_app/", "/table.json", "/favicon.svg.gz", "/FAVICON.SVG"])
def test_what_is_not_in_the_bundle_is_not_found(bundle_folder: Path, path: str) -> None:
    with page_of(bundle_folder) as served:
        response, body = served.request("GET", path)
        assert response.status == 404
        assert json.loads(body)["error"]["message"] == "File Not Found"
        assert served.request("POST", "/favicon.svg")[0].status == 404


@pytest.mark.parametrize("prefix", ["", "/llm/ui"])
def test_the_page_needs_no_key_and_no_loaded_model(bundle_folder: Path, prefix: str) -> None:
    for ready in (True, False):
        with page_of(bundle_folder, is_ready=ready, api_keys=["secret"], api_prefix=prefix) as served:
            for name in ["", *TREE]:
                assert served.request("GET", f"{prefix}/{name}")[0].status == 200, name
            assert served.request("GET", f"{prefix}/fail")[0].status == (401 if ready else 503)
            assert served.request("POST", f"{prefix}/echo", {})[0].status == (401 if ready else 503)
            assert served.request("POST", f"{prefix}/favicon.ico", {})[0].status == (401 if ready else 503)


def test_below_a_prefix_the_page_is_found_with_and_without_the_last_slash(bundle_folder: Path) -> None:
    with page_of(bundle_folder, api_prefix="/llm/ui", api_keys=["secret"]) as served:
        assert served.request("GET", "/llm/ui/")[1] == TREE["index.html"]
        for path, target in [("/llm/ui", "ui/"), ("/llm/ui?q=a%20b", "ui/?q=a%20b")]:
            response, _ = served.request("GET", path)
            assert (response.status, response.headers["Location"]) == (307, target)
        for path in ("/", "/favicon.ico", "/llm/uix", "/llm"):
            assert served.request("GET", path, headers=KEY)[0].status == 404, path


def test_slow_readers_of_the_script_hold_up_no_short_answer(bundle_folder: Path) -> None:
    ask = b"GET /_app/immutable/bundle.x.js HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n"
    with page_of(bundle_folder) as served:
        # more than there are threads for short answers, each with requests piled up on one connection
        slow = [socket.socket() for _ in range(6)]
        for sock in slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", served.port))
            sock.sendall(ask * 3)
        for sock in slow:
            assert read_until(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 200")
        for _ in range(3):
            assert served.request("GET", "/health")[0].status == 200
        for sock in slow:
            sock.close()


# -- no page


def test_without_a_bundle_the_root_says_how_to_get_one(tmp_path: Path) -> None:
    with page_of(tmp_path) as served:
        response, body = served.request("GET", "/")
        assert (response.status, response.headers["Content-Type"]) == (404, "text/html; charset=utf-8")
        assert b"LLAMASRV_NO_UI" in body and b"--path" in body
        assert served.request("GET", "/index.html")[0].status == 404


@pytest.mark.parametrize("why", ["no bundle", "--no-ui", "--path without a worker", "--no-ui beats --path"])
def test_a_worker_that_a_browser_has_kept_is_replaced_by_one_that_leaves(
    tmp_path: Path, bundle_folder: Path, why: str
) -> None:
    own = {"sw.js": b"own"} if "beats" in why else {"index.html": b"own"}
    path = str(write_tree(tmp_path / "site", own)) if "--path" in why else ""
    folder = bundle_folder if "--" in why else tmp_path
    config = {"ui": "--no-ui" not in why, "public_path": path, "api_keys": ["secret"]}
    with page_of(folder, is_ready=False, **config) as served:
        response, body = served.request("GET", "/sw.js")
        assert (response.status, response.headers["Content-Type"]) == (200, "text/javascript; charset=utf-8")
        assert response.headers["Cache-Control"] == "no-cache"
        assert b"registration.unregister()" in body and b"caches.delete" in body


def test_with_no_ui_there_is_no_page(bundle_folder: Path) -> None:
    with page_of(bundle_folder, ui=False, api_prefix="/ai") as served:
        for path in ("/ai/", "/ai/index.html", "/ai/favicon.ico", "/ai"):
            response, body = served.request("GET", path)
            assert (response.status, json.loads(body)["error"]["type"]) == (404, "not_found_error"), path


# -- the folder of --path

SITE = {
    "index.html": b"<h1>mine</h1>",
    "app.js": b"let a = 1;",
    "data.bin": bytes(range(256)) * 400,
    "sub/index.html": b"<h1>sub</h1>",
    "sub/deep/x.txt": b"deep",
    "java:日 ü/index.html": b"odd name",
    "empty/.keep": b"",
    "with space.txt": b"space",
    "umläut.txt": b"umlaut",
    "health": b"not the server's",
    ".hidden": b"hidden",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_bytes(b"secret")
    (tmp_path / "site-next-door").mkdir()
    (tmp_path / "site-next-door" / "secret.txt").write_bytes(b"secret")
    folder = write_tree(tmp_path / "site", SITE)
    (folder / "out.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "out").symlink_to(tmp_path)
    (folder / "in.txt").symlink_to(folder / "sub" / "deep" / "x.txt")
    (folder / "loop").symlink_to(folder / "loop")
    return folder


def test_files_of_the_folder_are_served_instead_of_the_ui(site: Path, bundle_folder: Path) -> None:
    cases = {
        "/": ("index.html", "text/html; charset=utf-8"),
        "/index.html": ("index.html", "text/html; charset=utf-8"),
        "/app.js": ("app.js", "text/javascript; charset=utf-8"),
        "/app.js?v=2": ("app.js", "text/javascript; charset=utf-8"),
        "/data.bin": ("data.bin", "application/octet-stream"),
        "/sub/": ("sub/index.html", "text/html; charset=utf-8"),
        "/sub/deep/x.txt": ("sub/deep/x.txt", "text/plain; charset=utf-8"),
        "/sub%2Fdeep/x.txt": ("sub/deep/x.txt", "text/plain; charset=utf-8"),
        "/with%20space.txt": ("with space.txt", "text/plain; charset=utf-8"),
        "/uml%C3%A4ut.txt": ("umläut.txt", "text/plain; charset=utf-8"),
        "/in.txt": ("sub/deep/x.txt", "text/plain; charset=utf-8"),
        "/.hidden": (".hidden", "application/octet-stream"),
    }
    with page_of(bundle_folder, public_path=str(site)) as served:
        for path, (name, kind) in cases.items():
            response, body = served.request("GET", path, headers=GZIP)
            assert (response.status, body, response.headers["Content-Type"]) == (200, SITE[name], kind), path
            assert response.headers["Cache-Control"] == "no-cache"
        assert served.request("GET", "/favicon.ico")[0].status == 404


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/sub/../../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/secret.txt",
        "/%2e%2e%2fsecret.txt",
        "/sub/..%2f..%2fsecret.txt",
        "/..%5csecret.txt",
        "/..\\secret.txt",
        "/../site-next-door/secret.txt",
        "/%2fetc/passwd",
        "/.//etc/passwd",
        "/out.txt",
        "/out/secret.txt",
        "/out/site-next-door/secret.txt",
        "/out/",
        "/loop",
        "/loop/x",
        "/app.js%00.txt",
        "/%00",
        "/app.js/",
        "/app.js/x",
        "/empty/",
        "/empty",
        "/sub/deep",
        "/nope",
        "/%ff%fe",
        "/" + "a" * 300,
        "/" + "a/" * 3000,
    ],
)
def test_nothing_but_files_of_the_folder_is_served(site: Path, path: str) -> None:
    with page_of(site, public_path=str(site)) as served:
        sock = served.raw(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = read_until(sock, b"never")
        assert answer.startswith(b"HTTP/1.1 404"), answer[:200]
        assert b"File Not Found" in answer and b"root:" not in answer
        assert served.request("GET", "/app.js")[0].status == 200


def test_a_double_slash_leads_nowhere(site: Path) -> None:
    with page_of(site, public_path=str(site)) as served:
        for path in ("//etc/passwd", "//app.js"):
            assert served.request("GET", path)[0].status == 404


def test_a_folder_with_a_page_is_found_without_its_slash(site: Path) -> None:
    with page_of(site, public_path=str(site), api_prefix="/ai") as served:
        redirects = {
            "/ai/sub": "sub/",
            "/ai/sub?a=b": "sub/?a=b",
            "/ai": "ai/",
            "/ai/java:%E6%97%A5%20%C3%BC": "java%3A%E6%97%A5%20%C3%BC/",
        }
        for path, target in redirects.items():
            response, _ = served.request("GET", path)
            assert (response.status, response.headers["Location"]) == (307, target)
        assert served.request("GET", "/ai/sub/")[1] == SITE["sub/index.html"]


@pytest.mark.parametrize("is_ready", [True, False])
def test_the_whole_folder_needs_no_key_and_no_loaded_model(site: Path, is_ready: bool) -> None:
    with page_of(site, is_ready=is_ready, public_path=str(site), api_keys=["secret"]) as served:
        for path in ("/", "/app.js", "/sub/", "/sub/deep/x.txt"):
            assert served.request("GET", path)[0].status == 200, path
        assert served.request("HEAD", "/app.js")[0].status == 200
        assert served.request("GET", "/nope")[0].status == 404
        refused = 401 if is_ready else 503
        assert served.request("GET", "/fail")[0].status == refused
        assert served.request("POST", "/app.js", {})[0].status == refused
        assert served.request("DELETE", "/app.js")[0].status == refused


def test_routes_of_the_api_go_before_files_of_the_same_name(site: Path) -> None:
    with page_of(site, public_path=str(site)) as served:
        assert json.loads(served.request("GET", "/health")[1]) == {"status": "ok"}


def test_who_has_the_file_is_told_so_until_it_changes(site: Path) -> None:
    with page_of(site, public_path=str(site)) as served:
        headers = served.request("GET", "/app.js")[0].headers
        for given in ({"If-None-Match": headers["ETag"]}, {"If-Modified-Since": headers["Last-Modified"]}):
            response, body = served.request("GET", "/app.js", headers=given)
            assert (response.status, body) == (304, b"")
        (site / "app.js").write_bytes(b"let changed = 2;")
        response, body = served.request("GET", "/app.js", headers={"If-None-Match": headers["ETag"]})
        assert (response.status, body) == (200, b"let changed = 2;")


def test_a_part_of_a_file_is_sent_where_it_is_asked_for(site: Path) -> None:
    data = SITE["data.bin"]
    with page_of(site, public_path=str(site)) as served:
        parts = {"bytes=10-19": data[10:20], "bytes=-5": data[-5:], f"bytes={len(data) - 3}-": data[-3:]}
        for asked, part in parts.items():
            response, body = served.request("GET", "/data.bin", headers={"Range": asked})
            assert (response.status, body) == (206, part), asked
            assert response.headers["Content-Range"].endswith(f"/{len(data)}")
        response, _ = served.request("GET", "/data.bin", headers={"Range": f"bytes={len(data)}-"})
        assert response.status == 416


def test_head_of_a_file_has_its_length(site: Path) -> None:
    with page_of(site, public_path=str(site)) as served:
        response, body = served.request("HEAD", "/data.bin")
        assert (response.status, body, response.headers["Content-Length"]) == (200, b"", str(len(SITE["data.bin"])))


def test_a_large_file_arrives_whole_and_the_connection_goes_on(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "site", {"big.bin": SCRIPT})
    with page_of(tmp_path, public_path=str(folder)) as served:
        connection = served.connect()
        for _ in range(2):
            assert served.request("GET", "/big.bin", connection=connection)[1] == SCRIPT


@pytest.mark.parametrize("has_folder", [True, False])
def test_large_files_arrive_whole_over_tls(tmp_path: Path, bundle_folder: Path, has_folder: bool) -> None:
    key, certificate = make_certificate(tmp_path)
    folder = str(write_tree(tmp_path / "site")) if has_folder else ""
    with page_of(bundle_folder, public_path=folder, ssl_file_key=str(key), ssl_file_cert=str(certificate)) as served:
        context = ssl.create_default_context(cafile=str(certificate))
        connection = http.client.HTTPSConnection("localhost", served.port, context=context, timeout=60)
        for _ in range(2):
            _, body = served.request("GET", "/_app/immutable/bundle.x.js", connection=connection)
            assert body == SCRIPT
        connection.close()


def test_a_file_that_cannot_be_read_tells_nothing_of_where_it_is(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(ui_routes, "file_answer", refuse)
    with page_of(site, public_path=str(site)) as served:
        response, body = served.request("GET", "/app.js")
        assert response.status == 404
        assert str(site).encode() not in body


def test_a_folder_that_is_none_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "nope", tmp_path / "file"):
        with pytest.raises(FolderError, match=f"static assets path not found: {path}"):
            StaticFolder(str(path))


def test_scripts_have_the_type_that_browsers_want() -> None:
    assert mime_type("a/b.JS") == mime_type("sw.mjs") == "text/javascript"
    assert mime_type("x.webmanifest") == "application/manifest+json"
    assert mime_type("x.js.map") == "application/json"
    assert mime_type("noext") == mime_type("x.unknown") == mime_type(".js/x") == "application/octet-stream"
