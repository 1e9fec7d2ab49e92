#pragma once
/// \file
/// Chooses the next token from its logits.
#include "dense.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

namespace smollm2 {

struct sampler {
    float temperature = 0.8f;  ///< 0: always the likeliest token
    int among = 40;            ///< the likeliest so many tokens take part
    std::mt19937_64 random{1};

    template <class Row>
    int operator()(const Row& logits) {
        index likeliest = 0;
        const float most = logits.maxCoeff(&likeliest);
        if (temperature == 0 || among == 1) return static_cast<int>(likeliest);
        order_.resize(static_cast<std::size_t>(logits.size()));
        std::iota(order_.begin(), order_.end(), 0);
        const auto count = std::min<std::ptrdiff_t>(among, logits.size());
        std::partial_sort(order_.begin(), order_.begin() + count, order_.end(),
                          [&](int a, int b) { return logits[a] > logits[b]; });
        std::vector<double> weights(static_cast<std::size_t>(count));
        for (std::size_t i = 0; i < weights.size(); ++i)
            weights[i] = std::exp(static_cast<double>((logits[order_[i]] - most) / temperature));
        double rest =
            std::accumulate(weights.begin(), weights.end(), 0.0) * static_cast<double>(random() >> 11) * 0x1p-53;
        std::size_t chosen = 0;
        while (chosen + 1 < weights.size() && (rest -= weights[chosen]) >= 0) ++chosen;
        return order_[chosen];
    }

private:
    std::vector<int> order_;
};

}  // namespace smollm2
