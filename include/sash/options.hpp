#pragma once
/// \file
/// What a call of the verb may say beside its tensors.
#include <sash/execution.hpp>
#include <sash/kv_cache.hpp>

namespace sash {

/// The last, optional argument of every form of the verb.
struct options {
    static constexpr int64 automatic = std::numeric_limits<int64>::min();

    /// Receives log Σ exp(score) of every row, [tokens, heads], natural logarithm, of the keys alone; -inf for a row that
    /// saw none.
    std::span<float> lse = {};
    /// Position of the first query. `attend` into a cache: always the cache's length. `read`: the cache's length unless
    /// said. Without a cache: the queries are the last tokens unless said.
    int64 first_query = automatic;
    /// Who does the work: serial{}, openmp{threads}, a pool of your own. No result depends on it.
    runner run = {};
    /// Scratch to use; else the cache's own, or, for a const cache and without one, memory allocated for the call.
    sash::workspace* workspace = nullptr;
    /// false: sink logits are left out, and (out, 1, lse) is a partial that can be merged and finished later.
    bool finish = true;
    /// Keys in one piece where a few queries meet many keys; 0: about
    /// 1 MiB of them, 512 to 4096. Bits depend on it, and on nothing else that is free.
    int64 key_piece = 0;
};

/// One sequence of a batch: its own cache, its own number of tokens.
template <class Cache>
struct request {
    typename Cache::tokens tokens = {};
    Cache* cache = nullptr;
    output out = {};
    std::span<float> lse = {};
};

}  // namespace sash
