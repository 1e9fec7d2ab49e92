#pragma once
/// \file
/// The verb: check everything, plan the work, call the kernels.
#include <sash/cpu/recurrent.hpp>
#include <sash/cpu/softmax.hpp>

namespace sash {

/// The last, optional argument of every form of the verb.
struct options {
    static constexpr int64 automatic = std::numeric_limits<int64>::min();

    /// Receives log Σ exp(score) of every row, [tokens, heads], natural logarithm, of the keys alone; -inf for a row that
    /// saw none.
    std::span<float> lse = {};
    /// Position of the first query. `attend` into a cache: always the cache's length. `read`: the cache's length unless
    /// said. Without a cache: the queries are the last tokens unless said.
    int64 first_query = automatic;
    /// Who does the work: serial{}, openmp{threads}, a pool of your own. No result depends on it.
    runner run = {};
    /// Scratch to use; else the cache's own, or, for a const cache and without one, memory allocated for the call.
    sash::workspace* workspace = nullptr;
    /// false: sink logits are left out, and (out, 1, lse) is a partial that can be merged and finished later.
    bool finish = true;
    /// Keys in one piece where a few queries meet many keys; 0: 512. Bits depend on it, and on nothing else that is free.
    int64 key_piece = 0;
};

/// One sequence of a batch: its own cache, its own number of tokens.
template <class Cache>
struct request {
    typename Cache::tokens tokens = {};
    Cache* cache = nullptr;
    output out = {};
    std::span<float> lse = {};
};

namespace detail {

enum class verb { attend, append, read };

/// Tokens of which only the query is there.
template <class P>
SASH_INLINE tokens_of<P> query_alone(input query) {
    if constexpr (takes_decay<P>)
        return {.query = query, .key = {}, .value = {}, .decay = input{}};
    else
        return {.query = query, .key = {}, .value = {}};
}

/// A request with its cache opened: what all forms of the verb are brought to.
template <class P, class E>
struct call {
    const tokens_of<P>* tokens = nullptr;
    cache_data<P, E>* cache = nullptr;  // not written by verb::read
    output out;
    std::span<float> lse;
    int64 first_query = options::automatic;
};

// --------------------------------------------------------------------------------------------------------------------- checks

template <class Build, class Pointer>
void check_extents(const char* name, const strided<Pointer>& t, int64 tokens, int64 heads, int64 dim) {
    require<Build>(t.tokens == tokens, name, " has ", t.tokens, " tokens, must have ", tokens);
    require<Build>(t.heads == heads, name, " has ", t.heads, " heads, must have ", heads);
    require<Build>(t.dim == dim, name, " has dim ", t.dim, ", must have ", dim);
    require<Build>(t.empty() || t.data != nullptr, name, " has no memory");
    const auto element = static_cast<std::uintptr_t>(bytes_of(t.type));
    require<Build>(reinterpret_cast<std::uintptr_t>(t.data) % element == 0, name, " begins at an address that is no multiple of its element's ",
                   static_cast<int64>(element), " bytes");
}

/// What is written must not overlap itself.
template <class Build>
void check_written(const char* name, const output& t) {
    const auto apart = [&](int64 stride, int64 extent, const char* axis) {
        require<Build>(extent <= 1 || stride != 0, name, " has ", axis, " stride 0 over ", extent, " of them: rows would overlap");
    };
    apart(t.token_stride, t.tokens, "token");
    apart(t.head_stride, t.heads, "head");
    apart(t.dim_stride, t.dim, "dim");
}

template <class Build>
void check_lse(std::span<float> lse, int64 tokens, int64 heads) {
    require<Build>(lse.empty() || static_cast<int64>(lse.size()) == tokens * heads, "lse has ", lse.size(), " entries, must have ",
                   tokens * heads, ": [tokens, heads]");
}

template <class Build, class P>
void check_inputs(const tokens_of<P>& in, const shape& dims, verb what, int64 tokens) {
    if (what != verb::append) check_extents<Build>("query", in.query, tokens, dims.query_heads, dims.key_dim);
    if (what == verb::read) return;
    check_extents<Build>("key", in.key, tokens, dims.key_heads, dims.key_dim);
    check_extents<Build>("value", in.value, tokens, dims.value_heads, dims.value_dim);
    if constexpr (takes_decay<P>) {
        check_extents<Build>("decay", in.decay, tokens, dims.gate_heads, 1);
        check_decay<Build>(in.decay);
    }
}

/// Tokens of a call: those of its key, or of its query where nothing is stored.
template <class P>
SASH_INLINE int64 tokens_in(const tokens_of<P>& in, verb what) {
    return what == verb::read ? in.query.tokens : in.key.tokens;
}

template <class Build, class P>
void check_first_query(const P& p, const block_store& s, int64 first, int64 tokens) {
    require<Build>(first >= 0 && first <= far_away, "first_query is ", first, ", must not be negative");
    if (first >= s.length || tokens == 0) return;
    for (int64 h = 0; h < s.heads; ++h)
        for (const key_interval& i : ask::visible(p, first, first + 1, h))
            for (int64 key = i.first; key < smaller(i.last, s.oldest); ++key) {
                bool pinned = false;
                for (const key_interval& stay : s.pinned) pinned |= key >= stay.first && key < stay.last;
                require<Build>(pinned, "the query at position ", first, " sees key ", key, ", which has left the cache; the oldest is ", s.oldest);
            }
}

template <class Build, class P, class E>
void check_position(const call<P, E>& c, verb what, int64 tokens) {
    const int64 length = c.cache->store.length;
    require<Build>(length + tokens < far_away, "the cache has seen ", length, " tokens, ", tokens, " more are too many");
    if (what != verb::read) {
        require<Build>(c.first_query == options::automatic || c.first_query == length, "first_query is ", c.first_query,
                       ", but these tokens stand at ", length, ", the length of the cache");
        if constexpr (softmax_policy<P>)
            require<Build>(what == verb::append || ask::is_causal(c.cache->policy),
                           "a bidirectional policy takes append, then read: an append that also reads could not be cut into parts");
    } else if constexpr (softmax_policy<P>) {
        if (c.first_query != options::automatic) check_first_query<Build>(c.cache->policy, c.cache->store, c.first_query, tokens);
    } else {
        require<Build>(c.first_query == options::automatic || c.first_query == length,
                       "a recurrent cache is read where it stands, at ", length, "; first_query is ", c.first_query);
    }
}

/// Would the tokens exceed a hard capacity? Counts what is held afterwards.
template <class Build, class P, class E>
void check_capacity(const cache_data<P, E>& c, int64 tokens) {
    if constexpr (softmax_policy<P>) {
        if (c.options.capacity == 0) return;
        block_store after = c.store;
        advance<Build>(after, c.policy, tokens);
        int64 held = 0;
        for (const key_interval& i : held_positions(after)) held += i.last - i.first;
        require<Build>(held <= c.options.capacity, "the cache would hold ", held, " tokens, its capacity is ", c.options.capacity);
    }
}

template <class Build, class P, class E>
void check_call(const call<P, E>& c, verb what) {
    const shape& dims = c.cache->dims;
    const int64 tokens = tokens_in<P>(*c.tokens, what);
    require<Build>(tokens >= 0, "the call brings ", tokens, " tokens");
    check_inputs<Build, P>(*c.tokens, dims, what, tokens);
    if (what != verb::append) {
        check_extents<Build>("out", c.out, tokens, dims.heads, dims.value_dim);
        check_written<Build>("out", c.out);
        check_lse<Build>(c.lse, tokens, dims.heads);
        if constexpr (recurrent_policy<P>)
            require<Build>(c.lse.empty() || P::has_normaliser, "this policy has no normaliser, so there is no lse");
    }
    check_position<Build>(c, what, tokens);
    if (what != verb::read) check_capacity<Build>(*c.cache, tokens);
}

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

/// The workspace of a call: the one given, else the cache's own where it may be changed, else one for this call.
template <class P, class E>
SASH_INLINE workspace& workspace_of(const options& how, const call<P, E>& first, verb what, workspace& local) {
    if (how.workspace) return *how.workspace;
    return what == verb::read ? local : first.cache->scratch;
}

template <class Build, class P, class E>
void perform_softmax(const call<P, E>* calls, int64 count, verb what, const options& how, const runner& run) {
    workspace local(0, calls[0].cache->options.memory), list(0, calls[0].cache->options.memory);
    cpu::softmax_sequence<P> one;
    cpu::softmax_sequence<P>* sequences = &one;
    if (count > 1) sequences = reinterpret_cast<cpu::softmax_sequence<P>*>(list.grow(static_cast<std::size_t>(count) * sizeof one));
    for (int64 j = 0; j < count; ++j) ::new (static_cast<void*>(sequences + j)) cpu::softmax_sequence<P>(sequence_of<Build>(calls[j], what, how.finish));
    const int64 bytes = cpu::workspace_for<Build, E>(sequences, count, how.key_piece, run);
    std::byte* memory = workspace_of(how, calls[0], what, local).grow(static_cast<std::size_t>(bytes));
    if (what != verb::read)
        for (int64 j = 0; j < count; ++j)
            make_room<Build>(*sequences[j].store, calls[j].cache->policy, sequences[j].key.tokens, sequences[j].piece());
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
        if constexpr (takes_decay<P>) r.decay = in.decay;
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
        for (int64 pair = 0; pair < s.pairs; ++pair) turns[t * s.pairs + pair] = turn_by<Build>(c.cache->store.length + t, s.frequencies[pair]);
    r.turns = turns;
    r.pairs = s.pairs;
}

/// How the workspace of a recurrent call is divided.
struct recurrent_plan {
    cpu::recurrent_call* calls = nullptr;  // [count]
    std::byte* scratch = nullptr;          // [workers][scratch_bytes]
    int64 workers = 1, scratch_bytes = 0, used = 0;
};

/// Without memory it only counts.
template <class Build, class P, class E>
recurrent_plan plan_recurrent(cpu::arena memory, const call<P, E>* calls, int64 count, verb what, const runner& run) {
    recurrent_plan plan;
    plan.workers = larger(1, smaller(run.concurrency(), 64));
    plan.calls = memory.take<cpu::recurrent_call>(count);
    for (int64 j = 0; j < count; ++j) {
        cpu::recurrent_call r = recurrent_call_of<Build>(calls[j], what);
        fill_recurrent_turns<Build>(memory, calls[j], r);
        if (plan.calls) ::new (static_cast<void*>(plan.calls + j)) cpu::recurrent_call(r);
        const int64 floats = cpu::recurrent_scratch(calls[j].cache->policy, calls[j].cache->dims);
        plan.scratch_bytes = larger(plan.scratch_bytes, round_up(floats * static_cast<int64>(sizeof(float)), 64));
    }
    plan.scratch = memory.take<std::byte>(plan.workers * plan.scratch_bytes);
    plan.used = memory.used;
    return plan;
}

template <class Build, class P, class E>
void perform_recurrent(const call<P, E>* calls, int64 count, verb what, const options& how, const runner& run) {
    workspace local(0, calls[0].cache->options.memory);
    const int64 bytes = plan_recurrent<Build>({}, calls, count, what, run).used;
    std::byte* memory = workspace_of(how, calls[0], what, local).grow(static_cast<std::size_t>(bytes));
    for (int64 j = 0; j < count; ++j) ensure_states<Build>(calls[j].cache->store);
    const recurrent_plan plan = plan_recurrent<Build>({memory}, calls, count, what, run);
    int64 tasks = 0, work = 0;
    for (int64 j = 0; j < count; ++j) {
        const state_store& s = calls[j].cache->store;
        tasks += s.states;
        work += tokens_in<P>(*calls[j].tokens, what) * s.states * s.state_floats;
    }
    const int64 workers = work < 1 << 16 ? 1 : plan.workers;
    run_tasks<Build>(run, tasks, plan.scratch, plan.scratch_bytes, workers, [&](int64 i, std::byte* mine) {
        int64 j = 0;
        for (; i >= calls[j].cache->store.states; ++j) i -= calls[j].cache->store.states;
        cpu::recurrent<Build>(calls[j].cache->policy, calls[j].cache->dims, calls[j].cache->store, plan.calls[j], i, reinterpret_cast<float*>(mine));
    });
    if (what != verb::read)
        for (int64 j = 0; j < count; ++j) calls[j].cache->store.length += tokens_in<P>(*calls[j].tokens, what);
}

// -------------------------------------------------------------------------------------------------------------- the one way in

template <class Build, class P, class E>
void perform(const call<P, E>* calls, int64 count, verb what, const options& how) {
    if (count == 0) return;
    require<Build>(how.key_piece >= 0, "key_piece is ", how.key_piece, ", must not be negative");
    for (int64 j = 0; j < count; ++j) check_call<Build>(calls[j], what);
    const runner run = how.run ? how.run : default_runner<Build>();
    if constexpr (softmax_policy<P>)
        perform_softmax<Build>(calls, count, what, how, run);
    else
        perform_recurrent<Build>(calls, count, what, how, run);
}

/// Bytes of workspace that a call of `tokens` new tokens takes.
template <class Build, class P, class E>
std::size_t count_workspace(const cache_data<P, E>& c, int64 tokens, const options& how) {
    const runner run = how.run ? how.run : default_runner<Build>();
    tokens_of<P> in = query_alone<P>({});
    in.query.tokens = in.key.tokens = in.value.tokens = tokens;
    const call<P, E> imagined{&in, const_cast<cache_data<P, E>*>(&c), {}, {}, options::automatic};
    if constexpr (softmax_policy<P>) {
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
    const call<P, E> c{&tokens, &access::data(cache), out, how.lse, how.first_query};
    perform<Build, P, E>(&c, 1, what, how);
}

template <class Build, class Cache>
void perform_requests(request<Cache>* requests, int64 count, const options& how) {
    using P = typename Cache::policy_type;
    using E = typename Cache::element_type;
    require<Build>(how.lse.empty() && how.first_query == options::automatic, "a batch takes lse in each request, and no first_query");
    array<call<P, E>> calls;
    struct guard {
        array<call<P, E>>* held;
        ~guard() { free<Build>(*held, {}); }
    } freed{&calls};
    reserve<Build>(calls, {}, count);
    for (int64 i = 0; i < count; ++i) {
        request<Cache>& r = requests[i];
        require<Build>(r.cache != nullptr, "request ", i, " has no cache");
        for (int64 j = 0; j < i; ++j)
            require<Build>(requests[j].cache != r.cache, "requests ", j, " and ", i, " name the same cache: their order would matter");
        calls.data[calls.size++] = {&r.tokens, &access::data(*r.cache), r.out, r.lse, options::automatic};
    }
    perform<Build, P, E>(calls.data, count, verb::attend, how);
}

// ------------------------------------------------------------------------------------------------------------ without a cache

/// Where the queries of a call without a cache stand: they are the last tokens unless said otherwise.
template <class Build>
int64 stateless_first(const options& how, int64 queries, int64 keys, bool causal) {
    if (how.first_query != options::automatic) {
        require<Build>(how.first_query >= 0 && how.first_query < far_away, "first_query is ", how.first_query, ", must not be negative");
        return how.first_query;
    }
    require<Build>(queries <= keys || !causal, queries, " queries are to be the last of ", keys, " tokens: say .first_query");
    return larger(0, keys - queries);
}

/// Keys and values are packed into blocks of scratch, those some query sees, and attended as a cache's are.
template <class Build, class P>
void perform_stateless(const P& policy, const shape& dims, const tokens_of<P>& in, output out, const options& how, const score& scores) {
    validate<Build>(policy);
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

    const runner run = how.run ? how.run : default_runner<Build>();
    const int64 block_bytes = store.heads * store.ring_blocks * store.block_bytes;
    const int64 scratch_bytes = cpu::workspace_for<Build, float>(&s, 1, how.key_piece, run);
    workspace local;
    std::byte* memory = (how.workspace ? *how.workspace : local).grow(static_cast<std::size_t>(block_bytes + scratch_bytes));
    store.ring_data = memory;
    cpu::perform<Build, float>(&s, 1, how.key_piece, run, memory + block_bytes);
}

/// A recurrent policy without a cache: the states live for the call.
template <class Build, class P>
void perform_stateless_recurrent(const P& policy, const shape& dims, tokens_of<P> in, output out, const options& how, const score& scores) {
    kv_cache<P, float> cache(policy, dims, scores);
    const int64 before = stateless_first<Build>(how, in.query.tokens, in.key.tokens, true);
    require<Build>(before + in.query.tokens == in.key.tokens, "the queries of a recurrent policy are the last tokens: first_query is ", before,
                   ", must be ", in.key.tokens - in.query.tokens);
    tokens_of<P> prefix = in;
    prefix.key = in.key.tokens_from(0, before);
    prefix.value = in.value.tokens_from(0, before);
    in.key = in.key.tokens_from(before, in.query.tokens);
    in.value = in.value.tokens_from(before, in.query.tokens);
    if constexpr (takes_decay<P>) {
        prefix.decay = in.decay.tokens_from(0, before);
        in.decay = in.decay.tokens_from(before, in.query.tokens);
    }
    options each = how;
    each.first_query = options::automatic;
    perform_one<Build>(prefix, cache, {}, verb::append, each);
    perform_one<Build>(in, cache, out, verb::attend, each);
}

template <class Build, class P>
void perform_without_cache(const P& policy, const tokens_of<P>& in, output out, const options& how, const score& scores) {
    const int64 kv_heads = larger(in.key.heads, in.value.heads);
    shape dims{.heads = out.heads, .kv_heads = kv_heads, .key_dim = in.query.dim, .value_dim = in.value.dim, .query_heads = in.query.heads,
               .key_heads = in.key.heads, .value_heads = in.value.heads};
    if constexpr (takes_decay<P>) dims.gate_heads = in.decay.heads;
    dims = resolve<Build>(dims);
    check_extents<Build>("query", in.query, in.query.tokens, dims.query_heads, dims.key_dim);
    check_extents<Build>("key", in.key, in.key.tokens, dims.key_heads, dims.key_dim);
    check_extents<Build>("value", in.value, in.key.tokens, dims.value_heads, dims.value_dim);
    check_extents<Build>("out", out, in.query.tokens, dims.heads, dims.value_dim);
    check_written<Build>("out", out);
    check_lse<Build>(how.lse, in.query.tokens, dims.heads);
    require<Build>(how.key_piece >= 0, "key_piece is ", how.key_piece, ", must not be negative");
    if constexpr (softmax_policy<P>)
        perform_stateless<Build>(policy, dims, in, out, how, scores);
    else
        perform_stateless_recurrent<Build>(policy, dims, in, out, how, scores);
}

}  // namespace detail

// ------------------------------------------------------------------------------------------------------------------- the verb

/// Appends T new tokens and computes their T output rows: T = 1 is decoding, T = the prompt's length is prefill, anything
/// between is chunked prefill or verification of drafts. However the same tokens are cut into calls, the rows are the same.
///
///     query [T, query_heads, key_dim]   key [T, key_heads, key_dim]   value [T, value_heads, value_dim]
///     out   [T, heads, value_dim]       each float, float16 or bfloat16, with any strides
///
///     out[t, h] = Σ_j softmax_j(score(q[t, h], k[j])) v[j]     over the keys j that the policy shows to position length + t
///
/// What is attended is what is stored: key and value rounded to the cache's element. Scores and sums are fp32; against the same
/// formula in double the error stays below 1e-6 + 1e-5 · |out| for scores of moderate size. A row that sees no key is exactly 0.
/// A key that a row does not see has no influence on it, whatever its bits; a visible NaN propagates. T = 0 does nothing.
///
/// Cost: O(visible keys · heads · (key_dim + value_dim)). Allocates: storage as the cache grows, scratch until its largest call;
/// nothing in steady-state decoding. Errors: sash::error for a shape, stride, position or capacity that cannot be, naming the
/// value and the limit, and std::bad_alloc; both before anything is written.
template <class Policy, class Element>
SASH_INLINE void attend(const tokens_of<std::type_identity_t<Policy>>& tokens, kv_cache<Policy, Element>& cache, output out,
                        const options& how = {}) {
    detail::perform_one<build::here>(tokens, cache, out, detail::verb::attend, how);
}

/// The short form, for policies that need query, key and value alone.
template <class Policy, class Element>
SASH_INLINE void attend(input query, input key, input value, kv_cache<Policy, Element>& cache, output out, const options& how = {}) {
    detail::perform_one<build::here, kv_cache<Policy, Element>>({.query = query, .key = key, .value = value}, cache, out,
                                                                detail::verb::attend, how);
}

/// A batch: every sequence has its own cache and its own number of tokens. All or nothing: one request that cannot be leaves
/// every cache as it was. The same cache twice is refused. The rows are, bit for bit, those of one call for each.
/// `requests`: a contiguous range of request<Cache>.
template <std::ranges::contiguous_range R>
    requires requires(R& r) { std::ranges::data(r)->cache->length(); }
SASH_INLINE void attend(R&& requests, const options& how = {}) {
    detail::perform_requests<build::here>(std::ranges::data(requests), static_cast<int64>(std::ranges::size(requests)), how);
}

/// Appends tokens and computes no rows.
template <class Policy, class Element>
SASH_INLINE void append(const tokens_of<std::type_identity_t<Policy>>& tokens, kv_cache<Policy, Element>& cache, const options& how = {}) {
    detail::perform_one<build::here>(tokens, cache, {}, detail::verb::append, how);
}
template <class Policy, class Element>
SASH_INLINE void append(input key, input value, kv_cache<Policy, Element>& cache, const options& how = {}) {
    detail::perform_one<build::here, kv_cache<Policy, Element>>({.query = {}, .key = key, .value = value}, cache, {},
                                                                detail::verb::append, how);
}

/// Computes rows for queries that bring no keys: cross attention, a shared prefix. Stores nothing. The first query stands at
/// `how.first_query`, by default at the cache's length. Without `how.workspace` it allocates scratch, since the cache is const;
/// many threads may read one cache at a time, each with a workspace of its own.
template <class Policy, class Element>
SASH_INLINE void read(input query, const kv_cache<Policy, Element>& cache, output out, const options& how = {}) {
    auto& opened = const_cast<kv_cache<Policy, Element>&>(cache);  // verb::read writes none of it
    tokens_of<Policy> tokens = detail::query_alone<Policy>(query);
    detail::perform_one<build::here>(tokens, opened, out, detail::verb::read, how);
}

/// Attention without a cache: encoders, benchmarks, teaching, keys and values in memory of your own, with any strides.
///
///     query [T, query_heads, key_dim]   key [n, key_heads, key_dim]   value [n, value_heads, value_dim]   out [T, heads, value_dim]
///
/// Key j stands at position j; the queries are the last T of n tokens, or stand where `how.first_query` says. Keys and values
/// that some query sees are packed into scratch: `how.workspace`, or memory allocated for the call.
template <attention_policy Policy>
SASH_INLINE void attend(const Policy& policy, input query, input key, input value, output out, const options& how = {},
                        const score& scores = {}) {
    detail::perform_without_cache<build::here, Policy>(policy, {.query = query, .key = key, .value = value}, out, how, scores);
}
template <attention_policy Policy>
SASH_INLINE void attend(const Policy& policy, const tokens_of<std::type_identity_t<Policy>>& tokens, output out, const options& how = {},
                        const score& scores = {}) {
    detail::perform_without_cache<build::here, Policy>(policy, tokens, out, how, scores);
}

/// Scratch that a call of `tokens` tokens on this cache takes as it stands now, for a workspace made beforehand.
template <class Policy, class Element>
SASH_INLINE std::size_t workspace_bytes(const kv_cache<Policy, Element>& cache, int64 tokens, const options& how = {}) {
    return detail::count_workspace<build::here>(detail::access::data(cache), tokens, how);
}

}  // namespace sash
