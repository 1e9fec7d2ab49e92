// Against attention that is put together from a library's matrix products, in the same process.
#include "../baselines.hpp"
#include "goal.hpp"

#include <cstdio>

namespace goals {
namespace {

figure over_compositions(const effort& most, int64 dim) {
    bench::prompt tokens(bench::quarter_layer(dim), 2048);
    bench::prefill<float, sash::full> ours(tokens, {});
    bench::composition<bench::eigen_products> eigen(tokens);
#if defined(SASH_BENCH_OPENBLAS)
    bench::composition<bench::openblas_products> openblas(tokens);
    const auto [our_seconds, eigen_seconds, openblas_seconds] = bench::in_turn(
        most, [&] { return ours.seconds(); }, [&] { return eigen.seconds(); }, [&] { return openblas.seconds(); });
    const figure over_eigen = bench::ratio(eigen_seconds, our_seconds);
    figure over_openblas = bench::ratio(openblas_seconds, our_seconds);
    char text[120];
    std::snprintf(text, sizeof text, "Eigen %.2f (%d rows a block), OpenBLAS %.2f (%d)", over_eigen.median,
                  static_cast<int>(eigen.block()), over_openblas.median, static_cast<int>(openblas.block()));
    figure better_one = over_eigen.median < over_openblas.median ? over_eigen : over_openblas;
    better_one.note = text;
#else
    const auto [our_seconds, eigen_seconds] = bench::in_turn(
        most, [&] { return ours.seconds(); }, [&] { return eigen.seconds(); });
    figure better_one = bench::ratio(eigen_seconds, our_seconds);
    better_one.note = "Eigen alone: OpenBLAS was not found when this was built";
#endif
    return better_one;
}

}  // namespace

void free_libraries(char** arguments) { bench::let_openblas_choose(arguments); }

std::vector<goal> library_goals() {
    return {
        {"prefill float d128 n2048, × better of Eigen, OpenBLAS", better::higher, 1.10, 1.25,
         [](const effort& most) { return over_compositions(most, 128); }},
        {"prefill float d64 n2048, × better of Eigen, OpenBLAS", better::higher, 1.2, 1.4,
         [](const effort& most) { return over_compositions(most, 64); }},
    };
}

}  // namespace goals
