#pragma once
/// \file
/// How an attention policy is spelt on the command line, and how a spelling becomes a type.
///
///     full              every earlier token
///     256               a window of 256 keys, the query's own token included
///     252+4             the same number of keys: a window of 252 and the first 4 tokens of the text
///     252+4:compact     the sinks read at the position they have inside the cache
///     linear            linear attention, elu + 1, without any training for it
///     …@8192            up to so many tokens
#include "arguments.hpp"

#include <sash/sash.hpp>

namespace smollm2 {

struct policy_choice {
    enum class kind { full, window, linear };
    kind what = kind::full;
    sash::sliding_window keys = {};  ///< where `what` is window
    sash::int64 tokens = 0;          ///< how far to go; 0: not said

    /// As the tables print it, with the frame where there are sinks to be read in one.
    std::string name() const {
        if (what == kind::full) return "full";
        if (what == kind::linear) return "linear, elu+1, untrained";
        if (keys.sinks == 0) return std::to_string(keys.window) + ", no sinks";
        return std::to_string(keys.window) + " + " + std::to_string(keys.sinks) + ", " + frame();
    }
    std::string type() const {
        if (what == kind::window) return "sliding_window";
        return what == kind::full ? "full" : "linear";
    }
    std::string frame() const { return keys.frame == sash::frame::compact ? "compact" : "original"; }
    sash::int64 window() const { return what == kind::window ? keys.window : 0; }
    sash::int64 sinks() const { return what == kind::window ? keys.sinks : 0; }
};

inline policy_choice parse_policy(std::string_view spelling) {
    policy_choice choice;
    std::string_view rest = spelling;
    if (const std::size_t at = rest.find('@'); at != std::string_view::npos) {
        choice.tokens = parse_number<sash::int64>(spelling, rest.substr(at + 1));
        if (choice.tokens < 1) throw usage_error(std::string(spelling) + ": the number of tokens must be at least 1");
        rest = rest.substr(0, at);
    }
    if (rest == "full") return choice;
    choice.what = policy_choice::kind::linear;
    if (rest == "linear") return choice;
    choice.what = policy_choice::kind::window;
    if (const std::size_t colon = rest.find(':'); colon != std::string_view::npos) {
        const std::string_view frame = rest.substr(colon + 1);
        if (frame != "compact" && frame != "original")
            throw usage_error(std::string(spelling) + ": the frame is \"compact\" or \"original\"");
        if (frame == "compact") choice.keys.frame = sash::frame::compact;
        rest = rest.substr(0, colon);
    }
    const std::size_t plus = rest.find('+');
    if (rest.empty() || rest.find_first_not_of("0123456789+") != std::string_view::npos)
        throw usage_error("unknown policy \"" + std::string(spelling) +
                          "\": full, linear, 256, 252+4 or 252+4:compact");
    choice.keys.window = parse_number<sash::int64>(spelling, rest.substr(0, plus));
    if (plus != std::string_view::npos) choice.keys.sinks = parse_number<sash::int64>(spelling, rest.substr(plus + 1));
    return choice;
}

/// Several, from options that may be repeated or hold commas.
inline std::vector<policy_choice> parse_policies(const std::vector<std::string>& spellings) {
    std::vector<policy_choice> choices;
    for (const std::string& spelling : spellings)
        for (const std::string& one : split(spelling, ',')) choices.push_back(parse_policy(one));
    return choices;
}

/// What keys and values are stored as.
inline sash::scalar parse_element(std::string_view name) {
    if (name == "float") return sash::scalar::f32;
    if (name == "float16") return sash::scalar::f16;
    if (name == "bfloat16") return sash::scalar::bf16;
    throw usage_error("unknown element \"" + std::string(name) + "\": float, float16 or bfloat16");
}

/// Calls f<Cache>(policy) with the chosen type of cache; f is a template lambda. A linear state is always float.
template <class F>
void with_cache(const policy_choice& choice, sash::scalar element, const F& f) {
    const auto with_policy = [&]<class Policy>(const Policy& policy) {
        if (element == sash::scalar::f16)
            f.template operator()<sash::kv_cache<Policy, sash::float16>>(policy);
        else if (element == sash::scalar::bf16)
            f.template operator()<sash::kv_cache<Policy, sash::bfloat16>>(policy);
        else
            f.template operator()<sash::kv_cache<Policy, float>>(policy);
    };
    if (choice.what == policy_choice::kind::full)
        with_policy(sash::full{});
    else if (choice.what == policy_choice::kind::window)
        with_policy(choice.keys);
    else
        f.template operator()<sash::kv_cache<sash::linear<>>>(sash::linear<>{});
}

}  // namespace smollm2
