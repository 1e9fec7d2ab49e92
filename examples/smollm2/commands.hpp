#pragma once
/// \file
/// The commands of the program, one file each. They return the program's exit status.
#include "arguments.hpp"

namespace smollm2 {

int stream(arguments& options);    ///< perplexity of a text under several policies
int generate(arguments& options);  ///< continues a prompt
int chat(arguments& options);      ///< turn by turn, the caches kept between turns
int needle(arguments& options);    ///< finds a sentence hidden in a novel, or does not
int check(arguments& options);     ///< compares logits and tokens with committed values; ctest runs it

}  // namespace smollm2
