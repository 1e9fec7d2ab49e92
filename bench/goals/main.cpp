// goals [--quick] [--only TEXT] [--json FILE]: measures what this library is to reach on one thread of this machine,
// and on two, beside what the machine can do; prints a table and ends with 1 where a must falls short.
//
// Times are thread CPU time (on two threads the clock on the wall), figures are medians of ratios, and peak, bandwidth
// or baseline are measured beside each sample. What cannot be measured here is said, and fails nothing.
#include "goal.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <utility>

namespace {

using bench::effort;
using bench::figure;
using goals::goal;

struct arguments {
    effort most{};
    std::string only, json;
};

/// Rows that a second program measures: the same source, compiled for AVX2.
std::vector<goal> avx2_goals(const std::filesystem::path& folder) {
    std::vector<goal> rows = goals::float_prefill_goals("AVX2 build: ");
    for (std::size_t i = 0; i < rows.size(); ++i)
        rows[i].measure = [i, program = (folder / "goals_avx2").string()](const effort& most) {
#if defined(__x86_64__) && defined(__GNUC__)
            if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
                return bench::not_measured("this CPU has no AVX2");
            if (!std::filesystem::exists(program)) throw std::runtime_error(program + " is missing");
            char command[1024];
            std::snprintf(command, sizeof command, "'%s' %zu %g %d %d", program.c_str(), i, most.seconds,
                          most.least_rounds, most.most_rounds);
            std::FILE* pipe = popen(command, "r");
            figure f;
            const int read = pipe ? std::fscanf(pipe, "%lf %lf %lf %d", &f.median, &f.low, &f.high, &f.samples) : 0;
            if (!pipe || pclose(pipe) != 0 || read != 4) throw std::runtime_error(program + " failed");
            return f;
#else
            return bench::not_measured("no machine for AVX2");
#endif
        };
    return rows;
}

std::vector<goal> all_goals(const std::filesystem::path& folder) {
    std::vector<goal> rows;
    for (const auto& part : {goals::float_prefill_goals(""), avx2_goals(folder), goals::narrow_prefill_goals(),
                             goals::window_goals(), goals::decode_goals(), goals::stream_goals(), goals::linear_goals(),
                             goals::library_goals(), goals::thread_goals()})
        rows.insert(rows.end(), part.begin(), part.end());
    return rows;
}

struct outcome {
    goal row;
    figure measured;
    bool failed = false;  ///< an exception: counts as falling short

    bool is_measured() const { return measured.samples > 0; }
    bool must_holds() const { return !failed && (!is_measured() || row.reaches(row.must, measured)); }
    bool aim_holds() const { return is_measured() && row.reaches(row.aim, measured); }
    const char* verdict() const {
        if (failed) return "FAILED";
        if (!is_measured()) return "not measured";
        if (row.must == goal::none) return "";
        return !must_holds() ? "SHORT" : aim_holds() ? "aim" : "ok";
    }
};

outcome measure(const goal& row, const std::function<figure(const effort&)>& measuring, const effort& most) {
    try {
        return {row, measuring(most)};
    } catch (const std::exception& e) { return {row, bench::not_measured(e.what()), true}; }
}

std::string number(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3f", x);
    return x == goal::none ? "" : text;
}

void print(const outcome& o) {
    const std::string sign = o.row.direction == goals::better::higher ? "≥ " : "≤ ";
    std::printf("%-72s  %8s  %s%5s  %6s  %s%s%s\n", o.row.name.c_str(),
                o.is_measured() ? number(o.measured.median).c_str() : "-",
                o.row.must == goal::none ? "  " : sign.c_str(), number(o.row.must).c_str(), number(o.row.aim).c_str(),
                o.verdict(), o.measured.note.empty() ? "" : "  · ", o.measured.note.c_str());
    std::fflush(stdout);
}

std::string quoted(const std::string& text) {
    std::string s = "\"";
    for (const char c : text) s += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    return s + '"';
}

void write_json(const std::string& file, const std::vector<outcome>& outcomes, double seconds) {
    std::ofstream out(file);
    out << "{\n  \"machine\": {\"processor\": " << quoted(machine::processor())
        << ", \"compiler\": " << quoted(__VERSION__) << ", \"fp32 flops\": " << machine::peak_flops()
        << ", \"bfloat16 flops\": " << machine::peak_bfloat16_flops()
        << ", \"int8 operations\": " << machine::peak_int8_operations()
        << ", \"bytes read\": " << machine::read_bandwidth()
        << ", \"bytes read in two streams\": " << machine::read_bandwidth<2>() << "},\n  \"seconds\": " << seconds
        << ",\n  \"goals\": [";
    for (const outcome& o : outcomes) {
        out << (&o == outcomes.data() ? "\n" : ",\n") << "    {\"goal\": " << quoted(o.row.name) << ", \"better\": \""
            << (o.row.direction == goals::better::higher ? "higher" : "lower") << "\"";
        if (o.is_measured())
            out << ", \"measured\": " << o.measured.median << ", \"low\": " << o.measured.low
                << ", \"high\": " << o.measured.high << ", \"samples\": " << o.measured.samples;
        if (o.row.must != goal::none) out << ", \"must\": " << o.row.must << ", \"aim\": " << o.row.aim;
        out << ", \"ok\": " << (o.must_holds() ? "true" : "false")
            << ", \"reaches aim\": " << (o.aim_holds() ? "true" : "false") << ", \"note\": " << quoted(o.measured.note)
            << "}";
    }
    out << "\n  ]\n}\n";
    if (!out.flush()) throw std::runtime_error("cannot write " + file);
}

arguments parse(int count, char** values) {
    arguments a;
    for (int i = 1; i < count; ++i) {
        const std::string_view option = values[i];
        const bool has_value = i + 1 < count;
        if (option == "--quick")
            a.most = {.seconds = 0.25, .least_rounds = 3, .most_rounds = 9};
        else if (option == "--only" && has_value)
            a.only = values[++i];
        else if (option == "--json" && has_value)
            a.json = values[++i];
        else
            throw std::runtime_error("usage: goals [--quick] [--only TEXT] [--json FILE]");
    }
    return a;
}

int run(const arguments& a, const std::filesystem::path& folder) {
    const double start = machine::wall_seconds();
    std::printf(
        "%s, one thread: %.0f GFLOP/s fp32, %.0f bfloat16, %.0f GOP/s int8; %.1f GB/s read, %.1f in two streams\n\n",
        machine::processor().c_str(), machine::peak_flops() / 1e9, machine::peak_bfloat16_flops() / 1e9,
        machine::peak_int8_operations() / 1e9, machine::read_bandwidth() / 1e9, machine::read_bandwidth<2>() / 1e9);
    std::printf("%-72s  %8s  %7s  %6s  %s\n", "goal", "measured", "must", "aim", "ok");
    std::vector<outcome> outcomes;
    for (goal& row : all_goals(folder)) {
        const auto measuring = std::exchange(row.measure, nullptr);  // what rows share goes with the last of them
        if (row.name.find(a.only) == std::string::npos) continue;
        outcomes.push_back(measure(row, measuring, a.most));
        print(outcomes.back());
    }
    int with_must = 0, hold = 0, aims = 0, unmeasured = 0;
    for (const outcome& o : outcomes) {
        if (!o.is_measured() && !o.failed) {
            ++unmeasured;
        } else if (o.row.must != goal::none || o.failed) {
            ++with_must;
            hold += o.must_holds() ? 1 : 0;
            aims += o.aim_holds() ? 1 : 0;
        }
    }
    const double seconds = machine::wall_seconds() - start;
    std::printf("\n%d of %d musts hold, %d aims are reached, %d rows could not be measured; %.0f s\n", hold, with_must,
                aims, unmeasured, seconds);
    if (!a.json.empty()) write_json(a.json, outcomes, seconds);
    return hold == with_must ? 0 : 1;
}

}  // namespace

int main(int count, char** values) {
    goals::free_libraries(values);
    try {
        return run(parse(count, values), std::filesystem::absolute(values[0]).parent_path());
    } catch (const std::exception& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 2;
    }
}
