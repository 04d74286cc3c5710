"""Parameters as they are after the checks of the start-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from llamasrv.engine.log import srv_inf, srv_trc, srv_wrn

#: What every model file begins with.
GGUF_MAGIC = b"GGUF"
#: Slots when nobody says how many.
AUTO_SLOTS = 4
#: How the parser marks ``-c 0``, the whole context of the model.
WHOLE_CONTEXT = 0xFFFFFFFF


def is_router(params: Mapping[str, Any]) -> bool:
    """Whether no model is named, so that the server would manage many."""
    model = params["model"]
    return not (model["path"] or model["hf_repo"] or model["docker_repo"])


def check_ui_config(params: Mapping[str, Any]) -> None:
    """Raise ValueError if --ui-config is no JSON; the page would get an error instead of the server's properties."""
    try:
        orjson.loads(params["ui_config_json"] or "{}")
    except orjson.JSONDecodeError as exc:
        raise ValueError(f"failed to parse UI config: {exc}") from None


class StartError(ValueError):
    """The server cannot start with these parameters; the text says why."""


def check(params: Mapping[str, Any]) -> None:
    """Raise :class:`StartError` for what would end in the native side's many lines, in an abort, or unnoticed."""
    if params["n_ctx"] < 0:
        raise StartError(f"--ctx-size must not be negative: {params['n_ctx']}")
    if params["n_batch"] == 0:
        raise StartError("--batch-size must be at least 1")
    _check_file("model", params["model"]["path"])
    for kind, model in (("mmproj", params["mmproj"]), ("draft model", params["speculative"]["draft"]["model"])):
        # what is fetched has no path yet
        if not (model["hf_repo"] or model["url"] or model["docker_repo"]):
            _check_file(kind, model["path"])
    for adapter in params["lora_adapters"]:
        _check_file("lora adapter", adapter["path"])
    for vector in params["control_vectors"]:
        _check_file("control vector", vector["fname"])


def warn_of_absent(params: Mapping[str, Any]) -> None:
    """Log a warning for each flag whose feature this server does not have; what asks for it is refused."""
    for names, flags, effect in (
        (("server_tools",), "--tools", "/tools answers 403"),
        (("ui_mcp_proxy",), "--ui-mcp-proxy", "/cors-proxy answers 403"),
        (
            ("mcp_servers_config", "mcp_servers_json"),
            "--mcp-servers-config, --mcp-servers-json",
            "no MCP server is used",
        ),
    ):
        if any(params[name] for name in names):
            srv_wrn("llama_server", "%s: not available in this server, %s", flags, effect)
    if params["mmproj"]["path"]:
        srv_wrn("llama_server", "--mmproj: not available in this server, requests with images or audio are refused")


def _check_file(kind: str, path: str) -> None:
    if not path:
        return
    try:
        with open(path, "rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as exc:
        raise StartError(f"failed to load {kind} '{path}': {exc.strerror}") from exc
    if magic != GGUF_MAGIC:
        raise StartError(f"failed to load {kind} '{path}': it is no GGUF file")


def adjustments(params: Mapping[str, Any]) -> dict[str, Any]:
    """Fields to change before anything is set up. ``params``: ``Params.to_dict()``."""
    changed: dict[str, Any] = {}
    # all tokens of an embedding have to be in one physical batch
    if params["embedding"] and params["n_batch"] > params["n_ubatch"]:
        n_ubatch = params["n_ubatch"]
        srv_wrn("llama_server", "embeddings enabled with n_batch (%d) > n_ubatch (%d)", params["n_batch"], n_ubatch)
        srv_wrn("llama_server", "setting n_batch = n_ubatch = %d to avoid assertion failure", n_ubatch)
        changed["n_batch"] = n_ubatch

    n_parallel = params["n_parallel"]
    if n_parallel < 0:
        n_parallel = AUTO_SLOTS
        srv_trc("llama_server", "n_parallel is set to auto, using n_parallel = %d and kv_unified = true", n_parallel)
        changed.update(n_parallel=n_parallel, kv_unified=True)

    per_slot = params["kv_unified_per_slot"]
    is_whole = params["fit_params_min_ctx"] & 0xFFFFFFFF == WHOLE_CONTEXT
    if per_slot > 0 and params["n_ctx"] == 0 and not is_whole:
        changed["n_ctx"] = n_parallel * per_slot
        srv_inf(
            "llama_server",
            "--kv-unified-per-slot: sizing KV pool to n_parallel * kv_unified_per_slot = %d * %d = %d",
            n_parallel,
            per_slot,
            changed["n_ctx"],
        )

    if not params["model_alias"] and params["model"]["name"]:
        changed["model_alias"] = [params["model"]["name"]]
    return changed
