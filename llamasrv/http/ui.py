"""The files of the web page: llama.cpp's UI, or a folder of the user's choice."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flask import Request, Response, send_file
from werkzeug.security import safe_join

from llamasrv.http.config import HttpConfig

#: Where the build puts the UI.
BUNDLE_FOLDER = Path(__file__).resolve().parent.parent / "_ui"
TABLE = "table.json"
INDEX = "index.html"

#: Our own table: what a system's table says about a script may keep a browser from running it.
MIME_TYPES = {
    ".avif": "image/avif",
    ".css": "text/css",
    ".csv": "text/csv",
    ".gif": "image/gif",
    ".htm": "text/html",
    ".html": "text/html",
    ".ico": "image/x-icon",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".js": "text/javascript",
    ".json": "application/json",
    ".map": "application/json",
    ".md": "text/markdown",
    ".mjs": "text/javascript",
    ".mp3": "audio/mpeg",
    ".mp4": "video/mp4",
    ".ogg": "audio/ogg",
    ".pdf": "application/pdf",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".ttf": "font/ttf",
    ".txt": "text/plain",
    ".wasm": "application/wasm",
    ".wav": "audio/wav",
    ".webm": "video/webm",
    ".webmanifest": "application/manifest+json",
    ".webp": "image/webp",
    ".woff": "font/woff",
    ".woff2": "font/woff2",
    ".xml": "application/xml",
}
#: Names that stay while their content changes; the page looks at them for news.
REVALIDATED = frozenset({INDEX, "sw.js", "manifest.webmanifest", "build.json", "_app/version.json"})
IMMUTABLE = "public, max-age=31536000, immutable"
#: What lets a page measure time finely and share memory between its threads.
ISOLATION = {"Cross-Origin-Embedder-Policy": "require-corp", "Cross-Origin-Opener-Policy": "same-origin"}


def mime_type(name: str) -> str:
    return MIME_TYPES.get(PurePosixPath(name).suffix.lower(), "application/octet-stream")


class FolderError(ValueError):
    """The folder of --path cannot be served."""


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the UI. ``etag``: that of the gzipped data, in quotes."""

    name: str
    data: bytes
    etag: str

    def answer(self, request: Request) -> Response:
        """The file, gzipped unless the client does not take that, or that the client has it."""
        is_gzipped = request.accept_encodings.quality("gzip") > 0
        # two encodings are two representations, which must not share a tag
        tag = self.etag.strip('"') + ("" if is_gzipped else "-plain")
        response = Response(content_type=_content_type(self.name))
        response.set_etag(tag)
        response.headers["Vary"] = "Accept-Encoding"
        response.headers["Cache-Control"] = "no-cache" if self.name in REVALIDATED else IMMUTABLE
        if self.name == INDEX:
            response.headers.update(ISOLATION)
        if request.if_none_match.contains_weak(tag):
            response.status_code = 304
            return response
        if is_gzipped:
            response.headers["Content-Encoding"] = "gzip"
        response.set_data(self.data if is_gzipped else gzip.decompress(self.data))
        return response


def _content_type(name: str) -> str:
    kind = mime_type(name)
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind


def load_bundle(folder: Path = BUNDLE_FOLDER) -> Mapping[str, Asset] | None:
    """The built UI by file name; None where llamasrv was built without it."""
    try:
        table = json.loads((folder / TABLE).read_bytes())
        return {name: Asset(name, (folder / f"{name}.gz").read_bytes(), etag) for name, etag in table.items()}
    except FileNotFoundError:
        return None


def has_page(config: HttpConfig) -> bool:
    """Whether a browser gets a page from a server with these settings."""
    return config.ui and (bool(config.public_path) or (BUNDLE_FOLDER / TABLE).is_file())


class StaticFolder:
    """The folder of ``--path``. Raises :class:`FolderError` if it is none."""

    def __init__(self, path: str) -> None:
        if not os.path.isdir(path):
            raise FolderError(f"static assets path not found: {path}")
        self._root = os.path.realpath(path)

    def find(self, name: str) -> str | None:
        """Path of the file below the folder that ``name``, the path of a URL, stands for; None if there is none."""
        if name.endswith("/") or not name:
            name += INDEX
        path = safe_join(self._root, name)
        if path is None or "\0" in path:
            return None
        # a link may lead out of the folder
        path = os.path.realpath(path)
        return path if path.startswith(os.path.join(self._root, "")) and os.path.isfile(path) else None

    def is_folder(self, name: str) -> bool:
        """Whether ``name`` lacks a slash to be the page of a folder below this one."""
        return not name.endswith("/") and self.find(f"{name}/") is not None

    def __contains__(self, name: str) -> bool:
        return self.find(name) is not None


def file_answer(path: str) -> Response:
    """A file, or the part of it that is asked for, or that the client has it."""
    response = send_file(path, mimetype=mime_type(path), conditional=True)
    # the tag is made of time and size: a browser asks whether it still holds
    response.headers["Cache-Control"] = "no-cache"
    return response
