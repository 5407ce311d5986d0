#include "args.h"
#include "error.h"
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HELP_COLUMNS = 80,
    HELP_INDENT = 28, // where the explanations begin
    NAME_BYTES_MAX = 64, // longest name of a flag
    LINE_BYTES = 1024,
};

// The flags of all tables, and which were on the command line.
static struct {
    struct arg *args; // (count) copies: args_given() works when the tables are gone
    bool *given; // (count)
    size_t count;
} flags;

// ---- the tables --------------------------------------------------------------------------------

// Index of the flag whose name is the first `length` bytes of `name`; flags.count if there is none.
static size_t flag_find(const char *name, size_t length) {
    for (size_t k = 0; k < flags.count; k++) {
        if (strlen(flags.args[k].name) == length && memcmp(flags.args[k].name, name, length) == 0) {
            return k;
        }
    }
    return flags.count;
}

static void flags_collect(const struct arg *const *tables, size_t table_count) {
    size_t total = 0;
    for (size_t t = 0; t < table_count; t++) {
        for (const struct arg *a = tables[t]; a->kind != ARG_NONE; a++) {
            total++;
        }
    }
    free(flags.args);
    free(flags.given);
    flags.args = calloc(total + 1, sizeof *flags.args);
    flags.given = calloc(total + 1, sizeof *flags.given);
    flags.count = 0;
    CHECK(flags.args != NULL && flags.given != NULL);
    for (size_t t = 0; t < table_count; t++) {
        for (const struct arg *a = tables[t]; a->kind != ARG_NONE; a++) {
            CHECK(strlen(a->name) <= NAME_BYTES_MAX);
            CHECK(flag_find(a->name, strlen(a->name)) == flags.count); // one flag, one row
            flags.args[flags.count++] = *a;
        }
    }
}

bool args_given(const char *name) {
    size_t k = flag_find(name, strlen(name));
    return k < flags.count && flags.given[k];
}

// ---- misspelt names ----------------------------------------------------------------------------

static size_t min3(size_t a, size_t b, size_t c) {
    size_t least = a < b ? a : b;
    return least < c ? least : c;
}

// Levenshtein's distance of two words without their dashes.
static size_t edit_distance(const char *a, size_t a_length, const char *b, size_t b_length) {
    size_t row[NAME_BYTES_MAX + 1]; // distances of a's first i bytes from b's first j
    for (size_t j = 0; j <= b_length; j++) {
        row[j] = j;
    }
    for (size_t i = 1; i <= a_length; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_length; j++) {
            size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = min3(row[j] + 1, row[j - 1] + 1, replaced);
        }
    }
    return row[b_length];
}

// As edit_distance(), but a word that begins with the other one is near to it.
static size_t name_distance(const char *a, size_t a_length, const char *b, size_t b_length) {
    size_t shorter = a_length < b_length ? a_length : b_length;
    if (memcmp(a, b, shorter) == 0) {
        return a_length != b_length;
    }
    return edit_distance(a, a_length, b, b_length);
}

// The flag that the user may have meant, or NULL: about a third of the letters may differ.
static const char *nearest_name(const char *word, size_t length) {
    while (length > 0 && *word == '-') {
        word++;
        length--;
    }
    const char *nearest = NULL;
    size_t least = (length + 1) / 3 + 1;
    if (length > NAME_BYTES_MAX) {
        return NULL;
    }
    for (size_t k = 0; k < flags.count; k++) {
        const char *name = flags.args[k].name + 2;
        size_t distance = name_distance(word, length, name, strlen(name));
        if (distance < least) {
            least = distance;
            nearest = flags.args[k].name;
        }
    }
    return nearest;
}

static void refuse_word(const char *word, size_t length) {
    const char *what = strncmp(word, "--", 2) == 0 ? "unknown flag" : "unexpected word";
    const char *nearest = nearest_name(word, length);
    if (nearest != NULL) {
        error_user("%s %.*s; did you mean %s? --help lists all flags of %s", what, (int)length,
                   word, nearest, program_invocation_short_name);
    }
    error_user("%s %.*s; --help lists all flags of %s", what, (int)length, word,
               program_invocation_short_name);
}

// ---- values ------------------------------------------------------------------------------------

// The bounds in words: "1 to 64", "at least 1". Returns false if there are none.
static bool bounds_text(const struct arg *arg, char *text, size_t size) {
    if (arg->min == 0 && arg->max == 0) {
        return false;
    }
    if (arg->max < arg->min || arg->max == INFINITY) {
        snprintf(text, size, "at least %.16g", arg->min);
    } else if (arg->min == -INFINITY) {
        snprintf(text, size, "at most %.16g", arg->max);
    } else {
        snprintf(text, size, "%.16g to %.16g", arg->min, arg->max);
    }
    return true;
}

// long double holds every int64_t and every double exactly.
static bool in_bounds(const struct arg *arg, long double value) {
    long double min = arg->min, max = arg->max;
    if (min == 0 && max == 0) {
        return true;
    }
    return value >= min && (max < min || value <= max);
}

static void refuse_range(const struct arg *arg, const char *word) {
    char bounds[128];
    if (!bounds_text(arg, bounds, sizeof bounds)) {
        if (arg->kind == ARG_INT) {
            snprintf(bounds, sizeof bounds, "%" PRId64 " to %" PRId64, INT64_MIN, INT64_MAX);
        } else {
            snprintf(bounds, sizeof bounds, "a number that a double can hold");
        }
    }
    error_user("%s %s is out of range; expected %s", arg->name, word, bounds);
}

// Only what is written with `allowed` characters: strtoll and strtod take more, such as leading
// blanks, hexadecimal numbers, "inf" and "nan".
static bool consists_of(const char *word, const char *allowed) {
    return word[0] != '\0' && word[strspn(word, allowed)] == '\0';
}

static void set_int(const struct arg *arg, const char *word) {
    char *end = NULL;
    errno = 0;
    int64_t value = strtoll(word, &end, 10);
    if (!consists_of(word, "+-0123456789") || *end != '\0' || end == word) {
        error_user("%s takes a whole number; found \"%s\"", arg->name, word);
    }
    if (errno == ERANGE || !in_bounds(arg, (long double)value)) {
        refuse_range(arg, word);
    }
    *(int64_t *)arg->value = value;
}

static void set_double(const struct arg *arg, const char *word) {
    char *end = NULL;
    errno = 0;
    double value = strtod(word, &end);
    if (!consists_of(word, "+-.eE0123456789") || *end != '\0' || end == word) {
        error_user("%s takes a number; found \"%s\"", arg->name, word);
    }
    if ((errno == ERANGE && (isinf(value) || value == 0)) || !in_bounds(arg, value)) {
        refuse_range(arg, word);
    }
    *(double *)arg->value = value;
}

static void set_choice(const struct arg *arg, const char *word) {
    size_t length = strlen(word);
    const char *choice = arg->choices;
    while (*choice != '\0') {
        size_t choice_length = strcspn(choice, "|");
        if (choice_length == length && memcmp(choice, word, length) == 0) {
            *(const char **)arg->value = word;
            return;
        }
        choice += choice_length + (choice[choice_length] == '|');
    }
    error_user("%s takes one of %s; found \"%s\"", arg->name, arg->choices, word);
}

static void set_value(const struct arg *arg, const char *word) {
    switch (arg->kind) {
    case ARG_INT:
        set_int(arg, word);
        break;
    case ARG_DOUBLE:
        set_double(arg, word);
        break;
    case ARG_CHOICE:
        set_choice(arg, word);
        break;
    case ARG_STRING:
        *(const char **)arg->value = word;
        break;
    case ARG_FLAG:
    case ARG_NONE:
        error_fatal(__FILE__, __LINE__, "%s takes no argument", arg->name);
    }
}

static const char *unit_text(const struct arg *arg) {
    if (arg->unit != NULL) {
        return arg->unit;
    }
    return arg->kind == ARG_CHOICE ? arg->choices : arg->kind == ARG_STRING ? "TEXT" : "N";
}

// The argument of a flag: what follows '=', or the next word, which must not be a flag itself.
static const char *flag_argument(const struct arg *arg, const char *equals, const char *next) {
    if (equals != NULL) {
        if (equals[1] == '\0') {
            error_user("%s needs an argument: %s=%s", arg->name, arg->name, unit_text(arg));
        }
        return equals + 1;
    }
    if (next == NULL || next[0] == '\0') {
        error_user("%s needs an argument: %s %s", arg->name, arg->name, unit_text(arg));
    }
    if (strncmp(next, "--", 2) == 0) {
        error_user("%s needs an argument: %s %s; found the flag %s (if that is the argument, write "
                   "%s=%s)",
                   arg->name, arg->name, unit_text(arg), next, arg->name, next);
    }
    return next;
}

// ---- help --------------------------------------------------------------------------------------

// Prints words up to the last column; lines after the first begin at `indent`.
static void print_wrapped(const char *text, size_t column, size_t indent) {
    bool first = true;
    while (*text != '\0') {
        size_t length = strcspn(text, " ");
        if (!first && column + 1 + length > HELP_COLUMNS) {
            printf("\n%*s", (int)indent, "");
            column = indent;
        } else if (!first) {
            putchar(' ');
            column++;
        }
        while (column + length > HELP_COLUMNS) { // a word that fits nowhere
            size_t part = HELP_COLUMNS - column;
            printf("%.*s\n%*s", (int)part, text, (int)indent, "");
            text += part;
            length -= part;
            column = indent;
        }
        printf("%.*s", (int)length, text);
        column += length;
        text += length;
        text += strspn(text, " ");
        first = false;
    }
    putchar('\n');
}

// The default as --help shows it; empty if there is nothing to show.
static void default_text(const struct arg *arg, char *text, size_t size) {
    text[0] = '\0';
    if (arg->absent != NULL) {
        snprintf(text, size, " (default: %s)", arg->absent);
    } else if (arg->kind == ARG_INT) {
        snprintf(text, size, " (default: %" PRId64 ")", *(const int64_t *)arg->value);
    } else if (arg->kind == ARG_DOUBLE) {
        snprintf(text, size, " (default: %.15g)", *(const double *)arg->value);
    } else if (arg->kind == ARG_FLAG && *(const bool *)arg->value) {
        snprintf(text, size, " (default: on)");
    } else if (arg->kind != ARG_FLAG && *(const char *const *)arg->value != NULL) {
        snprintf(text, size, " (default: %s)", *(const char *const *)arg->value);
    }
}

static void help_flag(const struct arg *arg) {
    char line[LINE_BYTES];
    char value[LINE_BYTES / 2];
    int width = printf("  %s%s%s", arg->name, arg->kind == ARG_FLAG ? "" : " ",
                       arg->kind == ARG_FLAG ? "" : unit_text(arg));
    if (width + 2 > HELP_INDENT) {
        putchar('\n');
        width = 0;
    }
    printf("%*s", HELP_INDENT - width, "");
    default_text(arg, value, sizeof value);
    snprintf(line, sizeof line, "%s%s", arg->help != NULL ? arg->help : "", value);
    print_wrapped(line + (line[0] == ' '), HELP_INDENT, HELP_INDENT);
}

// The heading of flag k: its own, or that of the nearest flag before it that has one.
static const char *flag_group(size_t k) {
    while (k > 0 && flags.args[k].group == NULL) {
        k--;
    }
    return flags.count > 0 && flags.args[k].group != NULL ? flags.args[k].group : "Options";
}

static bool group_begins_at(size_t k) {
    for (size_t before = 0; before < k; before++) {
        if (strcmp(flag_group(before), flag_group(k)) == 0) {
            return false;
        }
    }
    return true;
}

static void help_print(const char *program) {
    char line[LINE_BYTES];
    snprintf(line, sizeof line, "%s: %s", program_invocation_short_name, program);
    print_wrapped(line, 0, 0);
    printf("\nUsage: %s [--flag VALUE | --flag=VALUE]...\n", program_invocation_short_name);
    for (size_t k = 0; k < flags.count; k++) {
        if (!group_begins_at(k)) {
            continue;
        }
        printf("\n%s\n", flag_group(k));
        for (size_t i = k; i < flags.count; i++) {
            if (strcmp(flag_group(i), flag_group(k)) == 0) {
                help_flag(&flags.args[i]);
            }
        }
    }
    printf("\nHelp\n  %-*s%s\n", HELP_INDENT - 2, "--help", "print this text and exit");
}

static bool flush_output(void) {
    bool failed = fflush(stdout) != 0;
    return !failed && ferror(stdout) == 0;
}

static void help_if_asked(int argc, char **argv, const char *program) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            if (error_rank() == 0) {
                help_print(program);
            }
            if (!flush_output()) {
                fprintf(stderr, "%s: --help could not be printed: %s\n",
                        program_invocation_short_name, strerror(errno));
                exit(1);
            }
            exit(0);
        } else if (strncmp(argv[i], "--help=", 7) == 0) {
            error_user("--help takes no argument; found \"%s\"", argv[i] + 7);
        }
    }
}

// ---- the command line --------------------------------------------------------------------------

void args_parse(int argc, char **argv, const char *program, const struct arg *const *tables,
                size_t table_count) {
    flags_collect(tables, table_count);
    help_if_asked(argc, argv, program);
    for (int i = 1; i < argc; i++) {
        const char *equals = strchr(argv[i], '=');
        size_t length = equals != NULL ? (size_t)(equals - argv[i]) : strlen(argv[i]);
        size_t k = flag_find(argv[i], length);
        if (k == flags.count) {
            refuse_word(argv[i], length);
        }
        const struct arg *arg = &flags.args[k];
        if (flags.given[k]) {
            error_user("%s is given twice; give it once", arg->name);
        }
        flags.given[k] = true;
        if (arg->kind == ARG_FLAG) {
            if (equals != NULL) {
                error_user("%s takes no argument; found \"%s\"", arg->name, equals + 1);
            }
            *(bool *)arg->value = true;
            continue;
        }
        set_value(arg, flag_argument(arg, equals, argv[i + 1]));
        i += equals == NULL;
    }
}

static void value_text(const struct arg *arg, char *text, size_t size) {
    const char *word = NULL;
    switch (arg->kind) {
    case ARG_INT:
        snprintf(text, size, "%" PRId64, *(const int64_t *)arg->value);
        break;
    case ARG_DOUBLE:
        snprintf(text, size, "%.17g", *(const double *)arg->value);
        break;
    case ARG_FLAG:
        snprintf(text, size, "%s", *(const bool *)arg->value ? "on" : "off");
        break;
    default:
        word = *(const char *const *)arg->value;
        snprintf(text, size, "%s", word != NULL ? word : "absent");
    }
}

void args_each(void (*each)(const char *name, const char *value)) {
    for (size_t k = 0; k < flags.count; k++) {
        char text[LINE_BYTES];
        value_text(&flags.args[k], text, sizeof text);
        each(flags.args[k].name, text);
    }
}
