// The objects behind the handles, and what several sources of the bridge do with them.
#pragma once

#include "support.h"

#include "common.h"
#include "log.h"
#include "sampling.h"

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

struct lsrv_params {
    common_params p;

    // common_init_from_params() adds to the sampling part; a second load has to start from what was there before
    std::optional<common_params_sampling> sampling_before_load;
};

struct lsrv_engine {
    static constexpr uint64_t ABORT_ALL = UINT64_MAX;

    common_init_result_ptr init;
    llama_batch_ext_ptr    batch;

    std::vector<common_adapter_lora_info> lora;

    // per sequence: whose chain runs in the compute graph (backend sampling), NULL for none
    std::vector<lsrv_sampler *> attached;

    llama_model   * model = nullptr;
    llama_context * ctx   = nullptr;

    int32_t n_vocab       = 0;
    int32_t n_outputs_max = 0;     // limit of the context; more outputs would abort the process
    bool    embeddings    = false; // every entry of a batch is an output

    std::atomic<uint64_t> running{ 0 };   // serial of the call under way
    std::atomic<uint64_t> to_abort{ 0 };

    static bool must_abort(void * data) {
        const auto *   self   = (const lsrv_engine *) data;
        const uint64_t serial = self->to_abort.load(std::memory_order_relaxed);
        return serial != 0 && (serial == ABORT_ALL || serial == self->running.load(std::memory_order_relaxed));
    }
};

struct lsrv_sampler {
    common_sampler_ptr smpl;

    // The same grammar before a chain that changes nothing: tells whether the grammar allows a token.
    common_sampler_ptr gate;

    const llama_vocab * vocab = nullptr;

    uint64_t family = 0; // the same for a sampler and its clones: only these can be copied to each other

    bool constrained      = false; // by a grammar
    bool backend_sampling = false; // asked for, and possible with these settings
    bool sampled          = false; // there are candidates to look at
    bool failed           = false; // a grammar that refused a token aborts the process on the next use

    // where its chain runs in the compute graph; a chain is prepared for that once in its life
    lsrv_engine * engine       = nullptr;
    int32_t       attached_seq = -1;
    bool          was_attached = false;

    std::string error; // of the last call for many samplers
};

namespace lsrv {

// For functions that have no way to report: an exception becomes a line of the log.
template <typename F>
void logged(const char * what, F && body) noexcept {
    char * text = nullptr;
    if (guarded(&text, body) != LSRV_OK) {
        const char * reason = text != nullptr ? text : "out of memory";
        common_log_add(common_log_main(), GGML_LOG_LEVEL_ERROR, "%s: %s\n", what, reason);
        free(text);
    }
}

// Collects the error lines of the native libraries on this thread, for the text of an exception.
class error_capture {
  public:
    error_capture();
    ~error_capture();

    std::string after(const std::string & head) const;

  private:
    std::string text;
};

// Gives a call into the library the name by which lsrv_abort() stops it.
class running_call {
  public:
    running_call(lsrv_engine * engine, uint64_t serial) : engine(engine) {
        engine->running.store(serial, std::memory_order_relaxed);
        current = engine;
    }

    ~running_call() {
        current = nullptr;
        engine->running.store(0, std::memory_order_relaxed);
    }

    // Whether the call of this thread was told to stop.
    static bool is_stopped() { return current != nullptr && lsrv_engine::must_abort(current); }

    running_call(const running_call &)             = delete;
    running_call & operator=(const running_call &) = delete;

  private:
    lsrv_engine * engine;

    static inline thread_local lsrv_engine * current = nullptr;
};

// lsrv_decode(), with the decision order of each entry unless `order` is NULL.
int32_t decode(lsrv_engine * engine, int32_t n, const int32_t * token, const int32_t * pos, const int32_t * seq_id,
               const int8_t * output, const int32_t * order, bool sync, uint64_t serial);

// common_sampler_sample() aborts the process when there is nothing to read at a batch index; this throws.
void check_logits(llama_context * ctx, int32_t idx);

// The logits of the whole vocabulary at a batch index; throws if there are none, or if the backend sampled there and left
// what was computed before in their place.
const float * raw_logits(llama_context * ctx, int32_t idx);

// Sample from the logits at a batch index; the grammar allows the token. Throws, and the sampler is of no further use then.
llama_token choose(llama_context * ctx, lsrv_sampler * smpl, int32_t idx);

// Take a token into history, grammar and reasoning budget (the latter two if is_generated). Throws like choose().
void accept(lsrv_sampler * smpl, llama_token token, bool is_generated);

// Whether grammar and chain let this token pass at a batch index. Only for samplers under a grammar.
bool grammar_allows(llama_context * ctx, const lsrv_sampler * smpl, int32_t idx, llama_token token);

std::unique_ptr<lsrv_sampler> clone(const lsrv_sampler * smpl);

// lsrv_token_probs(), but throws.
int32_t token_probs(llama_context * ctx, lsrv_sampler * smpl, int32_t idx, llama_token token, int32_t n_top, bool post,
                    int32_t * ids, float * probs, float * token_prob);

} // namespace lsrv
