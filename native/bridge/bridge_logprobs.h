/* C interface to the log-probabilities of given tokens, for prompts that are to be scored. The rules are those of bridge.h. */
#ifndef LLAMASRV_BRIDGE_LOGPROBS_H
#define LLAMASRV_BRIDGE_LOGPROBS_H

#include "bridge.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Natural logarithms of softmax over the raw logits, at n batch indices of the last decode: logprob[i] of tokens[i], and the n_top
 * (at most the vocabulary's size) most likely tokens at [i * n_top, ...), best first, equal ones by id. */
LSRV_API int32_t lsrv_logprobs(lsrv_engine * engine, int32_t n, const int32_t * idx, const int32_t * tokens, int32_t n_top,
                               float * logprob, int32_t * top_ids, float * top_logprobs, char ** err);

#ifdef __cplusplus
}
#endif

#endif
