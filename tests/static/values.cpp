// Caches are values: moves and destruction never throw, a copy is a fork, and what must not be copied cannot be.
#include <sash/sash.hpp>

#include <array>
#include <type_traits>
#include <vector>

using namespace sash;

namespace {

template <class T>
inline constexpr bool moves =
    std::is_nothrow_move_constructible_v<T>&& std::is_nothrow_move_assignable_v<T>&& std::is_nothrow_destructible_v<T>;
template <class T>
inline constexpr bool copies = std::is_copy_constructible_v<T>&& std::is_copy_assignable_v<T>;

static_assert(moves<kv_cache<full>> && copies<kv_cache<full>>);
static_assert(moves<kv_cache<sliding_window, float16>> && copies<kv_cache<sliding_window, float16>>);
static_assert(moves<kv_cache<linear<>>> && copies<kv_cache<linear<>>>);
static_assert(moves<kv_cache<linear<hedgehog>, bfloat16>> && copies<kv_cache<linear<hedgehog>, bfloat16>>);
static_assert(!std::is_default_constructible_v<kv_cache<full>>);  // a cache has a shape

static_assert(moves<workspace> && !std::is_copy_constructible_v<workspace>);
static_assert(moves<checkpoints<kv_cache<full>>>);

// A policy alone makes a cache of floats; the element type is named where it is another.
static_assert(std::is_same_v<decltype(kv_cache(full{}, {.head_dim = 8})), kv_cache<full, float>>);
static_assert(std::is_same_v<decltype(kv_cache(sliding_window{}, {.head_dim = 8}, {.scale = 1})),
                             kv_cache<sliding_window, float>>);
static_assert(
    std::is_same_v<decltype(kv_cache(linear{}, {.head_dim = 8}, {}, {.capacity = 9})), kv_cache<linear<>, float>>);
static_assert(std::is_same_v<decltype(linear{relu{}}), linear<relu>>);

// A view is made of memory that lasts: an lvalue, a pointer, a span; not of a container about to die.
template <class T>
concept readable = requires(T&& x) {
    input(static_cast<T&&>(x), 1, 1, 1);
};
template <class T>
concept writable = requires(T&& x) {
    output(static_cast<T&&>(x), 1, 1, 1);
};
static_assert(readable<const std::vector<float>&> && readable<std::vector<float16>&> &&
              readable<std::array<bfloat16, 4>&>);
static_assert(readable<std::span<const float>> && readable<const float*> && readable<float*&>);
static_assert(!readable<std::vector<float>> && !readable<int> && !readable<std::vector<bool>&>);
static_assert(writable<std::vector<float>&> && writable<std::span<float16>> && writable<float*>);
static_assert(!writable<const std::vector<float>&> && !writable<std::span<const float>> && !writable<const float*>);
static_assert(std::is_convertible_v<output, input> && !std::is_convertible_v<input, output>);

// Errors are ordinary exceptions.
static_assert(std::is_base_of_v<std::invalid_argument, error>);

// What can run tasks is a runner.
struct own_pool {
    void operator()(int64 tasks, task f) {
        for (int64 i = 0; i < tasks; ++i) f(i);
    }
};
static_assert(std::is_convertible_v<serial, runner> && std::is_convertible_v<own_pool&, runner>);
static_assert(!std::is_convertible_v<int, runner>);

// A range of caches is any range of one cache type.
static_assert(cache_range<std::vector<kv_cache<full>>> && cache_range<kv_cache<linear<>>[3]>);
static_assert(!cache_range<std::vector<int>> && !cache_range<kv_cache<full>>);

}  // namespace
