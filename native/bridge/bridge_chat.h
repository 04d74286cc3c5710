/* C interface over the chat part of libllama-common: templates, prompts, grammars, parsers. The rules are those of bridge.h. */
#ifndef LLAMASRV_BRIDGE_CHAT_H
#define LLAMASRV_BRIDGE_CHAT_H

#include "bridge.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lsrv_chat_templates lsrv_chat_templates; /* common_chat_templates */
typedef struct lsrv_chat_session   lsrv_chat_session;   /* common_chat_session + the message that its text makes so far */

typedef struct lsrv_chat_span {
    int32_t role; /* enum common_chat_role: 0 unknown, 1 system, 2 assistant, 3 user, 4 tool */
    int32_t pos;  /* first token */
    int32_t len;  /* tokens */
} lsrv_chat_span;

/* templates (thread-safe once made) */

/* Parse `source`, or the templates of the model when it is empty. Without a model (NULL) the texts of BOS and EOS are
 * those given. No pointer into the model is kept: templates outlive it. */
LSRV_API int32_t lsrv_chat_templates_new(const struct llama_model * model, const char * source, const char * bos, const char * eos,
                                         lsrv_chat_templates ** out, char ** err);
LSRV_API void lsrv_chat_templates_free(lsrv_chat_templates * templates);

/* {"source": str, "source_tool_use": str (may be empty), "explicit": bool, "caps": {name: bool}, "supports_thinking": bool,
 *  "example": str, "asr_prompt": {"system": str, "user": str}}
 * kwargs: JSON object of template arguments, for the example. Renders: an error means that the template does not work. */
LSRV_API int32_t lsrv_chat_templates_describe(const lsrv_chat_templates * templates, bool use_jinja, const char * kwargs,
                                              char ** out, char ** err);

/* sessions */

/* Render a request and make the parser of its answer. `request` is a JSON object; all members but "messages" are optional:
 *   "messages", "tools", "tool_choice" ("auto", "none", "required"): as in OpenAI's chat API
 *   "json_schema": any, "grammar": str, "parallel_tool_calls", "add_generation_prompt", "use_jinja", "enable_thinking",
 *   "force_pure_content", "echo": bool, "continue_final_message": bool, "content" or "reasoning_content",
 *   "reasoning_format": str, "chat_template_kwargs": object
 * Without a vocabulary (NULL) there are no token ids in what comes out. Neither vocabulary nor templates are kept. */
LSRV_API int32_t lsrv_chat_session_new(const lsrv_chat_templates * templates, const struct llama_vocab * vocab, const char * request,
                                       lsrv_chat_session ** out, char ** err);
LSRV_API int32_t lsrv_chat_session_clone(const lsrv_chat_session * session, lsrv_chat_session ** out, char ** err);
LSRV_API void lsrv_chat_session_free(lsrv_chat_session * session);

/* {"prompt", "format", "grammar", "grammar_of_calls" (with tool_choice "required": the same, but for prose beside the
 *  calls), "generation_prompt", "thinking_start_tag": str, "grammar_lazy": bool,
 *  "grammar_triggers": [{"type": 0..3, "value": str, "token": id}], "preserved_tokens": [id], "additional_stops": [str],
 *  "thinking_end_tags": [str], "message_delimiters": [{"role": str, "delimiter": str, "tokens": [id]}]} */
LSRV_API int32_t lsrv_chat_session_describe(const lsrv_chat_session * session, char ** out, char ** err);

/* Messages within the tokens of the prompt, ascending. */
LSRV_API int32_t lsrv_chat_session_spans(const lsrv_chat_session * session, const int32_t * tokens, int32_t n_tokens,
                                         lsrv_chat_span ** spans, int32_t * n_spans, char ** err);

/* Add generated text. *diffs gets NULL when the message did not change, else a JSON array of
 *   {"reasoning_content": str}, {"content": str}, {"index": i, "id", "name", "arguments": str}
 * (of a tool call, members that did not change are left out). Tool calls for which the model gives no id get a random one.
 * is_final: the text is complete. An error means that the text does not fit the format. */
LSRV_API int32_t lsrv_chat_session_feed(lsrv_chat_session * session, const char * text, int32_t n_text, bool is_final,
                                        char ** diffs, char ** err);

/* The message so far: {"content", "reasoning_content": str, "tool_calls": [{"id", "name", "arguments"}]} */
LSRV_API int32_t lsrv_chat_session_message(const lsrv_chat_session * session, char ** out, char ** err);

#ifdef __cplusplus
}
#endif

#endif
