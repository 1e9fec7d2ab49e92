#pragma once
// Comparing with golden values, and feeding a case in calls of different lengths.
#include "golden.hpp"

#include <sash/view.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

namespace golden {

// The files beside the tests; `source` is the test's __FILE__.
inline std::vector<test_case> read_beside(const std::string& source, const std::string& name) {
    return read(source.substr(0, source.find_last_of("/\\") + 1) + "golden/" + name + ".txt");
}

// |a - b| <= absolute + relative |b|
struct tolerance {
    double absolute = 1e-6, relative = 1e-5;
    tolerance times(double factor) const { return {absolute * factor, relative * factor}; }
};
constexpr tolerance of_fp32;
constexpr tolerance of_double{1e-8, 1e-10};  // the files give eight decimals

// Empty when every number agrees, else a sentence about the worst one.
template <class Number>
std::string disagreement(const std::vector<Number>& got, const tensor& expected, tolerance within = of_fp32) {
    if (got.size() != expected.values.size()) return "sizes differ";
    double worst = 1;
    std::string sentence;
    for (std::size_t i = 0; i < got.size(); ++i) {
        const double a = got[i], b = expected.values[i];
        const double excess = a == b ? 0 : std::abs(a - b) / (within.absolute + within.relative * std::abs(b));
        if (excess <= worst) continue;  // NaN goes on
        worst = std::isnan(excess) ? HUGE_VAL : excess;
        sentence = "element " + std::to_string(i) + ": " + std::to_string(a) + " instead of " + std::to_string(b) +
                   ", off by " + std::to_string(worst) + " tolerances";
    }
    return sentence;
}

inline double largest(const tensor& t) {
    double most = 0;
    for (const double x : t.values) most = std::max(most, std::abs(x));
    return most;
}

// How many tokens each call takes: all, one, and an uneven sequence that crosses blocks and pieces.
inline std::vector<std::vector<std::int64_t>> cuts_of(std::int64_t tokens) {
    const std::int64_t uneven[] = {3, 1, 9, 1, 6, 20, 67, 2, 130};
    std::vector<std::vector<std::int64_t>> cuts{
        {tokens}, std::vector<std::int64_t>(static_cast<std::size_t>(tokens), 1), {}};
    std::int64_t done = 0;
    for (std::size_t i = 0; done < tokens; ++i) {
        cuts[2].push_back(std::min(uneven[i % std::size(uneven)], tokens - done));
        done += cuts[2].back();
    }
    return cuts;
}

// Rows [first, first + count) of a tensor [tokens, heads, dim] or [tokens, heads].
inline sash::input rows(const std::vector<float>& data, const tensor& t, std::int64_t first, std::int64_t count) {
    const std::int64_t heads = t.extent(1), dim = t.shape.size() > 2 ? t.extent(2) : 1;
    return {data.data() + first * heads * dim, count, heads, dim};
}
inline sash::output rows(std::vector<float>& data, const tensor& t, std::int64_t first, std::int64_t count) {
    return {data.data() + first * t.extent(1) * t.extent(2), count, t.extent(1), t.extent(2)};
}

}  // namespace golden
