#include "sharded.h"
#include "error.h"
#include "files.h"
#include "safetensors.h"
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    PATH_SIZE = FILES_PATH_SIZE,
};

struct sharded_piece {
    char *name; // of the tensor
    size_t first; // its first element, in the whole tensor
    const char *path; // of the file
    const struct safetensors *file;
    const struct safetensors_entry *entry;
};

struct sharded {
    bool in_parts;
    char *path;
    int file_count;
    char **paths; // (file_count)
    struct safetensors **files; // (file_count)
    size_t piece_count;
    struct sharded_piece *pieces; // (piece_count) by name, then by place
};

// ---- names -------------------------------------------------------------------------------------

void sharded_name(char *name, int file, int files) {
    snprintf(name, SHARDED_NAME_SIZE, "rank-%05d-of-%05d.safetensors", file, files);
}

// The numbers in the name of a rank's file; false if it is no such name.
static bool name_parse(const char *name, int *file, int *files) {
    char again[SHARDED_NAME_SIZE];
    if (sscanf(name, "rank-%9d-of-%9d", file, files) != 2 || *file < 0 || *file >= *files) {
        return false;
    }
    sharded_name(again, *file, *files);
    return strcmp(again, name) == 0;
}

static void names_add(const char ***names, const char *name) {
    size_t count = 0;
    for (; *names != NULL && (*names)[count] != NULL; count++) {
        if (strcmp((*names)[count], name) == 0) {
            return;
        }
    }
    *names = realloc(*names, (count + 2) * sizeof **names);
    CHECK(*names != NULL);
    (*names)[count] = strdup(name);
    CHECK((*names)[count] != NULL);
    (*names)[count + 1] = NULL;
}

// Adds those of the files of ranks in a folder, if it is one. False if it cannot be listed: errno.
static bool names_add_folder(const char ***names, const char *path) {
    DIR *folder = opendir(path);
    bool listed = folder != NULL || errno == ENOENT || errno == ENOTDIR;
    struct dirent *entry;
    int file, files;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        if (name_parse(entry->d_name, &file, &files)) {
            names_add(names, entry->d_name);
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return listed;
}

// Adds those in the temporary folders beside a folder, which files.h calls PATH.tmp-….
static void names_add_left(const char ***names, const char *path) {
    char parent[PATH_SIZE], left[2 * PATH_SIZE];
    const char *base = strrchr(path, '/') + 1;
    snprintf(parent, sizeof parent, "%.*s", (int)(base - path), path);
    DIR *folder = opendir(parent);
    struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        const char *name = entry->d_name;
        size_t length = strlen(base);
        if (strncmp(name, base, length) == 0 && strncmp(name + length, ".tmp-", 5) == 0) {
            snprintf(left, sizeof left, "%s%s", parent, name);
            names_add_folder(names, left);
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
}

const char *const *sharded_names(const char *dir, int files) {
    char name[SHARDED_NAME_SIZE], path[PATH_SIZE], error[ERROR_TEXT_SIZE];
    const char **names = NULL;
    names_add(&names, "config.json");
    for (int k = 0; k < files; k++) {
        sharded_name(name, k, files);
        names_add(&names, name);
    }
    if (files_resolve(dir, path, error, sizeof error)) { // if not, writing will say so
        names_add_folder(&names, path);
        names_add_left(&names, path);
    }
    return names;
}

void sharded_names_free(const char *const *names) {
    for (size_t k = 0; names != NULL && names[k] != NULL; k++) {
        free((char *)names[k]);
    }
    free((void *)names);
}

// ---- opening -----------------------------------------------------------------------------------

// Says which of the files of ranks is the first that a folder has not.
static bool missing(const char *dir, int count, char *error, size_t error_size) {
    char name[SHARDED_NAME_SIZE], path[PATH_SIZE + SHARDED_NAME_SIZE];
    int k = -1;
    do {
        sharded_name(name, ++k, count);
        snprintf(path, sizeof path, "%s/%s", dir, name);
    } while (k < count - 1 && access(path, F_OK) == 0);
    return error_text(error, error_size,
                      "%s: there is no such file; the checkpoint has files of %d ranks", path,
                      count);
}

// Into how many files the ranks have written what lies in the folder; 0: no such file.
static bool count_files(const char *dir, int *count, char *error, size_t error_size) {
    const char **names = NULL;
    bool good = true;
    size_t found = 0;
    *count = 0;
    if (!names_add_folder(&names, dir)) {
        return error_text(error, error_size, "%s: %s", dir, strerror(errno));
    }
    for (; good && names != NULL && names[found] != NULL; found++) {
        int file, files;
        good = name_parse(names[found], &file, &files) && (*count == 0 || files == *count);
        if (!good) {
            error_text(error, error_size,
                       "%s: has files of two checkpoints, %s and %s: one was written by %d ranks, "
                       "the other by %d",
                       dir, names[0], names[found], *count, files);
        }
        *count = files;
    }
    sharded_names_free(names);
    if (good && found < (size_t)*count) {
        return missing(dir, *count, error, error_size);
    }
    return good;
}

static bool file_open(struct sharded *s, int k, const char *dir, const char *name, char *error,
                      size_t error_size) {
    char path[PATH_SIZE];
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= PATH_SIZE) {
        return error_text(error, error_size, "%.80s ...: the path is too long", dir);
    }
    s->paths[k] = strdup(path);
    CHECK(s->paths[k] != NULL);
    s->files[k] = safetensors_open(path, error, error_size);
    return s->files[k] != NULL;
}

// All files of one save say the same of the training.
static bool check_metadata(const struct sharded *s, int k, char *error, size_t error_size) {
    size_t count, first_count;
    const struct safetensors_pair *pairs = safetensors_metadata_all(s->files[k], &count);
    safetensors_metadata_all(s->files[0], &first_count);
    for (size_t i = 0; i < count; i++) {
        const char *first = safetensors_metadata(s->files[0], pairs[i].key);
        if (first == NULL || strcmp(first, pairs[i].value) != 0) {
            return error_text(error, error_size,
                              "%s: is of another save than %s: its %s is %s, not %s", s->paths[k],
                              s->paths[0], pairs[i].key, pairs[i].value,
                              first != NULL ? first : "missing");
        }
    }
    return count == first_count ||
           error_text(error, error_size, "%s: is of another save than %s: it says less of it",
                      s->paths[k], s->paths[0]);
}

// Splits NAME@FIRST.
static bool piece_parse(const struct sharded *s, struct sharded_piece *piece, char *error,
                        size_t error_size) {
    const char *name = piece->entry->name;
    const char *at = strrchr(name, '@');
    piece->name = strdup(name);
    CHECK(piece->name != NULL);
    if (!s->in_parts) {
        return true;
    }
    char again[32] = "";
    if (at != NULL) {
        piece->name[at - name] = '\0';
        piece->first = strtoull(at + 1, NULL, 10);
        snprintf(again, sizeof again, "%zu", piece->first);
    }
    return (at != NULL && strcmp(again, at + 1) == 0 && piece->first < SIZE_MAX / 2 &&
            piece->entry->dims == 1) ||
           error_text(
               error, error_size,
               "%s: has the tensor %s of %zu dimensions; all have the form NAME@FIRST and one "
               "dimension",
               piece->path, name, piece->entry->dims);
}

static int compare_pieces(const void *a, const void *b) {
    const struct sharded_piece *x = a, *y = b;
    int order = strcmp(x->name, y->name);
    return order != 0 ? order : (x->first > y->first) - (x->first < y->first);
}

static bool list_pieces(struct sharded *s, char *error, size_t error_size) {
    size_t total = 0;
    for (int k = 0; k < s->file_count; k++) {
        total += safetensors_count(s->files[k]);
    }
    s->pieces = calloc(total + 1, sizeof *s->pieces);
    CHECK(s->pieces != NULL);
    for (int k = 0; k < s->file_count; k++) {
        for (size_t i = 0; i < safetensors_count(s->files[k]); i++) {
            struct sharded_piece *piece = &s->pieces[s->piece_count++];
            piece->path = s->paths[k];
            piece->file = s->files[k];
            piece->entry = safetensors_at(s->files[k], i);
            if (!piece_parse(s, piece, error, error_size)) {
                return false;
            }
        }
    }
    qsort(s->pieces, s->piece_count, sizeof *s->pieces, compare_pieces);
    return true;
}

static bool set_open(struct sharded *s, const char *dir, const char *whole, char *error,
                     size_t error_size) {
    for (int k = 0; k < s->file_count; k++) {
        char name[SHARDED_NAME_SIZE];
        sharded_name(name, k, s->file_count);
        if (!file_open(s, k, dir, s->in_parts ? name : whole, error, error_size) ||
            !check_metadata(s, k, error, error_size)) {
            return false;
        }
    }
    s->path = strdup(s->in_parts ? dir : s->paths[0]);
    CHECK(s->path != NULL);
    return list_pieces(s, error, error_size);
}

struct sharded *sharded_open(const char *dir, const char *whole, char *error, size_t error_size) {
    int count;
    if (!count_files(dir, &count, error, error_size)) {
        return NULL;
    }
    char path[PATH_SIZE];
    if (count > 0 && snprintf(path, sizeof path, "%s/%s", dir, whole) < PATH_SIZE &&
        access(path, F_OK) == 0) {
        error_text(error, error_size,
                   "%s: has both %s and files of %d ranks, which are two checkpoints", dir, whole,
                   count);
        return NULL;
    }
    struct sharded *s = calloc(1, sizeof *s);
    CHECK(s != NULL);
    s->in_parts = count > 0;
    s->file_count = s->in_parts ? count : 1;
    s->paths = calloc((size_t)s->file_count, sizeof *s->paths);
    s->files = calloc((size_t)s->file_count, sizeof *s->files);
    CHECK(s->paths != NULL && s->files != NULL);
    if (!set_open(s, dir, whole, error, error_size)) {
        sharded_close(s);
        return NULL;
    }
    return s;
}

void sharded_close(struct sharded *s) {
    if (s == NULL) {
        return;
    }
    for (size_t k = 0; k < s->piece_count; k++) {
        free(s->pieces[k].name);
    }
    for (int k = 0; k < s->file_count; k++) {
        safetensors_close(s->files[k]);
        free(s->paths[k]);
    }
    free(s->pieces);
    free(s->files);
    free(s->paths);
    free(s->path);
    free(s);
}

bool sharded_in_parts(const struct sharded *s) {
    return s->in_parts;
}

const char *sharded_path(const struct sharded *s) {
    return s->path;
}

int sharded_files(const struct sharded *s) {
    return s->file_count;
}

const char *sharded_file(const struct sharded *s, int file) {
    return s->paths[file];
}

const char *sharded_metadata(const struct sharded *s, const char *key) {
    return safetensors_metadata(s->files[0], key);
}

uint64_t sharded_hash(const struct sharded *s, uint64_t hash) {
    for (int k = 0; k < s->file_count; k++) {
        hash = safetensors_hash(s->files[k], hash);
    }
    return hash;
}

size_t sharded_pieces(const struct sharded *s) {
    return s->piece_count;
}

const char *sharded_piece_of(const struct sharded *s, size_t k) {
    return s->pieces[k].name;
}

// ---- a tensor ----------------------------------------------------------------------------------

static void shape_text(char *out, size_t size, const size_t *shape, size_t dims) {
    size_t length = (size_t)snprintf(out, size, "(");
    for (size_t i = 0; i < dims && length < size; i++) {
        length += (size_t)snprintf(out + length, size - length, i > 0 ? ", %zu" : "%zu", shape[i]);
    }
    if (length < size) {
        snprintf(out + length, size - length, ")");
    }
}

static void check_shape(const struct sharded_piece *piece, const struct param *p) {
    const struct safetensors_entry *e = piece->entry;
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
            piece->path, piece->name, found, expected);
    }
}

// One piece begins where the one before ends, from 0 to `expected`.
static void check_pieces(const struct sharded *s, const struct sharded_tensor *t, size_t expected) {
    size_t end = 0;
    for (size_t k = 0; k < t->count; k++) {
        const struct sharded_piece *piece = &t->pieces[k];
        if (piece->first > end) {
            error_user("%s: the elements %zu to %zu of the tensor %s are in none of its %d files; "
                       "name a checkpoint that is whole",
                       s->path, end, piece->first - 1, piece->name, s->file_count);
        }
        if (piece->first < end) {
            error_user("%s: has elements of the tensor %s from %zu on, which %s has up to %zu; "
                       "expected each element once; name a checkpoint that is whole",
                       piece->path, piece->name, piece->first, piece[-1].path, end - 1);
        }
        end += piece->entry->count;
    }
    if (end != expected) {
        error_user("%s: tensor %s has %zu elements, expected %zu; give the sizes that the "
                   "checkpoint was made with (its config.json has them), or name one that is whole",
                   s->path, t->pieces->name, end, expected);
    }
}

static void check_type(const struct sharded_piece *piece) {
    const struct safetensors_entry *e = piece->entry;
    if (!e->known || e->dtype == DTYPE_I32 || e->dtype == DTYPE_U8) {
        error_user("%s: tensor %s has the type %s; expected F32, BF16, F16 or F64", piece->path,
                   e->name, e->type_name);
    }
}

struct sharded_tensor sharded_find(const struct sharded *s, const char *name,
                                   const struct param *p) {
    size_t low = 0;
    for (size_t high = s->piece_count; low < high;) { // the first piece that is not before it
        size_t middle = (low + high) / 2;
        bool before = strcmp(s->pieces[middle].name, name) < 0;
        low = before ? middle + 1 : low;
        high = before ? high : middle;
    }
    struct sharded_tensor t = {
        .pieces = &s->pieces[low],
    };
    while (low + t.count < s->piece_count && strcmp(t.pieces[t.count].name, name) == 0) {
        t.count++;
    }
    if (t.count == 0) {
        error_user("%s: has no tensor %s; it is not a checkpoint of this model and size", s->path,
                   name);
    }
    if (s->in_parts) {
        check_pieces(s, &t, param_whole_count(p));
    } else {
        check_shape(t.pieces, p);
    }
    for (size_t k = 0; k < t.count; k++) {
        check_type(&t.pieces[k]);
    }
    return t;
}

// ---- values ------------------------------------------------------------------------------------

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

// Reads elements of one piece, counted in the piece.
static void piece_read(const struct sharded_piece *piece, bool squares, size_t first, size_t count,
                       float *out) {
    char error[ERROR_TEXT_SIZE];
    enum dtype dtype = piece->entry->dtype;
    void *raw = malloc(count * dtype_size(dtype) + 1);
    CHECK(raw != NULL);
    if (!safetensors_read(piece->file, piece->entry, first, count, raw, error, sizeof error)) {
        error_user("%s", error);
    }
    for (size_t i = 0; i < count; i++) {
        out[i] = element(raw, dtype, i);
        if (!isfinite(out[i]) || (squares && out[i] < 0)) {
            error_user("%s: element %zu of the tensor %s is %g; expected a finite number%s: this "
                       "is what a training left that failed; name an older checkpoint",
                       piece->path, first + i, piece->entry->name,
                       isnan(out[i]) ? (double)NAN : (double)out[i],
                       squares ? " that is not negative" : "");
        }
    }
    free(raw);
}

void sharded_read(const struct sharded_tensor *t, size_t first, size_t count, float *out) {
    for (size_t k = 0; k < t->count; k++) {
        const struct sharded_piece *piece = &t->pieces[k];
        size_t from = first > piece->first ? first : piece->first;
        size_t end = piece->first + piece->entry->count;
        size_t to = first + count < end ? first + count : end;
        if (from < to) {
            piece_read(piece, t->squares, from - piece->first, to - from, out + (from - first));
        }
    }
}
