#pragma once
// What the rules (rules_*.cpp) are tested with. The oracle asks the library nothing: who sees whom, rounding and sums
// are written here once more, in double, over the whole history as it was before any of it was stored.
//
//     uniform probe    Q = K = 0, so every visible key weighs the same; V[j] = j gives the mean of the positions seen
//     one-hot probe    Q = K = 0, V[j] = e_j: column j of a row is the weight of key j, so a wrong key is named
//     content probe    x(n) = ((37 n + 11) mod 101) / 50 - 1 fills Q, K and V: the order shows, and nothing is random
#include <sash/sash.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace probes {

using sash::int64;
using floats = std::vector<float>;
using positions = std::vector<int64>;

inline constexpr double infinity = std::numeric_limits<double>::infinity();
inline constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

inline std::size_t index(int64 i) { return static_cast<std::size_t>(i); }

// ------------------------------------------------------------------------------------------------ who sees whom, again

// V(i) of a window with sinks; without a limit on either it is full attention.
struct window_rule {
    int64 window = std::numeric_limits<int64>::max(), sinks = 0;
    bool operator()(int64 i, int64 j) const { return j >= 0 && j <= i && (i - j < window || j < sinks); }
};

// --------------------------------------------------------------------------------------------------- numbers as stored

// x in a binary format of so many significant bits, to nearest, ties to even.
inline double nearest(double x, int significant, int least_exponent, double largest) {
    if (!std::isfinite(x) || x == 0) return x;
    const double unit = std::ldexp(1.0, std::max(std::ilogb(x), least_exponent) - significant + 1);
    const double rounded = std::nearbyint(x / unit) * unit;
    return std::abs(rounded) > largest ? std::copysign(infinity, x) : rounded;
}

template <class Element>
double stored(float x) {
    if constexpr (std::is_same_v<Element, sash::float16>) return nearest(x, 11, -14, 65504);
    if constexpr (std::is_same_v<Element, sash::bfloat16>) return nearest(x, 8, -126, 0x1.fep127);
    return x;
}

// --------------------------------------------------------------------------------------------------------- the history

inline float content(int64 n) { return static_cast<float>((37 * n + 11) % 101) / 50 - 1; }

// All tokens of a sequence, contiguous [tokens, heads, dim].
struct history {
    int64 tokens = 0;
    sash::shape shape;  // heads, kv_heads, key_dim and value_dim are set
    floats query, key, value;

    history(int64 n, sash::shape s) : tokens(n), shape(s) {
        if (shape.kv_heads == 0) shape.kv_heads = shape.heads;
        if (shape.key_dim == 0) shape.key_dim = shape.head_dim;
        if (shape.value_dim == 0) shape.value_dim = shape.head_dim;
        query.resize(index(n * shape.heads * shape.key_dim));
        key.resize(index(n * shape.kv_heads * shape.key_dim));
        value.resize(index(n * shape.kv_heads * shape.value_dim));
    }

    sash::input queries(int64 first, int64 count) const {
        return {query.data() + first * shape.heads * shape.key_dim, count, shape.heads, shape.key_dim};
    }
    sash::input keys(int64 first, int64 count) const {
        return {key.data() + first * shape.kv_heads * shape.key_dim, count, shape.kv_heads, shape.key_dim};
    }
    sash::input values(int64 first, int64 count) const {
        return {value.data() + first * shape.kv_heads * shape.value_dim, count, shape.kv_heads, shape.value_dim};
    }
    float* value_row(int64 token, int64 head = 0) {
        return value.data() + (token * shape.kv_heads + head) * shape.value_dim;
    }
    float* key_row(int64 token, int64 head = 0) { return key.data() + (token * shape.kv_heads + head) * shape.key_dim; }

    // The first n tokens.
    history first(int64 n) const {
        history h(n, shape);
        std::copy_n(query.begin(), h.query.size(), h.query.begin());
        std::copy_n(key.begin(), h.key.size(), h.key.begin());
        std::copy_n(value.begin(), h.value.size(), h.value.begin());
        return h;
    }

    int64 row_floats() const { return shape.heads * shape.value_dim; }  // of one token's output
    sash::output rows(floats& out, int64 first, int64 count) const {
        return {out.data() + first * row_floats(), count, shape.heads, shape.value_dim};
    }
};

inline history uniform(int64 tokens) {
    history h(tokens, {.head_dim = 1});
    for (int64 j = 0; j < tokens; ++j) *h.value_row(j) = static_cast<float>(j);
    return h;
}

inline history one_hot(int64 tokens) {
    history h(tokens, {.key_dim = 1, .value_dim = tokens});
    for (int64 j = 0; j < tokens; ++j) h.value_row(j)[j] = 1;
    return h;
}

inline history contents(int64 tokens, sash::shape s, int64 from = 0) {
    history h(tokens, s);
    for (floats* part : {&h.query, &h.key, &h.value})
        for (float& x : *part) x = content(from++);
    return h;
}

// ---------------------------------------------------------------------------------------------------------- the oracle

// Output rows [tokens, heads, value_dim] and log-sum-exps [tokens, heads].
template <class Number>
struct rows_of {
    std::vector<Number> out, lse;
};
using rows = rows_of<float>;
using exact_rows = rows_of<double>;

// Softmax attention of every query of the history over the keys that rule(i, j) shows it. `stage(s, head, i, j)` is
// what happens to the scaled score before the softmax; `sink(head)` a logit in the denominator alone.
template <class Element, class Rule, class Stage, class Sink>
exact_rows softmax_rows(const history& h, const Rule& sees, const Stage& stage, const Sink& sink, double scale) {
    const sash::shape& s = h.shape;
    exact_rows r{std::vector<double>(index(h.tokens * h.row_floats())),
                 std::vector<double>(index(h.tokens * s.heads), -infinity)};
    for (int64 i = 0; i < h.tokens; ++i)
        for (int64 head = 0; head < s.heads; ++head) {
            const int64 kv = head / (s.heads / s.kv_heads);
            std::vector<std::pair<int64, double>> seen;
            double most = -infinity;
            for (int64 j = 0; j < h.tokens; ++j) {
                if (!sees(i, j)) continue;
                double dot = 0;
                for (int64 c = 0; c < s.key_dim; ++c)
                    dot += double{h.query[index((i * s.heads + head) * s.key_dim + c)]} *
                           stored<Element>(h.key[index((j * s.kv_heads + kv) * s.key_dim + c)]);
                seen.emplace_back(j, stage(scale * dot, head, i, j));
                most = std::max(most, seen.back().second);
            }
            if (most == -infinity) continue;  // nothing to be seen: 0 and -inf
            double mass = 0;
            for (const auto& [j, score] : seen) mass += std::exp(score - most);
            r.lse[index(i * s.heads + head)] = most + std::log(mass);
            mass += std::exp(sink(head) - most);
            for (int64 c = 0; c < s.value_dim; ++c) {
                double sum = 0;
                for (const auto& [j, score] : seen)
                    sum += std::exp(score - most) *
                           stored<Element>(h.value[index((j * s.kv_heads + kv) * s.value_dim + c)]);
                r.out[index((i * s.heads + head) * s.value_dim + c)] = sum / mass;
            }
        }
    return r;
}

template <class Element = float, class Rule>
exact_rows softmax_rows(const history& h, const Rule& sees) {
    return softmax_rows<Element>(
        h, sees, [](double s, int64, int64, int64) { return s; }, [](int64) { return -infinity; },
        1 / std::sqrt(double(h.shape.key_dim)));
}

// Normalised linear attention with phi = elu + 1, as the sum over keys that it is.
inline exact_rows linear_rows(const history& h) {
    const sash::shape& s = h.shape;
    const auto phi = [](double x) { return x > 0 ? x + 1 : std::exp(x); };
    exact_rows r{std::vector<double>(index(h.tokens * h.row_floats())), std::vector<double>(index(h.tokens * s.heads))};
    for (int64 i = 0; i < h.tokens; ++i)
        for (int64 head = 0; head < s.heads; ++head) {
            const int64 kv = head / (s.heads / s.kv_heads);
            double mass = 0;
            std::vector<double> sum(index(s.value_dim));
            for (int64 j = 0; j <= i; ++j) {
                double weight = 0;
                for (int64 c = 0; c < s.key_dim; ++c)
                    weight += phi(h.query[index((i * s.heads + head) * s.key_dim + c)]) *
                              phi(h.key[index((j * s.kv_heads + kv) * s.key_dim + c)]);
                mass += weight;
                for (int64 c = 0; c < s.value_dim; ++c)
                    sum[index(c)] += weight * h.value[index((j * s.kv_heads + kv) * s.value_dim + c)];
            }
            r.lse[index(i * s.heads + head)] = std::log(mass);
            for (int64 c = 0; c < s.value_dim; ++c)
                r.out[index((i * s.heads + head) * s.value_dim + c)] = sum[index(c)] / mass;
        }
    return r;
}

// ----------------------------------------------------------------------------------------------------------- comparing

// Empty where |a - b| <= 1e-6 + 1e-5 |b| everywhere (times `factor`), else a sentence about the first number that is
// not so.
template <class Number>
std::string difference(const floats& got, const std::vector<Number>& expected, double factor = 1) {
    if (got.size() != expected.size())
        return std::to_string(got.size()) + " numbers instead of " + std::to_string(expected.size());
    for (std::size_t n = 0; n < got.size(); ++n) {
        const double a = got[n], b = double{expected[n]};
        if (a == b || std::abs(a - b) <= factor * (1e-6 + 1e-5 * std::abs(b))) continue;
        return "number " + std::to_string(n) + " is " + std::to_string(a) + " instead of " + std::to_string(b);
    }
    return "";
}
template <class Number>
std::string difference(const rows& got, const rows_of<Number>& expected, double factor = 1) {
    const std::string out = difference(got.out, expected.out, factor), lse = difference(got.lse, expected.lse, factor);
    return out.empty() ? (lse.empty() ? "" : "lse: " + lse) : "out: " + out;
}

// Empty where every bit is the same.
inline std::string difference_in_bits(const floats& got, const floats& expected) {
    if (got.size() != expected.size())
        return std::to_string(got.size()) + " numbers instead of " + std::to_string(expected.size());
    for (std::size_t n = 0; n < got.size(); ++n)
        if (std::memcmp(&got[n], &expected[n], sizeof(float)) != 0)
            return "number " + std::to_string(n) + " is " + std::to_string(got[n]) + ", was " +
                   std::to_string(expected[n]);
    return "";
}
inline std::string difference_in_bits(const rows& got, const rows& expected) {
    const std::string out = difference_in_bits(got.out, expected.out), lse = difference_in_bits(got.lse, expected.lse);
    return out.empty() ? (lse.empty() ? "" : "lse: " + lse) : "out: " + out;
}

// What f is refused with; empty where it is not.
template <class F>
std::string refusal(F&& f) {
    try {
        f();
    } catch (const sash::error& e) { return e.what(); }
    return "";
}
inline bool names(const std::string& sentence, std::initializer_list<const char*> words) {
    return std::all_of(words.begin(), words.end(),
                       [&](const char* w) { return sentence.find(w) != std::string::npos; });
}

template <class Numbers>
bool all_finite(const Numbers& numbers) {
    return std::all_of(numbers.begin(), numbers.end(), [](auto x) { return std::isfinite(x); });
}

template <class Cache>
positions held(const Cache& cache) {
    positions p;
    for (const int64 j : cache.positions()) p.push_back(j);
    return p;
}

inline positions range(int64 first, int64 last) {
    positions p;
    for (; first < last; ++first) p.push_back(first);
    return p;
}

// -------------------------------------------------------------------------------------------------------------- memory

// A source that fills what it hands out, 0xff (NaN in every element type) unless said, and again what comes back;
// counts; and has no memory left when it is told so. Used from several threads.
class poisoned_memory {
public:
    explicit poisoned_memory(int pattern = 0xff)
        : fill_([pattern](void* p, std::size_t n) { std::memset(p, pattern, n); }) {}
    explicit poisoned_memory(float number)
        : fill_([number](void* p, std::size_t n) {
              for (std::size_t at = 0; at + sizeof number <= n; at += sizeof number)
                  std::memcpy(static_cast<std::byte*>(p) + at, &number, sizeof number);
          }) {}
    poisoned_memory(const poisoned_memory&) = delete;

    sash::memory_source source() {
        return {[](void* self, std::size_t size, std::size_t alignment) {
                    return static_cast<poisoned_memory*>(self)->take(size, alignment);
                },
                [](void* self, void* p, std::size_t size, std::size_t) {
                    static_cast<poisoned_memory*>(self)->give(p, size);
                },
                this};
    }

    std::atomic<int64> allocations{0};               // ever
    std::atomic<int64> bytes{0};                     // held now
    std::atomic<int64> left{std::int64_t{1} << 60};  // allocations until there is no memory any more

private:
    void* take(std::size_t size, std::size_t alignment) {
        if (left.fetch_sub(1) <= 0) return nullptr;
        void* p = std::aligned_alloc(alignment, size);
        fill_(p, size);
        ++allocations;
        bytes += static_cast<int64>(size);
        return p;
    }
    void give(void* p, std::size_t size) {
        fill_(p, size);
        bytes -= static_cast<int64>(size);
        std::free(p);
    }

    std::function<void(void*, std::size_t)> fill_;
};

// ------------------------------------------------------------------------------------------------------------- runners

// A runner on threads of its own; the tasks are dealt out from the last to the first, to meet no order that helps.
struct threads {
    int64 count = 4;
    int64 concurrency() const { return count; }
    void operator()(int64 tasks, sash::task f) const {
        std::vector<std::thread> team;
        for (int64 t = 0; t < count; ++t)
            team.emplace_back([&f, tasks, t, this] {
                for (int64 i = tasks - 1 - t; i >= 0; i -= count) f(i);
            });
        for (std::thread& member : team) member.join();
    }
};

struct named_runner {
    std::string name;
    sash::runner run;
};
inline std::vector<named_runner> runners() {
    return {
        {"serial", sash::serial{}},
#if defined(_OPENMP)
            {"openmp of 3", sash::openmp{3}},
#endif
        {
            "std::thread x 4", threads { 4 }
        }
    };
}

// ----------------------------------------------------------------------------------------------- every way to the rows

// How the tokens of a sequence are cut into calls.
inline std::vector<positions> cuts_of(int64 tokens) {
    const int64 uneven[] = {3, 1, 9, 1, 6, 20, 67, 2, 130};
    std::vector<positions> cuts{{tokens}, positions(index(tokens), 1), {}};
    for (int64 done = 0, n = 0; done < tokens; done += cuts[2].back(), ++n)
        cuts[2].push_back(std::min(uneven[n % 9], tokens - done));
    return cuts;
}

enum class form { attend, append_then_read, batch, without_cache };

struct way {
    std::string name;
    probes::form form = form::attend;
    positions cut;
    sash::runner run;
    int64 key_piece = 0;
};

// All forms of the verb, each with every cut and every runner. `append_then_read` needs every token by itself; what has
// no cache has no storage type.
template <class Element = float>
std::vector<way> every_way(int64 tokens, std::vector<int64> key_pieces = {0}) {
    std::vector<way> ways;
    for (const named_runner& by : runners())
        for (const int64 piece : key_pieces) {
            const std::string ending = ", " + by.name + (piece ? ", pieces of " + std::to_string(piece) : "");
            for (const positions& cut : cuts_of(tokens)) {
                const std::string calls = " in " + std::to_string(cut.size()) + " calls" + ending;
                ways.push_back({"attend" + calls, form::attend, cut, by.run, piece});
                ways.push_back({"batch" + calls, form::batch, cut, by.run, piece});
            }
            ways.push_back(
                {"append, then read" + ending, form::append_then_read, positions(index(tokens), 1), by.run, piece});
            if (std::is_same_v<Element, float>)
                ways.push_back({"without a cache" + ending, form::without_cache, {tokens}, by.run, piece});
        }
    return ways;
}

// Empty rows, poisoned: a row that nobody writes shows.
inline rows unwritten(const history& h) {
    return {floats(index(h.tokens * h.row_floats()), not_a_number),
            floats(index(h.tokens * h.shape.heads), not_a_number)};
}
inline std::span<float> lse_of(rows& r, const history& h, int64 first, int64 count) {
    return std::span(r.lse).subspan(index(first * h.shape.heads), index(count * h.shape.heads));
}

template <class Policy>
inline constexpr bool has_lse = [] {
    if constexpr (sash::recurrent_policy<Policy>)
        return Policy::has_normaliser;
    else
        return true;
}();

// Feeds the tokens of h to a cache, cut as said.
template <class Policy, class Element>
rows fed(sash::kv_cache<Policy, Element>& cache, const history& h, const positions& cut, sash::options how = {}) {
    rows r = unwritten(h);
    int64 first = 0;
    for (const int64 n : cut) {
        if (has_lse<Policy>) how.lse = lse_of(r, h, first, n);
        sash::attend(h.queries(first, n), h.keys(first, n), h.values(first, n), cache, h.rows(r.out, first, n), how);
        first += n;
    }
    return r;
}

template <class Policy, class Element>
rows appended_then_read(sash::kv_cache<Policy, Element>& cache, const history& h, sash::options how) {
    rows r = unwritten(h);
    for (int64 i = 0; i < h.tokens; ++i) {
        sash::append(h.keys(i, 1), h.values(i, 1), cache, how);
        sash::options reading = how;
        if (sash::softmax_policy<Policy>) reading.first_query = i;  // a state is read where it stands
        if (has_lse<Policy>) reading.lse = lse_of(r, h, i, 1);
        sash::read(h.queries(i, 1), cache, h.rows(r.out, i, 1), reading);
    }
    return r;
}

// Two neighbours of other lengths go along: one begins before, one behind this sequence.
template <class Policy, class Element>
rows in_a_batch(sash::kv_cache<Policy, Element>& cache, const history& h, const positions& cut,
                const sash::options& how) {
    rows r = unwritten(h);
    using cache_type = sash::kv_cache<Policy, Element>;
    const history other = contents(h.tokens + 7, h.shape, 5);
    rows ignored = unwritten(other), ignored_too = unwritten(other);
    cache_type before = cache.empty_copy(), behind = cache.empty_copy();
    fed(before, contents(7, h.shape), {7}, how);
    int64 first = 0;
    for (const int64 n : cut) {
        const auto asks = [&](const history& from, rows& to, int64 at, int64 count, cache_type& in) {
            return sash::request<cache_type>{.tokens = {.query = from.queries(at, count),
                                                        .key = from.keys(at, count),
                                                        .value = from.values(at, count)},
                                             .cache = &in,
                                             .out = from.rows(to.out, at, count),
                                             .lse = has_lse<Policy> ? lse_of(to, from, at, count) : std::span<float>{}};
        };
        sash::request<cache_type> requests[] = {asks(other, ignored, first, n + 2 > 7 ? 1 : n + 2, before),
                                                asks(h, r, first, n, cache),
                                                asks(other, ignored_too, first, n, behind)};
        sash::attend(requests, how);
        first += n;
    }
    return r;
}

// The rows of h under a policy, got in one of the ways, with poison in all the memory that the library is handed.
template <class Element, class Policy>
rows rows_by(const way& w, const Policy& policy, const history& h, const sash::score& score = {},
             sash::storage storage = {}) {
    poisoned_memory memory;
    storage.memory = memory.source();
    sash::workspace scratch(0, memory.source());
    sash::options how{.run = w.run, .workspace = &scratch, .key_piece = w.key_piece};
    sash::kv_cache<Policy, Element> cache(policy, h.shape, score, storage);
    switch (w.form) {
        case form::attend:
            return fed(cache, h, w.cut, how);
        case form::append_then_read:
            return appended_then_read(cache, h, how);
        case form::batch:
            return in_a_batch(cache, h, w.cut, how);
        case form::without_cache:
            break;
    }
    rows r = unwritten(h);
    if (has_lse<Policy>) how.lse = r.lse;
    sash::attend(policy, h.queries(0, h.tokens), h.keys(0, h.tokens), h.values(0, h.tokens), h.rows(r.out, 0, h.tokens),
                 how, score);
    return r;
}

}  // namespace probes
