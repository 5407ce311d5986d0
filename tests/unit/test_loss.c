// Softmax and cross entropy in steps, whole and cut over columns.
#include "ops.h"
#include "tensors.h"

enum { PADDED = 3 }; // columns beyond the whole in the last part

// R rows of V logits.
struct problem {
    size_t R;
    size_t V;
    double *logits; // (R, V)
    int32_t *targets; // (R)
};

static double row_loss(const struct problem *p, size_t r) {
    const double *x = p->logits + r * p->V;
    double max = -INFINITY, sum = 0;
    for (size_t j = 0; j < p->V; j++) {
        max = fmax(max, x[j]);
    }
    for (size_t j = 0; j < p->V; j++) {
        sum += exp(x[j] - max);
    }
    return log(sum) - (x[p->targets[r]] - max);
}

static double loss_sum(void *context) {
    const struct problem *p = context;
    double sum = 0;
    for (size_t r = 0; r < p->R; r++) {
        sum += p->targets[r] >= 0 ? row_loss(p, r) : 0;
    }
    return sum;
}

// Of equal logits the first counts as the model's answer.
static size_t right_answers(const struct problem *p) {
    size_t right = 0;
    for (size_t r = 0; r < p->R; r++) {
        const double *x = p->logits + r * p->V;
        size_t answer = 0;
        for (size_t j = 1; j < p->V; j++) {
            answer = x[j] > x[answer] ? j : answer;
        }
        right += p->targets[r] == (int32_t)answer;
    }
    return right;
}

// Every third target is the largest logit, so that some answers are right; every fifth row does not
// count.
static struct problem make_problem(size_t R, size_t V, double scale) {
    struct problem p = {
        .R = R,
        .V = V,
        .logits = malloc((R * V + 1) * sizeof(double)),
        .targets = malloc((R + 1) * sizeof(int32_t)),
    };
    uint64_t state = 1 + R + V;
    for (size_t i = 0; i < R * V; i++) {
        p.logits[i] = (double)(float)(scale * test_random(&state));
    }
    for (size_t r = 0; r < R; r++) {
        p.targets[r] = r % 5 == 4 ? -1 : test_random_int(&state, (int32_t)V);
        if (r % 3 == 0 && p.targets[r] >= 0) {
            for (size_t j = 0; j < V; j++) {
                bool larger = p.logits[r * V + j] > p.logits[r * V + (size_t)p.targets[r]];
                p.targets[r] = larger ? (int32_t)j : p.targets[r];
            }
        }
    }
    return p;
}

static void free_problem(struct problem *p) {
    free(p->logits);
    free(p->targets);
}

// The columns [first, first + cols) of the problem; what lies beyond it is NaN.
static struct tensor make_part(const struct problem *p, size_t first, size_t cols) {
    float *x = malloc((p->R * cols + 1) * sizeof *x);
    for (size_t i = 0; i < p->R * cols; i++) {
        size_t j = first + i % cols;
        x[i] = j < p->V ? (float)p->logits[i / cols * p->V + j] : NAN;
    }
    struct tensor t = test_floats(p->R, cols, x);
    free(x);
    return t;
}

struct steps {
    struct tensor targets;
    struct tensor max;
    struct tensor sum;
    struct tensor target_logit;
    struct tensor loss;
};

static struct steps make_steps(const struct problem *p) {
    return (struct steps){
        .targets = test_ints(p->R, 1, p->targets),
        .max = test_tensor(p->R, 1, DTYPE_F32),
        .sum = test_tensor(p->R, 1, DTYPE_F32),
        .target_logit = test_tensor(p->R, 1, DTYPE_F32),
        .loss = test_tensor(1, 2, DTYPE_F64),
    };
}

static void free_steps(struct steps *s) {
    test_free(&s->targets);
    test_free(&s->max);
    test_free(&s->sum);
    test_free(&s->target_logit);
    test_free(&s->loss);
}

// max = the larger of max and other, element by element, as a group of ranks would reduce it.
static void reduce_max(struct tensor max, struct tensor other) {
    float *a = test_host(max), *b = test_host(other);
    for (size_t i = 0; i < tensor_count(max); i++) {
        a[i] = fmaxf(a[i], b[i]);
    }
    device_upload(max, a);
    free(a);
    free(b);
}

// ---- the loss ----------------------------------------------------------------------------------

static void check_loss(const char *name, const struct problem *p, struct steps s) {
    double *got = test_doubles(s.loss), want = loss_sum((void *)p);
    double error = want == 0 ? fabs(got[0]) : fabs(got[0] / want - 1);
    print_message("%s %s, R %zu V %zu: loss %.9g, expected %.9g, error %.2g; %g right\n",
                  error <= 5e-7 ? "PASS" : "FAIL", name, p->R, p->V, got[0], want, error, got[1]);
    assert_true(error <= 5e-7);
    assert_true(got[1] == (double)right_answers(p));
    free(got);
}

// What is d loss / d logits of part [first, first + cols)? Zeros where nothing counts.
static double *part_of_gradient(const struct problem *p, const double *whole, size_t first,
                                size_t cols, double scale) {
    double *part = calloc(p->R * cols + 1, sizeof *part);
    for (size_t i = 0; i < p->R * cols; i++) {
        size_t j = first + i % cols;
        part[i] = j < p->V ? scale * whole[i / cols * p->V + j] : 0;
    }
    return part;
}

// The gradient is softmax - onehot: a probability has the rounding of its exponent, 6e-8 times the
// logits.
static void check_parts_of(struct problem p, size_t parts, const char *what) {
    const float factor = 0.125f;
    size_t R = p.R, V = p.V;
    size_t cols = (V + PADDED + parts - 1) / parts;
    struct steps all = make_steps(&p);
    struct tensor logits[8];
    ops_fill(all.max, -INFINITY);
    ops_zero(all.sum);
    ops_zero(all.target_logit);
    for (size_t i = 0; i < parts; i++) {
        struct steps one = make_steps(&p);
        logits[i] = make_part(&p, i * cols, cols);
        ops_row_max(one.max, logits[i], i * cols, V);
        reduce_max(all.max, one.max);
        free_steps(&one);
    }
    for (size_t i = 0; i < parts; i++) {
        struct steps one = make_steps(&p);
        ops_row_exp_sum(one.sum, one.target_logit, logits[i], all.max, all.targets, i * cols, V);
        ops_add(all.sum, one.sum);
        ops_add(all.target_logit, one.target_logit);
        free_steps(&one);
    }
    ops_cross_entropy(all.loss, all.sum, all.target_logit, all.targets);
    char name[100];
    snprintf(name, sizeof name, "cross entropy in %zu parts, %s", parts, what);
    check_loss(name, &p, all);
    double *gradient = test_gradient(p.logits, R * V, loss_sum, &p);
    for (size_t i = 0; i < parts; i++) {
        ops_cross_entropy_backward(logits[i], all.max, all.sum, all.targets, i * cols, V, factor);
        double *want = part_of_gradient(&p, gradient, i * cols, cols, (double)factor);
        test_close(name, logits[i], want, 2e-6, 1e-5);
        test_free(&logits[i]);
        free(want);
    }
    free(gradient);
    free_steps(&all);
    free_problem(&p);
}

static void check_parts(size_t R, size_t V, size_t parts, double scale) {
    char what[40];
    snprintf(what, sizeof what, "scale %g", scale);
    check_parts_of(make_problem(R, V, scale), parts, what);
}

// Logits of so few values that most rows have several largest ones: with one value all are equal,
// and only the target 0 is right.
static void check_ties(size_t R, size_t V, size_t parts, int32_t values) {
    struct problem p = make_problem(R, V, 1);
    uint64_t state = 7;
    for (size_t i = 0; i < R * V; i++) {
        p.logits[i] = values == 1 ? 0.5 : (double)test_random_int(&state, values) - 1.0;
    }
    p.targets[0] = 0;
    check_parts_of(p, parts, values == 1 ? "all logits equal" : "ties");
}

static void test_ties(void **state) {
    (void)state;
    for (size_t parts = 1; parts <= 8; parts += parts < 3 ? 1 : 5) {
        check_ties(65, 10, parts, 1);
        check_ties(65, 10, parts, 2);
        check_ties(33, 40, parts, 3);
    }
}

static void test_whole(void **state) {
    (void)state;
    check_parts(1, 1, 1, 1);
    check_parts(1, 7, 1, 3);
    check_parts(9, 10, 1, 3);
    check_parts(130, 33, 1, 5);
    check_parts(3, 257, 1, 5);
}

// In 5 parts of V = 257 the last has 2 columns of padding; in 8 parts of V = 7 some have nothing
// else.
static void test_parts(void **state) {
    (void)state;
    check_parts(10, 257, 2, 5);
    check_parts(10, 257, 5, 5);
    check_parts(33, 32, 3, 5);
    check_parts(10, 7, 8, 3);
}

static void test_large_logits(void **state) {
    (void)state;
    struct problem p = make_problem(64, 50, 300); // exp of them overflows, most differences vanish
    struct steps s = make_steps(&p);
    struct tensor logits = make_part(&p, 0, p.V);
    ops_row_max(s.max, logits, 0, p.V);
    ops_row_exp_sum(s.sum, s.target_logit, logits, s.max, s.targets, 0, p.V);
    ops_cross_entropy(s.loss, s.sum, s.target_logit, s.targets);
    check_loss("cross entropy of large logits", &p, s);
    test_free(&logits);
    free_steps(&s);
    free_problem(&p);
}

// ---- edges -------------------------------------------------------------------------------------

static void test_row_max(void **state) {
    (void)state;
    const float x[] = {-3, -INFINITY, -7, 5, -5, 9, -1, -2, -4};
    struct tensor logits = test_floats(3, 3, x), max = test_tensor(3, 1, DTYPE_F32);
    const double all[] = {-3, 9, -1}, two[] = {-3, 5, -1};
    ops_row_max(max, logits, 0, 3);
    test_close("row max", max, all, 0, 0);
    ops_row_max(max, logits, 4, 6);
    test_close("row max without the last column", max, two, 0, 0);
    ops_row_max(max, logits, 6, 6);
    test_all_equal("row max of padding", max, -INFINITY);
    test_free(&logits);
    test_free(&max);
}

static void test_no_rows(void **state) {
    (void)state;
    struct problem p = make_problem(0, 12, 1);
    struct steps s = make_steps(&p);
    struct tensor logits = make_part(&p, 0, p.V);
    ops_row_max(s.max, logits, 0, p.V);
    ops_row_exp_sum(s.sum, s.target_logit, logits, s.max, s.targets, 0, p.V);
    ops_cross_entropy(s.loss, s.sum, s.target_logit, s.targets);
    ops_cross_entropy_backward(logits, s.max, s.sum, s.targets, 0, p.V, 1);
    test_all_equal("loss without rows", s.loss, 0);
    test_free(&logits);
    free_steps(&s);
    free_problem(&p);
}

// A NaN must show in the loss, wherever it is.
static void test_nan(void **state) {
    (void)state;
    for (size_t place = 0; place < 40; place++) {
        struct problem p = make_problem(2, 40, 1);
        p.logits[place] = NAN;
        struct steps s = make_steps(&p);
        struct tensor logits = make_part(&p, 0, p.V);
        ops_row_max(s.max, logits, 0, p.V);
        ops_row_exp_sum(s.sum, s.target_logit, logits, s.max, s.targets, 0, p.V);
        ops_cross_entropy(s.loss, s.sum, s.target_logit, s.targets);
        double *loss = test_doubles(s.loss);
        assert_true(isnan(loss[0]));
        free(loss);
        test_free(&logits);
        free_steps(&s);
        free_problem(&p);
    }
}

// With one column and a max of 0 the sum is exp(logit).
static void test_exp(void **state) {
    (void)state;
    enum { ROWS = 1 << 18 };
    struct problem p = make_problem(ROWS, 1, 87.3);
    struct steps s = make_steps(&p);
    struct tensor logits = make_part(&p, 0, 1);
    ops_zero(s.max);
    ops_row_exp_sum(s.sum, s.target_logit, logits, s.max, s.targets, 0, 1);
    float *got = test_host(s.sum);
    double worst = 0, where = 0;
    for (size_t i = 0; i < ROWS; i++) {
        double want = exp(p.logits[i]), unit = ldexp(1, ilogb(want) - 23);
        double error = fabs((double)got[i] - want) / unit;
        where = error > worst ? p.logits[i] : where;
        worst = error > worst ? error : worst;
    }
    print_message("%s exp: error %.3f units in the last place (at most 1.5) at %.9g\n",
                  worst <= 1.5 ? "PASS" : "FAIL", worst, where);
    assert_true(worst <= 1.5);
    free(got);
    test_free(&logits);
    free_steps(&s);
    free_problem(&p);
}

static void test_exp_edges(void **state) {
    (void)state;
    const float x[] = {-INFINITY, -200, -100, -88, 0, 1, 89, 100, 200, INFINITY, NAN};
    const double e = 2.718281828459045, infinity = INFINITY;
    const double want[] = {0, 0, 0, 0, 1, e, infinity, infinity, infinity, infinity, NAN};
    for (size_t i = 0; i < sizeof x / sizeof x[0]; i++) {
        struct problem p = make_problem(1, 1, 1);
        struct steps s = make_steps(&p);
        p.logits[0] = (double)x[i];
        struct tensor logits = make_part(&p, 0, 1);
        ops_zero(s.max);
        ops_row_exp_sum(s.sum, s.target_logit, logits, s.max, s.targets, 0, 1);
        float *got = test_host(s.sum);
        if (isfinite(want[i])) {
            assert_true(fabs((double)got[0] - want[i]) <= 1e-7 * want[i]);
        } else {
            assert_true(test_same_special((double)got[0], want[i]));
        }
        free(got);
        test_free(&logits);
        free_steps(&s);
        free_problem(&p);
    }
}

static void test_threads(void **state) {
    (void)state;
    struct problem p = make_problem(700, 65, 4);
    struct steps s = make_steps(&p);
    void *kept[5] = {NULL};
    for (int threads = 1; threads <= 3; threads++) {
        device_init(threads, 1);
        struct tensor logits = make_part(&p, 0, p.V);
        ops_row_max(s.max, logits, 0, p.V);
        ops_row_exp_sum(s.sum, s.target_logit, logits, s.max, s.targets, 0, p.V);
        ops_cross_entropy(s.loss, s.sum, s.target_logit, s.targets);
        ops_cross_entropy_backward(logits, s.max, s.sum, s.targets, 0, p.V, 0.25f);
        test_same_bits("max", s.max, &kept[0]);
        test_same_bits("sum", s.sum, &kept[1]);
        test_same_bits("target_logit", s.target_logit, &kept[2]);
        test_same_bits("loss", s.loss, &kept[3]);
        test_same_bits("d logits", logits, &kept[4]);
        test_free(&logits);
    }
    for (int i = 0; i < 5; i++) {
        free(kept[i]);
    }
    free_steps(&s);
    free_problem(&p);
}

int main(void) {
    device_init(2, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole),     cmocka_unit_test(test_parts),
        cmocka_unit_test(test_ties),      cmocka_unit_test(test_large_logits),
        cmocka_unit_test(test_row_max),   cmocka_unit_test(test_no_rows),
        cmocka_unit_test(test_nan),       cmocka_unit_test(test_exp),
        cmocka_unit_test(test_exp_edges), cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
