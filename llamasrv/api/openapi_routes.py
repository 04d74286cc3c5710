"""What each route does, takes and answers: one declaration per route."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llamasrv.api.metrics import CONTENT_TYPE as METRICS_TYPE
from llamasrv.api.openapi_schema import STRING, Schema, enum, integer

JSON = "application/json"
EVENTS = "text/event-stream"
HTML = "text/html"


@dataclass(frozen=True, slots=True)
class Parameter:
    """``place``: "path", "query" or "header"."""

    name: str
    place: str
    schema: Schema
    description: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """A route by method and path, the latter as it is registered.

    ``body``: name of the request's schema; ``answer``: that of the answer in JSON. ``other``: what else may come, by
    content type. ``errors``: statuses beside those that every route has. ``example``: a body for the manual.
    """

    method: str
    path: str
    tag: str
    summary: str
    answer: str = ""
    body: str = ""
    needs_body: bool = True
    other: tuple[tuple[str, Schema], ...] = ()
    status: int = 200
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[int, ...] = ()
    is_public: bool = False
    example: Any = None
    description: str = ""


_STREAM = ((EVENTS, STRING),)
_CONVERSATION = Parameter(
    "X-Conversation-Id", "header", STRING, "Name under which a stream can be read again at /v1/stream."
)
_CONV_ID = Parameter("conv_id", "query", {"type": "string", "minLength": 1}, "The conversation.", True)

_HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}


def _generating(path: str, tag: str, summary: str, body: str, answer: str, example: Any, *errors: int) -> Operation:
    """A route that answers in one piece, or with events if the request has ``stream``."""
    return Operation(
        "POST",
        path,
        tag,
        summary,
        answer,
        body,
        other=_STREAM,
        parameters=(_CONVERSATION,),
        errors=(400, 408, 500, *errors),
        example=example,
    )


def _asking(path: str, tag: str, summary: str, body: str, answer: str, example: Any, *errors: int) -> Operation:
    return Operation("POST", path, tag, summary, answer, body, errors=(400, 408, 500, *errors), example=example)


def _also(operation: Operation, *paths: str) -> tuple[Operation, ...]:
    """The operation and its other paths."""
    return operation, *(replace(operation, path=path) for path in paths)


_COMPLETION = _generating(
    "/completion",
    "Completions",
    "Completes a prompt, in the native dialect",
    "CompletionRequest",
    "Completion",
    {"prompt": "The capital of France is", "n_predict": 12},
)
_CHAT = _generating(
    "/v1/chat/completions", "Chats", "Answers a chat, OpenAI's API", "ChatRequest", "ChatCompletion", _HELLO
)
_COUNT = _asking(
    "/v1/chat/completions/input_tokens", "Chats", "Counts the tokens of a chat", "ChatRequest", "InputTokens", _HELLO
)
_RESPOND = _generating(
    "/v1/responses",
    "Chats",
    "Answers a chat, OpenAI's Responses API",
    "ResponsesRequest",
    "Response",
    {"input": "Hello", "max_output_tokens": 32},
)
_EMBED = _asking(
    "/embedding",
    "Vectors",
    "Vectors of texts, in the native form",
    "EmbeddingsRequest",
    "Embeddings",
    {"input": ["one", "two"]},
    501,
)
_RANK = _asking(
    "/v1/rerank",
    "Vectors",
    "Rates documents",
    "RerankRequest",
    "Ranking",
    {"query": "What is a panda?", "documents": ["It is a bear.", "It is a car."]},
    501,
)
_HEALTH = Operation("GET", "/health", "Server", "200 once the model is loaded, 503 before", "Health", is_public=True)
_MODELS = Operation("GET", "/v1/models", "Server", "The loaded model", "Models", is_public=True)

OPERATIONS: tuple[Operation, ...] = (
    *_also(_COMPLETION, "/completions"),
    _generating(
        "/v1/completions",
        "Completions",
        "Completes a prompt, OpenAI's API",
        "CompletionRequest",
        "TextCompletion",
        {"prompt": "The capital of France is", "max_tokens": 12},
    ),
    _generating(
        "/infill",
        "Completions",
        "Fills the gap between two texts, for models of code",
        "InfillRequest",
        "Completion",
        {"input_prefix": "def add(a, b):\n", "input_suffix": "\nprint(add(1, 2))\n", "n_predict": 32},
        501,
    ),
    *_also(_CHAT, "/chat/completions"),
    *_also(_COUNT, "/chat/completions/input_tokens"),
    _asking(
        "/v1/chat/completions/control",
        "Chats",
        "Acts on an answer that is being generated",
        "ControlRequest",
        "ControlResult",
        {"id": "chatcmpl-...", "action": "reasoning_end"},
    ),
    _asking("/apply-template", "Chats", "The prompt of a chat", "ChatRequest", "Prompt", _HELLO),
    *_also(_RESPOND, "/responses"),
    *_also(
        _asking(
            "/v1/responses/input_tokens",
            "Chats",
            "Counts the tokens of a request to /v1/responses",
            "ResponsesRequest",
            "InputTokens",
            {"input": "Hello"},
        ),
        "/responses/input_tokens",
    ),
    _generating("/v1/messages", "Chats", "Answers a chat, Anthropic's API", "MessagesRequest", "Message", _HELLO),
    _asking(
        "/v1/messages/count_tokens",
        "Chats",
        "Counts the tokens of a request to /v1/messages",
        "MessagesRequest",
        "InputTokens",
        _HELLO,
    ),
    *_also(_EMBED, "/embeddings"),
    replace(_EMBED, path="/v1/embeddings", summary="Vectors of texts, OpenAI's API", answer="OpenAIEmbeddings"),
    *_also(_RANK, "/v1/reranking", "/rerank", "/reranking"),
    _asking(
        "/v1/systemone",
        "Decisions",
        "Asks a decision model typed questions",
        "DecisionRequest",
        "Decisions",
        {
            "state": "I was charged twice.",
            "questions": {"angry": {"type": "noul", "instructions": "Is the customer angry?"}},
        },
        501,
    ),
    _asking("/tokenize", "Tokens", "Tokens of a text", "TokenizeRequest", "Tokenized", {"content": "Hello"}),
    _asking("/detokenize", "Tokens", "Text of tokens", "DetokenizeRequest", "Detokenized", {"tokens": [1, 2, 3]}),
    Operation("GET", "/lora-adapters", "Adapters", "The adapters and their scales", "LoraAdapters"),
    _asking(
        "/lora-adapters",
        "Adapters",
        "Sets the scales for requests that name none",
        "LoraAdaptersRequest",
        "Success",
        [{"id": 0, "scale": 0.5}],
    ),
    Operation(
        "GET",
        "/v1/stream",
        "Streams",
        "Reads the stream of a conversation again",
        other=_STREAM,
        parameters=(
            _CONV_ID,
            Parameter("from", "query", {"type": "string", "pattern": "^[0-9]*$"}, "Bytes that are known already."),
        ),
        errors=(400, 404),
    ),
    Operation(
        "DELETE",
        "/v1/stream",
        "Streams",
        "Ends the stream of a conversation",
        status=204,
        parameters=(_CONV_ID,),
        errors=(400,),
    ),
    Operation(
        "POST",
        "/v1/streams/lookup",
        "Streams",
        "Which of these conversations have a stream",
        "Conversations",
        "LookupRequest",
        errors=(400,),
        example={"conversation_ids": ["a"]},
    ),
    Operation(
        "GET",
        "/slots",
        "Server",
        "State of all slots",
        "Slots",
        parameters=(Parameter("fail_on_no_slot", "query", STRING, "503 where all slots are busy."),),
        errors=(501,),
    ),
    Operation(
        "POST",
        "/slots/<id_slot>",
        "Server",
        "Saves, restores or erases the prompt of a slot",
        "SlotActionResult",
        "SlotActionRequest",
        needs_body=False,
        parameters=(
            Parameter("id_slot", "path", integer(0), "The slot.", True),
            Parameter("action", "query", enum("save", "restore", "erase"), "What to do.", True),
        ),
        errors=(400, 500, 501),
        example={"filename": "chat.bin"},
    ),
    Operation("GET", "/v1/requests", "Server", "The requests under way", "Requests"),
    Operation(
        "DELETE",
        "/v1/requests/<id_request>",
        "Server",
        "Ends a request under way",
        "CancelledRequest",
        parameters=(Parameter("id_request", "path", STRING, "Its X-Request-Id; all that have it are ended.", True),),
        errors=(404,),
    ),
    Operation("GET", "/metrics", "Server", "Counters for Prometheus", other=((METRICS_TYPE, STRING),), errors=(501,)),
    *_also(_HEALTH, "/v1/health"),
    *_also(_MODELS, "/models"),
    Operation("GET", "/props", "Server", "Properties of the server and its model", "Props"),
    Operation(
        "POST",
        "/props",
        "Server",
        "Changes properties; there are none that can be changed",
        "Success",
        "PropsRequest",
        needs_body=False,
        errors=(501,),
    ),
    *(
        Operation(method, path, "Page", "Asked by the web page: this server has no such thing", "Disabled", status=403)
        for path in ("/tools", "/cors-proxy")
        for method in ("GET", "POST")
    ),
    Operation(
        "GET",
        "/openapi.json",
        "Manual",
        "This document",
        "Document",
        is_public=True,
    ),
    Operation("GET", "/docs", "Manual", "This document as a page", other=((HTML, STRING),), is_public=True),
)


def predictions(path: str, health_path: str) -> tuple[Operation, ...]:
    """The routes that Vertex AI's environment names."""
    predict = _asking(
        path,
        "Vertex AI",
        "Several requests to other routes in one",
        "PredictRequest",
        "Predictions",
        {"instances": [{"@requestFormat": "chatCompletions", **_HELLO}]},
    )
    return (predict, replace(_HEALTH, path=health_path, is_public=False)) if health_path else (predict,)
