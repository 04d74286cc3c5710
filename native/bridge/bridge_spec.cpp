#include "bridge_spec.h"

#include "objects.h"

#include "common.h"
#include "log.h"
#include "ngram-cache.h"
#include "speculative.h"

#include "../src/llama-ext.h"

#include <algorithm>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using namespace lsrv;

namespace {

// What is known of one sequence, besides what the drafters keep for themselves.
struct spec_seq {
    llama_tokens prompt;     // without the last token
    size_t       n_seen = 0; // tokens that the drafters have been shown

    llama_tokens                               draft;
    std::vector<std::vector<llama_token_data>> draft_q; // distribution of each drafted token; empty if it was not sampled

    bool has_drafted = false;

    std::mt19937 synth_rng;
};

} // namespace

struct lsrv_spec {
    lsrv_engine * engine = nullptr;

    common_params_speculative          params;
    common_speculative_init_result_ptr init; // draft model and context; outlives what follows
    common_speculative_ptr             spec;

    llama_context * ctx_dft = nullptr;

    int32_t n_max       = 0;
    int32_t n_vocab_dft = 0;
    bool    is_simple   = false; // a draft model of the ordinary kind, at the same positions as the target
    size_t  n_reserve   = 0;
    size_t  n_min_known = 0;     // tokens without which drafting reads beyond its data

    std::vector<double>   synth_probs;
    std::vector<spec_seq> seqs;

    spec_seq & at(int32_t seq_id) {
        if (seq_id < 0 || seq_id >= (int32_t) seqs.size()) {
            refuse("no sequence " + std::to_string(seq_id));
        }
        return seqs[seq_id];
    }
};

namespace {

bool has_type(const common_params_speculative & params, common_speculative_type type) {
    return std::find(params.types.begin(), params.types.end(), type) != params.types.end();
}

bool needs_draft_context(common_speculative_type type) {
    switch (type) {
        case COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE:
        case COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3:
        case COMMON_SPECULATIVE_TYPE_DRAFT_MTP:
        case COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH:
        case COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK:
            return true;
        default:
            return false;
    }
}

// Making the drafters aborts the process on each of these.
void check_models(const common_params_speculative & params, const llama_model * model_tgt) {
    for (const auto & path : { params.ngram_cache.lookup_cache_static, params.ngram_cache.lookup_cache_dynamic }) {
        if (has_type(params, COMMON_SPECULATIVE_TYPE_NGRAM_CACHE) && !path.empty()) {
            common_ngram_cache_load(path);
        }
    }
    if (params.draft.ctx_dft == nullptr) {
        return;
    }

    const llama_model * model_dft = llama_get_model(params.draft.ctx_dft);
    const int32_t *     layers    = llama_model_target_layer_ids(model_dft);
    const uint32_t      n_layers  = llama_model_target_layer_ids_n(model_dft);

    const bool is_eagle3 = has_type(params, COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3);
    const bool is_block  = has_type(params, COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH) ||
                           has_type(params, COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK);

    if (has_type(params, COMMON_SPECULATIVE_TYPE_DRAFT_MTP) && llama_model_n_embd_out(model_dft) != llama_model_n_embd_out(model_tgt)) {
        refuse("the hidden states of the draft and the target model differ in width");
    }
    if (is_block && n_layers == 0) {
        refuse("the draft model does not say which layers of the target it reads");
    }
    if (is_eagle3 || is_block) {
        const int32_t last = llama_model_n_layer(model_tgt) - (is_block ? 1 : 0);
        if (std::any_of(layers, layers + n_layers, [last](int32_t layer) { return layer < 0 || layer > last; })) {
            refuse("the draft model reads layers that the target does not have");
        }
    }
}

void load_draft(lsrv_spec * spec, const lsrv_params * params, lsrv_progress_fn progress, void * user_data) {
    const common_params & p = params->p;

    const bool has_draft = p.speculative.has_dft();
    const bool has_heads = has_type(p.speculative, COMMON_SPECULATIVE_TYPE_DRAFT_MTP);
    if (!has_heads && !(has_draft && std::any_of(p.speculative.types.begin(), p.speculative.types.end(), needs_draft_context))) {
        return;
    }
    common_params p_dft = common_base_params_to_speculative(p);
    p_dft.load_progress_callback           = progress;
    p_dft.load_progress_callback_user_data = user_data;

    error_capture errors;
    spec->init    = common_speculative_init_from_params(p_dft, spec->engine->model, spec->engine->ctx);
    spec->ctx_dft = spec->init->context();
    if (has_draft && spec->init->model() == nullptr) {
        throw std::runtime_error(errors.after("failed to load draft model '" + p_dft.model.path + "'"));
    }
    if (spec->ctx_dft == nullptr) {
        throw std::runtime_error(errors.after("failed to create the draft context"));
    }
    llama_set_abort_callback(spec->ctx_dft, lsrv_engine::must_abort, spec->engine);
    spec->n_vocab_dft = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(spec->ctx_dft)));
}

void init_drafters(lsrv_spec * spec, uint32_t n_seq) {
    auto & params = spec->params;
    params.draft.ctx_tgt = spec->engine->ctx;
    params.draft.ctx_dft = spec->ctx_dft;
    check_models(params, spec->engine->model);
    spec->spec.reset(common_speculative_init(params, n_seq));
    if (!spec->spec) {
        return;
    }
    spec->n_max       = common_speculative_n_max(spec->spec.get());
    spec->synth_probs = common_speculative_get_synth_probs(spec->spec.get());
    spec->is_simple   = spec->ctx_dft != nullptr && has_type(params, COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE);
    spec->n_min_known = has_type(params, COMMON_SPECULATIVE_TYPE_NGRAM_CACHE) ? LLAMA_NGRAM_MAX - 1 : 0;
    // ngram-map compares a little beyond the end when a new prompt is shorter than an old one
    for (const auto & map : { params.ngram_map_k, params.ngram_map_k4v }) {
        spec->n_reserve = std::max<size_t>(spec->n_reserve, (size_t) map.size_n + map.size_m + 1);
    }
    spec->seqs.resize(n_seq);
}

// llama_process() refuses a whole batch in which one sequence does not go on where its cells end.
void align_draft_context(lsrv_spec * spec, int32_t seq_id, llama_pos pos) {
    llama_memory_t  memory  = llama_get_memory(spec->ctx_dft);
    const llama_pos pos_max = llama_memory_seq_pos_max(memory, seq_id);
    if (pos_max < 0 || pos_max == pos - 1) {
        return;
    }
    if (pos_max < pos || !llama_memory_seq_rm(memory, seq_id, pos, -1)) {
        llama_memory_seq_rm(memory, seq_id, -1, -1);
    }
}

bool prepare_draft(lsrv_spec * spec, const lsrv_draft_item & item) {
    auto & seq = spec->at(item.seq_id);
    if ((size_t) item.n_prompt != seq.prompt.size()) {
        refuse("sequence " + std::to_string(item.seq_id) + " has " + std::to_string(seq.prompt.size()) + " tokens, not " +
               std::to_string(item.n_prompt));
    }
    auto & draft_params = common_speculative_get_draft_params(spec->spec.get(), item.seq_id);
    if (draft_params.drafting) {
        refuse("sequence " + std::to_string(item.seq_id) + " is there twice");
    }
    seq.draft.clear();
    seq.draft_q.clear();
    if (item.n_max < 1 || spec->n_max < 1 || item.pos0 < 0 || item.id_last < 0 || seq.prompt.size() < spec->n_min_known ||
        (spec->ctx_dft != nullptr && item.id_last >= spec->n_vocab_dft)) {
        return false;
    }
    if (seq.prompt.size() < seq.n_seen) {
        // ngram-map aborts the process when it finds fewer tokens than before
        common_speculative_begin(spec->spec.get(), item.seq_id, seq.prompt);
    }
    seq.n_seen = seq.prompt.size();
    if (spec->is_simple) {
        align_draft_context(spec, item.seq_id, item.pos0);
    }
    draft_params.drafting = true;
    draft_params.n_max    = item.n_max;
    draft_params.pos0     = item.pos0;
    draft_params.id_last  = item.id_last;
    draft_params.prompt   = &seq.prompt;
    draft_params.result   = &seq.draft;
    draft_params.result_q = item.rejection != 0 ? &seq.draft_q : nullptr;
    draft_params.temp     = item.temp;
    draft_params.seed     = item.seed;
    return true;
}

void take_draft(lsrv_spec * spec, lsrv_draft_item & item) {
    auto & seq = spec->at(item.seq_id);
    // the vocabularies of target and draft may differ in length
    const auto is_foreign = [spec](llama_token token) { return token < 0 || token >= spec->engine->n_vocab; };
    seq.draft.erase(std::find_if(seq.draft.begin(), seq.draft.end(), is_foreign), seq.draft.end());
    seq.draft.resize(std::min(seq.draft.size(), (size_t) spec->n_max));
    if (seq.draft_q.size() < seq.draft.size()) {
        seq.draft_q.clear();
    }
    seq.has_drafted = seq.has_drafted || !seq.draft.empty();
    item.n_draft    = (int32_t) seq.draft.size();
    std::copy(seq.draft.begin(), seq.draft.end(), item.draft);
}

// verification

// One item of lsrv_spec_verify() in work.
class verification {
  public:
    verification(lsrv_spec * spec, lsrv_verify_item & item) :
        ctx(spec->engine->ctx), smpl(item.smpl), seq(spec->at(item.seq_id)), synth_probs(spec->synth_probs), item(item) {
        item.n_accepted = 0;
        if (item.n_draft < 1) {
            refuse("nothing was drafted");
        }
        for (int32_t i = 0; i < item.n_draft; ++i) {
            if (item.draft[i] < 0 || item.draft[i] >= spec->engine->n_vocab) {
                refuse("token out of range: " + std::to_string(item.draft[i]));
            }
        }
    }

    void run() {
        if (!synth_probs.empty()) {
            by_chance();
        } else if (item.rejection != 0 && item.replay != 0) {
            again();
        } else if (item.rejection != 0 && has_distributions()) {
            by_rejection();
        } else {
            by_match();
        }
    }

  private:
    // The draft stands as long as the target samples the same.
    void by_match() {
        for (int32_t i = 0; i < item.n_draft; ++i) {
            const llama_token token = choose(i);
            take(i, token);
            // what follows an end of generation is not wanted; in a replay it is the target's own, and the last
            if (token != item.draft[i] || (is_eog(token) && i + 1 < item.n_draft)) {
                return;
            }
        }
        take_own(item.n_draft);
    }

    // The draft stands: sampling only brings the random numbers to where they were.
    void again() {
        for (int32_t i = 0; i < item.n_draft; ++i) {
            take_drafted(i, choose(i), true);
        }
        take_own(item.n_draft);
    }

    // The draft stands by chance, whatever the target says.
    void by_chance() {
        if ((size_t) item.n_draft > synth_probs.size() && item.replay == 0) {
            refuse("the draft is longer than the list of synthetic acceptance rates");
        }
        std::uniform_real_distribution<double> chance(0.0, 1.0);
        for (int32_t i = 0; i < item.n_draft; ++i) {
            const llama_token token  = choose(i);
            const bool        stands = item.replay != 0 || (chance(seq.synth_rng) < synth_probs[i] && !is_eog(item.draft[i]));
            if (!stands) {
                take(i, token);
                return;
            }
            // only the last token of a replay is the target's own, which grammar and reasoning budget have to see
            take_drafted(i, token, item.replay != 0 && i + 1 == item.n_draft);
        }
        take_own(item.n_draft);
    }

    void by_rejection() {
        const int32_t n_draft = n_verifiable();

        std::vector<int>   idxs;
        const llama_tokens draft(item.draft, item.draft + n_draft);
        for (int32_t i = 0; i <= n_draft; ++i) {
            idxs.push_back(item.idx + i);
        }
        const std::vector<std::vector<llama_token_data>> draft_q(seq.draft_q.begin(), seq.draft_q.begin() + n_draft);

        // its loop cannot be looked into: probabilities after sampling come from doing the same once more
        auto before = item.n_top >= 0 && item.post != 0 ? lsrv::clone(smpl) : nullptr;

        smpl->failed = true;
        const auto accepted = common_sampler_sample_and_accept_n_rejection(smpl->smpl.get(), ctx, idxs, draft, draft_q);
        for (const llama_token token : accepted) {
            if (smpl->gate) {
                common_sampler_accept(smpl->gate.get(), token, true);
            }
        }
        smpl->failed  = false;
        smpl->sampled = true;

        for (const llama_token token : accepted) {
            const int32_t i = item.n_accepted;
            if (before) {
                lsrv::choose(ctx, before.get(), item.idx + i);
            }
            record(i, token, before ? before.get() : smpl);
            if (before && i + 1 < (int32_t) accepted.size()) {
                lsrv::accept(before.get(), token, true);
            }
        }
    }

    // How much of the draft can go through common_sampler_sample_and_accept_n_rejection(), which would abort the process
    // where nothing fits the grammar.
    int32_t n_verifiable() {
        if (!smpl->constrained) {
            for (int32_t i = 0; i <= item.n_draft; ++i) {
                check_logits(ctx, item.idx + i);
            }
            return item.n_draft;
        }
        auto trial = lsrv::clone(smpl);
        for (int32_t i = 0;; ++i) {
            try {
                lsrv::choose(ctx, trial.get(), item.idx + i);
            } catch (const std::exception &) {
                if (i == 0) {
                    smpl->failed = true;
                    throw;
                }
                return i - 1;
            }
            if (i == item.n_draft) {
                return item.n_draft;
            }
            try {
                check_end(trial.get(), i);
                lsrv::accept(trial.get(), item.draft[i], true);
            } catch (const std::exception &) {
                return item.n_draft; // refused here for sure
            }
        }
    }

    bool has_distributions() const {
        return seq.draft_q.size() >= (size_t) item.n_draft && seq.draft.size() >= (size_t) item.n_draft &&
               std::equal(item.draft, item.draft + item.n_draft, seq.draft.begin());
    }

    bool is_eog(llama_token token) const {
        return llama_vocab_is_eog(smpl->vocab, token);
    }

    // A grammar aborts the process on an end of generation that it does not allow.
    void check_end(const lsrv_sampler * sampler, int32_t i) const {
        const llama_token token = item.draft[i];
        if (sampler->constrained && is_eog(token) && !grammar_allows(ctx, sampler, item.idx + i, token)) {
            throw std::runtime_error("the grammar does not allow the end of generation");
        }
    }

    llama_token choose(int32_t i) {
        return lsrv::choose(ctx, smpl, item.idx + i);
    }

    void take(int32_t i, llama_token token) {
        record(i, token, smpl);
        lsrv::accept(smpl, token, true);
    }

    void take_own(int32_t i) {
        take(i, choose(i));
    }

    void take_drafted(int32_t i, llama_token chosen, bool is_generated) {
        if (is_generated && chosen != item.draft[i]) {
            check_end(smpl, i);
        }
        record(i, item.draft[i], smpl);
        lsrv::accept(smpl, item.draft[i], is_generated);
    }

    void record(int32_t i, llama_token token, lsrv_sampler * sampler) {
        item.accepted[item.n_accepted++] = token;
        if (item.n_top < 0) {
            return;
        }
        const size_t offset = (size_t) i * item.n_top;
        item.n_written[i] = token_probs(ctx, sampler, item.idx + i, token, item.n_top, item.post != 0, item.top_ids + offset,
                                        item.top_probs + offset, item.prob + i);
    }

    llama_context *             ctx;
    lsrv_sampler *              smpl;
    spec_seq &                  seq;
    const std::vector<double> & synth_probs;
    lsrv_verify_item &          item;
};

} // namespace

extern "C" {

// making and describing

const char * lsrv_spec_all_types(void) {
    return common_speculative_all_types_str();
}

void lsrv_spec_output_limits(int32_t n_batch, int32_t n_parallel, int32_t n_draft, int32_t * total, int32_t * per_seq) {
    const auto limits = common_speculative_get_output_limits(n_batch, n_parallel, n_draft);
    *total   = limits.total;
    *per_seq = limits.per_seq;
}

int32_t lsrv_spec_load(lsrv_engine * engine, const lsrv_params * params, lsrv_progress_fn progress, void * user_data,
                       lsrv_spec ** out, char ** err) {
    *out = nullptr;
    auto spec = std::make_unique<lsrv_spec>();
    spec->engine = engine;

    const int32_t status = guarded(err, [&] {
        spec->params = params->p.speculative;
        load_draft(spec.get(), params, progress, user_data);
    });
    if (status != LSRV_OK) {
        return status;
    }
    if (guarded(err, [&] { init_drafters(spec.get(), params->p.n_parallel); }) == LSRV_OK && spec->spec) {
        *out = spec.release();
    }
    return LSRV_OK;
}

void lsrv_spec_free(lsrv_spec * spec) {
    delete spec;
}

struct llama_context * lsrv_spec_context(lsrv_spec * spec) {
    return spec->ctx_dft;
}

int32_t lsrv_spec_n_max(const lsrv_spec * spec) {
    return spec->n_max;
}

int32_t lsrv_spec_n_synth(const lsrv_spec * spec) {
    return (int32_t) spec->synth_probs.size();
}

const double * lsrv_spec_synth_probs(const lsrv_spec * spec) {
    return spec->synth_probs.data();
}

void lsrv_spec_print_stats(const lsrv_spec * spec) {
    logged(__func__, [&] { common_speculative_print_stats(spec->spec.get()); });
}

// tokens of a sequence

int32_t lsrv_spec_begin(lsrv_spec * spec, int32_t seq_id, uint32_t seed, char ** err) {
    return guarded(err, [&] {
        auto & seq = spec->at(seq_id);
        seq.draft.clear();
        seq.draft_q.clear();
        seq.synth_rng.seed(seed == LLAMA_DEFAULT_SEED ? std::random_device{}() : seed);
        common_speculative_begin(spec->spec.get(), seq_id, seq.prompt);
        seq.n_seen = seq.prompt.size();
    });
}

int32_t lsrv_spec_prompt(lsrv_spec * spec, int32_t seq_id, int32_t n_keep, const int32_t * tokens, int32_t n, char ** err) {
    return guarded(err, [&] {
        auto & prompt = spec->at(seq_id).prompt;
        if (n_keep < 0 || (size_t) n_keep > prompt.size() || n < 0) {
            refuse("cannot keep " + std::to_string(n_keep) + " of " + std::to_string(prompt.size()) + " tokens");
        }
        if (std::any_of(tokens, tokens + n, [spec](int32_t token) { return token < 0 || token >= spec->engine->n_vocab; })) {
            refuse("token out of range");
        }
        prompt.resize(n_keep);
        if (prompt.capacity() < n_keep + n + spec->n_reserve) {
            prompt.reserve(2 * (n_keep + (size_t) n) + spec->n_reserve);
        }
        prompt.insert(prompt.end(), tokens, tokens + n);
    });
}

int32_t lsrv_spec_n_prompt(const lsrv_spec * spec, int32_t seq_id) {
    return seq_id < 0 || seq_id >= (int32_t) spec->seqs.size() ? 0 : (int32_t) spec->seqs[seq_id].prompt.size();
}

// a step

int32_t lsrv_spec_draft(lsrv_spec * spec, int32_t n, lsrv_draft_item * items, uint64_t serial, char ** err) {
    return guarded(err, [&] {
        // an earlier call may have ended in the middle
        for (int32_t seq_id = 0; seq_id < (int32_t) spec->seqs.size(); ++seq_id) {
            common_speculative_get_draft_params(spec->spec.get(), seq_id).drafting = false;
        }
        bool any = false;
        for (int32_t i = 0; i < n; ++i) {
            items[i].n_draft = 0;
            any = prepare_draft(spec, items[i]) || any;
        }
        if (any) {
            const running_call call(spec->engine, serial);
            common_speculative_draft(spec->spec.get());
        }
        for (int32_t i = 0; i < n; ++i) {
            take_draft(spec, items[i]);
        }
    });
}

int32_t lsrv_spec_process(lsrv_spec * spec, int32_t n, const int32_t * token, const int32_t * pos, const int32_t * seq_id,
                          uint64_t serial) {
    int32_t status = LSRV_ERR;
    logged(__func__, [&] {
        common_batch      batch;
        std::vector<bool> seen(spec->seqs.size(), false);
        for (int32_t i = 0; i < n; ++i) {
            spec->at(seq_id[i]);
            if (spec->is_simple && !seen[seq_id[i]]) {
                align_draft_context(spec, seq_id[i], pos[i]);
                seen[seq_id[i]] = true;
            }
            // a token that the draft model does not know fails the whole batch, any other only makes a worse draft
            const bool is_known = spec->ctx_dft == nullptr || (token[i] >= 0 && token[i] < spec->n_vocab_dft);
            batch.add(is_known ? token[i] : 0, pos[i], seq_id[i], false);
        }
        const running_call call(spec->engine, serial);
        if (common_speculative_process(spec->spec.get(), batch)) {
            status = LSRV_OK;
        }
    });
    return status;
}

int32_t lsrv_spec_verify(lsrv_spec * spec, int32_t n, lsrv_verify_item * items, char ** err) {
    int32_t result = LSRV_OK;
    for (int32_t i = 0; i < n; ++i) {
        auto & item = items[i];
        char * text = nullptr;
        item.status = (int8_t) guarded(&text, [&] { verification(spec, item).run(); });
        if (item.status != LSRV_OK) {
            item.smpl->error = text != nullptr ? text : "";
            free(text);
            if (result == LSRV_OK) {
                result = fail(err, item.smpl->error.c_str());
            }
        }
    }
    return result;
}

int32_t lsrv_spec_accept(lsrv_spec * spec, int32_t seq_id, int32_t n, char ** err) {
    return guarded(err, [&] {
        const auto & seq = spec->at(seq_id);
        if (n < 0 || n > UINT16_MAX || (n > 0 && !seq.has_drafted)) {
            refuse("sequence " + std::to_string(seq_id) + " has no draft of which " + std::to_string(n) + " tokens were accepted");
        }
        common_speculative_accept(spec->spec.get(), seq_id, (uint16_t) n);
    });
}

// state that belongs to a checkpoint

int32_t lsrv_spec_get_state(lsrv_spec * spec, int32_t seq_id, uint8_t ** data, size_t * size, char ** err) {
    return guarded(err, [&] {
        spec->at(seq_id);
        std::vector<uint8_t> state;
        common_speculative_get_state(spec->spec.get(), seq_id, state);
        *data = copy_array(state);
        *size = state.size();
    });
}

int32_t lsrv_spec_set_state(lsrv_spec * spec, int32_t seq_id, const uint8_t * data, size_t size, char ** err) {
    return guarded(err, [&] {
        spec->at(seq_id);
        common_speculative_set_state(spec->spec.get(), seq_id, std::vector<uint8_t>(data, data + size));
    });
}

} // extern "C"
