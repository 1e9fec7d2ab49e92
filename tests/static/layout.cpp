// Types that users hold have one layout under all flags, so that files built differently can pass them to each other. The sizes
// are written down here; this file is right only if every set of flags finds the same.
#include <sash/sash.hpp>

#include <type_traits>

using namespace sash;

namespace {

template <class T>
inline constexpr bool plain = std::is_trivially_copyable_v<T>&& std::is_standard_layout_v<T>;

// Element types are bit patterns: memory of theirs needs no constructor, and 16 bits are 16 bits.
static_assert(plain<float16> && sizeof(float16) == 2 && alignof(float16) == 2);
static_assert(plain<bfloat16> && sizeof(bfloat16) == 2 && alignof(bfloat16) == 2);
static_assert(std::is_trivially_default_constructible_v<float16> &&
              std::is_trivially_default_constructible_v<bfloat16>);
static_assert(sizeof(scalar) == 1);

// Views.
static_assert(plain<input> && sizeof(input) == 64 && alignof(input) == 8);
static_assert(plain<output> && sizeof(output) == 64 && alignof(output) == 8);
static_assert(std::is_trivially_destructible_v<input> && std::is_nothrow_copy_constructible_v<input>);

// Shapes and policies: what a kernel takes by value.
static_assert(plain<shape> && sizeof(shape) == 9 * 8);
static_assert(plain<key_interval> && sizeof(key_interval) == 24);
static_assert(plain<key_intervals<1>> && sizeof(key_intervals<1>) == 32);
static_assert(plain<key_intervals<4>> && sizeof(key_intervals<4>) == 104);
static_assert(plain<full> && sizeof(full) == 1);
static_assert(plain<sliding_window> && sizeof(sliding_window) == 24);
static_assert(std::is_trivially_copyable_v<linear<>>);
static_assert(std::is_trivially_copyable_v<linear<hedgehog>>);
static_assert(std::is_trivially_copyable_v<linear<identity, per_head_and_token, additive, no_normaliser>>);

// Scores and partials.
static_assert(plain<per_head> && sizeof(per_head) == 8);
static_assert(std::is_trivially_copyable_v<scalar_site> && sizeof(scalar_site) == 16);
static_assert(std::is_trivially_copyable_v<custom_score> && alignof(custom_score) == 16);
static_assert(std::is_trivially_copyable_v<rotary> && std::is_trivially_copyable_v<score>);
static_assert(std::is_trivially_copyable_v<rope_table>);
static_assert(std::is_trivially_copyable_v<partial> && sizeof(partial) == 24);

// Execution.
static_assert(std::is_trivially_copyable_v<task> && sizeof(task) == 16);
static_assert(std::is_trivially_copyable_v<runner> && sizeof(runner) == 32);
static_assert(plain<memory_source> && sizeof(memory_source) == 24);
static_assert(std::is_empty_v<serial> && sizeof(openmp) == sizeof(int));

// What -mavx512f must not change is the alignment of what holds a cache.
static_assert(alignof(kv_cache<full>) == 16 && alignof(kv_cache<sliding_window, bfloat16>) == 16);
static_assert(alignof(kv_cache<linear<>>) == 16 && alignof(workspace) == 8);
static_assert(sizeof(kv_cache<full, float>) == sizeof(kv_cache<full, float16>));
static_assert(sizeof(kv_cache<full, float>) == sizeof(kv_cache<full, bfloat16>));

}  // namespace
