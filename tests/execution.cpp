// Who does the work changes no bit: runners, thread counts, batch neighbours, workspaces. Where keys are split does,
// within the tolerance, and partials that leave the library merge to the whole.
#include "support/catch.hpp"
#include "support/any_cache.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <limits>
#include <mutex>
#include <thread>

namespace {

using sash::int64;
using test::numbers;
using test::poisoned_memory;
using test::tensor;

constexpr double infinity = std::numeric_limits<double>::infinity();

// ---------------------------------------------------------------------------------------------------------------------
// Runners

// A pool such as an engine has: threads that wait for a list of tasks.
class thread_pool {
public:
    explicit thread_pool(int threads) {
        for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { serve(); });
    }
    thread_pool(const thread_pool&) = delete;
    ~thread_pool() {
        {
            const std::lock_guard lock(mutex_);
            over_ = true;
        }
        wake_.notify_all();
        for (std::thread& t : threads_) t.join();
    }

    int64 concurrency() const { return static_cast<int64>(threads_.size()); }
    void operator()(int64 tasks, sash::task f) {
        std::unique_lock lock(mutex_);
        what_ = &f;
        next_ = 0;
        left_ = tasks;
        last_ = tasks;
        wake_.notify_all();
        done_.wait(lock, [this] { return left_ == 0; });
        what_ = nullptr;
    }

private:
    void serve() {
        std::unique_lock lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return over_ || (what_ && next_ < last_); });
            if (over_) return;
            const int64 mine = next_++;
            const sash::task f = *what_;
            lock.unlock();
            f(mine);
            lock.lock();
            if (--left_ == 0) done_.notify_all();
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    const sash::task* what_ = nullptr;
    int64 next_ = 0, last_ = 0, left_ = 0;
    bool over_ = false;
};

// A thread for each task, all at once.
struct thread_each {
    int64 concurrency() const { return 5; }
    void operator()(int64 tasks, sash::task f) const {
        std::vector<std::thread> threads;
        for (int64 i = 0; i < tasks; ++i) threads.emplace_back([f, i] { f(i); });
        for (std::thread& t : threads) t.join();
    }
};

// One thread that takes tasks from the last to the first, and says that it is seven.
struct backwards {
    int64 concurrency() const { return 7; }
    void operator()(int64 tasks, sash::task f) const {
        for (int64 i = tasks; i-- > 0;) f(i);
    }
};

template <class F>
void for_each_runner(F&& f) {
    const auto with = [&](const char* name, const sash::runner& run) {
        INFO(name);
        f(run);
    };
    with("backwards", backwards{});
    with("a thread each", thread_each{});
    thread_pool pool(3);
    with("a pool", pool);
    with("a lambda", [](int64 tasks, sash::task g) {
        for (int64 i = 0; i < tasks; ++i) g(i);
    });
#if defined(_OPENMP)
    for (int threads = 1; threads <= 4; ++threads) {
        CAPTURE(threads);
        with("openmp", sash::openmp{threads});
    }
    with("openmp, as many as there are", sash::openmp{});
#endif
    with("the default", {});
}

// ---------------------------------------------------------------------------------------------------------------------
// Work

using test::stream;
using test::tokens_of;

// Rows and lse, compared bit by bit.
struct rows {
    tensor out;
    std::vector<float> lse;

    rows(int64 tokens, const sash::shape& s)
        : out(tokens, s.heads, s.value_dim), lse(static_cast<std::size_t>(tokens * s.heads), -1) {}
    std::span<float> lse_of(int64 first, int64 count) {
        return std::span(lse).subspan(static_cast<std::size_t>(first * out.heads()),
                                      static_cast<std::size_t>(count * out.heads()));
    }
    friend bool operator==(const rows& a, const rows& b) {
        return a.out == b.out && a.lse.size() == b.lse.size() &&
               std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
    }
};

template <class P, class E>
struct kind {
    const char* name;
    P policy = {};
    sash::score score = {};
    sash::shape shape = {.heads = 6, .kv_heads = 2, .key_dim = 33, .value_dim = 20};
    using cache = sash::kv_cache<P, E>;

    cache make(const sash::storage& storage = {}) const { return cache(policy, shape, score, storage); }

    // Prefill, chunks and decoding: 700 tokens, so that decoding splits its keys and prefill has many tiles.
    rows attended(const stream& s, const sash::options& given, const sash::storage& storage = {}) const {
        cache c = make(storage);
        rows r(s.query.tokens(), shape);
        sash::options how = given;
        const int64 cuts[] = {1, 40, 300, 1, 1, 257, 90};
        for (int64 done = 0, i = 0; done < s.query.tokens(); ++i) {
            const int64 count = std::min(cuts[i % 7], s.query.tokens() - done);
            how.lse = r.lse_of(done, count);
            sash::attend(tokens_of<P>(s, done, count), c, r.out.out(done, count), how);
            done += count;
        }
        return r;
    }
};

const std::vector<double> frequencies = {1, 0.5, 0.2, 0.05};
const std::vector<float> slopes = {0.5f, 0.25f, 0.1f, 0.05f, 0.02f, 0.01f}, logits = {0.5f, -1, 2, 0, 1, -3};

template <class F>
void for_each_kind(F&& f) {
    const auto with = [&](const auto& k) {
        INFO(k.name);
        f(k);
    };
    with(kind<sash::full, float>{"full", {}, {.soft_cap = 5, .alibi = slopes}});
    with(kind<sash::full, sash::bfloat16>{"full, bfloat16"});
    with(kind<sash::sliding_window, sash::float16>{
        "window, compact",
        {.window = 150, .sinks = 4, .frame = sash::frame::compact},
        {.sink_logits = logits, .rotary = {.frequencies = frequencies, .by = sash::rotates::library}}});
    with(kind<sash::linear<sash::elu_plus_one, sash::per_head_and_token>, float>{"linear with decay"});
}

constexpr test::tolerance of_rows{2e-6, 1e-5};  // values reach 1.74 and cancel in a row

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------

TEST_CASE("R33 R34: every runner and every number of threads gives the same bits") {
    for_each_kind([](const auto& k) {
        const stream s(700, 1, k.shape);
        const rows serial = k.attended(s, {.run = sash::serial{}});
        for_each_runner([&](const sash::runner& run) {
            CHECK(k.attended(s, {.run = run}) == serial);
            CHECK(k.attended(s, {.run = run, .key_piece = 100}) ==
                  k.attended(s, {.run = sash::serial{}, .key_piece = 100}));
        });
    });
}

TEST_CASE("R34: without a cache and in reads, too, every runner gives the same bits") {
    const kind<sash::full, float> k{"full", {.causal = false}};
    const stream s(600, 2, k.shape);
    auto cache = k.make();
    sash::append(s.key.in(), s.value.in(), cache, {.run = sash::serial{}});
    const auto stateless = [&](const sash::runner& run) {
        rows r(600, k.shape);
        sash::attend(k.policy, s.query.in(), s.key.in(), s.value.in(), r.out.out(), {.lse = r.lse, .run = run});
        return r;
    };
    const auto read = [&](const sash::runner& run, int64 queries) {
        rows r(queries, k.shape);
        sash::read(s.query.in(0, queries), cache, r.out.out(), {.lse = r.lse, .run = run});
        return r;
    };
    const rows one = stateless(sash::serial{}), many = read(sash::serial{}, 90), single = read(sash::serial{}, 1);
    for_each_runner([&](const sash::runner& run) {
        CHECK(stateless(run) == one);
        CHECK(read(run, 90) == many);
        CHECK(read(run, 1) == single);
    });
}

TEST_CASE("A runner is given work, and every task once") {
    struct counting {
        std::atomic<int64>* calls;
        std::atomic<int64>* tasks;
        int64 concurrency() const { return 4; }
        void operator()(int64 n, sash::task f) const {
            ++*calls;
            *tasks += n;
            for (int64 i = 0; i < n; ++i) f(i);
        }
    };
    for_each_kind([](const auto& k) {
        const stream s(700, 1, k.shape);
        std::atomic<int64> calls = 0, tasks = 0;
        k.attended(s, {.run = counting{&calls, &tasks}});
        CHECK(calls > 0);
        CHECK(tasks > calls);
        CHECK(tasks <= 4 * calls);  // never more at a time than it says it runs
    });
}

TEST_CASE("R34: batch neighbours change no bit") {
    for_each_kind([](const auto& k) {
        using cache_type = typename std::remove_cvref_t<decltype(k)>::cache;
        using P = typename cache_type::policy_type;
        const std::vector<int64> lengths = {0, 1, 70, 300, 513}, news = {3, 1, 130, 1, 64};
        std::vector<stream> streams;
        for (std::size_t i = 0; i < lengths.size(); ++i) streams.emplace_back(700, 10 + i, k.shape);
        const auto prepared = [&](std::size_t i) {
            cache_type c = k.make();
            sash::append(tokens_of<P>(streams[i], 0, lengths[i]), c, {.run = sash::serial{}});
            return c;
        };
        std::vector<rows> alone;
        for (std::size_t i = 0; i < lengths.size(); ++i) {
            cache_type c = prepared(i);
            alone.emplace_back(news[i] + 1, k.shape);
            sash::attend(tokens_of<P>(streams[i], lengths[i], news[i]), c, alone[i].out.out(0, news[i]),
                         {.lse = alone[i].lse_of(0, news[i])});
            sash::attend(tokens_of<P>(streams[i], lengths[i] + news[i], 1), c, alone[i].out.out(news[i], 1),
                         {.lse = alone[i].lse_of(news[i], 1)});
        }
        for (const std::vector<std::size_t>& together :
             {std::vector<std::size_t>{0, 1, 2, 3, 4}, {4, 3, 2, 1, 0}, {2}, {1, 3}, {3, 0, 4}}) {
            CAPTURE(together);
            for_each_runner([&](const sash::runner& run) {
                std::vector<cache_type> caches;
                std::vector<rows> got;
                for (const std::size_t i : together) {
                    caches.push_back(prepared(i));
                    got.emplace_back(news[i] + 1, k.shape);
                }
                const auto step = [&](bool second) {  // many tokens each, then one each
                    std::vector<sash::request<cache_type>> requests;
                    for (std::size_t n = 0; n < together.size(); ++n) {
                        const std::size_t i = together[n];
                        const int64 first = second ? news[i] : 0, count = second ? 1 : news[i];
                        requests.push_back({tokens_of<P>(streams[i], lengths[i] + first, count), &caches[n],
                                            got[n].out.out(first, count), got[n].lse_of(first, count)});
                    }
                    sash::attend(requests, {.run = run});
                };
                step(false);
                step(true);
                for (std::size_t n = 0; n < together.size(); ++n) CHECK(got[n] == alone[together[n]]);
            });
        }
    });
}

TEST_CASE("R06: wherever keys are split, the result is the same within the tolerance") {
    const kind<sash::full, float> k{"full", {}, {.soft_cap = 5, .alibi = slopes, .sink_logits = logits}};
    const stream s(700, 3, k.shape);
    const auto expected = sash::reference::attend(k.policy, k.shape, s.query.in(), s.key.in(), s.value.in(), k.score);
    for (const int64 piece : {0, 1, 2, 3, 16, 63, 64, 65, 100, 512, 700, 100000}) {
        CAPTURE(piece);
        const rows r = k.attended(s, {.run = sash::serial{}, .key_piece = piece});
        CHECK(test::differs(r.out, expected.out, of_rows) == "");
        CHECK(test::differs(r.lse, expected.lse, of_rows) == "");
    }
    CHECK_THROWS_AS(k.attended(s, {.key_piece = -1}), sash::error);
}

TEST_CASE("lse is the log-sum-exp of the keys alone, natural, and -inf where there are none") {
    for (const bool with_logits : {false, true}) {
        kind<sash::sliding_window, float> k{"", {.window = 30, .sinks = 2}};
        if (with_logits) k.score.sink_logits = logits;
        const stream s(200, 4, k.shape);
        const auto expected =
            sash::reference::attend(k.policy, k.shape, s.query.in(), s.key.in(), s.value.in(), k.score);
        for (const bool finish : {true, false}) {
            CAPTURE(with_logits, finish);
            const rows r = k.attended(s, {.run = sash::serial{}, .finish = finish});
            CHECK(test::differs(r.lse, expected.lse, of_rows) == "");
        }
        const auto empty = k.make();
        rows none(5, k.shape);
        sash::read(s.query.in(0, 5), empty, none.out.out(), {.lse = none.lse});
        for (const float x : none.lse) CHECK(double{x} == -infinity);
        none.out.for_each([&](int64 t, int64 h, int64 d) { CHECK(none.out.get(t, h, d) == 0); });
    }
    const kind<sash::linear<>, float> linear{"linear"};
    const stream s(60, 5, linear.shape);
    const auto expected = sash::reference::attend(linear.policy, linear.shape, s.query.in(), s.key.in(), s.value.in());
    CHECK(test::differs(linear.attended(s, {.run = sash::serial{}}).lse, expected.lse, of_rows) == "");
}

TEST_CASE("R06: partials over parts of the keys merge to the whole, and a sink logit counts once") {
    const sash::shape shape{.heads = 6, .kv_heads = 2, .key_dim = 33, .value_dim = 20};
    const stream s(230, 6, shape);
    const sash::score score{.sink_logits = logits};
    const int64 queries = 9;
    const auto whole = sash::reference::attend(sash::full{.causal = false}, shape, s.query.in(0, queries), s.key.in(),
                                               s.value.in(), score);
    const std::vector<int64> ends = {1, 64, 64, 200, 230};  // an empty part among them

    const auto part = [&](int64 first, int64 last) {
        rows r(queries, shape);
        sash::attend(sash::full{.causal = false}, s.query.in(0, queries), s.key.in(first, last - first),
                     s.value.in(first, last - first), r.out.out(), {.lse = r.lse, .finish = false}, score);
        return r;
    };
    std::vector<rows> parts;
    for (std::size_t i = 0; i < ends.size(); ++i) parts.push_back(part(i == 0 ? 0 : ends[i - 1], ends[i]));
    const auto row_of = [&](const rows& r, int64 t, int64 h) {
        std::vector<float> row;
        for (int64 d = 0; d < shape.value_dim; ++d) row.push_back(r.out.get(t, h, d));
        return row;
    };
    const auto width = static_cast<std::size_t>(shape.value_dim);
    for (const bool backwards_too : {false, true}) {
        tensor merged(queries, shape.heads, shape.value_dim), finished(queries, shape.heads, shape.value_dim);
        std::vector<float> lse;
        for (int64 t = 0; t < queries; ++t)
            for (int64 h = 0; h < shape.heads; ++h) {
                const auto at = static_cast<std::size_t>(t * shape.heads + h);
                std::vector<float> numerator(width), out(width);
                sash::partial sum{.numerator = numerator};
                float running = -std::numeric_limits<float>::infinity();
                for (std::size_t n = 0; n < parts.size(); ++n) {
                    const rows& p = parts[backwards_too ? parts.size() - 1 - n : n];
                    std::vector<float> row = row_of(p, t, h);
                    sash::partial one{.numerator = row,
                                      .denominator = std::isinf(p.lse[at]) ? 0.0f : 1.0f,
                                      .maximum = p.lse[at]};  // (out, 1, lse)
                    sash::merge_finished(out, running, row, p.lse[at]);
                    sum.merge(one);
                }
                lse.push_back(running);
                CHECK(of_rows.holds(sum.lse(), running));
                // The finished pair is a partial, too: the logit joins it last.
                sash::partial{.numerator = out, .denominator = 1, .maximum = running}.finish(
                    out, logits[static_cast<std::size_t>(h)]);
                sum.finish(numerator, logits[static_cast<std::size_t>(h)]);
                for (int64 d = 0; d < shape.value_dim; ++d) {
                    merged.set(t, h, d, numerator[static_cast<std::size_t>(d)]);
                    finished.set(t, h, d, out[static_cast<std::size_t>(d)]);
                }
            }
        CHECK(test::differs(merged, whole.out, of_rows) == "");
        CHECK(test::differs(finished, whole.out, of_rows) == "");
        CHECK(test::differs(lse, whole.lse, of_rows) == "");
    }
}

TEST_CASE("Partials of several caches merge to the whole: a prefix that many share") {
    const sash::shape shape{.heads = 6, .kv_heads = 2, .key_dim = 33, .value_dim = 20};
    const stream s(300, 7, shape);
    const auto whole = sash::reference::attend(sash::full{}, shape, s.query.in(299, 1), s.key.in(), s.value.in());
    sash::kv_cache prefix(sash::full{}, shape), own(sash::full{}, shape);
    sash::append(s.key.in(0, 210), s.value.in(0, 210), prefix);
    sash::append(s.key.in(210, 90), s.value.in(210, 90), own);
    rows a(1, shape), b(1, shape);
    sash::read(s.query.in(299, 1), prefix, a.out.out(), {.lse = a.lse, .finish = false});
    sash::read(s.query.in(299, 1), own, b.out.out(), {.lse = b.lse, .finish = false});
    tensor merged(1, shape.heads, shape.value_dim);
    for (int64 h = 0; h < shape.heads; ++h) {
        std::vector<float> left, right;
        for (int64 d = 0; d < shape.value_dim; ++d)
            left.push_back(a.out.get(0, h, d)), right.push_back(b.out.get(0, h, d));
        sash::merge_finished(left, a.lse[static_cast<std::size_t>(h)], right, b.lse[static_cast<std::size_t>(h)]);
        for (int64 d = 0; d < shape.value_dim; ++d) merged.set(0, h, d, left[static_cast<std::size_t>(d)]);
    }
    CHECK(test::differs(merged, whole.out, of_rows) == "");
    CHECK(test::differs(a.lse, whole.lse, of_rows) == "");
}

// ---------------------------------------------------------------------------------------------------------------------
// Workspaces

TEST_CASE("One workspace serves calls of every kind and size, and leaves no trace in any") {
    poisoned_memory memory;
    sash::workspace shared(0, memory.source());
    for (int round = 0; round < 2; ++round)
        for_each_kind([&](const auto& k) {
            const stream s(700, 1, k.shape), other(90, 8, k.shape);
            const rows expected = k.attended(s, {.run = sash::serial{}}),
                       expected_other = k.attended(other, {.run = sash::serial{}});
            CHECK(k.attended(s, {.run = sash::serial{}, .workspace = &shared}) == expected);
            CHECK(k.attended(other, {.run = backwards{}, .workspace = &shared}) == expected_other);
            const int64 calls = memory.calls();
            CHECK(k.attended(s, {.run = sash::serial{}, .workspace = &shared}) == expected);
            CHECK(memory.calls() == calls);  // it grew to the largest call, and no more
        });
    CHECK(memory.consistent());
}

TEST_CASE("workspace_bytes is enough, to the byte, for any call") {
    for_each_kind([](const auto& k) {
        using P = std::remove_cvref_t<decltype(k.policy)>;
        const stream s(700, 1, k.shape);
        for (const int64 length : {0, 1, 64, 300})
            for (const int64 tokens : {0, 1, 5, 64, 300})
                for (const int64 key_piece : {0, 10})
                    for (const bool many : {false, true}) {
                        CAPTURE(length, tokens, key_piece, many);
                        auto cache = k.make({.piece = 50});
                        sash::append(tokens_of<P>(s, 0, length), cache, {.run = sash::serial{}});
                        sash::options how{.key_piece = key_piece};
                        if (many)
                            how.run = backwards{};
                        else
                            how.run = sash::serial{};
                        poisoned_memory memory;
                        {
                            sash::workspace scratch(sash::workspace_bytes(cache, tokens, how), memory.source());
                            how.workspace = &scratch;
                            const int64 calls = memory.calls();
                            rows r(tokens, k.shape);
                            how.lse = r.lse;
                            auto fork = cache;
                            sash::attend(tokens_of<P>(s, length, tokens), cache, r.out.out(), how);
                            CHECK(memory.calls() == calls);
                            how.lse = {};
                            sash::append(tokens_of<P>(s, length, tokens), fork, how);
                            CHECK(memory.calls() == calls);
                            sash::workspace_bytes(cache, tokens, how);  // of the cache as it stands now
                        }
                        CHECK(memory.live() == 0);
                        CHECK(memory.consistent());
                    }
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Several threads at a time

TEST_CASE("R33: many threads may read one cache") {
    for_each_kind([](const auto& k) {
        using P = std::remove_cvref_t<decltype(k.policy)>;
        const stream s(400, 1, k.shape);
        auto made = k.make();
        sash::append(tokens_of<P>(s, 0, 390), made, {.run = sash::serial{}});
        const auto& cache = made;
        rows expected(10, k.shape);
        sash::read(s.query.in(390, 10), cache, expected.out.out(), {.lse = expected.lse, .run = sash::serial{}});
        const auto file = cache.save();
        std::atomic<int> right = 0;
        std::vector<std::thread> threads;
        for (int i = 0; i < 6; ++i)
            threads.emplace_back([&, i] {
                sash::workspace own;
                for (int n = 0; n < 5; ++n) {
                    rows r(10, k.shape);
                    sash::read(s.query.in(390, 10), cache, r.out.out(),
                               {.lse = r.lse, .run = sash::serial{}, .workspace = i % 2 ? &own : nullptr});
                    const auto fork = cache;
                    right += r == expected && cache.save() == file && fork.length() == 390 && cache.can_rollback(0);
                }
            });
        for (std::thread& t : threads) t.join();
        CHECK(right == 30);
    });
}

TEST_CASE("R33: forks that share memory may be used, written and destroyed by different threads") {
    for_each_kind([](const auto& k) {
        using cache_type = typename std::remove_cvref_t<decltype(k)>::cache;
        using P = typename cache_type::policy_type;
        const stream s(400, 1, k.shape);
        const auto continued = [&](cache_type& c, int64 from) {
            rows r(100, k.shape);
            for (int64 t = 0; t < 100; t += 10)
                sash::attend(tokens_of<P>(s, from + t, 10), c, r.out.out(t, 10),
                             {.lse = r.lse_of(t, 10), .run = sash::serial{}});
            return r;
        };
        auto original = k.make({.rollback_slack = 20});
        sash::append(tokens_of<P>(s, 0, 150), original, {.run = sash::serial{}});
        std::vector<rows> expected;
        for (int64 i = 0; i < 6; ++i) {
            cache_type c = original;
            c.rollback(i);
            expected.push_back(continued(c, 200 + 10 * i));
        }
        std::vector<cache_type> forks(6, original);
        std::atomic<int> right = 0;
        std::vector<std::thread> threads;
        for (std::size_t i = 0; i < 6; ++i)
            threads.emplace_back([&, i, fork = std::move(forks[i])]() mutable {
                for (int n = 0; n < 3; ++n) {
                    cache_type mine = fork;
                    mine.rollback(static_cast<int64>(i));
                    right += continued(mine, 200 + 10 * static_cast<int64>(i)) == expected[i];
                }
            });
        original.reset();  // meanwhile
        original = k.make();
        for (std::thread& t : threads) t.join();
        CHECK(right == 18);
    });
}

TEST_CASE("R33: callers on many threads, each with runners of their own") {
    const kind<sash::sliding_window, float> k{"", {.window = 150, .sinks = 4}};
    const stream s(500, 1, k.shape);
    const rows expected = k.attended(s, {.run = sash::serial{}});
    std::atomic<int> right = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
        threads.emplace_back([&, i] {
            thread_pool pool(2);
            if (i % 2)
                right += k.attended(s, {.run = pool}) == expected;
            else
                right += k.attended(s, {}) == expected;  // the default, whatever it is
        });
    for (std::thread& t : threads) t.join();
    CHECK(right == 4);
#if defined(_OPENMP)
    int inside = 0;
#pragma omp parallel for num_threads(3) reduction(+ : inside)
    for (int i = 0; i < 6; ++i) inside += k.attended(s, {.run = sash::openmp{8}}) == expected;
    CHECK(inside == 6);
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// What a decode step reads, and in which order

namespace {

using window_cache = sash::kv_cache<sash::sliding_window>;
using build = sash::build::here;

// `length` tokens of two KV heads; every number of a key is 1000 * its head + its position.
window_cache numbered(sash::sliding_window policy, int64 length) {
    window_cache cache(policy, {.heads = 4, .kv_heads = 2, .head_dim = 16});
    std::vector<float> keys;
    for (int64 t = 0; t < length; ++t)
        for (int64 h = 0; h < 2; ++h) keys.insert(keys.end(), 16, static_cast<float>(1000 * h + t));
    sash::append({keys, length, 2, 16}, {keys, length, 2, 16}, cache);
    return cache;
}

sash::cpu::softmax_job<sash::sliding_window> last_token_of(window_cache& cache) {
    auto& data = sash::detail::access::data(cache);
    sash::cpu::softmax_job<sash::sliding_window> job;
    job.policy = &data.policy;
    job.dims = &data.dims;
    job.scores = &data.scores;
    job.store = &data.store;
    job.query.tokens = 1;
    job.first_query = cache.length() - 1;
    job.group = 2;
    return job;
}

// The numbers (see above) of the keys in the tiles of one task, in order; then of those it takes for a later task's.
struct keys_of_tiles {
    std::vector<float> mine, ahead;

    keys_of_tiles(const sash::cpu::softmax_job<sash::sliding_window>& job, int64 head, int64 first, int64 last) {
        const sash::cpu::softmax_task task{0, head, 0, 2, first, last, nullptr};
        sash::cpu::tile_stream<build, sash::sliding_window> tiles{
            job, task, {job.first_query, job.first_query + 1}, head + 1};
        for (auto now = tiles.next(); now.tile.block != nullptr; now = tiles.next())
            for (int lane = now.tile.first; lane < now.tile.last; ++lane) {
                float key[16], value[16];
                sash::codec<float>::load<build>(now.tile.block, lane, 16, 16, key, value);
                (now.mine ? mine : ahead).push_back(key[0]);
                CHECK(key[0] == static_cast<float>(now.lane_zero + lane) + (key[0] < 1000 ? 0.0f : 1000.0f));
            }
    }
};

}  // namespace

TEST_CASE("A task reads the keys of its piece in order, and takes for the next what the next will read") {
    for (const int64 window : {1, 5, 64, 100, 300, 1000})
        for (const int64 sinks : {0, 4, 70})
            for (const int64 cut : {0, 3, 64, 490, 500}) {
                CAPTURE(window, sinks, cut);
                const sash::sliding_window policy{.window = window, .sinks = sinks};
                window_cache cache = numbered(policy, 500);
                const auto job = last_token_of(cache);
                std::vector<float> before, behind, other;
                for (int64 p = 0; p < 500; ++p)
                    if (499 - p < window || p < sinks) {
                        (p < cut ? before : behind).push_back(static_cast<float>(p));
                        other.push_back(static_cast<float>(1000 + p));
                    }
                const keys_of_tiles first(job, 0, 0, cut), second(job, 0, cut, 500), last(job, 1, 0, 500);
                CHECK(first.mine == before);
                CHECK(second.mine == behind);
                CHECK(last.mine == other);
                CHECK(second.ahead == other);
                CHECK(last.ahead.empty());
                behind.insert(behind.end(), other.begin(), other.end());
                CHECK(first.ahead == behind);
            }
}

TEST_CASE("Keys are split by their number and by where they stand, and a short rest is not split off") {
    const auto tasks = [](sash::sliding_window policy, int64 length, int64 key_piece) {
        window_cache cache = numbered(policy, length);
        const auto job = last_token_of(cache);
        sash::cpu::arena nothing;
        const auto plan = sash::cpu::plan_round<build>(nothing, &job, 1, key_piece);
        std::vector<std::byte> bytes(static_cast<std::size_t>(nothing.used) + 64);
        const auto at = reinterpret_cast<std::uintptr_t>(bytes.data()) % 64;
        sash::cpu::arena memory{bytes.data() + (64 - at) % 64};
        const auto listed = sash::cpu::plan_round<build>(memory, &job, 1, key_piece);
        CHECK(memory.used == nothing.used);  // counted right
        CHECK(listed.task_count == plan.task_count);
        CHECK(listed.group_count == plan.group_count);
        CHECK(listed.work == plan.work);
        return plan.task_count;
    };
    // A key and its value are 128 bytes here, so a piece is of 4096 keys.
    CHECK(tasks({.window = 4096, .sinks = 4}, 5000, 0) == 2);
    CHECK(tasks({.window = 5120, .sinks = 0}, 6000, 0) == 2);
    CHECK(tasks({.window = 5121, .sinks = 0}, 6000, 0) == 4);
    CHECK(tasks({.window = 100, .sinks = 4}, 150, 64) == 6);  // [0, 4) and [50, 64); [64, 128); [128, 150)
    CHECK(tasks({.window = 100, .sinks = 4}, 150, 1000) == 2);
}

// ---------------------------------------------------------------------------------------------------------------------

TEST_CASE("Runners are held by value where they are small, else by reference") {
    struct large {
        std::array<int64, 20> counts = {};
        void operator()(int64 tasks, sash::task f) {
            ++counts[7];
            for (int64 i = 0; i < tasks; ++i) f(i);
        }
    };
    large mine;
    const sash::runner run = mine;
    int64 sum = 0;
    auto add = [&](int64 i) { sum += i; };
    run(5, add);
    CHECK(sum == 10);
    CHECK(mine.counts[7] == 1);
    CHECK(run.concurrency() == 8);  // it does not say
    CHECK_FALSE(static_cast<bool>(sash::runner{}));
    CHECK(static_cast<bool>(run));
    CHECK(sash::runner(sash::serial{}).concurrency() == 1);
    CHECK(sash::runner(backwards{}).concurrency() == 7);
#if defined(_OPENMP)
    CHECK(sash::runner(sash::openmp{3}).concurrency() == 3);
    CHECK(sash::runner(sash::openmp{}).concurrency() >= 1);
#endif
    const sash::runner by_value = [] {
        const backwards gone;
        return sash::runner(gone);
    }();
    by_value(5, add);
    CHECK(sum == 20);
}
