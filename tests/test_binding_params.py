"""Command line, parameters and the log sink of the binding."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamasrv.binding import ClosedError, NativeError, Params, build_info, build_number, log

ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own: the parser exits by itself, and the log's file and format are process-wide."""
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def parsed(*args: str) -> dict[str, Any]:
    with Params.parse(["llamasrv", *args]) as params:
        return params.to_dict()


def test_defaults_are_those_of_llama_server_except_the_port() -> None:
    fields = parsed()
    assert fields["port"] == 8080
    assert fields["hostnames"] == ["127.0.0.1"]
    assert fields["n_parallel"] == -1
    assert fields["n_batch"] == 2048
    assert fields["cont_batching"] is True
    assert fields["sampling"]["top_k"] == 40
    assert fields["speculative"]["types"] == ["none"]
    assert fields["pooling_type"] == "unspecified"
    assert fields["reasoning_format"] == "deepseek"


def test_flags_and_aliases_reach_the_fields() -> None:
    fields = parsed("-m", "a.gguf", "-c", "512", "-np", "3", "--host", "0.0.0.0", "--temp", "0.7", "--pooling", "mean")
    assert fields["model"]["path"] == "a.gguf"
    assert fields["model"]["name"] == "a.gguf"
    assert (fields["n_ctx"], fields["n_parallel"], fields["hostnames"]) == (512, 3, ["0.0.0.0"])
    assert fields["pooling_type"] == "mean"


def test_floats_are_exactly_the_native_ones() -> None:
    assert parsed("--temp", "0.7")["sampling"]["temp"] == 0.699999988079071


def test_environment_variables_are_read_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "256")
    assert parsed()["n_ctx"] == 256
    assert parsed("-c", "512")["n_ctx"] == 512


def test_infinite_bias_is_a_word() -> None:
    bias = parsed("--logit-bias", "5-inf")["sampling"]["logit_bias"]
    assert bias == [[5, "-inf"]]


@pytest.mark.parametrize("args", [["--no-such-flag"], ["-c"], ["-c", "many"]])
def test_bad_input_is_a_native_error(args: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NativeError):
        parsed(*args)
    assert args[0] in capfd.readouterr().err


def test_nul_in_an_argument_is_refused_before_c() -> None:
    with pytest.raises(ValueError, match="NUL"):
        parsed("-m", "a\0b")


def test_set_changes_fields_of_every_kind() -> None:
    with Params.parse(["llamasrv"]) as params:
        params.set(n_batch=64, kv_unified=True, slot_prompt_similarity=0.25, model_alias=["b", "a"], chat_template="x")
        fields = params.to_dict()
    assert (fields["n_batch"], fields["kv_unified"], fields["slot_prompt_similarity"]) == (64, True, 0.25)
    assert (fields["model_alias"], fields["chat_template"]) == (["a", "b"], "x")


@pytest.mark.parametrize(
    "wrong",
    [
        {"no_such_field": 1},
        {"n_ubatch": "big"},
        {"n_ubatch": 1.5},
        {"n_ubatch": 2**31},
        {"kv_unified": 1},
        {"numa": "x"},
    ],
)
def test_set_is_all_or_nothing(wrong: dict[str, Any]) -> None:
    with Params.parse(["llamasrv"]) as params:
        before = params.to_dict()
        with pytest.raises(NativeError, match=next(iter(wrong))):
            params.set(n_batch=64, **wrong)
        assert params.to_dict() == before


def test_output_limits_follow_slots_and_batch() -> None:
    with Params.parse(["llamasrv", "-np", "4"]) as params:
        assert params.to_dict()["speculative"]["output_limits"] == {"total": 4, "per_seq": 1}
        params.set(n_batch=2)
        assert params.to_dict()["speculative"]["output_limits"] == {"total": 2, "per_seq": 1}


def test_a_local_model_needs_no_resolving() -> None:
    with Params.parse(["llamasrv", "-m", "a.gguf", "--offline"]) as params:
        assert params.resolve_model() is False
        assert params.to_dict()["model"]["path"] == "a.gguf"


def test_closed_parameters_say_so() -> None:
    params = Params.parse(["llamasrv"])
    params.close()
    params.close()
    with pytest.raises(ClosedError, match="params is closed"):
        params.to_dict()
    with pytest.raises(ClosedError):
        params.set(n_batch=1)


def test_build_is_named() -> None:
    assert build_info().startswith(f"b{build_number()}-")


def test_help_shows_our_port_and_our_own_text() -> None:
    done = run_python("from llamasrv.binding import Params; Params.parse(['x', '--help'], 'more to say\\n')")
    assert done.returncode == 0
    assert "(default: 8080)" in done.stdout
    assert done.stdout.endswith("more to say\n")


def test_version_ends_the_process_with_success() -> None:
    done = run_python("from llamasrv.binding import Params; Params.parse(['x', '--version']); print('still here')")
    assert done.returncode == 0
    assert "still here" not in done.stdout
    assert str(build_number()) in done.stdout + done.stderr


LOG_LINES = """
import sys
from llamasrv.binding import Params, log
Params.parse(["x", *sys.argv[1:]])
for level in range(6):
    log.log(level, f"line {level} 100%s\\n")
log.log(log.ERROR, "no newline, NUL \\0, lone surrogate \\ud800")
log.flush()
print("verbosity", log.verbosity())
"""


def test_log_lines_go_to_the_native_file_up_to_the_verbosity(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    done = run_python(LOG_LINES, "--log-file", str(path), "-lv", "3")
    assert done.returncode == 0
    assert done.stdout == "line 0 100%s\nverbosity 3\n"
    lines = path.read_text().splitlines()
    assert [line.split(" ", 1)[-1] for line in lines] == [
        "0 100%s",
        "E line 1 100%s",
        "W line 2 100%s",
        "I line 3 100%s",
        "E no newline, NUL \\0, lone surrogate \\ud800",
    ]
    assert all(line.split(" ")[0].count(".") == 3 for line in lines[1:]), "every line has its time"
    assert done.stderr.splitlines() == lines[1:]


def test_debug_lines_appear_at_the_highest_verbosity() -> None:
    done = run_python(LOG_LINES, "-lv", "5")
    assert [level for level in range(6) if f"line {level}" in done.stdout + done.stderr] == [0, 1, 2, 3, 4, 5]


def test_log_as_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    done = run_python(LOG_LINES, "--log-file", str(path), "--log-jsonl", "-lv", "3")
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(entry["type"], entry["level"]) for entry in entries] == [
        ("log", "none"),
        ("log", "error"),
        ("log", "warn"),
        ("log", "info"),
        ("log", "error"),
    ]
    assert entries[1]["msg"] == "line 1 100%s\n"
    assert len(done.stdout.splitlines()) == len(entries) + 1


def test_log_colors_are_the_native_ones() -> None:
    done = run_python(LOG_LINES, "--log-colors", "on", "-lv", "1")
    assert "\x1b[31mE line 1 100%s\x1b[0m" in done.stderr


def test_native_and_python_lines_are_one_stream_in_order(tmp_path: Path, tiny_model_path: Path) -> None:
    path = tmp_path / "log.txt"
    code = """
import sys
from llamasrv.binding import Model, Params, backend_init, log
params = Params.parse(["x", "-m", sys.argv[1], "--log-file", sys.argv[2], "-lv", "5", "-c", "64", "-np", "1"])
backend_init(params)
log.log(log.INFO, "before loading")
with Model.load(params):
    log.log(log.INFO, "after loading")
log.flush()
"""
    done = run_python(code, str(tiny_model_path), str(path))
    assert done.returncode == 0, done.stderr
    text = path.read_text()
    before, _, rest = text.partition("before loading\n")
    between, _, _ = rest.partition("after loading\n")
    assert "print_info" not in before
    assert "print_info" in between


def test_verbosity_can_be_changed() -> None:
    before = log.verbosity()
    try:
        log.set_verbosity(1)
        assert log.verbosity() == 1
    finally:
        log.set_verbosity(before)
