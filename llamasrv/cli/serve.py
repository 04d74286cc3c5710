"""One model: the steps from parameters to the main loop, and back."""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import replace
from typing import Any

from llamasrv import binding
from llamasrv.api.chat_settings import ChatSettings, log_chat_settings
from llamasrv.api.context import check_model
from llamasrv.cli.signals import SignalWatch
from llamasrv.cli.startup import adjustments, check, check_ui_config, is_router, warn_of_absent
from llamasrv.engine.log import srv_dbg, srv_err, srv_inf, srv_wrn
from llamasrv.engine.server_context import ServerContext
from llamasrv.http.app import create_app, short_requests
from llamasrv.http.config import HttpConfig
from llamasrv.http.routes import api_routes
from llamasrv.http.server import HttpServer
from llamasrv.http.state import ServerState
from llamasrv.http.ui import has_page
from llamasrv.http.vertex import Vertex

#: Seconds that workers get to send their last words once the engine has ended.
FLUSH_S = 1.0
#: Seconds after which the process ends whatever the main thread is doing, once all requests have ended ...
EXIT_S = 1.5
#: ... and after the end of the time that running requests get.
LIMIT_S = 1.9


def serve(params: binding.Params, own: dict[str, Any]) -> int:
    """Run one server; returns the exit code. ``own``: values of our own flags. On the main thread."""
    srv_inf("llama_server", "initializing ...")
    if is_router(params.to_dict()):
        srv_err("llama_server", "no model given: use -m FILE, -hf REPO or -mu URL; a folder of models is not served")
        return 1
    server = Server(own)
    code = 0
    try:
        server.prepare(params)
        server.run(params)
    except StopRequested:
        pass
    except Exception as exc:
        # whoever ends the server while it starts does not care what broke by that
        if not server.watch.is_stopping:
            code = 1
            srv_err("llama_server", "%s", " ".join(str(exc).splitlines()) or repr(exc))
            srv_dbg("llama_server", "%s", traceback.format_exc())
    server.clean_up(code)
    return code


class StopRequested(Exception):
    """The server was told to end while it started."""


class Server:
    """The parts of a running server and the order in which they start and end."""

    def __init__(self, own: dict[str, Any]) -> None:
        self.context = ServerContext()
        self.state = ServerState(self.context)
        self.http: HttpServer | None = None
        self._own = own
        drain_s: float = own["drain_seconds"]
        self.watch = SignalWatch(self.stop, self._before_exit, EXIT_S, drain_s + LIMIT_S)
        #: Until then running requests may end by themselves, once the server was told to end.
        self._drain_until = 0.0

    def prepare(self, params: binding.Params) -> None:
        """Everything up to the model: checks, backend, HTTP.

        Raises an exception whose text is the one line the user reads, or :class:`StopRequested`.
        """
        # the signals count from here on, so that a download or a load can be ended as well
        self.watch.start()
        self._resolve(params)
        check(params.to_dict())
        params.set(**adjustments(params.to_dict()))
        binding.backend_init(params)
        params.print_info(devices=True)

        fields = params.to_dict()
        if fields["cors_origins"] == "*" and not fields["api_keys"]:
            srv_wrn("llama_server", "security: no API key is set and CORS allows all origins")
        warn_of_absent(fields)
        check_ui_config(fields)
        config = HttpConfig.from_params(fields)
        config = replace(config, max_body_bytes=self._own["max_body_mib"] * 1024 * 1024)
        vertex = Vertex.from_env(os.environ)
        if vertex is not None:
            config = replace(config, vertex=vertex, port=vertex.port)
        self.state.config = config
        routes = api_routes(self.state)
        self.http = HttpServer(create_app(self.state, routes), config, short_requests(config.api_prefix, routes))
        self.http.bind()
        self._check_stop()
        # before the model, so that /health can say that it is loading
        self.http.start()

    def run(self, params: binding.Params) -> None:
        """Load the model and work until told to end. Raises as :meth:`prepare`."""
        assert self.http is not None
        context = self.context
        context.load_model(params, lambda progress: not self.watch.is_stopping, self._own)
        log_chat_settings(ChatSettings.from_params(context.params, context.chat_templates), context.params)
        check_model(self.context)
        self._check_stop()
        self.state.is_ready = True
        srv_inf("llama_server", "model loaded")
        for address in self.http.addresses:
            srv_inf("llama_server", "listening on %s", address)
            if has_page(self.state.config) and address.startswith("http"):
                srv_inf("llama_server", "the web page is at %s%s/", address, self.state.config.api_prefix)
        context.start_loop()

    def stop(self) -> None:
        """End, on a thread of its own: nothing new is taken, what runs may end by itself for a while, then it is told.

        Meanwhile the main thread leaves its loop and goes on with :meth:`clean_up`.
        """
        self._drain_until = time.monotonic() + self._own["drain_seconds"]
        self._refuse()
        self.context.drain(self._drain_until - time.monotonic())
        self.context.terminate()
        if self.http is not None:
            self.http.wait_until_quiet(self._answer_s())

    def clean_up(self, code: int) -> None:
        """End everything, in reverse order. May leave the process with ``code`` from here."""
        srv_inf("clean_up", "cleaning up before exit...")
        self._refuse()
        self.context.terminate()
        if self.http is not None and not self.http.shutdown(self._answer_s()):
            # a worker is still inside a native call: freeing what it uses would crash
            srv_wrn("clean_up", "HTTP workers are still at work, leaving")
            binding.log.flush()
            os._exit(code)
        self.state.streams.close()
        self.context.close()
        binding.backend_free()

    def _refuse(self) -> None:
        """No new requests from now on."""
        self.state.is_stopping = True
        if self.http is not None:
            self.http.stop_accepting()

    def _answer_s(self) -> float:
        """How long the last answers may take, now that the engine has ended."""
        return max(FLUSH_S, self._drain_until - time.monotonic())

    def _resolve(self, params: binding.Params) -> None:
        model = params.to_dict()["model"]
        if not (model["hf_repo"] or model["url"] or model["docker_repo"]):
            return
        try:
            if params.resolve_model():
                raise RuntimeError("the repository holds presets for several models, which needs the router")
        except binding.NativeError as exc:
            raise RuntimeError(f"failed to download model: {exc}") from exc

    def _check_stop(self) -> None:
        if self.watch.is_stopping:
            raise StopRequested

    def _before_exit(self) -> None:
        if self.http is not None:
            self.http.remove_files()
        binding.log.flush()
