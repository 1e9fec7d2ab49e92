#pragma once
/// \file
/// Who does the work. A call is cut into tasks by its shape alone; a runner decides which thread takes which task, and
/// nothing else: every runner and any number of threads give the same bits.
#include <sash/memory.hpp>

#include <atomic>
#include <new>
#include <type_traits>
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace sash {

/// A task list handed to a runner: `f(i)` does task i. A reference; valid during the call only.
class task {
public:
    template <class F>
        requires(!std::is_same_v<std::remove_cvref_t<F>, task>)
    SASH_INLINE task(F& f) : what_(&f), call_([](void* what, int64 i) { (*static_cast<F*>(what))(i); }) {}
    SASH_INLINE void operator()(int64 i) const { call_(what_, i); }

private:
    void* what_;
    void (*call_)(void*, int64);
};

/// Runs every task on the calling thread.
struct serial {
    SASH_INLINE int64 concurrency() const { return 1; }
    template <class F>
    SASH_INLINE void operator()(int64 tasks, F&& f) const {
        for (int64 i = 0; i < tasks; ++i) f(i);
    }
};

/// Runs tasks on an OpenMP team of at most `threads` threads (0: as many as the runtime offers). Right for any team the
/// runtime really gives, one thread included; may be called inside a parallel region. Needs the file to be compiled with
/// OpenMP.
struct openmp {
    int threads = 0;

    template <class Build = build::here>
    int64 concurrency() const {
#if defined(_OPENMP)
        return threads > 0 ? threads : omp_get_max_threads();
#else
        return 1;
#endif
    }
    template <class Build = build::here, class F>
    void operator()([[maybe_unused]] int64 tasks, [[maybe_unused]] F&& f) const {
#if defined(_OPENMP)
        const int team = static_cast<int>(concurrency<Build>());
#pragma omp parallel for schedule(static, 1) num_threads(team)
        for (int64 i = 0; i < tasks; ++i) f(i);
#else
        static_assert(detail::never<F>, "sash: sash::openmp needs this file to be compiled with OpenMP (-fopenmp)");
#endif
    }
};

/// Any runner, by reference or, where it is small, by value. It is whatever can be called as run(tasks, f), calling f(i)
/// once for each i in [0, tasks), in any order, on any threads, and returning when all are done. A member
/// `concurrency()` may say how many tasks it runs at a time (8 if it does not). An empty runner is the default one:
/// OpenMP where this file is compiled with it, else serial.
class runner {
public:
    SASH_INLINE constexpr runner() = default;

    template <class R>
        requires(!std::is_same_v<std::remove_cvref_t<R>, runner> && std::is_invocable_v<R&, int64, task>)
    SASH_INLINE runner(R&& run) {
        using plain = std::remove_cvref_t<R>;
        if constexpr (std::is_trivially_copyable_v<plain> && sizeof(plain) <= sizeof held_ &&
                      alignof(plain) <= alignof(void*)) {
            ::new (static_cast<void*>(held_)) plain(run);
            run_ = &run_as<build::here, plain, false>;
        } else {
            static_assert(std::is_lvalue_reference_v<R>,
                          "sash: a large runner must be an lvalue that outlives the call");
            auto* where = const_cast<plain*>(&run);
            ::new (static_cast<void*>(held_))(plain*)(where);
            run_ = &run_as<build::here, plain, true>;
        }
        concurrency_ = concurrency_of(run);
    }

    SASH_INLINE constexpr explicit operator bool() const { return run_ != nullptr; }
    SASH_INLINE constexpr int64 concurrency() const { return concurrency_; }
    SASH_INLINE void operator()(int64 tasks, task f) const { run_(held_, tasks, f); }

private:
    template <class R>
    SASH_INLINE static int64 concurrency_of(const R& run) {
        if constexpr (requires { run.concurrency(); })
            return static_cast<int64>(run.concurrency());
        else
            return 8;
    }
    template <class Build, class R, bool ByReference>
    static void run_as(const void* held, int64 tasks, task f) {
        void* at = const_cast<void*>(held);
        R& run = ByReference ? **static_cast<R**>(at) : *static_cast<R*>(at);
        run(tasks, f);
    }

    alignas(void*) std::byte held_[2 * sizeof(void*)] = {};
    void (*run_)(const void*, int64, task) = nullptr;
    int64 concurrency_ = 1;
};

namespace detail {

template <class Build>
runner default_runner() {
#if defined(_OPENMP)
    return openmp{};
#else
    return serial{};
#endif
}

/// Runs do_task(i, scratch) for i in [0, tasks). The runner is given as many workers as it runs at a time; each takes the
/// next task that nobody has, and keeps one piece of scratch, so that scratch does not grow with the work.
template <class Build, class F>
void run_tasks(const runner& given, int64 tasks, std::byte* scratch, int64 scratch_bytes, int64 workers, F&& do_task) {
    if (tasks == 0) return;
    std::atomic<int64> next{0};
    auto work = [&](int64 worker) {
        for (int64 i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;)
            do_task(i, scratch + worker * scratch_bytes);
    };
    if (workers == 1)
        work(0);
    else
        given(workers, task(work));
}

/// The list that task i belongs to, where list j has tasks [first[j], first[j + 1]) of `count` lists.
SASH_INLINE int64 list_of(const int64* first, int64 count, int64 i) {
    int64 low = 0;
    for (int64 high = count; high - low > 1;) {
        const int64 middle = low + (high - low) / 2;
        if (first[middle] <= i)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/// How many workers, each with scratch of its own, a runner gets for so many tasks.
SASH_INLINE int64 workers_for(const runner& run, int64 tasks) {
    return larger(1, smaller(smaller(run.concurrency(), tasks), 256));
}

}  // namespace detail
}  // namespace sash
