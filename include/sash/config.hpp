#pragma once
/// \file
/// Compiler facts, the build tag and the error hook. The only file with conditions on compilers.
///
/// A header-only library is compiled once per file that includes it, and a program may hold files built with different
/// flags (`-mavx2`, `-fopenmp`, `-fno-exceptions`, `-ffast-math`). The linker keeps ONE copy of an inline function of a
/// given name: perhaps the one that holds AVX-512 code, for the file that was to run on an old machine. So every
/// function of sash is either always inlined (SASH_INLINE), or a template whose first parameter is `build::here`, a tag
/// that differs wherever the flags differ: two builds never share a symbol that could hold different code.
#include <sash/version.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string_view>

#if !defined(_MSVC_LANG) && __cplusplus < 202002L
#error "sash needs C++20: compile with -std=c++20 or newer"
#endif

#if defined(__GNUC__)
#define SASH_INLINE [[gnu::always_inline]] inline
#define SASH_COLD [[gnu::cold, gnu::noinline]]
#define SASH_MAY_ALIAS [[gnu::may_alias]]
#else
#define SASH_INLINE inline
#define SASH_COLD
#define SASH_MAY_ALIAS
#endif

namespace sash {

using int64 = std::int64_t;

namespace build {

/// One bit for each fact of this file's flags that may change the code of a function.
inline constexpr std::uint64_t flags =
    0
#if defined(__SSE3__)
    | 1u << 0
#endif
#if defined(__SSSE3__)
    | 1u << 1
#endif
#if defined(__SSE4_1__)
    | 1u << 2
#endif
#if defined(__SSE4_2__)
    | 1u << 3
#endif
#if defined(__AVX__)
    | 1u << 4
#endif
#if defined(__F16C__)
    | 1u << 5
#endif
#if defined(__FMA__)
    | 1u << 6
#endif
#if defined(__AVX2__)
    | 1u << 7
#endif
#if defined(__AVX512F__)
    | 1u << 8
#endif
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512CD__)
    | 1u << 9
#endif
#if defined(__AVX512BF16__)
    | 1u << 10
#endif
#if defined(__AVX512VNNI__)
    | 1u << 11
#endif
#if defined(__BMI2__)
    | 1u << 12
#endif
#if defined(__BMI__)
    | 1u << 13
#endif
#if defined(__LZCNT__)  // an older processor runs it as another instruction: other numbers, no trap
    | 1u << 14
#endif
#if defined(__POPCNT__)
    | 1u << 15
#endif
#if defined(_OPENMP)
    | 1u << 16
#endif
#if defined(__cpp_exceptions)
    | 1u << 17
#endif
#if defined(__FAST_MATH__) || defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
    | 1u << 18
#endif
#if defined(NDEBUG)
    | 1u << 19
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    | 1u << 20
#endif
#if defined(__ARM_FEATURE_SVE)
    | 1u << 21
#endif
#if defined(__ARM_FEATURE_SVE2)
    | 1u << 22
#endif
#if defined(__ARM_FEATURE_DOTPROD)
    | 1u << 23
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    | 1u << 24
#endif
#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
    | 1u << 25
#endif
#if defined(__ARM_FEATURE_ATOMICS)
    | 1u << 26
#endif
    ;

/// How a file is built. `here` names it; it is the first template parameter of every function that is not always inlined.
template <std::uint64_t Flags>
struct tag {
    static constexpr bool has_openmp = (Flags & (1u << 16)) != 0;
    static constexpr bool has_exceptions = (Flags & (1u << 17)) != 0;
    static constexpr bool has_fast_math = (Flags & (1u << 18)) != 0;
};
using here = tag<flags>;

}  // namespace build

/// What sash throws: a wrong shape, stride, parameter or file. The message names the value and the limit. Nothing has
/// been written when it is thrown.
struct error : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

#if !defined(__cpp_exceptions)
/// With exceptions switched off the program defines this function; it must not return.
[[noreturn]] void on_error(std::string_view message);
#endif

namespace detail {

/// std::bit_cast, but always inlined: without optimisation that is a function, of which a program that links files for
/// different processors keeps any one.
template <class To, class From>
SASH_INLINE constexpr To bit_cast(From x) {
    return __builtin_bit_cast(To, x);
}

/// One part of a message: a text, a whole number or a real one.
struct message_part {
    enum { words, whole, real } kind;
    union {
        const char* text;
        int64 number;
        double value;
    };

    SASH_INLINE message_part(const char* s) : kind(words), text(s) {}
    SASH_INLINE message_part(int64 n) : kind(whole), number(n) {}
    SASH_INLINE message_part(double x) : kind(real), value(x) {}
};

/// What a part is passed as. Messages that differ in no more than the lengths of literals and the widths of numbers
/// share their code: a program checks some fifty things, and compiling a function for each took a sixth of the time.
SASH_INLINE const char* part_of(const char* text) { return text; }
SASH_INLINE int64 part_of(int64 n) { return n; }
SASH_INLINE int64 part_of(int n) { return n; }
SASH_INLINE int64 part_of(std::size_t n) { return static_cast<int64>(n); }
SASH_INLINE double part_of(double x) { return x; }
SASH_INLINE double part_of(float x) { return x; }

/// Puts a message together, without a heap, and reports it: throws sash::error, or calls on_error where exceptions are
/// off.
template <class Build>
[[noreturn]] SASH_COLD void report(const message_part* parts, int count) {
    char text[384];
    std::size_t length = 0;
    const auto add = [&](const char* s) {
        while (*s != '\0' && length + 1 < sizeof text) text[length++] = *s++;
    };
    add("sash: ");
    for (const message_part* part = parts; part < parts + count; ++part) {
        char digits[40] = "";
        if (part->kind == message_part::whole)
            std::snprintf(digits, sizeof digits, "%lld", static_cast<long long>(part->number));
        if (part->kind == message_part::real) std::snprintf(digits, sizeof digits, "%g", part->value);
        add(part->kind == message_part::words ? part->text : digits);
    }
    text[length] = '\0';
#if defined(__cpp_exceptions)
    throw error(text);
#else
    on_error(std::string_view(text, length));
#endif
}

/// As `report`, with its parts side by side.
template <class Build, class... Parts>
[[noreturn]] SASH_COLD void report_parts(Parts... parts) {
    const message_part list[] = {parts...};
    report<Build>(list, static_cast<int>(sizeof...(parts)));
}

/// Reports an error of these `parts`, texts and numbers.
template <class Build, class... Parts>
[[noreturn]] SASH_INLINE void refuse(const Parts&... parts) {
    report_parts<Build>(part_of(parts)...);
}

/// Refuses unless `condition` holds.
template <class Build, class... Parts>
SASH_INLINE constexpr void require(bool condition, const Parts&... parts) {
    if (!condition) [[unlikely]]
        refuse<Build>(parts...);
}

template <class>
inline constexpr bool never = false;  // a false that depends on a type: for the sentences in static_assert

SASH_INLINE constexpr int64 round_up(int64 n, int64 multiple) { return (n + multiple - 1) / multiple * multiple; }
SASH_INLINE constexpr int64 smaller(int64 a, int64 b) { return a < b ? a : b; }
SASH_INLINE constexpr int64 larger(int64 a, int64 b) { return a < b ? b : a; }

}  // namespace detail
}  // namespace sash
