// The page of the systems says what the aliases are: every name there with its template arguments, and none missing.
#include "support/catch.hpp"

#include <sash/sash.hpp>

#include <fstream>
#include <string>
#include <type_traits>
#include <vector>

using namespace sash;

namespace {

struct row {
    const char *name, *arguments;
};

// The arguments as code, compared with the alias, and as text, compared with the page.
#define SASH_SYSTEM(name, ...)                                                               \
    row {                                                                                    \
        ("systems::" #name), [] {                                                            \
            static_assert(std::is_same_v<systems::name, __VA_ARGS__>, #name " is not that"); \
            return #__VA_ARGS__;                                                             \
        }()                                                                                  \
    }

const row rows[] = {
    SASH_SYSTEM(katharopoulos, linear<elu_plus_one>),
    SASH_SYSTEM(t2r, linear<relu_affine>),
    SASH_SYSTEM(performer, linear<favor>),
    SASH_SYSTEM(cosformer, linear<sash::cosformer>),
    SASH_SYSTEM(based, linear<taylor_2>),
    SASH_SYSTEM(rebased, linear<sash::rebased>),
    SASH_SYSTEM(hedgehog, linear<sash::hedgehog>),
    SASH_SYSTEM(supra, linear<identity, constant_per_head, additive, no_normaliser>),
    SASH_SYSTEM(retnet, linear<identity, constant_per_head, additive, no_normaliser>),
    SASH_SYSTEM(lightning, linear<identity, constant_per_head, additive, unscaled>),
    SASH_SYSTEM(simple_gla, linear<identity, per_head_and_token, additive, no_normaliser>),
    SASH_SYSTEM(gla, linear<identity, per_channel_and_token, additive, no_normaliser>),
    SASH_SYSTEM(mamba2, linear<identity, per_head_and_token, additive, unscaled>),
    SASH_SYSTEM(mohawk, linear<identity, per_head_and_token, additive, unscaled>),
    SASH_SYSTEM(mamba, linear<identity, per_channel_and_token, additive, unscaled>),
    SASH_SYSTEM(qrwkv6, linear<identity, per_channel_and_token, additive, no_normaliser>),
    SASH_SYSTEM(liger_linear, linear<softmax_dim, per_channel_and_token, additive, unscaled>),
    SASH_SYSTEM(rwkv6, linear<identity, per_channel_and_token, exclusive_bonus, unscaled>),
    SASH_SYSTEM(deltanet, linear<l2_normalised<>, no_decay, delta, no_normaliser>),
    SASH_SYSTEM(gated_deltanet, linear<l2_normalised<>, per_head_and_token, delta, no_normaliser>),
    SASH_SYSTEM(kda, linear<l2_normalised<>, per_channel_and_token, delta, no_normaliser>),
    SASH_SYSTEM(rwkv7, linear<identity, per_channel_and_token, diagonal_plus_low_rank, unscaled>),
    SASH_SYSTEM(qrwkv7, linear<identity, per_channel_and_token, diagonal_plus_low_rank, unscaled>),
    SASH_SYSTEM(lolcats, hybrid<sliding_window, linear<sash::hedgehog>, shared_denominator>),
    SASH_SYSTEM(lolcats_terraced, hybrid<terraced_window, linear<sash::hedgehog>, shared_denominator>),
    SASH_SYSTEM(liger_gla, hybrid<sliding_window, systems::liger_linear, convex>),
};

std::vector<std::string> lines_of(const std::string& path) {
    const std::string source = __FILE__;
    std::ifstream in(source.substr(0, source.find_last_of("/\\") + 1) + path);
    std::vector<std::string> lines;
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}

}  // namespace

TEST_CASE("The page of the linear family says what each system is") {
    const auto page = lines_of("../examples/linear_family.md"), header = lines_of("../include/sash/systems.hpp");
    REQUIRE(page.size() > 50);
    REQUIRE(header.size() > 50);
    const auto lines_with = [&](const std::string& begin, const std::string& end) {
        int found = 0;
        for (const std::string& line : page)
            found += line.rfind(begin, 0) == 0 && line.size() >= end.size() &&
                     line.compare(line.size() - end.size(), end.size(), end) == 0;
        return found;
    };
    int named = 0, aliases = 0;
    for (const row& r : rows) {
        CAPTURE(r.name, r.arguments);
        CHECK(lines_with(std::string("| `") + r.name + "` |", std::string("| `") + r.arguments + "` |") == 1);
    }
    for (const std::string& line : page) named += line.rfind("| `systems::", 0) == 0;
    for (const std::string& line : header) aliases += line.rfind("using ", 0) == 0;
    CHECK(named == int(std::size(rows)));
    CHECK(aliases == int(std::size(rows)));
}
