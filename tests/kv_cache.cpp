// The common interface of every cache: what it holds, what it costs, and that a copy, a rollback, a checkpoint or a file gives
// back exactly the cache there was. "The same" means: the same bits in every later row.
#include "support/catch.hpp"
#include "support/tensors.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

#include <array>
#include <limits>
#include <list>
#include <type_traits>

namespace {

using sash::int64;
using test::numbers;
using test::poisoned_memory;
using test::tensor;
using bytes = std::vector<std::byte>;

constexpr sash::shape small_shape{.heads = 4, .kv_heads = 2, .key_dim = 10, .value_dim = 7};

// ---------------------------------------------------------------------------------------------------------------------
// Every kind of cache

template <class P, class E>
struct kind {
    const char* name;
    P policy = {};
    sash::score score = {};
    sash::shape shape = small_shape;
    using cache = sash::kv_cache<P, E>;

    cache make(const sash::storage& storage = {}) const { return cache(policy, shape, score, storage); }
};

const std::vector<double> frequencies = {1, 0.3, 0.01};
constexpr sash::sliding_window small_window{.window = 20, .sinks = 3};

template <class F>
void for_each_kind(F&& f) {
    const auto with = [&](const auto& k) {
        INFO(k.name);
        f(k);
    };
    using gated = sash::linear<sash::elu_plus_one, sash::per_head_and_token>;
    with(kind<sash::full, float>{"full", {}, {.soft_cap = 4}});
    with(kind<sash::sliding_window, float>{"window", small_window});
    with(kind<sash::sliding_window, sash::float16>{"window, float16, compact", {.window = 20, .sinks = 3, .frame = sash::frame::compact},
                                                   {.rotary = {.frequencies = frequencies, .by = sash::rotates::library}}});
    with(kind<sash::sliding_window, float>{"window with many sinks", {.window = 2, .sinks = 90}});
    with(kind<sash::linear<>, float>{"linear", {}});
    with(kind<gated, float>{"linear with decay", {}});
}

// Tokens of one sequence, and a query for each.
struct stream {
    tensor query, key, value, decay;

    explicit stream(int64 tokens, std::uint64_t seed = 1, const sash::shape& given = small_shape) {
        const sash::shape s = sash::detail::resolve<sash::build::here>(given);
        query = tensor(tokens, s.query_heads, s.key_dim);
        key = tensor(tokens, s.key_heads, s.key_dim);
        value = tensor(tokens, s.value_heads, s.value_dim);
        decay = tensor(tokens, s.gate_heads, 1);
        numbers random(seed);
        for (tensor* t : {&query, &key, &value}) t->fill(random);
        decay.for_each([&](int64 t, int64 h, int64 d) { decay.set(t, h, d, -0.05f * static_cast<float>(random.below(8))); });
    }
};

template <class P>
sash::tokens_of<P> tokens_of(const stream& from, int64 first, int64 count) {
    if constexpr (sash::detail::takes_decay<P>)
        return {.query = from.query.in(first, count), .key = from.key.in(first, count), .value = from.value.in(first, count), .decay = from.decay.in(first, count)};
    else
        return {.query = from.query.in(first, count), .key = from.key.in(first, count), .value = from.value.in(first, count)};
}

template <class P, class E>
void append(sash::kv_cache<P, E>& cache, const stream& from, int64 first, int64 count) {
    sash::append(tokens_of<P>(from, first, count), cache, {.run = sash::serial{}});
}

// Appends tokens [first, first + count) in the given step and returns their rows.
template <class P, class E>
tensor attend(sash::kv_cache<P, E>& cache, const stream& from, int64 first, int64 count, int64 step) {
    tensor out(count, cache.shape().heads, cache.shape().value_dim);
    for (int64 done = 0; done < count; done += step) {
        const int64 n = std::min(step, count - done);
        sash::attend(tokens_of<P>(from, first + done, n), cache, out.out(done, n), {.run = sash::serial{}});
    }
    return out;
}

// What a cache will say from now on, in all bits: 75 more tokens, decoded, then in one call. The cache itself is not touched.
template <class Cache>
tensor future_of(const Cache& cache) {
    static const stream later(75, 99);
    Cache one = cache, other = cache;
    tensor decoded = attend(one, later, 0, 75, 1), together = attend(other, later, 0, 75, 75);
    tensor both(150, cache.shape().heads, cache.shape().value_dim);
    both.for_each([&](int64 t, int64 h, int64 d) { both.set(t, h, d, t < 75 ? decoded.get(t, h, d) : together.get(t - 75, h, d)); });
    return both;
}

template <class Cache>
bool same(const Cache& a, const Cache& b) {
    return a.length() == b.length() && future_of(a) == future_of(b);
}

template <class Cache>
std::vector<int64> positions_of(const Cache& cache) {
    std::vector<int64> list;
    for (const int64 p : cache.positions()) list.push_back(p);
    return list;
}

// What a window must hold: the sinks, and the last window + slack tokens.
std::vector<int64> window_positions(int64 length, int64 window, int64 sinks) {
    std::vector<int64> list;
    for (int64 p = 0; p < length; ++p)
        if (p < sinks || p >= length - window) list.push_back(p);
    return list;
}

// The message of the sash::error that f throws.
template <class F>
std::string message_of(F&& f) {
    try {
        f();
    } catch (const sash::error& e) {
        return e.what();
    }
    return "nothing was refused";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// What it holds

TEST_CASE("R09 R10: a window holds its sinks and its last tokens, and says which") {
    const stream s(300);
    for (const int64 slack : {0, 1, 50})
        for (const int64 step : {1, 7, 150}) {
            CAPTURE(slack, step);
            auto cache = kind<sash::sliding_window, float>{"", small_window}.make({.rollback_slack = slack});
            CHECK(cache.empty());
            CHECK(positions_of(cache).empty());
            for (int64 done = 0; done < 300; done += step) {
                append(cache, s, done, std::min(step, 300 - done));
                const int64 length = std::min(done + step, int64{300});
                REQUIRE(cache.length() == length);
                REQUIRE(positions_of(cache) == window_positions(length, 20 + slack, 3));
                REQUIRE(cache.stored() == static_cast<int64>(positions_of(cache).size()));
                REQUIRE(cache.positions().size() == cache.stored());
            }
        }
}

TEST_CASE("Full attention holds every token, a recurrent policy none") {
    const stream s(150);
    auto full = kind<sash::full, float>{"", {}}.make();
    append(full, s, 0, 150);
    CHECK(positions_of(full) == window_positions(150, 150, 0));
    CHECK(full.stored() == 150);
    auto linear = kind<sash::linear<>, float>{"", {}}.make({.rollback_slack = 4});
    append(linear, s, 0, 150);
    CHECK(linear.length() == 150);
    CHECK(linear.stored() == 0);
    CHECK(positions_of(linear).empty());
}

TEST_CASE("Sinks beyond the window, and many of them, are counted once") {
    const stream s(200);
    auto cache = kind<sash::sliding_window, float>{"", {.window = 2, .sinks = 90}}.make();
    for (int64 t = 0; t < 200; ++t) {
        append(cache, s, t, 1);
        REQUIRE(positions_of(cache) == window_positions(t + 1, 2, 90));
    }
}

TEST_CASE("R28: a hard capacity is refused before anything is written") {
    const stream s(100);
    auto full = kind<sash::full, float>{"", {}}.make({.capacity = 10});
    CHECK(full.capacity() == 10);
    CHECK(kind<sash::full, float>{"", {}}.make().capacity() == std::numeric_limits<int64>::max());
    append(full, s, 0, 9);
    const bytes before = full.save();
    const std::string message = message_of([&] { append(full, s, 9, 2); });
    CHECK(contains(message, "11"));
    CHECK(contains(message, "10"));
    CHECK((full.save() == before));
    append(full, s, 9, 1);
    CHECK_THROWS_AS(append(full, s, 10, 1), sash::error);
    full.rollback(3);
    append(full, s, 10, 3);
    CHECK(full.length() == 10);

    const kind<sash::sliding_window, float> window{"", {.window = 6, .sinks = 2}};
    auto roomy = window.make({.capacity = 8});
    append(roomy, s, 0, 100);  // holds 8 at a time, for ever
    CHECK(roomy.stored() == 8);
    auto tight = window.make({.capacity = 7});
    append(tight, s, 0, 7);
    CHECK_THROWS_AS(append(tight, s, 7, 1), sash::error);
    CHECK(tight.length() == 7);
}

TEST_CASE("A file that holds more than the capacity is refused") {
    const stream s(20);
    const kind<sash::full, float> full{"", {}};
    auto large = full.make(), small = full.make({.capacity = 10});
    append(large, s, 0, 20);
    append(small, s, 0, 3);
    const bytes before = small.save();
    CHECK_THROWS_AS(small.load(large.save()), sash::error);
    CHECK((small.save() == before));
}

// ---------------------------------------------------------------------------------------------------------------------
// What it costs

TEST_CASE("After reserve, appending and decoding allocate nothing") {
    const stream s(400);
    for_each_kind([&](const auto& k) {
        poisoned_memory memory;
        auto cache = k.make({.memory = memory.source()});
        append(cache, s, 0, 5);
        cache.reserve(400);
        CHECK(cache.length() == 5);
        sash::workspace scratch(std::max(sash::workspace_bytes(cache, 1), sash::workspace_bytes(cache, 395)) + 100000);
        const int64 calls = memory.calls();
        tensor out(400, k.shape.heads, k.shape.value_dim);
        using P = typename std::remove_cvref_t<decltype(cache)>::policy_type;
        for (int64 t = 5; t < 150; ++t)
            sash::attend(tokens_of<P>(s, t, 1), cache, out.out(t, 1), {.run = sash::serial{}, .workspace = &scratch});
        sash::append(tokens_of<P>(s, 150, 200), cache, {.run = sash::serial{}, .workspace = &scratch});
        sash::attend(tokens_of<P>(s, 350, 50), cache, out.out(350, 50), {.run = sash::serial{}, .workspace = &scratch});
        CHECK(memory.calls() == calls);
        auto plain = k.make();
        append(plain, s, 0, 400);
        CHECK(same(cache, plain));
        cache.reserve(1);
        cache.reserve(0);
        CHECK(cache.length() == 400);
    });
}

TEST_CASE("A bounded cache reserves no more than its window, whatever is asked") {
    poisoned_memory memory;
    auto cache = kind<sash::sliding_window, float>{"", small_window}.make({.memory = memory.source()});
    cache.reserve(int64{1} << 50);
    CHECK(memory.live() < 100000);
}

TEST_CASE("Memory is bounded for ever, and steady decoding allocates nothing") {
    const sash::shape shape{.heads = 2, .kv_heads = 1, .head_dim = 8};
    const stream s(100, 1, shape);
    const auto run = [&](const auto& k, int64 most_bytes) {
        INFO(k.name);
        poisoned_memory memory;
        auto cache = k.make({.memory = memory.source()});
        int64 calls = 0, held = 0;
        for (int64 t = 0; t < 20000; ++t) {
            attend(cache, s, t % 100, 1, 1);
            if (t == 600) calls = memory.calls(), held = cache.bytes();
        }
        CHECK(memory.calls() == calls);
        CHECK(cache.bytes() == held);
        CHECK(cache.bytes() < most_bytes);
        for (int64 t = 0; t < 50; ++t) attend(cache, s, 0, 100, 100);  // nor does prefill, after its first call
        const int64 after_prefill = cache.bytes(), calls_after = memory.calls();
        for (int64 t = 0; t < 50; ++t) attend(cache, s, 0, 100, 100);
        CHECK(cache.bytes() == after_prefill);
        CHECK(memory.calls() == calls_after);
        CHECK(cache.length() == 30000);
    };
    run(kind<sash::sliding_window, float>{"window", {.window = 100, .sinks = 5}, {}, shape}, 200000);
    run(kind<sash::sliding_window, sash::float16>{"narrow window", {.window = 100, .sinks = 5}, {}, shape}, 200000);
    run(kind<sash::linear<>, float>{"linear", {}, {}, shape}, 200000);
}

TEST_CASE("bytes() is what the memory source has given") {
    const stream s(700);
    for_each_kind([&](const auto& k) {
        for (const int64 slack : {0, 20}) {
            poisoned_memory memory;
            {
                auto cache = k.make({.rollback_slack = slack, .auxiliary = 5, .memory = memory.source()});
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
    const stream s(400), other(400, 2);
    for_each_kind([&](const auto& k) {
        for (const int64 length : {0, 1, 63, 64, 65, 128, 200}) {
            CAPTURE(length);
            poisoned_memory memory;
            const sash::storage storage{.memory = memory.source()};
            auto original = k.make(storage), undisturbed = k.make(storage), with_other = k.make(storage);
            for (auto* c : {&original, &undisturbed, &with_other}) append(*c, s, 0, length);
            auto fork = original;
            auto second = fork;
            CHECK(same(fork, undisturbed));

            const tensor expected = attend(undisturbed, s, length, 100, 9), otherwise = attend(with_other, other, 0, 100, 9);
            CHECK(attend(fork, other, 0, 100, 9) == otherwise);     // the fork first
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
    const stream s(300), other(300, 2);
    for_each_kind([&](const auto& k) {
        auto original = k.make({.rollback_slack = 300});
        append(original, s, 0, 230);
        const auto fork = original;
        const tensor before = future_of(fork);
        for (const int64 back : {1, 29, 120}) {
            auto again = fork;
            again.rollback(back);
            append(again, other, 0, 150);  // over tokens that the fork still reads
            CHECK(future_of(fork) == before);
        }
        original.reset();
        append(original, other, 0, 250);
        CHECK(future_of(fork) == before);
        auto fresh = k.make({.rollback_slack = 300});
        append(fresh, other, 0, 250);
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
    const stream s(200);
    for_each_kind([&](const auto& k) {
        for (const int64 slack : {0, 10}) {
            poisoned_memory memory;
            {
                const sash::storage storage{.rollback_slack = slack, .auxiliary = 3, .memory = memory.source()};
                auto cache = k.make(storage);
                const auto fresh = k.make(storage);
                append(cache, s, 0, 150);
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
                CHECK(cache.empty());
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
    const stream s(300);
    for_each_kind([&](const auto& k) {
        poisoned_memory memory;
        auto cache = k.make({.rollback_slack = 4, .memory = memory.source()});
        const auto fresh = k.make({.rollback_slack = 4});
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
    const stream s(300), drafts(300, 2);
    for_each_kind([&](const auto& k) {
        for (const int64 slack : {0, 1, 5, 70})
            for (const int64 length : {1, 15, 64, 150})
                for (const int64 count : {0, 1, 4, 5, 6, 70, 71}) {
                    CAPTURE(slack, length, count);
                    const sash::storage storage{.rollback_slack = slack};
                    auto cache = k.make(storage), undisturbed = k.make(storage);
                    append(cache, s, 0, length);
                    append(undisturbed, s, 0, length);
                    append(cache, drafts, 0, count);
                    const bool can = cache.can_rollback(count);
                    if (std::is_same_v<std::remove_cvref_t<decltype(k.policy)>, sash::full> || count <= slack) REQUIRE(can);
                    if (can) {
                        cache.rollback(count);
                        CHECK(same(cache, undisturbed));
                    } else {
                        const bytes before = cache.save();
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
    const stream s(100);
    for_each_kind([&](const auto& k) {
        auto cache = k.make({.rollback_slack = 10});
        CHECK(cache.can_rollback(0));
        CHECK_FALSE(cache.can_rollback(1));
        append(cache, s, 0, 50);
        const bytes before = cache.save();
        cache.rollback(0);
        for (const int64 count : {int64{51}, int64{1000}, int64{-1}, std::numeric_limits<int64>::max(), std::numeric_limits<int64>::min()}) {
            CAPTURE(count);
            CHECK_FALSE(cache.can_rollback(count));
            CHECK_THROWS_AS(cache.rollback(count), sash::error);
        }
        CHECK((cache.save() == before));
    });
}

TEST_CASE("R12: rolled back into the sinks, a window keeps those that are left") {
    const stream s(100), other(100, 2);
    const kind<sash::sliding_window, float> k{"", {.window = 8, .sinks = 2}};
    auto cache = k.make(), undisturbed = k.make();
    append(cache, s, 0, 8);
    append(undisturbed, s, 0, 1);
    cache.rollback(7);
    CHECK(positions_of(cache) == std::vector<int64>{0});
    CHECK(attend(cache, other, 0, 60, 7) == attend(undisturbed, other, 0, 60, 7));
    CHECK(same(cache, undisturbed));
}

TEST_CASE("R12 R25: a walk of appends and rollbacks leaves what the surviving tokens alone would have left") {
    const stream pool(4000);
    for_each_kind([&](const auto& k) {
        using P = std::remove_cvref_t<decltype(k.policy)>;
        for (const int64 slack : {3, 40}) {
            numbers random(static_cast<std::uint64_t>(slack));
            auto cache = k.make({.rollback_slack = slack});
            std::vector<int64> history;  // tokens of the pool that survive, in order
            int64 next = 0;
            for (int step = 0; step < 120; ++step) {
                CAPTURE(slack, step);
                const int64 count = random.pick({1, 1, 2, 3, 17, 64});
                append(cache, pool, next, count);
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
                stream survived(n);
                for (tensor stream::*member : {&stream::key, &stream::value, &stream::decay})
                    (survived.*member).for_each([&](int64 t, int64 h, int64 d) { (survived.*member).set(t, h, d, (pool.*member).get(history[static_cast<std::size_t>(t)], h, d)); });
                tensor query(1, k.shape.heads, k.shape.key_dim), out(1, k.shape.heads, k.shape.value_dim);
                query.fill(random);
                sash::read(query.in(), cache, out.out(), {.run = sash::serial{}});
                const auto expected = [&] {
                    if constexpr (sash::softmax_policy<P>)
                        return sash::reference::attend(k.policy, k.shape, query.in(), survived.key.in(), survived.value.in(), k.score, n,
                                                       sash::detail::scalar_of<typename std::remove_cvref_t<decltype(cache)>::element_type>::value);
                    else
                        return sash::reference::attend(k.policy, k.shape, query.in(), survived.key.in(), survived.value.in(), survived.decay.in(), k.score, n);
                }();
                // Keys that the library turned may round to the neighbouring float16.
                const bool neighbours = k.score.rotary.by == sash::rotates::library && !k.score.rotary.frequencies.empty();
                CHECK(test::differs(out, expected.out, neighbours ? test::tolerance{2e-3, 1e-5} : test::tolerance{2e-6, 1e-5}) == "");
            }
        }
    });
}

TEST_CASE("A checkpoint brings back every policy, as often as asked") {
    const stream s(300), other(300, 2);
    for_each_kind([&](const auto& k) {
        for (const int64 length : {0, 10, 130}) {
            CAPTURE(length);
            auto cache = k.make({.auxiliary = 2});
            append(cache, s, 0, length);
            cache.auxiliary()[0] = 7;
            const tensor future = future_of(cache);
            const auto checkpoint = cache.checkpoint();
            for (const int64 count : {1, 64, 200}) {
                append(cache, other, 0, count);
                cache.auxiliary()[0] = 8;
                cache.restore(checkpoint);
                CHECK(cache.length() == length);
                CHECK(future_of(cache) == future);
                CHECK(cache.auxiliary()[0] == 7);
            }
            auto fork = cache;
            append(fork, other, 0, 30);
            fork.restore(checkpoint);
            CHECK(future_of(fork) == future);
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Files

TEST_CASE("R14: a file gives back the cache, bit for bit, and what it could roll back") {
    const stream s(400);
    for_each_kind([&](const auto& k) {
        for (const int64 slack : {0, 9})
            for (const int64 length : {0, 1, 2, 63, 64, 65, 90, 300}) {
                CAPTURE(slack, length);
                poisoned_memory memory;
                const sash::storage storage{.rollback_slack = slack, .auxiliary = 3, .memory = memory.source()};
                auto cache = k.make(storage);
                append(cache, s, 0, length);
                cache.auxiliary()[2] = 0.1f;
                const bytes file = cache.save();
                CHECK(file.size() == cache.saved_bytes());
                auto loaded = k.make(storage);
                append(loaded, s, 100, 77);  // what was there is replaced
                CHECK(loaded.load(file) == file.size());
                CHECK(same(loaded, cache));
                CHECK(positions_of(loaded) == positions_of(cache));
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
    const stream s(100);
    for_each_kind([&](const auto& k) {
        auto first = k.make(), second = k.make(), cache = k.make();
        append(first, s, 0, 30);
        append(second, s, 50, 41);
        bytes both = first.save();
        const std::size_t length = both.size();
        const bytes more = second.save();
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
    const auto check = [&](auto k) {
        INFO(k.name);
        k.shape = shape;
        k.score = {};
        auto saved = k.make({.rollback_slack = 2, .auxiliary = 1}), target = k.make({.rollback_slack = 2, .auxiliary = 1});
        append(saved, s, 0, 7);
        append(target, s, 7, 9);
        const bytes file = saved.save(), before = target.save();
        int64 accepted = 0, changed = 0;
        for (std::size_t i = 0; i < file.size(); ++i)
            for (const int flip : {0x01, 0x10, 0x80, 0xff}) {
                bytes damaged = file;
                damaged[i] ^= static_cast<std::byte>(flip);
                try {
                    target.load(damaged);
                    ++accepted;
                } catch (const sash::error&) {
                }
                changed += target.save() != before;
            }
        for (std::size_t length = 0; length < file.size(); ++length) {
            const bytes shortened(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(length));
            try {
                target.load(shortened);
                ++accepted;
            } catch (const sash::error&) {
            }
            changed += target.save() != before;
        }
        for (std::size_t i = 0; i + 1 < file.size(); i += 8)  // two bytes exchanged
            if (bytes damaged = file; damaged[i] != damaged[i + 1]) {
                std::swap(damaged[i], damaged[i + 1]);
                CHECK_THROWS_AS(target.load(damaged), sash::error);
            }
        CHECK(accepted == 0);
        CHECK(changed == 0);
        CHECK(target.load(file) == file.size());  // the undamaged one is taken
    };
    check(kind<sash::full, float>{"full"});
    check(kind<sash::sliding_window, sash::bfloat16>{"window", {.window = 3, .sinks = 2}});
    check(kind<sash::linear<>, float>{"linear"});
    check(kind<sash::linear<sash::relu, sash::per_head_and_token>, float>{"linear with decay"});
}

TEST_CASE("R14: a file whose numbers cannot be is refused even with a checksum that fits") {
    const stream s(60);
    const auto forge = [](bytes file, std::size_t at, int64 value) {
        std::memcpy(file.data() + at, &value, sizeof value);
        sash::detail::fingerprint sum;
        sum.add(file.data(), file.size() - sizeof sum.value);
        std::memcpy(file.data() + file.size() - sizeof sum.value, &sum.value, sizeof sum.value);
        return file;
    };
    for_each_kind([&](const auto& k) {
        poisoned_memory memory;
        auto cache = k.make({.rollback_slack = 3, .memory = memory.source()});
        append(cache, s, 0, 60);
        const bytes file = cache.save();
        const std::size_t store = sizeof(sash::detail::file_header);
        REQUIRE((forge(file, store, 60) == file));  // the length lies there: the forgery itself is in order
        const std::size_t allocated = memory.allocated();
        constexpr bool counted = sash::softmax_policy<std::remove_cvref_t<decltype(k.policy)>>;  // a state may have any length
        for (const int64 length : {int64{-1}, int64{59}, int64{61}, int64{1} << 40, int64{1} << 62, std::numeric_limits<int64>::min()}) {
            CAPTURE(length);
            if (!counted && length > 0 && length < int64{1} << 60) continue;
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
    const stream s(30);
    const std::vector<float> slopes{0.1f, 0.2f, 0.3f, 0.4f}, other_slopes{0.1f, 0.2f, 0.3f, 0.5f};
    const std::vector<double> other_frequencies = {1, 0.3, 0.02};
    const auto refuses = [&](const auto& into, const auto& from) {
        auto target = into.make();
        auto source = from.make();
        append(target, s, 0, 10);
        append(source, stream(30, 1, from.shape), 0, 25);
        const bytes before = target.save();
        const std::string message = message_of([&] { target.load(source.save()); });
        return contains(message, "another policy") && target.save() == before;
    };
    using window = kind<sash::sliding_window, float>;
    const window plain{"", small_window};
    SECTION("policy") {
        CHECK(refuses(plain, window{"", {.window = 21, .sinks = 3}}));
        CHECK(refuses(plain, window{"", {.window = 20, .sinks = 2}}));
        CHECK(refuses(plain, kind<sash::full, float>{""}));
        CHECK(refuses(kind<sash::full, float>{""}, plain));
        CHECK(refuses(plain, kind<sash::linear<>, float>{""}));
        CHECK(refuses(kind<sash::linear<>, float>{""}, kind<sash::linear<sash::relu>, float>{""}));
        const sash::score turned{.rotary = {.frequencies = frequencies}};
        CHECK(refuses(window{"", small_window, turned}, window{"", {.window = 20, .sinks = 3, .frame = sash::frame::compact}, turned}));
    }
    SECTION("what a linear policy forgets or divides by") {
        using sash::additive, sash::linear, sash::no_normaliser, sash::no_decay, sash::per_head_and_token;
        CHECK(refuses(kind<linear<>, float>{""}, kind<linear<sash::elu_plus_one, per_head_and_token>, float>{""}));
        CHECK(refuses(kind<linear<>, float>{""}, kind<linear<sash::elu_plus_one, no_decay, additive, no_normaliser>, float>{""}));
        CHECK(refuses(kind<linear<sash::identity, no_decay, additive, no_normaliser>, float>{""},
                      kind<linear<sash::identity, per_head_and_token, additive, no_normaliser>, float>{""}));
    }
    SECTION("learned maps") {
        const std::vector<float> weights(100, 0.1f);
        std::vector<float> others = weights;
        others[57] = 0.2f;
        const auto learned = [&](const std::vector<float>& w) {
            return kind<sash::linear<sash::hedgehog>, float>{"", {.map = {.query_weights = w, .key_weights = w}}};
        };
        CHECK(refuses(learned(weights), learned(others)));
        CHECK(refuses(kind<sash::linear<sash::hedgehog>, float>{""}, learned(weights)));
        CHECK(refuses(kind<sash::linear<sash::hedgehog>, float>{"", {.map = {.form = sash::hedgehog_form::h2}}}, kind<sash::linear<sash::hedgehog>, float>{""}));
    }
    SECTION("shape") {
        for (const sash::shape& shape : {sash::shape{.heads = 8, .kv_heads = 2, .key_dim = 10, .value_dim = 7}, sash::shape{.heads = 4, .kv_heads = 4, .key_dim = 10, .value_dim = 7},
                                         sash::shape{.heads = 4, .kv_heads = 2, .key_dim = 7, .value_dim = 10}, sash::shape{.heads = 4, .kv_heads = 2, .key_dim = 10, .value_dim = 8},
                                         sash::shape{.heads = 4, .kv_heads = 2, .key_dim = 10, .value_dim = 7, .query_heads = 2}})
            CHECK(refuses(plain, window{"", small_window, {}, shape}));
    }
    SECTION("element") {
        CHECK(refuses(plain, kind<sash::sliding_window, sash::float16>{"", small_window}));
        CHECK(refuses(kind<sash::sliding_window, sash::bfloat16>{"", small_window}, kind<sash::sliding_window, sash::float16>{"", small_window}));
    }
    SECTION("score") {
        const sash::score scores[] = {
            {}, {.scale = 0.5f}, {.soft_cap = 5}, {.soft_cap = 6}, {.alibi = slopes}, {.alibi = other_slopes}, {.sink_logits = slopes},
            {.sink_logits = other_slopes}, {.rotary = {.frequencies = frequencies}}, {.rotary = {.frequencies = other_frequencies}},
            {.rotary = {.frequencies = frequencies, .layout = sash::rotary_layout::interleaved}}, {.rotary = {.frequencies = frequencies, .by = sash::rotates::library}}};
        for (const sash::score& a : scores)
            for (const sash::score& b : scores)
                if (&a != &b) CHECK(refuses(window{"", small_window, a}, window{"", small_window, b}));
    }
}

TEST_CASE("R14: bytes that are no file, and room that is too small") {
    const stream s(30);
    auto cache = kind<sash::full, float>{""}.make();
    append(cache, s, 0, 30);
    const bytes before = cache.save();
    numbers random(5);
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{31}, std::size_t{32}, std::size_t{100}, std::size_t{10000}}) {
        bytes noise(size);
        for (std::byte& b : noise) b = static_cast<std::byte>(random.below(256));
        CHECK_THROWS_AS(cache.load(noise), sash::error);
    }
    bytes tight(cache.saved_bytes() - 1, std::byte{0x11});
    const bytes untouched = tight;
    const std::string message = message_of([&] { cache.save(std::span<std::byte>(tight)); });
    CHECK(contains(message, std::to_string(cache.saved_bytes())));
    CHECK((tight == untouched));
    CHECK((cache.save() == before));
}

// ---------------------------------------------------------------------------------------------------------------------
// The layers of a model

TEST_CASE("R12: a range of caches rolls back together or not at all") {
    const stream s(300);
    const kind<sash::sliding_window, float> k{"", small_window};
    std::vector<kind<sash::sliding_window, float>::cache> layers;
    for (const int64 slack : {40, 40, 2}) layers.push_back(k.make({.rollback_slack = slack}));
    for (auto& layer : layers) append(layer, s, 0, 100);
    const auto before = sash::save(layers);
    CHECK_FALSE(sash::can_rollback(layers, 3));  // the last one cannot
    CHECK_THROWS_AS(sash::rollback(layers, 3), sash::error);
    CHECK_THROWS_AS(sash::rollback(layers, -1), sash::error);
    CHECK((sash::save(layers) == before));
    CHECK(sash::can_rollback(layers, 2));
    sash::rollback(layers, 2);
    for (auto& layer : layers) {
        auto undisturbed = k.make();
        append(undisturbed, s, 0, 98);
        CHECK(layer.length() == 98);
        CHECK(future_of(layer) == future_of(undisturbed));
    }
    std::array few{layers[0], layers[1]};  // any range will do
    std::list<kind<sash::sliding_window, float>::cache> listed(layers.begin(), layers.end());
    CHECK(sash::can_rollback(few, 38));
    CHECK_FALSE(sash::can_rollback(listed, 38));
    sash::rollback(few, 38);
    CHECK(few[1].length() == 60);
    sash::rollback(std::span(layers).first(2), 1);
    CHECK(layers[0].length() == 97);
    CHECK(layers[2].length() == 98);
}

TEST_CASE("A range of caches returns to its checkpoints together or not at all") {
    const stream s(300);
    for_each_kind([&](const auto& k) {
        std::vector layers(3, k.make());
        for (std::size_t i = 0; i < layers.size(); ++i) append(layers[i], s, static_cast<int64>(50 * i), 90);
        const auto before = sash::save(layers);
        const auto checkpoints = sash::checkpoint(layers);
        for (auto& layer : layers) append(layer, s, 200, 33);
        const auto later = sash::save(layers);
        auto fewer = std::vector(layers.begin(), layers.begin() + 2);
        CHECK_THROWS_AS(sash::restore(fewer, checkpoints), sash::error);
        CHECK((sash::save(layers) == later));
        for (int twice = 0; twice < 2; ++twice) {
            sash::restore(layers, checkpoints);
            CHECK((sash::save(layers) == before));
            append(layers[1], s, 0, 5);
        }
    });
}

TEST_CASE("R14: a range of caches is loaded together or not at all") {
    const stream s(300);
    for_each_kind([&](const auto& k) {
        std::vector layers(3, k.make()), others(3, k.make());
        for (std::size_t i = 0; i < layers.size(); ++i) {
            append(layers[i], s, static_cast<int64>(50 * i), 30);
            append(others[i], s, static_cast<int64>(10 * i), 40);
        }
        bytes file = sash::save(layers);
        const bytes before = sash::save(others);
        for (const std::size_t at : {std::size_t{9}, file.size() / 2, file.size() - 3}) {
            bytes damaged = file;
            damaged[at] ^= std::byte{4};
            CHECK_THROWS_AS(sash::load(others, damaged), sash::error);
            CHECK((sash::save(others) == before));
        }
        CHECK_THROWS_AS(sash::load(others, std::span(file).first(file.size() - 1)), sash::error);
        std::vector<typename decltype(layers)::value_type> more(4, k.make());
        CHECK_THROWS_AS(sash::load(more, file), sash::error);  // three files for four layers
        for (auto& layer : more) CHECK(layer.empty());
        CHECK((sash::save(others) == before));

        file.push_back(std::byte{1});
        CHECK(sash::load(others, file) == file.size() - 1);
        for (std::size_t i = 0; i < layers.size(); ++i) CHECK(same(others[i], layers[i]));
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Auxiliary floats, and memory that runs out

TEST_CASE("Auxiliary floats are zero at first and go where the cache goes") {
    const stream s(50);
    for_each_kind([&](const auto& k) {
        poisoned_memory memory;
        auto cache = k.make({.auxiliary = 4, .memory = memory.source()});
        const auto list = [](const auto& c) { return std::vector<float>(c.auxiliary().begin(), c.auxiliary().end()); };
        CHECK(list(cache) == std::vector<float>(4));
        append(cache, s, 0, 50);
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
        CHECK(k.make().auxiliary().empty());
        auto without = k.make();
        CHECK_THROWS_AS(without.load(cache.save()), sash::error);
    });
}

TEST_CASE("Memory that runs out changes nothing") {
    const stream s(700);
    for_each_kind([&](const auto& k) {
        using cache_type = typename std::remove_cvref_t<decltype(k)>::cache;
        poisoned_memory memory;
        {
            const sash::storage storage{.rollback_slack = 3, .auxiliary = 2, .memory = memory.source()};
            auto undisturbed = k.make({.rollback_slack = 3, .auxiliary = 2});
            append(undisturbed, s, 0, 100);
            const bytes file = undisturbed.save();
            const auto until_it_works = [&](auto&& f) {  // one allocation more each time
                for (int64 calls = 0; calls < 100; ++calls) {
                    memory.fail_after(calls);
                    bool done = true;
                    try {
                        f();
                    } catch (const std::bad_alloc&) {
                        done = false;
                    }
                    memory.fail_after(-1);
                    if (done) return calls;
                }
                return int64{-1};
            };
            CHECK(until_it_works([&] { k.make(storage); }) >= 0);

            auto cache = k.make(storage);
            append(cache, s, 0, 100);
            CHECK(until_it_works([&] { cache_type(cache).rollback(0); }) > 0);
            CHECK((cache.save() == file));
            CHECK(until_it_works([&] { cache.load(file); }) > 0);
            CHECK((cache.save() == file));
            auto fork = cache;  // so that appending must copy, too
            CHECK(until_it_works([&] { append(cache, s, 100, 600); }) >= 0);
            CHECK(cache.length() == 700);
            CHECK((fork.save() == file));
            append(undisturbed, s, 100, 600);
            CHECK(same(cache, undisturbed));
            CHECK(until_it_works([&] { cache.reserve(1000); }) >= 0);

            tensor rows(2, k.shape.heads, k.shape.value_dim);  // of a batch
            const auto one = tokens_of<typename cache_type::policy_type>(s, 0, 1);
            std::array requests{sash::request<cache_type>{one, &cache, rows.out(0, 1), {}}, sash::request<cache_type>{one, &fork, rows.out(1, 1), {}}};
            bool untouched = true;
            until_it_works([&] {
                struct at_exit {
                    const cache_type &cache, &fork;
                    bool& untouched;
                    ~at_exit() { untouched = untouched && (cache.length() == 701) == (fork.length() == 101); }
                } checked{cache, fork, untouched};
                sash::attend(requests, {.run = sash::serial{}});
            });
            CHECK(untouched);
            CHECK(fork.length() == 101);
        }
        CHECK(memory.live() == 0);
        CHECK(memory.consistent());
    });
}

TEST_CASE("R04: storage that cannot be is refused, and says why") {
    const kind<sash::sliding_window, float> k{"", small_window};
    CHECK(contains(message_of([&] { k.make({.capacity = -1}); }), "capacity is -1"));
    CHECK(contains(message_of([&] { k.make({.rollback_slack = -2}); }), "rollback_slack is -2"));
    CHECK(contains(message_of([&] { k.make({.rollback_slack = int64{1} << 60}); }), "rollback_slack"));
    CHECK(contains(message_of([&] { k.make({.auxiliary = -3}); }), "auxiliary is -3"));
    CHECK(contains(message_of([&] { k.make({.piece = 0}); }), "piece is 0"));
    poisoned_memory memory;
    sash::memory_source half = memory.source();
    half.release = nullptr;
    CHECK(contains(message_of([&] { k.make({.memory = half}); }), "release"));
    CHECK(memory.live() == 0);
}
