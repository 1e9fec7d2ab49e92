// Links the units named by UNITS(X) and passes one cache between them: made by one, filled by the others in turn, forked
// by a third, destroyed by a fourth. Prints every output's bits, so that two ways of linking can be compared, and fails
// where a unit that took every step itself would have come to another value.
//
// With an argument only the unit of that name runs.
#include "unit.hpp"

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <new>
#include <vector>

#define DECLARE(name) namespace odr::name { extern const unit functions; }
UNITS(DECLARE)

namespace {

using odr::unit;

#define ADDRESS(name) &odr::name::functions,
const unit* const units[] = {UNITS(ADDRESS)};
constexpr int unit_count = sizeof units / sizeof units[0];

// A cache in raw memory, so that construction and destruction happen where the unit says and nowhere else.
struct slot {
    alignas(odr::cache_type) unsigned char memory[sizeof(odr::cache_type)];
    odr::cache_type& cache() { return *std::launder(reinterpret_cast<odr::cache_type*>(memory)); }
};

// The k-th number of a fixed sequence in [-1, 1).
float number(std::uint32_t k) {
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    return static_cast<float>(k >> 8) / static_cast<float>(1 << 23) - 1.0f;
}

std::vector<float> numbers(std::int64_t count, std::uint32_t seed) {
    std::vector<float> result(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < result.size(); ++i) result[i] = number(seed + static_cast<std::uint32_t>(i));
    return result;
}

// Feeds 1, 2, 3, 1, 2, 3, … tokens a call, each call by the next unit of `order`. Half way the cache is forked, saved,
// loaded and rolled back, each by another unit.
std::vector<float> run(const std::vector<const unit*>& order) {
    const auto by = [&](int step) { return order[static_cast<std::size_t>(step) % order.size()]; };
    slot first, second;
    new (first.memory) odr::cache_type(by(0)->make());
    slot* current = &first;
    std::vector<float> outputs;
    for (int step = 0; step < 18; ++step) {
        if (step == 9) {
            new (second.memory) odr::cache_type(by(step + 1)->fork(first.cache()));
            by(step + 2)->destroy(&first.cache());
            current = &second;
            by(step + 3)->save_and_load(second.cache());
            by(step + 4)->roll_back(second.cache(), 2);
        }
        const std::int64_t tokens = 1 + step % 3;
        const auto seed = static_cast<std::uint32_t>(step) * 10007u;
        const auto q = numbers(tokens * odr::heads * odr::head_dim, seed);
        const auto k = numbers(tokens * odr::kv_heads * odr::head_dim, seed + 3001u);
        const auto v = numbers(tokens * odr::kv_heads * odr::head_dim, seed + 6007u);
        std::vector<float> out(static_cast<std::size_t>(tokens * odr::heads * odr::head_dim));
        by(step)->attend(current->cache(), tokens, q.data(), k.data(), v.data(), out.data());
        outputs.insert(outputs.end(), out.begin(), out.end());
    }
    by(3)->destroy(&current->cache());

    outputs.resize(outputs.size() + 3 * odr::row);
    const auto q = numbers(odr::row, 1), k = numbers(odr::kv_heads * odr::head_dim, 2), v = numbers(odr::kv_heads * odr::head_dim, 3);
    by(0)->other_policies(q.data(), k.data(), v.data(), outputs.data() + outputs.size() - 3 * odr::row);
    return outputs;
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::vector<const unit*>> orders;
    for (const unit* one : units) {
        if (argc < 2 || std::strcmp(argv[1], one->name) == 0) orders.push_back({one});
    }
    if (argc < 2) {
        for (int start = 0; start < unit_count; ++start) {
            orders.emplace_back();
            for (int i = 0; i < unit_count; ++i) orders.back().push_back(units[(start + i) % unit_count]);
        }
    }
    const std::vector<float> expected = run({orders.at(0)});
    for (const auto& order : orders) {
        const std::vector<float> outputs = run(order);
        std::printf("%s%s", order.front()->name, order.size() > 1 ? " and all after it:" : ":");
        for (std::size_t i = 0; i < outputs.size(); ++i) {
            if (!(std::fabs(outputs[i] - expected[i]) < 4e-6f)) {
                std::printf(" output %zu is %g, not %g\n", i, static_cast<double>(outputs[i]), static_cast<double>(expected[i]));
                return 1;
            }
            std::printf(" %08x", std::bit_cast<std::uint32_t>(outputs[i]));
        }
        std::printf("\n");
    }
}
