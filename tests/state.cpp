// Recurrent states as memory: rolling back, forking, saving.
#include "support/catch.hpp"
#include "support/recurrent_layer.hpp"

#include <algorithm>

namespace {

using namespace recurrent;
using gated = sash::linear<sash::elu_plus_one, sash::per_head_and_token>;

sequence random_sequence(std::mt19937& random, int64 tokens) {
    sequence s({.heads = 4, .kv_heads = 2, .key_dim = 9, .value_dim = 21}, tokens);
    s.fill(random);
    return s;
}

template <class P>
void append_in_cuts(layer<P>& l, const sequence& s, int64 first, int64 last, std::mt19937& random) {
    for (const int64 n : random_cut(random, last - first, 11)) l.append(s, first, first + n), first += n;
}

}  // namespace

TEST_CASE("R25: rolling back is, to the bit, never having seen the tokens", "[state]") {
    const unsigned seed = GENERATE(range(200u, 230u));
    std::mt19937 random(seed);
    const int64 slack = 1 + random() % 40, tokens = 1 + random() % 90;
    const sequence s = random_sequence(random, tokens);
    layer<gated> l({}, s.dims, slack);
    append_in_cuts(l, s, 0, tokens, random);
    rows whole(s), again(s), unseen(s);
    layer<gated>({}, s.dims, slack).attend(s, 0, tokens, whole);
    for (int64 n = 0; n <= std::min(slack, tokens); ++n) {
        CAPTURE(seed, slack, tokens, n);
        REQUIRE(l.can_rollback(n));
        layer<gated> back(l), never({}, s.dims, slack);
        back.rollback(n);
        never.append(s, 0, tokens - n);
        CHECK(back.store().length == tokens - n);
        CHECK(same_bits(back.states(), never.states()));
        back.attend(s, tokens - n, tokens, again);
        never.attend(s, tokens - n, tokens, unseen);
        CHECK(same_bits(back.states(), l.states()));
        const std::size_t row = static_cast<std::size_t>(s.dims.heads * s.dims.value_dim),
                          from = static_cast<std::size_t>(tokens - n) * row;
        CHECK(std::memcmp(again.out.data() + from, whole.out.data() + from,
                          (whole.out.size() - from) * sizeof(float)) == 0);
        CHECK(std::memcmp(unseen.out.data() + from, whole.out.data() + from,
                          (whole.out.size() - from) * sizeof(float)) == 0);
    }
}

TEST_CASE("R12: what can be taken back does not depend on how tokens were cut", "[state]") {
    std::mt19937 random(231);
    const sequence s = random_sequence(random, 60);
    for (const int64 slack : {0, 1, 5, 16, 17}) {
        layer<gated> one({}, s.dims, slack), cut({}, s.dims, slack);
        one.append(s, 0, 60);
        append_in_cuts(cut, s, 0, 60, random);
        for (const layer<gated>* l : {&one, &cut}) {
            CAPTURE(slack);
            CHECK(l->can_rollback(0));
            CHECK(l->can_rollback(slack));
            CHECK(l->can_rollback(60));  // everything: empty states are always known
            CHECK_FALSE(l->can_rollback(slack + 1));
            CHECK_FALSE(l->can_rollback(61));
            CHECK_FALSE(l->can_rollback(-1));
        }
    }
}

TEST_CASE("R12: rolling back in steps reaches as far as in one, and new tokens bring new room", "[state]") {
    std::mt19937 random(232);
    const sequence s = random_sequence(random, 80);
    layer<gated> l({}, s.dims, 8);
    l.append(s, 0, 50);
    l.rollback(3);
    CHECK(l.can_rollback(5));
    CHECK_FALSE(l.can_rollback(6));
    l.rollback(5);
    CHECK(l.can_rollback(0));
    CHECK_FALSE(l.can_rollback(1));
    append_in_cuts(l, s, 42, 45, random);
    CHECK(l.can_rollback(3));
    CHECK_FALSE(l.can_rollback(4));
    l.rollback(2);
    append_in_cuts(l, s, 43, 80, random);
    CHECK(l.can_rollback(8));
    l.rollback(8);
    layer<gated> never({}, s.dims, 8);
    never.append(s, 0, 72);
    CHECK(same_bits(l.states(), never.states()));
}

TEST_CASE("R12: drafts accepted in part, over and over", "[state]") {
    std::mt19937 random(233);
    const sequence s = random_sequence(random, 200), drafts = random_sequence(random, 200);
    layer<gated> l({}, s.dims, 6), plain({}, s.dims);
    for (int64 at = 0; at + 6 <= 200;) {
        const int64 good = 1 + random() % 3,
                    bad = random() % 4;  // the first `good` are right, the rest is another text
        l.append(s, at, at + good);
        l.append(drafts, at + good, at + good + bad);
        REQUIRE(l.can_rollback(bad));
        l.rollback(bad);
        plain.append(s, at, at + good);
        at += good;
        REQUIRE(same_bits(l.states(), plain.states()));
    }
}

TEST_CASE("R13: a copy is independent, history and all; reset is new", "[state]") {
    std::mt19937 random(234);
    const sequence s = random_sequence(random, 40);
    layer<gated> l({}, s.dims, 5);
    l.append(s, 0, 30);
    layer<gated> fork(l);
    const floats at_fork = fork.states();
    l.append(s, 30, 40);
    CHECK(same_bits(fork.states(), at_fork));
    CHECK(fork.store().length == 30);
    fork.rollback(5);
    layer<gated> never({}, s.dims, 5);
    never.append(s, 0, 25);
    CHECK(same_bits(fork.states(), never.states()));

    sash::detail::reset<build>(l.store());
    layer<gated> fresh({}, s.dims, 5);
    CHECK(same_bits(l.states(), fresh.states()));
    CHECK(l.store().length == 0);
    l.append(s, 0, 25);
    CHECK(same_bits(l.states(), never.states()));
    CHECK(sash::detail::bytes<build>(l.store()) == sash::detail::bytes<build>(fresh.store()));
}

TEST_CASE("R14: what is saved comes back to the bit, history and all", "[state]") {
    std::mt19937 random(235);
    const sequence s = random_sequence(random, 70);
    for (const int64 slack : {0, 4, 30})
        for (const int64 length : {0, 3, 50}) {
            CAPTURE(slack, length);
            layer<gated> l({}, s.dims, slack), back({}, s.dims, slack);
            append_in_cuts(l, s, 0, length, random);
            back.append(s, 0, 33);  // something to be replaced
            const std::vector<std::byte> file = l.save();
            REQUIRE(back.load(file));
            CHECK((back.save() == file));
            for (layer<gated>* each : {&l, &back}) {
                each->append(s, length, length + 2);
                if (slack > 0 && length > 0) {
                    CHECK(each->can_rollback(std::min(slack, length + 2)));
                    each->rollback(std::min<int64>(slack, length + 1));
                }
            }
            CHECK(same_bits(l.states(), back.states()));
        }
}

TEST_CASE("R14: a file from other slack brings the states, not the history", "[state]") {
    std::mt19937 random(236);
    const sequence s = random_sequence(random, 50);
    for (const int64 from : {0, 3, 20})
        for (const int64 to : {0, 5}) {
            layer<gated> l({}, s.dims, from), back({}, s.dims, to);
            l.append(s, 0, 40);
            REQUIRE(back.load(l.save()));
            CHECK(same_bits(back.states(), l.states()));
            CHECK_FALSE(back.can_rollback(1));
            back.append(s, 40, 44);
            if (to > 0) {
                REQUIRE(back.can_rollback(4));
                back.rollback(3);
                l.append(s, 40, 41);
                CHECK(same_bits(back.states(), l.states()));
            }
        }
}

TEST_CASE("R14: bytes that cannot be a state are refused and change nothing", "[state]") {
    std::mt19937 random(237);
    const sequence s = random_sequence(random, 30);
    layer<gated> l({}, s.dims, 4);
    l.append(s, 0, 30);
    const std::vector<std::byte> file = l.save();
    layer<gated> target({}, s.dims, 4);
    target.append(s, 0, 7);
    const std::vector<std::byte> before = target.save();

    std::vector<std::byte> shorter(file.begin(), file.end() - 1), longer = file;
    longer.push_back(std::byte{0});
    CHECK_FALSE(target.load(shorter));
    CHECK_FALSE(target.load(longer));
    CHECK_FALSE(target.load({}));
    for (std::size_t member = 0; member < sizeof(sash::detail::saved_state) / 8; ++member)
        for (const std::int64_t wrong :
             {std::int64_t{-1}, std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()}) {
            std::vector<std::byte> damaged = file;
            std::memcpy(damaged.data() + 8 * member, &wrong, 8);
            CAPTURE(member, wrong);
            CHECK_FALSE(target.load(damaged));
        }
    layer<gated> other({}, {.heads = 4, .kv_heads = 2, .key_dim = 9, .value_dim = 40}, 4);
    CHECK_FALSE(other.load(file));
    CHECK((target.save() == before));
}

TEST_CASE("state: memory comes from the given source and goes back to it, a copy's too", "[state]") {
    struct ledger {
        int64 held = 0, calls = 0;
        static void* take(void* self, std::size_t bytes, std::size_t alignment) {
            static_cast<ledger*>(self)->held += static_cast<int64>(bytes);
            static_cast<ledger*>(self)->calls += 1;
            return std::aligned_alloc(alignment, bytes);
        }
        static void give(void* self, void* memory, std::size_t bytes, std::size_t) {
            static_cast<ledger*>(self)->held -= static_cast<int64>(bytes);
            std::free(memory);
        }
    } books;
    const sash::shape dims = resolved({.heads = 3, .head_dim = 30});
    sash::detail::state_store store, fork;
    sash::detail::create<build>(store, gated{}, dims,
                                sash::storage{.rollback_slack = 2, .memory = {ledger::take, ledger::give, &books}});
    CHECK(books.calls == 1);
    CHECK(books.held >= sash::detail::bytes<build>(store));
    sash::detail::copy<build>(fork, store);
    CHECK(books.calls == 2);
    sash::detail::destroy<build>(store);
    sash::detail::destroy<build>(fork);
    CHECK(books.held == 0);
    sash::detail::destroy<build>(fork);  // an empty store has nothing to give back
    CHECK(books.held == 0);
}
