// The timeline: what is recorded, and the file.
#include "common/trace.h"
#include "scratch.h"
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <time.h>

// ---- a reader of JSON --------------------------------------------------------------------------

// Each takes the text at *at and moves on; false if it is no JSON. No function of the library sees
// the rest of the text: the address sanitizer would read all of it, each time.
static bool json_value(const char **at);

static void json_space(const char **at) {
    while (**at == ' ' || **at == '\n' || **at == '\r' || **at == '\t') {
        (*at)++;
    }
}

static bool json_take(const char **at, char wanted) {
    json_space(at);
    if (**at != wanted) {
        return false;
    }
    (*at)++;
    return true;
}

// What follows a backslash.
static bool json_escape(const char **at) {
    if (**at == '\0' || strchr("\"\\/bfnrtu", **at) == NULL) {
        return false;
    }
    for (int i = **at == 'u' ? 4 : 0; i > 0; i--) {
        if (!isxdigit((unsigned char)*++*at)) {
            return false;
        }
    }
    (*at)++;
    return true;
}

static bool json_string(const char **at) {
    if (!json_take(at, '"')) {
        return false;
    }
    while (**at != '"') {
        unsigned char c = (unsigned char)*(*at)++;
        if (c < 0x20 || (c == '\\' && !json_escape(at))) {
            return false;
        }
    }
    (*at)++;
    return true;
}

static bool json_number(const char **at) {
    char digits[64];
    char *end;
    size_t length = 0;
    while (length < sizeof digits - 1 &&
           (isalnum((unsigned char)**at) || **at == '-' || **at == '+' || **at == '.')) {
        digits[length++] = *(*at)++;
    }
    digits[length] = '\0';
    strtod(digits, &end);
    // strtod() knows "inf" and "nan", too
    return (digits[0] == '-' || isdigit((unsigned char)digits[0])) && *end == '\0';
}

// Up to the closing bracket; an object has keys.
static bool json_members(const char **at, bool keys, char end) {
    if (json_take(at, end)) {
        return true;
    }
    do {
        if (keys && !(json_string(at) && json_take(at, ':'))) {
            return false;
        }
        if (!json_value(at)) {
            return false;
        }
    } while (json_take(at, ','));
    return json_take(at, end);
}

static bool json_value(const char **at) {
    if (json_take(at, '{')) {
        return json_members(at, true, '}');
    }
    if (json_take(at, '[')) {
        return json_members(at, false, ']');
    }
    if (**at == '"') {
        return json_string(at);
    }
    return json_number(at);
}

static bool is_json(const char *text) {
    bool good = json_value(&text);
    json_space(&text);
    return good && *text == '\0';
}

static void test_the_reader(void **state) {
    (void)state;
    assert_true(is_json("{\"a\": [1, -2.5e3, {}], \"b\\\"\\u001f\\\\u\": \"c\"}\n"));
    const char *const wrong[] = {
        "",        "{\"a\": 1",  "[1,]",      "[,1]",       "[1] 2",         "{1: 2}", "[nan]",
        "[1.2.3]", "[\"a\nb\"]", "[\"\\x\"]", "[\"a\"b\"]", "[\"\\u00g0\"]", "[1 2]",
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        if (is_json(wrong[i])) {
            fail_msg("taken for JSON: %s", wrong[i]);
        }
    }
}

// ---- helpers -----------------------------------------------------------------------------------

// The file, which must be JSON. The caller frees it.
static char *read_trace(const char *path) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    size_t length = (size_t)ftell(file);
    rewind(file);
    char *text = calloc(length + 1, 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, length, file), length);
    fclose(file);
    if (!is_json(text)) {
        fail_msg("not JSON: %.2000s", text);
    }
    return text;
}

static char *finish_and_read(const char *path) {
    assert_true(trace_finish(comm_self()));
    assert_false(trace_on());
    return read_trace(path);
}

static const char *find(const char *text, const char *part) {
    const char *found = strstr(text, part);
    if (found == NULL) {
        fail_msg("expected \"%s\" in \"%.4000s\"", part, text);
    }
    return found;
}

static size_t count_of(const char *text, const char *part) {
    size_t count = 0;
    for (const char *at = text; *at != '\0'; at++) {
        count += strncmp(at, part, strlen(part)) == 0;
    }
    return count;
}

struct times {
    double begin_us;
    double end_us;
};

// The times of the span that has this name, and of which nothing else is unknown.
static struct times span_times(const char *text, const char *name) {
    char start[256];
    double ts = 0, dur = 0;
    int length = 0;
    snprintf(
        start, sizeof start,
        "{\"ph\": \"X\", \"cat\": \"user_annotation\", \"name\": \"%s\", \"pid\": 0, \"tid\": 0, ",
        name);
    const char *rest = find(text, start) + strlen(start);
    assert_int_equal(count_of(text, start), 1);
    assert_int_equal(sscanf(rest, "\"ts\": %lf, \"dur\": %lf}%n", &ts, &dur, &length), 2);
    assert_true(length > 0);
    assert_int_equal(strchr(strstr(rest, "\"dur\""), '}') - strchr(strstr(rest, "\"dur\""), '.'),
                     4);
    return (struct times){ts, ts + dur};
}

static bool inside(struct times inner, struct times outer) {
    return outer.begin_us <= inner.begin_us && inner.begin_us <= inner.end_us &&
           inner.end_us <= outer.end_us;
}

static const struct trace_call CALL = {
    .kind = COMM_ALL_REDUCE,
    .group = "dp",
    .group_size = 4,
    .count = 1000,
    .dtype = DTYPE_F32,
    .bytes = 4000,
    .number = 7,
    .enqueued_us = 1700000000000000.5,
    .begin_us = 1700000000000010.25,
    .end_us = 1700000000000110.75,
};

// ---- tests -------------------------------------------------------------------------------------

static void test_the_clock(void **state) {
    (void)state;
    struct timespec real;
    clock_gettime(CLOCK_REALTIME, &real);
    double real_us = (double)real.tv_sec * 1e6 + (double)real.tv_nsec * 1e-3;
    double last = trace_now_us();
    assert_true(last > real_us - 60e6 && last < real_us + 60e6);
    for (int i = 0; i < 1000; i++) {
        double now = trace_now_us();
        assert_true(now >= last);
        last = now;
    }
    nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    assert_true(trace_now_us() - last >= 2000 - 1);
}

static void test_off_records_nothing(void **state) {
    (void)state;
    trace_start(NULL);
    assert_false(trace_on());
    trace_begin("forward", 0);
    trace_end();
    trace_end(); // even one too many
    trace_record_call(&CALL);
    assert_true(trace_finish(comm_self()));
    const char *path = scratch_path("trace.json");
    assert_int_equal(access(path, F_OK), -1);
    trace_start(path);
    assert_true(trace_on());
    char *text = finish_and_read(path);
    assert_int_equal(count_of(text, "\"ph\": \"X\""), 0);
    trace_begin("forward", 0); // off again
    trace_record_call(&CALL);
    assert_true(trace_finish(comm_self()));
    free(text);
}

static void test_head(void **state) {
    (void)state;
    const char *path = scratch_path("new/folder/trace.json");
    trace_start(path);
    char *text = finish_and_read(path);
    assert_string_equal(
        text, "{\n"
              "\"schemaVersion\": 1,\n"
              "\"displayTimeUnit\": \"ms\",\n"
              "\"baseTimeNanoseconds\": 0,\n"
              "\"distributedInfo\": {\"backend\": \"self\", \"rank\": 0, \"world_size\": 1},\n"
              "\"traceEvents\": [\n"
              "{\"ph\": \"M\", \"pid\": 0, \"tid\": 0, \"name\": \"process_name\", \"args\": "
              "{\"name\": \"rank 0\"}},\n"
              "{\"ph\": \"M\", \"pid\": 0, \"tid\": 0, \"name\": \"process_sort_index\", \"args\": "
              "{\"sort_index\": 0}},\n"
              "{\"ph\": \"M\", \"pid\": 0, \"tid\": 0, \"name\": \"thread_name\", \"args\": "
              "{\"name\": \"compute\"}},\n"
              "{\"ph\": \"M\", \"pid\": 0, \"tid\": 0, \"name\": \"thread_sort_index\", \"args\": "
              "{\"sort_index\": 0}},\n"
              "{\"ph\": \"M\", \"pid\": 0, \"tid\": 1, \"name\": \"thread_name\", \"args\": "
              "{\"name\": \"communication\"}},\n"
              "{\"ph\": \"M\", \"pid\": 0, \"tid\": 1, \"name\": \"thread_sort_index\", \"args\": "
              "{\"sort_index\": 1}}\n"
              "]\n"
              "}\n");
    free(text);
}

static void test_spans_nest(void **state) {
    (void)state;
    const char *path = scratch_path("trace.json");
    double before = trace_now_us();
    trace_start(path);
    trace_begin("step", -1);
    trace_begin("forward", 0);
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    trace_end();
    trace_begin("forward", 3);
    trace_begin("inner", -1);
    trace_end();
    trace_end();
    trace_end();
    trace_begin("optimizer", -1);
    trace_end();
    char *text = finish_and_read(path);
    struct times step = span_times(text, "step");
    struct times first = span_times(text, "forward 0");
    struct times second = span_times(text, "forward 3");
    struct times inner = span_times(text, "inner");
    struct times optimizer = span_times(text, "optimizer");
    assert_true(before <= step.begin_us && optimizer.end_us <= trace_now_us());
    assert_true(inside(first, step) && inside(second, step) && inside(inner, second));
    assert_true(first.end_us - first.begin_us >= 1000 - 1);
    assert_true(first.end_us <= second.begin_us && step.end_us <= optimizer.begin_us);
    assert_true(optimizer.end_us - optimizer.begin_us < 60e6);
    assert_int_equal(count_of(text, "\"ph\": \"X\""), 5);
    free(text);
}

static void test_open_spans_end(void **state) {
    (void)state;
    const char *path = scratch_path("trace.json");
    trace_start(path);
    trace_begin("outer", -1);
    trace_begin("inner", 1);
    char *text = finish_and_read(path);
    struct times outer = span_times(text, "outer");
    assert_true(inside(span_times(text, "inner 1"), outer));
    assert_true(outer.end_us <= trace_now_us());
    free(text);
}

static size_t files_in_folder(void) {
    DIR *folder = opendir(scratch_folder);
    size_t files = 0;
    assert_non_null(folder);
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        files += entry->d_name[0] != '.';
    }
    closedir(folder);
    return files;
}

// How one call of 4 ranks reads in the file.
static void check_call(enum comm_kind kind, const char *name, const char *collective, int in,
                       int out) {
    char expected[1024];
    const char *path = scratch_path("trace.json");
    struct trace_call call = CALL;
    call.kind = kind;
    trace_start(path);
    trace_record_call(&call);
    char *text = finish_and_read(path);
    snprintf(expected, sizeof expected,
             ",\n{\"ph\": \"X\", \"cat\": \"kernel\", \"name\": \"%s\", \"pid\": 0, \"tid\": 1, "
             "\"ts\": 1700000000000010.250, \"dur\": 100.500, \"args\": {"
             "\"Collective name\": \"%s\", \"In msg nelems\": %d, \"Out msg nelems\": %d, "
             "\"Group size\": 4, \"dtype\": \"Float\", \"Process Group Name\": \"dp\", "
             "\"bytes\": 4000, \"call\": 7, \"queued us\": 9.750}}\n]\n}\n",
             name, collective, in, out);
    find(text, expected);
    free(text);
}

static void test_calls(void **state) {
    (void)state;
    check_call(COMM_ALL_REDUCE, "all-reduce", "allreduce", 1000, 1000);
    check_call(COMM_REDUCE_SCATTER, "reduce-scatter", "_reduce_scatter_base", 1000, 250);
    check_call(COMM_ALL_GATHER, "all-gather", "_allgather_base", 250, 1000);
    check_call(COMM_BROADCAST, "broadcast", "broadcast", 1000, 1000);
    check_call(COMM_SEND, "send", "send", 1000, 1000);
    check_call(COMM_RECV, "recv", "recv", 1000, 1000);
    check_call(COMM_HOST, "host", "host", 1000, 1000);
}

static void test_types_of_elements(void **state) {
    (void)state;
    const char *const names[] = {"Float", "BFloat16", "Half", "Double", "Int", "Byte"};
    const enum dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_F64, DTYPE_I32, DTYPE_U8};
    const char *path = scratch_path("trace.json");
    trace_start(path);
    for (size_t i = 0; i < 6; i++) {
        struct trace_call call = CALL;
        call.dtype = dtypes[i];
        call.number = i;
        trace_record_call(&call);
    }
    char *text = finish_and_read(path);
    const char *at = text;
    for (int i = 0; i < 6; i++) {
        char expected[128];
        snprintf(expected, sizeof expected, "\"dtype\": \"%s\"", names[i]);
        at = find(at, expected);
        snprintf(expected, sizeof expected, "\"call\": %d,", i);
        find(at, expected);
    }
    free(text);
}

static void test_names_are_escaped(void **state) {
    (void)state;
    const char *path = scratch_path("trace.json");
    struct trace_call call = CALL;
    call.group = "d\"p\\\n";
    trace_start(path);
    trace_begin("a\"b\\c\td\x1f \xc3\xa9", 2);
    trace_end();
    trace_record_call(&call);
    char *text = finish_and_read(path);
    find(text, "\"name\": \"a\\\"b\\\\c\\u0009d\\u001f \xc3\xa9 2\"");
    find(text, "\"Process Group Name\": \"d\\\"p\\\\\\u000a\"");
    free(text);
}

enum { THREADS = 4, CALLS = 3000 };

static void *record_calls(void *argument) {
    struct trace_call call = CALL;
    call.group_size = *(int *)argument;
    for (int i = 0; i < CALLS; i++) {
        call.number = (uint64_t)i;
        trace_record_call(&call);
    }
    return NULL;
}

// More events than fit into one piece of the file, from several threads.
static void test_many_events(void **state) {
    (void)state;
    const char *path = scratch_path("trace.json");
    int sizes[THREADS];
    pthread_t threads[THREADS];
    trace_start(path);
    for (int i = 0; i < THREADS; i++) {
        sizes[i] = i + 1;
        assert_int_equal(pthread_create(&threads[i], NULL, record_calls, &sizes[i]), 0);
    }
    for (int i = 0; i < CALLS; i++) {
        trace_begin("forward", i);
        trace_end();
    }
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
    char *text = finish_and_read(path);
    assert_true(strlen(text) > 3 * (1 << 20));
    assert_int_equal(count_of(text, "\"name\": \"forward "), CALLS);
    for (int i = 0; i < THREADS; i++) {
        char part[32];
        snprintf(part, sizeof part, "\"Group size\": %d,", sizes[i]);
        assert_int_equal(count_of(text, part), CALLS);
    }
    assert_int_equal(count_of(text, "\"call\": 2999,"), THREADS);
    free(text);
}

// What trace_finish() prints on stderr. The caller reads it with scratch_read().
static bool finish_with_stderr(const char *path) {
    fflush(stderr);
    int saved = dup(STDERR_FILENO);
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    assert_true(saved >= 0 && file >= 0);
    dup2(file, STDERR_FILENO);
    bool good = trace_finish(comm_self());
    fflush(stderr);
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(file);
    return good;
}

static void test_a_path_that_cannot_be_written(void **state) {
    (void)state;
    const char *messages = scratch_path("messages");
    scratch_write(scratch_path("file"), "x", 1);
    trace_start(scratch_path("file/trace.json"));
    trace_begin("forward", 0);
    trace_end();
    trace_record_call(&CALL);
    assert_false(finish_with_stderr(messages));
    const char *text = scratch_read(messages);
    assert_ptr_equal(find(text, "warning: no trace written: "), text);
    find(text, "file/trace.json: ");
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
    assert_false(trace_on());
    assert_string_equal(scratch_read(scratch_path("file")), "x");
}

static void test_a_device(void **state) {
    (void)state;
    trace_start("/dev/full");
    assert_false(finish_with_stderr(scratch_path("messages")));
    find(scratch_read(scratch_path("messages")), "/dev/full: ");
}

// Files may grow to 500 bytes only, so that, as on a full disk, a part of it cannot be written.
static void test_a_full_disk(void **state) {
    (void)state;
    const char *path = scratch_path("trace.json"), *messages = scratch_path("messages");
    struct rlimit saved, small;
    scratch_write(path, "old", 3);
    getrlimit(RLIMIT_FSIZE, &saved);
    small = saved;
    small.rlim_cur = 500;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    trace_start(path);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    bool good = finish_with_stderr(messages);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &saved), 0);
    signal(SIGXFSZ, handler);
    assert_false(good);
    find(scratch_read(messages), "trace.json: cannot be written: ");
    assert_string_equal(scratch_read(path), "old");
    assert_int_equal(files_in_folder(), 2); // no temporary one is left
}

static void test_an_old_file_is_replaced(void **state) {
    (void)state;
    const char *path = scratch_path("trace.json");
    scratch_write(path, "old", 3);
    trace_start(path);
    assert_string_equal(scratch_read(path), "old");
    char *text = finish_and_read(path);
    assert_null(strstr(text, "old"));
    free(text);
    assert_int_equal(files_in_folder(), 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_reader),
        cmocka_unit_test(test_the_clock),
        scratch_test(test_off_records_nothing),
        scratch_test(test_head),
        scratch_test(test_spans_nest),
        scratch_test(test_open_spans_end),
        scratch_test(test_calls),
        scratch_test(test_types_of_elements),
        scratch_test(test_names_are_escaped),
        scratch_test(test_many_events),
        scratch_test(test_a_path_that_cannot_be_written),
        scratch_test(test_a_device),
        scratch_test(test_a_full_disk),
        scratch_test(test_an_old_file_is_replaced),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
