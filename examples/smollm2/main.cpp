// smollm2: a real language model that reads and writes through the attention policies of sash.
#include "commands.hpp"

#include <cstdio>
#include <exception>

namespace {

constexpr const char* help = R"(smollm2 COMMAND [options]

  stream     feeds a text through the model under several policies and prints perplexities
               --text NAME      a prepared novel, "all" for all six, or a file [pride_and_prejudice]
               --policy P,…     full, 256, 252+4, 252+4:compact, linear; 64+4@4096 for so many tokens
               --grid NAME      a ready set: study, stream or demo [demo]
               --to N           at most so many tokens
               --json FILE      the same as JSON
               --plot FILE      an SVG of perplexity against position
               --chunk N        tokens per step [256]
  generate   continues a prompt
               --prompt TEXT, --policy P [252+4:compact], --tokens N [200], --endless
  chat       turn by turn, from standard input; the caches are kept between turns
               --system TEXT, --policy P [1020+4:compact], --tokens N [400]
  needle     hides a sentence in a novel and asks for it
               --policy P,…     [full,252+4,1020+4,linear]
               --lengths N,…    tokens of the prompt [1024,2048,4096]
               --depths D,…     where the sentence lies, 0 to 1 [0.1,0.3,0.5,0.7,0.9]
               --from N         token of the novel at which the haystack begins [3000]
               --text, --json   as above
  check      compares with other implementations: --golden FILE; the prepared model, or --random the built-in one

everywhere   --model FOLDER     what prepare.py made; without one, a small built-in model with random weights
             --random           the built-in model in any case
             --threads N        [all cores]
             --element E        keys and values stored as float, float16 or bfloat16 [float]
             --progress         a progress bar even where stderr is no terminal
generate     --temperature T [0.8; 0: the likeliest token], --top N [40], --seed N [1]
and chat

"w+s": a query sees its own token and the w - 1 before it, and the first s tokens. ":compact" reads these sinks at the
place they have inside the cache, otherwise at their true distance.
)";

int run(smollm2::arguments& options) {
    const std::string command = options.command();
    if (command == "stream") return smollm2::stream(options);
    if (command == "generate") return smollm2::generate(options);
    if (command == "chat") return smollm2::chat(options);
    if (command == "needle") return smollm2::needle(options);
    if (command == "check") return smollm2::check(options);
    if (!command.empty() && command != "help")
        throw smollm2::usage_error("unknown command " + command + ": stream, generate, chat, needle, check or help");
    const bool asked = command == "help" || options.flag("--help");
    std::fputs(help, asked ? stdout : stderr);
    return asked ? 0 : 2;
}

}  // namespace

int main(int count, char** text) {
    try {
        smollm2::arguments options(count, text);
        return run(options);
    } catch (const smollm2::usage_error& error) {
        std::fprintf(stderr, "smollm2: %s\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "smollm2: %s\n", error.what());
        return 1;
    }
}
