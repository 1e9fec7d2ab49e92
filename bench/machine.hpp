#pragma once
// What this machine can do, measured in the same process as what is compared with it: multiply-adds in registers, and bytes
// read from memory. Benchmarks report fractions of these, never bare times.
#include <sash/cpu/simd.hpp>
#include <sash/memory.hpp>

#include <algorithm>
#include <ctime>
#include <span>

namespace machine {

/// CPU time of the calling thread, in seconds: other work on the machine does not count.
inline double thread_seconds() {
    std::timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// The shortest of `times` runs of f.
template <class F>
double seconds_of(int times, F&& f) {
    double best = 1e30;
    for (int i = 0; i < times; ++i) {
        const double start = thread_seconds();
        f();
        best = std::min(best, thread_seconds() - start);
    }
    return best;
}

inline volatile float sink = 0;  // results go here, so that no loop is dropped

/// fp32 operations per second of one thread: enough independent multiply-adds that the units never wait.
inline double peak_flops() {
    using sash::cpu::floats;
    constexpr int chains = sash::cpu::registers<sash::build::here> == 32 ? 24 : 12;
    constexpr int rounds = 1000000;
    const double seconds = seconds_of(5, [] {
        floats sum[chains];
        for (auto& s : sum) s = floats(1.0f);
        const floats factor(0.999f), term(0.001f);
        for (int i = 0; i < rounds; ++i)
#pragma GCC unroll 24
            for (int j = 0; j < chains; ++j) sum[j] = sash::cpu::fma(sum[j], factor, term);
        floats all = sum[0];
        for (int j = 1; j < chains; ++j) all = all + sum[j];
        float lane[floats::size];
        all.store_unaligned(lane);
        sink = lane[0];
    });
    return 2.0 * rounds * chains * floats::size / seconds;
}

/// Bytes per second that one thread reads from memory: a piece far larger than any cache, on huge pages where there are some,
/// as caches are.
inline double read_bandwidth() {
    using sash::cpu::floats;
    constexpr std::size_t count = std::size_t{192} << 20;
    auto* const data = static_cast<float*>(sash::detail::allocate<sash::build::here>({}, count * sizeof(float)));
    std::fill(data, data + count, 1.0f);
    const std::span<const float> memory(data, count);
    const double seconds = seconds_of(3, [memory] {
        floats sum[8];
        for (auto& s : sum) s = floats(0.0f);
        for (std::size_t i = 0; i + 8 * floats::size <= memory.size(); i += 8 * floats::size)
            for (std::size_t j = 0; j < 8; ++j) sum[j] = sum[j] + floats::load_unaligned(memory.data() + i + j * floats::size);
        floats all = sum[0];
        for (int j = 1; j < 8; ++j) all = all + sum[j];
        float lane[floats::size];
        all.store_unaligned(lane);
        sink = lane[0];
    });
    sash::detail::release<sash::build::here>({}, data, count * sizeof(float));
    return static_cast<double>(count * sizeof(float)) / seconds;
}

}  // namespace machine
