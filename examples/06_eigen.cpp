// Lesson 6: sash in a layer written with Eigen. Queries, keys and values stay where the projection put them: blocks of
// one matrix.
#include "lesson.hpp"

#include <sash/interop/eigen.hpp>
#include <sash/sash.hpp>

#include <Eigen/Core>

namespace {

using sash::int64;
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr int64 width = 96, heads = 6, kv_heads = 2, dim = 16, window = 20, sinks = 2;

// The blocks of x [Wq Wk Wv].
auto query(const matrix& qkv) { return qkv.leftCols(heads * dim); }
auto key(const matrix& qkv) { return qkv.middleCols(heads * dim, kv_heads * dim); }
auto value(const matrix& qkv) { return qkv.rightCols(kv_heads * dim); }

// y = attention(x Wq, x Wk, x Wv) Wo, with a cache of its own: x may be a prompt or a single token.
class attention_layer {
public:
    explicit attention_layer(unsigned seed)
        : in_(random(width, (heads + 2 * kv_heads) * dim, seed)),
          out_(random(heads * dim, width, seed + 1)),
          cache_(sash::sliding_window{.window = window, .sinks = sinks},
                 {.heads = heads, .kv_heads = kv_heads, .head_dim = dim}) {}

    matrix operator()(const matrix& x) {
        const matrix qkv = x * in_;  // [tokens, (heads + 2 kv_heads) dim]
        matrix rows(x.rows(), heads * dim);
        sash::attend(sash::view(query(qkv), heads), sash::view(key(qkv), kv_heads), sash::view(value(qkv), kv_heads),
                     cache_, sash::view(rows, heads));
        return rows * out_;
    }

    // The same for a whole sequence, as Eigen says it.
    Eigen::MatrixXd by_hand(const matrix& x) const {
        const matrix qkv = x * in_;
        Eigen::MatrixXd rows(x.rows(), heads * dim);
        for (int64 h = 0; h < heads; ++h) {
            const int64 kv = h / (heads / kv_heads);
            const Eigen::MatrixXd q = query(qkv).middleCols(h * dim, dim).cast<double>();
            const Eigen::MatrixXd k = key(qkv).middleCols(kv * dim, dim).cast<double>();
            const Eigen::MatrixXd v = value(qkv).middleCols(kv * dim, dim).cast<double>();
            Eigen::MatrixXd weights = (q * k.transpose() / std::sqrt(double(dim))).array().exp();
            for (int64 i = 0; i < x.rows(); ++i)
                for (int64 j = 0; j < x.rows(); ++j)
                    if (j > i || (i - j >= window && j >= sinks)) weights(i, j) = 0;
            const Eigen::VectorXd mass = weights.rowwise().sum();
            rows.middleCols(h * dim, dim) = mass.cwiseInverse().asDiagonal() * weights * v;
        }
        return rows * out_.cast<double>();
    }

private:
    static matrix random(int64 rows, int64 columns, unsigned seed) {
        const std::vector<float> numbers = lesson::numbers(rows * columns, seed);
        return Eigen::Map<const matrix>(numbers.data(), rows, columns) / std::sqrt(float(rows));
    }

    matrix in_, out_;
    sash::kv_cache<sash::sliding_window> cache_;
};

}  // namespace

int main() {
    constexpr int64 tokens = 60, prompt = 48;
    const std::vector<float> numbers = lesson::numbers(tokens * width, 1);
    const matrix x = Eigen::Map<const matrix>(numbers.data(), tokens, width);

    attention_layer layer(2);
    matrix y(tokens, width);
    y.topRows(prompt) = layer(x.topRows(prompt));
    for (int64 t = prompt; t < tokens; ++t) y.row(t) = layer(x.row(t));

    lesson::say("a layer of width ", width, ", a prompt of ", prompt, " tokens, then one at a time");
    lesson::expect_near((y.cast<double>() - layer.by_hand(x)).cwiseAbs().maxCoeff(), 1e-5,
                        "against the same layer in Eigen's own words");

    // ---- Any matrix will do: column-major, a block of a larger one, half precision. Only the strides and the element
    // type differ.
    const Eigen::Matrix<Eigen::bfloat16, Eigen::Dynamic, Eigen::Dynamic> brain =
        x.leftCols(dim).cast<Eigen::bfloat16>();
    const matrix rounded = brain.cast<float>();
    const matrix copied = x.leftCols(dim);
    matrix a(tokens, dim), b(tokens, dim), c(tokens, dim), d(tokens, dim);
    const auto attend = [](const auto& qkv, matrix& rows) {
        sash::attend(sash::full{}, sash::view(qkv, 1), sash::view(qkv, 1), sash::view(qkv, 1), sash::view(rows, 1));
    };
    attend(rounded, a), attend(brain, b);
    attend(copied, c), attend(x.leftCols(dim), d);
    lesson::expect_near((a - b).cwiseAbs().maxCoeff(), 1e-6, "bfloat16, column-major: as the same numbers in float");
    lesson::expect_near((c - d).cwiseAbs().maxCoeff(), 1e-6, "a block of a wider matrix: as a copy of it");
    return lesson::exit_code();
}
