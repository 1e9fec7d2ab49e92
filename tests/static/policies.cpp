// What is a policy, and what policies answer, at compile time.
#include <sash/full.hpp>
#include <sash/linear.hpp>
#include <sash/sliding_window.hpp>

using namespace sash;

namespace {

// ---------------------------------------------------------------------------------------------------- what models what

static_assert(softmax_policy<full> && softmax_policy<sliding_window> && !recurrent_policy<full>);
static_assert(recurrent_policy<linear<>> && recurrent_policy<linear<hedgehog>> && !softmax_policy<linear<>>);
static_assert(attention_policy<full> && attention_policy<linear<>> && !attention_policy<int>);

struct per_kv_head {  // every question may take the KV head
    constexpr bool sees(int64 query, int64 key, int64 head) const { return key <= query && query - key <= head; }
    constexpr key_intervals<1> visible(int64 first, int64 last, int64 head) const {
        key_intervals<1> keys;
        keys.add(first - head, last);
        return keys;
    }
};
struct only_sees {
    constexpr bool sees(int64, int64) const { return true; }
};
struct only_visible {
    constexpr key_intervals<1> visible(int64, int64) const { return {}; }
};
struct not_trivial : full {
    constexpr not_trivial(const not_trivial& other) : full(other) {}
};
static_assert(softmax_policy<per_kv_head>);
static_assert(!attention_policy<only_sees> && !attention_policy<only_visible> && !attention_policy<not_trivial>);

// ------------------------------------------------------------------------------------------- the window, by its formula

// The number of keys that query i sees, counted by `sees` and summed up from `visible`.
constexpr int64 counted(const sliding_window& p, int64 i) {
    int64 n = 0;
    for (int64 j = 0; j <= i + 3; ++j) n += p.sees(i, j);
    return n;
}
constexpr int64 summed(const sliding_window& p, int64 i) {
    int64 n = 0;
    for (const key_interval& keys : p.visible(i, i + 1)) n += keys.last - keys.first;
    return n;
}
constexpr bool formula_holds() {
    for (int64 sinks = 0; sinks < 6; ++sinks)
        for (int64 window = 1; window < 8; ++window)
            for (const frame f : {frame::original, frame::compact})
                for (int64 i = 0; i < 20; ++i) {
                    const sliding_window p{.window = window, .sinks = sinks, .frame = f};
                    const int64 expected = i + 1 < sinks + window ? i + 1 : sinks + window;
                    if (counted(p, i) != expected || summed(p, i) != expected) return false;
                }
    return true;
}
static_assert(formula_holds());

// What a query saw and what later ones see is retained: nothing is needed that was dropped.
constexpr bool retained_suffices() {
    for (int64 sinks = 0; sinks < 4; ++sinks)
        for (int64 window = 1; window < 6; ++window)
            for (int64 next = 1; next < 16; ++next) {
                const sliding_window p{.window = window, .sinks = sinks};
                for (int64 query = next - 1; query < 16; ++query)
                    for (int64 key = 0; key < next; ++key) {
                        bool kept = false;
                        for (const key_interval& i : p.retained(next)) kept |= key >= i.first && key < i.last;
                        if (p.sees(query, key) && !kept) return false;
                    }
            }
    return true;
}
static_assert(retained_suffices());

// A tile is whole only if no query of it lacks a key of it.
constexpr bool whole_is_whole() {
    const sliding_window p{.window = 5, .sinks = 2};
    for (int64 q = 0; q < 12; ++q)
        for (int64 queries = 1; queries < 4; ++queries)
            for (int64 k = 0; k < 12; ++k)
                for (int64 keys = 1; keys < 4; ++keys) {
                    bool every = true;
                    for (int64 i = q; i < q + queries; ++i)
                        for (int64 j = k; j < k + keys; ++j) every = every && p.sees(i, j);
                    if (p.whole({q, q + queries}, {k, k + keys}) && !every) return false;
                }
    return true;
}
static_assert(whole_is_whole());

// ------------------------------------------------------------------------------------------------- conventions and limits

static_assert(sliding_window::from_left(3).window == 4 && sliding_window::from_left(3, 2).sinks == 2);
static_assert(sliding_window::from_left(-1).sees(int64{1} << 40, 0));  // unlimited there, and here

constexpr int64 huge = std::numeric_limits<int64>::max();
static_assert(sliding_window{.window = huge}.sees(1000, 0) && counted({.window = huge}, 7) == 8);
static_assert(summed({.window = huge, .sinks = 3}, 7) == 8);

static_assert(sliding_window{.window = 4, .sinks = 2}.distance(1000, 0) == 1000);
static_assert(sliding_window{.window = 4, .sinks = 2, .frame = frame::compact}.distance(1000, 0) == 5);
static_assert(sliding_window{.window = 4, .sinks = 2, .frame = frame::compact}.distance(1000, 998) == 2);
static_assert(sliding_window{.window = 4, .sinks = 2, .frame = frame::compact}.distance(3, 0) == 3);

static_assert(full{}.sees(3, 3) && !full{}.sees(3, 4) && full{.causal = false}.sees(3, 4));

// ------------------------------------------------------------------------------------------------------ sets of intervals

constexpr key_intervals<3> made_of(std::initializer_list<key_interval> items) {
    key_intervals<3> all;
    for (const key_interval& i : items) all.add(i.first, i.last, i.frame);
    return all;
}
static_assert(made_of({{5, 7}, {0, 2}}).count == 2 && made_of({{5, 7}, {0, 2}})[0] == key_interval{0, 2});  // ascending
static_assert(made_of({{0, 4}, {2, 6}}).count == 1 && made_of({{0, 4}, {2, 6}})[0] == key_interval{0, 6});  // a set
static_assert(made_of({{0, 4}, {4, 6}}).count == 1);                                                        // touching
static_assert(made_of({{0, 4, 1}, {4, 6}}).count == 2);               // two frames are read by two queries
static_assert(made_of({{3, 3}, {4, 2}, {-5, 0}}).count == 0);         // empty ones are none
static_assert(made_of({{-5, 2}})[0] == key_interval{0, 2});           // there is no position before 0
static_assert(made_of({{0, 1}, {2, 3}, {4, 5}, {6, 7}}).count == 3);  // one too many is bridged: a superset

}  // namespace
