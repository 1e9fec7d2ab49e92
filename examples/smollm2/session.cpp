#include "session.hpp"

#include <cstdio>
#include <fstream>
#include <sstream>
#include <thread>

namespace smollm2 {

namespace {

namespace fs = std::filesystem;

// The first is the text of all figures that are compared with others.
constexpr const char* novels[] = {default_text,       "emma",       "mansfield_park",
                                  "northanger_abbey", "persuasion", "sense_and_sensibility"};

constexpr const char* built_in_text =
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. "
    "However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth "
    "is so "
    "well fixed in the minds of the surrounding families, that he is considered the rightful property of some one or "
    "other "
    "of their daughters. ";

std::string read_file(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot open " + path.string());
    std::ostringstream content;
    content << file.rdbuf();
    return content.str();
}

/// Little-endian 16-bit numbers, as prepare.py writes them.
std::vector<int> read_tokens(const fs::path& path, int vocabulary) {
    const std::string raw = read_file(path);
    std::vector<int> tokens(raw.size() / 2);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = static_cast<unsigned char>(raw[2 * i]) | static_cast<unsigned char>(raw[2 * i + 1]) << 8;
        if (tokens[i] >= vocabulary)
            throw std::runtime_error(path.string() + ": token " + std::to_string(tokens[i]) +
                                     " is outside the vocabulary");
    }
    return tokens;
}

}  // namespace

bool is_prepared(const fs::path& folder) {
    for (const char* name : {"config.json", "model.safetensors", "tokenizer.json", "characters.json"})
        if (!fs::exists(folder / name)) return false;
    return true;
}

session open_session(arguments& options) {
    const std::string named = options.value("--model", "");
    const unsigned cores = sash::build::here::has_openmp ? std::max(1u, std::thread::hardware_concurrency()) : 1;
    const int threads = options.number("--threads", static_cast<int>(cores), 1);
    const bool show_progress = options.flag("--progress");
    const bool random = options.flag("--random");
    options.finish();

    session s{.folder = named.empty() ? fs::path(SMOLLM2_MODEL) : fs::path(named),
              .run = crew{.threads = threads},
              .threads = threads,
              .show_progress = show_progress};
    if (!random && is_prepared(s.folder)) {
        s.model = load_weights(s.folder);
        s.tokenizer = tokenizer::load(s.folder);
        return s;
    }
    if (!named.empty() && !random)
        throw std::runtime_error("no model in " + named + ": run prepare.py " + named + " first");
    if (!random)
        std::fprintf(stderr,
                     "no model in %s (prepare.py makes it): a small built-in model with random weights is used;\n"
                     "everything works, and its figures and words mean nothing\n",
                     s.folder.c_str());
    s.built_in = true;
    s.model = random_weights();
    s.tokenizer = tokenizer::of_bytes();
    return s;
}

text load_text(const session& s, const std::string& name, sash::int64 most) {
    text result{name, {}};
    const int vocabulary = static_cast<int>(s.model.config.vocabulary);
    const auto prepared = [&](const std::string& novel) { return s.folder / "texts" / (novel + ".tokens"); };
    if (name == "all" && !s.built_in && fs::exists(prepared(novels[0]))) {
        for (const char* novel : novels) {
            const std::vector<int> tokens = read_tokens(prepared(novel), vocabulary);
            result.tokens.insert(result.tokens.end(), tokens.begin(), tokens.end());
        }
    } else if (!s.built_in && fs::exists(prepared(name))) {
        result.tokens = read_tokens(prepared(name), vocabulary);
    } else if (fs::is_regular_file(name)) {
        result.name = fs::path(name).filename().string();
        result.tokens = s.tokenizer.encode(read_file(name));
    } else if (name == default_text || name == "all") {
        if (!s.built_in)
            std::fprintf(
                stderr,
                "there are no novels in %s (prepare.py fetches them): the model reads one paragraph again and again,\n"
                "and its figures mean nothing; --text FILE takes a text of yours\n",
                (s.folder / "texts").c_str());
        result.name = "a built-in paragraph, again and again";
        const std::vector<int> once = s.tokenizer.encode(built_in_text);
        while (static_cast<sash::int64>(result.tokens.size()) < std::min<sash::int64>(most, 1 << 20))
            result.tokens.insert(result.tokens.end(), once.begin(), once.end());
    } else {
        throw std::runtime_error("no text \"" + name + "\": neither a file nor a name in " +
                                 (s.folder / "texts").string());
    }
    if (static_cast<sash::int64>(result.tokens.size()) > most) result.tokens.resize(static_cast<std::size_t>(most));
    return result;
}

}  // namespace smollm2
