"""The web page, and what stands in for it where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import quote

from flask import Response, request

from llamasrv.engine.log import srv_inf, srv_wrn
from llamasrv.http.errors import no_route
from llamasrv.http.route import CATCH_ALL, Route
from llamasrv.http.state import ServerState
from llamasrv.http.ui import Asset, StaticFolder, file_answer, load_bundle

#: Takes the place of a worker that a browser has kept from an earlier page: it empties its caches and leaves.
REMOVING_WORKER = """\
// There is no app with a worker here any more.
self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => {
  const leave = async () => {
    const names = await caches.keys();
    await Promise.all(names.map((name) => caches.delete(name)));
    await self.registration.unregister();
    const pages = await self.clients.matchAll({ type: "window" });
    pages.forEach((page) => page.navigate(page.url));
  };
  event.waitUntil(leave());
});
"""

NO_BUNDLE = """\
<!doctype html>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>llamasrv</title>
<body style="font-family: sans-serif; max-width: 40em; margin: 3em auto; padding: 0 1em; line-height: 1.5">
<h1>llamasrv is running, without its web page</h1>
<p>This llamasrv was installed with <code>LLAMASRV_NO_UI</code> set, which leaves llama.cpp's web UI out. To have it,
install again without that variable (<code>pip install .</code> in its source), or start the server with
<code>--path DIR</code> to serve a page of your own.</p>
<p>The API is there; <a href="docs">/docs</a> is its manual.</p>
"""


def routes(state: ServerState, bundle: Mapping[str, Asset] | None = None) -> list[Route]:
    """``bundle``: instead of the one that is installed. Raises FolderError when there is no folder of --path."""
    config = state.config
    made: list[Route] = []
    if not config.ui:
        srv_inf("init", "the web UI is disabled (--no-ui)")
        made.append(_page("/sw.js", _removing_worker))
    elif config.public_path:
        made += _folder_routes(StaticFolder(config.public_path))
    elif bundle := bundle or load_bundle():
        made += [_page(f"/{name}", _answer(asset)) for name, asset in bundle.items()]
        made.append(_page("/", _answer(bundle["index.html"])))
    else:
        srv_wrn("init", "this llamasrv was installed without the web UI")
        made += [_page("/", _no_bundle), _page("/sw.js", _removing_worker)]
    if config.api_prefix and config.ui:
        made.append(_page("", _to_slash))
    return made


def _page(path: str, handler: Callable[..., Response]) -> Route:
    return Route("GET", path, handler, is_short=True, is_public=True)


def _answer(asset: Asset) -> Callable[[], Response]:
    return lambda: asset.answer(request)


def _folder_routes(folder: StaticFolder) -> list[Route]:
    def serve(name: str = "") -> Response:
        path = folder.find(name)
        try:
            if path is not None:
                return file_answer(path)
        except OSError as exc:  # gone since, or not for us to read
            srv_wrn("http", "a file of --path cannot be read: %s", exc)
        if folder.is_folder(name):
            return _to_slash()
        if name == "sw.js":
            return _removing_worker()
        raise no_route()

    return [_page("/", serve), _page(CATCH_ALL, serve)]


def _to_slash() -> Response:
    """From a folder's name to the folder, whose page names its files relative to it."""
    # relative: a proxy before us may have another prefix
    target = quote(request.path.rpartition("/")[2]) + "/"
    query = request.query_string.decode("latin-1")
    return Response(status=307, headers={"Location": f"{target}?{query}" if query else target})


def _removing_worker() -> Response:
    headers = {"Cache-Control": "no-cache"}
    return Response(REMOVING_WORKER, headers=headers, content_type="text/javascript; charset=utf-8")


def _no_bundle() -> Response:
    return Response(NO_BUNDLE, 404, content_type="text/html; charset=utf-8")
