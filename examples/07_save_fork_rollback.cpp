// Lesson 7: caches are values. Copy one to fork a sequence; take the last tokens back; keep a checkpoint; write it to a
// file. The same works on a range of caches, the layers of a model: for all of them, or for none.
#include "lesson.hpp"

#include <sash/sash.hpp>

#include <cstring>

namespace {

using sash::int64;
constexpr int64 heads = 4, kv_heads = 2, dim = 32, layers = 3;
constexpr std::size_t row = heads * dim;
const sash::sliding_window policy{.window = 32, .sinks = 4};

// A model's layers. A window that has slid forgets; to take back up to 8 tokens it must hold 8 more.
using cache = sash::kv_cache<sash::sliding_window>;
std::vector<cache> new_layers(int64 slack = 8) {
    return std::vector<cache>(
        layers, cache(policy, {.heads = heads, .kv_heads = kv_heads, .head_dim = dim}, {}, {.rollback_slack = slack}));
}

// Runs one token through all layers, each fed with the rows of the one before. The token's number stands for its
// embedding.
std::vector<float> step(std::vector<cache>& model, unsigned token) {
    std::vector<float> x = lesson::numbers(heads * dim, token), rows(row);
    for (cache& layer : model) {
        sash::attend({x, 1, heads, dim}, {x, 1, kv_heads, dim}, {x, 1, kv_heads, dim}, layer, {rows, 1, heads, dim});
        x = rows;
    }
    return rows;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

int main() {
    std::vector<cache> model = new_layers();
    for (unsigned token = 0; token < 100; ++token) step(model, token);
    lesson::say(layers, " layers, ", model[0].length(), " tokens seen, ", model[0].stored(), " held in each");

    // ---- Fork: two ways to go on from the same text. Neither knows of the other.
    std::vector<cache> other = model;
    step(other, 777);
    const std::vector<float> next = step(model, 100);
    std::vector<cache> undisturbed = new_layers();
    for (unsigned token = 0; token < 100; ++token) step(undisturbed, token);
    lesson::expect(same_bits(next, step(undisturbed, 100)), "a fork goes its own way");

    // ---- Roll back: a small model drafts four tokens, the large one takes the first and rejects three.
    for (unsigned draft : {101u, 900u, 901u, 902u}) step(model, draft);
    sash::rollback(model, 3);
    step(undisturbed, 101);
    lesson::expect(model[0].length() == undisturbed[0].length() && same_bits(step(model, 102), step(undisturbed, 102)),
                   "after a rollback of 3 of 4 drafts, bit for bit as if they had never been");

    // ---- What has left the cache cannot come back: then nothing changes, in any layer.
    std::vector<cache> tight = new_layers(0);
    for (unsigned token = 0; token < 100; ++token) step(tight, token);
    lesson::expect(!sash::can_rollback(tight, 3), "without slack a window that has slid cannot go back");
    try {
        sash::rollback(tight, 3);
        lesson::expect(false, "it must be refused");
    } catch (const sash::error& e) { lesson::expect(tight[0].length() == 100, e.what()); }

    // ---- A checkpoint always can. Try something, come back.
    const auto before = sash::checkpoint(tight);
    const std::vector<float> once = step(tight, 100);
    for (unsigned token = 500; token < 600; ++token) step(tight, token);
    sash::restore(tight, before);
    lesson::expect(tight[0].length() == 100 && same_bits(once, step(tight, 100)),
                   "back at the checkpoint, a hundred tokens later");

    // ---- Save and load: one file for all layers, checked before anything is touched.
    const std::vector<std::byte> file = sash::save(model);
    std::vector<cache> loaded = new_layers();
    const std::size_t used = sash::load(loaded, file);
    lesson::say("a file of ", file.size(), " bytes for ", layers, " layers");
    lesson::expect(used == file.size() && same_bits(step(loaded, 103), step(model, 103)),
                   "loaded, it goes on bit for bit");

    std::vector<std::byte> damaged = file;
    damaged[damaged.size() / 2] ^= std::byte{1};
    const int64 length = loaded[0].length();
    try {
        sash::load(loaded, damaged);
        lesson::expect(false, "one bit flipped: it must be refused");
    } catch (const sash::error& e) {
        lesson::expect(loaded[0].length() == length && loaded[2].length() == length, e.what());
    }
    try {
        cache narrower({.window = 16, .sinks = 4}, {.heads = heads, .kv_heads = kv_heads, .head_dim = dim});
        narrower.load(file);
        lesson::expect(false, "another window: it must be refused");
    } catch (const sash::error& e) { lesson::expect(true, e.what()); }
    return lesson::exit_code();
}
