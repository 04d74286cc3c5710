#include "bridge_decision.h"

#include "objects.h"

#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"
#include "jinja/value.h"
#include "json.h"

#include "../src/llama-ext.h"

#include <memory>
#include <string>

using namespace lsrv;

static_assert(LSRV_ORDER_NONE            == LLAMA_DECISION_ORDER_NONE, "");
static_assert(LSRV_ORDER_QUESTION_NOUL   == LLAMA_DECISION_ORDER_QUESTION_NOUL, "");
static_assert(LSRV_ORDER_QUESTION_CHOICE == LLAMA_DECISION_ORDER_QUESTION_CHOICE, "");
static_assert(LSRV_ORDER_QUESTION_SCORE  == LLAMA_DECISION_ORDER_QUESTION_SCORE, "");
static_assert(LSRV_ORDER_OPTION          == LLAMA_DECISION_ORDER_OPTION, "");

struct lsrv_template {
    std::string    source;
    jinja::program program;
};

extern "C" {

int32_t lsrv_decode_ordered(lsrv_engine * engine, int32_t n, const int32_t * token, const int32_t * pos, const int32_t * seq_id,
                            const int8_t * output, const int32_t * order, bool sync, uint64_t serial) {
    return decode(engine, n, token, pos, seq_id, output, order, sync, serial);
}

int32_t lsrv_logits_at(lsrv_engine * engine, int32_t idx, const int32_t * tokens, int32_t n, float * out, char ** err) {
    return guarded(err, [&] {
        const float * logits = raw_logits(engine->ctx, idx);
        for (int32_t i = 0; i < n; ++i) {
            if (tokens[i] < 0 || tokens[i] >= engine->n_vocab) {
                refuse("token out of range: " + std::to_string(tokens[i]));
            }
            out[i] = logits[tokens[i]];
        }
    });
}

int32_t lsrv_embeddings_at(lsrv_engine * engine, const int32_t * idx, int32_t n, float * out, char ** err) {
    return guarded(err, [&] {
        const size_t n_row = llama_model_n_embd_out(engine->model);
        for (int32_t i = 0; i < n; ++i) {
            const float * row = idx[i] < 0 ? nullptr : llama_get_embeddings_ith(engine->ctx, idx[i]);
            if (row == nullptr) {
                refuse("no embeddings at batch index " + std::to_string(idx[i]));
            }
            std::copy(row, row + n_row, out + i * n_row);
        }
    });
}

int32_t lsrv_template_new(const char * source, lsrv_template ** out, char ** err) {
    return guarded(err, [&] {
        jinja::lexer lexer;
        const auto   tokens = lexer.tokenize(source);
        auto         tmpl   = std::make_unique<lsrv_template>();
        tmpl->source  = tokens.source;
        tmpl->program = jinja::parse_from_tokens(tokens);
        *out = tmpl.release();
    });
}

void lsrv_template_free(lsrv_template * tmpl) {
    delete tmpl;
}

int32_t lsrv_template_render(const lsrv_template * tmpl, const char * values, char ** out, char ** err) {
    return guarded(err, [&] {
        jinja::context context(tmpl->source);
        jinja::global_from_json(context, common_json::parse(values), false);
        jinja::runtime runtime(context);
        const auto parts = jinja::runtime::gather_string_parts(runtime.execute(tmpl->program));
        *out = copy_text(parts->as_string().str());
    });
}

} // extern "C"
