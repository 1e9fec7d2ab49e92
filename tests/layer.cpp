// What a layer does around its recurrence: golden values of rows and of whole layers, cuts, strides, narrow numbers.
#include "support/catch.hpp"
#include "support/golden_compare.hpp"

#include <sash/layer.hpp>
#include <sash/sash.hpp>

#include <cstring>
#include <random>

namespace {

using golden::disagreement;
using golden::test_case;
using sash::int64;
using floats = std::vector<float>;
namespace layer = sash::layer;

floats optional(const test_case& c, const char* name) { return c.has(name) ? c[name].floats() : floats{}; }

sash::output whole(floats& data, const golden::tensor& t) { return golden::rows(data, t, 0, t.extent(0)); }
sash::input whole(const floats& data, const golden::tensor& t) { return golden::rows(data, t, 0, t.extent(0)); }

// [tokens, channels] as one head.
sash::output channels(floats& data, const golden::tensor& t, int64 first, int64 count) {
    return {data.data() + first * t.extent(1), count, 1, t.extent(1)};
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows

void check_convolution(const test_case& c) {
    const floats weights = c["weights"].floats(), bias = optional(c, "bias");
    const layer::filter by{
        .weights = weights,
        .bias = bias,
        .activation = c.text("activation") == "silu" ? layer::activation::silu : layer::activation::none};
    const int64 tokens = c["input"].extent(0), taps = c["weights"].extent(1);
    floats whole_call;
    auto cuts = golden::cuts_of(tokens);
    cuts.push_back({c.integer("cut"), tokens - c.integer("cut")});
    for (const auto& cut : cuts) {
        floats x = c["input"].floats(),
               state(static_cast<std::size_t>(layer::filter_state(c["input"].extent(1), taps)));
        int64 done = 0;
        for (const int64 n : cut) {
            layer::convolve(channels(x, c["input"], done, n), by, state);
            done += n;
        }
        CHECK(disagreement(x, c["output"]) == "");
        if (whole_call.empty()) whole_call = x;
        CHECK(std::memcmp(x.data(), whole_call.data(), x.size() * sizeof(float)) == 0);
    }
}

void check_token_shift(const test_case& c) {
    const floats mu = c["mu"].floats();
    const int64 tokens = c["input"].extent(0), width = c["input"].extent(1);
    for (const auto& cut : golden::cuts_of(tokens)) {
        floats x = c["input"].floats(), y(x.size(), NAN), last(static_cast<std::size_t>(width));
        int64 done = 0;
        for (const int64 n : cut) {
            const sash::output part = channels(x, c["input"], done, n);
            layer::token_shift(sash::input(part), mu, last, channels(y, c["output"], done, n));
            layer::keep_last(sash::input(part), last);
            done += n;
        }
        CHECK(disagreement(y, c["output"]) == "");
    }
}

void check_row(const test_case& c) {
    INFO(c.name);
    const std::string row = c.text("row");
    if (row == "convolution") return check_convolution(c);
    if (row == "token_shift") return check_token_shift(c);
    const floats weight = optional(c, "weight"), bias = optional(c, "bias"), gate = optional(c, "gate");
    floats x = c["input"].floats();
    const sash::output out = whole(x, c["input"]);
    const float epsilon = static_cast<float>(c.real("eps"));
    const layer::norm norm{.epsilon = epsilon, .weight = weight, .bias = bias};
    if (row == "rms_norm")
        layer::rms_norm(out, {.epsilon = epsilon, .weight = weight, .groups = weight.size() > 5 ? 1 : 0});
    else if (row == "group_norm")
        layer::group_norm(out, norm);
    else if (row == "l2_norm" && epsilon < 1e-9f)
        layer::unit_norm(out, 0, epsilon);
    else if (row == "l2_norm")
        layer::unit_norm(out, epsilon);
    else if (row == "norm_then_silu_gate")
        layer::rms_norm(out, norm), layer::multiply_by_silu(out, whole(gate, c["gate"]));
    else if (row == "norm_then_sigmoid_gate")
        layer::rms_norm(out, norm), layer::multiply_by_sigmoid(out, whole(gate, c["gate"]));
    else if (row == "silu_gate_then_norm")
        layer::multiply_by_silu(out, whole(gate, c["gate"])),
            layer::rms_norm(out, {.epsilon = epsilon, .weight = weight, .groups = c.integer("groups")});
    else
        FAIL("no row function for " << row);
    CHECK(disagreement(x, c["output"]) == "");
}

// ---------------------------------------------------------------------------------------------------------------------
// Layers, from the core's output to what goes into the output projection

// The inputs of a part of a layer behind its convolution. Channels of the filter are those of the parts, in order.
floats convolved(const test_case& c, const std::vector<const char*>& parts, const char* wanted, bool silu) {
    const floats weights = c["conv_weights"].floats(), bias = optional(c, "conv_bias");
    std::size_t channel = 0;
    for (const char* part : parts) {
        floats x = c[part].floats(), state;
        const auto tokens = static_cast<std::size_t>(c[part].extent(0)), width = x.size() / tokens;
        state.resize(width * 3);
        const layer::filter by{
            .weights = std::span(weights).subspan(4 * channel, 4 * width),
            .bias = bias.empty() ? std::span<const float>() : std::span<const float>(bias).subspan(channel, width),
            .activation = silu ? layer::activation::silu : layer::activation::none};
        layer::convolve({x.data(), int64(tokens), 1, int64(width)}, by, state);
        if (part == wanted) return x;
        channel += width;
    }
    throw std::runtime_error("no such part");
}

void check_layer(const test_case& c) {
    INFO(c.name);
    const std::string name = c.text("layer");
    const floats weight = optional(c, "norm_weight"), bias = optional(c, "norm_bias"), gate = optional(c, "gate"),
                 gate_bias = optional(c, "gate_bias"), skip = optional(c, "D");
    floats x = c["core_output"].floats();
    golden::tensor shape = c["core_output"];
    if (shape.shape.size() == 2) shape.shape.push_back(1);  // Mamba: a head is a channel
    const sash::output out = whole(x, shape);
    sash::input by;
    if (!gate.empty()) by = {gate.data(), out.tokens, out.heads, out.dim};
    layer::norm norm{.epsilon = static_cast<float>(c.real("eps", 0)), .weight = weight, .bias = bias};

    if (name == "gla" || name == "gated_deltanet" || name == "retnet") {
        layer::rms_norm(out, norm);
        layer::multiply_by_silu(out, by);
    } else if (name == "kda") {
        layer::rms_norm(out, norm);
        layer::multiply_by_sigmoid(out, by);
    } else if (name == "deltanet") {
        layer::rms_norm(out, norm);
    } else if (name == "lightning") {
        norm.groups = 1;
        layer::rms_norm(out, norm);
        layer::multiply_by_sigmoid(out, by);
    } else if (name == "supra") {
        layer::group_norm(out, norm);
    } else if (name == "rwkv6") {
        layer::group_norm(out, norm);
        layer::multiply_by_silu(out, by);
    } else if (name == "qrwkv6") {
        layer::multiply_by_sigmoid(out, by);
    } else if (name == "mamba2" || name == "mamba" || name == "mohawk") {
        const floats from =
            name == "mamba" ? convolved(c, {"x"}, "x", true) : convolved(c, {"x", "B", "C"}, "x", name == "mamba2");
        layer::add_skip(out, {from.data(), out.tokens, out.heads, out.dim}, skip);
        layer::multiply_by_silu(out, by, gate_bias);
        norm.groups = name == "mamba2" ? c.integer("groups") : 0;
        if (name == "mamba2") layer::rms_norm(out, norm);
    } else if (name == "rwkv7" || name == "qrwkv7") {
        const bool bonus = name == "rwkv7";
        layer::group_norm(out, norm);
        const floats query = c["query"].floats(), key = c["written_key"].floats(), r_k = optional(c, "r_k");
        const floats value = bonus ? c["written_value"].floats() : floats{};
        if (bonus)
            layer::add_current(out, whole(query, c["query"]), whole(key, c["written_key"]),
                               whole(value, c["written_value"]), r_k);
        for (std::size_t i = 0; i < x.size(); ++i) x[i] *= gate[i];  // this gate is a plain factor
    } else {
        FAIL("no layer " << name);
    }
    CHECK(disagreement(x, c["output"], {2e-5 * golden::largest(c["output"]), 0}) == "");
}

}  // namespace

TEST_CASE("R22 R23 R24 golden: functions of rows around a recurrence") {
    int checked = 0;
    for (const auto& c : golden::read_beside(__FILE__, "rows")) check_row(c), ++checked;
    CHECK(checked == 20);
}

TEST_CASE("R22 R24 golden: layers, from the core's output to the normed and gated rows") {
    int checked = 0;
    for (const auto& c : golden::read_beside(__FILE__, "layers")) check_layer(c), ++checked;
    CHECK(checked == 16);
}

// ---------------------------------------------------------------------------------------------------------------------
// Against double loops: rows longer than a piece, strided, narrow

namespace {

floats random(std::size_t count, unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    floats x(count);
    for (float& number : x) number = normal(generator);
    return x;
}

template <class T>
std::vector<T> narrowed(const floats& x) {
    std::vector<T> made;
    for (const float number : x) made.push_back(T(number));
    return made;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Largest error of `got` [tokens, heads, dim], dims apart by `stride`, in units of `unit` · (1 + |expected|).
template <class T>
double error(const std::vector<T>& got, const std::vector<double>& expected, std::size_t stride, double unit) {
    double worst = 0;
    for (std::size_t i = 0; i < expected.size(); ++i)
        worst = std::max(worst,
                         std::abs(double(float(got[i * stride])) - expected[i]) / (unit * (1 + std::abs(expected[i]))));
    return worst;
}

}  // namespace

TEMPLATE_TEST_CASE("R27 layer: long rows, strided and of every type, against double", "", float, sash::float16,
                   sash::bfloat16) {
    constexpr std::size_t tokens = 5, heads = 3, dim = 131, stride = 2, count = tokens * heads * dim;
    const double unit = std::is_same_v<TestType, float> ? 1e-6 : std::is_same_v<TestType, sash::float16> ? 1e-3 : 8e-3;
    const std::vector<TestType> from = narrowed<TestType>(random(count * stride, 1)),
                                gate = narrowed<TestType>(random(count, 2));
    const floats weight = random(heads * dim, 3), bias = random(dim, 4);
    const auto view = [](std::vector<TestType>& x) {
        return sash::output(x, tokens, heads, dim, heads * dim * stride, dim * stride, stride);
    };
    std::vector<double> expected(count);

    SECTION("root mean square of all heads") {
        auto x = from;
        layer::rms_norm(view(x), {.epsilon = 1e-5f, .weight = weight, .bias = bias, .groups = 1});
        for (std::size_t t = 0; t < tokens; ++t) {
            double squares = 0;
            for (std::size_t i = 0; i < heads * dim; ++i)
                squares += std::pow(float(from[(t * heads * dim + i) * stride]), 2);
            for (std::size_t i = 0; i < heads * dim; ++i)
                expected[t * heads * dim + i] = float(from[(t * heads * dim + i) * stride]) /
                                                    std::sqrt(squares / (heads * dim) + 1e-5) * weight[i] +
                                                bias[i % dim];
        }
        CHECK(error(x, expected, stride, unit) < 1);
        for (std::size_t i = 1; i < x.size(); i += stride) REQUIRE(float(x[i]) == float(from[i]));  // between the rows
    }
    SECTION("gates") {
        auto x = from, y = from;
        layer::multiply_by_silu(view(x), sash::input(gate, tokens, heads, dim), bias);
        layer::multiply_by_sigmoid(view(y), sash::input(gate, tokens, heads, dim));
        std::vector<double> by_sigmoid(count);
        for (std::size_t i = 0; i < count; ++i) {
            const double z = double(float(gate[i])) + bias[i % dim];
            expected[i] = float(from[i * stride]) * z * sigmoid(z);
            by_sigmoid[i] = float(from[i * stride]) * sigmoid(float(gate[i]));
        }
        CHECK(error(x, expected, stride, unit) < 1);
        CHECK(error(y, by_sigmoid, stride, unit) < 1);
    }
    SECTION("convolution, cut everywhere") {
        constexpr std::size_t taps = 3;
        const floats taps_of = random(heads * dim * taps, 5), offset = random(heads * dim, 6);
        for (std::size_t t = 0; t < tokens; ++t)
            for (std::size_t c = 0; c < heads * dim; ++c) {
                double& y = expected[t * heads * dim + c] = offset[c];
                for (std::size_t j = 0; j < taps; ++j)
                    if (t + j + 1 >= taps)
                        y += taps_of[c * taps + j] * float(from[((t + j + 1 - taps) * heads * dim + c) * stride]);
            }
        for (std::size_t cut = 0; cut <= tokens; ++cut) {
            auto x = from;
            floats state(heads * dim * (taps - 1));
            const sash::output all = view(x);
            layer::convolve(all.tokens_from(0, int64(cut)), {.weights = taps_of, .bias = offset}, state);
            layer::convolve(all.tokens_from(int64(cut), int64(tokens - cut)), {.weights = taps_of, .bias = offset},
                            state);
            CAPTURE(cut);
            CHECK(error(x, expected, stride, unit) < 1);
        }
    }
}

TEST_CASE("R19 layer: a NaN stays in its row, and a convolution forgets it") {
    floats x = random(6 * 2 * 3, 7), weights(2 * 3 * 3, 0.5f), state(2 * 3 * 2);
    x[3 * 6 + 4] = NAN;
    floats normed = x;
    layer::rms_norm({normed, 6, 2, 3});
    layer::convolve({x, 6, 2, 3}, {.weights = weights}, state);
    for (std::size_t i = 0; i < x.size(); ++i) {
        const std::size_t token = i / 6, channel = i % 6;
        CAPTURE(i);
        CHECK(std::isnan(normed[i]) == (token == 3 && channel >= 3));
        CHECK(std::isnan(x[i]) == (channel == 4 && token >= 3));  // three taps: tokens 3, 4 and 5
    }
    layer::convolve({x.data(), 1, 2, 3}, {.weights = weights}, state);
    CHECK(!std::isnan(x[3]));
}

TEST_CASE("layer: sizes that do not fit are refused, and nothing is written") {
    floats x = random(4 * 2 * 3, 8), state(2 * 3 * 3), few(5);
    const floats before = x;
    const sash::output out(x, 4, 2, 3);
    CHECK_THROWS_AS(layer::rms_norm(out, {.weight = few}), sash::error);
    CHECK_THROWS_AS(layer::group_norm(out, {.bias = few}), sash::error);
    CHECK_THROWS_AS(layer::rms_norm(out, {.groups = 4}), sash::error);
    CHECK_THROWS_AS(layer::multiply_by_silu(out, {x, 4, 3, 2}), sash::error);
    CHECK_THROWS_AS(layer::multiply_by_sigmoid(out, {x, 4, 2, 3}, few), sash::error);
    CHECK_THROWS_AS(layer::add_skip(out, {x, 4, 2, 3}, few), sash::error);
    CHECK_THROWS_AS(layer::convolve(out, {.weights = few}, state), sash::error);
    CHECK_THROWS_AS(layer::convolve(out, {.weights = floats(6 * 4), .bias = few}, state), sash::error);
    CHECK_THROWS_AS(layer::convolve(out, {.weights = floats(6 * 3)}, state), sash::error);
    CHECK_THROWS_AS(layer::convolve(out, {.weights = floats(6 * 17)}, state), sash::error);
    CHECK_THROWS_AS(layer::token_shift({x, 4, 2, 3}, few, floats(6), out), sash::error);
    CHECK_THROWS_AS(layer::keep_last({x, 4, 2, 3}, few), sash::error);
    CHECK(x == before);
}
