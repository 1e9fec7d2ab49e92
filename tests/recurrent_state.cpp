// Recurrent states from outside: looked at, set, carried from one cache to another; states kept in bfloat16.
#include "support/catch.hpp"
#include "support/linear_text.hpp"

#include <type_traits>

namespace {

using namespace linear_text;
using namespace sash;

// What a learned or random map looks at.
struct random_weights {
    floats numbers;
    random_weights(std::mt19937& random, int64 count) : numbers(at(count)) {
        std::normal_distribution<float> normal;
        for (float& e : numbers) e = normal(random);
    }
};

// The numbers of a view, in order, as floats.
floats numbers_of(const input& x) {
    floats all;
    for (int64 t = 0; t < x.tokens; ++t)
        for (int64 h = 0; h < x.heads; ++h)
            for (int64 i = 0; i < x.dim; ++i) all.push_back(detail::number_at(x, t, h, i));
    return all;
}

// States in memory of their own, as a program would keep them.
struct kept_states {
    floats matrix, normaliser, memory;
    recurrent_state extents;

    explicit kept_states(const recurrent_state& s)
        : matrix(numbers_of(s.matrix)),
          normaliser(numbers_of(s.normaliser)),
          memory(numbers_of(s.memory)),
          extents(s) {}
    static input packed(const floats& x, const input& as) {
        return as.empty() ? input() : input(x.data(), as.tokens, as.heads, as.dim);
    }
    recurrent_state view() const {
        return {packed(matrix, extents.matrix), packed(normaliser, extents.normaliser), packed(memory, extents.memory),
                extents.length};
    }
};

// Calls f(policy) for policies with every kind of state.
template <class F>
void for_each_policy(const text& x, const floats& rows, F&& f) {
    f(linear<>{});
    f(systems::gla{});
    f(systems::gated_deltanet{});
    f(systems::rwkv6{.update = {x.u}});
    f(systems::rwkv7{});
    f(systems::performer{{.features = 7, .weights = rows}});
    f(systems::cosformer{.map = {.most_positions = 64}});
    f(linear<favor, per_head_and_token>{{.features = 7, .weights = rows}});
}

template <class F>
std::string refusal(F&& f) {
    try {
        f();
    } catch (const error& e) { return e.what(); }
    return "";
}
bool names(const std::string& sentence, std::initializer_list<const char*> parts) {
    return std::all_of(parts.begin(), parts.end(),
                       [&](const char* p) { return sentence.find(p) != std::string::npos; });
}

const shape grouped{.heads = 6, .kv_heads = 2, .key_dim = 9, .value_dim = 21};
const shape columns{.heads = 6, .kv_heads = 2, .key_dim = 9, .value_dim = 1};
const shape grouped_values{
    .heads = 4, .head_dim = 16, .query_heads = 2, .key_heads = 2, .value_heads = 4, .gate_heads = 4};

}  // namespace

TEST_CASE("R13: states carried into another cache go on there to the bit") {
    std::mt19937 random(701);
    for (const shape& dims : {grouped, grouped_values, columns}) {
        const text x(random, dims, 40);
        const random_weights rows(random, x.features * 7);
        for_each_policy(x, rows.numbers, [&]<class P>(const P& policy) {
            floats out = unwritten(x), other = out;
            kv_cache<P> cache(policy, x.dims), second(policy, x.dims), slack(policy, x.dims, {}, {.rollback_slack = 9});
            feed(cache, x, 0, 23, out);
            const kept_states kept(cache.state());
            CHECK(kept.extents.length == 23);
            CHECK(kept.extents.matrix.tokens == policy.states(x.dims));
            CHECK(kept.extents.matrix.heads == policy.features(x.dims.key_dim));
            CHECK(kept.extents.matrix.dim == x.dims.value_dim);
            CHECK(kept.extents.normaliser.empty() == !P::has_normaliser);
            CHECK(kept.extents.memory.dim == (std::is_same_v<decltype(P::map), favor> ? 2 : 0));
            second.state(cache.state());
            slack.state(kept.view());
            feed(cache, x, 23, 17, out);
            for (kv_cache<P>* each : {&second, &slack}) {
                CHECK(each->length() == 23);
                feed(*each, x, 23, {1, 9, 7}, other);
                const floats there(other.begin() + std::ptrdiff_t(23 * x.row()), other.end()),
                    here(out.begin() + std::ptrdiff_t(23 * x.row()), out.end());
                if (each == &slack && detail::can_wait<P>) {  // with slack no token waits: another order of sums
                    CHECK(far_apart(there, doubles(here.begin(), here.end()), 1e-5) == "");
                    continue;
                }
                CHECK(same_bits(there, here));
                CHECK((numbers_of(each->state().matrix) == numbers_of(cache.state().matrix)));
            }
            CHECK((second.save() == [&] {
                kv_cache<P> same(policy, x.dims);
                same.state(kept.view());
                append(x.slice<P>(23, 17), same);
                CHECK(same.state().length == 40);  // as in `second`, nothing waits from here on
                return same.save();
            }()));
        });
    }
}

TEST_CASE("R13: states may come in any type, with any strides, and be a cache's own") {
    std::mt19937 random(702);
    using P = linear<elu_plus_one, per_head_and_token>;
    const text x(random, grouped, 12);
    for (const shape& dims : {grouped, columns}) {
        const text y(random, dims, 12);
        kv_cache<P> cache({}, dims), other({}, dims);
        append(y.slice<P>(0, 12), cache);
        const kept_states kept(cache.state());
        const int64 states = kept.extents.matrix.tokens, features = 9, dim = y.dims.value_dim;

        floats turned(kept.matrix.size());  // [dim, features, states]
        std::vector<bfloat16> narrow;
        floats rounded;
        for (int64 s = 0; s < states; ++s)
            for (int64 f = 0; f < features; ++f)
                for (int64 d = 0; d < dim; ++d) {
                    const float e = kept.matrix[at((s * features + f) * dim + d)];
                    turned[at((d * features + f) * states + s)] = e;
                    narrow.push_back(bfloat16(e));
                    rounded.push_back(float(narrow.back()));
                }
        recurrent_state view = kept.view();
        view.matrix = {turned, states, features, dim, 1, states, features * states};
        other.state(view);
        CHECK((numbers_of(other.state().matrix) == kept.matrix));
        view.matrix = {narrow, states, features, dim};
        other.state(view);
        CHECK((numbers_of(other.state().matrix) == rounded));

        cache.state(cache.state());
        CHECK((numbers_of(cache.state().matrix) == kept.matrix));
        CHECK((numbers_of(cache.state().normaliser) == kept.normaliser));
    }
}

TEST_CASE("R12: there is no way back to before states that were set, but all the slack behind them") {
    std::mt19937 random(703);
    const text x(random, grouped, 40);
    const random_weights rows(random, x.features * 7);
    for_each_policy(x, rows.numbers, [&]<class P>(const P& policy) {
        for (const int64 length : {0, 5})
            for (const bool through_file : {false, true}) {
                kv_cache<P> from(policy, x.dims), cache(policy, x.dims, {}, {.rollback_slack = 9});
                append(x.slice<P>(0, 20), from);
                recurrent_state begin = from.state();
                begin.length = length;
                cache.state(begin);
                CAPTURE(length, through_file);
                CHECK(cache.can_rollback(0));
                CHECK(cache.can_rollback(length) == (length == 0));
                append(x.slice<P>(20, 3), cache);
                append(x.slice<P>(23, 4), cache);
                if (through_file) {
                    kv_cache<P> loaded = cache.empty_copy();
                    loaded.load(cache.save());
                    cache = loaded;
                }
                CHECK(cache.length() == length + 7);
                CHECK(cache.can_rollback(7));
                CHECK_FALSE(cache.can_rollback(8));
                CHECK(cache.can_rollback(length + 7) == (length == 0));
                kv_cache<P> whole = cache;
                whole.rollback(7);
                CHECK((numbers_of(whole.state().matrix) == numbers_of(from.state().matrix)));
                CHECK(whole.length() == length);
                cache.rollback(4);
                kv_cache<P> never = cache.empty_copy();
                never.state(begin);
                append(x.slice<P>(20, 3), never);
                CHECK((numbers_of(cache.state().matrix) == numbers_of(never.state().matrix)));
                append(x.slice<P>(23, 17), cache);
                CHECK_FALSE(cache.can_rollback(length + 20));

                kv_cache<P> none(policy, x.dims);  // without slack there is no way back at all
                none.state(begin);
                append(x.slice<P>(20, 3), none);
                CHECK_FALSE(none.can_rollback(3));
                CHECK_FALSE(none.can_rollback(length + 3));
                none.reset();
                CHECK(none.length() == 0);
                append(x.slice<P>(20, 3), none);
                CHECK(none.can_rollback(3));
            }
    });
}

TEST_CASE("R4: states that do not fit are refused, by name, and nothing changes") {
    std::mt19937 random(704);
    const text x(random, grouped, 12);
    using P = systems::cosformer;
    kv_cache<P> cache({.map = {.most_positions = 30}}, x.dims, {}, {.rollback_slack = 3});
    append(x.slice<P>(0, 12), cache);
    const auto before = cache.save();
    const kept_states kept(cache.state());
    const auto refused = [&](auto&& change, std::initializer_list<const char*> parts) {
        recurrent_state wrong = kept.view();
        change(wrong);
        const std::string sentence = refusal([&] { cache.state(wrong); });
        CAPTURE(sentence);
        CHECK(names(sentence, parts));
        CHECK((cache.save() == before));
    };
    refused([](auto& s) { s.matrix.tokens = 3; }, {"matrix", "[3, 18, 21]", "[2, 18, 21]"});
    refused([](auto& s) { s.matrix.heads = 9; }, {"matrix", "[2, 9, 21]", "[2, 18, 21]"});
    refused([](auto& s) { s.matrix.dim = 20; }, {"matrix", "[2, 18, 20]", "[2, 18, 21]"});
    refused([](auto& s) { s.matrix.data = nullptr; }, {"matrix", "no memory"});
    refused([](auto& s) { s.matrix.data = static_cast<const std::byte*>(s.matrix.data) + 1; }, {"matrix", "address"});
    refused([](auto& s) { s.normaliser = {}; }, {"normaliser", "[0, 0, 0]", "[2, 1, 18]"});
    refused([](auto& s) { s.memory = s.normaliser; }, {"memory", "[2, 1, 18]", "[0, 0, 0]"});
    refused([](auto& s) { s.length = -1; }, {"length is -1"});
    refused([](auto& s) { s.length = 31; }, {"length is 31", "30"});
    recurrent_state late = kept.view();
    late.length = 30;
    cache.state(late);
    CHECK(names(refusal([&] { append(x.slice<P>(0, 1), cache); }), {"30"}));

    kv_cache<systems::gla> plain({}, x.dims);
    recurrent_state many{.matrix = plain.state().matrix, .normaliser = kept.view().normaliser};
    CHECK(names(refusal([&] { plain.state(many); }), {"normaliser", "[0, 0, 0]"}));
}

TEST_CASE("R13: a cache that was moved from shows states of zeros, and takes others") {
    std::mt19937 random(705);
    for (const shape& dims : {grouped, columns}) {
        const text x(random, dims, 12);
        using P = linear<elu_plus_one, per_head_and_token>;
        kv_cache<P> cache({}, x.dims);
        append(x.slice<P>(0, 12), cache);
        const kept_states kept(cache.state());
        kv_cache<P> moved = std::move(cache);
        CHECK((numbers_of(cache.state().matrix) == floats(kept.matrix.size())));
        CHECK((numbers_of(cache.state().normaliser) == floats(kept.normaliser.size())));
        CHECK(cache.state().length == 0);
        cache.state(moved.state());
        CHECK((numbers_of(cache.state().matrix) == kept.matrix));
        CHECK(cache.length() == 12);
    }
}

TEST_CASE("R22: the states of a hybrid are those of its linear part, and are set under its window") {
    std::mt19937 random(706);
    const text x(random, {.heads = 4, .kv_heads = 2, .head_dim = 8}, 40);
    const sliding_window window{.window = 8, .sinks = 2};
    SECTION("the window holds what the states do not") {
        using P = hybrid<sliding_window, linear<elu_plus_one>, log_sum_exp>;
        kv_cache<P> cache({window, {}, {}}, x.dims), other = cache.empty_copy(), begun = cache.empty_copy();
        kv_cache<linear<>> states({}, x.dims);
        floats out = unwritten(x), again = out;
        attend(x.slice<P>(0, 25), cache, x.rows(out, 0, 25));
        append(x.slice<linear<>>(2, 15), states);  // 0 and 1 are sinks, 17 to 24 in the window
        CHECK(cache.state().length == 15);
        CHECK((numbers_of(cache.state().matrix) == numbers_of(states.state().matrix)));

        // Set, the states are read from the first token on, also while no token has left the window.
        begun.state({states.state().matrix, states.state().normaliser, {}, 0});
        attend(x.slice<P>(0, 3), begun, x.rows(again, 0, 3));
        for (int64 t = 0; t < 3; ++t)
            for (int64 h = 0; h < 4; ++h) {
                const int64 kv = h / 2;
                double mass = 0;
                doubles row(8);
                const auto of = [&](const floats& numbers, int64 heads, int64 token, int64 head, int64 c) {
                    return double(numbers[at((token * heads + head) * 8 + c)]);
                };
                for (int64 j = 0; j <= t; ++j) {
                    double dot = 0;
                    for (int64 c = 0; c < 8; ++c) dot += of(x.q, 4, t, h, c) * of(x.k, 2, j, kv, c);
                    const double weight = std::exp(dot / std::sqrt(8.0));
                    mass += weight;
                    for (int64 d = 0; d < 8; ++d) row[at(d)] += weight * of(x.v, 2, j, kv, d);
                }
                for (int64 c = 0; c < 8; ++c) {
                    const double q = of(x.q, 4, t, h, c), phi = q > 0 ? q + 1 : std::exp(q);
                    mass += phi * detail::number_at(states.state().normaliser, kv, 0, c);
                    for (int64 d = 0; d < 8; ++d)
                        row[at(d)] += phi * detail::number_at(states.state().matrix, kv, c, d);
                }
                doubles expected;
                for (const double e : row) expected.push_back(e / mass);
                const auto from = again.begin() + std::ptrdiff_t((t * 4 + h) * 8);
                CHECK(far_apart(floats(from, from + 8), expected, 1e-5) == "");
            }
        CHECK_FALSE(begun.can_rollback(20));

        recurrent_state wrong = states.state();
        wrong.length = 14;
        const auto before = cache.save();
        CHECK(names(refusal([&] { cache.state(wrong); }), {"length is 14", "15"}));
        CHECK((cache.save() == before));
        cache.state(states.state());
        attend(x.slice<P>(25, 15), cache, x.rows(out, 25, 15));
        attend(x.slice<P>(0, 40), other, x.rows(again, 0, 40));
        CHECK(same_bits(out, again, 25 * x.row()));
    }
    SECTION("the states hold every token") {
        using P = hybrid<sliding_window, systems::liger_linear, convex>;
        const auto tokens = [&x](int64 first, int64 n) {
            tokens_of<P> in = detail::query_alone<P>(x.view(x.q, x.dims.query_heads, 8, first, n));
            in.key = x.view(x.k, x.dims.key_heads, 8, first, n);
            in.value = x.view(x.v, x.dims.value_heads, 8, first, n);
            in.decay = x.view(x.channel_g, x.dims.gate_heads, 8, first, n);
            return in;
        };
        kv_cache<P> cache({window, {}, {}}, x.dims), other = cache.empty_copy();
        floats out = unwritten(x), again = out;
        append(tokens(0, 25), cache);
        append(tokens(0, 25), other);
        CHECK(cache.state().length == 25);
        const kept_states kept(cache.state());
        append(tokens(25, 10), cache);
        CHECK_FALSE((numbers_of(cache.state().matrix) == kept.matrix));
        recurrent_state zero = other.state();
        const floats nothing(kept.matrix.size());
        zero.matrix = kept_states::packed(nothing, zero.matrix);
        other.state(zero);
        CHECK((numbers_of(other.state().matrix) == nothing));
        other.state(kept.view());
        attend(tokens(25, 15), other, x.rows(out, 25, 15));
        kv_cache<P> whole = cache.empty_copy();
        attend(tokens(0, 40), whole, x.rows(again, 0, 40));
        CHECK(same_bits(out, again, 25 * x.row()));
    }
}

TEST_CASE("R14: a file of states with other slack brings the states, not the history") {
    std::mt19937 random(707);
    const text x(random, grouped, 30);
    using P = systems::gla;
    for (const int64 from : {0, 3, 20})
        for (const int64 to : {0, 5}) {
            if (from == to) continue;
            kv_cache<P> cache({}, x.dims, {}, {.rollback_slack = from}), other({}, x.dims, {}, {.rollback_slack = to});
            append(x.slice<P>(0, 20), cache);
            other.load(cache.save());
            CAPTURE(from, to);
            CHECK(other.length() == 20);
            CHECK_FALSE(other.can_rollback(1));
            CHECK(other.can_rollback(20));
            append(x.slice<P>(20, 4), other);
            CHECK(other.can_rollback(4) == (to > 0));
            append(x.slice<P>(20, 4), cache);
            CHECK((numbers_of(other.state().matrix) == numbers_of(cache.state().matrix)));
        }
}

// ------------------------------------------------------------------------------------------------ states kept in bfloat16

TEST_CASE("R24: what is kept in bfloat16 is S, rounded once a call; z and a map's memory stay as they are") {
    std::mt19937 random(711);
    using P = linear<favor, per_head_and_token>;
    for (const shape& dims : {grouped, columns}) {
        const text x(random, dims, 20);
        const random_weights rows(random, x.features * 7);
        const P policy{{.features = 7, .weights = rows.numbers}};
        kv_cache<P> exact(policy, x.dims), narrow(policy, x.dims, {}, {.state = scalar::bf16});
        append(x.slice<P>(0, 20), exact);
        append(x.slice<P>(0, 20), narrow);
        CHECK(narrow.state().matrix.type == scalar::bf16);
        CHECK(narrow.state().normaliser.type == scalar::f32);
        floats rounded = numbers_of(exact.state().matrix);
        for (float& e : rounded) e = float(bfloat16(e));
        CHECK((numbers_of(narrow.state().matrix) == rounded));
        CHECK((numbers_of(narrow.state().normaliser) == numbers_of(exact.state().normaliser)));
        CHECK((numbers_of(narrow.state().memory) == numbers_of(exact.state().memory)));
        // A read changes nothing, not even by rounding again.
        const auto before = narrow.save();
        floats row(x.row());
        read(x.view(x.q, x.dims.query_heads, x.features, 0, 1), narrow,
             {row.data(), 1, x.dims.heads, x.dims.value_dim});
        CHECK((narrow.save() == before));
    }
}

TEST_CASE("R13: narrow states are forked, saved, moved and set like others, in half the bytes") {
    std::mt19937 random(712);
    using P = systems::gla;
    for (const shape& dims : {shape{.heads = 4, .kv_heads = 2, .key_dim = 32, .value_dim = 48}, grouped, columns}) {
        const text x(random, dims, 30);
        kv_cache<P> cache({}, x.dims, {}, {.state = scalar::bf16}), wide({}, x.dims);
        if (x.features == 32) {
            CHECK(cache.state().matrix.token_stride == 32 * 48);
            CHECK(wide.bytes() - cache.bytes() == 2 * 32 * 48 * 2);
            CHECK(wide.saved_bytes() - cache.saved_bytes() == 2 * 32 * 48 * 2);
        }
        floats out = unwritten(x), other = out;
        feed(cache, x, 0, {3, 1, 6}, out);
        kv_cache<P> fork = cache, loaded = cache.empty_copy(), set = cache.empty_copy();
        loaded.load(cache.save());
        set.state(cache.state());
        kv_cache<P> moved = std::move(fork);
        CHECK((numbers_of(fork.state().matrix) == floats(numbers_of(cache.state().matrix).size())));
        fork = moved;
        feed(cache, x, 10, {1, 7, 12}, out);
        for (kv_cache<P>* each : {&fork, &loaded, &set, &moved}) {
            feed(*each, x, 10, {1, 7, 12}, other);
            CHECK(std::memcmp(other.data() + 10 * x.row(), out.data() + 10 * x.row(), 20 * x.row() * sizeof(float)) ==
                  0);
        }
        wide.state(cache.state());
        CHECK((numbers_of(wide.state().matrix) == numbers_of(cache.state().matrix)));
        const auto before = wide.save();
        CHECK(names(refusal([&] { wide.load(cache.save()); }), {"another policy"}));
        CHECK((wide.save() == before));
        CHECK_FALSE(cache.can_rollback(1));
        CHECK(cache.can_rollback(cache.length()));
        cache.reset();
        feed(cache, x, 0, {3, 1, 6}, other);
        CHECK(std::memcmp(other.data(), out.data(), 10 * x.row() * sizeof(float)) == 0);
    }
}

TEST_CASE("R34: narrow states: no bit depends on threads or on the others in a batch") {
    std::mt19937 random(713);
    using P = systems::gla;
    const text x(random, {.heads = 8, .kv_heads = 8, .key_dim = 32, .value_dim = 48}, 200);
    std::vector<kv_cache<P>> caches;
    std::vector<request<kv_cache<P>>> batch;
    std::vector<floats> out(5, unwritten(x));
    for (int i = 0; i < 5; ++i) caches.emplace_back(P{}, x.dims, score{}, storage{.state = scalar::bf16});
    for (std::size_t i = 0; i < 5; ++i) {
        const int64 n = std::int64_t(i) * 37;
        batch.push_back({.tokens = x.slice<P>(0, n), .cache = &caches[i], .out = x.rows(out[i], 0, n), .lse = {}});
    }
    attend(batch, {.run = serial{}});
    for (std::size_t i = 0; i < 5; ++i) {
        kv_cache<P> alone({}, x.dims, {}, {.state = scalar::bf16});
        floats rows = unwritten(x);
        feed(alone, x, 0, std::int64_t(i) * 37, rows);
        CHECK((alone.save() == caches[i].save()));
        CHECK(same_bits(rows, out[i]));
    }
}

TEST_CASE("R4: narrow states are refused where they would not do") {
    const shape dims{.heads = 2, .head_dim = 8};
    const auto of = [&](const auto& policy, const storage& how) {
        using P = std::remove_cvref_t<decltype(policy)>;
        return refusal([&] { kv_cache<P> cache(policy, dims, {}, how); });
    };
    CHECK(names(of(linear<>{}, {.state = scalar::bf16}), {"storage.state is bf16", "no decay"}));
    CHECK(names(of(systems::deltanet{}, {.state = scalar::bf16}), {"no decay"}));
    const floats rows(8 * 5, .1f);
    CHECK(names(of(linear<favor>{{.features = 5, .weights = rows}}, {.state = scalar::bf16}), {"no decay"}));
    CHECK(
        names(of(hybrid<sliding_window, linear<elu_plus_one>, log_sum_exp>{}, {.state = scalar::bf16}), {"no decay"}));
    CHECK(names(of(full{}, {.state = scalar::bf16}), {"keeps no state"}));
    CHECK(names(of(systems::gla{}, {.state = scalar::f16}), {"scalar::f32 or scalar::bf16"}));
    CHECK(names(of(systems::gla{}, {.state = scalar::i8}), {"scalar::f32 or scalar::bf16"}));
    CHECK(names(of(systems::gla{}, {.rollback_slack = 4, .state = scalar::bf16}), {"rollback_slack is 4", "0"}));
    CHECK(of(systems::gla{}, {.state = scalar::bf16}) == "");
    CHECK(of(hybrid<sliding_window, systems::liger_linear, convex>{}, {.state = scalar::bf16}) == "");
    CHECK(of(full{}, {.state = scalar::f32}) == "");
}
