#pragma once
/// \file
/// A cache as plain bytes: what must be equal for a file to belong to a cache, how damage is seen, what is written.
#include <sash/cache/data.hpp>

namespace sash::detail {

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

/// Distances at which policies and scores are asked: all short ones, then the neighbours of powers of two.
template <class F>
SASH_INLINE void for_each_probe(F&& f) {
    for (int64 d = 0; d < 128; ++d) f(d);
    for (int power = 7; power < 40; ++power)
        for (int64 d = (int64{1} << power) - 1; d < (int64{1} << power) + 2; ++d) f(d);
}

/// A policy is known by what it answers, so that policies of users need no code for this: what queries near the start, at
/// powers of two and far away see, and how.
template <class P>
SASH_INLINE void add_policy(fingerprint& f, const P& p, int64 heads) {
    const auto add = [&f](int64 x) { f.add(static_cast<std::uint64_t>(x)); };
    for (int64 h = 0; h < heads; ++h) {
        for (int power = 0; power < 60; ++power)
            for (int64 q = int64{1} << power; q < (int64{1} << power) + 2; ++q)
                for (const key_interval& i : ask::visible(p, q, q + 1, h)) {
                    add(i.first);
                    add(i.last);
                    add(i.frame);
                }
        for (const int64 q : {int64{130}, int64{1} << 41})
            for_each_probe([&](int64 back) {
                if (back > q) return;
                add(ask::sees(p, q, q - back, h) ? 1 : 0);
                add(ask::distance(p, q, q - back, h));
            });
        for (int frame = 0; frame < ask::frames<P>; ++frame)
            for_each_probe([&](int64 q) { add(ask::read_position(p, q, frame)); });
    }
}

/// A feature map is known by the features of a few rows, head by head: learned weights take part.
template <class Build, recurrent_policy P>
void add_policy(fingerprint& f, const P& p, const shape& dims, const memory_source& memory) {
    const int64 width = p.features(dims.key_dim);
    row_buffer<Build> buffer(memory, dims.key_dim + width);
    float *x = buffer.row.data, *phi = x + dims.key_dim;
    f.add(static_cast<std::uint64_t>(width));
    f.add(P::has_normaliser ? 1u : 0u);
    f.add(P::needs_decay ? 1u : 0u);
    for (int64 h = 0; h < dims.heads; ++h)
        for (int side = 0; side < 2; ++side) {
            for (int64 c = 0; c < dims.key_dim; ++c)
                x[c] = static_cast<float>((37 * c + 11 * h + 50 * side) % 101) / 50 - 1;
            if (side == 0)
                ask::query_features(p.map, h / (dims.heads / ask::query_map_heads(p.map, dims.key_dim)), x,
                                    dims.key_dim, phi);
            else
                ask::key_features(p.map, h / (dims.heads / ask::key_map_heads(p.map, dims.key_dim)), x, dims.key_dim,
                                  phi);
            f.add(phi, static_cast<std::size_t>(width) * sizeof(float));
        }
    if constexpr (requires { p.describe([](double) {}, dims); })
        p.describe([&](double number) { f.add(&number, sizeof number); }, dims);
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
    if (!s.custom) return;
    for (int64 h = 0; h < heads; ++h)  // by what it answers, too: its bytes may hold addresses
        for_each_probe([&](int64 distance) {
            for (float x : {-0.75f, 2.5f}) {
                const float y = s.custom.one(s.custom.functor, x, scalar_site{static_cast<float>(distance), h});
                f.add(&y, sizeof y);
            }
        });
}

// ------------------------------------------------------------------------------------------------------------- save and load

/// magic, bytes in all, fingerprint, then store and auxiliary floats, then the checksum of everything before it.
struct file_header {
    char magic[8];
    std::uint64_t bytes, fingerprint;
};
inline constexpr char file_magic[8] = {'s', 'a', 's', 'h', 'k', 'v', '0', '3'};

template <class Build, class P, class E>
std::uint64_t fingerprint_of(const cache_data<P, E>& c) {
    fingerprint f;
    if constexpr (softmax_policy<P>)
        add_policy(f, c.policy, stored_heads(c.dims));
    else
        add_policy<Build>(f, c.policy, c.dims, c.options.memory);
    if constexpr (hybrid_policy<P>) {
        add_policy<Build>(f, c.policy.linear, c.dims, c.options.memory);
        f.add(P::divides_tokens + 2 * P::has_lse);
        if constexpr (requires { c.policy.combine.describe([](double) {}); })
            c.policy.combine.describe([&](double number) { f.add(&number, sizeof number); });
    }
    f.add(static_cast<std::uint64_t>(storage_name<E>));
    f.add(&c.dims, sizeof c.dims);
    f.add(static_cast<std::uint64_t>(c.options.auxiliary));
    if constexpr (!recurrent_policy<P>)  // states come without their history where the slack is another
        f.add(static_cast<std::uint64_t>(c.options.rollback_slack));
    f.add(static_cast<std::uint64_t>(c.options.state));
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
    if constexpr (hybrid_policy<P>) ensure_states<Build>(const_cast<cache_data<P, E>&>(c).store.states);
    file_header header{{}, total, fingerprint_of<Build>(c)};
    std::memcpy(header.magic, file_magic, sizeof file_magic);
    std::memcpy(to, &header, sizeof header);
    std::byte* at = to + sizeof header;
    if constexpr (softmax_policy<P>)
        save<Build, E>(c.store, at);
    else
        save<Build>(c.store, at);
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
    require<Build>(std::memcmp(header.magic, file_magic, sizeof file_magic) == 0,
                   "these bytes are no saved cache of this version");
    require<Build>(header.bytes >= sizeof header + sizeof(std::uint64_t) && header.bytes <= file.size(),
                   "the saved cache has ", static_cast<int64>(header.bytes), " bytes, only ", file.size(), " are here");
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
    if constexpr (softmax_policy<P>)
        good = load<Build, E>(fresh.store, fresh.policy, at, stored);
    else
        good = load<Build, P>(fresh.store, at, static_cast<std::size_t>(stored));
    require<Build>(good, "the saved cache is damaged: its lengths do not fit together");
    if constexpr (softmax_policy<P>) {
        int64 held = 0;
        for (const key_interval& i : held_positions(fresh.store)) held += i.last - i.first;
        require<Build>(fresh.options.capacity == 0 || held <= fresh.options.capacity, "the saved cache holds ", held,
                       " tokens, the capacity of this one is ", fresh.options.capacity);
    }
    if (auxiliary_bytes > 0) std::memcpy(auxiliary<Build>(fresh), at + stored, auxiliary_bytes);
}

}  // namespace sash::detail
