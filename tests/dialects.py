"""The same question in every dialect that generates text, and the text of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server_process import ServerProcess


@dataclass(frozen=True, slots=True)
class Dialect:
    path: str
    #: Fields of the prompt, the most tokens and the stop strings.
    prompt: str
    limit: str
    stop: str = "stop"

    def body(self, prompt: str, n_predict: int, stop: Sequence[str] = (), **more: Any) -> dict[str, Any]:
        asked: Any = [{"role": "user", "content": prompt}] if self.prompt == "messages" else prompt
        return {"temperature": 0, self.prompt: asked, self.limit: n_predict, self.stop: list(stop), **more}

    def text(self, answer: Any) -> str:
        """Text of a whole answer or of one event of a stream."""
        if self.path == "/completion":
            return str(answer["content"])
        if "choices" in answer:
            return "".join(_choice_text(choice) for choice in answer["choices"])
        if answer.get("type") == "message" or "output" in answer:
            items = answer["content"] if "content" in answer else answer["output"]
            parts = [part for item in items for part in item.get("content", [item])]
            return "".join(part.get("text", "") for part in parts)
        if answer["type"] in ("response.output_text.delta", "content_block_delta"):
            delta = answer["delta"]
            return delta if isinstance(delta, str) else str(delta.get("text", ""))
        return ""

    def n_tokens(self, answer: Any) -> int:
        """Tokens that a whole answer says it has."""
        if self.path == "/completion":
            return int(answer["tokens_predicted"])
        usage = answer["usage"]
        return int(usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"])

    def ask(self, server: ServerProcess, prompt: str, n_predict: int, stop: Sequence[str] = (), **more: Any) -> Any:
        response = server.post(self.path, self.body(prompt, n_predict, stop, **more))
        assert response.status == 200, response.text
        return response.json()

    def stream(
        self, server: ServerProcess, prompt: str, n_predict: int, stop: Sequence[str] = (), **more: Any
    ) -> list[Any]:
        with server.stream(self.path, self.body(prompt, n_predict, stop, **more, stream=True)) as stream:
            assert stream.status == 200, stream.read()
            return list(stream)


def _choice_text(choice: Any) -> str:
    said = choice if "text" in choice else choice.get("message") or choice["delta"]
    return str(said.get("text") or said.get("content") or "")


DIALECTS = (
    Dialect("/completion", "prompt", "n_predict"),
    Dialect("/v1/completions", "prompt", "max_tokens"),
    Dialect("/v1/chat/completions", "messages", "max_tokens"),
    Dialect("/v1/responses", "input", "max_output_tokens"),
    Dialect("/v1/messages", "messages", "max_tokens", "stop_sequences"),
)
