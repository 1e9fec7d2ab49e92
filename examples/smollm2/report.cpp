#include "report.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>

namespace smollm2 {

namespace {

constexpr int name_width = 27;
constexpr int number_width = 8;

std::string position_name(sash::int64 position) {
    return position % 1024 == 0 ? std::to_string(position / 1024) + "k" : std::to_string(position);
}

void print_head(const std::vector<sash::int64>& ends, bool cumulative) {
    std::printf("%-*s", name_width, cumulative ? "cumulative up to" : "perplexity in the range");
    sash::int64 from = 0;
    for (const sash::int64 to : ends) {
        std::printf("%*s", number_width, (cumulative ? position_name(to) : range_name(from, to)).c_str());
        from = to;
    }
    std::printf("\n");
}

std::ofstream create(const std::filesystem::path& path) {
    std::ofstream file(path);
    if (!file) throw std::runtime_error("cannot write " + path.string());
    return file;
}

}  // namespace

std::vector<sash::int64> range_ends(sash::int64 length) {
    std::vector<sash::int64> ends;
    for (sash::int64 end = 512; end < length; end *= 2) ends.push_back(end);
    ends.push_back(length);
    return ends;
}

std::string range_name(sash::int64 from, sash::int64 to) { return (from == 0 ? "0-" : "-") + position_name(to); }

std::string short_number(double number) {
    char text[32];
    std::snprintf(text, sizeof text, "%.*f", number < 100 ? 2 : number < 1000 ? 1 : 0, number);
    return text;
}

void print_setting(const stream_setting& setting, const std::vector<policy_choice>& policies, sash::int64 longest) {
    const auto any = [&](auto is) { return std::ranges::any_of(policies, is); };
    std::printf("%s (trained to %lld positions) reads %s\n", setting.model.c_str(),
                static_cast<long long>(setting.trained_positions), setting.text.c_str());
    std::printf("keys and values stored as %s; the policy holds in every layer, prompt and decode alike; %d thread%s\n",
                setting.element.c_str(), setting.threads, setting.threads == 1 ? "" : "s");
    std::printf("The loss of token i + 1 is counted at position i. No BOS token, no chat template.\n");
    if (any([](const policy_choice& p) { return p.what == policy_choice::kind::window; }))
        std::printf("w + s: a query sees its own token and the w - 1 before it, and the first s tokens of the text.\n");
    if (any([](const policy_choice& p) { return p.sinks() > 0; }))
        std::printf(
            "original: the sinks are read at their true distance. compact: at the place they have inside the cache.\n");
    std::printf("\n");
    print_head(range_ends(longest), false);
    std::fflush(stdout);
}

void print_perplexities(const stream_result& result) {
    std::printf("%-*s", name_width, result.policy.name().c_str());
    for (const range_result& range : result.ranges)
        std::printf("%*s", number_width, short_number(range.perplexity).c_str());
    std::printf("\n");
    std::fflush(stdout);
}

void print_summary(const std::vector<stream_result>& results, sash::int64 longest) {
    std::printf("\n");
    print_head(range_ends(longest), true);
    for (const stream_result& result : results) {
        std::printf("%-*s", name_width, result.policy.name().c_str());
        for (const range_result& range : result.ranges)
            std::printf("%*s", number_width, short_number(range.cumulative).c_str());
        std::printf("\n");
    }

    std::printf("\n%-*s%10s%12s%12s%12s%12s\n", name_width, "speed and memory", "tokens", "prefill", "decode",
                "attention", "cache");
    std::printf("%-*s%10s%12s%12s%12s%12s\n", name_width, "", "", "tokens/s", "tokens/s", "share", "MiB");
    for (const stream_result& result : results) {
        double seconds = 0, in_attention = 0;
        for (const range_result& range : result.ranges) {
            const double part = static_cast<double>(range.to - range.from) / range.prefill_tokens_per_s;
            seconds += part;
            in_attention += part * range.attention_share;
        }
        const range_result& last = result.ranges.back();
        std::printf("%-*s%10lld%12.0f%12.1f%11.1f%%%12.1f\n", name_width, result.policy.name().c_str(),
                    static_cast<long long>(last.to), static_cast<double>(last.to) / seconds, last.decode_tokens_per_s,
                    100 * in_attention / seconds, static_cast<double>(last.cache_bytes) / (1 << 20));
    }
    std::printf(
        "prefill: the whole model and the loss of every token, in chunks. decode: one token at a time, at the end.\n");
}

void check_writable(const std::filesystem::path& path) {
    if (!path.empty() && !std::ofstream(path, std::ios::app)) throw std::runtime_error("cannot write " + path.string());
}

void write_json(const std::filesystem::path& path, const stream_setting& setting,
                const std::vector<stream_result>& results) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const stream_result& result : results)
        for (const range_result& range : result.ranges)
            rows.push_back({{"policy", result.policy.type()},
                            {"window", result.policy.window()},
                            {"sinks", result.policy.sinks()},
                            {"frame", result.policy.frame()},
                            {"from", range.from},
                            {"to", range.to},
                            {"perplexity", range.perplexity},
                            {"cumulative", range.cumulative},
                            {"cache_bytes", range.cache_bytes},
                            {"prefill_tokens_per_s", range.prefill_tokens_per_s},
                            {"decode_tokens_per_s", range.decode_tokens_per_s},
                            {"attention_share", range.attention_share}});
    const nlohmann::ordered_json all = {{"model", setting.model},
                                        {"text", setting.text},
                                        {"element", setting.element},
                                        {"threads", setting.threads},
                                        {"rows", rows}};
    create(path) << all.dump(1) << "\n";
}

namespace {

/// Maps a positive number to a pixel on a logarithmic scale.
struct log_scale {
    double least, most, from_pixel, to_pixel;
    double operator()(double value) const {
        return from_pixel + (to_pixel - from_pixel) * std::log(value / least) / std::log(most / least);
    }
};

struct curve_point {
    double position, perplexity;
};

/// Perplexity over parts of the positions that are evenly spaced on the scale, and long enough not to be noise.
std::vector<curve_point> curve(const std::vector<float>& losses) {
    constexpr std::size_t shortest = 256;
    constexpr double growth = 1.19;
    std::vector<curve_point> points;
    for (std::size_t from = 0; from < losses.size();) {
        std::size_t to = std::max(from + shortest, static_cast<std::size_t>(growth * static_cast<double>(from)));
        if (to + shortest > losses.size()) to = losses.size();
        double sum = 0;
        for (std::size_t i = from; i < to; ++i) sum += static_cast<double>(losses[i]);
        points.push_back({0.5 * static_cast<double>(from + to), std::exp(sum / static_cast<double>(to - from))});
        from = to;
    }
    return points;
}

constexpr const char* colours[] = {"#1b6ca8", "#d1495b", "#2a9d5c", "#e08e0b", "#7b4fa3",
                                   "#5c6b73", "#00a6a6", "#a0522d", "#e56bb0"};

/// A text as XML wants it: the user's file names may hold anything.
std::string escaped(const std::string& text) {
    std::string result;
    for (const char c : text) result += c == '<' ? "&lt;" : c == '&' ? "&amp;" : std::string(1, c);
    return result;
}

template <class... Parts>
std::string line_of(const char* format, Parts... parts) {
    char text[512];
    std::snprintf(text, sizeof text, format, parts...);
    return std::string(text) + "\n";
}

}  // namespace

void write_plot(const std::filesystem::path& path, const stream_setting& setting,
                const std::vector<stream_result>& results) {
    constexpr double width = 900, height = 480, left = 70, right = 680, top = 50, bottom = 420;
    std::vector<std::vector<curve_point>> curves;
    double least = 1e30, most = 0, longest = 0;
    for (const stream_result& result : results) {
        curves.push_back(curve(result.losses));
        for (const curve_point& point : curves.back()) {
            least = std::min(least, point.perplexity);
            most = std::max(most, point.perplexity);
            longest = std::max(longest, point.position);
        }
    }
    const log_scale x{64, std::max(128.0, longest), left, right}, y{least / 1.1, most * 1.1, bottom, top};

    std::string svg = line_of(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" font-family=\"sans-serif\" font-size=\"12\">",
        width, height);
    svg += line_of("<rect width=\"%g\" height=\"%g\" fill=\"white\"/>", width, height);
    svg += line_of("<text x=\"%g\" y=\"24\" font-size=\"15\">Perplexity against position: %s, %s</text>", left,
                   setting.model.c_str(), escaped(setting.text).c_str());
    const auto grid = [&](double x1, double y1, double x2, double y2) {
        svg += line_of("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#dddddd\"/>", x1, y1, x2, y2);
    };
    for (double position = 64; position <= x.most; position *= 2) {
        grid(x(position), top, x(position), bottom);
        svg += line_of("<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%s</text>", x(position), bottom + 18,
                       position_name(std::llround(position)).c_str());
    }
    for (double decade = 1; decade < y.most; decade *= 10) {
        for (const double step : {1, 2, 5}) {
            const double perplexity = step * decade;
            if (perplexity < y.least || perplexity > y.most) continue;
            grid(left, y(perplexity), right, y(perplexity));
            svg += line_of("<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%g</text>", left - 6, y(perplexity) + 4,
                           perplexity);
        }
    }
    svg += line_of("<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">position in the text, tokens</text>",
                   (left + right) / 2, bottom + 40);
    for (std::size_t i = 0; i < curves.size(); ++i) {
        const char* const colour = colours[i % std::size(colours)];
        const char* const dashes = i < std::size(colours) ? "none" : "6 3";
        svg += "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"" + std::string(colour) + "\" stroke-dasharray=\"" +
               dashes + "\" points=\"";
        for (const curve_point& point : curves[i])
            svg += line_of("%.1f,%.1f", x(std::max(64.0, point.position)), y(point.perplexity));
        svg += "\"/>\n";
        const double at = top + 10 + 19 * static_cast<double>(i);
        svg += line_of(
            "<line x1=\"%g\" y1=\"%g\" x2=\"%g\" y2=\"%g\" stroke=\"%s\" stroke-width=\"3\" stroke-dasharray=\"%s\"/>",
            right + 15, at, right + 40, at, colour, dashes);
        svg += line_of("<text x=\"%g\" y=\"%g\">%s</text>", right + 47, at + 4, results[i].policy.name().c_str());
    }
    create(path) << svg << "</svg>\n";
}

}  // namespace smollm2
