// Prefill on one thread, as a fraction of the multiply-adds that the same process measured, visible pairs only.
#include "goal.hpp"

namespace goals {
namespace {

/// Tokens of type Number, stored as Element.
template <class Element, class Number = float>
figure of_peak(const effort& most, int64 n, int64 dim, double (*peak)()) {
    bench::prompt_of<Number> tokens(bench::quarter_layer(dim), n);
    bench::prefill<Element, sash::full, Number> run(tokens, {});
    const double work = bench::flops(tokens.shape, bench::visible_pairs(n, n));
    return bench::of_peak(most, work, peak, [&] { return run.seconds(); });
}

figure bfloat16_of_peak(const effort& most, int64 n, int64 dim) {
    if (machine::peak_bfloat16_flops() == 0) return bench::not_measured("this build has no bfloat16 dot products");
    return of_peak<sash::bfloat16, sash::bfloat16>(most, n, dim, machine::peak_bfloat16_flops);
}

figure bfloat16_over_float(const effort& most, int64 n, int64 dim) {
    if (machine::peak_bfloat16_flops() == 0) return bench::not_measured("this build has no bfloat16 dot products");
    bench::prompt wide_tokens(bench::quarter_layer(dim), n);
    bench::prompt_of<sash::bfloat16> narrow_tokens(bench::quarter_layer(dim), n);
    bench::prefill<float, sash::full> wide(wide_tokens, {});
    bench::prefill<sash::bfloat16, sash::full, sash::bfloat16> narrow(narrow_tokens, {});
    const auto [wide_seconds, narrow_seconds] = bench::in_turn(
        most, [&] { return wide.seconds(); }, [&] { return narrow.seconds(); });
    return bench::ratio(wide_seconds, narrow_seconds);
}

std::string at(int64 dim, int64 n) { return "d" + std::to_string(dim) + " n" + std::to_string(n); }

}  // namespace

std::vector<goal> float_prefill_goals(const std::string& build) {
    std::vector<goal> rows;
    for (const int64 dim : {128, 64})
        for (const int64 n : {512, 2048, 4096}) {
            const bool is_wide = dim == 128;
            const double must = n == 512 ? 0.65 : is_wide ? 0.75 : 0.72, aim = n == 512 ? 0.78 : is_wide ? 0.88 : 0.85;
            rows.push_back({build + "prefill float " + at(dim, n) + ", of FMA peak", better::higher, must, aim,
                            [=](const effort& most) { return of_peak<float>(most, n, dim, machine::peak_flops); }});
        }
    return rows;
}

std::vector<goal> narrow_prefill_goals() {
    std::vector<goal> rows;
    for (const int64 dim : {128, 64})
        for (const int64 n : {2048, 4096}) {
            rows.push_back(
                {"prefill float16 " + at(dim, n) + ", of FMA peak", better::higher, 0.68, 0.80,
                 [=](const effort& most) { return of_peak<sash::float16>(most, n, dim, machine::peak_flops); }});
            rows.push_back({"prefill bfloat16 " + at(dim, n) + ", of bfloat16 peak", better::higher, 0.62, 0.78,
                            [=](const effort& most) { return bfloat16_of_peak(most, n, dim); }});
            rows.push_back({"prefill bfloat16 " + at(dim, n) + ", × float", better::higher, 1.5, 1.85,
                            [=](const effort& most) { return bfloat16_over_float(most, n, dim); }});
        }
    return rows;
}

}  // namespace goals
