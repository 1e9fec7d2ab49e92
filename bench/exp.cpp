// Powers of two in registers, beside the exponentials of xsimd, Eigen and the C library: numbers per second.
#include "suite.hpp"

#include <sash/cpu/exp.hpp>

#include <Eigen/Core>

#include <cmath>

namespace {

using sash::cpu::floats;

constexpr int count = 4096;  // fits the first cache

struct numbers {
    alignas(64) float x[count], y[count];

    numbers() {
        const std::vector<float> from = bench::noise(count, 1);
        for (int i = 0; i < count; ++i) x[i] = -std::fabs(from[static_cast<std::size_t>(i)]) * 5;
    }
};

/// f fills y from x.
template <class F>
void measure(benchmark::State& state, F&& f) {
    numbers n;
    for (auto _ : state) {
        f(n);
        benchmark::DoNotOptimize(n.y);
        benchmark::ClobberMemory();
    }
    bench::count_rate(state, "exp/s", count);
}

template <class F>
void each_register(benchmark::State& state, F&& f) {
    measure(state, [&](numbers& n) {
        for (std::size_t i = 0; i < count; i += floats::size) sash::cpu::store(n.y + i, f(sash::cpu::load(n.x + i)));
    });
}

void exp2_of_sash(benchmark::State& state) {
    each_register(state, [](floats x) { return sash::cpu::exp2(x); });
}
void tanh_of_sash(benchmark::State& state) {
    each_register(state, [](floats x) { return sash::cpu::tanh(x); });
}
void exp_of_xsimd(benchmark::State& state) {
    each_register(state, [](floats x) { return xsimd::exp(x); });
}
void exp_of_eigen(benchmark::State& state) {
    measure(state, [](numbers& n) {
        Eigen::Map<Eigen::ArrayXf, Eigen::Aligned64>(n.y, count) =
            Eigen::Map<const Eigen::ArrayXf, Eigen::Aligned64>(n.x, count).exp();
    });
}
void exp_of_the_c_library(benchmark::State& state) {
    measure(state, [](numbers& n) {
        for (int i = 0; i < count; ++i) n.y[i] = std::exp(n.x[i]);
    });
}

}  // namespace

BENCHMARK(exp2_of_sash);
BENCHMARK(tanh_of_sash);
BENCHMARK(exp_of_xsimd);
BENCHMARK(exp_of_eigen);
BENCHMARK(exp_of_the_c_library);

BENCHMARK_MAIN();
