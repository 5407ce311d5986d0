#include "child.h"
#include "error.h"
#include <signal.h>

static void user_body(void *argument) {
    printf("printed before");
    error_user("%s: found %d, expected 3", (const char *)argument, 7);
}

static void test_user(void **state) {
    (void)state;
    struct child child = child_run(user_body, "file");
    assert_int_equal(child.exit_code, 2);
    assert_string_equal(child.err, "test_error: file: found 7, expected 3\n");
    assert_string_equal(child.out, "printed before");
}

static void test_user_disarms_terminal_commands(void **state) {
    (void)state;
    struct child child = child_run(user_body, "\033[2J\r\x7f\xc2\x9b\tä\n");
    assert_string_equal(child.err, "test_error: ?[2J?????ä?: found 7, expected 3\n");
}

static void lines_body(void *argument) {
    error_user("one\ntwo %s\nthree", (const char *)argument);
}

static void test_user_lines(void **state) {
    (void)state;
    struct child child = child_run(lines_body, "a\nb");
    assert_string_equal(child.err, "test_error: one\ntwo a?b\nthree\n");
}

static void warning_body(void *argument) {
    error_warning("%s: cannot be written", (const char *)argument);
}

static void test_warning(void **state) {
    (void)state;
    struct child child = child_run(warning_body, "a\nb");
    assert_int_equal(child.exit_code, 0);
    assert_string_equal(child.err, "warning: a?b: cannot be written\n");
}

static void test_user_cuts_long_text(void **state) {
    (void)state;
    char *text = malloc(100001);
    memset(text, 'x', 100000);
    text[100000] = '\0';
    struct child child = child_run(user_body, text);
    assert_int_equal(child.exit_code, 2);
    size_t length = strlen(child.err);
    assert_in_range(length, 1000, 16384);
    free(text);
}

static void hook_user(const char *text) {
    fprintf(stderr, "hook: %s", text);
    exit(2);
}

static void user_hook_body(void *argument) {
    (void)argument;
    error_set_hooks((struct error_hooks){
        .rank = 3,
        .user = hook_user,
    });
    error_user("mistake");
}

static void test_user_hook(void **state) {
    (void)state;
    struct child child = child_run(user_hook_body, NULL);
    assert_int_equal(child.exit_code, 2);
    assert_string_equal(child.err, "hook: test_error: mistake\n");
}

static void check_body(void *argument) {
    int *calls = argument;
    printf("never flushed");
    CHECK(++*calls == 2);
}

static void test_fatal(void **state) {
    (void)state;
    int calls = 0;
    char host[256] = "", expected[512];
    struct child child = child_run(check_body, &calls);
    gethostname(host, sizeof host - 1);
    snprintf(expected, sizeof expected, "rank 0 on %s: ", host);
    assert_int_equal(child.signal, SIGABRT);
    assert_memory_equal(child.err, expected, strlen(expected));
    assert_contains(child.err, "test_error.c:");
    assert_contains(child.err, ": CHECK(++*calls == 2) failed\n");
    assert_string_equal(child.out, "");
}

static void test_check_evaluates_once(void **state) {
    (void)state;
    int calls = 0;
    CHECK(++calls == 1);
    assert_int_equal(calls, 1);
}

static void hook_abort(void) {
    _exit(9);
}

static void fatal_hook_body(void *argument) {
    (void)argument;
    error_set_hooks((struct error_hooks){
        .rank = 5,
        .abort = hook_abort,
    });
    if (error_rank() == 5) {
        error_fatal("somewhere.c", 12, "count %d", 4);
    }
}

static void test_fatal_hook(void **state) {
    (void)state;
    struct child child = child_run(fatal_hook_body, NULL);
    assert_int_equal(child.exit_code, 9);
    assert_contains(child.err, "rank 5 on ");
    assert_contains(child.err, ": somewhere.c:12: count 4\n");
}

static void test_text(void **state) {
    (void)state;
    char text[8];
    assert_false(error_text(text, sizeof text, "%d is too much", 12));
    assert_string_equal(text, "12 is t");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_user),
        cmocka_unit_test(test_user_disarms_terminal_commands),
        cmocka_unit_test(test_user_lines),
        cmocka_unit_test(test_warning),
        cmocka_unit_test(test_user_cuts_long_text),
        cmocka_unit_test(test_user_hook),
        cmocka_unit_test(test_fatal),
        cmocka_unit_test(test_check_evaluates_once),
        cmocka_unit_test(test_fatal_hook),
        cmocka_unit_test(test_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
