"""What the command line says about chats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from llamasrv.binding import ChatTemplates
from llamasrv.engine.log import srv_inf, srv_trc, srv_wrn


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Chat template and defaults of chat requests. Thread-safe; outlives the model, so that it serves through sleep.

    ``template_kwargs``: variables for the template unless a request sets them. ``enable_thinking``: whether the model
    reasons unless a request says otherwise. ``reasoning_budget``: most tokens of reasoning, -1: no limit.
    ``force_pure_content``: answers are not parsed.
    """

    templates: ChatTemplates
    prefill_assistant: bool = True
    reasoning_format: str = "auto"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    enable_thinking: bool = False
    reasoning_budget: int = -1
    reasoning_budget_message: str = ""
    force_pure_content: bool = False

    @classmethod
    def from_params(cls, params: Mapping[str, Any], templates: ChatTemplates) -> ChatSettings:
        """From ``Params.to_dict()`` of the server."""
        sampling: Mapping[str, Any] = params.get("sampling", {})
        return cls(
            templates=templates,
            prefill_assistant=params["prefill_assistant"],
            reasoning_format=params["reasoning_format"],
            template_kwargs={name: orjson.loads(text) for name, text in params["default_template_kwargs"].items()},
            enable_thinking=params["enable_reasoning"] != 0 and templates.supports_thinking,
            reasoning_budget=sampling.get("reasoning_budget_tokens", -1),
            reasoning_budget_message=sampling.get("reasoning_budget_message", ""),
            force_pure_content=params["force_pure_content_parser"],
        )

    @property
    def use_jinja(self) -> bool:
        return self.templates.use_jinja


def log_chat_settings(settings: ChatSettings, params: Mapping[str, Any]) -> None:
    """Say in the log what the template can do. ``params``: ``Params.to_dict()`` of the server."""
    srv_trc("init", "chat template, example_format: '%s'", settings.templates.example)
    srv_trc("init", "chat template, thinking = %d", settings.enable_thinking)
    _tell_about_reasoning(settings, bool(params["preserve_reasoning_specified"]))


def _tell_about_reasoning(settings: ChatSettings, was_specified: bool) -> None:
    """Whether the reasoning of earlier answers stays in the prompt."""
    is_enabled = settings.template_kwargs.get("preserve_reasoning") is True
    if not settings.templates.caps["supports_preserve_reasoning"]:
        if was_specified and is_enabled:
            srv_wrn("init", "the chat template does not preserve reasoning, --reasoning-preserve has no effect")
    elif not was_specified:
        srv_wrn(
            "init",
            "the chat template preserves reasoning, which takes more tokens (--no-reasoning-preserve turns it off)",
        )
    elif not is_enabled:
        srv_inf("init", "the chat template can preserve reasoning, see --reasoning-preserve")
