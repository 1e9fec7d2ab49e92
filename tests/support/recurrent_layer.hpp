#pragma once
/// One recurrent layer below the front door: the states, a sequence of random tokens, and calls for any stretch of
/// them.
#include <sash/cpu/recurrent.hpp>
#include <sash/linear.hpp>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace recurrent {

using build = sash::build::here;
using sash::int64;
using floats = std::vector<float>;

inline sash::shape resolved(const sash::shape& s) { return sash::detail::resolve<build>(s); }

/// T tokens of a layer, and where its rows go: contiguous [tokens, heads, dim].
struct sequence {
    sash::shape dims;
    int64 tokens;
    floats query, key, value, decay;

    sequence(const sash::shape& s, int64 count)
        : dims(resolved(s)),
          tokens(count),
          query(size(dims.query_heads * dims.key_dim)),
          key(size(dims.key_heads * dims.key_dim)),
          value(size(dims.value_heads * dims.value_dim)),
          decay(size(dims.gate_heads)) {}

    /// Normal numbers; decays between 0 and -strongest, every fourth exactly 0.
    void fill(std::mt19937& random, float strongest = 1) {
        std::normal_distribution<float> normal;
        for (floats* x : {&query, &key, &value})
            for (float& v : *x) v = normal(random);
        for (float& g : decay) g = random() % 4 ? -strongest * static_cast<float>(random() % 1024) / 1024 : 0.0f;
    }

    std::size_t size(int64 row) const { return static_cast<std::size_t>(tokens * row); }
    sash::input query_view() const { return {query, tokens, dims.query_heads, dims.key_dim}; }
    sash::input key_view() const { return {key, tokens, dims.key_heads, dims.key_dim}; }
    sash::input value_view() const { return {value, tokens, dims.value_heads, dims.value_dim}; }
    sash::input decay_view() const { return {decay, tokens, dims.gate_heads, 1}; }
};

struct rows {
    floats out, lse;  // [tokens, heads, value_dim], [tokens, heads]; NaN where nothing was written
    explicit rows(const sequence& s)
        : out(s.size(s.dims.heads * s.dims.value_dim), std::numeric_limits<float>::quiet_NaN()),
          lse(s.size(s.dims.heads), std::numeric_limits<float>::quiet_NaN()) {}
};

inline bool same_bits(const floats& a, const floats& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// The states under a policy. A copy is a fork.
template <class P>
class layer {
public:
    layer(const P& policy, const sash::shape& s, int64 slack = 0) : policy_(policy), dims_(resolved(s)) {
        sash::detail::create<build>(store_, policy_, dims_, sash::storage{.rollback_slack = slack});
    }
    layer(const layer& other) : policy_(other.policy_), dims_(other.dims_) {
        sash::detail::copy<build>(store_, other.store_);
    }
    layer& operator=(const layer&) = delete;
    ~layer() { sash::detail::destroy<build>(store_); }

    /// Appends tokens [first, last) and gives their rows.
    void attend(const sequence& s, int64 first, int64 last, rows& r) { call(s, first, last, &r, true); }
    void append(const sequence& s, int64 first, int64 last) { call(s, first, last, nullptr, true); }
    /// Rows of the queries of [first, last), from the states as they are.
    void read(const sequence& s, int64 first, int64 last, rows& r) { call(s, first, last, &r, false); }

    bool can_rollback(int64 n) const { return sash::detail::can_rollback<build>(store_, n); }
    void rollback(int64 n) { sash::detail::rollback<build>(store_, policy_, dims_, n); }

    std::vector<std::byte> save() const {
        std::vector<std::byte> file(sash::detail::saved_bytes<build>(store_));
        sash::detail::save<build>(store_, file.data());
        return file;
    }
    bool load(const std::vector<std::byte>& file) {
        return sash::detail::load<build, P>(store_, file.data(), file.size());
    }

    /// All states, to be compared bit by bit.
    floats states() const { return floats(store_.data, store_.data + store_.states * store_.state_floats); }
    const sash::detail::state_store& store() const { return store_; }
    sash::detail::state_store& store() { return store_; }

private:
    void call(const sequence& s, int64 first, int64 last, rows* r, bool writes) {
        const int64 n = last - first;
        sash::cpu::recurrent_call c;
        c.query = s.query_view().tokens_from(first, n);
        c.key = s.key_view().tokens_from(first, n);
        c.value = s.value_view().tokens_from(first, n);
        c.decay = s.decay_view().tokens_from(first, n);
        c.reads = r != nullptr;
        c.writes = writes;
        c.scale = static_cast<float>(1 / std::sqrt(double(dims_.key_dim)));
        if (r) {
            c.out = sash::output(r->out, s.tokens, dims_.heads, dims_.value_dim).tokens_from(first, n);
            c.lse = r->lse.data() + first * dims_.heads;
        }
        const auto count = static_cast<std::size_t>(sash::cpu::recurrent_scratch(policy_, dims_));
        float* scratch = static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64));
        std::memset(static_cast<void*>(scratch), 0xff, count * sizeof(float));  // NaN
        for (int64 state = 0; state < store_.states; ++state)
            sash::cpu::recurrent<build>(policy_, dims_, store_, c, state, scratch);
        std::free(scratch);
        if (writes) sash::cpu::count_tokens(store_, c);
    }

    P policy_;
    sash::shape dims_;
    sash::detail::state_store store_;
};

/// A way of cutting n tokens into calls: random lengths up to `longest`.
inline std::vector<int64> random_cut(std::mt19937& random, int64 n, int64 longest) {
    std::vector<int64> lengths;
    for (int64 done = 0; done < n; done += lengths.back())
        lengths.push_back(std::min(n - done, 1 + static_cast<int64>(random() % static_cast<unsigned>(longest))));
    return lengths;
}

}  // namespace recurrent
