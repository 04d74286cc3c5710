"""What a real server tells about its requests: metrics, log lines, names, limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess
from talk import EXACT, all_idle, complete, streamed, wait_for

KEY = "sk-do-not-tell-4711"
MARK = "zebra quagga okapi"


@pytest.fixture(scope="module")
def tiny(tiny_model_path: Path) -> Iterator[ServerProcess]:
    flags = ("-c", 8192, "-np", 2, "-t", 1, "--metrics", "--queue-max", 3, "--context-shift")
    with ServerProcess("-m", tiny_model_path, *flags, *EXACT) as server:
        yield server


def samples(server: ServerProcess) -> dict[str, float]:
    """Values by name, of histograms the count and sum only."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {
        sample.name.partition(":")[2]: sample.value
        for family in families
        for sample in family.samples
        if not sample.labels
    }


def test_histograms_tell_how_requests_fared(tiny: ServerProcess) -> None:
    before = samples(tiny)
    complete(tiny, prompt=[1] + [40] * 99, n_predict=8, ignore_eos=True)
    complete(tiny, prompt=[1] + [40] * 99, n_predict=8, ignore_eos=True, n_cmpl=2)
    streamed(tiny, prompt="x", n_predict=0, cache_prompt=False)
    tiny.post("/completion", {"prompt": []})
    after = samples(tiny)
    change = {name: after[name] - before[name] for name in after}
    # two first tokens: the second completion of the second request is none of its own, the third has no token
    assert change["time_to_first_token_seconds_count"] == 2
    assert change["time_between_tokens_seconds_count"] == 3 * 7
    assert change["request_duration_seconds_count"] == 3
    assert change["request_queue_seconds_count"] >= 3
    assert change["request_prompt_tokens_count"] == 3
    assert change["request_prompt_tokens_sum"] == pytest.approx(202, abs=3)
    # all but the last token of the second prompt came from the first
    assert change["request_cached_share_sum"] == pytest.approx(0.99, abs=0.02)
    assert change["time_to_first_token_seconds_sum"] <= change["request_duration_seconds_sum"]
    assert change["requests_refused_total"] == 0


def test_more_requests_than_the_queue_takes_are_refused_and_the_others_served(tiny: ServerProcess) -> None:
    assert all_idle(tiny)
    refused = samples(tiny)["requests_refused_total"]
    body = {"prompt": "x", "n_predict": 400, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: tiny.post("/completion", body), range(12)))
    served = [answer for answer in answers if answer.status == 200]
    others = [answer for answer in answers if answer.status != 200]
    # two slots and three places
    assert len(served) >= 5
    assert len(others) >= 1
    assert {answer.json()["tokens_predicted"] for answer in served} == {400}
    for answer in others:
        assert answer.status == 503
        assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert samples(tiny)["requests_refused_total"] - refused == len(others)
    wait_for(lambda: all_idle(tiny))
    complete(tiny, prompt="x")


def test_a_running_request_is_listed_and_ends_when_it_is_deleted(tiny: ServerProcess) -> None:
    # goes on until somebody ends it
    body = {"prompt": MARK, "n_predict": -1, "ignore_eos": True, "stream": True}
    with tiny.stream("/completion", body, headers={"X-Request-Id": "long-one"}) as stream:
        events = iter(stream)
        next(events)
        [entry] = tiny.get("/v1/requests").json()["data"]
        assert (entry["id"], entry["status"], len(entry["id_slots"])) == ("long-one", "running", 1)
        assert "zebra" not in json.dumps(entry)
        assert tiny.request("DELETE", "/v1/requests/long-one").status == 200
        rest = list(events)
    assert rest[-1]["error"]["message"] == "The request was cancelled"
    wait_for(lambda: all_idle(tiny))
    assert tiny.get("/v1/requests").json()["data"] == []


def test_a_generation_ends_when_its_time_is_up(tiny: ServerProcess) -> None:
    answer = tiny.post("/completion", {"prompt": "x", "n_predict": -1, "ignore_eos": True, "timeout_s": 0.3})
    assert (answer.status, answer.json()["error"]["type"]) == (408, "timeout_error")
    wait_for(lambda: all_idle(tiny))


def ask_everything(server: ServerProcess) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    chat = {"messages": [{"role": "user", "content": MARK}], "max_tokens": 4}
    for path, body in (
        ("/completion", {"prompt": MARK, "n_predict": 4}),
        ("/v1/completions", {"prompt": MARK, "max_tokens": 4, "stream": True}),
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"input": MARK, "max_output_tokens": 4}),
        ("/v1/messages", chat),
        ("/tokenize", {"content": MARK}),
        ("/apply-template", chat),
        ("/completion", {"prompt": MARK, "grammar": "root ::= ("}),
    ):
        assert server.post(path, body, headers).status in (200, 400), path
    assert server.get(f"/v1/models?key={KEY}", {"X-Api-Key": KEY}).status == 200
    assert server.post("/completion", {"prompt": MARK}, {"X-Api-Key": KEY + "x"}).status == 401


@pytest.mark.parametrize("level", [3, 4])
def test_the_log_has_neither_prompts_nor_keys(tiny_model_path: Path, level: int) -> None:
    flags = ("-m", tiny_model_path, "-c", 2048, "-np", 1, "-t", 1, "--api-key", KEY, "-lv", level)
    with ServerProcess(*flags) as server:
        ask_everything(server)
        # the line comes after the answer
        wait_for(lambda: "access: POST /completion 401" in server.log)
        log = server.log
    assert "access: POST /v1/chat/completions 200" in log
    assert KEY not in log
    for word in MARK.split():
        assert word not in log


def test_keys_are_not_logged_at_any_level(tiny_model_path: Path) -> None:
    flags = ("-m", tiny_model_path, "-c", 2048, "-np", 1, "-t", 1, "--api-key", KEY, "-v")
    with ServerProcess(*flags) as server:
        ask_everything(server)
        wait_for(lambda: "access: POST /completion 401" in server.log)
        assert KEY not in server.log


def test_the_log_of_json_lines_has_access_objects(tiny_model_path: Path) -> None:
    flags = ("-m", tiny_model_path, "-c", 2048, "-np", 1, "-t", 1, "--log-jsonl")
    with ServerProcess(*flags) as server:
        body = {"prompt": "x", "n_predict": 4, "ignore_eos": True}
        server.post("/completion", body, {"X-Request-Id": "order-66"})

        def found() -> list[dict[str, Any]]:
            lines = [line for line in server.log.splitlines() if line.startswith("{")]
            entries = [json.loads(line) for line in lines if line.endswith("}")]
            return [entry["data"] for entry in entries if entry["type"] == "access"]

        wait_for(lambda: any(entry["request_id"] == "order-66" for entry in found()))
        [entry] = [entry for entry in found() if entry["request_id"] == "order-66"]
    assert (entry["status"], entry["path"], entry["n_decoded"]) == (200, "/completion", 4)
    assert entry["n_prompt_tokens"] > 0
    assert re.fullmatch(r"127\.0\.0\.1:\d+", entry["caller"])
