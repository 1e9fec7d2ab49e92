#pragma once
// A golden case of the linear family, every way that the library can compute it: in one call, token by token, in an
// uneven cut and as a prefill that is continued, without a cache, and by the reference.
#include "catch.hpp"
#include "golden_compare.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

#include <cmath>
#include <type_traits>

namespace golden_linear {

using golden::disagreement;
using golden::test_case;
using golden::tolerance;
using sash::int64;
using floats = std::vector<float>;

// Errors of sums that may cancel are a share of the largest number: 2e-6 of it; 2e-5 where a sum divides, and where the
// inputs are themselves what fp32 made of raw projections.
inline tolerance within(const test_case& c, const golden::tensor& expected) {
    return {(c.text("normaliser") == "none" ? 2e-6 : 2e-5) * golden::largest(expected), 0};
}

// ---------------------------------------------------------------------------------------------------------------------
// A case as the library sees it

// Shape and score options of a case; owns what the options point to.
struct setting {
    std::vector<double> frequencies;
    sash::shape shape;
    sash::score score;

    explicit setting(const test_case& c) {
        const auto &query = c["query"], &key = c["key"], &value = c["value"];
        shape = {.heads = c["output"].extent(1),
                 .key_dim = key.extent(2),
                 .value_dim = value.extent(2),
                 .query_heads = query.extent(1),
                 .key_heads = key.extent(1),
                 .value_heads = value.extent(1)};
        for (const char* gate : {"decay", "beta", "removal"})
            if (c.has(gate)) shape.gate_heads = c[gate].extent(c[gate].shape.size() == 1 ? 0 : 1);
        if (c.text("layer") != "" && !c.has("decay")) shape.gate_heads = shape.heads;  // constant decays of the heads
        if (c.has("frequencies")) {
            frequencies = c["frequencies"].values;
            score.rotary = {.frequencies = frequencies,
                            .layout = c.text("layout") == "interleaved" ? sash::rotary_layout::interleaved
                                                                        : sash::rotary_layout::half_split,
                            .dims = c.integer("dims"),
                            .by = sash::rotates::library};
        }
    }
    setting(const setting&) = delete;
    setting& operator=(const setting&) = delete;
};

// What the tokens of a case bring.
struct inputs {
    const test_case& c;
    floats query = c["query"].floats(), key = c["key"].floats(), value = c["value"].floats();
    floats decay = optional("decay"), beta = optional("beta");
    floats removal = optional("removal"), replacement = optional("replacement");

    // Tokens [first, first + count).
    template <class Policy>
    sash::tokens_of<Policy> part(int64 first, int64 count) const {
        using tokens = sash::tokens_of<Policy>;
        const auto of = [&](const floats& data, const char* name) { return rows(data, c[name], first, count); };
        return {of(query, "query"),
                of(key, "key"),
                of(value, "value"),
                taken<decltype(tokens::decay)>([&] { return of(decay, "decay"); }),
                taken<decltype(tokens::beta)>([&] { return of(beta, "beta"); }),
                taken<decltype(tokens::removal)>([&] { return of(removal, "removal"); }),
                taken<decltype(tokens::replacement)>([&] { return of(replacement, "replacement"); })};
    }

private:
    floats optional(const char* name) const { return c.has(name) ? c[name].floats() : floats{}; }

    // An input where the policy takes one, else what stands in its place.
    template <class Member, class Rows>
    static Member taken(const Rows& rows_of) {
        if constexpr (std::is_same_v<Member, sash::input>)
            return rows_of();
        else
            return {};
    }
};

struct answer {
    floats out, lse;
    explicit answer(const test_case& c) : out(c["output"].values.size(), NAN) {
        lse.assign(out.size() / static_cast<std::size_t>(c["output"].extent(2)), NAN);
    }
    std::span<float> lse_rows(int64 first, int64 count, int64 heads) {
        return std::span(lse).subspan(static_cast<std::size_t>(first * heads), static_cast<std::size_t>(count * heads));
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Every way to the same rows

template <class Policy>
answer without_cache(const test_case& c, const Policy& policy) {
    const setting s(c);
    const inputs in{c};
    answer a(c);
    sash::options options;
    if (Policy::has_normaliser) options.lse = a.lse;
    const int64 tokens = c["key"].extent(0);
    sash::attend(policy, in.part<Policy>(0, tokens), rows(a.out, c["output"], 0, tokens), options, s.score);
    return a;
}

template <class Answer>
void agree(const Answer& a, const test_case& c) {
    CHECK(disagreement(a.out, c["output"], within(c, c["output"])) == "");
    if (c.has("lse")) CHECK(disagreement(a.lse, c["lse"]) == "");
}

// The state [heads, features, value_dim], read with unit vectors: query f gives row f times the scale.
template <class Policy>
void check_state(const test_case& c, const sash::kv_cache<Policy>& cache) {
    const std::string map = c.text("map");
    if (!c.has("state_at_end") || c.has("frequencies") || (map != "identity" && map != "l2_normalised")) return;
    const golden::tensor& state = c["state_at_end"];
    const int64 heads = state.extent(0), features = state.extent(1), value_dim = state.extent(2);
    const int64 query_heads = c["query"].extent(1);
    floats unit(static_cast<std::size_t>(features * query_heads * features), 0.0f);
    for (int64 row = 0; row < features * query_heads; ++row)
        unit[static_cast<std::size_t>(row * features + row / query_heads)] = 1.0f;
    golden::tensor expected{{features, heads, value_dim}, {}};
    for (int64 f = 0; f < features; ++f)
        for (int64 h = 0; h < heads; ++h)
            for (int64 j = 0; j < value_dim; ++j)
                expected.values.push_back(c.real("scale") *
                                          state.values[static_cast<std::size_t>((h * features + f) * value_dim + j)]);
    floats out(expected.values.size(), NAN);
    sash::read({unit, features, query_heads, features}, cache, {out, features, heads, value_dim});
    CHECK(disagreement(out, expected, within(c, expected)) == "");
}

template <class Policy>
void check_case(const test_case& c, const Policy& policy) {
    const setting s(c);
    const inputs in{c};
    const int64 tokens = c["key"].extent(0), pause = c.integer("cut");
    {
        INFO(c.name << ": no cache");
        agree(without_cache(c, policy), c);
    }
    {
        INFO(c.name << ": reference");
        const auto r = sash::reference::attend(policy, s.shape, in.part<Policy>(0, tokens), s.score);
        const bool exact = c.text("normaliser") != "" && c.text("decay_kind") != "per_head";  // in fp32
        const double rounded = exact ? 1e-8 : 1e-6;
        CHECK(disagreement(r.out, c["output"], {rounded * std::max(1.0, golden::largest(c["output"])), 0}) == "");
        if (c.has("lse")) CHECK(disagreement(r.lse, c["lse"], golden::of_double) == "");
    }
    auto cuts = golden::cuts_of(tokens);
    cuts.push_back({pause, tokens - pause});
    for (const auto& cut : cuts) {
        INFO(c.name << ": " << cut.size() << " calls");
        sash::kv_cache<Policy> cache(policy, s.shape, s.score);
        answer a(c);
        int64 done = 0;
        for (const int64 n : cut) {
            sash::options options;
            if (Policy::has_normaliser) options.lse = a.lse_rows(done, n, s.shape.heads);
            sash::attend(in.part<Policy>(done, n), cache, rows(a.out, c["output"], done, n), options);
            done += n;
        }
        agree(a, c);
        check_state(c, cache);
    }
}

// Checks every case of a file beside the test `source`; returns how many there were.
template <class Check>
int check_file(const std::string& source, const std::string& name, const Check& check) {
    int checked = 0;
    for (const auto& c : golden::read_beside(source, name)) {
        check(c);
        ++checked;
    }
    return checked;
}

}  // namespace golden_linear
