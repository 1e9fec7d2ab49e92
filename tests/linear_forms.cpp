// Every decay, every update, with and without a normaliser, through the verb: against recurrences in double written out
// here from the equations, against the reference in both its forms, in every cut, and as memory.
#include "support/catch.hpp"
#include "support/linear_text.hpp"

#include <sash/reference.hpp>

namespace {

using namespace linear_text;
using namespace sash;

// ------------------------------------------------------------------------------------------------------------- oracles

// The maps of this file.
doubles elu_features(const doubles& x) {
    doubles phi;
    for (const double e : x) phi.push_back(e > 0 ? e + 1 : std::exp(e));
    return phi;
}
doubles unit_silu_features(const doubles& x) {
    doubles phi;
    double square = 1e-6f;
    for (const double e : x) phi.push_back(e / (1 + std::exp(-e))), square += phi.back() * phi.back();
    for (double& e : phi) e /= std::sqrt(square);
    return phi;
}
doubles same_features(const doubles& x) { return x; }

// What a policy is, said once more in this file's own words.
struct words {
    doubles (*phi)(const doubles&) = same_features;
    enum { none, constant, head, channel } decay = none;
    enum { add, delta, bonus, low_rank } update = add;
    bool divides = false;
    double scale = 1;
};

// States that a sequence begins with: S [states, F, V] and z [states, F].
struct beginning {
    int64 states, features, dim;
    floats S, z;

    template <class P>
    beginning(std::mt19937& random, const P& policy, const shape& s)
        : states(policy.states(s)), features(s.key_dim), dim(s.value_dim) {
        std::normal_distribution<float> normal;
        for (int64 i = 0; i < states * features * dim; ++i) S.push_back(normal(random));
        for (int64 i = 0; i < states * features; ++i) z.push_back(.1f + std::abs(normal(random)));
    }
    recurrent_state view(bool divides, int64 length = 0) const {
        recurrent_state v{.matrix = {S, states, features, dim}, .length = length};
        if (divides) v.normaliser = {z, states, 1, features};
        return v;
    }
};

// Row by row, element by element, with a state S[c][j] that is written as the equations of each rule say.
struct oracle {
    const text& x;
    words w;
    const beginning* start = nullptr;

    doubles row_of(const floats& from, int64 t, int64 heads, int64 h, int64 dim) const {
        const auto begin = from.begin() + static_cast<std::ptrdiff_t>((t * heads + h) * dim);
        return doubles(begin, begin + static_cast<std::ptrdiff_t>(dim));
    }
    double alpha(int64 t, int64 gate, int64 c) const {
        switch (w.decay) {
            case words::constant:
                return std::exp(double{x.constant[at(gate)]});
            case words::head:
                return std::exp(double{x.g[at(t * x.dims.gate_heads + gate)]});
            case words::channel:
                return std::exp(double{x.channel_g[at((t * x.dims.gate_heads + gate) * x.features + c)]});
            default:
                return 1;
        }
    }

    doubles rows() const {
        doubles out(at(x.tokens) * x.row());
        for (int64 h = 0; h < x.dims.heads; ++h) head_rows(h, out);
        return out;
    }
    void head_rows(int64 h, doubles& out) const {
        const shape& s = x.dims;
        const int64 F = x.features, V = s.value_dim;
        const auto of = [&](int64 count) { return h / (s.heads / count); };
        const int64 gate = of(s.gate_heads);
        std::vector<doubles> S(at(F), doubles(at(V)));
        doubles z(at(F));
        const int64 state = start ? of(start->states) : 0;
        for (int64 c = 0; c < F && start; ++c) {
            z[at(c)] = start->z[at(state * F + c)];
            for (int64 j = 0; j < V; ++j) S[at(c)][at(j)] = start->S[at((state * F + c) * V + j)];
        }
        for (int64 t = 0; t < x.tokens; ++t) {
            const doubles q = w.phi(row_of(x.q, t, s.query_heads, of(s.query_heads), F)),
                          k = w.phi(row_of(x.k, t, s.key_heads, of(s.key_heads), F)),
                          v = row_of(x.v, t, s.value_heads, of(s.value_heads), V);
            const double beta = x.beta[at(t * s.gate_heads + gate)];
            double mass = 0;
            for (int64 c = 0; c < F; ++c) {
                z[at(c)] = alpha(t, gate, c) * z[at(c)] + k[at(c)];
                mass += z[at(c)] * q[at(c)];
            }
            for (int64 j = 0; j < V; ++j) {
                double read = 0, lookup = 0;
                for (int64 c = 0; c < F && w.update == words::bonus; ++c)
                    read += q[at(c)] * (S[at(c)][at(j)] + x.u[at(h * F + c)] * k[at(c)] * v[at(j)]);
                for (int64 c = 0; c < F; ++c) {
                    if (w.update == words::delta) lookup += k[at(c)] * alpha(t, gate, c) * S[at(c)][at(j)];
                    if (w.update == words::low_rank)
                        lookup += x.a[at((t * s.gate_heads + gate) * F + c)] * S[at(c)][at(j)];
                }
                for (int64 c = 0; c < F; ++c) {
                    double& e = S[at(c)][at(j)];
                    e *= alpha(t, gate, c);
                    if (w.update == words::delta)
                        e += k[at(c)] * beta * (v[at(j)] - lookup);
                    else
                        e += k[at(c)] * v[at(j)];
                    if (w.update == words::low_rank) e += x.d[at((t * s.gate_heads + gate) * F + c)] * lookup;
                }
                for (int64 c = 0; c < F && w.update != words::bonus; ++c) read += q[at(c)] * S[at(c)][at(j)];
                out[at((t * s.heads + h) * V + j)] = w.divides ? read / mass : w.scale * read;
            }
        }
    }
};

// ------------------------------------------------------------------------------------------------------------ policies

// A policy, made for a text, and its words.
template <class P>
struct form {
    using policy = P;
    std::string name;
    P (*make)(const text&);
    words say;
};

template <class Decay>
Decay decay_for(const text& x) {
    if constexpr (ask::constant_decay<Decay>)
        return Decay(x.constant);
    else
        return {};
}

template <class Map, class Decay, class Update, class Normaliser>
form<linear<Map, Decay, Update, Normaliser>> make_form(const std::string& name, const words& w) {
    using P = linear<Map, Decay, Update, Normaliser>;
    return {name,
            [](const text& x) {
                P p{.decay = decay_for<Decay>(x)};
                if constexpr (std::is_same_v<Update, exclusive_bonus>) p.update.bonus = x.u;
                return p;
            },
            w};
}

// Calls f(form) for every combination of decay and update that there is, each with a map and a normaliser that fit.
template <class Decay, class F>
void for_each_update(const std::string& decay, words w, F&& f) {
    const auto with = [&w](auto update, auto phi, bool divides, double scale) {
        words each = w;
        each.update = update;
        each.phi = phi;
        each.divides = divides;
        each.scale = scale;
        return each;
    };
    f(make_form<elu_plus_one, Decay, additive, sum>("sum, " + decay, with(words::add, elu_features, true, 1)));
    f(make_form<identity, Decay, additive, unscaled>("additive, " + decay, with(words::add, same_features, false, 1)));
    f(make_form<identity, Decay, exclusive_bonus, unscaled>("bonus, " + decay,
                                                            with(words::bonus, same_features, false, 1)));
    f(make_form<l2_normalised<silu>, Decay, delta, unscaled>("delta, " + decay,
                                                             with(words::delta, unit_silu_features, false, 1)));
    f(make_form<identity, Decay, diagonal_plus_low_rank, unscaled>("low rank, " + decay,
                                                                   with(words::low_rank, same_features, false, 1)));
}
template <class F>
void for_each_form(F&& f) {
    for_each_update<no_decay>("no decay", {.decay = words::none}, f);
    for_each_update<constant_per_head>("constant", {.decay = words::constant}, f);
    for_each_update<per_head_and_token>("per head", {.decay = words::head}, f);
    for_each_update<per_channel_and_token>("per channel", {.decay = words::channel}, f);
}

const shape grouped{.heads = 6, .kv_heads = 3, .key_dim = 20, .value_dim = 37};
const shape grouped_values{
    .heads = 4, .head_dim = 16, .query_heads = 2, .key_heads = 2, .value_heads = 4, .gate_heads = 4};
const shape gates_of_queries{.heads = 10, .kv_heads = 1, .key_dim = 33, .value_dim = 80, .gate_heads = 2};
const shape many_readers{.heads = 7, .kv_heads = 1, .key_dim = 5, .value_dim = 130};
const shape columns{.heads = 6, .kv_heads = 3, .key_dim = 16, .value_dim = 1};
const shape long_columns{.heads = 14, .kv_heads = 2, .key_dim = 37, .value_dim = 1};
const shape scanned{.heads = 12, .key_dim = 32, .value_dim = 1, .query_heads = 1, .key_heads = 1};

}  // namespace

// ----------------------------------------------------------------------------------------------------------------- R22

// Calls of fewer tokens go one by one, and their bits do not depend on the cut; longer ones go in chunks of eight.
constexpr int64 long_call = cpu::least_chunked;

TEST_CASE("R22: every decay with every update is its equation, in one call and in any cut; short calls to the bit") {
    const unsigned seed = GENERATE(501u, 502u);
    std::mt19937 random(seed);
    for (const shape& dims : {grouped, grouped_values, gates_of_queries, many_readers, columns, long_columns, scanned})
        for_each_form([&]<class P>(const form<P>& f) {
            const text x(random, dims, 57 + random() % 80);  // one to three rounds
            CAPTURE(seed, f.name, x.tokens, dims.heads);
            const P policy = f.make(x);
            const doubles expected = oracle{x, f.say}.rows();
            kv_cache<P> one(policy, dims);
            floats whole = unwritten(x);
            feed(one, x, 0, x.tokens, whole);
            CHECK(far_apart(whole, expected, 1e-5) == "");
            floats singly = unwritten(x);
            kv_cache<P> single(policy, dims);
            feed(single, x, 0, positions(at(x.tokens), 1), singly);
            CHECK(far_apart(singly, expected, 1e-5) == "");
            for (const positions& cut :
                 {random_cut(random, x.tokens), positions{long_call - 1, x.tokens - long_call + 1},
                  positions{long_call + 3, 1, x.tokens - long_call - 4}}) {
                kv_cache<P> parts(policy, dims);
                floats out = unwritten(x);
                feed(parts, x, 0, cut, out);
                CHECK(far_apart(out, expected, 1e-5) == "");
                const auto in_order = [&](int64 n) { return n < long_call; };
                if (std::all_of(cut.begin(), cut.end(), in_order)) CHECK(same_bits(out, singly));
            }
            floats stateless = unwritten(x);
            attend(policy, x.slice<P>(0, x.tokens), x.rows(stateless, 0, x.tokens));
            CHECK(same_bits(stateless, whole));
        });
}

TEST_CASE("R22: a sequence that begins with states goes on from them, in every form and any cut") {
    const unsigned seed = GENERATE(521u, 522u);
    std::mt19937 random(seed);
    for (const shape& dims : {grouped, grouped_values, many_readers, long_columns, scanned})
        for_each_form([&]<class P>(const form<P>& f) {
            const text x(random, dims, 57 + random() % 80);
            CAPTURE(seed, f.name, x.tokens, dims.heads);
            const P policy = f.make(x);
            const beginning start(random, policy, x.dims);
            const doubles expected = oracle{x, f.say, &start}.rows();
            CHECK(far_apart(oracle{x, f.say}.rows(), expected, 1e-3) != "");  // it matters
            floats whole = unwritten(x);
            kv_cache<P> one(policy, dims);
            one.state(start.view(f.say.divides));
            feed(one, x, 0, x.tokens, whole);
            CHECK(far_apart(whole, expected, 1e-5) == "");
            CHECK(one.length() == x.tokens);
            floats singly;
            for (const positions& cut : {positions(at(x.tokens), 1), random_cut(random, x.tokens)}) {
                kv_cache<P> parts(policy, dims);
                floats out = unwritten(x);
                append(x.slice<P>(0, 9), parts);  // forgotten again
                parts.state(start.view(f.say.divides));
                feed(parts, x, 0, cut, out);
                CHECK(far_apart(out, expected, 1e-5) == "");
                if (singly.empty()) singly = out;
                const auto in_order = [](int64 n) { return n < long_call; };
                if (std::all_of(cut.begin(), cut.end(), in_order)) CHECK(same_bits(out, singly));
            }
        });
}

TEST_CASE("R8: a selective scan has the same bits wherever its rows lie, and where tokens are logged") {
    std::mt19937 random(523);
    using P = systems::mamba;
    const text x(random, scanned, 90);
    kv_cache<P> plain({}, x.dims), logged({}, x.dims, {}, {.rollback_slack = 30}), strided = plain.empty_copy();
    floats out = unwritten(x), other = out, strewn = out;
    feed(plain, x, 0, {1, 70, 19}, out);
    feed(logged, x, 0, {40, 1, 49}, other);
    CHECK(same_bits(out, other));
    logged.rollback(30);
    feed(logged, x, 60, 30, other);
    CHECK(same_bits(out, other));
    floats keys(x.k.size() * 2);
    for (std::size_t i = 0; i < x.k.size(); ++i) keys[2 * i] = x.k[i];
    tokens_of<P> in = x.slice<P>(0, 90);
    in.key = input(keys, 90, 1, 32, 64, 64, 2);
    attend(in, strided, x.rows(strewn, 0, 90));
    CHECK(same_bits(out, strewn));
}

TEST_CASE("R23: nothing is written behind the features of a column, not even by an infinity") {
    const float infinity = std::numeric_limits<float>::infinity();
    for (const int64 features : {5, 16, 21}) {
        const shape dims{.heads = 2, .kv_heads = 1, .key_dim = features, .value_dim = 1};
        const floats ones(at(2 * features), 1.0f), value{infinity}, none{0.0f};
        const floats infinite{infinity, infinity};
        kv_cache<systems::simple_gla> fading({}, dims);
        kv_cache<linear<identity, no_decay, additive, unscaled>> lasting({}, dims);
        floats out(2);
        const input query(ones, 1, 2, features), key(ones, 1, 1, features), v(value, 1, 1, 1);
        attend({.query = query, .key = key, .value = v, .decay = {none, 1, 1, 1}}, fading, {out, 1, 2, 1});
        CHECK(out == infinite);
        for (int i = 0; i < 2; ++i) {
            attend(query, key, v, lasting, {out, 1, 2, 1});
            CHECK(out == infinite);
        }
    }
}

// What rounding the states to bfloat16 after every token may do to each row at most. Updates of all forms here are
// contractions of a state's columns, by no more than the largest alpha: e_t = alpha e_(t-1) + 2^-9 |S_t| bounds the
// Frobenius norm of a state's error, and e_t |phi(q)| that of a row.
template <class P>
doubles rounding_bounds(const text& x, const form<P>& f) {
    kv_cache<P> exact(f.make(x), x.dims);
    const int64 states = exact.state().matrix.tokens;
    doubles error(at(states)), bounds;
    floats row(x.row()), lse(at(x.dims.heads));
    const oracle of{x, f.say};
    for (int64 t = 0; t < x.tokens; ++t) {
        options how;
        if (P::has_normaliser) how.lse = lse;
        attend(x.slice<P>(t, 1), exact, {row.data(), 1, x.dims.heads, x.dims.value_dim}, how);
        const input S = exact.state().matrix;
        const doubles before = error;
        for (int64 s = 0; s < states; ++s) {
            double square = 0, alpha = 0;
            for (int64 c = 0; c < S.heads; ++c) {
                for (int64 j = 0; j < S.dim; ++j) square += std::pow(double(detail::number_at(S, s, c, j)), 2);
                alpha = std::max(alpha, of.alpha(t, s / (states / x.dims.gate_heads), c));
            }
            error[at(s)] = alpha * error[at(s)] + std::sqrt(square) / 512;
        }
        for (int64 h = 0; h < x.dims.heads; ++h) {
            double square = 0;
            for (const double e :
                 f.say.phi(of.row_of(x.q, t, x.dims.query_heads, h / (x.dims.heads / x.dims.query_heads), x.features)))
                square += e * e;
            const double mass = P::has_normaliser ? std::exp(double(lse[at(h)])) : 1;
            const doubles& read = f.say.update == words::bonus ? before : error;
            bounds.push_back(std::sqrt(square) * read[at(h / (x.dims.heads / states))] / mass);
        }
    }
    return bounds;
}

TEST_CASE("R13: tokens that wait beside the states are in every copy, file and look at them") {
    const unsigned seed = GENERATE(521u, 522u);
    std::mt19937 random(seed);
    for_each_form([&]<class P>(const form<P>& f) {
        if constexpr (detail::can_wait<P>) {
            const text x(random, grouped_values, 60);
            const doubles expected = oracle{x, f.say}.rows();
            const P policy = f.make(x);
            for (int64 n = 1; n <= 17; ++n) {
                CAPTURE(seed, f.name, n);
                kv_cache<P> cache(policy, x.dims), from_file = cache.empty_copy(), looked_at = cache.empty_copy();
                kv_cache<P> with_slack(policy, x.dims, {}, {.rollback_slack = 5});
                floats out = unwritten(x);
                feed(cache, x, 0, positions(at(n), 1), out);
                floats again(x.row()), again_out = out;
                read(x.view(x.q, x.dims.query_heads, x.features, n - 1, 1), cache,
                     {again.data(), 1, x.dims.heads, x.dims.value_dim});
                const auto last = expected.begin() + std::ptrdiff_t(at(n - 1) * x.row());
                CHECK(far_apart(again, doubles(last, last + std::ptrdiff_t(x.row())), 1e-5) == "");

                const std::vector<std::byte> file = cache.save();
                kv_cache<P> fork = cache, seen = cache;
                from_file.load(file);
                CHECK(from_file.save() == file);
                kv_cache<P> in_parts = cache.empty_copy();
                feed(in_parts, x, 0, positions(at(n - 1), 1), again_out);
                in_parts.load(in_parts.save());
                feed(in_parts, x, n - 1, 1, again_out);
                CHECK(in_parts.save() == file);  // nothing of earlier tokens is left in it
                with_slack.load(file);
                looked_at.state(seen.state());
                CHECK(seen.length() == n);
                floats forked = out, filed = out, slack = out, looked = out, whole = out;
                feed(cache, x, n, positions(20, 1), out);
                feed(fork, x, n, positions(20, 1), forked);
                feed(from_file, x, n, {3, 17}, filed);
                feed(with_slack, x, n, {3, 17}, slack);
                feed(looked_at, x, n, {3, 17}, looked);
                CHECK(same_bits(out, forked));
                CHECK(same_bits(out, filed));
                feed(seen, x, n, 60 - n, whole);
                const auto first = [&](const floats& rows) {
                    return floats(rows.begin(), rows.begin() + std::ptrdiff_t(at(n + 20) * x.row()));
                };
                const doubles there(expected.begin(), expected.begin() + std::ptrdiff_t(at(n + 20) * x.row()));
                for (const floats* rows : {&out, &slack, &looked}) CHECK(far_apart(first(*rows), there, 1e-5) == "");
                CHECK(far_apart(whole, expected, 1e-5) == "");
            }
        }
    });
}

TEST_CASE("R24: states kept in bfloat16 are off by no more than their roundings, in every form that forgets") {
    const unsigned seed = GENERATE(531u, 532u);
    std::mt19937 random(seed);
    for (const shape& dims : {grouped, grouped_values, long_columns})
        for_each_form([&]<class P>(const form<P>& f) {
            if constexpr (!std::is_same_v<decltype(P::decay), no_decay>) {
                const text x(random, dims, 57 + random() % 80);
                CAPTURE(seed, f.name, x.tokens, dims.heads);
                const doubles expected = oracle{x, f.say}.rows(), bounds = rounding_bounds(x, f);
                kv_cache<P> decoded(f.make(x), x.dims, {}, {.state = scalar::bf16}), whole = decoded.empty_copy();
                CHECK(decoded.state().matrix.type == scalar::bf16);
                floats out = unwritten(x), rows = unwritten(x);
                feed(decoded, x, 0, positions(at(x.tokens), 1), out);
                feed(whole, x, 0, x.tokens, rows);
                double largest = 0, worst = 0, most = 0;  // of all rows; an error; an error in its bound
                for (const double e : expected) largest = std::max(largest, std::abs(e));
                for (std::size_t i = 0; i < expected.size(); ++i)
                    for (const float got : {out[i], rows[i]}) {
                        const double off = std::abs(double(got) - expected[i]);
                        worst = std::max(worst, off / largest);
                        most = std::max(most, off / (1.01 * bounds[i / at(x.dims.value_dim)] + 1e-5 * largest));
                    }
                CHECK(most <= 1);
                CHECK(worst > 1e-5);  // they were rounded
            }
        });
}

TEST_CASE("R22: the reference: quadratic form = recurrence = the equations") {
    std::mt19937 random(503);
    for (const shape& dims : {grouped, grouped_values})
        for (const gates strength : {gates::mild, gates::strong})
            for_each_form([&]<class P>(const form<P>& f) {
                const text x(random, dims, 13, strength);
                CAPTURE(f.name);
                const P policy = f.make(x);
                const doubles expected = oracle{x, f.say}.rows();
                const auto in = x.slice<P>(0, x.tokens);
                CHECK(far_apart(reference::attend(policy, dims, in).out, expected, 1e-12) == "");
                CHECK(far_apart(reference::recur(policy, dims, in).out, expected, 1e-12) == "");
            });
}

TEST_CASE("R22: an append without rows writes the same state; a read finds it, without a bonus") {
    const positions cut = GENERATE(positions{34, 1, 10}, positions{30, 1, 14});
    std::mt19937 random(504);
    for_each_form([&]<class P>(const form<P>& f) {
        const text x(random, grouped, 45);
        CAPTURE(f.name);
        const P policy = f.make(x);
        kv_cache<P> attended(policy, x.dims), appended(policy, x.dims), in_parts(policy, x.dims);
        floats out = unwritten(x);
        feed(attended, x, 0, cut, out);
        int64 first = 0;
        for (const int64 n : cut) append(x.slice<P>(first, n), appended), first += n;
        CHECK((attended.save() == appended.save()));
        first = 0;
        for (const int64 n : random_cut(random, x.tokens)) append(x.slice<P>(first, n), in_parts), first += n;
        if (cut[0] < long_call) CHECK((attended.save() == in_parts.save()));
        floats row(x.row());
        read(x.view(x.q, x.dims.query_heads, x.features, x.tokens - 1, 1), appended,
             {row.data(), 1, x.dims.heads, x.dims.value_dim});
        const floats last(out.end() - static_cast<std::ptrdiff_t>(x.row()), out.end());
        CHECK((row == last) == (f.say.update != words::bonus));
    });
}

// A long call as its states hold it: what can no longer be taken back, in chunks, and the rest one by one.
TEST_CASE("R12 R25: tokens of a long call are taken back to the bit, in any form") {
    std::mt19937 random(517);
    const int64 slack = GENERATE(1, 7, 20);
    for_each_form([&]<class P>(const form<P>& f) {
        const text x(random, grouped, 100);
        CAPTURE(f.name, slack);
        const P policy = f.make(x);
        const doubles expected = oracle{x, f.say}.rows();
        const int64 in_chunks = (90 - slack) / 8 * 8;
        for (const int64 back : {int64{1}, slack}) {
            kv_cache<P> taken(policy, x.dims, {}, {.rollback_slack = slack}), never = taken.empty_copy();
            kv_cache<P> chunks(policy, x.dims);
            floats out = unwritten(x), other = unwritten(x);
            feed(taken, x, 0, 90, out);
            CHECK_FALSE(taken.can_rollback(slack + 1));
            taken.rollback(back);
            feed(taken, x, 90 - back, positions(at(10 + back), 1), out);
            CHECK(far_apart(out, expected, 1e-5) == "");
            feed(chunks, x, 0, in_chunks, other);
            never.state(chunks.state());
            feed(never, x, in_chunks, positions(at(100 - in_chunks), 1), other);
            CHECK(same_bits(out, other));
        }
    });
}

TEST_CASE("R14 R25: a long call leaves a cache that can be forked, saved and loaded, and taken back") {
    std::mt19937 random(518);
    for_each_form([&]<class P>(const form<P>& f) {
        const text x(random, grouped_values, 80);
        CAPTURE(f.name);
        kv_cache<P> cache(f.make(x), x.dims, {}, {.rollback_slack = 5});
        floats a = unwritten(x), b = unwritten(x), c = unwritten(x);
        feed(cache, x, 0, {10, 60}, a);
        kv_cache<P> fork = cache, loaded = cache.empty_copy();
        loaded.load(cache.save());
        for (kv_cache<P>* each : {&cache, &fork, &loaded}) each->rollback(5);
        feed(cache, x, 65, 15, a);
        feed(fork, x, 65, 15, b);
        feed(loaded, x, 65, 15, c);
        const std::size_t from = 65 * x.row();
        CHECK(same_bits(a, b, from));
        CHECK(same_bits(a, c, from));
    });
}

// ----------------------------------------------------------------------------------------------------------------- R23

TEST_CASE("R23: what follows changes no bit of what came before, in any form") {
    const int64 tokens = GENERATE(30, 90);  // one by one, and in chunks
    std::mt19937 random(505);
    for_each_form([&]<class P>(const form<P>& f) {
        const text x(random, grouped, tokens);
        text other(random, grouped, tokens);
        const auto keep = [&](floats& to, const floats& from) {
            const std::size_t past = from.size() * 17 / 30;
            std::copy_n(from.begin(), past, to.begin());
        };
        keep(other.q, x.q), keep(other.k, x.k), keep(other.v, x.v), keep(other.beta, x.beta);
        keep(other.g, x.g), keep(other.channel_g, x.channel_g), keep(other.a, x.a), keep(other.d, x.d);
        other.u = x.u, other.constant = x.constant;
        kv_cache<P> left(f.make(x), x.dims), right(f.make(other), x.dims);
        floats a = unwritten(x), b = unwritten(x);
        feed(left, x, 0, tokens, a);
        feed(right, other, 0, tokens, b);
        CAPTURE(f.name, tokens);
        CHECK(std::memcmp(a.data(), b.data(), at(tokens) * 17 / 30 * x.row() * sizeof(float)) == 0);
        CHECK_FALSE(same_bits(a, b));
    });
}

TEST_CASE("R23: a token of zeros with a gate of 0 changes no state") {
    std::mt19937 random(506);
    for_each_form([&]<class P>(const form<P>& f) {
        if (f.say.decay == words::constant || f.say.divides) return;  // these have no token that does nothing
        text x(random, grouped, 12);
        for (floats* each : {&x.k, &x.v, &x.g, &x.channel_g, &x.beta, &x.a, &x.d})
            std::fill(each->begin() + static_cast<std::ptrdiff_t>(each->size() / 2), each->end(), 0.0f);
        kv_cache<P> padded(f.make(x), x.dims), plain(f.make(x), x.dims);
        append(x.slice<P>(0, 12), padded);
        append(x.slice<P>(0, 6), plain);
        floats a(x.row()), b(x.row());
        for (const auto& [cache, row] : {std::pair{&padded, &a}, std::pair{&plain, &b}})
            read(x.view(x.q, x.dims.query_heads, x.features, 0, 1), *cache,
                 {row->data(), 1, x.dims.heads, x.dims.value_dim});
        CAPTURE(f.name);
        CHECK(far_apart(a, doubles(b.begin(), b.end()), 1e-6) == "");
        const input kept = padded.state().matrix, expected = plain.state().matrix;
        for (int64 s = 0; s < kept.tokens; ++s)
            for (int64 r = 0; r < kept.heads; ++r)
                CHECK(std::memcmp(kept.at(s, r), expected.at(s, r), at(kept.dim) * sizeof(float)) == 0);
    });
}

TEST_CASE("R23: within a call a NaN reaches its own token and later ones, and its own state, only") {
    const int64 tokens = GENERATE(31, 75);  // one by one, and in chunks
    std::mt19937 random(516);
    for_each_form([&]<class P>(const form<P>& f) {
        const text x(random, grouped, tokens);
        text bad = x;
        bad.v[at((21 * x.dims.value_heads + 1) * x.dims.value_dim + 5)] = std::numeric_limits<float>::quiet_NaN();
        kv_cache<P> left(f.make(x), x.dims), right(f.make(x), x.dims);
        floats a = unwritten(x), b = unwritten(x);
        feed(left, x, 0, tokens, a);
        feed(right, bad, 0, tokens, b);
        CAPTURE(f.name, tokens);
        bool as_said = true;
        for (std::size_t i = 0; i < a.size(); ++i) {
            const std::size_t column = i % 37, head = i / 37 % 6, token = i / x.row();
            const bool is_hit = token >= 21 && head / 2 == 1 && column == 5;
            as_said = as_said && (is_hit ? std::isnan(b[i]) : std::memcmp(&a[i], &b[i], sizeof(float)) == 0);
        }
        CHECK(as_said);
    });
}

// ----------------------------------------------------------------------------------------------------------------- R24

TEST_CASE("R24: gates of 0 to -60 a step, and of exactly 0 throughout") {
    const gates strength = GENERATE(gates::strong, gates::zero);
    std::mt19937 random(507);
    for_each_form([&]<class P>(const form<P>& f) {
        const text x(random, grouped, 77, strength);
        CAPTURE(f.name, int(strength));
        const P policy = f.make(x);
        const doubles expected = oracle{x, f.say}.rows();
        for (const positions& cut : {positions{77}, random_cut(random, x.tokens)}) {
            kv_cache<P> cache(policy, x.dims);
            floats out = unwritten(x);
            feed(cache, x, 0, cut, out);
            CHECK(far_apart(out, expected, 5e-5) == "");
        }
    });
}

TEST_CASE("R24: a decay of almost nothing neither drifts nor is lost: 8192 tokens, one by one and in one call") {
    std::mt19937 random(519);
    const shape dims{.heads = 3, .kv_heads = 3, .head_dim = 8};
    const constant_per_head last_layer = lightning_decays(3, 79, 80);  // 1 - 1.6e-6 and less
    for_each_form([&]<class P>(const form<P>& f) {
        if (f.say.decay == words::none || f.say.update == words::low_rank) return;
        text x(random, dims, 8192);
        for (float& v : x.v) v += 1;
        for (float& k : x.k) k = std::abs(k);
        x.constant.assign(last_layer.logs, last_layer.logs + 3);
        for (std::size_t i = 0; i < x.g.size(); ++i) x.g[i] = x.constant[i % 3];
        for (std::size_t i = 0; i < x.channel_g.size(); ++i) x.channel_g[i] = 2e-6f * x.channel_g[i];
        CAPTURE(f.name);
        const doubles expected = oracle{x, f.say}.rows();
        for (const positions& cut : {positions(8192, 1), positions{8192}}) {
            kv_cache<P> cache(f.make(x), x.dims);
            floats out = unwritten(x);
            feed(cache, x, 0, cut, out);
            CHECK(far_apart(out, expected, 1e-5) == "");
        }
    });
}

TEST_CASE("R24: a gate of minus infinity forgets everything, one feature or all") {
    std::mt19937 random(508);
    const float endless = std::numeric_limits<float>::infinity();
    for_each_form([&]<class P>(const form<P>& f) {
        if (f.say.decay != words::head && f.say.decay != words::channel) return;
        text x(random, grouped, 33);
        for (int64 h = 0; h < x.dims.gate_heads; ++h) {
            x.g[at(5 * x.dims.gate_heads + h)] = -endless;
            x.channel_g[at((5 * x.dims.gate_heads + h) * x.features + 3)] = -endless;
        }
        kv_cache<P> cache(f.make(x), x.dims);
        floats out = unwritten(x);
        feed(cache, x, 0, 33, out);
        CAPTURE(f.name);
        CHECK(far_apart(out, oracle{x, f.say}.rows(), 1e-5) == "");
    });
}

TEST_CASE("R24: the delta rule stays bounded over thousands of tokens, and recalls the last value of a key") {
    std::mt19937 random(509);
    const text x(random, {.heads = 2, .head_dim = 16}, 3000, gates::zero);
    using P = linear<l2_normalised<>, per_head_and_token, delta, unscaled>;
    kv_cache<P> cache({}, x.dims);
    floats out = unwritten(x);
    feed(cache, x, 0, x.tokens, out);
    for (const float e : out) REQUIRE(std::abs(e) < 1e3f);
    text last = x;
    last.q = x.k;
    std::fill(last.beta.begin(), last.beta.end(), 1.0f);
    floats recalled = unwritten(x);
    feed(cache, last, 0, 20, recalled);
    for (std::size_t i = 0; i < 20 * x.row(); ++i) CHECK(std::abs(recalled[i] - last.v[i]) < 2e-3f);
}

TEST_CASE("R24: the sum is kept from zero as it is told: epsilon is added, the least comes last") {
    std::mt19937 random(510);
    const text x(random, {.heads = 1, .head_dim = 3}, 5);
    const doubles mean = oracle{x, {.phi = elu_features, .divides = true}}.rows();
    kv_cache<linear<>> plain({}, x.dims);
    floats out = unwritten(x), lse(5);
    attend(x.slice<linear<>>(0, 5), plain, x.rows(out, 0, 5), {.lse = lse});
    for (const sum normaliser : {sum{.epsilon = .5f}, sum{.least = 1000}, sum{.epsilon = 3, .least = 20}}) {
        const linear<> policy{.normaliser = normaliser};
        kv_cache<linear<>> cache(policy, x.dims);
        floats kept = unwritten(x), kept_lse(5);
        attend(x.slice<linear<>>(0, 5), cache, x.rows(kept, 0, 5), {.lse = kept_lse});
        doubles expected = mean;
        for (std::size_t i = 0; i < expected.size(); ++i) {
            const double mass = std::exp(double{lse[i / 3]});
            expected[i] *= mass / std::max(mass + double{normaliser.epsilon}, double{normaliser.least});
        }
        CHECK(far_apart(kept, expected, 1e-5) == "");
        CHECK(far_apart(kept, reference::attend(policy, x.dims, x.slice<linear<>>(0, 5)).out, 1e-5) == "");
        CHECK(std::abs(kept_lse[0] - std::log(std::max(std::exp(lse[0]) + normaliser.epsilon, normaliser.least))) <
              1e-5f);
    }
}

// ------------------------------------------------------------------------------------------------------- R12, R13, R14

TEST_CASE("R25: a rollback is, to the bit, never having seen the tokens: every form, every number of tokens") {
    std::mt19937 random(511);
    for_each_form([&]<class P>(const form<P>& f) {
        const text x(random, grouped, 60);
        const P policy = f.make(x);
        for (const int64 slack : {1, 5, 20}) {
            kv_cache<P> cache(policy, x.dims, {}, {.rollback_slack = slack});
            floats whole = unwritten(x), again = unwritten(x);
            feed(cache, x, 0, random_cut(random, 60), whole);
            for (int64 n = 0; n <= slack; ++n) {
                CAPTURE(f.name, slack, n);
                kv_cache<P> back = cache;
                REQUIRE(back.can_rollback(n));
                back.rollback(n);
                CHECK(back.length() == 60 - n);
                feed(back, x, 60 - n, n, again);
                CHECK(std::memcmp(again.data() + at(60 - n) * x.row(), whole.data() + at(60 - n) * x.row(),
                                  at(n) * x.row() * sizeof(float)) == 0);
                floats now(x.row()), before(x.row());
                for (const auto& [of, row] : {std::pair{&back, &now}, std::pair{&cache, &before}})
                    read(x.view(x.q, x.dims.query_heads, x.features, 7, 1), *of,
                         {row->data(), 1, x.dims.heads, x.dims.value_dim});
                CHECK(now == before);
            }
            CHECK_FALSE(cache.can_rollback(slack + 1));
        }
    });
}

TEST_CASE("R13: forks and files carry every form on to the bit") {
    std::mt19937 random(512);
    for_each_form([&]<class P>(const form<P>& f) {
        const text x(random, grouped_values, 31);
        const P policy = f.make(x);
        kv_cache<P> cache(policy, x.dims, {}, {.rollback_slack = 3});
        floats out = unwritten(x), other = unwritten(x);
        feed(cache, x, 0, 20, out);
        kv_cache<P> fork = cache, loaded(policy, x.dims, {}, {.rollback_slack = 3});
        CHECK(loaded.load(cache.save()) == cache.saved_bytes());
        feed(cache, x, 20, 11, out);
        CAPTURE(f.name);
        for (kv_cache<P>* each : {&fork, &loaded}) {
            each->rollback(2);
            feed(*each, x, 18, 13, other);
            CHECK(std::memcmp(other.data() + 20 * x.row(), out.data() + 20 * x.row(), 11 * x.row() * sizeof(float)) ==
                  0);
        }
    });
}

TEST_CASE("R14: a file of another decay, bonus, scale or normaliser is refused") {
    std::mt19937 random(513);
    const text x(random, {.heads = 2, .head_dim = 4}, 3);
    const auto refused = [&]<class P>(const P& saved, const P& opened) {
        kv_cache<P> from(saved, x.dims), to(opened, x.dims);
        append(x.slice<P>(0, 3), from);
        try {
            to.load(from.save());
        } catch (const error&) { return true; }
        return false;
    };
    using retained = linear<identity, constant_per_head, additive, no_normaliser>;
    CHECK(refused(retained{.decay = retnet_decays(2)}, retained{.decay = alibi_decays(2)}));
    CHECK_FALSE(refused(retained{.decay = retnet_decays(2)}, retained{.decay = retnet_decays(2)}));
    using bonus = linear<identity, no_decay, exclusive_bonus, unscaled>;
    const floats zeros(8);
    CHECK(refused(bonus{.update = {x.u}}, bonus{.update = {zeros}}));
    CHECK(refused(linear<>{.normaliser = {.epsilon = 1e-6f}}, linear<>{}));
    CHECK(refused(linear<cosformer>{{.most_positions = 10}}, linear<cosformer>{{.most_positions = 11}}));
}

TEST_CASE("R34: the same bits by any runner, and in a batch beside others") {
    std::mt19937 random(514);
    for_each_form([&]<class P>(const form<P>& f) {
        const text x(random, gates_of_queries, 21), neighbour(random, gates_of_queries, 34);
        text settings = x;
        settings.constant = neighbour.constant;
        kv_cache<P> serially(f.make(x), x.dims), together(f.make(x), x.dims), beside(f.make(neighbour), x.dims);
        floats expected = unwritten(x), out = unwritten(x), ignored = unwritten(neighbour);
        feed(serially, x, 0, positions{21}, expected, serial{});
        request<kv_cache<P>> requests[] = {{neighbour.slice<P>(0, 34), &beside, neighbour.rows(ignored, 0, 34), {}},
                                           {x.slice<P>(0, 21), &together, x.rows(out, 0, 21), {}}};
        attend(requests, {.run = openmp{3}});
        CAPTURE(f.name);
        CHECK(same_bits(out, expected));
    });
}

// ----------------------------------------------------------------------------------------------------------------- R04

TEST_CASE("R04: gates out of range and of the wrong shape are refused by name, and nothing changes") {
    std::mt19937 random(515);
    text x(random, grouped, 4);
    floats out = unwritten(x);
    const auto complaint = [&]<class P>(kv_cache<P>& cache, const tokens_of<P>& in) -> std::string {
        const std::vector<std::byte> before = cache.save();
        try {
            attend(in, cache, x.rows(out, 0, in.key.tokens));
        } catch (const error& e) {
            CHECK((cache.save() == before));
            CHECK(std::isnan(out[0]));
            return e.what();
        }
        return "";
    };
    const auto holds = [](const std::string& all, const char* part) { return all.find(part) != std::string::npos; };
    using channels = linear<identity, per_channel_and_token, additive, no_normaliser>;
    kv_cache<channels> gated({}, x.dims);
    for (const float wrong : {1e-6f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        text bad = x;
        bad.channel_g[at((2 * 3 + 1) * 20 + 7)] = wrong;
        CHECK(holds(complaint(gated, bad.slice<channels>(0, 4)), "decay of token 2, gate head 1, feature 7"));
    }
    tokens_of<channels> narrow = x.slice<channels>(0, 4);
    narrow.decay = x.view(x.g, 3, 1, 0, 4);
    CHECK(holds(complaint(gated, narrow), "decay has dim 1, must have 20"));

    using corrected = linear<normalised_by_caller, no_decay, delta, no_normaliser>;
    kv_cache<corrected> cache({}, x.dims);
    for (const float wrong : {-.1f, 2.1f, std::numeric_limits<float>::quiet_NaN()}) {
        text bad = x;
        bad.beta[at(1 * 3 + 2)] = wrong;
        CHECK(holds(complaint(cache, bad.slice<corrected>(0, 4)), "beta of token 1, gate head 2"));
    }
    using low_rank = linear<identity, no_decay, diagonal_plus_low_rank, unscaled>;
    kv_cache<low_rank> removing({}, x.dims);
    tokens_of<low_rank> in = x.slice<low_rank>(0, 4);
    in.replacement = in.replacement.tokens_from(0, 3);
    CHECK(holds(complaint(removing, in), "replacement has 3 tokens, must have 4"));
}

TEST_CASE("R04: decays, bonuses and positions that do not fit the shape are refused") {
    const auto complaint = [](auto&& f) -> std::string {
        try {
            f();
        } catch (const error& e) { return e.what(); }
        return "";
    };
    const auto holds = [](const std::string& all, const char* part) { return all.find(part) != std::string::npos; };
    const shape dims{.heads = 4, .kv_heads = 2, .head_dim = 3};
    using retained = linear<identity, constant_per_head, additive, no_normaliser>;
    CHECK(holds(complaint([&] { kv_cache<retained>({.decay = retnet_decays(4)}, dims); }),
                "decays are for 4 heads, must be for gate_heads, which is 2"));
    CHECK(holds(complaint([&] {
                    kv_cache<retained>({.decay = std::span<const float>(floats{-1, .5f})}, dims);
                }),
                "decay of gate head 1 is 0.5"));
    CHECK(holds(complaint([&] { retnet_decays(257); }), "decays for 257 heads"));
    CHECK(holds(complaint([&] { lightning_decays(4, 8, 8); }), "layer is 8, must be 0 to 7"));
    using bonus = linear<identity, no_decay, exclusive_bonus, unscaled>;
    CHECK(holds(complaint([&] { kv_cache<bonus>({}, dims); }), "bonus holds 0 numbers"));
    const floats three(9);
    CHECK(holds(complaint([&] { kv_cache<bonus>({.update = {three}}, dims); }), "bonus is for 3 heads"));
    CHECK(holds(complaint([&] { kv_cache<linear<>>({.normaliser = {.epsilon = -1}}, dims); }), "epsilon is -1"));
    kv_cache<linear<cosformer>> bounded({{.most_positions = 5}}, dims);
    const floats x(4 * 3 * 6, 1.0f);
    append({x.data(), 4, 2, 3}, {x.data(), 4, 2, 3}, bounded);
    CHECK(holds(complaint([&] { append({x.data(), 2, 2, 3}, {x.data(), 2, 2, 3}, bounded); }), "5 positions"));
    append({x.data(), 1, 2, 3}, {x.data(), 1, 2, 3}, bounded);
    CHECK(bounded.length() == 5);
}

// -------------------------------------------------------------------------------------------------------------- tables

TEST_CASE("decay: the tables of RetNet, ALiBi and lightning attention") {
    const constant_per_head retnet = retnet_decays(8), alibi = alibi_decays(32),
                            lightning = lightning_decays(64, 3, 80);
    for (int64 h = 0; h < 8; ++h)
        CHECK(std::abs(std::exp(double{retnet.of_head(h)}) - (1 - std::pow(2.0, -5.0 - double(h)))) < 1e-7);
    CHECK(std::abs(std::exp(alibi.of_head(0)) - .43f) < .005f);
    CHECK(std::abs(std::exp(alibi.of_head(31)) - .9961f) < 1e-4f);
    CHECK(std::abs(lightning.of_head(10) + std::pow(2.0, -8 * 11 / 64.0) * (1 - 3 / 79.00001 + 1e-5)) < 1e-7);
    CHECK(lightning_decays(6, 0, 1).heads == 6);
    // Six heads: the slopes of four, then the first and the third of eight.
    const constant_per_head six = alibi_decays(6);
    const double expected[] = {.25, .0625, .015625, .00390625, .5, .125};
    for (int64 h = 0; h < 6; ++h) CHECK(six.of_head(h) == -static_cast<float>(expected[h]));
}
