#pragma once
/// \file
/// The model's chat template: every message between markers, and a role before it.
///
///     <|im_start|>system\n…<|im_end|>\n<|im_start|>user\n…<|im_end|>\n<|im_start|>assistant\n
#include "tokenizer.hpp"

namespace smollm2 {

inline constexpr const char* default_system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";

inline void append(std::vector<int>& tokens, const std::vector<int>& more) {
    tokens.insert(tokens.end(), more.begin(), more.end());
}

inline std::vector<int> begin_message(const tokenizer& t, std::string_view role) {
    std::vector<int> tokens = t.marker("<|im_start|>");
    append(tokens, t.encode(std::string(role) + "\n"));
    return tokens;
}

inline std::vector<int> end_message(const tokenizer& t) {
    std::vector<int> tokens = t.marker("<|im_end|>");
    append(tokens, t.encode("\n"));
    return tokens;
}

inline std::vector<int> message(const tokenizer& t, std::string_view role, std::string_view content) {
    std::vector<int> tokens = begin_message(t, role);
    append(tokens, t.encode(content));
    append(tokens, end_message(t));
    return tokens;
}

}  // namespace smollm2
