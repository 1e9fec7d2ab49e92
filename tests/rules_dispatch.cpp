// Rule 32: what a program may run is asked of the feature, of its sub-features and of the operating system. The
// function under test is the one of examples/08_dispatch: it is given machines that are described here, bit by bit as
// the processors' manuals number them.
#include "../examples/08_dispatch/choose.hpp"
#include "support/catch.hpp"

#include <random>
#include <string>
#include <vector>

namespace {

using dispatch::cpu_words;
using dispatch::isa;

enum class word { leaf_1_ecx, leaf_7_ebx, xcr0 };

// Every bit that code of an instruction set depends on.
struct fact {
    const char* name;
    word where;
    int bit;
    isa needed_by;  // the least instruction set that needs it
};
const fact facts[] = {
    {"FMA", word::leaf_1_ecx, 12, isa::avx2},
    {"POPCNT", word::leaf_1_ecx, 23, isa::avx2},
    {"OSXSAVE", word::leaf_1_ecx, 27, isa::avx2},
    {"AVX", word::leaf_1_ecx, 28, isa::avx2},
    {"F16C", word::leaf_1_ecx, 29, isa::avx2},
    {"AVX2", word::leaf_7_ebx, 5, isa::avx2},
    {"the system saves xmm", word::xcr0, 1, isa::avx2},
    {"the system saves ymm", word::xcr0, 2, isa::avx2},
    {"AVX512F", word::leaf_7_ebx, 16, isa::avx512},
    {"AVX512DQ", word::leaf_7_ebx, 17, isa::avx512},
    {"AVX512CD", word::leaf_7_ebx, 28, isa::avx512},
    {"AVX512BW", word::leaf_7_ebx, 30, isa::avx512},
    {"AVX512VL", word::leaf_7_ebx, 31, isa::avx512},
    {"the system saves masks", word::xcr0, 5, isa::avx512},
    {"the system saves the upper halves of zmm0 to 15", word::xcr0, 6, isa::avx512},
    {"the system saves zmm16 to 31", word::xcr0, 7, isa::avx512},
};

void set(cpu_words& cpu, const fact& f, bool on) {
    const std::uint64_t bit = std::uint64_t{1} << f.bit;
    const auto put = [&](auto& w) { w = static_cast<std::decay_t<decltype(w)>>(on ? w | bit : w & ~bit); };
    if (f.where == word::leaf_1_ecx) put(cpu.leaf_1_ecx);
    if (f.where == word::leaf_7_ebx) put(cpu.leaf_7_ebx);
    if (f.where == word::xcr0) put(cpu.xcr0);
}

cpu_words with_all_of(isa most) {
    cpu_words cpu;
    for (const fact& f : facts)
        if (f.needed_by <= most) set(cpu, f, true);
    return cpu;
}

const cpu_words every_bit{~std::uint32_t{0}, ~std::uint32_t{0}, ~std::uint64_t{0}};

}  // namespace

TEST_CASE("R32: all that an instruction set needs is enough, and nothing else matters") {
    CHECK(choose(cpu_words{}) == isa::baseline);
    CHECK(choose(with_all_of(isa::avx2)) == isa::avx2);
    CHECK(choose(with_all_of(isa::avx512)) == isa::avx512);
    CHECK(choose(every_bit) == isa::avx512);

    cpu_words others = every_bit;  // a machine with everything beside what is asked for
    for (const fact& f : facts) set(others, f, false);
    CHECK(choose(others) == isa::baseline);
}

TEST_CASE("R32: one missing sub-feature, or state that the operating system does not save, is one step down") {
    for (const fact& f : facts) {
        cpu_words cpu = every_bit;
        set(cpu, f, false);
        CAPTURE(f.name);
        CHECK(choose(cpu) == (f.needed_by == isa::avx2 ? isa::baseline : isa::avx2));
    }
}

TEST_CASE("R32: features that stand on missing ones do not count") {
    cpu_words cpu = with_all_of(isa::avx512);
    cpu.xcr0 = 0xe7 & ~std::uint64_t{0x04};  // zmm is saved, ymm is not
    CHECK(choose(cpu) == isa::baseline);
    cpu = with_all_of(isa::avx512);
    set(cpu, {"OSXSAVE", word::leaf_1_ecx, 27, isa::avx2}, false);  // then XCR0 was never read, whatever it says
    CHECK(choose(cpu) == isa::baseline);
}

TEST_CASE("R32: machines that are sold") {
    // CPUID words as such processors give them, and XCR0 of a system that saves all they have, where nothing else is
    // said.
    struct machine {
        const char* name;
        cpu_words cpu;
        isa expected;
    };
    const machine machines[] = {
        {"Nehalem", {0x009ce3bd, 0x00000000, 0x00}, isa::baseline},
        {"Sandy Bridge: AVX without AVX2", {0x1fbae3ff, 0x00000000, 0x07}, isa::baseline},
        {"Haswell", {0x7ffafbff, 0x000027ab, 0x07}, isa::avx2},
        {"Haswell, started with noxsave", {0x77fafbff, 0x000027ab, 0x00}, isa::baseline},
        {"Knights Landing: AVX-512F and CD alone", {0x7ff8f3bf, 0x1c0d23ab, 0xe7}, isa::avx2},
        {"Skylake server", {0x7ffefbff, 0xd39ffffb, 0xe7}, isa::avx512},
        {"Skylake server under a hypervisor without zmm", {0xfffefbff, 0xd39ffffb, 0x07}, isa::avx2},
        {"Zen 2", {0x7ed8320b, 0x219c91a9, 0x07}, isa::avx2},
    };
    for (const machine& m : machines) {
        CAPTURE(m.name);
        CHECK(choose(m.cpu) == m.expected);
    }
}

TEST_CASE("R32: any combination of bits") {
    constexpr unsigned seed = 32;
    std::mt19937_64 random(seed);
    CAPTURE(seed);
    int wrong = 0, seen[3] = {};
    for (int n = 0; n < 20000; ++n) {
        // Mostly complete machines: among random words hardly one would have all bits.
        cpu_words cpu{static_cast<std::uint32_t>(random()), static_cast<std::uint32_t>(random()), random()};
        for (const fact& f : facts) set(cpu, f, random() % 16 != 0);
        isa expected = isa::avx512;
        for (const fact& f : facts) {
            cpu_words without = cpu;
            set(without, f, false);
            const bool has = without.leaf_1_ecx != cpu.leaf_1_ecx || without.leaf_7_ebx != cpu.leaf_7_ebx ||
                             without.xcr0 != cpu.xcr0;
            if (!has && f.needed_by <= expected) expected = f.needed_by == isa::avx2 ? isa::baseline : isa::avx2;
        }
        wrong += choose(cpu) != expected;
        ++seen[static_cast<int>(expected)];
    }
    CHECK(wrong == 0);
    for (const int count : seen) CHECK(count > 1000);
}

#if defined(__x86_64__)
TEST_CASE("R32: this machine, as the compiler's own function sees it") {
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512cd");
    CHECK(choose(dispatch::this_machine()) == (avx512 ? isa::avx512 : avx2 ? isa::avx2 : isa::baseline));
}
#endif
