// The CPU kernels by themselves, against a loop in double over every key that a row sees. Blocks are filled with NaN
// before tokens are stored, scratch too: whatever is read without having been written shows.
#include "support/catch.hpp"

#include <sash/cpu/decode.hpp>
#include <sash/cpu/prefill.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

namespace {

using build = sash::build::here;
using sash::bfloat16;
using sash::float16;
using sash::int64;
using sash::int8_rows;
namespace cpu = sash::cpu;

// Made from their bits, and told by their bits: this file is also compiled with -ffast-math.
constexpr float not_a_number = std::bit_cast<float>(0x7fc00000u);
constexpr float infinity = std::bit_cast<float>(0x7f800000u);
std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }
bool is_nan(float x) { return (bits(x) & 0x7fffffffu) > 0x7f800000u; }

// 64-byte aligned floats, all NaN.
struct scratch {
    explicit scratch(int64 floats) : size(static_cast<std::size_t>(floats)) {
        data = static_cast<float*>(std::aligned_alloc(64, (size * sizeof(float) + 127) / 64 * 64));
        std::memset(static_cast<void*>(data), 0xff, size * sizeof(float));
    }
    ~scratch() { std::free(data); }
    scratch(const scratch&) = delete;
    scratch& operator=(const scratch&) = delete;
    std::size_t size;
    float* data;
};

struct my_score {  // a user's score function: soft cap, then a slope and an offset per head
    float cap;
    sash::per_head slope, offset;
    template <class N, class Site>
    constexpr N operator()(N s, const Site& at) const {
        using std::tanh;
        return N(cap) * tanh(s / N(cap)) - at.of_head(slope) * at.distance() + at.of_head(offset);
    }
};

// A history of tokens of one KV head, and rows that see some of it.
template <class Element>
struct problem {
    int64 tokens, key_dim, value_dim;
    int rows;
    std::vector<float> key, value;                 // [tokens][…], as stored
    std::vector<float> query;                      // [rows][key_dim]
    std::vector<std::vector<std::uint64_t>> seen;  // [block][row] words of lanes
    std::vector<std::int32_t> head;                // [rows], and some more
    std::vector<float> slope, offset;              // [heads]
    std::vector<float> position;                   // [rows]
    std::vector<std::shared_ptr<scratch>> block;
    double scale = 1, cap = 0;
    bool alibi = false;

    problem(int64 tokens_, int64 key_dim_, int64 value_dim_, int rows_, std::mt19937& random)
        : tokens(tokens_), key_dim(key_dim_), value_dim(value_dim_), rows(rows_) {
        const auto fill = [&](std::vector<float>& v, int64 n) {  // variance 1
            v.resize(static_cast<std::size_t>(n));
            for (float& x : v) x = (float(random() % 65536) / 32768 - 1) * 1.732f;
        };
        fill(key, tokens * key_dim);
        fill(value, tokens * value_dim);
        fill(query, rows * key_dim);
        fill(slope, 8);
        offset.assign(8, 0.0f);
        for (int r = 0; r < 64; ++r) head.push_back(static_cast<std::int32_t>(random() % 8));
        for (int r = 0; r < rows; ++r) position.push_back(static_cast<float>(tokens + r));
        seen.assign(static_cast<std::size_t>(blocks()), std::vector<std::uint64_t>(static_cast<std::size_t>(rows)));
        for (int64 j = 0; j < tokens; ++j)
            for (int r = 0; r < rows; ++r) see(r, j, true);
        scale = 1 / std::sqrt(double(key_dim));
    }
    int64 blocks() const { return (tokens + 63) / 64; }
    bool sees(int row, int64 token) const {
        return seen[std::size_t(token / 64)][std::size_t(row)] >> (token % 64) & 1;
    }
    void see(int row, int64 token, bool yes) {
        std::uint64_t& word = seen[std::size_t(token / 64)][std::size_t(row)];
        const std::uint64_t bit = std::uint64_t{1} << (token % 64);
        word = yes ? word | bit : word & ~bit;
    }

    // Stores the tokens, in pieces, and takes the rounded values back.
    void store(std::mt19937& random) {
        const int64 bytes = sash::codec<Element>::block_bytes(key_dim, value_dim);
        for (int64 b = 0; b < blocks(); ++b) block.push_back(std::make_shared<scratch>(bytes / 4));
        for (int64 j = 0; j < tokens;) {
            const int64 n = std::min<int64>({tokens - j, 64 - j % 64, 1 + int64(random() % 40)});
            sash::codec<Element>::template store<build>(memory(j / 64), j % 64, n, key_dim, value_dim,
                                                        &key[std::size_t(j * key_dim)], key_dim,
                                                        &value[std::size_t(j * value_dim)], value_dim);
            j += n;
        }
        for (int64 j = 0; j < tokens; ++j)
            sash::codec<Element>::template load<build>(memory(j / 64), j % 64, key_dim, value_dim,
                                                       &key[std::size_t(j * key_dim)],
                                                       &value[std::size_t(j * value_dim)]);
    }
    std::byte* memory(int64 b) const { return reinterpret_cast<std::byte*>(block[std::size_t(b)]->data); }

    struct answer {
        std::vector<double> out;
        double maximum = -1e300, lse = 0;  // base 2
        int64 count = 0;                   // keys seen
    };
    answer expected(int row) const {
        answer a;
        a.out.assign(std::size_t(value_dim), 0);
        std::vector<double> s;
        for (int64 j = 0; j < tokens; ++j) {
            double dot = 0;
            for (int64 d = 0; d < key_dim; ++d)
                dot += double(query[std::size_t(row * key_dim + d)]) * double(key[std::size_t(j * key_dim + d)]);
            dot *= scale;
            if (cap != 0) dot = cap * std::tanh(dot / cap);
            if (alibi)
                dot -= double(slope[std::size_t(head[std::size_t(row)])]) *
                       (double(position[std::size_t(row)]) - double(j));
            dot += double(offset[std::size_t(head[std::size_t(row)])]);
            s.push_back(dot * 1.4426950408889634);
            if (sees(row, j)) a.maximum = std::max(a.maximum, s.back()), ++a.count;
        }
        double sum = 0;
        for (int64 j = 0; j < tokens; ++j)
            if (sees(row, j)) {
                const double p = std::exp2(s[std::size_t(j)] - a.maximum);
                sum += p;
                for (int64 c = 0; c < value_dim; ++c)
                    a.out[std::size_t(c)] += p * double(value[std::size_t(j * value_dim + c)]);
            }
        for (double& x : a.out) x /= a.count > 0 ? sum : 1;
        a.lse = a.maximum + std::log2(std::max(sum, 1e-300));
        return a;
    }
};

struct answers {
    std::vector<float> numerator;  // [rows][pitch]
    std::vector<float> maximum, denominator;
    int64 pitch;
    bool scaled_right = true;
};

// Numbers of two answers that differ in a bit: one row each, all columns but one.
int64 differences(const answers& a, int row_a, const answers& b, int row_b, int64 but_column = -1) {
    int64 n = bits(a.maximum[std::size_t(row_a)]) != bits(b.maximum[std::size_t(row_b)]);
    n += bits(a.denominator[std::size_t(row_a)]) != bits(b.denominator[std::size_t(row_b)]);
    for (int64 c = 0; c < a.pitch; ++c)
        n += c != but_column &&
             bits(a.numerator[std::size_t(row_a * a.pitch + c)]) != bits(b.numerator[std::size_t(row_b * b.pitch + c)]);
    return n;
}

enum class staging { none, built_in, custom };

// The stage that gives the problem's cap and slopes, one way or the other.
template <class Element>
struct staged {
    my_score function;
    sash::custom_score custom;
    cpu::score_stage stage;
    staged(const problem<Element>& p, staging how)
        : function{float(p.cap), {p.slope.data()}, {p.offset.data()}}, custom(function) {
        if (how == staging::built_in) stage = {.soft_cap = float(p.cap), .alibi = p.alibi ? p.slope.data() : nullptr};
        if (how == staging::custom) stage.custom = &custom;
    }
    staged(const staged&) = delete;
    float factor(double scale) const { return float(stage.empty() ? scale * 1.4426950408889634 : scale); }
};

// Whether rows written with a factor of their own are the numerators times that factor, and nothing beside them is touched.
bool scaled_as_plain(const cpu::query_tile<build>& tile, const std::vector<float>& plain) {
    const int64 pitch = tile.value_dim + 3;
    std::vector<float> out(std::size_t(tile.rows * pitch), -1.0f);
    float* rows[cpu::query_tile<build>::capacity];
    float factor[cpu::query_tile<build>::capacity];
    for (int r = 0; r < tile.rows; ++r) {
        rows[r] = &out[std::size_t(r * pitch)];
        factor[r] = float(r % 7) * 0.25f;
    }
    cpu::unpack(tile, rows, factor);
    bool right = true;
    for (int64 r = 0; r < tile.rows; ++r)
        for (int64 c = 0; c < pitch; ++c) {
            const float want = c < tile.value_dim ? factor[r] * plain[std::size_t(r * tile.value_pitch + c)] : -1.0f;
            right = right && (bits(rows[r][c]) == bits(want) || (is_nan(rows[r][c]) && is_nan(want)));
        }
    return right;
}

template <class Element>
answers prefill(const problem<Element>& p, staging how = staging::none, bool table = false) {
    using tile_type = cpu::query_tile<build>;
    const staged<Element> s(p, how);
    scratch memory(tile_type::floats(p.key_dim, p.value_dim, 2));
    tile_type tile;
    tile.bind(memory.data, p.rows, p.key_dim, p.value_dim, 2);
    tile.head = p.head.data();
    std::vector<const float*> rows;
    for (int r = 0; r < p.rows; ++r) rows.push_back(&p.query[std::size_t(r * p.key_dim)]);
    cpu::pack_queries(tile, 1, rows.data(), s.factor(p.scale));
    cpu::begin(tile);
    for (int64 b = 0; b < p.blocks(); ++b) {
        const auto& words = p.seen[std::size_t(b)];
        std::uint64_t some = 0, all = ~std::uint64_t{0};
        for (const std::uint64_t w : words) some |= w, all &= w;
        if (some == 0) continue;
        const int first = std::countr_zero(some), last = 64 - std::countl_zero(some);
        std::vector<float> distance;
        for (int r = 0; r < p.rows; ++r) distance.push_back(p.position[std::size_t(r)] - float(b * 64));
        scratch distances(64 * tile_type::capacity);
        for (int lane = 0; lane < 64; ++lane)
            for (int r = 0; r < p.rows; ++r)
                distances.data[lane * tile_type::capacity + r] = distance[std::size_t(r)] - float(lane);
        const bool whole = all == some && std::popcount(all) == last - first;
        const cpu::key_tile behind{.block = b + 1 < p.blocks() ? p.memory(b + 1) : nullptr, .last = 64};
        cpu::absorb<build, Element>(
            tile,
            {.block = p.memory(b), .first = first, .last = last, .next = behind.block != nullptr ? &behind : nullptr},
            {.visible = whole ? nullptr : words.data(),
             .frame = 1,
             .distance = table ? nullptr : distance.data(),
             .distance_table = table ? distances.data : nullptr},
            s.stage);
    }
    cpu::settle(tile);
    answers a;
    a.pitch = tile.value_pitch;
    a.numerator.resize(std::size_t(p.rows * a.pitch));
    cpu::unpack(tile, a.numerator.data());
    a.scaled_right = scaled_as_plain(tile, a.numerator);
    a.maximum.assign(tile.maximum, tile.maximum + p.rows);
    a.denominator.assign(tile.denominator, tile.denominator + p.rows);
    return a;
}

template <class Element>
answers decode(const problem<Element>& p, staging how = staging::none, bool table = false) {
    using tile_type = cpu::decode_rows<build>;
    const staged<Element> s(p, how);
    scratch memory(tile_type::floats(p.rows, p.key_dim, p.value_dim, 2));
    tile_type tile;
    tile.bind(memory.data, p.rows, p.key_dim, p.value_dim, 2);
    tile.head = p.head.data();
    for (std::size_t i = 0; i < p.query.size(); ++i) tile.query[p.query.size() + i] = p.query[i] * s.factor(p.scale);
    cpu::prepare<build, Element>(tile, 1);
    cpu::begin(tile);
    for (int64 b = 0; b < p.blocks(); ++b) {
        const auto& words = p.seen[std::size_t(b)];
        std::uint64_t some = 0, all = ~std::uint64_t{0};
        for (const std::uint64_t w : words) some |= w, all &= w;
        if (some == 0) continue;
        const int first = std::countr_zero(some), last = 64 - std::countl_zero(some);
        std::vector<float> distance, distances;
        for (int r = 0; r < p.rows; ++r) distance.push_back(p.position[std::size_t(r)] - float(b * 64));
        for (int r = 0; r < p.rows; ++r)
            for (int lane = 0; lane < 64; ++lane) distances.push_back(distance[std::size_t(r)] - float(lane));
        const cpu::key_tile behind{.block = b + 1 < p.blocks() ? p.memory(b + 1) : nullptr, .last = 64};
        cpu::absorb<build, Element>(
            tile,
            {.block = p.memory(b), .first = first, .last = last, .next = behind.block != nullptr ? &behind : nullptr},
            {.visible = all == some && std::popcount(all) == last - first ? nullptr : words.data(),
             .frame = 1,
             .distance = table ? nullptr : distance.data(),
             .distance_table = table ? distances.data() : nullptr},
            s.stage);
    }
    cpu::settle(tile);
    return {{tile.numerator, tile.numerator + p.rows * tile.value_pitch},
            {tile.maximum, tile.maximum + p.rows},
            {tile.denominator, tile.denominator + p.rows},
            tile.value_pitch,
            true};
}

// The neutral element of merging.
bool is_empty(const answers& a, int row) {
    bool zero = bits(a.maximum[std::size_t(row)]) == bits(-infinity) && a.denominator[std::size_t(row)] == 0;
    for (int64 c = 0; c < a.pitch; ++c) zero = zero && bits(a.numerator[std::size_t(row * a.pitch + c)]) == 0;
    return zero;
}

template <class Element>
void check(const problem<Element>& p, const answers& got, double tolerance = 2e-5) {
    int64 wrong = 0;
    for (int r = 0; r < p.rows; ++r) {
        const auto want = p.expected(r);
        if (want.count == 0) {
            wrong += !is_empty(got, r);
            continue;
        }
        const double max = double(got.maximum[std::size_t(r)]), sum = double(got.denominator[std::size_t(r)]);
        wrong += !(sum >= 1 && sum <= double(want.count) * 1.00001);  // the largest weight is exactly 1
        wrong += !(std::abs(max - want.maximum) < tolerance * (1 + std::abs(want.maximum)));
        wrong += !(std::abs(max + std::log2(sum) - want.lse) < tolerance * (1 + std::abs(want.lse)));
        for (int64 c = 0; c < p.value_dim; ++c)
            wrong +=
                !(std::abs(double(got.numerator[std::size_t(r * got.pitch + c)]) / sum - want.out[std::size_t(c)]) <
                  tolerance * (1 + std::abs(want.maximum)) + tolerance * std::abs(want.out[std::size_t(c)]));
    }
    CAPTURE(p.tokens, p.key_dim, p.value_dim, p.rows, p.cap, p.alibi);
    CHECK(wrong == 0);
    CHECK(got.scaled_right);
}

// What each row sees, at random: everything, a causal edge, a window, scattered keys, nothing.
template <class Element>
void hide(problem<Element>& p, std::mt19937& random) {
    const auto kind = random() % 5;
    const int64 window = 1 + int64(random() % 100), sinks = int64(random() % 6);
    for (int r = 0; r < p.rows; ++r) {
        const int64 position = std::max<int64>(0, p.tokens - 1 - r / 2);
        for (int64 j = 0; j < p.tokens; ++j) {
            bool yes = true;
            if (kind == 1) yes = j <= position;
            if (kind == 2) yes = j <= position && (position - j < window || j < sinks);
            if (kind == 3) yes = random() % 3 == 0;
            if (kind == 4) yes = r % 5 != 2 && j / 64 % 2 == r % 2;
            p.see(r, j, yes);
        }
    }
}

// One row of a problem as a problem of its own.
template <class Element>
problem<Element> alone(const problem<Element>& p, int row) {
    problem<Element> one = p;
    one.rows = 1;
    one.query.assign(p.query.begin() + row * p.key_dim, p.query.begin() + (row + 1) * p.key_dim);
    for (std::size_t b = 0; b < p.seen.size(); ++b) one.seen[b] = {p.seen[b][std::size_t(row)]};
    one.head[0] = p.head[std::size_t(row)];
    one.position = {p.position[std::size_t(row)]};
    return one;
}

constexpr int most_rows = cpu::query_tile<build>::capacity;
constexpr unsigned few_rows = cpu::decode_rows<build>::capacity;
const std::int64_t dims[] = {1, 2, 3, 7, 8, 16, 20, 33, 64, 65, 80, 96, 128, 129, 256};

std::mt19937 seeded() {
    const unsigned seed = std::random_device{}();
    std::printf("seed %u\n", seed);
    return std::mt19937(seed);
}

}  // namespace

TEST_CASE("R21: exp2 is exact at its edges and close between") {
    const auto exp2 = [](float x) {
        alignas(64) float lane[cpu::lanes<build>];
        cpu::store(lane, cpu::exp2(cpu::floats(x)));
        return lane[0];
    };
    CHECK(exp2(0.0f) == 1.0f);
    CHECK(exp2(-0.0f) == 1.0f);
    CHECK(exp2(-infinity) == 0.0f);
    CHECK(exp2(-1000.0f) == 0.0f);
    CHECK(exp2(-3e38f) == 0.0f);
    CHECK(is_nan(exp2(not_a_number)));
    for (int n = -126; n <= 127; ++n) CHECK(exp2(float(n)) == std::ldexp(1.0f, n));
    double worst = 0;
    for (float x = -126.0f; x <= 127.0f; x += 0.00037f)
        worst = std::max(worst, std::abs(double(exp2(x)) / std::exp2(double(x)) - 1));
    CHECK(worst < 2.4e-7);  // 2 ulp
    for (float x = -160.0f; x < -126.0f; x += 0.01f) {
        const double y = double(exp2(x));
        CHECK((y >= 0 && y <= std::exp2(double(x)) * 1.000001 + 1.5e-45));
    }
}

TEST_CASE("tanh is odd, bounded and close") {
    const auto tanh = [](float x) {
        alignas(64) float lane[cpu::lanes<build>];
        cpu::store(lane, cpu::tanh(cpu::floats(x)));
        return lane[0];
    };
    CHECK(tanh(-0.0f) == 0.0f);
    CHECK(tanh(infinity) == 1.0f);
    CHECK(tanh(-infinity) == -1.0f);
    CHECK(tanh(3e38f) == 1.0f);
    CHECK(is_nan(tanh(not_a_number)));
    double worst = 0;
    for (float x = 1e-6f; x < 20; x *= 1.00007f) {
        worst = std::max(worst, std::abs(double(tanh(x)) / std::tanh(double(x)) - 1));
        if (tanh(-x) != -tanh(x)) worst = 1;
    }
    CHECK(worst < 2.4e-7);  // 2 ulp
}

TEMPLATE_TEST_CASE("rows are converted bit for bit as single numbers are", "", float16, bfloat16) {
    std::vector<TestType> narrow(65536 + 3), again(65536 + 3);
    for (std::size_t i = 0; i < narrow.size(); ++i) narrow[i].bits = std::uint16_t(i);
    std::vector<float> wide(narrow.size());
    cpu::widen<build>(narrow.data(), wide.data(), int64(wide.size()));
    int64 wrong = 0;
    for (std::size_t i = 0; i < wide.size(); ++i) wrong += bits(wide[i]) != bits(float(narrow[i]));
    CHECK(wrong == 0);

    std::mt19937 random = seeded();
    for (std::size_t i = 0; i < wide.size(); ++i) {  // any bits; every tie and its neighbours
        std::uint32_t pattern = std::uint32_t(random());
        const std::uint32_t half = std::is_same_v<TestType, bfloat16> ? 0x8000u : 0x1000u;
        if (i % 2 == 0) pattern = bits(float(narrow[i])) + half + std::uint32_t(random() % 3) - 1;
        wide[i] = std::bit_cast<float>(pattern);
    }
    cpu::narrow<build>(wide.data(), again.data(), int64(wide.size()));
    for (std::size_t i = 0; i < wide.size(); ++i) wrong += again[i].bits != TestType(wide[i]).bits;
    CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("R30: stored bits depend on the token alone", "", float, float16, bfloat16) {
    using storage = sash::codec<TestType>;
    std::mt19937 random = seeded();
    for (const int64 key_dim : {1, 5, 64, 80})
        for (const int64 value_dim : {1, 16, 65, 128}) {
            problem<TestType> p(64, key_dim, value_dim, 1, random), q = p;
            const std::vector<float> key = p.key, value = p.value;
            p.store(random);
            q.key = key, q.value = value;
            q.store(random);  // other pieces
            const auto bytes = std::size_t(storage::block_bytes(key_dim, value_dim));
            CHECK(bytes % 64 == 0);
            // All but the last 56 bytes, which nobody writes.
            CHECK(std::memcmp(p.memory(0), q.memory(0), bytes - 56) == 0);
            int64 wrong = 0;
            for (std::size_t i = 0; i < key.size(); ++i) wrong += p.key[i] != float(TestType(key[i]));
            for (std::size_t i = 0; i < value.size(); ++i) wrong += p.value[i] != float(TestType(value[i]));

            // The layout as it is written down.
            const auto* k = reinterpret_cast<const TestType*>(p.memory(0));
            const auto* v = k + storage::key_bytes(key_dim) / int64(sizeof(TestType));
            const int64 pitch = (value_dim + 15) / 16 * 16;
            constexpr int64 w = std::is_same_v<TestType, bfloat16> ? 2 : 1;
            const int64 key_rows = (key_dim + w - 1) / w, value_rows = 64 / w;
            const auto key_at = [&](int64 t, int64 d) {  // [4][key_rows][16][w]
                return float(k[((t / 16 * key_rows + d / w) * 16 + t % 16) * w + d % w]);
            };
            for (int64 t = 0; t < 64; ++t) {
                for (int64 d = 0; d < key_dim; ++d) wrong += key_at(t, d) != p.key[std::size_t(t * key_dim + d)];
                for (int64 d = key_dim; d % w != 0; ++d) wrong += bits(key_at(t, d)) != 0;
                for (int64 c = 0; c < pitch; ++c)  // [pitch / 16][value_rows][16][w]
                    wrong += float(v[((c / 16 * value_rows + t / w) * 16 + c % 16) * w + t % w]) !=
                             (c < value_dim ? p.value[std::size_t(t * value_dim + c)] : 0.0f);
            }
            CHECK(wrong == 0);
            CHECK(storage::nonfinite_lanes(p.memory(0), key_dim, value_dim) == 0);
        }
}

TEST_CASE("R30: numbers close to the middle of two bytes are rounded to the nearer one") {
    const auto one = [](float x, float scale) {
        alignas(64) float row[16] = {x};
        alignas(64) std::int8_t to[16];
        sash::detail::to_bytes<build>(row, 1, scale, to);
        return int(to[0]);
    };
    CHECK(one(0x1.5a5514p+1f, 0x1.bd887ap-6f) == 99);  // 99.499988: a reciprocal in few steps makes it 99.5
    CHECK(one(0x1.1cc06ap+0f, 0x1.b9cbep-7f) == 83);   // 82.500012
    for (const float x : {1.0f, 3.0f, 5.0f, 7.0f, 10.0f, 49.0f})
        for (const float y : {3.0f, 7.0f, 41.0f, 127.0f}) {
            alignas(64) float lane[cpu::lanes<build>];
            cpu::store(lane, cpu::quotient(cpu::floats(x), cpu::floats(y)));
            CHECK(lane[0] == x / y);
        }
}

TEST_CASE("R30: rows of bytes as they are written down, each with its own scale") {
    using storage = sash::codec<int8_rows>;
    std::mt19937 random = seeded();
    for (const int64 key_dim : {1, 2, 3, 5, 64, 80, 257})
        for (const int64 value_dim : {1, 16, 65, 128}) {
            problem<int8_rows> p(64, key_dim, value_dim, 1, random), q = p;
            for (int64 t = 0; t < 64; ++t)  // rows of very different size
                for (int64 d = 0; d < key_dim; ++d)
                    p.key[std::size_t(t * key_dim + d)] *= std::ldexp(1.0f, int(t % 40) - 20);
            q.key = p.key;
            const std::vector<float> key = p.key, value = p.value;
            p.store(random);
            q.store(random);  // other pieces
            const auto bytes = std::size_t(storage::block_bytes(key_dim, value_dim));
            CHECK(bytes % 64 == 0);
            CHECK(std::memcmp(p.memory(0), q.memory(0), bytes - 56) == 0);

            const auto* k = reinterpret_cast<const std::uint8_t*>(p.memory(0));
            const int64 words = (key_dim + 3) / 4, pitch = (value_dim + 15) / 16 * 16;
            const auto* scales = reinterpret_cast<const float*>(k + words * 256);
            const auto* v = reinterpret_cast<const std::int8_t*>(scales + 128);
            int64 wrong = 0;
            const auto differs = [](int stored, float scale, float x) {
                return stored < -127 || std::abs(double(stored) * double(scale) - double(x)) > 0.50001 * double(scale);
            };
            for (int64 t = 0; t < 64; ++t) {
                float largest[2] = {0, 0};
                for (int64 d = 0; d < key_dim; ++d)
                    largest[0] = std::max(largest[0], std::abs(key[std::size_t(t * key_dim + d)]));
                for (int64 c = 0; c < value_dim; ++c)
                    largest[1] = std::max(largest[1], std::abs(value[std::size_t(t * value_dim + c)]));
                for (int i = 0; i < 2; ++i) {
                    const double want = double(largest[i]) / 127;
                    wrong += !(std::abs(double(scales[i * 64 + t]) - want) <= want * 1e-7);
                }
                for (int64 d = 0; d < 4 * words; ++d) {
                    const int n = int(k[((t / 16 * words + d / 4) * 16 + t % 16) * 4 + d % 4]) - 128;
                    const float x = d < key_dim ? key[std::size_t(t * key_dim + d)] : 0.0f;
                    wrong += d < key_dim ? differs(n, scales[t], x) : n != 0;
                    if (d < key_dim) wrong += bits(p.key[std::size_t(t * key_dim + d)]) != bits(float(n) * scales[t]);
                }
                for (int64 c = 0; c < pitch; ++c) {
                    const float x = c < value_dim ? value[std::size_t(t * value_dim + c)] : 0.0f;
                    const std::int8_t n = v[(c / 16 * 64 + t) * 16 + c % 16];
                    wrong += c < value_dim ? differs(n, scales[64 + t], x) : n != 0;
                }
            }
            CHECK(wrong == 0);
            CHECK(storage::nonfinite_lanes(p.memory(0), key_dim, value_dim) == 0);

            // A token by itself, and back into another lane.
            std::vector<std::byte> token(std::size_t(storage::token_bytes(key_dim, value_dim)));
            storage::save_token<build>(p.memory(0), 7, key_dim, value_dim, token.data());
            storage::load_token<build>(q.memory(0), 9, key_dim, value_dim, token.data());
            storage::load<build>(q.memory(0), 9, key_dim, value_dim, &q.key[0], &q.value[0]);
            CHECK(std::memcmp(&q.key[0], &p.key[std::size_t(7 * key_dim)], std::size_t(key_dim) * 4) == 0);
            CHECK(std::memcmp(&q.value[0], &p.value[std::size_t(7 * value_dim)], std::size_t(value_dim) * 4) == 0);
        }
}

TEST_CASE("dot products of bytes are exact, and queries are written in digits to 22 bits") {
    std::mt19937 random = seeded();
    int64 wrong = 0;
    for (int i = 0; i < 2000; ++i) {
        alignas(64) std::int32_t a[16], b[16], sum[16], got[16];
        for (int l = 0; l < 16; ++l) {
            a[l] = std::int32_t(random()), b[l] = std::int32_t(random()), sum[l] = std::int32_t(random() % 2000) - 1000;
            if (i == 0) a[l] = -1, b[l] = std::int32_t(0x80808080u);
        }
        cpu::dot_bytes(cpu::load(sum), cpu::load(a), cpu::load(b)).store_unaligned(got);
        for (int l = 0; l < cpu::lanes<build>; ++l) {
            for (int k = 0; k < 4; ++k)
                sum[l] +=
                    int(std::uint8_t(std::uint32_t(a[l]) >> 8 * k)) * int(std::int8_t(std::uint32_t(b[l]) >> 8 * k));
            wrong += got[l] != sum[l];
        }
    }
    CHECK(wrong == 0);

    for (const int64 dim : {1, 3, 4, 15, 16, 17, 80, 128, 257})
        for (const float size : {1.0f, 1e-30f, 3e38f, 0.0f, 1e-44f}) {
            std::vector<float> q(std::size_t(dim), 0.0f);
            for (float& x : q) x = size * (float(random() % 65536) / 32768 - 1);
            const int64 pitch = (dim + 3) / 4 * 4;
            std::vector<std::int8_t> digits(std::size_t(cpu::query_digits * pitch), std::int8_t{99});
            float unit = 0, largest = 0;
            std::int32_t excess[cpu::query_digits];
            cpu::write_digits<build>(q.data(), dim, pitch, digits.data(), unit, excess);
            for (const float x : q) largest = std::max(largest, std::abs(x));
            for (int i = 0; i < cpu::query_digits; ++i) {
                std::int32_t sum = 0;
                for (int64 d = 0; d < pitch; ++d) sum += digits[std::size_t(i * pitch + d)];
                wrong += excess[i] != 128 * sum;
            }
            for (int64 d = 0; d < pitch; ++d) {
                double n = 0;
                for (int i = cpu::query_digits - 1; i >= 0; --i) n = n * 256 + digits[std::size_t(i * pitch + d)];
                const double x = d < dim ? double(q[std::size_t(d)]) : 0;
                wrong += !(std::abs(n * double(unit) - x) <= double(largest) * 0x1p-22 + 1e-35);
            }
        }
    CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("prefill agrees with the textbook for any shape", "", float, float16, bfloat16, int8_rows) {
    std::mt19937 random = seeded();
    for (int i = 0; i < 300; ++i) {
        problem<TestType> p(1 + int64(random() % 260), dims[random() % std::size(dims)],
                            dims[random() % std::size(dims)], 1 + int(random() % unsigned(most_rows)), random);
        hide(p, random);
        const auto how = staging(random() % 3);
        if (how != staging::none) p.cap = 1 + double(random() % 50), p.alibi = true;
        if (how == staging::custom)
            for (float& x : p.offset) x = float(random() % 7);
        p.store(random);
        check(p, prefill(p, how, random() % 2 == 0), how == staging::none ? 2e-5 : 1e-4);
    }
}

TEMPLATE_TEST_CASE("decode agrees with the textbook for any shape", "", float, float16, bfloat16, int8_rows) {
    std::mt19937 random = seeded();
    for (int i = 0; i < 300; ++i) {
        problem<TestType> p(1 + int64(random() % 260), dims[random() % std::size(dims)],
                            dims[random() % std::size(dims)], 1 + int(random() % few_rows), random);
        hide(p, random);
        const auto how = staging(random() % 3);
        if (how != staging::none) p.cap = 1 + double(random() % 50), p.alibi = true;
        if (how == staging::custom)
            for (float& x : p.offset) x = float(random() % 7);
        p.store(random);
        check(p, decode(p, how, random() % 2 == 0), how == staging::none ? 2e-5 : 1e-4);
    }
}

TEMPLATE_TEST_CASE("R34: the bits of a row do not depend on its neighbours", "", float, float16, bfloat16, int8_rows) {
    std::mt19937 random = seeded();
    int64 different = 0;
    for (int i = 0; i < 60; ++i) {
        const bool many = i % 2 == 0;
        problem<TestType> p(1 + int64(random() % 260), dims[random() % std::size(dims)],
                            dims[random() % std::size(dims)],
                            1 + int(random() % (many ? unsigned(most_rows) : few_rows)), random);
        for (float& x : p.query) x *= 1 + float(random() % 5);  // some rows rescale often
        hide(p, random);
        const auto how = staging(random() % 3);
        if (how != staging::none) p.cap = 20, p.alibi = true;
        p.store(random);
        const answers together = many ? prefill(p, how) : decode(p, how);
        for (int r = 0; r < p.rows; ++r) {
            const problem<TestType> one = alone(p, r);
            different += differences(together, r, many ? prefill(one, how) : decode(one, how), 0);
        }
    }
    CHECK(different == 0);
}

TEMPLATE_TEST_CASE("R19: what a row does not see has no influence, what it sees propagates", "", float, float16,
                   bfloat16, int8_rows) {
    constexpr bool spreads = std::is_same_v<TestType, int8_rows>;  // one bad number, and the row has no scale
    std::mt19937 random = seeded();
    int64 wrong = 0;
    for (int i = 0; i < 80; ++i) {
        const bool many = i % 2 == 0;
        problem<TestType> p(2 + int64(random() % 200), dims[random() % std::size(dims)],
                            dims[random() % std::size(dims)],
                            1 + int(random() % (many ? unsigned(most_rows) : few_rows)), random);
        hide(p, random);
        problem<TestType> bad_key = p, bad_value = p;
        p.store(random);
        const answers clean = many ? prefill(p) : decode(p);

        const float bad = i % 3 == 0 ? infinity : i % 3 == 1 ? -infinity : not_a_number;
        const int64 token = int64(random() % std::size_t(p.tokens)),
                    column = int64(random() % std::size_t(p.value_dim));
        bad_key.key[std::size_t(token * p.key_dim)] = not_a_number;
        bad_value.value[std::size_t(token * p.value_dim + column)] = bad;
        bad_key.store(random);
        bad_value.store(random);
        const answers k = many ? prefill(bad_key) : decode(bad_key), v = many ? prefill(bad_value) : decode(bad_value);
        for (int r = 0; r < p.rows; ++r) {
            if (!p.sees(r, token)) {
                wrong += differences(clean, r, k, r) + differences(clean, r, v, r);
                continue;
            }
            for (int64 c = 0; spreads && c < p.value_dim; ++c)
                wrong += !is_nan(v.numerator[std::size_t(r * v.pitch + c)]);
            wrong += !spreads && differences(clean, r, v, r, column) != 0;
            const float poisoned = v.numerator[std::size_t(r * v.pitch + column)];
            wrong += (bits(poisoned) & 0x7f800000u) != 0x7f800000u;
            wrong += !is_nan(k.denominator[std::size_t(r)]);
            for (int64 c = 0; c < p.value_dim; ++c) wrong += !is_nan(k.numerator[std::size_t(r * k.pitch + c)]);
        }
    }
    CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("R17, R18: nothing seen, or only scores of -infinity, is the neutral element", "", float, float16,
                   bfloat16) {
    std::mt19937 random = seeded();
    for (const bool many : {true, false}) {
        problem<TestType> p(100, 1, 20, many ? std::min(20, most_rows) : 5, random);
        for (float& x : p.query) x = 1;
        for (int64 j = 0; j < p.tokens; ++j)
            if (j % 3 == 0) p.key[std::size_t(j)] = -infinity;
        for (int r = 0; r < p.rows; ++r)
            for (int64 j = 0; j < p.tokens; ++j) {
                if (r % 2 == 0 || !many) p.see(r, j, j % 3 == 0);  // scores of -infinity alone
                if (r == 1 && many) p.see(r, j, false);            // nothing
            }
        p.store(random);
        const answers a = many ? prefill(p) : decode(p);
        int64 wrong = 0;
        for (int r = 0; r < p.rows; ++r) {
            if (many && r % 2 == 1 && r != 1) {  // both kinds of scores: those of -infinity weigh nothing
                problem<TestType> finite = alone(p, r);
                for (int64 j = 0; j < p.tokens; j += 3) finite.see(0, j, false);
                wrong += differences(a, r, prefill(finite), 0);
            } else {
                wrong += !is_empty(a, r);
            }
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("R18: the maximum may rise at every key or all at once") {
    std::mt19937 random = seeded();
    for (const bool many : {true, false})
        for (const double step : {0.01, 0.3, 2.0, 7.9, 8.1, 30.0, 400.0, -0.3, -9.0}) {
            problem<float> p(200, 2, 17, many ? most_rows : 4, random);
            for (int64 j = 0; j < p.tokens; ++j) {
                p.key[std::size_t(2 * j)] = float(step * double(j));
                p.key[std::size_t(2 * j + 1)] = 0;
            }
            p.scale = 0.6931471805599453;  // base 2 in the end: steps as they are written
            for (int r = 0; r < p.rows; ++r)
                p.query[std::size_t(2 * r)] = r % 3 == 0 ? 1.0f : r % 3 == 1 ? -0.5f : 0.001f;
            p.store(random);
            check(p, many ? prefill(p) : decode(p), 2e-5);
        }
}
