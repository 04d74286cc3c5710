#include "bridge_logprobs.h"

#include "objects.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

using namespace lsrv;

extern "C" {

int32_t lsrv_logprobs(lsrv_engine * engine, int32_t n, const int32_t * idx, const int32_t * tokens, int32_t n_top, float * logprob,
                      int32_t * top_ids, float * top_logprobs, char ** err) {
    return guarded(err, [&] {
        const int32_t n_vocab = engine->n_vocab;
        if (n_top < 0 || n_top > n_vocab) {
            refuse("number of tokens out of range: " + std::to_string(n_top));
        }
        std::vector<int32_t> order(n_top > 0 ? n_vocab : 0);
        for (int32_t i = 0; i < n; ++i) {
            if (tokens[i] < 0 || tokens[i] >= n_vocab) {
                refuse("token out of range: " + std::to_string(tokens[i]));
            }
            const float * logits = raw_logits(engine->ctx, idx[i]);
            const float   best   = *std::max_element(logits, logits + n_vocab);
            double sum = 0.0;
            for (int32_t t = 0; t < n_vocab; ++t) {
                sum += expf(logits[t] - best);
            }
            const double norm = best + log(sum);
            logprob[i] = (float) (logits[tokens[i]] - norm);
            if (n_top == 0) {
                continue;
            }
            std::iota(order.begin(), order.end(), 0);
            std::partial_sort(order.begin(), order.begin() + n_top, order.end(), [logits](int32_t a, int32_t b) {
                return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
            });
            for (int32_t k = 0; k < n_top; ++k) {
                top_ids     [(size_t) i * n_top + k] = order[k];
                top_logprobs[(size_t) i * n_top + k] = (float) (logits[order[k]] - norm);
            }
        }
    });
}

} // extern "C"
