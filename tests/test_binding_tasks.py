"""What special tasks need of the binding: adapters, control vectors, decisions, backend sampling, ways of loading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import spec_models

from llamasrv.binding import (
    ORDER_OPTION,
    ORDER_QUESTION_CHOICE,
    ORDER_QUESTION_NOUL,
    ORDER_QUESTION_SCORE,
    Batch,
    ClosedError,
    Model,
    NativeError,
    Params,
    Sampler,
    Template,
    backend_init,
    sample_many,
    set_sampler,
    token_probs,
)

TEXT = "Once upon a time there was a little cat and"
GREEDY = {"temp": 0.0}


def make_params(path: Path, *args: str) -> Params:
    params = Params.parse(
        ["llamasrv", "-m", str(path), "-c", "1024", "-np", "2", "-t", "1", "--no-warmup", "-lv", "0", *args]
    )
    backend_init(params)
    return params


def load(path: Path, *args: str) -> Model:
    return Model.load(make_params(path, *args))


def evaluate(model: Model, tokens: Sequence[int], output: bool = False) -> Batch:
    """Decode tokens into an empty sequence 0, with an output at the last one at least."""
    model.context.memory.seq_rm(0)
    batch = Batch(len(tokens) + 1)
    batch.extend(tokens, 0, 0, output)
    batch.set_output(len(tokens) - 1, True)
    assert model.context.decode(batch, 0, len(tokens), sync=True, serial=1) == 0
    return batch


def generate(model: Model, sampler: Sampler, n: int = 16) -> list[int]:
    tokens = model.vocab.tokenize(TEXT, True, True)
    evaluate(model, tokens)
    index, out = len(tokens) - 1, []
    for i in range(n):
        (token,) = sample_many(model, [sampler], [index])
        assert isinstance(token, int), token
        out.append(token)
        batch = Batch(1)
        batch.add(token, len(tokens) + i, 0, True)
        assert model.context.decode(batch, 0, 1, sync=True, serial=1) == 0
        index = 0
    return out


def greedy(model: Model) -> list[int]:
    with Sampler(model, model._params, GREEDY) as sampler:
        return generate(model, sampler)


# adapters


@pytest.fixture(scope="module")
def base_text(tiny_models: dict[str, Path]) -> list[int]:
    with load(tiny_models["tiny-llama"]) as model:
        return greedy(model)


def test_an_adapter_is_applied_at_load(tiny_models: dict[str, Path], base_text: list[int]) -> None:
    with load(tiny_models["tiny-llama"], "--lora", str(tiny_models["tiny-lora-a"])) as model:
        (info,) = model.lora_info()
        assert info["path"] == str(tiny_models["tiny-lora-a"])
        assert info["scale"] == 1.0
        assert info["alora_invocation_tokens"] == []
        assert greedy(model) != base_text
        model.set_lora([])
        assert greedy(model) == base_text


def test_load_without_apply_leaves_adapters_off(tiny_models: dict[str, Path], base_text: list[int]) -> None:
    args = ["--lora", str(tiny_models["tiny-lora-a"]), "--lora-init-without-apply"]
    with load(tiny_models["tiny-llama"], *args) as model:
        assert [info["scale"] for info in model.lora_info()] == [0.0]
        assert greedy(model) == base_text
        model.set_lora([(0, 1.0)])
        assert greedy(model) != base_text


def test_adapters_left_out_or_scaled_to_zero_are_off(tiny_models: dict[str, Path], base_text: list[int]) -> None:
    scaled = f"{tiny_models['tiny-lora-a']}:0.5"
    with load(tiny_models["tiny-llama"], "--lora-scaled", scaled, "--lora", str(tiny_models["tiny-lora-b"])) as model:
        assert sorted(info["scale"] for info in model.lora_info()) == [0.5, 1.0]
        texts = []
        for adapters in ([(0, 1.0)], [(1, 1.0)], [(0, 1.0), (1, 1.0)], [(0, 0.5), (1, 0.0)]):
            model.set_lora(adapters)
            texts.append(greedy(model))
        assert len({tuple(text) for text in [*texts, base_text]}) == 5
        model.set_lora([(0, 0.0), (1, 0.0)])
        assert greedy(model) == base_text
        with pytest.raises(NativeError, match="no lora adapter"):
            model.set_lora([(2, 1.0)])


def test_an_adapter_tells_its_task_prefix_and_invocation(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    texts = {"adapter.lora.task_name": "summarise — kurz", "adapter.lora.prompt_prefix": "Summary:"}
    named = spec_models.make_adapter(tmp_path / "named.gguf", 109, texts)
    args = [arg for path in (named, tiny_models["tiny-alora"]) for arg in ("--lora", str(path))]
    with load(tiny_models["tiny-llama"], *args) as model:
        first, second = sorted(model.lora_info(), key=lambda info: str(info["task_name"]), reverse=True)
        assert (first["task_name"], first["prompt_prefix"]) == ("summarise — kurz", "Summary:")
        assert (second["task_name"], second["prompt_prefix"]) == ("", "")
        tokens = second["alora_invocation_tokens"]
        assert model.vocab.detokenize(tokens) == b" Once Tom"


def test_an_adapter_of_another_model_stops_the_load(tiny_models: dict[str, Path]) -> None:
    with pytest.raises(NativeError, match="lora adapter"):
        load(tiny_models["tiny-swa"], "--lora", str(tiny_models["tiny-lora-a"]))


# control vectors


def test_a_control_vector_changes_the_text(tiny_models: dict[str, Path], tmp_path: Path, base_text: list[int]) -> None:
    vector = spec_models.make_control_vector(tmp_path / "vector.gguf", 64)
    texts = []
    for args in (["--control-vector", f"{vector}"], ["--control-vector-scaled", f"{vector}:-1"]):
        with load(tiny_models["tiny-llama"], *args) as model:
            texts.append(greedy(model))
    assert len({tuple(text) for text in [*texts, base_text]}) == 3


@pytest.mark.parametrize(
    ("n_embd", "name", "reason"),
    [(32, "direction.1", "32 elements, the model has 64"), (64, "something.1", "control vectors")],
)
def test_a_control_vector_that_does_not_fit_stops_the_load(
    n_embd: int, name: str, reason: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    vector = spec_models.make_control_vector(tmp_path / "vector.gguf", n_embd, name)
    with pytest.raises(NativeError, match=reason):
        load(tiny_models["tiny-llama"], "--control-vector", str(vector))
    with pytest.raises(NativeError, match=r"none\.gguf"):
        load(tiny_models["tiny-llama"], "--control-vector", str(tmp_path / "none.gguf"))


# decisions


def test_logits_of_labels_are_those_of_the_whole_row(tiny_models: dict[str, Path]) -> None:
    with load(tiny_models["tiny-llama"]) as model:
        tokens = model.vocab.tokenize(TEXT, True, True)
        evaluate(model, tokens)
        row = model.context.logits_ith(len(tokens) - 1)
        assert row is not None
        labels = [7, 300, 7, model.vocab.n_tokens - 1]
        values = model.context.logits_at(len(tokens) - 1, labels)
        assert values.dtype == np.float32
        assert values.tolist() == row[labels].tolist()
        assert model.context.logits_at(len(tokens) - 1, []).shape == (0,)
        for index, wrong in ((0, [7]), (-1, [7]), (10**6, [7]), (len(tokens) - 1, [model.vocab.n_tokens])):
            with pytest.raises(NativeError):
                model.context.logits_at(index, wrong)
        with pytest.raises(ValueError, match="int32"):
            model.context.logits_at(0, [2**31])


def test_embeddings_of_several_entries_come_in_one_array(tiny_models: dict[str, Path]) -> None:
    with load(tiny_models["tiny-embed"], "--embedding", "--pooling", "none") as model:
        tokens = model.vocab.tokenize(TEXT, True, True)
        evaluate(model, tokens, output=True)
        rows = model.context.embeddings_at([2, 0, 2])
        assert rows.shape == (3, model.n_embd_out)
        for row, index in zip(rows, (2, 0, 2), strict=True):
            single = model.context.embeddings_ith(index)
            assert single is not None
            assert row.tolist() == single.tolist()
        assert np.abs(rows[0] - rows[1]).max() > 0.01
        with pytest.raises(NativeError, match="no embeddings at batch index 1000"):
            model.context.embeddings_at([0, 1000])


def test_a_joint_head_scores_the_options_of_a_batch(tmp_path: Path) -> None:
    with load(spec_models.make_clef(tmp_path / "clef.gguf")) as model:
        info = model.info()
        assert info["decision_type"] == "clef"
        assert model.chat_template("systemone") == "{{ state }}"
        assert model.chat_template("rerank") is None
        tokens = model.vocab.tokenize(TEXT, True, True)[:12]

        def scores(spans: dict[int, int]) -> list[float]:
            batch = Batch(16)
            batch.extend(tokens, 0, 0, True)
            for index, order in spans.items():
                batch.set_decision_order(index, order)
            assert model.context.decode(batch, 0, len(tokens), sync=True, serial=1) == 0
            values: list[float] = model.context.embeddings_at(range(len(tokens)))[:, 0].tolist()
            return values

        two = scores({1: ORDER_QUESTION_CHOICE, 3: ORDER_OPTION, 5: ORDER_OPTION, 6: ORDER_OPTION})
        assert two[0] != two[1]
        assert two[2:] == [0.0] * 10
        # another type of question, other spans: other scores
        assert scores({1: ORDER_QUESTION_SCORE, 3: ORDER_OPTION, 5: ORDER_OPTION, 6: ORDER_OPTION})[:2] != two[:2]
        three = scores({1: ORDER_QUESTION_NOUL, 3: ORDER_OPTION, 5: ORDER_OPTION, 7: ORDER_OPTION})
        assert three[2] != 0.0
        assert three[3:] == [0.0] * 9
        # an option that belongs to no question
        assert np.isnan(scores({3: ORDER_OPTION})).all()


def test_a_batch_forgets_its_decision_order(tmp_path: Path) -> None:
    batch = Batch(4)
    batch.extend([5, 6, 7], 0, 0, True)
    batch.set_decision_order(1, ORDER_OPTION)
    assert batch.native_order is not None
    for index, order in ((3, ORDER_OPTION), (-1, ORDER_OPTION), (0, 5), (0, -1)):
        with pytest.raises(ValueError, match=r"no entry|order"):
            batch.set_decision_order(index, order)
    batch.clear()
    assert batch.native_order is None


def test_a_template_renders_raw_values() -> None:
    source = (
        "{% for o in options %}{{ loop.index }}. {{ o.key }}: {{ o.description if o.description is string else "
        "o.description | tojson }}\n{% endfor %}{{ state if state is string else state | tojson }}"
    )
    values = {
        "options": [{"key": "cät", "description": "pürrs"}, {"key": "dog", "description": {"z": 1, "a": [True, None]}}],
        "state": {"b": 1.5, "a": "x"},
    }
    with Template(source) as template:
        text = template.render(values)
        assert text == '1. cät: pürrs\n2. dog: {"z": 1, "a": [true, null]}\n{"b": 1.5, "a": "x"}'
        results: list[str] = []
        threads = [threading.Thread(target=lambda: results.append(template.render(values))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [text] * 8
    with pytest.raises(ClosedError):
        template.render(values)


def test_a_template_that_fails_is_an_error_with_its_reason() -> None:
    with pytest.raises(NativeError):
        Template("{% for x in %}")
    with Template("{{ raise_exception('no such thing: ' + name) }}") as template:
        with pytest.raises(NativeError, match="no such thing: this"):
            template.render({"name": "this"})
        with pytest.raises(ValueError, match="Out of range"):
            template.render({"name": float("inf")})


# backend sampling


def backend_sampler(model: Model, settings: dict[str, Any]) -> Sampler:
    return Sampler(model, model._params, {**settings, "backend_sampling": True})


@pytest.mark.parametrize("settings", [{"temp": 0.0}, {"temp": 0.9, "seed": 7, "top_k": 20}], ids=["greedy", "seeded"])
def test_sampling_in_the_graph_gives_a_text_of_its_own_seed(
    settings: dict[str, Any], tiny_models: dict[str, Path]
) -> None:
    with load(tiny_models["tiny-llama"], "-bs") as model:
        set_sampler(model, 0, None)
        with Sampler(model, model._params, {**settings, "backend_sampling": False}) as sampler:
            assert not sampler.backend_sampling
            on_cpu = generate(model, sampler)
        texts = []
        for _ in range(2):
            with backend_sampler(model, settings) as sampler:
                assert sampler.backend_sampling
                set_sampler(model, 0, sampler)
                set_sampler(model, 0, sampler)  # once more changes nothing
                tokens = model.vocab.tokenize(TEXT, True, True)
                evaluate(model, tokens)
                with pytest.raises(NativeError):  # the graph gave a token, no logits of all
                    model.context.logits_at(len(tokens) - 1, range(model.vocab.n_tokens))
                with pytest.raises(NativeError):
                    token_probs(model, sampler, len(tokens) - 1, 5, 1, False)
                texts.append(generate(model, sampler))
        assert texts[0] == texts[1]
        if settings["temp"] == 0.0:
            assert texts[0] == on_cpu
        # closed: sampled on the CPU again
        evaluate(model, model.vocab.tokenize(TEXT, True, True))
        assert model.context.logits_at(len(model.vocab.tokenize(TEXT, True, True)) - 1, [0]).shape == (1,)


def test_a_grammar_or_reasoning_budget_keeps_sampling_on_the_cpu(tiny_models: dict[str, Path]) -> None:
    with load(tiny_models["tiny-llama"]) as model:
        grammar = {"grammar": {"type": "user", "value": 'root ::= "a"'}}
        budget = {
            "reasoning_budget_start": [300],
            "reasoning_budget_end": [[301]],
            "reasoning_budget_forced": [301],
            "reasoning_control": True,
        }
        for settings in (grammar, budget):
            with backend_sampler(model, settings) as sampler:
                assert not sampler.backend_sampling
                with pytest.raises(NativeError, match="cannot run on the backend"):
                    set_sampler(model, 0, sampler)


def test_a_chain_runs_in_the_graph_only_once_in_its_life(tiny_models: dict[str, Path]) -> None:
    """The library would end the process."""
    with load(tiny_models["tiny-llama"]) as model:
        sampler = backend_sampler(model, GREEDY)
        copy = sampler.clone()
        assert copy.backend_sampling
        set_sampler(model, 0, sampler)
        with pytest.raises(NativeError, match="did before"):
            set_sampler(model, 1, sampler)
        set_sampler(model, 0, None)
        with pytest.raises(NativeError, match="did before"):
            set_sampler(model, 0, sampler)
        for seq in (-1, 2):
            with pytest.raises(ValueError, match="seq"):
                set_sampler(model, seq, None)
        assert generate(model, copy) == generate(model, Sampler(model, model._params, GREEDY))


def test_a_sampler_of_another_model_is_refused(tiny_models: dict[str, Path]) -> None:
    with load(tiny_models["tiny-llama"]) as one, load(tiny_models["tiny-llama"]) as other:
        sampler = backend_sampler(one, GREEDY)
        with pytest.raises(ValueError, match="another model"):
            set_sampler(other, 0, sampler)
        set_sampler(one, 0, sampler)
        del sampler  # what runs in the graph stays alive
        evaluate(one, one.vocab.tokenize(TEXT, True, True))


# ways of loading


def split_model(source: Path, directory: Path, n_tensors: int) -> Path:
    """The same model in files of at most ``n_tensors`` tensors; returns the first."""
    reader = gguf.GGUFReader(source)
    arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(directory / "split.gguf", arch, split_max_tensors=n_tensors)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub_type = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(directory.glob("split-*.gguf"))


def test_a_model_in_several_files_is_one(tiny_models: dict[str, Path], tmp_path: Path, base_text: list[int]) -> None:
    first = split_model(tiny_models["tiny-llama"], tmp_path, 8)
    assert len(list(tmp_path.iterdir())) == 3
    seen: list[float] = []

    def report(progress: float) -> bool:
        seen.append(progress)
        return True

    with Model.load(make_params(first), report) as model:
        assert greedy(model) == base_text
        assert seen[0] == 0.0
        assert seen[-1] == 1.0
    max(tmp_path.iterdir()).unlink()
    with pytest.raises(NativeError, match=r"00003-of-00003"):
        load(first)


@pytest.mark.parametrize(
    "args",
    [
        ["-lm", "none"],
        ["-lm", "mmap"],
        ["-lm", "mlock"],
        ["-lm", "mmap+mlock"],
        ["-lm", "dio"],
        ["--check-tensors"],
        ["--override-tensor", ".*ffn.*=CPU"],
        ["--fit", "off"],
        ["--numa", "distribute"],
        ["--cpu-mask", "0x1", "--cpu-strict", "1", "--poll", "0"],
        ["-ctk", "f32", "-ctv", "f32"],
        ["--no-repack"],
    ],
    ids=" ".join,
)
def test_ways_of_loading_do_not_change_the_text(
    args: list[str], tiny_models: dict[str, Path], base_text: list[int]
) -> None:
    with load(tiny_models["tiny-llama"], *args) as model:
        assert greedy(model) == base_text
        if args[0] == "-lm":
            assert model._params.to_dict()["load_mode"] == args[1]


def test_metadata_can_be_overridden(tiny_models: dict[str, Path]) -> None:
    kinds: list[tuple[str, Callable[[Model], object], object]] = [
        ("llama.context_length=int:512", lambda model: model.n_ctx_train, 512),
        ("tokenizer.ggml.add_bos_token=bool:false", lambda model: model.vocab.add_bos, False),
        ("tokenizer.ggml.eos_token_id=int:300", lambda model: model.vocab.eos, 300),
    ]
    for override, read, expected in kinds:
        with load(tiny_models["tiny-llama"], "--override-kv", override) as model:
            assert read(model) == expected


def test_a_damaged_tensor_is_found_when_asked_for(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    data = bytearray(tiny_models["tiny-llama"].read_bytes())
    data[-64:] = b"\xff" * 64  # NaNs in the last tensor
    path.write_bytes(data)
    with load(path):
        pass
    with pytest.raises(NativeError, match="invalid data"):
        load(path, "--check-tensors")
