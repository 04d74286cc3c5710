/* What Python sees of bridge_logprobs.h. */

int32_t lsrv_logprobs(lsrv_engine * engine, int32_t n, const int32_t * idx, const int32_t * tokens, int32_t n_top,
                      float * logprob, int32_t * top_ids, float * top_logprobs, char ** err);
