// expected-error {{sash: the delta rule is stable for unit keys only: use l2_normalised, or normalised_by_caller where the keys are unit vectors already}}
#include <sash/sash.hpp>

using sash::delta, sash::no_decay, sash::no_normaliser;

#ifdef CORRECTED
sash::linear<sash::l2_normalised<sash::silu>, no_decay, delta, no_normaliser> normalised;
sash::linear<sash::normalised_by_caller, no_decay, delta, no_normaliser> promised;
int main() { return sizeof normalised + sizeof promised == 0; }
#else
sash::linear<sash::silu, no_decay, delta, no_normaliser> policy;
int main() { return sizeof policy == 0; }
#endif
