/* What Python sees of llama.h and bridge.h. Compiled against the real headers: a drift of the pin breaks the build. */

/* llama.h: types and constants */

typedef int32_t  llama_token;
typedef int32_t  llama_pos;
typedef int32_t  llama_seq_id;
typedef uint32_t llama_state_seq_flags;

struct llama_vocab;
struct llama_model;
struct llama_context;
typedef struct llama_memory_i * llama_memory_t;

#define LLAMA_DEFAULT_SEED ...
#define LLAMA_TOKEN_NULL ...
#define LLAMA_STATE_SEQ_FLAGS_NONE ...
#define LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY ...
#define LLAMA_STATE_SEQ_FLAGS_ON_DEVICE ...

enum llama_vocab_type {
    LLAMA_VOCAB_TYPE_NONE,
    LLAMA_VOCAB_TYPE_SPM,
    LLAMA_VOCAB_TYPE_BPE,
    LLAMA_VOCAB_TYPE_WPM,
    LLAMA_VOCAB_TYPE_UGM,
    LLAMA_VOCAB_TYPE_RWKV,
    LLAMA_VOCAB_TYPE_PLAMO2,
    ...
};

enum llama_pooling_type {
    LLAMA_POOLING_TYPE_UNSPECIFIED,
    LLAMA_POOLING_TYPE_NONE,
    LLAMA_POOLING_TYPE_MEAN,
    LLAMA_POOLING_TYPE_CLS,
    LLAMA_POOLING_TYPE_LAST,
    LLAMA_POOLING_TYPE_RANK,
    ...
};

enum llama_token_attr {
    LLAMA_TOKEN_ATTR_UNKNOWN,
    LLAMA_TOKEN_ATTR_UNUSED,
    LLAMA_TOKEN_ATTR_NORMAL,
    LLAMA_TOKEN_ATTR_CONTROL,
    LLAMA_TOKEN_ATTR_USER_DEFINED,
    LLAMA_TOKEN_ATTR_BYTE,
    ...
};

struct llama_perf_context_data {
    double  t_start_ms;
    double  t_load_ms;
    double  t_p_eval_ms;
    double  t_eval_ms;
    int32_t n_p_eval;
    int32_t n_eval;
    int32_t n_reused;
};

/* llama.h: process */

const char * llama_version(void);
const char * llama_print_system_info(void);
int64_t llama_time_us(void);
size_t llama_max_devices(void);
size_t llama_max_parallel_sequences(void);
bool llama_supports_mmap(void);
bool llama_supports_mlock(void);
bool llama_supports_gpu_offload(void);
bool llama_supports_rpc(void);

/* llama.h: model */

const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);
int32_t  llama_model_n_ctx_train(const struct llama_model * model);
int32_t  llama_model_n_embd     (const struct llama_model * model);
int32_t  llama_model_n_embd_inp (const struct llama_model * model);
int32_t  llama_model_n_embd_out (const struct llama_model * model);
int32_t  llama_model_n_layer    (const struct llama_model * model);
int32_t  llama_model_n_head     (const struct llama_model * model);
int32_t  llama_model_n_head_kv  (const struct llama_model * model);
int32_t  llama_model_n_swa      (const struct llama_model * model);
uint32_t llama_model_n_cls_out  (const struct llama_model * model);
const char * llama_model_cls_label(const struct llama_model * model, uint32_t i);
uint64_t llama_model_size    (const struct llama_model * model);
uint64_t llama_model_n_params(const struct llama_model * model);
int32_t  llama_model_desc(const struct llama_model * model, char * buf, size_t buf_size);
int32_t  llama_model_meta_count(const struct llama_model * model);
int32_t  llama_model_meta_val_str(const struct llama_model * model, const char * key, char * buf, size_t buf_size);
int32_t  llama_model_meta_key_by_index(const struct llama_model * model, int32_t i, char * buf, size_t buf_size);
int32_t  llama_model_meta_val_str_by_index(const struct llama_model * model, int32_t i, char * buf, size_t buf_size);
const char * llama_model_chat_template(const struct llama_model * model, const char * name);
bool llama_model_has_encoder (const struct llama_model * model);
bool llama_model_has_decoder (const struct llama_model * model);
bool llama_model_is_recurrent(const struct llama_model * model);
bool llama_model_is_hybrid   (const struct llama_model * model);
bool llama_model_is_diffusion(const struct llama_model * model);
llama_token llama_model_decoder_start_token(const struct llama_model * model);

/* llama.h: vocabulary */

enum llama_vocab_type llama_vocab_type(const struct llama_vocab * vocab);
int32_t llama_vocab_n_tokens(const struct llama_vocab * vocab);
const char * llama_vocab_get_text(const struct llama_vocab * vocab, llama_token token);
float llama_vocab_get_score(const struct llama_vocab * vocab, llama_token token);
enum llama_token_attr llama_vocab_get_attr(const struct llama_vocab * vocab, llama_token token);
bool llama_vocab_is_eog    (const struct llama_vocab * vocab, llama_token token);
bool llama_vocab_is_control(const struct llama_vocab * vocab, llama_token token);
llama_token llama_vocab_bos (const struct llama_vocab * vocab);
llama_token llama_vocab_eos (const struct llama_vocab * vocab);
llama_token llama_vocab_eot (const struct llama_vocab * vocab);
llama_token llama_vocab_sep (const struct llama_vocab * vocab);
llama_token llama_vocab_nl  (const struct llama_vocab * vocab);
llama_token llama_vocab_pad (const struct llama_vocab * vocab);
llama_token llama_vocab_mask(const struct llama_vocab * vocab);
bool llama_vocab_get_add_bos(const struct llama_vocab * vocab);
bool llama_vocab_get_add_eos(const struct llama_vocab * vocab);
bool llama_vocab_get_add_sep(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_pre(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_suf(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_mid(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_pad(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_rep(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_sep(const struct llama_vocab * vocab);
int32_t llama_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len, llama_token * tokens,
                       int32_t n_tokens_max, bool add_special, bool parse_special);
int32_t llama_token_to_piece(const struct llama_vocab * vocab, llama_token token, char * buf, int32_t length,
                             int32_t lstrip, bool special);
int32_t llama_detokenize(const struct llama_vocab * vocab, const llama_token * tokens, int32_t n_tokens, char * text,
                         int32_t text_len_max, bool remove_special, bool unparse_special);

/* llama.h: context */

uint32_t llama_n_ctx    (const struct llama_context * ctx);
uint32_t llama_n_ctx_seq(const struct llama_context * ctx);
uint32_t llama_n_batch  (const struct llama_context * ctx);
uint32_t llama_n_ubatch (const struct llama_context * ctx);
uint32_t llama_n_seq_max(const struct llama_context * ctx);
uint32_t llama_n_rs_seq (const struct llama_context * ctx);
llama_memory_t llama_get_memory(const struct llama_context * ctx);
enum llama_pooling_type llama_pooling_type(const struct llama_context * ctx);
void llama_set_n_threads(struct llama_context * ctx, int32_t n_threads, int32_t n_threads_batch);
int32_t llama_n_threads      (struct llama_context * ctx);
int32_t llama_n_threads_batch(struct llama_context * ctx);
void llama_set_causal_attn(struct llama_context * ctx, bool causal_attn);
bool llama_get_causal_attn(const struct llama_context * ctx);
void llama_synchronize(struct llama_context * ctx);
float * llama_get_logits_ith    (struct llama_context * ctx, int32_t i);
float * llama_get_embeddings_ith(struct llama_context * ctx, int32_t i);
float * llama_get_embeddings_seq(struct llama_context * ctx, llama_seq_id seq_id);
struct llama_perf_context_data llama_perf_context(const struct llama_context * ctx);
void llama_perf_context_print(const struct llama_context * ctx);
void llama_perf_context_reset(struct llama_context * ctx);

/* llama.h: memory */

void llama_memory_clear(llama_memory_t mem, bool data);
bool llama_memory_seq_rm(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1);
void llama_memory_seq_cp(llama_memory_t mem, llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1);
void llama_memory_seq_keep(llama_memory_t mem, llama_seq_id seq_id);
void llama_memory_seq_add(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos delta);
void llama_memory_seq_div(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d);
llama_pos llama_memory_seq_pos_min(llama_memory_t mem, llama_seq_id seq_id);
llama_pos llama_memory_seq_pos_max(llama_memory_t mem, llama_seq_id seq_id);
bool llama_memory_can_shift(llama_memory_t mem);

/* llama.h: state of a sequence */

size_t llama_state_seq_get_size_ext(struct llama_context * ctx, llama_seq_id seq_id, llama_state_seq_flags flags);
size_t llama_state_seq_get_data_ext(struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id,
                                    llama_state_seq_flags flags);
size_t llama_state_seq_set_data_ext(struct llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id dest_seq_id,
                                    llama_state_seq_flags flags);
size_t llama_state_seq_save_file(struct llama_context * ctx, const char * filepath, llama_seq_id seq_id,
                                 const llama_token * tokens, size_t n_token_count);
size_t llama_state_seq_load_file(struct llama_context * ctx, const char * filepath, llama_seq_id dest_seq_id,
                                 llama_token * tokens_out, size_t n_token_capacity, size_t * n_token_count_out);

/* bridge.h */

#define LSRV_OK ...
#define LSRV_ERR ...

typedef struct lsrv_params  lsrv_params;
typedef struct lsrv_engine  lsrv_engine;
typedef struct lsrv_sampler lsrv_sampler;

typedef bool (*lsrv_progress_fn)(float progress, void * user_data);

void lsrv_free(void * ptr);

void lsrv_init(void);
void lsrv_backend_init(const lsrv_params * params);
void lsrv_backend_free(void);
const char * lsrv_build_info(void);
int32_t lsrv_build_number(void);

void lsrv_log(int32_t level, const char * text);
int32_t lsrv_log_verbosity(void);
void lsrv_log_set_verbosity(int32_t threshold);
int32_t lsrv_log_is_jsonl(void);
void lsrv_log_event(const char * type, const char * json);
void lsrv_log_flush(void);

lsrv_params * lsrv_params_new(void);
void lsrv_params_free(lsrv_params * params);
int32_t lsrv_params_parse(lsrv_params * params, int32_t argc, char ** argv, const char * usage_extra, char ** err);
int32_t lsrv_params_to_json(const lsrv_params * params, char ** out, char ** err);
int32_t lsrv_params_set(lsrv_params * params, const char * json, char ** err);
int32_t lsrv_params_resolve_model(lsrv_params * params, bool * is_preset, char ** err);
void lsrv_params_print_info(const lsrv_params * params, bool print_devices);

int32_t lsrv_engine_load(lsrv_params * params, lsrv_progress_fn progress, void * user_data, lsrv_engine ** out, char ** err);
void lsrv_engine_free(lsrv_engine * engine);
struct llama_model * lsrv_engine_model(lsrv_engine * engine);
struct llama_context * lsrv_engine_context(lsrv_engine * engine);
int32_t lsrv_engine_n_lora(const lsrv_engine * engine);
int32_t lsrv_context_seq_rm_type(struct llama_context * ctx);
void lsrv_memory_breakdown_print(const lsrv_engine * engine);
int32_t lsrv_model_info_json(lsrv_engine * engine, const lsrv_params * params, char ** out, char ** err);
int32_t lsrv_engine_set_lora(lsrv_engine * engine, const int32_t * indices, const float * scales, int32_t n, char ** err);
int32_t lsrv_engine_lora_json(const lsrv_engine * engine, char ** out, char ** err);
void lsrv_engine_set_embeddings(lsrv_engine * engine, bool embeddings);

int32_t lsrv_decode(lsrv_engine * engine, int32_t n, const int32_t * token, const int32_t * pos,
                    const int32_t * seq_id, const int8_t * output, bool sync, uint64_t serial);
void lsrv_abort(lsrv_engine * engine, uint64_t serial);

int32_t lsrv_vocab_pieces(const struct llama_vocab * vocab, bool special, char ** blob, int32_t ** offsets, char ** err);
int32_t lsrv_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len, bool add_special,
                      bool parse_special, int32_t ** tokens, int32_t * n_tokens, char ** err);

int32_t lsrv_sampler_new(lsrv_engine * engine, const lsrv_params * params, const char * settings, lsrv_sampler ** out, char ** err);
void lsrv_sampler_free(lsrv_sampler * smpl);
void lsrv_sampler_reset(lsrv_sampler * smpl);
int32_t lsrv_sampler_accept(lsrv_sampler * smpl, const int32_t * tokens, int32_t n, bool is_generated, char ** err);
uint32_t lsrv_sampler_seed(const lsrv_sampler * smpl);
int32_t lsrv_sampler_describe(const lsrv_sampler * smpl, char ** out, char ** err);
int32_t lsrv_sample_many(lsrv_engine * engine, int32_t n, lsrv_sampler * const * smpl, const int32_t * idx,
                         int32_t * tokens, int8_t * status, char ** err);
const char * lsrv_sampler_error(const lsrv_sampler * smpl);
int32_t lsrv_token_probs(lsrv_engine * engine, lsrv_sampler * smpl, int32_t idx, int32_t token, int32_t n_top, bool post,
                         int32_t * ids, float * probs, float * token_prob, char ** err);

int32_t lsrv_json_schema_to_grammar(const char * schema, char ** out, char ** err);
int32_t lsrv_grammar_check(const struct llama_vocab * vocab, const char * gbnf, char ** err);

/* Python */

extern "Python" bool lsrv_py_progress(float progress, void * user_data);
