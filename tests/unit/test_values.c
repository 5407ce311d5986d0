// Zero, fill, copy and casts, add, scale, and random start values.
#include "ops.h"
#include "tensors.h"

static const size_t counts[] = {0, 1, 3, 1000, (1 << 14) + 1, 50001};
enum { COUNTS = sizeof counts / sizeof counts[0] };

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static void test_zero_and_fill(void **state) {
    (void)state;
    for (int c = 0; c < COUNTS; c++) {
        device_init(c % 3 + 1, 1);
        const enum dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16,
                                     DTYPE_F64, DTYPE_I32,  DTYPE_U8};
        for (int d = 0; d < 6; d++) {
            struct tensor t = test_tensor(counts[c], 1, dtypes[d]);
            ops_zero(t);
            unsigned char *host = test_host(t);
            for (size_t i = 0; i < counts[c] * dtype_size(dtypes[d]); i++) {
                assert_int_equal(host[i], 0);
            }
            free(host);
            test_free(&t);
        }
        struct tensor t = test_tensor(1, counts[c], DTYPE_F32);
        ops_fill(t, -2.5f);
        test_all_equal("fill", t, -2.5);
        test_free(&t);
    }
}

static void test_add_and_scale(void **state) {
    (void)state;
    uint64_t random = 1;
    for (int c = 0; c < COUNTS; c++) {
        device_init(c % 3 + 1, 1);
        struct tensor y = test_uniform(counts[c], 1, 2.0, &random);
        struct tensor x = test_uniform(1, counts[c], 3.0, &random); // another shape, same count
        float *a = test_host(y);
        float *b = test_host(x);
        ops_add(y, x);
        ops_scale(y, 0.3f);
        float *got = test_host(y);
        for (size_t i = 0; i < counts[c]; i++) {
            float sum = a[i] + b[i];
            float want = sum * 0.3f;
            assert_memory_equal(&got[i], &want, sizeof want);
        }
        free(a);
        free(b);
        free(got);
        test_free(&x);
        test_free(&y);
    }
}

// Minus zero plus minus zero keeps its sign: a rank without samples contributes -0.0.
static void test_add_keeps_zero_signs(void **state) {
    (void)state;
    struct tensor y = test_floats(1, 3, (float[]){-0.0f, 0.0f, -0.0f});
    struct tensor x = test_floats(1, 3, (float[]){-0.0f, -0.0f, 0.0f});
    ops_add(y, x);
    float *got = test_host(y);
    assert_int_equal(bits_of(got[0]), 0x80000000);
    assert_int_equal(bits_of(got[1]), 0);
    assert_int_equal(bits_of(got[2]), 0);
    free(got);
    test_free(&x);
    test_free(&y);
}

static void test_copy_same_type(void **state) {
    (void)state;
    const enum dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_F64, DTYPE_I32, DTYPE_U8};
    for (int d = 0; d < 6; d++) {
        for (int c = 0; c < COUNTS; c++) {
            device_init(c % 3 + 1, 1);
            size_t bytes = counts[c] * dtype_size(dtypes[d]);
            unsigned char *host = malloc(bytes + 1);
            for (size_t i = 0; i < bytes; i++) {
                host[i] = (unsigned char)(i * 37 + i / 251);
            }
            struct tensor x = test_tensor(1, counts[c], dtypes[d]);
            struct tensor y = test_tensor(counts[c], 1, dtypes[d]);
            device_upload(x, host);
            ops_copy(y, x);
            unsigned char *got = test_host(y);
            assert_memory_equal(got, host, bytes);
            free(got);
            free(host);
            test_free(&x);
            test_free(&y);
        }
    }
}

static void *cast(const void *host, enum dtype from, enum dtype to, size_t count) {
    struct tensor x = test_tensor(1, count, from);
    struct tensor y = test_tensor(1, count, to);
    device_upload(x, host);
    ops_copy(y, x);
    void *got = test_host(y);
    test_free(&x);
    test_free(&y);
    return got;
}

// ---- 16-bit formats
// ------------------------------------------------------------------------------

struct format {
    enum dtype dtype;
    int mantissa; // bits, without the implied one
    int bias;
};

static const struct format BF16 = {DTYPE_BF16, 7, 127};
static const struct format F16 = {DTYPE_F16, 10, 15};

// The number that 16 bits stand for, by the definition of the format.
static double value_of(struct format f, uint32_t h) {
    int exponent = (int)((h & 0x7fff) >> f.mantissa);
    int fraction = (int)(h & ((1u << f.mantissa) - 1));
    double sign = h & 0x8000 ? -1.0 : 1.0;
    int largest = (0x7fff >> f.mantissa);
    if (exponent == largest) {
        return fraction == 0 ? sign * INFINITY : NAN;
    }
    if (exponent == 0) {
        return sign * ldexp(fraction, 1 - f.bias - f.mantissa);
    }
    return sign * ldexp((1 << f.mantissa) + fraction, exponent - f.bias - f.mantissa);
}

// All 65536 numbers: to f32 exactly, and back to the same bits (a NaN becomes a quiet one).
static void check_all_halves(struct format f) {
    uint16_t *h = malloc(65536 * sizeof *h);
    for (int i = 0; i < 65536; i++) {
        h[i] = (uint16_t)i;
    }
    float *floats = cast(h, f.dtype, DTYPE_F32, 65536);
    uint16_t *back = cast(floats, DTYPE_F32, f.dtype, 65536);
    for (uint32_t i = 0; i < 65536; i++) {
        double want = value_of(f, i);
        bool nan = isnan(want);
        assert_true(nan ? isnan(floats[i]) : (double)floats[i] == want);
        assert_int_equal(signbit(floats[i]) != 0, i >> 15);
        assert_int_equal(back[i], nan ? i | 1u << (f.mantissa - 1) : i);
    }
    free(h);
    free(floats);
    free(back);
}

// The number half-way between each two neighbours goes to the even one, and its own neighbours in
// f32 to the nearer one. Half-way beyond the largest begins infinity.
static void check_ties(struct format f) {
    uint32_t infinity = 0x7fffu >> f.mantissa << f.mantissa;
    size_t count = 0;
    float *x = malloc(6 * (size_t)infinity * sizeof *x);
    uint16_t *want = malloc(6 * (size_t)infinity * sizeof *want);
    for (uint32_t h = 0; h < infinity; h++) {
        double low = value_of(f, h);
        double high = h + 1 < infinity ? value_of(f, h + 1) : 2 * low - value_of(f, h - 1);
        float tie = (float)((low + high) / 2);
        assert_true(tie == (low + high) / 2);
        for (int sign = 0; sign < 2; sign++) {
            uint32_t near[3] = {h, h + (h & 1), h + 1};
            for (int i = 0; i < 3; i++) {
                uint32_t bits = bits_of(tie) + (uint32_t)i - 1;
                x[count] = float_of(bits | (uint32_t)sign << 31);
                want[count++] = (uint16_t)(near[i] | (uint32_t)sign << 15);
            }
        }
    }
    uint16_t *got = cast(x, DTYPE_F32, f.dtype, count);
    for (size_t i = 0; i < count; i++) {
        if (got[i] != want[i]) {
            fail_msg("%a (%08x) became %04x, expected %04x", x[i], bits_of(x[i]), got[i], want[i]);
        }
    }
    free(x);
    free(want);
    free(got);
}

static void check_specials(struct format f) {
    const uint32_t bits[] = {0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff,
                             0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7f800001,
                             0xff800001, 0x7fffffff, 0xffffffff, 0x7fc00000};
    enum { COUNT = sizeof bits / sizeof bits[0] };
    const uint16_t infinity = (uint16_t)(0x7fff >> f.mantissa << f.mantissa);
    uint16_t *got = cast(bits, DTYPE_F32, f.dtype, COUNT);
    for (int i = 0; i < COUNT; i++) {
        float x = float_of(bits[i]);
        assert_int_equal(got[i] >> 15, bits[i] >> 31);
        if (isnan(x)) {
            assert_true((got[i] & 0x7fff) > infinity);
        } else if (fabsf(x) > 1) {
            assert_int_equal(got[i] & 0x7fff, infinity); // the largest f32 rounds up in both
        } else if (bits[i] << 1 < 2u << 23 && f.dtype == DTYPE_F16) {
            assert_int_equal(got[i] & 0x7fff, 0);
        }
    }
    free(got);
}

static void test_bf16(void **state) {
    (void)state;
    check_all_halves(BF16);
    check_ties(BF16);
    check_specials(BF16);
}

static void test_f16(void **state) {
    (void)state;
    check_all_halves(F16);
    check_ties(F16);
    check_specials(F16);
}

static void test_f64_and_u8(void **state) {
    (void)state;
    const double x[] = {0.0,      -0.0,          1.0 + 0x1p-24, 1.0 + 0x3p-24, 1.0 + 0x1.000001p-24,
                        0x1p-150, 0x1.8p-149,    1e300,         -1e300,        INFINITY,
                        NAN,      0x1.ffffffp127};
    const float want[] = {0.0f, -0.0f,     1.0f,     1.0f + 0x2p-23f, 1.0f + 0x1p-23f,
                          0.0f, 0x1p-148f, INFINITY, -INFINITY,       INFINITY,
                          NAN,  INFINITY};
    enum { COUNT = sizeof x / sizeof x[0] };
    float *floats = cast(x, DTYPE_F64, DTYPE_F32, COUNT);
    double *back = cast(want, DTYPE_F32, DTYPE_F64, COUNT);
    for (int i = 0; i < COUNT; i++) {
        assert_true(isnan(want[i]) ? isnan(floats[i]) : bits_of(floats[i]) == bits_of(want[i]));
        assert_true(isnan(want[i]) ? isnan(back[i]) : back[i] == (double)want[i]);
    }
    free(floats);
    free(back);
    uint8_t bytes[256];
    for (int i = 0; i < 256; i++) {
        bytes[i] = (uint8_t)i;
    }
    floats = cast(bytes, DTYPE_U8, DTYPE_F32, 256);
    for (int i = 0; i < 256; i++) {
        assert_true(floats[i] == (float)i);
    }
    free(floats);
}

// ---- random start values
// -------------------------------------------------------------------------

static const struct random_key KEY = {
    .seed = 0x123456789abcdefULL, .purpose = RANDOM_INIT, .id = 5};

typedef void fill_op(struct tensor y, struct random_key key, struct place place, float scale);

// The element of the whole, by the definition.
static double normal_element(uint64_t index, float std) {
    uint64_t pair = index / 2 * 2;
    double uniform = (random_word(KEY, pair) + 0.5) / 4294967296.0;
    double angle = 2 * acos(-1.0) * random_word(KEY, pair + 1) / 4294967296.0;
    double radius = std * sqrt(-2 * log(uniform));
    return index % 2 == 0 ? radius * cos(angle) : radius * sin(angle);
}

static double uniform_element(uint64_t index, float bound) {
    return (2.0 * random_uniform(KEY, index) - 1.0) * bound;
}

// A part of a whole whose rows and columns end within it, so that padding is below and to the
// right.
static void check_fill(fill_op *fill, double (*element)(uint64_t, float), size_t rows, size_t cols,
                       struct place place) {
    void *kept = NULL;
    for (int threads = 1; threads <= 3; threads++) {
        device_init(threads, 1);
        struct tensor y = test_tensor(rows, cols, DTYPE_F32);
        fill(y, KEY, place, 0.02f);
        float *got = test_host(y);
        for (size_t i = 0; i < rows; i++) {
            for (size_t j = 0; j < cols; j++) {
                size_t r = place.first_row + i, c = place.first_col + j;
                bool inside = r < place.whole_rows && c < place.whole_cols;
                double want = inside ? element((uint64_t)r * place.whole_cols + c, 0.02f) : 0.0;
                if (fabs(got[i * cols + j] - want) > 1e-7 * fabs(want)) {
                    fail_msg("(%zu, %zu): %.9g, expected %.9g", r, c, got[i * cols + j], want);
                }
            }
        }
        free(got);
        test_same_bits("random values", y, &kept);
        test_free(&y);
    }
    free(kept);
}

static const struct {
    size_t rows, cols;
    struct place place;
} PARTS[] = {
    {7, 13, {0, 0, 7, 13}}, // the whole
    {3, 13, {2, 0, 7, 13}}, // rows
    {7, 5, {0, 6, 7, 13}}, // columns
    {4, 6, {5, 9, 7, 13}}, // a corner, with padding on both sides
    {4, 13, {5, 0, 7, 13}}, // whole rows, with padding below
    {2, 3, {8, 0, 7, 13}}, // nothing but padding
    {2, 3, {0, 14, 7, 13}}, // also
    {0, 13, {0, 0, 7, 13}}, // nothing
    {33, 1, {1, 0, 40, 1}}, // a vector
    {20001, 1, {13, 0, 30000, 1}}, // more than one piece
    {20001, 1, {13, 0, 20003, 1}}, // more than one piece, and padding
    {5, 3, {1431655765, 1, 4294967295, 4}}, // elements beyond 2^32
};

static void test_random_parts(void **state) {
    (void)state;
    for (size_t p = 0; p < sizeof PARTS / sizeof PARTS[0]; p++) {
        check_fill(ops_random_normal, normal_element, PARTS[p].rows, PARTS[p].cols, PARTS[p].place);
        check_fill(ops_random_uniform, uniform_element, PARTS[p].rows, PARTS[p].cols,
                   PARTS[p].place);
    }
}

// Tensors that are cut from a whole hold the same bits as the whole.
static void test_random_cut(void **state) {
    (void)state;
    enum { ROWS = 9, COLS = 22 };
    struct tensor whole = test_tensor(ROWS, COLS, DTYPE_F32);
    ops_random_normal(whole, KEY, (struct place){0, 0, ROWS, COLS}, 1.0f);
    float *want = test_host(whole);
    for (size_t col = 0; col < COLS; col += 5) {
        for (size_t row = 0; row < ROWS; row += 4) {
            struct tensor part = test_tensor(4, 5, DTYPE_F32);
            ops_random_normal(part, KEY, (struct place){row, col, ROWS, COLS}, 1.0f);
            float *got = test_host(part);
            for (size_t i = 0; i < 4; i++) {
                for (size_t j = 0; j < 5; j++) {
                    bool inside = row + i < ROWS && col + j < COLS;
                    float w = inside ? want[(row + i) * COLS + col + j] : 0.0f;
                    assert_memory_equal(&got[i * 5 + j], &w, sizeof w);
                }
            }
            free(got);
            test_free(&part);
        }
    }
    free(want);
    test_free(&whole);
}

static void test_random_moments(void **state) {
    (void)state;
    enum { COUNT = 100000 };
    struct tensor y = test_tensor(COUNT, 1, DTYPE_F32);
    for (int normal = 0; normal < 2; normal++) {
        (normal ? ops_random_normal : ops_random_uniform)(y, KEY, (struct place){0, 0, COUNT, 1},
                                                          2.0f);
        float *x = test_host(y);
        double sum = 0, square = 0, fourth = 0, product = 0, largest = 0;
        for (size_t i = 0; i < COUNT; i++) {
            sum += x[i];
            square += (double)x[i] * x[i];
            fourth += (double)x[i] * x[i] * x[i] * x[i];
            product += i % 2 == 1 ? (double)x[i] * x[i - 1] : 0;
            largest = fmax(largest, fabs(x[i]));
        }
        double variance = normal ? 4.0 : 4.0 / 3;
        double kurtosis = normal ? 3.0 : 9.0 / 5;
        assert_true(fabs(sum / COUNT) < 0.03);
        assert_true(fabs(square / COUNT / variance - 1) < 0.02);
        assert_true(fabs(fourth / COUNT / variance / variance / kurtosis - 1) < 0.05);
        assert_true(fabs(product / COUNT * 2 / variance) < 0.02);
        assert_true(normal ? largest > 7 && largest < 14 : largest <= 2.0);
        free(x);
    }
    test_free(&y);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_zero_and_fill),
        cmocka_unit_test(test_add_and_scale),
        cmocka_unit_test(test_add_keeps_zero_signs),
        cmocka_unit_test(test_copy_same_type),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_f16),
        cmocka_unit_test(test_f64_and_u8),
        cmocka_unit_test(test_random_parts),
        cmocka_unit_test(test_random_cut),
        cmocka_unit_test(test_random_moments),
    };
    device_init(1, 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
