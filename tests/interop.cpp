// Matrices of other libraries as views: the right element at the right place, no copy, and a refusal where that cannot
// be.
#include "support/catch.hpp"

#include <sash/interop/dlpack.hpp>
#include <sash/interop/eigen.hpp>
#include <sash/interop/mdspan.hpp>
#include <sash/sash.hpp>

#include <Eigen/Core>

#include <array>
#include <cstring>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#endif
#if __has_include(<mdspan>)
#include <mdspan>
#endif

namespace {

using sash::int64;
using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// The number that a view shows at (token, head, dim).
float shown(const sash::input& x, int64 token, int64 head, int64 dim) {
    const auto* at =
        static_cast<const std::byte*>(x.at(token, head)) + dim * x.dim_stride * (x.type == sash::scalar::f32 ? 4 : 2);
    std::uint16_t bits = 0;
    float number = 0;
    if (x.type == sash::scalar::f32)
        std::memcpy(&number, at, sizeof number);
    else
        std::memcpy(&bits, at, sizeof bits);
    sash::float16 half{};
    sash::bfloat16 brain{};
    half.bits = brain.bits = bits;
    return x.type == sash::scalar::f32 ? number : x.type == sash::scalar::f16 ? float(half) : float(brain);
}

// Small whole numbers, exact in every element type, no two alike: token, head and dim as digits.
float number_at(int64 token, int64 head, int64 dim) { return static_cast<float>(token * 64 + head * 16 + dim); }

bool shows_numbers(const sash::input& x, int64 tokens, int64 heads, int64 dim) {
    if (x.tokens != tokens || x.heads != heads || x.dim != dim) return false;
    for (int64 t = 0; t < tokens; ++t)
        for (int64 h = 0; h < heads; ++h)
            for (int64 d = 0; d < dim; ++d)
                if (shown(x, t, h, d) != number_at(t, h, d)) return false;
    return true;
}

template <class M>
M filled(int64 tokens, int64 heads, int64 dim) {
    M m(tokens, heads * dim);
    for (int64 t = 0; t < tokens; ++t)
        for (int64 c = 0; c < heads * dim; ++c) m(t, c) = typename M::Scalar(number_at(t, c / dim, c % dim));
    return m;
}

template <class F>
std::string message_of(F&& f) {
    try {
        f();
    } catch (const sash::error& e) { return e.what(); }
    return "no error";
}

using Catch::Matchers::Contains;

}  // namespace

// ----------------------------------------------------------------------------------------------------------------
// Eigen

TEMPLATE_TEST_CASE("Eigen matrices of every element type and storage order", "[interop][eigen]", Eigen::MatrixXf,
                   row_major, Eigen::ArrayXXf, (Eigen::Matrix<Eigen::half, 3, Eigen::Dynamic, Eigen::RowMajor>),
                   (Eigen::Matrix<Eigen::bfloat16, Eigen::Dynamic, Eigen::Dynamic>)) {
    const TestType m = filled<TestType>(3, 4, 5);
    const sash::input x = sash::view(m, 4);
    CHECK(x.data == m.data());
    CHECK(shows_numbers(x, 3, 4, 5));
}

TEST_CASE("Eigen maps, blocks and transposes keep their strides", "[interop][eigen]") {
    const row_major m = filled<row_major>(3, 4, 5);
    Eigen::MatrixXf wide = Eigen::MatrixXf::Constant(9, 50, -1);
    wide.block(2, 7, 3, 20) = m;
    CHECK(shows_numbers(sash::view(wide.block(2, 7, 3, 20), 4), 3, 4, 5));
    CHECK(shows_numbers(sash::view(wide.middleRows(2, 3).middleCols(7, 20), 4), 3, 4, 5));

    const Eigen::MatrixXf columns = m.transpose();  // a token a column
    CHECK(shows_numbers(sash::view(columns.transpose(), 4), 3, 4, 5));

    std::vector<float> apart(3 * 100, -1);
    Eigen::Map<row_major, 0, Eigen::Stride<100, 3>> strided(apart.data(), 3, 20);
    strided = m;
    CHECK(shows_numbers(sash::view(strided, 4), 3, 4, 5));

    const Eigen::RowVectorXf token = m.row(0);
    CHECK(shows_numbers(sash::view(token, 4), 1, 4, 5));
}

TEST_CASE("Eigen: what may be written is an output, what may not an input", "[interop][eigen]") {
    row_major m(2, 8);
    const row_major fixed(2, 8);
    const float* memory = m.data();
    const Eigen::Map<const row_major> map(memory, 2, 8);
    STATIC_REQUIRE(std::is_same_v<decltype(sash::view(m, 2)), sash::output>);
    STATIC_REQUIRE(std::is_same_v<decltype(sash::view(m.leftCols(4), 2)), sash::output>);
    STATIC_REQUIRE(std::is_same_v<decltype(sash::view(fixed, 2)), sash::input>);
    STATIC_REQUIRE(std::is_same_v<decltype(sash::view(fixed.leftCols(4), 2)), sash::input>);
    STATIC_REQUIRE(std::is_same_v<decltype(sash::view(map, 2)), sash::input>);
    const sash::input read = sash::view(m, 2);
    CHECK(read.data == m.data());
}

TEST_CASE("Eigen: a column count that heads do not divide is refused", "[interop][eigen]") {
    const row_major m(2, 10);
    CHECK_THAT(message_of([&] { sash::view(m, 4); }), Contains("10 columns") && Contains("heads, which is 4"));
    CHECK_THAT(message_of([&] { sash::view(m, 0); }), Contains("heads is 0"));
    CHECK(sash::view(Eigen::Map<const row_major>(m.data(), 0, 8), 4).empty());
}

TEST_CASE("Eigen: attention into a block of a larger matrix", "[interop][eigen]") {
    const int64 tokens = 6, heads = 4, kv_heads = 2, dim = 8;
    const Eigen::MatrixXf qkv =
        Eigen::MatrixXf::Random(tokens, (heads + 2 * kv_heads) * dim);  // column-major: dims lie apart
    const row_major q = qkv.leftCols(heads * dim), k = qkv.middleCols(heads * dim, kv_heads * dim),
                    v = qkv.rightCols(kv_heads * dim);
    row_major expected(tokens, heads * dim);
    sash::attend(sash::full{}, {q.data(), tokens, heads, dim}, {k.data(), tokens, kv_heads, dim},
                 {v.data(), tokens, kv_heads, dim}, {expected.data(), tokens, heads, dim});

    Eigen::MatrixXf around = Eigen::MatrixXf::Constant(tokens + 2, heads * dim + 3, 7);
    sash::kv_cache cache(sash::full{}, {.heads = heads, .kv_heads = kv_heads, .head_dim = dim});
    sash::attend(sash::view(qkv.leftCols(heads * dim), heads),
                 sash::view(qkv.middleCols(heads * dim, kv_heads * dim), kv_heads),
                 sash::view(qkv.rightCols(kv_heads * dim), kv_heads), cache,
                 sash::view(around.block(1, 1, tokens, heads * dim), heads));
    CHECK((around.block(1, 1, tokens, heads * dim) - expected).cwiseAbs().maxCoeff() <= 1e-6f);
    around.block(1, 1, tokens, heads * dim).setConstant(7);
    CHECK((around.array() == 7).all());  // nothing beside the block was written
}

// ----------------------------------------------------------------------------------------------------------------
// mdspan

namespace {

// An mdspan of one's own: the members that C++23 names, and no more.
template <class T, std::size_t Rank>
struct span_of {
    T* data = nullptr;
    std::array<std::size_t, Rank> extents = {};
    std::array<std::ptrdiff_t, Rank> strides = {};
    static constexpr std::size_t rank() { return Rank; }
    constexpr T* data_handle() const { return data; }
    constexpr std::size_t extent(std::size_t i) const { return extents[i]; }
    constexpr std::ptrdiff_t stride(std::size_t i) const { return strides[i]; }
};

template <class T>
std::vector<T> numbers(int64 tokens, int64 heads, int64 dim, int64 by_token, int64 by_head, int64 by_dim) {
    std::vector<T> all(
        static_cast<std::size_t>(1 + (tokens - 1) * by_token + (heads - 1) * by_head + (dim - 1) * by_dim), T(-1.0f));
    for (int64 t = 0; t < tokens; ++t)
        for (int64 h = 0; h < heads; ++h)
            for (int64 d = 0; d < dim; ++d)
                all[static_cast<std::size_t>(t * by_token + h * by_head + d * by_dim)] = T(number_at(t, h, d));
    return all;
}

}  // namespace

TEMPLATE_TEST_CASE("mdspan of rank 3, any strides", "[interop][mdspan]", float, sash::float16, sash::bfloat16) {
    std::vector<TestType> all = numbers<TestType>(3, 4, 5, 5, 15, 1);  // [heads, tokens, dim] in memory
    const span_of<TestType, 3> m{all.data(), {3, 4, 5}, {5, 15, 1}};
    STATIC_REQUIRE(std::is_same_v<decltype(sash::view(m)), sash::output>);
    CHECK(shows_numbers(sash::view(m), 3, 4, 5));
    const span_of<const TestType, 3> fixed{all.data(), {3, 4, 5}, {5, 15, 1}};
    STATIC_REQUIRE(std::is_same_v<decltype(sash::view(fixed)), sash::input>);
    CHECK(shows_numbers(sash::view(fixed), 3, 4, 5));
}

TEST_CASE("mdspan of rank 2 is cut into heads", "[interop][mdspan]") {
    std::vector<float> all = numbers<float>(3, 4, 5, 50, 10, 2);
    const span_of<const float, 2> m{all.data(), {3, 20}, {50, 2}};
    CHECK(shows_numbers(sash::view(m, 4), 3, 4, 5));
    CHECK_THAT(message_of([&] { sash::view(m, 3); }), Contains("20 columns") && Contains("heads, which is 3"));
    CHECK_THAT(message_of([&] { sash::view(m, -1); }), Contains("heads is -1"));
    CHECK(sash::view(span_of<const float, 2>{all.data(), {0, 20}, {50, 2}}, 4).empty());
}

TEST_CASE("mdspan: a view is a constant expression", "[interop][mdspan]") {
    static constexpr float all[6] = {1, 2, 3, 4, 5, 6};
    constexpr sash::input x = sash::view(span_of<const float, 3>{all, {2, 3, 1}, {3, 1, 1}});
    STATIC_REQUIRE(x.tokens == 2);
    STATIC_REQUIRE(x.heads == 3);
    STATIC_REQUIRE(x.dim == 1);
    STATIC_REQUIRE(x.token_stride == 3);
}

#if defined(__cpp_lib_mdspan)
TEST_CASE("std::mdspan", "[interop][mdspan]") {
    std::vector<float> all = numbers<float>(3, 4, 5, 20, 5, 1);
    CHECK(shows_numbers(sash::view(std::mdspan(all.data(), 3, 4, 5)), 3, 4, 5));
    CHECK(shows_numbers(sash::view(std::mdspan(all.data(), 3, 20), 4), 3, 4, 5));
}
#endif

// ----------------------------------------------------------------------------------------------------------------
// DLPack

namespace {

// DLTensor as DLPack lays it down, so that the test needs no package.
namespace own {
struct DLDevice {
    int device_type = 1;
    std::int32_t device_id = 0;
};
struct DLDataType {
    std::uint8_t code = 2, bits = 32;
    std::uint16_t lanes = 1;
};
struct DLTensor {
    void* data = nullptr;
    DLDevice device;
    std::int32_t ndim = 0;
    DLDataType dtype;
    std::int64_t* shape = nullptr;
    std::int64_t* strides = nullptr;
    std::uint64_t byte_offset = 0;
};
}  // namespace own

// A tensor with its shape and strides.
template <class Tensor>
struct dl {
    std::vector<std::int64_t> shape, strides;
    Tensor tensor = {};

    dl(void* data, std::vector<std::int64_t> extents, std::vector<std::int64_t> by = {}, int code = 2, int bits = 32)
        : shape(static_cast<std::vector<std::int64_t>&&>(extents)),
          strides(static_cast<std::vector<std::int64_t>&&>(by)) {
        tensor.data = data;
        tensor.device.device_type = static_cast<decltype(tensor.device.device_type)>(1);
        tensor.ndim = static_cast<int>(shape.size());
        tensor.dtype.code = static_cast<std::uint8_t>(code);
        tensor.dtype.bits = static_cast<std::uint8_t>(bits);
        tensor.dtype.lanes = 1;
        tensor.shape = shape.data();
        tensor.strides = strides.empty() ? nullptr : strides.data();
    }
    dl(const dl&) = delete;
};

}  // namespace

#if __has_include(<dlpack/dlpack.h>)
#define DL_TENSORS own::DLTensor, ::DLTensor
#else
#define DL_TENSORS own::DLTensor
#endif

TEMPLATE_TEST_CASE("DLPack: every element type, strides, no strides, byte_offset", "[interop][dlpack]", DL_TENSORS) {
    std::vector<float> compact = numbers<float>(3, 4, 5, 20, 5, 1);
    std::vector<sash::float16> half = numbers<sash::float16>(3, 4, 5, 5, 15, 1);
    std::vector<sash::bfloat16> brain = numbers<sash::bfloat16>(3, 4, 5, 50, 10, 2);

    CHECK(shows_numbers(sash::view(dl<TestType>(compact.data(), {3, 4, 5}).tensor), 3, 4, 5));
    CHECK(shows_numbers(sash::view(dl<TestType>(compact.data(), {3, 4, 5}, {20, 5, 1}).tensor), 3, 4, 5));
    CHECK(shows_numbers(sash::view(dl<TestType>(compact.data(), {3, 20}).tensor, 4), 3, 4, 5));
    CHECK(shows_numbers(sash::view(dl<TestType>(half.data(), {3, 4, 5}, {5, 15, 1}, 2, 16).tensor), 3, 4, 5));
    CHECK(shows_numbers(sash::view(dl<TestType>(brain.data(), {3, 20}, {50, 2}, 4, 16).tensor, 4), 3, 4, 5));

    compact.insert(compact.begin(), {-1, -1, -1});
    dl<TestType> offset(compact.data(), {3, 4, 5});
    offset.tensor.byte_offset = 3 * sizeof(float);
    CHECK(shows_numbers(sash::view(offset.tensor), 3, 4, 5));

    CHECK(sash::view(dl<TestType>(nullptr, {0, 4, 5}).tensor).empty());
}

TEST_CASE("DLPack: what cannot be is refused by name", "[interop][dlpack]") {
    std::vector<float> all(60);
    const auto message = [](const own::DLTensor& t) { return message_of([&] { sash::view(t); }); };
    using made = dl<own::DLTensor>;

    made on_gpu(all.data(), {3, 4, 5});
    on_gpu.tensor.device.device_type = 2;
    CHECK_THAT(message(on_gpu.tensor), Contains("device of type 2"));

    CHECK_THAT(message(made(all.data(), {3, 4, 5}, {}, 2, 64).tensor), Contains("code 2 with 64 bits"));
    CHECK_THAT(message(made(all.data(), {3, 4, 5}, {}, 0, 32).tensor), Contains("code 0 with 32 bits"));
    CHECK_THAT(message(made(all.data(), {3, 4, 5}, {}, 4, 32).tensor), Contains("code 4 with 32 bits"));

    made lanes(all.data(), {3, 4, 5});
    lanes.tensor.dtype.lanes = 4;
    CHECK_THAT(message(lanes.tensor), Contains("4 lanes"));

    CHECK_THAT(message(made(all.data(), {60}).tensor), Contains("1 axes, must have 3"));
    CHECK_THAT(message(made(all.data(), {1, 3, 4, 5}).tensor), Contains("4 axes, must have 3"));
    CHECK_THAT(message(made(all.data(), {3, 20}).tensor),
               Contains("2 axes, must have 3") && Contains("pass the number of heads"));
    CHECK_THAT(message(made(all.data(), {3, -4, 5}).tensor), Contains("axis 1") && Contains("-4"));
    CHECK_THAT(message_of([&] { sash::view(made(all.data(), {3, 4, 5}).tensor, 4); }), Contains("3 axes, must have 2"));
    CHECK_THAT(message_of([&] { sash::view(made(all.data(), {3, 20}).tensor, 3); }), Contains("20 columns"));
    CHECK_THAT(message_of([&] { sash::view(made(all.data(), {3, 20}).tensor, 0); }), Contains("heads is 0"));
}

TEST_CASE("DLPack: an address that its element does not allow is refused by the call", "[interop][dlpack]") {
    std::vector<float> all(100);
    dl<own::DLTensor> crooked(all.data(), {3, 2, 4});
    crooked.tensor.byte_offset = 2;
    std::vector<float> straight(24);
    const sash::input good(straight, 3, 2, 4);
    CHECK_THAT(message_of([&] {
                   sash::attend(sash::full{}, good, sash::view(crooked.tensor), good, sash::output(straight, 3, 2, 4));
               }),
               Contains("key begins at an address"));
}

TEST_CASE("DLPack and mdspan in one call", "[interop]") {
    const int64 tokens = 5, heads = 2, dim = 4;
    std::vector<float> q(static_cast<std::size_t>(tokens * heads * dim)), out(q), expected(q);
    std::iota(q.begin(), q.end(), -20.0f);
    for (float& x : q) x /= 10;
    sash::attend(sash::full{}, {q, tokens, heads, dim}, {q, tokens, heads, dim}, {q, tokens, heads, dim},
                 {expected, tokens, heads, dim});
    const dl<own::DLTensor> tensor(q.data(), {tokens, heads, dim});
    const span_of<float, 2> m{out.data(), {std::size_t(tokens), std::size_t(heads * dim)}, {heads * dim, 1}};
    sash::attend(sash::full{}, sash::view(tensor.tensor), sash::view(tensor.tensor), sash::view(tensor.tensor),
                 sash::view(m, heads));
    CHECK(out == expected);
}
