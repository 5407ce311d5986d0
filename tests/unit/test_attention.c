// Attention against a plain reference in double, whose own backward is checked by central
// differences.
#include "ops.h"
#include "tensors.h"

struct shape {
    size_t B;
    size_t T;
    size_t heads;
    size_t kv_heads;
    size_t D;
};

// The reference, all (B*T, …) as in ops.h.
struct reference {
    struct shape shape;
    double *q;
    double *k;
    double *v;
    double *dy;
    double *y;
    double *lse;
    double *dq;
    double *dk;
    double *dv;
};

static double dot(const double *a, const double *b, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

// The softmax of query t of one head over keys 0 … t into p; returns its lse.
static double probabilities(double *p, const double *q, const double *k, size_t k_step, size_t t,
                            size_t D) {
    double max = -INFINITY, sum = 0;
    for (size_t j = 0; j <= t; j++) {
        p[j] = dot(q, k + j * k_step, D) / sqrt((double)D);
        max = fmax(max, p[j]);
    }
    for (size_t j = 0; j <= t; j++) {
        sum += exp(p[j] - max);
    }
    for (size_t j = 0; j <= t; j++) {
        p[j] = exp(p[j] - max) / sum;
    }
    return max + log(sum);
}

static void forward_row(struct reference *r, size_t b, size_t t, size_t h, double *p) {
    struct shape s = r->shape;
    size_t D = s.D, C = s.heads * D, K = s.kv_heads * D, row = b * s.T + t;
    size_t kv = b * s.T * K + h / (s.heads / s.kv_heads) * D;
    r->lse[row * s.heads + h] = probabilities(p, r->q + row * C + h * D, r->k + kv, K, t, D);
    for (size_t d = 0; d < D; d++) {
        double sum = 0;
        for (size_t j = 0; j <= t; j++) {
            sum += p[j] * r->v[kv + j * K + d];
        }
        r->y[row * C + h * D + d] = sum;
    }
}

static void backward_row(struct reference *r, size_t b, size_t t, size_t h, double *p) {
    struct shape s = r->shape;
    size_t D = s.D, C = s.heads * D, K = s.kv_heads * D, row = b * s.T + t;
    size_t kv = b * s.T * K + h / (s.heads / s.kv_heads) * D, own = row * C + h * D;
    probabilities(p, r->q + own, r->k + kv, K, t, D);
    double delta = dot(r->dy + own, r->y + own, D);
    for (size_t j = 0; j <= t; j++) {
        size_t other = kv + j * K;
        double dp = dot(r->dy + own, r->v + other, D);
        double ds = p[j] * (dp - delta) / sqrt((double)D);
        for (size_t d = 0; d < D; d++) {
            r->dv[other + d] += p[j] * r->dy[own + d];
            r->dq[own + d] += ds * r->k[other + d];
            r->dk[other + d] += ds * r->q[own + d];
        }
    }
}

static void for_each_row(struct reference *r,
                         void (*row)(struct reference *, size_t, size_t, size_t, double *)) {
    double *p = malloc((r->shape.T + 1) * sizeof *p);
    for (size_t b = 0; b < r->shape.B; b++) {
        for (size_t t = 0; t < r->shape.T; t++) {
            for (size_t h = 0; h < r->shape.heads; h++) {
                row(r, b, t, h, p);
            }
        }
    }
    free(p);
}

struct tensors {
    struct tensor q;
    struct tensor k;
    struct tensor v;
    struct tensor dy;
    struct tensor y;
    struct tensor lse;
    struct tensor dq;
    struct tensor dk;
    struct tensor dv;
};

static struct tensors make_tensors(struct shape s, double scale) {
    uint64_t state = 1 + s.T * 1000 + s.D;
    size_t R = s.B * s.T, C = s.heads * s.D, K = s.kv_heads * s.D;
    return (struct tensors){
        .q = test_uniform(R, C, scale, &state),
        .k = test_uniform(R, K, scale, &state),
        .v = test_uniform(R, K, 1, &state),
        .dy = test_uniform(R, C, 1, &state),
        .y = test_tensor(R, C, DTYPE_F32),
        .lse = test_tensor(R, s.heads, DTYPE_F32),
        .dq = test_tensor(R, C, DTYPE_F32),
        .dk = test_tensor(R, K, DTYPE_F32),
        .dv = test_tensor(R, K, DTYPE_F32),
    };
}

static void free_tensors(struct tensors *t) {
    test_free(&t->q);
    test_free(&t->k);
    test_free(&t->v);
    test_free(&t->dy);
    test_free(&t->y);
    test_free(&t->lse);
    test_free(&t->dq);
    test_free(&t->dk);
    test_free(&t->dv);
}

static struct reference make_reference(struct shape s, struct tensors t) {
    size_t R = s.B * s.T, C = s.heads * s.D, K = s.kv_heads * s.D;
    struct reference r = {
        .shape = s,
        .q = test_doubles(t.q),
        .k = test_doubles(t.k),
        .v = test_doubles(t.v),
        .dy = test_doubles(t.dy),
        .y = calloc(R * C + 1, sizeof(double)),
        .lse = calloc(R * s.heads + 1, sizeof(double)),
        .dq = calloc(R * C + 1, sizeof(double)),
        .dk = calloc(R * K + 1, sizeof(double)),
        .dv = calloc(R * K + 1, sizeof(double)),
    };
    for_each_row(&r, forward_row);
    for_each_row(&r, backward_row);
    return r;
}

static void free_reference(struct reference *r) {
    free(r->q);
    free(r->k);
    free(r->v);
    free(r->dy);
    free(r->y);
    free(r->lse);
    free(r->dq);
    free(r->dk);
    free(r->dv);
}

static void run(struct tensors t, struct shape s) {
    ops_attention(t.y, t.lse, t.q, t.k, t.v, s.T, s.D);
    ops_attention_backward(t.dq, t.dk, t.dv, t.dy, t.y, t.lse, t.q, t.k, t.v, s.T, s.D);
}

// ---- the reference is right --------------------------------------------------------------------

// sum of dy * y, whose gradients dq, dk and dv are.
static double weighted_output(void *context) {
    struct reference *r = context;
    for_each_row(r, forward_row);
    return dot(r->dy, r->y, r->shape.B * r->shape.T * r->shape.heads * r->shape.D);
}

static void check_gradient(struct reference *r, double *x, const double *dx, size_t count) {
    double *want = test_gradient(x, count, weighted_output, r);
    for (size_t i = 0; i < count; i++) {
        assert_true(fabs(dx[i] - want[i]) < 1e-6);
    }
    free(want);
}

static void test_reference(void **state) {
    (void)state;
    struct shape s = {.B = 2, .T = 5, .heads = 4, .kv_heads = 2, .D = 3};
    struct tensors t = make_tensors(s, 1.5);
    struct reference r = make_reference(s, t);
    check_gradient(&r, r.q, r.dq, tensor_count(t.q));
    check_gradient(&r, r.k, r.dk, tensor_count(t.k));
    check_gradient(&r, r.v, r.dv, tensor_count(t.v));
    free_reference(&r);
    free_tensors(&t);
}

// ---- the op is the reference -------------------------------------------------------------------

static void check_shape(struct shape s, double scale, double norm_tolerance,
                        double element_tolerance) {
    char name[160];
    struct tensors t = make_tensors(s, scale);
    struct reference r = make_reference(s, t);
    run(t, s);
    const struct {
        const char *name;
        struct tensor got;
        const double *want;
    } outputs[] = {
        {"y", t.y, r.y},    {"lse", t.lse, r.lse}, {"dq", t.dq, r.dq},
        {"dk", t.dk, r.dk}, {"dv", t.dv, r.dv},
    };
    for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; i++) {
        snprintf(name, sizeof name, "attention %s, B %zu T %zu heads %zu/%zu D %zu, scale %g",
                 outputs[i].name, s.B, s.T, s.heads, s.kv_heads, s.D, scale);
        test_close(name, outputs[i].got, outputs[i].want, norm_tolerance, element_tolerance);
    }
    free_reference(&r);
    free_tensors(&t);
}

// All values are about 1. Sums have some hundred terms, each rounded to 6e-8 of itself; scores and
// lse are below 10, and their rounding is a relative error of the probabilities.
static void test_shapes(void **state) {
    (void)state;
    device_init(2, 1);
    const struct shape shapes[] = {
        {.B = 1, .T = 2, .heads = 1, .kv_heads = 1, .D = 1},
        {.B = 2, .T = 7, .heads = 2, .kv_heads = 1, .D = 5},
        {.B = 2, .T = 37, .heads = 4, .kv_heads = 2, .D = 22},
        {.B = 1, .T = 64, .heads = 3, .kv_heads = 3, .D = 48},
        {.B = 1, .T = 65, .heads = 3, .kv_heads = 3, .D = 48},
        {.B = 1, .T = 128, .heads = 4, .kv_heads = 2, .D = 32},
        {.B = 1, .T = 130, .heads = 1, .kv_heads = 1, .D = 130},
        {.B = 1, .T = 300, .heads = 2, .kv_heads = 1, .D = 16},
        {.B = 1, .T = 600, .heads = 1, .kv_heads = 1, .D = 64},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        check_shape(shapes[i], 1, 1e-6, 1e-5);
    }
}

// Scores of some hundreds: exp of the score itself would overflow, and most probabilities vanish. A
// score's rounding, 6e-8 of some hundreds, is a relative error of its probability.
static void test_large_scores(void **state) {
    (void)state;
    check_shape((struct shape){.B = 1, .T = 300, .heads = 2, .kv_heads = 2, .D = 48}, 12, 2e-5,
                2e-4);
}

// A single position attends to itself alone: y is v, and the scores do not matter.
static void test_one_position(void **state) {
    (void)state;
    struct shape s = {.B = 3, .T = 1, .heads = 2, .kv_heads = 2, .D = 22};
    struct tensors t = make_tensors(s, 1);
    run(t, s);
    double *v = test_doubles(t.v), *dy = test_doubles(t.dy);
    double *dq = test_doubles(t.dq), *dk = test_doubles(t.dk);
    test_close("attention y, T 1", t.y, v, 2e-7, 2e-7);
    test_close("attention dv, T 1", t.dv, dy, 2e-7, 2e-7);
    for (size_t i = 0; i < tensor_count(t.dq); i++) {
        assert_true(fabs(dq[i]) < 1e-6 && fabs(dk[i]) < 1e-6);
    }
    free(v);
    free(dy);
    free(dq);
    free(dk);
    free_tensors(&t);
}

static void test_no_samples(void **state) {
    (void)state;
    struct shape s = {.B = 0, .T = 9, .heads = 2, .kv_heads = 1, .D = 6};
    struct tensors t = make_tensors(s, 1);
    run(t, s);
    free_tensors(&t);
}

// ---- promises of ops.h -------------------------------------------------------------------------

static void test_dq_may_be_dy(void **state) {
    (void)state;
    struct shape s = {.B = 2, .T = 70, .heads = 4, .kv_heads = 2, .D = 22};
    struct tensors t = make_tensors(s, 1);
    run(t, s);
    void *kept = NULL;
    test_same_bits("dq", t.dq, &kept);
    ops_attention_backward(t.dy, t.dk, t.dv, t.dy, t.y, t.lse, t.q, t.k, t.v, s.T, s.D);
    test_same_bits("dq in the memory of dy", t.dy, &kept);
    free(kept);
    free_tensors(&t);
}

static void test_threads(void **state) {
    (void)state;
    struct shape s = {.B = 3, .T = 150, .heads = 4, .kv_heads = 2, .D = 22};
    struct tensors t = make_tensors(s, 1);
    void *kept[5] = {NULL};
    for (int threads = 1; threads <= 3; threads++) {
        device_init(threads, 1);
        run(t, s);
        test_same_bits("y", t.y, &kept[0]);
        test_same_bits("lse", t.lse, &kept[1]);
        test_same_bits("dq", t.dq, &kept[2]);
        test_same_bits("dk", t.dk, &kept[3]);
        test_same_bits("dv", t.dv, &kept[4]);
    }
    for (int i = 0; i < 5; i++) {
        free(kept[i]);
    }
    free_tensors(&t);
}

// A later position must not change an earlier one, not by a bit.
static void test_causal(void **state) {
    (void)state;
    struct shape s = {.B = 1, .T = 90, .heads = 2, .kv_heads = 2, .D = 16};
    const size_t changed = 70;
    struct tensors t = make_tensors(s, 1);
    run(t, s);
    struct tensor before = tensor_view(t.y, 0, changed, s.heads * s.D);
    void *kept = NULL;
    test_same_bits("y", before, &kept);
    struct tensor *inputs[] = {&t.q, &t.k, &t.v};
    for (size_t i = 0; i < 3; i++) {
        size_t cols = inputs[i]->cols;
        ops_scale(tensor_view(*inputs[i], changed * cols, s.T - changed, cols), -3.0f);
    }
    run(t, s);
    test_same_bits("y before the changed positions", before, &kept);
    free(kept);
    free_tensors(&t);
}

// The scores of a batch must never be in memory, nor those of one head.
static void test_workspace(void **state) {
    (void)state;
    device_init(1, 1);
    struct shape s = {.B = 1, .T = 2048, .heads = 1, .kv_heads = 1, .D = 8};
    struct tensors t = make_tensors(s, 1);
    mem_reset_peak();
    run(t, s);
    size_t bytes = mem_stats().highest_by_category[MEM_WORKSPACE];
    print_message("workspace for T %zu: %zu bytes; scores would take %zu\n", s.T, bytes,
                  s.T * s.T * 4);
    assert_true(bytes < s.T * s.T * 4 / 8);
    assert_int_equal(mem_stats().now_by_category[MEM_WORKSPACE], 0);
    free_tensors(&t);
}

int main(void) {
    device_init(1, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reference),    cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_large_scores), cmocka_unit_test(test_one_position),
        cmocka_unit_test(test_no_samples),   cmocka_unit_test(test_dq_may_be_dy),
        cmocka_unit_test(test_threads),      cmocka_unit_test(test_causal),
        cmocka_unit_test(test_workspace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
