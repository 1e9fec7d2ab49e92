#pragma once
// A randomised case is a flat list of named integers: it is drawn from a seed, printed as the names and values that
// differ from the plainest case, read back from such a line, and made smaller one integer at a time.
#include "tensors.hpp"

#include <sash/shape.hpp>
#include <sash/sliding_window.hpp>

#include <algorithm>
#include <limits>
#include <sstream>

namespace test {

enum class policy : int { full, sliding_window, elu, relu, hedgehog, elu_decay, identity_decay, identity, count };
enum class form : int {
    attend,       // into one cache, cut into calls
    batch,        // into several caches at a time
    append_read,  // append everything, then read from some position
    mixed,        // some calls attend, some append
    no_cache,
    count
};
// What happens between the calls and must leave no trace; bits of random_case::noise.
enum noise : int { rolled_back = 1, forked = 2, saved = 4, moved = 8, read = 16, reserved = 32, every_noise = 63 };

struct random_case {
    int64 seed = 1;  // of all numbers and cuts
    int64 policy = 0, element = 0, form = 0;
    int64 kv_heads = 1, group = 1, query_share = 1, key_share = 1, value_share = 1, gate_share = 1;
    int64 key_dim = 1, value_dim = 1, tokens = 1, sequences = 1, varied = 0;
    int64 window = 1, sinks = 0, compact = 0, bidirectional = 0;
    int64 pairs = 0, interleaved = 0, by_library = 0, quarter_turns = 0;
    int64 soft_cap = 0, alibi = 0, sink_logits = 0, custom = 0, scale = 0;
    int64 h2 = 0, features = 0, maps = 0, biases = 0;  // of Hedgehog; maps: none, one, one a KV head, one a query head
    int64 query_type = 0, key_type = 0, value_type = 0, out_type = 0, decay_type = 0;
    int64 query_lies = 0, key_lies = 0, value_lies = 0, out_lies = 0, decay_lies = 0;
    int64 calls = 1;               // 1: everything in one; 2: a token each; else uneven cuts
    int64 queries = 1, ahead = 0;  // of a read: how many, and where the first stands, counted from the length
    int64 piece = 256, key_piece = 0, slack = 0, noise = 0, unfinished = 0, no_lse = 0, own_workspace = 0, workers = 1;
    int64 nan_token = 0;  // 1 + position of a token whose key and value are NaN

    bool recurrent() const { return policy >= static_cast<int64>(test::policy::elu); }
    bool is(test::policy p) const { return policy == static_cast<int64>(p); }
    bool is(test::form f) const { return form == static_cast<int64>(f); }
    bool normalised() const { return !is(test::policy::identity) && !is(test::policy::identity_decay); }

    int64 heads() const { return kv_heads * group; }
    sash::shape shape() const {
        return {.heads = heads(),
                .kv_heads = kv_heads,
                .key_dim = key_dim,
                .value_dim = value_dim,
                .query_heads = heads() / query_share,
                .key_heads = kv_heads / key_share,
                .value_heads = kv_heads / value_share,
                .gate_heads = heads() / gate_share};
    }
    sash::sliding_window sliding_window() const {
        return {.window = window, .sinks = sinks, .frame = compact ? sash::frame::compact : sash::frame::original};
    }

    // The same for sequence i of a batch whose caches differ: in dims, and in their windows.
    random_case variant(int64 i) const {
        random_case c = *this;
        if (!varied) return c;
        c.key_dim += 8 * i;
        c.value_dim += 3 * i;
        if (window < 1000) c.window += i;
        return c;
    }

    // The nearest case that means something: what excludes each other is settled here, so that fields can be drawn and
    // shrunk one by one.
    random_case made_legal() const {
        random_case c = *this;
        const auto at_least = [](int64& x, int64 least) { x = std::max(x, least); };
        const auto dividing = [](int64& x, int64 n) {
            if (x < 1 || n % x != 0) x = 1;
        };
        for (int64* x : {&c.kv_heads, &c.group, &c.key_dim, &c.value_dim, &c.tokens, &c.sequences, &c.window, &c.calls,
                         &c.piece, &c.workers})
            at_least(*x, 1);
        for (int64* x : {&c.sinks, &c.pairs, &c.queries, &c.key_piece, &c.slack, &c.features, &c.nan_token})
            at_least(*x, 0);
        dividing(c.query_share, c.heads());
        dividing(c.key_share, c.kv_heads);
        dividing(c.value_share, c.kv_heads);
        dividing(c.gate_share, c.heads());
        c.pairs = std::min(c.pairs, c.key_dim / 2);
        if (!c.recurrent()) {
            if (c.key_share > 1) c.value_share = 1;  // the larger of the two counts as stored
            c.gate_share = 1;
            if (c.pairs == 0 && !c.alibi) c.compact = 0;
            c.bidirectional = c.bidirectional && c.is(test::policy::full) &&
                              (c.is(test::form::append_read) || c.is(test::form::no_cache));
        } else {
            c.soft_cap = c.alibi = c.sink_logits = c.custom = c.compact = c.bidirectional = c.nan_token = 0;
            if (!c.is(test::policy::hedgehog)) c.h2 = c.features = c.maps = c.biases = 0;
            if (c.maps == 0) c.features = c.biases = 0;
            if (!c.normalised()) c.no_lse = 1;
            if (c.normalised()) c.scale = 0;  // it would cancel, and is refused
            c.ahead = 0;  // a state is read where it stands
            if (c.is(test::form::no_cache)) c.queries = std::min(c.queries, c.tokens);
        }
        if (!c.is(test::form::batch)) c.sequences = 1;
        if (c.sequences == 1 || c.maps > 0) c.varied = 0;  // matrices fit one width
        if (c.is(test::form::no_cache)) c.noise = 0;
        c.ahead = std::max(c.ahead, c.lowest_ahead());
        return c;
    }

    friend bool operator==(const random_case&, const random_case&) = default;

private:
    // How far back the first query of a read may stand: not before the sequence, nor where its keys have left the ring.
    int64 lowest_ahead() const {
        if (is(test::policy::full) || is(test::form::no_cache)) return -tokens;
        const bool all_there = (window >= tokens && noise == 0) || window > (int64{1} << 40);
        if (noise & rolled_back) return -1;  // tokens that came and went have used up the slack
        return all_there ? -tokens : std::max(-tokens, -slack - 1);
    }
};

struct field {
    const char* name;
    int64 random_case::*member;
};
inline constexpr field fields[] = {
    {"seed", &random_case::seed},
    {"policy", &random_case::policy},
    {"element", &random_case::element},
    {"form", &random_case::form},
    {"kv_heads", &random_case::kv_heads},
    {"group", &random_case::group},
    {"query_share", &random_case::query_share},
    {"key_share", &random_case::key_share},
    {"value_share", &random_case::value_share},
    {"gate_share", &random_case::gate_share},
    {"key_dim", &random_case::key_dim},
    {"value_dim", &random_case::value_dim},
    {"tokens", &random_case::tokens},
    {"sequences", &random_case::sequences},
    {"varied", &random_case::varied},
    {"window", &random_case::window},
    {"sinks", &random_case::sinks},
    {"compact", &random_case::compact},
    {"bidirectional", &random_case::bidirectional},
    {"pairs", &random_case::pairs},
    {"interleaved", &random_case::interleaved},
    {"by_library", &random_case::by_library},
    {"quarter_turns", &random_case::quarter_turns},
    {"soft_cap", &random_case::soft_cap},
    {"alibi", &random_case::alibi},
    {"sink_logits", &random_case::sink_logits},
    {"custom", &random_case::custom},
    {"scale", &random_case::scale},
    {"h2", &random_case::h2},
    {"features", &random_case::features},
    {"maps", &random_case::maps},
    {"biases", &random_case::biases},
    {"query_type", &random_case::query_type},
    {"key_type", &random_case::key_type},
    {"value_type", &random_case::value_type},
    {"out_type", &random_case::out_type},
    {"decay_type", &random_case::decay_type},
    {"query_lies", &random_case::query_lies},
    {"key_lies", &random_case::key_lies},
    {"value_lies", &random_case::value_lies},
    {"out_lies", &random_case::out_lies},
    {"decay_lies", &random_case::decay_lies},
    {"calls", &random_case::calls},
    {"queries", &random_case::queries},
    {"ahead", &random_case::ahead},
    {"piece", &random_case::piece},
    {"key_piece", &random_case::key_piece},
    {"slack", &random_case::slack},
    {"noise", &random_case::noise},
    {"unfinished", &random_case::unfinished},
    {"no_lse", &random_case::no_lse},
    {"own_workspace", &random_case::own_workspace},
    {"workers", &random_case::workers},
    {"nan_token", &random_case::nan_token},
};
inline constexpr random_case plainest;

// "policy=1 tokens=40 …": the fields that differ from the plainest case.
inline std::string text_of(const random_case& c) {
    std::string line;
    for (const auto& [name, member] : fields)
        if (c.*member != plainest.*member)
            line += (line.empty() ? "" : " ") + std::string(name) + "=" + std::to_string(c.*member);
    return line;
}

inline random_case case_from(const std::string& line) {
    random_case c;
    std::istringstream words(line);
    for (std::string word; words >> word;) {
        const std::size_t equals = std::min(word.find('='), word.size());
        const auto named = [&](const field& f) { return word.substr(0, equals) == f.name; };
        const auto found = std::find_if(std::begin(fields), std::end(fields), named);
        if (found == std::end(fields) || equals == word.size())
            throw std::invalid_argument("no field of a case: " + word);
        c.*(found->member) = std::stoll(word.substr(equals + 1));
    }
    return c.made_legal();
}

// ---------------------------------------------------------------------------------------------------------------------
// Drawing

// Multiply-adds of the reference, about.
inline double cost_of(const random_case& c) {
    const double keys = static_cast<double>(c.tokens),
                 queries = c.is(form::append_read) || c.is(form::no_cache) ? static_cast<double>(c.queries) : keys;
    const double sequences = static_cast<double>(c.sequences), heads = static_cast<double>(c.heads());
    const double width = static_cast<double>(c.key_dim + c.value_dim + 40);
    const double maps =
        c.maps == 0 ? 0 : (keys + queries) * static_cast<double>(c.key_dim * std::max(c.features, int64{1})) * 4;
    return sequences * heads * (queries * keys * width + maps + (keys + queries) * width * 4);
}

inline int64 draw_dim(numbers& random) {
    return random.one_in(3) ? random.between(1, 256)
                            : random.pick({1,  2,  3,  5,  7,  8,  15,  16,  17,  24,  31,  32,  33,  48,  63,
                                           64, 64, 65, 72, 80, 96, 100, 127, 128, 128, 129, 160, 192, 255, 256});
}
inline int64 draw_tokens(numbers& random) {
    switch (random.below(12)) {
        case 0:
            return random.between(1, 3);
        case 1:
            return random.pick({63, 64, 65, 127, 128, 129, 192});
        case 2:
            return random.between(130, 400);
        case 3:
            return random.one_in(3) ? random.between(500, 1300) : random.between(60, 140);
        default:
            return random.between(1, 100);
    }
}
// From one token to far beyond the sequence.
inline int64 draw_window(numbers& random, int64 tokens) {
    switch (random.below(8)) {
        case 0:
            return 1;
        case 1:
            return random.pick({63, 64, 65, 128});
        case 2:
            return tokens + random.between(-1, 1);
        case 3:
            return tokens + random.between(1, 200);
        case 4:
            return random.pick(
                {std::numeric_limits<int64>::max(), int64{1} << 40, int64{1} << 41, int64{1} << 62, 1 << 20});
        default:
            return random.between(1, std::max<int64>(1, tokens / 2));
    }
}
inline int64 draw_sinks(numbers& random, int64 tokens, int64 window) {
    switch (random.below(7)) {
        case 0:
            return 0;
        case 1:
            return 4;
        case 2:
            return random.pick({63, 64, 65, 130});
        case 3:
            return tokens + random.between(-1, 5);
        case 4:
            return std::min(window, tokens) + random.between(0, 3);  // beyond the window
        case 5:
            return random.one_in(4) ? int64{1} << 50 : 1;
        default:
            return random.between(1, 9);
    }
}

inline random_case draw(std::uint64_t seed) {
    numbers random(seed);
    random_case c;
    c.seed = static_cast<int64>(seed >> 33);
    const auto sometimes = [&](int64 one_in, int64 value) { return random.one_in(one_in) ? value : 0; };
    c.policy = random.pick({0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3, 4, 5, 6, 7});
    c.element = random.pick({0, 0, 1, 2, 3});
    c.form = random.pick({0, 0, 0, 1, 2, 3, 4});
    c.sequences = random.between(1, 4);
    c.varied = random.below(2);
    c.kv_heads = random.pick({1, 1, 1, 2, 2, 3, 4, 6});
    c.group = random.pick({1, 1, 2, 3, 4, 5, 6, 7, 8, 9});
    c.query_share = random.one_in(6) ? random.between(1, 4) : 1;
    c.key_share = random.one_in(6) ? random.between(1, 6) : 1;
    c.value_share = random.one_in(6) ? random.between(1, 6) : 1;
    c.gate_share = random.one_in(2) ? c.group : random.between(1, 6);
    c.key_dim = draw_dim(random);
    c.value_dim = random.one_in(2) ? c.key_dim : draw_dim(random);
    c.tokens = draw_tokens(random);
    c.queries = random.one_in(3) ? 1 : random.between(0, 40);
    if (c.is(form::no_cache) && random.one_in(2)) c.queries = c.tokens;
    c.features = random.pick({0, 1, 5, 16, 20, 33});
    c.maps = random.below(4);
    // What is too expensive gives way in a random extent, so that any one of them is large in some cases.
    const double most = random.one_in(6) ? 2e7 : 3e6;
    while (cost_of(c) > most)
        for (int64* x : {&c.tokens, &c.kv_heads, &c.group, &c.sequences, &c.queries, &c.key_dim, &c.value_dim})
            if (random.one_in(7) && *x > 1) *x = std::max<int64>(1, *x - std::max<int64>(1, *x / 3));
    c.window = draw_window(random, c.tokens);
    c.sinks = draw_sinks(random, c.tokens, c.window);
    c.compact = random.below(2);
    c.bidirectional = random.one_in(3);
    c.pairs = random.one_in(2) ? 0 : random.one_in(3) ? random.between(1, c.key_dim / 2 + 1) : c.key_dim / 2;
    c.interleaved = random.below(2);
    c.by_library = random.below(2);
    c.quarter_turns = c.element != 0 && !random.one_in(3);
    c.soft_cap = sometimes(5, 1);
    c.alibi = sometimes(5, 1);
    c.sink_logits = sometimes(4, 1);
    c.custom = sometimes(6, 1);
    c.scale = sometimes(4, random.between(1, 3));
    c.h2 = random.below(2);
    c.biases = random.below(2);
    for (int64* type : {&c.query_type, &c.key_type, &c.value_type, &c.out_type, &c.decay_type})
        *type = random.pick({0, 0, 0, 1, 2});
    for (int64* lies : {&c.query_lies, &c.key_lies, &c.value_lies, &c.decay_lies})
        *lies = random.one_in(2) ? 0 : random.below(static_cast<int64>(arrangement::count));
    c.out_lies = random.one_in(2) ? 0 : random.below(static_cast<int64>(arrangement::shared_heads));
    c.calls = random.pick({1, 2, 3, 3, 3});
    c.ahead =
        random.pick({0, 0, -1, random.between(-c.tokens, 0), random.between(-c.tokens, 0), random.between(0, 80)});
    c.piece = random.pick({256, 256, 1, 2, 7, 64, 100});
    c.key_piece = random.pick({0, 0, 1, 3, 16, 64, 100, 128});
    c.slack = random.pick({0, 0, 1, 3, 16, 70});
    if (random.one_in(3)) c.noise = random.below(every_noise + 1);
    c.unfinished = sometimes(8, 1);
    c.no_lse = sometimes(8, 1);
    c.own_workspace = sometimes(3, 1);
    c.workers = random.pick({1, 1, 1, 3});
    c.nan_token = random.one_in(8) ? random.between(1, c.tokens) : 0;
    return c.made_legal();
}

// ---------------------------------------------------------------------------------------------------------------------
// Shrinking

// The plainest case near `c` for which `fails` still holds: each field is tried at its plainest value, then nearer.
template <class F>
random_case shrunk(random_case c, F&& fails) {
    const auto try_nearer = [&](const field& f) {
        const int64 usual = plainest.*f.member, away = c.*f.member - usual;
        for (const int64 kept : {int64{0}, away / 2, away - away / 4, away - (away > 0 ? 1 : -1)}) {
            if (away == 0) break;
            random_case tried = c;
            tried.*f.member = usual + kept;
            tried = tried.made_legal();
            if (tried == c || !fails(tried)) continue;
            c = tried;
            return true;
        }
        return false;
    };
    for (bool smaller = true; smaller;) {
        smaller = false;
        for (const field& f : fields) smaller |= try_nearer(f);
    }
    return c;
}

}  // namespace test
