#include "child.h"
#include "error.h"
#include "safetensors.h"
#include "scratch.h"
#include <errno.h>

static char error[ERROR_TEXT_SIZE];

// The linker takes this for the C library's.
static int sync_calls;
static bool sync_fails;

int fsync(int fd) {
    (void)fd;
    sync_calls++;
    errno = EIO;
    return sync_fails ? -1 : 0;
}

// ---- the reader --------------------------------------------------------------------------------

// Writes a file of a header and some bytes of data.
static char *write_file(const char *header, size_t data_bytes) {
    char *path = scratch_path("file.safetensors");
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    uint64_t length = strlen(header);
    fwrite(&length, sizeof length, 1, file);
    fputs(header, file);
    for (size_t i = 0; i < data_bytes; i++) {
        putc((int)(i % 251), file);
    }
    assert_int_equal(fclose(file), 0);
    return path;
}

static struct safetensors *open_good(const char *header, size_t data_bytes) {
    struct safetensors *file =
        safetensors_open(write_file(header, data_bytes), error, sizeof error);
    if (file == NULL) {
        fail_msg("refused: %s", error);
    }
    return file;
}

static void assert_refused(const char *header, size_t data_bytes, const char *message) {
    char *path = write_file(header, data_bytes);
    struct safetensors *file = safetensors_open(path, error, sizeof error);
    if (file != NULL) {
        fail_msg("accepted: %s", header);
    }
    assert_contains(error, message);
    assert_contains(error, path);
}

static void test_read(void **state) {
    (void)state;
    struct safetensors *file =
        open_good("{\"b\":{\"dtype\":\"U8\",\"shape\":[2,3],\"data_offsets\":[4,10]},\n\t"
                  "\"__metadata__\" : { \"k\" : \"v\" , \"l\":\"\"},"
                  "\"a\":{\"data_offsets\": [ 0, 4 ] ,\"shape\":[],\"dtype\":\"F32\"} }   ",
                  10);
    uint8_t bytes[6];
    size_t pairs;
    assert_int_equal(safetensors_count(file), 2);
    const struct safetensors_entry *b = safetensors_at(file, 0);
    assert_string_equal(b->name, "b");
    assert_string_equal(b->type_name, "U8");
    assert_true(b->known && b->dtype == DTYPE_U8);
    assert_int_equal(b->dims, 2);
    assert_int_equal(b->shape[1], 3);
    assert_int_equal(b->count, 6);
    const struct safetensors_entry *a = safetensors_find(file, "a");
    assert_true(a == safetensors_at(file, 1));
    assert_int_equal(a->dims, 0);
    assert_int_equal(a->count, 1);
    assert_null(safetensors_find(file, "c"));
    assert_true(safetensors_read(file, b, 1, 5, bytes, error, sizeof error));
    assert_memory_equal(bytes, "\5\6\7\10\11", 5);
    assert_true(safetensors_read(file, b, 6, 0, NULL, error, sizeof error));
    assert_string_equal(safetensors_metadata(file, "k"), "v");
    assert_string_equal(safetensors_metadata(file, "l"), "");
    assert_null(safetensors_metadata(file, "m"));
    assert_string_equal(safetensors_metadata_all(file, &pairs)[1].key, "l");
    assert_int_equal(pairs, 2);
    safetensors_close(file);
}

static void test_read_outside(void **state) {
    (void)state;
    uint32_t element;
    struct safetensors *file =
        open_good("{\"a\":{\"dtype\":\"I32\",\"shape\":[3],\"data_offsets\":[0,12]}}", 12);
    const struct safetensors_entry *a = safetensors_find(file, "a");
    assert_false(safetensors_read(file, a, 3, 1, &element, error, sizeof error));
    assert_contains(error, "elements 3 to 4 of the tensor a were asked for; it has 3");
    assert_false(safetensors_read(file, a, SIZE_MAX, 2, &element, error, sizeof error));
    assert_false(safetensors_read(file, a, 2, SIZE_MAX, &element, error, sizeof error));
    assert_true(safetensors_read(file, a, 2, 1, &element, error, sizeof error));
    assert_int_equal(element, 0x0b0a0908);
    assert_int_equal(truncate(scratch_path("file.safetensors"), 70), 0);
    assert_false(safetensors_read(file, a, 2, 1, &element, error, sizeof error));
    assert_contains(error, "the tensor a cannot be read: the file became shorter");
    safetensors_close(file);
}

static void test_other_types(void **state) {
    (void)state;
    char byte;
    struct safetensors *file =
        open_good("{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[3],\"data_offsets\":[0,3]}}", 3);
    assert_false(safetensors_at(file, 0)->known);
    assert_false(safetensors_read(file, safetensors_at(file, 0), 0, 1, &byte, error, sizeof error));
    assert_contains(error, "the tensor a has the type F8_E4M3, which is not read here");
    safetensors_close(file);
}

static void test_empty(void **state) {
    (void)state;
    safetensors_close(open_good("{}", 0));
    safetensors_close(open_good("{ } ", 0));
    safetensors_close(open_good("{\"__metadata__\":{}}", 0));
    struct safetensors *file =
        open_good("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                  "\"none\":{\"dtype\":\"F32\",\"shape\":[5,0],\"data_offsets\":[4,4]},"
                  "\"first\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}",
                  4);
    assert_int_equal(safetensors_find(file, "none")->count, 0);
    safetensors_close(file);
}

static void test_strings(void **state) {
    (void)state;
    struct safetensors *file =
        open_good("{\"__metadata__\":{\"\\\"\\\\\\/\\b\\f\\n\\r\\t\":"
                  "\"\\u0041\\u00e4\\u20AC\\ud83d\\ude00\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80\"}}",
                  0);
    assert_string_equal(safetensors_metadata(file, "\"\\/\b\f\n\r\t"), "Aä€😀"
                                                                       "ä€😀");
    safetensors_close(file);
    static const char *const bad[] = {
        "\\u0000",
        "\\u12",
        "\\u12g4",
        "\\ud800",
        "\\ud800\\u0041",
        "\\udc00",
        "\\x",
        "\n",
        "\x01",
        "\xff",
        "\xc3",
        "\xc0\x80",
        "\xed\xa0\x80",
        "\xf5\x80\x80\x80",
        "\xe2\x82",
        "\\ud800\\ud800",
        "\x80",
        "\xf4\x90\x80\x80",
        "\\",
        "\\ud83d\\ude",
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char header[128];
        snprintf(header, sizeof header, "{\"__metadata__\":{\"key\":\"%s\"}}", bad[i]);
        assert_refused(header, 0, "the header is broken at its byte");
    }
}

static void test_broken_json(void **state) {
    (void)state;
    static const char *const bad[] = {
        "",
        " {}",
        "[]",
        "{",
        "{}x",
        "{},",
        "{,}",
        "{\"",
        "{\"a",
        "{\"a\"",
        "{\"\xc3",
        "{\"\xe2\x82",
        "{\"\\",
        "{\"\\ud83d\\",
        "{\"a\":",
        "{\"a\":1}",
        "{\"a\":{}}",
        "{\"a\":null}",
        "{a:{}}",
        "{\"__metadata__\":{\"a\":1}}",
        "{\"__metadata__\":{\"a\"}}",
        "{\"__metadata__\":{\"a\":\"b\",}}",
        "{\"__metadata__\":[]}",
        "{\"__metadata__\":{},}",
        "{\"__metadata__\":{},\"__metadata__\":{}}",
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_refused(bad[i], 0, "the header is broken at its byte");
    }
    // One of dtype, shape and data_offsets missing, twice, or something else.
    static const char *const members[] = {
        "",
        "\"dtype\":\"U8\"",
        "\"dtype\":\"U8\",\"shape\":[1]",
        "\"dtype\":\"U8\",\"data_offsets\":[0,1]",
        "\"shape\":[1],\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"more\":{}",
        "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],",
        "\"dtype\":8,\"shape\":[1],\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"shape\":[1,],\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"shape\":[[1]],\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"shape\":[1e0],\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"shape\":[01],\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"shape\":[+1],\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"shape\":[0x1],\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"shape\":[9007199254740992],\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"shape\":[99999999999999999999999],\"data_offsets\":[0,1]",
        "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]",
        "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]",
        "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1",
    };
    for (size_t i = 0; i < sizeof members / sizeof members[0]; i++) {
        char header[256];
        snprintf(header, sizeof header, "{\"a\":{%s}}", members[i]);
        assert_refused(header, 1, "the header is broken at its byte");
    }
}

#define ENTRY(name, dtype, shape, begin, end)                                                      \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" begin "," end \
    "]}"

static void test_layout(void **state) {
    (void)state;
    assert_refused("{" ENTRY("a", "U8", "2", "0", "2") "," ENTRY("b", "U8", "2", "1", "3") "}", 3,
                   "the tensor b begins at byte 1, but the one before ends at 2");
    assert_refused("{" ENTRY("a", "U8", "2", "0", "2") "," ENTRY("b", "U8", "2", "3", "5") "}", 5,
                   "the tensor b begins at byte 3, but the one before ends at 2");
    assert_refused("{" ENTRY("a", "U8", "2", "1", "3") "}", 3, "the tensor a begins at byte 1");
    assert_refused("{" ENTRY("a", "U8", "2", "0", "2") "}", 1,
                   "cut short: it has 1 bytes of tensors, its header promises at least 2");
    assert_refused("{" ENTRY("a", "U8", "2", "0", "2") "}", 3, "too long: it has 3 bytes");
    assert_refused("{}", 1, "too long");
    assert_refused("{" ENTRY("a", "U8", "2", "2", "0") "}", 2, "ends at byte 0, before it begins");
    assert_refused("{" ENTRY("a", "U8", "1", "0", "1") "," ENTRY("a", "U8", "1", "1", "2") "}", 2,
                   "the tensor a is there twice");
    assert_refused(
        "{" ENTRY("a", "U8", "1", "0", "1") "," ENTRY("\\u0061", "U8", "1", "1", "2") "}", 2,
        "the tensor a is there twice");
    assert_refused("{\"__metadata__\":{\"x\":\"1\",\"y\":\"1\",\"x\":\"2\"}}", 0,
                   "the metadata have the key x twice");
}

static void test_shapes(void **state) {
    (void)state;
    assert_refused("{" ENTRY("a", "F32", "3", "0", "2") "}", 2,
                   "the tensor a has 2 bytes, but its shape and type F32 need 12");
    assert_refused("{" ENTRY("a", "F32", "1073741824,1073741824,8", "0", "0") "}", 0,
                   "the shape of the tensor a is too large");
    // 2^62 elements of 4 bytes are 0 bytes if one forgets to look.
    assert_refused("{" ENTRY("a", "F32", "1073741824,1073741824,4", "0", "0") "}", 0,
                   "the shape of the tensor a is too large");
    assert_refused("{" ENTRY("a", "U8", "1,1,1,1,1,1,1,1,1", "0", "1") "}", 1,
                   "the tensor a has more than 8 dimensions");
    safetensors_close(open_good("{" ENTRY("a", "U8", "1,1,1,1,1,1,1,1", "0", "1") "}", 1));
}

static void test_length(void **state) {
    (void)state;
    char *path = scratch_path("file.safetensors");
    for (size_t bytes = 0; bytes < 8; bytes++) {
        scratch_write(path, "\2\0\0\0\0\0\0\0{}", bytes);
        assert_null(safetensors_open(path, error, sizeof error));
        assert_contains(error, "expected a safetensors file");
    }
    scratch_write(path, "\3\0\0\0\0\0\0\0{}", 10);
    assert_null(safetensors_open(path, error, sizeof error));
    assert_contains(error, "the header has 3 bytes, the file has 10");
    scratch_write(path, "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    assert_null(safetensors_open(path, error, sizeof error));
    assert_contains(error, "the header has 18446744073709551615 bytes, the file has 10");
    scratch_write(path, "\1\xe1\xf5\5\0\0\0\0{}", 10); // 100,000,001
    assert_int_equal(truncate(path, 200000000), 0);
    assert_null(safetensors_open(path, error, sizeof error));
    assert_contains(error, "100000000 are allowed");
    assert_null(safetensors_open(scratch_folder, error, sizeof error));
    assert_contains(error, "is a folder; expected a file");
    assert_null(safetensors_open(scratch_path("missing"), error, sizeof error));
    assert_contains(error, "missing: there is no such file");
}

// Cutting a good file anywhere, or changing the header anywhere, never does worse than an error.
static void test_damage(void **state) {
    (void)state;
    static const char header[] = "{" ENTRY("a", "F32", "1", "0", "4") "," ENTRY(
        "b", "U8", "2,2", "4", "8") ",\"__metadata__\":{\"k\":\"\\u00e4\"}}";
    for (size_t keep = 0; keep < 8 + sizeof header - 1 + 8; keep++) {
        char *path = write_file(header, 8);
        assert_int_equal(truncate(path, (off_t)keep), 0);
        assert_null(safetensors_open(path, error, sizeof error));
    }
    for (size_t at = 0; at < sizeof header - 1; at++) {
        char changed[sizeof header];
        memcpy(changed, header, sizeof header);
        changed[at] ^= 1;
        safetensors_close(safetensors_open(write_file(changed, 8), error, sizeof error));
    }
}

// ---- the writer --------------------------------------------------------------------------------

static const struct safetensors_entry ENTRIES[] = {
    {.name = "second/weight", .dtype = DTYPE_F32, .dims = 2, .shape = {2, 3}},
    {.name = "first \"ä\"\n", .dtype = DTYPE_U8, .dims = 1, .shape = {5}},
    {.name = "none", .dtype = DTYPE_BF16, .dims = 2, .shape = {0, 7}},
    {.name = "scalar", .dtype = DTYPE_F64},
};

static const struct safetensors_pair PAIRS[] = {
    {"format", "pt"},
    {"quote", "a \"b\" \\ \t"},
};

enum { ENTRY_COUNT = 4, DATA_BYTES = 24 + 5 + 8 };

static struct safetensors_writer *create(const char *path) {
    struct safetensors_writer *writer =
        safetensors_create(path, ENTRIES, ENTRY_COUNT, PAIRS, 2, error, sizeof error);
    if (writer == NULL) {
        fail_msg("refused: %s", error);
    }
    return writer;
}

static void test_write(void **state) {
    (void)state;
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\",\"quote\":\"a \\\"b\\\" \\\\ \\t\"},"
        "\"second/weight\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
        "\"first \\\"ä\\\"\\n\":{\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[24,29]},"
        "\"none\":{\"dtype\":\"BF16\",\"shape\":[0,7],\"data_offsets\":[29,29]},"
        "\"scalar\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[29,37]}}";
    uint8_t data[DATA_BYTES], bytes[DATA_BYTES];
    char *path = scratch_path("out.safetensors");
    for (size_t i = 0; i < DATA_BYTES; i++) {
        data[i] = (uint8_t)(200 + i);
    }
    struct safetensors_writer *writer = create(path);
    assert_true(safetensors_write(writer, data, 1, error, sizeof error));
    assert_true(safetensors_write(writer, data + 1, 30, error, sizeof error));
    assert_true(safetensors_write(writer, data, 0, error, sizeof error));
    assert_true(safetensors_write(writer, data + 31, 6, error, sizeof error));
    assert_true(safetensors_finish(writer, error, sizeof error));
    assert_memory_equal(scratch_read(path) + 8, header, sizeof header - 1);
    struct safetensors *file = safetensors_open(path, error, sizeof error);
    assert_non_null(file);
    assert_int_equal(safetensors_count(file), ENTRY_COUNT);
    assert_int_equal(safetensors_at(file, 0)->offset % 8, 0);
    assert_string_equal(safetensors_metadata(file, "quote"), PAIRS[1].value);
    const struct safetensors_entry *entry = safetensors_find(file, ENTRIES[1].name);
    assert_true(safetensors_read(file, entry, 0, 5, bytes, error, sizeof error));
    assert_memory_equal(bytes, data + 24, 5);
    entry = safetensors_find(file, "scalar");
    assert_true(safetensors_read(file, entry, 0, 1, bytes, error, sizeof error));
    assert_memory_equal(bytes, data + 29, 8);
    safetensors_close(file);
}

static void test_write_nothing(void **state) {
    (void)state;
    char *path = scratch_path("out.safetensors");
    struct safetensors_writer *writer =
        safetensors_create(path, NULL, 0, NULL, 0, error, sizeof error);
    assert_non_null(writer);
    assert_true(safetensors_finish(writer, error, sizeof error));
    assert_memory_equal(scratch_read(path), "\10\0\0\0\0\0\0\0{}      ", 17);
}

static void test_wrong_amounts(void **state) {
    (void)state;
    uint8_t data[DATA_BYTES + 1] = {0};
    struct safetensors_writer *writer = create(scratch_path("out"));
    assert_false(safetensors_write(writer, data, DATA_BYTES + 1, error, sizeof error));
    assert_contains(error, "more bytes came than its header promises");
    assert_false(safetensors_write(writer, data, 1, error, sizeof error));
    assert_false(safetensors_finish(writer, error, sizeof error));
    writer = create(scratch_path("out"));
    assert_true(safetensors_write(writer, data, DATA_BYTES - 1, error, sizeof error));
    assert_false(safetensors_finish(writer, error, sizeof error));
    assert_contains(error, "fewer bytes came than its header promises");
}

static void assert_create_refused(struct safetensors_entry a, struct safetensors_entry b,
                                  struct safetensors_pair pair, const char *message) {
    const struct safetensors_entry entries[] = {a, b};
    assert_null(safetensors_create(scratch_path("out"), entries, 2, &pair, 1, error, sizeof error));
    assert_contains(error, message);
}

static void test_create_refused(void **state) {
    (void)state;
    const struct safetensors_pair pair = {"k", "v"}, bad_pair = {"k", "\xff"}, no_key = {"", "v"};
    const struct safetensors_entry a = {.name = "a"}, b = {.name = "b"}, none = {.name = ""},
                                   reserved = {.name = "__metadata__"}, latin = {.name = "\xe4"},
                                   huge = {.name = "huge",
                                           .dims = 2,
                                           .shape = {1u << 31, 1u << 31}},
                                   dims = {.name = "dims", .dims = 9};
    assert_create_refused(a, a, pair, "\"a\" is empty, there twice");
    assert_create_refused(a, none, pair, "\"\" is empty");
    assert_create_refused(reserved, b, pair, "\"__metadata__\" is empty, there twice, reserved");
    assert_create_refused(latin, b, pair, "not UTF-8");
    assert_create_refused(a, b, bad_pair, "not UTF-8");
    assert_create_refused(a, b, no_key, "\"\" is empty");
    assert_create_refused(huge, b, pair, "too large");
    assert_create_refused(dims, b, pair, "too large");
    assert_null(safetensors_create(scratch_path("no/folder"), &a, 1, NULL, 0, error, sizeof error));
    assert_contains(error, "cannot be written: No such file or directory");
}

static void test_sync(void **state) {
    (void)state;
    uint8_t data[DATA_BYTES] = {0};
    for (int fails = 0; fails < 2; fails++) {
        sync_calls = 0;
        sync_fails = fails;
        struct safetensors_writer *writer = create(scratch_path("out"));
        assert_true(safetensors_write(writer, data, DATA_BYTES, error, sizeof error));
        assert_int_equal(safetensors_finish(writer, error, sizeof error), !fails);
        assert_int_equal(sync_calls, 1);
    }
    sync_fails = false;
    assert_contains(error, "out: cannot be written: Input/output error");
}

// A full disk is found at the latest when the file is closed.
static void test_full_disk(void **state) {
    (void)state;
    uint8_t data[DATA_BYTES] = {0};
    struct safetensors_writer *writer = create("/dev/full");
    safetensors_write(writer, data, DATA_BYTES, error, sizeof error);
    error[0] = '\0';
    assert_false(safetensors_finish(writer, error, sizeof error));
    assert_contains(error, "/dev/full: cannot be written: No space left on device");
    const struct safetensors_entry large = {.name = "large", .dims = 1, .shape = {1 << 18}};
    static uint8_t zeros[1 << 20];
    writer = safetensors_create("/dev/full", &large, 1, NULL, 0, error, sizeof error);
    assert_non_null(writer);
    assert_false(safetensors_write(writer, zeros, sizeof zeros, error, sizeof error));
    assert_contains(error, "No space left on device");
    assert_false(safetensors_finish(writer, error, sizeof error));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        scratch_test(test_read),          scratch_test(test_read_outside),
        scratch_test(test_other_types),   scratch_test(test_empty),
        scratch_test(test_strings),       scratch_test(test_broken_json),
        scratch_test(test_layout),        scratch_test(test_shapes),
        scratch_test(test_length),        scratch_test(test_damage),
        scratch_test(test_write),         scratch_test(test_write_nothing),
        scratch_test(test_wrong_amounts), scratch_test(test_create_refused),
        scratch_test(test_sync),          scratch_test(test_full_disk),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
