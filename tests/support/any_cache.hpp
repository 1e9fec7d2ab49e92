#pragma once
// A cache of any policy and element type behind one interface, so that a test of what they have in common is compiled
// once.
#include "tensors.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

#include <memory>

namespace test {

// Tokens of one sequence, and a query for each.
struct stream {
    tensor query, key, value, decay;

    stream(int64 tokens, std::uint64_t seed, const sash::shape& given) {
        const sash::shape s = sash::detail::resolve<sash::build::here>(given);
        query = tensor(tokens, s.query_heads, s.key_dim);
        key = tensor(tokens, s.key_heads, s.key_dim);
        value = tensor(tokens, s.value_heads, s.value_dim);
        decay = tensor(tokens, s.gate_heads, 1);
        numbers random(seed);
        for (tensor* t : {&query, &key, &value}) t->fill(random);
        decay.for_each(
            [&](int64 t, int64 h, int64 d) { decay.set(t, h, d, -0.05f * static_cast<float>(random.below(8))); });
    }
};

template <class P>
sash::tokens_of<P> tokens_of(const stream& from, int64 first, int64 count) {
    if constexpr (sash::detail::takes_decay<P>)
        return {.query = from.query.in(first, count),
                .key = from.key.in(first, count),
                .value = from.value.in(first, count),
                .decay = from.decay.in(first, count)};
    else
        return {.query = from.query.in(first, count),
                .key = from.key.in(first, count),
                .value = from.value.in(first, count)};
}

// A policy, an element type and the options of the scores.
template <class P, class E = float>
struct kind {
    P policy = {};
    sash::score score = {};
    sash::shape shape = {};
    using cache = sash::kv_cache<P, E>;

    cache make(const sash::storage& storage = {}) const { return cache(policy, shape, score, storage); }
};

// A cache of any kind. The members are those of kv_cache; copies and moves are its own.
class any_cache {
public:
    template <class P, class E>
    any_cache(const kind<P, E>& k, const sash::kv_cache<P, E>& cache)
        : held_(std::make_unique<model<P, E>>(k, cache)) {}
    template <class P, class E>
    any_cache(const kind<P, E>& k, const sash::storage& storage)
        : held_(std::make_unique<model<P, E>>(k, k.make(storage))) {}
    any_cache(const any_cache& other) : held_(other.held_->copy()) {}
    any_cache(any_cache&& other) : held_(other.held_->move()) {}
    any_cache& operator=(const any_cache& other) { return held_->copy_from(*other.held_), *this; }
    any_cache& operator=(any_cache&& other) { return held_->move_from(*other.held_), *this; }

    void append(const stream& from, int64 first, int64 count, const sash::options& how = {.run = sash::serial{}}) {
        held_->append(from, first, count, how);
    }
    void attend(const stream& from, int64 first, int64 count, sash::output out,
                const sash::options& how = {.run = sash::serial{}}) {
        held_->attend(from, first, count, out, how);
    }
    // The next tokens of both in one batch.
    static void attend_both(any_cache& a, any_cache& b, const stream& from, int64 first, int64 count,
                            sash::output out_a, sash::output out_b) {
        a.held_->attend_with(*b.held_, from, first, count, out_a, out_b);
    }
    void read(sash::input query, sash::output out) const { held_->read(query, out); }
    std::size_t workspace_bytes(int64 tokens) const { return held_->workspace_bytes(tokens); }
    std::vector<double> expected(const stream& history, sash::input query) const {
        return held_->expected(history, query);
    }

    bool softmax() const { return held_->info().softmax; }
    bool grows() const { return held_->info().grows; }
    bool rounds_after_turning() const { return held_->info().rounds_after_turning; }
    int64 length() const { return held_->info().length; }
    int64 stored() const { return held_->info().stored; }
    int64 bytes() const { return held_->info().bytes; }
    sash::shape shape() const { return held_->info().shape; }
    std::vector<int64> positions() const { return held_->positions(); }
    void reserve(int64 count) { held_->reserve(count); }
    void reset() { held_->reset(); }
    bool can_rollback(int64 count) const { return held_->can_rollback(count); }
    void rollback(int64 count) { held_->rollback(count); }
    any_cache checkpoint() const { return any_cache(held_->checkpoint()); }
    void restore(const any_cache& from) { held_->restore(*from.held_); }
    std::vector<std::byte> save() const { return held_->save(); }
    void save(std::span<std::byte> to) const { held_->save(to); }
    std::size_t load(std::span<const std::byte> file) { return held_->load(file); }
    std::size_t saved_bytes() const { return held_->saved_bytes(); }
    std::span<float> auxiliary() { return held_->auxiliary(); }
    std::span<const float> auxiliary() const { return std::as_const(*held_).auxiliary(); }

private:
    struct facts {
        bool softmax, grows, rounds_after_turning;
        int64 length, stored, bytes;
        sash::shape shape;
    };
    struct interface {
        virtual ~interface() = default;
        virtual std::unique_ptr<interface> copy() const = 0;
        virtual std::unique_ptr<interface> move() = 0;
        virtual std::unique_ptr<interface> checkpoint() const = 0;
        virtual void copy_from(const interface&) = 0;
        virtual void move_from(interface&) = 0;
        virtual void restore(const interface&) = 0;
        virtual void append(const stream&, int64, int64, const sash::options&) = 0;
        virtual void attend(const stream&, int64, int64, sash::output, const sash::options&) = 0;
        virtual void attend_with(interface&, const stream&, int64, int64, sash::output, sash::output) = 0;
        virtual void read(sash::input, sash::output) const = 0;
        virtual std::size_t workspace_bytes(int64) const = 0;
        virtual std::vector<double> expected(const stream&, sash::input) const = 0;
        virtual facts info() const = 0;
        virtual std::vector<int64> positions() const = 0;
        virtual void reserve(int64) = 0;
        virtual void reset() = 0;
        virtual bool can_rollback(int64) const = 0;
        virtual void rollback(int64) = 0;
        virtual std::vector<std::byte> save() const = 0;
        virtual void save(std::span<std::byte>) const = 0;
        virtual std::size_t load(std::span<const std::byte>) = 0;
        virtual std::size_t saved_bytes() const = 0;
        virtual std::span<float> auxiliary() = 0;
        virtual std::span<const float> auxiliary() const = 0;
    };
    template <class P, class E>
    struct model final : interface {
        kind<P, E> k;
        sash::kv_cache<P, E> cache;

        model(const kind<P, E>& like, sash::kv_cache<P, E> c) : k(like), cache(std::move(c)) {}
        static auto& of(interface& other) { return static_cast<model&>(other).cache; }
        static const auto& of(const interface& other) { return static_cast<const model&>(other).cache; }
        std::unique_ptr<interface> copy() const override { return std::make_unique<model>(k, cache); }
        std::unique_ptr<interface> move() override { return std::make_unique<model>(k, std::move(cache)); }
        std::unique_ptr<interface> checkpoint() const override {
            return std::make_unique<model>(k, cache.checkpoint());
        }
        void copy_from(const interface& other) override { cache = of(other); }
        void move_from(interface& other) override { cache = std::move(of(other)); }
        void restore(const interface& other) override { cache.restore(of(other)); }
        void append(const stream& from, int64 first, int64 count, const sash::options& how) override {
            sash::append(tokens_of<P>(from, first, count), cache, how);
        }
        void attend(const stream& from, int64 first, int64 count, sash::output out, const sash::options& how) override {
            sash::attend(tokens_of<P>(from, first, count), cache, out, how);
        }
        void attend_with(interface& other, const stream& from, int64 first, int64 count, sash::output out,
                         sash::output other_out) override {
            const auto tokens = tokens_of<P>(from, first, count);
            sash::request<sash::kv_cache<P, E>> requests[] = {{tokens, &cache, out, {}},
                                                              {tokens, &of(other), other_out, {}}};
            sash::attend(requests, {.run = sash::serial{}});
        }
        void read(sash::input query, sash::output out) const override {
            sash::read(query, cache, out, {.run = sash::serial{}});
        }
        std::size_t workspace_bytes(int64 tokens) const override {
            return sash::workspace_bytes(cache, tokens, {.run = sash::serial{}});
        }
        std::vector<double> expected(const stream& s, sash::input query) const override {
            const int64 at = s.key.tokens();
            if constexpr (sash::softmax_policy<P>)
                return sash::reference::attend(k.policy, k.shape, query, s.key.in(), s.value.in(), k.score, at,
                                               sash::detail::storage_name<E>)
                    .out;
            else
                return sash::reference::attend(k.policy, k.shape, query, s.key.in(), s.value.in(), s.decay.in(),
                                               k.score, at)
                    .out;
        }
        facts info() const override {
            const bool turned = k.score.rotary.by == sash::rotates::library && !k.score.rotary.frequencies.empty();
            return {sash::softmax_policy<P>,
                    std::is_same_v<P, sash::full>,
                    turned && !std::is_same_v<E, float>,
                    cache.length(),
                    cache.stored(),
                    cache.bytes(),
                    cache.shape()};
        }
        std::vector<int64> positions() const override {
            std::vector<int64> list;
            for (const int64 p : cache.positions()) list.push_back(p);
            return list;
        }
        void reserve(int64 count) override { cache.reserve(count); }
        void reset() override { cache.reset(); }
        bool can_rollback(int64 count) const override { return cache.can_rollback(count); }
        void rollback(int64 count) override { cache.rollback(count); }
        std::vector<std::byte> save() const override { return cache.save(); }
        void save(std::span<std::byte> to) const override { cache.save(to); }
        std::size_t load(std::span<const std::byte> file) override { return cache.load(file); }
        std::size_t saved_bytes() const override { return cache.saved_bytes(); }
        std::span<float> auxiliary() override { return cache.auxiliary(); }
        std::span<const float> auxiliary() const override { return cache.auxiliary(); }
    };

    explicit any_cache(std::unique_ptr<interface> held) : held_(std::move(held)) {}
    std::unique_ptr<interface> held_;
};

}  // namespace test
