// Golden values of whole layers (tests/golden/README.md): gates, and the core's output from raw projections.
#include "support/golden_linear.hpp"

namespace {

using namespace golden_linear;
namespace systems = sash::systems;

// ---------------------------------------------------------------------------------------------------------------------
// Gates

namespace gate = sash::gate;

// Number i of an input: the files abbreviate float32.
template <class N>
N number(const test_case& c, const char* name, std::size_t i) {
    return N(static_cast<float>(c[name].values[i]));
}

// The gate of a case for number i of its raw numbers, [tokens, heads] or [tokens, heads, features].
template <class N>
N gated(const test_case& c, std::size_t i) {
    const std::string name = c.text("gate");
    const golden::tensor& raw = c["raw"];
    const std::size_t width = raw.values.size() / static_cast<std::size_t>(raw.extent(0)),
                      features = raw.shape.size() > 2 ? static_cast<std::size_t>(raw.extent(2)) : 1;
    const auto parameter = [&](const char* of, std::size_t at) { return c.has(of) ? number<N>(c, of, at) : N(0); };
    const N x = number<N>(c, "raw", i), bias = parameter("dt_bias", i % width),
            A_log = parameter("A_log", i % width / features);
    if (name == "logsigmoid") return gate::gla(x, N(c.real("divisor")));
    if (name == "mamba2")
        return gate::mamba(gate::mamba_step(x, bias, N(c.real("least")), N(c.real("most", 1e30))), A_log);
    if (name == "mohawk") return gate::mohawk(x);
    if (name == "gated_deltanet") return gate::gated_delta(x, A_log, bias);
    if (name == "kda") return gate::kda(x, A_log, bias);
    if (name == "kda_bounded") return gate::kda_bounded(x, A_log, bias, N(c.real("lower_bound")));
    if (name == "rwkv6") return gate::rwkv6(x);
    if (name == "qrwkv6") return gate::qrwkv6(x);
    if (name == "rwkv7") return gate::rwkv7(x);
    if (name == "qrwkv7") return gate::qrwkv7(x);
    throw std::runtime_error("no gate '" + name + "'");
}

template <class N>
std::vector<N> decays_of(const test_case& c) {
    std::vector<N> made;
    if (c.text("gate") == "mamba") {  // A_log [channels, states]
        const auto channels = static_cast<std::size_t>(c["A_log"].extent(0)),
                   states = c["A_log"].values.size() / channels;
        for (std::size_t i = 0; i < c["raw"].values.size() * states; ++i) {
            const N step =
                gate::mamba_step(number<N>(c, "raw", i / states), number<N>(c, "dt_bias", i / states % channels));
            made.push_back(gate::mamba(step, number<N>(c, "A_log", i % (channels * states))));
        }
        return made;
    }
    for (std::size_t i = 0; i < c["raw"].values.size(); ++i) made.push_back(gated<N>(c, i));
    return made;
}

floats table_of(const test_case& c) {
    const int64 heads = c.integer("heads");
    const sash::constant_per_head made = c.text("table") == "retnet" ? sash::retnet_decays(heads)
                                         : c.text("table") == "alibi"
                                             ? sash::alibi_decays(heads)
                                             : sash::lightning_decays(heads, c.integer("layer"), c.integer("layers"));
    return floats(made.logs, made.logs + made.heads);
}

void check_gate(const test_case& c) {
    CAPTURE(c.name);
    if (c.text("table") != "") {
        CHECK(disagreement(table_of(c), c["decay"], {1e-12, 1e-7}) == "");
        return;
    }
    CHECK(disagreement(decays_of<double>(c), c["decay"], {1e-35, 6e-9}) == "");  // nine digits
    CHECK(disagreement(decays_of<float>(c), c["decay"], {1e-35, 2e-5}) == "");  // sums of up to 100 inside exponentials
}

// ---------------------------------------------------------------------------------------------------------------------
// Layers up to the core's output: raw projections, convolved where the layer does, through the gates. Each function
// takes the case as its own, and puts what the core is to be given in the place of what was projected.

std::size_t size(int64 n) { return static_cast<std::size_t>(n); }

// The same numbers, each through f(number, its index).
template <class F>
golden::tensor each(golden::tensor t, const F& f) {
    for (std::size_t i = 0; i < t.values.size(); ++i) t.values[i] = double(f(static_cast<float>(t.values[i]), i));
    return t;
}
// [tokens, heads] -> [tokens, heads, 1]
golden::tensor as_column(golden::tensor t) {
    if (t.shape.size() == 2) t.shape.push_back(1);
    return t;
}

template <class F>
void apply(test_case& c, const std::vector<const char*>& parts, const F& f) {
    for (const char* part : parts) c.tensors[part] = each(c[part], [&](float x, std::size_t) { return f(x); });
}

// The causal convolution of four taps over the channels of the parts, one part after the other, with a bias if there is
// one: y[t, c] = b_c + sum_j w[c, j] x[t - 3 + j, c].
void convolve(test_case& c, const std::vector<const char*>& parts) {
    const std::vector<double>& weights = c["conv_weights"].values;
    std::size_t channel = 0;
    for (const char* part : parts) {
        golden::tensor& x = c.tensors[part];
        const std::size_t width = x.values.size() / size(x.extent(0));
        const std::vector<double> from = x.values;
        for (std::size_t i = 0; i < from.size(); ++i) {
            const std::size_t at = channel + i % width;
            x.values[i] = c.has("conv_bias") ? c["conv_bias"].values[at] : 0.0;
            for (std::size_t back = 0; back < 4 && back <= i / width; ++back)
                x.values[i] += weights[4 * at + 3 - back] * from[i - back * width];
        }
        channel += width;
    }
    REQUIRE(4 * channel == weights.size());
}

// The decays that the gate makes of the raw numbers must be those of the public code; the core gets the gate's.
template <class Gate>
void form_decay(test_case& c, const Gate& gate_of) {
    const golden::tensor made = as_column(each(c["decay_raw"], gate_of));
    CHECK(disagreement(made.floats(), c["decay"], {1e-35, 1e-5}) == "");
    c.tensors["decay"] = made;
}

template <class Policy>
void check_core(test_case& c, const Policy& policy) {
    c.tensors["output"] = as_column(c["core_output"]);
    check_case(c, policy);
}

void check_gla_layer(test_case c) {
    form_decay(c, [](float x, std::size_t) { return gate::gla(x); });
    check_core(c, systems::gla{});
}

// RetNet, lightning, SUPRA: constant decays, of every head.
template <class Policy>
void check_constant_layer(test_case c, const sash::constant_per_head& decays) {
    if (c.text("layer") == "lightning") apply(c, {"query", "key", "value"}, sash::silu{});
    if (c.text("layer") == "supra") apply(c, {"query", "key"}, sash::relu{});
    check_core(c, Policy{.decay = decays});
}

// Query, key and value of a state-space layer are C, B and x.
void as_attention(test_case& c) {
    c.tensors["query"] = c["C"];
    c.tensors["key"] = c["B"];
    for (const char* part : {"query", "key"}) {
        auto& shape = c.tensors[part].shape;
        if (shape.size() == 2) shape.insert(shape.begin() + 1, 1);  // Mamba: one head of B and C for all channels
    }
    c.tensors["value"] = as_column(c["x"]);
}

void check_mohawk_layer(test_case c) {
    convolve(c, {"x", "B", "C"});
    as_attention(c);
    form_decay(c, [](float a, std::size_t) { return gate::mohawk(a); });
    check_core(c, systems::mohawk{});
}

// v = dt x, g = dt A. A_log is [heads], or [heads, features] for Mamba, whose heads are channels.
template <class Policy>
void check_mamba_layer(test_case c, const std::vector<const char*>& convolved) {
    convolve(c, convolved);
    apply(c, convolved, sash::silu{});
    as_attention(c);
    const std::size_t heads = size(c.integer("heads")), width = size(c["value"].extent(2)),
                      features = c["A_log"].values.size() / heads;
    const auto least = static_cast<float>(c.real("least", 0)), most = static_cast<float>(c.real("most", 1e30));
    const floats steps = each(c["decay_raw"], [&](float raw, std::size_t i) {
                             return gate::mamba_step(raw, number<float>(c, "dt_bias", i % heads), least, most);
                         }).floats();
    CHECK(disagreement(steps, c["dt"], {0, 1e-5}) == "");
    c.tensors["value"] = each(c["value"], [&](float x, std::size_t i) { return x * steps[i / width]; });
    c.tensors["decay_raw"] = {{c["x"].extent(0), c["x"].extent(1), int64(features)},
                              std::vector<double>(steps.size() * features)};
    form_decay(c, [&](float, std::size_t i) {
        return gate::mamba(steps[i / features], number<float>(c, "A_log", i % (heads * features)));
    });
    check_core(c, Policy{});
}

// DeltaNet, Gated DeltaNet, KDA: convolution and SiLU of query, key and value, beta a sigmoid.
test_case delta_layer(test_case c) {
    convolve(c, {"query", "key", "value"});
    apply(c, {"query", "key", "value"}, sash::silu{});
    c.tensors["beta_raw"] = as_column(c["beta_raw"]);
    const golden::tensor beta = each(c["beta_raw"], [](float x, std::size_t) { return gate::sigmoid(x); });
    CHECK(disagreement(beta.floats(), c["beta"], {0, 1e-6}) == "");
    c.tensors["beta"] = beta;
    return c;
}
void check_gated_deltanet_layer(test_case c) {
    const std::size_t heads = size(c.integer("heads"));
    form_decay(c, [&](float x, std::size_t i) {
        return gate::gated_delta(x, number<float>(c, "A_log", i % heads), number<float>(c, "dt_bias", i % heads));
    });
    check_core(c, systems::gated_deltanet{});
}
void check_kda_layer(test_case c) {
    const std::size_t features = size(c["key"].extent(2)), width = size(c.integer("heads")) * features;
    form_decay(c, [&](float x, std::size_t i) {
        return gate::kda(x, number<float>(c, "A_log", i % width / features), number<float>(c, "dt_bias", i % width));
    });
    check_core(c, systems::kda{});
}

void check_rwkv6_layer(test_case c) {
    const floats bonus = c["bonus"].floats();
    form_decay(c, [](float w, std::size_t) { return gate::rwkv6(w); });
    check_core(c, systems::rwkv6{.update = {.bonus = bonus}});
}

// The key is written as k (1 - exp(g)), once for each query head.
void check_qrwkv6_layer(test_case c) {
    form_decay(c, [](float w, std::size_t) { return gate::qrwkv6(w); });
    const golden::tensor key = c["key"];
    const std::size_t features = size(key.extent(2)), group = size(c.integer("heads") / key.extent(1));
    c.tensors["key"] = each(c["decay"], [&](float g, std::size_t i) {
        const std::size_t row = i / features / group;
        return float(key.values[row * features + i % features]) * -std::expm1(g);
    });
    CHECK(disagreement(c["key"].floats(), c["written_key"], {1e-7, 1e-6}) == "");
    check_core(c, systems::qrwkv6{});
}

// Key, value, removal and replacement as the layer makes them.
void check_rwkv7_layer(test_case c) {
    const bool in_qwen = c.text("layer") == "qrwkv7";
    form_decay(c, [&](float w, std::size_t) { return in_qwen ? gate::qrwkv7(w) : gate::rwkv7(w); });
    c.tensors["key"] = c["written_key"];
    if (c.has("written_value")) c.tensors["value"] = c["written_value"];
    if (c.has("turned_query")) c.tensors["query"] = c["turned_query"];
    c.tensors.erase("frequencies");  // both are turned
    check_core(c, systems::rwkv7{});
}

void check_layer(const test_case& c) {
    INFO(c.name);
    const std::string layer = c.text("layer");
    const int64 heads = c.integer("heads");
    if (layer == "gla") return check_gla_layer(c);
    if (layer == "retnet") return check_constant_layer<systems::retnet>(c, sash::retnet_decays(heads));
    if (layer == "supra") return check_constant_layer<systems::supra>(c, sash::alibi_decays(heads));
    if (layer == "lightning")
        return check_constant_layer<systems::lightning>(
            c, sash::lightning_decays(heads, c.integer("layer_index"), c.integer("layers")));
    if (layer == "mohawk") return check_mohawk_layer(c);
    if (layer == "mamba2") return check_mamba_layer<systems::mamba2>(c, {"x", "B", "C"});
    if (layer == "mamba") return check_mamba_layer<systems::mamba>(c, {"x"});
    if (layer == "rwkv6") return check_rwkv6_layer(c);
    if (layer == "qrwkv6") return check_qrwkv6_layer(c);
    if (layer == "rwkv7" || layer == "qrwkv7") return check_rwkv7_layer(c);
    if (layer == "gated_deltanet") return check_gated_deltanet_layer(delta_layer(c));
    if (layer == "kda") return check_kda_layer(delta_layer(c));
    test_case made = delta_layer(c);
    REQUIRE(layer == "deltanet");
    check_core(made, systems::deltanet{});
}

// The linear half of Liger: softmax of raw queries and keys over their dims, gates made of the raw keys.
void check_liger(test_case c) {
    INFO(c.name << ", the linear half");
    c.tensors["decay_raw"] = c["key"];
    form_decay(c, [](float k, std::size_t) { return gate::gla(k); });
    c.tensors["core_output"] = c["linear_output"];
    c.tensors.erase("frequencies");  // they are the window's
    check_core(c, systems::liger_linear{});
}

}  // namespace

TEST_CASE("R24 golden: gates and tables of decays") { CHECK(check_file(__FILE__, "gates", check_gate) == 19); }

TEST_CASE("R22 R24 R26 golden: layers, from raw projections to the core's output") {
    CHECK(check_file(__FILE__, "layers", check_layer) == 16);
}

TEST_CASE("R22 R24 R26 golden: the linear half of Liger") {
    int checked = 0;
    for (const auto& c : golden::read_beside(__FILE__, "hybrids"))
        if (c.text("system") == "liger_gla") check_liger(c), ++checked;
    CHECK(checked == 5);
}
