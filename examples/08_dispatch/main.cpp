// Lesson 8: one program for every machine. The kernels are compiled three times (attend.cpp), and the program asks the
// processor and the operating system which of them it may call (choose.hpp).
//
//     dispatch            the best that this machine runs, checked together with all others that it runs
//     dispatch avx2       that one, or a refusal
//
// This file is compiled for the oldest machine: it runs before anything is known.
#include "../lesson.hpp"
#include "choose.hpp"
#include "kernels.hpp"

#include <sash/reference.hpp>

#include <cstring>

namespace dispatch {
namespace {

using sash::int64;

#if defined(__x86_64__)
const kernels* const by_isa[] = {&baseline, &avx2, &avx512};
#else
const kernels* const by_isa[] = {&baseline};
#endif

constexpr sash::shape shape{.heads = heads, .kv_heads = kv_heads, .head_dim = dim};
constexpr sash::sliding_window window{.window = 100, .sinks = 4};
constexpr int64 tokens = 300;

const std::vector<float> q = lesson::numbers(tokens * row, 1);
const std::vector<float> k = lesson::numbers(tokens * kv_row, 2);
const std::vector<float> v = lesson::numbers(tokens * kv_row, 3);

// All tokens into one cache, which the given copies of the kernels take in turn: a prompt, chunks, single tokens.
std::vector<float> rows(std::span<const kernels* const> team) {
    std::vector<float> out(q.size());
    cache_type cache(window, shape);
    for (int64 done = 0, n = 150, call = 0; done < tokens; done += n, ++call) {
        n = call == 0 ? 150 : std::min<int64>(call < 6 ? 7 : 1, tokens - done);
        team[std::size_t(call) % team.size()]->attend(cache, n, q.data() + done * row, k.data() + done * kv_row,
                                                      v.data() + done * kv_row, out.data() + done * row);
    }
    return out;
}

// Which of by_isa the argument names; by_isa's end where it is none.
std::size_t named(const char* name) {
    std::size_t i = 0;
    while (i < std::size(by_isa) && std::strcmp(by_isa[i]->name, name) != 0) ++i;
    return i;
}

int run(int argc, char** argv) {
    const auto best = static_cast<std::size_t>(choose(this_machine()));
    std::size_t chosen = best;
    if (argc > 1) {
        chosen = named(argv[1]);
        if (chosen == std::size(by_isa)) {
            lesson::say("there are no kernels called ", argv[1], " in this program");
            return 2;
        }
        if (chosen > best) {
            lesson::say(argv[1], " is refused: this machine, or its operating system, runs ", by_isa[best]->name,
                        " at most");
            return 2;
        }
    }

    const std::span runnable(by_isa, best + 1);
    const auto expected = sash::reference::attend(window, shape, {q, tokens, heads, dim}, {k, tokens, kv_heads, dim},
                                                  {v, tokens, kv_heads, dim});
    for (const kernels* const& one : argc > 1 ? runnable.subspan(chosen, 1) : runnable)
        lesson::expect_near(lesson::largest_difference(rows({&one, 1}), expected.out), 1e-5, one->name);
    if (argc == 1)
        lesson::expect_near(lesson::largest_difference(rows(runnable), expected.out), 1e-5,
                            "one cache, passed between all of them");
    lesson::say("chosen: ", by_isa[chosen]->name);
    return lesson::exit_code();
}

}  // namespace
}  // namespace dispatch

int main(int argc, char** argv) { return dispatch::run(argc, argv); }
