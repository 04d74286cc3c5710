// Functions of libllama's grammar sampler under their own names. The dynamic linker binds the library's calls to
// these, because the bridge comes before it in the order of search (tests/test_binding.py checks that it does).
//
// The library follows every way through an ambiguous grammar by itself: some grammars of a few bytes take time and memory
// that double with every character, and a clone compares every element with every other. Here stacks that agree are one,
// what was found out once is kept for the call, and a call that still becomes too long throws. Patterns of triggers are
// looked for by a matcher that neither recurses over the text nor takes exponential time.

#include "src/llama-grammar.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <regex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

// A step is about a nanosecond.
constexpr uint64_t MAX_STEPS    = 50000000;
constexpr uint64_t NEW_STACK    = 100;    // steps that a stack costs
constexpr size_t   MAX_ELEMENTS = 200000; // of all stacks between two tokens

using element = llama_grammar_element;

struct too_complex : std::runtime_error {
    too_complex() : std::runtime_error("the grammar is too complex: there are too many ways to go on") {}
};

bool is_end(const element * pos) {
    return pos->type == LLAMA_GRETYPE_END || pos->type == LLAMA_GRETYPE_ALT;
}

bool is_token(const element * pos) {
    return pos->type == LLAMA_GRETYPE_TOKEN || pos->type == LLAMA_GRETYPE_TOKEN_NOT;
}

bool matches_token(const element * pos, llama_token token) {
    return (pos->value == (uint32_t) token) == (pos->type == LLAMA_GRETYPE_TOKEN);
}

// Whether the characters at `pos` include one of low..high, and where the sequence goes on.
std::pair<bool, const element *> find_char(const element * pos, uint32_t low, uint32_t high) {
    const bool is_inverse = pos->type == LLAMA_GRETYPE_CHAR_NOT;
    bool found = pos->type == LLAMA_GRETYPE_CHAR_ANY;
    do {
        const bool is_range = pos[1].type == LLAMA_GRETYPE_CHAR_RNG_UPPER;
        found = found || (pos->value <= high && low <= (is_range ? pos[1].value : pos->value));
        pos += is_range ? 2 : 1;
    } while (pos->type == LLAMA_GRETYPE_CHAR_ALT);
    return { found != is_inverse, pos };
}

// Whether the first bytes of a character may become one that `pos` allows.
bool may_become(const element * pos, const llama_partial_utf8 & partial) {
    if (partial.n_remain < 0 || (partial.n_remain == 1 && partial.value < 2)) {
        return false; // no character begins like that
    }
    uint32_t       low  = partial.value << (6 * partial.n_remain);
    const uint32_t high = low | ((1u << (6 * partial.n_remain)) - 1);
    if (low == 0 && partial.n_remain >= 2) {
        low = partial.n_remain == 2 ? 0x800 : 0x10000; // shorter forms have to be used below
    }
    return find_char(pos, low, high).first;
}

struct text {
    std::vector<uint32_t> chars;
    llama_partial_utf8    partial; // what is left over at the end; n_remain -1: no UTF-8
};

// Characters of a token's piece, which may begin and end within one.
void decode(const std::string & piece, llama_partial_utf8 partial, text & out) {
    out.chars.clear();
    bool is_open = partial.n_remain > 0;
    for (size_t at = 0; at < piece.size() && piece[at] != '\0'; ++at) {
        const uint8_t byte = (uint8_t) piece[at];
        if (partial.n_remain > 0) {
            // within a character that began in this piece the library takes any byte, and so do its stored states
            if (is_open && (byte >> 6) != 2) {
                out.partial = { 0, -1 };
                return;
            }
            partial.value = (partial.value << 6) + (byte & 0x3f);
            --partial.n_remain;
        } else {
            is_open = false;
            const int n_bytes = byte < 0x80 ? 1 : byte < 0xc0 ? 0 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
            if (n_bytes == 0) {
                out.chars.clear();
                out.partial = { 0, -1 };
                return;
            }
            partial.n_remain = n_bytes - 1;
            partial.value    = byte & ((1u << (8 - n_bytes)) - 1);
        }
        if (partial.n_remain == 0) {
            out.chars.push_back(partial.value);
            is_open = false;
        }
    }
    out.partial = partial;
}

// Stacks of one grammar, each once: a stack is its top and the stack below it.
class machine {
  public:
    using stack = uint32_t; // EMPTY, or one more than its place in `nodes`
    using set   = uint32_t; // its place in `sets`

    static constexpr stack EMPTY = 0;
    static constexpr set   NONE  = 0; // the set without stacks

    explicit machine(const llama_grammar & grammar) : rules(grammar.rules) {
        intern({});
        std::vector<stack> start;
        for (const auto & elements : grammar.stacks) {
            count(NEW_STACK * elements.size());
            stack made = EMPTY;
            for (const element * top : elements) {
                made = push(made, top);
            }
            start.push_back(made);
            if (made != EMPTY && is_token(top(made))) {
                tokens.push_back(made);
            }
        }
        begin = intern(std::move(start));
    }

    set start() const { return begin; }

    const std::vector<stack> & stacks(set of) const { return sets[of]; }

    const element * top(stack of) const { return nodes[of - 1].top; }

    // The stacks of `from` after one more character.
    set after_char(set from, uint32_t chr) {
        const uint64_t key   = ((uint64_t) from << 32) | chr;
        const auto     known = moves.find(key);
        if (known != moves.end()) {
            return known->second;
        }
        std::vector<stack> next;
        const size_t n = sets[from].size();
        count(n);
        for (size_t i = 0; i < n; ++i) {
            const stack at = sets[from][i];
            if (at == EMPTY || is_token(top(at))) {
                continue;
            }
            const auto [found, pos] = find_char(top(at), chr, chr);
            if (found) {
                go_on(at, pos, next);
            }
        }
        const set to = intern(std::move(next));
        moves.emplace(key, to);
        return to;
    }

    // The stacks after a first token that the grammar names itself, added to `next`.
    void after_token(llama_token token, std::vector<stack> & next) {
        for (const stack at : tokens) {
            if (matches_token(top(at), token)) {
                go_on(at, top(at) + 1, next);
            }
        }
    }

    set after_text(set from, const std::vector<uint32_t> & chars) {
        for (const uint32_t chr : chars) {
            if (from == NONE) {
                break;
            }
            from = after_char(from, chr);
        }
        return from;
    }

    // Whether a token can be next.
    bool allows(llama_token token, const text & piece) {
        count(tokens.size());
        for (const stack at : tokens) {
            if (matches_token(top(at), token)) {
                return true;
            }
        }
        const set end = after_text(begin, piece.chars);
        if (piece.partial.n_remain == 0) {
            return end != NONE && !piece.chars.empty();
        }
        return std::any_of(sets[end].begin(), sets[end].end(), [&](stack at) {
            return at != EMPTY && !is_token(top(at)) && may_become(top(at), piece.partial);
        });
    }

    set intern(std::vector<stack> members) {
        std::sort(members.begin(), members.end());
        members.erase(std::unique(members.begin(), members.end()), members.end());
        const auto [at, is_new] = set_ids.emplace(std::move(members), (set) sets.size());
        if (is_new) {
            sets.push_back(at->first);
            count(at->first.size());
        }
        return at->second;
    }

    llama_grammar_stacks unpack(set of) const {
        llama_grammar_stacks out;
        out.reserve(sets[of].size());
        size_t n_elements = 0;
        for (stack at : sets[of]) {
            llama_grammar_stack elements;
            for (; at != EMPTY; at = nodes[at - 1].below) {
                elements.push_back(top(at));
            }
            n_elements += elements.size();
            if (n_elements > MAX_ELEMENTS) {
                throw too_complex();
            }
            std::reverse(elements.begin(), elements.end());
            out.push_back(std::move(elements));
        }
        return out;
    }

  private:
    struct node {
        const element * top;
        stack           below;
    };

    struct hash_node {
        size_t operator()(const std::pair<const element *, stack> & key) const {
            return std::hash<const element *>()(key.first) * 31 + key.second * 0x9e3779b97f4a7c15ull;
        }
    };

    void count(uint64_t n) {
        steps += n;
        if (steps > MAX_STEPS) {
            throw too_complex();
        }
    }

    stack push(stack below, const element * top) {
        const auto [at, is_new] = node_ids.emplace(std::make_pair(top, below), (stack) nodes.size() + 1);
        if (is_new) {
            nodes.push_back({ top, below });
        }
        return at->second;
    }

    // The stacks of `at` whose top has been taken, so that the sequence goes on at `pos`, added to `next`.
    void go_on(stack at, const element * pos, std::vector<stack> & next) {
        const stack below = nodes[at - 1].below;
        const auto & found = expand(is_end(pos) ? below : push(below, pos));
        count(found.size());
        next.insert(next.end(), found.begin(), found.end());
    }

    // What a stack stands for: stacks with a character or token on top, or the empty one.
    const std::vector<stack> & expand(stack of) {
        const auto known = expanded.find(of);
        if (known != expanded.end()) {
            return known->second;
        }
        std::vector<stack> found;
        std::vector<stack> todo = { of };
        std::unordered_map<stack, bool> seen;
        while (!todo.empty()) {
            const stack at = todo.back();
            todo.pop_back();
            if (!seen.emplace(at, true).second) {
                continue;
            }
            count(NEW_STACK);
            if (at == EMPTY || top(at)->type != LLAMA_GRETYPE_RULE_REF) {
                found.push_back(at);
                continue;
            }
            const element * pos  = top(at);
            const stack     rest = is_end(pos + 1) ? nodes[at - 1].below : push(nodes[at - 1].below, pos + 1);
            for (const element * sub = rules[pos->value].data();; ++sub) {
                todo.push_back(is_end(sub) ? rest : push(rest, sub));
                while (!is_end(sub)) {
                    ++sub;
                }
                if (sub->type == LLAMA_GRETYPE_END) {
                    break;
                }
            }
        }
        return expanded.emplace(of, std::move(found)).first->second;
    }

    const llama_grammar_rules & rules;

    std::vector<node> nodes;
    std::unordered_map<std::pair<const element *, stack>, stack, hash_node> node_ids;
    std::unordered_map<stack, std::vector<stack>> expanded;

    std::vector<std::vector<stack>> sets;
    std::map<std::vector<stack>, set> set_ids;
    std::unordered_map<uint64_t, set> moves;

    set                begin = NONE;
    std::vector<stack> tokens; // those of `begin` that want a certain token
    uint64_t           steps = 0;
};

// Characters at the end of a text in which a trigger is looked for.
constexpr size_t MAX_SEARCHED = 65536;
constexpr size_t KEPT_PATTERNS = 64;

const std::regex & compiled(const std::string & pattern) {
    static thread_local std::unordered_map<std::string, std::regex> known;
    const auto at = known.find(pattern);
    if (at != known.end()) {
        return at->second;
    }
    auto flags = std::regex::ECMAScript;
#ifdef __GLIBCXX__
    flags |= std::regex_constants::__polynomial;
#endif
    std::regex made;
    try {
        made = std::regex(pattern, flags);
    } catch (const std::regex_error &) { // it refers back to a group
        made = std::regex(pattern);
    }
    if (known.size() >= KEPT_PATTERNS) {
        known.clear();
    }
    return known.emplace(pattern, std::move(made)).first->second;
}

const std::string & piece_of(const llama_vocab * vocab, llama_token token, std::string & buffer) {
    buffer.resize(std::max<size_t>(buffer.capacity(), 64));
    int32_t n = llama_token_to_piece(vocab, token, &buffer[0], (int32_t) buffer.size(), 0, true);
    if (n < 0) {
        buffer.resize(-n);
        n = llama_token_to_piece(vocab, token, &buffer[0], (int32_t) buffer.size(), 0, true);
    }
    buffer.resize(std::max(0, n));
    return buffer;
}

} // namespace

#define TAKES_THE_PLACE __attribute__((visibility("default")))

TAKES_THE_PLACE void llama_grammar_apply_impl(const llama_grammar & grammar, llama_token_data_array * cur_p) {
    if (grammar.awaiting_trigger) {
        return;
    }
    machine of(grammar);
    const auto & start   = of.stacks(of.start());
    const bool   may_end = std::find(start.begin(), start.end(), machine::EMPTY) != start.end();

    std::string buffer;
    text        piece;
    for (size_t i = 0; i < cur_p->size; ++i) {
        llama_token_data & item = cur_p->data[i];
        bool allowed = may_end;
        if (!llama_vocab_is_eog(grammar.vocab, item.id)) {
            const std::string & bytes = piece_of(grammar.vocab, item.id, buffer);
            allowed = false;
            if (!bytes.empty() && bytes[0] != '\0') {
                decode(bytes, grammar.partial_utf8, piece);
                allowed = of.allows(item.id, piece);
            }
        }
        if (!allowed) {
            item.logit = -std::numeric_limits<float>::infinity();
        }
    }
}

TAKES_THE_PLACE void llama_grammar_accept_token(llama_grammar & grammar, llama_token token, const std::string & bytes) {
    text piece;
    decode(bytes, grammar.partial_utf8, piece);

    machine of(grammar);
    // a piece without a whole character changes nothing but what is left over
    std::vector<machine::stack> next = of.stacks(of.after_text(of.start(), piece.chars));
    if (piece.chars.empty()) {
        next.erase(std::remove_if(next.begin(), next.end(),
                       [&of](machine::stack at) { return at == machine::EMPTY || is_token(of.top(at)); }),
                   next.end());
    }
    of.after_token(token, next);

    grammar.stacks       = of.unpack(of.intern(std::move(next)));
    grammar.partial_utf8 = piece.partial;
    if (grammar.stacks.empty()) {
        throw std::runtime_error("Unexpected empty grammar stack after accepting piece: " + bytes + " (" +
                                 std::to_string(token) + ")");
    }
}

TAKES_THE_PLACE size_t llama_grammar_trigger_pattern::find(const std::string & input) const {
    const std::regex & expression = compiled(pattern);
    const size_t       skipped    = input.size() > MAX_SEARCHED ? input.size() - MAX_SEARCHED : 0;
    const auto         begin      = input.begin() + (std::ptrdiff_t) skipped;

    std::smatch match;
    const bool  is_whole = !pattern.empty() && pattern.front() == '^' && pattern.back() == '$';
    if (!(is_whole && skipped == 0 && std::regex_match(begin, input.end(), match, expression))) {
        const auto flags = skipped > 0 ? std::regex_constants::match_prev_avail : std::regex_constants::match_default;
        if (!std::regex_search(begin, input.end(), match, expression, flags)) {
            return std::string::npos;
        }
    }
    // the grammar begins with the first group that holds something, or with the match
    for (size_t i = 1; i < match.size(); ++i) {
        if (match.length(i) > 0) {
            return skipped + (size_t) match.position(i);
        }
    }
    return skipped + (size_t) match.position(0);
}

TAKES_THE_PLACE llama_grammar * llama_grammar_clone_impl(const llama_grammar & grammar) {
    auto * copy = new llama_grammar{
        grammar.vocab,
        grammar.rules,
        grammar.stacks,
        grammar.partial_utf8,
        grammar.lazy,
        grammar.awaiting_trigger,
        grammar.trigger_buffer,
        grammar.trigger_buffer_positions,
        grammar.trigger_tokens,
        grammar.trigger_patterns,
    };
    // first element of each rule -> the rule's number
    std::map<const element *, size_t> rule_at;
    for (size_t i = 0; i < grammar.rules.size(); ++i) {
        rule_at[grammar.rules[i].data()] = i;
    }
    for (auto & stack : copy->stacks) {
        for (const element *& pos : stack) {
            const auto rule = std::prev(rule_at.upper_bound(pos));
            pos = copy->rules[rule->second].data() + (pos - rule->first);
        }
    }
    return copy;
}
