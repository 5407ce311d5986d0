#include "args.h"
#include "child.h"
#include <math.h>

enum { WORDS_MAX = 16 };

static struct {
    int64_t batch, tp, offset, big, seed;
    double lr, x;
    const char *data, *optimizer;
    bool overlap, resume;
} v;

static const struct arg COMMON[] = {
    {"--data", ARG_STRING, &v.data, .unit = "PATH", .group = "Training", .help = "a file"},
    {"--batch", ARG_INT, &v.batch, 1, 65536, .help = "samples in a step, over all ranks"},
    {"--lr", ARG_DOUBLE, &v.lr, 0, 10, .group = "Optimizer", .help = "learning rate"},
    {"--optimizer", ARG_CHOICE, &v.optimizer, .choices = "sgd|adamw|adadelta",
     .help = "how gradients change parameters, told in so many words that they need a second line"},
    {"--x", ARG_DOUBLE, &v.x, .help = "no bounds"},
    {0},
};

static const struct arg CHAPTER[] = {
    {"--tp", ARG_INT, &v.tp, 1, 1024, .group = "Mesh", .help = "ranks in a tensor-parallel group"},
    {"--offset", ARG_INT, &v.offset, .help = "no bounds"},
    {"--big", ARG_INT, &v.big, 5, 0, .help = "at least 5", .absent = "by --size"},
    {"--seed", ARG_INT, &v.seed, 0, 9007199254740992, .help = "up to 2^53"},
    {"--overlap", ARG_FLAG, &v.overlap, .help = "on by default"},
    {"--resume", ARG_FLAG, &v.resume, .group = "Training", .help = "off by default"},
    {0},
};

static void defaults(void) {
    memset(&v, 0, sizeof v);
    v.batch = 64;
    v.tp = 1;
    v.lr = 2e-3;
    v.data = "/usr/share/datasets/fashion-mnist";
    v.optimizer = "adamw";
    v.overlap = true;
}

static void parse(char **words) {
    static const struct arg *const tables[] = {COMMON, CHAPTER};
    char *argv[WORDS_MAX] = {"program"};
    int argc = 1;
    for (; *words != NULL; words++) {
        argv[argc++] = *words;
    }
    defaults();
    args_parse(argc, argv, "trains a model", tables, 2);
}

#define PARSE(...) parse((char *[]){__VA_ARGS__, NULL})

static void test_values(void **state) {
    (void)state;
    PARSE("--batch", "8", "--lr=1e-2", "--optimizer", "sgd", "--data=a=b", "--resume", "--x",
          "-1.5");
    assert_int_equal(v.batch, 8);
    assert_true(v.lr == 1e-2);
    assert_string_equal(v.optimizer, "sgd");
    assert_string_equal(v.data, "a=b");
    assert_true(v.resume);
    assert_true(v.x == -1.5);
    assert_int_equal(v.tp, 1);
    assert_true(args_given("--batch"));
    assert_false(args_given("--tp"));
    assert_false(args_given("--unknown"));
}

static void test_given_is_forgotten(void **state) {
    (void)state;
    PARSE("--batch", "8");
    PARSE("--tp", "2");
    assert_false(args_given("--batch"));
    assert_true(args_given("--tp"));
}

static void test_extreme_numbers(void **state) {
    (void)state;
    PARSE("--offset", "-9223372036854775808", "--batch", "65536", "--lr", "0", "--x", "1e-320");
    assert_true(v.offset == INT64_MIN);
    assert_int_equal(v.batch, 65536);
    assert_true(v.lr == 0);
    assert_true(v.x == 1e-320);
    PARSE("--offset", "+9223372036854775807", "--big", "5", "--lr", "10");
    assert_true(v.offset == INT64_MAX);
    assert_int_equal(v.big, 5);
}

static void test_tables_may_go(void **state) {
    (void)state;
    static const char name[] = "--gone";
    struct arg *table = calloc(2, sizeof *table);
    table[0] = (struct arg){
        .name = name,
        .kind = ARG_INT,
        .value = &v.batch,
    };
    const struct arg *tables[] = {table};
    char *argv[] = {"program", "--gone", "3", NULL};
    args_parse(3, argv, "", tables, 1);
    free(table);
    assert_true(args_given("--gone"));
}

static void parse_body(void *argument) {
    parse(argument);
}

// The message of a command line that must be refused.
static void assert_refused(char **words, const char *message) {
    struct child child = child_run(parse_body, words);
    assert_user_error(&child, PARTS(message));
    assert_string_equal(child.out, "");
}

#define REFUSED(message, ...) assert_refused((char *[]){__VA_ARGS__, NULL}, message)

static void test_names(void **state) {
    (void)state;
    REFUSED("unknown flag --batchsize; did you mean --batch?", "--batchsize", "8");
    REFUSED("unknown flag --btach; did you mean --batch?", "--btach=8");
    REFUSED("unknown flag --Batch; did you mean --batch?", "--Batch", "8");
    REFUSED("unknown flag --q; --help lists all flags", "--q");
    REFUSED("unknown flag --; --help", "--");
    REFUSED("unexpected word 8; --help", "8");
    REFUSED("unexpected word batch; did you mean --batch?", "batch", "8");
    REFUSED("unexpected word -batch; did you mean --batch?", "-batch", "8");
    REFUSED("unexpected word 9; --help", "--batch", "8", "9");
    REFUSED("unexpected word ; --help", "");
    REFUSED("unknown flag --bat; did you mean --batch?", "--bat", "8");
    REFUSED("--batch is given twice", "--batch", "8", "--batch=8");
    REFUSED("--resume is given twice", "--resume", "--resume");
}

static void test_missing_arguments(void **state) {
    (void)state;
    REFUSED("--batch needs an argument: --batch N", "--batch");
    REFUSED("--data needs an argument: --data=PATH", "--data=");
    REFUSED("--data needs an argument: --data PATH", "--data", "");
    REFUSED("found the flag --batch", "--data", "--batch", "8");
    REFUSED("needs an argument: --optimizer sgd|adamw|adadelta", "--optimizer");
    REFUSED("--resume takes no argument; found \"yes\"", "--resume=yes");
    REFUSED("--resume takes no argument; found \"\"", "--resume=");
}

static void test_malformed_numbers(void **state) {
    (void)state;
    static const char *const ints[] = {"1.5", "1e3", "0x10", "8 ",  " 8",
                                       "8a",  "a",   "-",    "+-1", "٣"};
    static const char *const doubles[] = {"0x10", "inf", "nan", "-inf", "1e",  "1.2.3",
                                          " 1",   "1 ",  "1,5", ".",    "1e+", "1f"};
    for (size_t i = 0; i < sizeof ints / sizeof ints[0]; i++) {
        REFUSED("--batch takes a whole number; found \"", "--batch", (char *)ints[i]);
    }
    for (size_t i = 0; i < sizeof doubles / sizeof doubles[0]; i++) {
        REFUSED("--lr takes a number; found \"", "--lr", (char *)doubles[i]);
    }
    REFUSED("--optimizer takes one of sgd|adamw|adadelta; found \"sg\"", "--optimizer", "sg");
    REFUSED("found \"adamw|adadelta\"", "--optimizer", "adamw|adadelta");
}

static void test_ranges(void **state) {
    (void)state;
    REFUSED("--tp 0 is out of range; expected 1 to 1024", "--tp", "0");
    REFUSED("--tp -1 is out of range; expected 1 to 1024", "--tp", "-1");
    REFUSED("--tp 99999999999 is out of range; expected 1 to 1024", "--tp", "99999999999");
    REFUSED("--tp 99999999999999999999 is out of range; expected 1 to 1024", "--tp",
            "99999999999999999999");
    REFUSED("--batch 65537 is out of range; expected 1 to 65536", "--batch", "65537");
    REFUSED("--offset 9223372036854775808 is out of range", "--offset", "9223372036854775808");
    REFUSED("--big 4 is out of range; expected at least 5", "--big", "4");
    REFUSED("--seed 9007199254740993 is out of range; expected 0 to 9007199254740992", "--seed",
            "9007199254740993");
    REFUSED("--lr 11 is out of range; expected 0 to 10", "--lr", "11");
    REFUSED("--lr -1e-9 is out of range; expected 0 to 10", "--lr=-1e-9");
    REFUSED("--x 1e999 is out of range; expected a number that a double can hold", "--x", "1e999");
    REFUSED("--x -1e999 is out of range", "--x", "-1e999");
    REFUSED("--x 1e-999 is out of range", "--x", "1e-999");
}

static const char HELP[] =
    "test_args: trains a model\n"
    "\n"
    "Usage: test_args [--flag VALUE | --flag=VALUE]...\n"
    "\n"
    "Training\n"
    "  --data PATH               a file (default: /usr/share/datasets/fashion-mnist)\n"
    "  --batch N                 samples in a step, over all ranks (default: 64)\n"
    "  --resume                  off by default\n"
    "\n"
    "Optimizer\n"
    "  --lr N                    learning rate (default: 0.002)\n"
    "  --optimizer sgd|adamw|adadelta\n"
    "                            how gradients change parameters, told in so many\n"
    "                            words that they need a second line (default: adamw)\n"
    "  --x N                     no bounds (default: 0)\n"
    "\n"
    "Mesh\n"
    "  --tp N                    ranks in a tensor-parallel group (default: 1)\n"
    "  --offset N                no bounds (default: 0)\n"
    "  --big N                   at least 5 (default: by --size)\n"
    "  --seed N                  up to 2^53 (default: 0)\n"
    "  --overlap                 on by default (default: on)\n"
    "\n"
    "Help\n"
    "  --help                    print this text and exit\n";

static void test_help(void **state) {
    (void)state;
    char *words[] = {"--batch", "nonsense", "--help", NULL};
    struct child child = child_run(parse_body, words);
    assert_int_equal(child.exit_code, 0);
    assert_string_equal(child.out, HELP);
    assert_string_equal(child.err, "");
    char *short_words[] = {"-h", NULL};
    child = child_run(parse_body, short_words);
    assert_string_equal(child.out, HELP);
}

static void long_help_body(void *argument) {
    const char *text = argument;
    const struct arg table[] = {
        {"--text", ARG_STRING, &text, .help = "text"},
        {0},
    };
    const struct arg *tables[] = {table};
    char *argv[] = {"program", "--help", NULL};
    args_parse(2, argv, "p", tables, 1);
}

static void test_help_fits_the_terminal(void **state) {
    (void)state;
    char word[301];
    memset(word, 'w', 300);
    word[300] = '\0';
    struct child child = child_run(long_help_body, word);
    assert_int_equal(child.exit_code, 0);
    for (const char *line = child.out; *line != '\0'; line += strcspn(line, "\n") + 1) {
        assert_in_range(strcspn(line, "\n"), 0, 80);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_given_is_forgotten),
        cmocka_unit_test(test_extreme_numbers),
        cmocka_unit_test(test_tables_may_go),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_missing_arguments),
        cmocka_unit_test(test_malformed_numbers),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_help),
        cmocka_unit_test(test_help_fits_the_terminal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
