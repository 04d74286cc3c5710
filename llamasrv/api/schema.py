"""The fields of a completion request, each declared once.

The order counts where a handler looks at what an earlier one stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llamasrv.api import handlers
from llamasrv.api.defaults import request_defaults
from llamasrv.api.errors import invalid_request
from llamasrv.api.fields import FLOAT_MAX, FLOAT_MIN, INT32_MAX, INT64_MAX, Echo, Field, Kind, Limits, RequestState
from llamasrv.api.grammar import GrammarUse
from llamasrv.api.openapi_schema import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    STRING,
    STRINGS,
    array,
    checked,
    either,
    enum,
    integer,
    object_of,
)
from llamasrv.api.protocols import Vocab
from llamasrv.engine.meta import ServerMeta
from llamasrv.engine.task import TaskParams

#: Tokens of history that every server grants to the repetition samplers, whatever its context.
MIN_HISTORY = 65_536

_UNIT = Limits(0.0, 1.0, clamp=True)
_COUNT = Limits(0, INT32_MAX)
_COUNT_OR_ALL = Limits(-1, INT32_MAX)

_BIAS = either(NUMBER, {"const": False})
_BIASES = either(
    array({"type": "array", "prefixItems": [either(INTEGER, STRING), _BIAS], "minItems": 2, "maxItems": 2}),
    {"type": "object", "additionalProperties": _BIAS},
)
_ADAPTERS = array(object_of({"id": integer(-1, INT32_MAX), "scale": NUMBER}, ["id"]))
_STOPS = either(
    {"type": "string", "maxLength": handlers.MAX_STOP_CHARS},
    array(either(STRING, {"type": "null"}), maxItems=handlers.MAX_STOPS),
)
_TAG = {"type": "string", "maxLength": handlers.MAX_TAG_CHARS}
_TRIGGER = object_of(
    {
        "type": integer(handlers.TRIGGER_TOKEN, handlers.TRIGGER_PATTERN_FULL),
        "value": {"type": "string", "maxLength": handlers.MAX_TRIGGER_CHARS},
        "token": INTEGER,
    },
    ["type", "value"],
)


def _biases(value: tuple[tuple[int, float], ...]) -> list[dict[str, Any]]:
    return [{"bias": bias, "token": token} for token, bias in value]


def _triggers(value: tuple[tuple[int, str, int], ...]) -> list[dict[str, Any]]:
    return [
        {"type": kind, "value": text, "token": token}
        if kind == handlers.TRIGGER_TOKEN
        else {"type": kind, "value": text}
        for kind, text, token in value
    ]


def _adapters(value: dict[int, float] | None) -> list[dict[str, Any]]:
    return [{"id": index, "scale": scale} for index, scale in sorted((value or {}).items())]


def _flag(name: str, target: str, description: str, echo: Echo = Echo.NONE, **extra: Any) -> Field:
    return Field(name, Kind.BOOL, target, description, echo=echo, **extra)


def _whole(name: str, target: str, limits: Limits, description: str, echo: Echo = Echo.ALWAYS, **extra: Any) -> Field:
    return Field(name, Kind.INT, target, description, limits=limits, echo=echo, **extra)


def _real(name: str, target: str, description: str, limits: Limits | None = None, **extra: Any) -> Field:
    return Field(name, Kind.FLOAT, target, description, limits=limits, echo=Echo.ALWAYS, **extra)


FIELDS: tuple[Field, ...] = (
    _flag("verbose", "verbose", "Adds debugging information to the response."),
    _flag(
        "timings_per_token",
        "timings_per_token",
        "Adds the speed of prompt processing and generation to every response of a stream.",
        Echo.ALWAYS,
    ),
    _flag("stream", "stream", "Sends the text piece by piece as it is generated.", Echo.ALWAYS),
    _flag("include_usage", "include_usage", "Ends the stream with a chunk of token counts.", group="stream_options"),
    _flag(
        "cache_prompt",
        "cache_prompt",
        "Reuses what earlier requests left in the KV cache for the prefix that they share with this prompt.",
    ),
    _flag("return_tokens", "return_tokens", "Gives the generated token ids in `tokens`."),
    _flag("return_progress", "return_progress", "Reports the progress of prompt processing in a stream."),
    _whole(
        "sse_ping_interval",
        "sse_ping_interval",
        _COUNT_OR_ALL,
        "Seconds of silence in a stream after which a comment is sent; -1: none are sent.",
        Echo.NONE,
    ),
    _whole(
        "n_predict",
        "n_predict",
        _COUNT_OR_ALL,
        "Most tokens to generate; -1: no limit. 0 only evaluates the prompt into the cache.",
        aliases=("max_completion_tokens", "max_tokens"),
    ),
    _whole("n_indent", "n_indent", _COUNT, "Fewest spaces at the start of each line of the generated text.", Echo.NONE),
    _whole(
        "n_keep",
        "n_keep",
        _COUNT_OR_ALL,
        "Tokens of the prompt that stay when the context is shifted; -1: all of them.",
    ),
    _whole(
        "n_discard", "n_discard", _COUNT, "Tokens dropped when the context is shifted; 0: half of those after n_keep."
    ),
    Field(
        "n_cmpl",
        Kind.INT,
        "n_cmpl",
        "Number of completions of each prompt.",
        aliases=("n",),
        limits_of=lambda n_parallel: Limits(1, n_parallel),
    ),
    _whole(
        "n_cache_reuse",
        "n_cache_reuse",
        _COUNT,
        "Fewest tokens of a chunk that is reused from elsewhere in the cache by shifting it; 0: never.",
        Echo.NONE,
    ),
    Field(
        "t_max_predict_ms",
        Kind.INT,
        "t_max_predict_ms",
        "Milliseconds, counted from the first token, after which generation ends once there is a line break.",
        limits=Limits(-1, INT64_MAX),
    ),
    Field(
        "response_fields",
        Kind.ARRAY,
        "response_fields",
        "Members of the response to send; `a/b` stands for member b of member a.",
        handler=handlers.read_response_fields,
        schema=array(STRING, maxItems=handlers.MAX_RESPONSE_FIELDS),
    ),
    _whole("top_k", "sampling.top_k", Limits(0, INT32_MAX, clamp=True), "Keeps the k most likely tokens; 0: all."),
    _real("top_p", "sampling.top_p", "Keeps the most likely tokens up to this sum of probabilities; 1: all.", _UNIT),
    _real("min_p", "sampling.min_p", "Least probability, relative to that of the most likely token; 0: off.", _UNIT),
    _real(
        "top_n_sigma", "sampling.top_n_sigma", "Keeps tokens within n standard deviations of the best logit; < 0: off."
    ),
    _real("xtc_probability", "sampling.xtc_probability", "Chance of removing top tokens by XTC; 0: off.", _UNIT),
    _real("xtc_threshold", "sampling.xtc_threshold", "Least probability for removal by XTC; > 0.5: off.", _UNIT),
    _real("typical_p", "sampling.typ_p", "Locally typical sampling; 1: off."),
    _real(
        "temperature",
        "sampling.temp",
        "Randomness of the choice; 0: always the most likely token.",
        Limits(0.0, FLOAT_MAX, clamp=True),
    ),
    _real("dynatemp_range", "sampling.dynatemp_range", "Temperature varies by up to this much; 0: off."),
    _real("dynatemp_exponent", "sampling.dynatemp_exponent", "How entropy maps to the varying temperature."),
    _whole(
        "repeat_last_n",
        "sampling.penalty_last_n",
        _COUNT,
        "Last tokens looked at by the repetition penalties; 0: off.",
        handler=handlers.read_repeat_last_n,
    ),
    _real(
        "repeat_penalty",
        "sampling.penalty_repeat",
        "Penalty for repeated tokens, above 0; 1: off.",
        schema={"type": "number", "minimum": FLOAT_MIN},
    ),
    _real("frequency_penalty", "sampling.penalty_freq", "Penalty by how often a token was used; 0: off."),
    _real("presence_penalty", "sampling.penalty_present", "Penalty for tokens used at all; 0: off."),
    _real("dry_multiplier", "sampling.dry_multiplier", "Strength of the DRY penalty for repeated sequences; 0: off."),
    _real(
        "dry_base",
        "sampling.dry_base",
        "Growth of the DRY penalty; below 1 the server's setting is taken.",
        handler=handlers.read_dry_base,
        schema=NUMBER,
    ),
    _whole(
        "dry_allowed_length",
        "sampling.dry_allowed_length",
        _COUNT,
        "Length of a repetition, in tokens, up to which DRY does not punish it.",
    ),
    _whole(
        "dry_penalty_last_n",
        "sampling.dry_penalty_last_n",
        _COUNT,
        "Last tokens that DRY looks at; 0: off.",
        handler=handlers.read_dry_penalty_last_n,
    ),
    _whole(
        "mirostat",
        "sampling.mirostat",
        Limits(0, 2, clamp=True),
        "Mirostat sampling: 0 off, 1 Mirostat, 2 Mirostat 2.0.",
    ),
    _real("mirostat_tau", "sampling.mirostat_tau", "Target entropy of Mirostat."),
    _real("mirostat_eta", "sampling.mirostat_eta", "Learning rate of Mirostat."),
    _real(
        "adaptive_target",
        "sampling.adaptive_target",
        "Probability that adaptive sampling aims at, 0 to 1; below 0: off.",
        Limits(-FLOAT_MAX, 1.0, clamp=True),
    ),
    _real(
        "adaptive_decay",
        "sampling.adaptive_decay",
        "Decay of the average in adaptive sampling; it covers about 1 / (1 - decay) tokens.",
        Limits(0.0, 0.99),
    ),
    Field(
        "seed",
        Kind.INT,
        "sampling.seed",
        "Seed of the random numbers; -1: drawn anew.",
        handler=handlers.read_seed,
        echo=Echo.ALWAYS,
        schema=integer(-(2**63), 2**64 - 1),
    ),
    Field(
        "n_probs",
        Kind.INT,
        "sampling.n_probs",
        "Gives the probabilities of the n most likely tokens at every step; 0: none.",
        aliases=("logprobs",),
        handler=handlers.read_n_probs,
        echo=Echo.ALWAYS,
        schema=INTEGER,
    ),
    _whole("min_keep", "sampling.min_keep", _COUNT, "Fewest tokens that a sampler leaves; 0: off."),
    _flag("backend_sampling", "sampling.backend_sampling", "Samples on the device that runs the model.", Echo.ALWAYS),
    _flag(
        "post_sampling_probs",
        "post_sampling_probs",
        "Probabilities are those after the sampler chain.",
        Echo.ALWAYS,
    ),
    Field(
        "lora",
        Kind.ARRAY,
        "lora",
        "LoRA adapters for this request, objects with `id` and `scale`; those left out are off.",
        handler=handlers.read_lora,
        echo=Echo.ALWAYS,
        render=_adapters,
        schema=_ADAPTERS,
    ),
    Field(
        "dry_sequence_breakers",
        Kind.ARRAY,
        "sampling.dry_sequence_breakers",
        "Strings across which DRY sees no repetition.",
        handler=handlers.read_dry_sequence_breakers,
        echo=Echo.FULL,
        schema=array(STRING, minItems=1, maxItems=handlers.MAX_BREAKERS),
    ),
    Field(
        "json_schema",
        Kind.OBJECT,
        "sampling.grammar",
        "JSON schema that the text has to fit; {}: any object. Without effect beside `grammar`.",
        handler=handlers.read_json_schema,
        schema=checked({"type": "object"}),
    ),
    Field(
        "grammar",
        Kind.STRING,
        "sampling.grammar",
        "GBNF grammar that the text has to fit.",
        handler=handlers.read_grammar,
        echo=Echo.FULL,
        render=lambda grammar: grammar[1],
        schema=checked(STRING),
    ),
    _flag("grammar_lazy", "sampling.grammar_lazy", "The grammar applies only once a trigger was generated.", Echo.FULL),
    Field(
        "reasoning_format",
        Kind.STRING,
        "reasoning_format",
        "How reasoning is told apart from the answer: " + ", ".join(handlers.REASONING_FORMATS) + ".",
        handler=handlers.read_reasoning_format,
        echo=Echo.ALWAYS,
        schema=enum(*handlers.REASONING_FORMATS),
    ),
    Field(
        "continue_final_message",
        Kind.ANY,
        "",
        "Chat: continues the last message instead of beginning a new one.",
        handler=handlers.read_continue_final_message,
        schema=either(BOOLEAN, enum("content", "reasoning_content")),
    ),
    Field(
        "echo",
        Kind.BOOL,
        "",
        "Gives the prompt (/v1/completions) or the continued message (chat) in the response too.",
        handler=handlers.read_echo,
        schema=BOOLEAN,
    ),
    Field(
        "preserved_tokens",
        Kind.ARRAY,
        "sampling.preserved_tokens",
        "Texts of tokens that are shown although they are control tokens.",
        handler=handlers.read_preserved_tokens,
        echo=Echo.FULL,
        render=sorted,
        schema=array(STRING, maxItems=handlers.MAX_PRESERVED),
    ),
    Field(
        "grammar_triggers",
        Kind.ARRAY,
        "sampling.grammar_triggers",
        "What starts a lazy grammar: objects with `type` (0 token, 1 word, 2 pattern, 3 pattern of the whole text), "
        "`value` and, for type 0, `token`.",
        handler=handlers.read_grammar_triggers,
        echo=Echo.FULL,
        render=_triggers,
        schema=checked(array(_TRIGGER, maxItems=handlers.MAX_TRIGGERS)),
    ),
    _flag(
        "reasoning_control",
        "sampling.reasoning_control",
        "Keeps the means ready to end the reasoning while the request runs.",
    ),
    _whole(
        "reasoning_budget_tokens",
        "sampling.reasoning_budget_tokens",
        _COUNT_OR_ALL,
        "Most tokens of reasoning; -1: no limit.",
        Echo.NONE,
    ),
    Field(
        "reasoning_budget_start_tag",
        Kind.STRING,
        "sampling.reasoning_budget_start",
        "Text that begins the reasoning.",
        handler=handlers.read_reasoning_budget_start,
        schema=_TAG,
    ),
    Field(
        "reasoning_budget_end_tags",
        Kind.ARRAY,
        "sampling.reasoning_budget_end",
        "Texts that end the reasoning; the first is forced when the budget is spent.",
        aliases=("reasoning_budget_end_tag",),
        handler=handlers.read_reasoning_budget_end,
        schema=either(_TAG, array(_TAG, maxItems=handlers.MAX_TAGS)),
    ),
    Field(
        "reasoning_budget_message",
        Kind.STRING,
        "sampling.reasoning_budget_forced",
        "Text put before the end tag when that is forced.",
        handler=handlers.read_reasoning_budget_message,
        schema=STRING,
    ),
    Field(
        "logit_bias",
        Kind.ANY,
        "sampling.logit_bias",
        "Added to the logits: pairs of token id or text and bias, or an object; bias false bans the token.",
        handler=handlers.read_logit_bias,
        echo=Echo.FULL,
        render=_biases,
        schema=_BIASES,
    ),
    Field(
        "ignore_eos",
        Kind.BOOL,
        "sampling.ignore_eos",
        "Goes on where the model would end.",
        handler=handlers.read_ignore_eos,
        echo=Echo.ALWAYS,
        schema=BOOLEAN,
    ),
    Field(
        "stop",
        Kind.ANY,
        "antiprompt",
        "String or strings at which generation ends; they are not part of the text.",
        handler=handlers.read_stop,
        echo=Echo.FULL,
        schema=_STOPS,
    ),
    Field(
        "samplers",
        Kind.ANY,
        "sampling.samplers",
        "Samplers in their order: a list of names or a string of letters.",
        handler=handlers.read_samplers,
        echo=Echo.ALWAYS,
        schema=either(STRING, STRINGS),
    ),
)


class RequestSchema:
    """Reads requests for one loaded model. Thread-safe.

    ``params``: ``Params.to_dict()`` of the server, from which the defaults come.
    """

    def __init__(self, params: Mapping[str, Any], meta: ServerMeta, vocab: Vocab, grammars: GrammarUse) -> None:
        self.defaults = request_defaults(params)
        self._vocab = vocab
        self.grammars = grammars
        self._n_parallel = int(params["n_parallel"])
        self._n_history_max = max(MIN_HISTORY, meta.slot_n_ctx)
        self._logit_bias_eog = meta.logit_bias_eog

    def parse(self, data: Mapping[str, Any]) -> TaskParams:
        """Settings of a request whose JSON object is ``data``.

        Raises ApiError (status 400), text beginning ``Field '<name>':`` where one field is at fault.
        """
        defaults = self.defaults
        params = replace(defaults, sampling=replace(defaults.sampling))
        state = RequestState(
            data=data,
            params=params,
            defaults=defaults,
            vocab=self._vocab,
            grammars=self.grammars,
            n_parallel=self._n_parallel,
            n_history_max=self._n_history_max,
            logit_bias_eog=self._logit_bias_eog,
        )
        for field in FIELDS:
            field.read(state)
        self._finish(params)
        return params

    def _finish(self, params: TaskParams) -> None:
        """What no field can say alone."""
        sampling = params.sampling
        if sampling.ignore_eos:
            present = set(sampling.logit_bias)
            sampling.logit_bias += tuple(bias for bias in self._logit_bias_eog if bias not in present)
        if sampling.penalty_repeat <= 0.0:
            raise invalid_request("Failed to initialize samplers: penalty_repeat must be finite and greater than 0")
        if sampling.grammar_lazy and sampling.grammar[1] and not sampling.grammar_triggers:
            raise invalid_request("Field 'grammar_lazy': Error: no triggers set for lazy grammar!")
