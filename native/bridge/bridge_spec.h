/* C interface over the speculative decoding of libllama-common: drafting and verification. The rules are those of bridge.h.
 *
 * A generation goes: lsrv_spec_begin(), then per step lsrv_spec_draft(), lsrv_decode() of the last token and its draft with
 * an output at each, lsrv_spec_process() of the same entries, lsrv_spec_verify(), lsrv_spec_accept(). Prompts have to pass
 * through lsrv_spec_process() as well. Sequences are those of the engine's context. */
#ifndef LLAMASRV_BRIDGE_SPEC_H
#define LLAMASRV_BRIDGE_SPEC_H

#include "bridge.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lsrv_spec lsrv_spec; /* common_speculative, draft model and context, the tokens of each sequence */

/* One sequence's part in a lsrv_spec_draft(). */
typedef struct lsrv_draft_item {
    int32_t  seq_id;
    int32_t  n_max;         /* draft no more tokens than this; at least 1 */
    int32_t  pos0;          /* position of id_last */
    int32_t  id_last;       /* the last token, not yet in the KV cells */
    int32_t  n_prompt;      /* tokens before it; has to be what lsrv_spec_prompt() holds */
    float    temp;          /* the target's; for drafts that are sampled */
    uint32_t seed;
    int8_t   rejection;     /* keep the draft's distributions for verification by rejection sampling */

    int32_t   n_draft;      /* out */
    int32_t * draft;        /* out: room for lsrv_spec_n_max() tokens */
} lsrv_draft_item;

/* One sequence's part in a lsrv_spec_verify(). */
typedef struct lsrv_verify_item {
    lsrv_sampler *  smpl;
    int32_t         seq_id;
    int32_t         idx;       /* batch index of the token before the draft; the draft's tokens are at the next ones */
    int32_t         n_draft;   /* at least 1 */
    const int32_t * draft;
    int8_t          rejection; /* by rejection sampling if this draft's distributions were kept */
    int8_t          replay;    /* these tokens were accepted before: a roll-back took them out of the KV cells */
    int8_t          post;      /* probabilities: after the sampler chain, else over the raw logits */
    int32_t         n_top;     /* how many most likely tokens to tell; -1: no probabilities at all */

    int8_t    status;          /* out: LSRV_OK or LSRV_ERR, see lsrv_sampler_error() */
    int32_t   n_accepted;      /* out: at least 1; the last one is the target's own, those before are of the draft */
    int32_t * accepted;        /* out: room for n_draft + 1 tokens; likewise the next ones, unless n_top is -1 */
    float *   prob;            /* out: probability of each accepted token */
    int32_t * n_written;       /* out: how many of the n_top there are */
    int32_t * top_ids;         /* out: n_top per token */
    float *   top_probs;
} lsrv_verify_item;

/* making and describing */

LSRV_API const char * lsrv_spec_all_types(void); /* comma-separated names (static) */
/* What n_outputs_max and n_outputs_max_per_seq have to be to verify drafts of n_draft tokens. */
LSRV_API void lsrv_spec_output_limits(int32_t n_batch, int32_t n_parallel, int32_t n_draft, int32_t * total, int32_t * per_seq);

/* Load the draft model (or make the context for the model's own prediction heads) and set up every type of --spec-type.
 * *out is NULL if nothing was set up: no type asked for, or the types and models do not fit; *err then says why, or stays
 * NULL. LSRV_ERR: a draft model was asked for and cannot be loaded. Clears nothing in the engine's context. */
LSRV_API int32_t lsrv_spec_load(lsrv_engine * engine, const lsrv_params * params, lsrv_progress_fn progress, void * user_data,
                                lsrv_spec ** out, char ** err);
LSRV_API void lsrv_spec_free(lsrv_spec * spec); /* before its engine */

LSRV_API struct llama_context * lsrv_spec_context(lsrv_spec * spec); /* NULL without a draft model or heads */
LSRV_API int32_t lsrv_spec_n_max(const lsrv_spec * spec);            /* tokens of the longest draft */
/* The chance of each drafted token to be accepted under --spec-synth-*; 0 values: real verification. */
LSRV_API int32_t lsrv_spec_n_synth(const lsrv_spec * spec);
LSRV_API const double * lsrv_spec_synth_probs(const lsrv_spec * spec);
LSRV_API void lsrv_spec_print_stats(const lsrv_spec * spec);

/* tokens of a sequence, without the last one */

/* A generation starts after the tokens set by lsrv_spec_prompt(). `seed`: of the random numbers of --spec-synth-*. */
LSRV_API int32_t lsrv_spec_begin(lsrv_spec * spec, int32_t seq_id, uint32_t seed, char ** err);
/* Keep the first n_keep tokens and append n. */
LSRV_API int32_t lsrv_spec_prompt(lsrv_spec * spec, int32_t seq_id, int32_t n_keep, const int32_t * tokens, int32_t n, char ** err);
LSRV_API int32_t lsrv_spec_n_prompt(const lsrv_spec * spec, int32_t seq_id);

/* a step */

/* Draft for many sequences. The draft context holds the drafted positions afterwards: remove them from pos0 on.
 * `serial`: see lsrv_abort(); a stopped call leaves short drafts or none. */
LSRV_API int32_t lsrv_spec_draft(lsrv_spec * spec, int32_t n, lsrv_draft_item * items, uint64_t serial, char ** err);

/* Take in the entries that lsrv_decode() just computed. LSRV_ERR: the draft context lacks them now. */
LSRV_API int32_t lsrv_spec_process(lsrv_spec * spec, int32_t n, const int32_t * token, const int32_t * pos, const int32_t * seq_id,
                                   uint64_t serial);

/* Sample at each index and take the drafted tokens that stand. Samplers have moved on by what was accepted. Returns LSRV_OK
 * when all succeeded, else *err has the first error. */
LSRV_API int32_t lsrv_spec_verify(lsrv_spec * spec, int32_t n, lsrv_verify_item * items, char ** err);

/* Of this sequence's last draft n tokens were accepted. */
LSRV_API int32_t lsrv_spec_accept(lsrv_spec * spec, int32_t seq_id, int32_t n, char ** err);

/* state that belongs to a checkpoint of a sequence */

/* *size is 0 if there is none. */
LSRV_API int32_t lsrv_spec_get_state(lsrv_spec * spec, int32_t seq_id, uint8_t ** data, size_t * size, char ** err);
/* Data of another size than this drafter's is ignored. */
LSRV_API int32_t lsrv_spec_set_state(lsrv_spec * spec, int32_t seq_id, const uint8_t * data, size_t size, char ** err);

#ifdef __cplusplus
}
#endif

#endif
