#include "checkpoint.h"
#include "error.h"
#include "files.h"
#include "optimizer.h"
#include "safetensors.h"
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    PATH_SIZE = 4096,
    TEXT_SIZE = ERROR_TEXT_SIZE,
};

struct values_file {
    const struct safetensors *file;
    const struct safetensors_entry *entry;
};

static const char *const CHECKPOINT_FILES[] = {
    "config.json",
    "model.safetensors",
    "training.safetensors",
    NULL,
};

static void path_join(char *out, const char *dir, const char *name) {
    CHECK(snprintf(out, PATH_SIZE, "%s/%s", dir, name) < PATH_SIZE);
}

// ---- every parameter of the model, in the order of the files -----------------------------------

struct cursor {
    const struct checkpoint *c;
    int u;
    int i;
    int count; // parameters of unit u
    struct param params[UNIT_PARAMS_MAX];
};

static struct cursor cursor_begin(const struct checkpoint *c) {
    struct cursor cursor = {
        .c = c,
        .u = -1,
    };
    return cursor;
}

// The next parameter, or NULL after the last.
static const struct param *cursor_next(struct cursor *cursor) {
    if (cursor->u < 0 || ++cursor->i == cursor->count) {
        if (++cursor->u == model_units(cursor->c->model)) {
            return NULL;
        }
        cursor->i = 0;
        cursor->count = unit_params(cursor->c->model, cursor->u, cursor->params);
    }
    return &cursor->params[cursor->i];
}

static size_t param_total(const struct checkpoint *c) {
    struct cursor cursor = cursor_begin(c);
    size_t total = 0;
    while (cursor_next(&cursor) != NULL) {
        total++;
    }
    return total;
}

// The name of a tensor in a file: that of the parameter, with the state's in front.
static void tensor_name(const struct checkpoint *c, enum values what, const struct param *p,
                        char *name, size_t size) {
    if (what < VALUES_STATE) {
        snprintf(name, size, "%s", p->name);
        return;
    }
    snprintf(name, size, "%s.%s", optimizer_state_name(c->options, (int)(what - VALUES_STATE)),
             p->name);
}

// ---- writing -----------------------------------------------------------------------------------

// A safetensors file that receives `kinds` kinds of values of all parameters.
struct output {
    struct safetensors_writer *writer; // NULL: not the writer, or failed
    char error[TEXT_SIZE]; // empty: no failure so far
};

static void output_begin(struct output *out, const struct checkpoint *c, const char *path,
                         const enum values *kinds, size_t kind_count,
                         const struct safetensors_pair *pairs, size_t pair_count) {
    size_t total = param_total(c) * kind_count;
    struct safetensors_entry *entries = calloc(total + 1, sizeof *entries);
    char(*names)[2 * PARAM_NAME_MAX] = calloc(total + 1, sizeof *names);
    CHECK(entries != NULL && names != NULL);
    size_t at = 0;
    for (size_t k = 0; k < kind_count; k++) {
        struct cursor cursor = cursor_begin(c);
        const struct param *p;
        while ((p = cursor_next(&cursor)) != NULL) {
            tensor_name(c, kinds[k], p, names[at], sizeof names[at]);
            entries[at].name = names[at];
            entries[at].dtype = DTYPE_F32;
            entries[at].dims = (size_t)p->dims;
            memcpy(entries[at].shape, p->shape, sizeof p->shape);
            at++;
        }
    }
    out->writer =
        safetensors_create(path, entries, total, pairs, pair_count, out->error, sizeof out->error);
    free(names);
    free(entries);
}

// Writes one kind of values. All ranks take part until the last parameter, also after a failure.
static void output_values(struct output *out, const struct checkpoint *c, enum values what) {
    struct cursor cursor = cursor_begin(c);
    const struct param *p;
    while ((p = cursor_next(&cursor)) != NULL) {
        size_t count = param_whole_count(p);
        float *whole = NULL;
        if (c->writer) {
            whole = malloc(count * sizeof *whole + 1);
            CHECK(whole != NULL);
        }
        c->collect(c->trainer, what, cursor.u, cursor.i, whole);
        if (out->writer != NULL && out->error[0] == '\0') {
            safetensors_write(out->writer, whole, count * sizeof *whole, out->error,
                              sizeof out->error);
        }
        free(whole);
    }
}

static void output_end(struct output *out) {
    char later[TEXT_SIZE] = "";
    if (out->writer != NULL) {
        bool first = out->error[0] == '\0';
        safetensors_finish(out->writer, first ? out->error : later, sizeof later);
    }
}

static void write_config(const struct checkpoint *c, const char *dir, char *error, size_t size) {
    char path[PATH_SIZE];
    path_join(path, dir, "config.json");
    FILE *file = fopen(path, "w");
    if (file == NULL) {
        error_text(error, size, "%s: %s", path, strerror(errno));
        return;
    }
    model_write_config(c->model, file);
    bool failed = ferror(file) != 0;
    if (fclose(file) != 0 || failed) {
        error_text(error, size, "%s: %s", path, strerror(errno));
    }
}

static void write_model(const struct checkpoint *c, const char *dir, char *error, size_t size) {
    static const struct safetensors_pair pairs[] = {{"format", "pt"}};
    enum values kinds[] = {VALUES_PARAM};
    struct output out = {0};
    char path[PATH_SIZE];
    path_join(path, dir, "model.safetensors");
    if (c->writer && error[0] == '\0') {
        output_begin(&out, c, path, kinds, 1, pairs, 1);
    }
    output_values(&out, c, VALUES_PARAM);
    output_end(&out);
    if (error[0] == '\0') {
        snprintf(error, size, "%s", out.error);
    }
}

struct training_facts {
    char step[32];
    char batch[32];
    char seed[32];
    char data[32];
};

static struct training_facts facts(const struct checkpoint *c, int64_t step) {
    struct training_facts f;
    snprintf(f.step, sizeof f.step, "%" PRId64, step);
    snprintf(f.batch, sizeof f.batch, "%" PRId64, c->options->batch);
    snprintf(f.seed, sizeof f.seed, "%" PRId64, c->options->seed);
    snprintf(f.data, sizeof f.data, "%016" PRIx64, data_hash(c->data));
    return f;
}

static void write_training(const struct checkpoint *c, const char *dir, int64_t step, char *error,
                           size_t size) {
    struct training_facts f = facts(c, step);
    const struct safetensors_pair pairs[] = {
        {"step", f.step},
        {"batch", f.batch},
        {"seed", f.seed},
        {"data", f.data},
        {"optimizer", c->options->optimizer},
    };
    enum values kinds[OPTIMIZER_STATES_MAX];
    int states = optimizer_states(c->options);
    for (int k = 0; k < states; k++) {
        kinds[k] = (enum values)(VALUES_STATE + k);
    }
    struct output out = {0};
    char path[PATH_SIZE];
    path_join(path, dir, "training.safetensors");
    if (c->writer && error[0] == '\0') {
        output_begin(&out, c, path, kinds, (size_t)states, pairs, sizeof pairs / sizeof pairs[0]);
    }
    for (int k = 0; k < states; k++) {
        output_values(&out, c, kinds[k]);
    }
    output_end(&out);
    if (error[0] == '\0') {
        snprintf(error, size, "%s", out.error);
    }
}

bool checkpoint_save(const struct checkpoint *c, int64_t step) {
    char error[TEXT_SIZE] = "";
    struct files_folder *folder = NULL;
    const char *dir = "";
    if (c->writer) {
        folder = files_folder_begin(c->options->save, CHECKPOINT_FILES, error, sizeof error);
    }
    if (folder != NULL) {
        dir = files_folder_path(folder);
        write_config(c, dir, error, sizeof error);
    }
    write_model(c, dir, error, sizeof error);
    write_training(c, dir, step, error, sizeof error);
    if (folder != NULL && error[0] == '\0') {
        files_folder_commit(folder, error, sizeof error);
    } else {
        files_folder_abandon(folder);
    }
    if (error[0] != '\0') {
        fprintf(stderr, "warning: no checkpoint saved after step %" PRId64 ": %s\n", step, error);
    }
    return error[0] == '\0';
}

// ---- reading -----------------------------------------------------------------------------------

static float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

static float from_f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
    uint32_t exponent = bits >> 10 & 31;
    uint32_t fraction = bits & 1023;
    if (exponent == 0) { // zero, or below the smallest normal number
        float x = (float)fraction * 0x1p-24f;
        return sign ? -x : x;
    }
    uint32_t wide = sign | fraction << 13 | (exponent == 31 ? 255 : exponent + 112) << 23;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

static float element(const void *raw, enum dtype dtype, size_t i) {
    switch (dtype) {
    case DTYPE_F64:
        return (float)((const double *)raw)[i];
    case DTYPE_BF16:
        return from_bf16(((const uint16_t *)raw)[i]);
    case DTYPE_F16:
        return from_f16(((const uint16_t *)raw)[i]);
    default:
        return ((const float *)raw)[i];
    }
}

void values_read(const struct values_file *file, size_t first, size_t count, float *out) {
    char error[TEXT_SIZE];
    enum dtype dtype = file->entry->dtype;
    void *raw = malloc(count * dtype_size(dtype) + 1);
    CHECK(raw != NULL);
    if (!safetensors_read(file->file, file->entry, first, count, raw, error, sizeof error)) {
        error_user("%s", error);
    }
    for (size_t i = 0; i < count; i++) {
        out[i] = element(raw, dtype, i);
    }
    free(raw);
}

static void shape_text(char *out, size_t size, const size_t *shape, size_t dims) {
    size_t length = (size_t)snprintf(out, size, "(");
    for (size_t i = 0; i < dims && length < size; i++) {
        length += (size_t)snprintf(out + length, size - length, i > 0 ? ", %zu" : "%zu", shape[i]);
    }
    if (length < size) {
        snprintf(out + length, size - length, ")");
    }
}

static const struct safetensors_entry *entry_find(const struct safetensors *file, const char *path,
                                                  const char *name, const struct param *p) {
    const struct safetensors_entry *e = safetensors_find(file, name);
    if (e == NULL) {
        error_user("%s: has no tensor %s; it is not a checkpoint of this model and size", path,
                   name);
    }
    bool same = e->dims == (size_t)p->dims;
    for (int d = 0; same && d < p->dims; d++) {
        same = e->shape[d] == p->shape[d];
    }
    if (!same) {
        char found[128], expected[128];
        shape_text(found, sizeof found, e->shape, e->dims);
        shape_text(expected, sizeof expected, p->shape, (size_t)p->dims);
        error_user(
            "%s: tensor %s has the shape %s, expected %s; give the sizes that the checkpoint "
            "was made with (its config.json has them)",
            path, name, found, expected);
    }
    if (!e->known || e->dtype == DTYPE_I32 || e->dtype == DTYPE_U8) {
        error_user("%s: tensor %s has the type %s; expected F32, BF16, F16 or F64", path, name,
                   e->type_name);
    }
    return e;
}

static void load_values(const struct checkpoint *c, const struct safetensors *file,
                        const char *path, enum values what) {
    struct cursor cursor = cursor_begin(c);
    const struct param *p;
    while ((p = cursor_next(&cursor)) != NULL) {
        char name[2 * PARAM_NAME_MAX];
        tensor_name(c, what, p, name, sizeof name);
        struct values_file values = {
            .file = file,
            .entry = entry_find(file, path, name, p),
        };
        c->place(c->trainer, what, cursor.u, cursor.i, &values);
    }
}

// Whether a file's tensor is one of these kinds of values of this model.
static bool known_name(const struct checkpoint *c, enum values first, int kinds,
                       const char *found) {
    for (int k = 0; k < kinds; k++) {
        struct cursor cursor = cursor_begin(c);
        const struct param *p;
        while ((p = cursor_next(&cursor)) != NULL) {
            char name[2 * PARAM_NAME_MAX];
            tensor_name(c, (enum values)(first + k), p, name, sizeof name);
            if (strcmp(found, name) == 0) {
                return true;
            }
        }
    }
    return false;
}

// A tensor that this model does not have means another model, except for the table of angles that
// old versions of transformers wrote.
static void refuse_strangers(const struct checkpoint *c, const struct safetensors *file,
                             const char *path, enum values first, int kinds) {
    for (size_t k = 0; k < safetensors_count(file); k++) {
        const char *name = safetensors_at(file, k)->name;
        if (strstr(name, "rotary_emb.inv_freq") == NULL && !known_name(c, first, kinds, name)) {
            error_user("%s: has the tensor %s, which this model has not; give the sizes that the "
                       "checkpoint was made with (its config.json has them)",
                       path, name);
        }
    }
}

static struct safetensors *open_or_end(const char *dir, const char *name, char *path) {
    char error[TEXT_SIZE];
    if (!files_folder_recover(dir, error, sizeof error)) {
        error_user("%s", error);
    }
    path_join(path, dir, name);
    struct safetensors *file = safetensors_open(path, error, sizeof error);
    if (file == NULL) {
        error_user("%s; expected a folder that --save wrote", error);
    }
    return file;
}

// The text after "key": in a config.json, or NULL.
static const char *config_value(const char *json, const char *key) {
    char quoted[80];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *at = strstr(json, quoted);
    return at != NULL ? at + strlen(quoted) : NULL;
}

// The beginning of a small file as a string, or NULL; free() it.
static char *read_small(const char *path) {
    enum { MAX = 1 << 16 };
    char error[TEXT_SIZE];
    FILE *file = files_open(path, NULL, error, sizeof error);
    if (file == NULL) {
        return NULL;
    }
    char *text = calloc(MAX + 1, 1);
    CHECK(text != NULL);
    size_t got = fread(text, 1, MAX, file);
    text[got] = '\0';
    fclose(file);
    return text;
}

// Ends unless a key has the same value in both texts, or is missing in theirs.
static void same_value(const char *path, const char *key, const char *ours, const char *theirs) {
    const char *a = config_value(ours, key), *b = config_value(theirs, key);
    char our[40] = "", their[40] = "";
    if (a == NULL || b == NULL) {
        return;
    }
    CHECK(sscanf(a, " %39[^,}\n]", our) == 1);
    bool number = our[0] != '"';
    bool same = sscanf(b, " %39[^,}\n]", their) == 1 &&
                (number ? strtod(our, NULL) == strtod(their, NULL) : strcmp(our, their) == 0);
    if (!same) {
        error_user("%s: %s is %s there and %s in this run; give the sizes that the checkpoint was "
                   "made with",
                   path, key, their, our);
    }
}

// Sizes that no shape shows, such as the number of heads, change what the same weights compute.
static void check_config(const struct checkpoint *c, const char *dir) {
    static const char *const keys[] = {
        "model_type", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta",
    };
    char path[PATH_SIZE], ours[4096] = "";
    path_join(path, dir, "config.json");
    char *theirs = read_small(path);
    FILE *file = fmemopen(ours, sizeof ours - 1, "w");
    CHECK(file != NULL);
    model_write_config(c->model, file);
    CHECK(fclose(file) == 0);
    for (size_t i = 0; theirs != NULL && i < sizeof keys / sizeof keys[0]; i++) {
        same_value(path, keys[i], ours, theirs);
    }
    free(theirs);
}

static void load_model(const struct checkpoint *c, const char *dir) {
    char path[PATH_SIZE];
    struct safetensors *file = open_or_end(dir, "model.safetensors", path);
    check_config(c, dir);
    refuse_strangers(c, file, path, VALUES_PARAM, 1);
    load_values(c, file, path, VALUES_PARAM);
    safetensors_close(file);
}

static const char *fact(const struct safetensors *file, const char *path, const char *key) {
    const char *value = safetensors_metadata(file, key);
    if (value == NULL) {
        error_user("%s: its metadata has no \"%s\"; expected a folder that --save wrote", path,
                   key);
    }
    return value;
}

static void same_fact(const struct safetensors *file, const char *path, const char *key,
                      const char *now, const char *fix) {
    const char *then = fact(file, path, key);
    if (strcmp(then, now) != 0) {
        error_user("%s: the training was begun with %s %s, this run has %s; %s", path, key, then,
                   now, fix);
    }
}

static int64_t load_training(const struct checkpoint *c, const char *dir) {
    char path[PATH_SIZE];
    struct safetensors *file = open_or_end(dir, "training.safetensors", path);
    struct training_facts f = facts(c, 0);
    same_fact(file, path, "optimizer", c->options->optimizer,
              "give the same --optimizer, or --load the weights alone");
    same_fact(file, path, "seed", f.seed, "give the same --seed, or --load the weights alone");
    same_fact(file, path, "batch", f.batch, "give the same --batch, or --load the weights alone");
    same_fact(file, path, "data", f.data,
              "give the same --data and --seq, or --load the weights alone");
    const char *text = fact(file, path, "step");
    char *end;
    errno = 0;
    int64_t step = strtoll(text, &end, 10);
    if (errno != 0 || *end != '\0' || end == text || step < 0) {
        error_user("%s: its metadata has the step \"%.40s\"; expected a number", path, text);
    }
    int states = optimizer_states(c->options);
    refuse_strangers(c, file, path, VALUES_STATE, states);
    for (int k = 0; k < states; k++) {
        load_values(c, file, path, (enum values)(VALUES_STATE + k));
    }
    safetensors_close(file);
    return step;
}

// The number of the folder, 0 if there is none.
static uint64_t folder_number(const char *dir) {
    struct stat s;
    return stat(dir, &s) == 0 ? (uint64_t)s.st_ino : 0;
}

int64_t checkpoint_load(const struct checkpoint *c) {
    const char *dir = c->options->resume;
    if (c->options->load != NULL) {
        load_model(c, c->options->load);
    }
    if (dir == NULL) {
        return 0;
    }
    int64_t step;
    uint64_t folder;
    do { // again if another job replaced the folder in between: the two files belong together
        folder = folder_number(dir);
        load_model(c, dir);
        step = load_training(c, dir);
    } while (folder_number(dir) != folder);
    return step;
}

// ---- checks and dumps --------------------------------------------------------------------------

static const char *const DUMP_FILES[] = {
    "steps.txt",
    "grads.safetensors",
    "final.safetensors",
    NULL,
};

// Whether a file can be written where --log or --memory say, without touching one that exists.
static void check_file(const char *flag, const char *path) {
    char error[TEXT_SIZE];
    if (path == NULL) {
        return;
    }
    struct stat s;
    if (stat(path, &s) == 0 && !S_ISREG(s.st_mode) && !S_ISDIR(s.st_mode)) {
        return; // /dev/stdout, a pipe: opening it will tell
    }
    struct files_write *w = files_write_begin(path, error, sizeof error);
    if (w == NULL) {
        error_user("%s: %s", flag, error);
    }
    files_write_abandon(w);
}

// The path with links followed as far as it exists, and without slashes at the end.
static void path_resolve(char *out, const char *path) {
    char whole[PATH_SIZE], head[PATH_SIZE];
    CHECK(snprintf(whole, sizeof whole, "%s", path) < PATH_SIZE);
    size_t length = strlen(whole);
    while (length > 1 && whole[length - 1] == '/') {
        whole[--length] = '\0';
    }
    char *found = realpath(whole, NULL);
    if (found != NULL) {
        CHECK(snprintf(out, PATH_SIZE, "%s", found) < PATH_SIZE);
        free(found);
        return;
    }
    char *slash = strrchr(whole, '/');
    if (slash == NULL) {
        path_resolve(head, ".");
    } else if (slash == whole) {
        head[0] = '\0';
    } else {
        *slash = '\0';
        path_resolve(head, whole);
    }
    path_join(out, head, slash != NULL ? slash + 1 : whole);
}

struct output_place {
    const char *flag;
    const char *path; // or NULL
    bool folder;
};

// Ends if b lies where a lies, or inside of it.
static void check_apart(const struct output_place *a, const struct output_place *b) {
    char x[PATH_SIZE], y[PATH_SIZE];
    if (a->path == NULL || b->path == NULL) {
        return;
    }
    path_resolve(x, a->path);
    path_resolve(y, b->path);
    size_t length = strlen(x);
    bool same = strcmp(x, y) == 0 && strncmp(x, "/dev/", 5) != 0;
    bool inside = a->folder && strncmp(x, y, length) == 0 && y[length] == '/';
    if (same || inside) {
        error_user("%s %s lies %s %s %s; give it a place of its own", b->flag, b->path,
                   same ? "where" : "inside of", a->flag, a->path);
    }
}

static void check_places(const struct options *o) {
    const struct output_place places[] = {
        {"--save", o->save, true},      {"--dump", o->dump, true},      {"--log", o->log, false},
        {"--memory", o->memory, false}, {"--logits", o->logits, false},
    };
    size_t count = sizeof places / sizeof places[0];
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < count; j++) {
            if (i != j) {
                check_apart(&places[i], &places[j]);
            }
        }
    }
}

void checkpoint_check(const struct checkpoint *c) {
    char error[TEXT_SIZE];
    const struct options *o = c->options;
    check_places(o);
    if (o->save != NULL && !files_folder_check(o->save, CHECKPOINT_FILES, error, sizeof error)) {
        error_user("--save: %s", error);
    }
    if (o->dump != NULL && !files_folder_check(o->dump, DUMP_FILES, error, sizeof error)) {
        error_user("--dump: %s", error);
    }
    check_file("--log", o->log);
    check_file("--memory", o->memory);
    check_file("--logits", o->logits);
}

// A dump that cannot be written is a pity, and no reason to lose the training.
static void dump_failed(const char *error) {
    fprintf(stderr, "warning: the dump is not complete: %s\n", error);
}

static bool dump_folder(const struct checkpoint *c) {
    char error[TEXT_SIZE];
    if (mkdir(c->options->dump, 0777) == 0 || errno == EEXIST) {
        return true;
    }
    error_text(error, sizeof error, "%s: %s", c->options->dump, strerror(errno));
    dump_failed(error);
    return false;
}

bool dump_step(const struct checkpoint *c, bool first, int64_t step, double loss, double norm) {
    if (c->options->dump == NULL || !c->writer) {
        return true;
    }
    char path[PATH_SIZE], error[TEXT_SIZE];
    if (first && !dump_folder(c)) {
        return false;
    }
    path_join(path, c->options->dump, "steps.txt");
    FILE *file = fopen(path, first ? "w" : "a");
    bool written = file != NULL && fprintf(file, "%" PRId64 " %a %a\n", step, loss, norm) > 0;
    if ((file != NULL && fclose(file) != 0) || !written) {
        error_text(error, sizeof error, "%s: %s", path, strerror(errno));
        dump_failed(error);
        return false;
    }
    return true;
}

bool dump_values(const struct checkpoint *c, const char *name, enum values what) {
    if (c->options->dump == NULL) {
        return true;
    }
    struct output out = {0};
    char path[PATH_SIZE], file[64];
    snprintf(file, sizeof file, "%s.safetensors", name);
    path_join(path, c->options->dump, file);
    bool folder = !c->writer || dump_folder(c);
    if (c->writer && folder) {
        output_begin(&out, c, path, &what, 1, NULL, 0);
    }
    output_values(&out, c, what);
    output_end(&out);
    if (out.error[0] != '\0') {
        dump_failed(out.error);
    }
    return folder && out.error[0] == '\0';
}
