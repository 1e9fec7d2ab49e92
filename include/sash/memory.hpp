#pragma once
/// \file
/// Where storage comes from, and scratch memory that can be reused from call to call.
#include <sash/config.hpp>

#include <cstdlib>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sash {

/// Names an allocator: two functions and a context they are called with. The default takes memory from the system,
/// 2 MiB-aligned and with huge pages advised when the piece is large: decode reads a cache from end to end, and small
/// pages cost it 2 to 22 % of its bandwidth. `allocate` returns null when there is none left.
struct memory_source {
    void* (*allocate)(void* context, std::size_t bytes, std::size_t alignment) = nullptr;
    void (*release)(void* context, void* memory, std::size_t bytes, std::size_t alignment) = nullptr;
    void* context = nullptr;
};

namespace detail {

inline constexpr std::size_t cache_line = 64;
inline constexpr std::size_t huge_page = std::size_t{1} << 21;

/// The alignment a source of the caller's is asked with; sizes are multiples of it. (Whole huge pages: where one does not
/// fill two of them, they would waste too much.)
SASH_INLINE constexpr std::size_t alignment_for(std::size_t bytes) {
    return bytes >= 2 * huge_page ? huge_page : cache_line;
}
SASH_INLINE constexpr std::size_t rounded_size(std::size_t bytes) {
    const std::size_t alignment = alignment_for(bytes);
    return (bytes + alignment - 1) / alignment * alignment;
}

/// Memory from the system; null when there is none.
template <class Build>
void* allocate_from_system(std::size_t bytes) {
#if defined(__linux__)
    if (bytes >= huge_page) {
        void* memory = nullptr;
        if (posix_memalign(&memory, huge_page, bytes) != 0) return nullptr;
        madvise(memory, bytes, MADV_HUGEPAGE);  // advice: failure is harmless
        return memory;
    }
#endif
    return std::aligned_alloc(cache_line, (bytes + cache_line - 1) / cache_line * cache_line);
}

/// Uninitialised memory of at least `bytes` bytes; throws std::bad_alloc (or calls on_error) when there is none.
template <class Build>
void* allocate(const memory_source& source, std::size_t bytes) {
    void* memory = source.allocate ? source.allocate(source.context, rounded_size(bytes), alignment_for(bytes))
                                   : allocate_from_system<Build>(bytes);
    if (memory == nullptr) {
#if defined(__cpp_exceptions)
        throw std::bad_alloc();
#else
        on_error("sash: out of memory");
#endif
    }
    return memory;
}

template <class Build>
void release(const memory_source& source, void* memory, std::size_t bytes) noexcept {
    if (memory == nullptr) return;
    if (source.release)
        source.release(source.context, memory, rounded_size(bytes), alignment_for(bytes));
    else if (!source.allocate)
        std::free(memory);
}

/// A growing array of trivially copyable T: the few lists a cache keeps (segments, tables). Owned explicitly: `free` it.
template <class T>
struct array {
    T* data = nullptr;
    int64 size = 0;
    int64 room = 0;

    SASH_INLINE constexpr array() {}
    SASH_INLINE T& operator[](int64 i) { return data[i]; }
    SASH_INLINE const T& operator[](int64 i) const { return data[i]; }
    SASH_INLINE T* begin() const { return data; }
    SASH_INLINE T* end() const { return data + size; }
};

/// Makes room for `n` elements, keeping those there are.
template <class Build, class T>
void reserve(array<T>& a, const memory_source& source, int64 n) {
    if (n <= a.room) return;
    const int64 room = larger(n, 2 * a.room);
    T* data = static_cast<T*>(allocate<Build>(source, static_cast<std::size_t>(room) * sizeof(T)));
    for (int64 i = 0; i < a.size; ++i) ::new (static_cast<void*>(data + i)) T(a.data[i]);
    release<Build>(source, a.data, static_cast<std::size_t>(a.room) * sizeof(T));
    a.data = data;
    a.room = room;
}

template <class Build, class T>
void free(array<T>& a, const memory_source& source) noexcept {
    release<Build>(source, a.data, static_cast<std::size_t>(a.room) * sizeof(T));
    a = {};
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

}  // namespace detail

/// Scratch memory for the kernels. A call that is given one allocates only when it must grow, so a decode loop that
/// reuses its workspace does not allocate. One workspace serves one call at a time.
class workspace {
public:
    SASH_INLINE workspace() = default;
    SASH_INLINE explicit workspace(std::size_t bytes, memory_source source = {}) : source_(source) { grow(bytes); }
    SASH_INLINE workspace(workspace&& other) noexcept
        : source_(other.source_), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    SASH_INLINE workspace& operator=(workspace&& other) noexcept {
        std::swap(source_, other.source_);
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    SASH_INLINE ~workspace() { detail::release<build::here>(source_, data_, bytes_); }

    /// Bytes held.
    SASH_INLINE std::size_t bytes() const { return bytes_; }

    /// At least `bytes` bytes of 64-byte aligned scratch. Where it has to grow, only the first `kept` bytes stay what they were.
    SASH_INLINE std::byte* grow(std::size_t bytes, std::size_t kept = 0) {
        if (bytes > bytes_) {
            void* larger = detail::allocate<build::here>(source_, bytes);
            if (kept > 0) std::memcpy(larger, data_, kept);
            detail::release<build::here>(source_, data_, bytes_);
            data_ = larger;
            bytes_ = bytes;
        }
        return static_cast<std::byte*>(data_);
    }

private:
    memory_source source_;
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace sash
