// expected-error {{sash: a feature map is trivially copyable and has operator()(N) or width, query and key}}
// expected-error {{sash: the second argument of linear is a decay: no_decay, constant_per_head, per_head_and_token or per_channel_and_token}}
// expected-error {{sash: the third argument of linear is an update: additive, delta, exclusive_bonus or diagonal_plus_low_rank}}
// expected-error {{sash: the fourth argument of linear is a normaliser: sum, no_normaliser or unscaled}}
#include <sash/sash.hpp>

using sash::additive, sash::no_decay, sash::relu, sash::sum;

#ifdef CORRECTED
using map = relu;
using decay = no_decay;
using update = additive;
using normaliser = sum;
#else
struct map {};
using decay = additive;
using update = no_decay;
using normaliser = relu;
#endif

sash::linear<map> a;
sash::linear<relu, decay> b;
sash::linear<relu, no_decay, update> c;
sash::linear<relu, no_decay, additive, normaliser> d;

int main() { return sizeof a + sizeof b + sizeof c + sizeof d == 0; }
