// Convolution, forward and backward, against plain loops in double and central differences.
#include "ops.h"
#include "tensors.h"

// What one test works on: tensors, and the same numbers in double.
struct problem {
    struct conv conv;
    size_t samples;
    struct tensor x, w, bias, dy;
    double *x_host, *w_host, *bias_host, *dy_host;
    double *y_host; // computed by reference_forward()
};

static size_t out_height(struct conv c) {
    return c.height - c.kernel + 1;
}

static size_t out_width(struct conv c) {
    return c.width - c.kernel + 1;
}

static struct problem problem_alloc(struct conv c, size_t samples) {
    struct problem p = {.conv = c, .samples = samples};
    uint64_t random = 41;
    size_t out = out_height(c) * out_width(c) * c.out_channels;
    p.x = test_uniform(samples, c.height * c.width * c.in_channels, 1.0, &random);
    p.w = test_uniform(c.out_channels, c.in_channels * c.kernel * c.kernel, 1.0, &random);
    p.bias = test_uniform(c.out_channels, 1, 1.0, &random);
    p.dy = test_uniform(samples, out, 1.0, &random);
    p.x_host = test_doubles(p.x);
    p.w_host = test_doubles(p.w);
    p.bias_host = test_doubles(p.bias);
    p.dy_host = test_doubles(p.dy);
    p.y_host = malloc((samples * out + 1) * sizeof *p.y_host);
    return p;
}

static void problem_free(struct problem *p) {
    test_free(&p->x);
    test_free(&p->w);
    test_free(&p->bias);
    test_free(&p->dy);
    free(p->x_host);
    free(p->w_host);
    free(p->bias_host);
    free(p->dy_host);
    free(p->y_host);
}

// What the output pixel (y, x) of sample b and channel o sees, times the weights.
static double reference_pixel(const struct problem *p, size_t b, size_t y, size_t x, size_t o) {
    struct conv c = p->conv;
    double sum = p->bias_host[o];
    for (size_t i = 0; i < c.in_channels; i++) {
        for (size_t ky = 0; ky < c.kernel; ky++) {
            for (size_t kx = 0; kx < c.kernel; kx++) {
                size_t pixel = (b * c.height + y + ky) * c.width + x + kx;
                size_t weight = ((o * c.in_channels + i) * c.kernel + ky) * c.kernel + kx;
                sum += p->x_host[pixel * c.in_channels + i] * p->w_host[weight];
            }
        }
    }
    return sum;
}

static void reference_forward(struct problem *p) {
    double *y_host = p->y_host;
    for (size_t b = 0; b < p->samples; b++) {
        for (size_t y = 0; y < out_height(p->conv); y++) {
            for (size_t x = 0; x < out_width(p->conv); x++) {
                for (size_t o = 0; o < p->conv.out_channels; o++) {
                    *y_host++ = reference_pixel(p, b, y, x, o);
                }
            }
        }
    }
}

// The loss whose gradient with respect to y is dy.
static double reference_loss(void *context) {
    struct problem *p = context;
    double loss = 0;
    reference_forward(p);
    for (size_t i = 0; i < tensor_count(p->dy); i++) {
        loss += p->dy_host[i] * p->y_host[i];
    }
    return loss;
}

// dx, dw and dbias by the definition, for shapes too large for differences. The caller frees them.
static void reference_backward(const struct problem *p, double **dx, double **dw, double **dbias) {
    struct conv c = p->conv;
    *dx = calloc(tensor_count(p->x) + 1, sizeof **dx);
    *dw = calloc(tensor_count(p->w) + 1, sizeof **dw);
    *dbias = calloc(c.out_channels + 1, sizeof **dbias);
    for (size_t i = 0; i < tensor_count(p->dy); i++) {
        size_t o = i % c.out_channels, x = i / c.out_channels % out_width(c);
        size_t y = i / c.out_channels / out_width(c) % out_height(c), b = i / p->dy.cols;
        (*dbias)[o] += p->dy_host[i];
        for (size_t k = 0; k < p->w.cols; k++) {
            size_t in = k / c.kernel / c.kernel, ky = k / c.kernel % c.kernel, kx = k % c.kernel;
            size_t pixel = (b * c.height + y + ky) * c.width + x + kx;
            (*dx)[pixel * c.in_channels + in] += p->dy_host[i] * p->w_host[o * p->w.cols + k];
            (*dw)[o * p->w.cols + k] += p->dy_host[i] * p->x_host[pixel * c.in_channels + in];
        }
    }
}

// ---- comparisons -------------------------------------------------------------------------------

// The results of 1, 2 and 3 threads must have the same bits.
struct kept {
    void *y, *dx, *dw, *dbias;
};

static void check_ops(struct problem *p, const double *dx, const double *dw, const double *dbias,
                      double tolerance, struct kept *kept) {
    struct tensor y = test_tensor(p->dy.rows, p->dy.cols, DTYPE_F32);
    struct tensor got_dx = test_tensor(p->x.rows, p->x.cols, DTYPE_F32);
    struct tensor got_dw = test_tensor(p->w.rows, p->w.cols, DTYPE_F32);
    struct tensor got_dbias = test_tensor(p->bias.rows, 1, DTYPE_F32);
    ops_conv2d(y, p->x, p->w, p->bias, p->conv);
    ops_conv2d_dx(got_dx, p->dy, p->w, p->conv);
    ops_conv2d_dw(got_dw, got_dbias, p->dy, p->x, p->conv);
    test_close("conv y", y, p->y_host, 1e-6, 1e-5);
    test_close("conv dx", got_dx, dx, tolerance, 10 * tolerance);
    test_close("conv dw", got_dw, dw, tolerance, 10 * tolerance);
    test_close("conv dbias", got_dbias, dbias, tolerance, 10 * tolerance);
    test_same_bits("conv y", y, &kept->y);
    test_same_bits("conv dx", got_dx, &kept->dx);
    test_same_bits("conv dw", got_dw, &kept->dw);
    test_same_bits("conv dbias", got_dbias, &kept->dbias);
    test_free(&y);
    test_free(&got_dx);
    test_free(&got_dw);
    test_free(&got_dbias);
}

static void check_problem(struct problem *p, const double *dx, const double *dw,
                          const double *dbias, double tolerance) {
    struct kept kept = {0};
    for (int threads = 1; threads <= 3; threads++) {
        device_init(threads, 1);
        check_ops(p, dx, dw, dbias, tolerance, &kept);
    }
    free(kept.y);
    free(kept.dx);
    free(kept.dw);
    free(kept.dbias);
}

// in, out, height, width, kernel. A 3x3 kernel with channels in multiples of 16 has an algorithm of
// its own on the CPU, which works in tiles of 2x2 outputs: so odd and even sizes of those, too.
static const struct conv SMALL[] = {
    {1, 1, 3, 3, 3},   {1, 5, 6, 4, 3},   {3, 5, 5, 7, 3},   {5, 3, 4, 9, 1},
    {5, 1, 5, 5, 1},   {1, 1, 1, 1, 1},   {3, 4, 6, 5, 2},   {2, 3, 6, 8, 5},
    {16, 16, 3, 3, 3}, {16, 32, 4, 5, 3}, {32, 16, 5, 6, 3},
};

static void test_differences(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof SMALL / sizeof SMALL[0]; i++) {
        for (size_t samples = 1; samples <= 2; samples++) {
            struct problem p = problem_alloc(SMALL[i], samples);
            size_t out = SMALL[i].out_channels;
            double *dx = test_gradient(p.x_host, tensor_count(p.x), reference_loss, &p);
            double *dw = test_gradient(p.w_host, tensor_count(p.w), reference_loss, &p);
            double *dbias = test_gradient(p.bias_host, out, reference_loss, &p);
            reference_forward(&p);
            check_problem(&p, dx, dw, dbias, 2e-6);
            free(dx);
            free(dw);
            free(dbias);
            problem_free(&p);
        }
    }
}

static void check_definition(struct conv c, size_t samples) {
    struct problem p = problem_alloc(c, samples);
    double *dx, *dw, *dbias;
    reference_forward(&p);
    reference_backward(&p, &dx, &dw, &dbias);
    check_problem(&p, dx, dw, dbias, 2e-6);
    free(dx);
    free(dw);
    free(dbias);
    problem_free(&p);
}

// The shapes of the MNIST network, channels that fill no vector, and several chunks of samples.
static void test_definition(void **state) {
    (void)state;
    check_definition((struct conv){32, 64, 26, 26, 3}, 3);
    check_definition((struct conv){1, 32, 28, 28, 3}, 5);
    check_definition((struct conv){17, 33, 7, 9, 3}, 2);
    check_definition((struct conv){16, 48, 5, 6, 1}, 2);
    check_definition((struct conv){16, 48, 8, 33, 3}, 17);
    check_definition((struct conv){48, 16, 21, 4, 3}, 9);
    check_definition((struct conv){16, 16, 29, 34, 3}, 2);
    check_definition((struct conv){3, 5, 8, 7, 3}, 19);
    check_definition((struct conv){1, 5, 6, 6, 3}, 40);
}

static void test_no_samples(void **state) {
    (void)state;
    check_definition((struct conv){3, 5, 5, 4, 3}, 0);
    check_definition((struct conv){1, 32, 28, 28, 3}, 0);
    check_definition((struct conv){16, 32, 5, 4, 3}, 0);
}

// A sample's output must not depend on which samples are in the batch with it.
static void check_batch(struct conv c) {
    struct problem p = problem_alloc(c, 11);
    struct tensor all = test_tensor(p.dy.rows, p.dy.cols, DTYPE_F32);
    struct tensor one = test_tensor(1, p.dy.cols, DTYPE_F32);
    ops_conv2d(all, p.x, p.w, p.bias, c);
    ops_conv2d(one, tensor_view(p.x, 7 * p.x.cols, 1, p.x.cols), p.w, p.bias, c);
    float *want = test_host(all);
    float *got = test_host(one);
    assert_memory_equal(got, want + 7 * p.dy.cols, p.dy.cols * sizeof *got);
    free(want);
    free(got);
    test_free(&all);
    test_free(&one);
    problem_free(&p);
}

static void test_batch_independence(void **state) {
    (void)state;
    check_batch((struct conv){3, 20, 9, 8, 3});
    check_batch((struct conv){16, 32, 9, 8, 3});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_differences),
        cmocka_unit_test(test_definition),
        cmocka_unit_test(test_no_samples),
        cmocka_unit_test(test_batch_independence),
    };
    device_init(1, 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
