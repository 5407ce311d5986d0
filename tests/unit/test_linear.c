// Linear layers against plain sums in double.
#include "ops.h"
#include "tensors.h"

struct shape {
    size_t R;
    size_t N;
    size_t K;
};

// All of the op's tensors, in double: y and dy (R, N), x and dx (R, K), w and dw (N, K).
struct reference {
    struct shape shape;
    double *x;
    double *w;
    double *bias; // (N)
    double *dy;
    double *y;
    double *dx;
    double *dw;
    double *dbias; // (N)
};

static void forward(struct reference *r) {
    struct shape s = r->shape;
    for (size_t i = 0; i < s.R; i++) {
        for (size_t n = 0; n < s.N; n++) {
            double sum = r->bias[n];
            for (size_t k = 0; k < s.K; k++) {
                sum += r->x[i * s.K + k] * r->w[n * s.K + k];
            }
            r->y[i * s.N + n] = sum;
        }
    }
}

static void backward(struct reference *r) {
    struct shape s = r->shape;
    for (size_t i = 0; i < s.R; i++) {
        for (size_t n = 0; n < s.N; n++) {
            double d = r->dy[i * s.N + n];
            r->dbias[n] += d;
            for (size_t k = 0; k < s.K; k++) {
                r->dx[i * s.K + k] += d * r->w[n * s.K + k];
                r->dw[n * s.K + k] += d * r->x[i * s.K + k];
            }
        }
    }
}

struct tensors {
    struct tensor x;
    struct tensor w;
    struct tensor bias;
    struct tensor dy;
    struct tensor y;
    struct tensor dx;
    struct tensor dw;
    struct tensor dbias;
};

static struct tensors make_tensors(struct shape s) {
    uint64_t state = 1 + s.R * 7 + s.N * 3 + s.K;
    return (struct tensors){
        .x = test_uniform(s.R, s.K, 1, &state),
        .w = test_uniform(s.N, s.K, 1, &state),
        .bias = test_uniform(s.N, 1, 1, &state),
        .dy = test_uniform(s.R, s.N, 1, &state),
        .y = test_tensor(s.R, s.N, DTYPE_F32),
        .dx = test_tensor(s.R, s.K, DTYPE_F32),
        .dw = test_tensor(s.N, s.K, DTYPE_F32),
        .dbias = test_tensor(s.N, 1, DTYPE_F32),
    };
}

static void free_tensors(struct tensors *t) {
    test_free(&t->x);
    test_free(&t->w);
    test_free(&t->bias);
    test_free(&t->dy);
    test_free(&t->y);
    test_free(&t->dx);
    test_free(&t->dw);
    test_free(&t->dbias);
}

static struct reference make_reference(struct shape s, struct tensors t) {
    struct reference r = {
        .shape = s,
        .x = test_doubles(t.x),
        .w = test_doubles(t.w),
        .bias = test_doubles(t.bias),
        .dy = test_doubles(t.dy),
        .y = calloc(s.R * s.N + 1, sizeof(double)),
        .dx = calloc(s.R * s.K + 1, sizeof(double)),
        .dw = calloc(s.N * s.K + 1, sizeof(double)),
        .dbias = calloc(s.N + 1, sizeof(double)),
    };
    forward(&r);
    backward(&r);
    return r;
}

static void free_reference(struct reference *r) {
    free(r->x);
    free(r->w);
    free(r->bias);
    free(r->dy);
    free(r->y);
    free(r->dx);
    free(r->dw);
    free(r->dbias);
}

static void run(struct tensors t) {
    ops_linear(t.y, t.x, t.w, t.bias);
    ops_linear_dx(t.dx, t.dy, t.w, false);
    ops_linear_dw(t.dw, t.dbias, t.dy, t.x);
}

// ---- the op is the reference -------------------------------------------------------------------

// A sum of n products of numbers up to 1 is about sqrt(n), and so is what its n roundings, of 6e-8
// of the sum so far, add up to.
static void check(struct shape s, const char *what, struct tensor got, const double *want) {
    char name[120];
    snprintf(name, sizeof name, "linear %s, R %zu N %zu K %zu", what, s.R, s.N, s.K);
    test_close(name, got, want, 1e-6, 5e-6);
}

static void check_shape(struct shape s) {
    struct tensors t = make_tensors(s);
    struct reference r = make_reference(s, t);
    run(t);
    check(s, "y", t.y, r.y);
    check(s, "dx", t.dx, r.dx);
    check(s, "dw", t.dw, r.dw);
    check(s, "dbias", t.dbias, r.dbias);

    ops_linear_dx(t.dx, t.dy, t.w, true); // now twice the gradient
    for (size_t i = 0; i < s.R * s.K; i++) {
        r.dx[i] *= 2;
    }
    check(s, "dx added", t.dx, r.dx);

    struct tensor none = {0};
    ops_linear(t.y, t.x, t.w, none);
    ops_linear_dw(t.dw, none, t.dy, t.x);
    for (size_t i = 0; i < s.R * s.N; i++) {
        r.y[i] -= r.bias[i % s.N];
    }
    check(s, "y without bias", t.y, r.y);
    check(s, "dw without dbias", t.dw, r.dw);
    free_reference(&r);
    free_tensors(&t);
}

static void test_shapes(void **state) {
    (void)state;
    const struct shape shapes[] = {
        {1, 1, 1},     {1, 5, 3},     {3, 1, 7},     {17, 33, 5},    {127, 65, 31}, {129, 10, 128},
        {200, 96, 64}, {385, 40, 24}, {900, 130, 9}, {130, 1100, 7}, {5, 2050, 3},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        check_shape(shapes[i]);
    }
}

static double weighted_output(void *context) {
    struct reference *r = context;
    forward(r);
    double sum = 0;
    for (size_t i = 0; i < r->shape.R * r->shape.N; i++) {
        sum += r->dy[i] * r->y[i];
    }
    return sum;
}

static void test_central_differences(void **state) {
    (void)state;
    struct shape s = {7, 5, 9};
    struct tensors t = make_tensors(s);
    struct reference r = make_reference(s, t);
    run(t);
    double *dx = test_gradient(r.x, s.R * s.K, weighted_output, &r);
    double *dw = test_gradient(r.w, s.N * s.K, weighted_output, &r);
    double *dbias = test_gradient(r.bias, s.N, weighted_output, &r);
    check(s, "dx by differences", t.dx, dx);
    check(s, "dw by differences", t.dw, dw);
    check(s, "dbias by differences", t.dbias, dbias);
    free(dx);
    free(dw);
    free(dbias);
    free_reference(&r);
    free_tensors(&t);
}

// ---- edges -------------------------------------------------------------------------------------

static void test_no_rows(void **state) {
    (void)state;
    struct tensors t = make_tensors((struct shape){0, 6, 5});
    run(t);
    test_all_equal("dw without rows", t.dw, 0);
    test_all_equal("dbias without rows", t.dbias, 0);
    free_tensors(&t);
}

static void test_nothing_to_sum(void **state) {
    (void)state;
    struct tensors t = make_tensors((struct shape){9, 6, 0});
    run(t);
    double *bias = test_doubles(t.bias), *y = test_doubles(t.y);
    for (size_t i = 0; i < tensor_count(t.y); i++) {
        assert_true(y[i] == bias[i % 6]);
    }
    ops_linear(t.y, t.x, t.w, (struct tensor){0});
    test_all_equal("y of empty sums", t.y, 0);
    free(bias);
    free(y);
    free_tensors(&t);
}

static void test_threads(void **state) {
    (void)state;
    struct tensors t = make_tensors((struct shape){900, 300, 70});
    void *kept[4] = {NULL};
    for (int threads = 1; threads <= 3; threads++) {
        device_init(threads, 1);
        run(t);
        test_same_bits("linear y", t.y, &kept[0]);
        test_same_bits("linear dx", t.dx, &kept[1]);
        test_same_bits("linear dw", t.dw, &kept[2]);
        test_same_bits("linear dbias", t.dbias, &kept[3]);
    }
    for (int i = 0; i < 4; i++) {
        free(kept[i]);
    }
    free_tensors(&t);
}

// One piece alone, on a device of several threads: the library must not cut it in its own way.
static void test_threads_one_piece(void **state) {
    (void)state;
    struct tensors t = make_tensors((struct shape){100, 31, 700});
    void *kept[3] = {NULL};
    for (int threads = 1; threads <= 3; threads++) {
        device_init(threads, 1);
        run(t);
        test_same_bits("linear y", t.y, &kept[0]);
        test_same_bits("linear dx", t.dx, &kept[1]);
        test_same_bits("linear dw", t.dw, &kept[2]);
    }
    for (int i = 0; i < 3; i++) {
        free(kept[i]);
    }
    free_tensors(&t);
}

int main(void) {
    device_init(2, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),  cmocka_unit_test(test_central_differences),
        cmocka_unit_test(test_no_rows), cmocka_unit_test(test_nothing_to_sum),
        cmocka_unit_test(test_threads), cmocka_unit_test(test_threads_one_piece),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
