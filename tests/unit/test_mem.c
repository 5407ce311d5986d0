// The memory account and tensors.
#include "common/device.h"
#include "common/mem.h"
#include "common/tensor.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static void test_charges_exactly(void **state) {
    (void)state;
    struct mem_stats before = mem_stats();
    struct tensor t = tensor_alloc(3, 5, DTYPE_F32, MEM_GRADS);
    struct mem_stats with = mem_stats();
    assert_int_equal(with.now_bytes - before.now_bytes, 60);
    assert_int_equal(with.now_by_category[MEM_GRADS] - before.now_by_category[MEM_GRADS], 60);
    assert_int_equal((uintptr_t)t.data % 64, 0);
    tensor_free(&t);
    assert_false(tensor_exists(t));
    assert_int_equal(mem_stats().now_bytes, before.now_bytes);
}

static void test_peak_and_its_parts(void **state) {
    (void)state;
    mem_reset_peak();
    size_t base = mem_stats().now_bytes;
    struct tensor a = tensor_alloc(100, 1, DTYPE_F32, MEM_PARAMS);
    struct tensor b = tensor_alloc(50, 1, DTYPE_F64, MEM_ACTIVATIONS);
    tensor_free(&b);
    struct tensor c = tensor_alloc(300, 1, DTYPE_U8, MEM_ACTIVATIONS);
    struct mem_stats s = mem_stats();
    assert_int_equal(s.peak_bytes, base + 800);
    size_t parts = 0;
    for (int k = 0; k < MEM_CATEGORIES; k++) {
        parts += s.peak_by_category[k];
    }
    assert_int_equal(parts, s.peak_bytes);
    assert_int_equal(s.highest_by_category[MEM_ACTIVATIONS], 400);
    tensor_free(&c);
    tensor_free(&a);
    mem_reset_peak();
    assert_int_equal(mem_stats().peak_bytes, base);
}

static void test_empty_tensors(void **state) {
    (void)state;
    struct tensor t = tensor_alloc(0, 7, DTYPE_F32, MEM_WORKSPACE);
    assert_true(tensor_exists(t));
    assert_int_equal(tensor_count(t), 0);
    device_upload(t, NULL);
    device_download(NULL, t);
    tensor_free(&t);
    tensor_free(&t); // "no tensor" is ignored
}

static void test_views_share_memory(void **state) {
    (void)state;
    float in[6] = {0, 1, 2, 3, 4, 5};
    float out[2] = {0};
    struct tensor t = tensor_alloc(2, 3, DTYPE_F32, MEM_WORKSPACE);
    device_upload(t, in);
    device_download(out, tensor_view(t, 2, 1, 2));
    assert_int_equal((int)out[0], 2);
    assert_int_equal((int)out[1], 3);
    tensor_free(&t);
}

static void test_types(void **state) {
    (void)state;
    assert_int_equal(dtype_size(DTYPE_F32), 4);
    assert_int_equal(dtype_size(DTYPE_BF16), 2);
    assert_int_equal(dtype_size(DTYPE_F64), 8);
    assert_string_equal(dtype_name(DTYPE_F16), "F16");
    assert_string_equal(dtype_name(DTYPE_I32), "I32");
}

static void test_timeline(void **state) {
    (void)state;
    const char *path = "test_mem_timeline.tsv";
    assert_true(mem_timeline_start(path));
    struct tensor t = tensor_alloc(10, 1, DTYPE_F32, MEM_COMM);
    tensor_free(&t);
    assert_true(mem_timeline_stop());
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    char line[256];
    int lines = 0;
    double us;
    size_t comm = 0;
    size_t highest = 0;
    while (fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "%lf\t%*u\t%*u\t%*u\t%*u\t%zu", &us, &comm) == 2 && comm > highest) {
            highest = comm;
        }
        lines++;
    }
    fclose(file);
    unlink(path);
    assert_int_equal(lines, 4); // header, start, allocation, free
    assert_int_equal(highest, 40);
    assert_false(mem_timeline_start("no/such/folder/x"));
}

static void test_process_peak(void **state) {
    (void)state;
    assert_true(mem_process_peak_bytes() > 1000000);
}

int main(void) {
    device_init(1, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_charges_exactly), cmocka_unit_test(test_peak_and_its_parts),
        cmocka_unit_test(test_empty_tensors),   cmocka_unit_test(test_views_share_memory),
        cmocka_unit_test(test_types),           cmocka_unit_test(test_timeline),
        cmocka_unit_test(test_process_peak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
