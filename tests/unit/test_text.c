#include "child.h"
#include "scratch.h"
#include "text.h"

static const char HINT[] = "name a text file with --data FILE";

static void open_body(void *argument) {
    struct text text;
    text_open(&text, argument, HINT);
    text_free(&text);
}

static void test_open(void **state) {
    (void)state;
    struct text text;
    char *path = scratch_path("text");
    scratch_write(path, "one\0two\xff", 8);
    text_open(&text, path, NULL);
    assert_int_equal(text.count, 8);
    assert_memory_equal(text.bytes, "one\0two\xff", 8);
    assert_string_equal(text.path, path);
    text_free(&text);
    assert_null(text.bytes);
}

static void test_large(void **state) {
    (void)state;
    enum { COUNT = 1000003 };
    struct text text;
    char *bytes = malloc(COUNT);
    for (int i = 0; i < COUNT; i++) {
        bytes[i] = (char)(i % 127);
    }
    scratch_write(scratch_path("text"), bytes, COUNT);
    text_open(&text, scratch_path("text"), HINT);
    assert_int_equal(text.count, COUNT);
    assert_memory_equal(text.bytes, bytes, COUNT);
    text_free(&text);
    free(bytes);
}

static void assert_refused(char *path, const char *message) {
    struct child child = child_run(open_body, path);
    assert_user_error(&child, PARTS(path, message, HINT));
}

static void test_refused(void **state) {
    (void)state;
    assert_refused(scratch_path("missing"), "there is no such file");
    assert_refused(scratch_folder, "is a folder; expected a file");
    assert_refused("/dev/null", "is not a regular file");
    scratch_write(scratch_path("empty"), "", 0);
    assert_refused(scratch_path("empty"), "the file is empty");
    assert_int_equal(mkfifo(scratch_path("pipe"), 0777), 0);
    assert_refused(scratch_path("pipe"), "is not a regular file"); // and does not wait for a writer
    assert_refused(scratch_path("empty/file"), "cannot be opened: Not a directory");
}

static void short_body(void *argument) {
    text_check_count(argument, 9, "one window of --seq 8");
}

static void vocab_body(void *argument) {
    text_check_vocab(argument, 'x');
}

static void test_checks(void **state) {
    (void)state;
    struct text text = {
        .bytes = (uint8_t *)"abcdwxyz",
        .count = 8,
        .path = (char *)"book",
    };
    text_check_count(&text, 8, "");
    text_check_vocab(&text, 'z' + 1);
    struct child child = child_run(short_body, &text);
    assert_user_error(&child, PARTS("book: the text has 8 bytes; expected at least 9: one window"));
    child = child_run(vocab_body, &text);
    assert_user_error(&child,
                      PARTS("book: byte 5 has the value 120; with --vocab 120 values are 0 to "
                            "119; use --vocab 256"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        scratch_test(test_open),
        scratch_test(test_large),
        scratch_test(test_refused),
        cmocka_unit_test(test_checks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
