#pragma once
/// \file
/// The recurrent states of one cache, and what it takes to roll them back.
///
///     state    [states][ S | z [feature_pitch] | memory ]             z with a normaliser, memory where the feature map
///                                                                     has one; padding is zero
///     base     the same once more, some tokens ago                    only with rollback_slack
///     log      [states][log_tokens][ entry ]                          what the tokens since then wrote: a ring
///     waiting  [states][ waiting_rows ]                               only without rollback_slack: tokens that are not
///                                                                     in S yet, under the delta rule
///
/// S is [features][value_pitch]; or, where values are one number each and tokens are only added, [feature_pitch]: its one
/// column lies in the lanes. S is fp32, or bfloat16 by `storage.state`; z and memory are fp32.
///
/// An entry is all that a token does to one state, so that it can be done again:
///
///     phi(k) [feature_pitch] | v [value_pitch] | fade, beta, the map's memory behind the token [16] |
///     rows [feature_pitch] as the policy needs them: the fade of each feature, the vector that is looked up, the one
///     that is put back            (a fade is a factor of decay: cpu/fade.hpp)
///
/// The tokens of a long call that no rollback can reach go in chunks and are not logged; the base moves up behind them.
///
/// A state cannot be run backwards, so rolling back is running forward again: the base is copied over the state and the
/// log replayed up to the new length. The same operations in the same order give the same bits as if the tokens had
/// never come (in a call of their own). The base moves up in strides of several tokens, so that it costs decode little
/// bandwidth.
#include <sash/cache/storage.hpp>
#include <sash/cpu/rows.hpp>
#include <sash/linear.hpp>

#include <cstring>

namespace sash {

/// The recurrent states of one sequence, as a cache shows them and takes them: S, z, and how far they have come. The views
/// are of memory that somebody else owns.
struct recurrent_state {
    input matrix = {};      ///< S [states, features, value_dim]; output head h reads state h / (heads / states)
    input normaliser = {};  ///< z [states, 1, features], where the policy has the normaliser `sum`; else empty
    input memory = {};      ///< [states, 1, numbers], where the feature map keeps some (favor: 2); else empty
    int64 length = 0;       ///< tokens that the states stand for: the position of the next one
};

}  // namespace sash

namespace sash::detail {

struct state_store;

/// The rows of an entry behind its numbers, by place; -1: there is none. A delta rule without decay looks its key up,
/// which is there already.
template <recurrent_policy P>
struct entry_rows {
    using update = decltype(P::update);
    static constexpr bool decays_by_channel =
        ask::per_channel<decltype(P::decay)> || ask::map_memory<decltype(P::map)> > 0;
    static constexpr bool decays = decays_by_channel || !std::is_same_v<decltype(P::decay), no_decay>;
    static constexpr bool looks_up = update::needs_vectors || (update::needs_beta && decays);

    static constexpr int fade = decays_by_channel ? 0 : -1;
    static constexpr int lookup = looks_up ? fade + 1 : -1;
    static constexpr int replacement = update::needs_vectors ? lookup + 1 : -1;
    static constexpr int count = decays_by_channel + looks_up + update::needs_vectors;
};

/// Is the state read along a vector before a token is written?
template <recurrent_policy P>
inline constexpr bool corrects = decltype(P::update)::needs_beta || decltype(P::update)::needs_vectors;

/// May tokens wait beside the states, to be written together (cpu/waiting.hpp)? Under the delta rule. Where the caller says
/// what is put back, twice as many rows would wait: one token at a time that is still as fast, drafts are slower.
template <recurrent_policy P>
inline constexpr bool can_wait = decltype(P::update)::needs_beta && !decltype(P::update)::needs_vectors;

/// Does a policy forget by itself, so that states in bfloat16 lose little? What its feature map rescales does not count.
template <recurrent_policy P>
inline constexpr bool forgets = !std::is_same_v<decltype(P::decay), no_decay>;

}  // namespace sash::detail

namespace sash::cpu {

/// Does to `state` what the logged tokens [first, last) of state `s` did. Defined with the kernel, in recurrent.hpp.
template <class Build, recurrent_policy P>
void replay(const detail::state_store& store, int64 s, float* state, int64 first, int64 last);

/// Writes the first `count` tokens that wait in `waiting` into state s. Defined with the kernel, in waiting.hpp.
template <class Build, recurrent_policy P>
void settle(const detail::state_store& store, int64 s, float* waiting, int64 count);

}  // namespace sash::cpu

namespace sash::detail {

inline constexpr int64 state_padding = 16;  // floats: rows start on cache lines, whatever the registers of this build
inline constexpr int64 log_stride = 16;     // tokens by which the base moves up at a time
inline constexpr int64 most_tokens_of_states = int64{1} << 60;

// Numbers of an entry.
inline constexpr int64 entry_fade = 0, entry_beta = 1, entry_memory = 2;
inline constexpr int64 most_map_memory = state_padding - entry_memory;

inline constexpr int64 most_waiting = 8;

/// What waits beside a state (cpu/waiting.hpp), and its room:
///
///     factor [8], of each token since it came, where heads forget as a whole | fade of S [8: one number] |
///     fade of S [feature_pitch], where each feature forgets by itself |
///     of each token k [feature_pitch], u [value_pitch]
template <recurrent_policy P>
struct waiting_rows {
    static constexpr int64 most = most_waiting;
    static constexpr bool by_channel = entry_rows<P>::decays_by_channel;

    float *factor, *fade, *key, *value;
    int64 pitch;  ///< from token to token

    SASH_INLINE static constexpr int64 floats_of_head(int64 features) { return 2 * most + by_channel * features; }
    SASH_INLINE waiting_rows(float* at, int64 features, int64 values)
        : factor(at),
          fade(at + (by_channel ? 2 * most : most)),
          key(at + floats_of_head(features)),
          value(key + features),
          pitch(features + values) {}
};

/// Plain data: a move copies the members and empties the source.
struct state_store {
    memory_source memory;
    float* data = nullptr;     ///< states, then bases, then logs
    int64* base_at = nullptr;  ///< [states]: how many tokens each base has seen; behind the logs
    int64 length = 0;          ///< tokens appended so far
    int64 floor = 0;           ///< no rollback below this length
    int64 states = 0, features = 0, feature_pitch = 0, value_dim = 0, value_pitch = 0;
    int64 matrix_floats = 0;  ///< room of S, in floats whatever it holds; whole cache lines
    int64 state_floats = 0;   ///< of one state, its normaliser and the map's memory included
    int64 map_numbers = 0;    ///< that the feature map keeps for each state,
    int64 memory_floats = 0;  ///< and their room
    int64 rows = 0;           ///< of an entry, behind its numbers
    int64 log_tokens = 0;     ///< room of one log; 0 without slack
    int64 slack = 0;
    int64 waiting_floats = 0;  ///< of what may wait beside one state; 0: each token is written when it comes
    int64 waiting = 0;         ///< tokens that wait beside each state
    int64 waiting_head = 0, waiting_pitch = 0;  ///< floats in front of these tokens, and of each, here or in a file
    bool has_normaliser = false;
    bool is_column = false;        ///< S is one column, its features side by side
    bool was_set = false;          ///< the states did not begin empty: there is no way back before `floor`
    scalar element = scalar::f32;  ///< of S: f32 or bf16

    SASH_INLINE float* state(int64 s) const { return data + s * state_floats; }
    SASH_INLINE float* base(int64 s) const { return data + (states + s) * state_floats; }
    /// Numbers of S, padding included.
    SASH_INLINE int64 matrix_numbers() const { return is_column ? feature_pitch : features * value_pitch; }
    SASH_INLINE float* waiting_beside(int64 s) const { return data + states * state_floats + s * waiting_floats; }
    /// z [feature_pitch] and the map's memory of a state or base.
    SASH_INLINE float* normaliser(float* state) const { return state + matrix_floats; }
    SASH_INLINE float* map_memory(float* state) const { return state + state_floats - memory_floats; }
    SASH_INLINE int64 entry_floats() const { return entry_floats(feature_pitch, value_pitch, rows); }
    SASH_INLINE static constexpr int64 entry_floats(int64 feature_pitch, int64 value_pitch, int64 rows) {
        return (1 + rows) * feature_pitch + value_pitch + state_padding;
    }
    SASH_INLINE float* entry(int64 s, int64 token) const {
        return data + 2 * states * state_floats + (s * log_tokens + token % log_tokens) * entry_floats();
    }
    SASH_INLINE int64 total_floats() const {
        return log_tokens == 0 ? states * (state_floats + waiting_floats)
                               : states * (2 * state_floats + log_tokens * entry_floats());
    }
    SASH_INLINE std::size_t total_bytes() const {
        return static_cast<std::size_t>(total_floats()) * sizeof(float) +
               static_cast<std::size_t>(states) * sizeof(int64);
    }
};

template <class Build>
void reset(state_store& store) {
    if (store.data == nullptr) return;
    store.length = store.floor = store.waiting = 0;
    store.was_set = false;
    std::memset(store.data, 0, store.total_bytes());
}

/// Allocates the memory that `store` has computed its sizes for.
template <class Build>
void allocate_states(state_store& store) {
    store.data = static_cast<float*>(allocate<Build>(store.memory, store.total_bytes()));
    store.base_at = reinterpret_cast<int64*>(store.data + store.total_floats());
}

/// Empty states for a resolved shape. Allocates once, here.
template <class Build, recurrent_policy P>
void create(state_store& store, const P& policy, const shape& s, const storage& how, bool may_wait = true) {
    store = {};
    store.memory = how.memory;
    store.states = policy.states(s);
    store.features = policy.features(s.key_dim);
    store.feature_pitch = round_up(store.features, state_padding);
    store.value_dim = s.value_dim;
    store.value_pitch = round_up(s.value_dim, state_padding);
    store.is_column = s.value_dim == 1 && !decltype(P::update)::needs_beta && !decltype(P::update)::needs_vectors;
    store.element = how.state;
    store.matrix_floats =
        round_up(store.matrix_numbers() * bytes_of(store.element) / int64{sizeof(float)}, state_padding);
    store.has_normaliser = P::has_normaliser;
    static_assert(ask::map_memory<decltype(P::map)> <= most_map_memory,
                  "sash: a feature map keeps at most 14 numbers for each state");
    store.map_numbers = ask::map_memory<decltype(P::map)>;
    store.memory_floats = store.map_numbers > 0 ? state_padding : 0;
    store.state_floats = store.matrix_floats + (P::has_normaliser ? store.feature_pitch : 0) + store.memory_floats;
    store.rows = entry_rows<P>::count;
    store.slack = how.rollback_slack;
    store.log_tokens = how.rollback_slack > 0 ? how.rollback_slack + log_stride : 0;
    store.waiting_head = waiting_rows<P>::floats_of_head(store.feature_pitch);
    store.waiting_pitch = store.feature_pitch + store.value_pitch;
    if (may_wait && can_wait<P> && store.slack == 0 && store.element == scalar::f32)
        store.waiting_floats = store.waiting_head + most_waiting * store.waiting_pitch;
    allocate_states<Build>(store);
    reset<Build>(store);
}

template <class Build>
void destroy(state_store& store) noexcept {
    release<Build>(store.memory, store.data, store.total_bytes());
    store = {};
}

/// Makes `to`, which holds nothing, a copy of `from`, in memory from the same source.
template <class Build>
void copy(state_store& to, const state_store& from) {
    state_store made = from;
    if (from.data != nullptr) {
        allocate_states<Build>(made);
        std::memcpy(made.data, from.data, from.total_bytes());
    }
    to = made;
}

template <class Build>
int64 bytes(const state_store& store) {
    return store.data == nullptr ? 0 : static_cast<int64>(store.total_bytes());
}

/// Can the last n tokens be taken back, exactly? None can always be, all where the states began empty, else those of the
/// last `slack` appended.
template <class Build>
bool can_rollback(const state_store& store, int64 n) {
    if (n < 0 || n > store.length) return false;
    return n == 0 || (n == store.length && !store.was_set) ||
           store.length - n >= larger(store.floor, store.length - store.slack);
}

/// Takes the last n tokens back; `can_rollback(n)` holds. Allocates nothing, cannot fail.
template <class Build, recurrent_policy P>
void rollback(state_store& store, const P&, const shape&, int64 n) {
    if (n == 0) return;
    if (n == store.length && !store.was_set) {
        reset<Build>(store);
        return;
    }
    const int64 target = store.length - n;
    for (int64 s = 0; s < store.states; ++s) {
        std::memcpy(store.state(s), store.base(s), static_cast<std::size_t>(store.state_floats) * sizeof(float));
        cpu::replay<Build, P>(store, s, store.state(s), store.base_at[s], target);
    }
    store.floor = larger(store.floor, store.length - store.slack);
    store.length = target;
}

/// Makes the state s of now, which has seen `tokens`, its base: no token before can be taken back, and none was logged.
template <class Build>
void move_base(const state_store& store, int64 s, int64 tokens) {
    if (store.log_tokens > 0)
        std::memcpy(store.base(s), store.state(s), static_cast<std::size_t>(store.state_floats) * sizeof(float));
    store.base_at[s] = tokens;
}

/// Nothing is logged yet: the bases are the states.
template <class Build>
void begin_history(const state_store& store) {
    for (int64 s = 0; s < store.states; ++s) move_base<Build>(store, s, store.length);
}

/// Makes room in the log of state s for `count` more tokens behind `next`, by moving its base up; count <= log_stride.
template <class Build, recurrent_policy P>
void make_room_in_log(const state_store& store, int64 s, int64 next, int64 count) {
    if (next + count - store.base_at[s] <= store.log_tokens) return;
    const int64 up_to = smaller(next, next + count - store.slack);
    cpu::replay<Build, P>(store, s, store.base(s), store.base_at[s], up_to);
    store.base_at[s] = up_to;
}

// --------------------------------------------------------------------------------------------------- looked at, and set

/// Writes what waits into the states.
template <class Build, recurrent_policy P>
void settle_all(state_store& store) {
    if constexpr (can_wait<P>)
        for (int64 s = 0; store.waiting > 0 && s < store.states; ++s)
            cpu::settle<Build, P>(store, s, store.waiting_beside(s), store.waiting);
    store.waiting = 0;
}

inline constexpr float all_zero = 0;  // with strides of 0: the states of a cache that was moved from

/// The states where they lie.
template <class Build>
recurrent_state view_of_states(const state_store& s) {
    const bool is_empty = s.data == nullptr;
    const int64 to_next = is_empty ? 0 : s.state_floats, to_row = is_empty ? 0 : s.is_column ? 1 : s.value_pitch;
    recurrent_state made;
    made.length = s.length;
    if (s.element == scalar::bf16 && !is_empty)
        made.matrix = input(reinterpret_cast<const bfloat16*>(s.state(0)), s.states, s.features, s.value_dim,
                            to_next * (int64{sizeof(float)} / bytes_of(s.element)), to_row);
    else
        made.matrix =
            input(is_empty ? &all_zero : s.state(0), s.states, s.features, s.value_dim, to_next, to_row, !is_empty);
    const auto row = [&](const float* first, int64 n) {
        return input(is_empty ? &all_zero : first, s.states, 1, n, to_next, 0, !is_empty);
    };
    if (s.has_normaliser) made.normaliser = row(s.normaliser(s.state(0)), s.features);
    if (s.map_numbers > 0) made.memory = row(s.map_memory(s.state(0)), s.map_numbers);
    return made;
}

/// Refuses a part of the states that is not [states, rows, numbers].
template <class Build>
void check_states(const char* name, const input& x, int64 states, int64 rows, int64 numbers) {
    require<Build>(x.tokens == states && x.heads == rows && x.dim == numbers, "the states' ", name, " is [", x.tokens,
                   ", ", x.heads, ", ", x.dim, "], must be [", states, ", ", rows, ", ", numbers, "]");
    require<Build>(x.empty() || x.data != nullptr, "the states' ", name, " has no memory");
    require<Build>(reinterpret_cast<std::uintptr_t>(x.data) % static_cast<std::uintptr_t>(bytes_of(x.type)) == 0,
                   "the states' ", name, " begins at an address that is no multiple of its element's ",
                   bytes_of(x.type), " bytes");
}

/// Everything that can be wrong with states that are to be set.
template <class Build, recurrent_policy P>
void check_states(const state_store& s, const P& policy, const recurrent_state& x) {
    check_states<Build>("matrix", x.matrix, s.states, s.features, s.value_dim);
    const int64 sums = s.has_normaliser, kept = s.map_numbers > 0;
    check_states<Build>("normaliser", x.normaliser, sums * s.states, sums, sums * s.features);
    check_states<Build>("memory", x.memory, kept * s.states, kept, s.map_numbers);
    const int64 most = smaller(ask::map_positions(policy.map), most_tokens_of_states - 1);
    require<Build>(x.length >= 0 && x.length <= most, "the states' length is ", x.length, ", must be 0 to ", most);
}

/// Sets states that have been checked. They are read where they are written: a cache's own view sets what is there.
template <class Build>
void set_states(state_store& s, const recurrent_state& x) {
    input matrix = x.matrix;
    if (s.is_column) {  // one row of all features
        std::swap(matrix.heads, matrix.dim);
        matrix.dim_stride = matrix.head_stride;
    }
    const int64 pitch = s.is_column ? s.feature_pitch : s.value_pitch;
    row_buffer<Build> buffer(s.memory, larger(pitch, s.feature_pitch));
    float* row = buffer.row.data;
    const auto read = [&](const input& from, int64 state, int64 r, int64 padded) {
        cpu::read_row<Build>(from, state, r, row);
        for (int64 i = from.dim; i < padded; ++i) row[i] = 0;
    };
    for (int64 state = 0; state < s.states; ++state) {
        float* to = s.state(state);
        for (int64 r = 0; r < matrix.heads; ++r) {
            read(matrix, state, r, pitch);
            if (s.element == scalar::bf16)
                cpu::narrow<Build>(row, reinterpret_cast<bfloat16*>(to) + r * pitch, pitch);
            else
                std::memcpy(to + r * pitch, row, static_cast<std::size_t>(pitch) * sizeof(float));
        }
        if (s.has_normaliser) {
            read(x.normaliser, state, 0, s.feature_pitch);
            std::memcpy(s.normaliser(to), row, static_cast<std::size_t>(s.feature_pitch) * sizeof(float));
        }
        if (s.map_numbers > 0) cpu::read_row<Build>(x.memory, state, 0, s.map_memory(to));
    }
    s.length = s.floor = x.length;
    s.waiting = 0;
    s.was_set = true;
    begin_history<Build>(s);
}

// ------------------------------------------------------------------------------------------------------- save and load

/// What stands in front of the floats of a saved state.
struct saved_state {
    std::int64_t length, floor, slack, logged, waiting, was_set;
};

/// Tokens in the logs; between calls every state has the same.
SASH_INLINE int64 logged_tokens(const state_store& store) {
    return store.log_tokens == 0 || store.data == nullptr ? 0 : store.length - store.base_at[0];
}

/// Floats that are saved where so many tokens wait beside a state.
SASH_INLINE int64 saved_waiting_floats(const state_store& store, int64 waiting) {
    return waiting == 0 ? 0 : store.waiting_head + waiting * store.waiting_pitch;
}

/// Bytes of a file that begins so.
SASH_INLINE std::size_t bytes_of_saved(const state_store& store, const saved_state& head) {
    const int64 of_a_state = head.slack == 0 ? store.state_floats + saved_waiting_floats(store, head.waiting)
                                             : 2 * store.state_floats + head.logged * store.entry_floats();
    return sizeof(saved_state) + static_cast<std::size_t>(store.states * of_a_state) * sizeof(float);
}

SASH_INLINE saved_state head_of_saved(const state_store& store) {
    return {store.length, store.floor, store.slack, logged_tokens(store), store.waiting, store.was_set};
}

template <class Build>
std::size_t saved_bytes(const state_store& store) {
    return bytes_of_saved(store, head_of_saved(store));
}

/// Calls f(memory, floats) for the states of a store and, where it is asked for, for their history, in the order in which
/// they are saved.
template <class Build, class F>
void for_each_saved(const state_store& store, bool history, const saved_state& head, F&& f) {
    f(store.data, store.states * store.state_floats);
    if (!history) return;
    f(store.base(0), store.states * store.state_floats);
    for (int64 s = 0; s < store.states; ++s)
        for (int64 t = head.length - head.logged; t < head.length; ++t) f(store.entry(s, t), store.entry_floats());
}

/// Writes saved_bytes(store) bytes.
template <class Build>
void save(const state_store& store, std::byte* to) {
    const saved_state head = head_of_saved(store);
    std::memcpy(to, &head, sizeof head);
    to += sizeof head;
    const auto write = [&](const float* part, int64 floats) {
        std::memcpy(to, part, static_cast<std::size_t>(floats) * sizeof(float));
        to += static_cast<std::size_t>(floats) * sizeof(float);
    };
    for_each_saved<Build>(store, store.log_tokens > 0, head, write);
    for (int64 s = 0; head.waiting > 0 && s < store.states; ++s)
        write(store.waiting_beside(s), saved_waiting_floats(store, head.waiting));
}

/// Can these be the numbers of a saved state?
SASH_INLINE bool is_plausible(const saved_state& head, std::size_t size) {
    constexpr int64 most_slack = int64{1} << 40;  // sums of lengths and these stay inside 64 bits
    constexpr int64 most_length = most_tokens_of_states;
    if (head.length < 0 || head.length > most_length || head.floor < 0 || head.floor > head.length) return false;
    if (head.slack < 0 || head.slack > most_slack || (head.was_set & 1) != head.was_set) return false;
    if (head.waiting < 0 || head.waiting >= smaller(most_waiting, head.length + 1)) return false;
    if (head.waiting > 0 && head.slack > 0) return false;
    const int64 most_logged = head.slack > 0 ? head.slack + log_stride : 0;
    return head.logged >= 0 && head.logged <= smaller(head.length, most_logged) &&
           head.logged <= static_cast<int64>(size);
}

/// Reads what `save` wrote, into a store of the same policy and shape. False, and nothing changed, where the bytes
/// cannot be that. What was saved with another slack comes without its history: exact, but not to be rolled back
/// beyond this point.
template <class Build, recurrent_policy P>
bool load(state_store& store, const std::byte* from, std::size_t size) {
    saved_state head;
    if (size < sizeof head) return false;
    std::memcpy(&head, from, sizeof head);
    if (!is_plausible(head, size) || (head.waiting > 0 && (!can_wait<P> || store.element != scalar::f32))) return false;
    if (size != bytes_of_saved(store, head)) return false;

    from += sizeof head;
    const auto read = [&](float* part, int64 count) {
        std::memcpy(part, from, static_cast<std::size_t>(count) * sizeof(float));
        from += static_cast<std::size_t>(count) * sizeof(float);
    };
    const bool history = head.slack == store.slack && store.slack > 0, waits = store.waiting_floats > 0;
    row_buffer<Build> buffer(store.memory, waits ? 0 : saved_waiting_floats(store, most_waiting));
    for_each_saved<Build>(store, history, head, read);
    if constexpr (can_wait<P>)
        for (int64 s = 0; head.waiting > 0 && s < store.states; ++s) {
            float* const waiting = waits ? store.waiting_beside(s) : buffer.row.data;
            read(waiting, saved_waiting_floats(store, head.waiting));
            if (!waits) cpu::settle<Build, P>(store, s, waiting, head.waiting);
        }
    store.waiting = waits ? head.waiting : 0;
    store.length = head.length;
    store.floor = head.slack == store.slack ? head.floor : head.length;
    if (history)
        for (int64 s = 0; s < store.states; ++s) store.base_at[s] = head.length - head.logged;
    else
        begin_history<Build>(store);
    store.was_set = head.was_set != 0;
    return true;
}

}  // namespace sash::detail
