// The norm's two reductions, and the steps of SGD, AdamW and Adadelta against double.
#include "ops.h"
#include "tensors.h"

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// ---- the norm
// ------------------------------------------------------------------------------------

static void check_abs_max(float *values, size_t count, uint32_t want) {
    struct tensor x = test_floats(1, count, values);
    assert_int_equal(ops_abs_max(&x, 1), want);
    struct tensor halves[] = {
        tensor_view(x, 0, 1, count / 3),
        tensor_view(x, count / 3, count - count / 3, 1),
    };
    assert_int_equal(ops_abs_max(halves, 2), want);
    test_free(&x);
}

static void test_abs_max(void **state) {
    (void)state;
    enum { COUNT = 40000 };
    uint64_t random = 9;
    float *values = malloc(COUNT * sizeof *values);
    for (int threads = 1; threads <= 3; threads++) {
        device_init(threads, 1);
        uint32_t want = 0;
        for (size_t i = 0; i < COUNT; i++) {
            values[i] = (float)test_random(&random);
            want = bits_of(fabsf(values[i])) > want ? bits_of(fabsf(values[i])) : want;
        }
        check_abs_max(values, COUNT, want);
        values[COUNT - 1] = -77.0f;
        check_abs_max(values, COUNT, bits_of(77.0f));
        values[20000] = -INFINITY;
        check_abs_max(values, COUNT, bits_of(INFINITY));
        values[3] = float_of(0xffc00000);
        check_abs_max(values, COUNT, 0x7fc00000);
    }
    assert_int_equal(ops_abs_max(NULL, 0), 0);
    check_abs_max(values, 0, 0);
    check_abs_max((float[]){-0.0f, 0.0f, 0x1p-149f}, 3, 1);
    check_abs_max((float[]){-0.0f, 0.0f, 0.0f}, 3, 0);
    free(values);
}

// By the definition, with 128-bit sums and the C library's rounding.
static unsigned __int128 square_sum(const float *x, size_t count, uint32_t max_bits) {
    int exponent;
    frexp(float_of(max_bits), &exponent); // max = [0.5, 1) * 2^exponent
    unsigned __int128 sum = 0;
    for (size_t i = 0; i < count; i++) {
        sum += (unsigned __int128)llrint(ldexp((double)x[i] * x[i], 60 - 2 * (exponent - 1)));
    }
    return sum;
}

static void check_square_sum(float *values, size_t count, uint32_t max_bits) {
    unsigned __int128 want = square_sum(values, count, max_bits);
    struct tensor x = test_floats(1, count, values);
    assert_true(ops_square_sum(&x, 1, max_bits) == want);
    struct tensor parts[] = {
        tensor_view(x, count - count / 7, 1, count / 7),
        tensor_view(x, 0, 1, count / 3),
        tensor_view(x, count / 3, count - count / 7 - count / 3, 1),
    };
    assert_true(ops_square_sum(parts, 3, max_bits) == want);
    unsigned __int128 sum = 0;
    for (int p = 0; p < 3; p++) {
        sum += ops_square_sum(&parts[p], 1, max_bits);
    }
    assert_true(sum == want);
    test_free(&x);
}

static void shuffle(float *values, size_t count, uint64_t *random) {
    for (size_t i = count - 1; i > 0; i--) {
        size_t j = (size_t)test_random_int(random, (int32_t)i + 1);
        float swapped = values[i];
        values[i] = values[j];
        values[j] = swapped;
    }
}

// Numbers of many sizes, from the largest down to those whose squares round to 0.
static void test_square_sum(void **state) {
    (void)state;
    enum { COUNT = 50001 };
    float *values = malloc(COUNT * sizeof *values);
    const int exponents[] = {0, -100, 127, -120, -126, -149};
    for (int e = 0; e < 6; e++) {
        device_init(e % 3 + 1, 1);
        uint64_t random = 17 + (uint64_t)e;
        for (size_t i = 0; i < COUNT; i++) {
            double x = test_random(&random);
            values[i] = (float)ldexp(x, exponents[e] - test_random_int(&random, 40));
        }
        uint32_t max = 0;
        for (size_t i = 0; i < COUNT; i++) {
            max = bits_of(fabsf(values[i])) > max ? bits_of(fabsf(values[i])) : max;
        }
        if (max == 0) {
            values[5] = 0x1p-149f;
            max = 1;
        }
        unsigned __int128 before = square_sum(values, COUNT, max);
        check_square_sum(values, COUNT, max);
        shuffle(values, COUNT, &random);
        assert_true(square_sum(values, COUNT, max) == before);
        check_square_sum(values, COUNT, max);
    }
    free(values);
}

// With max in [1, 2) the unit is 2^-60. Ties cannot occur: a square is an odd number times an even
// power of two.
static void test_square_sum_rounding(void **state) {
    (void)state;
    const uint32_t max = bits_of(1.0f);
    const struct {
        float x;
        uint64_t want;
    } cases[] = {
        {1.0f, 1ULL << 60},
        {0x1.fffffep0f, (1ULL << 62) - (1ULL << 39) + (1ULL << 14)}, // (2 - 2^-23)^2
        {-0x1p-30f, 1},
        {0x1p-31f, 0}, // 1/4
        {0x1.8p-31f, 1}, // 9/16
        {0x1.6a09e6p-31f, 0}, // just below 1/2
        {0x1.6a09e8p-31f, 1}, // just above 1/2
        {0x1p-149f, 0},
        {0.0f, 0},
        {0x1p-8f, 1ULL << 44},
        {0x1.000002p-7f, (1ULL << 46) + (1ULL << 24) + 1}, // + 2^0 exactly
        {0x1.000002p-8f, (1ULL << 44) + (1ULL << 22)}, // 1/4 more
        {0x1.800002p-8f, (9ULL << 42) + (3ULL << 21)}, // 1/4 more
        {0x1.000006p-8f, (1ULL << 44) + (3ULL << 22) + 2}, // 9/4
        {0x1.00001p-9f, (1ULL << 42) + (1ULL << 23) + 4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        float x = cases[i].x;
        struct tensor t = test_floats(1, 1, &x);
        unsigned __int128 got = ops_square_sum(&t, 1, max);
        if (got != cases[i].want || square_sum(&x, 1, max) != got) {
            fail_msg("%a: %llu, expected %llu", x, (unsigned long long)got,
                     (unsigned long long)cases[i].want);
        }
        test_free(&t);
    }
}

// The sum of 2^20 squares of the largest number is beyond 64 bits.
static void test_square_sum_large(void **state) {
    (void)state;
    enum { COUNT = 1 << 20 };
    float *values = malloc(COUNT * sizeof *values);
    for (size_t i = 0; i < COUNT; i++) {
        values[i] = i % 2 ? 3.0f : -3.0f;
    }
    struct tensor x = test_floats(COUNT, 1, values);
    unsigned __int128 sum = ops_square_sum(&x, 1, bits_of(3.0f));
    assert_true(sum == (unsigned __int128)9 << (58 + 20));
    test_free(&x);
    free(values);
}

// ---- steps
// ---------------------------------------------------------------------------------------

enum { STEPS = 5 };

// Four vectors of the same size: parameter, gradient, two kinds of state.
struct vectors {
    size_t count;
    struct tensor w, g, a, b;
    double *ref_w, *ref_a, *ref_b;
};

static struct vectors vectors_alloc(size_t count, uint64_t *random) {
    struct vectors v = {.count = count};
    v.w = test_uniform(count, 1, 1.0, random);
    v.g = test_tensor(1, count, DTYPE_F32); // any shape, same count
    v.a = test_tensor(count, 1, DTYPE_F32);
    v.b = test_tensor(count, 1, DTYPE_F32);
    ops_zero(v.a);
    ops_zero(v.b);
    v.ref_w = test_doubles(v.w);
    v.ref_a = calloc(count + 1, sizeof(double));
    v.ref_b = calloc(count + 1, sizeof(double));
    return v;
}

static void vectors_free(struct vectors *v) {
    test_free(&v->w);
    test_free(&v->g);
    test_free(&v->a);
    test_free(&v->b);
    free(v->ref_w);
    free(v->ref_a);
    free(v->ref_b);
}

// Fresh gradients of very different sizes, some of them 0. The caller frees what it returns.
static double *new_gradients(struct vectors *v, uint64_t *random) {
    float *g = malloc((v->count + 1) * sizeof *g);
    for (size_t i = 0; i < v->count; i++) {
        g[i] = i % 5 == 0 ? 0.0f : (float)ldexp(test_random(random), -(int)(i % 20));
    }
    device_upload(v->g, g);
    free(g);
    return test_doubles(v->g);
}

static void step_sgd(struct vectors *v, const double *g, int step) {
    (void)step;
    ops_sgd(v->w, v->g, 0.5f, 0.1f, 0.01f);
    for (size_t i = 0; i < v->count; i++) {
        v->ref_w[i] -= 0.1f * (0.5 * g[i] + 0.01f * v->ref_w[i]);
    }
}

static void step_adamw(struct vectors *v, const double *g, int step) {
    const struct adamw o = {
        .lr = 0.002f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .decay = 0.1f, .step = step};
    ops_adamw(v->w, v->a, v->b, v->g, 0.25f, o);
    double correction1 = 1 - pow(o.beta1, step), correction2 = 1 - pow(o.beta2, step);
    for (size_t i = 0; i < v->count; i++) {
        double d = 0.25 * g[i];
        v->ref_w[i] *= 1 - (double)o.lr * o.decay;
        v->ref_a[i] = o.beta1 * v->ref_a[i] + (1.0 - o.beta1) * d;
        v->ref_b[i] = o.beta2 * v->ref_b[i] + (1.0 - o.beta2) * d * d;
        double denominator = sqrt(v->ref_b[i]) / sqrt(correction2) + o.eps;
        v->ref_w[i] -= o.lr / correction1 * v->ref_a[i] / denominator;
    }
}

static void step_adadelta(struct vectors *v, const double *g, int step) {
    (void)step;
    const float lr = 0.7f, rho = 0.9f, eps = 1e-6f, decay = 0.01f;
    ops_adadelta(v->w, v->a, v->b, v->g, 0.25f, lr, rho, eps, decay);
    for (size_t i = 0; i < v->count; i++) {
        double d = 0.25 * g[i] + decay * v->ref_w[i];
        v->ref_a[i] = rho * v->ref_a[i] + (1.0 - rho) * d * d;
        double delta = sqrt(v->ref_b[i] + eps) / sqrt(v->ref_a[i] + eps) * d;
        v->ref_b[i] = rho * v->ref_b[i] + (1.0 - rho) * delta * delta;
        v->ref_w[i] -= lr * delta;
    }
}

static void check_steps(const char *name, void (*step)(struct vectors *, const double *, int)) {
    const size_t counts[] = {0, 1, 17, 40001};
    for (int c = 0; c < 4; c++) {
        void *kept[3] = {NULL, NULL, NULL};
        for (int threads = 1; threads <= 3; threads++) {
            device_init(threads, 1);
            uint64_t random = 23;
            struct vectors v = vectors_alloc(counts[c], &random);
            for (int s = 1; s <= STEPS; s++) {
                double *g = new_gradients(&v, &random);
                step(&v, g, s);
                free(g);
            }
            test_close(name, v.w, v.ref_w, 1e-6, 3e-6);
            test_close(name, v.a, v.ref_a, 1e-6, 3e-6);
            test_close(name, v.b, v.ref_b, 1e-6, 3e-6);
            test_same_bits(name, v.w, &kept[0]);
            test_same_bits(name, v.a, &kept[1]);
            test_same_bits(name, v.b, &kept[2]);
            vectors_free(&v);
        }
        for (int i = 0; i < 3; i++) {
            free(kept[i]);
        }
    }
}

static void test_sgd(void **state) {
    (void)state;
    check_steps("sgd", step_sgd);
}

static void test_adamw(void **state) {
    (void)state;
    check_steps("adamw", step_adamw);
}

static void test_adadelta(void **state) {
    (void)state;
    check_steps("adadelta", step_adadelta);
}

// A parameter without gradient must stay as it is, bit for bit, when there is no decay.
static void test_zero_gradient(void **state) {
    (void)state;
    float values[] = {1.0f, -0.0f, 0.0f, 1e-30f};
    struct tensor w = test_floats(4, 1, values);
    struct tensor g = test_floats(4, 1, (float[4]){0});
    struct tensor a = test_floats(4, 1, (float[4]){0});
    struct tensor b = test_floats(4, 1, (float[4]){0});
    ops_adamw(w, a, b, g, 1.0f, (struct adamw){0.1f, 0.9f, 0.999f, 1e-8f, 0.0f, 1});
    ops_adadelta(w, a, b, g, 1.0f, 1.0f, 0.9f, 1e-6f, 0.0f);
    ops_sgd(w, g, 1.0f, 0.1f, 0.0f);
    float *got = test_host(w);
    for (int i = 0; i < 4; i++) {
        assert_true(got[i] == values[i]);
    }
    free(got);
    test_free(&w);
    test_free(&g);
    test_free(&a);
    test_free(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_abs_max),
        cmocka_unit_test(test_square_sum),
        cmocka_unit_test(test_square_sum_rounding),
        cmocka_unit_test(test_square_sum_large),
        cmocka_unit_test(test_sgd),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_adadelta),
        cmocka_unit_test(test_zero_gradient),
    };
    device_init(1, 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
