#include "objects.h"

#include "arg.h"
#include "build-info.h"
#include "chat.h"
#include "common.h"
#include "fit.h"
#include "json-schema-to-grammar.h"
#include "json.h"
#include "log.h"
#include "sampling.h"
#include "speculative.h"

#include "../src/llama-ext.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <clocale>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using namespace lsrv;

namespace {

constexpr int32_t  DEFAULT_PORT    = 8080;
constexpr int      MAX_NESTING     = 1000;    // of brackets in schemas and grammars: the parsers recurse, 8 MiB last for 8,000
constexpr int      MAX_RULES       = 10000;   // of a grammar: the search for left recursion goes this deep
constexpr int32_t  MAX_HISTORY     = 1 << 20; // tokens a sampler may look back: it allocates room for them at once

// log

// Writers share, a flush excludes them: while common_log is paused it drops what it is given.
std::shared_mutex log_mutex;

// Error lines of the native libraries on this thread while it loads a model, for the text of the exception.
thread_local std::string * captured_errors = nullptr;

void log_callback(enum ggml_log_level level, const char * text, void * user_data) {
    if (level == GGML_LOG_LEVEL_ERROR && running_call::is_stopped()) {
        level = GGML_LOG_LEVEL_DEBUG; // it fails because it was told to
    }
    if (level == GGML_LOG_LEVEL_ERROR && captured_errors != nullptr && captured_errors->size() < 4096) {
        *captured_errors += text;
    }
    common_log_default_callback(level, text, user_data);
}

// JSON helpers

common_json number(double value) {
    // JSON has no infinities; the readers below take the same words
    if (std::isnan(value)) {
        return common_json("nan");
    }
    if (std::isinf(value)) {
        return common_json(value > 0 ? "inf" : "-inf");
    }
    return common_json(value);
}

int64_t read_int(const std::string & name, const common_json & value, int64_t lo, int64_t hi) {
    if (!value.is_number_integer()) {
        refuse("'" + name + "' must be an integer");
    }
    const int64_t number = value.get<int64_t>();
    // what does not fit 64 bits has wrapped around
    if (number < lo || number > hi || value.get<double>() >= 9223372036854775808.0) {
        refuse("'" + name + "' is out of range: " + value.dump());
    }
    return number;
}

double read_number(const std::string & name, const common_json & value) {
    if (value.is_number()) {
        return value.get<double>();
    }
    if (value.is_string()) {
        const auto word = value.get<std::string>();
        if (word == "inf") {
            return std::numeric_limits<double>::infinity();
        }
        if (word == "-inf") {
            return -std::numeric_limits<double>::infinity();
        }
        if (word == "nan") {
            return std::numeric_limits<double>::quiet_NaN();
        }
    }
    refuse("'" + name + "' must be a number");
}

bool read_bool(const std::string & name, const common_json & value) {
    if (!value.is_boolean()) {
        refuse("'" + name + "' must be true or false");
    }
    return value.get<bool>();
}

std::string read_text(const std::string & name, const common_json & value) {
    if (!value.is_string()) {
        refuse("'" + name + "' must be a string");
    }
    return value.get<std::string>();
}

const common_json & read_array(const std::string & name, const common_json & value) {
    if (!value.is_array()) {
        refuse("'" + name + "' must be an array");
    }
    return value;
}

std::vector<std::string> read_texts(const std::string & name, const common_json & value) {
    std::vector<std::string> out;
    for (const auto & item : read_array(name, value)) {
        out.push_back(read_text(name, item));
    }
    return out;
}

llama_token read_token(const std::string & name, const common_json & value, int32_t n_vocab) {
    return (llama_token) read_int(name, value, 0, (int64_t) n_vocab - 1);
}

std::vector<llama_token> read_tokens(const std::string & name, const common_json & value, int32_t n_vocab) {
    std::vector<llama_token> out;
    for (const auto & item : read_array(name, value)) {
        out.push_back(read_token(name, item, n_vocab));
    }
    return out;
}

// Writes every field it is shown into an object.
struct field_writer {
    common_json & out;

    void operator()(const char * name, bool value) { out[name] = value; }
    void operator()(const char * name, float value) { out[name] = number(value); }
    void operator()(const char * name, double value) { out[name] = number(value); }
    void operator()(const char * name, const std::string & value) { out[name] = value; }
    void operator()(const char * name, const std::vector<std::string> & value) { out[name] = value; }
    void operator()(const char * name, const std::set<std::string> & value) { out[name] = value; }

    template <typename T, typename std::enable_if<std::is_integral<T>::value && !std::is_same<T, bool>::value, int>::type = 0>
    void operator()(const char * name, T value) { out[name] = value; }
};

// Reads one value into the field of that name, if it is shown one.
struct field_setter {
    const std::string & key;
    const common_json & value;
    bool found = false;

    bool wants(const char * name) {
        const bool hit = !found && key == name;
        found = found || hit;
        return hit;
    }

    void operator()(const char * name, bool & field) {
        if (wants(name)) {
            field = read_bool(key, value);
        }
    }

    void operator()(const char * name, float & field) {
        if (wants(name)) {
            field = (float) read_number(key, value);
        }
    }

    void operator()(const char * name, double & field) {
        if (wants(name)) {
            field = read_number(key, value);
        }
    }

    void operator()(const char * name, std::string & field) {
        if (wants(name)) {
            field = read_text(key, value);
        }
    }

    void operator()(const char * name, std::vector<std::string> & field) {
        if (wants(name)) {
            field = read_texts(key, value);
        }
    }

    void operator()(const char * name, std::set<std::string> & field) {
        if (wants(name)) {
            const auto items = read_texts(key, value);
            field = std::set<std::string>(items.begin(), items.end());
        }
    }

    template <typename T, typename std::enable_if<std::is_integral<T>::value && !std::is_same<T, bool>::value, int>::type = 0>
    void operator()(const char * name, T & field) {
        if (wants(name)) {
            const int64_t lo = std::is_signed<T>::value ? (int64_t) std::numeric_limits<T>::min() : 0;
            const int64_t hi = sizeof(T) < 8 ? (int64_t) std::numeric_limits<T>::max() : std::numeric_limits<int64_t>::max();
            field = (T) read_int(key, value, lo, hi);
        }
    }
};

// the fields of common_params that Python sees: one list for reading and for setting

#define FIELD(name) visit(#name, p.name)

template <typename V, typename P>
void visit_params(V & visit, P & p) {
    // prediction, context, batches
    FIELD(n_predict);
    FIELD(n_ctx);
    FIELD(n_batch);
    FIELD(n_ubatch);
    FIELD(n_keep);
    FIELD(n_parallel);
    FIELD(n_outputs_max);
    FIELD(n_outputs_max_per_seq);
    FIELD(kv_unified);
    FIELD(kv_unified_per_slot);
    FIELD(cont_batching);
    FIELD(ctx_shift);
    FIELD(swa_full);
    FIELD(n_cache_reuse);
    FIELD(cache_prompt);
    FIELD(cache_idle_slots);
    FIELD(n_ctx_checkpoints);
    FIELD(checkpoint_min_step);
    FIELD(cache_ram_mib);
    FIELD(slot_prompt_similarity);
    FIELD(slot_save_path);
    FIELD(sleep_idle_seconds);

    // model and devices
    FIELD(n_gpu_layers);
    FIELD(main_gpu);
    FIELD(fit_params);
    FIELD(fit_params_min_ctx);
    FIELD(no_kv_offload);
    FIELD(no_op_offload);
    FIELD(no_extra_bufts);
    FIELD(no_host);
    FIELD(check_tensors);
    FIELD(load_mtp);
    FIELD(warmup);
    FIELD(no_perf);
    FIELD(rope_freq_base);
    FIELD(rope_freq_scale);
    FIELD(yarn_ext_factor);
    FIELD(yarn_attn_factor);
    FIELD(yarn_beta_fast);
    FIELD(yarn_beta_slow);
    FIELD(yarn_orig_ctx);
    FIELD(moe_cache_size);
    FIELD(lora_init_without_apply);
    FIELD(control_vector_layer_start);
    FIELD(control_vector_layer_end);
    FIELD(model_alias);
    FIELD(model_tags);
    FIELD(offline);

    // embeddings
    FIELD(embedding);
    FIELD(embd_normalize);

    // text
    FIELD(special);
    FIELD(escape);
    FIELD(antiprompt);
    FIELD(spm_infill);
    FIELD(chat_template);
    FIELD(enable_chat_template);
    FIELD(use_jinja);
    FIELD(force_pure_content_parser);
    FIELD(enable_reasoning);
    FIELD(prefill_assistant);
    FIELD(preserve_reasoning_specified);

    // HTTP
    FIELD(hostnames);
    FIELD(port);
    FIELD(reuse_port);
    FIELD(timeout_read);
    FIELD(timeout_write);
    FIELD(sse_ping_interval);
    FIELD(n_threads_http);
    FIELD(public_path);
    FIELD(api_prefix);
    FIELD(api_keys);
    FIELD(ssl_file_key);
    FIELD(ssl_file_cert);
    FIELD(cors_origins);
    FIELD(cors_methods);
    FIELD(cors_headers);
    FIELD(cors_credentials);
    FIELD(cors_origins_explicit);
    FIELD(endpoint_slots);
    FIELD(endpoint_props);
    FIELD(endpoint_metrics);
    FIELD(ui);
    FIELD(ui_mcp_proxy);
    FIELD(ui_config_json);

    // tools and router
    FIELD(server_base);
    FIELD(server_tools);
    FIELD(server_tools_runtime);
    FIELD(mcp_servers_config);
    FIELD(mcp_servers_json);
    FIELD(models_dir);
    FIELD(models_preset);
    FIELD(models_preset_hf);
    FIELD(models_max);
    FIELD(models_autoload);

    // media
    FIELD(media_path);
    FIELD(no_mmproj);
    FIELD(mmproj_use_gpu);
    FIELD(image_min_tokens);
    FIELD(image_max_tokens);
    FIELD(mtmd_batch_max_tokens);
    FIELD(video_fps);
    FIELD(video_timestamp_interval_ms);
    FIELD(video_ffmpeg_bin_dir);

    // log
    FIELD(verbosity);
    FIELD(log_json);
    FIELD(path_prompts_log_dir);
    FIELD(show_timings);
    FIELD(verbose_prompt);
    FIELD(use_color);
}

template <typename V, typename P>
void visit_sampling(V & visit, P & p) {
    FIELD(seed);
    FIELD(n_prev);
    FIELD(n_probs);
    FIELD(min_keep);
    FIELD(top_k);
    FIELD(top_p);
    FIELD(min_p);
    FIELD(xtc_probability);
    FIELD(xtc_threshold);
    FIELD(typ_p);
    FIELD(temp);
    FIELD(dynatemp_range);
    FIELD(dynatemp_exponent);
    FIELD(penalty_last_n);
    FIELD(penalty_repeat);
    FIELD(penalty_freq);
    FIELD(penalty_present);
    FIELD(dry_multiplier);
    FIELD(dry_base);
    FIELD(dry_allowed_length);
    FIELD(dry_penalty_last_n);
    FIELD(dry_sequence_breakers);
    FIELD(adaptive_target);
    FIELD(adaptive_decay);
    FIELD(mirostat);
    FIELD(top_n_sigma);
    FIELD(mirostat_tau);
    FIELD(mirostat_eta);
    FIELD(ignore_eos);
    FIELD(no_perf);
    FIELD(timing_per_token);
    FIELD(user_sampling_config);
    FIELD(grammar_lazy);
    FIELD(generation_prompt);
    FIELD(reasoning_budget_tokens);
    FIELD(reasoning_budget_message);
    FIELD(reasoning_control);
    FIELD(backend_sampling);
}

#undef FIELD

// names of enumerations

const char * pooling_name(enum llama_pooling_type type) {
    switch (type) {
        case LLAMA_POOLING_TYPE_UNSPECIFIED: return "unspecified";
        case LLAMA_POOLING_TYPE_NONE:        return "none";
        case LLAMA_POOLING_TYPE_MEAN:        return "mean";
        case LLAMA_POOLING_TYPE_CLS:         return "cls";
        case LLAMA_POOLING_TYPE_LAST:        return "last";
        case LLAMA_POOLING_TYPE_RANK:        return "rank";
    }
    return "unknown";
}

const char * attention_name(enum llama_attention_type type) {
    switch (type) {
        case LLAMA_ATTENTION_TYPE_UNSPECIFIED: return "unspecified";
        case LLAMA_ATTENTION_TYPE_CAUSAL:      return "causal";
        case LLAMA_ATTENTION_TYPE_NON_CAUSAL:  return "non-causal";
    }
    return "unknown";
}

const char * split_mode_name(enum llama_split_mode mode) {
    switch (mode) {
        case LLAMA_SPLIT_MODE_NONE:   return "none";
        case LLAMA_SPLIT_MODE_LAYER:  return "layer";
        case LLAMA_SPLIT_MODE_ROW:    return "row";
        case LLAMA_SPLIT_MODE_TENSOR: return "tensor";
    }
    return "unknown";
}

const char * numa_name(ggml_numa_strategy strategy) {
    switch (strategy) {
        case GGML_NUMA_STRATEGY_DISABLED:   return "disabled";
        case GGML_NUMA_STRATEGY_DISTRIBUTE: return "distribute";
        case GGML_NUMA_STRATEGY_ISOLATE:    return "isolate";
        case GGML_NUMA_STRATEGY_NUMACTL:    return "numactl";
        case GGML_NUMA_STRATEGY_MIRROR:     return "mirror";
        default:                            return "unknown";
    }
}

const char * decision_name(common_decision_type type) {
    switch (type) {
        case COMMON_DECISION_TYPE_NONE:         return "none";
        case COMMON_DECISION_TYPE_OPENJEV:      return "openjev";
        case COMMON_DECISION_TYPE_LEV:          return "lev";
        case COMMON_DECISION_TYPE_KEV:          return "kev";
        case COMMON_DECISION_TYPE_NIMBLE:       return "nimble";
        case COMMON_DECISION_TYPE_LAYA:         return "laya";
        case COMMON_DECISION_TYPE_CLEF:         return "clef";
        case COMMON_DECISION_TYPE_PPLX_DECIDER: return "pplx-decider";
        case COMMON_DECISION_TYPE_LFM2_D1:      return "lfm2-d1";
        case COMMON_DECISION_TYPE_LFM2_D1_OMNI: return "lfm2-d1-omni";
        case COMMON_DECISION_TYPE_UNKNOWN:      return "unknown";
    }
    return "unknown";
}

const char * grammar_type_name(common_grammar_type type) {
    switch (type) {
        case COMMON_GRAMMAR_TYPE_NONE:          return "none";
        case COMMON_GRAMMAR_TYPE_USER:          return "user";
        case COMMON_GRAMMAR_TYPE_OUTPUT_FORMAT: return "output_format";
        case COMMON_GRAMMAR_TYPE_TOOL_CALLS:    return "tool_calls";
    }
    return "none";
}

common_grammar_type grammar_type_from_name(const std::string & name) {
    for (const auto type : { COMMON_GRAMMAR_TYPE_NONE, COMMON_GRAMMAR_TYPE_USER, COMMON_GRAMMAR_TYPE_OUTPUT_FORMAT,
                             COMMON_GRAMMAR_TYPE_TOOL_CALLS }) {
        if (name == grammar_type_name(type)) {
            return type;
        }
    }
    refuse("unknown grammar type: " + name);
}

const char * trigger_type_name(common_grammar_trigger_type type) {
    switch (type) {
        case COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN:        return "token";
        case COMMON_GRAMMAR_TRIGGER_TYPE_WORD:         return "word";
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN:      return "pattern";
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL: return "pattern_full";
    }
    return "word";
}

common_grammar_trigger_type trigger_type_from_name(const std::string & name) {
    for (const auto type : { COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN, COMMON_GRAMMAR_TRIGGER_TYPE_WORD,
                             COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN, COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL }) {
        if (name == trigger_type_name(type)) {
            return type;
        }
    }
    refuse("unknown grammar trigger type: " + name);
}

// objects of common_params

common_json bias_to_json(const std::vector<llama_logit_bias> & biases) {
    common_json out = common_json::array();
    for (const auto & bias : biases) {
        common_json pair = common_json::array();
        pair.push_back(bias.token);
        pair.push_back(number(bias.bias));
        out.push_back(pair);
    }
    return out;
}

common_json model_to_json(const common_params_model & model) {
    return {
        { "path",        model.path        },
        { "url",         model.url         },
        { "hf_repo",     model.hf_repo     },
        { "hf_file",     model.hf_file     },
        { "docker_repo", model.docker_repo },
        { "name",        model.get_name()  },
    };
}

common_json cpu_to_json(const common_cpu_params & cpu) {
    return {
        { "n_threads",  cpu.n_threads      },
        { "priority",   (int) cpu.priority },
        { "strict_cpu", cpu.strict_cpu     },
        { "poll",       cpu.poll           },
    };
}

common_json sampling_to_json(const common_params_sampling & sampling) {
    common_json out = common_json::object();
    field_writer writer{ out };
    visit_sampling(writer, sampling);

    std::vector<std::string> samplers;
    for (const auto type : sampling.samplers) {
        samplers.push_back(common_sampler_type_to_str(type));
    }
    out["samplers"] = samplers;
    out["grammar"]  = common_json{
        { "type",  grammar_type_name(sampling.grammar.type) },
        { "value", sampling.grammar.grammar                 },
    };
    common_json triggers = common_json::array();
    for (const auto & trigger : sampling.grammar_triggers) {
        triggers.push_back({ { "type", trigger_type_name(trigger.type) }, { "value", trigger.value }, { "token", trigger.token } });
    }
    out["grammar_triggers"] = triggers;
    common_json ends = common_json::array();
    for (const auto & tokens : sampling.reasoning_budget_end) {
        ends.push_back(tokens);
    }
    out["preserved_tokens"]        = sampling.preserved_tokens;
    out["reasoning_budget_start"]  = sampling.reasoning_budget_start;
    out["reasoning_budget_end"]    = ends;
    out["reasoning_budget_forced"] = sampling.reasoning_budget_forced;
    out["logit_bias"]       = bias_to_json(sampling.logit_bias);
    out["logit_bias_eog"]   = bias_to_json(sampling.logit_bias_eog);
    return out;
}

common_json ngram_map_to_json(const common_params_speculative_ngram_map & map) {
    return { { "size_n", map.size_n }, { "size_m", map.size_m }, { "min_hits", map.min_hits } };
}

common_json speculative_to_json(const common_params & p) {
    const auto & spec = p.speculative;

    std::vector<std::string> types;
    for (const auto type : spec.types) {
        types.push_back(common_speculative_type_to_str(type));
    }
    const int32_t n_max  = common_speculative_n_max(&spec);
    const auto    limits = common_speculative_get_output_limits(p.n_batch, p.n_parallel, n_max);

    return {
        { "types",       types            },
        { "has_dft",     spec.has_dft()   },
        { "has_synth",   spec.has_synth() },
        { "synth_len",   spec.synth_len   },
        { "synth_rates", spec.synth_rates },
        { "n_max",       n_max            },
        // what n_outputs_max and n_outputs_max_per_seq have to be for these types, batch and slots
        { "output_limits", { { "total", limits.total }, { "per_seq", limits.per_seq } } },
        { "draft", {
            { "n_max",            spec.draft.n_max                       },
            { "n_min",            spec.draft.n_min                       },
            { "p_split",          spec.draft.p_split                     },
            { "p_min",            spec.draft.p_min                       },
            { "backend_sampling", spec.draft.backend_sampling            },
            { "probabilistic",    spec.draft.probabilistic               },
            { "model",            model_to_json(spec.draft.mparams)      },
            { "n_gpu_layers",     spec.draft.n_gpu_layers                },
            { "cache_type_k",     ggml_type_name(spec.draft.cache_type_k) },
            { "cache_type_v",     ggml_type_name(spec.draft.cache_type_v) },
        } },
        { "ngram_mod", {
            { "n_match", spec.ngram_mod.n_match },
            { "n_max",   spec.ngram_mod.n_max   },
            { "n_min",   spec.ngram_mod.n_min   },
        } },
        { "ngram_simple",    ngram_map_to_json(spec.ngram_simple)    },
        { "ngram_map_k",     ngram_map_to_json(spec.ngram_map_k)     },
        { "ngram_map_k4v",   ngram_map_to_json(spec.ngram_map_k4v)   },
        { "ngram_cache", {
            { "lookup_cache_static",  spec.ngram_cache.lookup_cache_static  },
            { "lookup_cache_dynamic", spec.ngram_cache.lookup_cache_dynamic },
        } },
    };
}

common_json params_to_json(const common_params & p) {
    common_json out = common_json::object();
    field_writer writer{ out };
    visit_params(writer, p);

    out["pooling_type"]     = pooling_name(p.pooling_type);
    out["attention_type"]   = attention_name(p.attention_type);
    out["flash_attn_type"]  = llama_flash_attn_type_name(p.flash_attn_type);
    out["split_mode"]       = split_mode_name(p.split_mode);
    out["load_mode"]        = llama_load_mode_name(p.load_mode);
    out["numa"]             = numa_name(p.numa);
    out["cache_type_k"]     = ggml_type_name(p.cache_type_k);
    out["cache_type_v"]     = ggml_type_name(p.cache_type_v);
    out["reasoning_format"] = common_reasoning_format_name(p.reasoning_format);

    out["default_template_kwargs"] = p.default_template_kwargs;
    out["cpuparams"]               = cpu_to_json(p.cpuparams);
    out["cpuparams_batch"]         = cpu_to_json(p.cpuparams_batch);
    out["model"]                   = model_to_json(p.model);
    out["mmproj"]                  = model_to_json(p.mmproj);
    out["sampling"]                = sampling_to_json(p.sampling);
    out["speculative"]             = speculative_to_json(p);

    common_json lora = common_json::array();
    for (const auto & adapter : p.lora_adapters) {
        lora.push_back({
            { "path",          adapter.path          },
            { "scale",         adapter.scale         },
            { "task_name",     adapter.task_name     },
            { "prompt_prefix", adapter.prompt_prefix },
        });
    }
    out["lora_adapters"] = lora;

    common_json vectors = common_json::array();
    for (const auto & vector : p.control_vectors) {
        vectors.push_back({ { "fname", vector.fname }, { "strength", vector.strength } });
    }
    out["control_vectors"] = vectors;
    return out;
}

// sampling settings of a request

void check_sampling(const common_params_sampling & sampling) {
    // common_sampler_init() aborts the process on the first, and allocates the second at once
    if (sampling.mirostat < 0 || sampling.mirostat > 2) {
        refuse("'mirostat' must be 0, 1 or 2");
    }
    if (sampling.n_prev > MAX_HISTORY) {
        refuse("'n_prev' is too large");
    }
    if (sampling.min_keep < 0) {
        refuse("'min_keep' must not be negative");
    }
}

// Whether tokens have exactly this text; tokenizers may put a space after a control token, which a grammar refuses.
bool reads_as(const llama_vocab * vocab, const std::vector<llama_token> & tokens, const std::string & text) {
    std::string read;
    for (size_t i = 0; i < tokens.size(); ++i) {
        const std::string piece = common_token_to_piece(vocab, tokens[i], true);
        if (i == 0 && std::isspace((unsigned char) piece[0]) && !std::isspace((unsigned char) text[0])) {
            continue; // common_sampler_init() leaves this one out
        }
        read += piece;
    }
    return read == text;
}

// The text as one token per byte; empty if the vocabulary does not have them all.
std::vector<llama_token> byte_tokens(const llama_vocab * vocab, const std::string & text) {
    std::array<llama_token, 256> of_byte;
    of_byte.fill(LLAMA_TOKEN_NULL);
    for (llama_token token = 0; token < llama_vocab_n_tokens(vocab); ++token) {
        const std::string piece = common_token_to_piece(vocab, token, false);
        if (piece.size() == 1 && !llama_vocab_is_eog(vocab, token)) {
            of_byte[(unsigned char) piece[0]] = token;
        }
    }
    std::vector<llama_token> out;
    for (const char c : text) {
        out.push_back(of_byte[(unsigned char) c]);
        if (out.back() == LLAMA_TOKEN_NULL) {
            return {};
        }
    }
    return out;
}

int nesting_of(const char * text, const char * open, const char * close) {
    int  depth    = 0;
    int  deepest  = 0;
    char quote    = 0; // inside "..." or a [...] class brackets are plain characters
    for (const char * c = text; *c != '\0'; ++c) {
        if (*c == '\\' && c[1] != '\0') {
            ++c;
        } else if (quote != 0) {
            quote = *c == quote ? 0 : quote;
        } else if (*c == '"') {
            quote = '"';
        } else if (*c == '[' && strchr(open, '[') == nullptr) {
            quote = ']';
        } else if (strchr(open, *c) != nullptr) {
            deepest = std::max(deepest, ++depth);
        } else if (strchr(close, *c) != nullptr) {
            --depth;
        }
    }
    return deepest;
}

void check_grammar_text(const std::string & gbnf) {
    if (gbnf.find('\0') != std::string::npos) {
        refuse("failed to parse grammar: it holds a NUL character");
    }
    if (nesting_of(gbnf.c_str(), "(", ")") > MAX_NESTING) {
        refuse("failed to parse grammar: it is nested too deeply");
    }
    int n_rules = 0;
    for (size_t at = gbnf.find("::="); at != std::string::npos; at = gbnf.find("::=", at + 3)) {
        ++n_rules;
    }
    if (n_rules > MAX_RULES) {
        refuse("failed to parse grammar: it has too many rules");
    }
}

void read_grammar(common_params_sampling & sampling, const common_json & value) {
    if (value.is_null()) {
        sampling.grammar = {};
        return;
    }
    common_grammar grammar;
    grammar.type    = grammar_type_from_name(read_text("grammar.type", value.at("type")));
    grammar.grammar = read_text("grammar.value", value.at("value"));
    check_grammar_text(grammar.grammar);
    sampling.grammar = grammar;
}

void read_setting(common_params_sampling & sampling, const std::string & key, const common_json & value, int32_t n_vocab) {
    if (key == "seed") {
        // clients send -1 and full unsigned values alike
        sampling.seed = (uint32_t) read_int(key, value, std::numeric_limits<int32_t>::min(), std::numeric_limits<uint32_t>::max());
    } else if (key == "samplers") {
        sampling.samplers = common_sampler_types_from_names(read_texts(key, value));
    } else if (key == "grammar") {
        read_grammar(sampling, value);
    } else if (key == "grammar_triggers") {
        sampling.grammar_triggers.clear();
        for (const auto & item : read_array(key, value)) {
            common_grammar_trigger trigger;
            trigger.type  = trigger_type_from_name(read_text("grammar_triggers.type", item.at("type")));
            trigger.value = item.contains("value") ? read_text("grammar_triggers.value", item.at("value")) : "";
            if (trigger.type == COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN) {
                trigger.token = read_token("grammar_triggers.token", item.at("token"), n_vocab);
            }
            sampling.grammar_triggers.push_back(trigger);
        }
    } else if (key == "preserved_tokens") {
        const auto tokens = read_tokens(key, value, n_vocab);
        sampling.preserved_tokens = std::set<llama_token>(tokens.begin(), tokens.end());
    } else if (key == "logit_bias") {
        sampling.logit_bias.clear();
        for (const auto & item : read_array(key, value)) {
            if (!item.is_array() || item.size() != 2) {
                refuse("'logit_bias' must hold pairs of token and bias");
            }
            sampling.logit_bias.push_back({ read_token(key, item.at(0), n_vocab), (float) read_number(key, item.at(1)) });
        }
    } else if (key == "reasoning_budget_start") {
        sampling.reasoning_budget_start = read_tokens(key, value, n_vocab);
    } else if (key == "reasoning_budget_forced") {
        sampling.reasoning_budget_forced = read_tokens(key, value, n_vocab);
    } else if (key == "reasoning_budget_end") {
        sampling.reasoning_budget_end.clear();
        for (const auto & item : read_array(key, value)) {
            sampling.reasoning_budget_end.push_back(read_tokens(key, item, n_vocab));
        }
    } else {
        field_setter setter{ key, value };
        visit_sampling(setter, sampling);
        if (!setter.found) {
            refuse("unknown sampling field: " + key);
        }
    }
}

std::atomic<uint64_t> n_families{ 0 };

const char * usage_text = nullptr;

void print_usage_text(int /*argc*/, char ** /*argv*/) {
    if (usage_text != nullptr) {
        fputs(usage_text, stdout);
        fflush(stdout);
    }
}

} // namespace

// what the other sources use as well

namespace lsrv {

error_capture::error_capture() {
    captured_errors = &text;
}

error_capture::~error_capture() {
    captured_errors = nullptr;
}

std::string error_capture::after(const std::string & head) const {
    const std::string body = string_strip(text);
    return body.empty() ? head : head + ": " + body;
}

int32_t decode(lsrv_engine * engine, int32_t n, const int32_t * token, const int32_t * pos, const int32_t * seq_id,
               const int8_t * output, const int32_t * order, bool sync, uint64_t serial) {
    llama_context * ctx = engine->ctx;

    // llama_process() aborts the process on each of these
    const bool one_ubatch = llama_get_memory(ctx) == nullptr || !llama_get_causal_attn(ctx);
    if (n < 1 || n > (int32_t) llama_n_batch(ctx) || (one_ubatch && n > (int32_t) llama_n_ubatch(ctx))) {
        lsrv_log(LOG_LEVEL_ERROR, "decode: the batch is empty or larger than the context allows\n");
        return -1;
    }

    llama_batch_ext * batch = engine->batch.get();
    llama_batch_ext_clear(batch);
    int32_t n_outputs = 0;
    for (int32_t i = 0; i < n; ++i) {
        if (pos[i] < 0 || llama_batch_ext_add_token(batch, seq_id[i], token[i]) != i) {
            lsrv_log(LOG_LEVEL_ERROR, "decode: invalid token, position or sequence in the batch\n");
            return -1;
        }
        llama_batch_ext_set_pos(batch, i, &pos[i]);
        if (output[i] != 0) {
            llama_batch_ext_set_output_logits(batch, i, true);
            ++n_outputs;
        }
        if (order != nullptr && order[i] != LLAMA_DECISION_ORDER_NONE) {
            llama_batch_ext_set_decision_order(batch, i, (enum llama_decision_order) order[i]);
        }
    }
    if (engine->embeddings || llama_get_memory(ctx) == nullptr) {
        n_outputs = n;
    }
    if (n_outputs > engine->n_outputs_max) {
        lsrv_log(LOG_LEVEL_ERROR, "decode: more outputs than n_outputs_max\n");
        return -1;
    }

    try {
        const running_call call(engine, serial);
        const int32_t status = llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch);
        if (status == 0 && sync) {
            llama_synchronize(ctx);
        }
        return status;
    } catch (const std::exception & e) {
        common_log_add(common_log_main(), GGML_LOG_LEVEL_ERROR, "decode: %s\n", e.what());
        return -3;
    }
}

void accept(lsrv_sampler * smpl, llama_token token, bool is_generated) {
    smpl->failed = true;
    common_sampler_accept(smpl->smpl.get(), token, is_generated);
    if (smpl->gate) {
        common_sampler_accept(smpl->gate.get(), token, is_generated);
    }
    smpl->failed = false;
}

static bool is_candidate(common_sampler * smpl, llama_token token) {
    const auto * candidates = common_sampler_get_candidates(smpl, false);
    return std::any_of(candidates->data, candidates->data + candidates->size, [token](const llama_token_data & item) {
        return item.id == token && item.logit > -INFINITY;
    });
}

bool grammar_allows(llama_context * ctx, const lsrv_sampler * smpl, int32_t idx, llama_token token) {
    const common_sampler_ptr copy(common_sampler_clone((smpl->gate ? smpl->gate : smpl->smpl).get()));
    common_sampler_sample(copy.get(), ctx, idx, true);
    return is_candidate(copy.get(), token);
}

// When nothing fits the grammar the chain still chooses something; accepting it could abort the process.
static void check_fits_grammar(llama_context * ctx, lsrv_sampler * smpl, int32_t idx, llama_token token) {
    const auto * candidates = common_sampler_get_candidates(smpl->smpl.get(), false);
    bool fits = candidates->data[candidates->selected].logit > -INFINITY;
    if (fits && smpl->gate && llama_vocab_is_eog(smpl->vocab, token)) {
        common_sampler_sample(smpl->gate.get(), ctx, idx, true);
        fits = is_candidate(smpl->gate.get(), token);
    }
    if (!fits) {
        throw std::runtime_error("no token fits the grammar");
    }
}

void check_logits(llama_context * ctx, int32_t idx) {
    if (idx < 0 || (llama_get_sampled_logits_ith(ctx, idx) == nullptr && llama_get_sampled_probs_ith(ctx, idx) == nullptr &&
                    llama_get_logits_ith(ctx, idx) == nullptr)) {
        throw std::out_of_range("no logits at batch index " + std::to_string(idx));
    }
}

const float * raw_logits(llama_context * ctx, int32_t idx) {
    const float * logits = idx < 0 ? nullptr : llama_get_logits_ith(ctx, idx);
    if (logits == nullptr || llama_get_sampled_token_ith(ctx, idx) != LLAMA_TOKEN_NULL ||
        llama_get_sampled_logits_ith(ctx, idx) != nullptr || llama_get_sampled_probs_ith(ctx, idx) != nullptr) {
        throw std::out_of_range("no logits at batch index " + std::to_string(idx));
    }
    return logits;
}

llama_token choose(llama_context * ctx, lsrv_sampler * smpl, int32_t idx) {
    if (smpl->failed) {
        throw std::runtime_error("the sampler has failed before");
    }
    check_logits(ctx, idx);
    smpl->failed = true;
    const llama_token token = common_sampler_sample(smpl->smpl.get(), ctx, idx);
    smpl->sampled = true;
    if (smpl->constrained) {
        check_fits_grammar(ctx, smpl, idx, token);
    }
    smpl->failed = false;
    return token;
}

std::unique_ptr<lsrv_sampler> clone(const lsrv_sampler * smpl) {
    auto copy = std::make_unique<lsrv_sampler>();
    copy->smpl.reset(common_sampler_clone(smpl->smpl.get()));
    if (smpl->gate) {
        copy->gate.reset(common_sampler_clone(smpl->gate.get()));
    }
    // `sampled` stays false: until it samples itself, a clone's candidates are those of the original, in its memory
    copy->vocab            = smpl->vocab;
    copy->family           = smpl->family;
    copy->constrained      = smpl->constrained;
    copy->backend_sampling = smpl->backend_sampling;
    copy->failed           = smpl->failed;
    return copy;
}

static int32_t top_candidates(const llama_token_data * data, size_t n_data, int32_t token, int32_t n_top, bool stop_at_zero,
                              int32_t * ids, float * probs, float * token_prob) {
    *token_prob = 0.0f;
    for (size_t i = 0; i < n_data; ++i) {
        if (data[i].id == token) {
            *token_prob = data[i].p;
            break;
        }
    }
    int32_t n = 0;
    while (n < n_top && (size_t) n < n_data && !(stop_at_zero && data[n].p == 0.0f)) {
        ids[n]   = data[n].id;
        probs[n] = data[n].p;
        ++n;
    }
    return n;
}

int32_t token_probs(llama_context * ctx, lsrv_sampler * smpl, int32_t idx, llama_token token, int32_t n_top, bool post,
                    int32_t * ids, float * probs, float * token_prob) {
    if (post) {
        if (!smpl->sampled) {
            throw std::runtime_error("nothing was sampled yet");
        }
        const auto * candidates = common_sampler_get_candidates(smpl->smpl.get(), true);
        return top_candidates(candidates->data, candidates->size, token, n_top, true, ids, probs, token_prob);
    }

    const float * logits   = raw_logits(ctx, idx);
    const size_t  n_logits = llama_vocab_n_tokens(smpl->vocab);

    std::vector<llama_token_data> data(n_logits);
    for (size_t i = 0; i < n_logits; ++i) {
        data[i] = { (llama_token) i, logits[i], 0.0f };
    }
    const auto by_logit = [](const llama_token_data & a, const llama_token_data & b) { return a.logit > b.logit; };
    const size_t n_sorted = std::min<size_t>((size_t) std::max(1, n_top), n_logits);
    std::partial_sort(data.begin(), data.begin() + n_sorted, data.end(), by_logit);

    float sum = 0.0f;
    for (auto & item : data) {
        item.p = expf(item.logit - data[0].logit);
        sum += item.p;
    }
    for (auto & item : data) {
        item.p /= sum;
    }
    return top_candidates(data.data(), data.size(), token, n_top, false, ids, probs, token_prob);
}

} // namespace lsrv

extern "C" {

void lsrv_free(void * ptr) {
    free(ptr);
}

// process

void lsrv_init(void) {
    logged(__func__, [] {
        std::setlocale(LC_NUMERIC, "C");
        common_init();
        llama_log_set(log_callback, nullptr);
    });
}

void lsrv_backend_init(const lsrv_params * params) {
    logged(__func__, [&] {
        llama_backend_init();
        llama_numa_init(params->p.numa);
    });
}

void lsrv_backend_free(void) {
    logged(__func__, [] { llama_backend_free(); });
}

const char * lsrv_build_info(void) {
    return llama_build_info();
}

int32_t lsrv_build_number(void) {
    return llama_build_number();
}

// log

void lsrv_log(int32_t level, const char * text) {
    if (level > common_log_get_verbosity_thold()) {
        return;
    }
    enum ggml_log_level native = GGML_LOG_LEVEL_NONE;
    switch (level) {
        case LOG_LEVEL_ERROR: native = GGML_LOG_LEVEL_ERROR; break;
        case LOG_LEVEL_WARN:  native = GGML_LOG_LEVEL_WARN;  break;
        case LOG_LEVEL_INFO:
        case LOG_LEVEL_TRACE: native = GGML_LOG_LEVEL_INFO;  break;
        case LOG_LEVEL_DEBUG: native = GGML_LOG_LEVEL_DEBUG; break;
        default:              break;
    }
    std::shared_lock<std::shared_mutex> lock(log_mutex);
    common_log_add(common_log_main(), native, "%s", text);
}

int32_t lsrv_log_is_jsonl(void) {
    return common_log_get_jsonl() ? 1 : 0;
}

void lsrv_log_event(const char * type, const char * json) {
    std::shared_lock<std::shared_mutex> lock(log_mutex);
    try {
        common_log_add_json(common_log_main(), type, common_json::parse(json));
    } catch (const std::exception &) {
        common_log_add_json(common_log_main(), type, common_json(std::string(json)));
    }
}

int32_t lsrv_log_verbosity(void) {
    return common_log_get_verbosity_thold();
}

void lsrv_log_set_verbosity(int32_t threshold) {
    common_log_set_verbosity_thold(threshold);
}

void lsrv_log_flush(void) {
    std::unique_lock<std::shared_mutex> lock(log_mutex);
    common_log_flush(common_log_main());
}

// command line

lsrv_params * lsrv_params_new(void) {
    try {
        auto params = std::make_unique<lsrv_params>();
        params->p.port = DEFAULT_PORT;
        common_params_parser_init(params->p, LLAMA_EXAMPLE_SERVER);
        return params.release();
    } catch (...) {
        return nullptr;
    }
}

void lsrv_params_free(lsrv_params * params) {
    delete params;
}

int32_t lsrv_params_parse(lsrv_params * params, int32_t argc, char ** argv, const char * usage_extra, char ** err) {
    return guarded(err, [&] {
        usage_text = usage_extra;
        const bool ok = common_params_parse(argc, argv, params->p, LLAMA_EXAMPLE_SERVER, print_usage_text);
        usage_text = nullptr;
        if (!ok) {
            refuse("invalid command line");
        }
    });
}

int32_t lsrv_params_to_json(const lsrv_params * params, char ** out, char ** err) {
    return guarded(err, [&] { *out = copy_text(params_to_json(params->p).dump_safe()); });
}

int32_t lsrv_params_set(lsrv_params * params, const char * json, char ** err) {
    return guarded(err, [&] {
        const auto fields = common_json::parse(json);
        if (!fields.is_object()) {
            refuse("expected an object of fields");
        }
        common_params changed = params->p; // all or nothing
        for (const auto & [key, value] : fields.items()) {
            field_setter setter{ key, value };
            visit_params(setter, changed);
            if (!setter.found) {
                refuse("unknown or read-only field: " + key);
            }
        }
        params->p = std::move(changed);
    });
}

int32_t lsrv_params_resolve_model(lsrv_params * params, bool * is_preset, char ** err) {
    return guarded(err, [&] {
        auto handler = common_models_handler_init(params->p, LLAMA_EXAMPLE_SERVER);
        *is_preset = common_models_handler_is_preset_repo(handler);
        common_models_handler_apply(handler, params->p);
    });
}

void lsrv_params_print_info(const lsrv_params * params, bool print_devices) {
    logged(__func__, [&] { common_params_print_info(params->p, print_devices); });
}

// model and context

int32_t lsrv_engine_load(lsrv_params * params, lsrv_progress_fn progress, void * user_data, lsrv_engine ** out, char ** err) {
    auto & p = params->p;
    const int32_t status = guarded(err, [&] {
        if (params->sampling_before_load) {
            p.sampling = *params->sampling_before_load;
        } else {
            params->sampling_before_load = p.sampling;
        }
        check_sampling(p.sampling);
        if (p.model.path.empty()) {
            refuse("no model file given");
        }
        if (p.n_parallel < 1 || p.n_parallel > (int32_t) llama_max_parallel_sequences()) {
            refuse("'n_parallel' must be between 1 and " + std::to_string(llama_max_parallel_sequences()));
        }
        if (p.n_outputs_max > 0 && p.n_outputs_max < p.n_parallel) {
            refuse("'n_outputs_max' must not be less than 'n_parallel'");
        }

        // common_init_from_params() would go on without them, and without adapters
        error_capture errors;
        const int n_embd_control = p.control_vectors.empty() ? 0 : common_control_vector_load(p.control_vectors).n_embd;
        if (n_embd_control == -1) {
            throw std::runtime_error(errors.after("failed to load the control vectors"));
        }

        p.load_progress_callback           = progress;
        p.load_progress_callback_user_data = user_data;

        auto engine = std::make_unique<lsrv_engine>();
        engine->init  = common_init_from_params(p);
        engine->model = engine->init->model();
        engine->ctx   = engine->init->context();

        if (engine->model == nullptr) {
            throw std::runtime_error(errors.after("failed to load model '" + p.model.path + "'"));
        }
        if (engine->ctx == nullptr) {
            const size_t n_lora = engine->init->lora().size();
            if (n_lora < p.lora_adapters.size()) {
                throw std::runtime_error(errors.after("failed to load lora adapter '" + p.lora_adapters[n_lora].path + "'"));
            }
            throw std::runtime_error(errors.after("failed to create context with model '" + p.model.path + "'"));
        }

        if (n_embd_control != 0 && n_embd_control != llama_model_n_embd(engine->model)) {
            throw std::runtime_error("the control vectors are made for a hidden state of " + std::to_string(n_embd_control) +
                                     " elements, the model has " + std::to_string(llama_model_n_embd(engine->model)));
        }

        const int32_t n_batch = (int32_t) llama_n_batch(engine->ctx);

        engine->batch.reset(llama_batch_ext_init(engine->ctx));
        engine->lora          = p.lora_adapters;
        engine->attached.assign(llama_n_seq_max(engine->ctx), nullptr);
        if (p.lora_init_without_apply) {
            for (auto & adapter : engine->lora) {
                adapter.scale = 0.0f;
            }
        }
        engine->n_vocab       = llama_vocab_n_tokens(llama_model_get_vocab(engine->model));
        engine->embeddings    = p.embedding;
        engine->n_outputs_max = p.n_outputs_max <= 0 || p.embedding || llama_model_has_encoder(engine->model)
                              ? n_batch : p.n_outputs_max;
        llama_set_abort_callback(engine->ctx, lsrv_engine::must_abort, engine.get());
        *out = engine.release();
    });
    p.load_progress_callback           = nullptr;
    p.load_progress_callback_user_data = nullptr;
    return status;
}

void lsrv_engine_free(lsrv_engine * engine) {
    delete engine;
}

struct llama_model * lsrv_engine_model(lsrv_engine * engine) {
    return engine->model;
}

struct llama_context * lsrv_engine_context(lsrv_engine * engine) {
    return engine->ctx;
}

int32_t lsrv_engine_n_lora(const lsrv_engine * engine) {
    return (int32_t) engine->lora.size();
}

int32_t lsrv_context_seq_rm_type(struct llama_context * ctx) {
    int32_t type = COMMON_CONTEXT_SEQ_RM_TYPE_NO;
    logged(__func__, [&] { type = common_context_can_seq_rm(ctx); });
    return type;
}

void lsrv_memory_breakdown_print(const lsrv_engine * engine) {
    logged(__func__, [&] { common_memory_breakdown_print(engine->ctx); });
}

int32_t lsrv_model_info_json(lsrv_engine * engine, const lsrv_params * params, char ** out, char ** err) {
    return guarded(err, [&] {
        const auto templates = common_chat_templates_init(engine->model, params->p.chat_template);
        const common_json info = {
            { "ftype",                  llama_ftype_name(llama_model_ftype(engine->model))            },
            { "decision_type",          decision_name(common_get_decision_type(engine->model))        },
            { "chat_template",          common_chat_templates_source(templates.get(), "")             },
            { "chat_template_tool_use", common_chat_templates_source(templates.get(), "tool_use")     },
            { "chat_template_caps",     common_chat_templates_get_caps(templates.get())               },
            { "logit_bias_eog",         bias_to_json(params->p.sampling.logit_bias_eog)               },
        };
        *out = copy_text(info.dump_safe());
    });
}

int32_t lsrv_engine_lora_json(const lsrv_engine * engine, char ** out, char ** err) {
    return guarded(err, [&] {
        common_json list = common_json::array();
        for (const auto & adapter : engine->lora) {
            const uint64_t      n_tokens = llama_adapter_get_alora_n_invocation_tokens(adapter.ptr);
            const llama_token * tokens   = llama_adapter_get_alora_invocation_tokens(adapter.ptr);
            list.push_back({
                { "path",                    adapter.path          },
                { "scale",                   adapter.scale         },
                { "task_name",               adapter.task_name     },
                { "prompt_prefix",           adapter.prompt_prefix },
                { "alora_invocation_tokens", std::vector<llama_token>(tokens, tokens + n_tokens) },
            });
        }
        *out = copy_text(list.dump_safe());
    });
}

int32_t lsrv_engine_set_lora(lsrv_engine * engine, const int32_t * indices, const float * scales, int32_t n, char ** err) {
    return guarded(err, [&] {
        std::vector<llama_adapter_lora *> adapters;
        std::vector<float>                factors;
        for (int32_t i = 0; i < n; ++i) {
            if (indices[i] < 0 || indices[i] >= (int32_t) engine->lora.size()) {
                refuse("no lora adapter with index " + std::to_string(indices[i]));
            }
            adapters.push_back(engine->lora[indices[i]].ptr);
            factors.push_back(scales[i]);
        }
        if (llama_set_adapters_lora(engine->ctx, adapters.data(), adapters.size(), factors.data()) != 0) {
            throw std::runtime_error("failed to apply the lora adapters");
        }
    });
}

void lsrv_engine_set_embeddings(lsrv_engine * engine, bool embeddings) {
    logged(__func__, [&] {
        llama_set_embeddings(engine->ctx, embeddings);
        engine->embeddings = embeddings;
    });
}

// decode

int32_t lsrv_decode(lsrv_engine * engine, int32_t n, const int32_t * token, const int32_t * pos,
                    const int32_t * seq_id, const int8_t * output, bool sync, uint64_t serial) {
    return decode(engine, n, token, pos, seq_id, output, nullptr, sync, serial);
}

void lsrv_abort(lsrv_engine * engine, uint64_t serial) {
    // a stop of everything stands until it is withdrawn
    uint64_t current = engine->to_abort.load(std::memory_order_relaxed);
    while ((current != lsrv_engine::ABORT_ALL || serial == 0) &&
           !engine->to_abort.compare_exchange_weak(current, serial, std::memory_order_relaxed)) {
    }
}

// vocabulary

int32_t lsrv_vocab_pieces(const struct llama_vocab * vocab, bool special, char ** blob, int32_t ** offsets, char ** err) {
    return guarded(err, [&] {
        const int32_t n_tokens = llama_vocab_n_tokens(vocab);
        std::string          text;
        std::vector<int32_t> ends = { 0 };
        ends.reserve(n_tokens + 1);
        for (llama_token token = 0; token < n_tokens; ++token) {
            text += common_token_to_piece(vocab, token, special);
            ends.push_back((int32_t) text.size());
        }
        char * bytes = copy_text(text);
        try {
            *offsets = copy_array(ends);
        } catch (...) {
            free(bytes);
            throw;
        }
        *blob = bytes;
    });
}

int32_t lsrv_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len, bool add_special,
                      bool parse_special, int32_t ** tokens, int32_t * n_tokens, char ** err) {
    return guarded(err, [&] {
        if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
            refuse("the model has no vocabulary");
        }
        const auto result = common_tokenize(vocab, std::string(text, (size_t) text_len), add_special, parse_special);
        *tokens   = copy_array(result);
        *n_tokens = (int32_t) result.size();
    });
}

// sampling

int32_t lsrv_sampler_new(lsrv_engine * engine, const lsrv_params * params, const char * settings, lsrv_sampler ** out, char ** err) {
    return guarded(err, [&] {
        common_params_sampling sampling = params->p.sampling;

        const auto fields = common_json::parse(settings);
        if (!fields.is_object()) {
            refuse("expected an object of sampling fields");
        }
        for (const auto & [key, value] : fields.items()) {
            read_setting(sampling, key, value, engine->n_vocab);
        }
        check_sampling(sampling);
        const int32_t max_history = std::max((int32_t) llama_n_ctx(engine->ctx), MAX_HISTORY);
        sampling.penalty_last_n     = std::min(sampling.penalty_last_n,     max_history);
        sampling.dry_penalty_last_n = std::min(sampling.dry_penalty_last_n, max_history);
        if (sampling.grammar_lazy && sampling.grammar_triggers.empty()) {
            refuse("no triggers set for lazy grammar");
        }

        const bool infill = sampling.mirostat == 0 &&
            std::find(sampling.samplers.begin(), sampling.samplers.end(), COMMON_SAMPLER_TYPE_INFILL) != sampling.samplers.end();

        auto sampler = std::make_unique<lsrv_sampler>();
        sampler->vocab       = llama_model_get_vocab(engine->model);
        sampler->constrained = !sampling.grammar.grammar.empty();

        // each of these would abort the process, here or at the first token
        if (infill && llama_vocab_eot(sampler->vocab) == LLAMA_TOKEN_NULL && llama_vocab_eos(sampler->vocab) == LLAMA_TOKEN_NULL) {
            refuse("the infill sampler needs a vocabulary with an end-of-turn or end-of-sequence token");
        }
        std::vector<llama_token> prefill;
        if (sampler->constrained && !sampling.grammar_lazy && common_grammar_needs_prefill(sampling.grammar)) {
            const auto tokens = common_tokenize(sampler->vocab, sampling.generation_prompt, false, true);
            for (const llama_token token : tokens) {
                if (llama_vocab_is_eog(sampler->vocab, token)) {
                    refuse("the generation prompt holds a token that ends the generation");
                }
            }
            if (!reads_as(sampler->vocab, tokens, sampling.generation_prompt)) {
                prefill = byte_tokens(sampler->vocab, sampling.generation_prompt);
                if (!prefill.empty()) {
                    sampling.generation_prompt.clear();
                }
            }
        }

        // this may switch backend sampling off
        sampler->smpl.reset(common_sampler_init(engine->model, sampling));
        sampler->engine           = engine;
        sampler->backend_sampling = sampling.backend_sampling;
        sampler->family           = ++n_families;
        if (sampler->constrained && infill) {
            // the infill sampler may choose the end of generation whether the grammar allows it or not
            common_params_sampling plain = sampling;
            plain.samplers.clear();
            plain.logit_bias.clear();
            sampler->gate.reset(common_sampler_init(engine->model, plain));
        }
        for (const llama_token token : prefill) {
            accept(sampler.get(), token, true);
        }
        *out = sampler.release();
    });
}

void lsrv_sampler_free(lsrv_sampler * smpl) {
    if (smpl != nullptr && smpl->attached_seq >= 0) {
        lsrv_engine_set_sampler(smpl->engine, smpl->attached_seq, nullptr, nullptr);
    }
    delete smpl;
}

int32_t lsrv_sampler_clone(const lsrv_sampler * smpl, lsrv_sampler ** out, char ** err) {
    return guarded(err, [&] { *out = clone(smpl).release(); });
}

int32_t lsrv_sampler_copy(const lsrv_sampler * src, lsrv_sampler * dst, char ** err) {
    return guarded(err, [&] {
        if (src->family != dst->family) {
            refuse("only a sampler and its clones can be copied to each other");
        }
        common_sampler_copy(src->smpl.get(), dst->smpl.get());
        common_sampler_copy(src->gate.get(), dst->gate.get());
        dst->sampled = src->sampled;
        dst->failed  = src->failed;
    });
}

bool lsrv_sampler_backend_sampling(const lsrv_sampler * smpl) {
    return smpl->backend_sampling;
}

bool lsrv_sampler_force_reasoning_end(lsrv_sampler * smpl) {
    return common_sampler_reasoning_budget_force(smpl->smpl.get());
}

int32_t lsrv_engine_set_sampler(lsrv_engine * engine, int32_t seq_id, lsrv_sampler * smpl, char ** err) {
    return guarded(err, [&] {
        auto & attached = engine->attached.at(seq_id);
        if (smpl != nullptr && smpl == attached) {
            return;
        }
        if (smpl != nullptr && (smpl->engine != engine || smpl->was_attached || !smpl->backend_sampling)) {
            refuse("the sampler cannot run on the backend, or did before");
        }
        const bool ok = llama_set_sampler(engine->ctx, seq_id, smpl != nullptr ? common_sampler_get(smpl->smpl.get()) : nullptr);
        if (attached != nullptr) {
            attached->attached_seq = -1;
        }
        attached = ok ? smpl : nullptr;
        if (smpl != nullptr) {
            smpl->was_attached = true;
            smpl->attached_seq = ok ? seq_id : -1;
        }
    });
}

void lsrv_sampler_reset(lsrv_sampler * smpl) {
    logged(__func__, [&] {
        common_sampler_reset(smpl->smpl.get());
        if (smpl->gate) {
            common_sampler_reset(smpl->gate.get());
        }
    });
}

int32_t lsrv_sampler_accept(lsrv_sampler * smpl, const int32_t * tokens, int32_t n, bool is_generated, char ** err) {
    if (smpl->failed) {
        return fail(err, "the sampler has failed before");
    }
    return guarded(err, [&] {
        for (int32_t i = 0; i < n; ++i) {
            if (tokens[i] < 0 || tokens[i] >= llama_vocab_n_tokens(smpl->vocab)) {
                refuse("token out of range: " + std::to_string(tokens[i]));
            }
            // a grammar aborts the process if it does not allow the end; nobody has to accept an end by hand
            if (is_generated && smpl->constrained && llama_vocab_is_eog(smpl->vocab, tokens[i])) {
                refuse("an end of generation cannot be accepted under a grammar");
            }
        }
        for (int32_t i = 0; i < n; ++i) {
            accept(smpl, tokens[i], is_generated);
        }
    });
}

uint32_t lsrv_sampler_seed(const lsrv_sampler * smpl) {
    return common_sampler_get_seed(smpl->smpl.get());
}

int32_t lsrv_sampler_describe(const lsrv_sampler * smpl, char ** out, char ** err) {
    return guarded(err, [&] { *out = copy_text(common_sampler_print(smpl->smpl.get())); });
}

int32_t lsrv_sample_many(lsrv_engine * engine, int32_t n, lsrv_sampler * const * smpl, const int32_t * idx,
                         int32_t * tokens, int8_t * status, char ** err) {
    int32_t result = LSRV_OK;
    for (int32_t i = 0; i < n; ++i) {
        char * text = nullptr;
        tokens[i] = LLAMA_TOKEN_NULL;
        status[i] = (int8_t) guarded(&text, [&] {
            const llama_token token = choose(engine->ctx, smpl[i], idx[i]);
            accept(smpl[i], token, true);
            tokens[i] = token;
        });
        if (status[i] != LSRV_OK) {
            smpl[i]->error = text != nullptr ? text : "";
            free(text);
            if (result == LSRV_OK) {
                result = fail(err, smpl[i]->error.c_str());
            }
        }
    }
    return result;
}

const char * lsrv_sampler_error(const lsrv_sampler * smpl) {
    return smpl->error.c_str();
}

int32_t lsrv_token_probs(lsrv_engine * engine, lsrv_sampler * smpl, int32_t idx, int32_t token, int32_t n_top, bool post,
                         int32_t * ids, float * probs, float * token_prob, char ** err) {
    int32_t n_written = 0;
    const int32_t status = guarded(err, [&] {
        n_written = token_probs(engine->ctx, smpl, idx, token, n_top, post, ids, probs, token_prob);
    });
    return status == LSRV_OK ? n_written : LSRV_ERR;
}

// grammar

int32_t lsrv_json_schema_to_grammar(const char * schema, char ** out, char ** err) {
    return guarded(err, [&] {
        if (nesting_of(schema, "[{", "]}") > MAX_NESTING) {
            refuse("the JSON schema is nested too deeply");
        }
        *out = copy_text(json_schema_to_grammar(common_json::parse(schema)));
    });
}

int32_t lsrv_grammar_check(const struct llama_vocab * vocab, const char * gbnf, char ** err) {
    return guarded(err, [&] {
        if (strncmp(gbnf, "%llguidance", 11) == 0) {
            refuse("failed to parse grammar: llguidance is not enabled");
        }
        check_grammar_text(gbnf);
        llama_sampler_ptr grammar(llama_sampler_init_grammar(vocab, gbnf, "root"));
        if (!grammar) {
            refuse("failed to parse grammar");
        }
    });
}

} // extern "C"
