#pragma once
/// \file
/// How a cache holds its tokens: options that do not change any result, but for `state`.
#include <sash/memory.hpp>
#include <sash/scalar.hpp>

namespace sash {

/// The fourth argument of a cache.
struct storage {
    int64 capacity = 0;        ///< most tokens held at a time; 0: no limit. One token more is refused
    int64 rollback_slack = 0;  ///< tokens that `rollback` can take back once a window has slid or a state has advanced
    int64 auxiliary = 0;       ///< floats that travel with the cache: convolution tails, token-shift vectors
    int64 piece = 256;         ///< a bounded cache stores and reads a long append in pieces of this many tokens
    memory_source memory = {};
    /// What recurrent states are kept in: f32, or bf16 where the policy has a decay. S takes half the memory, and decoding
    /// half the traffic; arithmetic is fp32 all the same, and the sums that divide stay fp32. S is rounded to nearest after
    /// each call, and within a long one now and then, so bits depend on the cut. A rounding is an error of at most 2^-9 of
    /// each number (those below 2^-126 may become 0), which the state forgets like the number itself: with factors of at
    /// most alpha from one to the next they sum up to at most 2^-9 / (1 - alpha) of the largest norm that the state has
    /// had. Not with rollback_slack.
    scalar state = scalar::f32;
};

}  // namespace sash
