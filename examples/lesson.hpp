// What the lessons share: numbers to attend to, and checks that decide the exit code.
#pragma once

#include <sash/config.hpp>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <random>
#include <span>
#include <vector>

namespace lesson {

using sash::int64;

// Normally distributed numbers, the same on every run: what queries, keys and values of a normalised model look like.
inline std::vector<float> numbers(int64 count, unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    std::vector<float> drawn(static_cast<std::size_t>(count));
    for (float& x : drawn) x = normal(generator);
    return drawn;
}

// The largest |a - b|; infinite where the lengths differ or a difference is no number.
template <class A, class B>
double largest_difference(const A& a, const B& b) {
    double largest = a.size() == b.size() ? 0 : std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
        const double d = std::abs(double(a[i]) - double(b[i]));
        largest = d >= 0 ? std::max(largest, d) : std::numeric_limits<double>::infinity();
        if (std::isinf(largest)) break;
    }
    return largest;
}

// One line of text and numbers.
template <class... Parts>
void say(const Parts&... parts) {
    (std::cout << ... << parts) << '\n';
}

inline int failures = 0;

inline void expect(bool good, const char* what) {
    say(good ? "  ok    " : "  FAIL  ", what);
    failures += good ? 0 : 1;
}

inline void expect_near(double difference, double most, const char* what) {
    const bool good = difference <= most;
    std::cout.precision(2);
    say(good ? "  ok    " : "  FAIL  ", what, ": ", difference, " (at most ", most, ")");
    failures += good ? 0 : 1;
}

// For `return` of main.
inline int exit_code() { return failures == 0 ? 0 : 1; }

}  // namespace lesson
