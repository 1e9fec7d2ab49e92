#pragma once
// Other work comes and goes on a machine: what is compared is measured in turn, and the medians of ratios are reported.
#include "machine.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

namespace bench {

/// How long one figure may take: rounds are added until the seconds are spent, or there are enough.
struct effort {
    double seconds = 1.5;
    int least_rounds = 5;
    int most_rounds = 25;
};

/// The median of some samples, and the middle half of them.
struct figure {
    double median = 0, low = 0, high = 0;
    int samples = 0;
    std::string note = {};  ///< what bounds it, what was chosen; or why it could not be measured, with no samples
};

inline figure not_measured(std::string reason) { return {.note = std::move(reason)}; }

inline figure summary(std::vector<double> samples) {
    if (samples.empty()) return not_measured("no samples");
    std::sort(samples.begin(), samples.end());
    const auto at = [&](double part) {
        const double place = part * static_cast<double>(samples.size() - 1);
        const auto left = static_cast<std::size_t>(place);
        const auto right = std::min(left + 1, samples.size() - 1);
        return samples[left] + (place - std::floor(place)) * (samples[right] - samples[left]);
    };
    return {at(0.5), at(0.25), at(0.75), static_cast<int>(samples.size())};
}

/// Calls the functions in turn, round for round; each returns what it measured. Returns [function][round]. The first
/// round is there to warm up, and is dropped.
template <class... F>
std::array<std::vector<double>, sizeof...(F)> in_turn(const effort& most, F&&... measure) {
    std::array<std::vector<double>, sizeof...(F)> samples;
    const double start = machine::wall_seconds();
    for (int round = -1; round < most.most_rounds; ++round) {
        if (round >= most.least_rounds && machine::wall_seconds() - start > most.seconds) break;
        const double now[] = {measure()...};
        for (std::size_t i = 0; i < sizeof...(F) && round >= 0; ++i) samples[i].push_back(now[i]);
    }
    return samples;
}

/// numerator[i] / denominator[i], times a factor.
inline figure ratio(const std::vector<double>& numerator, const std::vector<double>& denominator, double factor = 1) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < numerator.size(); ++i) ratios.push_back(factor * numerator[i] / denominator[i]);
    return summary(std::move(ratios));
}

/// Work per second as a fraction of a peak that is measured beside every sample.
template <class Peak, class Seconds>
figure of_peak(const effort& most, double work, Peak&& peak, Seconds&& seconds) {
    const auto [peaks, times] = in_turn(most, peak, seconds);
    std::vector<double> fractions;
    for (std::size_t i = 0; i < times.size(); ++i) fractions.push_back(work / times[i] / peaks[i]);
    return summary(std::move(fractions));
}

}  // namespace bench
