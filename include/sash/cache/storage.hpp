#pragma once
/// \file
/// How a cache holds its tokens: options that do not change any result.
#include <sash/memory.hpp>

namespace sash {

/// The fourth argument of a cache.
struct storage {
    int64 capacity = 0;        ///< most tokens held at a time; 0: no limit. One token more is refused
    int64 rollback_slack = 0;  ///< tokens that `rollback` can take back once a window has slid or a state has advanced
    int64 auxiliary = 0;       ///< floats that travel with the cache: convolution tails, token-shift vectors
    int64 piece = 256;         ///< a bounded cache stores and reads a long append in pieces of this many tokens
    memory_source memory = {};
};

}  // namespace sash
