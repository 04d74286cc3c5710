"""What the server says about itself: properties, models, slots, metrics."""

from __future__ import annotations

import subprocess
import sys

import pytest
from api_fakes import BOS, api_context, server_meta, server_params
from prometheus_client.parser import text_string_to_metric_families

from llamasrv.api.ids import media_marker
from llamasrv.api.metrics import metrics_text, start_time
from llamasrv.api.models import models_json
from llamasrv.api.props import props_json
from llamasrv.api.slots import slots_json
from llamasrv.engine.metrics import Bucket, ServerMetrics
from llamasrv.engine.result import MetricsResult, SlotSnapshot, SlotsResult
from llamasrv.engine.task import TaskParams

SHORT = {
    *("seed", "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma"),
    *("xtc_probability", "xtc_threshold", "typical_p", "repeat_last_n", "repeat_penalty", "presence_penalty"),
    *("frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "mirostat"),
    *("mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay", "max_tokens", "n_predict", "n_keep"),
    *("n_discard", "ignore_eos", "stream", "n_probs", "min_keep", "chat_format", "reasoning_format"),
    *("reasoning_in_content", "generation_prompt", "samplers", "speculative.types", "timings_per_token"),
    *("post_sampling_probs", "backend_sampling", "lora"),
}
FULL = SHORT | {
    *("dry_sequence_breakers", "stop", "logit_bias", "grammar", "grammar_lazy", "grammar_triggers"),
    "preserved_tokens",
}


def test_props() -> None:
    value = props_json(server_meta(), server_params(ui_config_json='{"theme": "dark"}', n_predict=5), False)
    settings = value.pop("default_generation_settings")
    assert settings["n_ctx"] == 512
    assert settings["params"].keys() == SHORT
    assert (settings["params"]["top_k"], settings["params"]["n_predict"]) == (40, -1)
    assert value == {
        "total_slots": 4,
        "model_alias": "tiny",
        "model_ftype": "F32",
        "model_path": "/models/tiny.gguf",
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": media_marker(),
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "ui": False,
        "ui_settings": {"theme": "dark"},
        "chat_template": "{{ messages }}",
        "chat_template_caps": {"supports_tools": False},
        "bos_token": "<s>",
        "eos_token": "</s>",
        "build_info": "b1-test",
        "is_sleeping": False,
        "cors_proxy_enabled": False,
    }


def test_props_show_the_tool_template_where_there_is_one() -> None:
    meta = server_meta(chat_template_tool_use="{{ tools }}")
    assert props_json(meta, server_params(), True)["chat_template_tool_use"] == "{{ tools }}"
    assert "chat_template_tool_use" not in props_json(meta, server_params(use_jinja=False), True)


def test_the_media_marker_stays_for_a_process_and_can_be_pinned() -> None:
    assert media_marker() == media_marker()
    program = "from llamasrv.api.ids import media_marker; print(media_marker())"

    def marker(env: dict[str, str]) -> str:
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True
        ).stdout

    assert marker({"LLAMA_MEDIA_MARKER": "<__m__>"}) == "<__m__>\n"
    assert marker({}) != marker({"LLAMA_MEDIA_MARKER": ""})


def test_models() -> None:
    value = models_json(server_meta(model_aliases=("tiny", "other"), model_tags=("small",)))
    (entry,) = value["data"]
    assert entry.pop("created") > 0
    assert entry == {
        "id": "tiny",
        "aliases": ["tiny", "other"],
        "tags": ["small"],
        "object": "model",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "owned_by": "llamacpp",
        "meta": {
            "vocab_type": 1,
            "n_vocab": 266,
            "n_ctx": 512,
            "n_ctx_train": 2048,
            "n_embd": 64,
            "n_params": 1000,
            "size": 4000,
            "ftype": "F32",
        },
    }
    assert value["object"] == "list"
    assert value["models"][0]["capabilities"] == ["completion"]


def test_models_with_other_inputs_are_multimodal() -> None:
    value = models_json(server_meta(), ("text", "image"))
    assert value["models"][0]["capabilities"] == ["completion", "multimodal"]


def test_a_slot_before_its_first_task() -> None:
    result = SlotsResult(id=1, slots=[SlotSnapshot(id=2, n_ctx=512, is_processing=False)])
    assert slots_json(api_context(), result) == [{"id": 2, "n_ctx": 512, "speculative": False, "is_processing": False}]


def test_a_slot_at_work() -> None:
    slot = SlotSnapshot(
        id=0,
        n_ctx=512,
        is_processing=True,
        id_task=7,
        params=TaskParams(),
        n_prompt_tokens=10,
        n_prompt_tokens_processed=6,
        n_prompt_tokens_cache=4,
        has_new_line=True,
        n_remain=3,
        n_decoded=2,
    )
    (value,) = slots_json(api_context(), SlotsResult(id=1, slots=[slot]))
    assert value.pop("params").keys() == SHORT
    assert value == {
        "id": 0,
        "n_ctx": 512,
        "speculative": False,
        "is_processing": True,
        "id_task": 7,
        "n_prompt_tokens": 10,
        "n_prompt_tokens_processed": 6,
        "n_prompt_tokens_cache": 4,
        "next_token": [{"has_next_token": True, "has_new_line": True, "n_remain": 3, "n_decoded": 2}],
    }


def test_a_slot_with_debugging_shows_text_and_all_settings() -> None:
    slot = SlotSnapshot(id=0, n_ctx=512, is_processing=True, params=TaskParams(), prompt=[BOS, 97], generated=b"b\xff")
    (value,) = slots_json(api_context(), SlotsResult(id=1, slots=[slot]))
    assert value["params"].keys() == FULL
    assert (value["prompt"], value["generated"]) == ("<s>a", "b\ufffd")


COUNTERS = (
    *("prompt_tokens_total", "prompt_tokens_cached_total", "prompt_seconds_total", "tokens_predicted_total"),
    *("tokens_predicted_seconds_total", "n_decode_total", "n_tokens_max", "spec_decode_num_draft_tokens_total"),
    *("spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total"),
)
GAUGES = (
    *("prompt_tokens_seconds", "predicted_tokens_seconds", "requests_processing", "requests_deferred"),
    "n_busy_slots_per_decode",
)


def read_metrics(text: str) -> dict[str, float]:
    """Values by name as they stand in the text."""
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


#: Those that llama-server does not have.
OWN_HISTOGRAMS = (
    *("request_queue_seconds", "time_to_first_token_seconds", "time_between_tokens_seconds"),
    *("request_duration_seconds", "request_prompt_tokens", "request_cached_share"),
)


def test_metrics_of_a_fresh_server_are_zero_and_well_formed() -> None:
    text = metrics_text(MetricsResult(id=1)).decode()
    values = read_metrics(text)
    assert set(values.values()) == {0.0}
    assert {f"llamacpp:{name}" for name in COUNTERS + GAUGES} <= values.keys()
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {f"llamasrv:{name}" for name in OWN_HISTOGRAMS} < names


def test_histograms_count_up_to_each_bound_and_all() -> None:
    metrics = ServerMetrics()
    for value in (0.001, 0.002, 0.3, 1000.0):
        metrics.requests.first_token.observe(value)
    for share in (0.0, 0.5, 1.0):
        metrics.requests.cached.observe(share)
    text = metrics_text(MetricsResult(id=1, metrics=metrics)).decode()
    values = read_metrics(text)
    name = "llamasrv:time_to_first_token_seconds"
    assert values[f'{name}_bucket{{le="0.001"}}'] == 1
    assert values[f'{name}_bucket{{le="0.0025"}}'] == 2
    assert values[f'{name}_bucket{{le="0.5"}}'] == 3
    assert values[f'{name}_bucket{{le="300.0"}}'] == 3
    assert values[f'{name}_bucket{{le="+Inf"}}'] == values[f"{name}_count"] == 4
    assert values[f"{name}_sum"] == pytest.approx(1000.303)
    shares = "llamasrv:request_cached_share_bucket"
    assert [values[f'{shares}{{le="{bound}"}}'] for bound in ("0.0", "0.5", "0.95", "1.0", "+Inf")] == [1, 2, 2, 3, 3]
    for family in text_string_to_metric_families(text):
        if family.type == "histogram":
            buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
            assert buckets == sorted(buckets), family.name


def test_metrics_have_the_types_and_names_that_dashboards_know() -> None:
    text = metrics_text(MetricsResult(id=1)).decode()
    types = [line for line in text.splitlines() if line.startswith("# TYPE ")]
    own = [
        *(f"# TYPE llamasrv:{name} histogram" for name in OWN_HISTOGRAMS),
        "# TYPE llamasrv:requests_refused_total counter",
    ]
    theirs = [f"# TYPE llamacpp:{name} counter" for name in COUNTERS] + [
        f"# TYPE llamacpp:{name} gauge" for name in GAUGES
    ]
    assert types == theirs + own
    helped = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP ")]
    own_names = [f"llamasrv:{name}" for name in (*OWN_HISTOGRAMS, "requests_refused_total")]
    assert helped == [f"llamacpp:{name}" for name in (*COUNTERS, *GAUGES)] + own_names
    assert "_created" not in text


def test_metrics_carry_the_counters() -> None:
    metrics = ServerMetrics(
        t_start=1_700_000_000.9,
        prompt=Bucket(12_345_678, 12_345_678, 2_500_000),
        predict=Bucket(30, 20, 4_000_000),
        prompt_bucket=Bucket(100, 100, 500_000),
        predict_bucket=Bucket(30, 20, 4_000_000),
        n_prompt_cached=7,
        n_tokens_max=99,
        n_decode=4,
        n_busy_slots=6,
        n_accepted_per_pos=[3, 1],
    )
    result = MetricsResult(id=1, metrics=metrics, n_processing_slots=2, n_tasks_deferred=5)
    text = metrics_text(result).decode()
    values = read_metrics(text)
    assert values["llamacpp:prompt_tokens_total"] == 12_345_678
    assert values["llamacpp:prompt_seconds_total"] == 2.5
    assert values["llamacpp:tokens_predicted_total"] == 30
    assert values["llamacpp:n_tokens_max"] == 99
    assert values["llamacpp:prompt_tokens_seconds"] == pytest.approx(200)
    assert values["llamacpp:predicted_tokens_seconds"] == pytest.approx(5)
    assert values["llamacpp:requests_deferred"] == 5
    assert values["llamacpp:n_busy_slots_per_decode"] == 1.5
    assert values['llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"}'] == 1
    assert start_time(result) == "1700000000"
