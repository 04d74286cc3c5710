"""Coverage-guided fuzzing of one parser: ``python fuzz_targets.py NAME [libFuzzer's options and folders]``.

Ends with an error if anything but a refusal is raised. Needs atheris.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import atheris

with atheris.instrument_imports(include=["llamasrv.api", "llamasrv.binding.template_guard"]):
    from llamasrv.api import gbnf, json_schema
    from llamasrv.api.anthropic.request import read_anthropic_request
    from llamasrv.api.chat_messages import read_messages
    from llamasrv.api.chat_tools import read_tools
    from llamasrv.api.completion import build_completion_tasks
    from llamasrv.api.decision.tasks import build_decision_tasks
    from llamasrv.api.embeddings import build_embedding_tasks
    from llamasrv.api.errors import ApiError
    from llamasrv.api.infill import infill_prompt
    from llamasrv.api.jsonio import dumps, parse, parse_object
    from llamasrv.api.pattern import rewrite
    from llamasrv.api.rerank import build_rerank_tasks
    from llamasrv.api.responses.request import read_responses_request
    from llamasrv.binding.template_guard import check_template

from api_fakes import FakeIds, api_context
from test_api_hostile import context

CONTEXT = api_context()
DECISIONS = {kind: context(kind) for kind in ("lev", "kev", "openjev", "laya")}
VECTORS = context()


def fuzz_json(data: bytes) -> None:
    value = parse(data)
    # what was taken can be written and read again
    assert parse(dumps(value)) == value


def fuzz_gbnf(data: bytes) -> None:
    gbnf.check(data.decode("utf-8", "ignore"))


def fuzz_pattern(data: bytes) -> None:
    text = data.decode("utf-8", "ignore")
    rewrite(text)
    check_template(text)


def fuzz_schema(data: bytes) -> None:
    json_schema.check(parse(data))


def fuzz_completion(data: bytes) -> None:
    body = parse_object(data)
    build_completion_tasks(CONTEXT, {"prompt": "x", **body}, FakeIds())
    infill_prompt(CONTEXT, body)


def fuzz_chat(data: bytes) -> None:
    body = parse_object(data)
    for strict in (True, False):
        read_messages(body, strict)
    read_tools(body, True)


def fuzz_anthropic(data: bytes) -> None:
    chat = read_anthropic_request(parse_object(data))
    read_messages(chat, True)
    read_tools(chat, True)


def fuzz_responses(data: bytes) -> None:
    chat = read_responses_request(parse_object(data)).chat
    read_messages(chat, True)
    read_tools(chat, True)


def fuzz_vectors(data: bytes) -> None:
    body = parse_object(data)
    for is_oai in (True, False):
        build_embedding_tasks(VECTORS, body, FakeIds(), is_oai)
    build_rerank_tasks(VECTORS, body, FakeIds())


def fuzz_decision(data: bytes) -> None:
    body = parse_object(data)
    for decisions in DECISIONS.values():
        build_decision_tasks(decisions, body, FakeIds())


TARGETS: dict[str, Callable[[bytes], None]] = {
    name.removeprefix("fuzz_"): value for name, value in globals().items() if name.startswith("fuzz_")
}


def main() -> None:
    target = TARGETS[sys.argv.pop(1)]

    def run(data: bytes) -> None:
        refusal: ApiError | None = None
        other = ""
        try:
            target(data)
        except ApiError as error:
            refusal = error
        except (gbnf.GrammarError, json_schema.SchemaError):
            pass
        except ValueError as error:
            other = str(error)
        if refusal is not None:
            assert refusal.status in (400, 501), refusal.message
            dumps(refusal.body())
        # the guard of templates has no exception of its own
        assert not other or "chat template" in other, other

    atheris.Setup(sys.argv, run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
