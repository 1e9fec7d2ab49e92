// The common interface of every cache: what it holds, what it costs, and that a copy, a rollback, a checkpoint or a
// file gives back exactly the cache there was. "The same" means: the same bits in every later row.
#include "support/any_cache.hpp"
#include "support/catch.hpp"

#include <array>
#include <functional>
#include <limits>
#include <list>
#include <type_traits>

namespace {

using sash::int64;
using test::any_cache;
using test::kind;
using test::numbers;
using test::poisoned_memory;
using test::stream;
using test::tensor;
using file_bytes = std::vector<std::byte>;

constexpr sash::shape small_shape{.heads = 4, .kv_heads = 2, .key_dim = 10, .value_dim = 7};
constexpr sash::sliding_window small_window{.window = 20, .sinks = 3};
const std::vector<double> frequencies = {1, 0.3, 0.01};

using exact_hybrid = sash::hybrid<sash::sliding_window, sash::linear<>, sash::shared_denominator>;
using stepped_hybrid = sash::hybrid<sash::terraced_window, sash::linear<sash::relu>, sash::log_sum_exp>;
using parallel_hybrid = sash::hybrid<sash::sliding_window, sash::linear<>, sash::convex>;
using gated = sash::linear<sash::elu_plus_one, sash::per_head_and_token>;

template <class P, class E = float>
kind<P, E> small(P policy = {}, const sash::score& score = {}) {
    return {policy, score, small_shape};
}
any_cache small_cache(const sash::sliding_window& policy, const sash::storage& storage = {}) {
    return any_cache(small<sash::sliding_window>(policy), storage);
}
stream tokens(int64 count, std::uint64_t seed = 1) { return stream(count, seed, small_shape); }

// Calls f(make) for every kind of cache, where make(storage) gives an empty one.
using maker = std::function<any_cache(const sash::storage&)>;
template <class F>
void for_each_kind(F&& f) {
    const auto with = [&](const char* name, const auto& k) {
        INFO(name);
        f(maker([k](const sash::storage& storage) { return any_cache(k, storage); }));
    };
    with("full", small<sash::full>({}, {.soft_cap = 4}));
    with("window", small<sash::sliding_window>(small_window));
    with("window, float16, compact", small<sash::sliding_window, sash::float16>(
                                         {.window = 20, .sinks = 3, .frame = sash::frame::compact},
                                         {.rotary = {.frequencies = frequencies, .by = sash::rotates::library}}));
    with("window with many sinks", small<sash::sliding_window>({.window = 2, .sinks = 90}));
    with("linear", small<sash::linear<>>());
    with("linear with decay", small<gated>());
    with("hybrid", small<exact_hybrid>({.window = small_window}));
    with("hybrid in steps, float16", small<stepped_hybrid, sash::float16>({.window = {.window = 11, .sinks = 2}}));
    with("hybrid side by side", small<parallel_hybrid>({.window = small_window}));
}

// Appends tokens [first, first + count) in the given step and returns their rows.
tensor attend(any_cache& cache, const stream& from, int64 first, int64 count, int64 step) {
    tensor out(count, cache.shape().heads, cache.shape().value_dim);
    for (int64 done = 0; done < count; done += step) {
        const int64 n = std::min(step, count - done);
        cache.attend(from, first + done, n, out.out(done, n));
    }
    return out;
}

// What a cache will say from now on, in all bits: 75 more tokens, decoded, then in one call. The cache is not touched.
tensor future_of(const any_cache& cache) {
    const stream later(75, 99, cache.shape());
    any_cache one = cache, other = cache;
    const tensor decoded = attend(one, later, 0, 75, 1), together = attend(other, later, 0, 75, 75);
    tensor both(150, cache.shape().heads, cache.shape().value_dim);
    both.for_each([&](int64 t, int64 h, int64 d) {
        both.set(t, h, d, t < 75 ? decoded.get(t, h, d) : together.get(t - 75, h, d));
    });
    return both;
}

bool same(const any_cache& a, const any_cache& b) { return a.length() == b.length() && future_of(a) == future_of(b); }

// What a window must hold: the sinks, and the last window + slack tokens.
std::vector<int64> window_positions(int64 length, int64 window, int64 sinks) {
    std::vector<int64> list;
    for (int64 p = 0; p < length; ++p)
        if (p < sinks || p >= length - window) list.push_back(p);
    return list;
}

// A score function of a user's.
struct halved {
    template <class N, class Site>
    constexpr N operator()(N s, const Site&) const {
        return s * N(0.5f);
    }
};

// The message of the sash::error that f throws.
template <class F>
std::string message_of(F&& f) {
    try {
        f();
    } catch (const sash::error& e) { return e.what(); }
    return "nothing was refused";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// What it holds

TEST_CASE("R09 R10: a window holds its sinks and its last tokens, and says which") {
    const stream s = tokens(300);
    for (const int64 slack : {0, 1, 50})
        for (const int64 step : {1, 7, 150}) {
            CAPTURE(slack, step);
            any_cache cache = small_cache(small_window, {.rollback_slack = slack});
            CHECK(cache.positions().empty());
            for (int64 done = 0; done < 300; done += step) {
                cache.append(s, done, std::min(step, 300 - done));
                const int64 length = std::min(done + step, int64{300});
                REQUIRE(cache.length() == length);
                REQUIRE(cache.positions() == window_positions(length, 20 + slack, 3));
                REQUIRE(cache.stored() == static_cast<int64>(cache.positions().size()));
            }
        }
}

TEST_CASE("Full attention holds every token, a recurrent policy none") {
    const stream s = tokens(150);
    any_cache full(small<sash::full>(), sash::storage{});
    full.append(s, 0, 150);
    CHECK(full.positions() == window_positions(150, 150, 0));
    CHECK(full.stored() == 150);
    any_cache linear(small<sash::linear<>>(), sash::storage{.rollback_slack = 4});
    linear.append(s, 0, 150);
    CHECK(linear.length() == 150);
    CHECK(linear.stored() == 0);
    CHECK(linear.positions().empty());
}

TEST_CASE("Sinks beyond the window, and many of them, are counted once") {
    const stream s = tokens(200);
    any_cache cache = small_cache({.window = 2, .sinks = 90});
    for (int64 t = 0; t < 200; ++t) {
        cache.append(s, t, 1);
        REQUIRE(cache.positions() == window_positions(t + 1, 2, 90));
    }
}

TEST_CASE("R28: a hard capacity is refused before anything is written") {
    const stream s = tokens(100);
    CHECK(small<sash::full>().make({.capacity = 10}).capacity() == 10);
    CHECK(small<sash::full>().make().capacity() == std::numeric_limits<int64>::max());
    any_cache full(small<sash::full>(), sash::storage{.capacity = 10});
    full.append(s, 0, 9);
    const file_bytes before = full.save();
    const std::string message = message_of([&] { full.append(s, 9, 2); });
    CHECK(contains(message, "11"));
    CHECK(contains(message, "10"));
    CHECK((full.save() == before));
    full.append(s, 9, 1);
    CHECK_THROWS_AS(full.append(s, 10, 1), sash::error);
    full.rollback(3);
    full.append(s, 10, 3);
    CHECK(full.length() == 10);

    any_cache roomy = small_cache({.window = 6, .sinks = 2}, {.capacity = 8});
    roomy.append(s, 0, 100);  // holds 8 at a time, for ever
    CHECK(roomy.stored() == 8);
    any_cache tight = small_cache({.window = 6, .sinks = 2}, {.capacity = 7});
    tight.append(s, 0, 7);
    CHECK_THROWS_AS(tight.append(s, 7, 1), sash::error);
    CHECK(tight.length() == 7);
}

TEST_CASE("A file that holds more than the capacity is refused") {
    const stream s = tokens(20);
    any_cache roomy(small<sash::full>(), sash::storage{}), tight(small<sash::full>(), sash::storage{.capacity = 10});
    roomy.append(s, 0, 20);
    tight.append(s, 0, 3);
    const file_bytes before = tight.save();
    CHECK_THROWS_AS(tight.load(roomy.save()), sash::error);
    CHECK((tight.save() == before));
}

// ---------------------------------------------------------------------------------------------------------------------
// What it costs

TEST_CASE("After reserve, appending and decoding allocate nothing") {
    const stream s = tokens(400);
    for_each_kind([&](const maker& make) {
        poisoned_memory memory;
        auto cache = make({.memory = memory.source()});
        cache.append(s, 0, 5);
        cache.reserve(400);
        CHECK(cache.length() == 5);
        sash::workspace scratch(std::max(cache.workspace_bytes(1), cache.workspace_bytes(395)) + 100000);
        const sash::options how{.run = sash::serial{}, .workspace = &scratch};
        const int64 calls = memory.calls();
        tensor out(400, small_shape.heads, small_shape.value_dim);
        for (int64 t = 5; t < 150; ++t) cache.attend(s, t, 1, out.out(t, 1), how);
        cache.append(s, 150, 200, how);
        cache.attend(s, 350, 50, out.out(350, 50), how);
        CHECK(memory.calls() == calls);
        auto plain = make({});  // states have the same bits where the calls have: long ones go in chunks
        for (const auto& [first, count] : {std::pair{0, 5}, {5, 145}, {150, 200}, {350, 50}})
            for (int64 t = first; t < first + count; t += first == 5 ? 1 : count)
                plain.append(s, t, first == 5 ? 1 : count);
        CHECK(same(cache, plain));
        cache.reserve(1);
        cache.reserve(0);
        CHECK(cache.length() == 400);
    });
}

TEST_CASE("A bounded cache reserves no more than its window, whatever is asked") {
    poisoned_memory memory;
    any_cache cache = small_cache(small_window, {.memory = memory.source()});
    cache.reserve(int64{1} << 50);
    CHECK(memory.live() < 100000);
}

TEST_CASE("Memory is bounded for ever, and steady decoding allocates nothing") {
    const sash::shape shape{.heads = 2, .kv_heads = 1, .head_dim = 8};
    const stream s(100, 1, shape);
    poisoned_memory memory;
    const auto run = [&](any_cache cache) {
        int64 calls = 0, held = 0;
        for (int64 t = 0; t < 20000; ++t) {
            attend(cache, s, t % 100, 1, 1);
            if (t == 600) calls = memory.calls(), held = cache.bytes();
        }
        CHECK(memory.calls() == calls);
        CHECK(cache.bytes() == held);
        CHECK(cache.bytes() < 200000);
        for (int64 t = 0; t < 50; ++t) attend(cache, s, 0, 100, 100);  // nor does prefill, after its first call
        const int64 after_prefill = cache.bytes(), calls_after = memory.calls();
        for (int64 t = 0; t < 50; ++t) attend(cache, s, 0, 100, 100);
        CHECK(cache.bytes() == after_prefill);
        CHECK(memory.calls() == calls_after);
        CHECK(cache.length() == 30000);
    };
    const sash::storage storage{.memory = memory.source()};
    run(any_cache(kind<sash::sliding_window>{{.window = 100, .sinks = 5}, {}, shape}, storage));
    run(any_cache(kind<sash::sliding_window, sash::float16>{{.window = 100, .sinks = 5}, {}, shape}, storage));
    run(any_cache(kind<sash::linear<>>{{}, {}, shape}, storage));
}

TEST_CASE("A window of several pieces allocates nothing once its ring is full") {
    const sash::shape shape{.heads = 4, .kv_heads = 1, .head_dim = 8};
    const stream s(300, 1, shape);
    for (const int64 key_piece : {100, 512})
        for (const int64 tokens : {1, 3})
            for (const int64 window : {100, 640, 1100, 2100})
                for (const int64 sinks : {0, 4, 100}) {
                    poisoned_memory memory;
                    const sash::sliding_window policy{.window = window, .sinks = sinks};
                    sash::kv_cache<sash::sliding_window> cache(policy, shape, {}, {.memory = memory.source()});
                    sash::workspace scratch(0, memory.source());
                    std::vector<float> out(std::size_t(tokens * 4 * 8));
                    int64 calls = 0;
                    for (int64 t = 0; t < 2 * window + sinks + 2000; t += tokens) {
                        const int64 at = t % 297;
                        sash::attend(s.query.in(at, tokens), s.key.in(at, tokens), s.value.in(at, tokens), cache,
                                     {out.data(), tokens, 4, 8},
                                     {.run = sash::serial{}, .workspace = &scratch, .key_piece = key_piece});
                        if (t <= window + sinks + 64) calls = memory.calls();
                    }
                    CAPTURE(key_piece, tokens, window, sinks);
                    CHECK(memory.calls() == calls);
                }
}

TEST_CASE("bytes() is what the memory source has given") {
    const stream s = tokens(700);
    for_each_kind([&](const maker& make) {
        for (const int64 slack : {0, 20}) {
            poisoned_memory memory;
            {
                auto cache = make({.rollback_slack = slack, .auxiliary = 5, .memory = memory.source()});
                for (int64 t = 0; t < 700; t += 100) {
                    attend(cache, s, t, 100, 33);
                    const auto live = static_cast<int64>(memory.live());
                    CHECK(cache.bytes() <= live);
                    CHECK(live - cache.bytes() < 512);  // tables of the scores, and rounding to cache lines
                }
                auto other = std::move(cache);
                attend(cache, s, 0, 5, 5);  // moved from and used again: still from its source
                CHECK(cache.bytes() + other.bytes() <= static_cast<int64>(memory.live()));
            }
            CHECK(memory.live() == 0);
            CHECK(memory.consistent());
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Copies and moves

TEST_CASE("R13: forks are independent") {
    const stream s = tokens(400), other = tokens(400, 2);
    for_each_kind([&](const maker& make) {
        for (const int64 length : {0, 1, 63, 64, 65, 128, 200}) {
            CAPTURE(length);
            poisoned_memory memory;
            const sash::storage storage{.memory = memory.source()};
            auto original = make(storage), undisturbed = make(storage), with_other = make(storage);
            for (any_cache* c : {&original, &undisturbed, &with_other}) c->append(s, 0, length);
            auto fork = original;
            auto second = fork;
            CHECK(same(fork, undisturbed));

            const tensor expected = attend(undisturbed, s, length, 100, 9),
                         otherwise = attend(with_other, other, 0, 100, 9);
            CHECK(attend(fork, other, 0, 100, 9) == otherwise);      // the fork first
            CHECK(attend(original, s, length, 100, 9) == expected);  // then the original
            CHECK(same(original, undisturbed));
            CHECK(same(fork, with_other));
            {
                const auto gone = std::move(original);  // a fork outlives what it was copied from
            }
            CHECK(attend(second, s, length, 100, 9) == expected);
            second = fork;  // assignment replaces
            CHECK(same(second, with_other));
        }
    });
}

TEST_CASE("R13: what is shared is copied before it is written, after a rollback or a reset") {
    const stream s = tokens(300), other = tokens(300, 2);
    for_each_kind([&](const maker& make) {
        auto original = make({.rollback_slack = 300});
        original.append(s, 0, 230);
        const auto fork = original;
        const tensor before = future_of(fork);
        for (const int64 back : {1, 29, 120}) {
            auto again = fork;
            again.rollback(back);
            again.append(other, 0, 150);  // over tokens that the fork still reads
            CHECK(future_of(fork) == before);
        }
        original.reset();
        original.append(other, 0, 250);
        CHECK(future_of(fork) == before);
        auto fresh = make({.rollback_slack = 300});
        fresh.append(other, 0, 250);
        CHECK(same(original, fresh));
    });
}

TEST_CASE("A fork of a 32k-token cache moves less than one segment") {
    const sash::shape shape{.heads = 2, .kv_heads = 2, .head_dim = 64};
    const stream s(1, 1, shape);
    poisoned_memory memory;
    using cache_type = sash::kv_cache<sash::full, sash::float16>;
    cache_type cache({}, shape, {}, {.memory = memory.source()});
    sash::input key = s.key.in();  // one token, as often as needed
    key.token_stride = 0;
    const auto grow_to = [&](int64 length) {
        while (cache.length() < length) {
            key.tokens = std::min<int64>(64, length - cache.length());
            sash::append(key, key, cache);
        }
    };
    const auto moved_by = [&](auto&& f) {
        const std::size_t before = memory.allocated();
        f();
        return memory.allocated() - before;
    };
    grow_to(32768 + 100);
    const std::size_t segment = memory.largest(), list = 4096;
    REQUIRE(cache.bytes() > static_cast<int64>(8 * segment));
    REQUIRE(segment < (std::size_t{2} << 20) * 11 / 10);  // 1 MiB a head, about

    // Room for the last segment, of which only the tokens there are get copied; and the list of segments.
    CHECK(moved_by([&] {
              const cache_type fork = cache;
              CHECK(fork.bytes() > static_cast<int64>(8 * segment));
          }) <= segment + list);
    CHECK(moved_by([&] {
              std::vector<cache_type> beams(16, cache);
              for (auto& beam : beams) sash::append(s.key.in(), s.value.in(), beam);
              for (auto& beam : beams) CHECK(beam.length() == cache.length() + 1);
          }) <= 17 * (segment + list) + 16 * 65536);  // each its last segment, and scratch

    // Where the last segment is full there is nothing to copy at all.
    const int64 calls = memory.calls();
    for (int64 length = cache.length(); memory.calls() == calls; ++length) grow_to(length);
    cache.rollback(1);  // the token for which a segment was added
    CHECK(moved_by([&] { const cache_type fork = cache; }) <= list);
}

TEST_CASE("Moves are noexcept and leave an empty cache of the same shape") {
    static_assert(std::is_nothrow_move_constructible_v<sash::kv_cache<sash::full>>);
    static_assert(std::is_nothrow_move_assignable_v<sash::kv_cache<sash::full>>);
    static_assert(std::is_nothrow_move_constructible_v<sash::kv_cache<sash::sliding_window, sash::float16>>);
    static_assert(std::is_nothrow_move_constructible_v<sash::kv_cache<sash::linear<>>>);
    static_assert(std::is_nothrow_move_assignable_v<sash::kv_cache<sash::linear<>>>);
    static_assert(std::is_nothrow_swappable_v<sash::kv_cache<sash::sliding_window>>);
    const stream s = tokens(200);
    for_each_kind([&](const maker& make) {
        for (const int64 slack : {0, 10}) {
            poisoned_memory memory;
            {
                const sash::storage storage{.rollback_slack = slack, .auxiliary = 3, .memory = memory.source()};
                auto cache = make(storage);
                const auto fresh = make(storage);
                cache.append(s, 0, 150);
                cache.auxiliary()[1] = 5;
                const tensor before = future_of(cache);
                const int64 calls = memory.calls();
                auto other = std::move(cache);
                CHECK(memory.calls() == calls);
                CHECK(future_of(other) == before);
                CHECK(other.auxiliary()[1] == 5);

                // NOLINTBEGIN: a moved-from cache is a cache
                CHECK(cache.length() == 0);
                CHECK(cache.stored() == 0);
                CHECK(cache.shape() == fresh.shape());
                CHECK(cache.can_rollback(0));
                CHECK_FALSE(cache.can_rollback(1));
                CHECK((cache.save() == fresh.save()));
                CHECK(same(cache, fresh));
                CHECK(cache.auxiliary().size() == 3);
                CHECK(cache.auxiliary()[1] == 0);
                const auto copy = cache;
                CHECK(same(copy, fresh));
                cache.rollback(0);
                cache.reset();
                CHECK(cache.load(other.save()) > 0);
                CHECK(future_of(cache) == before);
                // NOLINTEND

                std::swap(cache, other);
                cache = std::move(other);  // over a full one
                CHECK(future_of(cache) == before);
                auto& itself = cache;
                cache = std::move(itself);
                CHECK(future_of(cache) == before);
                cache = itself;
                CHECK(future_of(cache) == before);
            }
            CHECK(memory.live() == 0);
            CHECK(memory.consistent());
        }
    });
}

TEST_CASE("Reset makes a cache new and keeps its memory") {
    const stream s = tokens(300);
    for_each_kind([&](const maker& make) {
        poisoned_memory memory;
        auto cache = make({.rollback_slack = 4, .memory = memory.source()});
        const auto fresh = make({.rollback_slack = 4});
        attend(cache, s, 0, 300, 100);
        const int64 calls = memory.calls();
        cache.reset();
        CHECK(cache.length() == 0);
        CHECK(cache.stored() == 0);
        attend(cache, s, 0, 300, 100);
        CHECK(memory.calls() == calls);
        cache.reset();
        CHECK((cache.save() == fresh.save()));
        attend(cache, s, 0, 77, 20);
        cache.reset();
        CHECK(same(cache, fresh));
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Back in time

TEST_CASE("R12 R25: rollback is exact, or refused with nothing changed") {
    const stream s = tokens(300), drafts = tokens(300, 2);
    for_each_kind([&](const maker& make) {
        for (const int64 slack : {0, 1, 5, 70})
            for (const int64 length : {1, 15, 64, 150})
                for (const int64 count : {0, 1, 4, 5, 6, 70, 71}) {
                    CAPTURE(slack, length, count);
                    const sash::storage storage{.rollback_slack = slack};
                    auto cache = make(storage), undisturbed = make(storage);
                    cache.append(s, 0, length);
                    undisturbed.append(s, 0, length);
                    cache.append(drafts, 0, count);
                    const bool can = cache.can_rollback(count);
                    if (cache.grows() || count <= slack) REQUIRE(can);
                    if (can) {
                        cache.rollback(count);
                        CHECK(same(cache, undisturbed));
                    } else {
                        const file_bytes before = cache.save();
                        const tensor future = future_of(cache);
                        const std::string message = message_of([&] { cache.rollback(count); });
                        CHECK(contains(message, std::to_string(count)));
                        CHECK(contains(message, "rollback_slack is " + std::to_string(slack)));
                        CHECK((cache.save() == before));
                        CHECK(future_of(cache) == future);
                    }
                }
    });
}

TEST_CASE("R12: rollback of nothing, of more than there is, and of a negative number") {
    const stream s = tokens(100);
    for_each_kind([&](const maker& make) {
        auto cache = make({.rollback_slack = 10});
        CHECK(cache.can_rollback(0));
        CHECK_FALSE(cache.can_rollback(1));
        cache.append(s, 0, 50);
        const file_bytes before = cache.save();
        cache.rollback(0);
        for (const int64 count : {int64{51}, int64{1000}, int64{-1}, std::numeric_limits<int64>::max(),
                                  std::numeric_limits<int64>::min()}) {
            CAPTURE(count);
            CHECK_FALSE(cache.can_rollback(count));
            CHECK_THROWS_AS(cache.rollback(count), sash::error);
        }
        CHECK((cache.save() == before));
    });
}

TEST_CASE("R12: rolled back into the sinks, a window keeps those that are left") {
    const stream s = tokens(100), other = tokens(100, 2);
    any_cache cache = small_cache({.window = 8, .sinks = 2}), undisturbed = small_cache({.window = 8, .sinks = 2});
    cache.append(s, 0, 8);
    undisturbed.append(s, 0, 1);
    cache.rollback(7);
    CHECK(cache.positions() == std::vector<int64>{0});
    CHECK(attend(cache, other, 0, 60, 7) == attend(undisturbed, other, 0, 60, 7));
    CHECK(same(cache, undisturbed));
}

TEST_CASE("R12 R25: a walk of appends and rollbacks leaves what the surviving tokens alone would have left") {
    const stream pool = tokens(4000);
    for_each_kind([&](const maker& make) {
        for (const int64 slack : {3, 40}) {
            numbers random(static_cast<std::uint64_t>(slack));
            auto cache = make({.rollback_slack = slack});
            std::vector<int64> history;  // tokens of the pool that survive, in order
            int64 next = 0;
            for (int step = 0; step < 120; ++step) {
                CAPTURE(slack, step);
                const int64 count = random.pick({1, 1, 2, 3, 17, 64});
                cache.append(pool, next, count);
                for (int64 i = 0; i < count; ++i) history.push_back(next++);
                const int64 back = random.pick({0, 1, 2, 3, 20, 40, 41, 200});
                if (cache.can_rollback(back)) {
                    cache.rollback(back);
                    history.resize(history.size() - static_cast<std::size_t>(back));
                } else {
                    CHECK_THROWS_AS(cache.rollback(back), sash::error);
                }
                REQUIRE(cache.length() == static_cast<int64>(history.size()));
                if (step % 10 != 9 || history.empty()) continue;
                // An independent witness: the reference over the surviving tokens.
                const auto n = static_cast<int64>(history.size());
                stream survived = tokens(n);
                for (tensor stream::*member : {&stream::key, &stream::value, &stream::decay}) {
                    tensor& to = survived.*member;
                    const tensor& from = pool.*member;
                    to.for_each([&](int64 t, int64 h, int64 d) {
                        to.set(t, h, d, from.get(history[static_cast<std::size_t>(t)], h, d));
                    });
                }
                tensor query(1, small_shape.heads, small_shape.key_dim),
                    out(1, small_shape.heads, small_shape.value_dim);
                query.fill(random);
                cache.read(query.in(), out.out());
                // Keys that the library turned may round to the neighbouring float16.
                const test::tolerance within =
                    cache.rounds_after_turning() ? test::tolerance{2e-3, 1e-5} : test::tolerance{2e-6, 1e-5};
                CHECK(test::differs(out, cache.expected(survived, query.in()), within) == "");
            }
        }
    });
}

TEST_CASE("A checkpoint brings back every policy, as often as asked") {
    const stream s = tokens(300), other = tokens(300, 2);
    for_each_kind([&](const maker& make) {
        for (const int64 length : {0, 10, 130}) {
            CAPTURE(length);
            auto cache = make({.auxiliary = 2});
            cache.append(s, 0, length);
            cache.auxiliary()[0] = 7;
            const tensor future = future_of(cache);
            const auto checkpoint = cache.checkpoint();
            for (const int64 count : {1, 64, 200}) {
                cache.append(other, 0, count);
                cache.auxiliary()[0] = 8;
                cache.restore(checkpoint);
                CHECK(cache.length() == length);
                CHECK(future_of(cache) == future);
                CHECK(cache.auxiliary()[0] == 7);
            }
            auto fork = cache;
            fork.append(other, 0, 30);
            fork.restore(checkpoint);
            CHECK(future_of(fork) == future);
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Files

TEST_CASE("R14: a file gives back the cache, bit for bit, and what it could roll back") {
    const stream s = tokens(400);
    for_each_kind([&](const maker& make) {
        for (const int64 slack : {0, 9})
            for (const int64 length : {0, 1, 2, 63, 64, 65, 90, 300}) {
                CAPTURE(slack, length);
                poisoned_memory memory;
                const sash::storage storage{.rollback_slack = slack, .auxiliary = 3, .memory = memory.source()};
                auto cache = make(storage);
                cache.append(s, 0, length);
                cache.auxiliary()[2] = 0.1f;
                const file_bytes file = cache.save();
                CHECK(file.size() == cache.saved_bytes());
                auto loaded = make(storage);
                loaded.append(s, 100, 77);  // what was there is replaced
                CHECK(loaded.load(file) == file.size());
                CHECK(same(loaded, cache));
                CHECK(loaded.positions() == cache.positions());
                CHECK(loaded.auxiliary()[2] == 0.1f);
                CHECK((loaded.save() == file));
                for (const int64 back : {1, 9, 10, 60}) {
                    REQUIRE(loaded.can_rollback(back) == cache.can_rollback(back));
                    if (!loaded.can_rollback(back)) continue;
                    auto a = loaded, b = cache;
                    a.rollback(back);
                    b.rollback(back);
                    CHECK(same(a, b));
                }
            }
    });
}

TEST_CASE("R14: load uses its own bytes and no more") {
    const stream s = tokens(100);
    for_each_kind([&](const maker& make) {
        auto first = make({}), second = make({}), cache = make({});
        first.append(s, 0, 30);
        second.append(s, 50, 41);
        file_bytes both = first.save();
        const std::size_t length = both.size();
        const file_bytes more = second.save();
        both.insert(both.end(), more.begin(), more.end());
        both.resize(both.size() + 13, std::byte{0x5a});
        CHECK(cache.load(both) == length);
        CHECK(same(cache, first));
        CHECK(cache.load(std::span(both).subspan(length)) == more.size());
        CHECK(same(cache, second));
    });
}

TEST_CASE("R14: every damaged byte and every truncation is refused, and the target stays as it was") {
    const sash::shape shape{.heads = 2, .kv_heads = 1, .key_dim = 3, .value_dim = 2};
    const stream s(20, 1, shape);
    const auto check = [&](any_cache saved) {
        any_cache target = saved;
        saved.append(s, 0, 7);
        target.append(s, 7, 9);
        const file_bytes file = saved.save(), before = target.save();
        int64 accepted = 0, changed = 0;
        for (std::size_t i = 0; i < file.size(); ++i)
            for (const int flip : {0x01, 0x10, 0x80, 0xff}) {
                file_bytes damaged = file;
                damaged[i] ^= static_cast<std::byte>(flip);
                try {
                    target.load(damaged);
                    ++accepted;
                } catch (const sash::error&) {}
                changed += target.save() != before;
            }
        for (std::size_t length = 0; length < file.size(); ++length) {
            const file_bytes shortened(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(length));
            try {
                target.load(shortened);
                ++accepted;
            } catch (const sash::error&) {}
            changed += target.save() != before;
        }
        for (std::size_t i = 0; i + 1 < file.size(); i += 8)  // two bytes exchanged
            if (file_bytes damaged = file; damaged[i] != damaged[i + 1]) {
                std::swap(damaged[i], damaged[i + 1]);
                CHECK_THROWS_AS(target.load(damaged), sash::error);
            }
        CHECK(accepted == 0);
        CHECK(changed == 0);
        CHECK(target.load(file) == file.size());  // the undamaged one is taken
    };
    const sash::storage storage{.rollback_slack = 2, .auxiliary = 1};
    check(any_cache(kind<sash::full>{{}, {}, shape}, storage));
    check(any_cache(kind<sash::sliding_window, sash::float16>{{.window = 3, .sinks = 2}, {}, shape}, storage));
    check(any_cache(kind<sash::linear<>>{{}, {}, shape}, storage));
    check(any_cache(kind<gated>{{}, {}, shape}, storage));
}

TEST_CASE("R14: a file whose numbers cannot be is refused even with a checksum that fits") {
    const stream s = tokens(60);
    const auto forge = [](file_bytes file, std::size_t at, int64 value) {
        std::memcpy(file.data() + at, &value, sizeof value);
        sash::detail::fingerprint sum;
        sum.add(file.data(), file.size() - sizeof sum.value);
        std::memcpy(file.data() + file.size() - sizeof sum.value, &sum.value, sizeof sum.value);
        return file;
    };
    for_each_kind([&](const maker& make) {
        poisoned_memory memory;
        auto cache = make({.rollback_slack = 3, .memory = memory.source()});
        cache.append(s, 0, 60);
        const file_bytes file = cache.save();
        const std::size_t store = sizeof(sash::detail::file_header);
        REQUIRE((forge(file, store, 60) == file));  // the length lies there: the forgery itself is in order
        const std::size_t allocated = memory.allocated();
        for (const int64 length :
             {int64{-1}, int64{59}, int64{61}, int64{1} << 40, int64{1} << 62, std::numeric_limits<int64>::min()}) {
            CAPTURE(length);
            if (!cache.softmax() && length > 0 && length < int64{1} << 60) continue;  // a state may have any length
            CHECK_THROWS_AS(cache.load(forge(file, store, length)), sash::error);
        }
        for (const int64 oldest : {int64{-1}, int64{61}, int64{1} << 50}) {
            CAPTURE(oldest);
            CHECK_THROWS_AS(cache.load(forge(file, store + 8, oldest)), sash::error);
        }
        CHECK(memory.allocated() - allocated < 2000000);  // nothing is allocated for a length that is not there
        CHECK((cache.save() == file));
    });
}

TEST_CASE("R14: the file of another policy, shape, element or score is refused, and the target stays as it was") {
    const std::vector<float> slopes{0.1f, 0.2f, 0.3f, 0.4f}, other_slopes{0.1f, 0.2f, 0.3f, 0.5f};
    const std::vector<double> other_frequencies = {1, 0.3, 0.02};
    const auto refuses = [&](any_cache target, any_cache source) {
        target.append(stream(10, 1, target.shape()), 0, 10);
        source.append(stream(25, 1, source.shape()), 0, 25);
        const file_bytes before = target.save();
        const std::string message = message_of([&] { target.load(source.save()); });
        return contains(message, "another policy") && target.save() == before;
    };
    const auto empty = [](const auto& k) { return any_cache(k, sash::storage{}); };
    const any_cache window = small_cache(small_window), full = empty(small<sash::full>()),
                    linear = empty(small<sash::linear<>>());
    SECTION("policy") {
        CHECK(refuses(window, small_cache({.window = 21, .sinks = 3})));
        CHECK(refuses(window, small_cache({.window = 20, .sinks = 2})));
        CHECK(refuses(window, full));
        CHECK(refuses(full, window));
        CHECK(refuses(window, linear));
        CHECK(refuses(linear, empty(small<sash::linear<sash::relu>>())));
        const sash::score turned{.rotary = {.frequencies = frequencies}};
        CHECK(refuses(
            empty(small(small_window, turned)),
            empty(small(sash::sliding_window{.window = 20, .sinks = 3, .frame = sash::frame::compact}, turned))));
    }
    SECTION("what a linear policy forgets or divides by") {
        using sash::additive, sash::no_normaliser, sash::no_decay, sash::per_head_and_token;
        CHECK(refuses(linear, empty(small<gated>())));
        CHECK(refuses(linear, empty(small<sash::linear<sash::elu_plus_one, no_decay, additive, no_normaliser>>())));
        CHECK(refuses(empty(small<sash::linear<sash::identity, no_decay, additive, no_normaliser>>()),
                      empty(small<sash::linear<sash::identity, per_head_and_token, additive, no_normaliser>>())));
    }
    SECTION("learned maps") {
        const std::vector<float> weights(100, 0.1f);
        std::vector<float> others = weights;
        others[57] = 0.2f;
        using learned = sash::linear<sash::hedgehog>;
        const auto with = [&](const sash::hedgehog& map) { return empty(small(learned{.map = map})); };
        const any_cache plain = with({});
        CHECK(refuses(with({.query_weights = weights, .key_weights = weights}),
                      with({.query_weights = weights, .key_weights = others})));
        CHECK(refuses(with({.query_weights = weights, .key_weights = weights}),
                      with({.query_weights = others, .key_weights = weights})));
        CHECK(refuses(plain, with({.query_weights = weights, .key_weights = weights})));
        CHECK(refuses(plain, with({.form = sash::hedgehog_form::h2})));
    }
    SECTION("shape") {
        for (const sash::shape& shape :
             {sash::shape{.heads = 8, .kv_heads = 2, .key_dim = 10, .value_dim = 7},
              sash::shape{.heads = 4, .kv_heads = 4, .key_dim = 10, .value_dim = 7},
              sash::shape{.heads = 4, .kv_heads = 2, .key_dim = 7, .value_dim = 10},
              sash::shape{.heads = 4, .kv_heads = 2, .key_dim = 10, .value_dim = 8},
              sash::shape{.heads = 4, .kv_heads = 2, .key_dim = 10, .value_dim = 7, .query_heads = 2}})
            CHECK(refuses(window, empty(kind<sash::sliding_window>{small_window, {}, shape})));
    }
    SECTION("element") {
        CHECK(refuses(window, empty(small<sash::sliding_window, sash::float16>(small_window))));
        CHECK(refuses(empty(small<sash::sliding_window, sash::bfloat16>(small_window)),
                      empty(small<sash::sliding_window, sash::float16>(small_window))));
    }
    SECTION("score") {
        const sash::score scores[] = {
            {},
            {.scale = 0.5f},
            {.soft_cap = 5},
            {.soft_cap = 6},
            {.alibi = slopes},
            {.alibi = other_slopes},
            {.sink_logits = slopes},
            {.sink_logits = other_slopes},
            {.rotary = {.frequencies = frequencies}},
            {.rotary = {.frequencies = other_frequencies}},
            {.rotary = {.frequencies = frequencies, .layout = sash::rotary_layout::interleaved}},
            {.rotary = {.frequencies = frequencies, .by = sash::rotates::library}},
            {.custom = halved{}}};
        for (const sash::score& a : scores)
            for (const sash::score& b : scores)
                if (&a != &b) CHECK(refuses(empty(small(small_window, a)), empty(small(small_window, b))));
    }
}

TEST_CASE("R14: bytes that are no file, and room that is too small") {
    const stream s = tokens(30);
    any_cache cache(small<sash::full>(), sash::storage{});
    cache.append(s, 0, 30);
    const file_bytes before = cache.save();
    numbers random(5);
    for (const std::size_t size :
         {std::size_t{0}, std::size_t{1}, std::size_t{31}, std::size_t{32}, std::size_t{100}, std::size_t{10000}}) {
        file_bytes noise(size);
        for (std::byte& b : noise) b = static_cast<std::byte>(random.below(256));
        CHECK_THROWS_AS(cache.load(noise), sash::error);
    }
    file_bytes tight(cache.saved_bytes() - 1, std::byte{0x11});
    const file_bytes untouched = tight;
    const std::string message = message_of([&] { cache.save(std::span<std::byte>(tight)); });
    CHECK(contains(message, std::to_string(cache.saved_bytes())));
    CHECK((tight == untouched));
    CHECK((cache.save() == before));
}

// ---------------------------------------------------------------------------------------------------------------------
// The layers of a model

TEST_CASE("R12: a range of caches rolls back together or not at all") {
    const stream s = tokens(300);
    const auto k = small(small_window);
    std::vector<sash::kv_cache<sash::sliding_window>> layers;
    for (const int64 slack : {40, 40, 2}) layers.push_back(k.make({.rollback_slack = slack}));
    for (auto& layer : layers) sash::append(s.key.in(0, 100), s.value.in(0, 100), layer);
    const file_bytes before = sash::save(layers);
    CHECK_FALSE(sash::can_rollback(layers, 3));  // the last one cannot
    CHECK_THROWS_AS(sash::rollback(layers, 3), sash::error);
    CHECK_THROWS_AS(sash::rollback(layers, -1), sash::error);
    CHECK((sash::save(layers) == before));
    CHECK(sash::can_rollback(layers, 2));
    sash::rollback(layers, 2);
    any_cache undisturbed = small_cache(small_window);
    undisturbed.append(s, 0, 98);
    for (const auto& layer : layers) CHECK(same(any_cache(k, layer), undisturbed));

    std::array few{layers[0], layers[1]};  // any range will do
    const std::list listed(layers.begin(), layers.end());
    CHECK(sash::can_rollback(few, 38));
    CHECK_FALSE(sash::can_rollback(listed, 38));
    sash::rollback(few, 38);
    CHECK(few[1].length() == 60);
    sash::rollback(std::span(layers).first(2), 1);
    CHECK(layers[0].length() == 97);
    CHECK(layers[2].length() == 98);
}

// Calls f(kind) for caches that keep their past in different ways.
template <class F>
void for_typed_kinds(F&& f) {
    f(small<sash::full>());
    f(small<gated>());
}

TEST_CASE("A range of caches returns to its checkpoints together or not at all") {
    const stream s = tokens(300);
    for_typed_kinds([&]<class P, class E>(const kind<P, E>& k) {
        std::vector layers(3, k.make());
        for (std::size_t i = 0; i < layers.size(); ++i)
            sash::append(tokens_of<P>(s, static_cast<int64>(50 * i), 90), layers[i]);
        const file_bytes before = sash::save(layers);
        const auto checkpoints = sash::checkpoint(layers);
        for (auto& layer : layers) sash::append(tokens_of<P>(s, 200, 33), layer);
        const file_bytes later = sash::save(layers);
        std::vector fewer(layers.begin(), layers.begin() + 2);
        CHECK_THROWS_AS(sash::restore(fewer, checkpoints), sash::error);
        CHECK((sash::save(layers) == later));
        for (int twice = 0; twice < 2; ++twice) {
            sash::restore(layers, checkpoints);
            CHECK((sash::save(layers) == before));
            sash::append(tokens_of<P>(s, 0, 5), layers[1]);
        }
    });
}

TEST_CASE("R14: a range of caches is loaded together or not at all") {
    const stream s = tokens(300);
    for_typed_kinds([&]<class P, class E>(const kind<P, E>& k) {
        std::vector layers(3, k.make()), others(3, k.make());
        for (std::size_t i = 0; i < layers.size(); ++i) {
            sash::append(tokens_of<P>(s, static_cast<int64>(50 * i), 30), layers[i]);
            sash::append(tokens_of<P>(s, static_cast<int64>(10 * i), 40), others[i]);
        }
        file_bytes file = sash::save(layers);
        const file_bytes before = sash::save(others);
        for (const std::size_t at : {std::size_t{9}, file.size() / 2, file.size() - 3}) {
            file_bytes damaged = file;
            damaged[at] ^= std::byte{4};
            CHECK_THROWS_AS(sash::load(others, damaged), sash::error);
            CHECK((sash::save(others) == before));
        }
        CHECK_THROWS_AS(sash::load(others, std::span(file).first(file.size() - 1)), sash::error);
        std::vector more(4, k.make());
        CHECK_THROWS_AS(sash::load(more, file), sash::error);  // three files for four layers
        for (auto& layer : more) CHECK(layer.empty());
        CHECK((sash::save(others) == before));

        file.push_back(std::byte{1});
        CHECK(sash::load(others, file) == file.size() - 1);
        for (std::size_t i = 0; i < layers.size(); ++i) CHECK(same(any_cache(k, others[i]), any_cache(k, layers[i])));
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Auxiliary floats, and memory that runs out

TEST_CASE("Auxiliary floats are zero at first and go where the cache goes") {
    const stream s = tokens(50);
    for_each_kind([&](const maker& make) {
        poisoned_memory memory;
        auto cache = make({.auxiliary = 4, .memory = memory.source()});
        const auto list = [](const auto& c) { return std::vector<float>(c.auxiliary().begin(), c.auxiliary().end()); };
        CHECK(list(cache) == std::vector<float>(4));
        cache.append(s, 0, 50);
        for (std::size_t i = 0; i < 4; ++i) cache.auxiliary()[i] = static_cast<float>(i) + 1;
        const std::vector<float> set{1, 2, 3, 4};
        CHECK(list(std::as_const(cache)) == set);
        auto fork = cache;
        fork.auxiliary()[0] = 9;
        CHECK(list(cache) == set);
        CHECK(list(fork) == std::vector<float>{9, 2, 3, 4});
        fork.restore(cache.checkpoint());
        CHECK(list(fork) == set);
        cache.reset();
        CHECK(list(cache) == std::vector<float>(4));
        CHECK(list(fork) == set);
        cache.load(fork.save());
        CHECK(list(cache) == set);
        cache = std::move(fork);
        CHECK(list(cache) == set);
        CHECK(make({}).auxiliary().empty());
        auto without = make({});
        CHECK_THROWS_AS(without.load(cache.save()), sash::error);
    });
}

TEST_CASE("Memory that runs out changes nothing") {
    const stream s = tokens(700);
    for_each_kind([&](const maker& make) {
        poisoned_memory memory;
        {
            const sash::storage storage{.rollback_slack = 3, .auxiliary = 2, .memory = memory.source()};
            auto undisturbed = make({.rollback_slack = 3, .auxiliary = 2});
            undisturbed.append(s, 0, 100);
            const file_bytes file = undisturbed.save();
            const auto until_it_works = [&](auto&& f) {  // one allocation more each time
                for (int64 calls = 0; calls < 100; ++calls) {
                    memory.fail_after(calls);
                    bool done = true;
                    try {
                        f();
                    } catch (const std::bad_alloc&) { done = false; }
                    memory.fail_after(-1);
                    if (done) return calls;
                }
                return int64{-1};
            };
            CHECK(until_it_works([&] { make(storage); }) >= 0);

            auto cache = make(storage);
            cache.append(s, 0, 100);
            CHECK(until_it_works([&] { any_cache(cache).rollback(0); }) > 0);
            CHECK((cache.save() == file));
            CHECK(until_it_works([&] { cache.load(file); }) > 0);
            CHECK((cache.save() == file));
            auto fork = cache;  // so that appending must copy, too
            CHECK(until_it_works([&] { cache.append(s, 100, 600); }) >= 0);
            CHECK(cache.length() == 700);
            CHECK((fork.save() == file));
            undisturbed.append(s, 100, 600);
            CHECK(same(cache, undisturbed));
            CHECK(until_it_works([&] { cache.reserve(1000); }) >= 0);

            tensor rows(2, small_shape.heads, small_shape.value_dim);  // a batch: both or none
            bool both_or_none = true;
            until_it_works([&] {
                try {
                    any_cache::attend_both(cache, fork, s, 0, 1, rows.out(0, 1), rows.out(1, 1));
                } catch (const std::bad_alloc&) {
                    both_or_none = both_or_none && cache.length() == 700 && fork.length() == 100;
                    throw;
                }
            });
            CHECK(both_or_none);
            CHECK(cache.length() == 701);
            CHECK(fork.length() == 101);
        }
        CHECK(memory.live() == 0);
        CHECK(memory.consistent());
    });
}

TEST_CASE("R04: storage that cannot be is refused, and says why") {
    const auto make = [](const sash::storage& storage) { return small_cache(small_window, storage); };
    CHECK(contains(message_of([&] { make({.capacity = -1}); }), "capacity is -1"));
    CHECK(contains(message_of([&] { make({.rollback_slack = -2}); }), "rollback_slack is -2"));
    CHECK(contains(message_of([&] { make({.rollback_slack = int64{1} << 60}); }), "rollback_slack"));
    CHECK(contains(message_of([&] { make({.auxiliary = -3}); }), "auxiliary is -3"));
    CHECK(contains(message_of([&] { make({.piece = 0}); }), "piece is 0"));
    poisoned_memory memory;
    sash::memory_source half = memory.source();
    half.release = nullptr;
    CHECK(contains(message_of([&] { make({.memory = half}); }), "release"));
    CHECK(memory.live() == 0);
}
