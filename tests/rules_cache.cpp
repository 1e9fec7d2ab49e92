// Rules 9 to 14: what a cache holds, and that it can be taken back, forked, saved and loaded. And what it allocates.
#include "support/catch.hpp"
#include "support/probes.hpp"
#include <sash/reference.hpp>

#include <memory>
#include <new>
#include <random>

using namespace probes;
using sash::bfloat16;
using sash::float16;
using sash::full;
using sash::kv_cache;
using sash::sliding_window;

// Everything this program takes from the heap is counted, so that "allocates nothing" means that.
namespace {
std::atomic<int64> heap_calls{0};
}
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
extern "C" void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept {
    ++heap_calls;
    void* p = nullptr;
    return posix_memalign(&p, alignment, size) == 0 ? p : nullptr;
}
[[gnu::noinline]] void* operator new(std::size_t size) {
    ++heap_calls;
    if (void* p = std::malloc(size)) return p;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
#endif

namespace {

// A file of a cache. Two are compared as a whole: printing them would not help.
struct bytes : std::vector<std::byte> {
    using vector::vector;
    bytes(std::vector<std::byte> v) : vector(std::move(v)) {}
};
std::ostream& operator<<(std::ostream& to, const bytes& b) { return to << b.size() << " bytes"; }

template <class Cache>
bytes saved(const Cache& cache) {
    return cache.save();
}

using exact_hybrid = sash::hybrid<sash::sliding_window, sash::linear<>, sash::log_sum_exp>;
using stepped_hybrid = sash::hybrid<sash::terraced_window, sash::linear<sash::relu>, sash::log_sum_exp>;

// One of each kind of cache, over an element type.
template <class P, class E>
struct kind {
    using policy = P;
    using element = E;
    using cache = kv_cache<P, E>;
    static P make() {
        if constexpr (std::is_same_v<P, sliding_window>)
            return {.window = 8, .sinks = 2};
        else if constexpr (sash::hybrid_policy<P>)
            return {.window = {.window = 8, .sinks = 2}};
        else
            return {};
    }
};
using kinds = std::tuple<kind<full, float>, kind<full, bfloat16>, kind<sliding_window, float>,
                         kind<sliding_window, float16>, kind<sash::linear<>, float>, kind<exact_hybrid, float>, kind<stepped_hybrid, float16>>;

const sash::shape small{.heads = 2, .kv_heads = 1, .key_dim = 3, .value_dim = 5};

// The rows of the tokens [first, last) of h, computed on this thread.
template <class Cache>
floats next_rows(Cache& cache, const history& h, int64 first, int64 last) {
    floats out(index((last - first) * h.row_floats()), not_a_number);
    sash::attend(h.queries(first, last - first), h.keys(first, last - first), h.values(first, last - first), cache,
                 {out, last - first, h.shape.heads, h.shape.value_dim}, {.run = sash::serial{}});
    return out;
}

floats part(const exact_rows& r, const history& h, int64 first, int64 last) {
    floats p;
    for (int64 n = first * h.row_floats(); n < last * h.row_floats(); ++n)
        p.push_back(static_cast<float>(r.out[index(n)]));
    return p;
}

// What a cache of this kind gives for a history.
template <class Kind>
exact_rows expected_rows(const history& h) {
    if constexpr (std::is_same_v<typename Kind::policy, sash::linear<>>)
        return linear_rows(h);
    else if constexpr (std::is_same_v<typename Kind::policy, full>)
        return softmax_rows<typename Kind::element>(h, window_rule{});
    else if constexpr (sash::hybrid_policy<typename Kind::policy>) {
        const auto r = sash::reference::attend(Kind::make(), h.shape, h.queries(0, h.tokens), h.keys(0, h.tokens), h.values(0, h.tokens), {}, -1, sash::detail::storage_name<typename Kind::element>);
        return {r.out, r.lse};
    } else
        return softmax_rows<typename Kind::element>(h, window_rule{8, 2});
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------------- R09

TEST_CASE("R09: positions are ascending, each once, and just those that a later query may see") {
    const history h = contents(260, {.head_dim = 1});
    for (const int64 window : {1, 2, 5, 63, 64, 65, 100})
        for (const int64 sinks : {0, 1, 4, 64, 70})
            for (const int64 slack : {0, 3, 64})
                for (const positions& cut : cuts_of(260)) {
                    CAPTURE(window, sinks, slack, cut.size());
                    kv_cache cache(sliding_window{.window = window, .sinks = sinks}, h.shape, {},
                                   {.rollback_slack = slack});
                    CHECK(held(cache).empty());
                    int64 length = 0;
                    for (const int64 n : cut) {
                        sash::append(h.keys(length, n), h.values(length, n), cache);
                        length += n;
                        positions stay = range(0, std::min(length, sinks));
                        for (int64 j = std::max(sinks, length - window - slack); j < length; ++j) stay.push_back(j);
                        REQUIRE(held(cache) == stay);
                        REQUIRE(cache.stored() == static_cast<int64>(stay.size()));
                        REQUIRE(cache.length() == length);
                    }
                }
}

TEST_CASE("R09: a slot without a token is not position 0") {
    for (const int fill : {0x00, 0xff}) {
        poisoned_memory memory(fill);
        kv_cache cache(sliding_window{.window = 8, .sinks = 4}, {.head_dim = 2}, {}, {.memory = memory.source()});
        const auto none = cache.positions();
        CHECK(none.size() == 0);
        CHECK((none.begin() == none.end()));
        const floats zero(2, 0.f), value(2, 5.f);
        floats out(2, not_a_number);
        sash::attend({zero, 1, 1, 2}, {zero, 1, 1, 2}, {value, 1, 1, 2}, cache, {out, 1, 1, 2});
        CHECK(out == floats(2, 5.f));  // not diluted by seven slots of zeros
        CHECK(held(cache) == positions{0});
    }
}

TEST_CASE("R09: order comes from positions, in a ring that has turned many times") {
    const history h = contents(700, {.heads = 2, .kv_heads = 1, .head_dim = 4});
    const float slopes[] = {.25f, .01f};
    const auto with_slope = [&](double s, int64 head, int64 i, int64 j) {
        return s - double{slopes[head]} * double(i - j);
    };
    const exact_rows expected = softmax_rows<float>(
        h, window_rule{67, 3}, with_slope, [](int64) { return -infinity; }, .5);
    for (const way& w : every_way(700)) {
        CAPTURE(w.name);
        CHECK(difference(rows_by<float>(w, sliding_window{.window = 67, .sinks = 3}, h, {.alibi = slopes}), expected,
                         3) == "");
    }
}

// ----------------------------------------------------------------------------------------------------------------- R10

TEST_CASE("R10: appending n makes room for n, and memory stays bounded for ever") {
    const history h = contents(5000, {.heads = 1, .head_dim = 2});
    for (const positions& cut : {positions{5000}, positions(50, 100), positions(5000, 1), cuts_of(5000)[2]}) {
        poisoned_memory memory;
        kv_cache cache(sliding_window{.window = 100, .sinks = 4}, h.shape, {},
                       {.rollback_slack = 10, .memory = memory.source()});
        int64 at = 0, bytes_at_half = 0;
        for (const int64 n : cut) {
            sash::append(h.keys(at, n), h.values(at, n), cache);
            at += n;
            REQUIRE(cache.stored() <= 100 + 4 + 10);
            if (at <= 2500) bytes_at_half = memory.bytes;
        }
        CAPTURE(cut.size());
        if (cut.size() > 1) CHECK(memory.bytes == bytes_at_half);
        CHECK(memory.bytes <= 200'000);
        CHECK(cache.bytes() <= memory.bytes);
        CHECK(memory.bytes <= cache.bytes() + 4096);  // small tables apart, bytes() tells the truth
    }
}

TEST_CASE("R10: no tokens store nothing, whatever else they are") {
    const history h = contents(20, small);
    kv_cache cache(sliding_window{.window = 8, .sinks = 2}, small);
    fed(cache, h, {12});
    const bytes before = saved(cache);
    const floats nothing;
    sash::append(h.keys(0, 0), h.values(0, 0), cache);
    sash::append({nothing, 0, 1, 3}, {nothing, 0, 1, 5}, cache);
    sash::attend(h.queries(0, 0), h.keys(0, 0), h.values(0, 0), cache, {static_cast<float*>(nullptr), 0, 2, 5});
    CHECK(saved(cache) == before);
    CHECK(difference(next_rows(cache, h, 12, 20), part(softmax_rows(h, window_rule{8, 2}), h, 12, 20)) == "");
}

TEST_CASE("R10: size never exceeds the capacity, and one token too many changes nothing") {
    const history h = contents(30, small);
    SECTION("a growing cache") {
        kv_cache cache(full{}, small, {}, {.capacity = 20});
        CHECK(cache.capacity() == 20);
        fed(cache, h, {12});
        const bytes before = saved(cache);
        floats out(index(9 * h.row_floats()), 7.f);
        CHECK(names(refusal([&] {
                        sash::attend(h.queries(12, 9), h.keys(12, 9), h.values(12, 9), cache, {out, 9, 2, 5});
                    }),
                    {"21", "20"}));
        CHECK_THROWS_AS(sash::append(h.keys(12, 9), h.values(12, 9), cache), sash::error);
        CHECK(out == floats(out.size(), 7.f));
        CHECK(saved(cache) == before);
        CHECK(difference(next_rows(cache, h, 12, 20), part(softmax_rows(h, window_rule{}), h, 12, 20)) == "");
        CHECK(cache.stored() == 20);
        CHECK_THROWS_AS(sash::append(h.keys(20, 1), h.values(20, 1), cache), sash::error);
        cache.rollback(5);
        sash::append(h.keys(20, 5), h.values(20, 5), cache);
        CHECK(cache.stored() == 20);
    }
    SECTION("a window fits, or is refused when it does not") {
        kv_cache cache(sliding_window{.window = 8, .sinks = 2}, small, {}, {.capacity = 10});
        CHECK(difference(fed(cache, h, {30}), softmax_rows(h, window_rule{8, 2})) == "");
        CHECK(cache.stored() == 10);
        kv_cache tight(sliding_window{.window = 8, .sinks = 2}, small, {}, {.capacity = 9});
        CHECK_THROWS_AS(sash::append(h.keys(0, 30), h.values(0, 30), tight), sash::error);
        CHECK(tight.length() == 0);
    }
    SECTION("a file of more tokens") {
        kv_cache large(full{}, small), tight(full{}, small, {}, {.capacity = 20});
        fed(large, h, {30});
        fed(tight, h, {4});
        const bytes before = saved(tight);
        CHECK_THROWS_AS(tight.load(saved(large)), sash::error);
        CHECK(tight.stored() == 4);
        CHECK(saved(tight) == before);
    }
}

// ----------------------------------------------------------------------------------------------------------------- R11

TEST_CASE("R11: length, position and window belong to the sequence") {
    const sliding_window policies[] = {
        {.window = 3}, {.window = 10, .sinks = 2}, {.window = 1, .sinks = 70}, {.window = 1000}};
    const int64 lengths[] = {0, 5, 300, 64}, news[] = {1, 4, 0, 70};
    const history h = contents(400, small);
    std::vector<kv_cache<sliding_window>> caches;
    std::vector<rows> got;
    for (int n = 0; n < 4; ++n) {
        caches.emplace_back(policies[n], small);
        sash::append(h.keys(0, lengths[n]), h.values(0, lengths[n]), caches.back());
        got.push_back(unwritten(h));
    }
    for (const named_runner& by : runners()) {
        std::vector<kv_cache<sliding_window>> now = caches;
        std::vector<sash::request<kv_cache<sliding_window>>> requests;
        for (int n = 0; n < 4; ++n) {
            const int64 first = lengths[n], count = news[n];
            requests.push_back({.tokens = {.query = h.queries(first, count),
                                           .key = h.keys(first, count),
                                           .value = h.values(first, count)},
                                .cache = &now[index(n)],
                                .out = h.rows(got[index(n)].out, first, count),
                                .lse = lse_of(got[index(n)], h, first, count)});
        }
        sash::attend(requests, {.run = by.run});
        for (int n = 0; n < 4; ++n) {
            CAPTURE(by.name, n);
            const int64 last = lengths[n] + news[n];
            CHECK(now[index(n)].length() == last);
            const exact_rows expected = softmax_rows(h, window_rule{policies[n].window, policies[n].sinks});
            const floats& out = got[index(n)].out;
            CHECK(difference(floats(out.begin() + lengths[n] * h.row_floats(), out.begin() + last * h.row_floats()),
                             part(expected, h, lengths[n], last)) == "");
        }
    }
}

TEST_CASE("R11: a batch is all or nothing") {
    const history h = contents(20, small);
    using cache_type = kv_cache<sliding_window>;
    std::vector<cache_type> caches(3, cache_type({.window = 8, .sinks = 2}, small, {}, {.capacity = 12}));
    caches[2] = cache_type({.window = 8, .sinks = 9}, small, {}, {.capacity = 12});
    for (cache_type& c : caches) sash::append(h.keys(0, 10), h.values(0, 10), c);
    floats out(index(3 * 2 * h.row_floats()), 7.f);
    const auto request = [&](int n, int64 count) {
        return sash::request<cache_type>{
            .tokens = {.query = h.queries(10, count), .key = h.keys(10, count), .value = h.values(10, count)},
            .cache = &caches[index(n)],
            .out = {out.data() + n * 2 * h.row_floats(), count, 2, 5}};
    };
    std::vector<bytes> before;
    for (const cache_type& c : caches) before.push_back(saved(c));
    const auto refused = [&](std::vector<sash::request<cache_type>> requests, const sash::options& how = {}) {
        CHECK_THROWS_AS(sash::attend(requests, how), sash::error);
        CHECK(out == floats(out.size(), 7.f));
        for (int n = 0; n < 3; ++n) CHECK(saved(caches[index(n)]) == before[index(n)]);
    };
    auto wrong = request(1, 2);
    wrong.tokens.value = h.values(10, 1);
    refused({request(0, 2), wrong});
    refused({request(0, 2), request(1, 2), request(2, 10)});  // the third exceeds its capacity
    refused({request(0, 2), request(1, 2), request(0, 2)});   // one cache twice
    wrong = request(1, 2);
    wrong.cache = nullptr;
    refused({request(0, 2), wrong});
    wrong = request(1, 2);
    wrong.lse = std::span(out).first(3);
    refused({request(0, 2), wrong});
    refused({request(0, 2)}, {.first_query = 10});
    refused({request(0, 2)}, {.lse = std::span(out).first(4)});
    sash::attend(std::vector<sash::request<cache_type>>{});  // nobody
    sash::attend(std::vector{request(0, 2), request(1, 1)});
    CHECK(caches[0].length() == 12);
    CHECK(caches[1].length() == 11);
}

// ----------------------------------------------------------------------------------------------------------------- R12

TEST_CASE("R12: A06 drafts are taken back exactly, or refused with nothing changed") {
    const history h = uniform(24);
    SECTION("with room for four drafts") {
        kv_cache cache(sliding_window{.window = 8}, h.shape, {}, {.capacity = 12, .rollback_slack = 4});
        fed(cache, h, {20});
        sash::append(h.keys(0, 4), h.values(0, 4), cache);  // drafts: values 0 … 3 where 20 … 23 will stand
        REQUIRE(cache.can_rollback(3));
        cache.rollback(3);
        CHECK(cache.length() == 21);
        cache.rollback(1);
        CHECK(cache.length() == 20);
        kv_cache never(sliding_window{.window = 8}, h.shape, {}, {.capacity = 12, .rollback_slack = 4});
        fed(never, h, {20});
        CHECK(difference_in_bits(next_rows(cache, h, 20, 21), next_rows(never, h, 20, 21)) == "");
        const floats row = next_rows(cache, h, 21, 22);
        CHECK(difference(row, floats{17.5f}) == "");
        CHECK(difference_in_bits(row, next_rows(never, h, 21, 22)) == "");
        CHECK(cache.length() == 22);
    }
    SECTION("without room") {
        kv_cache cache(sliding_window{.window = 8}, h.shape, {}, {.capacity = 8});
        fed(cache, h, {20});
        sash::append(h.keys(20, 4), h.values(20, 4), cache);
        const bytes before = saved(cache);
        const positions then = held(cache);
        CHECK_FALSE(cache.can_rollback(3));
        CHECK(names(refusal([&] { cache.rollback(3); }), {"3", "rollback_slack is 0"}));
        CHECK(saved(cache) == before);
        CHECK(held(cache) == then);
        CHECK(cache.length() == 24);
    }
}

TEMPLATE_LIST_TEST_CASE("R12: rollback of none, of too many, of a negative number", "", kinds) {
    const history h = contents(30, small);
    typename TestType::cache cache(TestType::make(), small, {}, {.rollback_slack = 4});
    CHECK(cache.can_rollback(0));
    CHECK_FALSE(cache.can_rollback(1));
    fed(cache, h, {30});
    const bytes before = saved(cache);
    cache.rollback(0);
    CHECK(saved(cache) == before);
    for (const int64 n : {int64{31}, int64{-1}, std::numeric_limits<int64>::max(), std::numeric_limits<int64>::min()}) {
        CHECK_FALSE(cache.can_rollback(n));
        CHECK_THROWS_AS(cache.rollback(n), sash::error);
        CHECK(saved(cache) == before);
    }
}

TEMPLATE_LIST_TEST_CASE(
    "R12: for every number of drafts: bit-equal to a cache that never saw them, or refused and unchanged", "", kinds) {
    const history h = contents(100, small), drafts = contents(100, small, 7);
    for (const int64 slack : {0, 1, 3, 17, 40})
        for (const int64 length : {1, 2, 5, 10, 20, 63, 64, 65})
            for (const int64 brought : {1, 2, 5, 30})
                for (const int64 back : {int64{1}, brought, brought + 1}) {
                    if (back > length + brought) continue;
                    CAPTURE(slack, length, brought, back);
                    const sash::storage storage{.rollback_slack = slack};
                    typename TestType::cache cache(TestType::make(), small, {}, storage),
                        never(TestType::make(), small, {}, storage);
                    next_rows(cache, h, 0, length);
                    next_rows(cache, drafts, 0, brought);
                    const bytes before = saved(cache);
                    if (!cache.can_rollback(back)) {
                        REQUIRE(
                            (back > slack && cache.stored() < cache.length()));  // and only because something has left
                        REQUIRE_THROWS_AS(cache.rollback(back), sash::error);
                        REQUIRE(saved(cache) == before);
                        continue;
                    }
                    cache.rollback(back);
                    const int64 target = length + brought - back;
                    REQUIRE(cache.length() == target);
                    next_rows(never, h, 0, std::min(length, target));
                    if (target > length) next_rows(never, drafts, 0, target - length);
                    REQUIRE(difference_in_bits(next_rows(cache, h, 70, 80), next_rows(never, h, 70, 80)) == "");
                    REQUIRE(difference_in_bits(next_rows(cache, h, 80, 81), next_rows(never, h, 80, 81)) == "");
                }
}

TEMPLATE_LIST_TEST_CASE("R12: a slack of several blocks beside a window of a few tokens", "", kinds) {
    const history h = contents(900, small), drafts = contents(300, small, 7);
    const exact_rows expected = expected_rows<TestType>(h);
    for (const int64 slack : {64, 100, 300})
        for (const int64 step : {int64{1}, int64{7}, slack}) {  // by which the tokens come
            typename TestType::cache cache(TestType::make(), small, {}, {.rollback_slack = slack});
            for (int64 at = 0; at < 600; at += step) next_rows(cache, h, at, std::min<int64>(600, at + step));
            CAPTURE(slack, step);
            typename TestType::cache fork = cache;
            fork.rollback(slack);  // tokens that were accepted long ago
            const int64 back = 600 - slack;
            CHECK(difference(next_rows(fork, h, back, 900), part(expected, h, back, 900)) == "");
            next_rows(cache, drafts, 0, slack);
            cache.rollback(slack);
            CHECK(difference(next_rows(cache, h, 600, 900), part(expected, h, 600, 900)) == "");
        }
}

TEMPLATE_LIST_TEST_CASE("R12: a second rollback without an append in between is exact too, or refused", "", kinds) {
    const history h = contents(80, small);
    for (const int64 slack : {1, 5, 17})
        for (int64 length = 1; length <= 70; length += length < 20 ? 1 : 7)
            for (const int64 first : {int64{1}, slack}) {
                if (first > length) continue;
                typename TestType::cache cache(TestType::make(), small, {}, {.rollback_slack = slack});
                next_rows(cache, h, 0, length);
                cache.rollback(first);
                for (int64 second = 0; second <= length - first; ++second) {
                    if (!cache.can_rollback(second)) continue;
                    typename TestType::cache fork = cache,
                                             never(TestType::make(), small, {}, {.rollback_slack = slack});
                    fork.rollback(second);
                    const int64 target = length - first - second;
                    next_rows(never, h, 0, target);
                    CAPTURE(slack, length, first, second);
                    REQUIRE(difference_in_bits(next_rows(fork, h, 70, 75), next_rows(never, h, 70, 75)) == "");
                }
            }
}

TEMPLATE_LIST_TEST_CASE("R12: as many drafts as the slack can always be taken back", "", kinds) {
    const history h = contents(300, small);
    for (const int64 slack : {1, 5, 17}) {
        typename TestType::cache cache(TestType::make(), small, {}, {.rollback_slack = slack});
        for (int64 at = 0; at + slack <= 300; at += 3) {
            CAPTURE(slack, at);
            sash::append(h.keys(at, slack), h.values(at, slack), cache);
            REQUIRE(cache.can_rollback(slack));
            cache.rollback(slack);
            REQUIRE(cache.length() == at);
            if (at + 3 <= 300) sash::append(h.keys(at, 3), h.values(at, 3), cache);
        }
    }
}

TEST_CASE("R12: rolling back past the sinks leaves those that came first, and new ones take their place") {
    history h = contents(40, small), changed = h;
    for (int64 j = 1; j < 40; ++j)
        for (int64 c = 0; c < 5; ++c) changed.value_row(j)[c] = content(j * 5 + c + 50);
    for (const int64 length : {5, 9}) {
        kv_cache cache(sliding_window{.window = 8, .sinks = 2}, small);
        fed(cache, h, {length});
        cache.rollback(length - 1);
        CHECK(held(cache) == positions{0});
        CHECK(difference(next_rows(cache, changed, 1, 40), part(softmax_rows(changed, window_rule{8, 2}), h, 1, 40)) ==
              "");
    }
    kv_cache cache(sliding_window{.window = 8, .sinks = 2}, small, {}, {.rollback_slack = 30});
    fed(cache, h, {30});
    cache.rollback(29);
    CHECK(held(cache) == positions{0});
    CHECK(difference(next_rows(cache, changed, 1, 40), part(softmax_rows(changed, window_rule{8, 2}), h, 1, 40)) == "");
}

TEMPLATE_LIST_TEST_CASE("R12: drafts of NaN and infinity leave nothing behind", "", kinds) {
    const history h = contents(40, small);
    for (const float bad : {not_a_number, static_cast<float>(infinity)}) {
        typename TestType::cache cache(TestType::make(), small, {}, {.rollback_slack = 6});
        fed(cache, h, {20});
        const floats x(100, bad);
        sash::append({x, 5, 1, 3}, {x, 5, 1, 5}, cache);
        cache.rollback(5);
        CHECK(difference(next_rows(cache, h, 20, 40), part(expected_rows<TestType>(h), h, 20, 40)) == "");
    }
}

TEMPLATE_LIST_TEST_CASE("R12: drafting at random, against the tokens that stayed", "", kinds) {
    const unsigned seed = 77;
    std::mt19937 random(seed);
    const auto pick = [&](int64 low, int64 high) { return std::uniform_int_distribution<int64>(low, high)(random); };
    for (int round = 0; round < 12; ++round) {
        const int64 slack = pick(1, 20);
        history truth = contents(400, small);
        typename TestType::cache cache(TestType::make(), small, {}, {.rollback_slack = slack, .piece = pick(1, 60)});
        int64 length = 0, number = 1;
        for (int step = 0; step < 40 && length < 380; ++step) {
            const int64 count = pick(1, 20);
            for (int64 j = length; j < length + count; ++j) {
                for (int64 c = 0; c < 3; ++c) truth.key_row(j)[c] = content(number++);
                for (int64 c = 0; c < 5; ++c) truth.value_row(j)[c] = content(number++);
            }
            const floats got = next_rows(cache, truth, length, length + count);
            CAPTURE(seed, round, step, slack, length, count);
            REQUIRE(difference(got, part(expected_rows<TestType>(truth.first(length + count)), truth, length,
                                         length + count)) == "");
            length += count;
            const int64 back = pick(0, std::min(slack, length));
            if (!cache.can_rollback(back)) continue;  // after a rollback there may be less slack than that
            cache.rollback(back);
            length -= back;
        }
    }
}

TEST_CASE("R12: keys turned by the library are taken back, saved and forked with their positions") {
    const sash::shape dims{.heads = 2, .kv_heads = 1, .head_dim = 4};
    const history h = contents(60, dims), drafts = contents(10, dims, 3);
    const double frequencies[] = {.7, .05};
    const sash::score turned{.rotary = {.frequencies = frequencies, .by = sash::rotates::library}};
    for (const sash::frame frame : {sash::frame::original, sash::frame::compact}) {
        const sliding_window policy{.window = 8, .sinks = 2, .frame = frame};
        kv_cache never(policy, dims, turned);
        const rows expected = fed(never, h, {30, 30});
        kv_cache cache(policy, dims, turned, {.rollback_slack = 10});
        fed(cache, h.first(30), {30});
        sash::append(drafts.keys(0, 10), drafts.values(0, 10), cache);
        cache.rollback(10);
        kv_cache fork = cache, loaded = cache.empty_copy();
        loaded.load(cache.save());
        for (kv_cache<sliding_window>* c : {&cache, &fork, &loaded})
            CHECK(difference_in_bits(next_rows(*c, h, 30, 60),
                                     floats(expected.out.begin() + 30 * 8, expected.out.end())) == "");
    }
}

TEST_CASE("R12: over a range of layers all are taken back, or none") {
    const history h = contents(40, small);
    SECTION("windows, one of which has no slack") {
        std::vector<kv_cache<sliding_window>> layers;
        for (const int64 slack : {6, 0, 6})
            layers.emplace_back(sliding_window{.window = 8, .sinks = 2}, small, sash::score{},
                                sash::storage{.rollback_slack = slack});
        for (auto& layer : layers) fed(layer, h, {20});
        std::vector<bytes> before;
        for (const auto& layer : layers) before.push_back(saved(layer));
        CHECK_FALSE(sash::can_rollback(layers, 3));
        CHECK_THROWS_AS(sash::rollback(layers, 3), sash::error);
        for (int n = 0; n < 3; ++n) CHECK(saved(layers[index(n)]) == before[index(n)]);
        layers[1] = layers[0];
        CHECK(sash::can_rollback(layers, 3));
        sash::rollback(layers, 3);
        for (auto& layer : layers) {
            CHECK(layer.length() == 17);
            CHECK(difference(next_rows(layer, h, 17, 40), part(softmax_rows(h, window_rule{8, 2}), h, 17, 40)) == "");
        }
    }
    SECTION("states of different lengths") {
        std::vector<kv_cache<sash::linear<>>> layers(2, kv_cache<sash::linear<>>({}, small, {}, {.rollback_slack = 6}));
        fed(layers[0], h, {20});
        fed(layers[1], h, {2});
        CHECK_THROWS_AS(sash::rollback(layers, 3), sash::error);
        CHECK(layers[0].length() == 20);
        sash::rollback(layers, 2);
        CHECK(layers[0].length() == 18);
        CHECK(layers[1].length() == 0);
    }
}

TEST_CASE("R12: a rollback allocates nothing, so it cannot fail halfway") {
    const history h = contents(300, small);
    poisoned_memory memory;
    kv_cache<sliding_window> window({.window = 8, .sinks = 2}, small, {},
                                    {.rollback_slack = 20, .memory = memory.source()});
    kv_cache<sash::linear<>> state({}, small, {}, {.rollback_slack = 20, .memory = memory.source()});
    kv_cache<full> everything({}, small, {}, {.memory = memory.source()});
    fed(window, h, {300});
    fed(state, h, {300});
    fed(everything, h, {300});
    const int64 before = heap_calls;
    memory.left = 0;
    window.rollback(20);
    state.rollback(20);
    everything.rollback(250);
    CHECK(heap_calls == before);
    CHECK(state.length() == 280);
}

// ----------------------------------------------------------------------------------------------------------------- R13

TEMPLATE_LIST_TEST_CASE("R13: forks are independent", "", kinds) {
    const history h = contents(200, small), other = contents(200, small, 13);
    for (const int64 length : {0, 1, 20, 64, 100}) {
        CAPTURE(length);
        typename TestType::cache cache(TestType::make(), small);
        fed(cache, h, {length});
        typename TestType::cache fork = cache, later = cache;
        CHECK(saved(fork) == saved(cache));
        next_rows(fork, other, length, 200);  // the fork goes its own way
        CHECK(cache.length() == length);
        const floats expected = part(expected_rows<TestType>(h), h, length, 200);
        CHECK(difference(next_rows(cache, h, length, 200), expected) == "");
        CHECK(difference(next_rows(later, h, length, 200), expected) == "");
        history mixed = other;  // what the fork has seen: h, then other
        std::copy_n(h.key.begin(), length * 3, mixed.key.begin());
        std::copy_n(h.value.begin(), length * 5, mixed.value.begin());
        fork = typename TestType::cache(later.empty_copy());
        fed(fork, h, {length});
        CHECK(difference(next_rows(fork, mixed, length, 200),
                         part(expected_rows<TestType>(mixed), mixed, length, 200)) == "");
    }
}

TEST_CASE("R13: forks that share segments do not write into each other's") {
    const sash::shape wide{.key_dim = 2, .value_dim = 4096};  // a segment is one block of 64 tokens
    const history h = contents(300, wide), other = contents(300, wide, 29);
    kv_cache cache(full{}, wide);
    fed(cache, h, {200});
    const bytes before = saved(cache);
    kv_cache fork = cache;
    SECTION("after a rollback into a shared segment") {
        for (const int64 keep : {199, 192, 191, 130, 128, 70, 64, 63, 1, 0}) {
            fork = cache;
            fork.rollback(200 - keep);
            sash::append(other.keys(keep, 220 - keep), other.values(keep, 220 - keep), fork);
            CAPTURE(keep);
            REQUIRE(saved(cache) == before);
            history mixed = other;
            std::copy_n(h.key.begin(), keep * 2, mixed.key.begin());
            std::copy_n(h.value.begin(), keep * 4096, mixed.value.begin());
            kv_cache alone(full{}, wide);
            sash::append(mixed.keys(0, 220), mixed.values(0, 220), alone);
            REQUIRE(saved(fork) == saved(alone));
        }
    }
    SECTION("when the original is rolled back and writes") {
        cache.rollback(150);
        sash::append(other.keys(50, 200), other.values(50, 200), cache);
        CHECK(saved(fork) == before);
    }
    SECTION("when the original is gone") {
        cache = kv_cache(full{}, wide);
        CHECK(saved(fork) == before);
        fork.reset();
        sash::append(other.keys(0, 300), other.values(0, 300), fork);
        CHECK(fork.length() == 300);
    }
    SECTION("when it is reset and filled anew") {
        fork.reset();
        sash::append(other.keys(0, 300), other.values(0, 300), fork);
        CHECK(saved(cache) == before);
    }
}

TEST_CASE("R13: a fork of a long cache takes less than a segment") {
    poisoned_memory memory;
    kv_cache cache(full{}, {.head_dim = 32}, {}, {.memory = memory.source()});
    const floats x(8192 * 32, 1.f);
    for (int n = 0; n < 4; ++n) sash::append({x, 8192, 1, 32}, {x, 8192, 1, 32}, cache);
    sash::append({x, 10, 1, 32}, {x, 10, 1, 32}, cache);
    const int64 before = memory.bytes;
    const kv_cache fork = cache;
    CHECK(memory.bytes - before <= (1 << 20) + (1 << 16));
    CHECK(fork.length() == 4 * 8192 + 10);
}

TEMPLATE_LIST_TEST_CASE("R13: a copy replaces what was there", "", kinds) {
    const history h = contents(60, small), other = contents(60, small, 3);
    typename TestType::cache cache(TestType::make(), small), target(TestType::make(), small);
    fed(cache, h, {30});
    fed(target, other, {50});
    target = cache;
    CHECK(saved(target) == saved(cache));
    CHECK(difference(next_rows(target, h, 30, 60), part(expected_rows<TestType>(h), h, 30, 60)) == "");
    CHECK(cache.length() == 30);
    typename TestType::cache& itself = cache;
    cache = itself;
    CHECK(difference(next_rows(cache, h, 30, 60), part(expected_rows<TestType>(h), h, 30, 60)) == "");
    cache = std::move(itself);
    CHECK(cache.length() == 60);
}

TEMPLATE_LIST_TEST_CASE("R13: a reset cache is a new one", "", kinds) {
    const history h = contents(60, small), other = contents(60, small, 3);
    poisoned_memory memory;
    const sash::storage storage{.rollback_slack = 4, .auxiliary = 3, .memory = memory.source()};
    typename TestType::cache cache(TestType::make(), small, {}, storage), fresh(TestType::make(), small, {}, storage);
    fed(cache, other, {60});
    cache.auxiliary()[1] = 5;
    cache.reset();
    CHECK(cache.length() == 0);
    CHECK(held(cache).empty());
    CHECK(cache.auxiliary()[1] == 0);
    CHECK(saved(cache) == saved(fresh));
    CHECK_FALSE(cache.can_rollback(1));
    const int64 held_before = memory.bytes;
    CHECK(difference_in_bits(fed(cache, h, {30, 30}), fed(fresh, h, {30, 30})) == "");
    CHECK(saved(cache) == saved(fresh));
    CHECK(memory.bytes >= held_before);
}

TEMPLATE_LIST_TEST_CASE("R13: moves are noexcept and leave an empty cache of the same shape", "", kinds) {
    using cache_type = typename TestType::cache;
    STATIC_REQUIRE(std::is_nothrow_move_constructible_v<cache_type>);
    STATIC_REQUIRE(std::is_nothrow_move_assignable_v<cache_type>);
    const history h = contents(60, small);
    poisoned_memory memory;
    {
        const sash::storage storage{.rollback_slack = 4, .auxiliary = 2, .memory = memory.source()};
        cache_type cache(TestType::make(), small, {}, storage);
        fed(cache, h, {30});
        cache.auxiliary()[0] = 9;
        const bytes before = saved(cache);
        memory.left = 0;
        cache_type moved = std::move(cache);
        cache_type again(TestType::make(), small);
        again = std::move(moved);
        memory.left = 1 << 30;
        CHECK(saved(again) == before);
        CHECK(again.auxiliary()[0] == 9);
        for (cache_type* left : {&cache, &moved}) {
            CHECK(left->length() == 0);
            CHECK(held(*left).empty());
            CHECK(left->shape() == again.shape());
            CHECK_FALSE(left->can_rollback(1));
            floats out(index(h.row_floats()), not_a_number);
            sash::read(h.queries(0, 1), *left, {out, 1, 2, 5});
            CHECK(out == floats(out.size(), 0.f));
            saved(*left);
            cache_type copy = *left;
            left->reset();
            CHECK(difference(fed(copy, h, {30, 30}), expected_rows<TestType>(h)) == "");
            CHECK(difference(fed(*left, h, {60}), expected_rows<TestType>(h)) == "");
            CHECK(left->auxiliary()[0] == 0);
        }
        CHECK(difference(next_rows(again, h, 30, 60), part(expected_rows<TestType>(h), h, 30, 60)) == "");
        std::swap(again, cache);
        std::vector<cache_type> many;
        for (int n = 0; n < 9; ++n) many.push_back(cache);  // grows by moving
        for (cache_type& c : many) CHECK(saved(c) == saved(cache));
    }
    CHECK(memory.bytes == 0);
}

TEMPLATE_LIST_TEST_CASE("R13: a checkpoint can be come back to, again and again", "", kinds) {
    const history h = contents(80, small), other = contents(80, small, 3);
    typename TestType::cache cache(TestType::make(), small, {}, {.auxiliary = 2});
    fed(cache, h, {30});
    cache.auxiliary()[0] = 4;
    const auto then = cache.checkpoint();
    const floats expected = part(expected_rows<TestType>(h), h, 30, 80);
    for (int n = 0; n < 3; ++n) {
        next_rows(cache, other, 0, 20 + n);
        cache.auxiliary()[0] = 1;
        cache.restore(then);
        CHECK(cache.length() == 30);
        CHECK(cache.auxiliary()[0] == 4);
        CHECK(difference(next_rows(cache, h, 30, 80), expected) == "");
    }
    SECTION("a range of them") {
        std::vector<typename TestType::cache> layers(3, then);
        auto all = sash::checkpoint(layers);
        for (auto& layer : layers) next_rows(layer, other, 0, 9);
        sash::restore(layers, all);
        for (auto& layer : layers) CHECK(difference(next_rows(layer, h, 30, 80), expected) == "");
        std::vector<typename TestType::cache> fewer(2, then);
        CHECK_THROWS_AS(sash::restore(fewer, all), sash::error);
    }
}

// ----------------------------------------------------------------------------------------------------------------- R14

TEMPLATE_LIST_TEST_CASE("R14: a loaded cache behaves to the bit as the one that was saved", "", kinds) {
    const history h = contents(200, small), other = contents(60, small, 3);
    for (const int64 length : {0, 1, 2, 9, 64, 100, 150})
        for (const int64 back : {0, 3}) {
            if (back > length) continue;
            CAPTURE(length, back);
            const sash::storage storage{.rollback_slack = 5, .auxiliary = 2};
            typename TestType::cache cache(TestType::make(), small, {}, storage),
                loaded(TestType::make(), small, {}, storage);
            fed(cache, h, {length});
            cache.rollback(back);
            cache.auxiliary()[1] = 6;
            const bytes file = saved(cache);
            CHECK(file.size() == cache.saved_bytes());
            fed(loaded, other, {60});  // it is not empty: all that goes
            CHECK(loaded.load(file) == file.size());
            CHECK(saved(loaded) == file);
            CHECK(held(loaded) == held(cache));
            CHECK(loaded.length() == cache.length());
            CHECK(loaded.auxiliary()[1] == 6);
            const int64 at = length - back;
            for (int64 n = 0; n < 8; ++n) REQUIRE(loaded.can_rollback(n) == cache.can_rollback(n));
            if (cache.can_rollback(2)) {
                auto fork = cache, loaded_fork = loaded;
                fork.rollback(2);
                loaded_fork.rollback(2);
                CHECK(difference_in_bits(next_rows(loaded_fork, h, at - 2, 200), next_rows(fork, h, at - 2, 200)) ==
                      "");
            }
            const floats rest = next_rows(cache, h, at, 200);
            CHECK(difference_in_bits(next_rows(loaded, h, at, 200), rest) == "");
            CHECK(difference(rest, part(expected_rows<TestType>(h), h, at, 200)) == "");
        }
}

TEMPLATE_LIST_TEST_CASE("R14: damage is refused wherever it is, and the target is untouched", "", kinds) {
    const history h = contents(20, small);
    typename TestType::cache cache(TestType::make(), small, {}, {.auxiliary = 1}), target = cache;
    fed(cache, h, {7});
    fed(target, h, {4});
    const bytes file = saved(cache), before = saved(target);
    const auto refused = [&](const bytes& f) {
        REQUIRE_THROWS_AS(target.load(f), sash::error);
        REQUIRE(saved(target) == before);
    };
    for (std::size_t at = 0; at < file.size(); ++at)
        for (const std::byte bit : {std::byte{0x01}, std::byte{0x80}}) {
            CAPTURE(at);
            bytes damaged = file;
            damaged[at] ^= bit;
            refused(damaged);
        }
    for (std::size_t size = 0; size < file.size(); ++size)
        refused(bytes(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size)));
    refused(bytes(4096));
    refused(bytes(4096, std::byte{0xff}));
    bytes swapped = file;  // two words change places
    std::swap_ranges(swapped.begin() + 40, swapped.begin() + 48, swapped.begin() + 56);
    if (swapped != file) refused(swapped);
    CHECK(target.load(file) == file.size());
}

TEST_CASE("R14: the file of another cache is refused") {
    const history h = contents(20, {.heads = 2, .kv_heads = 1, .head_dim = 4});
    const float slopes[] = {.1f, .2f}, logits[] = {0, 1};
    const double frequencies[] = {1, .1}, slower[] = {1, .2};
    const sliding_window policy{.window = 8, .sinks = 2};
    const sash::score score{
        .scale = .3f, .soft_cap = 5, .alibi = slopes, .sink_logits = logits, .rotary = {.frequencies = frequencies}};
    kv_cache cache(policy, h.shape, score);
    fed(cache, h, {20});
    const bytes file = saved(cache);
    const auto refused = [&](auto&& target) {
        sash::append(h.keys(0, 3), h.values(0, 3), target);
        const bytes before = saved(target);
        CHECK(names(refusal([&] { target.load(file); }), {"another"}));
        CHECK(saved(target) == before);
    };
    refused(kv_cache(sliding_window{.window = 9, .sinks = 2}, h.shape, score));
    refused(kv_cache(sliding_window{.window = 8, .sinks = 1}, h.shape, score));
    refused(kv_cache(sliding_window{.window = 8, .sinks = 2, .frame = sash::frame::compact}, h.shape, score));
    refused(kv_cache(full{}, h.shape, score));
    refused(kv_cache<sliding_window, float16>(policy, h.shape, score));
    refused(kv_cache<sliding_window, bfloat16>(policy, h.shape, score));
    refused(kv_cache(policy, {.heads = 4, .kv_heads = 1, .head_dim = 4}, {}));
    const auto other = [&](auto change) {
        sash::score s = score;
        change(s);
        refused(kv_cache(policy, h.shape, s));
    };
    other([](sash::score& s) { s.scale = .4f; });
    other([](sash::score& s) { s.soft_cap = 0; });
    other([](sash::score& s) { s.alibi = {}; });
    other([&](sash::score& s) { s.alibi = logits; });
    other([](sash::score& s) { s.sink_logits = {}; });
    other([&](sash::score& s) { s.rotary.frequencies = slower; });
    other([](sash::score& s) { s.rotary.layout = sash::rotary_layout::interleaved; });
    other([](sash::score& s) { s.rotary.by = sash::rotates::library; });
    kv_cache same(policy, h.shape, score, {.piece = 7});  // how the memory is used is no part of it
    CHECK(same.load(file) == file.size());
    CHECK(saved(same) == file);

    const history g = contents(20, {.heads = 2, .kv_heads = 1, .key_dim = 3, .value_dim = 5});
    kv_cache narrow(policy, g.shape);
    sash::append(g.keys(0, 3), g.values(0, 3), narrow);
    CHECK_THROWS_AS(narrow.load(file), sash::error);
    kv_cache state(sash::linear{}, h.shape);
    kv_cache rectified(sash::linear<sash::relu>{}, h.shape);
    CHECK_THROWS_AS(state.load(file), sash::error);
    fed(state, h, {20});
    CHECK_THROWS_AS(rectified.load(saved(state)), sash::error);
    CHECK_THROWS_AS(cache.load(saved(state)), sash::error);
}

namespace {

// Policies and scores of a user's, each told from the next by one number that shows only here and there.
struct every_nth {
    int64 n = 1;
    constexpr bool sees(int64 i, int64 j) const { return j <= i && (i - j) % n == 0; }
    constexpr sash::key_intervals<1> visible(int64, int64 last) const {
        sash::key_intervals<1> keys;
        keys.add(0, last);
        return keys;
    }
};
struct less_beyond {
    float reach;
    template <class N, class Site>
    constexpr N operator()(N s, const Site& at) const {
        using sash::select;
        return select(at.distance() > N(reach), s - N(1), s);
    }
};

}  // namespace

TEST_CASE("R14: the file of another policy or score of a user's is refused") {
    const history h = contents(30, small);
    for (const int64 n : {1, 2, 3, 7, 9, 16, 17, 32, 100}) {
        kv_cache cache(every_nth{n}, small);
        fed(cache, h, {30});
        CHECK(cache.load(saved(cache)) > 0);
        for (const int64 other : {1, 2, 3, 7, 9, 16, 17, 32, 100}) {
            if (other == n) continue;
            CAPTURE(n, other);
            kv_cache target(every_nth{other}, small);
            CHECK_THROWS_AS(target.load(saved(cache)), sash::error);
        }
    }
    for (const float reach : {0.f, 3.f, 20.f, 50.f, 100.f, 200.f, 1000.f}) {
        kv_cache cache(full{}, small, {.custom = less_beyond{reach}});
        fed(cache, h, {30});
        CHECK(cache.load(saved(cache)) > 0);
        for (const float other : {0.f, 3.f, 20.f, 50.f, 100.f, 200.f, 1000.f}) {
            if (other == reach) continue;
            CAPTURE(reach, other);
            kv_cache target(full{}, small, {.custom = less_beyond{other}});
            CHECK_THROWS_AS(target.load(saved(cache)), sash::error);
        }
    }
}

TEST_CASE("R14: a file is exactly its bytes, so layers lie behind each other; all are loaded or none") {
    const history h = contents(40, small);
    using cache_type = kv_cache<sliding_window>;
    std::vector<cache_type> layers(3, cache_type({.window = 8, .sinks = 2}, small)), fresh = layers;
    for (int n = 0; n < 3; ++n) fed(layers[index(n)], h, {5 + 12 * n});
    bytes file = bytes(sash::save(layers));
    file.resize(file.size() + 11, std::byte{0x5a});
    CHECK(sash::load(fresh, file) == file.size() - 11);
    for (int n = 0; n < 3; ++n) CHECK(saved(fresh[index(n)]) == saved(layers[index(n)]));

    std::vector<cache_type> target(3, cache_type({.window = 8, .sinks = 2}, small));
    for (cache_type& t : target) fed(t, h, {3});
    const bytes before = bytes(sash::save(target));
    file[file.size() - 20] ^= std::byte{1};  // in the last layer
    CHECK_THROWS_AS(sash::load(target, file), sash::error);
    CHECK(bytes(sash::save(target)) == before);
    std::vector<cache_type> four(4, cache_type({.window = 8, .sinks = 2}, small));
    file[file.size() - 20] ^= std::byte{1};
    CHECK_THROWS_AS(sash::load(four, file), sash::error);
    for (const cache_type& c : four) CHECK(c.length() == 0);
}

TEST_CASE("R14: saving into too little room writes nothing") {
    const history h = contents(9, small);
    kv_cache cache(full{}, small);
    fed(cache, h, {9});
    bytes room(cache.saved_bytes() - 1, std::byte{0x5a});
    CHECK_THROWS_AS(cache.save(room), sash::error);
    CHECK(room == bytes(room.size(), std::byte{0x5a}));
}

// ---------------------------------------------------------------------------------------------------- memory (no rule)

TEMPLATE_LIST_TEST_CASE("memory: steady-state decoding allocates nothing", "", kinds) {
    const history h = contents(4000, small);
    for (const named_runner& by : runners()) {
        if (by.name.find("std::thread") == 0) continue;  // making threads is that runner's own affair
        CAPTURE(by.name);
        poisoned_memory memory;
        typename TestType::cache cache(TestType::make(), small, {}, {.rollback_slack = 3, .memory = memory.source()});
        cache.reserve(4000);
        floats out(index(h.row_floats()));
        const auto decode = [&](int64 i) {
            sash::attend(h.queries(i, 1), h.keys(i, 1), h.values(i, 1), cache, {out, 1, 2, 5}, {.run = by.run});
        };
        int64 i = 0;
        for (; i < 400; ++i) decode(i);
        const int64 before = heap_calls, before_in_source = memory.allocations;
        for (; i < 4000; ++i) decode(i);
        const int64 from_source = memory.allocations - before_in_source, from_heap = heap_calls - before;
        CHECK(from_source == 0);
        CHECK(from_heap == 0);
    }
}

TEMPLATE_LIST_TEST_CASE("memory: nor does decoding in a batch, or reading with a workspace", "", kinds) {
    using cache_type = typename TestType::cache;
    const history h = contents(900, small);
    std::vector<cache_type> caches(3, cache_type(TestType::make(), small));
    for (cache_type& c : caches) c.reserve(900);
    std::vector<sash::request<cache_type>> requests(3);
    std::vector<floats> out(3, floats(index(h.row_floats())));
    sash::workspace scratch(1 << 20);
    const auto decode = [&](int64 i) {
        for (int n = 0; n < 3; ++n)
            requests[index(n)] = {.tokens = {.query = h.queries(i, 1), .key = h.keys(i, 1), .value = h.values(i, 1)},
                                  .cache = &caches[index(n)],
                                  .out = {out[index(n)], 1, 2, 5},
                                  .lse = {}};
        sash::attend(requests, {.run = sash::serial{}, .workspace = &scratch});
    };
    int64 i = 0;
    for (; i < 400; ++i) decode(i);
    SECTION("a batch") {
        const int64 before = heap_calls;
        for (; i < 900; ++i) decode(i);
        CHECK(heap_calls - before == 0);
    }
    SECTION("a read") {
        const int64 before = heap_calls;
        for (int n = 0; n < 100; ++n)
            sash::read(h.queries(0, 1), std::as_const(caches[0]), {out[0], 1, 2, 5},
                       {.run = sash::serial{}, .workspace = &scratch});
        CHECK(heap_calls - before == 0);
    }
}

TEMPLATE_LIST_TEST_CASE("memory: an allocation that fails leaves every cache as it was", "", kinds) {
    using cache_type = typename TestType::cache;
    const history h = contents(600, small);
    poisoned_memory memory;
    {
        const sash::storage storage{.rollback_slack = 3, .auxiliary = 2, .memory = memory.source()};
        const auto at_every_point = [&](auto&& act,
                                        auto&& unchanged) {  // fails the first, the second, … until all succeed
            int64 n = 0;
            for (;; ++n) {
                memory.left = n;
                bool failed = false;
                try {
                    act();
                } catch (const std::bad_alloc&) { failed = true; }
                memory.left = std::int64_t{1} << 60;
                if (!failed) break;
                unchanged();
            }
            return n;
        };
        cache_type cache(TestType::make(), small, {}, storage), other(TestType::make(), small, {}, storage);
        fed(cache, h, {40});
        fed(other, h, {3});
        const bytes before = saved(cache), other_before = saved(other);
        const auto both_unchanged = [&] {
            REQUIRE(saved(cache) == before);
            REQUIRE(saved(other) == other_before);
        };
        floats out(index(500 * h.row_floats())), out_too(index(500 * h.row_floats()));
        SECTION("attend") {
            at_every_point(
                [&] {
                    sash::attend(h.queries(40, 500), h.keys(40, 500), h.values(40, 500), cache, {out, 500, 2, 5});
                },
                both_unchanged);
            CHECK(difference(out, part(expected_rows<TestType>(h), h, 40, 540)) == "");
        }
        SECTION("append") {
            at_every_point([&] { sash::append(h.keys(40, 500), h.values(40, 500), cache); }, both_unchanged);
            CHECK(difference(next_rows(cache, h, 540, 600), part(expected_rows<TestType>(h), h, 540, 600)) == "");
        }
        SECTION("a batch") {
            sash::request<cache_type> requests[] = {
                {.tokens = {.query = h.queries(40, 500), .key = h.keys(40, 500), .value = h.values(40, 500)},
                 .cache = &cache,
                 .out = {out, 500, 2, 5},
                 .lse = {}},
                {.tokens = {.query = h.queries(3, 500), .key = h.keys(3, 500), .value = h.values(3, 500)},
                 .cache = &other,
                 .out = {out_too, 500, 2, 5},
                 .lse = {}}};
            CHECK(at_every_point([&] { sash::attend(requests); }, both_unchanged) > 0);
            CHECK(difference(out, part(expected_rows<TestType>(h), h, 40, 540)) == "");
            CHECK(difference(out_too, part(expected_rows<TestType>(h), h, 3, 503)) == "");
        }
        SECTION("a copy") {
            CHECK(at_every_point([&] { other = cache; }, both_unchanged) > 0);
            CHECK(saved(other) == before);
        }
        SECTION("load") {
            CHECK(at_every_point([&] { other.load(before); }, both_unchanged) > 0);
            CHECK(saved(other) == before);
        }
        SECTION("loading a range") {
            std::vector<cache_type> layers;
            layers.push_back(other);
            layers.push_back(other);
            bytes file = before;
            file.insert(file.end(), before.begin(), before.end());
            CHECK(at_every_point(
                      [&] { sash::load(layers, file); },
                      [&] { REQUIRE((saved(layers[0]) == other_before && saved(layers[1]) == other_before)); }) > 0);
            CHECK(saved(layers[1]) == before);
        }
        SECTION("restoring a range") {
            std::vector<cache_type> layers;
            layers.push_back(cache);
            layers.push_back(cache);
            const auto then = sash::checkpoint(layers);
            for (cache_type& layer : layers) layer.reset();
            const bytes empty = saved(layers[0]);
            CHECK(at_every_point([&] { sash::restore(layers, then); },
                                 [&] { REQUIRE((saved(layers[0]) == empty && saved(layers[1]) == empty)); }) > 0);
            CHECK(saved(layers[1]) == before);
        }
        SECTION("reserve") {
            at_every_point([&] { cache.reserve(5000); }, both_unchanged);
        }
        SECTION("a read") {
            CHECK(at_every_point(
                      [&] {
                          sash::read(h.queries(40, 100), std::as_const(cache), {out.data(), 100, 2, 5});
                      },
                      both_unchanged) > 0);
        }
        SECTION("a constructor") {
            CHECK(at_every_point(
                      [&] {
                          const float slopes[] = {1, 2};
                          if constexpr (sash::softmax_policy<typename TestType::policy>)
                              cache_type(TestType::make(), small, {.alibi = slopes}, storage);
                          else
                              cache_type(TestType::make(), small, {}, storage);
                      },
                      both_unchanged) > 0);
        }
    }
    CHECK(memory.bytes == 0);  // and nothing leaked
}

TEST_CASE("memory: what workspace_bytes says is enough") {
    const history h = contents(700, {.heads = 6, .kv_heads = 2, .head_dim = 5});
    for (const named_runner& by : runners())
        for (const int64 tokens : {1, 2, 40, 300}) {
            CAPTURE(by.name, tokens);
            poisoned_memory memory;
            kv_cache cache(sliding_window{.window = 100, .sinks = 4}, h.shape);
            fed(cache, h, {400});
            sash::workspace scratch(sash::workspace_bytes(cache, tokens, {.run = by.run}), memory.source());
            const int64 before = memory.allocations;
            floats out(index(tokens * h.row_floats()));
            sash::attend(h.queries(400, tokens), h.keys(400, tokens), h.values(400, tokens), cache, {out, tokens, 6, 5},
                         {.run = by.run, .workspace = &scratch});
            CHECK(memory.allocations == before);
            CHECK(difference(out, part(softmax_rows(h, window_rule{100, 4}), h, 400, 400 + tokens)) == "");
        }
}
