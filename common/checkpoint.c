#include "checkpoint.h"
#include "config.h"
#include "error.h"
#include "files.h"
#include "optimizer.h"
#include "safetensors.h"
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    PATH_SIZE = FILES_PATH_SIZE,
    NAME_SIZE = 64, // of the longest name in a folder, and more
    TEXT_SIZE = ERROR_TEXT_SIZE,
};

static const int64_t STEP_MAX = 1000000000000; // as --steps

struct values_file {
    const struct safetensors *file;
    const struct safetensors_entry *entry;
    const char *path;
    bool squares; // averages of squares, which are not negative
};

static const char *const CHECKPOINT_FILES[] = {
    "config.json",
    "model.safetensors",
    "training.safetensors",
    NULL,
};

// Paths that flags name are short enough: see named_look().
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

// A model that has numbers that are none must not take the place of a good one.
static void check_finite(struct output *out, const struct param *p, const float *x, size_t count) {
    size_t i = 0;
    while (i < count && isfinite(x[i])) {
        i++;
    }
    if (i < count) {
        error_text(out->error, sizeof out->error, "element %zu of %s is %s", i, p->name,
                   isnan(x[i]) ? "not a number" : "infinite");
    }
}

// Writes one kind of values. All ranks take part until the last parameter, also after a failure.
static void output_values(struct output *out, const struct checkpoint *c, enum values what,
                          bool finite) {
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
        if (finite && out->writer != NULL && out->error[0] == '\0') {
            check_finite(out, p, whole, count);
        }
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
    output_values(&out, c, VALUES_PARAM, true);
    output_end(&out);
    if (error[0] == '\0') {
        snprintf(error, size, "%s", out.error);
    }
}

enum { FACTS = 12 };

// What training.safetensors says of a training, in its metadata.
struct fact {
    const char *key;
    const char *flag; // of a setting that a resumed run may change; else NULL
    char text[40];
};

static void fact_int(struct fact *f, const char *key, const char *flag, int64_t value) {
    f->key = key;
    f->flag = flag;
    snprintf(f->text, sizeof f->text, "%" PRId64, value);
}

static void fact_double(struct fact *f, const char *key, const char *flag, double value) {
    f->key = key;
    f->flag = flag;
    snprintf(f->text, sizeof f->text, "%.17g", value);
}

static void fact_text(struct fact *f, const char *key, const char *flag, const char *value) {
    f->key = key;
    f->flag = flag;
    snprintf(f->text, sizeof f->text, "%s", value);
}

static void facts(const struct checkpoint *c, int64_t step, struct fact *f) {
    const struct options *o = c->options;
    char hash[20];
    snprintf(hash, sizeof hash, "%016" PRIx64, data_hash(c->data));
    fact_int(f++, "step", NULL, step);
    fact_int(f++, "batch", NULL, o->batch);
    fact_int(f++, "seed", NULL, o->seed);
    fact_text(f++, "data", NULL, hash);
    fact_text(f++, "optimizer", NULL, o->optimizer);
    fact_int(f++, "steps", "--steps", o->steps);
    fact_int(f++, "epochs", "--epochs", o->epochs);
    fact_double(f++, "lr", "--lr", o->lr);
    fact_double(f++, "min_lr", "--min-lr", o->min_lr);
    fact_int(f++, "warmup", "--warmup", o->warmup);
    fact_text(f++, "schedule", "--schedule", o->schedule);
    fact_double(f++, "gamma", "--gamma", o->gamma);
}

static void write_training(const struct checkpoint *c, const char *dir, int64_t step, char *error,
                           size_t size) {
    struct fact f[FACTS];
    struct safetensors_pair pairs[FACTS];
    enum values kinds[OPTIMIZER_STATES_MAX];
    facts(c, step, f);
    for (size_t i = 0; i < FACTS; i++) {
        pairs[i] = (struct safetensors_pair){f[i].key, f[i].text};
    }
    int states = optimizer_states(c->options);
    for (int k = 0; k < states; k++) {
        kinds[k] = (enum values)(VALUES_STATE + k);
    }
    struct output out = {0};
    char path[PATH_SIZE];
    path_join(path, dir, "training.safetensors");
    if (c->writer && error[0] == '\0') {
        output_begin(&out, c, path, kinds, (size_t)states, pairs, FACTS);
    }
    for (int k = 0; k < states; k++) {
        output_values(&out, c, kinds[k], true);
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
        error_warning("no checkpoint saved after step %" PRId64 ": %s", step, error);
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
    if (count == 0) {
        return; // a rank that has no part of it
    }
    void *raw = malloc(count * dtype_size(dtype) + 1);
    CHECK(raw != NULL);
    if (!safetensors_read(file->file, file->entry, first, count, raw, error, sizeof error)) {
        error_user("%s", error);
    }
    for (size_t i = 0; i < count; i++) {
        out[i] = element(raw, dtype, i);
        if (!isfinite(out[i]) || (file->squares && out[i] < 0)) {
            error_user("%s: element %zu of the tensor %s is %g; expected a finite number%s: this "
                       "is what a training left that failed; name an older checkpoint",
                       file->path, first + i, file->entry->name,
                       isnan(out[i]) ? (double)NAN : (double)out[i],
                       file->squares ? " that is not negative" : "");
        }
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
            .path = path,
            .squares = what >= VALUES_STATE && strncmp(name, "exp_avg.", strlen("exp_avg.")) != 0,
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

static void load_model(const struct checkpoint *c, const char *dir) {
    char path[PATH_SIZE];
    struct safetensors *file = open_or_end(dir, "model.safetensors", path);
    config_check(c->model, dir, c->writer);
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

static void same_fact(const struct safetensors *file, const char *path, const struct fact *now) {
    const char *then = fact(file, path, now->key);
    if (strcmp(then, now->text) != 0) {
        error_user("%s: the training was begun with %s %s, this run has %s; give the same --%s%s, "
                   "or --load the weights alone",
                   path, now->key, then, now->text, now->key,
                   strcmp(now->key, "data") == 0 ? " and --seq" : "");
    }
}

// A fact for a terminal, whatever the file says.
static void fact_show(char *out, size_t size, const char *text) {
    char *end;
    double number = strtod(text, &end);
    if (end != text && *end == '\0') {
        snprintf(out, size, "%.12g", number);
    } else {
        bool word = text[strspn(text, "abcdefghijklmnopqrstuvwxyz")] == '\0';
        snprintf(out, size, "%.20s", word ? text : "?");
    }
}

// Notes the settings that this run changes: the training goes on by these, from its old weights.
static void note_changes(struct checkpoint *c, const struct safetensors *file,
                         const struct fact *facts_now) {
    size_t length = 0, size = sizeof c->changes;
    c->changes[0] = '\0';
    for (int i = 0; i < FACTS; i++) {
        const struct fact *now = &facts_now[i];
        const char *then = safetensors_metadata(file, now->key);
        if (now->flag == NULL || then == NULL || strcmp(then, now->text) == 0 || length >= size) {
            continue;
        }
        char a[24], b[24];
        fact_show(a, sizeof a, now->text);
        fact_show(b, sizeof b, then);
        length += (size_t)snprintf(c->changes + length, size - length, "%s%s %s, was %s",
                                   length > 0 ? "; " : "", now->flag, a, b);
    }
}

static int64_t saved_step(const struct safetensors *file, const char *path) {
    const char *text = fact(file, path, "step");
    errno = 0;
    int64_t step = strtoll(text, NULL, 10);
    if (text[0] == '\0' || text[strspn(text, "0123456789")] != '\0' || errno != 0 ||
        step > STEP_MAX) {
        error_user("%s: its metadata has the step \"%.40s\"; expected a number up to %" PRId64,
                   path, text, STEP_MAX);
    }
    return step;
}

static int64_t load_training(struct checkpoint *c, const char *dir) {
    char path[PATH_SIZE];
    struct safetensors *file = open_or_end(dir, "training.safetensors", path);
    struct fact now[FACTS];
    facts(c, 0, now);
    for (size_t i = 1; i < FACTS && now[i].flag == NULL; i++) { // all but the step
        same_fact(file, path, &now[i]);
    }
    int64_t step = saved_step(file, path);
    int states = optimizer_states(c->options);
    refuse_strangers(c, file, path, VALUES_STATE, states);
    for (int k = 0; k < states; k++) {
        load_values(c, file, path, (enum values)(VALUES_STATE + k));
    }
    note_changes(c, file, now);
    safetensors_close(file);
    return step;
}

// The number of the folder, 0 if there is none.
static uint64_t folder_number(const char *dir) {
    struct stat s;
    return stat(dir, &s) == 0 ? (uint64_t)s.st_ino : 0;
}

int64_t checkpoint_load(struct checkpoint *c) {
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

uint64_t checkpoint_hash(const struct checkpoint *c) {
    const char *dir = c->options->resume != NULL ? c->options->resume : c->options->load;
    uint64_t hash = 0, words[1024];
    char path[PATH_SIZE];
    if (dir == NULL) {
        return 0;
    }
    path_join(path, dir, "model.safetensors");
    FILE *file = fopen(path, "rb");
    for (size_t got = 1; file != NULL && got > 0;) {
        memset(words, 0, sizeof words);
        got = fread(words, 1, sizeof words, file);
        for (size_t i = 0; i < (got + 7) / 8; i++) {
            hash = (hash ^ words[i]) * 0x100000001b3; // FNV, eight bytes at a time
            hash ^= hash >> 32;
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return hash;
}

// ---- checks ------------------------------------------------------------------------------------

// Whether a file can be written where a flag says, without touching one that exists.
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

// What a flag names: read by this run, or written.
struct named {
    const char *flag;
    const char *path; // or NULL
    bool input;
    bool folder; // whose contents belong to the flag
    char where[PATH_SIZE]; // path, resolved
    bool there;
    struct stat status; // if it is there
};

static void named_look(struct named *n) {
    char error[TEXT_SIZE];
    if (n->path == NULL) {
        return;
    }
    if (!files_resolve(n->path, n->where, error, sizeof error)) {
        error_user("%s: %s", n->flag, error);
    }
    if (strlen(n->path) > PATH_SIZE - NAME_SIZE || strlen(n->where) > PATH_SIZE - NAME_SIZE) {
        error_user("%s %.80s ...: the path is too long", n->flag, n->path);
    }
    n->there = stat(n->path, &n->status) == 0;
    n->folder = n->folder || (n->there && n->input && S_ISDIR(n->status.st_mode));
}

static bool is_special(const struct named *n) {
    return n->there && !S_ISREG(n->status.st_mode) && !S_ISDIR(n->status.st_mode);
}

static bool is_same(const struct named *a, const struct named *b) {
    bool same_file = a->there && b->there && a->status.st_dev == b->status.st_dev &&
                     a->status.st_ino == b->status.st_ino; // by another name
    return same_file || strcmp(a->where, b->where) == 0;
}

static bool is_inside(const struct named *a, const struct named *b) {
    size_t length = strcmp(a->where, "/") == 0 ? 0 : strlen(a->where);
    return a->folder && strncmp(a->where, b->where, length) == 0 && b->where[length] == '/';
}

// Ends if b lies where a lies, or inside of it.
static void check_apart(const struct named *a, const struct named *b) {
    if (a->path == NULL || b->path == NULL || (a->input && b->input) || is_special(a) ||
        is_special(b)) {
        return;
    }
    const struct named *in = a->input ? a : b, *out = a->input ? b : a;
    bool in_place = strcmp(in->flag, "--resume") == 0 && strcmp(out->flag, "--save") == 0;
    bool same = is_same(a, b);
    if ((same && !in_place) || (!same && is_inside(a, b))) {
        error_user("%s %s lies %s %s %s; give %s a place of its own", b->flag, b->path,
                   same ? "in the same place as" : "inside of", a->flag, a->path,
                   b->input ? a->flag : b->flag);
    }
}

// Nothing that this run writes may lie where something is that it reads or writes, too, but for
// --save in the place of --resume.
static void check_places(const struct checkpoint *c) {
    const struct options *o = c->options;
    char calls[PATH_SIZE];
    snprintf(calls, sizeof calls, "%s.%d", o->comm.log != NULL ? o->comm.log : "", error_rank());
    struct named all[] = {
        {.flag = "--data", .path = data_path(c->data), .input = true},
        {.flag = "--load", .path = o->load, .input = true},
        {.flag = "--resume", .path = o->resume, .input = true},
        {.flag = "--save", .path = o->save, .folder = true},
        {.flag = "--dump", .path = o->dump, .folder = true},
        {.flag = "--log", .path = o->log},
        {.flag = "--memory", .path = o->memory},
        {.flag = "--logits", .path = o->logits},
        {.flag = "--trace", .path = o->trace},
        {.flag = "--log-comm", .path = o->comm.log != NULL ? calls : NULL},
    };
    size_t count = sizeof all / sizeof all[0];
    for (size_t i = 0; i < count; i++) {
        named_look(&all[i]);
    }
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < count; j++) {
            if (i != j) {
                check_apart(&all[i], &all[j]);
            }
        }
    }
}

// ---- dumps -------------------------------------------------------------------------------------

static const char *const DUMP_FILES[] = {
    "steps.txt",
    "grads.safetensors",
    "final.safetensors",
    NULL,
};

// A dump that cannot be written is a pity, and no reason to lose the training. Nothing follows
// after what is missing.
static void dump_failed(struct checkpoint *c, const char *error) {
    if (!c->dump_failed) {
        error_warning("the dump is not complete: %s", error);
    }
    c->dump_failed = true;
}

// Before the first part: makes the folder, and removes what another run has left there, so that
// nobody takes its parts for ours. Returns whether the dump can be written so far.
static bool dump_begin(struct checkpoint *c) {
    char path[PATH_SIZE], error[TEXT_SIZE];
    const char *dump = c->options->dump;
    if (c->dump_begun) {
        return !c->dump_failed;
    }
    c->dump_begun = true;
    if (mkdir(dump, 0777) != 0 && errno != EEXIST) {
        error_text(error, sizeof error, "%s: %s", dump, strerror(errno));
        dump_failed(c, error);
    }
    for (size_t i = 0; DUMP_FILES[i] != NULL; i++) {
        path_join(path, dump, DUMP_FILES[i]);
        if (unlink(path) != 0 && errno != ENOENT) {
            error_text(error, sizeof error, "%s: %s", path, strerror(errno));
            dump_failed(c, error);
        }
    }
    return !c->dump_failed;
}

void dump_step(struct checkpoint *c, int64_t step, double loss, double norm) {
    if (c->options->dump == NULL || !c->writer || !dump_begin(c)) {
        return;
    }
    char path[PATH_SIZE], error[TEXT_SIZE];
    path_join(path, c->options->dump, "steps.txt");
    FILE *file = fopen(path, "ae");
    loss = isnan(loss) ? (double)NAN : loss; // without its sign, which means nothing
    norm = isnan(norm) ? (double)NAN : norm;
    bool written = file != NULL && fprintf(file, "%" PRId64 " %a %a\n", step, loss, norm) > 0;
    if ((file != NULL && fclose(file) != 0) || !written) {
        error_text(error, sizeof error, "%s: %s", path, strerror(errno));
        dump_failed(c, error);
    }
}

bool dump_values(struct checkpoint *c, const char *name, enum values what) {
    if (c->options->dump == NULL) {
        return true;
    }
    struct output out = {0};
    char path[PATH_SIZE], file[64];
    snprintf(file, sizeof file, "%s.safetensors", name);
    path_join(path, c->options->dump, file);
    if (c->writer && dump_begin(c)) {
        output_begin(&out, c, path, &what, 1, NULL, 0);
    }
    output_values(&out, c, what, false);
    output_end(&out);
    if (out.error[0] != '\0') {
        dump_failed(c, out.error);
    }
    return !c->dump_failed;
}

// ---- before the training -----------------------------------------------------------------------

static void check_folder(const char *flag, const char *dir, const char *const *names) {
    char error[TEXT_SIZE], file[PATH_SIZE];
    struct stat s;
    if (dir == NULL) {
        return;
    }
    if (!files_folder_check(dir, names, error, sizeof error)) {
        error_user("%s: %s", flag, error);
    }
    if (strcmp(flag, "--dump") == 0 && stat(dir, &s) == 0) { // it is not replaced whole
        path_join(file, dir, names[0]);
        check_file(flag, file);
    }
}

void checkpoint_check(const struct checkpoint *c) {
    const struct options *o = c->options;
    check_places(c);
    check_folder("--save", o->save, CHECKPOINT_FILES);
    check_folder("--dump", o->dump, DUMP_FILES);
    check_file("--log", o->log);
    check_file("--memory", o->memory);
    check_file("--logits", o->logits);
    check_file("--trace", o->trace);
}

void checkpoint_report(const struct checkpoint *c, struct log *log, int64_t step, int64_t steps) {
    if (c->options->resume == NULL) {
        return;
    }
    log_line(log, "resumed", "after step %" PRId64, step);
    if (c->changes[0] != '\0') {
        log_line(log, "note", "changed on the way: %s", c->changes);
    }
    if (step >= steps) {
        log_line(log, "note", "finished already: this training has %" PRId64 " steps", steps);
    }
}
