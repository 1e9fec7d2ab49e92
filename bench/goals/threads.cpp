// Two threads on two free cores. Whether they are free is measured beside every sample, by work that needs nothing but
// a core; a sample beside which that does not scale says nothing of the library, and is dropped.
#include "goal.hpp"

#include <cstdio>

namespace goals {
namespace {

#if defined(_OPENMP)

/// work(runner): wall-clock time on one thread over that on two. `limit` is what the machine itself can do. It must
/// scale by `free` at least, and hardly by more than 2, or other work has taken a core from one of its two
/// measurements.
template <class Work>
figure scaling(const effort& most, Work&& work, double (*limit)(), double free) {
    std::vector<double> kept, limits;
    const double start = machine::wall_seconds();
    const auto most_samples = static_cast<std::size_t>(most.most_rounds), least = std::size_t{5};
    while (kept.size() < most_samples) {
        const double spent = machine::wall_seconds() - start;
        if (spent > 4 * most.seconds || (spent > most.seconds && kept.size() >= least)) break;
        const double before = limit();
        const double one = machine::wall_seconds_of([&] { work(sash::runner(sash::openmp{1})); });
        const double two = machine::wall_seconds_of([&] { work(sash::runner(sash::openmp{2})); });
        const double after = limit();
        limits.insert(limits.end(), {before, after});
        if (std::min(before, after) >= free && std::max(before, after) <= 2.1) kept.push_back(one / two);
    }
    if (kept.size() >= 3) return bench::summary(kept);
    char text[160];
    std::snprintf(
        text, sizeof text,
        "2 cores are not free: what needs nothing else scaled by %.2f (median), in %zu of %zu tries as it should",
        bench::summary(limits).median, kept.size(), limits.size() / 2);
    return bench::not_measured(text);
}

figure prefill_scaling(const effort& most) {
    bench::prompt tokens(bench::quarter_layer(), 2048);
    bench::prefill<float, sash::full> run(tokens, {});
    return scaling(most, run, machine::scaling_of_arithmetic, 1.9);
}

figure decode_scaling(const effort& most) {
    constexpr int64 keys = 4096;
    bench::prompt tokens(bench::whole_layer(), keys);
    bench::cold_layers layers(bench::bytes_of_keys<float>(tokens.shape, keys),
                              [&] { return bench::filled<float>(tokens, sash::full{}, keys); });
    sash::workspace scratch;
    const auto pass = [&](sash::runner run) {
        for (std::size_t i = 0; i < layers.count(); ++i)
            sash::read(tokens.query(1), layers.next(), tokens.rows(1), {.run = run, .workspace = &scratch});
    };
    return scaling(most, pass, machine::scaling_of_reading, 1.85);
}

#else

figure prefill_scaling(const effort&) { return bench::not_measured("built without OpenMP"); }
figure decode_scaling(const effort&) { return bench::not_measured("built without OpenMP"); }

#endif

}  // namespace

std::vector<goal> thread_goals() {
    return {
        {"2 threads, prefill float d128 n2048, × 1 thread", better::higher, 1.85, 1.97, prefill_scaling},
        {"2 threads, cold decode float 4096 keys, × 1 thread", better::higher, 1.8, 1.97, decode_scaling},
    };
}

}  // namespace goals
