// Dropout: the mask is that of random_word() at each element's place in the whole.
#include "ops.h"
#include "tensors.h"

static const struct random_key KEY = {
    .seed = 0xfedcba9876543210ULL,
    .purpose = RANDOM_DROPOUT,
    .id = 3,
};

static bool dropped(uint64_t index, float p) {
    return random_word(KEY, index) < p * 4294967296.0;
}

// y of the part at `place`, from x = test_uniform(), compared with the definition.
static void check_part(size_t rows, size_t cols, struct place place, float p, bool in_place) {
    void *kept = NULL;
    for (int threads = 1; threads <= 3; threads++) {
        device_init(threads, 1);
        uint64_t random = 7;
        struct tensor x = test_uniform(rows, cols, 1.0, &random);
        struct tensor y = in_place ? x : test_tensor(rows, cols, DTYPE_F32);
        float *before = test_host(x);
        ops_dropout(y, x, p, KEY, place);
        float *got = test_host(y);
        for (size_t i = 0; i < rows * cols; i++) {
            size_t r = place.first_row + i / cols, c = place.first_col + i % cols;
            bool zero = dropped((uint64_t)r * place.whole_cols + c, p);
            double want = zero ? 0.0 : before[i] / (1.0 - (double)p);
            if (fabs(got[i] - want) > 2e-7 * fabs(want)) {
                fail_msg("(%zu, %zu): %.9g, expected %.9g", r, c, got[i], want);
            }
        }
        free(before);
        free(got);
        test_same_bits("dropout", y, &kept);
        test_free(&x);
        if (!in_place) {
            test_free(&y);
        }
    }
    free(kept);
}

static const struct {
    size_t rows, cols;
    struct place place;
} PARTS[] = {
    {5, 64, {0, 0, 5, 64}},      {3, 7, {0, 0, 3, 7}},
    {40, 1, {3, 0, 50, 1}},      {9, 3, {2, 5, 30, 11}},
    {4, 1000, {1, 37, 9, 2011}}, {2, 9216, {63, 0, 128, 9216}},
    {1, 255, {0, 1, 1, 256}},    {0, 5, {0, 0, 9, 5}},
    {3, 0, {0, 0, 9, 5}},        {3, 130, {4294967295, 3, 4294967299, 777}}, // elements beyond 2^32
};

static void test_mask_by_place(void **state) {
    (void)state;
    const float rates[] = {0.25f, 0.5f, 0.1f, 0.9999f, 1e-12f, 1.0f};
    for (size_t i = 0; i < sizeof PARTS / sizeof PARTS[0]; i++) {
        for (size_t p = 0; p < sizeof rates / sizeof rates[0]; p++) {
            check_part(PARTS[i].rows, PARTS[i].cols, PARTS[i].place, rates[p], i % 2 == 0);
            check_part(PARTS[i].rows, PARTS[i].cols, PARTS[i].place, rates[p], i % 2 == 1);
        }
    }
}

// The first word of the stream that ends in these 8 bits.
static uint32_t word_ending_in(uint32_t bits) {
    uint64_t i = 0;
    while ((random_word(KEY, i) & 0xff) != bits) {
        i++;
    }
    return random_word(KEY, i);
}

// With p = k / 2^32 exactly, the words below k are dropped: a word that is k is not, one that is
// k - 1 is. p is a float, so k has no more than 24 bits before its zeros.
static void test_edge_of_rate(void **state) {
    (void)state;
    enum { COUNT = 4096 };
    const uint32_t limits[] = {word_ending_in(0), word_ending_in(0xff) + 1};
    struct tensor x = test_tensor(1, COUNT, DTYPE_F32);
    struct tensor y = test_tensor(1, COUNT, DTYPE_F32);
    ops_fill(x, 1.0f);
    for (int k = 0; k < 2; k++) {
        float p = (float)(limits[k] / 4294967296.0);
        ops_dropout(y, x, p, KEY, (struct place){0, 0, 1, COUNT});
        float *got = test_host(y);
        for (size_t i = 0; i < COUNT; i++) {
            assert_int_equal(got[i] == 0.0f, random_word(KEY, i) < limits[k]);
        }
        free(got);
    }
    test_free(&x);
    test_free(&y);
}

static void test_rate(void **state) {
    (void)state;
    enum { ROWS = 64, COLS = 9216 };
    for (int i = 0; i < 2; i++) {
        float p = i ? 0.5f : 0.25f;
        struct tensor x = test_tensor(ROWS, COLS, DTYPE_F32);
        ops_fill(x, 1.0f);
        ops_dropout(x, x, p, KEY, (struct place){0, 0, ROWS, COLS});
        float *got = test_host(x);
        double zeros = 0, sum = 0;
        for (size_t e = 0; e < ROWS * COLS; e++) {
            zeros += got[e] == 0.0f;
            sum += got[e];
        }
        assert_true(fabs(zeros / (ROWS * COLS) - p) < 0.003);
        assert_true(fabs(sum / (ROWS * COLS) - 1) < 0.005);
        free(got);
        test_free(&x);
    }
}

static void test_zero_rate_copies(void **state) {
    (void)state;
    float values[] = {1.0f, -0.0f, INFINITY, NAN, 0x1p-149f};
    struct tensor x = test_floats(1, 5, values);
    struct tensor y = test_tensor(1, 5, DTYPE_F32);
    ops_dropout(y, x, 0.0f, KEY, (struct place){0, 0, 1, 5});
    ops_dropout(x, x, 0.0f, KEY, (struct place){0, 0, 1, 5});
    float *a = test_host(x);
    float *b = test_host(y);
    assert_memory_equal(a, values, sizeof values);
    assert_memory_equal(b, values, sizeof values);
    free(a);
    free(b);
    test_free(&x);
    test_free(&y);
}

// A dropped infinity or NaN is 0, not 0 times it.
static void test_dropped_nan(void **state) {
    (void)state;
    enum { COUNT = 200 };
    struct tensor x = test_tensor(1, COUNT, DTYPE_F32); // NaN
    struct tensor y = test_tensor(1, COUNT, DTYPE_F32);
    ops_dropout(y, x, 0.5f, KEY, (struct place){0, 0, 1, COUNT});
    float *got = test_host(y);
    for (size_t i = 0; i < COUNT; i++) {
        assert_true(dropped(i, 0.5f) ? got[i] == 0.0f : isnan(got[i]));
    }
    free(got);
    test_free(&x);
    test_free(&y);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mask_by_place), cmocka_unit_test(test_edge_of_rate),
        cmocka_unit_test(test_rate),          cmocka_unit_test(test_zero_rate_copies),
        cmocka_unit_test(test_dropped_nan),
    };
    device_init(1, 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
