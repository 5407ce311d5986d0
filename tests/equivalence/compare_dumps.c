// compare_dumps A B PROMISE: is the training that left dump A the one that left dump B?
//
//     compare_dumps A B bitwise
//     compare_dumps A B bounds [loss=X] [norm=X] [gradient=X] [weight=X]
//
// A dump is what a program writes with --dump: steps.txt (a line per step: step, loss, grad norm),
// grads.safetensors (first step) and final.safetensors. A is the one under test, B the reference.
//
// bitwise: every bit, that of the sign of a zero too. bounds: losses and grad norms differ by at
// most 1e-6, tensors at most 1e-5 by norm, relative to B; X changes a bound, inf removes it. Values
// that are not finite, and files, steps or tensors that only one dump has, never pass.
//
// If they agree, prints one line and exits 0: the largest relative difference of each kind, or how
// much was the same. Else prints where they differ first and exits 1.
#include "common/error.h"
#include "common/safetensors.h"
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PATH_SIZE = 4096,
    LINES_MAX = 20, // of what differs, so that it fits on a screen
    TENSORS_MAX = 6, // of one file that are told one by one
};

enum kind {
    LOSS,
    NORM,
    GRADIENT,
    WEIGHT,
    KINDS,
};

static const char *const KIND_NAMES[] = {"loss", "norm", "gradient", "weight"};
static const char *const FILE_NAMES[] = {"steps.txt", "grads.safetensors", "final.safetensors"};

// What was promised, and what was found.
static struct {
    bool bitwise;
    double bound[KINDS];
    double largest[KINDS]; // relative difference
    size_t count[KINDS]; // values compared; of gradients and weights: tensors
    size_t faults;
} promise = {
    .bound = {1e-6, 1e-6, 1e-5, 1e-5},
};

// One difference that breaks the promise.
static void fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void fault(const char *format, ...) {
    promise.faults++;
    if (promise.faults > LINES_MAX) {
        return;
    }
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
}

static void path_join(char *out, const char *dir, const char *name) {
    CHECK(snprintf(out, PATH_SIZE, "%s/%s", dir, name) < PATH_SIZE);
}

// Notes a relative difference. What is not finite is a fault anyway.
static void note(enum kind kind, double difference) {
    if (difference > promise.largest[kind]) {
        promise.largest[kind] = difference;
    }
    promise.count[kind]++;
}

static bool within(enum kind kind, double difference) {
    return difference <= promise.bound[kind];
}

// "relative 1.2e-05, bound 1.0e-06"
static void difference_text(char *out, size_t size, enum kind kind, double difference) {
    if (promise.bitwise) {
        snprintf(out, size, "relative %.1e", difference);
    } else {
        snprintf(out, size, "relative %.1e, bound %.1e", difference, promise.bound[kind]);
    }
}

// ---- steps -------------------------------------------------------------------------------------

struct step {
    int64_t number;
    double value[2]; // LOSS, NORM
};

struct steps {
    struct step *step; // (count)
    size_t count;
};

// A number that ends at a blank or at the line's end.
static bool number_read(char **at, double *value) {
    char *end;
    *value = strtod(*at, &end);
    bool good = end != *at && (*end == ' ' || *end == '\n');
    *at = end;
    return good;
}

// Reads "step loss norm"; false if the line is anything else.
static bool step_read(char *line, struct step *s) {
    char *at = line;
    s->number = strtoll(line, &at, 10);
    bool good = at != line && *at == ' ' && number_read(&at, &s->value[LOSS]);
    return good && *at == ' ' && number_read(&at, &s->value[NORM]) && strcmp(at, "\n") == 0;
}

static bool steps_read(const char *dir, struct steps *steps) {
    char path[PATH_SIZE];
    path_join(path, dir, FILE_NAMES[0]);
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        fault("%s: %s", path, strerror(errno));
        return false;
    }
    char *line = NULL;
    size_t size = 0;
    bool good = true;
    while (good && getline(&line, &size, file) > 0) {
        steps->step = realloc(steps->step, (steps->count + 1) * sizeof *steps->step);
        CHECK(steps->step != NULL);
        good = step_read(line, &steps->step[steps->count]);
        steps->count += good;
        if (!good) {
            fault("%s: line %zu is not \"step loss norm\": %.60s", path, steps->count + 1, line);
        }
    }
    free(line);
    fclose(file);
    if (good && steps->count == 0) {
        fault("%s: has no step", path);
        good = false;
    }
    return good;
}

static double relative(double a, double b) {
    return a == b ? 0 : fabs(a - b) / fabs(b);
}

static bool same_bits(const void *a, const void *b, size_t bytes) {
    return memcmp(a, b, bytes) == 0;
}

static void compare_steps_of(enum kind kind, const struct steps *a, const struct steps *b) {
    size_t bad = 0;
    size_t first = 0;
    for (size_t i = 0; i < a->count; i++) {
        const double *x = &a->step[i].value[kind], *y = &b->step[i].value[kind];
        bool good = isfinite(*x) && isfinite(*y) && within(kind, relative(*x, *y));
        if (promise.bitwise) {
            good = good && same_bits(x, y, sizeof *x);
        }
        note(kind, relative(*x, *y));
        if (!good && bad++ == 0) {
            first = i;
        }
    }
    if (bad > 0) {
        double x = a->step[first].value[kind], y = b->step[first].value[kind];
        char text[80];
        difference_text(text, sizeof text, kind, relative(x, y));
        fault("step %" PRId64 " %s: %a and %a (%.9g, %.9g), %s; the first of %zu of %zu steps",
              a->step[first].number, KIND_NAMES[kind], x, y, x, y, text, bad, a->count);
    }
}

static void compare_steps(const char *dir_a, const char *dir_b) {
    struct steps a = {0}, b = {0};
    bool good = steps_read(dir_a, &a);
    good = steps_read(dir_b, &b) && good;
    if (good && a.count != b.count) {
        fault("%s: %zu steps and %zu", FILE_NAMES[0], a.count, b.count);
        good = false;
    }
    for (size_t i = 0; good && i < a.count; i++) {
        if (a.step[i].number != b.step[i].number) {
            fault("%s: line %zu is step %" PRId64 " and %" PRId64, FILE_NAMES[0], i + 1,
                  a.step[i].number, b.step[i].number);
            good = false;
        }
    }
    if (good) {
        compare_steps_of(LOSS, &a, &b);
        compare_steps_of(NORM, &a, &b);
    }
    free(a.step);
    free(b.step);
}

// ---- tensors -----------------------------------------------------------------------------------

// How two tensors differ.
struct difference {
    bool finite;
    size_t count; // elements with other bits
    size_t at; // bitwise: the first of them; else the largest difference
    double by_norm; // |a - b| / |b|
};

static struct difference difference_of(const float *a, const float *b, size_t count) {
    struct difference d = {
        .finite = true,
    };
    double squares = 0;
    double reference = 0;
    double largest = -1;
    for (size_t i = 0; i < count; i++) {
        double delta = (double)a[i] - b[i];
        squares += delta * delta;
        reference += (double)b[i] * b[i];
        if (!isfinite(a[i]) || !isfinite(b[i])) {
            d.at = d.finite ? i : d.at;
            d.finite = false;
        } else if (!same_bits(&a[i], &b[i], sizeof a[i])) {
            if (d.finite && (promise.bitwise ? d.count == 0 : fabs(delta) > largest)) {
                d.at = i;
                largest = fabs(delta);
            }
            d.count++;
        }
    }
    d.by_norm = squares == 0 ? 0 : sqrt(squares) / sqrt(reference);
    return d;
}

static bool same_shape(const struct safetensors_entry *a, const struct safetensors_entry *b) {
    return a->dims == b->dims && same_bits(a->shape, b->shape, a->dims * sizeof a->shape[0]);
}

// Element `at` of a tensor as its indices: "[3, 17]".
static void element_text(char *out, size_t size, const struct safetensors_entry *e, size_t at) {
    size_t index[SAFETENSORS_MAX_DIMS];
    for (size_t d = e->dims; d-- > 0;) {
        index[d] = at % e->shape[d];
        at /= e->shape[d];
    }
    size_t length = (size_t)snprintf(out, size, "[");
    for (size_t d = 0; d < e->dims && length < size; d++) {
        length += (size_t)snprintf(out + length, size - length, d > 0 ? ", %zu" : "%zu", index[d]);
    }
    if (length < size) {
        snprintf(out + length, size - length, "]");
    }
}

static float *floats_read(const struct safetensors *file, const struct safetensors_entry *e,
                          const char *dir) {
    char error[ERROR_TEXT_SIZE];
    float *values = malloc(e->count * sizeof *values + 1);
    CHECK(values != NULL);
    if (!e->known || e->dtype != DTYPE_F32) {
        fault("%s: %s has the type %s; a dump has F32", dir, e->name, e->type_name);
    } else if (!safetensors_read(file, e, 0, e->count, values, error, sizeof error)) {
        fault("%s", error);
    } else {
        return values;
    }
    free(values);
    return NULL;
}

// What two dumps have under one name.
struct pair {
    const char *dir_a;
    const char *dir_b;
    const char *name; // of the file
    enum kind kind;
    struct safetensors *a;
    struct safetensors *b;
    size_t bad; // tensors
};

static void pair_fault(struct pair *p, const struct safetensors_entry *e, const float *a,
                       const float *b, const struct difference *d) {
    if (p->bad++ >= TENSORS_MAX) {
        return;
    }
    char text[80], element[200];
    difference_text(text, sizeof text, p->kind, d->by_norm);
    element_text(element, sizeof element, e, d->at);
    const char *which = !d->finite ? "not finite" : promise.bitwise ? "first" : "largest";
    fault("%s of %s: %zu of %zu elements differ, by norm %s; %s: %s %.9g and %.9g",
          KIND_NAMES[p->kind], e->name, d->count, e->count, text, which, element, (double)a[d->at],
          (double)b[d->at]);
}

static void compare_tensor(struct pair *p, const struct safetensors_entry *x,
                           const struct safetensors_entry *y) {
    if (!same_shape(x, y)) {
        fault("%s: %s has another shape", p->name, x->name);
        return;
    }
    float *a = floats_read(p->a, x, p->dir_a);
    float *b = floats_read(p->b, y, p->dir_b);
    if (a != NULL && b != NULL) {
        struct difference d = difference_of(a, b, x->count);
        bool good = d.finite && within(p->kind, d.by_norm);
        if (promise.bitwise) {
            good = d.finite && d.count == 0;
        }
        note(p->kind, d.by_norm);
        if (!good) {
            pair_fault(p, x, a, b, &d);
        }
    }
    free(b);
    free(a);
}

// Tensors that the first file has and the second has not.
static void report_missing(const struct safetensors *a, const struct safetensors *b,
                           const char *dir_b, const char *name) {
    for (size_t k = 0; k < safetensors_count(a); k++) {
        const char *tensor = safetensors_at(a, k)->name;
        if (safetensors_find(b, tensor) == NULL) {
            fault("%s/%s: has no tensor %s, the other one has", dir_b, name, tensor);
        }
    }
}

static struct safetensors *dump_open(const char *dir, const char *name) {
    char path[PATH_SIZE], error[ERROR_TEXT_SIZE];
    path_join(path, dir, name);
    struct safetensors *file = safetensors_open(path, error, sizeof error);
    if (file == NULL) {
        fault("%s", error);
    } else if (safetensors_count(file) == 0) {
        fault("%s: has no tensor", path);
    }
    return file;
}

static void compare_tensors(const char *dir_a, const char *dir_b, const char *name,
                            enum kind kind) {
    struct pair p = {
        .dir_a = dir_a,
        .dir_b = dir_b,
        .name = name,
        .kind = kind,
        .a = dump_open(dir_a, name),
        .b = dump_open(dir_b, name),
    };
    if (p.a != NULL && p.b != NULL) {
        report_missing(p.a, p.b, dir_b, name);
        report_missing(p.b, p.a, dir_a, name);
        for (size_t k = 0; k < safetensors_count(p.a); k++) {
            const struct safetensors_entry *x = safetensors_at(p.a, k);
            const struct safetensors_entry *y = safetensors_find(p.b, x->name);
            if (y != NULL) {
                compare_tensor(&p, x, y);
            }
        }
        if (p.bad > TENSORS_MAX) {
            fault("%s: %zu of %zu tensors differ", name, p.bad, safetensors_count(p.a));
        }
    }
    safetensors_close(p.b);
    safetensors_close(p.a);
}

// ---- folders -----------------------------------------------------------------------------------

// Nothing in a dump may tell how the training was cut, so there is nothing else in it.
static void check_folder(const char *dir) {
    DIR *folder = opendir(dir);
    if (folder == NULL) {
        fault("%s: %s", dir, strerror(errno));
        return;
    }
    const struct dirent *entry;
    while ((entry = readdir(folder)) != NULL) {
        bool known = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0;
        for (size_t i = 0; i < sizeof FILE_NAMES / sizeof FILE_NAMES[0]; i++) {
            known = known || strcmp(entry->d_name, FILE_NAMES[i]) == 0;
        }
        if (!known) {
            fault("%s/%s: is no part of a dump", dir, entry->d_name);
        }
    }
    closedir(folder);
}

static bool same_files(FILE *a, FILE *b) {
    char x[1 << 14], y[1 << 14];
    size_t got;
    do {
        got = fread(x, 1, sizeof x, a);
        if (fread(y, 1, sizeof y, b) != got || !same_bits(x, y, got)) {
            return false;
        }
    } while (got > 0);
    return true;
}

// All values are the same; now what stands between them: order, metadata, spelling.
static void compare_files(const char *dir_a, const char *dir_b) {
    for (size_t i = 0; i < sizeof FILE_NAMES / sizeof FILE_NAMES[0]; i++) {
        char path_a[PATH_SIZE], path_b[PATH_SIZE];
        path_join(path_a, dir_a, FILE_NAMES[i]);
        path_join(path_b, dir_b, FILE_NAMES[i]);
        FILE *a = fopen(path_a, "rb"), *b = fopen(path_b, "rb");
        CHECK(a != NULL && b != NULL);
        if (!same_files(a, b)) {
            fault("%s: the same values, but not the same file", FILE_NAMES[i]);
        }
        fclose(b);
        fclose(a);
    }
}

// ---- command line ------------------------------------------------------------------------------

static void bound_parse(const char *word) {
    for (int kind = 0; kind < KINDS; kind++) {
        size_t length = strlen(KIND_NAMES[kind]);
        if (strncmp(word, KIND_NAMES[kind], length) == 0 && word[length] == '=') {
            const char *number = word + length + 1;
            char *end;
            promise.bound[kind] = strtod(number, &end);
            if (end == number || *end != '\0' || !(promise.bound[kind] >= 0)) {
                error_user("%s: expected a number after '=', such as 1e-6 or inf", word);
            }
            return;
        }
    }
    error_user("unknown bound %s; expected loss=X, norm=X, gradient=X or weight=X", word);
}

static void promise_parse(int count, char **words) {
    promise.bitwise = strcmp(words[0], "bitwise") == 0;
    if (!promise.bitwise && strcmp(words[0], "bounds") != 0) {
        error_user("unknown promise %s; expected bitwise or bounds", words[0]);
    }
    if (promise.bitwise && count > 1) {
        error_user("bitwise takes no bounds; found %s", words[1]);
    }
    for (int i = 1; i < count; i++) {
        bound_parse(words[i]);
    }
}

static void report(void) {
    if (promise.faults > LINES_MAX) {
        printf("… and %zu differences more\n", promise.faults - LINES_MAX);
    } else if (promise.faults == 0 && promise.bitwise) {
        printf("same bits: %zu losses, %zu norms, %zu gradients, %zu weights\n",
               promise.count[LOSS], promise.count[NORM], promise.count[GRADIENT],
               promise.count[WEIGHT]);
    } else if (promise.faults == 0) {
        printf("loss %.1e, norm %.1e, gradient %.1e, weight %.1e\n", promise.largest[LOSS],
               promise.largest[NORM], promise.largest[GRADIENT], promise.largest[WEIGHT]);
    }
}

int main(int argc, char **argv) {
    if (argc < 4) {
        error_user("usage: compare_dumps A B bitwise\n"
                   "       compare_dumps A B bounds [loss=X] [norm=X] [gradient=X] [weight=X]");
    }
    promise_parse(argc - 3, argv + 3);
    check_folder(argv[1]);
    check_folder(argv[2]);
    compare_steps(argv[1], argv[2]);
    compare_tensors(argv[1], argv[2], "grads.safetensors", GRADIENT);
    compare_tensors(argv[1], argv[2], "final.safetensors", WEIGHT);
    if (promise.bitwise && promise.faults == 0) {
        compare_files(argv[1], argv[2]);
    }
    report();
    return promise.faults == 0 ? 0 : 1;
}
