#pragma once
// One row of the table of goals: what is measured, and what it must and should come to. Each file of this folder lists
// its rows in a function named below; a new row is one more entry there.
#include "../layer.hpp"
#include "../sampling.hpp"

#include <functional>
#include <string>
#include <vector>

namespace goals {

using bench::effort;
using bench::figure;
using sash::int64;

enum class better : char { higher, lower };

/// A row without a must, `none`, informs and cannot fail.
struct goal {
    static constexpr double none = 0;

    std::string name;
    better direction = better::higher;
    double must = none, aim = none;
    std::function<figure(const effort&)> measure;

    bool reaches(double limit, const figure& f) const {
        if (limit == none) return true;
        return direction == better::higher ? f.median >= limit : f.median <= limit;
    }
};

std::vector<goal> float_prefill_goals(const std::string& build);  // prefill.cpp: fractions of the peak
std::vector<goal> narrow_prefill_goals();
std::vector<goal> window_goals();   // window.cpp: windows cost what they show
std::vector<goal> decode_goals();   // decode.cpp: fractions of the read bandwidth, verification of drafts
std::vector<goal> stream_goals();   // stream.cpp: rings, endless streams, the compact frame
std::vector<goal> linear_goals();   // linear.cpp: recurrent states
std::vector<goal> thread_goals();   // threads.cpp: two cores
std::vector<goal> library_goals();  // libraries.cpp: compositions of matrix products

/// Starts the program again where the environment would hold a library back.
void free_libraries(char** arguments);

}  // namespace goals
