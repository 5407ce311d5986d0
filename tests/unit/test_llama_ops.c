// The ops of llama besides linear layers, attention and loss, against plain formulas in double.
#include "ops.h"
#include "tensors.h"

static double weighted_sum(const double *weights, const double *values, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) {
        sum += weights[i] * values[i];
    }
    return sum;
}

// ---- embedding ---------------------------------------------------------------------------------

static void check_embedding(size_t R, size_t V, size_t C) {
    uint64_t state = 1 + R + V + C;
    int32_t *token = malloc((R + 1) * sizeof *token);
    for (size_t r = 0; r < R; r++) {
        token[r] = r == 0 ? (int32_t)V - 1 : test_random_int(&state, (int32_t)V);
    }
    struct tensor tokens = test_ints(R, 1, token), w = test_uniform(V, C, 1, &state);
    struct tensor dy = test_uniform(R, C, 1, &state);
    struct tensor y = test_tensor(R, C, DTYPE_F32), dw = test_tensor(V, C, DTYPE_F32);
    ops_embedding(y, tokens, w);
    ops_embedding_dw(dw, dy, tokens);

    double *rows = test_doubles(w), *gradient = test_doubles(dy);
    double *want_y = calloc(R * C + 1, sizeof *want_y);
    double *want_dw = calloc(V * C + 1, sizeof *want_dw);
    for (size_t i = 0; i < R * C; i++) {
        size_t place = (size_t)token[i / C] * C + i % C;
        want_y[i] = rows[place];
        want_dw[place] += gradient[i];
    }
    char name[100];
    snprintf(name, sizeof name, "embedding R %zu V %zu C %zu", R, V, C);
    test_close(name, y, want_y, 0, 0);
    test_close(name, dw, want_dw, 5e-7, 2e-6); // sums of some ten numbers
    free(token);
    free(rows);
    free(gradient);
    free(want_y);
    free(want_dw);
    test_free(&tokens);
    test_free(&w);
    test_free(&dy);
    test_free(&y);
    test_free(&dw);
}

static void test_embedding(void **state) {
    (void)state;
    check_embedding(1, 1, 1);
    check_embedding(300, 17, 70);
    check_embedding(40, 200, 33);
    check_embedding(0, 5, 8);
}

// ---- root-mean-square norm ---------------------------------------------------------------------

static const double EPS = 1e-3;

struct norm {
    size_t R;
    size_t C;
    double *x; // (R, C)
    double *w; // (C)
    double *dy; // (R, C)
    double *y; // (R, C)
};

static void norm_forward(struct norm *n) {
    for (size_t r = 0; r < n->R; r++) {
        const double *x = n->x + r * n->C;
        double scale = 1 / sqrt(weighted_sum(x, x, n->C) / (double)n->C + EPS);
        for (size_t j = 0; j < n->C; j++) {
            n->y[r * n->C + j] = n->w[j] * x[j] * scale;
        }
    }
}

static double norm_weighted_output(void *context) {
    struct norm *n = context;
    norm_forward(n);
    return weighted_sum(n->dy, n->y, n->R * n->C);
}

static void check_norm(size_t R, size_t C) {
    uint64_t state = 1 + R + C;
    struct tensor x = test_uniform(R, C, 2, &state), w = test_uniform(C, 1, 1, &state);
    struct tensor dy = test_uniform(R, C, 1, &state), dx = test_tensor(R, C, DTYPE_F32);
    struct tensor y = test_tensor(R, C, DTYPE_F32), dw = test_tensor(C, 1, DTYPE_F32);
    ops_rmsnorm(y, x, w, (float)EPS);
    ops_rmsnorm_backward(dx, dw, dy, x, w, (float)EPS, false);

    struct norm n = {R, C, test_doubles(x), test_doubles(w), test_doubles(dy), test_doubles(y)};
    char name[100];
    snprintf(name, sizeof name, "rmsnorm R %zu C %zu", R, C);
    norm_forward(&n);
    test_close(name, y, n.y, 3e-7, 1e-6);
    double *want_dx = test_gradient(n.x, R * C, norm_weighted_output, &n);
    double *want_dw = test_gradient(n.w, C, norm_weighted_output, &n);
    test_close(name, dx, want_dx, 1e-6, 5e-6);
    test_close(name, dw, want_dw, 1e-6, 5e-6);
    ops_rmsnorm_backward(dx, dw, dy, x, w, (float)EPS, true);
    for (size_t i = 0; i < R * C; i++) {
        want_dx[i] *= 2;
    }
    test_close(name, dx, want_dx, 1e-6, 5e-6);
    free(n.x);
    free(n.w);
    free(n.dy);
    free(n.y);
    free(want_dx);
    free(want_dw);
    test_free(&x);
    test_free(&w);
    test_free(&dy);
    test_free(&dx);
    test_free(&y);
    test_free(&dw);
}

static void test_norm(void **state) {
    (void)state;
    check_norm(1, 5);
    check_norm(3, 33);
    check_norm(130, 16);
    check_norm(20, 70);
    check_norm(0, 7); // dw becomes 0
}

// ---- rotary positions --------------------------------------------------------------------------

static void check_rope(size_t B, size_t T, size_t heads, size_t D) {
    uint64_t state = 1 + B + T + heads + D;
    const double theta = 10000;
    size_t C = heads * D;
    struct tensor x = test_uniform(B * T, C, 1, &state), table = test_tensor(T, D, DTYPE_F32);
    double *before = test_doubles(x), *want = calloc(B * T * C + 1, sizeof *want);
    for (size_t i = 0; i < B * T * C; i++) {
        size_t t = i / C % T, d = i % D, pair = d % (D / 2);
        double angle = (double)t * pow(theta, -2.0 * (double)pair / (double)D);
        double other = d < D / 2 ? -before[i + D / 2] : before[i - D / 2];
        want[i] = before[i] * cos(angle) + other * sin(angle);
    }
    char name[100];
    snprintf(name, sizeof name, "rope B %zu T %zu heads %zu D %zu", B, T, heads, D);
    ops_rope_table(table, theta);
    ops_rope(x, table, false);
    test_close(name, x, want, 1.5e-7, 3e-7);
    ops_rope(x, table, true);
    test_close(name, x, before, 2e-7, 5e-7); // the inverse, and so the transpose, is the gradient
    free(before);
    free(want);
    test_free(&x);
    test_free(&table);
}

static void test_rope(void **state) {
    (void)state;
    check_rope(1, 1, 1, 2);
    check_rope(2, 7, 3, 22);
    check_rope(3, 100, 2, 48);
    check_rope(1, 2000, 1, 32); // large angles
    check_rope(0, 9, 2, 6);
}

// ---- gated activation --------------------------------------------------------------------------

struct gated {
    size_t count;
    double *gate;
    double *up;
    double *dy;
};

static double gated_output(void *context) {
    struct gated *g = context;
    double sum = 0;
    for (size_t i = 0; i < g->count; i++) {
        sum += g->dy[i] * g->gate[i] / (1 + exp(-g->gate[i])) * g->up[i];
    }
    return sum;
}

static void check_swiglu(size_t R, size_t F) {
    uint64_t state = 1 + R + F;
    struct tensor gate = test_uniform(R, F, 6, &state), up = test_uniform(R, F, 1, &state);
    struct tensor dy = test_uniform(R, F, 1, &state), y = test_tensor(R, F, DTYPE_F32);
    struct tensor dgate = test_tensor(R, F, DTYPE_F32), dup = test_tensor(R, F, DTYPE_F32);
    ops_swiglu(y, gate, up);
    ops_swiglu_backward(dgate, dup, dy, gate, up);

    struct gated g = {R * F, test_doubles(gate), test_doubles(up), test_doubles(dy)};
    double *want = test_doubles(y);
    for (size_t i = 0; i < R * F; i++) {
        want[i] = g.gate[i] / (1 + exp(-g.gate[i])) * g.up[i];
    }
    double *want_dgate = test_gradient(g.gate, R * F, gated_output, &g);
    double *want_dup = test_gradient(g.up, R * F, gated_output, &g);
    char name[100];
    snprintf(name, sizeof name, "swiglu R %zu F %zu", R, F);
    test_close(name, y, want, 2e-7, 1e-6);
    test_close(name, dgate, want_dgate, 3e-7, 2e-6);
    test_close(name, dup, want_dup, 3e-7, 2e-6);

    void *kept[2] = {NULL};
    test_same_bits("dgate", dgate, &kept[0]);
    test_same_bits("dup", dup, &kept[1]);
    ops_swiglu_backward(dy, up, dy, gate, up);
    test_same_bits("dgate in the memory of dy", dy, &kept[0]);
    test_same_bits("dup in the memory of up", up, &kept[1]);
    free(kept[0]);
    free(kept[1]);
    free(g.gate);
    free(g.up);
    free(g.dy);
    free(want);
    free(want_dgate);
    free(want_dup);
    test_free(&gate);
    test_free(&up);
    test_free(&dy);
    test_free(&y);
    test_free(&dgate);
    test_free(&dup);
}

static void test_swiglu(void **state) {
    (void)state;
    check_swiglu(1, 1);
    check_swiglu(3, 37);
    check_swiglu(20, 64);
    check_swiglu(0, 7);
}

// gate's own memory may take dgate, and far from 0 nothing overflows.
static void test_swiglu_edges(void **state) {
    (void)state;
    const float gates[] = {-1e30f, -200, -88.5f, -87, 0, 87, 88.5f, 200, 1e30f};
    const double y[] = {0, 0, 0, 0, 0, 87, 88.5, 200, 1e30};
    const double slopes[] = {0, 0, 0, 0, 0.5, 1, 1, 1, 1};
    struct tensor gate = test_floats(1, 9, gates), up = test_tensor(1, 9, DTYPE_F32);
    struct tensor out = test_tensor(1, 9, DTYPE_F32), dup = test_tensor(1, 9, DTYPE_F32);
    ops_fill(up, 1);
    ops_swiglu(out, gate, up);
    float *got = test_host(out);
    for (size_t i = 0; i < 9; i++) {
        assert_true(fabs((double)got[i] - y[i]) <= 1e-7 * fabs(y[i]) + 1e-35);
    }
    ops_swiglu_backward(gate, dup, up, gate, up);
    test_close("slope of silu far from 0", gate, slopes, 1e-7, 1e-7);
    free(got);
    test_free(&gate);
    test_free(&up);
    test_free(&out);
    test_free(&dup);
}

// ---- threads -----------------------------------------------------------------------------------

static void test_threads(void **state) {
    (void)state;
    enum { R = 700, C = 90, V = 40, KEPT = 8 };
    uint64_t random = 1;
    struct tensor x = test_uniform(R, C, 1, &random), dy = test_uniform(R, C, 1, &random);
    struct tensor w = test_uniform(C, 1, 1, &random), rows = test_uniform(V, C, 1, &random);
    struct tensor y = test_tensor(R, C, DTYPE_F32), dx = test_tensor(R, C, DTYPE_F32);
    struct tensor dw = test_tensor(C, 1, DTYPE_F32), drows = test_tensor(V, C, DTYPE_F32);
    struct tensor table = test_tensor(70, 30, DTYPE_F32), tokens = test_tensor(R, 1, DTYPE_I32);
    int32_t token[R];
    for (size_t r = 0; r < R; r++) {
        token[r] = test_random_int(&random, V);
    }
    device_upload(tokens, token);
    ops_rope_table(table, 10000);
    void *kept[KEPT] = {NULL};
    for (int threads = 1; threads <= 3; threads++) {
        device_init(threads, 1);
        ops_embedding(y, tokens, rows);
        test_same_bits("embedding", y, &kept[0]);
        ops_embedding_dw(drows, dy, tokens);
        test_same_bits("embedding dw", drows, &kept[1]);
        ops_rmsnorm(y, x, w, 1e-5f);
        test_same_bits("rmsnorm", y, &kept[2]);
        ops_rmsnorm_backward(dx, dw, dy, x, w, 1e-5f, false);
        test_same_bits("rmsnorm dx", dx, &kept[3]);
        test_same_bits("rmsnorm dw", dw, &kept[4]);
        ops_rope(dx, table, false);
        test_same_bits("rope", dx, &kept[5]);
        ops_swiglu(y, x, dy);
        test_same_bits("swiglu", y, &kept[6]);
        ops_swiglu_backward(dx, y, dy, x, y);
        test_same_bits("swiglu dgate", dx, &kept[7]);
    }
    for (int i = 0; i < KEPT; i++) {
        free(kept[i]);
    }
    struct tensor *all[] = {&x, &dy, &w, &rows, &y, &dx, &dw, &drows, &table, &tokens};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        test_free(all[i]);
    }
}

int main(void) {
    device_init(2, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_embedding), cmocka_unit_test(test_norm),
        cmocka_unit_test(test_rope),      cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_threads),   cmocka_unit_test(test_swiglu_edges),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
