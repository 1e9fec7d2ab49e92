#pragma once
/// \file
/// The common interface of every cache: kv_cache<Policy, Element>, and a range of them.
#include <sash/cache/file.hpp>
#include <sash/cache/positions.hpp>
#include <sash/tokens.hpp>

#include <limits>
#include <vector>

namespace sash {

namespace detail {

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
/// noexcept and leaves an empty cache of the same shape. `Element` is float, float16, bfloat16 or int8_rows: key and value
/// are rounded to it when they are stored, and everybody, the newest token included, reads the rounded number. A recurrent
/// policy keeps its state in fp32 whatever the element, or in what storage.state says.
///
/// Errors: sash::error for a shape, policy, score or storage option that cannot be, naming it; std::bad_alloc. A failed call
/// leaves the cache as it was. Distinct caches may be used from distinct threads; const members of one cache too.
template <class Policy, class Element = float>
class kv_cache {
    static_assert(attention_policy<Policy>,
                  "sash: Policy must model sash::attention_policy (see sash/policy.hpp: sees and visible, or a "
                  "recurrent policy)");
    static_assert(std::is_same_v<Element, float> || std::is_same_v<Element, float16> ||
                      std::is_same_v<Element, bfloat16> || std::is_same_v<Element, int8_rows>,
                  "sash: Element must be float, sash::float16, sash::bfloat16 or sash::int8_rows");
    using build_ = build::here;
    static constexpr bool has_state_ = recurrent_policy<Policy> || hybrid_policy<Policy>;
    static constexpr bool can_wait_ = [] {
        if constexpr (recurrent_policy<Policy>)
            return detail::can_wait<Policy>;
        else
            return false;
    }();

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

    /// Floats that copies, checkpoints, files and reset carry along, but no rollback: [storage.auxiliary], zero at first.
    SASH_INLINE std::span<float> auxiliary() {
        float* data = detail::auxiliary<build_>(data_);
        return {data, static_cast<std::size_t>(data_.auxiliary.size)};
    }
    SASH_INLINE std::span<const float> auxiliary() const {
        return {data_.auxiliary.data, static_cast<std::size_t>(data_.auxiliary.size)};
    }

    // ------------------------------------------------------------------------------------- the states of a recurrent policy

    /// The states as they are, for policies that keep some (of a hybrid, those of its linear part): views of the cache's
    /// memory, of floats or, by storage.state, bfloat16. They are good until the cache changes. Allocates nothing.
    SASH_INLINE recurrent_state state() const requires(!can_wait_) {
        static_assert(has_state_, "sash: this policy keeps no state: only linear and hybrid policies do");
        return detail::view_of_states<build_>(detail::states_of(data_.store));
    }
    /// The same under the delta rule: the tokens that wait beside the states, seven at most, are written into them first.
    /// Rows that follow are then other roundings of the same.
    SASH_INLINE recurrent_state state() requires can_wait_ {
        detail::settle_all<build_, Policy>(data_.store);
        return detail::view_of_states<build_>(data_.store);
    }
    /// Begins from states that come from elsewhere: another cache, another program, a learned initial state. What was held
    /// is forgotten; the next token stands at position `of.length`. Views of any type and strides; they must not be of this
    /// cache's memory in another order. There is no rollback to before this point.
    ///
    /// Of a hybrid only the states are set; its window stays, and with it how many tokens the states stand for: `of.length`
    /// must be what state().length is.
    ///
    /// Cost: a copy. Allocates one row. Errors: sash::error for extents or a length that cannot be, before anything is
    /// written.
    SASH_INLINE void state(const recurrent_state& of) {
        static_assert(has_state_, "sash: this policy keeps no state: only linear and hybrid policies do");
        detail::set_states_of_cache<build_>(data_, of);
    }

    // --------------------------------------------------------------------------------------------------------- going back in time

    /// Can the last `count` tokens be taken back, so that nothing shows they were ever there? Always for a growing cache; for
    /// a window that has slid and for a state, as far as rollback_slack reaches.
    SASH_INLINE bool can_rollback(int64 count) const { return detail::can_rollback_cache<build_>(data_, count); }
    /// Takes back the last `count` tokens, or throws sash::error and changes nothing. Allocates nothing. The auxiliary floats
    /// stay what they are: whoever keeps the last inputs of a convolution there puts them back, or uses a checkpoint.
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
        detail::require<build_>(to.size() >= saved_bytes(), "saving needs ", saved_bytes(),
                                " bytes, there is room for ", to.size());
        detail::save_cache<build_>(data_, to.data());
    }
    SASH_INLINE std::vector<std::byte> save() const {
        std::vector<std::byte> file(saved_bytes());
        save(file);
        return file;
    }
    /// Becomes the saved cache; the file may be longer: the number of bytes used is returned, so that layers can lie behind each
    /// other. Damaged bytes, or those of a cache with another policy, shape or options, are refused; this cache stays as it was.
    /// (A recurrent policy takes states that were saved with another rollback_slack: exact, but without the way back.)
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
                        score{s.scale,
                              s.soft_cap,
                              {s.alibi, s.alibi ? heads : 0},
                              {s.sink_logits, s.sink_logits ? heads : 0},
                              {{s.frequencies, static_cast<std::size_t>(s.pairs)}, s.layout, 0, s.by},
                              s.custom},
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
    detail::require<build::here>(count == from.size(), "restoring ", count, " caches from ", from.size(),
                                 " checkpoints");
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
