#pragma once
// What randomised tests are made of: numbers, tensors in awkward memory, memory that is full of NaN, and a comparison
// with the reference.
#include <sash/memory.hpp>
#include <sash/view.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace test {

using sash::int64;

// Random numbers that are the same with every standard library: its engines are specified, its distributions are not.
class numbers {
public:
    explicit numbers(std::uint64_t seed) : engine_(seed) {}

    std::uint64_t next() { return engine_(); }
    int64 below(int64 n) { return static_cast<int64>(next() % static_cast<std::uint64_t>(n)); }
    int64 between(int64 first, int64 last) { return first + below(last - first + 1); }  // both included
    bool one_in(int64 n) { return below(n) == 0; }
    int64 pick(std::initializer_list<int64> list) { return list.begin()[below(static_cast<int64>(list.size()))]; }

    // Uniform in [-sqrt 3, sqrt 3): mean 0, variance 1, and no tail that would make a score immoderate.
    float number() { return static_cast<float>((static_cast<double>(next() >> 40) / (1 << 24) * 2 - 1) * 1.7320508); }
    std::vector<float> several(int64 n, float factor = 1) {
        std::vector<float> list(static_cast<std::size_t>(n));
        for (float& x : list) x = factor * number();
        return list;
    }

private:
    std::mt19937_64 engine_;
};

// ---------------------------------------------------------------------------------------------------------------------
// Tensors

// How [tokens, heads, dim] lies in memory.
enum class arrangement : int {
    contiguous,
    heads_first,   // [heads, tokens, dim]
    padded,        // odd gaps between rows and between tokens
    reversed,      // token and head strides are negative
    spread,        // two numbers nobody owns between neighbours
    dims_first,    // [dim, heads, tokens], and backwards
    shared_heads,  // every head is the same memory: for inputs
    count
};

// A tensor that owns its memory. What no element occupies is full of 0xff bytes, a NaN in each of the three types; so
// is every element until it is set.
class tensor {
public:
    tensor() = default;
    tensor(int64 tokens, int64 heads, int64 dim, sash::scalar type = sash::scalar::f32,
           arrangement how = arrangement::contiguous)
        : tokens_(tokens), heads_(heads), dim_(dim), type_(type) {
        arrange(how);
        const int64 reach[] = {(tokens - 1) * strides_[0], (heads - 1) * strides_[1], (dim - 1) * strides_[2]};
        int64 lowest = 0, highest = 0;
        for (const int64 r : reach) (r < 0 ? lowest : highest) += r;
        first_ = margin - lowest;
        memory_.assign(
            static_cast<std::size_t>((tokens * heads * dim == 0 ? 2 * margin : first_ + highest + 1 + margin) * size()),
            std::byte{0xff});
    }

    int64 tokens() const { return tokens_; }
    int64 heads() const { return heads_; }
    int64 dim() const { return dim_; }
    sash::scalar type() const { return type_; }

    float get(int64 token, int64 head, int64 d) const {
        const std::byte* at = memory_.data() + offset(token, head, d);
        if (type_ == sash::scalar::f16) return load<sash::float16>(at);
        if (type_ == sash::scalar::bf16) return load<sash::bfloat16>(at);
        return load<float>(at);
    }
    void set(int64 token, int64 head, int64 d, float x) {
        std::byte* at = memory_.data() + offset(token, head, d);
        if (type_ == sash::scalar::f16) return store(at, sash::float16(x));
        if (type_ == sash::scalar::bf16) return store(at, sash::bfloat16(x));
        store(at, x);
    }
    template <class F>  // f(token, head, d) for every element
    void for_each(F&& f) const {
        for (int64 t = 0; t < tokens_; ++t)
            for (int64 h = 0; h < heads_; ++h)
                for (int64 d = 0; d < dim_; ++d) f(t, h, d);
    }
    void fill(numbers& random, float factor = 1) {
        for_each([&](int64 t, int64 h, int64 d) { set(t, h, d, factor * random.number()); });
    }

    sash::input in() const { return view<sash::input, const std::byte>(memory_.data()); }
    sash::output out() { return view<sash::output, std::byte>(memory_.data()); }
    sash::input in(int64 first, int64 count) const { return in().tokens_from(first, count); }
    sash::output out(int64 first, int64 count) { return out().tokens_from(first, count); }

    // Is every byte that belongs to no element as it was at first?
    bool surroundings_untouched() const {
        std::vector<bool> owned(memory_.size());
        for_each([&](int64 t, int64 h, int64 d) {
            for (int64 b = 0; b < size(); ++b) owned[static_cast<std::size_t>(offset(t, h, d) + b)] = true;
        });
        for (std::size_t i = 0; i < memory_.size(); ++i)
            if (!owned[i] && memory_[i] != std::byte{0xff}) return false;
        return true;
    }
    friend bool operator==(const tensor& a, const tensor& b) { return a.memory_ == b.memory_; }  // bits

private:
    static constexpr int64 margin = 16;

    void arrange(arrangement how) {
        switch (how) {
            case arrangement::heads_first:
                strides_ = {dim_, tokens_ * dim_, 1};
                break;
            case arrangement::padded:
                strides_ = {heads_ * (dim_ + 3) + 5, dim_ + 3, 1};
                break;
            case arrangement::reversed:
                strides_ = {-heads_ * dim_, -dim_, 1};
                break;
            case arrangement::spread:
                strides_ = {heads_ * dim_ * 3, dim_ * 3, 3};
                break;
            case arrangement::dims_first:
                strides_ = {-1, -tokens_, -tokens_ * heads_};
                break;
            case arrangement::shared_heads:
                strides_ = {dim_, 0, 1};
                break;
            default:
                strides_ = {heads_ * dim_, dim_, 1};
                break;
        }
    }
    int64 size() const { return type_ == sash::scalar::f32 ? 4 : 2; }
    int64 offset(int64 token, int64 head, int64 d) const {
        return (first_ + token * strides_[0] + head * strides_[1] + d * strides_[2]) * size();
    }
    template <class T>
    static float load(const std::byte* at) {
        T x;
        std::memcpy(&x, at, sizeof x);
        return static_cast<float>(x);
    }
    template <class T>
    static void store(std::byte* at, T x) {
        std::memcpy(at, &x, sizeof x);
    }
    template <class View, class Byte>
    View view(Byte* memory) const {
        const auto as = [&]<class T>(T* at) {
            return View(at, tokens_, heads_, dim_, strides_[0], strides_[1], strides_[2]);
        };
        constexpr bool constant = std::is_const_v<Byte>;
        Byte* at = memory + first_ * size();
        if (type_ == sash::scalar::f16)
            return as(reinterpret_cast<std::conditional_t<constant, const sash::float16, sash::float16>*>(at));
        if (type_ == sash::scalar::bf16)
            return as(reinterpret_cast<std::conditional_t<constant, const sash::bfloat16, sash::bfloat16>*>(at));
        return as(reinterpret_cast<std::conditional_t<constant, const float, float>*>(at));
    }

    int64 tokens_ = 0, heads_ = 0, dim_ = 0, first_ = 0;
    sash::scalar type_ = sash::scalar::f32;
    std::array<int64, 3> strides_ = {};
    std::vector<std::byte> memory_;
};

// ---------------------------------------------------------------------------------------------------------------------
// Memory

// A source whose memory is full of NaN, with guards around every piece, and which keeps the books.
class poisoned_memory {
public:
    poisoned_memory() = default;
    poisoned_memory(const poisoned_memory&) = delete;

    sash::memory_source source() { return {&allocate, &release, this}; }

    std::size_t live() const { return live_; }            // bytes out now
    std::size_t allocated() const { return allocated_; }  // bytes ever given out
    std::size_t largest() const { return largest_; }      // piece
    int64 calls() const { return calls_; }                // allocations there ever were
    // Was every piece given back with the size and alignment it was asked with, and nothing written outside of it?
    bool consistent() const {
        bool all = consistent_;
        for (const auto& [memory, p] : held_) all = all && guards_hold(memory, p);
        return all;
    }
    void fail_after(int64 more_calls) { limit_ = more_calls < 0 ? -1 : calls_ + more_calls; }  // negative: never

private:
    struct piece {
        std::byte* whole;
        std::size_t bytes, alignment;
    };
    static constexpr std::size_t guard = 4096;
    static constexpr std::byte mark{0xa5};

    static bool guards_hold(const std::byte* memory, const piece& p) {
        for (std::size_t i = 1; i <= guard; ++i)
            if (*(memory - i) != mark || memory[p.bytes + i - 1] != mark) return false;
        return true;
    }
    static void* allocate(void* context, std::size_t bytes, std::size_t alignment) {
        auto& self = *static_cast<poisoned_memory*>(context);
        if (self.limit_ >= 0 && self.calls_ >= self.limit_) return nullptr;
        const std::size_t front = std::max(alignment, guard);  // both powers of two
        auto* whole = static_cast<std::byte*>(
            std::aligned_alloc(alignment, (front + bytes + guard + alignment - 1) / alignment * alignment));
        if (whole == nullptr) return nullptr;
        std::byte* memory = whole + front;
        std::memset(memory - guard, static_cast<int>(mark), guard);
        std::memset(memory, 0xff, bytes);
        std::memset(memory + bytes, static_cast<int>(mark), guard);
        self.held_[memory] = {whole, bytes, alignment};
        self.live_ += bytes;
        self.allocated_ += bytes;
        self.largest_ = std::max(self.largest_, bytes);
        ++self.calls_;
        return memory;
    }
    static void release(void* context, void* memory, std::size_t bytes, std::size_t alignment) {
        auto& self = *static_cast<poisoned_memory*>(context);
        const auto found = self.held_.find(static_cast<std::byte*>(memory));
        if (found == self.held_.end()) {
            self.consistent_ = false;
            return;
        }
        const piece p = found->second;
        self.consistent_ =
            self.consistent_ && p.bytes == bytes && p.alignment == alignment && guards_hold(found->first, p);
        self.held_.erase(found);
        self.live_ -= p.bytes;
        std::memset(memory, 0xff, p.bytes);
        std::free(p.whole);
    }

    std::map<std::byte*, piece> held_;
    std::size_t live_ = 0, allocated_ = 0, largest_ = 0;
    int64 calls_ = 0, limit_ = -1;
    bool consistent_ = true;
};

// ---------------------------------------------------------------------------------------------------------------------
// Comparing

// |a - b| <= absolute + relative |b|; two NaN agree, equal infinities too.
struct tolerance {
    double absolute = 1e-6, relative = 1e-5;

    bool holds(double a, double b) const {
        if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
        return a == b || std::abs(a - b) <= absolute + relative * std::abs(b);
    }
    tolerance times(double factor) const { return {absolute * factor, relative * factor}; }
    // What rounding the result to a narrow type adds: half a unit in the last place, and half the smallest subnormal.
    tolerance narrowed_to(sash::scalar type) const {
        if (type == sash::scalar::f16) return {absolute + 3e-8, relative + 4.9e-4};
        if (type == sash::scalar::bf16) return {absolute, relative + 3.91e-3};
        return *this;
    }
};
inline constexpr tolerance of_fp32;

inline std::string text_of(double x) {
    char digits[40];
    std::snprintf(digits, sizeof digits, "%.9g", x);
    return digits;
}

// Empty when row `row` of `got` agrees with `expected`, [heads, dim]; else a sentence.
inline std::string row_differs(const tensor& got, int64 row, const double* expected, tolerance within) {
    for (int64 h = 0; h < got.heads(); ++h)
        for (int64 d = 0; d < got.dim(); ++d, ++expected)
            if (!within.holds(got.get(row, h, d), *expected))
                return "out(" + std::to_string(row) + ", " + std::to_string(h) + ", " + std::to_string(d) + ") is " +
                       text_of(got.get(row, h, d)) + ", must be " + text_of(*expected);
    return "";
}
// All rows of `got`, expected [tokens, heads, dim].
inline std::string differs(const tensor& got, const std::vector<double>& expected, tolerance within = of_fp32) {
    if (static_cast<int64>(expected.size()) != got.tokens() * got.heads() * got.dim()) return "sizes differ";
    for (int64 t = 0; t < got.tokens(); ++t)
        if (std::string found = row_differs(got, t, expected.data() + t * got.heads() * got.dim(), within);
            !found.empty())
            return found;
    return "";
}
inline std::string differs(const std::vector<float>& got, const std::vector<double>& expected,
                           tolerance within = of_fp32) {
    if (got.size() != expected.size()) return "sizes differ";
    for (std::size_t i = 0; i < got.size(); ++i)
        if (!within.holds(got[i], expected[i]))
            return "lse[" + std::to_string(i) + "] is " + text_of(got[i]) + ", must be " + text_of(expected[i]);
    return "";
}

}  // namespace test
