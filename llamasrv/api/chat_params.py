"""From a request of OpenAI's chat API to a completion request and what reads its answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamasrv import binding
from llamasrv.api.chat_forced import calling_session, with_instructions
from llamasrv.api.chat_messages import MAX_MESSAGES, quote, read_messages
from llamasrv.api.chat_settings import ChatSettings
from llamasrv.api.chat_tools import MAX_TOOLS, TOOL_CHOICE, ToolUse, read_tools
from llamasrv.api.errors import invalid_request
from llamasrv.api.fields import INT32_MAX, FieldError, Limits, as_bool, as_int, as_object, as_string, bounded_int
from llamasrv.api.grammar import GrammarUse
from llamasrv.api.handlers import REASONING_FORMATS
from llamasrv.api.jsonio import type_name
from llamasrv.api.openapi_schema import (
    BOOLEAN,
    INTEGER,
    OBJECT,
    STRING,
    Member,
    array,
    checked,
    either,
    enum,
    integer,
    object_of,
    ref,
)
from llamasrv.api.protocols import Vocab
from llamasrv.engine.task import TaskParams

#: Members of the request that are no fields of a completion, or that the chat session provides.
_CONSUMED = frozenset({"messages", "tools", "grammar_lazy", "grammar_triggers", "preserved_tokens"})
_MANY_CALLS = re.compile(r"^(tool-calls ::= )\((tool-call\?? space)\)\+$", re.MULTILINE)
#: Variables that a request may give the template.
_MAX_KWARGS = 256
#: Alternatives per token with ``logprobs`` alone.
_N_PROBS = 20


#: Members of a request beside the fields of a completion.
MEMBERS = (
    Member(
        "messages",
        array(ref("ChatMessage"), maxItems=MAX_MESSAGES),
        "The conversation; `--jinja` templates may demand more.",
        True,
    ),
    Member("tools", array(ref("ChatTool"), maxItems=MAX_TOOLS), "Functions that the model may call."),
    Member("tool_choice", TOOL_CHOICE, "Whether a tool is called, which, or which of them are allowed."),
    Member("parallel_tool_calls", BOOLEAN, "Whether one answer may have several calls."),
    Member(
        "response_format",
        checked(object_of({"type": enum("text", "json_object", "json_schema"), "json_schema": OBJECT})),
        "Form of the answer: text, any JSON object, or what fits a schema.",
    ),
    Member("logprobs", either(BOOLEAN, INTEGER), "Log-probabilities of the answer's tokens."),
    Member("top_logprobs", INTEGER, "Likely tokens at each place, with `logprobs` true only."),
    Member("add_generation_prompt", BOOLEAN, "Whether the prompt ends with the beginning of an answer (true)."),
    Member("chat_template_kwargs", checked(OBJECT), "Variables of the template."),
    Member("reasoning_effort", STRING, "`none` turns reasoning off; other values are the template's."),
    Member("thinking_budget_tokens", integer(-1, INT32_MAX), "Another name of `reasoning_budget_tokens`."),
)


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat request turned into a completion request.

    ``data``: the completion request, with ``prompt``. ``answer``: reads the answer; :meth:`~binding.ChatSession.clone`
    it for each of several. ``prompted``: the rendered prompt, often the same session. ``grammar``, ``grammar_lazy`` and
    ``generation_prompt``: for the sampler.
    """

    data: dict[str, Any]
    answer: binding.ChatSession
    prompted: binding.ChatSession
    grammar: str = ""
    grammar_lazy: bool = False
    generation_prompt: str = ""

    @property
    def prompt(self) -> str:
        return self.prompted.prompt

    def apply_to(self, params: TaskParams) -> None:
        """Set what the chat demands of sampling and stopping, over what was read from :attr:`data`."""
        sampling, answer = params.sampling, self.answer
        if self.grammar:
            sampling.grammar = ("tool_calls", self.grammar)
        sampling.grammar_lazy = self.grammar_lazy
        sampling.generation_prompt = self.generation_prompt
        sampling.preserved_tokens |= answer.preserved_tokens
        if answer is self.prompted:
            sampling.grammar_triggers += tuple(answer.grammar_triggers)
        params.chat_format = answer.format
        params.antiprompt += self.prompted.additional_stops

    def user_starts(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Positions in the tokens of the prompt at which messages of the user begin, ascending."""
        spans = self.prompted.message_spans(tokens)
        return tuple(span.pos for span in spans if span.role is binding.Role.USER)


def parse_chat(body: Mapping[str, Any], settings: ChatSettings, vocab: Vocab, grammars: GrammarUse) -> ChatPlan:
    """Check a chat request and render its prompt. Raises ApiError (400)."""
    use = read_tools(body, settings.use_jinja)
    user_grammar = _read(body, "grammar", as_string, "")
    schema = _read_schema(body, user_grammar)
    object_arguments = settings.use_jinja and settings.templates.caps["supports_object_arguments"]
    messages = read_messages(body, object_arguments)
    if use.is_possible and user_grammar:
        raise invalid_request("Cannot use custom grammar constraints with tools.")
    _check_probs(body, use)

    request = binding.ChatRequest(
        messages,
        tools=use.tools,
        tool_choice=use.choice,
        parallel_tool_calls=_read(
            body, "parallel_tool_calls", as_bool, settings.templates.caps["supports_parallel_tool_calls"]
        ),
        # a demanded call leaves no room for another answer
        json_schema=None if use.is_demanded or schema is None else _usable(grammars, schema),
        grammar=user_grammar,
        add_generation_prompt=_read(body, "add_generation_prompt", as_bool, True),
        reasoning_format=_read_reasoning_format(body, settings),
        force_pure_content=settings.force_pure_content,
        echo=_read(body, "echo", as_bool, False),
    )
    _read_continuation(body, settings, request)
    _read_template_kwargs(body, settings, request)

    native = vocab if isinstance(vocab, binding.Vocab) else None
    try:
        plan = _render(body, settings, request, native)
    except (binding.NativeError, ValueError) as error:
        raise invalid_request(str(error)) from None
    plan = _constrain(plan, use, request, grammars)
    _read_budget(body, settings, plan)
    return plan


def _render(
    body: Mapping[str, Any], settings: ChatSettings, request: binding.ChatRequest, vocab: binding.Vocab | None
) -> ChatPlan:
    prompted = answer = settings.templates.apply(request, vocab)
    if request.tool_choice == "required" and not prompted.grammar and not settings.force_pure_content:
        tools = request.tools or ()
        request.messages = with_instructions(request.messages, tools)
        request.tools, request.tool_choice, request.enable_thinking = None, "none", False
        prompted = settings.templates.apply(request, vocab)
        answer = calling_session(tools, request.parallel_tool_calls, vocab)
    data: dict[str, Any] = {"prompt": prompted.prompt}
    data.update((key, value) for key, value in body.items() if key not in data and key not in _CONSUMED)
    return ChatPlan(data, answer, prompted)


def _constrain(plan: ChatPlan, use: ToolUse, request: binding.ChatRequest, grammars: GrammarUse) -> ChatPlan:
    """Choose the grammar. Whatever is demanded is enforced or refused, never let go."""
    answer, data = plan.answer, plan.data
    one_call = bool(request.tools) and not request.parallel_tool_calls
    if answer.grammar:
        data.pop("grammar", None)
        data.pop("json_schema", None)
        if answer is not plan.prompted:
            # the calls begin at once: nothing of the prompt is part of the grammar
            return ChatPlan(data, answer, plan.prompted, _checked(grammars, answer.grammar))
        grammar = _checked(grammars, _limited(answer.grammar, one_call))
        if use.is_demanded:
            grammar = _first_usable(grammars, _limited(answer.grammar_of_calls, one_call), grammar)
        return ChatPlan(data, answer, answer, grammar, answer.grammar_lazy, answer.generation_prompt)
    if request.json_schema is not None:
        # a template whose parser does not care for schemas
        data.pop("json_schema", None)
        data["grammar"] = _from_schema(grammars, request.json_schema)
    return ChatPlan(data, answer, plan.prompted, generation_prompt=answer.generation_prompt)


def _limited(grammar: str, one_call: bool) -> str:
    """The grammar with at most one call; where a tag surrounds each call the native library allows any number."""
    return _MANY_CALLS.sub(r"\1\2", grammar) if one_call else grammar


def _checked(grammars: GrammarUse, text: str) -> str:
    try:
        grammars.check(text)
    except ValueError as error:
        raise invalid_request(str(error)) from None
    return text


def _first_usable(grammars: GrammarUse, wanted: str, other: str) -> str:
    try:
        grammars.check(wanted)
    except ValueError:
        return other
    return wanted


def _usable(grammars: GrammarUse, schema: Any) -> Any:
    try:
        return grammars.usable_schema(schema)
    except ValueError as error:
        raise invalid_request(f'"json_schema": {error}') from None


def _from_schema(grammars: GrammarUse, schema: Any) -> str:
    try:
        return grammars.from_json_schema(schema)
    except ValueError as error:
        raise invalid_request(f'"json_schema": {error}') from None


def _read_schema(body: Mapping[str, Any], grammar: str) -> Any:
    """The schema of the answer from ``json_schema`` or ``response_format``, None if any answer will do."""
    schema = body.get("json_schema")
    if schema is not None and grammar:
        raise invalid_request("Cannot use both json_schema and grammar")
    wanted = body.get("response_format")
    if wanted is not None:
        if not isinstance(wanted, dict):
            raise invalid_request(f"'response_format' must be an object, but is {type_name(wanted)}")
        kind = wanted.get("type")
        if kind == "json_object":
            if wanted.get("schema") is not None or not schema:
                schema = wanted.get("schema") or {}
        elif kind == "json_schema":
            schema = _schema_of(wanted)
        elif kind not in (None, "", "text"):
            raise invalid_request(
                'response_format type must be one of "text", "json_object" or "json_schema", '
                f"but got: {kind if isinstance(kind, str) else quote(kind)}"
            )
    # no schema is any object
    return {"type": "object"} if schema == {} else schema


def _schema_of(wanted: dict[str, Any]) -> Any:
    """The schema of a ``response_format`` of type "json_schema"; some clients leave out the wrapper."""
    wrapper = wanted.get("json_schema")
    if wrapper is None and wanted.get("schema") is not None:
        return wanted["schema"]
    if wrapper is None:
        raise invalid_request("'response_format.json_schema' is required")
    if not isinstance(wrapper, dict):
        raise invalid_request(f"'response_format.json_schema' must be an object, but is {type_name(wrapper)}")
    if wrapper.get("schema") is None:
        raise invalid_request("'response_format.json_schema.schema' is required")
    return wrapper["schema"]


def _read_reasoning_format(body: Mapping[str, Any], settings: ChatSettings) -> str:
    name: str = _read(body, "reasoning_format", as_string, settings.reasoning_format)
    if name not in REASONING_FORMATS:
        raise invalid_request(f"Unknown reasoning format: {name}")
    return name


def _read_continuation(body: Mapping[str, Any], settings: ChatSettings, request: binding.ChatRequest) -> None:
    """Whether the last message is to be continued: because the request says so, or because it is the assistant's."""
    wanted = body.get("continue_final_message")
    if wanted is not None and not isinstance(wanted, bool) and wanted not in ("content", "reasoning_content"):
        raise invalid_request('Invalid continue_final_message: expected a boolean, "content" or "reasoning_content"')
    roles = [message["role"] for message in request.messages]
    if not wanted and settings.prefill_assistant and roles[-1:] == ["assistant"]:
        if roles[-2:] == ["assistant", "assistant"]:
            raise invalid_request("Cannot have 2 or more assistant messages at the end of the list.")
        wanted = True
        request.add_generation_prompt = False
    if not wanted:
        return
    if request.add_generation_prompt:
        raise invalid_request("Cannot set both add_generation_prompt and continue_final_message to true.")
    if roles[-1:] == ["assistant"] and request.messages[-1].get("tool_calls"):
        raise invalid_request("Cannot continue an assistant message that contains tool calls.")
    request.continue_final_message = wanted


def _read_template_kwargs(body: Mapping[str, Any], settings: ChatSettings, request: binding.ChatRequest) -> None:
    """Variables of the template, and whether the model is to reason."""
    given = _read(body, "chat_template_kwargs", as_object, {})
    if len(given) > _MAX_KWARGS:
        raise invalid_request(f"Field 'chat_template_kwargs': there are too many (limit {_MAX_KWARGS})")
    kwargs = {**settings.template_kwargs, **given}
    request.enable_thinking = settings.enable_thinking
    thinking = kwargs.get("enable_thinking")
    if isinstance(thinking, bool):
        request.enable_thinking = thinking
    elif isinstance(thinking, str):
        raise invalid_request('invalid type for "enable_thinking" (expected boolean, got string)')
    effort = _read(body, "reasoning_effort", as_string, "")
    if effort == "none":
        request.enable_thinking = False
        kwargs.pop("reasoning_effort", None)
    elif effort:
        kwargs["reasoning_effort"] = effort
    request.template_kwargs = kwargs


def _check_probs(body: Mapping[str, Any], use: ToolUse) -> None:
    if body.get("logprobs") is True:
        if use.tools and body.get("stream") is True:
            raise invalid_request("logprobs is not supported with tools + stream")
    elif not body.get("logprobs") and body.get("top_logprobs") is not None:
        raise invalid_request("top_logprobs requires logprobs to be set to true")


def _read_budget(body: Mapping[str, Any], settings: ChatSettings, plan: ChatPlan) -> None:
    """Fields of the completion that follow from others: bounds of reasoning, number of probabilities."""
    data, session = plan.data, plan.answer
    if isinstance(body.get("logprobs"), bool):
        del data["logprobs"]
        if body["logprobs"]:
            data["n_probs"] = _read(body, "top_logprobs", as_int, _N_PROBS)
    if session.thinking_end_tags:
        budget = _read(
            body, "reasoning_budget_tokens", _as_budget, _read(body, "thinking_budget_tokens", _as_budget, -1)
        )
        data["reasoning_budget_tokens"] = settings.reasoning_budget if budget == -1 else budget
        data["reasoning_budget_start_tag"] = session.thinking_start_tag
        data["reasoning_budget_end_tags"] = list(session.thinking_end_tags)
        data["reasoning_budget_message"] = _read(
            body, "reasoning_budget_message", as_string, settings.reasoning_budget_message
        )
        data["reasoning_control"] = _read(body, "reasoning_control", as_bool, False)


def _as_budget(value: Any) -> int:
    return bounded_int(as_int(value), Limits(-1, INT32_MAX))


def _read(body: Mapping[str, Any], name: str, convert: Any, default: Any) -> Any:
    """The field ``name``; null is the same as absent."""
    value = body.get(name)
    if value is None:
        return default
    try:
        return convert(value)
    except FieldError as error:
        raise invalid_request(f"Field '{name}': {error}") from None
