// The front door on NEON: every form of attention at small shapes, against loops in double over the whole history
// (support/probes.hpp). A program without a test framework, since it is compiled for another machine than the tests.
#include "../support/probes.hpp"

#include <cstdint>
#include <cstdio>

namespace {

using probes::exact_rows;
using probes::history;
using probes::window_rule;
using sash::int64;

int checks = 0, failures = 0;

void check(const std::string& wrong, const std::string& what) {
    ++checks;
    if (wrong.empty()) return;
    ++failures;
    std::printf("FAIL  %s: %s\n", what.c_str(), wrong.c_str());
}

// Tokens of each call; the last number is used again until all tokens are through.
using cut = std::vector<int64>;

const struct {
    const char* name;
    cut tokens;
} cuts[] = {{"prefill", {1000}}, {"decode", {1}}, {"prefill, chunks, decode", {100, 37, 16, 3, 1}}};

std::vector<float> run(const history& h, const cut& tokens, auto cache) {
    probes::floats out(probes::index(h.tokens * h.row_floats()), probes::not_a_number);
    int64 done = 0;
    for (std::size_t call = 0; done < h.tokens; ++call) {
        const int64 n = std::min(tokens[std::min(call, tokens.size() - 1)], h.tokens - done);
        sash::attend(h.queries(done, n), h.keys(done, n), h.values(done, n), cache, h.rows(out, done, n),
                     {.run = sash::serial{}});
        done += n;
    }
    return out;
}

// Keys and values as they are stored. The oracle is given these, and the cache what they were made of.
template <class Element>
history rounded(history h) {
    for (probes::floats* part : {&h.key, &h.value})
        for (float& x : *part) x = static_cast<float>(probes::stored<Element>(x));
    return h;
}

template <class Element, class Policy>
void check_softmax(const std::string& name, const Policy& policy, const window_rule& rule, const sash::shape& shape) {
    const history h = probes::contents(140, shape);
    const exact_rows expected = probes::softmax_rows(rounded<Element>(h), rule);
    for (const auto& [cut_name, tokens] : cuts)
        check(probes::difference(run(h, tokens, sash::kv_cache<Policy, Element>(policy, shape)), expected.out),
              name + ", " + cut_name + ", " + std::to_string(shape.heads) + " heads on " +
                  std::to_string(shape.kv_heads));
}

template <class Element>
void check_element(const std::string& name) {
    const sash::shape shapes[] = {{.heads = 4, .kv_heads = 2, .key_dim = 64, .value_dim = 32},
                                  {.heads = 3, .kv_heads = 1, .key_dim = 37, .value_dim = 21},
                                  {.heads = 8, .kv_heads = 1, .key_dim = 16, .value_dim = 24}};
    for (const sash::shape& s : shapes) {
        check_softmax<Element>(name + ", full", sash::full{}, window_rule{}, s);
        check_softmax<Element>(name + ", window", sash::sliding_window{.window = 50, .sinks = 4},
                               window_rule{.window = 50, .sinks = 4}, s);
    }
}

void check_linear() {
    const sash::shape shape{.heads = 4, .kv_heads = 2, .key_dim = 24, .value_dim = 40};
    const history h = probes::contents(90, shape);
    const exact_rows expected = probes::linear_rows(h);
    for (const auto& [cut_name, tokens] : cuts)
        check(probes::difference(run(h, tokens, sash::kv_cache(sash::linear{}, shape)), expected.out),
              std::string("linear, ") + cut_name);
}

// Every 16-bit number, and every float next to one or next to the middle between two, bit for bit as single numbers are
// converted.
template <class Element>
void check_conversions(const char* name) {
    constexpr int count = 1 << 16;
    std::vector<Element> narrow(count), again(count);
    probes::floats wide(count), to_round(count);
    for (int i = 0; i < count; ++i) narrow[std::size_t(i)].bits = static_cast<std::uint16_t>(i);
    sash::cpu::widen<sash::build::here>(narrow.data(), wide.data(), count);
    int64 wrong = 0;
    for (std::size_t i = 0; i < wide.size(); ++i)
        wrong += std::bit_cast<std::uint32_t>(wide[i]) != std::bit_cast<std::uint32_t>(float(narrow[i]));
    const std::uint32_t half = std::is_same_v<Element, sash::float16> ? 0x1000u : 0x8000u;
    for (const std::uint32_t step : {0u, 1u, ~0u, half - 1, half, half + 1}) {
        for (std::size_t i = 0; i < wide.size(); ++i)
            to_round[i] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(wide[i]) + step);
        sash::cpu::narrow<sash::build::here>(to_round.data(), again.data(), count);
        for (std::size_t i = 0; i < wide.size(); ++i) wrong += again[i].bits != Element(to_round[i]).bits;
    }
    check(wrong == 0 ? "" : std::to_string(wrong) + " numbers differ", std::string("conversions of ") + name);
}

}  // namespace

int main() {
    using build = sash::build::here;
    static_assert(sash::cpu::lanes<build> == 4 && sash::cpu::registers<build> == 32, "this is not NEON");
    check_conversions<sash::float16>("float16");
    check_conversions<sash::bfloat16>("bfloat16");
    check_element<float>("float");
    check_element<sash::float16>("float16");
    check_element<sash::bfloat16>("bfloat16");
    check_linear();
    std::printf("%d checks, %d failed\n", checks, failures);
    return failures == 0 ? 0 : 1;
}
