// The seam for GPU kernels: policies, scores, rotary positions, partials, storage types and views are constexpr
// functions of trivially copyable structs, so that one struct, written once by anybody, runs in the reference, on the
// CPU and here.
//
//   nvcc -std=c++20 -arch=sm_80 --expt-relaxed-constexpr -Iinclude -c tests/static/seam.cu
//
// That it compiles is the test. Built as a program (without -c), it runs each kernel where there is a GPU and compares
// it with the very same function on the host.
#include <sash/full.hpp>
#include <sash/partial.hpp>
#include <sash/policy.hpp>
#include <sash/rope.hpp>
#include <sash/scalar.hpp>
#include <sash/score.hpp>
#include <sash/sliding_window.hpp>
#include <sash/view.hpp>

#include <cstdio>
#include <vector>

using sash::int64;

// A user's policy: every `step`-th key back, `count` of them, and a window of its own for each KV head.
struct dilated {
    int64 step = 2, count = 8;

    constexpr int64 reach(int64 kv_head) const { return step * (count << kv_head); }
    constexpr bool sees(int64 query, int64 key, int64 kv_head) const {
        return key <= query && query - key < reach(kv_head) && (query - key) % step == 0;
    }
    constexpr sash::key_intervals<1> visible(int64 first_query, int64 last_query, int64 kv_head) const {
        sash::key_intervals<1> keys;
        keys.add(first_query - reach(kv_head) + 1, last_query);
        return keys;
    }
};
static_assert(sash::softmax_policy<dilated>);

struct plain_score {
    template <class N, class Site>
    constexpr N operator()(N s, const Site&) const {
        return s;
    }
};

// A user's score: a soft cap, then a slope per head.
struct capped {
    float cap;
    sash::per_head slope;

    template <class N, class Site>
    constexpr N operator()(N s, const Site& at) const {
        using std::tanh;
        return N(cap) * tanh(s / N(cap)) - at.of_head(slope) * at.distance();
    }
};

constexpr int64 dim = 8, tokens = 64, heads = 2;
constexpr int64 pairs = dim / 2;

template <class Element>
struct operands {
    sash::input query, key, value;  // [tokens, heads, dim]; key and value are Elements, the query is float
    const double* frequencies;      // [pairs]; the query arrives turned, and turns once more for keys in another frame
};

// One output row of softmax attention by one thread: a partial for each interval of keys, then their merge.
template <class P, class Score, class Element>
constexpr float attend_row(const P& policy, const Score& score, const operands<Element>& in, int64 query, int64 head,
                           float* out) {
    float sum[dim] = {};
    sash::partial row{{sum, dim}};
    const auto* q = static_cast<const float*>(in.query.at(query, head));
    for (const sash::key_interval& keys : sash::ask::visible(policy, query, query + 1, head)) {
        float turned[dim] = {};
        for (int64 c = 0; c < dim; ++c) turned[c] = q[c];
        if (const int64 back = sash::ask::read_position(policy, query, keys.frame) - query; back != 0)
            for (int64 p = 0; p < pairs; ++p) {
                const auto angle = static_cast<float>(static_cast<double>(back) * in.frequencies[p]);
                float& a = turned[sash::pair_first(sash::rotary_layout::half_split, p)];
                float& b = turned[sash::pair_second(sash::rotary_layout::half_split, p, pairs)];
                sash::turn_pair(a, b, std::cos(angle), std::sin(angle));
            }
        float part[dim] = {};
        sash::partial of_interval{{part, dim}};
        for (int64 j = keys.first; j < keys.last; ++j) {
            if (!sash::ask::sees(policy, query, j, head)) continue;
            const auto* k = static_cast<const Element*>(in.key.at(j, head));
            const auto* v = static_cast<const Element*>(in.value.at(j, head));
            float dot = 0, value[dim] = {};
            for (int64 c = 0; c < dim; ++c) dot += turned[c] * static_cast<float>(k[c]), value[c] = v[c];
            const sash::scalar_site at{static_cast<float>(sash::ask::distance(policy, query, j, head)), head};
            of_interval.push(score(dot, at), {value, dim});
        }
        row.merge(of_interval);
    }
    row.finish({out, dim});
    return row.lse();
}

template <class P, class Score, class Element>
__global__ void attend_rows(P policy, Score score, operands<Element> in, sash::output out, float* lse) {
    const int64 query = blockIdx.x, head = threadIdx.x;
    lse[query * heads + head] = attend_row(policy, score, in, query, head, static_cast<float*>(out.at(query, head)));
}

// ---------------------------------------------------------------------------------------------------------------------

template <class T>
struct managed {
    T* data = nullptr;
    explicit managed(int64 count) { cudaMallocManaged(&data, static_cast<std::size_t>(count) * sizeof(T)); }
    managed(const managed&) = delete;
    managed& operator=(const managed&) = delete;
    ~managed() { cudaFree(data); }
};

template <class Element, class P, class Score>
bool same_on_both(const char* name, const P& policy, const Score& score) {
    constexpr int64 count = tokens * heads * dim;
    managed<float> query(count), out(count), lse(tokens * heads);
    managed<Element> key(count), value(count);
    managed<double> frequencies(pairs);
    for (int64 p = 0; p < pairs; ++p) frequencies.data[p] = 1.0 / static_cast<double>(1 << 2 * p);
    for (int64 i = 0; i < count; ++i) {
        const auto x = [i](int64 by) { return static_cast<float>((37 * i * by + 11) % 101) / 50 - 1; };
        query.data[i] = x(1), key.data[i] = Element(x(3)), value.data[i] = Element(x(7)), out.data[i] = 1e30f;
    }
    const operands<Element> in{{query.data, tokens, heads, dim},
                               {key.data, tokens, heads, dim},
                               {value.data, tokens, heads, dim},
                               frequencies.data};
    attend_rows<<<tokens, heads>>>(policy, score, in, {out.data, tokens, heads, dim}, lse.data);
    if (cudaDeviceSynchronize() != cudaSuccess) return false;
    float largest = 0, expected[dim];
    for (int64 t = 0; t < tokens; ++t)
        for (int64 h = 0; h < heads; ++h) {
            const float expected_lse = attend_row(policy, score, in, t, h, expected);
            largest = std::fmax(largest, std::fabs(expected_lse - lse.data[t * heads + h]));
            for (int64 c = 0; c < dim; ++c)
                largest = std::fmax(largest, std::fabs(expected[c] - out.data[(t * heads + h) * dim + c]));
        }
    std::printf("%-40s largest difference %.1e\n", name, static_cast<double>(largest));
    return largest < 1e-5f;
}

int main() {
    if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("no GPU here\n");
        return 77;
    }
    managed<float> slopes(heads);
    slopes.data[0] = 0.25f, slopes.data[1] = 0.0625f;
    const capped user_score{5, {slopes.data}};
    bool good = same_on_both<float>("full", sash::full{}, plain_score{});
    good &= same_on_both<sash::float16>("window and sinks, original frame",
                                        sash::sliding_window{.window = 7, .sinks = 3}, plain_score{});
    good &= same_on_both<sash::bfloat16>("window and sinks, compact, a user's score",
                                         sash::sliding_window{.window = 7, .sinks = 3, .frame = sash::frame::compact},
                                         user_score);
    good &= same_on_both<float>("a user's policy, a user's score", dilated{}, user_score);
    return good ? 0 : 1;
}
