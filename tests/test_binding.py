"""Model, vocabulary, context, memory, batch and sampler over the native library."""

from __future__ import annotations

import gc
import itertools
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamasrv import binding
from llamasrv.binding import (
    Batch,
    ClosedError,
    Model,
    NativeError,
    Params,
    Sampler,
    backend_init,
    check_grammar,
    json_schema_to_grammar,
    sample_many,
    token_probs,
)

TEXT = "Once upon a time there was a little cat"


def make_params(path: Path, *args: str) -> Params:
    params = Params.parse(["llamasrv", "-m", str(path), "-c", "1024", "-np", "4", "--no-warmup", "-lv", "0", *args])
    backend_init(params)
    return params


@pytest.fixture(scope="module")
def params(tiny_model_path: Path) -> Iterator[Params]:
    with make_params(tiny_model_path, "--kv-unified") as params:
        yield params


@pytest.fixture(scope="module")
def shared_model(params: Params) -> Iterator[Model]:
    with Model.load(params) as model:
        yield model


@pytest.fixture
def model(shared_model: Model) -> Model:
    shared_model.context.abort(0)
    shared_model.context.memory.clear()
    return shared_model


@pytest.fixture
def split_model(tiny_model_path: Path) -> Iterator[Model]:
    with make_params(tiny_model_path) as params, Model.load(params) as model:
        yield model


def prompt(model: Model, seq: int = 0, text: str = TEXT) -> list[int]:
    """Decode a text into a sequence; logits are at the last index."""
    tokens = model.vocab.tokenize(text, True, True)
    batch = Batch(len(tokens))
    batch.extend(tokens, 0, seq, False)
    batch.set_output(len(tokens) - 1, True)
    assert model.context.decode(batch, 0, len(tokens), sync=True, serial=1) == 0
    return tokens


def decode_one(model: Model, token: int, pos: int, seq: int = 0) -> int:
    batch = Batch(1)
    batch.add(token, pos, seq, True)
    return model.context.decode(batch, 0, 1, sync=True, serial=1)


def generate(model: Model, sampler: Sampler, n: int, seq: int = 0) -> list[int]:
    """Tokens sampled after the prompt in ``seq``; stops at an end of generation."""
    index = len(prompt(model, seq)) - 1
    pos = index + 1
    out: list[int] = []
    while len(out) < n:
        (token,) = sample_many(model, [sampler], [index])
        if isinstance(token, NativeError):
            raise token
        out.append(token)
        if model.vocab.is_eog(token):
            break
        assert decode_one(model, token, pos, seq) == 0
        pos, index = pos + 1, 0
    return out


# loading


def test_progress_is_reported_and_rises_to_one(params: Params) -> None:
    seen: list[float] = []

    def report(progress: float) -> bool:
        seen.append(progress)
        return True

    with Model.load(params, report):
        assert seen == sorted(seen)
        assert seen[0] == 0.0
        assert seen[-1] == 1.0


def test_progress_can_stop_the_load(params: Params) -> None:
    with pytest.raises(NativeError, match="stopped"):
        Model.load(params, lambda progress: progress < 0.5)


def test_an_exception_in_progress_reaches_the_caller(params: Params) -> None:
    def report(progress: float) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Model.load(params, report)


def test_a_missing_file_is_a_native_error_with_the_reason(tmp_path: Path) -> None:
    with make_params(tmp_path / "none.gguf") as params, pytest.raises(NativeError) as caught:
        Model.load(params)
    assert "none.gguf" in str(caught.value)
    assert "No such file" in str(caught.value)


def test_a_broken_file_is_a_native_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)))
    with make_params(path) as params, pytest.raises(NativeError, match=r"broken\.gguf"):
        Model.load(params)


def test_a_missing_adapter_is_named(tiny_model_path: Path) -> None:
    args = ["--lora", "no-such-adapter"]
    with make_params(tiny_model_path, *args) as params, pytest.raises(NativeError, match="adapter 'no-such-adapter'"):
        Model.load(params)


def test_limits_that_would_abort_the_process_are_refused(tiny_model_path: Path) -> None:
    with make_params(tiny_model_path) as params:
        params.set(n_outputs_max=2)
        with pytest.raises(NativeError, match="n_outputs_max"):
            Model.load(params)
        params.set(n_outputs_max=0, n_parallel=0)
        with pytest.raises(NativeError, match="n_parallel"):
            Model.load(params)


def test_a_second_load_from_the_same_parameters_is_like_the_first(tiny_model_path: Path) -> None:
    with make_params(tiny_model_path, "--ignore-eos") as params:
        seen = []
        for _ in range(2):
            with Model.load(params) as model:
                seen.append((model.info(), params.to_dict()))
    assert seen[0] == seen[1]


def test_the_model_describes_itself(model: Model) -> None:
    assert model.n_params > 0
    assert model.size > 0
    assert model.meta()["general.architecture"] == "llama"
    assert model.n_ctx_train == int(model.meta()["llama.context_length"])
    assert model.n_embd == model.n_embd_inp == model.n_embd_out == int(model.meta()["llama.embedding_length"])
    assert not (model.is_recurrent or model.is_hybrid or model.has_encoder)
    info = model.info()
    assert "F32" in info["ftype"]
    assert info["decision_type"] == "none"
    assert info["chat_template_caps"]["supports_system_role"] in (True, False)
    assert {token for token, _ in info["logit_bias_eog"]} == model.vocab.eog


def test_context_sizes_are_the_real_ones(model: Model) -> None:
    context = model.context
    assert (context.n_ctx, context.n_ctx_seq, context.n_seq_max) == (1024, 1024, 4)
    assert context.has_memory
    assert context.causal_attn
    assert context.pooling_type == binding.POOLING_NONE


# vocabulary


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-bpe"])
@pytest.mark.parametrize("text", [TEXT, "größer 🙂 \n\t日本", "a\0b", ""])
def test_tokens_give_back_the_text(tiny_models: dict[str, Path], name: str, text: str) -> None:
    with make_params(tiny_models[name]) as params, Model.load(params) as model:
        vocab = model.vocab
        tokens = vocab.tokenize(text, False, False)
        assert vocab.validate(tokens)
        assert vocab.detokenize(tokens).decode().removeprefix(" ") == text
        assert vocab.tokenize(text.encode(), False, False) == tokens


def test_special_tokens_are_added_and_parsed_on_demand(model: Model) -> None:
    vocab = model.vocab
    assert vocab.add_bos
    assert vocab.tokenize("cat", True, False)[0] == vocab.bos
    assert vocab.tokenize("cat", False, False)[0] != vocab.bos
    bos = vocab.piece(vocab.bos).decode()
    assert vocab.tokenize(bos, False, True) == [vocab.bos]
    assert len(vocab.tokenize(bos, False, False)) > 1


def test_pieces_of_control_tokens_are_empty_without_special(model: Model) -> None:
    vocab = model.vocab
    assert vocab.piece(vocab.eos, special=True) != b""
    assert vocab.piece(vocab.eos, special=False) == b""
    assert len(vocab.pieces(True)) == len(vocab.pieces(False)) == vocab.n_tokens


def test_end_of_generation_tokens(model: Model) -> None:
    assert model.vocab.eos in model.vocab.eog
    assert model.vocab.is_eog(model.vocab.eos)
    assert not model.vocab.is_eog(model.vocab.bos)


def test_tokens_outside_the_vocabulary_are_refused(model: Model) -> None:
    vocab = model.vocab
    for token in (-1, vocab.n_tokens, 2**40):
        assert not vocab.validate([0, token])
        with pytest.raises(ValueError, match="vocabulary"):
            vocab.piece(token)
        with pytest.raises(ValueError, match="vocabulary"):
            vocab.detokenize([0, token])


def test_pieces_are_made_once_for_all_threads(tiny_model_path: Path) -> None:
    with make_params(tiny_model_path) as params, Model.load(params) as model, ThreadPoolExecutor(8) as pool:
        tables = list(pool.map(lambda _: model.vocab.pieces(True), range(32)))
    assert len({id(table) for table in tables}) == 1


# batch


def test_batch_columns_hold_what_was_added() -> None:
    batch = Batch(64)
    assert batch.add(5, 7, 1, True) == 0
    assert batch.extend([1, 2, 3], 10, 2, False) == 1
    assert batch.extend(list(range(40)), 20, 3, True) == 4
    assert batch.n_tokens == 44
    assert batch.token[:4].tolist() == [5, 1, 2, 3]
    assert batch.pos[:5].tolist() == [7, 10, 11, 12, 20]
    assert batch.seq_id[[0, 1, 43]].tolist() == [1, 2, 3]
    assert batch.output[:5].tolist() == [1, 0, 0, 0, 1]
    batch.set_output(1, True)
    assert batch.output[1] == 1
    batch.clear()
    assert batch.n_tokens == 0


@pytest.mark.parametrize("n", [3, 40])
def test_a_full_batch_and_wide_numbers_are_refused_and_change_nothing(n: int) -> None:
    batch = Batch(50)
    batch.add(1, 0, 0, False)
    for tokens, pos0, seq in [
        ([1] * 60, 0, 0),
        ([1] * (n - 1) + [2**31], 0, 0),
        ([1] * n, 2**31 - 2, 0),
        ([1] * n, 0, 2**31),
        ([2**70] * n, 0, 0),
    ]:
        with pytest.raises(ValueError, match=r"\S"):
            batch.extend(tokens, pos0, seq, True)
        assert batch.n_tokens == 1
    with pytest.raises(ValueError, match="no entry"):
        batch.set_output(1, True)
    small = Batch(1)
    small.add(1, 0, 0, False)
    with pytest.raises(ValueError, match="full"):
        small.add(1, 1, 0, False)
    with pytest.raises(ValueError, match="n_alloc"):
        Batch(0)


# decoding


def test_greedy_generation_is_the_same_again_and_in_every_sequence(model: Model, params: Params) -> None:
    runs = []
    for seq in (0, 0, 3):
        model.context.memory.clear()
        with Sampler(model, params, {"temp": 0.0}) as sampler:
            runs.append(generate(model, sampler, 16, seq))
    assert len(runs[0]) > 1
    assert runs[0] == runs[1] == runs[2]


def test_a_prompt_in_parts_gives_the_logits_of_the_whole(model: Model) -> None:
    tokens = prompt(model, 0)
    whole = model.context.logits_ith(len(tokens) - 1)
    batch = Batch(len(tokens))
    batch.extend(tokens, 0, 1, False)
    batch.set_output(len(tokens) - 1, True)
    assert model.context.decode(batch, 0, 4, sync=False, serial=1) == 0
    assert model.context.decode(batch, 4, len(tokens) - 4, sync=False, serial=2) == 0
    model.context.synchronize()
    parts = model.context.logits_ith(len(tokens) - 5)
    assert whole is not None
    assert parts is not None
    assert whole.shape == (model.vocab.n_tokens,)
    np.testing.assert_allclose(parts, whole, atol=1e-3)


def test_results_exist_only_where_they_were_wanted(model: Model) -> None:
    n = len(prompt(model))
    assert model.context.logits_ith(n - 1) is not None
    assert model.context.logits_ith(0) is None
    assert model.context.logits_ith(n) is None
    assert model.context.embeddings_ith(n - 1) is None
    assert model.context.embeddings_seq(0) is None


@pytest.mark.parametrize("column", ["token", "pos", "seq_id"])
@pytest.mark.parametrize("value", [-1, 2**31 - 1])
def test_entries_that_do_not_exist_make_the_batch_invalid(model: Model, column: str, value: int) -> None:
    batch = Batch(2)
    batch.extend([5, 6], 0, 0, True)
    getattr(batch, column)[1] = value
    assert model.context.decode(batch, 0, 2, sync=True, serial=1) == -1
    assert model.context.memory.seq_pos_max(0) == -1
    assert decode_one(model, 5, 0) == 0


def test_a_range_outside_the_batch_is_refused(model: Model) -> None:
    batch = Batch(4)
    batch.extend([5, 6], 0, 0, True)
    for offset, n in [(0, 3), (-1, 1), (0, 0), (2, 1)]:
        with pytest.raises(ValueError, match="not within"):
            model.context.decode(batch, offset, n, sync=True, serial=1)
    with pytest.raises(ValueError, match="serial"):
        model.context.decode(batch, 0, 1, sync=True, serial=-1)


def test_more_outputs_than_the_context_has_room_for_are_refused(tiny_model_path: Path) -> None:
    with make_params(tiny_model_path) as params:
        params.set(n_outputs_max=4)
        with Model.load(params) as model:
            batch = Batch(8)
            batch.extend([5] * 5, 0, 0, True)
            assert model.context.decode(batch, 0, 5, sync=True, serial=1) == -1
            assert model.context.decode(batch, 0, 4, sync=True, serial=1) == 0
            model.context.memory.clear()
            model.context.set_embeddings(True)
            batch.output[:] = 0
            assert model.context.decode(batch, 0, 5, sync=True, serial=1) == -1


def test_a_full_cache_is_reported(tiny_model_path: Path) -> None:
    with make_params(tiny_model_path, "-c", "256", "-np", "1") as params, Model.load(params) as model:
        batch = Batch(model.context.n_batch)
        batch.extend([5] * 256, 0, 0, False)
        assert model.context.decode(batch, 0, 256, sync=True, serial=1) == 0
        assert decode_one(model, 5, 256) == 1
        assert model.context.memory.seq_pos_max(0) == 255


def test_abort_stops_the_call_of_that_serial_only(model: Model) -> None:
    context = model.context
    batch = Batch(8)
    batch.extend([5] * 8, 0, 0, False)
    context.abort(7)
    assert context.decode(batch, 0, 8, sync=True, serial=6) == 0
    context.memory.clear()
    assert context.decode(batch, 0, 8, sync=True, serial=7) == 2
    assert context.memory.seq_pos_max(0) == -1
    assert context.decode(batch, 0, 8, sync=True, serial=8) == 0


def test_abort_can_be_withdrawn(model: Model) -> None:
    model.context.abort(1)
    model.context.abort(0)
    assert decode_one(model, 5, 0) == 0


def test_stop_holds_for_every_later_call(model: Model) -> None:
    context = model.context
    context.stop()
    context.abort(5)
    assert decode_one(model, 5, 0) == 2
    assert decode_one(model, 5, 0) == 2
    context.abort(0)
    assert decode_one(model, 5, 0) == 0


def test_a_running_call_is_stopped_from_another_thread(tiny_model_path: Path) -> None:
    args = ["-c", "16384", "-np", "1", "-b", "16384", "-ub", "16"]
    with make_params(tiny_model_path, *args) as params, Model.load(params) as model:
        batch = Batch(16384)
        batch.extend([5] * 16384, 0, 0, False)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(model.context.decode, batch, 0, batch.n_tokens, sync=True, serial=9)
            time.sleep(0.05)
            model.context.abort(8)
            time.sleep(0.05)
            assert not running.done()
            model.context.abort(9)
            assert running.result() == 2
        # the physical batches computed before stay
        n_done = model.context.memory.seq_pos_max(0) + 1
        assert n_done % 16 == 0
        assert n_done < 16384


# memory


def test_removing_copying_and_moving_cells(model: Model) -> None:
    memory = model.context.memory
    n = len(prompt(model))
    memory.seq_cp(0, 1, -1, -1)
    memory.seq_cp(0, 2, 0, 4)
    assert [memory.seq_pos_max(seq) for seq in range(4)] == [n - 1, n - 1, 3, -1]
    assert memory.seq_rm(0, 3, -1)
    assert memory.seq_pos_max(0) == 2
    assert memory.seq_pos_max(1) == n - 1
    memory.seq_keep(1)
    assert [memory.seq_pos_max(seq) for seq in range(4)] == [-1, n - 1, -1, -1]
    memory.seq_rm(1, 0, 2)
    memory.seq_add(1, 2, -1, -2)
    assert (memory.seq_pos_min(1), memory.seq_pos_max(1)) == (0, n - 3)
    memory.seq_rm(1, 4, -1)
    memory.seq_div(1, 0, -1, 1)
    assert memory.seq_pos_max(1) == 3
    assert memory.seq_rm(-1, -1, -1)
    assert memory.seq_pos_max(1) == -1


def test_a_copied_sequence_goes_on_like_the_original(model: Model, params: Params) -> None:
    tokens = prompt(model)
    with Sampler(model, params, {"temp": 0.0}) as sampler:
        (token,) = sample_many(model, [sampler], [len(tokens) - 1])
    assert isinstance(token, int)
    model.context.memory.seq_cp(0, 1, -1, -1)
    logits = []
    for seq in (0, 1):
        assert decode_one(model, token, len(tokens), seq) == 0
        logits.append(model.context.logits_ith(0))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)  # type: ignore[arg-type]


def test_sequences_that_do_not_exist_are_refused(model: Model) -> None:
    memory = model.context.memory
    calls: list[Callable[[int], Any]] = [
        lambda seq: memory.seq_rm(seq if seq >= 0 else -2, -1, -1),
        lambda seq: memory.seq_cp(seq, 0, -1, -1),
        lambda seq: memory.seq_cp(0, seq, -1, -1),
        memory.seq_keep,
        lambda seq: memory.seq_add(seq, 0, -1, 1),
        lambda seq: memory.seq_div(seq, 0, -1, 2),
        memory.seq_pos_min,
        memory.seq_pos_max,
        model.context.state_seq_size,
        model.context.state_seq_get,
        lambda seq: model.context.state_seq_set(seq, b"x"),
    ]
    for call, seq in itertools.product(calls, [-1, 4, 2**31]):
        with pytest.raises(ValueError, match="must be between"):
            call(seq)
    with pytest.raises(ValueError, match="d must be"):
        memory.seq_div(0, 0, -1, 0)


def test_only_whole_sequences_are_copied_between_split_buffers(split_model: Model) -> None:
    memory = split_model.context.memory
    n = len(prompt(split_model))
    for p0, p1 in [(1, -1), (0, 3), (-1, 0)]:
        with pytest.raises(ValueError, match="unified"):
            memory.seq_cp(0, 1, p0, p1)
    memory.seq_cp(0, 1, -1, -1)
    assert memory.seq_pos_max(1) == n - 1
    assert decode_one(split_model, 5, n, 1) == 0


def test_kind_of_removal(tiny_models: dict[str, Path], model: Model) -> None:
    assert model.context.seq_rm_type() == binding.SEQ_RM_PART
    with make_params(tiny_models["tiny-mamba"]) as params, Model.load(params) as recurrent:
        assert recurrent.is_recurrent
        assert recurrent.context.seq_rm_type() == binding.SEQ_RM_FULL
        n = len(prompt(recurrent))
        assert not recurrent.context.memory.seq_rm(0, n - 2, -1)
        assert recurrent.context.memory.seq_rm(0, -1, -1)


def test_a_model_without_memory(tiny_models: dict[str, Path]) -> None:
    with make_params(tiny_models["tiny-embed"], "--embedding") as params, Model.load(params) as model:
        context = model.context
        assert not context.has_memory
        assert not context.memory.can_shift
        assert context.memory.seq_pos_max(0) == -1
        assert context.seq_rm_type() == binding.SEQ_RM_NO
        with pytest.raises(ValueError, match="cannot shift"):
            context.memory.seq_add(0, 0, -1, 1)
        context.memory.clear()
        batch = Batch(context.n_ubatch + 1)
        batch.extend([5] * batch.n_alloc, 0, 0, True)
        assert context.decode(batch, 0, batch.n_tokens, sync=True, serial=1) == -1
        assert context.decode(batch, 0, 16, sync=True, serial=1) == 0


# state


def logits_after(model: Model, token: int, pos: int, seq: int) -> Any:
    assert decode_one(model, token, pos, seq) == 0
    return model.context.logits_ith(0)


def test_a_state_restores_a_sequence(model: Model) -> None:
    context = model.context
    n = len(prompt(model))
    state = context.state_seq_get(0)
    assert len(state) == context.state_seq_size(0)
    expected = logits_after(model, 5, n, 0)
    context.memory.clear()
    assert context.state_seq_set(2, state) == len(state)
    assert context.memory.seq_pos_max(2) == n - 1
    np.testing.assert_allclose(logits_after(model, 5, n, 2), expected, atol=1e-4)


def test_a_damaged_state_does_not_fit(model: Model) -> None:
    prompt(model)
    state = model.context.state_seq_get(0)
    assert model.context.state_seq_set(1, state[: len(state) // 2]) == 0
    assert model.context.state_seq_set(1, b"") == 0


def test_an_on_device_state_of_unknown_origin_is_refused(model: Model) -> None:
    prompt(model)
    state = model.context.state_seq_get(0)
    for data in (state, b"", b"\0" * 64):
        with pytest.raises(ValueError, match="on-device"):
            model.context.state_seq_set(1, data, binding.STATE_ON_DEVICE)


def test_a_state_file_keeps_sequence_and_tokens(model: Model, tmp_path: Path) -> None:
    context = model.context
    path = tmp_path / "slot ü.bin"
    tokens = prompt(model)
    written = context.state_seq_save_file(path, 0, tokens)
    assert written == path.stat().st_size
    expected = logits_after(model, 5, len(tokens), 0)
    context.memory.clear()
    assert context.state_seq_load_file(path, 1, 64) == (written, tokens)
    np.testing.assert_allclose(logits_after(model, 5, len(tokens), 1), expected, atol=1e-4)


@pytest.mark.parametrize("n_cut", [1, 4, 5, 8, 9, 16, 100])
def test_a_state_file_that_lacks_its_last_bytes_is_refused(model: Model, tmp_path: Path, n_cut: int) -> None:
    context = model.context
    tokens = prompt(model)
    path = tmp_path / "slot.bin"
    written = context.state_seq_save_file(path, 0, tokens)
    path.write_bytes(path.read_bytes()[:-n_cut])
    assert context.state_seq_load_file(path, 1, 64) == (0, [])
    path.write_bytes(path.read_bytes() + bytes(n_cut))
    assert context.state_seq_load_file(path, 1, 64) == (written, tokens)


def test_a_state_that_finds_no_room_on_the_disk_is_not_called_saved(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "slot.bin"
    tokens = prompt(model)
    size = model.context.state_seq_save_file(path, 0, tokens)
    assert size > 4096
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 100, size - 4096, size - 1, size):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
            written = model.context.state_seq_save_file(path, 0, tokens)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert written == (size if room == size else 0)


def test_state_files_that_cannot_be_used(model: Model, tmp_path: Path) -> None:
    context = model.context
    tokens = prompt(model)
    path = tmp_path / "slot.bin"
    assert context.state_seq_save_file(path, 0, tokens) > 0
    assert context.state_seq_load_file(path, 1, len(tokens) - 1) == (0, [])
    assert context.state_seq_load_file(tmp_path / "none.bin", 1, 64) == (0, [])
    assert context.state_seq_save_file(tmp_path / "no" / "folder.bin", 0, tokens) == 0
    path.write_bytes(path.read_bytes()[:100])
    assert context.state_seq_load_file(path, 1, 64) == (0, [])
    with pytest.raises(ValueError, match="NUL"):
        context.state_seq_save_file("a\0b", 0, tokens)
    with pytest.raises(ValueError, match=r"\S"):
        context.state_seq_save_file(path, 0, [2**31])


# embeddings


def test_pooled_embeddings(tiny_models: dict[str, Path]) -> None:
    with make_params(tiny_models["tiny-embed"], "--embedding") as params, Model.load(params) as model:
        assert model.context.pooling_type == binding.POOLING_MEAN
        batch = Batch(64)
        for seq, text in enumerate(["a cat", "a cat", "the dog"]):
            batch.extend(model.vocab.tokenize(text, True, True), 0, seq, True)
        assert model.context.decode(batch, 0, batch.n_tokens, sync=True, serial=1) == 0
        vectors = [model.context.embeddings_seq(seq) for seq in range(4)]
        assert vectors[3] is None
        assert vectors[0] is not None
        assert vectors[0].shape == (model.n_embd_out,)
        assert vectors[0].dtype == np.float32
        np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)  # type: ignore[arg-type]
        assert not np.allclose(vectors[0], vectors[2], atol=1e-3)  # type: ignore[arg-type]


def test_rank_scores_are_one_per_sequence(tiny_models: dict[str, Path]) -> None:
    with make_params(tiny_models["tiny-rerank"], "--reranking") as params, Model.load(params) as model:
        assert model.context.pooling_type == binding.POOLING_RANK
        batch = Batch(64)
        batch.extend(model.vocab.tokenize("a cat", True, True), 0, 0, True)
        assert model.context.decode(batch, 0, batch.n_tokens, sync=True, serial=1) == 0
        scores = model.context.embeddings_seq(0)
        assert scores is not None
        assert scores.shape == (1,)


def test_embeddings_can_be_switched_on(model: Model) -> None:
    model.context.set_embeddings(True)
    try:
        batch = Batch(2)
        batch.extend([5, 6], 0, 0, True)
        assert model.context.decode(batch, 0, 2, sync=True, serial=1) == 0
        vector = model.context.embeddings_ith(1)
        assert vector is not None
        assert vector.shape == (model.n_embd_out,)
        assert np.abs(vector).max() > 0
    finally:
        model.context.set_embeddings(False)


# adapters


def test_adapters_change_the_logits_only_while_applied(tiny_models: dict[str, Path]) -> None:
    adapters = f"{tiny_models['tiny-lora-a']},{tiny_models['tiny-lora-b']}"
    args = ["--lora", adapters, "--lora-init-without-apply"]
    with make_params(tiny_models["tiny-llama"], *args) as params, Model.load(params) as model:
        assert model.n_lora == 2
        assert [Path(info["path"]).name for info in model.lora_info()] == ["tiny-lora-a.gguf", "tiny-lora-b.gguf"]

        def logits() -> Any:
            model.context.memory.clear()
            return model.context.logits_ith(len(prompt(model)) - 1)

        plain = logits()
        model.set_lora([(1, 1.0)])
        assert not np.allclose(logits(), plain, atol=1e-3)
        model.set_lora([])
        np.testing.assert_array_equal(logits(), plain)
        for index in (2, -1):
            with pytest.raises(NativeError, match="no lora adapter"):
                model.set_lora([(0, 1.0), (index, 1.0)])
        with pytest.raises(ValueError, match="index"):
            model.set_lora([(2**31, 1.0)])


def test_an_adapter_tells_its_invocation_tokens(tiny_models: dict[str, Path]) -> None:
    args = ["--lora", str(tiny_models["tiny-alora"])]
    with make_params(tiny_models["tiny-llama"], *args) as params, Model.load(params) as model:
        tokens = model.lora_info()[0]["alora_invocation_tokens"]
        assert model.vocab.detokenize(tokens) == b" Once Tom"


# sampling


def test_a_seed_decides_what_is_sampled(model: Model, params: Params) -> None:
    def run(seed: int) -> list[int]:
        model.context.memory.clear()
        with Sampler(model, params, {"seed": seed, "temp": 1.5, "top_k": 0}) as sampler:
            assert sampler.seed == seed
            return generate(model, sampler, 12)

    assert run(1) == run(1)
    assert len({tuple(run(seed)) for seed in range(5)}) > 1


def test_sampling_many_is_like_sampling_each(model: Model, params: Params) -> None:
    batch = Batch(128)
    indices = []
    for seq in range(4):
        batch.extend(model.vocab.tokenize(TEXT + " and" * seq, True, True), 0, seq, False)
        indices.append(batch.n_tokens - 1)
        batch.set_output(batch.n_tokens - 1, True)
    assert model.context.decode(batch, 0, batch.n_tokens, sync=True, serial=1) == 0
    many = [Sampler(model, params, {"seed": seed}) for seed in range(4)]
    each = [Sampler(model, params, {"seed": seed}) for seed in range(4)]
    assert sample_many(model, many, indices) == [
        sample_many(model, [sampler], [index])[0] for sampler, index in zip(each, indices, strict=True)
    ]
    assert sample_many(model, [], []) == []


def test_more_samplers_than_ever_before(model: Model, params: Params) -> None:
    index = len(prompt(model)) - 1
    samplers = [Sampler(model, params, {"temp": 0.0}) for _ in range(100)]
    tokens = sample_many(model, samplers, [index] * 100)
    assert len(tokens) == 100
    assert len(set(tokens)) == 1


def test_one_failing_sampler_does_not_disturb_the_others(model: Model, params: Params) -> None:
    index = len(prompt(model)) - 1
    samplers = [Sampler(model, params, {"temp": 0.0}) for _ in range(3)]
    for missing in (0, index + 1, -1, 2**31 - 1):
        first, second, third = sample_many(model, samplers, [index, missing, index])
        assert first == third
        assert isinstance(first, int)
        assert isinstance(second, NativeError)
        assert f"no logits at batch index {missing}" in str(second)
    (recovered,) = sample_many(model, samplers[1:2], [index])
    assert isinstance(recovered, int)


def test_wrong_arguments_of_sample_many(model: Model, split_model: Model, params: Params) -> None:
    index = len(prompt(model)) - 1
    sampler = Sampler(model, params, {})
    with pytest.raises(ValueError, match="2 indices"):
        sample_many(model, [sampler], [index, index])
    with pytest.raises(ValueError, match=r"\S"):
        sample_many(model, [sampler], [2**31])
    with pytest.raises(ValueError, match="another model"):
        sample_many(split_model, [sampler], [index])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"no_such_field": 1}, "unknown sampling field"),
        ({"temp": "warm"}, "'temp' must be a number"),
        ({"top_k": 1.5}, "'top_k' must be an integer"),
        ({"top_k": 2**31}, "out of range"),
        ({"top_k": 2**64 - 1}, "out of range"),
        ({"ignore_eos": 1}, "true or false"),
        ({"mirostat": 3}, "mirostat"),
        ({"n_prev": 2**30}, "n_prev"),
        ({"penalty_repeat": 0.0}, "penalty_repeat"),
        ({"penalty_freq": float("inf")}, "penalty_freq"),
        ({"logit_bias": [[10**6, 1.0]]}, "out of range"),
        ({"logit_bias": [[1]]}, "pairs"),
        ({"preserved_tokens": [-1]}, "out of range"),
        ({"grammar": {"type": "user", "value": 'root ::= "'}}, "failed to parse grammar"),
        ({"grammar": {"type": "other", "value": ""}}, "unknown grammar type"),
        ({"grammar": {"type": "user", "value": 'root ::= "a"'}, "grammar_lazy": True}, "no triggers"),
        ({"grammar": {"type": "user", "value": "root ::= " + "(" * 10**6}}, "nested too deeply"),
        (
            {"grammar": {"type": "output_format", "value": 'root ::= "a"'}, "generation_prompt": "</s>"},
            "ends the generation",
        ),
    ],
)
def test_settings_that_are_refused(model: Model, params: Params, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(NativeError, match=reason):
        Sampler(model, params, settings)


def test_settings_overlay_the_command_line(tiny_model_path: Path) -> None:
    with make_params(tiny_model_path, "--samplers", "top_k;temperature") as params, Model.load(params) as model:
        with Sampler(model, params, {}) as sampler:
            assert "top-k" in sampler.describe()
            assert "min-p" not in sampler.describe()
        with Sampler(model, params, {"samplers": ["min_p", "temp"]}) as sampler:
            assert "min-p" in sampler.describe()
            assert "top-k" not in sampler.describe()


def test_settings_have_the_form_in_which_parameters_are_read(model: Model, params: Params) -> None:
    settings = params.to_dict()["sampling"]
    del settings["logit_bias_eog"]
    with Sampler(model, params, settings) as same, Sampler(model, params, {}) as default:
        assert same.describe() == default.describe()


def test_a_look_back_longer_than_memory_is_cut(model: Model, params: Params) -> None:
    index = len(prompt(model)) - 1
    settings = {
        "penalty_last_n": 2**31 - 1,
        "dry_penalty_last_n": 2**31 - 1,
        "penalty_repeat": 1.1,
        "dry_multiplier": 0.8,
    }
    with Sampler(model, params, settings) as sampler:
        (token,) = sample_many(model, [sampler], [index])
        assert isinstance(token, int)


def test_a_bias_of_minus_infinity_forbids_a_token(model: Model, params: Params) -> None:
    index = len(prompt(model)) - 1
    with Sampler(model, params, {"temp": 0.0}) as sampler:
        (first,) = sample_many(model, [sampler], [index])
    for bias in ("-inf", float("-inf")):
        with Sampler(model, params, {"temp": 0.0, "logit_bias": [[first, bias]]}) as sampler:
            assert sample_many(model, [sampler], [index]) != [first]


def test_a_bias_of_a_hundred_forces_a_token(model: Model, params: Params) -> None:
    index = len(prompt(model)) - 1
    with Sampler(model, params, {"temp": 0.0, "logit_bias": [[42, 100]]}) as sampler:
        assert sample_many(model, [sampler], [index]) == [42]


def test_a_grammar_decides_the_text(model: Model, params: Params) -> None:
    settings = {"grammar": {"type": "user", "value": 'root ::= "yes, 🙂"'}}
    with Sampler(model, params, settings) as sampler:
        tokens = generate(model, sampler, 32)
    assert model.vocab.is_eog(tokens[-1])
    assert model.vocab.detokenize(tokens[:-1]) == "yes, 🙂".encode()


def test_a_lazy_grammar_waits_for_its_trigger(model: Model, params: Params) -> None:
    vocab = model.vocab
    (trigger,) = vocab.tokenize("<s>", False, True)
    settings = {
        "grammar": {"type": "tool_calls", "value": 'root ::= "<s>abc"'},
        "grammar_lazy": True,
        "grammar_triggers": [{"type": "token", "value": "<s>", "token": trigger}],
        "preserved_tokens": [trigger],
    }
    index = len(prompt(model)) - 1
    with Sampler(model, params, {**settings, "temp": 0.0}) as free, Sampler(model, params, {"temp": 0.0}) as plain:
        assert sample_many(model, [free], [index]) == sample_many(model, [plain], [index])
        free.accept([trigger], True)
        text = b""
        while True:
            (token,) = sample_many(model, [free], [index])
            assert isinstance(token, int)
            if vocab.is_eog(token):
                break
            text += vocab.piece(token)
        assert text == b"abc"


@pytest.mark.parametrize("extra", [{}, {"temp": 0.0}, {"mirostat": 1}, {"mirostat": 2}, {"samplers": []}])
def test_a_grammar_that_no_token_fits_is_an_error_of_that_sampler(
    model: Model, params: Params, extra: dict[str, Any]
) -> None:
    index = len(prompt(model)) - 1
    banned = [[token, "-inf"] for token in model.vocab.eog]
    settings = {"grammar": {"type": "user", "value": 'root ::= ""'}, "logit_bias": banned, **extra}
    with Sampler(model, params, settings) as sampler:
        for _ in range(2):  # a sampler that failed stays failed
            (result,) = sample_many(model, [sampler], [index])
            assert isinstance(result, NativeError)
        with pytest.raises(NativeError, match="failed before"):
            sampler.accept([5], True)


def test_the_infill_sampler_cannot_end_against_the_grammar(model: Model, params: Params) -> None:
    # whatever is likely is out of the question, so that the infill sampler falls back to the end of the turn
    settings = {"grammar": {"type": "user", "value": "root ::= [a-z]{40}"}, "samplers": ["infill"]}

    def run(seed: int) -> str:
        model.context.memory.clear()
        with Sampler(model, params, {**settings, "seed": seed}) as sampler:
            try:
                tokens = generate(model, sampler, 41)
            except NativeError as error:
                return str(error)
            return model.vocab.detokenize(tokens, special=False).decode()

    outcomes = [run(seed) for seed in range(10)]
    assert "no token fits the grammar" in outcomes
    assert all(len(outcome) == 40 for outcome in outcomes if outcome != "no token fits the grammar")


def test_the_infill_sampler_ends_where_the_grammar_allows_it(model: Model, params: Params) -> None:
    settings = {"grammar": {"type": "user", "value": "root ::= [a-z]*"}, "samplers": ["infill"], "seed": 1}
    with Sampler(model, params, settings) as sampler:
        assert model.vocab.is_eog(generate(model, sampler, 40)[-1])


def test_an_end_cannot_be_accepted_by_hand_under_a_grammar(model: Model, params: Params) -> None:
    with Sampler(model, params, {"grammar": {"type": "user", "value": 'root ::= "a"'}}) as sampler:
        with pytest.raises(NativeError, match="end of generation"):
            sampler.accept([model.vocab.eos], True)
        sampler.accept([model.vocab.eos], False)


def test_a_token_against_the_grammar_ends_the_sampler(model: Model, params: Params) -> None:
    (token,) = model.vocab.tokenize("b", False, False)[-1:]
    with Sampler(model, params, {"grammar": {"type": "user", "value": 'root ::= "a"'}}) as sampler:
        with pytest.raises(NativeError, match="grammar"):
            sampler.accept([token], True)
        with pytest.raises(NativeError, match="failed before"):
            sampler.accept([token], False)


def test_tokens_outside_the_vocabulary_are_not_accepted(model: Model, params: Params) -> None:
    with Sampler(model, params, {}) as sampler:
        for token in (-1, model.vocab.n_tokens):
            with pytest.raises(NativeError, match="out of range"):
                sampler.accept([5, token], False)
        with pytest.raises(ValueError, match=r"\S"):
            sampler.accept([2**31], False)


def test_history_is_used_and_forgotten(model: Model, params: Params) -> None:
    index = len(prompt(model)) - 1
    with Sampler(model, params, {"temp": 0.0, "penalty_repeat": 1000.0, "penalty_last_n": 64}) as sampler:
        (first,) = sample_many(model, [sampler], [index])
        assert isinstance(first, int)
        sampler.reset()
        assert sample_many(model, [sampler], [index]) == [first]
        assert sample_many(model, [sampler], [index]) != [first]


# probabilities


def test_raw_probabilities_are_the_softmax_of_the_logits(model: Model, params: Params) -> None:
    index = len(prompt(model)) - 1
    logits = model.context.logits_ith(index)
    assert logits is not None
    wide = np.exp(logits.astype(np.float64) - logits.max())
    expected = wide / wide.sum()
    with Sampler(model, params, {"n_probs": 5}) as sampler:
        (token,) = sample_many(model, [sampler], [index])
        assert isinstance(token, int)
        prob, top = token_probs(model, sampler, index, token, 5, False)
    assert prob == pytest.approx(expected[token], rel=1e-4)
    assert [t for t, _ in top] == np.argsort(-expected, kind="stable")[:5].tolist()
    assert [p for _, p in top] == pytest.approx(np.sort(expected)[::-1][:5].tolist(), rel=1e-4)


def test_post_sampling_probabilities_are_those_of_the_chain(model: Model, params: Params) -> None:
    index = len(prompt(model)) - 1
    with Sampler(model, params, {"n_probs": 50, "top_k": 3, "top_p": 1.0, "min_p": 0.0}) as sampler:
        with pytest.raises(NativeError, match="nothing was sampled"):
            token_probs(model, sampler, index, 0, 5, True)
        (token,) = sample_many(model, [sampler], [index])
        assert isinstance(token, int)
        prob, top = token_probs(model, sampler, index, token, 50, True)
        assert len(top) == 3
        assert sum(p for _, p in top) == pytest.approx(1.0, abs=1e-4)
        assert dict(top)[token] == prob
        assert [p for _, p in top] == sorted((p for _, p in top), reverse=True)
        others = set(range(model.vocab.n_tokens)) - {t for t, _ in top}
        assert token_probs(model, sampler, index, min(others), 0, True) == (0.0, [])


def test_probabilities_where_there_are_none(model: Model, params: Params) -> None:
    index = len(prompt(model)) - 1
    with Sampler(model, params, {}) as sampler:
        with pytest.raises(NativeError, match="no logits"):
            token_probs(model, sampler, index + 1, 0, 5, False)
        with pytest.raises(ValueError, match="n_top"):
            token_probs(model, sampler, index, 0, -1, False)
        _, top = token_probs(model, sampler, index, 0, 2**31 - 1, False)
        assert len(top) == model.vocab.n_tokens


# grammars


def test_a_schema_becomes_a_grammar_that_parses(model: Model) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    grammar = json_schema_to_grammar(schema)
    assert "root ::=" in grammar
    check_grammar(model.vocab, grammar)


@pytest.mark.parametrize(
    "schema",
    ["{", '{"type": "nope"}', '{"$ref": "#/nowhere"}', '{"anyOf":[' * 100000, '{"items":' * 5000 + "{}" + "}" * 5000],
)
def test_a_wrong_schema_is_a_native_error(schema: str) -> None:
    with pytest.raises(NativeError):
        json_schema_to_grammar(schema)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a',
        'other ::= "a"',
        "root ::= missing",
        'root ::= root "a"',
        "root ::= " + "(" * 100000 + '"a"' + ")" * 100000,
        "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(100000)) + 'a100000 ::= "a"\n',
        "%llguidance {}",
    ],
)
def test_a_wrong_grammar_is_a_native_error(model: Model, grammar: str) -> None:
    with pytest.raises(NativeError, match=r"^failed to parse grammar"):
        check_grammar(model.vocab, grammar)


def test_brackets_in_literals_and_classes_are_no_nesting(model: Model) -> None:
    check_grammar(model.vocab, 'root ::= "' + "(" * 5000 + '" [(' + "(" * 5000 + "]")
    assert json_schema_to_grammar('{"const": "' + "[" * 5000 + '"}')


def test_nul_in_a_grammar_or_schema_is_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="NUL"):
        check_grammar(model.vocab, "root ::= \0")
    with pytest.raises(ValueError, match="NUL"):
        json_schema_to_grammar("{}\0")


# ownership


@pytest.mark.parametrize("order", list(itertools.permutations(["params", "model", "sampler"])))
def test_objects_can_be_closed_in_any_order(tiny_model_path: Path, order: tuple[str, ...]) -> None:
    params = make_params(tiny_model_path)
    model = Model.load(params)
    objects: dict[str, Any] = {"params": params, "model": model, "sampler": Sampler(model, params, {})}
    for name in order:
        objects[name].close()
    for name in order:
        objects[name].close()


@pytest.mark.parametrize("order", list(itertools.permutations(["params", "model", "sampler", "memory"])))
def test_objects_can_be_dropped_in_any_order(tiny_model_path: Path, order: tuple[str, ...]) -> None:
    params = make_params(tiny_model_path)
    model = Model.load(params)
    objects: dict[str, Any] = {
        "params": params,
        "model": model,
        "sampler": Sampler(model, params, {}),
        "memory": model.context.memory,
    }
    del params, model
    for name in order:
        kept = dict(objects)
        del objects[name]
        kept.clear()
        gc.collect()
        if "memory" in objects:
            assert objects["memory"].seq_pos_max(0) == -1


def test_everything_of_a_closed_model_says_so(tiny_model_path: Path) -> None:
    with make_params(tiny_model_path) as params:
        model = Model.load(params)
        sampler = Sampler(model, params, {})
        context, vocab = model.context, model.vocab
        batch = Batch(1)
        batch.add(5, 0, 0, True)
        model.close()
        model.close()
        calls: list[Callable[[], Any]] = [
            lambda: context.decode(batch, 0, 1, sync=True, serial=1),
            context.synchronize,
            context.seq_rm_type,
            context.perf,
            lambda: context.n_reused,
            lambda: context.causal_attn,
            lambda: context.set_embeddings(True),
            lambda: context.logits_ith(0),
            lambda: context.embeddings_ith(0),
            lambda: context.embeddings_seq(0),
            lambda: context.state_seq_get(0),
            lambda: context.state_seq_set(0, b"x"),
            lambda: context.memory.seq_rm(0, -1, -1),
            lambda: context.memory.seq_pos_max(0),
            context.memory.clear,
            lambda: vocab.tokenize("a", True, True),
            lambda: vocab.pieces(True),
            lambda: check_grammar(vocab, 'root ::= "a"'),
            model.info,
            model.meta,
            model.lora_info,
            lambda: model.set_lora([]),
            lambda: Sampler(model, params, {}),
            lambda: sampler.accept([5], True),
            sampler.reset,
            sampler.describe,
            lambda: sample_many(model, [sampler], [0]),
            lambda: token_probs(model, sampler, 0, 0, 1, True),
        ]
        for call in calls:
            with pytest.raises(ClosedError):
                call()
        context.abort(1)
        context.stop()
        assert vocab.is_eog(vocab.eos)
        assert model.n_params > 0


def test_a_closed_sampler_is_refused_and_the_model_goes_on(model: Model, params: Params) -> None:
    index = len(prompt(model)) - 1
    first, second = Sampler(model, params, {}), Sampler(model, params, {})
    first.close()
    with pytest.raises(ClosedError, match="sampler is closed"):
        sample_many(model, [second, first], [index, index])
    (token,) = sample_many(model, [second], [index])
    assert isinstance(token, int)


def test_closing_waits_for_calls_on_other_threads(tiny_model_path: Path) -> None:
    args = ["-c", "4096", "-np", "1", "-b", "4096", "-ub", "16"]
    with make_params(tiny_model_path, *args) as params, ThreadPoolExecutor(3) as pool:
        model = Model.load(params)
        batch = Batch(4096)
        batch.extend([5] * 4096, 0, 0, False)
        tokenizing = threading.Semaphore(0)

        def tokenize() -> None:
            while True:
                model.vocab.tokenize(TEXT, True, True)
                tokenizing.release()

        readers = [pool.submit(tokenize) for _ in range(2)]
        decoding = pool.submit(model.context.decode, batch, 0, batch.n_tokens, sync=True, serial=1)
        for _ in range(100):
            tokenizing.acquire()
        assert not decoding.done()
        model.close()
        assert decoding.result() == 0
        for reader in readers:
            with pytest.raises(ClosedError):
                reader.result()


def test_samplers_can_be_made_on_many_threads(model: Model, params: Params) -> None:
    def make(seed: int) -> int:
        settings = {"seed": seed, "grammar": {"type": "user", "value": "root ::= [a-z]+"}}
        with Sampler(model, params, settings) as sampler:
            return sampler.seed

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(make, range(64))) == list(range(64))


def test_perf_counts(model: Model) -> None:
    before = model.context.perf()
    prompt(model)
    after = model.context.perf()
    assert after["n_p_eval"] > before["n_p_eval"]
    assert model.context.n_reused == after["n_reused"]
