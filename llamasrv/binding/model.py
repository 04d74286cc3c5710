"""A loaded model with its vocabulary and its context."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from llamasrv.binding.context import Context
from llamasrv.binding.errors import NativeError
from llamasrv.binding.native import (
    NULL,
    Closing,
    Handle,
    c_text,
    check,
    error_text,
    ffi,
    int_arg,
    lib,
    new_text_pointer,
    take_text,
    text_of,
)
from llamasrv.binding.params import Params
from llamasrv.binding.vocab import Vocab


class _Progress:
    """What the native progress callback of one load finds behind its user data."""

    __slots__ = ("error", "report", "stopped")

    def __init__(self, report: Callable[[float], bool]) -> None:
        self.report = report
        self.stopped = False
        self.error: BaseException | None = None


def _on_progress(progress: float, user_data: Any) -> bool:
    state: _Progress = ffi.from_handle(user_data)
    try:
        go_on = bool(state.report(progress))
    except BaseException as error:  # goes on in Model.load: it cannot cross C
        state.error = error
        go_on = False
    state.stopped = state.stopped or not go_on
    return go_on


ffi.def_extern(name="lsrv_py_progress", error=False)(_on_progress)


def load_with_progress(
    report: Callable[[float], bool] | None, load: Callable[[Any, Any, Any], int], failed: str
) -> str | None:
    """Run ``load(callback, user_data, err)``, a native call that loads a model and tells its progress.

    Raises what ``report`` raised, or NativeError. Returns the text that a successful call left in ``err``, if any.
    """
    err = new_text_pointer()
    state = _Progress(report) if report is not None else None
    user_data = ffi.new_handle(state) if state is not None else NULL
    callback = lib.lsrv_py_progress if state is not None else NULL
    status = load(callback, user_data, err)
    if status == 0:
        return take_text(err) if err[0] != NULL else None
    text = error_text(err, failed)
    if state is not None and state.error is not None:
        raise state.error
    if state is not None and state.stopped:
        raise NativeError("loading was stopped")
    raise NativeError(text)


class SampleArrays:
    """Argument arrays of :func:`sample_many`, kept from step to step."""

    __slots__ = ("capacity", "ids", "indices", "n_top", "probs", "samplers", "status", "tokens")

    def __init__(self) -> None:
        self.capacity = 0
        self.n_top = 0
        self.grow(16)
        self.grow_top(32)

    def grow(self, n: int) -> None:
        if n > self.capacity:
            self.capacity = max(n, 2 * self.capacity)
            self.samplers = ffi.new("lsrv_sampler *[]", self.capacity)
            self.indices = ffi.new("int32_t[]", self.capacity)
            self.tokens = ffi.new("int32_t[]", self.capacity)
            self.status = ffi.new("int8_t[]", self.capacity)

    def grow_top(self, n: int) -> None:
        if n > self.n_top:
            self.n_top = n
            self.ids = ffi.new("int32_t[]", n)
            self.probs = ffi.new("float[]", n)


class Model(Closing):
    """Model and context of one set of parameters. The plain attributes stay readable after :meth:`close`.

    ``n_ctx_train``: context it was trained with; ``n_embd``, ``n_embd_inp``, ``n_embd_out``: widths of the hidden
    state, of an input and of an output embedding; ``size``: bytes of all tensors; ``n_swa``: sliding window, 0 if none;
    ``n_lora``: loaded adapters.
    """

    __slots__ = (
        "_engine",
        "_params",
        "_pointer",
        "attached",
        "context",
        "desc",
        "has_encoder",
        "is_hybrid",
        "is_recurrent",
        "n_ctx_train",
        "n_embd",
        "n_embd_inp",
        "n_embd_out",
        "n_lora",
        "n_params",
        "n_swa",
        "sample_arrays",
        "size",
        "vocab",
    )

    def __init__(self, engine: Handle, params: Params) -> None:
        self._engine = engine
        self._params = params
        self.sample_arrays = SampleArrays()
        #: Per sequence what runs on the backend, kept alive; see :func:`llamasrv.binding.set_sampler`.
        self.attached: dict[int, object] = {}
        with engine as pointer:
            self._pointer = model = lib.lsrv_engine_model(pointer)
            self.n_lora = int(lib.lsrv_engine_n_lora(pointer))
            context = lib.lsrv_engine_context(pointer)
            self.n_ctx_train = int(lib.llama_model_n_ctx_train(model))
            self.n_embd = int(lib.llama_model_n_embd(model))
            self.n_embd_inp = int(lib.llama_model_n_embd_inp(model))
            self.n_embd_out = int(lib.llama_model_n_embd_out(model))
            self.n_params = int(lib.llama_model_n_params(model))
            self.size = int(lib.llama_model_size(model))
            self.n_swa = int(lib.llama_model_n_swa(model))
            self.is_recurrent = bool(lib.llama_model_is_recurrent(model))
            self.is_hybrid = bool(lib.llama_model_is_hybrid(model))
            self.has_encoder = bool(lib.llama_model_has_encoder(model))
            self.desc = _read(lambda buf, size: lib.llama_model_desc(model, buf, size))
            self.vocab = Vocab(engine, lib.llama_model_get_vocab(model))
            self.context = Context(
                engine,
                context,
                kv_unified=bool(params.to_dict()["kv_unified"]),
                n_embd_out=self.n_embd_out,
                n_cls_out=int(lib.llama_model_n_cls_out(model)),
                n_vocab=self.vocab.n_tokens,
            )

    @classmethod
    def load(cls, params: Params, progress: Callable[[float], bool] | None = None) -> Model:
        """Load the model file, make the context, apply LoRA and control vectors, warm up.

        ``progress`` is called on this thread with 0.0 ... 1.0; it stops the load by returning False or by raising; what
        it raises goes on to the caller. Loading fills in parameters (adapters' names, the model's own sampling
        defaults, ...). Raises NativeError.
        """
        out = ffi.new("lsrv_engine **")
        with params._handle as pointer:
            load_with_progress(
                progress,
                lambda callback, user_data, err: int(lib.lsrv_engine_load(pointer, callback, user_data, out, err)),
                "failed to load the model",
            )
        engine = Handle("model", out[0], lib.lsrv_engine_free)
        try:
            return cls(engine, params)
        except BaseException:
            engine.close()
            raise

    def info(self) -> dict[str, Any]:
        """``ftype``, ``decision_type``, ``chat_template``, ``chat_template_tool_use``, ``chat_template_caps``,
        ``logit_bias_eog`` (see bridge.h). Raises NativeError, for example when the chat template does not parse."""
        out, err = new_text_pointer(), new_text_pointer()
        with self._engine as engine, self._params._handle as params:
            check(lib.lsrv_model_info_json(engine, params, out, err), err, "describing the model")
        info: dict[str, Any] = json.loads(take_text(out))
        return info

    def chat_template(self, name: str | None = None) -> str | None:
        """A template of the GGUF file as it stands there: the default one, or "rerank", "systemone", "tool_use", ..."""
        c_name = NULL if name is None else c_text("name", name)
        with self._engine:
            text = lib.llama_model_chat_template(self._pointer, c_name)
            return None if text == NULL else text_of(text)

    def meta(self) -> dict[str, str]:
        """The scalar metadata of the GGUF file, as text."""
        model = self._pointer
        with self._engine:
            return {
                _read(lambda buf, size, i=i: lib.llama_model_meta_key_by_index(model, i, buf, size)): _read(
                    lambda buf, size, i=i: lib.llama_model_meta_val_str_by_index(model, i, buf, size)
                )
                for i in range(lib.llama_model_meta_count(model))
            }

    def set_lora(self, adapters: Sequence[tuple[int, float]]) -> None:
        """Apply exactly these ``(index, scale)`` of the ``--lora`` adapters. Raises NativeError for a wrong index."""
        indices = ffi.new("int32_t[]", [int_arg("index", index) for index, _ in adapters])
        scales = ffi.new("float[]", [scale for _, scale in adapters])
        err = new_text_pointer()
        with self._engine as engine:
            status = lib.lsrv_engine_set_lora(engine, indices, scales, len(adapters), err)
        check(status, err, "applying adapters")

    def lora_info(self) -> list[dict[str, Any]]:
        """Each adapter's ``path``, ``scale`` at load, ``task_name``, ``prompt_prefix``, ``alora_invocation_tokens``."""
        out, err = new_text_pointer(), new_text_pointer()
        with self._engine as engine:
            check(lib.lsrv_engine_lora_json(engine, out, err), err, "describing the adapters")
        info: list[dict[str, Any]] = json.loads(take_text(out))
        return info

    def memory_breakdown_print(self) -> None:
        """Log how much memory model, context and computation take on each device."""
        with self._engine as engine:
            lib.lsrv_memory_breakdown_print(engine)

    def close(self) -> None:
        """Free samplers, context and model; waits for calls under way on other threads."""
        self._engine.close()


def _read(fill: Callable[..., int]) -> str:
    """Text of a function that fills a buffer and returns the full length (negative: nothing there)."""
    size = 256
    while True:
        buffer = ffi.new("char[]", size)
        n = int(fill(buffer, size))
        if n < 0:
            return ""
        if n < size:
            return text_of(buffer)
        size = n + 1
