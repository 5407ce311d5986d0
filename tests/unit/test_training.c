// What the training loop takes from common/: learning rate, norm, clipping, data order, sampling.
#include "common/comm.h"
#include "common/data.h"
#include "common/device.h"
#include "common/ops.h"
#include "common/optimizer.h"
#include "common/sample.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static void near(double a, double b) {
    if (!(fabs(a - b) <= 1e-12 * fmax(1, fabs(b)))) {
        fail_msg("%.17g is not %.17g", a, b);
    }
}

static void test_learning_rate(void **state) {
    (void)state;
    struct options o = options_defaults();
    o.lr = 1;
    o.min_lr = 0.1;
    o.warmup = 4;
    o.schedule = "cosine";
    near(learning_rate(&o, 0, 11, 5), 0.25);
    near(learning_rate(&o, 3, 11, 5), 1);
    near(learning_rate(&o, 4, 11, 5), 1);
    near(learning_rate(&o, 7, 11, 5), 0.55);
    near(learning_rate(&o, 10, 11, 5), 0.1);
    near(learning_rate(&o, 20, 11, 5), 0.1);
    o.schedule = "step";
    o.warmup = 0;
    o.gamma = 0.5;
    near(learning_rate(&o, 4, 11, 5), 1);
    near(learning_rate(&o, 5, 11, 5), 0.5);
    near(learning_rate(&o, 14, 11, 5), 0.25);
    o.schedule = "constant";
    near(learning_rate(&o, 14, 11, 5), 1);
    o.schedule = "cosine"; // one step is no division by zero
    near(learning_rate(&o, 0, 1, 5), 1);
}

static struct piece piece_of(const float *grad, size_t count, bool replica) {
    struct piece p = {.replica = replica};
    p.grad = tensor_alloc(count, 1, DTYPE_F32, MEM_GRADS);
    device_upload(p.grad, grad);
    return p;
}

static double norm(const struct piece *p, size_t count) {
    uint32_t max_bits = norm_max(p, count);
    return norm_root(norm_squares(p, count, max_bits), max_bits);
}

static void test_norm(void **state) {
    (void)state;
    float a[3] = {3, 0, -4};
    float b[2] = {12, 0};
    struct piece p[2] = {piece_of(a, 3, false), piece_of(b, 2, false)};
    near(norm(p, 2), 13);
    p[1].replica = true;
    near(norm(p, 2), 5);
    p[0].replica = true;
    near(norm(p, 2), 0);
    ops_scale(p[0].grad, INFINITY);
    p[0].replica = false;
    assert_false(isfinite(norm(p, 2)));
    tensor_free(&p[0].grad);
    tensor_free(&p[1].grad);
}

// One outlier does not drown the rest, and a cut changes no bit.
static void test_norm_any_cut(void **state) {
    (void)state;
    enum { N = 10007 };
    static float x[N];
    double sum = 0;
    for (int i = 0; i < N; i++) {
        x[i] = (float)sin(i * 0.7) * 1e-3f;
        x[i] = i == 77 ? 1e3f : x[i];
        sum += (double)x[i] * x[i];
    }
    struct piece whole = piece_of(x, N, false);
    double right = norm(&whole, 1);
    assert_true(fabs(right - sqrt(sum)) <= 1e-14 * right);
    struct piece parts[3] = {piece_of(x, 13, false), piece_of(x + 13, 5000, false),
                             piece_of(x + 5013, N - 5013, false)};
    double cut = norm(parts, 3);
    assert_memory_equal(&right, &cut, sizeof cut);
    tensor_free(&whole.grad);
    for (int i = 0; i < 3; i++) {
        tensor_free(&parts[i].grad);
    }
}

static void test_clip(void **state) {
    (void)state;
    near(clip_scale(2, 0), 1);
    near(clip_scale(0.5, 1), 1);
    near(clip_scale(4, 1), 1 / (4 + 1e-6));
    assert_true(clip_scale(INFINITY, 1) == 0);
}

static const char *text_write(size_t count) {
    const char *path = "test_training_text.txt";
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    for (size_t i = 0; i < count; i++) {
        fputc('a' + (int)(i % 23), file);
    }
    assert_int_equal(fclose(file), 0);
    return path;
}

// Each epoch visits every sample once, and epochs differ.
static void test_epochs(void **state) {
    (void)state;
    struct data *d = data_open_text(text_write(1003), 8, 256, 7);
    size_t samples = data_samples(d, DATA_TRAIN);
    assert_int_equal(samples, (1003 - 100 - 1) / 8);
    size_t moved = 0;
    for (uint64_t epoch = 0; epoch < 3; epoch++) {
        char seen[200] = {0};
        for (size_t i = 0; i < samples; i++) {
            size_t k = data_sample_at(d, DATA_TRAIN, epoch * samples + i);
            assert_true(k < samples && !seen[k]);
            seen[k] = 1;
            moved += k != data_sample_at(d, DATA_TRAIN, i);
        }
    }
    assert_true(moved > samples);
    data_close(d);
}

// Targets are the inputs shifted by one; the short rest counts in validation only.
static void test_windows(void **state) {
    (void)state;
    struct data *d = data_open_text(text_write(1003), 8, 256, 7);
    size_t samples = data_samples(d, DATA_VALIDATION);
    assert_int_equal(samples, 13); // 99 targets: 12 windows of 8, and 3
    assert_int_equal(data_targets(d, DATA_VALIDATION, 0, samples), 99);
    assert_int_equal(data_targets(d, DATA_VALIDATION, 12, 1), 3);
    assert_int_equal(data_targets(d, DATA_TRAIN, 0, 5), 40);
    int32_t input[13 * 8], target[13 * 8];
    data_load(d, DATA_VALIDATION, 0, samples, input, target);
    size_t counted = 0;
    for (size_t i = 0; i < 13 * 8; i++) {
        counted += target[i] >= 0;
        if (i + 1 < 99) {
            assert_int_equal(input[i + 1], target[i]);
        }
    }
    assert_int_equal(counted, 99);
    assert_int_equal(input[0], 'a' + 903 % 23);
    data_close(d);
    unlink("test_training_text.txt");
}

static void test_sample(void **state) {
    (void)state;
    const float logits[4] = {0, 2, -1, 1};
    assert_int_equal(sample_draw(logits, 4, 0, 1, 0), 1);
    double total = exp(0) + exp(2) + exp(-1) + exp(1);
    int seen[4] = {0};
    enum { DRAWS = 20000 };
    for (int i = 0; i < DRAWS; i++) {
        seen[sample_draw(logits, 4, 1, 5, (uint64_t)i)]++;
    }
    for (int k = 0; k < 4; k++) {
        double p = exp(logits[k]) / total;
        double sigma = sqrt(DRAWS * p * (1 - p));
        assert_true(fabs(seen[k] - DRAWS * p) < 5 * sigma);
    }
}

// With one rank every collective is a copy, or nothing.
static void test_comm_self(void **state) {
    (void)state;
    struct comm c = comm_init();
    assert_int_equal(c.size, 1);
    float in[2] = {1, 2}, out[2] = {0};
    struct tensor a = tensor_alloc(2, 1, DTYPE_F32, MEM_COMM);
    struct tensor b = tensor_alloc(2, 1, DTYPE_F32, MEM_COMM);
    device_upload(a, in);
    comm_wait(comm_all_gather(c, b, a));
    device_download(out, b);
    assert_memory_equal(in, out, sizeof in);
    comm_wait(comm_all_reduce(c, b, COMM_SUM));
    comm_wait(comm_reduce_scatter(c, b, b));
    comm_wait(comm_broadcast(c, b, 0));
    double x = 3;
    comm_sum_f64(c, &x, 1);
    device_download(out, b);
    assert_memory_equal(in, out, sizeof in);
    near(x, 3);
    tensor_free(&a);
    tensor_free(&b);
    comm_start(c, &(struct comm_config){0});
    comm_finish();
}

int main(void) {
    device_init(2, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_learning_rate), cmocka_unit_test(test_norm),
        cmocka_unit_test(test_norm_any_cut),  cmocka_unit_test(test_clip),
        cmocka_unit_test(test_epochs),        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_sample),        cmocka_unit_test(test_comm_self),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
