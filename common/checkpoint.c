#include "checkpoint.h"
#include "comm.h"
#include "config.h"
#include "device.h"
#include "error.h"
#include "files.h"
#include "optimizer.h"
#include "safetensors.h"
#include "sharded.h"
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

// Elements that lie one after the other in a rank's part of a parameter and in the whole, too.
struct run {
    size_t part; // the first, counted in the part
    size_t whole; // the same one, counted in the whole
    size_t count; // 0: there are no more
};

static size_t at_most(size_t a, size_t b) {
    return a < b ? a : b;
}

// The first run of the elements begin … end - 1 of this rank's part. Padding is in none.
static struct run run_next(const struct param *p, size_t begin, size_t end) {
    const struct place *at = &p->place;
    size_t rows = at->first_row < at->whole_rows ? at->whole_rows - at->first_row : 0;
    size_t cols = at->first_col < at->whole_cols ? at->whole_cols - at->first_col : 0;
    rows = at_most(rows, p->rows);
    cols = at_most(cols, p->cols);
    size_t row = begin / p->cols, col = begin % p->cols;
    if (col >= cols) {
        row++;
        col = 0;
    }
    size_t first = row * p->cols + col;
    if (row >= rows || cols == 0 || first >= end) {
        return (struct run){0};
    }
    bool joined = cols == p->cols && cols == at->whole_cols; // one row goes on where another ends
    size_t stop = at_most(joined ? rows * p->cols : row * p->cols + cols, end);
    return (struct run){
        .part = first,
        .whole = (at->first_row + row) * at->whole_cols + at->first_col + col,
        .count = stop - first,
    };
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
static void check_finite(struct output *out, const struct param *p, const float *x, size_t first,
                         size_t count) {
    size_t i = 0;
    while (i < count && isfinite(x[i])) {
        i++;
    }
    if (i < count) {
        error_text(out->error, sizeof out->error, "element %zu of %s is %s", first + i, p->name,
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
            check_finite(out, p, whole, 0, count);
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

// The facts as metadata: pairs[] of the texts in f[].
static void facts_pairs(const struct checkpoint *c, int64_t step, struct fact *f,
                        struct safetensors_pair *pairs) {
    facts(c, step, f);
    for (size_t i = 0; i < FACTS; i++) {
        pairs[i] = (struct safetensors_pair){f[i].key, f[i].text};
    }
}

static void write_training(const struct checkpoint *c, const char *dir, int64_t step, char *error,
                           size_t size) {
    struct fact f[FACTS];
    struct safetensors_pair pairs[FACTS];
    enum values kinds[OPTIMIZER_STATES_MAX];
    facts_pairs(c, step, f, pairs);
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

static bool folder_end(struct files_folder *folder, int64_t step, char *error, size_t size) {
    if (folder != NULL && error[0] == '\0') {
        files_folder_commit(folder, error, size);
    } else {
        files_folder_abandon(folder);
    }
    if (error[0] != '\0') {
        error_warning("no checkpoint saved after step %" PRId64 ": %s", step, error);
    }
    return error[0] == '\0';
}

static bool save_whole(const struct checkpoint *c, int64_t step) {
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
    return folder_end(folder, step, error, sizeof error);
}

// ---- writing, every rank its parts -------------------------------------------------------------

// The tensors of this rank's file, in order.
struct parts {
    struct safetensors_entry *entries; // (count)
    size_t count;
};

// Adds a piece for each run of what this rank updates of a parameter, or of its states.
static void parts_add(struct parts *parts, const struct checkpoint *c, enum values what,
                      const struct cursor *at, const struct param *p) {
    size_t first;
    size_t end = tensor_count(c->held(c->trainer, what, at->u, at->i, &first));
    end += first;
    for (struct run r = run_next(p, first, end); r.count > 0;
         r = run_next(p, r.part + r.count, end)) {
        char name[2 * PARAM_NAME_MAX], piece[3 * PARAM_NAME_MAX];
        tensor_name(c, what, p, name, sizeof name);
        snprintf(piece, sizeof piece, "%s@%zu", name, r.whole);
        parts->entries = realloc(parts->entries, (parts->count + 1) * sizeof *parts->entries);
        CHECK(parts->entries != NULL);
        parts->entries[parts->count] = (struct safetensors_entry){
            .name = strdup(piece),
            .dtype = DTYPE_F32,
            .dims = 1,
            .shape = {r.count},
        };
        CHECK(parts->entries[parts->count].name != NULL);
        parts->count++;
    }
}

// Writes the values of these pieces.
static void parts_write(struct output *out, const struct checkpoint *c, enum values what,
                        const struct cursor *at, const struct param *p) {
    size_t first;
    struct tensor part = c->held(c->trainer, what, at->u, at->i, &first);
    size_t end = first + tensor_count(part);
    float *host = malloc(tensor_count(part) * sizeof *host + 1);
    CHECK(host != NULL);
    device_download(host, part);
    for (struct run r = run_next(p, first, end); r.count > 0 && out->error[0] == '\0';
         r = run_next(p, r.part + r.count, end)) {
        const float *values = host + (r.part - first);
        check_finite(out, p, values, r.whole, r.count);
        if (out->error[0] == '\0') {
            safetensors_write(out->writer, values, r.count * sizeof *values, out->error,
                              sizeof out->error);
        }
    }
    free(host);
}

// Writes this rank's file. Local.
static void write_parts(const struct checkpoint *c, const char *path, int64_t step, char *error,
                        size_t size) {
    struct fact f[FACTS];
    struct safetensors_pair pairs[FACTS];
    enum values kinds[1 + OPTIMIZER_STATES_MAX] = {VALUES_UPDATED};
    int count = 1 + optimizer_states(c->options);
    struct parts parts = {0};
    struct output out = {0};
    const struct param *p;
    facts_pairs(c, step, f, pairs);
    for (int k = 0; k < count; k++) {
        kinds[k] = k > 0 ? (enum values)(VALUES_STATE + k - 1) : VALUES_UPDATED;
        for (struct cursor at = cursor_begin(c); (p = cursor_next(&at)) != NULL;) {
            parts_add(&parts, c, kinds[k], &at, p);
        }
    }
    out.writer = safetensors_create(path, parts.entries, parts.count, pairs, FACTS, out.error,
                                    sizeof out.error);
    for (int k = 0; k < count && out.writer != NULL; k++) {
        for (struct cursor at = cursor_begin(c); (p = cursor_next(&at)) != NULL;) {
            parts_write(&out, c, kinds[k], &at, p);
        }
    }
    output_end(&out);
    snprintf(error, size, "%s", out.error);
    for (size_t k = 0; k < parts.count; k++) {
        free((char *)parts.entries[k].name);
    }
    free(parts.entries);
}

// Which of the files this rank writes, of how many: each rank that holds parts writes one.
static int file_number(const struct checkpoint *c, int *files) {
    bool *holds = calloc((size_t)c->world.size, sizeof *holds);
    int number = 0;
    CHECK(holds != NULL);
    comm_gather_host(c->world, holds, &c->holds, sizeof c->holds);
    *files = 0;
    for (int r = 0; r < c->world.size; r++) {
        number += holds[r] && r < c->world.rank;
        *files += holds[r];
    }
    free(holds);
    return number;
}

// The writer has made the folder; on another machine there may be no such folder.
static bool folder_seen(const struct checkpoint *c, const char *dir, char *error, size_t size) {
    char host[256] = "its machine";
    gethostname(host, sizeof host - 1);
    return access(dir, F_OK) == 0 ||
           error_text(error, size,
                      "rank %d on %s does not find the folder %s, which rank 0 has made (%s); "
                      "--save-sharded needs a folder that all machines share",
                      c->world.rank, host, dir, strerror(errno));
}

// All ranks get the message of the first one that failed, if any.
static void error_share(const struct checkpoint *c, char *error, size_t size) {
    uint32_t failed = error[0] != '\0' ? (uint32_t)(c->world.size - c->world.rank) : 0;
    comm_max_u32(c->world, &failed);
    if (failed > 0) {
        comm_broadcast_host(c->world, error, size, c->world.size - (int)failed);
    }
}

static bool save_sharded(const struct checkpoint *c, int64_t step) {
    char error[TEXT_SIZE] = "", dir[PATH_SIZE] = "", path[PATH_SIZE], name[SHARDED_NAME_SIZE];
    const char *const *names = NULL;
    struct files_folder *folder = NULL;
    int files, number = file_number(c, &files);
    if (c->writer) {
        names = sharded_names(c->options->save_sharded, files);
        folder = files_folder_begin(c->options->save_sharded, names, error, sizeof error);
    }
    if (folder != NULL) {
        snprintf(dir, sizeof dir, "%s", files_folder_path(folder));
        write_config(c, dir, error, sizeof error);
    }
    comm_broadcast_host(c->world, dir, sizeof dir, 0);
    if (dir[0] != '\0' && c->holds && error[0] == '\0' &&
        folder_seen(c, dir, error, sizeof error)) {
        sharded_name(name, number, files);
        path_join(path, dir, name);
        write_parts(c, path, step, error, sizeof error);
    }
    error_share(c, error, sizeof error);
    bool good = !c->writer || folder_end(folder, step, error, sizeof error);
    sharded_names_free(names);
    return good;
}

static bool save_to(const struct checkpoint *c, const char *dir, int64_t step, struct log *log,
                    bool (*save)(const struct checkpoint *c, int64_t step)) {
    if (dir == NULL) {
        return true;
    }
    bool good = save(c, step);
    if (good && log != NULL) {
        log_line(log, "saved", "%s (go on with --resume %s)", dir, dir);
    }
    return good;
}

bool checkpoint_save(const struct checkpoint *c, int64_t step, struct log *log) {
    bool whole = save_to(c, c->options->save, step, log, save_whole);
    bool parts = save_to(c, c->options->save_sharded, step, log, save_sharded);
    return whole && parts;
}

// ---- reading -----------------------------------------------------------------------------------

// Reads this rank's part of a parameter, or of a state of it.
static void load_part(const struct checkpoint *c, enum values what, const struct cursor *at,
                      const struct param *p, const struct sharded_tensor *from) {
    size_t first;
    struct tensor part = c->held(c->trainer, what, at->u, at->i, &first);
    size_t end = first + tensor_count(part);
    float *host = calloc(tensor_count(part) + 1, sizeof *host); // padding is 0
    CHECK(host != NULL);
    for (struct run r = run_next(p, first, end); r.count > 0;
         r = run_next(p, r.part + r.count, end)) {
        sharded_read(from, r.whole, r.count, host + (r.part - first));
    }
    device_upload(part, host);
    free(host);
}

static void load_values(const struct checkpoint *c, const struct sharded *set, enum values what) {
    struct cursor cursor = cursor_begin(c);
    const struct param *p;
    while ((p = cursor_next(&cursor)) != NULL) {
        char name[2 * PARAM_NAME_MAX];
        tensor_name(c, what, p, name, sizeof name);
        struct sharded_tensor whole = sharded_find(set, name, p);
        whole.squares = what >= VALUES_STATE && strncmp(name, "exp_avg.", strlen("exp_avg.")) != 0;
        load_part(c, what, &cursor, p, &whole);
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
// old versions of transformers wrote. Weights and states in the same files have the same names
// after the state's, which --load passes over.
static void refuse_strangers(const struct checkpoint *c, const struct sharded *set,
                             enum values first, int kinds) {
    for (size_t k = 0; k < sharded_pieces(set); k++) {
        const char *name = sharded_piece_of(set, k);
        const char *dot = strchr(name, '.');
        bool known =
            known_name(c, first, kinds, name) ||
            (sharded_in_parts(set) && known_name(c, VALUES_PARAM, 1, name)) ||
            (sharded_in_parts(set) && dot != NULL && known_name(c, VALUES_PARAM, 1, dot + 1));
        if (strstr(name, "rotary_emb.inv_freq") == NULL && !known) {
            error_user("%s: has the tensor %s, which this model has not; give the sizes that the "
                       "checkpoint was made with (its config.json has them)",
                       sharded_path(set), name);
        }
    }
}

// The number of the folder, 0 if there is none.
static uint64_t folder_number(const char *dir) {
    struct stat s;
    return stat(dir, &s) == 0 ? (uint64_t)s.st_ino : 0;
}

// Opens the file of that name, or the files that it is a part of.
static struct sharded *open_or_end(const char *dir, const char *name) {
    char error[TEXT_SIZE];
    struct sharded *set = NULL;
    uint64_t folder;
    if (!files_folder_recover(dir, error, sizeof error)) {
        error_user("%s", error);
    }
    do { // again if another job replaced the folder in between: all files belong together
        sharded_close(set);
        folder = folder_number(dir);
        set = sharded_open(dir, name, error, sizeof error);
    } while (folder_number(dir) != folder);
    if (set == NULL) {
        error_user("%s; expected a whole folder, as --save and --save-sharded write it", error);
    }
    return set;
}

static void load_model(const struct checkpoint *c, const char *dir, uint64_t *hash) {
    struct sharded *set = open_or_end(dir, "model.safetensors");
    config_check(c->model, dir, c->writer);
    refuse_strangers(c, set, VALUES_PARAM, 1);
    load_values(c, set, VALUES_PARAM);
    *hash = sharded_hash(set, *hash);
    sharded_close(set);
}

static const char *fact(const struct sharded *set, const char *key) {
    const char *value = sharded_metadata(set, key);
    if (value == NULL) {
        error_user("%s: its metadata has no \"%s\"; expected what --save or --save-sharded wrote",
                   sharded_file(set, 0), key);
    }
    return value;
}

static void same_fact(const struct sharded *set, const struct fact *now) {
    const char *then = fact(set, now->key);
    if (strcmp(then, now->text) != 0) {
        error_user("%s: the training was begun with %s %s, this run has %s; give the same --%s%s, "
                   "or --load the weights alone",
                   sharded_file(set, 0), now->key, then, now->text, now->key,
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
static void note_changes(struct checkpoint *c, const struct sharded *set,
                         const struct fact *facts_now) {
    size_t length = 0, size = sizeof c->changes;
    c->changes[0] = '\0';
    for (int i = 0; i < FACTS; i++) {
        const struct fact *now = &facts_now[i];
        const char *then = sharded_metadata(set, now->key);
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

static int64_t saved_step(const struct sharded *set) {
    const char *text = fact(set, "step");
    errno = 0;
    int64_t step = strtoll(text, NULL, 10);
    if (text[0] == '\0' || text[strspn(text, "0123456789")] != '\0' || errno != 0 ||
        step > STEP_MAX) {
        error_user("%s: its metadata has the step \"%.40s\"; expected a number up to %" PRId64,
                   sharded_file(set, 0), text, STEP_MAX);
    }
    return step;
}

static int64_t load_training(struct checkpoint *c, const char *dir, uint64_t *hash) {
    struct sharded *set = open_or_end(dir, "training.safetensors");
    struct fact now[FACTS];
    facts(c, 0, now);
    for (size_t i = 1; i < FACTS && now[i].flag == NULL; i++) { // all but the step
        same_fact(set, &now[i]);
    }
    int64_t step = saved_step(set);
    int states = optimizer_states(c->options);
    refuse_strangers(c, set, VALUES_STATE, states);
    for (int k = 0; k < states; k++) {
        load_values(c, set, (enum values)(VALUES_STATE + k));
    }
    note_changes(c, set, now);
    *hash = sharded_hash(set, *hash);
    sharded_close(set);
    return step;
}

// All ranks must have read the same, also where each has the folder on a disk of its own.
static void must_match(const char *flag, uint64_t hash) {
    char name[60], text[20];
    snprintf(name, sizeof name, "the hash of what %s has read", flag);
    snprintf(text, sizeof text, "%016" PRIx64, hash);
    comm_must_match(name, text);
}

int64_t checkpoint_load(struct checkpoint *c) {
    const char *dir = c->options->resume;
    uint64_t hash = 0;
    if (c->options->load != NULL) {
        load_model(c, c->options->load, &hash);
        must_match("--load", hash);
    }
    if (dir == NULL) {
        return 0;
    }
    int64_t step;
    uint64_t folder;
    do { // again if another job replaced the folder in between: the two files belong together
        folder = folder_number(dir);
        hash = 0;
        load_model(c, dir, &hash);
        step = load_training(c, dir, &hash);
    } while (folder_number(dir) != folder);
    must_match("--resume", hash);
    return step;
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
    bool saves = strcmp(out->flag, "--save") == 0 || strcmp(out->flag, "--save-sharded") == 0;
    bool in_place = strcmp(in->flag, "--resume") == 0 && saves;
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
        {.flag = "--save-sharded", .path = o->save_sharded, .folder = true},
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

static void check_sharded(const char *dir) {
    if (dir != NULL) {
        const char *const *names = sharded_names(dir, 0);
        check_folder("--save-sharded", dir, names);
        sharded_names_free(names);
    }
}

void checkpoint_check(const struct checkpoint *c) {
    const struct options *o = c->options;
    check_places(c);
    check_folder("--save", o->save, CHECKPOINT_FILES);
    check_sharded(o->save_sharded);
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
