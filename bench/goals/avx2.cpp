// goals_avx2 ROW SECONDS LEAST MOST: one row of float prefill, measured by a build for another instruction set against
// its own peak. `goals` calls it and knows what the row must come to.
#include "goal.hpp"

#include <cstdio>
#include <cstdlib>

int main(int count, char** values) {
    const auto rows = goals::float_prefill_goals("");
    const std::size_t row = count == 5 ? std::strtoul(values[1], nullptr, 10) : rows.size();
    if (row >= rows.size()) return 2;
    const bench::figure f = rows[row].measure(
        {.seconds = std::atof(values[2]), .least_rounds = std::atoi(values[3]), .most_rounds = std::atoi(values[4])});
    std::printf("%g %g %g %d\n", f.median, f.low, f.high, f.samples);
    return 0;
}
