// generate and chat: the model writes. With a window the caches keep their size however long it goes on.
#include "chat_template.hpp"
#include "commands.hpp"
#include "policies.hpp"
#include "sampler.hpp"
#include "session.hpp"

#include <unistd.h>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <limits>

namespace smollm2 {

namespace {

using clock = std::chrono::steady_clock;

volatile std::sig_atomic_t interrupted = 0;

/// From here on Ctrl-C ends the writing, and the program goes on to say how far it came.
void catch_interrupts() {
    std::signal(SIGINT, [](int) { interrupted = 1; });
}

struct writing {
    policy_choice policy;
    sash::scalar element;
    sampler choose;
    index most = 0;  ///< tokens
};

/// The options both commands share.
writing take_writing(arguments& options, const char* default_policy, index default_tokens) {
    writing how;
    how.policy = parse_policy(options.value("--policy", default_policy));
    how.element = parse_element(options.value("--element", "float"));
    how.choose.temperature = options.number("--temperature", how.choose.temperature, 0.0f);
    how.choose.among = options.number("--top", how.choose.among, 1);
    how.choose.random.seed(options.number<std::uint64_t>("--seed", 1, 0));
    how.most = options.number<index>("--tokens", default_tokens, 1);
    if (options.flag("--endless")) how.most = std::numeric_limits<index>::max();
    return how;
}

/// Writes until an end marker (`stop`, -1: none), `most` tokens or Ctrl-C. Every token written has been fed, too.
template <class Transformer>
index write_on(Transformer& sequence, const session& s, matrix hidden, writing& how, int stop) {
    index written = 0;
    while (written < how.most && !interrupted) {
        const int token = how.choose(logits(s.model, hidden, s.run).row(0));
        hidden = sequence.forward({&token, 1});
        if (token == stop) break;
        const std::string& bytes = s.tokenizer.bytes_of(token);
        std::fwrite(bytes.data(), 1, bytes.size(), stdout);
        std::fflush(stdout);
        ++written;
    }
    return written;
}

template <class Transformer>
void print_state(const Transformer& sequence, const policy_choice& policy, index written, clock::time_point start) {
    const double seconds = std::chrono::duration<double>(clock::now() - start).count();
    std::fprintf(stderr, "[%s: %lld tokens read and written, %.1f tokens/s, caches %.1f MiB]\n", policy.name().c_str(),
                 static_cast<long long>(sequence.length()), static_cast<double>(written) / seconds,
                 static_cast<double>(sequence.cache_bytes()) / (1 << 20));
}

/// Calls f(sequence) with an empty sequence under the chosen policy.
template <class F>
void with_sequence(const session& s, const writing& how, const F& f) {
    with_cache(how.policy, how.element, [&]<class Cache>(const typename Cache::policy_type& p) {
        transformer<Cache> sequence(s.model, p, s.run);
        f(sequence);
    });
}

int end_marker(const session& s) {
    const std::vector<int> marker = s.tokenizer.marker("<|im_end|>");
    return marker.size() == 1 ? marker.front() : -1;  // the built-in model has none, and stops at its last token
}

}  // namespace

int generate(arguments& options) {
    const std::string prompt = options.value("--prompt", "It is a truth universally acknowledged, that");
    writing how = take_writing(options, "252+4:compact", 200);
    const session s = open_session(options);
    const std::vector<int> tokens = s.tokenizer.encode(prompt);
    if (tokens.empty()) throw usage_error("--prompt is empty");
    catch_interrupts();
    with_sequence(s, how, [&](auto& sequence) {
        std::fwrite(prompt.data(), 1, prompt.size(), stdout);
        matrix hidden = sequence.feed(tokens);
        const auto start = clock::now();
        const index written = write_on(sequence, s, std::move(hidden), how, -1);
        std::printf("\n");
        print_state(sequence, how.policy, written, start);
    });
    return 0;
}

int chat(arguments& options) {
    const std::string system = options.value("--system", default_system);
    writing how = take_writing(options, "1020+4:compact", 400);
    const session s = open_session(options);
    const bool interactive = isatty(STDIN_FILENO) != 0;
    if (interactive) std::printf("Write to the model; an empty line or Ctrl-D ends the chat.\n");
    with_sequence(s, how, [&](auto& sequence) {
        const int stop = end_marker(s);
        std::vector<int> tokens = message(s.tokenizer, "system", system);
        while (true) {
            if (interactive) std::printf("\nyou> ");
            std::fflush(stdout);
            std::string line;
            if (!std::getline(std::cin, line) || line.empty()) break;
            append(tokens, message(s.tokenizer, "user", line));
            append(tokens, begin_message(s.tokenizer, "assistant"));
            matrix hidden = sequence.feed(tokens);  // only what is new: the caches hold every turn before
            const auto start = clock::now();
            if (interactive) std::printf("model> ");
            const index written = write_on(sequence, s, std::move(hidden), how, stop);
            std::printf("\n");
            print_state(sequence, how.policy, written, start);
            // The end marker has been fed where the model wrote it; an answer that was cut off gets it here.
            tokens = written == how.most ? end_message(s.tokenizer) : s.tokenizer.encode("\n");
        }
    });
    return 0;
}

}  // namespace smollm2
