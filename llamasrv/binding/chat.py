"""Chat templates: from messages to a prompt, and from generated text back to a message.

:class:`ChatTemplates` may be used by any thread and outlives the model it was made from. A :class:`ChatSession` belongs
to one answer and one thread; it needs neither model nor templates any more.
"""

from __future__ import annotations

import codecs
import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from llamasrv.binding.errors import NativeError
from llamasrv.binding.model import Model
from llamasrv.binding.native import (
    INT32_MAX,
    NULL,
    Handle,
    NativeObject,
    c_text,
    check,
    error_text,
    ffi,
    lib,
    new_text_pointer,
)
from llamasrv.binding.params import Params
from llamasrv.binding.template_guard import check_template
from llamasrv.binding.vocab import Vocab

#: Brackets within brackets in a request, also within the JSON texts that it holds. Templates recurse over them.
MAX_DEPTH = 200

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


class ChatFormatError(NativeError):
    """The generated text does not fit the format that the request asked for."""


class Role(enum.IntEnum):
    """Author of a message, as the native side numbers them."""

    UNKNOWN = 0
    SYSTEM = 1
    ASSISTANT = 2
    USER = 3
    TOOL = 4


@dataclass(slots=True)
class ChatRequest:
    """What a prompt is made of; names and meanings as in OpenAI's chat API where it has them.

    ``messages``: objects with ``role``, ``content`` (text or parts of type "text") and so on. ``json_schema``: the
    answer has to fit it; None: any answer. ``continue_final_message``: go on with the last message instead of
    beginning a new one; "content" and "reasoning_content" say where. ``template_kwargs``: variables of the template.
    ``echo``: a continued message is part of the answer.
    """

    messages: Sequence[Any]
    tools: Sequence[Any] | None = None
    tool_choice: str = "auto"
    parallel_tool_calls: bool = False
    json_schema: Any = None
    grammar: str = ""
    add_generation_prompt: bool = True
    continue_final_message: bool | str = False
    enable_thinking: bool = True
    reasoning_format: str = "none"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    force_pure_content: bool = False
    echo: bool = False


class GrammarTrigger(NamedTuple):
    """What starts a lazy grammar. ``type``: 0 token, 1 word, 2 pattern, 3 pattern of the whole text; -1: no token."""

    type: int
    value: str
    token: int


class MessageSpan(NamedTuple):
    """A message within the tokens of a prompt: ``tokens[pos : pos + len]``."""

    role: Role
    pos: int
    len: int


@dataclass(frozen=True, slots=True)
class MessageDelimiter:
    """Text, and its tokens, with which every message of a role begins."""

    role: str
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """``arguments``: JSON text, complete once the session is finished."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """An answer of the assistant."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What came to a message: to its reasoning, to its content, or to the tool call number ``index`` (-1: to none).

    ``id`` and ``name`` are given once per tool call; ``arguments`` is the text to append.
    """

    content: str = ""
    reasoning_content: str = ""
    index: int = -1
    id: str = ""
    name: str = ""
    arguments: str = ""


class ChatTemplates(NativeObject):
    """The chat template of a model, or one that replaces it.

    ``source``: its text; ``source_tool_use``: that of the variant for tools, may be empty; ``was_explicit``: whether
    model or user gave one; ``caps``: capability -> whether the template has it; ``supports_thinking``: whether
    reasoning can be switched on; ``example``: a short conversation rendered; ``asr_prompt``: system and user text that
    ask for a transcript.
    """

    __slots__ = (
        "asr_prompt",
        "caps",
        "example",
        "source",
        "source_tool_use",
        "supports_thinking",
        "use_jinja",
        "was_explicit",
    )

    def __init__(
        self,
        source: str = "",
        *,
        model: Model | None = None,
        bos: str = "",
        eos: str = "",
        use_jinja: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Parse ``source``, or the model's own templates when it is empty.

        ``bos``, ``eos``: what these tokens read when there is no model. ``use_jinja``: render the template itself, else
        the built-in imitation of it. ``template_kwargs``: variables for the example. Raises NativeError with the
        template engine's text for a template that does not parse or render, ValueError for one nested too deeply.
        """
        out, err = ffi.new("lsrv_chat_templates **"), new_text_pointer()
        data, bos_data, eos_data = c_text("source", source), c_text("bos", bos), c_text("eos", eos)
        if model is None:
            check_template(source)
            status = lib.lsrv_chat_templates_new(NULL, data, bos_data, eos_data, out, err)
        else:
            with model._engine:
                for own in (source,) if source else _templates_of(model):
                    check_template(own)
                status = lib.lsrv_chat_templates_new(model._pointer, data, bos_data, eos_data, out, err)
        check(status, err, "parsing the chat template")
        self._handle = Handle("chat templates", out[0], lib.lsrv_chat_templates_free)
        self.use_jinja = use_jinja

        described, err = new_text_pointer(), new_text_pointer()
        kwargs = _dumps(dict(template_kwargs or {}))
        with self._handle as pointer:
            status = lib.lsrv_chat_templates_describe(pointer, use_jinja, kwargs, described, err)
        check(status, err, "rendering the chat template")
        info = _take_json(described)
        self.source: str = info["source"]
        self.source_tool_use: str = info["source_tool_use"]
        self.was_explicit: bool = info["explicit"]
        self.caps: dict[str, bool] = info["caps"]
        self.supports_thinking: bool = info["supports_thinking"]
        self.example: str = info["example"]
        self.asr_prompt: tuple[str, str] = (info["asr_prompt"]["system"], info["asr_prompt"]["user"])

    @classmethod
    def from_params(cls, model: Model, params: Params) -> ChatTemplates:
        """The templates that the command line asks for. Raises like the constructor."""
        fields = params.to_dict()
        kwargs = {name: orjson.loads(text) for name, text in fields["default_template_kwargs"].items()}
        return cls(fields["chat_template"], model=model, use_jinja=fields["use_jinja"], template_kwargs=kwargs)

    def apply(self, request: ChatRequest, vocab: Vocab | None = None) -> ChatSession:
        """Render a prompt and make what reads the answer. Without ``vocab`` there are no token ids in the session.

        Raises NativeError with the text of the template engine or of the schema converter, ValueError for what cannot
        be written as JSON or is nested more than MAX_DEPTH deep.
        """
        _check_embedded(request.messages)
        data = _dumps(
            {
                "messages": list(request.messages),
                "tools": None if request.tools is None else list(request.tools),
                "tool_choice": request.tool_choice,
                "parallel_tool_calls": request.parallel_tool_calls,
                "json_schema": request.json_schema,
                "grammar": request.grammar,
                "add_generation_prompt": request.add_generation_prompt,
                "continue_final_message": request.continue_final_message,
                "use_jinja": self.use_jinja,
                "enable_thinking": request.enable_thinking,
                "reasoning_format": request.reasoning_format,
                "chat_template_kwargs": dict(request.template_kwargs),
                "force_pure_content": request.force_pure_content,
                "echo": request.echo,
            }
        )
        out, err = ffi.new("lsrv_chat_session **"), new_text_pointer()
        with self._handle as pointer:
            if vocab is None:
                status = lib.lsrv_chat_session_new(pointer, NULL, data, out, err)
            else:
                with vocab._engine:
                    status = lib.lsrv_chat_session_new(pointer, vocab._pointer, data, out, err)
        check(status, err, "applying the chat template")
        return ChatSession(Handle("chat session", out[0], lib.lsrv_chat_session_free))


class ChatSession(NativeObject):
    """A rendered request and the answer to it as it grows. Made by :meth:`ChatTemplates.apply`; one thread at a time.

    ``prompt``: text to complete; ``generation_prompt``: the end of it that already belongs to the answer; ``format``:
    name of the answer's format; ``grammar``: GBNF, may be empty; ``grammar_of_calls``: where the request demands tool
    calls, the same without prose beside them; ``grammar_lazy``: the grammar begins with one of ``grammar_triggers``;
    ``preserved_tokens``: control tokens whose text the parser has to see; ``additional_stops``:
    texts that end the answer; ``thinking_start_tag``, ``thinking_end_tags``: what surrounds reasoning.
    """

    __slots__ = (
        "_decoder",
        "additional_stops",
        "format",
        "generation_prompt",
        "grammar",
        "grammar_lazy",
        "grammar_of_calls",
        "grammar_triggers",
        "message_delimiters",
        "preserved_tokens",
        "prompt",
        "thinking_end_tags",
        "thinking_start_tag",
    )

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._decoder = _new_decoder()
        out, err = new_text_pointer(), new_text_pointer()
        with handle as pointer:
            check(lib.lsrv_chat_session_describe(pointer, out, err), err, "describing the chat session")
        info = _take_json(out)
        self.prompt: str = info["prompt"]
        self.format: str = info["format"]
        self.grammar: str = info["grammar"]
        self.grammar_of_calls: str = info["grammar_of_calls"]
        self.grammar_lazy: bool = info["grammar_lazy"]
        self.grammar_triggers = tuple(GrammarTrigger(**trigger) for trigger in info["grammar_triggers"])
        self.preserved_tokens: frozenset[int] = frozenset(info["preserved_tokens"])
        self.additional_stops: tuple[str, ...] = tuple(info["additional_stops"])
        self.generation_prompt: str = info["generation_prompt"]
        self.thinking_start_tag: str = info["thinking_start_tag"]
        self.thinking_end_tags: tuple[str, ...] = tuple(info["thinking_end_tags"])
        self.message_delimiters = tuple(
            MessageDelimiter(item["role"], item["delimiter"], tuple(item["tokens"]))
            for item in info["message_delimiters"]
        )

    @property
    def message(self) -> ChatMessage:
        """The message so far."""
        out, err = new_text_pointer(), new_text_pointer()
        with self._handle as pointer:
            check(lib.lsrv_chat_session_message(pointer, out, err), err, "reading the message")
        info = _take_json(out)
        calls = tuple(ToolCall(**call) for call in info["tool_calls"])
        return ChatMessage(info["content"], info["reasoning_content"], calls)

    def feed(self, text: bytes) -> list[ChatDelta]:
        """Add a piece of generated text and tell what it changed. Broken UTF-8 becomes U+FFFD.

        Raises ChatFormatError when the text so far fits no answer, or is nested too deeply.
        """
        return self._feed(text, False)

    def finish(self, text: bytes = b"") -> list[ChatDelta]:
        """Like :meth:`feed` for the last piece: what was waiting for more is decided. Nothing can follow."""
        return self._feed(text, True)

    def _feed(self, text: bytes, is_final: bool) -> list[ChatDelta]:
        # the native parser fails on broken bytes within a tool call
        data = self._decoder.decode(text, is_final).encode()
        if len(data) > INT32_MAX:
            raise ValueError("the text is too long")
        out, err = new_text_pointer(), new_text_pointer()
        with self._handle as pointer:
            status = lib.lsrv_chat_session_feed(pointer, data, len(data), is_final, out, err)
        if status != 0:
            raise ChatFormatError(error_text(err, "parsing the answer failed"))
        return [ChatDelta(**delta) for delta in _take_json(out)] if out[0] != NULL else []

    def message_spans(self, tokens: Sequence[int]) -> list[MessageSpan]:
        """Messages within the tokens of the prompt, ascending; empty if the template's messages have no known begin."""
        if not self.message_delimiters or not tokens:
            return []
        try:
            array = ffi.new("int32_t[]", list(tokens))
        except OverflowError as error:
            raise ValueError(str(error)) from None
        spans, n_spans, err = ffi.new("lsrv_chat_span **"), ffi.new("int32_t *"), new_text_pointer()
        with self._handle as pointer:
            status = lib.lsrv_chat_session_spans(pointer, array, len(tokens), spans, n_spans, err)
        check(status, err, "finding messages")
        try:
            return [MessageSpan(Role(span.role), span.pos, span.len) for span in spans[0][0 : n_spans[0]]]
        finally:
            lib.lsrv_free(spans[0])

    def clone(self) -> ChatSession:
        """An independent session in the same state, for one more answer to the same prompt."""
        out, err = ffi.new("lsrv_chat_session **"), new_text_pointer()
        with self._handle as pointer:
            check(lib.lsrv_chat_session_clone(pointer, out, err), err, "copying the chat session")
        twin = ChatSession.__new__(ChatSession)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._handle = Handle("chat session", out[0], lib.lsrv_chat_session_free)
        twin._decoder = _new_decoder()
        twin._decoder.setstate(self._decoder.getstate())
        return twin


def _new_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _templates_of(model: Model) -> list[str]:
    """The chat templates in the model's metadata."""
    found = []
    for name in (NULL, b"tool_use"):
        pointer = lib.llama_model_chat_template(model._pointer, name)
        if pointer != NULL:
            data: bytes = ffi.string(pointer)
            found.append(data.decode("utf-8", "replace"))
    return found


def _take_json(out: Any) -> Any:
    """The JSON value that a call stored through ``char **out``; frees the text."""
    pointer = out[0]
    out[0] = NULL
    try:
        return orjson.loads(ffi.string(pointer))
    finally:
        lib.lsrv_free(pointer)


def _dumps(value: Any) -> bytes:
    try:
        data = orjson.dumps(value)
    except (TypeError, orjson.JSONEncodeError) as error:
        raise ValueError(f"the request cannot be written as JSON: {error}") from None
    if _is_too_deep(data):
        raise ValueError(f"the request is nested too deeply (limit {MAX_DEPTH})")
    return data


def _check_embedded(messages: Sequence[Any]) -> None:
    """Templates may read a tool call's arguments and a tool's answer as JSON."""
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            continue
        for name, text in _json_texts(message):
            if _is_too_deep(text.encode(errors="replace")):
                raise ValueError(f"messages[{index}]: {name} is nested too deeply (limit {MAX_DEPTH})")


def _json_texts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of the texts in a message that may be JSON."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            yield "arguments", arguments
    content = message.get("content")
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, Mapping))
        content = "".join(text for text in texts if isinstance(text, str))
    if isinstance(content, str) and message.get("role") == "tool" and content.lstrip()[:1] in ("[", "{"):
        yield "content", content


def _is_too_deep(data: bytes) -> bool:
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for byte in _STRING.sub(b"", data).translate(None, _NOT_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        if depth > MAX_DEPTH:
            return True
    return False
