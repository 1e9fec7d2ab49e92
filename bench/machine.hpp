#pragma once
// What this machine can do, measured in the same process as what is compared with it: multiply-adds in registers, and
// bytes read from memory. Benchmarks report fractions of these, never bare times.
#include <sash/cpu/simd.hpp>
#include <sash/memory.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <fstream>
#include <span>
#include <string>
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace machine {

/// CPU time of the calling thread, in seconds: other work on the machine does not count.
inline double thread_seconds() {
    std::timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

inline double wall_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Thread CPU time of one call of f.
template <class F>
double seconds_of(F&& f) {
    const double start = thread_seconds();
    f();
    return thread_seconds() - start;
}

template <class F>
double wall_seconds_of(F&& f) {
    const double start = wall_seconds();
    f();
    return wall_seconds() - start;
}

/// The value counts as used, so that no loop that made it is dropped.
template <class T>
void keep(const T& value) {
#if defined(__GNUC__)
    asm volatile("" : : "m"(value) : "memory");
#else
    static volatile char sink;
    sink = reinterpret_cast<const char&>(value);
#endif
}

/// The model name that the operating system gives.
inline std::string processor() {
    std::ifstream info("/proc/cpuinfo");
    for (std::string line; std::getline(info, line);)
        if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
    return "unknown processor";
}

// -------------------------------------------------------------------------------------------- arithmetic, in registers

/// Independent sums: enough that the units never wait for one of them.
inline constexpr int chains = sash::cpu::registers<sash::build::here> == 32 ? 24 : 12;

/// sum = step(sum) in each of the chains, `rounds` times. A function of its own, or compilers run out of registers.
template <class Register, class Step>
[[gnu::noinline]] void run_chains(Register start, int rounds, Step step) {
    Register sum[chains];
    for (Register& s : sum) s = start;
    for (int i = 0; i < rounds; ++i)
#pragma GCC unroll 24
        for (int j = 0; j < chains; ++j) sum[j] = step(sum[j]);
    Register all = sum[0];
    for (int j = 1; j < chains; ++j) all = all + sum[j];
    keep(all);
}

/// Operations per second, the best of three runs of about a millisecond; a step is `operations` of them.
template <class Register, class Step>
double rate(int operations, Register start, Step step) {
    constexpr int rounds = 300000 / (chains / 12);
    double best = 1e30;
    for (int i = 0; i < 3; ++i) best = std::min(best, seconds_of([&] { run_chains(start, rounds, step); }));
    return static_cast<double>(operations) * rounds * chains / best;
}

/// fp32 multiply-adds of the instruction set this file is compiled for, two operations each.
inline double peak_flops() {
    using sash::cpu::floats;
    const floats factor(0.999f), term(0.001f);
    return rate(2 * static_cast<int>(floats::size), floats(1.0f),
                [factor, term](floats sum) { return sash::cpu::fma(sum, factor, term); });
}

/// Dot products of bfloat16 pairs, accumulated in fp32; 0 where the CPU has no instruction for them.
inline double peak_bfloat16_flops() {
#if defined(__AVX512BF16__)
    const auto a = (__m512bh)_mm512_set1_epi32(0x3f003f00), b = (__m512bh)_mm512_set1_epi32(0x3a003a00);
    return rate(64, _mm512_setzero_ps(), [a, b](__m512 sum) { return _mm512_dpbf16_ps(sum, a, b); });
#else
    return 0;
#endif
}

/// Dot products of four bytes, accumulated in 32 bits; 0 where the CPU has no instruction for them.
inline double peak_int8_operations() {
#if defined(__AVX512VNNI__)
    const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-1);
    return rate(128, _mm512_setzero_si512(), [a, b](__m512i sum) {
        sum = _mm512_dpbusd_epi32(sum, a, b);
        asm volatile(
            ""
            : "+v"(sum));  // in this order: g++ 12 would keep two copies of every sum, and run out of registers
        return sum;
    });
#else
    return 0;
#endif
}

// ------------------------------------------------------------------------------------------------------ reading memory

/// Memory on huge pages, as caches of keys and values are; handed back at the end of the program only. The first touch
/// of a page takes longer than anything that is measured in it.
class huge_memory {
public:
    explicit huge_memory(std::size_t bytes)
        : bytes_(bytes), data_(static_cast<std::byte*>(sash::detail::allocate<sash::build::here>({}, bytes))) {}
    huge_memory(const huge_memory&) = delete;
    ~huge_memory() { sash::detail::release<sash::build::here>({}, data_, bytes_); }

    std::byte* data() const { return data_; }
    std::size_t size() const { return bytes_; }

private:
    std::size_t bytes_;
    std::byte* data_;
};

/// The next slice of memory that is far larger than any cache: none of the slice is in a cache any more.
inline std::span<const float> cold_slice() {
    constexpr std::size_t slices = 4, slice = (std::size_t{128} << 20) / sizeof(float);
    static const huge_memory memory(slices * slice * sizeof(float));
    static std::size_t next = 0;
    auto* const data = reinterpret_cast<float*>(memory.data());
    if (next == 0) std::fill(data, data + slices * slice, 1.0f);
    return {data + next++ % slices * slice, slice};
}

/// Adds up a piece of memory, from end to end or as two streams side by side.
template <std::size_t Streams = 1>
void read_all(std::span<const float> memory) {
    using sash::cpu::floats;
    constexpr std::size_t registers = 8 / Streams, line = registers * floats::size;
    const std::size_t part = memory.size() / Streams;
    floats sum[8];
    for (auto& s : sum) s = floats(0.0f);
    for (std::size_t i = 0; i + line <= part; i += line)
#pragma GCC unroll 2
        for (std::size_t s = 0; s < Streams; ++s)
#pragma GCC unroll 8
            for (std::size_t j = 0; j < registers; ++j)
                sum[s * registers + j] =
                    sum[s * registers + j] + sash::cpu::load(memory.data() + s * part + i + j * floats::size);
    floats all = sum[0];
    for (int j = 1; j < 8; ++j) all = all + sum[j];
    keep(all);
}

/// Bytes per second that one thread reads from memory, now, from end to end: what the goals call the read bandwidth.
/// Two streams are a little faster on some machines.
template <std::size_t Streams = 1>
double read_bandwidth() {
    const std::span<const float> slice = cold_slice();
    return static_cast<double>(slice.size_bytes()) / seconds_of([slice] { read_all<Streams>(slice); });
}

// --------------------------------------------------------------------------------------------------------- two threads

#if defined(_OPENMP)
/// How many times faster two threads do twice a piece of work than one does: 2 where two cores are free, less where
/// other work takes part of them. `work(t)` does the piece of thread t.
template <class F>
double scaling_of_two(F&& work) {
    const double alone = wall_seconds_of([&] {
        work(0);
        work(1);
    });
    return alone / wall_seconds_of([&] {
#pragma omp parallel num_threads(2)
               work(omp_get_thread_num());
           });
}

/// The same of multiply-adds in registers, about 5 ms of them: nothing but a core is needed for these.
inline double scaling_of_arithmetic() {
    using sash::cpu::floats;
    return scaling_of_two([](int) {
        const floats factor(0.999f), term(0.001f);
        run_chains(floats(1.0f), 1500000 / (chains / 12),
                   [factor, term](floats sum) { return sash::cpu::fma(sum, factor, term); });
    });
}

/// The same of reading memory: what two threads may take of it at most.
inline double scaling_of_reading() {
    const std::span<const float> slice[2] = {cold_slice(), cold_slice()};
    return scaling_of_two([&](int t) { read_all(slice[t]); });
}
#endif

}  // namespace machine
