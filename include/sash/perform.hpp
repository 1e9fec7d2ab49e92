#pragma once
/// \file
/// From a call to its tasks: check, make room, plan, run. Everything that can fail happens before the first token is stored.
#include <sash/check.hpp>
#include <sash/cpu/hybrid.hpp>
#include <sash/full.hpp>

namespace sash::detail {

// ------------------------------------------------------------------------------------------------------- softmax policies

/// The sequence that a checked call is to the kernels.
template <class Build, class P, class E>
cpu::softmax_sequence<P> sequence_of(const call<P, E>& c, verb what, bool finish) {
    const tokens_of<P>& in = *c.tokens;
    cpu::softmax_sequence<P> s;
    s.job.policy = &c.cache->policy;
    s.job.dims = &c.cache->dims;
    s.job.scores = &c.cache->scores;
    s.job.store = s.store = &c.cache->store;
    s.job.group = c.cache->dims.heads / stored_heads(c.cache->dims);
    s.job.finish = finish;
    s.job.first_query = c.first_query == options::automatic ? c.cache->store.length : c.first_query;
    s.writes = what != verb::read;
    if (what != verb::append) {
        s.job.query = in.query;
        s.job.out = c.out;
        s.job.lse = c.lse.empty() ? nullptr : c.lse.data();
    }
    if (s.writes) {
        s.key = in.key;
        s.value = in.value;
    }
    return s;
}

/// Recurrent policies and hybrids need no list of sequences; any policy names the (unused) type.
template <class P>
using store_policy = std::conditional_t<softmax_policy<P> && !hybrid_policy<P>, P, full>;

/// Where a call works: its workspace, of which a list at the beginning (of a batch) is in use already.
struct workplace {
    workspace* memory;
    std::size_t listed = 0;

    /// `bytes` more bytes behind the list.
    SASH_INLINE std::byte* grow(int64 bytes) const {
        return memory->grow(listed + static_cast<std::size_t>(bytes), listed) + listed;
    }
    SASH_INLINE bool has(int64 bytes) const { return memory->bytes() >= listed + static_cast<std::size_t>(bytes); }
};

template <class Build, class P, class E>
void perform_softmax(const call<P, E>* calls, int64 count, verb what, const options& how, const runner& run,
                     workplace at, cpu::softmax_sequence<P>* sequences) {
    for (int64 j = 0; j < count; ++j)
        ::new (static_cast<void*>(sequences + j))
            cpu::softmax_sequence<P>(sequence_of<Build>(calls[j], what, how.finish));
    if (what != verb::read)
        for (int64 j = 0; j < count; ++j)
            make_room<Build>(*sequences[j].store, calls[j].cache->policy, sequences[j].key.tokens,
                             sequences[j].piece());
    const int64 bytes = cpu::workspace_for<Build, E>(sequences, count, how.key_piece, run);
    const bool enough = at.has(bytes);
    const std::ptrdiff_t listed_at = reinterpret_cast<std::byte*>(sequences) - at.memory->grow(0);
    std::byte* memory = at.grow(
        enough ? bytes : larger(bytes, cpu::workspace_for<Build, E>(sequences, count, how.key_piece, run, true)));
    if (at.listed > 0) sequences = reinterpret_cast<cpu::softmax_sequence<P>*>(at.memory->grow(0) + listed_at);
    cpu::perform<Build, E>(sequences, count, how.key_piece, run, memory);
}

// ------------------------------------------------------------------------------------------------------ recurrent policies

template <class Build, class P, class E>
cpu::recurrent_call recurrent_call_of(const call<P, E>& c, verb what) {
    const tokens_of<P>& in = *c.tokens;
    cpu::recurrent_call r;
    r.reads = what != verb::append;
    r.writes = what != verb::read;
    if (r.reads) {
        r.query = in.query;
        r.out = c.out;
        r.lse = c.lse.empty() ? nullptr : c.lse.data();
    }
    if (r.writes) {
        r.key = in.key;
        r.value = in.value;
        r.chunked = cpu::chunked_tokens(in.key.tokens, c.cache->store.slack);
        if constexpr (takes_decay<P>) r.decay = in.decay;
        if constexpr (takes_beta<P>) r.beta = in.beta;
        if constexpr (takes_vectors<P>) {
            r.removal = in.removal;
            r.replacement = in.replacement;
        }
    }
    r.scale = c.cache->scores.scale;
    r.layout = c.cache->scores.layout;
    return r;
}

/// Angles of the tokens of a call, where the library turns.
template <class Build, class P, class E>
void fill_recurrent_turns(cpu::arena& memory, const call<P, E>& c, cpu::recurrent_call& r) {
    const score_state& s = c.cache->scores;
    if (s.pairs == 0 || s.by == rotates::caller) return;
    const int64 tokens = r.reads ? r.query.tokens : r.key.tokens;
    turn* turns = memory.take<turn>(tokens * s.pairs);
    for (int64 t = 0; turns && t < tokens; ++t)
        for (int64 pair = 0; pair < s.pairs; ++pair)
            turns[t * s.pairs + pair] = turn_by<Build>(c.cache->store.length + t, s.frequencies[pair]);
    r.turns = turns;
    r.pairs = s.pairs;
}

/// How the workspace of a recurrent call is divided.
struct recurrent_plan {
    cpu::recurrent_call* calls = nullptr;  // [count]
    int64* first_task = nullptr;           // [count + 1]
    std::byte* scratch = nullptr;          // [workers][scratch_bytes]
    int64 workers = 1, scratch_bytes = 0, used = 0;
};

/// Without memory it only counts.
template <class Build, class P, class E>
recurrent_plan plan_recurrent(cpu::arena memory, const call<P, E>* calls, int64 count, verb what, const runner& run) {
    recurrent_plan plan;
    plan.workers = larger(1, smaller(run.concurrency(), 64));
    plan.calls = memory.take<cpu::recurrent_call>(count);
    plan.first_task = memory.take<int64>(count + 1);
    for (int64 j = 0; j < count; ++j) {
        cpu::recurrent_call r = recurrent_call_of<Build>(calls[j], what);
        fill_recurrent_turns<Build>(memory, calls[j], r);
        if (plan.calls) ::new (static_cast<void*>(plan.calls + j)) cpu::recurrent_call(r);
        const int64 floats =
            cpu::recurrent_scratch(calls[j].cache->policy, calls[j].cache->dims, calls[j].cache->options.state);
        plan.scratch_bytes = larger(plan.scratch_bytes, round_up(floats * static_cast<int64>(sizeof(float)), 64));
    }
    plan.scratch = memory.take<std::byte>(plan.workers * plan.scratch_bytes);
    plan.used = memory.used;
    return plan;
}

template <class Build, class P, class E>
void perform_recurrent(const call<P, E>* calls, int64 count, verb what, const runner& run, workplace at) {
    std::byte* memory = at.grow(plan_recurrent<Build>({}, calls, count, what, run).used);
    if (at.listed > 0) calls = reinterpret_cast<const call<P, E>*>(at.memory->grow(0));
    for (int64 j = 0; j < count; ++j) ensure_states<Build>(calls[j].cache->store);
    const recurrent_plan plan = plan_recurrent<Build>({memory}, calls, count, what, run);
    int64 work = 0, most_tokens = 0;
    plan.first_task[0] = 0;
    for (int64 j = 0; j < count; ++j) {
        const state_store& s = calls[j].cache->store;
        plan.first_task[j + 1] = plan.first_task[j] + s.states;
        const int64 tokens = tokens_in<P>(*calls[j].tokens, what);
        work += tokens * s.states * larger(s.state_floats, 256);  // a small state takes some 20 ns all the same
        most_tokens = larger(most_tokens, tokens);
    }
    const int64 workers = work < 1 << 16 ? 1 : plan.workers;
    for (int64 first = 0; first == 0 || first < most_tokens; first += cpu::tokens_of_round) {
        for (int64 j = 0; j < count; ++j) {
            plan.calls[j].first = first;
            plan.calls[j].last = first + cpu::tokens_of_round;
        }
        run_tasks<Build>(run, plan.first_task[count], plan.scratch, plan.scratch_bytes, workers,
                         [&](int64 i, std::byte* mine) {
                             const int64 j = list_of(plan.first_task, count, i);
                             cpu::recurrent<Build>(calls[j].cache->policy, calls[j].cache->dims,
                                                   calls[j].cache->store, plan.calls[j], i - plan.first_task[j],
                                                   reinterpret_cast<float*>(mine));
                         });
    }
    if (what != verb::read)
        for (int64 j = 0; j < count; ++j) cpu::count_tokens(calls[j].cache->store, plan.calls[j]);
}

// --------------------------------------------------------------------------------------------------------- hybrid policies

template <class Build, class P, class E>
cpu::hybrid_sequence<P> hybrid_sequence_of(const call<P, E>& c, verb what, const options& how) {
    cpu::hybrid_sequence<P> s;
    s.policy = &c.cache->policy;
    s.dims = &c.cache->dims;
    s.scores = &c.cache->scores;
    s.store = &c.cache->store;
    s.in = c.tokens;
    s.out = c.out;
    s.lse = c.lse.empty() ? nullptr : c.lse.data();
    s.first_query = c.first_query == options::automatic ? c.cache->store.length : c.first_query;
    s.reads = what != verb::append;
    s.writes = what != verb::read;
    s.finish = how.finish;
    return s;
}

/// Sequences of a batch one after the other; each fills the machine by itself.
template <class Build, class P, class E>
void perform_hybrids(const call<P, E>* calls, int64 count, verb what, const options& how, const runner& run,
                     workplace at) {
    int64 bytes = 0;
    for (int64 j = 0; j < count; ++j) {
        const cpu::hybrid_sequence<P> s = hybrid_sequence_of<Build>(calls[j], what, how);
        if (what != verb::read) make_room<Build>(*s.store, *s.policy, s.tokens(), s.piece());
        ensure_states<Build>(s.store->states);
        bytes = larger(bytes, cpu::hybrid_workspace<Build, E>(s, how.key_piece, run));
    }
    std::byte* memory = at.grow(bytes);
    if (at.listed > 0) calls = reinterpret_cast<const call<P, E>*>(at.memory->grow(0));
    for (int64 j = 0; j < count; ++j)
        cpu::perform_hybrid<Build, E>(hybrid_sequence_of<Build>(calls[j], what, how), how.key_piece, run, memory);
}

// -------------------------------------------------------------------------------------------------------------- the one way in

/// The workspace of a call: the one given, else the cache's own where it may be changed, else one for this call.
template <class P, class E>
SASH_INLINE workspace* workspace_of(const options& how, cache_data<P, E>& first, verb what, workspace& local) {
    if (how.workspace) return how.workspace;
    return what == verb::read ? &local : &first.scratch;
}

template <class Build>
runner runner_of(const options& how) {
    return how.run ? how.run : default_runner<Build>();
}

/// Bytes of workspace that a call of `tokens` new tokens takes.
template <class Build, class P, class E>
std::size_t count_workspace(const cache_data<P, E>& c, int64 tokens, const options& how) {
    const runner run = runner_of<Build>(how);
    tokens_of<P> in = query_alone<P>({});
    in.query.tokens = in.key.tokens = in.value.tokens = tokens;
    const call<P, E> imagined{&in, const_cast<cache_data<P, E>*>(&c), {}, {}, options::automatic};
    if constexpr (hybrid_policy<P>) {
        return static_cast<std::size_t>(cpu::hybrid_workspace<Build, E>(
            hybrid_sequence_of<Build>(imagined, verb::attend, how), how.key_piece, run));
    } else if constexpr (softmax_policy<P>) {
        cpu::softmax_sequence<P> s = sequence_of<Build>(imagined, verb::attend, how.finish);
        return static_cast<std::size_t>(cpu::workspace_for<Build, E>(&s, 1, how.key_piece, run));
    } else {
        return static_cast<std::size_t>(plan_recurrent<Build>({}, &imagined, 1, verb::attend, run).used);
    }
}

template <class Build, class Cache>
void perform_one(const typename Cache::tokens& tokens, Cache& cache, output out, verb what, const options& how) {
    using P = typename Cache::policy_type;
    using E = typename Cache::element_type;
    cache_data<P, E>& data = access::data(cache);
    const call<P, E> c{&tokens, &data, out, how.lse, how.first_query};
    require<Build>(how.key_piece >= 0, "key_piece is ", how.key_piece, ", must not be negative");
    check_call<Build>(c, what);
    workspace local(0, data.options.memory);
    const workplace at{workspace_of(how, data, what, local)};
    const runner run = runner_of<Build>(how);
    if constexpr (hybrid_policy<P>) {
        perform_hybrids<Build>(&c, 1, what, how, run, at);
    } else if constexpr (softmax_policy<P>) {
        cpu::softmax_sequence<P> sequence;
        perform_softmax<Build>(&c, 1, what, how, run, at, &sequence);
    } else {
        perform_recurrent<Build>(&c, 1, what, run, at);
    }
}

/// Refuses a batch that names one cache twice: which of the two comes first would matter. `slot` is a table by address, twice as
/// long as the batch; it holds request numbers + 1, or 0.
template <class Build, class Cache>
void check_distinct(const request<Cache>* requests, int64 count, int64* slot, int64 slots) {
    for (int64 i = 0; i < slots; ++i) slot[i] = 0;
    for (int64 i = 0; i < count; ++i) {
        fingerprint hash;
        hash.add(reinterpret_cast<std::uintptr_t>(requests[i].cache));
        int64 at = static_cast<int64>(hash.value % static_cast<std::uint64_t>(slots));
        for (; slot[at] != 0; at = (at + 1) % slots)
            require<Build>(requests[slot[at] - 1].cache != requests[i].cache, "requests ", slot[at] - 1, " and ", i,
                           " name the same cache: their order would matter");
        slot[at] = i + 1;
    }
}

template <class Build, class Cache>
void perform_requests(request<Cache>* requests, int64 count, const options& how) {
    using P = typename Cache::policy_type;
    using E = typename Cache::element_type;
    require<Build>(how.lse.empty() && how.first_query == options::automatic,
                   "a batch takes lse in each request, and no first_query");
    require<Build>(how.key_piece >= 0, "key_piece is ", how.key_piece, ", must not be negative");
    if (count == 0) return;
    for (int64 i = 0; i < count; ++i) require<Build>(requests[i].cache != nullptr, "request ", i, " has no cache");

    workspace unused;
    workplace at{workspace_of(how, access::data(*requests[0].cache), verb::attend, unused)};
    const int64 slots = int64{1} << (bits_in(count) + 1);
    const auto lay_out = [&](cpu::arena memory, call<P, E>*& calls, cpu::softmax_sequence<store_policy<P>>*& sequences,
                             int64*& slot) {
        calls = memory.take<call<P, E>>(count);
        sequences = memory.take<cpu::softmax_sequence<store_policy<P>>>(count);
        slot = memory.take<int64>(slots);
        return static_cast<std::size_t>(memory.used);
    };
    call<P, E>* calls = nullptr;
    cpu::softmax_sequence<store_policy<P>>* sequences = nullptr;
    int64* slot = nullptr;
    at.listed = lay_out({}, calls, sequences, slot);
    lay_out({at.memory->grow(at.listed)}, calls, sequences, slot);
    check_distinct<Build>(requests, count, slot, slots);
    for (int64 i = 0; i < count; ++i) {
        request<Cache>& r = requests[i];
        ::new (static_cast<void*>(calls + i))
            call<P, E>{&r.tokens, &access::data(*r.cache), r.out, r.lse, options::automatic};
        check_call<Build>(calls[i], verb::attend);
    }
    const runner run = runner_of<Build>(how);
    if constexpr (hybrid_policy<P>)
        perform_hybrids<Build>(calls, count, verb::attend, how, run, at);
    else if constexpr (softmax_policy<P>)
        perform_softmax<Build>(calls, count, verb::attend, how, run, at, sequences);
    else
        perform_recurrent<Build>(calls, count, verb::attend, run, at);
}

// ------------------------------------------------------------------------------------------------------------ without a cache

/// Where the queries of a call without a cache stand: they are the last tokens unless said otherwise.
template <class Build>
int64 stateless_first(const options& how, int64 queries, int64 keys, bool causal) {
    if (how.first_query != options::automatic) {
        require<Build>(how.first_query >= 0 && how.first_query < far_away, "first_query is ", how.first_query,
                       ", must not be negative");
        return how.first_query;
    }
    require<Build>(queries <= keys || !causal, queries, " queries are to be the last of ", keys,
                   " tokens: say .first_query");
    return larger(0, keys - queries);
}

/// Keys and values are packed into blocks of scratch, those some query sees, and attended as a cache's are.
template <class Build, class P>
void perform_stateless(const P& policy, const shape& dims, const tokens_of<P>& in, output out, const options& how,
                       const score& scores) {
    validate<Build>(policy, dims);
    const score_state state = view_of_score<Build>(policy, dims, scores);
    block_store store;
    create<Build, float>(store, policy, dims, {});
    const int64 keys = in.key.tokens, blocks = blocks_for(keys);
    store.bounded = true;  // one flat piece of memory, as a ring that never turns
    store.pinned = {};
    store.ring_blocks = larger(1, blocks);

    cpu::softmax_sequence<P> s;
    s.job.policy = &policy;
    s.job.dims = &dims;
    s.job.scores = &state;
    s.job.store = s.store = &store;
    s.job.query = in.query;
    s.job.out = out;
    s.job.lse = how.lse.empty() ? nullptr : how.lse.data();
    s.job.finish = how.finish;
    s.job.group = dims.heads / stored_heads(dims);
    s.job.first_query = stateless_first<Build>(how, in.query.tokens, keys, ask::is_causal(policy));
    s.key = in.key;
    s.value = in.value;
    s.only_visible = s.writes = true;

    const runner run = runner_of<Build>(how);
    const int64 block_bytes = store.heads * store.ring_blocks * store.block_bytes;
    const int64 scratch_bytes = cpu::workspace_for<Build, float>(&s, 1, how.key_piece, run);
    workspace local;
    std::byte* memory =
        (how.workspace ? *how.workspace : local).grow(static_cast<std::size_t>(block_bytes + scratch_bytes));
    store.ring_data = memory;
    cpu::perform<Build, float>(&s, 1, how.key_piece, run, memory + block_bytes);
}

/// A policy with states without a cache: they live for the call.
template <class Build, class P>
void perform_stateless_recurrent(const P& policy, const shape& dims, tokens_of<P> in, output out, const options& how,
                                 const score& scores) {
    kv_cache<P, float> cache(policy, dims, scores);
    const int64 before = stateless_first<Build>(how, in.query.tokens, in.key.tokens, true);
    require<Build>(before + in.query.tokens == in.key.tokens,
                   "the queries of a recurrent policy are the last tokens: first_query is ", before, ", must be ",
                   in.key.tokens - in.query.tokens);
    tokens_of<P> prefix = in;
    prefix.key = in.key.tokens_from(0, before);
    prefix.value = in.value.tokens_from(0, before);
    in.key = in.key.tokens_from(before, in.query.tokens);
    in.value = in.value.tokens_from(before, in.query.tokens);
    for_each_gate(policy, prefix, dims.key_dim, [&](const char*, input& x, int64) { x = x.tokens_from(0, before); });
    for_each_gate(policy, in, dims.key_dim,
                  [&](const char*, input& x, int64) { x = x.tokens_from(before, in.query.tokens); });
    options each = how;
    each.first_query = options::automatic;
    perform_one<Build>(prefix, cache, {}, verb::append, each);
    perform_one<Build>(in, cache, out, verb::attend, each);
}

template <class Build, class P>
void perform_without_cache(const P& policy, const tokens_of<P>& in, output out, const options& how,
                           const score& scores) {
    const int64 kv_heads = larger(in.key.heads, in.value.heads);
    shape dims{.heads = out.heads,
               .kv_heads = kv_heads,
               .key_dim = in.query.dim,
               .value_dim = in.value.dim,
               .query_heads = in.query.heads,
               .key_heads = in.key.heads,
               .value_heads = in.value.heads};
    for_each_gate(policy, in, dims.key_dim, [&](const char*, const input& x, int64) { dims.gate_heads = x.heads; });
    if constexpr (requires { policy.decay.heads; }) dims.gate_heads = policy.decay.heads;
    if constexpr (requires { policy.linear.decay.heads; }) dims.gate_heads = policy.linear.decay.heads;
    dims = resolve<Build>(dims);
    check_extents<Build>("query", in.query, in.query.tokens, dims.query_heads, dims.key_dim);
    check_extents<Build>("key", in.key, in.key.tokens, dims.key_heads, dims.key_dim);
    check_extents<Build>("value", in.value, in.key.tokens, dims.value_heads, dims.value_dim);
    check_extents<Build>("out", out, in.query.tokens, dims.heads, dims.value_dim);
    check_written<Build>(out);
    check_lse<Build>(how.lse, in.query.tokens, dims.heads);
    require<Build>(how.key_piece >= 0, "key_piece is ", how.key_piece, ", must not be negative");
    if constexpr (softmax_policy<P> && !hybrid_policy<P>)
        perform_stateless<Build>(policy, dims, in, out, how, scores);
    else
        perform_stateless_recurrent<Build>(policy, dims, in, out, how, scores);
}

}  // namespace sash::detail
