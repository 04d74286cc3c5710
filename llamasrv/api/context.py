"""What the handlers of requests share: the loaded model's facts and the schema made from them."""

from __future__ import annotations

from typing import Any

from llamasrv.api.chat_settings import ChatSettings
from llamasrv.api.decision.model import DecisionModel, DecisionModelError, load_decision_model
from llamasrv.api.grammar import GrammarUse, native_tools
from llamasrv.api.protocols import GrammarTools, Server, Vocab
from llamasrv.api.schema import RequestSchema
from llamasrv.binding import ChatTemplates
from llamasrv.engine.meta import ServerMeta


class ApiContext:
    """View of a server for this layer. Thread-safe.

    Follows the server when it loads its model again (after sleep).
    """

    def __init__(self, server: Server, tools: GrammarTools | None = None) -> None:
        self._server = server
        self._tools = tools
        #: The vocabulary and parameters that ``_schema`` was made from, and it.
        self._made: tuple[Vocab, dict[str, Any], RequestSchema] | None = None
        self._decision: tuple[Vocab, DecisionModel | None] | None = None
        self._chat: tuple[ChatTemplates, ChatSettings] | None = None

    @property
    def meta(self) -> ServerMeta:
        return self._server.meta

    @property
    def vocab(self) -> Vocab:
        return self._server.vocab

    @property
    def params(self) -> dict[str, Any]:
        """``Params.to_dict()`` of the server."""
        return self._server.params

    @property
    def chat(self) -> ChatSettings:
        """Needs no loaded model."""
        templates, made = self._server.chat_templates, self._chat
        if made is None or made[0] is not templates:
            made = self._chat = (templates, ChatSettings.from_params(self.params, templates))
        return made[1]

    @property
    def decision_model(self) -> DecisionModel | None:
        """None if the loaded model is of another kind. Raises DecisionModelError if its file is not complete."""
        vocab, made = self.vocab, self._decision
        if made is None or made[0] is not vocab:
            made = self._decision = (vocab, load_decision_model(self.meta, vocab))
        return made[1]

    @property
    def n_slots(self) -> int:
        return int(self.params["n_parallel"])

    @property
    def schema(self) -> RequestSchema:
        vocab, params, made = self.vocab, self.params, self._made
        if made is not None and made[0] is vocab and made[1] is params:
            return made[2]
        grammars = GrammarUse(self._tools or native_tools(), vocab)
        schema = RequestSchema(params, self.meta, vocab, grammars)
        self._made = (vocab, params, schema)
        return schema


def check_model(server: Server) -> None:
    """Raises RuntimeError if the model that a server has loaded lacks what its kind needs to be asked."""
    try:
        load_decision_model(server.meta, server.vocab)
    except DecisionModelError as error:
        raise RuntimeError(f"failed to init decision model: {error}") from error
