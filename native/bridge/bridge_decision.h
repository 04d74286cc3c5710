/* C interface to what decision models need beyond ordinary batches, and to plain Jinja templates. The rules are those of bridge.h. */
#ifndef LLAMASRV_BRIDGE_DECISION_H
#define LLAMASRV_BRIDGE_DECISION_H

#include "bridge.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lsrv_template lsrv_template; /* a parsed Jinja template */

/* Values of the `order` column: what a joint decision head reads. A run of equal values is one span; an option belongs to
 * the last question before it. */
#define LSRV_ORDER_NONE            0
#define LSRV_ORDER_QUESTION_NOUL   1
#define LSRV_ORDER_QUESTION_CHOICE 2
#define LSRV_ORDER_QUESTION_SCORE  3
#define LSRV_ORDER_OPTION          4

/* lsrv_decode() with a decision order for each entry; row i of the embeddings is then the score of option i. */
LSRV_API int32_t lsrv_decode_ordered(lsrv_engine * engine, int32_t n, const int32_t * token, const int32_t * pos,
                                     const int32_t * seq_id, const int8_t * output, const int32_t * order, bool sync, uint64_t serial);

/* The raw logits of n tokens at a batch index of the last decode. */
LSRV_API int32_t lsrv_logits_at(lsrv_engine * engine, int32_t idx, const int32_t * tokens, int32_t n, float * out, char ** err);
/* The embeddings at n batch indices of the last decode, n_embd_out values each. */
LSRV_API int32_t lsrv_embeddings_at(lsrv_engine * engine, const int32_t * idx, int32_t n, float * out, char ** err);

/* templates (thread-safe once made) */

LSRV_API int32_t lsrv_template_new(const char * source, lsrv_template ** out, char ** err);
LSRV_API void lsrv_template_free(lsrv_template * tmpl);
/* `values` is a JSON object; its members are the variables of the template, objects keep the order of their keys. */
LSRV_API int32_t lsrv_template_render(const lsrv_template * tmpl, const char * values, char ** out, char ** err);

#ifdef __cplusplus
}
#endif

#endif
