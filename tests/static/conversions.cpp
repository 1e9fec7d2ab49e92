// Storage types convert at compile time, exactly one way and to nearest the other; views and partials are constexpr too.
#include <sash/partial.hpp>
#include <sash/rope.hpp>
#include <sash/view.hpp>

using namespace sash;

namespace {

static_assert(float16(1.0f).bits == 0x3c00 && float16(-2.0f).bits == 0xc000 && float16(65504.0f).bits == 0x7bff);
static_assert(float16(65520.0f).bits == 0x7c00 &&
              float16(65519.0f).bits == 0x7bff);  // overflow begins half a step above
static_assert(float16(1.0f + 1 / 2048.0f).bits == 0x3c00 &&
              float16(1.0f + 3 / 2048.0f).bits == 0x3c02);  // ties to even
static_assert(float16(0x1p-24f).bits == 1 && float16(0x1p-25f).bits == 0 &&
              float16(0x1.8p-25f).bits == 1);  // subnormal
static_assert(bfloat16(1.0f).bits == 0x3f80 && bfloat16(1.0f + 1 / 256.0f).bits == 0x3f80);
static_assert(bfloat16(1.0f + 3 / 256.0f).bits == 0x3f82);

template <class Half>
constexpr bool every_pattern_returns() {
    for (std::uint32_t bits = 0; bits < 0x10000; bits += 7) {  // a seventh of them: the whole set is a run-time test's
        Half h{};
        h.bits = static_cast<std::uint16_t>(bits);
        const float wide = h;
        if (wide == wide && Half(wide).bits != h.bits) return false;
    }
    return true;
}
static_assert(every_pattern_returns<float16>() && every_pattern_returns<bfloat16>());

constexpr float numbers[6] = {1, 2, 3, 4, 5, 6};
constexpr input rows(numbers, 3, 2);
static_assert(rows.dim == 1 && rows.token_stride == 2 && rows.head_stride == 1 && !rows.empty());
static_assert(input(numbers, 0, 2, 1).empty());

// Two partials of one key each, merged: the mean of their values; and the empty partial is neutral.
constexpr float merged() {
    float left[1] = {}, right[1] = {}, none[1] = {}, out[1] = {};
    const float two[1] = {2}, four[1] = {4};
    partial a{left}, b{right};
    a.push(0.5f, two);
    b.push(0.5f, four);
    a.merge(b);
    a.merge(partial{none});
    a.finish(out);
    return out[0];
}
static_assert(merged() == 3);

constexpr float turned_by_a_quarter() {
    float a = 1, b = 0;
    turn_pair(a, b, 0.0f, 1.0f);
    return 10 * a + b;
}
static_assert(turned_by_a_quarter() == 1);
static_assert(pair_second(rotary_layout::half_split, 1, 4) == 5 && pair_second(rotary_layout::interleaved, 1, 4) == 3);

}  // namespace
