// ReLU and max-pooling.
#include "ops.h"
#include "tensors.h"

static void test_relu(void **state) {
    (void)state;
    const float values[] = {1.5f, -2.0f, 0.0f, INFINITY, -INFINITY, NAN, 0x1p-149f, -0x1p-149f};
    const double want[] = {1.5, 0.0, 0.0, INFINITY, 0.0, NAN, 0x1p-149, 0.0};
    struct tensor x = test_floats(2, 4, values);
    ops_relu(x);
    test_close("relu", x, want, 0, 0);
    const float gradient[] = {3.0f, 4.0f, 5.0f, NAN, NAN, 8.0f, 9.0f, 10.0f};
    const double want_gradient[] = {3.0, 0.0, 0.0, NAN, 0.0, 0.0, 9.0, 0.0};
    struct tensor dy = test_floats(2, 4, gradient);
    ops_relu_backward(dy, x);
    test_close("relu backward", dy, want_gradient, 0, 0);
    test_free(&x);
    test_free(&dy);
}

static void test_relu_sizes(void **state) {
    (void)state;
    const size_t counts[] = {0, 1, 31, 40000};
    for (int threads = 1; threads <= 3; threads++) {
        device_init(threads, 1);
        for (int c = 0; c < 4; c++) {
            uint64_t random = 5;
            struct tensor x = test_uniform(counts[c], 1, 1.0, &random);
            struct tensor dy = test_uniform(counts[c], 1, 1.0, &random);
            double *a = test_doubles(x);
            double *g = test_doubles(dy);
            for (size_t i = 0; i < counts[c]; i++) {
                g[i] = a[i] > 0 ? g[i] : 0;
                a[i] = a[i] > 0 ? a[i] : 0;
            }
            ops_relu(x);
            ops_relu_backward(dy, x);
            test_close("relu", x, a, 0, 0);
            test_close("relu backward", dy, g, 0, 0);
            free(a);
            free(g);
            test_free(&x);
            test_free(&dy);
        }
    }
}

// ---- max-pooling
// ---------------------------------------------------------------------------------

struct images {
    size_t samples, channels, height, width;
};

// The four inputs of a window, in the order of `winner`.
static void window(size_t place[4], struct images m, size_t b, size_t c, size_t y, size_t x) {
    for (size_t k = 0; k < 4; k++) {
        place[k] = ((b * m.height + 2 * y + k / 2) * m.width + 2 * x + k % 2) * m.channels + c;
    }
}

// Pools x and a random dy, and compares with the definition.
static void check_pool(struct images m, struct tensor x, uint64_t *random) {
    size_t h = m.height / 2, w = m.width / 2;
    struct tensor y = test_tensor(m.samples, m.channels * h * w, DTYPE_F32);
    struct tensor winner = test_tensor(m.samples, m.channels * h * w, DTYPE_U8);
    struct tensor dy = test_uniform(m.samples, m.channels * h * w, 1.0, random);
    struct tensor dx = test_tensor(m.samples, m.height * m.width * m.channels, DTYPE_F32);
    ops_max_pool(y, winner, x, m.channels, m.height, m.width);
    ops_max_pool_backward(dx, dy, winner, m.channels, m.height, m.width);
    double *in = test_doubles(x);
    double *g = test_doubles(dy);
    double *want = malloc((tensor_count(y) + 1) * sizeof *want);
    double *want_dx = calloc(tensor_count(x) + 1, sizeof *want_dx);
    uint8_t *which = test_host(winner);
    for (size_t i = 0; i < tensor_count(y); i++) {
        size_t place[4];
        window(place, m, i / (m.channels * h * w), i / (h * w) % m.channels, i / w % h, i % w);
        uint8_t best = 0;
        for (uint8_t k = 1; k < 4; k++) {
            double a = in[place[k]], b = in[place[best]];
            best = a > b || (isnan(a) && !isnan(b)) ? k : best;
        }
        want[i] = in[place[best]];
        want_dx[place[best]] = g[i];
        assert_int_equal(which[i], best);
    }
    test_close("max pool", y, want, 0, 0);
    test_close("max pool backward", dx, want_dx, 0, 0);
    free(in);
    free(g);
    free(want);
    free(want_dx);
    free(which);
    test_free(&y);
    test_free(&winner);
    test_free(&dy);
    test_free(&dx);
}

static void test_max_pool(void **state) {
    (void)state;
    const struct images sizes[] = {
        {1, 1, 2, 2}, {3, 1, 4, 6}, {2, 3, 5, 7},    {1, 5, 8, 3},    {2, 17, 11, 12},
        {0, 3, 4, 4}, {2, 2, 1, 5}, {3, 64, 24, 24}, {2, 16, 10, 34}, {1, 33, 40, 9},
    };
    for (int threads = 1; threads <= 3; threads++) {
        device_init(threads, 1);
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            struct images m = sizes[i];
            uint64_t random = 11 + i;
            struct tensor x =
                test_uniform(m.samples, m.height * m.width * m.channels, 1.0, &random);
            check_pool(m, x, &random);
            test_free(&x);
        }
    }
}

// Few different values, so that most windows have ties; among them NaN and infinities.
static void test_ties_and_nan(void **state) {
    (void)state;
    const float values[] = {0.0f, -0.0f, 1.0f, -1.0f, NAN, INFINITY, -INFINITY};
    struct images m = {4, 19, 9, 14};
    size_t count = m.samples * m.channels * m.height * m.width;
    float *host = malloc(count * sizeof *host);
    for (int kinds = 1; kinds <= 7; kinds++) {
        uint64_t random = 3;
        for (size_t i = 0; i < count; i++) {
            host[i] = values[test_random_int(&random, kinds)];
        }
        struct tensor x = test_floats(m.samples, m.height * m.width * m.channels, host);
        check_pool(m, x, &random);
        test_free(&x);
    }
    free(host);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_relu),
        cmocka_unit_test(test_relu_sizes),
        cmocka_unit_test(test_max_pool),
        cmocka_unit_test(test_ties_and_nan),
    };
    device_init(1, 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
