#pragma once
/// \file
/// What every command begins with: a model, its tokenizer, threads to run on, and texts.
#include "arguments.hpp"
#include "model.hpp"
#include "tokenizer.hpp"

namespace smollm2 {

struct session {
    std::filesystem::path folder;  ///< the prepared folder
    bool built_in = false;         ///< there is none: a small random model in its place
    weights model = {};
    smollm2::tokenizer tokenizer = {};
    crew run;
    int threads = 1;
    bool show_progress = false;
};

/// True where prepare.py has finished its work.
bool is_prepared(const std::filesystem::path& folder);

/// Takes --model, --threads and --progress from the command line and loads what they name. Says on stderr when there is
/// no prepared model and the built-in one is used; a folder that was named and lacks a model is an error.
session open_session(arguments& options);

struct text {
    std::string name;
    std::vector<int> tokens;
};

/// A novel of the prepared folder by name, `all` for the six novels one behind the other, or a file of the user's, of
/// which at most `most` tokens are kept. The built-in model reads an endless text of its own.
text load_text(const session& s, const std::string& name, sash::int64 most);

inline constexpr const char* default_text = "pride_and_prejudice";

}  // namespace smollm2
