// Thousands of random cases against the reference: shapes, policies, scores, element types, strides, cuts, and what may
// happen to a cache between two calls. All memory that nobody has written is full of NaN.
//
//     SASH_PROPERTY_SEED=7 SASH_PROPERTY_COUNT=1000000    other cases, and more of them
//     SASH_PROPERTY_CASE="policy=1 tokens=40 window=7"    one case, as a failure prints it
#include "support/catch.hpp"
#include "support/random_case.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

#include <chrono>
#include <iostream>
#include <memory>
#include <optional>

namespace {

using sash::int64;
using sash::scalar;
using test::form;
using test::numbers;
using test::random_case;
using test::tensor;
using test::tolerance;

// ---------------------------------------------------------------------------------------------------------------------
// A case as the library sees it

// A score function of a user's: uses everything that a site offers.
struct tanh_score {
    sash::per_head offset;

    template <class N, class Site>
    constexpr N operator()(N s, const Site& at) const {
        using std::tanh;
        return N(2) * tanh(s * N(0.5f)) - N(0.002f) * at.distance() + at.of_head(offset);
    }
};

// Options of the scores, with the tables they point to.
struct scoring {
    std::vector<float> alibi, sink_logits, offset;
    std::vector<double> frequencies;
    sash::score score;

    scoring(const random_case& c, numbers& random) {
        const float factors[] = {0, 0.5f, 1.5f, -1};
        score.scale = factors[c.scale & 3] / std::sqrt(static_cast<float>(c.key_dim));
        score.soft_cap = c.soft_cap ? 3.0f : 0.0f;
        // Where a query may stand far from every key it sees, steep slopes would make scores of hundreds, whose fp32
        // rounding alone exceeds the tolerance.
        const bool nearest_is_near = !c.is(form::append_read) && !c.is(form::no_cache);
        const float steepest = nearest_is_near ? 0.5f : 2 / static_cast<float>(c.tokens + 100);
        for (int64 h = 0; h < c.heads(); ++h) {
            alibi.push_back(steepest * static_cast<float>(random.between(1, 8)) / 8);
            sink_logits.push_back(random.number());
            offset.push_back(random.number());
        }
        if (c.alibi) score.alibi = alibi;
        if (c.sink_logits) score.sink_logits = sink_logits;
        if (c.custom) score.custom = tanh_score{{offset.data()}};
        if (c.pairs == 0) return;
        for (int64 p = 0; p < c.pairs; ++p)
            frequencies.push_back(c.quarter_turns
                                      ? static_cast<double>(random.between(1, 3)) * 1.5707963267948966
                                      : std::pow(1e4, -static_cast<double>(p) / static_cast<double>(c.pairs)));
        score.rotary = {.frequencies = frequencies,
                        .layout = c.interleaved ? sash::rotary_layout::interleaved : sash::rotary_layout::half_split,
                        .by = c.by_library ? sash::rotates::library : sash::rotates::caller};
    }
    scoring(const scoring&) = delete;
};

tensor random_tensor(int64 tokens, int64 heads, int64 dim, int64 type, int64 lies, numbers& random) {
    tensor t(tokens, heads, dim, static_cast<scalar>(type), static_cast<test::arrangement>(lies));
    t.fill(random);
    return t;
}

// The tokens of one sequence.
struct operands {
    tensor query, key, value, decay;

    operands(const random_case& c, int64 tokens, int64 queries, numbers& random) {
        const sash::shape s = c.shape();
        // Keys that turn by quarters stay exact only if they are exact in every storage type.
        const bool narrow = c.element == 1 || c.element == 2;
        const int64 key_type = c.quarter_turns && c.by_library && narrow ? c.element : c.key_type;
        query = random_tensor(queries, s.query_heads, s.key_dim, c.query_type, c.query_lies, random);
        key = random_tensor(tokens, s.key_heads, s.key_dim, key_type, c.key_lies, random);
        value = random_tensor(tokens, s.value_heads, s.value_dim, c.value_type, c.value_lies, random);
        decay = tensor(tokens, s.gate_heads, 1, static_cast<scalar>(c.decay_type),
                       static_cast<test::arrangement>(c.decay_lies));
        decay.for_each([&](int64 t, int64 h, int64 d) {
            const double rates[] = {0, 0, -0.01, -0.2, -3, -HUGE_VAL};
            decay.set(t, h, d, static_cast<float>(rates[random.one_in(8) ? random.below(6) : random.below(4)]));
        });
    }
    void poison(int64 token, float with) {
        const auto overwrite = [&](tensor& t) {
            for (int64 h = 0; h < t.heads(); ++h)
                for (int64 d = 0; d < t.dim(); ++d) t.set(token, h, d, with);
        };
        overwrite(key);
        overwrite(value);
    }
    tensor magnitudes(const tensor& t) const {
        tensor m(t.tokens(), t.heads(), t.dim());
        m.for_each([&](int64 i, int64 h, int64 d) { m.set(i, h, d, std::abs(t.get(i, h, d))); });
        return m;
    }
};

template <class P>
sash::tokens_of<P> tokens_of(const operands& of, int64 first, int64 count) {
    if constexpr (sash::detail::takes_decay<P>)
        return {.query = of.query.in(first, count),
                .key = of.key.in(first, count),
                .value = of.value.in(first, count),
                .decay = of.decay.in(first, count)};
    else
        return {.query = of.query.in(first, count), .key = of.key.in(first, count), .value = of.value.in(first, count)};
}

// ---------------------------------------------------------------------------------------------------------------------
// What must come out

// The policies stated once more, for the reference: it would believe whatever the library's own say of themselves.
struct stated_full {
    bool causal = true;
    constexpr bool sees(int64 query, int64 key) const { return key <= query || !causal; }
    constexpr sash::key_intervals<1> visible(int64, int64) const { return {}; }
};
struct stated_window {
    int64 window = 1, sinks = 0;
    bool compact = false;
    static constexpr int frames = 2;

    constexpr bool sees(int64 query, int64 key) const {
        if (key > query) return false;
        const int64 back = query - key;  // 0: the query's own token
        return back <= window - 1 || key <= sinks - 1;
    }
    constexpr int64 distance(int64 query, int64 key) const {
        if (!compact || key >= sinks || query < sinks || query - sinks < window) return query - key;
        return sinks + window - 1 -
               key;  // the cache is full: its newest token stands in the last of its sinks + window places
    }
    constexpr sash::key_intervals<1> visible(int64, int64) const { return {}; }
};
stated_full stated(const sash::full& p) { return {p.causal}; }
stated_window stated(const sash::sliding_window& p) { return {p.window, p.sinks, p.frame == sash::frame::compact}; }

struct expectation {
    sash::reference::result rows;
    std::vector<double> magnitude;  // of the terms that a sum without a normaliser cancels
};

template <class P>
expectation expected(const random_case& c, const P& policy, sash::score score, const operands& of, int64 first_query) {
    if (c.unfinished) score.sink_logits = {};
    if constexpr (sash::softmax_policy<P>) {
        const auto stored = c.is(form::no_cache) ? scalar::f32 : static_cast<scalar>(c.element);
        return {sash::reference::attend(stated(policy), c.shape(), of.query.in(), of.key.in(), of.value.in(), score,
                                        first_query, stored),
                {}};
    } else {
        const auto attend = [&](const tensor& q, const tensor& k, const tensor& v) {
            return sash::reference::attend(policy, c.shape(), q.in(), k.in(), v.in(), of.decay.in(), score,
                                           first_query);
        };
        expectation e{attend(of.query, of.key, of.value), {}};
        if (c.normalised()) return e;
        score.rotary = {};  // a turn lengthens a number by the root of 2 at most
        score.scale = 2 * (score.scale != 0 ? std::abs(score.scale) : 1 / std::sqrt(static_cast<float>(c.key_dim)));
        e.magnitude = attend(of.magnitudes(of.query), of.magnitudes(of.key), of.magnitudes(of.value)).out;
        return e;
    }
}

// Values reach 1.74, scores 7. A row is a mean of values, which may cancel: what an error in a weight does to it is of
// the values' size, not of the row's. So the absolute part is 3e-6 where rows of size 1 are allowed 1e-6.
constexpr tolerance of_random_rows{3e-6, 1e-5};

tolerance tolerance_of(const random_case& c) {
    // The exp of a matrix product: errors of the product become relative errors of weights.
    if (c.recurrent()) return of_random_rows.times(c.maps > 0 ? 4 : 1);
    // The library turns keys in fp32, the reference in double; then both round to the storage type, sometimes to
    // neighbours. (By quarter turns nothing is rounded, so these are compared tightly.)
    const bool neighbours = c.element != 0 && c.pairs > 0 && c.by_library && !c.quarter_turns && !c.is(form::no_cache);
    if (neighbours) return {c.element == 1 ? 0.006 : 0.05, 1e-5};
    // Where the machine multiplies bfloat16, weights are rounded to it (half an ulp is 2^-8 at most, and values reach 1.74), and so
    // are queries that had to be turned.
    const bool words = sash::cpu::multiplies_pairs<sash::build::here> && c.element == 2 && c.query_type == 2;
    if (words) return {c.pairs > 0 && !c.quarter_turns ? 0.05 : 0.008, 1e-5};
    return of_random_rows.times(c.scale == 2 ? 1.5 : 1);  // scores are stretched, and their errors
}

// What a linear row may be off beyond that: half an ulp for each product, where products are not small against the sum.
double slip_of(const random_case& c, const expectation& e, std::size_t row, std::size_t i) {
    if (!e.magnitude.empty()) return 6e-8 * e.magnitude[i];  // signed terms cancel
    // Turning a number leaves an absolute error; where relu cuts off near 0, that is large against a small mass.
    const double lse = e.rows.lse[row];
    if (c.is(test::policy::relu) && c.pairs > 0 && c.by_library && std::isfinite(lse))
        return 3e-8 * static_cast<double>(c.tokens * c.key_dim) * std::exp(-lse);
    return 0;
}

std::string disagreement(const random_case& c, const tensor& out, const std::vector<float>& lse, const expectation& e,
                         int64 token) {
    const tolerance within = tolerance_of(c);
    const auto heads = static_cast<std::size_t>(c.heads()), width = static_cast<std::size_t>(c.value_dim);
    for (std::size_t h = 0; h < heads; ++h) {
        const std::size_t row = static_cast<std::size_t>(token) * heads + h;
        const auto place = [&] { return "(" + std::to_string(token) + ", " + std::to_string(h); };
        const auto here = [&](std::size_t i) {
            return tolerance{within.absolute + slip_of(c, e, row, i), within.relative};
        };
        for (std::size_t d = 0; d < width; ++d) {
            const float got = out.get(token, static_cast<int64>(h), static_cast<int64>(d));
            const double right = e.rows.out[row * width + d];
            if (!here(row * width + d).narrowed_to(out.type()).holds(got, right))
                return "out" + place() + ", " + std::to_string(d) + ") is " + test::text_of(got) + ", must be " +
                       test::text_of(right);
        }
        if (!lse.empty() && !here(row * width).holds(lse[row], e.rows.lse[row]))
            return "lse" + place() + ") is " + test::text_of(lse[row]) + ", must be " + test::text_of(e.rows.lse[row]);
    }
    return "";
}

// ---------------------------------------------------------------------------------------------------------------------
// Doing it

// Takes tasks in the wrong order, and speaks of more workers than there are.
struct backwards {
    int64 workers;
    int64 concurrency() const { return workers; }
    void operator()(int64 tasks, sash::task f) const {
        for (int64 i = tasks; i-- > 0;) f(i);
    }
};

struct failure {
    std::string what;
};
void must(bool condition, const std::string& what) {
    if (!condition) throw failure{what};
}

int64 next_call(const random_case& c, int64 left, numbers& random) {
    if (c.calls == 1) return left;
    if (c.calls == 2) return 1;
    return std::min(left, random.pick({1, 1, 1, 2, 3, 5, 17, 64, 65, 130, 0}));
}

// The policy of a case of which `policy` is that of the first sequence.
template <class P>
P policy_of(const random_case& c, P policy) {
    if constexpr (std::is_same_v<P, sash::sliding_window>) policy.window = c.window;
    return policy;
}

// What leaves no trace. `make` gives an empty cache for a case.
template <class Cache, class Make>
void disturb(const random_case& c, Cache& cache, const Make& make, numbers& random) {
    using P = typename Cache::policy_type;
    const int64 length = cache.length();
    const int64 count = random.between(1, std::max<int64>(1, c.slack));
    operands junk(c, count, count, random);
    junk.poison(random.below(count), random.one_in(2) ? NAN : 1e4f);
    if (c.noise & test::rolled_back) {
        const Cache before = cache.checkpoint();
        sash::append(tokens_of<P>(junk, 0, count), cache, {.run = sash::serial{}});
        must(cache.can_rollback(count) || (count > c.slack && !c.is(test::policy::full)),
             "rollback within the slack is refused");
        cache.can_rollback(count) ? cache.rollback(count) : cache.restore(before);
    }
    if (c.noise & test::forked) {
        Cache fork = cache;
        const bool keep_fork = random.one_in(2);
        Cache& other = keep_fork ? cache : fork;  // whichever it is, what both hold must survive it
        if (const int64 back = random.between(0, length); other.can_rollback(back)) other.rollback(back);
        sash::append(tokens_of<P>(junk, 0, count), other, {.run = sash::serial{}});
        if (keep_fork) cache = fork;
    }
    if (c.noise & test::saved) {
        const std::vector<std::byte> file = cache.save();
        Cache loaded = make(c);
        must(loaded.load(file) == file.size(), "load used another number of bytes than save wrote");
        must(loaded.save() == file, "a loaded cache saves other bytes");
        cache = loaded;
    }
    if (c.noise & test::moved) {
        Cache other = std::move(cache);
        must(cache.length() == 0 && cache.stored() == 0, "a moved-from cache is not empty");
        sash::append(tokens_of<P>(junk, 0, count), cache, {.run = sash::serial{}});
        cache = std::move(other);
    }
    if (c.noise & test::reserved) cache.reserve(random.between(0, 700));
    if (c.noise & test::read) {
        tensor out(count, c.heads(), c.value_dim);
        sash::read(junk.query.in(), cache, out.out(), {.run = sash::serial{}});
    }
    must(cache.length() == length, "the length changed");
}

// One sequence on its way through a cache.
template <class P, class E>
struct sequence {
    using cache_type = sash::kv_cache<P, E>;
    random_case c;
    operands of;
    cache_type cache;
    tensor out;
    std::vector<float> lse;
    std::vector<bool> computed;  // which rows
    int64 done = 0;

    sequence(const random_case& given, cache_type empty, int64 tokens, numbers& random)
        : c(given),
          of(c, tokens, tokens, random),
          cache(std::move(empty)),
          out(tokens, c.heads(), c.value_dim, static_cast<scalar>(c.out_type),
              static_cast<test::arrangement>(c.out_lies)),
          lse(static_cast<std::size_t>(c.no_lse ? 0 : tokens * c.heads()), NAN),
          computed(static_cast<std::size_t>(tokens)) {}

    int64 left() const { return of.key.tokens() - done; }
    std::span<float> lse_of(int64 count) {
        if (c.no_lse) return {};
        return std::span(lse).subspan(static_cast<std::size_t>(done * c.heads()),
                                      static_cast<std::size_t>(count * c.heads()));
    }
    void advance(int64 count, bool with_rows) {
        for (int64 t = done; t < done + count; ++t) computed[static_cast<std::size_t>(t)] = with_rows;
        done += count;
    }
};

sash::options how_of(const random_case& c, sash::workspace& workspace) {
    sash::options how;
    if (c.workers > 1)
        how.run = backwards{c.workers};
    else
        how.run = sash::serial{};
    if (c.own_workspace) how.workspace = &workspace;
    how.finish = !c.unfinished;
    how.key_piece = c.key_piece;
    return how;
}

template <class P, class E>
void check_cache(const random_case& c, const sash::kv_cache<P, E>& cache, int64 tokens) {
    must(cache.length() == tokens,
         "the length is " + std::to_string(cache.length()) + " after " + std::to_string(tokens) + " tokens");
    if constexpr (std::is_same_v<P, sash::full>) must(cache.stored() == tokens, "full attention has lost a token");
    if constexpr (std::is_same_v<P, sash::sliding_window>)
        if (c.window < 1 << 21 && c.sinks < 1 << 21)
            must(cache.stored() >= std::min(tokens, c.window + c.sinks) &&
                     cache.stored() <= std::min(tokens, c.window + c.sinks + c.slack),
                 "a window of " + std::to_string(c.window) + " and " + std::to_string(c.sinks) + " sinks holds " +
                     std::to_string(cache.stored()));
}

// The forms that compute rows as tokens are appended: attend, batch, mixed.
template <class P, class E, class Make>
void run_appending(const random_case& c, const P& policy, const scoring& scores, const Make& make, sash::options how,
                   numbers& random) {
    std::vector<sequence<P, E>> all;
    for (int64 i = 0; i < c.sequences; ++i)
        all.emplace_back(c.variant(i), make(c.variant(i)), i == 0 ? c.tokens : random.between(1, c.tokens), random);
    if (c.nan_token > 0) all[0].of.poison(std::min(c.nan_token, c.tokens) - 1, NAN);

    const auto busy = [](const sequence<P, E>& s) { return s.left() > 0; };
    while (std::any_of(all.begin(), all.end(), busy)) {
        std::vector<sash::request<sash::kv_cache<P, E>>> requests;
        for (auto& s : all) {
            const int64 count = next_call(c, s.left(), random);
            const bool with_rows = !c.is(form::mixed) || random.one_in(2);
            how.lse = s.lse_of(count);
            if (c.is(form::batch)) {
                if (s.left() > 0 && !random.one_in(4))  // the others keep their length for now
                    requests.push_back(
                        {tokens_of<P>(s.of, s.done, count), &s.cache, s.out.out(s.done, count), how.lse});
                else
                    continue;
            } else if (with_rows) {
                sash::attend(tokens_of<P>(s.of, s.done, count), s.cache, s.out.out(s.done, count), how);
            } else {
                sash::append(tokens_of<P>(s.of, s.done, count), s.cache, how);
            }
            s.advance(count, with_rows);
        }
        how.lse = {};
        if (c.is(form::batch)) sash::attend(requests, how);
        for (auto& s : all)
            if (c.noise) disturb(s.c, s.cache, make, random);
    }
    for (auto& s : all) {
        check_cache(s.c, s.cache, s.of.key.tokens());
        const expectation e = expected(s.c, policy_of(s.c, policy), scores.score, s.of, 0);
        for (int64 t = 0; t < s.of.key.tokens(); ++t)
            if (s.computed[static_cast<std::size_t>(t)])
                if (const std::string wrong = disagreement(s.c, s.out, s.lse, e, t); !wrong.empty())
                    throw failure{wrong};
        must(s.out.surroundings_untouched(), "memory beside the output was written");
    }
}

// The forms whose queries are not those of the tokens: append_read, no_cache.
template <class P, class E, class Make>
void run_reading(const random_case& c, const P& policy, const scoring& scores, const Make& make, sash::options how,
                 numbers& random) {
    operands of(c, c.tokens, c.queries, random);
    if (c.nan_token > 0) of.poison(std::min(c.nan_token, c.tokens) - 1, NAN);
    tensor out(c.queries, c.heads(), c.value_dim, static_cast<scalar>(c.out_type),
               static_cast<test::arrangement>(c.out_lies));
    std::vector<float> lse(static_cast<std::size_t>(c.no_lse ? 0 : c.queries * c.heads()), NAN);
    how.lse = lse;
    int64 first_query = std::max<int64>(0, c.tokens + c.ahead);
    if (!c.is(form::no_cache)) {
        auto cache = make(c);
        operands appended(c, c.tokens, c.tokens, random);
        std::swap(appended.key, of.key), std::swap(appended.value, of.value), std::swap(appended.decay, of.decay);
        for (int64 done = 0; done < c.tokens;) {
            const int64 count = next_call(c, c.tokens - done, random);
            auto tokens = tokens_of<P>(appended, done, count);
            tokens.query = {};
            sash::append(tokens, cache, how);
            done += count;
            if (c.noise) disturb(c, cache, make, random);
        }
        std::swap(appended.key, of.key), std::swap(appended.value, of.value), std::swap(appended.decay, of.decay);
        check_cache(c, cache, c.tokens);
        if (c.ahead != 0) how.first_query = first_query;
        sash::read(of.query.in(), std::as_const(cache), out.out(), how);
        check_cache(c, cache, c.tokens);
    } else {
        if (c.ahead == 0 && (c.queries <= c.tokens || c.bidirectional))
            first_query = std::max<int64>(0, c.tokens - c.queries);
        else if (!c.recurrent())
            how.first_query = first_query;
        sash::tokens_of<P> tokens = tokens_of<P>(of, 0, c.tokens);
        tokens.query = of.query.in();
        sash::attend(policy, tokens, out.out(), how, scores.score);
    }
    const expectation e = expected(c, policy, scores.score, of, first_query);
    for (int64 t = 0; t < c.queries; ++t)
        if (const std::string wrong = disagreement(c, out, lse, e, t); !wrong.empty()) throw failure{wrong};
    must(out.surroundings_untouched(), "memory beside the output was written");
}

template <class P, class E>
void run_with(const random_case& c, const P& policy, const scoring& scores, numbers& random) {
    test::poisoned_memory memory;
    {
        const sash::storage storage{.rollback_slack = c.slack, .piece = c.piece, .memory = memory.source()};
        const auto make = [&](const random_case& like) {
            return sash::kv_cache<P, E>(policy_of(like, policy), like.shape(), scores.score, storage);
        };
        sash::workspace workspace(0, memory.source());
        const sash::options how = how_of(c, workspace);
        if (c.is(form::append_read) || c.is(form::no_cache))
            run_reading<P, E>(c, policy, scores, make, how, random);
        else
            run_appending<P, E>(c, policy, scores, make, how, random);
    }
    must(memory.live() == 0, "memory was not given back: " + std::to_string(memory.live()) + " bytes");
    must(memory.consistent(),
         "memory was given back as another piece than it was asked as, or something was written outside of it");
}

template <class P>
void run_any_element(const random_case& c, const P& policy, const scoring& scores, numbers& random) {
    switch (c.element) {
        case 1:
            return run_with<P, sash::float16>(c, policy, scores, random);
        case 2:
            return run_with<P, sash::bfloat16>(c, policy, scores, random);
        case 3:
            return run_with<P, sash::int8_rows>(c, policy, scores, random);
        default:
            return run_with<P, float>(c, policy, scores, random);
    }
}

void run_hedgehog(const random_case& c, const scoring& scores, numbers& random) {
    sash::linear<sash::hedgehog> policy{
        .map = {.form = c.h2 ? sash::hedgehog_form::h2 : sash::hedgehog_form::h3, .features = c.features}};
    const int64 f = c.features ? c.features : c.key_dim;
    const int64 heads[] = {0, 1, c.kv_heads, c.heads()};
    const float factor = 1 / std::sqrt(static_cast<float>(c.key_dim));
    const int64 maps = heads[c.maps & 3];
    const auto query_weights = random.several(maps * c.key_dim * f, factor),
               key_weights = random.several(maps * c.key_dim * f, factor);
    const auto query_biases = random.several(c.biases ? maps * f : 0),
               key_biases = random.several(c.biases ? maps * f : 0);
    policy.map.query_weights = query_weights;
    policy.map.key_weights = key_weights;
    policy.map.query_biases = query_biases;
    policy.map.key_biases = key_biases;
    run_with<sash::linear<sash::hedgehog>, float>(c, policy, scores, random);
}

// Empty when the case is as it must be, else what is wrong.
std::string run(const random_case& c) {
    try {
        numbers random(static_cast<std::uint64_t>(c.seed));
        const scoring scores(c, random);
        using sash::additive, sash::linear, sash::no_normaliser, sash::per_head_and_token;
        switch (static_cast<test::policy>(c.policy)) {
            case test::policy::full:
                run_any_element(c, sash::full{.causal = !c.bidirectional}, scores, random);
                break;
            case test::policy::sliding_window:
                run_any_element(c, c.sliding_window(), scores, random);
                break;
            case test::policy::elu:
                run_with<linear<>, sash::float16>(c, {}, scores, random);
                break;
            case test::policy::relu:
                run_with<linear<sash::relu>, float>(c, {}, scores, random);
                break;
            case test::policy::hedgehog:
                run_hedgehog(c, scores, random);
                break;
            case test::policy::elu_decay:
                run_with<linear<sash::elu_plus_one, per_head_and_token>, float>(c, {}, scores, random);
                break;
            case test::policy::identity_decay:
                run_with<linear<sash::identity, per_head_and_token, additive, no_normaliser>, float>(c, {}, scores,
                                                                                                     random);
                break;
            default:
                run_with<linear<sash::identity, sash::no_decay, additive, no_normaliser>, float>(c, {}, scores, random);
                break;
        }
    } catch (const failure& f) { return f.what; } catch (const std::exception& e) {
        return std::string("refused: ") + e.what();
    }
    return "";
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

std::uint64_t mixed(std::uint64_t seed, std::uint64_t i) {
    std::uint64_t x = seed * 0x9e3779b97f4a7c15u + i;
    x = (x ^ x >> 31) * 0xd6e8feb86659fd93u;
    x = (x ^ x >> 29) * 0xd6e8feb86659fd93u;
    return x ^ x >> 32;
}

std::optional<std::string> environment(const char* name) {
    const char* value = std::getenv(name);
    return value ? std::optional<std::string>(value) : std::nullopt;
}

void report(const random_case& found, const std::string& wrong) {
    const random_case least = test::shrunk(found, [](const random_case& c) { return !run(c).empty(); });
    std::cout << "  SASH_PROPERTY_CASE=\"" << test::text_of(least) << "\"   # " << run(least) << "\n    found as \""
              << test::text_of(found) << "\"   # " << wrong << std::endl;
}

}  // namespace

TEST_CASE(
    "R01-R30: random shapes, policies, scores, types, strides, cuts and cache histories agree with the reference") {
    if (const auto line = environment("SASH_PROPERTY_CASE")) {
        const random_case c = test::case_from(*line);
        INFO(test::text_of(c));
        REQUIRE(run(c) == "");
        return;
    }
    const std::uint64_t seed = std::stoull(environment("SASH_PROPERTY_SEED").value_or("20260101"));
    const std::uint64_t count = std::stoull(environment("SASH_PROPERTY_COUNT").value_or("30000"));
    std::cout << "SASH_PROPERTY_SEED=" << seed << " SASH_PROPERTY_COUNT=" << count << std::endl;
    int failures = 0;
    for (std::uint64_t i = 0; i < count && failures < 5; ++i) {
        const random_case c = test::draw(mixed(seed, i));
        INFO("SASH_PROPERTY_CASE=\"" << test::text_of(c) << '"');  // for a crash
        const std::string wrong = run(c);
        if (wrong.empty()) continue;
        ++failures;
        report(c, wrong);
    }
    CHECK(failures == 0);
}

TEST_CASE("A case reads back from the line that is printed for it") {
    for (std::uint64_t i = 0; i < 200; ++i) {
        const random_case c = test::draw(i);
        CHECK(test::case_from(test::text_of(c)) == c);
        CHECK(c.made_legal() == c);
    }
    CHECK_THROWS(test::case_from("no_such_field=1"));
    CHECK_THROWS(test::case_from("tokens"));
}

TEST_CASE("A failing case shrinks to the plainest one that fails") {
    random_case c = test::draw(1);
    c.tokens = 90, c.window = 50, c.policy = 1;
    const random_case least =
        test::shrunk(c, [](const random_case& tried) { return tried.tokens >= 17 && tried.policy == 1; });
    CHECK(test::text_of(least) == "policy=1 tokens=17");
}
