// Rules 15 to 21, 29 and 30: positions and angles, empty rows, infinities and NaN, sums, and what is stored.
#include "support/catch.hpp"
#include "support/probes.hpp"

#include <bit>

using namespace probes;
using sash::bfloat16;
using sash::float16;
using sash::full;
using sash::kv_cache;
using sash::rotary_layout;
using sash::rotates;
using sash::sliding_window;

namespace {

constexpr float endless = std::numeric_limits<float>::infinity();

const auto as_it_is = [](double s, int64, int64, int64) { return s; };
const auto no_sink = [](int64) { return -infinity; };

// Where a query stands when it reads a key.
int64 standing(const sliding_window& p, int64 i, int64 j) {
    return p.frame == sash::frame::compact && j < p.sinks ? std::min(i, p.sinks + p.window - 1) : i;
}

// Row `from` of `dim` numbers, the first 2 n of them turned as pairs.
std::vector<double> turned(const float* from, int64 dim, const std::vector<double>& frequencies, rotary_layout layout,
                           int64 position) {
    std::vector<double> x(from, from + dim);
    const auto pairs = static_cast<int64>(frequencies.size());
    for (int64 p = 0; p < pairs; ++p) {
        double& a = x[index(layout == rotary_layout::half_split ? p : 2 * p)];
        double& b = x[index(layout == rotary_layout::half_split ? p + pairs : 2 * p + 1)];
        const double angle = double(position) * frequencies[index(p)], c = std::cos(angle), s = std::sin(angle),
                     was = a;
        a = was * c - b * s;
        b = was * s + b * c;
    }
    return x;
}

// Attention over raw queries and keys that are turned where they stand.
exact_rows rotary_rows(const history& h, const sliding_window& policy, const std::vector<double>& frequencies,
                       rotary_layout layout, double scale) {
    const sash::shape& s = h.shape;
    const auto score = [&](double, int64 head, int64 i, int64 j) {
        const int64 kv = head / (s.heads / s.kv_heads);
        const auto q = turned(h.query.data() + (i * s.heads + head) * s.key_dim, s.key_dim, frequencies, layout,
                              standing(policy, i, j));
        const auto k = turned(h.key.data() + (j * s.kv_heads + kv) * s.key_dim, s.key_dim, frequencies, layout, j);
        double dot = 0;
        for (int64 c = 0; c < s.key_dim; ++c) dot += q[index(c)] * k[index(c)];
        return scale * dot;
    };
    return softmax_rows<float>(h, window_rule{policy.window, policy.sinks}, score, no_sink, 1);
}

// The history of a caller who turns by himself.
history turned_by_caller(history h, const std::vector<double>& frequencies, rotary_layout layout) {
    const sash::shape& s = h.shape;
    const auto turn = [&](floats& rows, int64 heads) {
        for (int64 r = 0; r < h.tokens * heads; ++r) {
            const auto x = turned(rows.data() + r * s.key_dim, s.key_dim, frequencies, layout, r / heads);
            for (int64 c = 0; c < s.key_dim; ++c) rows[index(r * s.key_dim + c)] = static_cast<float>(x[index(c)]);
        }
    };
    turn(h.query, s.heads);
    turn(h.key, s.kv_heads);
    return h;
}

floats row(const rows& r, const history& h, int64 token) {
    return floats(r.out.begin() + token * h.row_floats(), r.out.begin() + (token + 1) * h.row_floats());
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------------- R15

TEST_CASE("R15: A07 the position goes on counting when tokens have left") {
    const history h = contents(13, {.head_dim = 2});
    for (const positions& cut : {positions{12}, positions(12, 1), positions{5, 7}})
        for (const sash::frame frame : {sash::frame::original, sash::frame::compact}) {
            const double frequencies[] = {.5};
            kv_cache cache(sliding_window{.window = 4, .sinks = 2, .frame = frame}, h.shape,
                           {.rotary = {.frequencies = frequencies}});
            fed(cache, h, cut);
            CHECK(held(cache) == positions{0, 1, 8, 9, 10, 11});
            CHECK(cache.stored() == 6);
            CHECK(cache.length() == 12);
        }
}

TEST_CASE("R15: A07 query and keys stand in one declared frame") {
    const std::vector<double> frequencies{.5};
    history h(1012, {.key_dim = 2, .value_dim = 6});
    for (int64 j = 0; j < h.tokens; ++j) {
        h.query[index(2 * j)] = h.key[index(2 * j)] = 1;
        h.value_row(j)[j < 2 ? j : 2 + j % 4] =
            1;  // columns: the two sinks, then the window in its order (of rows 11, 1011)
    }
    const floats original{.180199f, .117808f, .095214f, .152276f, .213359f, .241144f};
    const floats compact{.049749f, .073112f, .118970f, .190269f, .266592f, .301309f};
    const history by_caller = turned_by_caller(h, frequencies, rotary_layout::half_split);
    for (const rotates by : {rotates::library, rotates::caller})
        for (const sash::frame frame : {sash::frame::original, sash::frame::compact}) {
            const sliding_window policy{.window = 4, .sinks = 2, .frame = frame};
            const sash::score score{.scale = 1, .rotary = {.frequencies = frequencies, .by = by}};
            const history& given = by == rotates::library ? h : by_caller;
            for (const way& w : every_way(h.tokens)) {
                CAPTURE(static_cast<int>(by), static_cast<int>(frame), w.name);
                const rows r = rows_by<float>(w, policy, given, score);
                CHECK(difference(row(r, h, 11), frame == sash::frame::compact ? compact : original, 2) == "");
                if (frame == sash::frame::compact)  // and so for ever
                    CHECK(difference(row(r, h, 1011), row(r, h, 11), by == rotates::library ? 1 : 10) == "");
            }
        }
}

TEST_CASE("R15: both frames, both layouts, whole and partial turns, by library and caller, against the formula") {
    const history h = contents(100, {.heads = 4, .kv_heads = 2, .key_dim = 10, .value_dim = 3});
    for (const std::vector<double>& frequencies :
         {std::vector<double>{1, .4, .1, .02, .003}, std::vector<double>{.7, .05}})
        for (const rotary_layout layout : {rotary_layout::half_split, rotary_layout::interleaved})
            for (const sliding_window& policy :
                 {sliding_window{.window = 7, .sinks = 3},
                  sliding_window{.window = 7, .sinks = 3, .frame = sash::frame::compact},
                  sliding_window{.window = 1, .sinks = 70, .frame = sash::frame::compact},
                  sliding_window{.window = 64, .sinks = 1, .frame = sash::frame::compact},
                  sliding_window{.window = 30, .frame = sash::frame::compact}}) {
                const exact_rows expected = rotary_rows(h, policy, frequencies, layout, 1 / std::sqrt(10.0));
                const history by_caller = turned_by_caller(h, frequencies, layout);
                for (const positions& cut : cuts_of(100))
                    for (const form f : {form::attend, form::without_cache})
                        for (const rotates by : {rotates::library, rotates::caller}) {
                            CAPTURE(frequencies.size(), static_cast<int>(layout), policy.window, policy.sinks,
                                    cut.size(), static_cast<int>(f), static_cast<int>(by));
                            const sash::score score{.rotary = {.frequencies = frequencies, .layout = layout, .by = by}};
                            CHECK(difference(rows_by<float>({"", f, cut, sash::serial{}}, policy,
                                                            by == rotates::library ? h : by_caller, score),
                                             expected, 3) == "");
                        }
            }
}

TEST_CASE("R15: slopes count distance in the same frame") {
    const history h = contents(90, {.heads = 2, .kv_heads = 1, .head_dim = 3});
    const float slopes[] = {.3f, .05f};
    for (const sash::frame frame : {sash::frame::original, sash::frame::compact}) {
        const sliding_window policy{.window = 6, .sinks = 3, .frame = frame};
        const auto stage = [&](double s, int64 head, int64 i, int64 j) {
            return s - double{slopes[head]} * double(standing(policy, i, j) - j);
        };
        const exact_rows expected = softmax_rows<float>(h, window_rule{6, 3}, stage, no_sink, 1 / std::sqrt(3.0));
        for (const way& w : every_way(90)) {
            CAPTURE(static_cast<int>(frame), w.name);
            CHECK(difference(rows_by<float>(w, policy, h, {.alibi = slopes}), expected, 2) == "");
        }
    }
}

// ----------------------------------------------------------------------------------------------------------------- R16

TEST_CASE("R16: angles are right after a million tokens") {
    const int64 million = 1'000'003;
    const std::vector<double> frequencies{.7};
    const floats x{1, 0}, value{1, 0, 0, 0, 0};
    floats one_hot(4 * 5);
    for (int64 j = 0; j < 4; ++j) one_hot[index(j * 5 + 1 + j)] = 1;
    for (const sash::frame frame : {sash::frame::original, sash::frame::compact}) {
        const sliding_window policy{.window = 4, .sinks = 1, .frame = frame};
        kv_cache cache(policy, {.key_dim = 2, .value_dim = 5},
                       {.scale = 3, .rotary = {.frequencies = frequencies, .by = rotates::library}});
        sash::append({x.data(), million - 3, 1, 2, 0, 0}, {value.data(), million - 3, 1, 5, 0, 0}, cache,
                     {.run = sash::serial{}});  // one token, again and again
        floats out(4 * 5, not_a_number);
        sash::attend({x.data(), 4, 1, 2, 0, 0}, {x.data(), 4, 1, 2, 0, 0}, {one_hot, 4, 1, 5}, cache, {out, 4, 1, 5});
        std::vector<double> expected;
        double sum = 0;
        for (const int64 j : {int64{0}, million - 3, million - 2, million - 1, million})
            sum += expected.emplace_back(std::exp(3 * std::cos(.7 * double(standing(policy, million, j) - j))));
        for (double& weight : expected) weight /= sum;
        CAPTURE(static_cast<int>(frame));
        CHECK(difference(floats(out.end() - 5, out.end()), expected, 10) == "");
    }
}

TEST_CASE("R16: a query a thousand million tokens from its key turns right") {
    const std::vector<double> frequencies{1};
    const floats x{1, 0};
    for (const rotates by : {rotates::library, rotates::caller}) {
        const sliding_window policy{
            .window = 1, .sinks = 2, .frame = by == rotates::caller ? sash::frame::compact : sash::frame::original};
        kv_cache cache(policy, {.head_dim = 2}, {.scale = 1, .rotary = {.frequencies = frequencies, .by = by}});
        const floats keys{1, 0, 0, 1}, values{1, 0, 0, 1};
        sash::append({keys, 2, 1, 2}, {values, 2, 1, 2}, cache);
        const int64 far = 1'000'000'007;
        floats out(2, not_a_number);
        sash::read({x, 1, 1, 2}, cache, {out, 1, 1, 2}, {.first_query = far});
        // By the library: q turned by `far`, key 1 by 1. By the caller: q turned back from `far` to 2, keys as they
        // are.
        const double angle = by == rotates::library ? double(far) : double(2 - far);
        const double first = std::exp(std::cos(angle)),
                     second = std::exp(by == rotates::library ? std::sin(angle - 1) : std::sin(angle));
        CHECK(difference(out, std::vector<double>{first / (first + second), second / (first + second)}, 2) == "");
    }
}

TEST_CASE("R16: keys in narrow storage are rounded once, not at every step") {
    const std::vector<double> frequencies{1, .21};
    const sliding_window policy{.window = 5, .sinks = 3, .frame = sash::frame::compact};
    const history h =
        turned_by_caller(contents(4000, {.key_dim = 4, .value_dim = 2}), frequencies, rotary_layout::half_split);
    kv_cache<sliding_window, bfloat16> cache(policy, h.shape, {.rotary = {.frequencies = frequencies}});
    const rows got = fed(cache, h, positions(4000, 1));
    const auto stage = [&](double, int64, int64 i, int64 j) {
        const auto q =
            turned(h.query.data() + i * 4, 4, frequencies, rotary_layout::half_split, standing(policy, i, j) - i);
        double dot = 0;
        for (int64 c = 0; c < 4; ++c) dot += q[index(c)] * stored<bfloat16>(h.key[index(j * 4 + c)]);
        return dot / 2;
    };
    CHECK(difference(got, softmax_rows<bfloat16>(h, window_rule{5, 3}, stage, no_sink, 1), 2) == "");
}

TEST_CASE("R16: one routine turns, whatever the cut: the stored keys are the same to the bit") {
    const std::vector<double> frequencies{1, .4, .1};
    const history h = contents(300, {.heads = 2, .kv_heads = 2, .key_dim = 7, .value_dim = 1});
    const auto stored_by = [&](const positions& cut, const sash::runner& run) {
        kv_cache cache(full{}, h.shape, {.rotary = {.frequencies = frequencies, .by = rotates::library}});
        fed(cache, h, cut, {.run = run});
        return cache.save();
    };
    const auto once = stored_by({300}, sash::serial{});
    for (const positions& cut : cuts_of(300))
        for (const named_runner& by : runners()) CHECK((stored_by(cut, by.run) == once));
}

// ----------------------------------------------------------------------------------------------------------------- R17

TEST_CASE("R17: A08 no stored key, and one token in many splits") {
    const floats q(3, 1.f);
    floats out(3, not_a_number), lse(1, not_a_number);
    const auto empty = [&](const auto& cache) {
        out.assign(3, not_a_number);
        sash::read({q, 1, 1, 3}, cache, {out, 1, 1, 3}, {.lse = lse});
        CHECK(out == floats(3, 0.f));
        CHECK(lse[0] == -endless);
    };
    empty(kv_cache(full{}, {.head_dim = 3}));
    empty(kv_cache(sliding_window{.window = 3, .sinks = 1}, {.head_dim = 3}));
    empty(kv_cache<full, float16>({}, {.head_dim = 3}));
    empty(kv_cache(sash::linear{}, {.head_dim = 3}));
    empty(kv_cache(sash::linear<sash::relu>{}, {.head_dim = 3}));
    for (const int64 piece : {1, 2, 8}) {
        kv_cache cache(full{}, {.head_dim = 3});
        const floats v{4, 5, 6};
        sash::attend({q, 1, 1, 3}, {q, 1, 1, 3}, {v, 1, 1, 3}, cache, {out, 1, 1, 3}, {.lse = lse, .key_piece = piece});
        CHECK(out == v);
        CHECK(difference(lse, std::vector<double>{std::sqrt(3.0)}) == "");
    }
}

TEST_CASE("R17: A08 the empty partial is the neutral element of merge, to the bit") {
    floats x{3, -0.f, 1e-40f}, y = x, zero(3, 0.f);
    sash::partial full_one{.numerator = x, .denominator = 2.5f, .maximum = -7.25f}, empty{.numerator = zero};
    full_one.merge(empty);
    CHECK(difference_in_bits(x, y) == "");
    CHECK((full_one.denominator == 2.5f && full_one.maximum == -7.25f));
    floats into(3, 0.f);
    sash::partial taken{.numerator = into};
    taken.merge(full_one);
    CHECK(difference_in_bits(into, y) == "");
    CHECK((taken.denominator == 2.5f && taken.maximum == -7.25f));
    empty.merge(sash::partial{.numerator = into});
    empty.merge({});
    CHECK(zero == floats(3, 0.f));
    CHECK((empty.denominator == 0 && empty.maximum == -endless && empty.lse() == -endless));
    floats out(3, not_a_number);
    empty.finish(out);
    CHECK(out == floats(3, 0.f));
    empty.finish(out, 3.f);  // nothing but a sink logit
    CHECK(out == floats(3, 0.f));

    float lse = -endless;
    sash::merge_finished(zero, lse, zero, -endless);
    CHECK((zero == floats(3, 0.f) && lse == -endless));
    sash::merge_finished(zero, lse, y, 1.5f);
    CHECK((difference_in_bits(zero, y) == "" && lse == 1.5f));
    sash::merge_finished(zero, lse, floats(3, not_a_number),
                         -endless);  // what is beside an lse of -inf is not looked at
    CHECK((difference_in_bits(zero, y) == "" && lse == 1.5f));
}

TEST_CASE("R17: attention split anywhere, empty parts included, merges to attention over all keys") {
    const history h = contents(20, {.heads = 2, .kv_heads = 1, .head_dim = 4});
    const exact_rows expected = softmax_rows(h, window_rule{});
    for (const positions& ends :
         {positions{0, 20}, positions{5, 5, 20}, positions{1, 2, 19, 20}, positions{20, 20, 20}}) {
        floats out(8, 0.f), lse(2, -endless);
        int64 first = 0;
        for (const int64 last : ends) {
            rows r{floats(8, not_a_number), floats(2, not_a_number)};
            sash::attend(full{}, h.queries(19, 1), h.keys(first, last - first), h.values(first, last - first),
                         {r.out, 1, 2, 4}, {.lse = r.lse, .first_query = std::max<int64>(0, 19 - first)});
            for (std::size_t head = 0; head < 2; ++head)
                sash::merge_finished(std::span(out).subspan(4 * head, 4), lse[head],
                                     std::span(r.out).subspan(4 * head, 4), r.lse[head]);
            first = last;
        }
        CHECK(difference(rows{out, lse}, exact_rows{{expected.out.end() - 8, expected.out.end()},
                                                    {expected.lse.end() - 2, expected.lse.end()}}) == "");
    }
}

namespace {

// Causal, but every query whose position leaves 1 when divided by `every` sees nothing.
struct sometimes_blind {
    int64 every = 0;
    constexpr bool sees(int64 i, int64 j) const { return j <= i && (every == 0 || i % every != 1); }
    constexpr sash::key_intervals<1> visible(int64, int64 last) const {
        sash::key_intervals<1> keys;
        keys.add(0, last);
        return keys;
    }
};

}  // namespace

TEST_CASE("R17: A08 an empty row beside full ones changes no bit of them") {
    for (const int64 tokens : {10, 90}) {
        const history h = contents(tokens, {.heads = 3, .kv_heads = 1, .key_dim = 4, .value_dim = 5});
        for (const way& w : every_way(tokens, {0, 5})) {
            CAPTURE(tokens, w.name);
            rows blind = rows_by<float>(w, sometimes_blind{3}, h), seeing = rows_by<float>(w, sometimes_blind{}, h);
            CHECK(difference(seeing, softmax_rows(h, window_rule{})) == "");
            for (int64 i = 1; i < tokens; i += 3) {
                std::fill_n(seeing.out.begin() + i * 15, 15, 0.f);
                std::fill_n(seeing.lse.begin() + i * 3, 3, -endless);
            }
            CHECK(difference_in_bits(blind, seeing) == "");
        }
    }
}

// ----------------------------------------------------------------------------------------------------------------- R18

TEST_CASE("R18: there is no number that means minus infinity") {
    for (const float low : {-1e4f, -65504.f, -1e9f, -1e30f, -1e37f, -2e38f}) {
        history h = uniform(80);
        std::fill(h.query.begin(), h.query.end(), low / 1e3f);
        std::fill(h.key.begin(), h.key.end(), 1e3f);
        for (const way& w : every_way(80, {0, 7})) {
            CAPTURE(low, w.name);
            const rows r = rows_by<float>(w, sliding_window{.window = 70, .sinks = 2}, h, {.scale = 1});
            CHECK(difference(r.out, softmax_rows(uniform(80), window_rule{70, 2}).out) == "");
            CHECK(all_finite(r.lse));
        }
    }
}

namespace {

// -inf for every key further away than `reach`.
struct no_further_than {
    float reach;
    template <class N, class Site>
    constexpr N operator()(N s, const Site& at) const {
        using sash::select;
        return select(at.distance() > N(reach), N(-std::numeric_limits<float>::infinity()), s);
    }
};

}  // namespace

TEST_CASE("R18: scores of minus infinity weigh nothing, and never meet each other") {
    const history h = contents(150, {.heads = 2, .kv_heads = 1, .head_dim = 3});
    for (const int64 reach : {int64{0}, int64{2}, int64{63}, int64{64}, int64{90}}) {
        const exact_rows expected = softmax_rows(h, window_rule{reach + 1, 0});
        for (const way& w : every_way(150, {0, 10})) {
            CAPTURE(reach, w.name);
            CHECK(difference(rows_by<float>(w, full{}, h, {.custom = no_further_than{static_cast<float>(reach)}}),
                             expected) == "");
        }
    }
    for (const way& w : every_way(150, {0, 10})) {  // nothing else at all: an empty row
        CAPTURE(w.name);
        const rows r = rows_by<float>(w, sliding_window{.window = 80, .sinks = 1}, h, {.custom = no_further_than{-1}});
        CHECK(difference_in_bits(r, {floats(r.out.size(), 0.f), floats(r.lse.size(), -endless)}) == "");
    }
}

TEST_CASE("R18: extreme sink logits") {
    const history h = contents(40, {.head_dim = 3});
    for (const float logit : {-endless, -3e38f, -1e5f, 1e5f, 3e38f}) {
        const float logits[] = {logit};
        const exact_rows expected = softmax_rows<float>(
            h, window_rule{9, 1}, as_it_is, [&](int64) { return double{logit}; }, 1 / std::sqrt(3.0));
        for (const way& w : every_way(40, {0, 3})) {
            CAPTURE(logit, w.name);
            CHECK(difference(rows_by<float>(w, sliding_window{.window = 9, .sinks = 1}, h, {.sink_logits = logits}),
                             expected) == "");
        }
    }
}

// ----------------------------------------------------------------------------------------------------------------- R19

TEMPLATE_TEST_CASE("R19: A09 what memory held before has no influence, whatever its bits", "", float, float16,
                   bfloat16) {
    struct wave {
        int64 tokens, window, sinks, capacity;
    };
    for (const wave& n : {wave{10, 3, 1, 16}, wave{200, 70, 5, 0}, wave{300, 64, 64, 128}})
        for (const positions& cut : cuts_of(n.tokens)) {
            const history h = contents(n.tokens, {.heads = 2, .kv_heads = 1, .key_dim = 3, .value_dim = 5});
            const auto over = [&](auto pattern) {
                poisoned_memory memory(pattern);
                kv_cache<sliding_window, TestType> cache({.window = n.window, .sinks = n.sinks}, h.shape, {},
                                                         {.capacity = n.capacity, .memory = memory.source()});
                return fed(cache, h, cut);
            };
            CAPTURE(n.tokens, cut.size());
            const rows zero = over(0);
            CHECK(difference(zero, softmax_rows<TestType>(h, window_rule{n.window, n.sinks})) == "");
            CHECK(difference_in_bits(over(0xff), zero) == "");  // NaN, everywhere
            CHECK(difference_in_bits(over(endless), zero) == "");
            CHECK(difference_in_bits(over(-endless), zero) == "");
            CHECK(difference_in_bits(over(std::bit_cast<float>(0x7c007c00u)), zero) == "");  // infinity of float16
            CHECK(difference_in_bits(over(0x7f), zero) == "");                               // huge
        }
}

TEMPLATE_TEST_CASE("R19: A09 a token of NaN reaches the rows that see it, and no other", "", float, float16, bfloat16) {
    struct wave {
        int64 tokens, window, sinks, bad;
    };
    for (const wave& n : {wave{10, 3, 0, 2}, wave{10, 3, 1, 0}, wave{10, 3, 4, 2}, wave{300, 70, 0, 100},
                          wave{300, 64, 2, 128}, wave{200, 200, 0, 199}})
        for (const float bad : {not_a_number, endless, -endless})
            for (const bool in_key : {false, true})
                for (const bool in_value : {false, true}) {
                    if (!in_key && !in_value) continue;
                    const history h = contents(n.tokens, {.heads = 2, .kv_heads = 2, .key_dim = 3, .value_dim = 5});
                    history spoilt = h;
                    if (in_key) spoilt.key_row(n.bad, 1)[1] = bad;
                    if (in_value) spoilt.value_row(n.bad, 1)[2] = bad;
                    const exact_rows expected = softmax_rows<TestType>(h, window_rule{n.window, n.sinks});
                    std::vector<way> ways = every_way<TestType>(n.tokens, {0, 9});
                    if (n.tokens > 10)
                        ways.erase(
                            std::remove_if(ways.begin(), ways.end(),
                                           [](const way& w) { return w.name.find("serial") == std::string::npos; }),
                            ways.end());
                    for (const way& w : ways) {
                        CAPTURE(n.tokens, n.window, n.sinks, n.bad, bad, in_key, in_value, w.name);
                        const rows got =
                            rows_by<TestType>(w, sliding_window{.window = n.window, .sinks = n.sinks}, spoilt);
                        int64 wrong = 0;
                        for (int64 i = 0; i < n.tokens; ++i)
                            for (int64 c = 0; c < 10; ++c) {
                                const bool reached =
                                    c >= 5 && window_rule{n.window, n.sinks}(i, n.bad) && (in_key || c == 7);
                                const double a = got.out[index(i * 10 + c)], b = expected.out[index(i * 10 + c)];
                                if (!reached && !(std::abs(a - b) <= 1e-6 + 1e-5 * std::abs(b))) ++wrong;
                                // An infinite key may make a score of minus infinity, which weighs nothing.
                                if (reached && std::isfinite(a) && (std::isnan(bad) || !in_key)) ++wrong;
                            }
                        CHECK(wrong == 0);
                    }
                }
}

TEST_CASE("R19: a query of NaN is its own affair") {
    const history h = contents(100, {.heads = 3, .kv_heads = 1, .head_dim = 4});
    history spoilt = h;
    spoilt.query[index((57 * 3 + 1) * 4 + 2)] = not_a_number;
    for (const way& w : every_way(100)) {
        CAPTURE(w.name);
        const rows clean = rows_by<float>(w, sliding_window{.window = 70, .sinks = 2}, h);
        rows got = rows_by<float>(w, sliding_window{.window = 70, .sinks = 2}, spoilt);
        for (int64 c = 0; c < 4; ++c) {
            float& x = got.out[index((57 * 3 + 1) * 4 + c)];
            CHECK(std::isnan(x));
            x = clean.out[index((57 * 3 + 1) * 4 + c)];
        }
        got.lse[57 * 3 + 1] = clean.lse[57 * 3 + 1];
        CHECK(difference_in_bits(got, clean) == "");
    }
}

TEST_CASE("R19: without a cache, memory around what is seen may hold anything") {
    const int64 keys = 300;
    for (const int64 first : {0, 10, 200, 299}) {
        history h = contents(keys, {.head_dim = 3});
        const exact_rows expected = softmax_rows(h, window_rule{20, 2});
        for (int64 j = 0; j < keys; ++j)
            if (j > first || (j >= 2 && first - j >= 20)) {
                std::fill_n(h.key_row(j), 3, not_a_number);
                std::fill_n(h.value_row(j), 3, not_a_number);
            }
        floats out(3, not_a_number);
        sash::attend(sliding_window{.window = 20, .sinks = 2}, h.queries(first, 1), h.keys(0, keys), h.values(0, keys),
                     {out, 1, 1, 3}, {.first_query = first});
        CHECK(difference(out, std::vector<double>(expected.out.begin() + first * 3,
                                                  expected.out.begin() + first * 3 + 3)) == "");
    }
}

// ----------------------------------------------------------------------------------------------------------------- R20

TEMPLATE_TEST_CASE("R20: sums are fp32, whatever is stored: means over a hundred thousand keys", "", float, float16,
                   bfloat16) {
    const int64 tokens = 100'000;
    const floats zero{0}, one{1}, alternating{0, 1}, large{60000};
    kv_cache<full, TestType> cache({}, {.key_dim = 1, .value_dim = 3}, {}, {});
    std::vector<float> values(index(tokens * 3));
    for (int64 j = 0; j < tokens; ++j) {
        values[index(3 * j)] = 1;
        values[index(3 * j + 1)] = static_cast<float>(j % 2);
        values[index(3 * j + 2)] = 59904;  // exact in every type; two of them overflow float16
    }
    sash::append({zero.data(), tokens, 1, 1, 0, 0}, {values, tokens, 1, 3}, cache);
    for (const int64 queries : {1, 30}) {  // decode and prefill
        floats out(index(queries * 3), not_a_number);
        sash::read({zero.data(), queries, 1, 1, 0, 0}, cache, {out, queries, 1, 3});
        for (int64 t = 0; t < queries; ++t)
            CHECK(difference(floats(out.begin() + 3 * t, out.begin() + 3 * t + 3), floats{1, .5f, 59904}) == "");
    }
}

TEMPLATE_TEST_CASE("R20: dot products are fp32, whatever is stored", "", float, float16, bfloat16) {
    history h = contents(70, {.heads = 2, .kv_heads = 1, .key_dim = 64, .value_dim = 3});
    for (float& x : h.query) x *= 100;
    for (float& x : h.key) x *= 100;  // dots of up to 640,000: past float16
    const exact_rows expected = softmax_rows<TestType>(h, window_rule{20, 2}, as_it_is, no_sink, double{1e-4f});
    for (const positions& cut : cuts_of(70))
        CHECK(difference(rows_by<TestType>({"", form::attend, cut, sash::serial{}},
                                           sliding_window{.window = 20, .sinks = 2}, h, {.scale = 1e-4f}),
                         expected, 3) == "");
}

TEST_CASE("R20: the scale comes from the true dim, not from a padded one") {
    for (const int64 dim : {1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 80, 96, 100, 127, 128, 129, 200, 256})
        for (const int64 value_dim : {int64{1}, dim, int64{20}}) {
            CAPTURE(dim, value_dim);
            const history h = contents(40, {.heads = 2, .kv_heads = 1, .key_dim = dim, .value_dim = value_dim});
            const exact_rows expected = softmax_rows(h, window_rule{15, 1});
            for (const positions& cut : cuts_of(40))
                CHECK(difference(rows_by<float>({"", form::attend, cut, sash::serial{}},
                                                sliding_window{.window = 15, .sinks = 1}, h),
                                 expected, 2) == "");
            CHECK(difference(rows_by<float>({"", form::without_cache, {}, sash::serial{}},
                                            sliding_window{.window = 15, .sinks = 1}, h),
                             expected, 2) == "");
        }
}

TEST_CASE("R20: a cap does not bring back what is masked") {
    const history h = one_hot(100);
    for (const float cap : {1e-3f, 1.f, 50.f})
        for (const way& w : every_way(100)) {
            CAPTURE(cap, w.name);
            const rows r = rows_by<float>(w, sliding_window{.window = 20, .sinks = 1}, h, {.soft_cap = cap});
            int64 wrong = 0;
            for (int64 i = 0; i < 100; ++i)
                for (int64 j = 0; j < 100; ++j) {
                    const float weight = r.out[index(i * 100 + j)];
                    const double count = double(std::min<int64>(i + 1, 21));
                    if (window_rule{20, 1}(i, j) ? std::abs(weight - 1 / count) > 1e-6 : weight != 0) ++wrong;
                }
            CHECK(wrong == 0);
        }
}

namespace {

// Twice the score, less a number for each head and a tenth of the distance's root.
struct twice_less {
    sash::per_head number;
    template <class N, class Site>
    constexpr N operator()(N s, const Site& at) const {
        using std::sqrt;
        return s + s - at.of_head(number) - N(.1f) * sqrt(at.distance());
    }
};

}  // namespace

TEST_CASE("R20: scale, then cap, then slopes, then the user's function, each alone and all together") {
    history h = contents(120, {.heads = 4, .kv_heads = 2, .head_dim = 6});
    for (float& x : h.query) x *= 5;
    const float slopes[] = {.5f, .2f, .1f, .01f}, numbers[] = {0, 1, -2, 3}, logits[] = {0, 1, 2, -1};
    for (int which = 0; which < 32; ++which) {
        sash::score score;
        if (which & 1) score.scale = .6f;
        if (which & 2) score.soft_cap = 1.5f;
        if (which & 4) score.alibi = slopes;
        if (which & 8) score.custom = twice_less{{numbers}};
        if (which & 16) score.sink_logits = logits;
        const auto stage = [&](double s, int64 head, int64 i, int64 j) {
            if (which & 2) s = 1.5 * std::tanh(s / 1.5);
            if (which & 4) s -= double{slopes[head]} * double(i - j);
            if (which & 8) s = 2 * s - double{numbers[head]} - double{.1f} * std::sqrt(double(i - j));
            return s;
        };
        const auto sink = [&](int64 head) { return which & 16 ? double{logits[head]} : -infinity; };
        const exact_rows expected =
            softmax_rows<float>(h, window_rule{40, 3}, stage, sink, which & 1 ? double{.6f} : 1 / std::sqrt(6.0));
        for (const positions& cut : cuts_of(120))
            for (const form f : {form::attend, form::without_cache}) {
                CAPTURE(which, cut.size(), static_cast<int>(f));
                CHECK(difference(rows_by<float>({"", f, cut, sash::serial{}}, sliding_window{.window = 40, .sinks = 3},
                                                h, score),
                                 expected, 3) == "");
            }
    }
}

// ----------------------------------------------------------------------------------------------------------------- R21

TEMPLATE_TEST_CASE("R21: a key far below weighs exactly nothing, a key alone exactly one", "", float, float16,
                   bfloat16) {
    const float huge = std::is_same_v<TestType, float16> ? 60000.f : 3e38f;
    for (const float below : {-110.f, -200.f, -1000.f, -1e6f, -1e30f})
        for (const int64 queries : {1, 2, 20}) {
            kv_cache<full, TestType> cache({}, {.key_dim = 2, .value_dim = 1}, {.scale = 1});
            const floats keys{0, 1, 1, 0}, values{huge, .75f};
            sash::append({keys, 2, 1, 2}, {values, 2, 1, 1}, cache);
            floats query;
            for (int64 t = 0; t < queries; ++t) query.insert(query.end(), {0.f, below});
            floats out(index(queries), not_a_number), lse(index(queries), not_a_number);
            sash::read({query, queries, 1, 2}, cache, {out, queries, 1, 1}, {.lse = lse});
            CAPTURE(below, queries);
            CHECK(out == floats(index(queries), .75f));
            CHECK(lse == floats(index(queries), 0.f));
        }
    const history h = contents(60, {.heads = 2, .kv_heads = 2, .head_dim = 5});
    for (const way& w : every_way<TestType>(60)) {  // a window of one: the row is the stored value
        const rows r = rows_by<TestType>(w, sliding_window{.window = 1}, h);
        floats values;
        for (const float x : h.value) values.push_back(static_cast<float>(stored<TestType>(x)));
        CHECK(r.out == values);
    }
}

TEST_CASE("R21: weights are right from one to the smallest, relatively") {
    for (float x = -86; x <= 86; x += .37f)
        for (const int64 queries : {1, 9}) {
            kv_cache cache(full{}, {.key_dim = 2, .value_dim = 2}, {.scale = 1});
            const floats keys{0, 1, 1, 0}, values{1, 0, 0, 1};
            sash::append({keys, 2, 1, 2}, {values, 2, 1, 2}, cache);
            floats query;
            for (int64 t = 0; t < queries; ++t) query.insert(query.end(), {0.f, x});  // scores x and 0
            floats out(index(queries * 2), not_a_number);
            sash::read({query, queries, 1, 2}, cache, {out, queries, 1, 2});
            CAPTURE(x, queries);
            const double first = 1 / (1 + std::exp(-double{x})), second = 1 / (1 + std::exp(double{x}));
            REQUIRE(std::abs(double{out[0]} / first - 1) <= 1e-5);
            REQUIRE(std::abs(double{out[1]} / second - 1) <= 1e-5);
        }
}

TEST_CASE("R21: a visible score of NaN is kept, wherever the maximum is") {
    for (const int64 tokens : {2, 5, 70, 130})
        for (int64 bad = 0; bad<tokens; bad += tokens> 10 ? 13 : 1)
            for (const float others : {-50.f, 0.f, 50.f}) {
                history h = contents(tokens, {.head_dim = 2});
                std::fill(h.query.begin(), h.query.end(), 1.f);
                std::fill(h.key.begin(), h.key.end(), others);
                h.key_row(bad)[0] = not_a_number;
                for (const positions& cut : cuts_of(tokens)) {
                    const rows r = rows_by<float>({"", form::attend, cut, sash::serial{}}, full{}, h);
                    int64 wrong = 0;
                    for (int64 i = 0; i < tokens; ++i)
                        wrong +=
                            std::isnan(r.out[index(2 * i)]) != (i >= bad) || std::isnan(r.lse[index(i)]) != (i >= bad);
                    CAPTURE(tokens, bad, others, cut.size());
                    CHECK(wrong == 0);
                }
            }
}

// ----------------------------------------------------------------------------------------------------------------- R29

TEMPLATE_TEST_CASE("R29: A12 zero, constant, tiny and mixed rows are stored exactly as the type can", "", float,
                   float16, bfloat16) {
    const int64 dim = 37;
    const auto stored_as = [&](const floats& value) {
        const floats zero(index(dim), 0.f);
        floats out(index(dim), not_a_number);
        kv_cache<sliding_window, TestType> cache({.window = 1}, {.head_dim = dim});
        sash::attend({zero, 1, 1, dim}, {zero, 1, 1, dim}, {value, 1, 1, dim}, cache, {out, 1, 1, dim});
        return out;
    };
    const auto constant = [&](float x) { return floats(index(dim), x); };
    CHECK(stored_as(constant(0)) == constant(0));
    CHECK(stored_as(constant(-0.f)) == constant(0));
    CHECK(stored_as(constant(3)) == constant(3));
    CHECK(stored_as(constant(1e-30f)) == constant(static_cast<float>(stored<TestType>(1e-30f))));  // float16: 0
    floats mixed = constant(1);
    mixed[0] = 1e4f;
    floats expected = mixed;
    expected[0] = static_cast<float>(stored<TestType>(1e4f));  // and its neighbours are still exactly 1
    CHECK(stored_as(mixed) == expected);
    CHECK(stored_as(constant(65504)) == constant(static_cast<float>(stored<TestType>(65504))));
    CHECK(stored_as(constant(1e5f)) ==
          constant(static_cast<float>(stored<TestType>(1e5f))));  // float16: infinity, never a wrapped number
    floats bad = constant(2);
    bad[5] = endless;
    CHECK(stored_as(bad) == bad);
}

TEMPLATE_TEST_CASE("R29: every number of a narrow type, the ties between them and what lies beside a tie", "", float16,
                   bfloat16) {
    const int64 dim = 128;
    floats numbers;
    for (std::uint32_t bits = 0; bits + 1 < 0x10000; ++bits) {
        const float here = std::bit_cast<TestType>(static_cast<std::uint16_t>(bits));
        const float next = std::bit_cast<TestType>(static_cast<std::uint16_t>(bits + 1));
        if (!std::isfinite(here) || !std::isfinite(next)) continue;
        const auto tie = static_cast<float>((double{here} + double{next}) / 2);  // exact: one bit more
        for (const float x : {here, tie, std::nextafter(tie, here), std::nextafter(tie, next)}) numbers.push_back(x);
    }
    numbers.resize((numbers.size() + index(dim) - 1) / index(dim) * index(dim));
    const auto tokens = static_cast<int64>(numbers.size()) / dim;
    const floats zero(1, 0.f);
    floats out(numbers.size(), not_a_number), expected;
    for (const float x : numbers) expected.push_back(static_cast<float>(stored<TestType>(x)));
    kv_cache<sliding_window, TestType> cache({.window = 1}, {.key_dim = 1, .value_dim = dim});
    sash::attend({zero, tokens, 1, 1, 0, 0}, {zero, tokens, 1, 1, 0, 0}, {numbers, tokens, 1, dim}, cache,
                 {out, tokens, 1, dim});
    int64 wrong = 0;
    for (std::size_t n = 0; n < out.size(); ++n) wrong += out[n] != expected[n];
    for (std::size_t n = 0; n < out.size(); ++n) wrong += float{TestType(numbers[n])} != expected[n];
    CHECK(wrong == 0);
    std::vector<TestType> rounded(numbers.size());  // and so are the numbers of an output
    sash::attend(sliding_window{.window = 1}, {zero, tokens, 1, 1, 0, 0}, {zero, tokens, 1, 1, 0, 0},
                 {numbers, tokens, 1, dim}, {rounded, tokens, 1, dim});
    for (std::size_t n = 0; n < out.size(); ++n) wrong += float{rounded[n]} != expected[n];
    CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("R29: A12 over keys of zeros the row is the mean, and a bad row touches no other", "", float,
                   float16, bfloat16) {
    history h = contents(40, {.heads = 2, .kv_heads = 2, .head_dim = 4});
    std::fill(h.key.begin(), h.key.end(), 0.f);
    CHECK(difference(rows_by<TestType>(every_way<TestType>(40)[0], full{}, h),
                     softmax_rows<TestType>(h, window_rule{})) == "");
    history spoilt = h;
    for (int64 c = 0; c < 4; ++c)
        spoilt.value_row(20, 0)[c] = spoilt.key_row(20, 0)[c] = c % 2 ? not_a_number : endless;
    for (const way& w : every_way<TestType>(40)) {
        CAPTURE(w.name);
        rows clean = rows_by<TestType>(w, sliding_window{.window = 5}, h),
             got = rows_by<TestType>(w, sliding_window{.window = 5}, spoilt);
        for (int64 i = 20; i < 25; ++i) {  // head 0 of the rows that see it
            std::fill_n(clean.out.begin() + i * 8, 4, 0.f);
            std::fill_n(got.out.begin() + i * 8, 4, 0.f);
            got.lse[index(2 * i)] = clean.lse[index(2 * i)];
        }
        CHECK(difference_in_bits(got, clean) == "");
    }
}

// ----------------------------------------------------------------------------------------------------------------- R30

TEMPLATE_TEST_CASE("R30: what is stored depends on the token alone, not on the cut, the runner or the neighbours", "",
                   float, float16, bfloat16) {
    const history h = contents(200, {.heads = 2, .kv_heads = 2, .key_dim = 5, .value_dim = 9});
    using cache_type = kv_cache<sliding_window, TestType>;
    cache_type once({.window = 90, .sinks = 3}, h.shape);
    fed(once, h, {200});
    const auto expected = once.save();
    for (const positions& cut : cuts_of(200))
        for (const named_runner& by : runners()) {
            CAPTURE(cut.size(), by.name);
            cache_type cut_up({.window = 90, .sinks = 3}, h.shape), in_company({.window = 90, .sinks = 3}, h.shape);
            fed(cut_up, h, cut, {.run = by.run});
            CHECK((cut_up.save() == expected));
            in_a_batch(in_company, h, cut, {.run = by.run});
            CHECK((in_company.save() == expected));
        }
    SECTION("nor on the other heads") {
        history other = h;
        for (int64 j = 0; j < 200; ++j) {
            std::fill_n(other.key_row(j, 0), 5, 1e30f);
            std::fill_n(other.value_row(j, 0), 9, not_a_number);
        }
        const way w{"", form::attend, {200}, sash::serial{}};
        const rows a = rows_by<TestType>(w, sliding_window{.window = 90, .sinks = 3}, h),
                   b = rows_by<TestType>(w, sliding_window{.window = 90, .sinks = 3}, other);
        floats first, second;
        for (int64 i = 0; i < 200; ++i) {
            first.insert(first.end(), a.out.begin() + i * 18 + 9, a.out.begin() + i * 18 + 18);
            second.insert(second.end(), b.out.begin() + i * 18 + 9, b.out.begin() + i * 18 + 18);
        }
        CHECK(difference_in_bits(second, first) == "");
    }
}

TEMPLATE_TEST_CASE("R30: a loaded key or value is the one that was stored, to the bit", "", float, float16, bfloat16) {
    const history h = contents(130, {.key_dim = 3, .value_dim = 6});
    kv_cache<full, TestType> cache({}, h.shape), loaded({}, h.shape);
    fed(cache, h, {130});
    loaded.load(cache.save());
    kv_cache<full, TestType> again = loaded;
    again.load(loaded.save());
    CHECK((again.save() == cache.save()));
}
