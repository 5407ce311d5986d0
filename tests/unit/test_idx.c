#include "child.h"
#include "error.h"
#include "idx.h"
#include "scratch.h"
#include <zlib.h>

enum {
    HEIGHT = 2,
    WIDTH = 3,
    ITEMS = 5,
    BODY = ITEMS * HEIGHT * WIDTH,
    IMAGE_HEADER = 16,
    BYTES_MAX = 4096,
};

static const size_t DIMS[] = {HEIGHT, WIDTH};

// The bytes of a file, and what idx_parse() makes of them.
static struct {
    uint8_t bytes[BYTES_MAX];
    size_t count;
    char error[ERROR_TEXT_SIZE];
    struct idx idx;
} f;

static void put(uint32_t number) {
    for (int shift = 24; shift >= 0; shift -= 8) {
        f.bytes[f.count++] = (uint8_t)(number >> shift);
    }
}

// A good file of ITEMS items of HEIGHT x WIDTH; tests break it.
static void make_plain(void) {
    f.count = 0;
    put(0x803);
    put(ITEMS);
    put(HEIGHT);
    put(WIDTH);
    for (int i = 0; i < BODY; i++) {
        f.bytes[f.count++] = (uint8_t)(i * 7);
    }
}

// Appends to f what gzip makes of the bytes.
static void gzip_append(const uint8_t *bytes, size_t count) {
    z_stream z = {0};
    assert_int_equal(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
    z.next_in = (uint8_t *)bytes;
    z.avail_in = (uInt)count;
    z.next_out = f.bytes + f.count;
    z.avail_out = (uInt)(BYTES_MAX - f.count);
    assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
    f.count = BYTES_MAX - z.avail_out;
    deflateEnd(&z);
}

static void compress_all(void) {
    uint8_t plain[BYTES_MAX];
    size_t count = f.count;
    memcpy(plain, f.bytes, count);
    f.count = 0;
    gzip_append(plain, count);
}

static void make_gzip(void) {
    make_plain();
    compress_all();
}

static bool parse_dims(const size_t *dims, size_t dim_count) {
    static char nothing[1];
    FILE *file = f.count > 0 ? fmemopen(f.bytes, f.count, "rb") : fmemopen(nothing, 1, "rb");
    assert_non_null(file);
    if (f.count == 0) {
        getc(file);
    }
    f.error[0] = '\0';
    bool good = idx_parse(&f.idx, file, dims, dim_count, f.error, sizeof f.error);
    fclose(file);
    return good;
}

static void assert_good(void) {
    if (!parse_dims(DIMS, 2)) {
        fail_msg("refused: %s", f.error);
    }
    assert_int_equal(f.idx.count, ITEMS);
    assert_int_equal(f.idx.item_bytes, HEIGHT * WIDTH);
    for (int i = 0; i < BODY; i++) {
        assert_int_equal(f.idx.data[i], (uint8_t)(i * 7));
    }
    idx_free(&f.idx);
}

static void assert_bad(const char *part) {
    if (parse_dims(DIMS, 2)) {
        fail_msg("accepted, expected \"%s\"", part);
    }
    assert_contains(f.error, part);
    assert_null(f.idx.data);
}

// ---- the parser --------------------------------------------------------------------------------

static void test_good(void **state) {
    (void)state;
    make_plain();
    assert_good();
    make_gzip();
    assert_good();
}

static void test_gzip_members(void **state) {
    (void)state;
    uint8_t plain[BYTES_MAX];
    make_plain();
    size_t count = f.count;
    memcpy(plain, f.bytes, count);
    f.count = 0;
    gzip_append(plain, 9);
    gzip_append(plain + 9, 0);
    gzip_append(plain + 9, count - 9);
    assert_good();
}

static void test_labels(void **state) {
    (void)state;
    f.count = 0;
    put(0x801);
    put(3);
    memcpy(f.bytes + f.count, "\1\2\3", 3);
    f.count += 3;
    assert_true(parse_dims(NULL, 0));
    assert_int_equal(f.idx.count, 3);
    assert_int_equal(f.idx.item_bytes, 1);
    assert_memory_equal(f.idx.data, "\1\2\3", 3);
    idx_free(&f.idx);
    assert_bad(
        "has 1 dimension; expected 3 (magic number 00000801, expected 00000803); are the files "
        "of images and of labels swapped?");
}

static void test_no_items(void **state) {
    (void)state;
    make_plain();
    f.bytes[7] = 0;
    f.count = IMAGE_HEADER;
    assert_true(parse_dims(DIMS, 2));
    assert_int_equal(f.idx.count, 0);
    idx_free(&f.idx);
}

static void test_not_idx(void **state) {
    (void)state;
    f.count = 0;
    assert_bad("is empty; expected an IDX file");
    f.count = (size_t)sprintf((char *)f.bytes, "<!DOCTYPE html><title>404</title>");
    assert_bad(
        "is not an IDX file: it begins with \"<!DOCTYPE html><title>404</title\", a web page "
        "(bytes 3c 21 44 4f), expected the bytes 00 00 08");
    compress_all();
    assert_bad("it begins with \"<!DOCTYPE html>");
    memcpy(f.bytes, "\x1b[2J\0", 5);
    f.count = 5;
    assert_bad("it begins with \".[2J.\" (bytes 1b 5b 32 4a)");
    memset(f.bytes, 0, 100);
    f.count = 100;
    assert_bad("(bytes 00 00 00 00)");
    f.count = 3;
    assert_bad("is not an IDX file");
}

static void test_other_elements(void **state) {
    (void)state;
    make_plain();
    f.bytes[2] = 0x0d;
    assert_bad("has elements of type 32-bit float (0x0d); expected unsigned byte (0x08)");
}

static void test_other_sizes(void **state) {
    (void)state;
    make_plain();
    f.bytes[11] = 32;
    f.bytes[15] = 33;
    assert_bad("has items of 32 x 33; expected 2 x 3");
}

static void test_little_endian(void **state) {
    (void)state;
    static const uint8_t sizes[] = {ITEMS, 0, 0, 0, HEIGHT, 0, 0, 0, WIDTH, 0, 0, 0};
    make_plain();
    memcpy(f.bytes + 4, sizes, sizeof sizes);
    assert_bad("has items of 33554432 x 50331648; expected 2 x 3 (its sizes are little-endian");
    memcpy(f.bytes, "\3\10\0\0", 4);
    assert_bad("is little-endian (its magic number is 03 08 00 00)");
    memcpy(f.bytes, "\0\0\10\1\4\0\0\0abcd", 12);
    f.count = 12;
    assert_false(parse_dims(NULL, 0));
    assert_contains(f.error, "promises 67108864 items, so expected 67108872 bytes, found 12; its "
                             "count is little-endian");
}

static void test_cut_plain(void **state) {
    (void)state;
    for (size_t keep = 4; keep < IMAGE_HEADER + BODY; keep++) {
        char expected[128];
        make_plain();
        f.count = keep;
        snprintf(expected, sizeof expected,
                 keep < IMAGE_HEADER ? "found %zu bytes, expected 16"
                                     : "expected 46 bytes, found %zu",
                 keep);
        assert_bad(expected);
    }
}

static void test_cut_gzip(void **state) {
    (void)state;
    make_gzip();
    size_t whole = f.count;
    for (size_t keep = 2; keep < whole; keep++) {
        make_gzip();
        f.count = keep;
        assert_bad("the compressed data end too early");
    }
}

static bool is_original(void) {
    bool same = f.idx.count == ITEMS;
    for (int i = 0; i < BODY && same; i++) {
        same = f.idx.data[i] == (uint8_t)(i * 7);
    }
    return same;
}

// No changed bit goes unnoticed, but for those that mean nothing to gzip.
static void test_flipped_gzip(void **state) {
    (void)state;
    size_t accepted = 0;
    make_gzip();
    for (size_t bit = 0; bit < f.count * 8; bit++) {
        make_gzip();
        f.bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        if (parse_dims(DIMS, 2)) {
            accepted++;
            assert_true(is_original());
            idx_free(&f.idx);
        }
    }
    assert_in_range(accepted, 1, 7 * 8 + 7); // flags, time, system; the rest of the last byte
}

static void test_checksum(void **state) {
    (void)state;
    make_gzip();
    f.bytes[f.count - 5] ^= 1;
    assert_bad("is damaged: the compressed data are broken: incorrect data check, after 46 bytes");
}

static void test_too_long(void **state) {
    (void)state;
    make_plain();
    f.count += 2;
    assert_bad("is too long: its header promises 5 items, so expected 46 bytes, found 48");
    compress_all();
    assert_bad("is too long: its header promises 5 items, so expected 46 bytes, found 48");
    make_gzip();
    f.bytes[f.count++] = 'x';
    assert_bad("is damaged: bytes that are not gzip follow the compressed data");
}

// A header that claims terabytes costs no memory (a sanitizer would end the program here).
static void test_huge_claim(void **state) {
    (void)state;
    make_plain();
    memset(f.bytes + 4, 255, 4);
    assert_bad("promises 4294967295 items, so expected 25769803786 bytes, found 46");
    compress_all();
    assert_bad("expected 25769803786 bytes, found 46");
}

// Nor does it when a few megabytes have come.
static void test_huge_claim_later(void **state) {
    (void)state;
    enum { SIDE = 1024, COUNT = 3 * SIDE * SIDE / 2 };
    static const size_t dims[] = {SIDE, SIDE};
    uint8_t *bytes = calloc(1, IMAGE_HEADER + COUNT);
    memcpy(bytes, "\0\0\10\3\xff\xff\xff\xff\0\0\4\0\0\0\4", IMAGE_HEADER);
    FILE *file = fmemopen(bytes, IMAGE_HEADER + COUNT, "rb");
    assert_false(idx_parse(&f.idx, file, dims, 2, f.error, sizeof f.error));
    assert_contains(f.error, "expected 4503599626321936 bytes, found 1572880");
    fclose(file);
    free(bytes);
}

static void test_many_items(void **state) {
    (void)state;
    enum { COUNT = 3000001 };
    uint8_t *bytes = malloc(8 + COUNT);
    memcpy(bytes, "\0\0\10\1\0\x2d\xc6\xc1", 8);
    for (size_t i = 0; i < COUNT; i++) {
        bytes[8 + i] = (uint8_t)(i % 251);
    }
    FILE *file = fmemopen(bytes, 8 + COUNT, "rb");
    assert_true(idx_parse(&f.idx, file, NULL, 0, f.error, sizeof f.error));
    assert_int_equal(f.idx.count, COUNT);
    assert_memory_equal(f.idx.data, bytes + 8, COUNT);
    idx_free(&f.idx);
    fclose(file);
    free(bytes);
}

// ---- folders of images and labels --------------------------------------------------------------

static void write_images(const char *name, uint32_t count, bool compressed) {
    f.count = 0;
    put(0x803);
    put(count);
    put(28);
    put(28);
    uint8_t *bytes = malloc(IMAGE_HEADER + (size_t)count * IMAGES_PIXELS);
    memcpy(bytes, f.bytes, IMAGE_HEADER);
    memset(bytes + IMAGE_HEADER, 9, (size_t)count * IMAGES_PIXELS);
    gzFile file = gzopen(scratch_path(name), compressed ? "wb" : "wbT");
    assert_int_equal(gzwrite(file, bytes, (unsigned)(IMAGE_HEADER + count * IMAGES_PIXELS)),
                     IMAGE_HEADER + count * IMAGES_PIXELS);
    assert_int_equal(gzclose(file), Z_OK);
    free(bytes);
}

static void write_labels(const char *name, const char *labels, uint32_t count) {
    f.count = 0;
    put(0x801);
    put(count);
    memcpy(f.bytes + f.count, labels, count);
    scratch_write(scratch_path(name), f.bytes, f.count + count);
}

static void open_body(void *argument) {
    struct images images;
    images_open(&images, argument, "train");
    images_free(&images);
}

static void assert_open(const char *dir) {
    struct images images;
    images_open(&images, dir, "train");
    assert_int_equal(images.count, 3);
    assert_memory_equal(images.labels, "\0\1\11", 3);
    assert_int_equal(images.pixels[3 * IMAGES_PIXELS - 1], 9);
    images_free(&images);
    assert_null(images.pixels);
}

static void test_folder(void **state) {
    (void)state;
    write_images("train-images-idx3-ubyte.gz", 3, true);
    write_labels("train-labels-idx1-ubyte", "\0\1\11", 3);
    assert_open(scratch_folder);
    assert_int_equal(rename(scratch_path("train-images-idx3-ubyte.gz"),
                            scratch_path("train-images.idx3-ubyte.gz")),
                     0);
    assert_open(scratch_folder);
    assert_int_equal(remove(scratch_path("train-images.idx3-ubyte.gz")), 0);
    write_images("train-images.idx3-ubyte", 3, false);
    assert_open(scratch_folder);
    // Plain bytes under a name that says gzip, as a browser may save them.
    assert_int_equal(
        rename(scratch_path("train-images.idx3-ubyte"), scratch_path("train-images-idx3-ubyte.gz")),
        0);
    assert_open(scratch_folder);
}

static void assert_folder_refused(const char *const *parts) {
    struct child child = child_run(open_body, scratch_folder);
    assert_user_error(&child, parts);
}

static void test_missing(void **state) {
    (void)state;
    struct child child = child_run(open_body, "/no/such/dir");
    assert_user_error(&child, PARTS("/no/such/dir: No such file or directory", "--data DIR",
                                    "dataset-fashion-mnist"));
    assert_folder_refused(PARTS(scratch_folder, "no file train-images-idx3-ubyte",
                                "dataset-fashion-mnist", "--data DIR"));
    write_images("train-images-idx3-ubyte", 3, false);
    assert_folder_refused(PARTS("no file train-labels-idx1-ubyte"));
    child = child_run(open_body, scratch_path("train-images-idx3-ubyte"));
    assert_user_error(&child, PARTS("is not a folder", "--data DIR"));
    assert_int_equal(mkdir(scratch_path("train-labels-idx1-ubyte"), 0777), 0);
    assert_folder_refused(PARTS("train-labels-idx1-ubyte: is a folder; expected a file"));
}

static void unprivileged_body(void *argument) {
    if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0) {
        exit(3);
    }
    open_body(argument);
}

static void test_locked(void **state) {
    (void)state;
    write_images("train-images-idx3-ubyte", 3, false);
    write_labels("train-labels-idx1-ubyte", "\0\11\1", 3);
    assert_int_equal(chmod(scratch_folder, 0), 0);
    struct child child = child_run(unprivileged_body, scratch_folder);
    assert_user_error(&child, PARTS("train-images-idx3-ubyte: Permission denied"));
    assert_int_equal(chmod(scratch_folder, 0755), 0);
    assert_int_equal(chmod(scratch_path("train-labels-idx1-ubyte"), 0), 0);
    child = child_run(unprivileged_body, scratch_folder);
    assert_user_error(&child,
                      PARTS("train-labels-idx1-ubyte: cannot be opened: Permission denied"));
}

static void test_counts_differ(void **state) {
    (void)state;
    write_images("train-images-idx3-ubyte", 3, false);
    write_labels("train-labels-idx1-ubyte", "\0\1", 2);
    assert_folder_refused(PARTS("train-images-idx3-ubyte has 3 images",
                                "train-labels-idx1-ubyte has 2 labels", "expected one label"));
    write_images("train-images-idx3-ubyte", 0, false);
    write_labels("train-labels-idx1-ubyte", "", 0);
    assert_folder_refused(PARTS("train-images-idx3-ubyte: the file has no images"));
}

static void test_bad_label(void **state) {
    (void)state;
    write_images("train-images-idx3-ubyte", 3, false);
    write_labels("train-labels-idx1-ubyte", "\0\11\12", 3);
    assert_folder_refused(
        PARTS("train-labels-idx1-ubyte: label 2 has the value 10; expected 0 to 9"));
    write_labels("train-labels-idx1-ubyte", "\xff\0\0", 3);
    assert_folder_refused(PARTS("label 0 has the value 255; expected 0 to 9"));
}

static void test_broken_file_is_named(void **state) {
    (void)state;
    write_images("train-images-idx3-ubyte", 3, false);
    write_labels("train-labels-idx1-ubyte", "\0\11\1", 3);
    assert_int_equal(truncate(scratch_path("train-images-idx3-ubyte"), 1000), 0);
    assert_folder_refused(
        PARTS("train-images-idx3-ubyte: the file is cut short", "expected 2368 bytes, found 1000"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good),
        cmocka_unit_test(test_gzip_members),
        cmocka_unit_test(test_labels),
        cmocka_unit_test(test_no_items),
        cmocka_unit_test(test_not_idx),
        cmocka_unit_test(test_other_elements),
        cmocka_unit_test(test_other_sizes),
        cmocka_unit_test(test_little_endian),
        cmocka_unit_test(test_cut_plain),
        cmocka_unit_test(test_cut_gzip),
        cmocka_unit_test(test_flipped_gzip),
        cmocka_unit_test(test_checksum),
        cmocka_unit_test(test_too_long),
        cmocka_unit_test(test_huge_claim),
        cmocka_unit_test(test_huge_claim_later),
        cmocka_unit_test(test_many_items),
        scratch_test(test_folder),
        scratch_test(test_missing),
        scratch_test(test_locked),
        scratch_test(test_counts_differ),
        scratch_test(test_bad_label),
        scratch_test(test_broken_file_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
