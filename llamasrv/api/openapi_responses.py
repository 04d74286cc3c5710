"""Schemas of answers. They name what is always there and what matters; answers may have more members."""

from __future__ import annotations

from llamasrv.api.openapi_schema import (
    ANY,
    BOOLEAN,
    INTEGER,
    NUMBER,
    OBJECT,
    STRING,
    STRINGS,
    Schema,
    array,
    either,
    enum,
    every,
    nullable,
    object_of,
    ref,
)
from llamasrv.api.requests import STATUSES
from llamasrv.engine.result import ErrorType, StopType

_TOKEN_IDS = array(INTEGER)
_TIMINGS = {
    **dict.fromkeys(("cache_n", "prompt_n", "predicted_n"), INTEGER),
    **dict.fromkeys(("prompt_ms", "prompt_per_token_ms", "prompt_per_second"), NUMBER),
    **dict.fromkeys(("predicted_ms", "predicted_per_token_ms", "predicted_per_second"), NUMBER),
}
_CALL = every(type=enum("function"), id=STRING, function=every(name=STRING, arguments=STRING))
_USAGE = every(
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    prompt_tokens_details=every(cached_tokens=INTEGER),
)
#: Usage where nothing is generated.
_READ = every(prompt_tokens=INTEGER, total_tokens=INTEGER)
_MODEL = every(id=STRING, object=enum("model"), created=INTEGER, owned_by=STRING, aliases=STRINGS, tags=STRINGS)


def _answer(kind: str, choice: Schema) -> Schema:
    """What OpenAI's two completion APIs have in common."""
    return object_of(
        {
            "id": STRING,
            "object": enum(kind),
            "created": INTEGER,
            "model": STRING,
            "system_fingerprint": STRING,
            "choices": array(choice),
            "usage": _USAGE,
            "timings": ref("Timings"),
        },
        ("id", "object", "created", "model", "choices", "usage"),
    )


def _completion() -> Schema:
    """Nothing is required: ``response_fields`` says what is there."""
    return object_of(
        {
            "index": INTEGER,
            "content": STRING,
            "tokens": _TOKEN_IDS,
            "id_slot": INTEGER,
            "stop": BOOLEAN,
            "model": STRING,
            "tokens_predicted": INTEGER,
            "tokens_evaluated": INTEGER,
            "generation_settings": OBJECT,
            "prompt": STRING,
            "has_new_line": BOOLEAN,
            "truncated": BOOLEAN,
            "stop_type": enum(*(kind.value for kind in StopType)),
            "stopping_word": STRING,
            "tokens_cached": INTEGER,
            "timings": ref("Timings"),
            "completion_probabilities": array(OBJECT),
        }
    )


def response_schemas() -> dict[str, Schema]:
    """Name -> schema of every answer."""
    finish = nullable(enum("stop", "length"))
    text_choice = object_of(
        {"text": STRING, "index": INTEGER, "logprobs": nullable(OBJECT), "finish_reason": finish}, ("text", "index")
    )
    message = object_of(
        {"role": enum("assistant"), "content": STRING, "reasoning_content": STRING, "tool_calls": array(_CALL)},
        ("role", "content"),
    )
    chat_choice = object_of(
        {
            "finish_reason": enum("stop", "length", "tool_calls"),
            "index": INTEGER,
            "message": message,
            "logprobs": OBJECT,
        },
        ("finish_reason", "index", "message"),
    )
    native_vector = every(index=INTEGER, embedding=array(array(NUMBER)))
    native_one = every(index=INTEGER, embedding=array(NUMBER))
    vector = object_of(
        {"index": INTEGER, "object": enum("embedding"), "embedding": either(array(NUMBER), STRING)},
        ("index", "object", "embedding"),
    )
    vectors = array(either(native_vector, native_one))
    return {
        "Error": every(error=ref("ErrorObject")),
        "ErrorObject": object_of(
            {
                "code": {"type": "integer", "description": "The HTTP status."},
                "message": STRING,
                "type": enum(*(kind.label for kind in ErrorType)),
                "n_prompt_tokens": INTEGER,
                "n_ctx": INTEGER,
            },
            ("code", "message", "type"),
        ),
        "Disabled": every(error=every(message=STRING, type=enum("feature_disabled"))),
        "Health": every(status=enum("ok")),
        "Success": every(success=BOOLEAN),
        "ControlResult": object_of({"success": BOOLEAN, "message": STRING}, ["success"]),
        "Props": object_of(
            {
                "default_generation_settings": OBJECT,
                "total_slots": INTEGER,
                "model_alias": STRING,
                "model_path": STRING,
                "modalities": every(vision=BOOLEAN, audio=BOOLEAN),
                "chat_template": STRING,
                "chat_template_caps": OBJECT,
                "bos_token": STRING,
                "eos_token": STRING,
                "build_info": STRING,
                "is_sleeping": BOOLEAN,
            },
            ("default_generation_settings", "total_slots", "modalities", "chat_template", "build_info"),
        ),
        "Models": every(object=enum("list"), data=array(_MODEL), models=array(OBJECT)),
        "Slots": array(
            object_of(
                {
                    "id": INTEGER,
                    "n_ctx": INTEGER,
                    "speculative": BOOLEAN,
                    "is_processing": BOOLEAN,
                    "id_task": INTEGER,
                    "n_prompt_tokens": INTEGER,
                    "params": OBJECT,
                    "next_token": array(OBJECT),
                },
                ("id", "n_ctx", "is_processing"),
            )
        ),
        "SlotActionResult": object_of(
            {
                "id_slot": INTEGER,
                "filename": STRING,
                "n_saved": INTEGER,
                "n_written": INTEGER,
                "n_restored": INTEGER,
                "n_read": INTEGER,
                "n_erased": INTEGER,
                "timings": OBJECT,
            },
            ["id_slot"],
        ),
        "LoraAdapters": array(
            object_of(
                {
                    "id": INTEGER,
                    "path": STRING,
                    "scale": NUMBER,
                    "alora_invocation_string": STRING,
                    "alora_invocation_tokens": _TOKEN_IDS,
                },
                ("id", "path", "scale"),
            )
        ),
        "Tokenized": every(tokens=array(either(INTEGER, every(id=INTEGER, piece=either(STRING, array(INTEGER)))))),
        "Detokenized": every(content=STRING),
        "Prompt": every(prompt=STRING),
        "InputTokens": object_of({"input_tokens": INTEGER, "object": STRING}, ["input_tokens"]),
        "Timings": every(**_TIMINGS),
        "Completion": either(_completion(), array(_completion())),
        "TextCompletion": _answer("text_completion", text_choice),
        "ChatCompletion": _answer("chat.completion", chat_choice),
        "Response": object_of(
            {
                "id": STRING,
                "object": enum("response"),
                "created_at": INTEGER,
                "model": STRING,
                "status": enum("completed", "incomplete"),
                "incomplete_details": nullable(every(reason=STRING)),
                "output": array(object_of({"id": STRING, "type": STRING}, ("id", "type"))),
                "usage": every(input_tokens=INTEGER, output_tokens=INTEGER, total_tokens=INTEGER),
            },
            ("id", "object", "created_at", "model", "status", "output", "usage"),
        ),
        "Message": object_of(
            {
                "id": STRING,
                "type": enum("message"),
                "role": enum("assistant"),
                "content": array(object_of({"type": enum("text", "thinking", "tool_use")}, ["type"])),
                "model": STRING,
                "stop_reason": enum("end_turn", "max_tokens", "stop_sequence", "tool_use"),
                "stop_sequence": nullable(STRING),
                "usage": every(input_tokens=INTEGER, output_tokens=INTEGER, cache_read_input_tokens=INTEGER),
            },
            ("id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage"),
        ),
        "Embeddings": vectors,
        "OpenAIEmbeddings": either(every(object=enum("list"), model=STRING, usage=_READ, data=array(vector)), vectors),
        "Ranking": either(
            every(
                object=enum("list"),
                model=STRING,
                usage=_READ,
                results=array(every(index=INTEGER, relevance_score=NUMBER)),
            ),
            array(object_of({"index": INTEGER, "score": NUMBER, "text": STRING}, ("index", "score"))),
        ),
        "Decisions": every(
            model=STRING,
            answers={
                "type": "object",
                "additionalProperties": object_of({"type": enum("choice", "score", "noul")}, ["type"]),
            },
            usage=every(input_tokens=INTEGER, output_tokens=INTEGER),
        ),
        "Conversations": array(
            every(
                conversation_id=STRING,
                is_done=BOOLEAN,
                total_bytes=INTEGER,
                started_at=NUMBER,
                completed_at=NUMBER,
            )
        ),
        "Requests": every(
            object=enum("list"),
            data=array(
                every(
                    id=STRING,
                    object=enum("request"),
                    status=enum(*STATUSES),
                    method=STRING,
                    path=STRING,
                    caller=STRING,
                    created=INTEGER,
                    elapsed_ms=NUMBER,
                    stream=BOOLEAN,
                    timeout_s=nullable(NUMBER),
                    id_slots=array(INTEGER),
                    n_prompt_tokens_processed=INTEGER,
                    n_prompt_tokens_cache=INTEGER,
                    n_decoded=INTEGER,
                )
            ),
        ),
        "CancelledRequest": every(id=STRING, object=enum("request"), cancelled=BOOLEAN),
        "Predictions": every(predictions=array(ANY)),
    }
