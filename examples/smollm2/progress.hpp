#pragma once
/// \file
/// A bar on stderr for long work, only where somebody is watching: stderr is a terminal, or --progress was given.
#include <unistd.h>
#include <chrono>
#include <cstdio>
#include <string>

namespace smollm2 {

class progress {
public:
    progress(std::string what, long long total, bool forced)
        : what_(std::move(what)), total_(total), shown_(forced || isatty(STDERR_FILENO) != 0), start_(clock::now()) {}
    progress(const progress&) = delete;
    ~progress() {
        if (shown_) std::fprintf(stderr, "\r\033[K");
    }

    void at(long long done, const std::string& note = "") {
        const auto now = clock::now();
        if (!shown_ || now < next_) return;
        next_ = now + std::chrono::milliseconds(100);
        constexpr int width = 30;
        const double share = static_cast<double>(done) / static_cast<double>(total_);
        const double seconds = std::chrono::duration<double>(now - start_).count();
        std::string bar(width, '.');
        for (int i = 0; i < static_cast<int>(share * width); ++i) bar[static_cast<std::size_t>(i)] = '#';
        std::fprintf(stderr, "\r\033[K%-26s [%s] %3.0f %%  %.0f s left  %s", what_.c_str(), bar.c_str(), 100 * share,
                     done > 0 ? seconds / share - seconds : 0.0, note.c_str());
        std::fflush(stderr);
    }

private:
    using clock = std::chrono::steady_clock;
    std::string what_;
    long long total_;
    bool shown_;
    clock::time_point start_, next_{};
};

}  // namespace smollm2
