"""Parameters after the checks of the start-up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_process import ROOT

from llamasrv import binding
from llamasrv.cli.startup import adjustments, is_router, warn_of_absent
from llamasrv.engine import log


def params(**changes: Any) -> dict[str, Any]:
    base = {
        "embedding": False,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_parallel": 1,
        "kv_unified": False,
        "kv_unified_per_slot": 0,
        "n_ctx": 0,
        "fit_params_min_ctx": 4096,
        "model_alias": ["name"],
        "model": {"path": "m.gguf", "hf_repo": "", "docker_repo": "", "name": "m.gguf"},
    }
    return {**base, **changes}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"embedding": True}, {"n_batch": 512}),
        ({"embedding": True, "n_batch": 256}, {}),
        ({"n_parallel": -1}, {"n_parallel": 4, "kv_unified": True}),
        ({"n_parallel": 3, "kv_unified_per_slot": 100}, {"n_ctx": 300}),
        (
            {"n_parallel": -1, "kv_unified_per_slot": 100},
            {"n_parallel": 4, "kv_unified": True, "n_ctx": 400},
        ),
        ({"kv_unified_per_slot": 100, "n_ctx": 512}, {}),
        # -c 0: the whole context of the model
        ({"kv_unified_per_slot": 100, "fit_params_min_ctx": -1}, {}),
        ({"kv_unified_per_slot": 100, "fit_params_min_ctx": 0xFFFFFFFF}, {}),
        ({"model_alias": []}, {"model_alias": ["m.gguf"]}),
    ],
)
def test_adjustments(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert adjustments(params(**changes)) == expected


def test_without_any_model_it_would_be_the_router() -> None:
    empty = {"path": "", "hf_repo": "", "docker_repo": "", "name": ""}
    assert is_router(params(model=empty))
    for key in ("path", "hf_repo", "docker_repo"):
        assert not is_router(params(model={**empty, key: "x"}))


@pytest.mark.parametrize(
    ("args", "flags"),
    [
        ([], []),
        (["--tools", "all"], ["--tools"]),
        (["--ui-mcp-proxy"], ["--ui-mcp-proxy"]),
        (["--mcp-servers-json", "{}"], ["--mcp-servers-config, --mcp-servers-json"]),
        (["--agent"], ["--tools", "--ui-mcp-proxy"]),
        (["--mmproj", "x.gguf"], ["--mmproj"]),
    ],
)
def test_flags_without_a_feature_are_named(args: list[str], flags: list[str]) -> None:
    lines: list[str] = []
    log.set_sink(lambda level, text: lines.append(text), log.WARN)
    try:
        with binding.Params.parse(["x", "-m", "m.gguf", *args]) as parsed:
            warn_of_absent(parsed.to_dict())
    finally:
        log.set_sink(lambda level, text: None, 0)
    assert [line.partition("llama_server: ")[2].partition(": not available")[0] for line in lines] == flags


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: Path) -> Path:
    """A folder of files with which no server can start."""
    folder = tmp_path_factory.mktemp("broken")
    good = tiny_model_path.read_bytes()
    key = b"general.architecture"
    # after the key its type and the length of the value
    value = good.index(key) + len(key) + 4 + 8
    assert good[value : value + 5] == b"llama"
    (folder / "other.gguf").write_bytes(good[:value] + b"zzama" + good[value + 5 :])
    (folder / "short.gguf").write_bytes(good[: len(good) * 3 // 4])
    (folder / "head.gguf").write_bytes(good[:1000])
    (folder / "text.gguf").write_text("this is no model")
    (folder / "empty.gguf").touch()
    (folder / "folder.gguf").mkdir()
    (folder / "bad.pem").write_text("no key")
    (folder / "bad.jinja").write_text("{% for %}")
    (folder / "bad.gbnf").write_text('root ::= "a')
    return folder


def start(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the server until it ends by itself."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("LLAMA_", "LLAMASRV_"))}
    return subprocess.run(
        [sys.executable, "-m", "llamasrv", "--port", "0", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**clean, "PYTHONPATH": str(ROOT)},
        check=False,
    )


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["-m", "missing.gguf"], "failed to load model 'missing.gguf': No such file or directory"),
        (["-m", "{}/folder.gguf"], "failed to load model '{}/folder.gguf': Is a directory"),
        (["-m", "{}/empty.gguf"], "failed to load model '{}/empty.gguf': it is no GGUF file"),
        (["-m", "{}/text.gguf"], "failed to load model '{}/text.gguf': it is no GGUF file"),
        (["-m", "{}/head.gguf"], "failed to load model '{}/head.gguf': .*failed to read"),
        (["-m", "{}/short.gguf"], "failed to load model '{}/short.gguf': .*corrupted or incomplete"),
        (["-m", "{}/other.gguf"], "failed to load model '{}/other.gguf': .*unknown model architecture: 'zzama'"),
        (["--lora", "missing.gguf"], "failed to load lora adapter 'missing.gguf': No such file or directory"),
        (["--lora", "{}/other.gguf"], "failed to load lora adapter '{}/other.gguf': .+"),
        (["--mmproj", "missing.gguf"], "failed to load mmproj 'missing.gguf': No such file or directory"),
        (["--control-vector", "missing.gguf"], "failed to load control vector 'missing.gguf': No such file"),
        (["-md", "missing.gguf"], "failed to load draft model 'missing.gguf': No such file or directory"),
        (["-md", "{}/text.gguf"], "failed to load draft model '{}/text.gguf': it is no GGUF file"),
        (
            ["--host", "no-such-host.invalid"],
            "couldn't bind .*, hostname: no-such-host.invalid, .+: .+",
        ),
        (["--host", "/no/such/folder/a.sock"], "couldn't bind .*: No such file or directory"),
        (["--port", "99999"], "couldn't bind .*: the port must be between 0 and 65535"),
        (["--ssl-key-file", "missing", "--ssl-cert-file", "missing"], "cannot read 'missing': No such file"),
        (["--ssl-key-file", "{}/bad.pem", "--ssl-cert-file", "{}/bad.pem"], "cannot use key '{}/bad.pem' with .+"),
        (["--path", "/no/such/folder"], "static assets path not found: /no/such/folder"),
        (["--grammar-file", "{}/bad.gbnf"], "failed to parse grammar"),
        (["-c", "-5"], "--ctx-size must not be negative: -5"),
        (["-b", "0"], "--batch-size must be at least 1"),
        (["-np", "100000"], "'n_parallel' must be between 1 and 256"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_start_that_fails_says_why_in_one_line(
    args: list[str], reason: str, broken: Path, tiny_model_path: Path
) -> None:
    model = [] if "-m" in args else ["-m", str(tiny_model_path)]
    done = start(*model, *(arg.format(broken) for arg in args))
    assert done.returncode == 1
    own = [line.partition(": ")[2] for line in done.stderr.splitlines() if " E srv  llama_server: " in line]
    assert len(own) == 1, done.stderr
    assert re.match(reason.format(re.escape(str(broken))), own[0])
    assert done.stderr.splitlines()[-1].endswith(own[0]) or "cleaning up" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--slot-save-path", "/no/such/folder"], 'argument "--slot-save-path": not a directory: /no/such/folder'),
        (["--api-key-file", "missing"], "argument \"--api-key-file\": error: failed to open file 'missing'"),
        (
            ["--chat-template-file", "missing"],
            "argument \"--chat-template-file\": error: failed to open file 'missing'",
        ),
        (
            ["--jinja", "--chat-template-file", "{}/bad.jinja"],
            "chat template is not supported: {% for",
        ),
        (["--grammar-file", "missing"], "argument \"--grammar-file\": error: failed to open file 'missing'"),
        (["-j", '{"type": "nonsense"}'], "unrecognized type nonsense"),
        (["-np", "0"], "invalid value for n_parallel"),
        (["-ctk", "q7"], "Unsupported cache type: q7"),
        (["--drain-seconds", "-1"], "error: invalid value '-1' for --drain-seconds: must be between 0 and 1000000"),
        (["--drain-seconds", "soon"], "error: invalid value 'soon' for --drain-seconds: expected a number of seconds"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_value_is_named_with_its_flag(args: list[str], reason: str, broken: Path, tiny_model_path: Path) -> None:
    done = start("-m", str(tiny_model_path), *(arg.replace("{}", str(broken)) for arg in args))
    assert done.returncode == 1
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_a_context_beyond_the_memory_is_one_line(tiny_model_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from llamasrv.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    flags = ("-m", str(tiny_model_path), "-c", "20000000", "-np", "1", "-fit", "off", "--port", "0")
    done = subprocess.run(
        [sys.executable, "-c", code, *flags],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 1, done.stderr[-2000:]
    own = [line for line in done.stderr.splitlines() if " E srv  llama_server: " in line]
    assert len(own) == 1
    assert re.search(r"failed to create context with model '.*': .*(insufficient memory|failed to allocate)", own[0])
