#pragma once
/// \file
/// The command line: `smollm2 command --name value --name value …`.
#include <sash/config.hpp>

#include <algorithm>
#include <charconv>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace smollm2 {

/// What the user did wrong; the message says what would be right.
struct usage_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <class Number>
Number parse_number(std::string_view what, std::string_view text) {
    Number number{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{} || end != text.data() + text.size())
        throw usage_error(std::string(what) + ": \"" + std::string(text) + "\" is no number");
    return number;
}

/// The parts of "a,b,c".
inline std::vector<std::string> split(std::string_view text, char by) {
    std::vector<std::string> parts;
    while (true) {
        const std::size_t end = text.find(by);
        parts.emplace_back(text.substr(0, end));
        if (end == std::string_view::npos) return parts;
        text.remove_prefix(end + 1);
    }
}

/// Options are taken out as they are asked for; `finish` refuses what nobody asked for, so that a misspelt option is
/// not passed over.
class arguments {
public:
    arguments(int count, char** text) : all_(text + 1, text + count) {}

    /// The first word that is no option.
    std::string command() {
        if (all_.empty() || all_.front().starts_with("-")) return "";
        std::string first = all_.front();
        all_.erase(all_.begin());
        return first;
    }

    /// Is the option there? It stays.
    bool has(std::string_view name) const { return std::ranges::find(all_, name) != all_.end(); }
    bool flag(std::string_view name) { return std::erase(all_, std::string(name)) > 0; }

    /// The values of an option that may be repeated.
    std::vector<std::string> values(std::string_view name) {
        std::vector<std::string> found;
        for (std::size_t i = 0; i < all_.size();) {
            if (all_[i] != name) {
                ++i;
                continue;
            }
            if (i + 1 == all_.size()) throw usage_error(std::string(name) + " needs a value");
            found.push_back(all_[i + 1]);
            const auto at = all_.begin() + static_cast<std::ptrdiff_t>(i);
            all_.erase(at, at + 2);
        }
        return found;
    }

    std::string value(std::string_view name, std::string_view otherwise) {
        const std::vector<std::string> found = values(name);
        return found.empty() ? std::string(otherwise) : found.back();
    }

    template <class Number>
    Number number(std::string_view name, Number otherwise, Number least) {
        const std::string text = value(name, "");
        const Number result = text.empty() ? otherwise : parse_number<Number>(name, text);
        if (!(result >= least))
            throw usage_error(std::string(name) + " is " + text + ", must be at least " + std::to_string(least));
        return result;
    }

    void finish() const {
        if (!all_.empty()) throw usage_error("unknown option " + all_.front() + " (smollm2 help lists them)");
    }

private:
    std::vector<std::string> all_;
};

}  // namespace smollm2
