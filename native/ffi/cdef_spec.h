/* What Python sees of bridge_spec.h, and of bridge.h what belongs to it. */

/* bridge.h: clones, backend sampling, reasoning */

int32_t lsrv_sampler_clone(const lsrv_sampler * smpl, lsrv_sampler ** out, char ** err);
int32_t lsrv_sampler_copy(const lsrv_sampler * src, lsrv_sampler * dst, char ** err);
bool lsrv_sampler_backend_sampling(const lsrv_sampler * smpl);
int32_t lsrv_engine_set_sampler(lsrv_engine * engine, int32_t seq_id, lsrv_sampler * smpl, char ** err);
bool lsrv_sampler_force_reasoning_end(lsrv_sampler * smpl);

/* bridge_spec.h */

typedef struct lsrv_spec lsrv_spec;

typedef struct lsrv_draft_item {
    int32_t  seq_id;
    int32_t  n_max;
    int32_t  pos0;
    int32_t  id_last;
    int32_t  n_prompt;
    float    temp;
    uint32_t seed;
    int8_t   rejection;

    int32_t   n_draft;
    int32_t * draft;
} lsrv_draft_item;

typedef struct lsrv_verify_item {
    lsrv_sampler *  smpl;
    int32_t         seq_id;
    int32_t         idx;
    int32_t         n_draft;
    const int32_t * draft;
    int8_t          rejection;
    int8_t          replay;
    int8_t          post;
    int32_t         n_top;

    int8_t    status;
    int32_t   n_accepted;
    int32_t * accepted;
    float *   prob;
    int32_t * n_written;
    int32_t * top_ids;
    float *   top_probs;
} lsrv_verify_item;

const char * lsrv_spec_all_types(void);
void lsrv_spec_output_limits(int32_t n_batch, int32_t n_parallel, int32_t n_draft, int32_t * total, int32_t * per_seq);

int32_t lsrv_spec_load(lsrv_engine * engine, const lsrv_params * params, lsrv_progress_fn progress, void * user_data,
                       lsrv_spec ** out, char ** err);
void lsrv_spec_free(lsrv_spec * spec);
struct llama_context * lsrv_spec_context(lsrv_spec * spec);
int32_t lsrv_spec_n_max(const lsrv_spec * spec);
int32_t lsrv_spec_n_synth(const lsrv_spec * spec);
const double * lsrv_spec_synth_probs(const lsrv_spec * spec);
void lsrv_spec_print_stats(const lsrv_spec * spec);

int32_t lsrv_spec_begin(lsrv_spec * spec, int32_t seq_id, uint32_t seed, char ** err);
int32_t lsrv_spec_prompt(lsrv_spec * spec, int32_t seq_id, int32_t n_keep, const int32_t * tokens, int32_t n, char ** err);
int32_t lsrv_spec_n_prompt(const lsrv_spec * spec, int32_t seq_id);

int32_t lsrv_spec_draft(lsrv_spec * spec, int32_t n, lsrv_draft_item * items, uint64_t serial, char ** err);
int32_t lsrv_spec_process(lsrv_spec * spec, int32_t n, const int32_t * token, const int32_t * pos, const int32_t * seq_id,
                          uint64_t serial);
int32_t lsrv_spec_verify(lsrv_spec * spec, int32_t n, lsrv_verify_item * items, char ** err);
int32_t lsrv_spec_accept(lsrv_spec * spec, int32_t seq_id, int32_t n, char ** err);

int32_t lsrv_spec_get_state(lsrv_spec * spec, int32_t seq_id, uint8_t ** data, size_t * size, char ** err);
int32_t lsrv_spec_set_state(lsrv_spec * spec, int32_t seq_id, const uint8_t * data, size_t size, char ** err);
