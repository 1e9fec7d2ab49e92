// Golden values from PyTorch and from public naive recurrences (tests/golden/README.md): an oracle that shares no code
// with the library. Every case is fed in one call, token by token, and in an uneven cut, and to the reference.
#include "support/catch.hpp"
#include "support/golden_compare.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace {

using sash::int64;
using floats = std::vector<float>;

using golden::cuts_of;
using golden::disagreement;
using golden::largest;
using golden::of_double;
using golden::of_fp32;
using golden::rows;
using golden::tolerance;

std::vector<golden::test_case> read_file(const std::string& name) { return golden::read_beside(__FILE__, name); }

// ---------------------------------------------------------------------------------------------------------------------
// A case as the library sees it

// Shape and score options of a case; owns what the options point to.
struct setting {
    floats alibi, sink_logits;
    std::vector<double> frequencies;
    sash::shape shape;
    sash::score score;

    explicit setting(const golden::test_case& c) {
        const auto &query = c["query"], &key = c["key"], &value = c["value"];
        shape = {.heads = c["output"].extent(1),
                 .key_dim = key.extent(2),
                 .value_dim = value.extent(2),
                 .query_heads = query.extent(1),
                 .key_heads = key.extent(1),
                 .value_heads = value.extent(1)};
        if (c.has("decay")) shape.gate_heads = c["decay"].extent(1);
        score.scale = static_cast<float>(c.real("scale", 0));
        score.soft_cap = static_cast<float>(c.real("soft_cap", 0));
        if (c.has("alibi")) score.alibi = alibi = c["alibi"].floats();
        if (c.has("sink_logits")) score.sink_logits = sink_logits = c["sink_logits"].floats();
        if (c.has("frequencies")) {
            frequencies = c["frequencies"].values;
            score.rotary = {.frequencies = frequencies,
                            .layout = layout(c),
                            .dims = c.integer("dims"),
                            .by = c.text("rotates_by") == "caller" ? sash::rotates::caller : sash::rotates::library};
        }
    }
    setting(const setting&) = delete;
    setting& operator=(const setting&) = delete;

    static sash::rotary_layout layout(const golden::test_case& c) {
        return c.text("layout") == "interleaved" ? sash::rotary_layout::interleaved : sash::rotary_layout::half_split;
    }
};

sash::full full_policy(const golden::test_case& c) { return {.causal = c.integer("causal") != 0}; }

sash::sliding_window window_policy(const golden::test_case& c) {
    return {.window = c.integer("window"),
            .sinks = c.integer("sinks"),
            .frame = c.text("frame") == "compact" ? sash::frame::compact : sash::frame::original};
}

template <class Policy>
bool joins_append_and_read(const Policy&) {
    return true;
}
bool joins_append_and_read(const sash::full& policy) { return policy.causal; }

struct answer {
    floats out, lse;
    explicit answer(const golden::test_case& c) : out(c["output"].values.size(), NAN) {
        lse.assign(out.size() / static_cast<std::size_t>(c["output"].extent(2)), NAN);
    }
    std::span<float> lse_rows(int64 first, int64 count, int64 heads) {
        return std::span(lse).subspan(static_cast<std::size_t>(first * heads), static_cast<std::size_t>(count * heads));
    }
};

// The tokens before the first query are appended; the rest come as the cut says.
template <class Element, class Policy>
answer through_cache(const golden::test_case& c, Policy policy, const std::vector<int64>& cut) {
    const setting s(c);
    const floats q = c["query"].floats(), k = c["key"].floats(), v = c["value"].floats();
    const int64 keys = c["key"].extent(0), queries = c["query"].extent(0), before = keys - queries;
    sash::kv_cache<Policy, Element> cache(policy, s.shape, s.score);
    answer a(c);
    const bool join = joins_append_and_read(policy);
    const int64 alone = join ? before : keys;
    if (alone > 0) sash::append(rows(k, c["key"], 0, alone), rows(v, c["value"], 0, alone), cache);
    int64 done = 0;
    for (const int64 n : cut) {
        const sash::input query = rows(q, c["query"], done, n);
        const sash::output out = rows(a.out, c["output"], done, n);
        const sash::options options{.lse = a.lse_rows(done, n, s.shape.heads)};
        const sash::input key = rows(k, c["key"], before + done, join ? n : 0);
        const sash::input value = rows(v, c["value"], before + done, join ? n : 0);
        if (join)
            sash::attend(query, key, value, cache, out, options);
        else
            sash::read(query, cache, out, options);
        done += n;
    }
    CHECK(cache.length() == keys);
    return a;
}

// No cache: K and V in the caller's memory, in the element type of the case.
template <class Element, class Policy>
answer stateless(const golden::test_case& c, Policy policy) {
    const setting s(c);
    const floats q = c["query"].floats(), k = c["key"].floats(), v = c["value"].floats();
    std::vector<Element> key, value;
    for (const float x : k) key.push_back(Element(x));
    for (const float x : v) value.push_back(Element(x));
    const auto view = [](const std::vector<Element>& data, const golden::tensor& t) {
        return sash::input(data.data(), t.extent(0), t.extent(1), t.extent(2));
    };
    answer a(c);
    sash::attend(policy, rows(q, c["query"], 0, c["query"].extent(0)), view(key, c["key"]), view(value, c["value"]),
                 rows(a.out, c["output"], 0, c["output"].extent(0)), {.lse = a.lse}, s.score);
    return a;
}

// fp32 leaves an error of about 2^-24 |s| in a score s, and as large a relative one in its weight: scores beyond 16
// loosen the tolerance in proportion.
double loosened(const golden::test_case& c) { return std::max(1.0, c.real("largest_score") / 16); }

template <class Answer>
void agree(const Answer& a, const golden::test_case& c, tolerance within) {
    CHECK(disagreement(a.out, c["output"], within) == "");
    CHECK(disagreement(a.lse, c["lse"], within) == "");
}

template <class Policy>
sash::reference::result by_reference(const golden::test_case& c, Policy policy, sash::scalar stored) {
    const setting s(c);
    const floats q = c["query"].floats(), k = c["key"].floats(), v = c["value"].floats();
    const int64 keys = c["key"].extent(0), queries = c["query"].extent(0);
    return sash::reference::attend(policy, s.shape, rows(q, c["query"], 0, queries), rows(k, c["key"], 0, keys),
                                   rows(v, c["value"], 0, keys), s.score, -1, stored);
}

template <class Element, class Policy>
void check_case(const golden::test_case& c, Policy policy) {
    const tolerance within = of_fp32.times(loosened(c));
    for (const auto& cut : cuts_of(c["query"].extent(0))) {
        INFO(c.name << ": " << cut.size() << " calls");
        agree(through_cache<Element>(c, policy, cut), c, within);
    }
    // Without a cache nothing is stored after the library has rotated: narrow keys are rounded before, not after.
    if (std::is_same_v<Element, float> || !c.has("frequencies")) {
        INFO(c.name << ": no cache");
        agree(stateless<Element>(c, policy), c, within);
    }
    INFO(c.name << ": reference");
    const bool keys_are_rounded = c.text("rotates_by") == "library";  // to the element type, once they are turned
    agree(by_reference(c, policy, sash::detail::scalar_of<Element>::value), c, keys_are_rounded ? of_fp32 : of_double);
}

template <class Element>
void check_case(const golden::test_case& c) {
    if (c.text("policy") == "full")
        check_case<Element>(c, full_policy(c));
    else
        check_case<Element>(c, window_policy(c));
}

// Every case of the file that has a policy; returns how many there were.
int check_file(const std::string& name) {
    int checked = 0;
    for (const auto& c : read_file(name)) {
        if (!c.has("query")) continue;
        ++checked;
        if (c.text("element") == "float16")
            check_case<sash::float16>(c);
        else if (c.text("element") == "bfloat16")
            check_case<sash::bfloat16>(c);
        else
            check_case<float>(c);
    }
    return checked;
}

// ---------------------------------------------------------------------------------------------------------------------
// Linear policies

// Tokens [first, first + count) of a case.
struct linear_inputs {
    const golden::test_case& c;
    floats query = c["query"].floats(), key = c["key"].floats(), value = c["value"].floats();
    floats decay = c.has("decay") ? c["decay"].floats() : floats{};

    template <class Policy>
    typename sash::kv_cache<Policy>::tokens part(int64 first, int64 count) const {
        const sash::input q = rows(query, c["query"], first, count), k = rows(key, c["key"], first, count);
        const sash::input v = rows(value, c["value"], first, count);
        if constexpr (Policy::needs_decay)
            return {.query = q, .key = k, .value = v, .decay = rows(decay, c["decay"], first, count)};
        else
            return {.query = q, .key = k, .value = v};
    }
};

// A sum without normaliser may cancel: its error is fp32's share of the largest row, not of each.
tolerance of_state(const golden::test_case& c, const golden::tensor& expected) {
    if (c.text("normaliser") == "sum") return of_fp32;
    return {std::max(1e-6, 2e-6 * largest(expected)), 1e-5};
}

// The state [heads, features, columns], read with queries whose phi is a unit vector, so that query c gives row c of S:
// times the scale, or divided by z_c (0 where z_c is 0).
template <class Cache>
void check_state(const golden::test_case& c, const std::string& name, const Cache& cache) {
    if (!c.has(name)) return;  // no query is mapped to a unit vector
    const golden::tensor& state = c[name];
    const int64 heads = state.extent(0), features = state.extent(1), columns = state.extent(2);
    const int64 query_heads = c["query"].extent(1), value_dim = c["value"].extent(2);
    const double scale = c.real("scale", 1 / std::sqrt(static_cast<double>(features)));
    const bool elu = c.text("map") == "elu_plus_one";  // phi(0) = 1, phi(-10000) = 0; else phi(1) = 1, phi(0) = 0
    floats unit(static_cast<std::size_t>(features * query_heads * features), elu ? -1e4f : 0.0f);
    for (int64 row = 0; row < features * query_heads; ++row)
        unit[static_cast<std::size_t>(row * features + row / query_heads)] = elu ? 0.0f : 1.0f;
    floats out(static_cast<std::size_t>(features * heads * value_dim), NAN);
    golden::tensor expected{{features, heads, value_dim}, {}};
    for (int64 f = 0; f < features; ++f)
        for (int64 h = 0; h < heads; ++h) {
            const double* row = state.values.data() + (h * features + f) * columns;
            const double sum = columns > value_dim ? row[value_dim] : 1 / scale;
            for (int64 j = 0; j < value_dim; ++j) expected.values.push_back(sum > 0 ? row[j] / sum : 0);
        }
    sash::read({unit, features, query_heads, features}, cache, {out, features, heads, value_dim});
    CHECK(disagreement(out, expected, of_state(c, expected)) == "");
}

template <class Policy>
void agree_linear(const floats& out, const floats& lse, const golden::test_case& c) {
    CHECK(disagreement(out, c["output"], of_state(c, c["output"])) == "");
    if (Policy::has_normaliser) CHECK(disagreement(lse, c["lse"]) == "");
}

template <class Policy>
answer linear_without_cache(const golden::test_case& c, Policy policy) {
    const setting s(c);
    const linear_inputs inputs{c};
    answer a(c);
    sash::options options;
    if (Policy::has_normaliser) options.lse = a.lse;
    const int64 tokens = c["key"].extent(0);
    sash::attend(policy, inputs.part<Policy>(0, tokens), rows(a.out, c["output"], 0, tokens), options, s.score);
    return a;
}

template <class Policy>
void check_linear_case(const golden::test_case& c, Policy policy) {
    const setting s(c);
    const linear_inputs inputs{c};
    const int64 tokens = c["key"].extent(0), pause = c.integer("cut");
    {
        INFO(c.name << ": no cache");
        const answer a = linear_without_cache(c, policy);
        agree_linear<Policy>(a.out, a.lse, c);
    }
    {
        INFO(c.name << ": reference");
        const auto all = inputs.part<Policy>(0, tokens);
        sash::input decay;
        if constexpr (Policy::needs_decay) decay = all.decay;
        const auto r = sash::reference::attend(policy, s.shape, all.query, all.key, all.value, decay, s.score);
        CHECK(disagreement(r.out, c["output"], of_double) == "");
        if (Policy::has_normaliser) CHECK(disagreement(r.lse, c["lse"], of_double) == "");
    }
    auto cuts = cuts_of(tokens);
    cuts.push_back({pause, tokens - pause});
    for (const auto& cut : cuts) {
        INFO(c.name << ": " << cut.size() << " calls");
        sash::kv_cache<Policy> cache(policy, s.shape, s.score);
        answer a(c);
        int64 done = 0;
        for (const int64 n : cut) {
            sash::options options;
            if (Policy::has_normaliser) options.lse = a.lse_rows(done, n, s.shape.heads);
            sash::attend(inputs.part<Policy>(done, n), cache, rows(a.out, c["output"], done, n), options);
            done += n;
            if (done == pause) check_state(c, "state_at_cut", cache);
        }
        agree_linear<Policy>(a.out, a.lse, c);
        check_state(c, "state_at_end", cache);

        const floats probe = c["probe"].floats();
        floats read(c["probe_output"].values.size(), NAN);
        sash::read(rows(probe, c["probe"], 0, 3), cache, rows(read, c["probe_output"], 0, 3));
        CHECK(disagreement(read, c["probe_output"], of_state(c, c["probe_output"])) == "");
    }
}

template <class Map>
void check_linear_map(const golden::test_case& c, Map map) {
    const bool gated = c.has("decay");
    if (c.text("normaliser") == "none") {
        if (gated)
            check_linear_case(c, sash::linear<Map, sash::per_head_and_token, sash::additive, sash::no_normaliser>{map});
        else
            check_linear_case(c, sash::linear<Map, sash::no_decay, sash::additive, sash::no_normaliser>{map});
    } else if constexpr (Map::non_negative) {
        if (gated)
            check_linear_case(c, sash::linear<Map, sash::per_head_and_token>{map});
        else
            check_linear_case(c, sash::linear<Map>{map});
    } else {
        FAIL(c.name << ": this map has no normaliser");
    }
}

void check_hedgehog(const golden::test_case& c) {
    const auto table = [&](const char* name) { return c.has(name) ? c[name].floats() : floats{}; };
    const floats query_weights = table("query_weights"), key_weights = table("key_weights");
    const floats query_biases = table("query_biases"), key_biases = table("key_biases");
    check_linear_map(c,
                     sash::hedgehog{.form = c.text("form") == "h2" ? sash::hedgehog_form::h2 : sash::hedgehog_form::h3,
                                    .features = c.integer("features"),
                                    .query_weights = query_weights,
                                    .key_weights = key_weights,
                                    .query_biases = query_biases,
                                    .key_biases = key_biases});
}

golden::test_case find(const std::string& file, const std::string& name) {
    for (const auto& c : read_file(file))
        if (c.name == name) return c;
    throw std::runtime_error("no golden case " + name);
}

}  // namespace

TEST_CASE("R01 R03 R08 R26 R27 golden: full attention") { CHECK(check_file("full") == 24); }

TEST_CASE("R01 R02 R06 R07 R08 golden: sliding windows with sinks") { CHECK(check_file("window") == 61); }

TEST_CASE("R06 R20 golden: scale, soft cap, ALiBi, sink logits") { CHECK(check_file("score") == 21); }

TEST_CASE("R08 R30 golden: keys and values stored in 16 bits") { CHECK(check_file("narrow") == 12); }

TEST_CASE("R15 R16 A07 golden: rotary positions in both frames") { CHECK(check_file("rope") == 47); }

TEST_CASE("R22 R24 R26 golden: linear attention") {
    int checked = 0;
    for (const auto& c : read_file("linear")) {
        ++checked;
        const std::string map = c.text("map");
        if (map == "elu_plus_one")
            check_linear_map(c, sash::elu_plus_one{});
        else if (map == "relu")
            check_linear_map(c, sash::relu{});
        else if (map == "identity")
            check_linear_map(c, sash::identity{});
        else if (map == "hedgehog")
            check_hedgehog(c);
        else
            FAIL("no feature map '" << map << "'");
    }
    CHECK(checked == 40);
}

TEST_CASE("R30 golden: conversion to 16 bits") {
    const auto file = read_file("narrow");
    int compared = 0;
    for (const auto& c : file) {
        if (!c.has("from")) continue;
        const auto &from = c["from"].values, &to = c["to"].values;
        const bool half = c.text("element") == "float16";
        for (std::size_t i = 0; i < from.size(); ++i, ++compared) {
            const auto bits = static_cast<std::uint32_t>(from[i]);
            const float x = std::bit_cast<float>(bits);
            CAPTURE(c.name, bits);
            CHECK((half ? sash::float16(x).bits : sash::bfloat16(x).bits) == static_cast<std::uint16_t>(to[i]));
        }
    }
    CHECK(compared > 300);
}

TEST_CASE("R16 golden: frequency tables") {
    const auto file = read_file("rope");
    int compared = 0;
    for (const auto& c : file) {
        const std::string scaling = c.text("scaling");
        if (scaling.empty()) continue;
        CAPTURE(c.name);
        sash::rope_table table = sash::rope_frequencies(c.integer("dims"), c.real("base"));
        if (scaling == "linear") table = sash::linear_scaled(table, c.real("factor"));
        if (scaling == "llama3")
            table = sash::llama3_scaled(table, {.factor = c.real("factor"),
                                                .low_frequency_factor = c.real("low"),
                                                .high_frequency_factor = c.real("high"),
                                                .original_context = static_cast<double>(c.integer("trained"))});
        const auto& expected = c["frequencies"].values;
        REQUIRE(table.size() == expected.size());
        for (std::size_t p = 0; p < expected.size(); ++p, ++compared)
            CHECK(std::abs(table.data()[p] - expected[p]) <= 1e-12 * expected[p]);
    }
    CHECK(compared > 200);
}

TEST_CASE("R16 golden: rotation near and far") {
    const auto file = read_file("rope");
    int compared = 0;
    for (const auto& c : file) {
        if (!c.has("positions")) continue;
        const auto &positions = c["positions"].values, &frequencies = c["frequencies"].values;
        const auto pairs = static_cast<int64>(frequencies.size()), dim = c["input"].extent(1);
        floats x = c["input"].floats();
        for (std::size_t row = 0; row < positions.size(); ++row, ++compared) {
            std::vector<sash::detail::turn> turns;
            for (const double f : frequencies)
                turns.push_back(sash::detail::turn_by<sash::build::here>(static_cast<int64>(positions[row]), f));
            sash::turn_row(x.data() + int64(row) * dim, turns.data(), pairs, setting::layout(c));
        }
        CAPTURE(c.name);
        CHECK(disagreement(x, c["output"]) == "");
    }
    CHECK(compared == 22);
}

// What the tests above are worth: a policy or an option that is wrong by the least amount must not agree.
TEST_CASE("golden values notice a wrong window, sink, frame and scale") {
    const auto whole = [](const golden::test_case& c) { return std::vector<int64>{c["query"].extent(0)}; };
    const auto wrong = [&](const golden::test_case& c, sash::sliding_window policy) {
        return disagreement(through_cache<float>(c, policy, whole(c)).out, c["output"]) != "";
    };
    const auto c = find("window", "window 7 sinks 4");
    CHECK(wrong(c, {.window = 8, .sinks = 4}));
    CHECK(wrong(c, {.window = 6, .sinks = 4}));
    CHECK(wrong(c, {.window = 7, .sinks = 3}));
    CHECK(wrong(c, {.window = 7, .sinks = 5}));
    CHECK(wrong(find("rope", "half_split, compact"), {.window = 8, .sinks = 3, .frame = sash::frame::original}));
    auto scaled = find("window", "window 7 sinks 4");
    scaled.reals["scale"] = 0.501;
    CHECK(wrong(scaled, {.window = 7, .sinks = 4}));
}

TEST_CASE("golden values notice a wrong map, form and decay") {
    const auto wrong = [](const golden::test_case& c, auto policy) {
        return disagreement(linear_without_cache(c, policy).out, c["output"], of_state(c, c["output"])) != "";
    };
    CHECK(wrong(find("linear", "elu, grouped 4 over 2"), sash::linear<sash::relu>{}));
    const auto learned = find("linear", "hedgehog h2");
    const floats query = learned["query_weights"].floats(), key = learned["key_weights"].floats();
    CHECK(wrong(learned, sash::linear<sash::hedgehog>{{.form = sash::hedgehog_form::h3,
                                                       .features = learned.integer("features"),
                                                       .query_weights = query,
                                                       .key_weights = key}}));
    auto fading = find("linear", "decay, grouped 4 over 2");
    fading.tensors["decay"].values[3] -= 0.001;  // one head of one token
    using gated = sash::linear<sash::identity, sash::per_head_and_token, sash::additive, sash::no_normaliser>;
    CHECK(wrong(fading, gated{}));
}
