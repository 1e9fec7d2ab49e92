// Windows that are not in the library yet, written as a user would: what the seam between policies, caches and kernels
// must carry. Each is compared with the reference, and with a loop that knows nothing of policies: `sees` is stated a
// second time.
#include "support/catch.hpp"
#include "support/tensors.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

#include <algorithm>
#include <functional>
#include <limits>

namespace {

using sash::int64;
using sash::key_interval;
using sash::key_intervals;
using test::numbers;
using test::tensor;

// ---------------------------------------------------------------------------------------------------------------------
// The policies

// Every KV head has a window and sinks of its own; window 0 is full attention.
struct window_per_head {
    int64 window[4] = {}, sinks[4] = {};

    constexpr bool sees(int64 query, int64 key, int64 head) const {
        return key <= query && (window[head] == 0 || query - key < window[head] || key < sinks[head]);
    }
    constexpr key_intervals<2> visible(int64 first_query, int64 last_query, int64 head) const {
        key_intervals<2> keys;
        keys.add(0, window[head] == 0 ? last_query : std::min(sinks[head], last_query));
        keys.add(first_query - window[head] + 1, last_query);
        return keys;
    }
    constexpr key_intervals<2> retained(int64 next, int64 head) const {
        key_intervals<2> keys;
        keys.add(0, window[head] == 0 ? next : std::min(sinks[head], next));
        keys.add(next - window[head], next);
        return keys;
    }
};

// An image in raster order: a query sees `reach` columns to either side in its own row and in two rows above, up to
// itself; and sinks.
struct raster_window {
    int64 width = 1, reach = 0, sinks = 0;
    static constexpr int64 height = 3;
    static constexpr bool exact_intervals = true;

    constexpr bool sees(int64 query, int64 key) const {
        const int64 up = query / width - key / width, aside = query % width - key % width;
        return key <= query && (key < sinks || (up < height && -reach <= aside && aside <= reach));
    }
    constexpr key_intervals<4> visible(int64 first_query, int64 last_query) const {
        key_intervals<4> keys;
        keys.add(0, std::min(sinks, last_query));
        for (int64 up = height - 1; up >= 0; --up) {
            int64 first = first_query - reach, last = last_query + reach;
            if (last_query ==
                first_query + 1) {  // one query: cut off where its row ends, so that the interval is exact
                const int64 row = first_query / width * width;
                first = std::max(first, row);
                last = std::min(last, row + width);
            }
            keys.add(first - up * width, std::min(last - up * width, last_query));
        }
        return keys;
    }
    constexpr key_intervals<2> retained(int64 next) const {
        key_intervals<2> keys;
        keys.add(0, std::min(sinks, next));
        keys.add(next - 1 - (height - 1) * width - reach, next);
        return keys;
    }
};

// Longformer: `reach` keys to either side; the first `globals` tokens see all and are seen by all.
struct global_window {
    int64 reach = 0, globals = 0;
    static constexpr bool causal = false;
    static constexpr int64 everywhere = int64{1} << 62;

    constexpr bool sees(int64 query, int64 key) const {
        return query < globals || key < globals || (query - key <= reach && key - query <= reach);
    }
    constexpr key_intervals<2> visible(int64 first_query, int64 last_query) const {
        key_intervals<2> keys;
        keys.add(0, first_query < globals ? everywhere : globals);
        keys.add(first_query - reach, last_query + reach);
        return keys;
    }
    constexpr bool whole(key_interval queries, key_interval keys) const {
        return keys.last <= globals || queries.last <= globals ||
               (queries.last - 1 - keys.first <= reach && keys.last - 1 - queries.first <= reach);
    }
};

// A window, and tokens in the middle of the sequence that stay: a system prompt that comes after a greeting.
struct pinned_window {
    int64 window = 1, first = 0, last = 0;

    constexpr bool sees(int64 query, int64 key) const {
        return key <= query && (query - key < window || (first <= key && key < last));
    }
    constexpr key_intervals<2> visible(int64 first_query, int64 last_query) const {
        key_intervals<2> keys;
        keys.add(first, std::min(last, last_query));
        keys.add(first_query - window + 1, last_query);
        return keys;
    }
    constexpr key_intervals<2> retained(int64 next) const {
        key_intervals<2> keys;
        keys.add(first, std::min(last, next));
        keys.add(next - window, next);
        return keys;
    }
};

// Every `step`-th key, `window` of them; distances count steps.
struct dilated_window {
    int64 window = 1, step = 1;

    constexpr bool sees(int64 query, int64 key) const {
        return key <= query && (query - key) % step == 0 && query - key < window * step;
    }
    constexpr key_intervals<1> visible(int64 first_query, int64 last_query) const {
        key_intervals<1> keys;
        keys.add(first_query - (window - 1) * step, last_query);
        return keys;
    }
    constexpr key_intervals<1> retained(int64 next) const {
        key_intervals<1> keys;
        keys.add(next - 1 - (window - 1) * step, next);
        return keys;
    }
    constexpr int64 distance(int64 query, int64 key) const { return (query - key) / step; }
};

// For the reference alone: a window that is `before` up to a position, and `after` from there on; keys below `held` had
// left by then.
struct changed_window {
    int64 before = 1, after = 1, at = 0, sinks = 0, held = 0;

    constexpr bool sees(int64 query, int64 key) const {
        if (key > query) return false;
        if (query < at) return query - key < before || key < sinks;
        return (query - key < after && key >= held) || key < sinks;
    }
    constexpr key_intervals<1> visible(int64, int64 last_query) const {
        key_intervals<1> keys;
        keys.add(0, last_query);
        return keys;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Two oracles

using seeing = std::function<bool(int64 query, int64 key, int64 kv_head)>;
using distances = std::function<double(int64 query, int64 key)>;

struct layer {
    sash::shape shape{.heads = 6, .kv_heads = 2, .key_dim = 24, .value_dim = 40};
    tensor query, key, value;

    layer(int64 tokens, std::uint64_t seed) : layer(tokens, tokens, seed) {}
    layer(int64 queries, int64 tokens, std::uint64_t seed)
        : query(queries, shape.heads, shape.key_dim),
          key(tokens, shape.kv_heads, shape.key_dim),
          value(tokens, shape.kv_heads, shape.value_dim) {
        numbers random(seed);
        query.fill(random);
        key.fill(random);
        value.fill(random);
    }
};

// The textbook's loop: no policy, no interval, no cache.
std::vector<double> by_hand(const layer& l, const seeing& sees, int64 first_query = 0,
                            const std::vector<float>& slopes = {}, const distances& distance = nullptr) {
    std::vector<double> out;
    for (int64 t = 0; t < l.query.tokens(); ++t)
        for (int64 h = 0; h < l.shape.heads; ++h) {
            const int64 kv_head = h / (l.shape.heads / l.shape.kv_heads);
            std::vector<double> row(static_cast<std::size_t>(l.shape.value_dim));
            double mass = 0;
            for (int64 j = 0; j < l.key.tokens(); ++j) {
                if (!sees(first_query + t, j, kv_head)) continue;
                double s = 0;
                for (int64 d = 0; d < l.shape.key_dim; ++d)
                    s += double{l.query.get(t, h, d)} * double{l.key.get(j, kv_head, d)};
                s /= std::sqrt(static_cast<double>(l.shape.key_dim));
                if (distance) s -= double{slopes[static_cast<std::size_t>(h)]} * distance(first_query + t, j);
                mass += std::exp(s);
                for (int64 d = 0; d < l.shape.value_dim; ++d)
                    row[static_cast<std::size_t>(d)] += std::exp(s) * double{l.value.get(j, kv_head, d)};
            }
            for (const double x : row) out.push_back(mass == 0 ? 0 : x / mass);
        }
    return out;
}

// Values reach 1.74 and cancel in a row: the absolute part is of their size.
constexpr test::tolerance of_rows{2e-6, 1e-5};

void check_rows(const tensor& out, const std::vector<double>& hand, const std::vector<double>& reference) {
    double apart = 0;
    for (std::size_t i = 0; i < hand.size(); ++i) apart = std::max(apart, std::abs(hand[i] - reference[i]));
    CHECK(apart < 1e-12);
    CHECK(test::differs(out, hand, of_rows) == "");
    CHECK(test::differs(out, reference, of_rows) == "");
}

// Cuts of `tokens` tokens into calls: all, one by one, and across blocks of 64.
std::vector<std::vector<int64>> cuts_of(int64 tokens) {
    const int64 uneven[] = {3, 1, 9, 64, 1, 6, 130, 20, 67, 2};
    std::vector<std::vector<int64>> cuts{{tokens}, std::vector<int64>(static_cast<std::size_t>(tokens), 1), {}};
    for (int64 done = 0; done < tokens; done += cuts[2].back())
        cuts[2].push_back(std::min(uneven[cuts[2].size() % std::size(uneven)], tokens - done));
    return cuts;
}

// Through a cache in every cut, and without a cache, against both oracles.
template <class P>
void check_causal(const P& policy, int64 tokens, const seeing& sees, const std::vector<float>& slopes = {},
                  const distances& distance = nullptr) {
    const layer l(tokens, static_cast<std::uint64_t>(tokens));
    sash::score score;
    score.alibi = slopes;
    const auto hand = by_hand(l, sees, 0, slopes, distance);
    const auto reference = sash::reference::attend(policy, l.shape, l.query.in(), l.key.in(), l.value.in(), score).out;
    for (const auto& cut : cuts_of(tokens)) {
        CAPTURE(cut.size());
        test::poisoned_memory memory;
        sash::kv_cache<P> cache(policy, l.shape, score, {.piece = 96, .memory = memory.source()});
        tensor out(tokens, l.shape.heads, l.shape.value_dim);
        int64 done = 0;
        for (const int64 count : cut) {
            sash::attend(l.query.in(done, count), l.key.in(done, count), l.value.in(done, count), cache,
                         out.out(done, count), {.key_piece = 50});
            done += count;
        }
        check_rows(out, hand, reference);
    }
    tensor out(tokens, l.shape.heads, l.shape.value_dim);
    sash::attend(policy, l.query.in(), l.key.in(), l.value.in(), out.out(), {}, score);
    check_rows(out, hand, reference);
}

template <class Cache>
std::vector<int64> positions_of(const Cache& cache) {
    std::vector<int64> list;
    for (const int64 p : cache.positions()) list.push_back(p);
    return list;
}

// The positions [first, last) of every list.
std::vector<int64> ranges(std::initializer_list<std::pair<int64, int64>> of) {
    std::vector<int64> list;
    for (const auto& [first, last] : of)
        for (int64 p = first; p < last; ++p) list.push_back(p);
    return list;
}

// A bounded policy: after a long stream the cache holds `held` and has stopped growing.
template <class P>
void check_bounded(const P& policy, int64 tokens, const std::vector<int64>& held) {
    const layer l(1, 1, 5);
    sash::kv_cache<P> cache(policy, l.shape);
    int64 bytes = 0;
    for (int64 t = 0; t < tokens; ++t) {
        sash::append(l.key.in(), l.value.in(), cache);
        if (t == tokens / 2) bytes = cache.bytes();
    }
    CHECK(cache.bytes() == bytes);
    CHECK(positions_of(cache) == held);
    CHECK(cache.stored() == static_cast<int64>(held.size()));
    CHECK(cache.length() == tokens);
}

}  // namespace

TEST_CASE("A window of its own for each KV head") {
    const window_per_head policy{.window = {7, 90}, .sinks = {3, 0}};
    check_causal(policy, 230,
                 [](int64 q, int64 k, int64 head) { return k <= q && (head == 0 ? q - k < 7 || k < 3 : q - k < 90); });
    check_bounded(policy, 2000, ranges({{0, 3}, {1910, 2000}}));
    const window_per_head other{.window = {65, 64},
                                .sinks = {0, 70}};  // sinks in the second head alone, beyond its window
    check_causal(other, 200, [](int64 q, int64 k, int64 head) {
        return k <= q && (head == 0 ? q - k < 65 : q - k < 64 || k < 70);
    });
    check_bounded(other, 2000, ranges({{0, 70}, {1935, 2000}}));
}

TEST_CASE("Full attention in some heads, a window in the others") {
    const window_per_head policy{.window = {0, 20}, .sinks = {0, 4}};
    check_causal(policy, 230,
                 [](int64 q, int64 k, int64 head) { return k <= q && (head == 0 || q - k < 20 || k < 4); });

    const layer l(1, 1, 5);
    sash::kv_cache cache(policy, l.shape);
    for (int i = 0; i < 700; ++i) sash::append(l.key.in(), l.value.in(), cache);
    CHECK(positions_of(cache) == ranges({{0, 700}}));  // what one head keeps, all heads keep
    CHECK(cache.can_rollback(699));
}

TEST_CASE("A 2-D raster window: three intervals, and sinks") {
    for (const raster_window policy :
         {raster_window{.width = 20, .reach = 3, .sinks = 5}, raster_window{.width = 70, .reach = 8, .sinks = 2},
          raster_window{.width = 9, .reach = 9, .sinks = 0}, raster_window{.width = 1, .reach = 0, .sinks = 1}}) {
        CAPTURE(policy.width, policy.reach);
        const int64 w = policy.width, reach = policy.reach, sinks = policy.sinks;
        check_causal(policy, 260, [=](int64 q, int64 k, int64) {
            const int64 q_row = q / w, q_column = q - q_row * w, k_row = k / w, k_column = k - k_row * w;
            const bool near = q_row - k_row <= 2 && std::abs(q_column - k_column) <= reach;
            return k <= q && (near || k < sinks);
        });
    }
    const raster_window wide{.width = 20, .reach = 3, .sinks = 5};
    check_bounded(wide, 1000, ranges({{0, 5}, {999 - 2 * 20 - 3, 1000}}));
}

TEST_CASE("A bidirectional window with global tokens") {
    const global_window policy{.reach = 6, .globals = 3};
    const seeing sees = [](int64 q, int64 k, int64) { return q < 3 || k < 3 || std::abs(q - k) <= 6; };
    const layer l(210, 11);
    const auto hand = by_hand(l, sees);
    const auto reference = sash::reference::attend(policy, l.shape, l.query.in(), l.key.in(), l.value.in()).out;

    tensor out(210, l.shape.heads, l.shape.value_dim);
    sash::attend(policy, l.query.in(), l.key.in(), l.value.in(), out.out());
    check_rows(out, hand, reference);

    test::poisoned_memory memory;
    sash::kv_cache cache(policy, l.shape, {}, {.memory = memory.source()});
    for (int64 done = 0; done < 210; done += 70) sash::append(l.key.in(done, 70), l.value.in(done, 70), cache);
    for (const int64 count : {int64{210}, int64{42}, int64{1}}) {  // read in one, in parts, and row by row
        CAPTURE(count);
        tensor read(210, l.shape.heads, l.shape.value_dim);
        for (int64 done = 0; done < 210; done += count)
            sash::read(l.query.in(done, count), cache, read.out(done, count), {.first_query = done, .key_piece = 50});
        check_rows(read, hand, reference);
    }
    tensor refused(210, l.shape.heads, l.shape.value_dim);
    const tensor untouched = refused;
    CHECK_THROWS_AS(sash::attend(l.query.in(), l.key.in(), l.value.in(), cache, refused.out()), sash::error);
    CHECK(refused == untouched);
    CHECK(cache.length() == 210);
}

TEST_CASE("Pinned tokens in the middle of the sequence in place of the first ones") {
    const pinned_window policy{.window = 30, .first = 17, .last = 90};
    check_causal(policy, 260, [](int64 q, int64 k, int64) { return k <= q && (q - k < 30 || (k >= 17 && k < 90)); });
    check_bounded(policy, 2000, ranges({{17, 90}, {1970, 2000}}));

    // A pinned stretch that lies ahead of everything but is reached; and an empty one.
    const pinned_window late{.window = 5, .first = 120, .last = 121};
    check_causal(late, 200, [](int64 q, int64 k, int64) { return k <= q && (q - k < 5 || k == 120); });
    const pinned_window none{.window = 5, .first = 9, .last = 9};
    check_causal(none, 150, [](int64 q, int64 k, int64) { return k <= q && q - k < 5; });

    // Rolled back to before, into and behind the pinned stretch: what is pinned must come from the new tokens.
    const layer l(200, 3);
    for (const int64 back_to : {10, 50, 95}) {
        CAPTURE(back_to);
        test::poisoned_memory memory;
        const sash::storage storage{.rollback_slack = 100, .memory = memory.source()};
        sash::kv_cache cache(policy, l.shape, {}, storage);
        sash::append(l.key.in(0, back_to), l.value.in(0, back_to), cache);
        tensor junk(100, l.shape.kv_heads, l.shape.key_dim),
            more_junk(100, l.shape.kv_heads, l.shape.value_dim);  // NaN, all of it
        sash::append(junk.in(), more_junk.in(), cache);
        REQUIRE(cache.can_rollback(100));
        cache.rollback(100);
        CHECK(cache.length() == back_to);
        tensor out(200, l.shape.heads, l.shape.value_dim);
        const int64 rest = 200 - back_to;
        sash::attend(l.query.in(back_to, rest), l.key.in(back_to, rest), l.value.in(back_to, rest), cache,
                     out.out(back_to, rest));
        const auto hand =
            by_hand(l, [](int64 q, int64 k, int64) { return k <= q && (q - k < 30 || (k >= 17 && k < 90)); });
        for (int64 t = back_to; t < 200; ++t)
            CHECK(test::row_differs(out, t, hand.data() + t * l.shape.heads * l.shape.value_dim, of_rows) == "");
    }
}

TEST_CASE("A dilated window, bounded by what it says is retained") {
    const dilated_window policy{.window = 12, .step = 7};
    const seeing sees = [](int64 q, int64 k, int64) {
        for (int64 n = 0; n < 12; ++n)
            if (q - 7 * n == k) return true;
        return false;
    };
    check_causal(policy, 230, sees);
    check_bounded(policy, 1500, ranges({{1499 - 77, 1500}}));
    // Its distance is no straight line: ALiBi counts steps.
    check_causal(policy, 230, sees, {0.5f, 0.25f, 0.125f, 1, 0, 0.75f},
                 [](int64 q, int64 k) { return static_cast<double>((q - k) / 7); });
}

TEST_CASE("A window changed in mid-stream, both ways") {
    const layer l(300, 29);
    for (const auto& change : {std::pair<int64, int64>{50, 9}, {9, 50}, {70, 64}, {64, 130}, {1, 200}, {200, 1}}) {
        const int64 before = change.first, after = change.second;
        for (const int64 sinks : {0, 3}) {
            for (const int64 at : {40, 128, 207}) {
                CAPTURE(before, after, sinks, at);
                test::poisoned_memory memory;
                sash::kv_cache cache(sash::sliding_window{.window = before, .sinks = sinks}, l.shape, {},
                                     {.piece = 32, .memory = memory.source()});
                tensor out(300, l.shape.heads, l.shape.value_dim);
                const auto feed = [&](int64 first, int64 last, int64 step) {
                    for (int64 done = first; done < last; done += step) {
                        const int64 count = std::min(step, last - done);
                        sash::attend(l.query.in(done, count), l.key.in(done, count), l.value.in(done, count), cache,
                                     out.out(done, count));
                    }
                };
                feed(0, at, 17);
                cache.policy({.window = after, .sinks = sinks});
                CHECK(cache.policy().window == after);
                // Smaller at once. Larger as tokens arrive: what had left does not come back.
                const int64 held = std::max<int64>(0, at - std::min(before, after));
                CHECK(positions_of(cache) == ranges({{0, std::min(sinks, held)}, {held, at}}));
                feed(at, at + 20, 1);
                feed(at + 20, 300, 45);
                CHECK(cache.stored() <= sinks + after);

                const auto hand = by_hand(l, [=](int64 q, int64 k, int64) {
                    if (k > q) return false;
                    if (k < sinks) return true;
                    return q < at ? q - k < before : q - k < after && k >= held;
                });
                const changed_window told{before, after, at, sinks, held};
                check_rows(out, hand,
                           sash::reference::attend(told, l.shape, l.query.in(), l.key.in(), l.value.in()).out);
            }
        }
    }
}

TEST_CASE("A window may change at every token, and to no limit at all") {
    const layer l(160, 31);
    constexpr int64 unlimited = std::numeric_limits<int64>::max();
    test::poisoned_memory memory;
    sash::kv_cache cache(sash::sliding_window{.window = 5}, l.shape, {}, {.memory = memory.source()});
    tensor out(160, l.shape.heads, l.shape.value_dim);
    std::vector<std::vector<int64>> seen;
    numbers random(8);
    for (int64 t = 0; t < 160; ++t) {
        const int64 window = t > 130 ? unlimited : random.pick({1, 2, 9, 40, 70});
        cache.policy({.window = window});
        std::vector<int64> keys;
        for (const int64 p : cache.positions())
            if (t - p < window) keys.push_back(p);
        keys.push_back(t);
        seen.push_back(keys);
        sash::attend(l.query.in(t, 1), l.key.in(t, 1), l.value.in(t, 1), cache, out.out(t, 1));
    }
    CHECK(cache.stored() >= 160 - 130);
    const auto hand = by_hand(l, [&](int64 q, int64 k, int64) {
        const auto& keys = seen[static_cast<std::size_t>(q)];
        return std::find(keys.begin(), keys.end(), k) != keys.end();
    });
    CHECK(test::differs(out, hand, of_rows) == "");
}

TEST_CASE("A window without limit that becomes a small one") {
    const layer l(400, 41);
    const int64 heads = l.shape.heads, value_dim = l.shape.value_dim;
    test::poisoned_memory memory;
    sash::kv_cache cache(sash::sliding_window::from_left(-1, 2), l.shape, {}, {.memory = memory.source()});
    tensor out(400, heads, value_dim);
    sash::attend(l.query.in(0, 150), l.key.in(0, 150), l.value.in(0, 150), cache, out.out(0, 150));
    cache.policy({.window = 9, .sinks = 2});
    sash::attend(l.query.in(150, 100), l.key.in(150, 100), l.value.in(150, 100), cache, out.out(150, 100));
    CHECK(cache.stored() <= 9 + 2);
    cache.policy({.window = 20, .sinks = 2});
    sash::attend(l.query.in(250, 150), l.key.in(250, 150), l.value.in(250, 150), cache, out.out(250, 150));
    const auto hand = by_hand(l, [](int64 q, int64 k, int64) {
        if (k > q) return false;
        return k < 2 || (q < 150 ? true : q < 250 ? q - k < 9 : q - k < 20 && k >= 250 - 9);
    });
    CHECK(test::differs(out, hand, of_rows) == "");
}

TEST_CASE("A change of window that cannot be is refused and changes nothing") {
    const layer l(100, 37);
    sash::kv_cache cache(sash::sliding_window{.window = 10, .sinks = 2}, l.shape);
    sash::append(l.key.in(), l.value.in(), cache);
    const auto before = cache.save();
    CHECK_THROWS_AS(cache.policy({.window = 0, .sinks = 2}), sash::error);
    CHECK_THROWS_AS(cache.policy({.window = 10, .sinks = 5}), sash::error);  // tokens 2 to 4 have left
    CHECK_THROWS_AS(cache.policy({.window = 10, .sinks = -1}), sash::error);
    CHECK(cache.save() == before);
    CHECK(cache.policy() == sash::sliding_window{.window = 10, .sinks = 2});
}
