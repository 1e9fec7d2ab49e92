#pragma once
// Which instruction set may this machine run? Three questions, and a program that leaves one out crashes somewhere:
//
//     the feature          CPUID says AVX2, AVX-512F, …
//     the sub-features     everything the compiler was allowed to use: FMA and F16C beside AVX2 (some processors have
//                          AVX2 without FMA), BW, DQ, VL and CD beside AVX-512F (the first ones had only some)
//     the operating system it must save the wide registers when it switches threads: XCR0 says which it does; a
//                          hypervisor or a kernel option may leave them out although the processor has them
//
// The answer is a pure function of three words, so that machines nobody has here can be tried in a test.
//
// Why not __builtin_cpu_supports? Those of g++ and clang++ ask the operating system too, but not every version knows
// every name ("f16c" is new), and they cannot be asked about another machine.
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace dispatch {

enum class isa { baseline, avx2, avx512 };  // each includes the ones before

struct cpu_words {
    std::uint32_t leaf_1_ecx = 0;  // CPUID(1).ECX
    std::uint32_t leaf_7_ebx = 0;  // CPUID(7, 0).EBX
    std::uint64_t xcr0 = 0;        // XGETBV(0): the registers that the operating system saves
};

constexpr isa choose(const cpu_words& cpu) {
    const auto bit = [](int n) { return std::uint64_t{1} << n; };
    const auto has = [](std::uint64_t word, std::uint64_t bits) { return (word & bits) == bits; };
    const std::uint64_t osxsave = bit(27), avx = bit(28), fma = bit(12), f16c = bit(29), popcnt = bit(23);
    const std::uint64_t avx2 = bit(5);
    const std::uint64_t avx512 = bit(16) | bit(17) | bit(28) | bit(30) | bit(31);  // F, DQ, CD, BW, VL
    const std::uint64_t ymm = bit(1) | bit(2), zmm = bit(5) | bit(6) | bit(7);     // zmm: masks and both parts

    if (!has(cpu.leaf_1_ecx, osxsave | avx | fma | f16c | popcnt) || !has(cpu.leaf_7_ebx, avx2) || !has(cpu.xcr0, ymm))
        return isa::baseline;
    if (!has(cpu.leaf_7_ebx, avx512) || !has(cpu.xcr0, zmm)) return isa::avx2;
    return isa::avx512;
}

// The words of the machine that runs this; all zero where it is no x86.
inline cpu_words this_machine() {
    cpu_words cpu;
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d)) cpu.leaf_1_ecx = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) cpu.leaf_7_ebx = b;
    if (cpu.leaf_1_ecx >> 27 & 1) {  // OSXSAVE: without it the next instruction does not exist
        asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
        cpu.xcr0 = std::uint64_t{d} << 32 | a;
    }
#endif
    return cpu;
}

}  // namespace dispatch
