// expected-error {{sash: parts that share a denominator need a linear policy that has one and forgets nothing: linear<map>}}
// expected-error {{sash: tokens enter the state of this hybrid after their turn, so its feature map cannot depend on the position}}
// expected-error {{sash: the window of a hybrid is a softmax policy, the same for every head, that bounds its memory and whose intervals are exact: sliding_window, terraced_window or one like them}}
#include <sash/sash.hpp>

using namespace sash;

#ifdef CORRECTED
using forgetting = linear<>;
using placed = linear<>;
using window = sliding_window;
#else
using forgetting = linear<identity, per_head_and_token, additive, unscaled>;
using placed = linear<cosformer>;
using window = full;
#endif

hybrid<sliding_window, forgetting, shared_denominator> a;
hybrid<sliding_window, placed, log_sum_exp> b;
hybrid<window, linear<>, convex> c;

int main() { return sizeof a + sizeof b + sizeof c == 0; }
