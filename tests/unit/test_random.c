#include "random.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

// Known answers of Random123's kat_vectors, "philox4x32 10".
static const struct {
    uint32_t counter[4];
    uint32_t key[2];
    uint32_t word[4];
} KNOWN[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

static uint64_t join(const uint32_t *words) {
    return (uint64_t)words[1] << 32 | words[0];
}

static void test_philox(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof KNOWN / sizeof KNOWN[0]; k++) {
        struct random_key key = {
            .seed = join(KNOWN[k].key),
            .purpose = (enum random_purpose)KNOWN[k].counter[2],
            .id = KNOWN[k].counter[3],
        };
        struct random_block block = random_philox(key, join(KNOWN[k].counter));
        assert_memory_equal(block.word, KNOWN[k].word, sizeof block.word);
    }
}

static void test_words(void **state) {
    (void)state;
    struct random_key key = {
        .seed = 7,
        .purpose = RANDOM_DROPOUT,
        .id = 3,
    };
    for (uint64_t i = 0; i < 64; i++) {
        uint64_t index = i + (UINT64_C(1) << 40);
        uint32_t word = random_word(key, index);
        assert_int_equal(word, random_philox(key, index / 4).word[index % 4]);
        assert_true(random_uniform(key, index) == (float)(word >> 8) / 16777216.0f);
    }
}

// Every part of the key and of the index changes the numbers.
static void test_streams_differ(void **state) {
    (void)state;
    const struct random_key keys[] = {
        {1, RANDOM_INIT, 0},  {2, RANDOM_INIT, 0}, {1 + (UINT64_C(1) << 32), RANDOM_INIT, 0},
        {1, RANDOM_ORDER, 0}, {1, RANDOM_INIT, 1},
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        assert_int_not_equal(random_word(keys[i], 0), random_word(keys[i], UINT64_C(1) << 34));
        for (size_t j = 0; j < i; j++) {
            assert_int_not_equal(random_word(keys[i], 0), random_word(keys[j], 0));
        }
    }
}

static void test_uniform(void **state) {
    (void)state;
    enum { COUNT = 100000, BINS = 10 };
    struct random_key key = {
        .seed = 1,
    };
    int bins[BINS] = {0};
    double sum = 0;
    for (uint64_t i = 0; i < COUNT; i++) {
        float u = random_uniform(key, i);
        assert_true(u >= 0 && u < 1);
        sum += (double)u;
        bins[(int)(u * BINS)]++;
    }
    assert_true(sum / COUNT > 0.495 && sum / COUNT < 0.505); // 5 standard deviations
    for (int b = 0; b < BINS; b++) {
        assert_in_range(bins[b], COUNT / BINS - 500, COUNT / BINS + 500);
    }
}

static void test_permutation(void **state) {
    (void)state;
    enum { COUNT = 1009 };
    static uint32_t order[COUNT], again[COUNT], other[COUNT];
    static int seen[COUNT];
    struct random_key key = {
        .seed = 1,
        .purpose = RANDOM_ORDER,
        .id = 0,
    };
    random_permutation(key, order, COUNT);
    random_permutation(key, again, COUNT);
    key.id = 1;
    random_permutation(key, other, COUNT);
    assert_memory_equal(order, again, sizeof order);
    assert_memory_not_equal(order, other, sizeof order);
    for (size_t i = 0; i < COUNT; i++) {
        assert_true(order[i] < COUNT);
        assert_int_equal(seen[order[i]]++, 0);
    }
}

// All 24 orders of four come about equally often.
static void test_permutation_is_fair(void **state) {
    (void)state;
    enum { TRIALS = 24000 };
    int seen[256] = {0};
    int orders = 0;
    for (uint32_t id = 0; id < TRIALS; id++) {
        uint32_t order[4];
        struct random_key key = {
            .seed = 5,
            .purpose = RANDOM_ORDER,
            .id = id,
        };
        random_permutation(key, order, 4);
        seen[order[0] << 6 | order[1] << 4 | order[2] << 2 | order[3]]++;
    }
    for (int k = 0; k < 256; k++) {
        orders += seen[k] > 0;
        assert_true(seen[k] == 0 || (seen[k] > 840 && seen[k] < 1160));
    }
    assert_int_equal(orders, 24);
}

static void test_small_permutations(void **state) {
    (void)state;
    uint32_t order[2] = {77, 78};
    struct random_key key = {0};
    random_permutation(key, order, 0);
    assert_int_equal(order[0], 77);
    random_permutation(key, order, 1);
    assert_int_equal(order[0], 0);
    assert_int_equal(order[1], 78);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox),
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_streams_differ),
        cmocka_unit_test(test_uniform),
        cmocka_unit_test(test_permutation),
        cmocka_unit_test(test_permutation_is_fair),
        cmocka_unit_test(test_small_permutations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
