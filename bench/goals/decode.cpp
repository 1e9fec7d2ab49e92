// One token, or a few drafts, against keys that come from memory: fractions of the read bandwidth.
#include "goal.hpp"

#include <memory>
#include <optional>

namespace goals {
namespace {

/// Layers of one storage type and length, and what reads them.
template <class Element>
class cold_reads {
public:
    explicit cold_reads(int64 keys)
        : tokens_(bench::whole_layer(), 4096),
          keys_(keys),
          layers_(bytes(), [this] { return bench::filled<Element>(tokens_, sash::full{}, keys_); }) {}

    double bytes() const { return bench::bytes_of_keys<Element>(tokens_.shape, keys_); }
    double flops(int64 queries) const {
        const double drafts = static_cast<double>(queries), keys = static_cast<double>(keys_);
        return bench::flops(tokens_.shape, drafts * (keys - (drafts - 1) / 2));
    }
    /// Thread CPU time that some queries take in one layer, over 100 MB of layers or more.
    double seconds(int64 queries) {
        const int layers = std::max(1, static_cast<int>(100e6 / bytes()));
        return machine::seconds_of([&] {
                   for (int i = 0; i < layers; ++i)
                       sash::read(tokens_.query(queries), layers_.next(), tokens_.rows(queries),
                                  {.first_query = keys_ - queries, .run = sash::serial{}, .workspace = &scratch_});
               }) /
               layers;
    }

private:
    bench::prompt tokens_;
    int64 keys_;
    bench::cold_layers<sash::kv_cache<sash::full, Element>> layers_;
    sash::workspace scratch_;
};

/// Filled when the first row asks for them, and gone with the last row that shares them: half a gigabyte takes longer
/// to fill than to read.
template <class Element>
class shared_reads {
public:
    explicit shared_reads(int64 keys) : keys_(keys), reads_(std::make_shared<std::optional<cold_reads<Element>>>()) {}
    cold_reads<Element>& get() const {
        if (!*reads_) reads_->emplace(keys_);
        return **reads_;
    }

private:
    int64 keys_;
    std::shared_ptr<std::optional<cold_reads<Element>>> reads_;
};

template <class Element>
figure of_bandwidth(const effort& most, cold_reads<Element>& reads) {
    return bench::of_peak(most, reads.bytes(), machine::read_bandwidth<>, [&] { return reads.seconds(1); });
}

/// Time over what the machine needs at least: for the bytes, or for the multiply-adds.
template <class Element>
figure verification(const effort& most, cold_reads<Element>& reads, int64 queries) {
    const auto [bandwidth, peak, seconds] =
        bench::in_turn(most, machine::read_bandwidth<>, machine::peak_flops, [&] { return reads.seconds(queries); });
    std::vector<double> times_bound;
    int memory_binds = 0;
    for (std::size_t i = 0; i < seconds.size(); ++i) {
        const double to_read = reads.bytes() / bandwidth[i], to_compute = reads.flops(queries) / peak[i];
        memory_binds += to_read > to_compute ? 1 : 0;
        times_bound.push_back(seconds[i] / std::max(to_read, to_compute));
    }
    figure f = bench::summary(times_bound);
    f.note = 2 * memory_binds > f.samples ? "bound by memory" : "bound by arithmetic";
    return f;
}

/// Decode at three lengths, and verification of drafts at the middle one.
template <class Element>
void add(std::vector<goal>& rows, const std::string& element, double must, double aim, double verify_must,
         double verify_aim) {
    for (const int64 keys : {1024, 4096, 16384}) {
        const shared_reads<Element> reads(keys);
        const std::string at = element + " " + std::to_string(keys) + " keys";
        rows.push_back({"cold decode " + at + ", of read bandwidth", better::higher, must, aim,
                        [=](const effort& most) { return of_bandwidth(most, reads.get()); }});
        for (const int64 queries : {2, 4, 8, 16})
            if (keys == 4096)
                rows.push_back({"verify " + std::to_string(queries) + " drafts " + at + ", time over what must be",
                                better::lower, verify_must, verify_aim,
                                [=](const effort& most) { return verification(most, reads.get(), queries); }});
    }
}

}  // namespace

std::vector<goal> decode_goals() {
    std::vector<goal> rows;
    add<float>(rows, "float", 0.80, 0.92, 1.25, 1.1);
    add<sash::float16>(rows, "float16", 0.75, 0.90, goal::none, goal::none);
    add<sash::bfloat16>(rows, "bfloat16", 0.72, 0.88, goal::none, goal::none);
    add<sash::int8_rows>(rows, "int8_rows", 0.55, 0.75, goal::none, goal::none);
    return rows;
}

}  // namespace goals
