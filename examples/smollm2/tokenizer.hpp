#pragma once
/// \file
/// Byte-level BPE, as tokenizer.json describes it: text is split into words, the bytes of a word are tokens, and pairs
/// of neighbours are merged, always the pair that was learned first, until none is left that was ever learned.
///
/// Words are split as GPT-2 does, after every digit has been made a word of its own:
///
///     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
#include <array>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace smollm2 {

/// Classes of characters as ranges of code points: C++ has no tables of Unicode.
class character_classes {
public:
    enum kind : std::uint8_t { other, letter, number, space };

    /// Reads characters.json.
    static character_classes load(const std::filesystem::path& path);
    kind of(char32_t code) const;

private:
    struct range {
        char32_t first, last;
        kind what;
    };
    std::vector<range> ranges_;  // ascending, disjoint
};

class tokenizer {
public:
    /// Reads tokenizer.json and characters.json of a prepared folder.
    static tokenizer load(const std::filesystem::path& folder);
    /// 256 tokens, one a byte: what the built-in model speaks.
    static tokenizer of_bytes();

    /// Tokens of a text. Markers such as <|im_start|> in it are text like any other; see `marker`.
    std::vector<int> encode(std::string_view text) const;

    /// The token of a marker, or the marker as text where this vocabulary has no such token.
    std::vector<int> marker(std::string_view name) const;

    /// The bytes of a token; a character may be spread over several tokens.
    const std::string& bytes_of(int token) const { return bytes_.at(static_cast<std::size_t>(token)); }
    std::string decode(std::span<const int> tokens) const;

    int size() const { return static_cast<int>(bytes_.size()); }

private:
    struct merge {
        int rank, result;
    };
    static std::uint64_t pair_key(int left, int right) {
        return std::uint64_t(std::uint32_t(left)) << 32 | std::uint32_t(right);
    }

    std::vector<int> merge_word(std::string_view word) const;
    template <class F>
    void for_each_word(std::string_view text, const F& f) const;

    std::vector<std::string> bytes_;                   // of each token
    std::array<int, 256> byte_token_;                  // -1: no token has this byte alone
    std::unordered_map<std::uint64_t, merge> merges_;  // of a pair of tokens
    std::unordered_map<std::string, int> markers_;
    character_classes classes_;
};

/// The first code point of a text and its length in bytes; a byte that begins no valid sequence stands for itself.
std::pair<char32_t, std::size_t> first_character(std::string_view text);

}  // namespace smollm2
