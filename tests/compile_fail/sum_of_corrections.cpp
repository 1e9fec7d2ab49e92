// expected-error {{sash: what the delta rule stores has no weights that could be summed: use no_normaliser}}
// expected-error {{sash: a state with removals has no weights that could be summed: use no_normaliser or unscaled}}
// expected-error {{sash: a bonus is not part of the sum that would divide: use no_normaliser or unscaled}}
#include <sash/sash.hpp>

using sash::linear, sash::elu_plus_one, sash::no_decay;

#ifdef CORRECTED
using normaliser = sash::unscaled;
#else
using normaliser = sash::sum;
#endif

linear<sash::l2_normalised<>, no_decay, sash::delta, normaliser> a;
linear<elu_plus_one, no_decay, sash::diagonal_plus_low_rank, normaliser> b;
linear<elu_plus_one, no_decay, sash::exclusive_bonus, normaliser> c;

int main() { return sizeof a + sizeof b + sizeof c == 0; }
