// Rules 26 to 28, 31 and 33 to 35: heads, strides, bounds, layouts, threads, partitions and big counts.
#include "support/catch.hpp"
#include "support/probes.hpp"

#include <chrono>
#include <cstdio>
#include <future>
#include <map>

#include <sys/mman.h>
#include <unistd.h>

using namespace probes;
using sash::bfloat16;
using sash::float16;
using sash::full;
using sash::kv_cache;
using sash::sliding_window;

// ----------------------------------------------------------------------------------------------------------------- R26

TEMPLATE_TEST_CASE("R26: A11 query head h reads KV head h / (heads / kv_heads)", "", full, sliding_window,
                   sash::linear<>) {
    struct grouping {
        int64 heads, kv_heads;
    };
    for (const grouping g : {grouping{6, 2}, grouping{6, 1}, grouping{6, 6}, grouping{8, 4}, grouping{28, 4},
                             grouping{71, 1}, grouping{1, 1}})
        for (const int64 tokens : {1, 3, 70}) {
            history h(tokens, {.heads = g.heads, .kv_heads = g.kv_heads, .head_dim = 3});
            floats expected;
            for (int64 j = 0; j < tokens; ++j) {
                for (int64 kv = 0; kv < g.kv_heads; ++kv)
                    std::fill_n(h.value_row(j, kv), 3, static_cast<float>(10 * kv + 1));
                for (int64 head = 0; head < g.heads; ++head)
                    expected.insert(expected.end(), 3, static_cast<float>(10 * (head * g.kv_heads / g.heads) + 1));
            }
            for (const way& w : every_way(tokens)) {
                CAPTURE(g.heads, g.kv_heads, tokens, w.name);
                CHECK(difference(rows_by<float>(w, TestType{}, h).out, expected) == "");
            }
        }
}

TEST_CASE("R26: six query heads over two KV heads, by number") {
    const floats q(6, 0.f), k(2, 0.f), v{1, 11};
    floats out(6, not_a_number);
    sash::attend(full{}, {q, 1, 6, 1}, {k, 1, 2, 1}, {v, 1, 2, 1}, {out, 1, 6, 1});
    CHECK(out == floats{1, 1, 1, 11, 11, 11});
}

TEST_CASE("R26: query, key and value heads may each be grouped in their own way") {
    struct grouping {
        int64 heads, query, key, value;
    };
    for (const grouping g : {grouping{8, 8, 2, 4}, grouping{8, 4, 4, 8}, grouping{8, 8, 8, 2}, grouping{12, 6, 3, 12},
                             grouping{4, 1, 1, 4}, grouping{4, 2, 4, 1}}) {
        const int64 tokens = 50;
        const history q = contents(tokens, {.heads = g.query, .head_dim = 3}),
                      k = contents(tokens, {.heads = g.key, .head_dim = 3}, 5),
                      v = contents(tokens, {.heads = g.value, .head_dim = 3}, 11);
        history alike(tokens,
                      {.heads = g.heads, .kv_heads = g.heads, .head_dim = 3});  // every head with operands of its own
        for (int64 t = 0; t < tokens; ++t)
            for (int64 head = 0; head < g.heads; ++head) {
                const auto copy = [&](const floats& from, int64 count, floats& to) {
                    std::copy_n(from.begin() + (t * count + head / (g.heads / count)) * 3, 3,
                                to.begin() + (t * g.heads + head) * 3);
                };
                copy(q.query, g.query, alike.query);
                copy(k.key, g.key, alike.key);
                copy(v.value, g.value, alike.value);
            }
        const auto got = [&](const auto& policy) {
            floats out(index(tokens * g.heads * 3), not_a_number), stateless = out;
            kv_cache cache(
                policy,
                {.heads = g.heads, .head_dim = 3, .query_heads = g.query, .key_heads = g.key, .value_heads = g.value});
            for (int64 first = 0; first < tokens; first += 10) {
                const auto rows = [&](const floats& x, int64 heads) {
                    return sash::input{x.data() + first * heads * 3, 10, heads, 3};
                };
                sash::attend(rows(q.query, g.query), rows(k.key, g.key), rows(v.value, g.value), cache,
                             {out.data() + first * g.heads * 3, 10, g.heads, 3});
            }
            sash::attend(policy, {q.query, tokens, g.query, 3}, {k.key, tokens, g.key, 3},
                         {v.value, tokens, g.value, 3}, {stateless, tokens, g.heads, 3});
            CHECK(difference(stateless, out) == "");
            return out;
        };
        CAPTURE(g.heads, g.query, g.key, g.value);
        CHECK(difference(got(sliding_window{.window = 20, .sinks = 2}), softmax_rows(alike, window_rule{20, 2}).out) ==
              "");
        CHECK(difference(got(sash::linear{}), linear_rows(alike).out, 3) == "");
    }
}

// ----------------------------------------------------------------------------------------------------------------- R27

namespace {

// Memory that ends, and begins, at a page that cannot be touched.
template <class T>
class guarded {
public:
    explicit guarded(std::size_t count, bool at_the_end = true) {
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE)),
                   inside = (count * sizeof(T) + page - 1) / page * page;
        size_ = inside + 2 * page;
        base_ = mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base_ == MAP_FAILED) throw std::bad_alloc();
        auto* first = static_cast<std::byte*>(base_) + page;
        if (mprotect(first, inside, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
        data = reinterpret_cast<T*>(at_the_end ? first + inside - count * sizeof(T) : first);
    }
    guarded(const guarded&) = delete;
    ~guarded() { munmap(base_, size_); }
    T* data;

private:
    void* base_;
    std::size_t size_;
};

template <class T>
void put(T* to, const floats& from) {
    for (std::size_t n = 0; n < from.size(); ++n) to[n] = T(from[n]);
}

template <class Element>
floats as_stored(floats numbers) {
    for (float& x : numbers) x = static_cast<float>(stored<Element>(x));
    return numbers;
}

// Elements of one head's row may lie anywhere: where a view has put them.
struct layout {
    const char* name;
    int64 by_token, by_head, by_dim;
    int64 first = 0;  // element (0, 0, 0)
    int64 room = 0;
};
std::vector<layout> layouts(int64 tokens, int64 heads, int64 dim) {
    const int64 all = tokens * heads * dim;
    return {{"contiguous", heads * dim, dim, 1, 0, all},
            {"head by head", dim, tokens * dim, 1, 0, all},
            {"dim first", heads, 1, tokens * heads, 0, all},
            {"every third", 3 * heads * dim, 3 * dim, 3, 2, 3 * all + 2},
            {"padded rows", heads * (dim + 5) + 7, dim + 5, 1, 3, tokens * (heads * (dim + 5) + 7) + 3},
            {"backwards", -heads * dim, -dim, -1, all - 1, all},
            {"tokens backwards", -heads * dim, dim, 1, (tokens - 1) * heads * dim, all}};
}
template <class T>
std::vector<T> laid_out(const floats& x, const layout& l, int64 tokens, int64 heads, int64 dim) {
    std::vector<T> placed(index(l.room), T(not_a_number));
    for (int64 t = 0; t < tokens; ++t)
        for (int64 h = 0; h < heads; ++h)
            for (int64 c = 0; c < dim; ++c)
                placed[index(l.first + t * l.by_token + h * l.by_head + c * l.by_dim)] =
                    T(x[index((t * heads + h) * dim + c)]);
    return placed;
}

template <class Element, class Policy>
void check_layouts(const Policy& policy, const exact_rows& expected, const history& h) {
    const sash::shape& s = h.shape;
    for (const std::size_t which : {0u, 1u, 2u, 3u, 4u, 5u, 6u})
        for (const positions& cut : cuts_of(h.tokens)) {
            const layout lq = layouts(h.tokens, s.heads, s.key_dim)[which],
                         lk = layouts(h.tokens, s.kv_heads, s.key_dim)[(which + 1) % 7],
                         lv = layouts(h.tokens, s.kv_heads, s.value_dim)[(which + 2) % 7],
                         lo = layouts(h.tokens, s.heads, s.value_dim)[(which + 3) % 7];
            const auto q = laid_out<Element>(h.query, lq, h.tokens, s.heads, s.key_dim),
                       k = laid_out<Element>(h.key, lk, h.tokens, s.kv_heads, s.key_dim),
                       v = laid_out<Element>(h.value, lv, h.tokens, s.kv_heads, s.value_dim);
            floats out(index(lo.room), 77.f);
            kv_cache cache(policy, s);
            int64 at = 0;
            for (const int64 n : cut) {
                const auto view = [&](const std::vector<Element>& x, const layout& l, int64 heads, int64 dim) {
                    return sash::input(x.data() + l.first + at * l.by_token, n, heads, dim, l.by_token, l.by_head,
                                       l.by_dim);
                };
                sash::attend(view(q, lq, s.heads, s.key_dim), view(k, lk, s.kv_heads, s.key_dim),
                             view(v, lv, s.kv_heads, s.value_dim), cache,
                             {out.data() + lo.first + at * lo.by_token, n, s.heads, s.value_dim, lo.by_token,
                              lo.by_head, lo.by_dim});
                at += n;
            }
            floats got;
            for (int64 t = 0; t < h.tokens; ++t)
                for (int64 head = 0; head < s.heads; ++head)
                    for (int64 c = 0; c < s.value_dim; ++c) {
                        float& x = out[index(lo.first + t * lo.by_token + head * lo.by_head + c * lo.by_dim)];
                        got.push_back(x);
                        x = 77;
                    }
            CAPTURE(lq.name, lo.name, cut.size());
            CHECK(difference(got, expected.out, 3) == "");
            CHECK(out == floats(out.size(), 77.f));  // and nothing beside them
        }
}

}  // namespace

TEMPLATE_TEST_CASE("R27: any strides of query, key, value and out, negative ones too", "", float, float16, bfloat16) {
    history h = contents(70, {.heads = 4, .kv_heads = 2, .key_dim = 7, .value_dim = 5});
    h.query = as_stored<TestType>(h.query);
    h.key = as_stored<TestType>(h.key);
    h.value = as_stored<TestType>(h.value);
    check_layouts<TestType>(sliding_window{.window = 30, .sinks = 3}, softmax_rows(h, window_rule{30, 3}), h);
    check_layouts<TestType>(full{}, softmax_rows(h, window_rule{}), h);
    check_layouts<TestType>(sash::linear{}, linear_rows(h), h);
}

TEST_CASE("R27: a stride of zero is a broadcast, over tokens, heads and dims") {
    const int64 tokens = 50;
    const floats key{.3f, -.2f, .5f}, value{4, 5}, query{1, 2, 3};
    history h(tokens, {.heads = 4, .kv_heads = 2, .key_dim = 3, .value_dim = 2});
    for (int64 n = 0; n < tokens * 4; ++n) std::copy(query.begin(), query.end(), h.query.begin() + n * 3);
    for (int64 n = 0; n < tokens * 2; ++n) std::copy(key.begin(), key.end(), h.key.begin() + n * 3);
    for (int64 n = 0; n < tokens * 2; ++n) std::copy(value.begin(), value.end(), h.value.begin() + n * 2);
    const exact_rows expected = softmax_rows(h, window_rule{7, 1});
    for (const int64 n : {1, 50}) {
        kv_cache cache(sliding_window{.window = 7, .sinks = 1}, h.shape);
        floats out(index(tokens * h.row_floats()), not_a_number);
        for (int64 at = 0; at < tokens; at += n)
            sash::attend({query, n, 4, 3, 0, 0}, {key, n, 2, 3, 0, 0}, {value, n, 2, 2, 0, 0}, cache,
                         h.rows(out, at, n));
        CHECK(difference(out, expected.out) == "");
        kv_cache ones(full{}, {.heads = 2, .head_dim = 4});
        const floats one{1};
        floats same(index(tokens * 8), not_a_number);
        for (int64 at = 0; at < tokens; at += n)
            sash::attend({one, n, 2, 4, 0, 0, 0}, {one, n, 2, 4, 0, 0, 0}, {one, n, 2, 4, 0, 0, 0}, ones,
                         {same.data() + at * 8, n, 2, 4});
        CHECK(difference(same, floats(same.size(), 1.f)) == "");
    }
}

TEST_CASE("R27: every alignment of every operand that its element has, with pitches that have none") {
    const history h = contents(70, {.heads = 2, .kv_heads = 1, .key_dim = 9, .value_dim = 17});
    const exact_rows expected = softmax_rows(h, window_rule{20, 1});
    for (int64 shift = 0; shift < 17; ++shift)
        for (const positions& cut : cuts_of(70)) {
            const auto moved = [&](const floats& x, int64 by) {
                floats y(index(by), not_a_number);
                y.insert(y.end(), x.begin(), x.end());
                return y;
            };
            const floats q = moved(h.query, shift), k = moved(h.key, (shift + 3) % 17),
                         v = moved(h.value, (shift + 7) % 17);
            floats out(index(70 * 34 + 17), not_a_number);
            float* o = out.data() + (shift + 11) % 17;
            kv_cache cache(sliding_window{.window = 20, .sinks = 1}, h.shape);
            int64 at = 0;
            for (const int64 n : cut) {
                sash::attend({q.data() + shift + at * 18, n, 2, 9}, {k.data() + (shift + 3) % 17 + at * 9, n, 1, 9},
                             {v.data() + (shift + 7) % 17 + at * 17, n, 1, 17}, cache, {o + at * 34, n, 2, 17});
                at += n;
            }
            CAPTURE(shift, cut.size());
            CHECK(difference(floats(o, o + 70 * 34), expected.out) == "");
        }
}

TEST_CASE("R27: an address that is no multiple of its element is refused, of each operand") {
    alignas(64) std::byte memory[4096] = {};
    const auto at = [&](std::size_t byte) { return reinterpret_cast<float*>(memory + byte); };
    const auto half_at = [&](std::size_t byte) { return reinterpret_cast<float16*>(memory + byte); };
    kv_cache cache(full{}, {.heads = 1, .head_dim = 4});
    const auto refused = [&](sash::input q, sash::input k, sash::input v, sash::output o) {
        CHECK(names(refusal([&] { sash::attend(q, k, v, cache, o); }), {"address", "multiple"}));
        CHECK_THROWS_AS(sash::attend(full{}, q, k, v, o), sash::error);
        CHECK(cache.length() == 0);
        CHECK(std::all_of(std::begin(memory), std::end(memory), [](std::byte b) { return b == std::byte{0}; }));
    };
    for (const std::size_t off : {1u, 2u, 3u}) {
        refused({at(off), 1, 1, 4}, {at(64), 1, 1, 4}, {at(128), 1, 1, 4}, {at(256), 1, 1, 4});
        refused({at(0), 1, 1, 4}, {at(64 + off), 1, 1, 4}, {at(128), 1, 1, 4}, {at(256), 1, 1, 4});
        refused({at(0), 1, 1, 4}, {at(64), 1, 1, 4}, {at(128 + off), 1, 1, 4}, {at(256), 1, 1, 4});
        refused({at(0), 1, 1, 4}, {at(64), 1, 1, 4}, {at(128), 1, 1, 4}, {at(256 + off), 1, 1, 4});
    }
    refused({half_at(1), 1, 1, 4}, {half_at(64), 1, 1, 4}, {half_at(128), 1, 1, 4}, {half_at(256), 1, 1, 4});
    sash::attend({half_at(2), 1, 1, 4}, {half_at(66), 1, 1, 4}, {half_at(130), 1, 1, 4}, cache,
                 {half_at(258), 1, 1, 4});
    CHECK(cache.length() == 1);
}

TEST_CASE("R27: rows of an output that overlap are refused, whatever the strides") {
    const history h = contents(4, {.heads = 2, .kv_heads = 1, .head_dim = 5});
    kv_cache cache(full{}, h.shape);
    floats out(100, 7.f);
    const auto refused = [&](int64 by_token, int64 by_head, int64 by_dim) {
        CAPTURE(by_token, by_head, by_dim);
        CHECK_THROWS_AS(sash::attend(h.queries(0, 4), h.keys(0, 4), h.values(0, 4), cache,
                                     {out.data() + 40, 4, 2, 5, by_token, by_head, by_dim}),
                        sash::error);
        CHECK(std::count(out.begin(), out.end(), 7.f) == 100);
        CHECK(cache.length() == 0);
        out.assign(100, 7.f);
        cache.reset();
    };
    refused(0, 5, 1);
    refused(10, 0, 1);
    refused(10, 5, 0);
    refused(5, 5, 1);  // token 1 over head 1 of token 0
    refused(9, 5, 1);  // the last number of a token is the first of the next
    refused(10, 4, 1);
    refused(1, 10, 1);
    refused(-4, 5, 1);
    refused(2, 20, 1);
}

TEMPLATE_TEST_CASE("R27: nothing is read or written beyond an operand's ends, for any dims", "", float, float16,
                   bfloat16) {
    for (const int64 key_dim : {1, 3, 8, 15, 16, 17, 31, 33, 64, 65})
        for (const int64 value_dim : {1, 2, 15, 16, 17, 33, 64})
            for (const int64 tokens : {1, 2, 5, 65})
                for (const bool at_the_end : {true, false}) {
                    const history h =
                        contents(tokens, {.heads = 2, .kv_heads = 1, .key_dim = key_dim, .value_dim = value_dim});
                    guarded<TestType> q(h.query.size(), at_the_end), k(h.key.size(), at_the_end),
                        v(h.value.size(), at_the_end), out(index(tokens * 2 * value_dim), at_the_end);
                    guarded<float> lse(index(tokens * 2), at_the_end);
                    put(q.data, h.query);
                    put(k.data, h.key);
                    put(v.data, h.value);
                    const auto attended = [&](const auto& policy) {
                        kv_cache cache(policy, h.shape);
                        std::fill_n(out.data, tokens * 2 * value_dim, TestType(not_a_number));
                        sash::attend({q.data, tokens, 2, key_dim}, {k.data, tokens, 1, key_dim},
                                     {v.data, tokens, 1, value_dim}, cache, {out.data, tokens, 2, value_dim},
                                     {.lse = {lse.data, index(tokens * 2)}, .run = sash::serial{}});
                        return std::all_of(out.data, out.data + tokens * 2 * value_dim,
                                           [](TestType x) { return std::isfinite(float{x}); });
                    };
                    CAPTURE(key_dim, value_dim, tokens, at_the_end);
                    CHECK(attended(sliding_window{.window = 9, .sinks = 1}));
                    CHECK(attended(sash::linear{}));
                    std::fill_n(out.data, tokens * 2 * value_dim, TestType(not_a_number));
                    sash::attend(full{}, {q.data, tokens, 2, key_dim}, {k.data, tokens, 1, key_dim},
                                 {v.data, tokens, 1, value_dim}, {out.data, tokens, 2, value_dim},
                                 {.lse = {lse.data, index(tokens * 2)}, .run = sash::serial{}});
                    CHECK(std::all_of(out.data, out.data + tokens * 2 * value_dim,
                                      [](TestType x) { return std::isfinite(float{x}); }));
                }
}

TEST_CASE("R27: key and value dims are independent") {
    for (const int64 key_dim : {1, 2, 64, 130})
        for (const int64 value_dim : {1, 3, 64, 100, 257}) {
            const history h = contents(70, {.heads = 2, .kv_heads = 1, .key_dim = key_dim, .value_dim = value_dim});
            const exact_rows expected = softmax_rows(h, window_rule{20, 2}), sums = linear_rows(h);
            for (const positions& cut : cuts_of(70)) {
                CAPTURE(key_dim, value_dim, cut.size());
                CHECK(difference(rows_by<float>({"", form::attend, cut, sash::serial{}},
                                                sliding_window{.window = 20, .sinks = 2}, h),
                                 expected) == "");
                CHECK(difference(rows_by<float>({"", form::attend, cut, sash::serial{}}, sash::linear{}, h), sums, 3) ==
                      "");
            }
        }
}

TEST_CASE("R27: a view larger than its range is refused, products that overflow too") {
    const floats x(24);
    CHECK_NOTHROW(sash::input(x, 2, 3, 4));
    CHECK_THROWS_AS(sash::input(x, 2, 3, 5), sash::error);
    CHECK_THROWS_AS(sash::input(x, 3, 3, 4), sash::error);
    CHECK_THROWS_AS(sash::input(x, 2, 3, 4, 12, 5), sash::error);
    CHECK_THROWS_AS(sash::input(x, 2, 3, 4, 13, 4), sash::error);
    CHECK_THROWS_AS(sash::input(x, 2, 3, 4, -12, 4), sash::error);
    CHECK_THROWS_AS(sash::input(x, int64{1} << 32, 1 << 16, 1 << 16), sash::error);  // 2^64 elements: 0 in 64 bits
    CHECK_THROWS_AS(sash::input(x, 2, 3, 4, int64{1} << 62, int64{1} << 62), sash::error);
}

// ----------------------------------------------------------------------------------------------------------------- R28

namespace {

// Hands out again what it got back, as it was left: pages of a pool.
class recycled_memory {
public:
    recycled_memory() = default;
    recycled_memory(const recycled_memory&) = delete;
    ~recycled_memory() {
        for (auto& [size, pages] : free_)
            for (void* p : pages) std::free(p);
    }
    sash::memory_source source() {
        return {[](void* self, std::size_t size, std::size_t alignment) {
                    auto& pages = static_cast<recycled_memory*>(self)->free_[size];
                    if (pages.empty()) return std::aligned_alloc(alignment, size);
                    void* p = pages.back();
                    pages.pop_back();
                    ++static_cast<recycled_memory*>(self)->reused;
                    return p;
                },
                [](void* self, void* p, std::size_t size, std::size_t) {
                    static_cast<recycled_memory*>(self)->free_[size].push_back(p);
                },
                this};
    }
    int64 reused = 0;

private:
    std::map<std::size_t, std::vector<void*>> free_;
};

}  // namespace

TEMPLATE_TEST_CASE("R28: recycled pages are garbage: another sequence's tokens never show", "", float, float16,
                   bfloat16) {
    const history h = contents(260, {.heads = 2, .kv_heads = 1, .key_dim = 3, .value_dim = 5});
    history poison = h;
    std::fill(poison.key.begin(), poison.key.end(), 1e4f);
    std::fill(poison.value.begin(), poison.value.end(), not_a_number);
    const exact_rows windowed = softmax_rows<TestType>(h, window_rule{70, 3}),
                     everything = softmax_rows<TestType>(h, window_rule{}), sums = linear_rows(h);
    recycled_memory pool;
    for (const positions& cut : cuts_of(260)) {
        const auto after_another = [&](const auto& policy, const exact_rows& expected) {
            using cache_type = kv_cache<std::remove_cvref_t<decltype(policy)>, TestType>;
            {
                cache_type before(policy, h.shape, {}, {.memory = pool.source()});
                fed(before, poison, {260});
            }
            cache_type cache(policy, h.shape, {}, {.memory = pool.source()});
            CHECK(difference(fed(cache, h, cut), expected, 3) == "");
            cache.reset();  // and its own
            fed(cache, poison, {200, 60});
            cache.reset();
            CHECK(difference(fed(cache, h, cut), expected, 3) == "");
        };
        CAPTURE(cut.size());
        after_another(sliding_window{.window = 70, .sinks = 3}, windowed);
        after_another(full{}, everything);
        after_another(sash::linear{}, sums);
    }
    CHECK(pool.reused > 0);
}

TEST_CASE("R28: every length around the ends of blocks and segments") {
    const history h = contents(520, {.key_dim = 1, .value_dim = 1});
    const exact_rows all = softmax_rows(h, window_rule{}), some = softmax_rows(h, window_rule{64, 64});
    for (const int64 length :
         {1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 319, 320, 321, 511, 512, 513})
        for (const int64 more : {1, 2, 6}) {
            CAPTURE(length, more);
            kv_cache everything(full{}, h.shape);
            kv_cache window(sliding_window{.window = 64, .sinks = 64}, h.shape);
            const rows a = fed(everything, h, {length, more}), b = fed(window, h, {length, more});
            const auto first = [&](const std::vector<double>& x) {
                return std::vector<double>(x.begin(), x.begin() + length + more);
            };
            CHECK(difference(floats(a.out.begin(), a.out.begin() + length + more), first(all.out)) == "");
            CHECK(difference(floats(b.out.begin(), b.out.begin() + length + more), first(some.out)) == "");
        }
}

TEST_CASE("R28: positions near the end of what a position can be are refused, not wrapped") {
    const float x = 1;
    kv_cache cache(sliding_window{.window = 1}, {.head_dim = 1});
    sash::append({&x, 1, 1, 1}, {&x, 1, 1, 1}, cache);
    float out = 7;
    for (const int64 far : {std::numeric_limits<int64>::max(), std::numeric_limits<int64>::max() - 1, int64{1} << 62}) {
        CHECK_THROWS_AS(sash::read({&x, 1, 1, 1}, cache, {&out, 1, 1, 1}, {.first_query = far}), sash::error);
        CHECK_THROWS_AS(sash::attend(sliding_window{.window = 1}, {&x, 1, 1, 1}, {&x, 1, 1, 1}, {&x, 1, 1, 1},
                                     {&out, 1, 1, 1}, {.first_query = far}),
                        sash::error);
        CHECK_THROWS_AS(sash::append({&x, far, 1, 1, 0, 0}, {&x, far, 1, 1, 0, 0}, cache), sash::error);
    }
    CHECK(out == 7);
    CHECK(cache.length() == 1);
    CHECK_THROWS_AS(sash::append({&x, -1, 1, 1}, {&x, -1, 1, 1}, cache), sash::error);
}

// ----------------------------------------------------------------------------------------------------------------- R31

TEST_CASE("R31: a block is laid out the same under all flags") {  // the rest of the rule: tests/odr, tests/static
    STATIC_REQUIRE(sash::codec<float>::block_bytes(64, 64) == 64 * 64 * 4 * 2 + 64);
    STATIC_REQUIRE(sash::codec<float>::block_bytes(3, 5) == 3 * 64 * 4 + 16 * 64 * 4 + 64);
    STATIC_REQUIRE(sash::codec<float16>::block_bytes(3, 17) == 3 * 64 * 2 + 32 * 64 * 2 + 64);
    STATIC_REQUIRE(sash::codec<bfloat16>::block_bytes(3, 5) == 4 * 64 * 2 + 16 * 64 * 2 + 64);
    STATIC_REQUIRE(sizeof(sash::input) == 64);
    STATIC_REQUIRE(sizeof(sash::output) == sizeof(sash::input));
    STATIC_REQUIRE(sizeof(sash::shape) == 9 * 8);
    STATIC_REQUIRE(sizeof(sash::float16) == 2);
    // The file of a cache says nothing of the machine's registers either.
    kv_cache cache(full{}, {.key_dim = 3, .value_dim = 5});
    const history h = contents(70, cache.shape());
    fed(cache, h, {70});
    CHECK(cache.save().size() == 24 + 16 + 70 * 8 * 4 + 8);  // header, length and oldest, rows, checksum
}

// ----------------------------------------------------------------------------------------------------------------- R33

namespace {

// Work that several threads share, both ways: a prefill, and a decode over many keys.
struct work {
    history h = contents(700, {.heads = 4, .kv_heads = 2, .head_dim = 24});

    rows done_by(const sash::runner& run) const {
        kv_cache cache(full{}, h.shape);
        return fed(cache, h, {650, 1, 1, 40, 8}, {.run = run, .key_piece = 64});
    }
};

// Calls f on a thread of its own; the program ends here if it does not come back.
template <class F>
void ends_within_5_s(const char* what, F f) {
    std::packaged_task<void()> task(f);
    std::future<void> end = task.get_future();
    std::thread thread(std::move(task));
    if (end.wait_for(std::chrono::seconds(5)) != std::future_status::ready) {
        std::fprintf(stderr, "R33: '%s' has not ended after 5 s\n", what);
        std::_Exit(1);
    }
    thread.join();
    end.get();
}

#if defined(_OPENMP)
// Every thread of a parallel region asks for eight; how many give the serial bits?
int callers_in_a_region(const work& w, const rows& expected) {
    int right = 0;
#pragma omp parallel num_threads(4) reduction(+ : right)
    right += difference_in_bits(w.done_by(sash::openmp{8}), expected).empty() ? 1 : 0;
    return right;
}

struct openmp_settings {  // put back at the end
    int dynamic = omp_get_dynamic(), levels = omp_get_max_active_levels();
    ~openmp_settings() {
        omp_set_dynamic(dynamic);
        omp_set_max_active_levels(levels);
    }
};

int team_size() {
    int size = 0;
#pragma omp parallel
#pragma omp single
    size = omp_get_num_threads();
    return size;
}
#endif

}  // namespace

#if defined(_OPENMP)
TEST_CASE("R33: A14 called from inside a parallel region, for any team that comes") {
    const work w;
    const rows expected = w.done_by(sash::serial{});
    const openmp_settings restored;
    for (const int levels : {1, 2, 3})
        for (const int dynamic : {0, 1}) {
            omp_set_max_active_levels(levels);
            omp_set_dynamic(dynamic);
            CAPTURE(levels, dynamic);
            int right = 0, in_the_region = 0;
            ends_within_5_s("parallel region", [&] {
                omp_set_max_active_levels(levels);
                omp_set_dynamic(dynamic);
#pragma omp parallel num_threads(4)
#pragma omp single
                in_the_region = omp_get_num_threads();
                right = callers_in_a_region(w, expected);
            });
            CHECK(in_the_region >= 1);
            CHECK(right >= 1);
            if (dynamic == 0) CHECK(right == in_the_region);
        }
}

TEST_CASE("R33: A14 with dynamic teams, one thread, and more threads than there is work or machine") {
    const work w;
    const rows expected = w.done_by(sash::serial{});
    const openmp_settings restored;
    for (const int dynamic : {0, 1})
        for (const int threads : {0, 1, 2, 7, 64}) {
            CAPTURE(dynamic, threads);
            rows got;
            ends_within_5_s("dynamic teams", [&] {
                omp_set_dynamic(dynamic);
                got = w.done_by(sash::openmp{threads});
            });
            CHECK(difference_in_bits(got, expected) == "");
        }
}

TEST_CASE("R33: A14 under OMP_THREAD_LIMIT") {
    // The limit is read when the runtime starts, so the case below runs in a program of its own.
    char self[4096];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length <= 0) {
        WARN("not tested: /proc/self/exe cannot be read");
        return;
    }
    self[length] = '\0';
    for (const char* limits : {"OMP_THREAD_LIMIT=2", "OMP_THREAD_LIMIT=1", "OMP_THREAD_LIMIT=3 OMP_DYNAMIC=true",
                               "OMP_NUM_THREADS=5,3 OMP_NESTED=true OMP_THREAD_LIMIT=4"}) {
        CAPTURE(limits);
        CHECK(std::system((std::string(limits) + " '" + self + "' '[under-a-limit]' > /dev/null").c_str()) == 0);
    }
}

TEST_CASE("R33: A14 the program that runs under a limit", "[.][under-a-limit]") {
    const work w;
    const rows expected = w.done_by(sash::serial{});
    REQUIRE(team_size() <= omp_get_thread_limit());
    rows got;
    ends_within_5_s("thread limit", [&] { got = w.done_by(sash::openmp{8}); });
    CHECK(difference_in_bits(got, expected) == "");
    int right = 0;
    ends_within_5_s("thread limit in a region", [&] { right = callers_in_a_region(w, expected); });
    CHECK(right >= 1);
}
#endif

TEST_CASE("R33: A14 eight std::threads call at once, each with a cache of its own") {
    const work w;
    const rows expected = w.done_by(sash::serial{});
    for (const named_runner& by : runners()) {
        std::vector<rows> got(8);
        ends_within_5_s("std::thread callers", [&] {
            std::vector<std::thread> callers;
            for (rows& mine : got) callers.emplace_back([&mine, &w, &by] { mine = w.done_by(by.run); });
            for (std::thread& caller : callers) caller.join();
        });
        CAPTURE(by.name);
        for (const rows& one : got) CHECK(difference_in_bits(one, expected) == "");
    }
}

TEMPLATE_TEST_CASE("R33: eight std::threads read one cache at once", "", full, sliding_window, sash::linear<>) {
    const history h = contents(300, {.heads = 4, .kv_heads = 2, .head_dim = 24});
    kv_cache<TestType> filled({}, h.shape);
    fed(filled, h, {300});
    const kv_cache<TestType>& cache = filled;
    floats expected(index(300 * h.row_floats()));
    sash::read(h.queries(0, 300), cache, h.rows(expected, 0, 300), {.run = sash::serial{}});
    for (const named_runner& by : runners())
        for (const bool own_workspace : {true, false}) {
            std::vector<floats> got(8, floats(expected.size()));
            ends_within_5_s("readers", [&] {
                std::vector<std::thread> readers;
                for (floats& mine : got)
                    readers.emplace_back([&] {
                        sash::workspace scratch;
                        sash::options how{.run = by.run};
                        if (own_workspace) how.workspace = &scratch;
                        sash::read(h.queries(0, 300), cache, h.rows(mine, 0, 300), how);
                    });
                for (std::thread& reader : readers) reader.join();
            });
            CAPTURE(by.name, own_workspace);
            for (const floats& one : got) CHECK(difference_in_bits(one, expected) == "");
        }
}

TEMPLATE_TEST_CASE("R33: forks of one cache go their ways on eight threads", "", full, sliding_window, sash::linear<>) {
    const history h = contents(400, {.heads = 2, .kv_heads = 1, .key_dim = 2, .value_dim = 1500});  // several segments
    TestType policy{};
    if constexpr (std::is_same_v<TestType, sliding_window>) policy = {.window = 70, .sinks = 2};
    kv_cache<TestType> original(policy, h.shape);
    sash::append(h.keys(0, 300), h.values(0, 300), original);
    const auto goes_on = [&](kv_cache<TestType>& cache, int64 turn) {
        floats out(index(h.row_floats()), not_a_number);
        for (int64 i = 300; i < 330; ++i)
            sash::attend(h.queries(i, 1), h.keys(i - turn, 1), h.values(i - turn, 1), cache, {out, 1, 2, 1500},
                         {.run = sash::serial{}});
        return out;
    };
    std::vector<floats> expected, got(8);
    for (int64 n = 0; n < 8; ++n) {
        kv_cache<TestType> fork = original;
        expected.push_back(goes_on(fork, n));
    }
    const auto before = original.save();
    for (int again = 0; again < 5; ++again) {
        ends_within_5_s("forks", [&] {
            std::vector<std::thread> team;
            for (int64 n = 0; n < 8; ++n)
                team.emplace_back([&, n] {
                    kv_cache<TestType> fork = original;
                    if (fork.can_rollback(100) && n % 2) {
                        fork.rollback(100);
                        sash::append(h.keys(200, 100), h.values(200, 100), fork, {.run = sash::serial{}});
                    }
                    got[index(n)] = goes_on(fork, n);
                });
            for (std::thread& member : team) member.join();
        });
        for (std::size_t n = 0; n < 8; ++n) CHECK(difference_in_bits(got[n], expected[n]) == "");
    }
    CHECK((original.save() == before));
}

namespace {

// Runners that keep the contract in unusual ways.
struct backwards {
    void operator()(int64 tasks, sash::task f) const {
        while (tasks > 0) f(--tasks);
    }
};
struct claims {  // to run so many at a time; runs one
    int64 count;
    int64 concurrency() const { return count; }
    void operator()(int64 tasks, sash::task f) const {
        for (int64 i = 0; i < tasks; ++i) f(i);
    }
};
struct one_after_another {  // a new thread for each
    void operator()(int64 tasks, sash::task f) const {
        for (int64 i = 0; i < tasks; ++i) std::thread([&] { f(i); }).join();
    }
};

}  // namespace

TEST_CASE("R33: any runner that calls each task once gives the same bits") {
    const work w;
    const rows expected = w.done_by(sash::serial{});
    const std::vector<sash::runner> all{backwards{}, one_after_another{}, claims{1},  claims{2},  claims{1000},
                                        claims{0},   claims{-3},          threads{1}, threads{2}, threads{9}};
    for (std::size_t n = 0; n < all.size(); ++n) {
        CAPTURE(n);
        CHECK(difference_in_bits(w.done_by(all[n]), expected) == "");
    }
    struct large {  // held by reference
        char much[200] = {};
        int64 calls = 0;
        void operator()(int64 tasks, sash::task f) {
            ++calls;
            for (int64 i = 0; i < tasks; ++i) f(i);
        }
    } by_reference;
    CHECK(difference_in_bits(w.done_by(by_reference), expected) == "");
    CHECK(by_reference.calls > 0);
}

// ----------------------------------------------------------------------------------------------------------------- R34

TEMPLATE_TEST_CASE("R34: the same bits for any number of threads and any neighbours", "", full, sliding_window,
                   sash::linear<>) {
    const history h = contents(2100, {.heads = 4, .kv_heads = 2, .key_dim = 6, .value_dim = 18});
    TestType policy{};
    if constexpr (std::is_same_v<TestType, sliding_window>) policy = {.window = 1300, .sinks = 4};
    using cache_type = kv_cache<TestType>;
    std::vector<sash::runner> by{sash::serial{}, threads{2}, threads{5}};
#if defined(_OPENMP)
    for (const int n : {0, 1, 2, 3, 5, 16}) by.push_back(sash::openmp{n});
#endif
    for (const int64 length : {0, 30, 600, 2000})  // the last: four pieces of 512 keys
        for (const int64 tokens : {1, 3, 90}) {
            cache_type cache(policy, h.shape);
            sash::append(h.keys(0, length), h.values(0, length), cache);
            const auto request = [&](cache_type& in, floats& out, floats& lse, int64 first, int64 count) {
                return sash::request<cache_type>{.tokens = {.query = h.queries(first, count),
                                                            .key = h.keys(first, count),
                                                            .value = h.values(first, count)},
                                                 .cache = &in,
                                                 .out = {out, count, 4, 18},
                                                 .lse = lse};
            };
            const rows blank{floats(index(tokens * h.row_floats()), not_a_number),
                             floats(index(tokens * 4), not_a_number)};
            rows expected = blank;
            cache_type alone = cache;
            sash::attend(
                {.query = h.queries(length, tokens), .key = h.keys(length, tokens), .value = h.values(length, tokens)},
                alone, {expected.out, tokens, 4, 18}, {.lse = expected.lse, .run = sash::serial{}});
            for (const sash::runner& run : by)
                for (const int neighbours : {0, 1, 4}) {
                    std::vector<cache_type> caches(index(neighbours), cache.empty_copy());
                    std::vector<rows> ignored(index(neighbours),
                                              rows{floats(index(100 * h.row_floats())), floats(400)});
                    cache_type mine = cache;
                    rows got = blank;
                    std::vector<sash::request<cache_type>> requests;
                    for (int n = 0; n < neighbours; ++n) {
                        const int64 before = 400 * n, count = n % 2 ? 1 : 70;
                        sash::append(h.keys(0, before), h.values(0, before), caches[index(n)], {.run = sash::serial{}});
                        ignored[index(n)].out.resize(index(count * h.row_floats()));
                        ignored[index(n)].lse.resize(index(count * 4));
                        requests.push_back(
                            request(caches[index(n)], ignored[index(n)].out, ignored[index(n)].lse, before, count));
                    }
                    requests.insert(requests.begin() + neighbours / 2, request(mine, got.out, got.lse, length, tokens));
                    sash::attend(requests, {.run = run});
                    CAPTURE(length, tokens, run.concurrency(), neighbours);
                    CHECK(difference_in_bits(got, expected) == "");
                }
        }
}

TEST_CASE("R34: pieces of keys change no more than the last digits") {
    const history h = contents(2100, {.heads = 2, .kv_heads = 1, .key_dim = 6, .value_dim = 3});
    const exact_rows expected = softmax_rows(history(h), window_rule{1500, 4});
    for (const int64 piece : {0, 1, 7, 64, 512, 1000, 100000}) {
        kv_cache cache(sliding_window{.window = 1500, .sinks = 4}, h.shape);
        rows r = unwritten(h);
        sash::append(h.keys(0, 2090), h.values(0, 2090), cache);
        for (const int64 tokens : {1, 2, 7}) {
            const int64 at = cache.length();
            sash::attend(h.queries(at, tokens), h.keys(at, tokens), h.values(at, tokens), cache,
                         h.rows(r.out, at, tokens), {.key_piece = piece});
        }
        CAPTURE(piece);
        CHECK(difference(floats(r.out.begin() + 2090 * 6, r.out.end()),
                         std::vector<double>(expected.out.begin() + 2090 * 6, expected.out.end())) == "");
    }
}

// ----------------------------------------------------------------------------------------------------------------- R35

TEST_CASE("R35: A15 sixty-five thousand heads in one call") {
    for (const int64 heads : {65536, 65538}) {
        const int64 kv_heads = heads / 6 * 6 == heads ? heads / 6 : heads;
        const floats zero(16, 0.f);
        floats value(index(kv_heads * 16)), out(index(heads * 16), not_a_number);
        for (int64 kv = 0; kv < kv_heads; ++kv) std::fill_n(value.begin() + kv * 16, 16, static_cast<float>(kv % 251));
        const auto right = [&] {
            int64 n = 0;
            for (int64 head = 0; head < heads; ++head)
                for (int64 c = 0; c < 16; ++c)
                    n += out[index(head * 16 + c)] == static_cast<float>(head / (heads / kv_heads) % 251);
            std::fill(out.begin(), out.end(), not_a_number);
            return n;
        };
        CAPTURE(heads);
        sash::attend(full{}, {zero, 1, heads, 16, 0, 0}, {zero, 1, kv_heads, 16, 0, 0}, {value, 1, kv_heads, 16},
                     {out, 1, heads, 16});
        CHECK(right() == heads * 16);
        kv_cache<sliding_window, float16> cache({.window = 2}, {.heads = heads, .kv_heads = kv_heads, .head_dim = 16});
        sash::attend({zero, 1, heads, 16, 0, 0}, {zero, 1, kv_heads, 16, 0, 0}, {value, 1, kv_heads, 16}, cache,
                     {out, 1, heads, 16});
        CHECK(right() == heads * 16);
    }
}

TEST_CASE("R35: A15 a batch of many sequences", "[slow]") {
    using cache_type = kv_cache<full, float16>;
    struct size {
        int64 sequences, heads, kv_heads;
    };
    for (const size n : {size{10923, 6, 2}, size{65536, 1, 1}}) {
        const floats zero(1, 0.f);
        std::vector<cache_type> caches(
            index(n.sequences),
            cache_type({}, {.heads = n.heads, .kv_heads = n.kv_heads, .key_dim = 1, .value_dim = 1}));
        floats value(index(n.sequences * n.kv_heads)), out(index(n.sequences * n.heads), not_a_number);
        for (std::size_t j = 0; j < value.size(); ++j) value[j] = static_cast<float>(j % 251);
        std::vector<sash::request<cache_type>> requests;
        for (int64 b = 0; b < n.sequences; ++b)
            requests.push_back({.tokens = {.query = {zero, 1, n.heads, 1, 0, 0},
                                           .key = {zero, 1, n.kv_heads, 1, 0, 0},
                                           .value = {value.data() + b * n.kv_heads, 1, n.kv_heads, 1}},
                                .cache = &caches[index(b)],
                                .out = {out.data() + b * n.heads, 1, n.heads, 1},
                                .lse = {}});
        sash::attend(requests);
        int64 wrong = 0;
        for (int64 row = 0; row < n.sequences * n.heads; ++row)
            wrong += out[index(row)] != value[index(row / (n.heads / n.kv_heads))];
        CAPTURE(n.sequences);
        CHECK(wrong == 0);
    }
}

TEST_CASE("R35: A15 one head with more than 65535 tiles of queries", "[slow]") {
    const int64 tokens = 48 * 65536 + 100;
    const floats zero(1, 0.f);
    floats value(index(tokens)), out(index(tokens), not_a_number);
    for (int64 j = 0; j < tokens; ++j) value[index(j)] = static_cast<float>(j % 1000);
    sash::attend(sliding_window{.window = 2}, {zero, tokens, 1, 1, 0, 0}, {zero, tokens, 1, 1, 0, 0},
                 {value, tokens, 1, 1}, {out, tokens, 1, 1});
    int64 wrong = 0;
    for (int64 i = 0; i < tokens; ++i) {
        const float expected = i == 0 ? 0 : (value[index(i)] + value[index(i - 1)]) / 2;
        wrong += !(std::abs(out[index(i)] - expected) <= 1e-5f * expected);
    }
    CHECK(wrong == 0);
}

TEST_CASE("R35: strides of more than 2^31 elements") {
    const int64 by_token = (int64{1} << 31) + 8, by_head = 3 * (int64{1} << 31) + 40;
    const auto size = static_cast<std::size_t>(2 * by_token + by_head + 64) * sizeof(float);
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        WARN("not tested: no " << (size >> 30) << " GiB of address space");
        return;
    }
    auto* at = static_cast<float*>(memory);
    const history h = contents(3, {.heads = 2, .kv_heads = 2, .head_dim = 4});
    const exact_rows expected = softmax_rows(h, window_rule{});
    const auto place = [&](const floats& from, int64 offset) {
        for (int64 t = 0; t < 3; ++t)
            for (int64 head = 0; head < 2; ++head)
                std::copy_n(from.begin() + (t * 2 + head) * 4, 4, at + offset + t * by_token + head * by_head);
        return sash::input(at + offset, 3, 2, 4, by_token, by_head);
    };
    const sash::input q = place(h.query, 0), k = place(h.key, 8), v = place(h.value, 16);
    const auto gathered = [&] {
        floats out;
        for (int64 t = 0; t < 3; ++t)
            for (int64 head = 0; head < 2; ++head)
                for (int64 c = 0; c < 4; ++c)
                    out.push_back(std::exchange(at[24 + t * by_token + head * by_head + c], not_a_number));
        return out;
    };
    gathered();  // poisons
    kv_cache cache(full{}, h.shape);
    sash::attend(q, k, v, cache, {at + 24, 3, 2, 4, by_token, by_head});
    CHECK(difference(gathered(), expected.out) == "");
    sash::attend(full{}, q, k, v, {at + 24, 3, 2, 4, by_token, by_head});
    CHECK(difference(gathered(), expected.out) == "");
    kv_cache state(sash::linear{}, h.shape);
    sash::attend(q, k, v, state, {at + 24, 3, 2, 4, by_token, by_head});
    CHECK(difference(gathered(), linear_rows(h).out, 3) == "");
    munmap(memory, size);
}

TEST_CASE("R35: zero sizes return early and touch nothing") {
    kv_cache cache(full{}, {.heads = 2, .head_dim = 4});
    const float* nothing = nullptr;
    float* nowhere = nullptr;
    const auto before = cache.save();
    for (const named_runner& by : runners()) {
        sash::attend({nothing, 0, 2, 4}, {nothing, 0, 2, 4}, {nothing, 0, 2, 4}, cache, {nowhere, 0, 2, 4},
                     {.run = by.run});
        sash::append({nothing, 0, 2, 4}, {nothing, 0, 2, 4}, cache, {.run = by.run});
        sash::read({nothing, 0, 2, 4}, cache, {nowhere, 0, 2, 4}, {.run = by.run});
        sash::attend(full{}, {nothing, 0, 2, 4}, {nothing, 0, 2, 4}, {nothing, 0, 2, 4}, {nowhere, 0, 2, 4},
                     {.run = by.run});
        const floats x(24, 1.f);
        sash::attend(full{}, {nothing, 0, 2, 4}, {x, 3, 2, 4}, {x, 3, 2, 4}, {nowhere, 0, 2, 4}, {.run = by.run});
        sash::attend(sash::linear{}, {nothing, 0, 2, 4}, {nothing, 0, 2, 4}, {nothing, 0, 2, 4}, {nowhere, 0, 2, 4},
                     {.run = by.run});
    }
    CHECK((cache.save() == before));
    cache.reserve(0);
    cache.reserve(-5);
    cache.rollback(0);
    CHECK(cache.length() == 0);
}
