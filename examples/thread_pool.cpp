// A thread pool of your own as the runner. sash cuts a call into tasks by its shape alone; who does which is the
// runner's business, and no bit of the result depends on it. A runner is anything that can be called as run(tasks, f)
// and calls f(i) once for each task.
#include "lesson.hpp"

#include <sash/sash.hpp>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

namespace {

using sash::int64;

// Threads that sleep until there is work. The caller works, too. It serves one call at a time.
class thread_pool {
public:
    explicit thread_pool(int64 threads) {
        for (int64 i = 1; i < threads; ++i) helpers_.emplace_back([this] { help(); });
    }
    thread_pool(const thread_pool&) = delete;
    ~thread_pool() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (std::thread& helper : helpers_) helper.join();
    }

    // How many tasks run at a time: sash makes no more than that many pieces of scratch.
    int64 concurrency() const { return static_cast<int64>(helpers_.size()) + 1; }

    void operator()(int64 tasks, sash::task f) {
        std::unique_lock lock(mutex_);
        job_ = &f, tasks_ = tasks, next_ = 0, unfinished_ = tasks;
        ++calls_;
        wake_.notify_all();
        work(lock);
        done_.wait(lock, [this] { return unfinished_ == 0; });
        job_ = nullptr;
    }
    int64 calls() const { return calls_; }

private:
    void work(std::unique_lock<std::mutex>& lock) {
        while (job_ != nullptr && next_ < tasks_) {
            const int64 i = next_++;
            const sash::task* job = job_;
            lock.unlock();
            (*job)(i);
            lock.lock();
            if (--unfinished_ == 0) done_.notify_one();
        }
    }
    void help() {
        std::unique_lock lock(mutex_);
        while (!stopping_) {
            work(lock);
            wake_.wait(lock, [this] { return stopping_ || (job_ != nullptr && next_ < tasks_); });
        }
    }

    std::vector<std::thread> helpers_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    const sash::task* job_ = nullptr;
    int64 tasks_ = 0, next_ = 0, unfinished_ = 0, calls_ = 0;
    bool stopping_ = false;
};

constexpr int64 tokens = 700, prompt = 690, heads = 8, kv_heads = 2, dim = 64;

// A prompt, then single tokens.
std::vector<float> run(const sash::runner& runner) {
    const std::vector<float> q = lesson::numbers(tokens * heads * dim, 1);
    const std::vector<float> k = lesson::numbers(tokens * kv_heads * dim, 2);
    const std::vector<float> v = lesson::numbers(tokens * kv_heads * dim, 3);
    const sash::input query(q, tokens, heads, dim), key(k, tokens, kv_heads, dim), value(v, tokens, kv_heads, dim);
    std::vector<float> rows(q.size());
    const sash::output out(rows, tokens, heads, dim);
    sash::kv_cache cache(sash::full{}, {.heads = heads, .kv_heads = kv_heads, .head_dim = dim});
    for (int64 t = 0, n = prompt; t < tokens; t += n, n = 1)
        sash::attend(query.tokens_from(t, n), key.tokens_from(t, n), value.tokens_from(t, n), cache,
                     out.tokens_from(t, n), {.run = runner});
    return rows;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

int main() {
    const std::vector<float> alone = run(sash::serial{});

    thread_pool pool(4);
    const std::vector<float> pooled = run(pool);
    lesson::say("a pool of ", pool.concurrency(), " threads was called ", pool.calls(), " times for a prompt and ",
                tokens - prompt, " tokens");
    lesson::expect(pool.calls() > 0, "the pool was used");
    lesson::expect(same_bits(alone, pooled), "the same bits from one thread and from a pool");

    // The smallest runner there is: tasks in any order will do.
    const auto backwards = [](int64 tasks, sash::task f) {
        while (tasks > 0) f(--tasks);
    };
    lesson::expect(same_bits(alone, run(backwards)), "the same bits from the last task to the first");
#if defined(_OPENMP)
    lesson::expect(same_bits(alone, run(sash::openmp{.threads = 3})), "the same bits from an OpenMP team");
#endif
    return lesson::exit_code();
}
