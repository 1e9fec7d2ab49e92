#pragma once
/// \file
/// The common interface of every cache: kv_cache<Policy, Element>.
#include <sash/cache/blocks.hpp>
#include <sash/cache/state.hpp>
#include <sash/linear.hpp>
#include <sash/score.hpp>
#include <sash/view.hpp>

#include <limits>
#include <vector>

namespace sash {

// ------------------------------------------------------------------------------------------------------ what a token brings

namespace detail {

/// Stands where a policy takes no such input: naming it does not compile.
struct no_decay_input {
    constexpr no_decay_input() = default;
    template <class V>
    constexpr no_decay_input(const V&) {
        static_assert(never<V>, "sash: .decay is no input of this policy");
    }
};
/// The initialiser of a needed input: leaving it out does not compile.
struct missing_decay {
    template <class V>
    constexpr operator V() const {
        static_assert(never<V>, "sash: this policy needs .decay");
        return V{};
    }
};

template <class P>
inline constexpr bool takes_decay = [] {
    if constexpr (recurrent_policy<P>)
        return static_cast<bool>(P::needs_decay);
    else
        return false;
}();

template <bool Needed>
struct decay_member {
    using type = no_decay_input;
    using initial = no_decay_input;
};
template <>
struct decay_member<true> {
    using type = input;
    using initial = missing_decay;
};

}  // namespace detail

/// What new tokens bring: one flat aggregate for designated initialisers. A policy with a data-dependent decay needs
/// `.decay`, the others refuse it, both at compile time.
///
///     query [tokens, query_heads, key_dim]   key [tokens, key_heads, key_dim]   value [tokens, value_heads, value_dim]
///     decay [tokens, gate_heads, 1]: natural logarithm of the factor, at most 0
template <class Policy>
struct tokens_of {
    input query = {}, key = {}, value = {};
    typename detail::decay_member<detail::takes_decay<Policy>>::type decay =
        typename detail::decay_member<detail::takes_decay<Policy>>::initial{};
};

// ------------------------------------------------------------------------------------------------------------ positions held

/// The positions a cache holds, in ascending order: a range of int64.
class position_list {
public:
    class iterator {
    public:
        using value_type = int64;
        using difference_type = std::ptrdiff_t;
        SASH_INLINE iterator() = default;
        SASH_INLINE iterator(const key_interval* in, int64 at) : in_(in), at_(at) {}
        SASH_INLINE int64 operator*() const { return at_; }
        SASH_INLINE iterator& operator++() {
            if (++at_ == in_->last) {
                ++in_;
                at_ = in_->first;
            }
            return *this;
        }
        SASH_INLINE iterator operator++(int) {
            iterator before = *this;
            ++*this;
            return before;
        }
        SASH_INLINE friend bool operator==(const iterator& a, const iterator& b) { return a.in_ == b.in_ && a.at_ == b.at_; }

    private:
        const key_interval* in_ = nullptr;
        int64 at_ = 0;
    };

    SASH_INLINE explicit position_list(const key_intervals<9>& held) {
        for (const key_interval& i : held) item_[count_++] = i;
    }
    SASH_INLINE iterator begin() const { return {item_, item_[0].first}; }
    SASH_INLINE iterator end() const { return {item_ + count_, item_[count_].first}; }
    SASH_INLINE int64 size() const {
        int64 n = 0;
        for (int i = 0; i < count_; ++i) n += item_[i].last - item_[i].first;
        return n;
    }
    /// The same as intervals.
    SASH_INLINE std::span<const key_interval> intervals() const { return {item_, static_cast<std::size_t>(count_)}; }

private:
    key_interval item_[10] = {};  // one empty interval behind the last: the end
    int count_ = 0;
};

// -------------------------------------------------------------------------------------------------------- options of the scores

namespace detail {

/// Per-head arrays and frequencies of a cache; shared by its copies, freed by the last.
struct alignas(cache_line) score_tables {
    std::atomic<int64> owners;
    int64 bytes;
};

/// Options of the scores, checked, with defaults filled in. The arrays live in `tables`, or in the caller's memory where
/// there is no cache.
struct score_state {
    float scale = 1, soft_cap = 0;
    const float* alibi = nullptr;
    const float* sink_logits = nullptr;
    const double* frequencies = nullptr;
    int64 pairs = 0;
    rotary_layout layout = rotary_layout::half_split;
    rotates by = rotates::caller;
    custom_score custom;
    score_tables* tables = nullptr;
};

template <class Build>
void check_table(const char* name, std::size_t count, int64 heads) {
    require<Build>(count == 0 || count == static_cast<std::size_t>(heads), name, " has ", count, " entries, must have one for each of ",
                   heads, " heads");
}

template <class Build>
void check_rotary(const rotary& r, int64 key_dim) {
    const auto pairs = static_cast<int64>(r.frequencies.size());
    require<Build>(r.dims == 0 || r.dims == 2 * pairs, "rotary.dims is ", r.dims, ", must be twice the number of frequencies, which is ",
                   pairs);
    require<Build>(2 * pairs <= key_dim, "rotary turns ", 2 * pairs, " dims, must be at most key_dim, which is ", key_dim);
}

/// Does this policy read any key in a frame of its own?
template <class P>
SASH_INLINE bool reads_other_frames(const P& p, int64 heads) {
    if constexpr (ask::frames<P> > 1)
        for (int64 h = 0; h < heads; ++h)
            for (const key_interval& i : ask::visible(p, far_away, far_away + 1, h))
                if (i.frame != 0) return true;
    return false;
}

template <class Build, class P>
void check_score(const P& p, const shape& dims, const score& s) {
    require<Build>(s.scale == s.scale && s.scale - s.scale == 0, "scale is ", s.scale, ", must be finite");
    require<Build>(s.soft_cap >= 0 && s.soft_cap - s.soft_cap == 0, "soft_cap is ", s.soft_cap, ", must be finite and not negative");
    check_table<Build>("alibi", s.alibi.size(), dims.heads);
    check_table<Build>("sink_logits", s.sink_logits.size(), dims.heads);
    check_rotary<Build>(s.rotary, dims.key_dim);
    if constexpr (recurrent_policy<P>) {
        require<Build>(s.soft_cap == 0, "soft_cap is ", s.soft_cap, ", but a linear policy has no scores to cap");
        require<Build>(s.alibi.empty() && s.sink_logits.empty() && !s.custom,
                       "a linear policy has no scores: alibi, sink_logits and custom must be empty");
    } else {
        require<Build>(!reads_other_frames(p, stored_heads(dims)) || !s.rotary.frequencies.empty() || !s.alibi.empty(),
                       "the compact frame turns the query that reads the sinks: it needs score.rotary.frequencies, which is empty");
    }
}

/// Views of the caller's arrays: for calls without a cache, and the first half of making one.
template <class Build, class P>
score_state view_of_score(const P& p, const shape& dims, const score& s) {
    check_score<Build>(p, dims, s);
    score_state made;
    made.scale = s.scale != 0 ? s.scale : static_cast<float>(1 / std::sqrt(static_cast<double>(dims.key_dim)));
    made.soft_cap = s.soft_cap;
    made.alibi = s.alibi.empty() ? nullptr : s.alibi.data();
    made.sink_logits = s.sink_logits.empty() ? nullptr : s.sink_logits.data();
    made.frequencies = s.rotary.frequencies.empty() ? nullptr : s.rotary.frequencies.data();
    made.pairs = static_cast<int64>(s.rotary.frequencies.size());
    made.layout = s.rotary.layout;
    made.by = s.rotary.by;
    made.custom = s.custom;
    return made;
}

/// Copies the arrays that a view names.
template <class Build>
void own_tables(score_state& s, const memory_source& memory, int64 heads) {
    const auto frequencies = static_cast<std::size_t>(s.pairs) * sizeof(double);
    const auto row = static_cast<std::size_t>(heads) * sizeof(float);
    const std::size_t bytes = sizeof(score_tables) + frequencies + (s.alibi ? row : 0) + (s.sink_logits ? row : 0);
    if (bytes == sizeof(score_tables)) return;
    s.tables = ::new (allocate<Build>(memory, bytes)) score_tables{{1}, static_cast<int64>(bytes)};
    auto* at = reinterpret_cast<std::byte*>(s.tables + 1);
    const auto keep = [&at]<class T>(const T*& view, std::size_t n) {
        if (view == nullptr) return;
        std::memcpy(at, view, n);
        view = reinterpret_cast<const T*>(at);
        at += n;
    };
    keep(s.frequencies, frequencies);
    keep(s.alibi, row);
    keep(s.sink_logits, row);
}

template <class Build>
void let_go_tables(const score_state& s, const memory_source& memory) noexcept {
    if (s.tables && s.tables->owners.fetch_sub(1, std::memory_order_acq_rel) == 1)
        release<Build>(memory, s.tables, static_cast<std::size_t>(s.tables->bytes));
}

// ----------------------------------------------------------------------------------------------------------- fingerprints

/// A 64-bit mixing hash: guards files against damage and mix-ups, not against malice.
struct fingerprint {
    std::uint64_t value = 0x243f6a8885a308d3u;

    SASH_INLINE void add(std::uint64_t word) {
        value = (value ^ word) * 0x9e3779b97f4a7c15u;
        value ^= value >> 29;
    }
    SASH_INLINE void add(const void* data, std::size_t bytes) {
        const auto* at = static_cast<const std::byte*>(data);
        add(static_cast<std::uint64_t>(bytes));
        for (; bytes >= 8; bytes -= 8, at += 8) {
            std::uint64_t word;
            std::memcpy(&word, at, 8);
            add(word);
        }
        std::uint64_t rest = 0;
        if (bytes > 0) std::memcpy(&rest, at, bytes);
        add(rest);
    }
};

/// A policy is known by what it answers, so that policies of users need no code for this: what queries near the start, at
/// powers of two and far away see.
template <class P>
SASH_INLINE void add_policy(fingerprint& f, const P& p, int64 heads) {
    for (int64 h = 0; h < heads; ++h)
        for (int power = 0; power < 60; ++power)
            for (int64 q = int64{1} << power; q < (int64{1} << power) + 2; ++q) {
                for (const key_interval& i : ask::visible(p, q, q + 1, h)) {
                    f.add(static_cast<std::uint64_t>(i.first));
                    f.add(static_cast<std::uint64_t>(i.last));
                    f.add(static_cast<std::uint64_t>(i.frame));
                }
                for (int64 back = 0; back < 8 && back <= q; ++back) f.add(ask::sees(p, q, q - back, h));
            }
}

/// Scratch floats; freed at the end of the scope.
template <class Build>
struct row_buffer {
    memory_source memory;
    array<float> row;
    row_buffer(const memory_source& m, int64 n) : memory(m) { reserve<Build>(row, memory, n); }
    row_buffer(const row_buffer&) = delete;
    ~row_buffer() { free<Build>(row, memory); }
};

/// A feature map is known by the features of a few rows, head by head: learned weights take part.
template <class Build, recurrent_policy P>
void add_policy(fingerprint& f, const P& p, const shape& dims, const memory_source& memory) {
    const int64 width = p.features(dims.key_dim);
    row_buffer<Build> buffer(memory, dims.key_dim + width);
    float *x = buffer.row.data, *phi = x + dims.key_dim;
    f.add(static_cast<std::uint64_t>(width));
    for (int64 h = 0; h < dims.heads; ++h)
        for (int side = 0; side < 2; ++side) {
            for (int64 c = 0; c < dims.key_dim; ++c) x[c] = static_cast<float>((37 * c + 11 * h + 50 * side) % 101) / 50 - 1;
            if (side == 0)
                ask::query_features(p.map, h / (dims.heads / ask::query_map_heads(p.map, dims.key_dim)), x, dims.key_dim, phi);
            else
                ask::key_features(p.map, h / (dims.heads / ask::key_map_heads(p.map, dims.key_dim)), x, dims.key_dim, phi);
            f.add(phi, static_cast<std::size_t>(width) * sizeof(float));
        }
}

template <class Build>
void add_score(fingerprint& f, const score_state& s, int64 heads) {
    f.add(&s.scale, sizeof s.scale);
    f.add(&s.soft_cap, sizeof s.soft_cap);
    const auto row = static_cast<std::size_t>(heads) * sizeof(float);
    f.add(s.alibi, s.alibi ? row : 0);
    f.add(s.sink_logits, s.sink_logits ? row : 0);
    f.add(s.frequencies, static_cast<std::size_t>(s.pairs) * sizeof(double));
    f.add(static_cast<std::uint64_t>(s.layout));
    f.add(static_cast<std::uint64_t>(s.by));
    if (s.custom)  // by what it answers, too: its bytes may hold addresses
        for (int64 h = 0; h < heads; ++h)
            for (float x : {-3.0f, 0.0f, 0.5f, 40.0f}) {
                const float y = s.custom.one(s.custom.functor, x, scalar_site{10 * x + 31, h});
                f.add(&y, sizeof y);
            }
}

// -------------------------------------------------------------------------------------------------------------- the cache itself

template <class P>
using store_for = std::conditional_t<softmax_policy<P>, block_store, state_store>;

/// Everything a cache holds. One name and one layout under all compiler flags.
template <class P, class Element>
struct cache_data {
    P policy;
    shape dims;
    storage options;
    score_state scores;
    store_for<P> store;
    array<float> auxiliary;
    workspace scratch;

    SASH_INLINE ~cache_data() = default;
};

template <class Build, class P, class E>
void create_store(cache_data<P, E>& c) {
    if constexpr (softmax_policy<P>)
        create<Build, E>(c.store, c.policy, c.dims, c.options);
    else
        create<Build>(c.store, c.policy, c.dims, c.options);
}

template <class Build, class P>
void check_storage(const storage& s) {
    require<Build>(s.capacity >= 0, "capacity is ", s.capacity, ", must not be negative (0: no limit)");
    require<Build>(s.rollback_slack >= 0, "rollback_slack is ", s.rollback_slack, ", must not be negative");
    require<Build>(s.rollback_slack <= int64{1} << 32, "rollback_slack is ", s.rollback_slack, ", must be at most ", int64{1} << 32);
    require<Build>(s.auxiliary >= 0, "auxiliary is ", s.auxiliary, ", must not be negative");
    require<Build>(s.piece >= 1, "piece is ", s.piece, ", must be at least 1");
    require<Build>((s.memory.allocate == nullptr) == (s.memory.release == nullptr),
                   "memory needs both allocate and release, or neither");
}

/// Zeroed, on first use: a cache that was moved from gets it back here.
template <class Build, class P, class E>
float* auxiliary(cache_data<P, E>& c) {
    if (c.auxiliary.size < c.options.auxiliary) {
        reserve<Build>(c.auxiliary, c.options.memory, c.options.auxiliary);
        for (int64 i = 0; i < c.options.auxiliary; ++i) c.auxiliary.data[i] = 0;
        c.auxiliary.size = c.options.auxiliary;
    }
    return c.auxiliary.data;
}

template <class Build, class P, class E>
void create(cache_data<P, E>& c, const score& s) {
    c.dims = resolve<Build>(c.dims);
    if constexpr (softmax_policy<P>) {
        const int64 stored = stored_heads(c.dims);
        require<Build>(stored % c.dims.key_heads == 0 && stored % c.dims.value_heads == 0, "key_heads is ", c.dims.key_heads,
                       " and value_heads ", c.dims.value_heads, ": one must divide the other");
        validate<Build>(c.policy);
    } else {
        validate<Build>(c.policy, c.dims);
    }
    check_storage<Build, P>(c.options);
    c.scores = view_of_score<Build>(c.policy, c.dims, s);
    c.scratch = workspace(0, c.options.memory);
    own_tables<Build>(c.scores, c.options.memory, c.dims.heads);
    struct guard {
        cache_data<P, E>* held;
        ~guard() {
            if (held) let_go_tables<Build>(held->scores, held->options.memory);
        }
    } undo{&c};
    create_store<Build>(c);
    auxiliary<Build>(c);
    undo.held = nullptr;
}

template <class Build, class P, class E>
void destroy_cache(cache_data<P, E>& c) noexcept {
    destroy<Build>(c.store);
    free<Build>(c.auxiliary, c.options.memory);
    let_go_tables<Build>(c.scores, c.options.memory);
}

/// Forks `from` into `to`, whose store and tables hold nothing yet.
template <class Build, class P, class E>
void copy_cache(cache_data<P, E>& to, const cache_data<P, E>& from) {
    copy<Build>(to.store, from.store);
    struct guard {
        cache_data<P, E>* held;
        ~guard() {
            if (held) destroy<Build>(held->store);
        }
    } undo{&to};
    if (from.auxiliary.size > 0) {
        reserve<Build>(to.auxiliary, from.options.memory, from.auxiliary.size);
        std::memcpy(to.auxiliary.data, from.auxiliary.data, static_cast<std::size_t>(from.auxiliary.size) * sizeof(float));
        to.auxiliary.size = from.auxiliary.size;
    }
    undo.held = nullptr;
    to.scores = from.scores;
    if (to.scores.tables) to.scores.tables->owners.fetch_add(1, std::memory_order_relaxed);
    to.policy = from.policy;
    to.dims = from.dims;
    to.options = from.options;
    to.scratch = workspace(0, from.options.memory);
}

/// What a moved-from cache keeps: policy, shape, options; no token.
SASH_INLINE block_store emptied(const block_store& s) {
    block_store e = s;
    e.length = e.oldest = 0;
    e.pinned_blocks = e.ring_blocks = 0;
    e.pinned_data = e.ring_data = nullptr;
    e.segments = {};
    return e;
}
SASH_INLINE state_store emptied(const state_store& s) {
    state_store e = s;
    e.length = e.floor = 0;
    e.data = nullptr;
    e.base_at = nullptr;
    return e;
}
/// States of a cache that was moved from come back, as zeros, when they are needed.
template <class Build>
void ensure_states(state_store& s) {
    if (s.data != nullptr || s.states == 0) return;
    allocate_states<Build>(s);
    reset<Build>(s);
}

template <class Build, class P, class E>
void move_cache(cache_data<P, E>& to, cache_data<P, E>& from) noexcept {
    to.policy = from.policy;
    to.dims = from.dims;
    to.options = from.options;
    to.scores = from.scores;
    if (to.scores.tables) to.scores.tables->owners.fetch_add(1, std::memory_order_relaxed);
    to.store = from.store;
    from.store = emptied(from.store);
    to.auxiliary = from.auxiliary;
    from.auxiliary = {};
    to.scratch = static_cast<workspace&&>(from.scratch);
}

template <class Build, class P, class E>
void reset_cache(cache_data<P, E>& c) {
    reset<Build>(c.store);
    for (int64 i = 0; i < c.auxiliary.size; ++i) c.auxiliary.data[i] = 0;
}

template <class Build, class P, class E>
bool can_rollback_cache(const cache_data<P, E>& c, int64 tokens) {
    if constexpr (softmax_policy<P>)
        return can_rollback<Build>(c.store, c.policy, tokens);
    else
        return can_rollback<Build>(c.store, tokens);
}

template <class Build, class P, class E>
void rollback_cache(cache_data<P, E>& c, int64 tokens) {
    if constexpr (softmax_policy<P>)
        rollback<Build>(c.store, tokens);
    else
        rollback<Build>(c.store, c.policy, c.dims, tokens);
}

template <class Build>
[[noreturn]] SASH_COLD void refuse_rollback(int64 tokens, int64 length, int64 slack) {
    if (tokens < 0) refuse<Build>("rollback of ", tokens, " tokens: must not be negative");
    if (tokens > length) refuse<Build>("rollback of ", tokens, " tokens: the cache holds only ", length);
    refuse<Build>("rollback of ", tokens, " tokens needs what has already left the cache; rollback_slack is ", slack);
}

/// Another policy of the same type from the next token on: a window that grows or shrinks.
template <class Build, class P, class E>
void change_policy(cache_data<P, E>& c, const P& p) {
    static_assert(softmax_policy<P>, "sash: the policy of a recurrent cache cannot change: its state was made with it");
    validate<Build>(p);
    auto& s = c.store;
    if (s.bounded) {
        const pinned_set pinned = pinned_positions<Build>(p, s.heads);
        bool same = pinned.count == s.pinned.count;
        for (int i = 0; same && i < pinned.count; ++i) same = pinned[i] == s.pinned[i];
        if (!same && s.length > 0) {
            require<Build>(s.oldest == 0 || pinned_count(pinned, s.length) <= pinned_count(s.pinned, s.length),
                           "the new policy keeps ", pinned_count(pinned, s.length), " pinned positions, but tokens from ",
                           pinned_count(s.pinned, s.length), " to ", s.oldest, " have left the cache");
            refuse<Build>("the pinned positions (sinks) of a cache can change only while it is empty; it holds ", s.length, " tokens");
        }
        s.pinned = pinned;
    }
    c.policy = p;
    if (s.bounded) s.oldest = larger(s.oldest, first_retained<Build>(p, s.length, s.heads, s.pinned) - s.slack);
}

// ------------------------------------------------------------------------------------------------------------- save and load

/// magic, bytes in all, fingerprint, then store and auxiliary floats, then the checksum of everything before it.
struct file_header {
    char magic[8];
    std::uint64_t bytes, fingerprint;
};
inline constexpr char file_magic[8] = {'s', 'a', 's', 'h', 'k', 'v', '0', '1'};

template <class Build, class P, class E>
std::uint64_t fingerprint_of(const cache_data<P, E>& c) {
    fingerprint f;
    if constexpr (softmax_policy<P>)
        add_policy(f, c.policy, stored_heads(c.dims));
    else
        add_policy<Build>(f, c.policy, c.dims, c.options.memory);
    f.add(static_cast<std::uint64_t>(scalar_of<E>::value));
    f.add(&c.dims, sizeof c.dims);
    f.add(static_cast<std::uint64_t>(c.options.auxiliary));
    f.add(static_cast<std::uint64_t>(c.options.rollback_slack));
    add_score<Build>(f, c.scores, c.dims.heads);
    return f.value;
}

template <class Build, class P, class E>
int64 store_bytes(const cache_data<P, E>& c) {
    if constexpr (softmax_policy<P>)
        return saved_bytes<Build, E>(c.store);
    else
        return static_cast<int64>(saved_bytes<Build>(c.store));
}

template <class Build, class P, class E>
std::size_t file_bytes(const cache_data<P, E>& c) {
    return sizeof(file_header) + static_cast<std::size_t>(store_bytes<Build>(c)) +
           static_cast<std::size_t>(c.options.auxiliary) * sizeof(float) + sizeof(std::uint64_t);
}

template <class Build, class P, class E>
void save_cache(const cache_data<P, E>& c, std::byte* to) {
    const std::size_t total = file_bytes<Build>(c);
    if constexpr (recurrent_policy<P>) ensure_states<Build>(const_cast<cache_data<P, E>&>(c).store);
    file_header header{{}, total, fingerprint_of<Build>(c)};
    std::memcpy(header.magic, file_magic, sizeof file_magic);
    std::memcpy(to, &header, sizeof header);
    std::byte* at = to + sizeof header;
    if constexpr (softmax_policy<P>) {
        row_buffer<Build> buffer(c.options.memory, c.dims.key_dim + c.dims.value_dim);
        save<Build, E>(c.store, at, buffer.row.data);
    } else {
        save<Build>(c.store, at);
    }
    at += store_bytes<Build>(c);
    const auto auxiliary_bytes = static_cast<std::size_t>(c.options.auxiliary) * sizeof(float);
    std::memset(at, 0, auxiliary_bytes);
    if (c.auxiliary.size > 0) std::memcpy(at, c.auxiliary.data, auxiliary_bytes);
    fingerprint sum;
    sum.add(to, total - sizeof sum.value);
    std::memcpy(to + total - sizeof sum.value, &sum.value, sizeof sum.value);
}

/// Checks a file against the cache it is to fill; returns its size.
template <class Build, class P, class E>
std::size_t check_file(const cache_data<P, E>& c, std::span<const std::byte> file) {
    file_header header;
    require<Build>(file.size() >= sizeof header + sizeof(std::uint64_t), "a saved cache has at least ",
                   sizeof header + sizeof(std::uint64_t), " bytes, these are ", file.size());
    std::memcpy(&header, file.data(), sizeof header);
    require<Build>(std::memcmp(header.magic, file_magic, sizeof file_magic) == 0, "these bytes are no saved cache of this version");
    require<Build>(header.bytes >= sizeof header + sizeof(std::uint64_t) && header.bytes <= file.size(), "the saved cache has ",
                   static_cast<int64>(header.bytes), " bytes, only ", file.size(), " are here");
    fingerprint sum;
    sum.add(file.data(), header.bytes - sizeof sum.value);
    std::uint64_t stored;
    std::memcpy(&stored, file.data() + header.bytes - sizeof stored, sizeof stored);
    require<Build>(stored == sum.value, "the saved cache is damaged: its checksum does not match");
    require<Build>(header.fingerprint == fingerprint_of<Build>(c),
                   "the saved cache belongs to another policy, element type, shape, storage or score options");
    return header.bytes;
}

/// Fills the empty cache `fresh` from a file that has been checked.
template <class Build, class P, class E>
void load_cache(cache_data<P, E>& fresh, std::span<const std::byte> file) {
    const auto auxiliary_bytes = static_cast<std::size_t>(fresh.options.auxiliary) * sizeof(float);
    const std::byte* at = file.data() + sizeof(file_header);
    const std::size_t payload = file.size() - sizeof(file_header) - sizeof(std::uint64_t);
    require<Build>(payload >= auxiliary_bytes, "the saved cache is damaged: it is too short");
    const auto stored = static_cast<int64>(payload - auxiliary_bytes);
    bool good;
    if constexpr (softmax_policy<P>) {
        row_buffer<Build> buffer(fresh.options.memory, fresh.dims.key_dim + fresh.dims.value_dim);
        good = load<Build, E>(fresh.store, fresh.policy, at, stored, buffer.row.data);
    } else {
        good = load<Build>(fresh.store, at, static_cast<std::size_t>(stored));
    }
    require<Build>(good, "the saved cache is damaged: its lengths do not fit together");
    if (auxiliary_bytes > 0) std::memcpy(auxiliary<Build>(fresh), at + stored, auxiliary_bytes);
}

struct access {  // lets the verb see the inside of a cache
    template <class C>
    SASH_INLINE static auto& data(C& cache) {
        return cache.data_;
    }
};

}  // namespace detail

/// The memory of one attention layer for one sequence: what the policy keeps, in the storage type `Element`.
///
///     sash::kv_cache cache(sash::sliding_window{.window = 1024, .sinks = 4}, {.heads = 32, .kv_heads = 8, .head_dim = 128});
///     sash::kv_cache<sash::full, sash::float16> narrow({}, {.heads = 9, .kv_heads = 3, .head_dim = 64});
///
/// A cache is a value. A copy is a fork: full segments of a growing cache are shared, a ring or a state is copied. A move is
/// noexcept and leaves an empty cache of the same shape. `Element` is float, float16 or bfloat16: key and value are rounded
/// to it when they are stored, and everybody, the newest token included, reads the rounded number. A recurrent policy keeps
/// its state in fp32 whatever the element.
///
/// Errors: sash::error for a shape, policy, score or storage option that cannot be, naming it; std::bad_alloc. A failed call
/// leaves the cache as it was. Distinct caches may be used from distinct threads; const members of one cache too.
template <class Policy, class Element = float>
class kv_cache {
    static_assert(attention_policy<Policy>,
                  "sash: Policy must model sash::attention_policy (see sash/policy.hpp: sees and visible, or a recurrent policy)");
    static_assert(std::is_same_v<Element, float> || std::is_same_v<Element, float16> || std::is_same_v<Element, bfloat16>,
                  "sash: Element must be float, sash::float16 or sash::bfloat16");
    using build_ = build::here;

public:
    using policy_type = Policy;
    using element_type = Element;
    using tokens = tokens_of<Policy>;

    SASH_INLINE kv_cache(Policy p, sash::shape s, const score& scores = {}, const storage& options = {})
        : data_{p, s, options, {}, {}, {}, {}} {
        detail::create<build_>(data_, scores);
    }
    SASH_INLINE kv_cache(const kv_cache& other) : data_{other.data_.policy, {}, {}, {}, {}, {}, {}} {
        detail::copy_cache<build_>(data_, other.data_);
    }
    SASH_INLINE kv_cache(kv_cache&& other) noexcept : data_{other.data_.policy, {}, {}, {}, {}, {}, {}} {
        detail::move_cache<build_>(data_, other.data_);
    }
    SASH_INLINE kv_cache& operator=(const kv_cache& other) {
        if (this != &other) {
            kv_cache forked(other);
            *this = static_cast<kv_cache&&>(forked);
        }
        return *this;
    }
    SASH_INLINE kv_cache& operator=(kv_cache&& other) noexcept {
        if (this != &other) {
            detail::destroy_cache<build_>(data_);
            detail::move_cache<build_>(data_, other.data_);
        }
        return *this;
    }
    SASH_INLINE ~kv_cache() { detail::destroy_cache<build_>(data_); }

    // ------------------------------------------------------------------------------------------------------------ what it is

    SASH_INLINE const Policy& policy() const { return data_.policy; }
    /// Heads and dims, every default filled in.
    SASH_INLINE const sash::shape& shape() const { return data_.dims; }
    /// Another policy from the next token on: a window may shrink at once, and grow as tokens arrive; its sinks stay.
    SASH_INLINE void policy(const Policy& p) { detail::change_policy<build_>(data_, p); }

    // ----------------------------------------------------------------------------------------------------------- what it holds

    /// Tokens appended so far: the position of the next one. It keeps counting when tokens leave.
    SASH_INLINE int64 length() const { return data_.store.length; }
    SASH_INLINE bool empty() const { return length() == 0; }
    /// Tokens held: at most sinks + window + rollback_slack for a window; none for a recurrent policy, which holds a state.
    SASH_INLINE int64 stored() const { return positions().size(); }
    /// Their positions, ascending.
    SASH_INLINE position_list positions() const {
        if constexpr (softmax_policy<Policy>)
            return position_list(detail::held_positions(data_.store));
        else
            return position_list({});
    }
    /// Most tokens that may be held; the largest int64 where there is no limit.
    SASH_INLINE int64 capacity() const {
        return data_.options.capacity > 0 ? data_.options.capacity : std::numeric_limits<int64>::max();
    }
    /// Bytes of memory held, unused room and scratch included. A segment shared with a fork counts in both.
    SASH_INLINE int64 bytes() const {
        return held_bytes() + data_.auxiliary.room * static_cast<int64>(sizeof(float)) +
               static_cast<int64>(data_.scratch.bytes());
    }
    /// Makes room for `count` tokens in all: appends up to there allocate no storage. A bounded cache needs no more room than
    /// its window.
    SASH_INLINE void reserve(int64 count) {
        if constexpr (softmax_policy<Policy>) detail::reserve_tokens<build_>(data_.store, data_.policy, count);
    }
    /// Forgets every token, keeps the memory; auxiliary floats become 0.
    SASH_INLINE void reset() { detail::reset_cache<build_>(data_); }

    /// Floats that copies, checkpoints, files and reset carry along: [storage.auxiliary], zero at first.
    SASH_INLINE std::span<float> auxiliary() {
        float* data = detail::auxiliary<build_>(data_);
        return {data, static_cast<std::size_t>(data_.auxiliary.size)};
    }
    SASH_INLINE std::span<const float> auxiliary() const {
        return {data_.auxiliary.data, static_cast<std::size_t>(data_.auxiliary.size)};
    }

    // --------------------------------------------------------------------------------------------------------- going back in time

    /// Can the last `count` tokens be taken back, so that nothing shows they were ever there? Always for a growing cache; for
    /// a window that has slid and for a state, as far as rollback_slack reaches.
    SASH_INLINE bool can_rollback(int64 count) const { return detail::can_rollback_cache<build_>(data_, count); }
    /// Takes back the last `count` tokens, or throws sash::error and changes nothing. Allocates nothing.
    SASH_INLINE void rollback(int64 count) {
        if (!can_rollback(count)) detail::refuse_rollback<build_>(count, length(), data_.options.rollback_slack);
        detail::rollback_cache<build_>(data_, count);
    }
    /// The present state, to come back to: a fork.
    SASH_INLINE kv_cache checkpoint() const { return *this; }
    /// Comes back to a checkpoint of this cache or of a fork of it.
    SASH_INLINE void restore(const kv_cache& checkpoint) { *this = checkpoint; }

    // ------------------------------------------------------------------------------------------------------------ as plain bytes

    /// Bytes that `save` writes.
    SASH_INLINE std::size_t saved_bytes() const { return detail::file_bytes<build_>(data_); }
    /// Writes the cache: held tokens, bit for bit, with a version, a fingerprint of policy, shape and score options, and a
    /// checksum. Numbers are in the byte order of the machine.
    SASH_INLINE void save(std::span<std::byte> to) const {
        detail::require<build_>(to.size() >= saved_bytes(), "saving needs ", saved_bytes(), " bytes, there is room for ", to.size());
        detail::save_cache<build_>(data_, to.data());
    }
    SASH_INLINE std::vector<std::byte> save() const {
        std::vector<std::byte> file(saved_bytes());
        save(file);
        return file;
    }
    /// Becomes the saved cache; the file may be longer: the number of bytes used is returned, so that layers can lie behind each
    /// other. Damaged bytes, or those of a cache with another policy, shape or options, are refused; this cache stays as it was.
    SASH_INLINE std::size_t load(std::span<const std::byte> file) {
        const std::size_t used = detail::check_file<build_>(data_, file);
        kv_cache fresh = empty_copy();
        detail::load_cache<build_>(fresh.data_, file.first(used));
        *this = static_cast<kv_cache&&>(fresh);
        return used;
    }

    /// An empty cache with the same policy, shape and options.
    SASH_INLINE kv_cache empty_copy() const {
        const detail::score_state& s = data_.scores;
        const auto heads = static_cast<std::size_t>(data_.dims.heads);
        return kv_cache(data_.policy, data_.dims,
                        score{s.scale, s.soft_cap, {s.alibi, s.alibi ? heads : 0}, {s.sink_logits, s.sink_logits ? heads : 0},
                              {{s.frequencies, static_cast<std::size_t>(s.pairs)}, s.layout, 0, s.by}, s.custom},
                        data_.options);
    }

private:
    friend struct detail::access;
    SASH_INLINE int64 held_bytes() const {
        if constexpr (softmax_policy<Policy>)
            return detail::bytes_held<build_>(data_.store);
        else
            return detail::bytes<build_>(data_.store);
    }
    detail::cache_data<Policy, Element> data_;
};

template <class Policy>
kv_cache(Policy, shape) -> kv_cache<Policy>;
template <class Policy>
kv_cache(Policy, shape, score) -> kv_cache<Policy>;
template <class Policy>
kv_cache(Policy, shape, score, storage) -> kv_cache<Policy>;

// ------------------------------------------------------------------------------------------------- a range of caches, all or none

namespace detail {

template <class T>
inline constexpr bool is_kv_cache = false;
template <class P, class E>
inline constexpr bool is_kv_cache<kv_cache<P, E>> = true;

}  // namespace detail

/// The layers of a model: a range of caches of one type.
template <class R>
concept cache_range = requires(R& r) {
    requires detail::is_kv_cache<std::remove_cvref_t<decltype(*std::begin(r))>>;
    std::end(r);
};

template <cache_range R>
SASH_INLINE bool can_rollback(const R& caches, int64 tokens) {
    for (const auto& cache : caches)
        if (!cache.can_rollback(tokens)) return false;
    return true;
}

/// Takes the last tokens back in every cache, or in none.
template <cache_range R>
SASH_INLINE void rollback(R&& caches, int64 tokens) {
    for (auto& cache : caches)
        if (!cache.can_rollback(tokens)) cache.rollback(tokens);  // refuses, with its reason
    for (auto& cache : caches) cache.rollback(tokens);
}

/// Checkpoints of a range of caches, in order. Moves only.
template <class Cache>
class checkpoints {
public:
    SASH_INLINE checkpoints() = default;
    SASH_INLINE checkpoints(checkpoints&& other) noexcept : list_(std::exchange(other.list_, {})) {}
    SASH_INLINE checkpoints& operator=(checkpoints&& other) noexcept {
        std::swap(list_, other.list_);
        return *this;
    }
    SASH_INLINE ~checkpoints() {
        for (Cache& c : list_) c.~Cache();
        detail::free<build::here>(list_, {});
    }
    SASH_INLINE void add(Cache&& c) {
        if (list_.size == list_.room) grow();
        ::new (static_cast<void*>(list_.data + list_.size)) Cache(static_cast<Cache&&>(c));
        ++list_.size;
    }
    SASH_INLINE int64 size() const { return list_.size; }
    SASH_INLINE Cache* begin() const { return list_.begin(); }
    SASH_INLINE Cache* end() const { return list_.end(); }

private:
    SASH_INLINE void grow() {
        detail::array<Cache> more;
        detail::reserve<build::here>(more, {}, 2 * list_.room + 8);
        for (Cache& c : list_) {
            ::new (static_cast<void*>(more.data + more.size++)) Cache(static_cast<Cache&&>(c));
            c.~Cache();
        }
        detail::free<build::here>(list_, {});
        list_ = more;
    }
    detail::array<Cache> list_;
};

template <cache_range R>
SASH_INLINE auto checkpoint(const R& caches) {
    checkpoints<std::remove_cvref_t<decltype(*std::begin(caches))>> made;
    for (const auto& cache : caches) made.add(cache.checkpoint());
    return made;
}

/// Brings every cache back, or none.
template <cache_range R, class Cache>
SASH_INLINE void restore(R&& caches, const checkpoints<Cache>& from) {
    int64 count = 0;
    for (auto& cache : caches) count += (static_cast<void>(cache), 1);
    detail::require<build::here>(count == from.size(), "restoring ", count, " caches from ", from.size(), " checkpoints");
    checkpoints<Cache> forks;
    for (const Cache& c : from) forks.add(c.checkpoint());  // all that can fail
    Cache* next = forks.begin();
    for (auto& cache : caches) cache = static_cast<Cache&&>(*next++);
}

/// The caches' files, one behind the other.
template <cache_range R>
SASH_INLINE std::vector<std::byte> save(const R& caches) {
    std::size_t total = 0;
    for (const auto& cache : caches) total += cache.saved_bytes();
    std::vector<std::byte> file(total);
    std::span<std::byte> rest(file);
    for (const auto& cache : caches) {
        cache.save(rest);
        rest = rest.subspan(cache.saved_bytes());
    }
    return file;
}

/// Loads every cache, or none; returns the bytes used.
template <cache_range R>
SASH_INLINE std::size_t load(R&& caches, std::span<const std::byte> file) {
    using cache_type = std::remove_cvref_t<decltype(*std::begin(caches))>;
    checkpoints<cache_type> fresh;
    std::size_t used = 0;
    for (const auto& cache : caches) {
        fresh.add(cache.empty_copy());
        used += (fresh.end() - 1)->load(file.subspan(used));
    }
    cache_type* next = fresh.begin();
    for (auto& cache : caches) cache = static_cast<cache_type&&>(*next++);
    return used;
}

}  // namespace sash
