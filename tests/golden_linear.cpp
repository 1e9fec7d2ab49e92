// Golden values of the linear family, system by system (tests/golden/README.md): an oracle that shares no code with the
// library.
#include "support/golden_linear.hpp"

namespace {

using namespace golden_linear;

test_case find(const std::string& file, const std::string& name) {
    for (const auto& c : golden::read_beside(__FILE__, file))
        if (c.name == name) return c;
    throw std::runtime_error("no golden case " + name);
}

// ---------------------------------------------------------------------------------------------------------------------
// The systems

namespace systems = sash::systems;
using sash::additive, sash::delta, sash::no_normaliser, sash::unscaled;
using sash::identity, sash::l2_normalised, sash::silu, sash::normalised_by_caller;
using sash::no_decay, sash::constant_per_head, sash::per_head_and_token, sash::per_channel_and_token;

// Decays [gate_heads] that do not change.
template <class Policy>
void check_constant(const test_case& c) {
    const floats decays = c["decay"].floats();
    check_case(c, Policy{.decay = std::span<const float>(decays)});
}

void check_additive(const test_case& c) {
    const std::string system = c.text("system");
    if (system == "gla")
        check_case(c, systems::gla{});
    else if (system == "qrwkv6")
        check_case(c, systems::qrwkv6{});
    else if (system == "simple_gla")
        check_case(c, systems::simple_gla{});
    else if (system == "retnet")
        check_constant<systems::retnet>(c);
    else if (system == "supra")
        check_constant<systems::supra>(c);
    else if (system == "lightning" && c.text("map") == "silu")
        check_constant<sash::linear<silu, constant_per_head, additive, unscaled>>(c);
    else if (system == "lightning")
        check_constant<systems::lightning>(c);
    else if (system == "mamba2")
        check_case(c, systems::mamba2{});
    else if (system == "mohawk")
        check_case(c, systems::mohawk{});
    else if (system == "mamba")
        check_case(c, systems::mamba{});
    else
        FAIL("no system '" << system << "'");
}

// System: with unit vectors made by the map; the same behind SiLU.
template <class System, class Decay>
void check_delta(const test_case& c) {
    const std::string map = c.text("map");
    if (map == "l2_normalised")
        check_case(c, System{});
    else if (map == "silu_l2_normalised")
        check_case(c, sash::linear<l2_normalised<silu>, Decay, delta, no_normaliser>{});
    else
        FAIL("no map '" << map << "'");
}

void check_delta_rule(const test_case& c) {
    const std::string system = c.text("system");
    if (c.text("map") == "identity")  // short keys, taken as they are
        check_case(c, sash::linear<normalised_by_caller, no_decay, delta, no_normaliser>{});
    else if (system == "deltanet")
        check_delta<systems::deltanet, no_decay>(c);
    else if (system == "gated_deltanet")
        check_delta<systems::gated_deltanet, per_head_and_token>(c);
    else if (system == "kda")
        check_delta<systems::kda, per_channel_and_token>(c);
    else
        FAIL("no system '" << system << "'");
}

void check_rwkv(const test_case& c) {
    if (c.text("system") != "rwkv6") return check_case(c, systems::rwkv7{});  // and qrwkv7
    const floats bonus = c["bonus"].floats();
    check_case(c, systems::rwkv6{.update = {.bonus = bonus}});
}

void check_map(const test_case& c) {
    const auto table = [&](const char* name) { return c.has(name) ? c[name].floats() : floats{}; };
    const floats query_weights = table("query_weights"), key_weights = table("key_weights");
    const floats query_biases = table("query_biases"), key_biases = table("key_biases");
    const std::string map = c.text("map");
    if (map == "relu_affine") {
        check_case(c, systems::t2r{{.features = c.integer("features"),
                                    .query_weights = query_weights,
                                    .key_weights = key_weights,
                                    .query_biases = query_biases,
                                    .key_biases = key_biases}});
    } else if (map == "hedgehog") {
        check_case(
            c, systems::hedgehog{{.form = c.text("form") == "h1" ? sash::hedgehog_form::h1 : sash::hedgehog_form::h4,
                                  .features = c.integer("features"),
                                  .query_weights = query_weights,
                                  .key_weights = key_weights}});
    } else if (map == "favor") {
        const golden::tensor& projection = c["projection"];  // [features, dim]
        const int64 features = projection.extent(0), dim = projection.extent(1);
        floats weights(projection.values.size());
        for (int64 i = 0; i < features * dim; ++i)
            weights[static_cast<std::size_t>(i % dim * features + i / dim)] =
                static_cast<float>(projection.values[static_cast<std::size_t>(i)]);
        check_case(c,
                   systems::performer{
                       {.features = features, .weights = weights, .epsilon = static_cast<float>(c.real("epsilon"))}});
    } else if (map == "cosformer") {
        check_case(c, systems::cosformer{{.most_positions = c.integer("period")}});
    } else if (map == "taylor_2") {
        check_case(c, systems::based{});
    } else if (map == "rebased") {
        const floats gamma = table("norm_gamma"), beta = table("norm_beta");
        check_case(c,
                   systems::rebased{{.query_gamma = gamma, .query_beta = beta, .key_gamma = gamma, .key_beta = beta}});
    } else {
        FAIL("no feature map '" << map << "'");
    }
}

}  // namespace

TEST_CASE("R22 R24 R26 golden: GLA, RetNet, lightning, SUPRA, Mamba-2, MOHAWK, QRWKV6, Mamba") {
    CHECK(check_file(__FILE__, "additive", check_additive) == 34);
}

TEST_CASE("R22 R24 R26 golden: DeltaNet, Gated DeltaNet, KDA") {
    CHECK(check_file(__FILE__, "delta", check_delta_rule) == 23);
}

TEST_CASE("R22 R24 R26 golden: RWKV-6, RWKV-7, QRWKV7") {
    CHECK(check_file(__FILE__, "bonus_and_low_rank", check_rwkv) == 14);
}

TEST_CASE("R22 R24 R26 golden: T2R, Performer, cosFormer, Based, ReBased, Hedgehog") {
    CHECK(check_file(__FILE__, "maps", check_map) == 23);
}

// What the tests above are worth: a policy or an input that is wrong by little must not agree.
TEST_CASE("golden values notice a wrong update, gate and map") {
    const auto wrong = [](const test_case& c, const auto& policy) {
        return disagreement(without_cache(c, policy).out, c["output"], within(c, c["output"])) != "";
    };
    const auto nudged = [](test_case c, const char* name) {  // one number of one head of a token in the middle
        auto& values = c.tensors[name].values;
        values[values.size() * 2 / 3] -= 0.001;
        return c;
    };
    const auto channel = find("additive", "gla");
    CHECK(wrong(channel, systems::mamba{}));
    CHECK(wrong(nudged(channel, "decay"), systems::gla{}));
    CHECK(wrong(nudged(find("additive", "simple gla"), "decay"), systems::simple_gla{}));

    const auto corrected = find("delta", "kda");
    CHECK(wrong(nudged(corrected, "beta"), systems::kda{}));
    CHECK(wrong(nudged(corrected, "decay"), systems::kda{}));
    CHECK(wrong(corrected, systems::kda{.map = {.epsilon = 1e-3f}}));
    CHECK(wrong(find("delta", "kda, silu, 133 tokens"), systems::kda{}));

    const auto exclusive = find("bonus_and_low_rank", "rwkv6");
    const floats bonus = nudged(exclusive, "bonus")["bonus"].floats();
    CHECK(wrong(exclusive, systems::rwkv6{.update = {.bonus = bonus}}));
    CHECK(wrong(exclusive, systems::mamba{}));
    const auto low_rank = find("bonus_and_low_rank", "rwkv7");
    for (const char* part : {"removal", "replacement"}) CHECK(wrong(nudged(low_rank, part), systems::rwkv7{}));

    CHECK(wrong(find("maps", "cosformer, period 15"), systems::cosformer{{.most_positions = 16}}));
    CHECK(wrong(find("maps", "based"), systems::rebased{}));
}
