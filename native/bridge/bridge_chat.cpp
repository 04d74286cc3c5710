#include "bridge_chat.h"

#include "support.h"

#include "chat-peg-parser.h"
#include "chat.h"
#include "common.h"
#include "json-schema-to-grammar.h"
#include "json.h"

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

using namespace lsrv;

namespace {

// Parsers of nested values recurse about 4 KiB of stack per bracket that is open in the text.
constexpr int MAX_OPEN_BRACKETS = 500;

constexpr size_t TOOL_CALL_ID_LENGTH = 32;

// recursion of parsers

// Calls back with every parser that this one tries.
template <typename F>
struct child_visitor {
    F & visit;

    void operator()(const common_peg_sequence_parser & p)   { each(p.children); }
    void operator()(const common_peg_choice_parser & p)     { each(p.children); }
    void operator()(const common_peg_repetition_parser & p) { visit(p.child); }
    void operator()(const common_peg_and_parser & p)        { visit(p.child); }
    void operator()(const common_peg_not_parser & p)        { visit(p.child); }
    void operator()(const common_peg_schema_parser & p)     { visit(p.child); }
    void operator()(const common_peg_rule_parser & p)       { visit(p.child); }
    void operator()(const common_peg_atomic_parser & p)     { visit(p.child); }
    void operator()(const common_peg_tag_parser & p)        { visit(p.child); }
    void operator()(const common_peg_gbnf_parser & p)       { visit(p.child); }
    void operator()(const common_peg_ac_parser & p)         { visit(p.child); }

    template <typename T>
    void operator()(const T &) {}

    void each(const std::vector<common_peg_parser_id> & children) {
        for (const auto child : children) {
            visit(child);
        }
    }
};

// Whether some parser leads back to itself, so that its depth follows the text and not only the schema.
bool is_recursive(const common_peg_arena & arena) {
    enum : char { NEW, OPEN, DONE };

    std::vector<char> state(arena.size(), NEW);
    for (size_t root = 0; root < arena.size(); ++root) {
        std::vector<std::pair<common_peg_parser_id, bool>> todo = { { root, false } };
        while (!todo.empty()) {
            const auto [id, is_end] = todo.back();
            todo.pop_back();
            if (is_end) {
                state[id] = DONE;
                continue;
            }
            if (state[id] != NEW) {
                continue;
            }
            state[id] = OPEN;
            todo.push_back({ id, true });
            bool found = false;
            auto visit = [&](common_peg_parser_id child) {
                found = found || state.at(child) == OPEN;
                todo.push_back({ child, false });
            };
            std::visit(child_visitor<decltype(visit)>{ visit }, arena.get(id));
            if (found) {
                return true;
            }
        }
    }
    return false;
}

// Takes the prose out of a parser: what remains matches reasoning and tool calls only.
class prose_remover {
  public:
    explicit prose_remover(common_peg_arena & arena) : arena(arena), with_prose(arena.size()) {}

    void run() {
        mark();
        for (common_peg_parser_id id = 0; id < arena.size(); ++id) {
            drop_alternatives(id);
        }
        for (common_peg_parser_id id = 0; id < arena.size(); ++id) {
            if (is_prose(id)) {
                arena.get(id) = common_peg_epsilon_parser{};
            }
        }
        drop_what_is_empty();
    }

  private:
    common_peg_arena & arena;
    std::vector<char>  with_prose; // per parser: whether prose is part of what it matches

    bool is_prose(common_peg_parser_id id) const {
        const auto * tag = std::get_if<common_peg_tag_parser>(&arena.get(id));
        return tag != nullptr && tag->tag == common_chat_peg_builder::CONTENT;
    }

    std::vector<common_peg_parser_id> children_of(common_peg_parser_id id) const {
        std::vector<common_peg_parser_id> out;
        auto visit = [&](common_peg_parser_id child) { out.push_back(child); };
        std::visit(child_visitor<decltype(visit)>{ visit }, arena.get(id));
        return out;
    }

    // Calls step for every parser, again and again, until it returns false for all.
    template <typename F>
    void settle(F && step) {
        for (bool changed = true; changed;) {
            changed = false;
            for (common_peg_parser_id id = 0; id < arena.size(); ++id) {
                changed = step(id) || changed;
            }
        }
    }

    void mark() {
        settle([&](common_peg_parser_id id) {
            if (with_prose[id]) {
                return false;
            }
            const auto children = children_of(id);
            const auto marked   = [&](common_peg_parser_id child) { return with_prose[child] != 0; };
            with_prose[id] = is_prose(id) || std::any_of(children.begin(), children.end(), marked);
            return with_prose[id] != 0;
        });
    }

    // Where there is a way without prose, the ways with prose go.
    void drop_alternatives(common_peg_parser_id id) {
        auto * choice = std::get_if<common_peg_choice_parser>(&arena.get(id));
        if (choice == nullptr) {
            return;
        }
        std::vector<common_peg_parser_id> plain;
        for (const auto child : choice->children) {
            if (!with_prose[child]) {
                plain.push_back(child);
            }
        }
        if (!plain.empty()) {
            choice->children = std::move(plain);
        }
    }

    // An optional nothing would be written as a mere "?".
    void drop_what_is_empty() {
        const auto is_empty = [&](common_peg_parser_id id) {
            return std::holds_alternative<common_peg_epsilon_parser>(arena.get(id));
        };
        settle([&](common_peg_parser_id id) {
            const auto children = children_of(id);
            if (is_empty(id) || children.empty() || !std::all_of(children.begin(), children.end(), is_empty)) {
                return false;
            }
            arena.get(id) = common_peg_epsilon_parser{};
            return true;
        });
    }
};

std::string grammar_of_calls(common_peg_arena arena) {
    prose_remover(arena).run();
    return build_grammar([&](const common_grammar_builder & builder) { arena.build_grammar(builder); });
}

// Brackets that are open after a text, as far as one can tell without knowing its format.
struct bracket_counter {
    int n_open = 0;

    void add(const std::string & text) {
        for (const char c : text) {
            if (c == '[' || c == '{') {
                if (++n_open > MAX_OPEN_BRACKETS) {
                    refuse("the text is nested too deeply");
                }
            } else if ((c == ']' || c == '}') && n_open > 0) {
                --n_open;
            }
        }
    }
};

// requests

common_chat_templates_inputs read_request(const common_json & request) {
    common_chat_templates_inputs inputs;
    inputs.messages              = common_chat_msgs_parse_oaicompat(request.at("messages"));
    inputs.tools                 = common_chat_tools_parse_oaicompat(request.value("tools", common_json()));
    inputs.tool_choice           = common_chat_tool_choice_parse_oaicompat(request.value("tool_choice", "auto"));
    inputs.grammar               = request.value("grammar", "");
    inputs.parallel_tool_calls   = request.value("parallel_tool_calls", inputs.parallel_tool_calls);
    inputs.add_generation_prompt = request.value("add_generation_prompt", inputs.add_generation_prompt);
    inputs.use_jinja             = request.value("use_jinja", inputs.use_jinja);
    inputs.enable_thinking       = request.value("enable_thinking", inputs.enable_thinking);
    inputs.force_pure_content    = request.value("force_pure_content", inputs.force_pure_content);
    inputs.reasoning_format      = common_reasoning_format_from_name(request.value("reasoning_format", "none"));
    inputs.continue_final_message = common_chat_continuation_parse(request.value("continue_final_message", common_json()));

    const auto schema = request.value("json_schema", common_json());
    if (!schema.is_null()) {
        inputs.json_schema = schema.dump();
    }
    const auto kwargs = request.value("chat_template_kwargs", common_json::object());
    for (const auto & [name, value] : kwargs.items()) {
        inputs.chat_template_kwargs[name] = value.dump();
    }
    return inputs;
}

std::map<std::string, std::string> read_kwargs(const char * text) {
    std::map<std::string, std::string> out;
    const auto kwargs = common_json::parse(text);
    for (const auto & [name, value] : kwargs.items()) {
        out[name] = value.dump();
    }
    return out;
}

// What is wrong with a template; common_chat_templates_init() loses the text of the exception.
std::string template_error(const llama_model * model, const std::string & source, const std::string & fallback) {
    const char * own = model != nullptr && source.empty() ? llama_model_chat_template(model, nullptr) : nullptr;
    try {
        common_chat_template parsed(own != nullptr ? own : source, "", "");
    } catch (const std::exception & e) {
        return e.what();
    }
    return fallback;
}

// messages

std::string random_id() {
    static const char chars[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

    thread_local std::mt19937_64 generator{ std::random_device{}() };
    std::uniform_int_distribution<size_t> any(0, sizeof(chars) - 2);
    std::string out;
    for (size_t i = 0; i < TOOL_CALL_ID_LENGTH; ++i) {
        out += chars[any(generator)];
    }
    return out;
}

common_json diff_to_json(const common_chat_msg_diff & diff) {
    common_json out = common_json::object();
    if (!diff.reasoning_content_delta.empty()) {
        out["reasoning_content"] = diff.reasoning_content_delta;
    }
    if (!diff.content_delta.empty()) {
        out["content"] = diff.content_delta;
    }
    if (diff.tool_call_index != std::string::npos) {
        out["index"] = diff.tool_call_index;
        if (!diff.tool_call_delta.id.empty()) {
            out["id"] = diff.tool_call_delta.id;
        }
        if (!diff.tool_call_delta.name.empty()) {
            out["name"] = diff.tool_call_delta.name;
        }
        if (!diff.tool_call_delta.arguments.empty()) {
            out["arguments"] = diff.tool_call_delta.arguments;
        }
    }
    return out;
}

common_json message_to_json(const common_chat_msg & msg) {
    common_json calls = common_json::array();
    for (const auto & call : msg.tool_calls) {
        calls.push_back({ { "id", call.id }, { "name", call.name }, { "arguments", call.arguments } });
    }
    return {
        { "content",           msg.content           },
        { "reasoning_content", msg.reasoning_content },
        { "tool_calls",        calls                 },
    };
}

} // namespace

struct lsrv_chat_templates {
    common_chat_templates_ptr templates;
};

struct lsrv_chat_session {
    common_chat_session session;
    common_chat_msg     msg; // as last reported: with the ids of tool calls

    std::vector<std::string> tool_call_ids;

    std::string grammar_of_calls; // where the request demands tool calls

    bracket_counter brackets;
    bool recursive = false;
    bool finished  = false;
};

extern "C" {

// templates

int32_t lsrv_chat_templates_new(const struct llama_model * model, const char * source, const char * bos, const char * eos,
                                lsrv_chat_templates ** out, char ** err) {
    return guarded(err, [&] {
        if (model == nullptr && source[0] == '\0') {
            refuse("there is neither a model nor a chat template");
        }
        auto templates = std::make_unique<lsrv_chat_templates>();
        try {
            templates->templates = common_chat_templates_init(model, source, bos, eos);
        } catch (const std::exception & e) {
            refuse(template_error(model, source, e.what()));
        }
        *out = templates.release();
    });
}

void lsrv_chat_templates_free(lsrv_chat_templates * templates) {
    delete templates;
}

int32_t lsrv_chat_templates_describe(const lsrv_chat_templates * templates, bool use_jinja, const char * kwargs,
                                     char ** out, char ** err) {
    return guarded(err, [&] {
        const auto * tmpls = templates->templates.get();
        const auto   asr   = common_chat_get_asr_prompt(tmpls);
        const common_json info = {
            { "source",            common_chat_templates_source(tmpls)                                        },
            { "source_tool_use",   common_chat_templates_source(tmpls, "tool_use")                            },
            { "explicit",          common_chat_templates_was_explicit(tmpls)                                  },
            { "caps",              common_chat_templates_get_caps(tmpls)                                      },
            { "example",           common_chat_format_example(tmpls, use_jinja, read_kwargs(kwargs))          },
            { "supports_thinking", use_jinja && common_chat_templates_support_enable_thinking(tmpls)          },
            { "asr_prompt",        { { "system", asr.system }, { "user", asr.user } }                         },
        };
        *out = copy_text(info.dump_safe());
    });
}

// sessions

int32_t lsrv_chat_session_new(const lsrv_chat_templates * templates, const struct llama_vocab * vocab, const char * request,
                              lsrv_chat_session ** out, char ** err) {
    return guarded(err, [&] {
        const auto fields = common_json::parse(request);
        const auto inputs = read_request(fields);

        auto session = std::make_unique<lsrv_chat_session>();
        if (inputs.continue_final_message != COMMON_CHAT_CONTINUATION_NONE && !inputs.messages.empty()) {
            // the new session parses what it continues
            session->brackets.add(inputs.messages.back().reasoning_content);
            session->brackets.add(inputs.messages.back().render_content());
        }

        common_chat_session_params params;
        params.echo = fields.value("echo", params.echo);
        session->session   = common_chat_session(templates->templates.get(), vocab, inputs, params);
        session->msg       = session->session.msg();
        session->recursive = is_recursive(session->session.parser());
        const bool demanded = inputs.tool_choice == COMMON_CHAT_TOOL_CHOICE_REQUIRED && !inputs.tools.empty();
        if (demanded && !session->session.grammar().empty()) {
            session->grammar_of_calls = grammar_of_calls(session->session.parser());
        }
        *out = session.release();
    });
}

int32_t lsrv_chat_session_clone(const lsrv_chat_session * session, lsrv_chat_session ** out, char ** err) {
    return guarded(err, [&] { *out = new lsrv_chat_session(*session); });
}

void lsrv_chat_session_free(lsrv_chat_session * session) {
    delete session;
}

int32_t lsrv_chat_session_describe(const lsrv_chat_session * session, char ** out, char ** err) {
    return guarded(err, [&] {
        const auto & chat = session->session;

        common_params_sampling sampling;
        sampling.grammar = {};
        chat.apply_sampling(sampling);

        common_json triggers = common_json::array();
        for (const auto & trigger : sampling.grammar_triggers) {
            triggers.push_back({ { "type", (int) trigger.type }, { "value", trigger.value }, { "token", trigger.token } });
        }
        common_json delimiters = common_json::array();
        for (const auto & delimiter : chat.message_delimiters().delimiters) {
            delimiters.push_back({
                { "role",      common_chat_role_to_string(delimiter.role) },
                { "delimiter", delimiter.delimiter                        },
                { "tokens",    delimiter.tokens                           },
            });
        }
        const common_json info = {
            { "prompt",             chat.prompt()                            },
            { "format",             common_chat_format_name(chat.format())   },
            { "grammar",            chat.grammar()                           },
            { "grammar_of_calls",   session->grammar_of_calls                },
            { "grammar_lazy",       sampling.grammar_lazy                    },
            { "grammar_triggers",   triggers                                 },
            { "preserved_tokens",   sampling.preserved_tokens                },
            { "additional_stops",   chat.additional_stops()                  },
            { "generation_prompt",  chat.generation_prompt()                 },
            { "thinking_start_tag", chat.thinking_start_tag()                },
            { "thinking_end_tags",  chat.thinking_end_tags()                 },
            { "message_delimiters", delimiters                               },
        };
        *out = copy_text(info.dump_safe());
    });
}

int32_t lsrv_chat_session_spans(const lsrv_chat_session * session, const int32_t * tokens, int32_t n_tokens,
                                lsrv_chat_span ** spans, int32_t * n_spans, char ** err) {
    return guarded(err, [&] {
        common_chat_msg_delimiters delimiters;
        for (const auto & delimiter : session->session.message_delimiters().delimiters) {
            if (!delimiter.tokens.empty()) { // nothing would match everywhere
                delimiters.delimiters.push_back(delimiter);
            }
        }
        std::vector<lsrv_chat_span> found;
        if (!delimiters.delimiters.empty()) {
            for (const auto & span : delimiters.split(llama_tokens(tokens, tokens + n_tokens)).spans) {
                found.push_back({ (int32_t) span.role, (int32_t) span.pos, (int32_t) span.len });
            }
        }
        *spans   = copy_array(found);
        *n_spans = (int32_t) found.size();
    });
}

int32_t lsrv_chat_session_feed(lsrv_chat_session * session, const char * text, int32_t n_text, bool is_final,
                               char ** diffs, char ** err) {
    return guarded(err, [&] {
        *diffs = nullptr;
        if (session->finished) {
            refuse("the chat session is finished");
        }
        const common_chat_input added{ std::string(text, (size_t) n_text) };
        if (session->recursive) {
            session->brackets.add(added.text);
        }
        session->finished = is_final;
        common_chat_msg msg = is_final ? session->session.finish(added) : session->session.feed(added);
        if (msg.empty()) {
            return;
        }
        msg.set_tool_call_ids(session->tool_call_ids, random_id);

        common_json out = common_json::array();
        for (const auto & diff : common_chat_msg_diff::compute_diffs(session->msg, msg)) {
            out.push_back(diff_to_json(diff));
        }
        session->msg = std::move(msg);
        if (!out.empty()) {
            *diffs = copy_text(out.dump_safe());
        }
    });
}

int32_t lsrv_chat_session_message(const lsrv_chat_session * session, char ** out, char ** err) {
    return guarded(err, [&] { *out = copy_text(message_to_json(session->msg).dump_safe()); });
}

} // extern "C"
