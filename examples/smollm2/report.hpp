#pragma once
/// \file
/// What `stream` found, as tables, as JSON and as a picture.
#include "policies.hpp"

#include <filesystem>
#include <string>
#include <vector>

namespace smollm2 {

/// One policy on one range of positions [from, to).
struct range_result {
    sash::int64 from = 0, to = 0;
    double perplexity = 0;            ///< exp of the mean loss over the range
    double cumulative = 0;            ///< the same over [0, to)
    double prefill_tokens_per_s = 0;  ///< whole model and loss, fed in chunks, over the range
    double decode_tokens_per_s = 0;   ///< whole model and logits, one token at a time, behind the range's end
    sash::int64 cache_bytes = 0;      ///< all layers, at the range's end
    double attention_share = 0;       ///< of the time of the chunks
};

struct stream_result {
    policy_choice policy;
    std::vector<range_result> ranges;
    std::vector<float> losses;  ///< at every position
};

/// What all results have in common.
struct stream_setting {
    std::string model, text, element;
    sash::int64 trained_positions = 0;
    int threads = 1;
};

/// The ends of the ranges up to `length`: 512, 1024, 2048, … and `length` itself.
std::vector<sash::int64> range_ends(sash::int64 length);

/// "-2k": the range that ends at 2048.
std::string range_name(sash::int64 from, sash::int64 to);
/// 16.14, 277.9, 8546: four digits are enough to compare.
std::string short_number(double number);

/// Prints the frame in which the figures are to be read, and the head of the table of perplexities.
void print_setting(const stream_setting& setting, const std::vector<policy_choice>& policies, sash::int64 longest);
/// One line of that table, printed as soon as it is known.
void print_perplexities(const stream_result& result);
/// The tables of cumulative perplexities, of speed and of memory.
void print_summary(const std::vector<stream_result>& results, sash::int64 longest);

/// Fails now, and not after the work, where a file cannot be written. An empty path is none.
void check_writable(const std::filesystem::path& path);

void write_json(const std::filesystem::path& path, const stream_setting& setting,
                const std::vector<stream_result>& results);
/// Perplexity against position, both on logarithmic scales, a line for every policy.
void write_plot(const std::filesystem::path& path, const stream_setting& setting,
                const std::vector<stream_result>& results);

}  // namespace smollm2
