#pragma once
/// \file
/// What a kernel is handed: which keys, who sees them, and what happens to a score. Kernels know neither policies nor
/// caches. Also the place where a user's score function meets the lanes of a register.
#include <sash/cache/codec.hpp>
#include <sash/cpu/exp.hpp>
#include <sash/score.hpp>

SASH_KERNELS_BEGIN

namespace sash::cpu {

/// Some tokens of one block of 64 of one KV head.
struct key_tile {
    const std::byte* block = nullptr;
    std::int32_t first = 0, last = 0;  ///< lanes [first, last) are candidates
    const key_tile* next = nullptr;    ///< what will be read after it, as far as is known: a hint
};

/// Bits [first, last) of a word of lanes.
SASH_INLINE std::uint64_t lanes_between(int first, int last) {
    return first < last ? ~std::uint64_t{0} >> (64 - (last - first)) << first : 0;
}

/// Who reads a key tile.
struct tile_visit {
    /// Bit l of a word: lane l is seen. Prefill: a word for each row; decode: one word for all rows. Null: every row
    /// sees all of [first, last).
    const std::uint64_t* visible = nullptr;
    int frame = 0;                    ///< which prepared query reads
    const float* distance = nullptr;  ///< [rows] from the row to lane 0; to lane l it is distance[row] - l
    /// Instead, where positions do not run with the lanes. Prefill: [64][capacity]; decode: [rows][64].
    const float* distance_table = nullptr;
};

/// What happens to a score between the dot product and the softmax, beside the scale. When it is empty, queries carry
/// scale · log2(e) and a score is ready for 2^s; otherwise they carry the scale alone, and log2(e) is multiplied last.
struct score_stage {
    float soft_cap = 0;                    ///< 0: none
    const float* alibi = nullptr;          ///< slope of each query head
    const custom_score* custom = nullptr;  ///< a user's function

    SASH_INLINE bool empty() const { return soft_cap == 0 && alibi == nullptr && custom == nullptr; }
};

/// x -> cap · tanh(x · inverse) in `count` registers of scores, `pitch` floats apart.
template <class Build>
void soft_cap(float* scores, int64 count, int64 pitch, float inverse, float cap) {
    for (int64 i = 0; i < count; ++i, scores += pitch)
        store(scores, floats(cap) * tanh(load(scores) * floats(inverse)));
}

/// Where the scores of one register stand. A table looked up by head is gathered when it is first asked for, not once a
/// key: a function asks for the same few tables again and again.
template <class Build>
struct row_site {  // lanes are rows: heads and positions differ from lane to lane
    floats distance_;
    const std::int32_t* head;  // [lanes], all of them valid
    mutable const float* gathered[4] = {};
    mutable floats table[4];

    SASH_INLINE explicit row_site(const std::int32_t* heads) : distance_(0.0f), head(heads) {}
    SASH_INLINE floats distance() const { return distance_; }
    SASH_INLINE floats of_head(per_head t) const {
        for (int i = 0; i < 4; ++i) {
            if (gathered[i] == t.data) return table[i];
            if (gathered[i] == nullptr) {
                table[i] = gather(t.data);
                gathered[i] = t.data;
                return table[i];
            }
        }
        return gather(t.data);
    }
    SASH_INLINE floats gather(const float* data) const {
        alignas(64) float value[floats::size];
        for (std::size_t i = 0; i < floats::size; ++i) value[i] = data[head[i]];
        return floats::load_aligned(value);
    }
};

template <class Build>
struct key_site {  // lanes are keys of one row
    floats distance_;
    std::int32_t head;

    SASH_INLINE floats distance() const { return distance_; }
    SASH_INLINE floats of_head(per_head t) const { return floats(t.data[head]); }
};

/// 0, 1, 2, … : the index of each lane.
template <class Build>
SASH_INLINE floats lane_index() {
    alignas(64) static constexpr float index[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(index);
}

/// Distances of one register of rows to the lanes of a block. Nothing is read past the last row.
template <class Build>
struct row_distances {
    floats to_lane_0;
    const float* table = nullptr;
    int64 pitch;

    SASH_INLINE row_distances(const float* distance, const float* distance_table, int64 row, int64 rows,
                              int64 table_pitch)
        : to_lane_0(0.0f), pitch(table_pitch) {
        if (distance_table != nullptr) {
            table = distance_table + row;
        } else if (distance != nullptr) {
            alignas(64) float value[floats::size] = {};
            for (int64 i = 0; i < lanes<Build> && row + i < rows; ++i) value[i] = distance[row + i];
            to_lane_0 = load(value);
        }
    }
    SASH_INLINE floats to(int64 lane) const {
        return table != nullptr ? load(table + lane * pitch) : to_lane_0 - floats(static_cast<float>(lane));
    }
};

/// Distances of one row to the keys in lanes [lane, lane + lanes) of a block.
template <class Build>
SASH_INLINE floats key_distances(const float* distance, const float* distance_table, int64 row, int64 lane) {
    if (distance_table != nullptr) return load(distance_table + row * block_tokens + lane);
    if (distance == nullptr) return floats(0.0f);
    return floats(distance[row] - static_cast<float>(lane)) - lane_index<Build>();
}

/// Applies F to a tile whose lanes are rows, then brings the scores to base 2. Whole registers of rows are rewritten,
/// those past the last row too.
template <class Build, class F>
void score_rows(const void* functor, const score_tile& tile) {
    const F& f = *static_cast<const F*>(functor);
    for (int64 row = 0; row < tile.rows; row += lanes<Build>) {
        std::int32_t head[floats::size] = {};
        for (int64 i = 0; tile.head != nullptr && i < lanes<Build> && row + i < tile.rows; ++i)
            head[i] = tile.head[row + i];
        const row_distances<Build> distance(tile.distance, tile.distance_table, row, tile.rows, tile.pitch);
        row_site<Build> site(head);
        float* scores = tile.scores + row;
        for (int64 key = 0; key < tile.keys; ++key, scores += tile.pitch) {
            site.distance_ = distance.to(tile.first_lane + key);
            store(scores, f(load(scores), site) * floats(log2_e));
        }
    }
}

/// Applies F to a tile whose lanes are keys, then brings the scores to base 2. Whole registers of keys are rewritten.
template <class Build, class F>
void score_keys(const void* functor, const score_tile& tile) {
    const F& f = *static_cast<const F*>(functor);
    for (int64 row = 0; row < tile.rows; ++row) {
        key_site<Build> site{floats(0.0f), tile.head != nullptr ? tile.head[row] : 0};
        for (int64 key = 0; key < tile.keys; key += lanes<Build>) {
            site.distance_ = key_distances<Build>(tile.distance, tile.distance_table, row, tile.first_lane + key);
            float* scores = tile.scores + row * tile.pitch + key;
            store(scores, f(load(scores), site) * floats(log2_e));
        }
    }
}

}  // namespace sash::cpu

SASH_KERNELS_END
