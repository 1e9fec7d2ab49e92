#pragma once
// What the programs of Google Benchmark have in common: thread CPU time, and counters as fractions of what the same
// process measured for this machine.
#include "layer.hpp"

#include <benchmark/benchmark.h>

namespace bench {

/// Measured once a program, the best of a few.
struct machine_peaks {
    double flops = 0, bandwidth = 0;

    machine_peaks() {
        for (int i = 0; i < 5; ++i) {
            flops = std::max(flops, machine::peak_flops());
            bandwidth = std::max(bandwidth, machine::read_bandwidth());
        }
    }
    static const machine_peaks& here() {
        static const machine_peaks measured;
        return measured;
    }
};

/// Runs f() for as long as Google Benchmark wants, in thread CPU time; returns the seconds of one call.
template <class F>
double measure(benchmark::State& state, F&& f) {
    f();
    double seconds = 0;
    for (auto _ : state) {
        const double once = machine::seconds_of(f);
        state.SetIterationTime(once);
        seconds += once;
    }
    return seconds / static_cast<double>(state.iterations());
}

/// GFLOP/s of visible pairs, and the fraction of the peak of fp32 multiply-adds that they are.
inline void count_flops(benchmark::State& state, double flops, double seconds) {
    state.counters["GFLOP/s"] = flops / seconds / 1e9;
    state.counters["of_peak"] = flops / seconds / machine_peaks::here().flops;
}

/// GB/s of keys, values or states, and the fraction of the read bandwidth that they are.
inline void count_bytes(benchmark::State& state, double bytes, double seconds) {
    state.counters["GB/s"] = bytes / seconds / 1e9;
    state.counters["of_bandwidth"] = bytes / seconds / machine_peaks::here().bandwidth;
}

inline void count_tokens(benchmark::State& state, int64 tokens, double seconds) {
    state.counters["tokens/s"] = static_cast<double>(tokens) / seconds;
}

/// Where Google Benchmark takes the time itself.
inline void count_rate(benchmark::State& state, const char* name, double per_iteration) {
    state.counters[name] = benchmark::Counter(per_iteration, benchmark::Counter::kIsIterationInvariantRate);
}

}  // namespace bench
