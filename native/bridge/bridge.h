/* C interface over the parts of libllama-common that llamasrv uses.
 *
 * Rules
 *  - Handles are opaque. Scalars and arrays for what runs per token, JSON text for what runs per request.
 *  - A function that can fail returns LSRV_OK or a negative status and, if `err` is not NULL, stores a text in *err.
 *    Texts and arrays handed out through `char **` or `int32_t **` belong to the caller: release with lsrv_free().
 *  - No C++ exception leaves a function. No server logic lives here.
 *  - Unless a comment says otherwise, a handle must not be used by two threads at once.
 */
#ifndef LLAMASRV_BRIDGE_H
#define LLAMASRV_BRIDGE_H

#include <stdbool.h>
#include <stdint.h>

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LSRV_API __attribute__((visibility("default")))

#define LSRV_OK 0
#define LSRV_ERR (-1)

typedef struct lsrv_params  lsrv_params;  /* common_params */
typedef struct lsrv_engine  lsrv_engine;  /* model + context (common_init_result) + abort state */
typedef struct lsrv_sampler lsrv_sampler; /* common_sampler */

/* return false to stop loading */
typedef bool (*lsrv_progress_fn)(float progress, void * user_data);

LSRV_API void lsrv_free(void * ptr);

/* ---- process ------------------------------------------------------------------------------------------------- */

/* Logging and numeric locale; call once, first. */
LSRV_API void lsrv_init(void);
LSRV_API void lsrv_backend_init(const lsrv_params * params); /* llama_backend_init + llama_numa_init */
LSRV_API void lsrv_backend_free(void);
LSRV_API const char * lsrv_build_info(void);                 /* "b11549-..." (static) */
LSRV_API int32_t lsrv_build_number(void);

/* ---- log sink: one stream for native and Python lines (thread-safe) ------------------------------------------- */

/* level: LOG_LEVEL_* of common/log.h (0 output, 1 error, 2 warn, 3 info, 4 trace, 5 debug); text includes its newline */
LSRV_API void lsrv_log(int32_t level, const char * text);
LSRV_API int32_t lsrv_log_is_jsonl(void);
/* {"type": type, "data": json}; nothing without --log-jsonl */
LSRV_API void lsrv_log_event(const char * type, const char * json);
LSRV_API int32_t lsrv_log_verbosity(void); /* the threshold set by -lv / -v */
LSRV_API void lsrv_log_set_verbosity(int32_t threshold);
LSRV_API void lsrv_log_flush(void);

/* ---- command line --------------------------------------------------------------------------------------------- */

LSRV_API lsrv_params * lsrv_params_new(void); /* defaults of llama-server, port 8080 */
LSRV_API void lsrv_params_free(lsrv_params * params);

/* The parser of llama-server (flags, aliases, environment, presets). Prints and calls exit() by itself for --help,
 * --version, --list-devices, --completion-bash and the like; `usage_extra` (may be NULL) is printed after the usage
 * text of --help. On bad input the parser has already written its message to stderr. */
LSRV_API int32_t lsrv_params_parse(lsrv_params * params, int32_t argc, char ** argv, const char * usage_extra, char ** err);

/* Everything Python needs to know: one flat JSON object whose keys are the field names of common_params, nested objects
 * "sampling", "speculative", "model", "mmproj". Enumerations as the names the original prints. */
LSRV_API int32_t lsrv_params_to_json(const lsrv_params * params, char ** out, char ** err);

/* Set scalar fields by the same names as in lsrv_params_to_json (top level only). Unknown name or wrong type: error. */
LSRV_API int32_t lsrv_params_set(lsrv_params * params, const char * json, char ** err);

/* Resolve -hf / -mu / --docker-repo: find or download files and set the model paths. *is_preset tells whether the
 * repository holds a preset.ini (router mode). */
LSRV_API int32_t lsrv_params_resolve_model(lsrv_params * params, bool * is_preset, char ** err);
LSRV_API void lsrv_params_print_info(const lsrv_params * params, bool print_devices);

/* ---- model and context ---------------------------------------------------------------------------------------- */

/* common_init_from_params: fit, load, context, LoRA, control vectors, warm-up. The callback runs on the calling thread. */
LSRV_API int32_t lsrv_engine_load(lsrv_params * params, lsrv_progress_fn progress, void * user_data, lsrv_engine ** out, char ** err);
LSRV_API void lsrv_engine_free(lsrv_engine * engine);
LSRV_API struct llama_model   * lsrv_engine_model  (lsrv_engine * engine);
LSRV_API struct llama_context * lsrv_engine_context(lsrv_engine * engine);
LSRV_API int32_t lsrv_engine_n_lora(const lsrv_engine * engine);
LSRV_API int32_t lsrv_context_seq_rm_type(struct llama_context * ctx); /* common_context_can_seq_rm, clears the memory */
LSRV_API void lsrv_memory_breakdown_print(const lsrv_engine * engine);
LSRV_API int32_t lsrv_model_info_json(lsrv_engine * engine, const lsrv_params * params, char ** out, char ** err);
        /* {"ftype": str, "decision_type": str, "chat_template": str, "chat_template_tool_use": str,
         *  "chat_template_caps": {...}, "logit_bias_eog": [[token, bias], ...]} */

/* Apply the adapters in `indices` (into the list of --lora) with their scales; all others are off. */
LSRV_API int32_t lsrv_engine_set_lora(lsrv_engine * engine, const int32_t * indices, const float * scales, int32_t n, char ** err);
/* The adapters of --lora as loaded: [{"path", "scale", "task_name", "prompt_prefix", "alora_invocation_tokens"}, ...]
 * With --lora-init-without-apply every scale is 0. */
LSRV_API int32_t lsrv_engine_lora_json(const lsrv_engine * engine, char ** out, char ** err);

/* llama_set_embeddings; lsrv_decode() has to know, since every entry is an output while it is on. */
LSRV_API void lsrv_engine_set_embeddings(lsrv_engine * engine, bool embeddings);

/* ---- decode --------------------------------------------------------------------------------------------------- */

/* One llama_process(DECODE) over columns of n entries; entry i becomes batch index i. `output`: 1 where logits (or, with
 * llama_set_embeddings, embeddings) are wanted. sync: wait for the result. `serial` names this call for lsrv_abort().
 * Returns the value of llama_process(). */
LSRV_API int32_t lsrv_decode(lsrv_engine * engine, int32_t n, const int32_t * token, const int32_t * pos,
                             const int32_t * seq_id, const int8_t * output, bool sync, uint64_t serial);

/* Ask the lsrv_decode() call with this serial to stop between graph nodes; a call with another serial is not touched.
 * UINT64_MAX stops the running and every later call (shutdown); 0 withdraws. Thread-safe, never blocks. */
LSRV_API void lsrv_abort(lsrv_engine * engine, uint64_t serial);

/* ---- vocabulary (thread-safe) --------------------------------------------------------------------------------- */

/* The text of every token: *blob holds the bytes, *offsets n_tokens + 1 positions. special: render control tokens. */
LSRV_API int32_t lsrv_vocab_pieces(const struct llama_vocab * vocab, bool special, char ** blob, int32_t ** offsets, char ** err);
/* The vector that common_tokenize gives. */
LSRV_API int32_t lsrv_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len, bool add_special,
                               bool parse_special, int32_t ** tokens, int32_t * n_tokens, char ** err);

/* ---- sampling ------------------------------------------------------------------------------------------------- */

/* common_sampler_init from the sampling part of `params`, overlaid by `settings`: a JSON object with field names of
 * common_params_sampling (samplers as a list of names; logit_bias as [[token, bias or "-inf"], ...]; grammar as
 * {"type": "user"|"output_format"|"tool_calls", "value": gbnf}; preserved_tokens, grammar_triggers as
 * [{"type", "value", "token"}], reasoning_budget_* as token lists). A grammar that does not parse is an error. */
LSRV_API int32_t lsrv_sampler_new(lsrv_engine * engine, const lsrv_params * params, const char * settings, lsrv_sampler ** out, char ** err);
LSRV_API void lsrv_sampler_free(lsrv_sampler * smpl);
LSRV_API void lsrv_sampler_reset(lsrv_sampler * smpl);
LSRV_API int32_t lsrv_sampler_accept(lsrv_sampler * smpl, const int32_t * tokens, int32_t n, bool is_generated, char ** err);
LSRV_API uint32_t lsrv_sampler_seed(const lsrv_sampler * smpl);
LSRV_API int32_t lsrv_sampler_describe(const lsrv_sampler * smpl, char ** out, char ** err);

/* A second sampler in the same state; runs nowhere on the backend. */
LSRV_API int32_t lsrv_sampler_clone(const lsrv_sampler * smpl, lsrv_sampler ** out, char ** err);
/* Bring dst into the state of src; one must be a clone (of a clone ...) of the other. */
LSRV_API int32_t lsrv_sampler_copy(const lsrv_sampler * src, lsrv_sampler * dst, char ** err);
/* Whether its settings ask for backend sampling and allow it (no grammar, no reasoning budget). */
LSRV_API bool lsrv_sampler_backend_sampling(const lsrv_sampler * smpl);
/* llama_set_sampler: run the chain of this sampler in the compute graph for the outputs of a sequence; NULL: no chain.
 * A chain can be run so once in its life. When the backend cannot run it, sampling stays on the CPU and nothing fails. */
LSRV_API int32_t lsrv_engine_set_sampler(lsrv_engine * engine, int32_t seq_id, lsrv_sampler * smpl, char ** err);
/* End the reasoning that is under way; false when there is none or no reasoning budget was set up. */
LSRV_API bool lsrv_sampler_force_reasoning_end(lsrv_sampler * smpl);

/* For each i: common_sampler_sample(smpl[i], ctx, idx[i]) and accept. tokens[i] gets the token, status[i] LSRV_OK or
 * LSRV_ERR; the first error's text goes to *err. Returns LSRV_OK when all succeeded. */
LSRV_API int32_t lsrv_sample_many(lsrv_engine * engine, int32_t n, lsrv_sampler * const * smpl, const int32_t * idx,
                                  int32_t * tokens, int8_t * status, char ** err);
/* Why this sampler failed in the last lsrv_sample_many(); valid until the next. A sampler whose grammar refused a token
 * is of no further use: every later call for it fails. */
LSRV_API const char * lsrv_sampler_error(const lsrv_sampler * smpl);

/* Probabilities of the token just sampled from batch index idx. post: after the sampler chain (candidates of smpl, sorted,
 * entries of probability 0 end the list), else softmax over the raw logits. Writes at most n_top ids and probabilities,
 * *token_prob gets the probability of `token` (0 if it is not a candidate). Returns the number written, or LSRV_ERR. */
LSRV_API int32_t lsrv_token_probs(lsrv_engine * engine, lsrv_sampler * smpl, int32_t idx, int32_t token, int32_t n_top, bool post,
                                  int32_t * ids, float * probs, float * token_prob, char ** err);

/* ---- grammar (thread-safe) ------------------------------------------------------------------------------------ */

LSRV_API int32_t lsrv_json_schema_to_grammar(const char * schema, char ** out, char ** err);
LSRV_API int32_t lsrv_grammar_check(const struct llama_vocab * vocab, const char * gbnf, char ** err);

#ifdef __cplusplus
}
#endif

#endif
