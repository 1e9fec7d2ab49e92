#pragma once
/// \file
/// The positions a cache holds, as a range.
#include <sash/policy.hpp>

#include <cstddef>
#include <span>

namespace sash {

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
        SASH_INLINE friend bool operator==(const iterator& a, const iterator& b) {
            return a.in_ == b.in_ && a.at_ == b.at_;
        }

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

}  // namespace sash
