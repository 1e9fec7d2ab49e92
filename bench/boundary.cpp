// boundary [--quick] [--json FILE]: where is the boundary between a window and a state? One layer of 32 / 8 heads of 128
// remembers by windows of 64 to 65,536 keys (4 of them sinks) and by linear methods: what a sequence holds, what a token
// costs alone, in a batch and in a prompt, how that changes along a stream of a million tokens, and the window from which
// on each linear method is smaller, and faster. One thread; within four minutes, --quick within one.
//
// Every step finds its layer in memory, not in a cache. The time of a step is thread CPU time, times the read bandwidth
// that is measured beside it, over that of the whole run: what other work takes of the memory takes nothing from the
// comparison. Where all sequences of a batch would not fit, fewer are measured; a thread takes them one after another.
#include "methods.hpp"
#include "sampling.hpp"

#include <cstdio>
#include <exception>
#include <fstream>
#include <stdexcept>

namespace {

using bench::int64;
namespace method = bench::method;

struct settings {
    bench::effort most{.seconds = 0.4, .least_rounds = 5, .most_rounds = 15};
    std::vector<int64> batches{1, 8, 64};
    int64 window_factor = 2;  ///< from one window to the next
    int64 stream = 1000000;
    std::string json;
};

constexpr int64 smallest_window = 64, largest_window = 65536;

std::vector<int64> windows(const settings& s) {
    std::vector<int64> keys;
    for (int64 k = smallest_window; k <= largest_window; k *= s.window_factor) keys.push_back(k);
    return keys;
}

/// Calls f with each linear method, of the whole layer or a part of it.
template <class F>
void for_each_linear_method(int64 part, F&& f) {
    f(method::hedgehog{part});
    f(method::lolcats{part});
    f(method::liger{part});
    f(method::gla{{part}});
    f(method::mamba2{{part}});
    f(method::gated_deltanet{{part}});
}

/// Bytes per second that this run reads: the unit of every time below.
double bandwidth_of_run() {
    static const double median = [] {
        std::vector<double> rates;
        for (int i = 0; i < 15; ++i) rates.push_back(machine::read_bandwidth());
        return bench::summary(std::move(rates)).median;
    }();
    return median;
}

/// The median of the seconds that measure() says, of something that works on memory: as if its bandwidth were that of the
/// whole run.
template <class F>
double seconds_from_memory(const bench::effort& most, F&& measure) {
    const auto [rates, times] = bench::in_turn(most, machine::read_bandwidth<>, measure);
    std::vector<double> seconds;
    for (std::size_t i = 0; i < times.size(); ++i) seconds.push_back(times[i] * rates[i] / bandwidth_of_run());
    return bench::summary(std::move(seconds)).median;
}

// ------------------------------------------------------------------------------------------------------------ measuring

struct step {
    std::string name;
    int64 keys = 0, states = 0, batch = 1, measured = 1;  ///< keys of a window, states of a linear method
    double held = 0, moved = 0, bytes = 0;                ///< of a sequence: by arithmetic, and held by the cache
    double seconds = 0;                                   ///< a token of one sequence
};

template <class Method>
int64 keys_of(const Method& m) {
    if constexpr (requires { m.keys; })
        return m.keys;
    else
        return 0;
}

/// One token for each sequence of a batch.
template <class Method>
step decode(const Method& m, int64 batch, const bench::effort& most) {
    constexpr double room = 600 << 20;
    const int64 fitting = std::clamp(static_cast<int64>(room / (m.held() + m.shared())), int64{1}, batch);
    bench::cold_sequences<Method> layers(m, fitting);
    const double of_step = static_cast<double>(fitting) * m.moved() + m.shared();
    const int steps = std::max(1, static_cast<int>(50e6 / of_step));
    const double seconds =
        seconds_from_memory(most, [&] { return bench::seconds_of_step(steps, of_step, [&] { layers.step(); }); });
    return {.name = Method::name,
            .keys = keys_of(m),
            .states = Method::states,
            .batch = batch,
            .measured = fitting,
            .held = m.held(),
            .moved = m.moved(),
            .bytes = layers.bytes(),
            .seconds = seconds / static_cast<double>(fitting)};
}

struct prompt_cost {
    std::string name;
    int64 keys = 0;
    double seconds = 0;  ///< a token
};

/// A long prompt goes on: pieces of 256 tokens behind a window that is full.
template <class Method>
prompt_cost prefill(const Method& m, const bench::effort& most) {
    constexpr int64 piece = 256;
    bench::gated_prompt tokens(m.policy(), m.shape(), 1024);
    bench::cache_of<Method> cache(m.policy(), m.shape(), sash::score{}, {.memory = bench::reused_memory()});
    sash::workspace scratch;
    bench::append_until(keys_of(m) + piece, tokens, cache, scratch);
    const auto [seconds] = bench::in_turn(most, [&] {
        return machine::seconds_of([&] {
            sash::attend(tokens.slice(0, piece), cache, tokens.rows(0, piece),
                         {.run = sash::serial{}, .workspace = &scratch});
        });
    });
    return {Method::name, keys_of(m), bench::summary(seconds).median / piece};
}

struct stream_cost {
    std::string name;
    int64 keys = 0, position = 0;
    double seconds = 0;  ///< a token at that position
};

/// One stream of an eighth of the layer, 4 / 1 heads: what the token at each position costs.
template <class Method>
void run_stream(const Method& m, const settings& s, std::vector<stream_cost>& found) {
    constexpr bool grows = std::is_same_v<Method, method::full>;
    constexpr double in_all = 160e6;  // more than a cache of the machine holds
    using cache = bench::cache_of<Method>;
    bench::gated_prompt tokens(m.policy(), m.shape(), 2048);
    sash::workspace scratch;
    const auto grown = [&](int64 position) {
        cache fresh(m.policy(), m.shape());
        bench::append_until(position, tokens, fresh, scratch);
        return fresh;
    };
    cache stream(m.policy(), m.shape());
    for (int64 position = 1000; position <= s.stream; position *= 10) {
        const double held = grows ? method::bytes_of_key(m.part) * static_cast<double>(position) : m.held();
        const auto count = static_cast<std::size_t>(std::ceil(in_all / held));
        if (!grows) bench::append_until(position, tokens, stream, scratch);
        std::vector<cache> copies;
        while (copies.size() < count) copies.push_back(grows ? grown(position) : stream);
        std::size_t next = 0;
        const auto step = [&] {
            sash::attend(tokens.slice(0, 1), copies[next], tokens.rows(0, 1),
                         {.run = sash::serial{}, .workspace = &scratch});
            next = (next + 1) % count;
        };
        const auto seconds = [&] { return bench::seconds_of_step(64, held, step); };
        found.push_back({Method::name, keys_of(m), position, seconds_from_memory(s.most, seconds)});
    }
}

// ------------------------------------------------------------------------------------------------------------ crossings

/// The number of keys at which a cost that grows with the window, [(keys, cost)], comes to `level`: a straight line
/// between two windows. 0 where the smallest window already costs more, infinite where none does.
double keys_at(const std::vector<std::pair<double, double>>& costs, double level) {
    if (costs.front().second >= level) return 0;
    for (std::size_t i = 1; i < costs.size(); ++i) {
        const auto [keys, cost] = costs[i];
        const auto [keys_before, before] = costs[i - 1];
        if (cost >= level) return keys_before + (level - before) / (cost - before) * (keys - keys_before);
    }
    return std::numeric_limits<double>::infinity();
}

/// keys_at of the windows among some figures.
template <class Figure, class Cost, class Wanted>
double boundary(const std::vector<Figure>& figures, double level, Cost&& cost, Wanted&& wanted) {
    std::vector<std::pair<double, double>> costs;
    for (const Figure& f : figures)
        if (f.name == method::window::name && wanted(f)) costs.emplace_back(static_cast<double>(f.keys), cost(f));
    return keys_at(costs, level);
}

/// The windows, in keys, from which on a linear method is smaller and faster: by arithmetic, and as measured.
struct crossing {
    std::string name;
    double smaller = 0, smaller_measured = 0;
    double faster = 0;
    std::vector<double> faster_measured;  ///< by batch
    double faster_in_prompts = 0;         ///< measured
};

std::vector<crossing> crossings(const settings& s, const std::vector<step>& steps,
                                const std::vector<prompt_cost>& prompts) {
    const double key = method::bytes_of_key(1);
    const auto seconds = [](const auto& figure) { return figure.seconds; };
    const auto first = [](const step& w) { return w.batch == 1; };
    std::vector<crossing> all;
    for (const prompt_cost& p : prompts) {
        if (p.name == method::window::name) continue;
        crossing c;
        c.name = p.name;
        c.faster_in_prompts = boundary(prompts, p.seconds, seconds, [](const prompt_cost&) { return true; });
        for (const step& linear : steps) {
            if (linear.name != p.name) continue;
            c.faster_measured.push_back(
                boundary(steps, linear.seconds, seconds, [&](const step& w) { return w.batch == linear.batch; }));
            if (linear.batch != s.batches.front()) continue;
            c.smaller = linear.held / key;
            c.faster = linear.moved / key;
            c.smaller_measured = boundary(
                steps, linear.bytes, [](const step& w) { return w.bytes; }, first);
        }
        all.push_back(c);
    }
    return all;
}

// -------------------------------------------------------------------------------------------------------------- reports

std::string name_of(const std::string& name, int64 keys) {
    return keys == 0 ? name : name + " " + std::to_string(keys);
}

void print(const step& s) {
    std::printf("%-14s %8.2f %9.2f %9.2f %11.2f %9.0f %8.2f%s\n", name_of(s.name, s.keys).c_str(), s.held / 0x1p20,
                s.bytes / 0x1p20, s.moved / 0x1p20, s.seconds * 1e6, 1 / s.seconds,
                s.moved / s.seconds / bandwidth_of_run(),
                s.measured < s.batch ? ("  (of " + std::to_string(s.measured) + " sequences)").c_str() : "");
    std::fflush(stdout);
}

void print_head(const char* title) {
    std::printf("\n%-14s %8s %9s %9s %11s %9s %8s\n", title, "MiB", "held", "moved", "µs a token", "tokens/s",
                "of read");
}

std::string keys_text(double keys) {
    if (keys == 0) return "all";
    if (std::isinf(keys)) return "none";
    char text[32];
    std::snprintf(text, sizeof text, "%.0f", keys);
    return text;
}

void print(const settings& s, const std::vector<crossing>& all) {
    std::printf("\nThe window, in keys, from which on each is smaller, and faster\n%-14s %10s %10s %14s", "", "smaller",
                "measured", "faster");
    for (const int64 batch : s.batches) std::printf("   batch %-3lld", static_cast<long long>(batch));
    std::printf(" %10s\n", "prompt");
    for (const crossing& c : all) {
        std::printf("%-14s %10.0f %10s %14.0f", c.name.c_str(), c.smaller, keys_text(c.smaller_measured).c_str(),
                    c.faster);
        for (const double keys : c.faster_measured) std::printf(" %11s", keys_text(keys).c_str());
        std::printf(" %10s\n", keys_text(c.faster_in_prompts).c_str());
    }
}

/// [{"a": 1, …}, …] of some figures; fields(f) gives the inside of one.
template <class Figure, class Fields>
void write_list(std::ofstream& out, const char* name, const std::vector<Figure>& figures, Fields&& fields) {
    out << ",\n \"" << name << "\": [";
    for (const Figure& f : figures) {
        out << (&f == figures.data() ? "\n" : ",\n") << "  {\"name\": \"" << f.name << "\", ";
        fields(f);
        out << "}";
    }
    out << "\n ]";
}

struct results {
    std::vector<step> table, steps;
    std::vector<prompt_cost> prompts;
    std::vector<stream_cost> streams;
    std::vector<crossing> crossings;
};

void write_json(const std::string& file, const settings& s, const results& r) {
    std::ofstream out(file);
    out << "{\n \"processor\": \"" << machine::processor() << "\", \"bytes read\": " << bandwidth_of_run();
    const auto fields_of_step = [&](const step& f) {
        out << "\"keys\": " << f.keys << ", \"states\": " << f.states << ", \"batch\": " << f.batch
            << ", \"sequences\": " << f.measured << ", \"held\": " << f.held << ", \"moved\": " << f.moved
            << ", \"bytes\": " << f.bytes << ", \"seconds\": " << f.seconds;
    };
    const auto keys = [](double k) { return std::isinf(k) ? std::string("null") : std::to_string(std::lround(k)); };
    write_list(out, "equal memory", r.table, fields_of_step);
    write_list(out, "decode", r.steps, fields_of_step);
    write_list(out, "prefill", r.prompts,
               [&](const prompt_cost& p) { out << "\"keys\": " << p.keys << ", \"seconds\": " << p.seconds; });
    write_list(out, "stream", r.streams, [&](const stream_cost& c) {
        out << "\"keys\": " << c.keys << ", \"position\": " << c.position << ", \"seconds\": " << c.seconds;
    });
    write_list(out, "crossings", r.crossings, [&](const crossing& c) {
        out << "\"smaller\": " << keys(c.smaller) << ", \"smaller, measured\": " << keys(c.smaller_measured)
            << ", \"faster\": " << keys(c.faster);
        for (std::size_t i = 0; i < c.faster_measured.size(); ++i)
            out << ", \"faster, batch " << s.batches[i] << "\": " << keys(c.faster_measured[i]);
        out << ", \"faster in prompts\": " << keys(c.faster_in_prompts);
    });
    out << "\n}\n";
    if (!out.flush()) throw std::runtime_error("cannot write " + file);
}

// -------------------------------------------------------------------------------------------------------------- sections

/// The table of equal memory: full attention, the windows of the study, and the linear methods beside them.
std::vector<step> equal_memory(const settings& s) {
    print_head("batch 1");
    std::vector<step> table;
    const auto add = [&](const auto& m) {
        table.push_back(decode(m, 1, s.most));
        print(table.back());
    };
    for (const int64 keys : {4096, 32768}) add(method::full{keys});
    for (const int64 keys : {64, 128, 256, 512, 1024}) add(method::window{keys + bench::sinks});
    for_each_linear_method(1, add);
    return table;
}

std::vector<step> decode_all(const settings& s) {
    std::vector<step> steps;
    for (const int64 batch : s.batches) {
        print_head(("batch " + std::to_string(batch)).c_str());
        const auto add = [&](const auto& m) {
            steps.push_back(decode(m, batch, s.most));
            print(steps.back());
        };
        for (const int64 keys : windows(s)) add(method::window{keys});
        for_each_linear_method(1, add);
    }
    return steps;
}

std::vector<prompt_cost> prefill_all(const settings& s) {
    std::vector<prompt_cost> prompts;
    std::printf("\nprompt, µs a token\n");
    const auto add = [&](const auto& m) {
        prompts.push_back(prefill(m, {.seconds = s.most.seconds, .least_rounds = 2, .most_rounds = 9}));
        std::printf("%-14s %8.1f\n", name_of(prompts.back().name, prompts.back().keys).c_str(),
                    prompts.back().seconds * 1e6);
        std::fflush(stdout);
    };
    for (const int64 keys : windows(s)) add(method::window{keys});
    for_each_linear_method(1, add);
    return prompts;
}

std::vector<stream_cost> stream_all(const settings& s) {
    std::vector<stream_cost> streams;
    std::printf("\nµs a token at a position of one stream, 4 / 1 heads\n");
    const auto add = [&](const auto& m) {
        const std::size_t before = streams.size();
        run_stream(m, s, streams);
        std::printf("%-14s", name_of(m.name, keys_of(m)).c_str());
        for (std::size_t i = before; i < streams.size(); ++i)
            std::printf("  %7lld: %-9.2f", static_cast<long long>(streams[i].position), streams[i].seconds * 1e6);
        std::printf("\n");
        std::fflush(stdout);
    };
    add(method::full{.keys = 0, .part = 8});
    for (const int64 keys : {64, 1024, 65536}) add(method::window{keys, 8});
    for_each_linear_method(8, add);
    return streams;
}

settings parse(int count, char** values) {
    settings s;
    for (int i = 1; i < count; ++i) {
        const std::string_view option = values[i];
        if (option == "--quick") {
            s.most = {.seconds = 0.1, .least_rounds = 3, .most_rounds = 7};
            s.batches = {1, 64};
            s.window_factor = 4;
            s.stream = 100000;
        } else if (option == "--json" && i + 1 < count) {
            s.json = values[++i];
        } else {
            throw std::runtime_error("usage: boundary [--quick] [--json FILE]");
        }
    }
    return s;
}

void run(const settings& s) {
    const double start = machine::wall_seconds();
    std::printf("%s, one thread: %.1f GB/s read. A layer of 32 / 8 heads of 128; keys in bfloat16, states in fp32.\n",
                machine::processor().c_str(), bandwidth_of_run() / 1e9);
    results r;
    r.table = equal_memory(s);
    r.steps = decode_all(s);
    r.prompts = prefill_all(s);
    r.streams = stream_all(s);
    r.crossings = crossings(s, r.steps, r.prompts);
    print(s, r.crossings);
    if (!s.json.empty()) write_json(s.json, s, r);
    std::printf("\n%.0f s\n", machine::wall_seconds() - start);
}

}  // namespace

int main(int count, char** values) {
    try {
        run(parse(count, values));
    } catch (const std::exception& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 2;
    }
}
