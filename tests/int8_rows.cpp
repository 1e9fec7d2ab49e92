// Caches of bytes with a scale for each row, against a loop in double over the whole history whose rows are rounded
// here once more, from the formula: scale = max |x| / 127, n = x / scale to nearest, a number is n · scale.
#include "support/catch.hpp"
#include "support/probes.hpp"

#include <sash/reference.hpp>

#include <bit>
#include <random>

namespace {

using namespace probes;
using sash::full;
using sash::int8_rows;
using sash::kv_cache;
using sash::sliding_window;

constexpr float endless = std::numeric_limits<float>::infinity();

void round_row(float* row, int64 dim) {
    float largest = 0;
    bool finite = true;
    for (int64 c = 0; c < dim; ++c) {
        largest = std::max(largest, std::abs(row[c]));
        finite = finite && std::isfinite(row[c]);
    }
    const float scale = largest / 127;
    for (int64 c = 0; c < dim; ++c)
        row[c] = !finite      ? not_a_number
                 : scale == 0 ? 0
                              : scale * std::clamp(std::nearbyint(row[c] / scale), -127.f, 127.f);
}

history as_stored(history h) {
    const sash::shape& s = h.shape;
    for (int64 r = 0; r < h.tokens * s.kv_heads; ++r) {
        round_row(h.key.data() + r * s.key_dim, s.key_dim);
        round_row(h.value.data() + r * s.value_dim, s.value_dim);
    }
    return h;
}

template <class Rule>
exact_rows oracle(const history& h, const Rule& sees) {
    return softmax_rows(as_stored(h), sees);
}

// Numbers of variance 1; keys and queries grow with `sharpness`, so that few keys weigh more than the others.
history noise(int64 tokens, sash::shape shape, unsigned seed, float sharpness = 1) {
    history h(tokens, shape);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& x : h.query) x = sharpness * normal(random);
    for (float& x : h.key) x = normal(random);
    for (float& x : h.value) x = normal(random);
    return h;
}

// One token's value, read by itself.
floats alone(const floats& value) {
    const auto dim = static_cast<int64>(value.size());
    const floats zero(1, 0.f);
    floats out(value.size(), not_a_number);
    kv_cache<sliding_window, int8_rows> cache({.window = 1}, {.key_dim = 1, .value_dim = dim});
    sash::attend({zero, 1, 1, 1}, {zero, 1, 1, 1}, {value, 1, 1, dim}, cache, {out, 1, 1, dim});
    return out;
}

int64 units_apart(float a, float b) {
    return std::abs(int64{std::bit_cast<std::int32_t>(a)} - int64{std::bit_cast<std::int32_t>(b)});
}

template <class Policy>
using cache_of = kv_cache<Policy, int8_rows>;

}  // namespace

// ----------------------------------------------------------------------------------------------------------------- R29

TEST_CASE("R29: A12 int8: rows of zeros, constant, tiny and mixed rows") {
    for (const int64 dim : {1, 3, 5, 16, 37, 80, 257}) {
        const auto constant = [&](float x) { return floats(index(dim), x); };
        CHECK(alone(constant(0)) == constant(0));
        CHECK(alone(constant(-0.f)) == constant(0));
        for (const float x : {3.f, -3.f, 1.f, 0.1f, 1e-30f, 2e-36f, 12345.678f, 3e38f})
            for (const float y : alone(constant(x))) CHECK(units_apart(x, y) <= 1);
        floats mixed = constant(1);
        mixed[0] = 1e4f;
        const floats got = alone(mixed);
        CHECK(units_apart(got[0], 1e4f) <= 1);
        for (int64 c = 1; c < dim; ++c) CHECK(std::abs(got[index(c)] - 1) <= 1e4 / 254);
        mixed[0] = -3e38f;  // and no sign is lost at the end of the range
        CHECK(units_apart(alone(mixed)[0], -3e38f) <= 1);
        for (const float y : alone(constant(1e-40f))) CHECK(std::abs(y - 1e-40f) <= 1e-40f / 127);
        CHECK(alone(constant(1e-44f)) == constant(0));
    }
}

TEST_CASE("R29: int8: every number is the nearest of 255, whatever else the row holds") {
    const unsigned seed = std::random_device{}();
    CAPTURE(seed);
    std::mt19937 random(seed);
    int64 wrong = 0;
    for (int i = 0; i < 400; ++i) {
        floats row(1 + random() % 200);
        const float size = std::ldexp(1.f, static_cast<int>(random() % 200) - 100);
        for (float& x : row) x = size * (static_cast<float>(random() % 65536) / 32768 - 1);
        float largest = 0;
        for (const float x : row) largest = std::max(largest, std::abs(x));
        const floats got = alone(row);
        for (std::size_t c = 0; c < row.size(); ++c) {
            wrong += !(std::abs(double{got[c]} - double{row[c]}) <= double{largest} / 254 * 1.00002);
            wrong += std::abs(row[c]) == largest && units_apart(got[c], row[c]) > 1;
        }
    }
    CHECK(wrong == 0);
}

TEST_CASE("R29: A12 int8: over keys of zeros the row is the mean, and a bad row touches no other") {
    history h = contents(140, {.heads = 2, .kv_heads = 2, .head_dim = 5});
    std::fill(h.key.begin(), h.key.end(), 0.f);
    for (const way& w : every_way<int8_rows>(140)) {
        CAPTURE(w.name);
        CHECK(difference(rows_by<int8_rows>(w, full{}, h), oracle(h, window_rule{})) == "");
    }
    for (const bool key : {true, false})
        for (const float bad : {not_a_number, endless, -endless}) {
            history spoilt = h;
            (key ? spoilt.key_row(20, 0) : spoilt.value_row(20, 0))[3] = bad;
            for (const way& w : every_way<int8_rows>(140)) {
                CAPTURE(w.name, key, bad);
                const rows clean = rows_by<int8_rows>(w, sliding_window{.window = 5}, h),
                           got = rows_by<int8_rows>(w, sliding_window{.window = 5}, spoilt);
                int64 wrong = 0;
                for (int64 i = 0; i < 140; ++i)
                    for (int64 head = 0; head < 2; ++head) {
                        const bool sees = head == 0 && i >= 20 && i < 25;  // a row without a range is NaN, all of it
                        for (int64 c = 0; c < 5; ++c) {
                            const auto at = index((i * 2 + head) * 5 + c);
                            wrong += sees ? !std::isnan(got.out[at])
                                          : std::memcmp(&got.out[at], &clean.out[at], sizeof(float)) != 0;
                        }
                        wrong += std::isnan(got.lse[index(i * 2 + head)]) != (sees && key);
                    }
                CHECK(wrong == 0);
            }
        }
}

TEST_CASE("R29: int8: a query of NaN or infinity makes its own row NaN, and no other") {
    const history h = contents(70, {.heads = 4, .kv_heads = 2, .head_dim = 7});
    for (const float bad : {not_a_number, endless}) {
        history spoilt = h;
        spoilt.query[index((50 * 4 + 1) * 7 + 2)] = bad;
        const way each{"", form::attend, positions(70, 1), sash::serial{}};
        const rows clean = rows_by<int8_rows>(each, full{}, h), got = rows_by<int8_rows>(each, full{}, spoilt);
        int64 wrong = 0;
        for (int64 r = 0; r < 280; ++r)
            for (int64 c = 0; c < 7; ++c) {
                const auto at = index(r * 7 + c);
                wrong +=
                    r == 201 ? !std::isnan(got.out[at]) : std::memcmp(&got.out[at], &clean.out[at], sizeof(float)) != 0;
            }
        CHECK(wrong == 0);
    }
}

TEST_CASE("R29: int8: only the numbers of the row set its range, whatever lies beside it") {
    for (const int64 dim : {1, 3, 5, 17, 63, 80, 100}) {
        const history narrow = contents(70, {.head_dim = dim});
        const int64 pitch = dim + 5;
        history wide(70, {.head_dim = pitch});  // the same rows, in memory that is full of something larger
        for (floats* part : {&wide.query, &wide.key, &wide.value}) std::fill(part->begin(), part->end(), 1e30f);
        for (int64 t = 0; t < 70; ++t) {
            std::copy_n(narrow.query.data() + t * dim, dim, wide.query.data() + t * pitch);
            std::copy_n(narrow.key.data() + t * dim, dim, wide.key.data() + t * pitch);
            std::copy_n(narrow.value.data() + t * dim, dim, wide.value.data() + t * pitch);
        }
        rows a = unwritten(narrow), b = a;
        cache_of<full> one({}, narrow.shape), other({}, narrow.shape);
        sash::attend(narrow.queries(0, 70), narrow.keys(0, 70), narrow.values(0, 70), one, narrow.rows(a.out, 0, 70));
        sash::attend({wide.query, 70, 1, dim, pitch, dim}, {wide.key, 70, 1, dim, pitch, dim},
                     {wide.value, 70, 1, dim, pitch, dim}, other, narrow.rows(b.out, 0, 70));
        CHECK(difference_in_bits(a.out, b.out) == "");
        CHECK((one.save() == other.save()));
    }
}

TEST_CASE("R19: int8: memory that was never written has no influence") {
    const history h = contents(150, {.heads = 4, .kv_heads = 2, .key_dim = 6, .value_dim = 19});
    const sliding_window policy{.window = 40, .sinks = 3};
    poisoned_memory ones(0xff), zeros(0), eights(0x88), infinite(endless);
    std::vector<rows> got;
    for (poisoned_memory* memory : {&ones, &zeros, &eights, &infinite}) {
        cache_of<sliding_window> cache(policy, h.shape, {}, {.memory = memory->source()});
        sash::workspace scratch(0, memory->source());
        for (const positions& cut : cuts_of(150)) {
            cache.reset();
            got.push_back(fed(cache, h, cut, {.workspace = &scratch}));
        }
    }
    for (std::size_t i = 3; i < got.size(); ++i) CHECK(difference_in_bits(got[i], got[i % 3]) == "");
}

// ----------------------------------------------------------------------------------------------------------------- R30

TEST_CASE("R30: int8: what is stored depends on the row alone, not on the cut, the runner or the neighbours") {
    const history h = contents(200, {.heads = 2, .kv_heads = 2, .key_dim = 5, .value_dim = 9});
    const sliding_window policy{.window = 90, .sinks = 3};
    cache_of<sliding_window> once(policy, h.shape);
    fed(once, h, {200});
    const auto expected = once.save();
    for (const positions& cut : cuts_of(200))
        for (const named_runner& by : runners()) {
            CAPTURE(cut.size(), by.name);
            cache_of<sliding_window> cut_up(policy, h.shape), in_company(policy, h.shape);
            fed(cut_up, h, cut, {.run = by.run});
            CHECK((cut_up.save() == expected));
            in_a_batch(in_company, h, cut, {.run = by.run});
            CHECK((in_company.save() == expected));
        }
    history other = h;  // of another head
    for (int64 j = 0; j < 200; ++j) {
        std::fill_n(other.key_row(j, 0), 5, 1e30f);
        std::fill_n(other.value_row(j, 0), 9, not_a_number);
    }
    const way w{"", form::attend, {200}, sash::serial{}};
    const rows a = rows_by<int8_rows>(w, policy, h), b = rows_by<int8_rows>(w, policy, other);
    int64 wrong = 0;
    for (int64 i = 0; i < 200; ++i) wrong += std::memcmp(&a.out[index(i * 18 + 9)], &b.out[index(i * 18 + 9)], 36) != 0;
    CHECK(wrong == 0);
}

TEST_CASE("R30, R14: int8: bytes and scales are saved and loaded as they are, over and over") {
    const unsigned seed = std::random_device{}();
    CAPTURE(seed);
    const history h = noise(130, {.key_dim = 33, .value_dim = 6}, seed);
    cache_of<full> cache({}, h.shape);
    fed(cache, h, {130});
    const auto file = cache.save();
    CHECK(file.size() < 130 * (33 + 6 + 8) + 100);
    cache_of<full> loaded({}, h.shape);
    for (int i = 0; i < 3; ++i) {  // a second rounding would move a scale by a unit now and then
        loaded.load(cache.save());
        std::swap(cache, loaded);
        CHECK((cache.save() == file));
    }
    kv_cache<full, sash::bfloat16> another({}, h.shape);
    CHECK(names(refusal([&] { another.load(file); }), {"element type"}));
    auto damaged = file;
    damaged[200] ^= std::byte{1};
    CHECK(names(refusal([&] { loaded.load(damaged); }), {"damaged"}));
}

// ---------------------------------------------------------------------------------------------- attention over it

TEST_CASE("R01, R08, R20: int8: every form, cut and runner agrees with the rows as they are stored") {
    struct {
        sash::shape shape;
        int64 tokens;
    } const cases[] = {{{.heads = 1, .kv_heads = 1, .head_dim = 1}, 150},
                       {{.heads = 4, .kv_heads = 2, .head_dim = 3}, 150},
                       {{.heads = 8, .kv_heads = 1, .head_dim = 5}, 200},
                       {{.heads = 3, .kv_heads = 1, .head_dim = 80}, 150},
                       {{.heads = 16, .kv_heads = 1, .head_dim = 64}, 70},
                       {{.heads = 5, .kv_heads = 1, .key_dim = 100, .value_dim = 33}, 140},
                       {{.heads = 2, .kv_heads = 2, .key_dim = 16, .value_dim = 257}, 90},
                       {{.heads = 6, .kv_heads = 2, .head_dim = 128}, 140}};
    for (const auto& c : cases) {
        const history h = contents(c.tokens, c.shape);
        const exact_rows all = oracle(h, window_rule{}), some = oracle(h, window_rule{.window = 40, .sinks = 5});
        for (const way& w : every_way<int8_rows>(c.tokens, {0, 48})) {
            CAPTURE(w.name, c.shape.heads, c.shape.kv_heads, h.shape.key_dim, h.shape.value_dim);
            CHECK(difference(rows_by<int8_rows>(w, full{}, h), all) == "");
            CHECK(difference(rows_by<int8_rows>(w, sliding_window{.window = 40, .sinks = 5}, h), some) == "");
        }
    }
}

TEST_CASE("R08: int8: sharp scores and rows of very different size: decoding and prefill agree with what is stored") {
    const unsigned seed = std::random_device{}();
    CAPTURE(seed);
    for (const float sharpness : {0.01f, 1.f, 30.f}) {
        history h = noise(300, {.heads = 8, .kv_heads = 2, .head_dim = 96}, seed, sharpness);
        for (int64 t = 0; t < 300; t += 7)
            for (int64 c = 0; c < 96; ++c) h.key_row(t, 1)[c] *= 1e-3f, h.value_row(t, 1)[c] *= 1e3f;
        const exact_rows want = oracle(h, window_rule{});
        for (const positions& cut : cuts_of(300)) {
            CAPTURE(sharpness, cut.size());
            const way w{"", form::attend, cut, sash::serial{}};
            const rows got = rows_by<int8_rows>(w, full{}, h);
            // A score of s is right to a few units in its last place, and so is a weight to s units.
            int64 wrong = 0;
            for (std::size_t i = 0; i < got.out.size(); ++i)
                wrong += !(std::abs(double{got.out[i]} - want.out[i]) <=
                           (i / 96 % 8 < 4 ? 1 : 4e3) * 1e-5 * (1 + double{sharpness}));
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("R34: int8: a row has the same bits alone, in a batch, on any number of threads") {
    const history h = contents(150, {.heads = 8, .kv_heads = 2, .head_dim = 20});
    for (const positions& cut : cuts_of(150)) {
        const rows once = rows_by<int8_rows>({"", form::attend, cut, sash::serial{}}, full{}, h);
        for (const named_runner& by : runners())
            for (const form how : {form::attend, form::batch}) {
                CAPTURE(cut.size(), by.name);
                CHECK(difference_in_bits(rows_by<int8_rows>({"", how, cut, by.run}, full{}, h), once) == "");
            }
    }
}

TEST_CASE("int8: the error against attention that stores floats is within its bound") {
    // A number of a row is off by max / 254, so a score by e = scale · Σ |q| · max |k| / 254, a weight by a factor
    // within exp(±2 e), and a row by (exp(2 e) - 1) · 2 max |v| + max |v| / 254. In the mean it is much less.
    const unsigned seed = std::random_device{}();
    CAPTURE(seed);
    const sash::shape shape{.heads = 4, .kv_heads = 1, .head_dim = 64};
    const history h = noise(256, shape, seed);
    const exact_rows want = softmax_rows(h, window_rule{});
    double largest_key = 0, largest_value = 0, sum = 0, size = 0;
    for (const float x : h.key) largest_key = std::max(largest_key, std::abs(double{x}));
    for (const float x : h.value) largest_value = std::max(largest_value, std::abs(double{x}));
    const rows got = rows_by<int8_rows>({"", form::attend, positions(256, 1), sash::serial{}}, full{}, h);
    int64 wrong = 0;
    for (int64 r = 0; r < 256 * 4; ++r) {
        double query = 0;
        for (int64 c = 0; c < 64; ++c) query += std::abs(double{h.query[index(r * 64 + c)]});
        const double e = query / 8 * largest_key / 254;
        for (int64 c = 0; c < 64; ++c) {
            const double off = std::abs(double{got.out[index(r * 64 + c)]} - want.out[index(r * 64 + c)]);
            wrong += !(off <= (std::exp(2 * e) - 1) * 2 * largest_value + largest_value / 254);
            sum += off * off;
            size += want.out[index(r * 64 + c)] * want.out[index(r * 64 + c)];
        }
    }
    CHECK(wrong == 0);
    CHECK(std::sqrt(sum / size) < 0.02);  // root mean square, of that of the rows
}

TEST_CASE("R16: int8: keys are turned before they are rounded, and once") {
    const sash::rope_table table = sash::rope_frequencies(16, 10000);
    const sash::shape shape{.heads = 2, .kv_heads = 1, .head_dim = 16};
    const history raw = contents(120, shape);
    history turned = raw;  // the same, turned by the caller
    for (int64 t = 0; t < 120; ++t)
        for (int64 pair = 0; pair < 8; ++pair) {
            const double angle = double(t) * std::pow(10000.0, -double(pair) / 8), c = std::cos(angle),
                         s = std::sin(angle);
            const auto turn = [&](float* row) {
                const double x = row[pair], y = row[pair + 8];
                row[pair] = static_cast<float>(x * c - y * s);
                row[pair + 8] = static_cast<float>(x * s + y * c);
            };
            turn(turned.key_row(t));
            turn(turned.query.data() + t * 32), turn(turned.query.data() + t * 32 + 16);
        }
    const exact_rows want = oracle(turned, window_rule{.window = 50, .sinks = 2});
    for (const way& w : every_way<int8_rows>(120)) {
        CAPTURE(w.name);
        const rows by_library = rows_by<int8_rows>(w, sliding_window{.window = 50, .sinks = 2}, raw,
                                                   {.rotary = {.frequencies = table, .by = sash::rotates::library}});
        // A turned number that lies beside a tie may go the other way: one step of 1/127 in one number of a key.
        CHECK(difference(by_library, want, 100) == "");
        CHECK(difference(rows_by<int8_rows>(w, sliding_window{.window = 50, .sinks = 2}, turned), want) == "");
    }
}

TEST_CASE("R15, R20: int8: caps, slopes, sink logits and the compact frame agree with the reference") {
    const sash::rope_table table = sash::rope_frequencies(12, 10000);
    const sash::shape shape{.heads = 4, .kv_heads = 2, .key_dim = 12, .value_dim = 9};
    const history h = contents(130, shape);
    const floats slopes{0.5f, 0.1f, 0.02f, 0.003f}, logits{0.3f, -1.f, 2.f, 0.f};
    const sliding_window policy{.window = 30, .sinks = 3, .frame = sash::frame::compact};
    const sash::score score{.soft_cap = 3, .alibi = slopes, .sink_logits = logits, .rotary = {.frequencies = table}};
    const sash::reference::result want = sash::reference::attend(policy, h.shape, h.queries(0, 130), h.keys(0, 130),
                                                                 h.values(0, 130), score, -1, sash::scalar::i8);
    for (const way& w : every_way<int8_rows>(130)) {
        CAPTURE(w.name);
        CHECK(difference(rows_by<int8_rows>(w, policy, h, score), exact_rows{want.out, want.lse}) == "");
    }
}

// ------------------------------------------------------------------------------------------- what a cache can do

TEST_CASE("R12, R13, R14: int8: a fork, a rollback, a checkpoint and a file are the cache there was") {
    const history h = contents(260, {.heads = 4, .kv_heads = 2, .key_dim = 10, .value_dim = 7});
    const auto check = [&]<class P>(const P& policy) {
        const auto future = [&](const cache_of<P>& cache) {  // tokens 200 and on, one by one
            cache_of<P> copy = cache;
            rows r = unwritten(h);
            for (int64 i = 200; i < 260; ++i)
                sash::attend(h.queries(i, 1), h.keys(i, 1), h.values(i, 1), copy, h.rows(r.out, i, 1));
            return floats(r.out.begin() + 200 * h.row_floats(), r.out.end());
        };
        cache_of<P> cache(policy, h.shape, {}, {.rollback_slack = 30});
        fed(cache, h.first(200), {200});
        const floats expected = future(cache);
        cache_of<P> fork = cache;
        const auto mark = cache.checkpoint();
        const auto file = cache.save();
        for (int64 drafts = 0; drafts <= 30; drafts += 5) {
            sash::append(contents(drafts, h.shape, 77).keys(0, drafts), contents(drafts, h.shape, 78).values(0, drafts),
                         cache);
            cache.rollback(drafts);
            CHECK(difference_in_bits(future(cache), expected) == "");
        }
        sash::append(h.keys(0, 100), h.values(0, 100), cache);
        CHECK(difference_in_bits(future(fork), expected) == "");
        cache.restore(mark);
        CHECK(difference_in_bits(future(cache), expected) == "");
        cache.reset();
        cache.load(file);
        CHECK(difference_in_bits(future(cache), expected) == "");
        CHECK((cache.save() == file));
    };
    check(full{});
    check(sliding_window{.window = 50, .sinks = 3});
    check(sliding_window{.window = 2, .sinks = 90});
}

TEST_CASE("int8: a window that is bounded in mid-stream takes its bytes along") {
    const history h = contents(300, {.heads = 2, .kv_heads = 1, .key_dim = 9, .value_dim = 18});
    const sliding_window wide{.window = int64{1} << 50, .sinks = 4}, narrow{.window = 64, .sinks = 4};
    cache_of<sliding_window> cache(wide, h.shape);
    const rows before = fed(cache, h.first(200), cuts_of(200)[2]);
    CHECK(difference(before, oracle(h.first(200), window_rule{})) == "");
    cache.policy(narrow);
    CHECK(cache.stored() <= 68);
    rows after = unwritten(h);
    for (int64 i = 200; i < 300; ++i)
        sash::attend(h.queries(i, 1), h.keys(i, 1), h.values(i, 1), cache, h.rows(after.out, i, 1),
                     {.lse = lse_of(after, h, i, 1)});
    const exact_rows want = oracle(h, window_rule{.window = 64, .sinks = 4});
    rows tail{floats(after.out.begin() + 200 * 36, after.out.end()), floats(after.lse.begin() + 400, after.lse.end())};
    CHECK(difference(tail, exact_rows{{want.out.begin() + 200 * 36, want.out.end()},
                                      {want.lse.begin() + 400, want.lse.end()}}) == "");
}

TEST_CASE("int8: a cache takes about a quarter of the bytes of one of floats") {
    const sash::shape shape{.heads = 8, .kv_heads = 8, .head_dim = 128};
    cache_of<sliding_window> bytes({.window = 1024}, shape);
    kv_cache<sliding_window> wide({.window = 1024}, shape);
    bytes.reserve(4096);
    wide.reserve(4096);
    CHECK(double(bytes.bytes()) < 0.27 * double(wide.bytes()));
}

TEST_CASE("R24: int8: a recurrent policy keeps its state in floats") {
    const history h = contents(80, {.heads = 2, .kv_heads = 1, .head_dim = 6});
    const way w{"", form::attend, {80}, sash::serial{}};
    CHECK(difference_in_bits(rows_by<int8_rows>(w, sash::linear<>{}, h), rows_by<float>(w, sash::linear<>{}, h)) == "");
}
