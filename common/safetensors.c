#include "safetensors.h"
#include "error.h"
#include "files.h"
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "elements are read as they are stored");

enum {
    LENGTH_BYTES = 8, // of the number in front of the header
    HEADER_BYTES_MAX = 100000000, // the format's bound
    ALIGNMENT = 8, // of the first tensor in a file
};

static const char METADATA[] = "__metadata__";

// What follows a backslash in JSON, and what it means.
static const char ESCAPES[] = "\"\\/bfnrt";
static const char ESCAPE_MEANINGS[] = "\"\\/\b\f\n\r\t";

struct safetensors {
    char *path;
    FILE *file;
    char *header; // strings of entries and pairs lie in it, unescaped and ended with a NUL
    struct safetensors_entry *entries; // (count)
    size_t count;
    const struct safetensors_entry **by_name; // (count)
    struct safetensors_pair *pairs; // (pair_count)
    size_t pair_count;
};

// Room for one more element; ends the program if memory does (the header's size bounds the array).
static void *array_grow(void *array, size_t count, size_t size) {
    if (count & (count - 1)) {
        return array; // full only at powers of two, and at 0
    }
    array = realloc(array, (count == 0 ? 1 : 2 * count) * size);
    CHECK(array != NULL);
    return array;
}

// ---- UTF-8 -------------------------------------------------------------------------------------

// Bytes of the character that text begins with, or 0 if it is not valid (RFC 3629).
static size_t utf8_length(const uint8_t *text, size_t room) {
    static const struct {
        uint8_t mask, lead;
        size_t length;
        uint32_t smallest;
    } forms[] = {
        {0x80, 0x00, 1, 0},
        {0xe0, 0xc0, 2, 0x80},
        {0xf0, 0xe0, 3, 0x800},
        {0xf8, 0xf0, 4, 0x10000},
    };
    for (size_t f = 0; f < sizeof forms / sizeof forms[0]; f++) {
        if ((text[0] & forms[f].mask) != forms[f].lead) {
            continue;
        }
        uint32_t code = text[0] & (uint8_t)~forms[f].mask;
        if (forms[f].length > room) {
            return 0;
        }
        for (size_t i = 1; i < forms[f].length; i++) {
            if ((text[i] & 0xc0) != 0x80) {
                return 0;
            }
            code = code << 6 | (text[i] & 0x3f);
        }
        bool surrogate = code >= 0xd800 && code < 0xe000;
        return code < forms[f].smallest || code > 0x10ffff || surrogate ? 0 : forms[f].length;
    }
    return 0;
}

static char *utf8_put(char *out, uint32_t code) {
    if (code < 0x80) {
        *out++ = (char)code;
        return out;
    }
    int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    *out++ = (char)((0xff00 >> (more + 1)) | (code >> (6 * more)));
    while (more-- > 0) {
        *out++ = (char)(0x80 | (code >> (6 * more) & 0x3f));
    }
    return out;
}

// ---- JSON, as much of it as the format has -----------------------------------------------------

struct parser {
    char *begin;
    char *at;
    char *end;
    const char *path;
    char *error;
    size_t error_size;
};

static bool refuse(struct parser *p, const char *expected) {
    return error_text(p->error, p->error_size,
                      "%s: the header is broken at its byte %td: expected %s", p->path,
                      p->at - p->begin, expected);
}

static void skip_space(struct parser *p) {
    while (p->at < p->end && memchr(" \t\r\n", *p->at, 4) != NULL) {
        p->at++;
    }
}

// Whether the next character is this one; takes it if so.
static bool take(struct parser *p, char c) {
    skip_space(p);
    if (p->at < p->end && *p->at == c) {
        p->at++;
        return true;
    }
    return false;
}

static bool expect(struct parser *p, char c) {
    char expected[] = {'\'', c, '\'', '\0'};
    return take(p, c) || refuse(p, expected);
}

// After an element of a list that ends with `close`: sets `more` if another one follows.
static bool expect_separator(struct parser *p, char close, bool *more) {
    *more = take(p, ',');
    return *more || expect(p, close);
}

// A number 0 … 2^53 - 1, as JSON spells it.
static bool parse_number(struct parser *p, uint64_t *number) {
    skip_space(p);
    char *begin = p->at;
    *number = 0;
    while (p->at < p->end && *p->at >= '0' && *p->at <= '9') {
        *number = *number * 10 + (uint64_t)(*p->at++ - '0');
        if (*number >= UINT64_C(1) << 53) {
            return refuse(p, "a number below 2^53");
        }
    }
    if (p->at == begin || (p->at - begin > 1 && *begin == '0')) {
        p->at = begin;
        return refuse(p, "a number");
    }
    return true;
}

static bool parse_hex4(struct parser *p, uint32_t *code) {
    *code = 0;
    for (int i = 0; i < 4; i++, p->at++) {
        const char *digits = "0123456789abcdef0123456789ABCDEF";
        const char *digit = p->at < p->end ? memchr(digits, *p->at, 32) : NULL;
        if (digit == NULL) {
            return refuse(p, "four hexadecimal digits");
        }
        *code = *code << 4 | ((uint32_t)(digit - digits) & 15);
    }
    return true;
}

// What follows \u: one unit of UTF-16, or two of them with another \u between.
static bool parse_unicode(struct parser *p, uint32_t *code) {
    uint32_t low;
    if (!parse_hex4(p, code)) {
        return false;
    }
    if (*code == 0) {
        return refuse(p, "no NUL in a string");
    }
    if (*code < 0xd800 || *code >= 0xe000) {
        return true;
    }
    if (*code >= 0xdc00 || p->end - p->at < 2 || p->at[0] != '\\' || p->at[1] != 'u') {
        return refuse(p, "a pair of surrogates");
    }
    p->at += 2;
    if (!parse_hex4(p, &low)) {
        return false;
    }
    if (low < 0xdc00 || low >= 0xe000) {
        return refuse(p, "a pair of surrogates");
    }
    *code = 0x10000 + ((*code - 0xd800) << 10) + (low - 0xdc00);
    return true;
}

static bool parse_escape(struct parser *p, char **out) {
    uint32_t code;
    if (p->at < p->end && *p->at == 'u') {
        p->at++;
        if (!parse_unicode(p, &code)) {
            return false;
        }
        *out = utf8_put(*out, code);
        return true;
    }
    const char *escape = p->at < p->end ? memchr(ESCAPES, *p->at, sizeof ESCAPES - 1) : NULL;
    if (escape == NULL) {
        return refuse(p, "an escape sequence");
    }
    *(*out)++ = ESCAPE_MEANINGS[escape - ESCAPES];
    p->at++;
    return true;
}

// A string, unescaped in its place: that never makes it longer.
static bool parse_string(struct parser *p, const char **string) {
    if (!expect(p, '"')) {
        return false;
    }
    char *out = p->at;
    *string = out;
    while (p->at < p->end && *p->at != '"') {
        if ((unsigned char)*p->at < 0x20) {
            return refuse(p, "no control character in a string");
        }
        if (*p->at == '\\') {
            p->at++;
            if (!parse_escape(p, &out)) {
                return false;
            }
            continue;
        }
        size_t length = utf8_length((const uint8_t *)p->at, (size_t)(p->end - p->at));
        if (length == 0) {
            return refuse(p, "UTF-8");
        }
        memmove(out, p->at, length);
        out += length;
        p->at += length;
    }
    if (p->at == p->end) {
        return refuse(p, "the end of a string");
    }
    p->at++;
    *out = '\0';
    return true;
}

// ---- the header's contents ---------------------------------------------------------------------

static bool parse_shape(struct parser *p, struct safetensors_entry *entry) {
    bool more = true;
    if (!expect(p, '[')) {
        return false;
    }
    if (take(p, ']')) {
        return true;
    }
    while (more) {
        uint64_t size;
        if (entry->dims == SAFETENSORS_MAX_DIMS) {
            return error_text(p->error, p->error_size,
                              "%s: the tensor %s has more than %d dimensions", p->path, entry->name,
                              SAFETENSORS_MAX_DIMS);
        }
        if (!parse_number(p, &size) || !expect_separator(p, ']', &more)) {
            return false;
        }
        entry->shape[entry->dims++] = size;
    }
    return true;
}

// [begin, end], in bytes from the first tensor.
static bool parse_offsets(struct parser *p, struct safetensors_entry *entry) {
    uint64_t end;
    if (!expect(p, '[') || !parse_number(p, &entry->offset) || !expect(p, ',') ||
        !parse_number(p, &end) || !expect(p, ']')) {
        return false;
    }
    if (end < entry->offset) {
        return error_text(p->error, p->error_size,
                          "%s: the tensor %s ends at byte %" PRIu64
                          ", before it begins at %" PRIu64,
                          p->path, entry->name, end, entry->offset);
    }
    entry->bytes = end - entry->offset;
    return true;
}

static void set_dtype(struct safetensors_entry *entry) {
    for (enum dtype dtype = DTYPE_F32; dtype <= DTYPE_U8; dtype++) {
        if (strcmp(entry->type_name, dtype_name(dtype)) == 0) {
            entry->dtype = dtype;
            entry->known = true;
        }
    }
}

// Counts the elements and compares them with the bytes. Other people's types are only counted.
static bool check_shape(struct parser *p, struct safetensors_entry *entry) {
    size_t bytes = 0;
    bool overflow = false;
    entry->count = 1;
    for (size_t d = 0; d < entry->dims; d++) {
        overflow = overflow || __builtin_mul_overflow(entry->count, entry->shape[d], &entry->count);
    }
    set_dtype(entry);
    if (entry->known) {
        overflow =
            overflow || __builtin_mul_overflow(entry->count, dtype_size(entry->dtype), &bytes);
    }
    if (overflow) {
        return error_text(p->error, p->error_size, "%s: the shape of the tensor %s is too large",
                          p->path, entry->name);
    }
    if (entry->known && bytes != entry->bytes) {
        return error_text(p->error, p->error_size,
                          "%s: the tensor %s has %zu bytes, but its shape and type %s need %zu",
                          p->path, entry->name, entry->bytes, entry->type_name, bytes);
    }
    return true;
}

static bool parse_tensor(struct parser *p, struct safetensors_entry *entry) {
    bool more = true, has_shape = false, has_offsets = false;
    const char *key;
    if (!expect(p, '{')) {
        return false;
    }
    while (more) {
        if (!parse_string(p, &key) || !expect(p, ':')) {
            return false;
        }
        bool good;
        if (strcmp(key, "dtype") == 0 && entry->type_name == NULL) {
            good = parse_string(p, &entry->type_name);
        } else if (strcmp(key, "shape") == 0 && !has_shape) {
            has_shape = good = parse_shape(p, entry);
        } else if (strcmp(key, "data_offsets") == 0 && !has_offsets) {
            has_offsets = good = parse_offsets(p, entry);
        } else {
            good = refuse(p, "dtype, shape and data_offsets, each once");
        }
        if (!good || !expect_separator(p, '}', &more)) {
            return false;
        }
    }
    if (entry->type_name == NULL || !has_shape || !has_offsets) {
        return refuse(p, "dtype, shape and data_offsets, each once");
    }
    return check_shape(p, entry);
}

static bool parse_metadata(struct parser *p, struct safetensors *file) {
    bool more = true;
    if (!expect(p, '{')) {
        return false;
    }
    if (take(p, '}')) {
        return true;
    }
    while (more) {
        struct safetensors_pair pair;
        if (!parse_string(p, &pair.key) || !expect(p, ':') || !parse_string(p, &pair.value) ||
            !expect_separator(p, '}', &more)) {
            return false;
        }
        file->pairs = array_grow(file->pairs, file->pair_count, sizeof *file->pairs);
        file->pairs[file->pair_count++] = pair;
    }
    return true;
}

static bool parse_member(struct parser *p, struct safetensors *file, bool *has_metadata) {
    struct safetensors_entry entry = {0};
    if (!parse_string(p, &entry.name) || !expect(p, ':')) {
        return false;
    }
    if (strcmp(entry.name, METADATA) == 0) {
        if (*has_metadata) {
            return refuse(p, "__metadata__ once");
        }
        *has_metadata = true;
        return parse_metadata(p, file);
    }
    if (!parse_tensor(p, &entry)) {
        return false;
    }
    file->entries = array_grow(file->entries, file->count, sizeof *file->entries);
    file->entries[file->count++] = entry;
    return true;
}

static bool parse_header(struct parser *p, struct safetensors *file) {
    bool more = true, has_metadata = false;
    if (p->at == p->end || *p->at != '{') {
        return refuse(p, "'{'");
    }
    p->at++;
    if (!take(p, '}')) {
        while (more) {
            if (!parse_member(p, file, &has_metadata) || !expect_separator(p, '}', &more)) {
                return false;
            }
        }
    }
    skip_space(p);
    return p->at == p->end || refuse(p, "nothing but spaces after the last '}'");
}

// ---- what the tensors are together -------------------------------------------------------------

static int compare_names(const void *a, const void *b) {
    const struct safetensors_entry *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

static int compare_offsets(const void *a, const void *b) {
    const struct safetensors_entry *const *x = a, *const *y = b;
    if ((*x)->offset != (*y)->offset) {
        return (*x)->offset < (*y)->offset ? -1 : 1;
    }
    return ((*x)->bytes > (*y)->bytes) - ((*x)->bytes < (*y)->bytes);
}

static int compare_keys(const void *a, const void *b) {
    const struct safetensors_pair *const *x = a, *const *y = b;
    return strcmp((*x)->key, (*y)->key);
}

static bool check_keys(struct parser *p, const struct safetensors *file) {
    const struct safetensors_pair **sorted = malloc((file->pair_count + 1) * sizeof *sorted);
    CHECK(sorted != NULL);
    for (size_t k = 0; k < file->pair_count; k++) {
        sorted[k] = &file->pairs[k];
    }
    qsort(sorted, file->pair_count, sizeof *sorted, compare_keys);
    bool good = true;
    for (size_t k = 1; k < file->pair_count && good; k++) {
        if (strcmp(sorted[k - 1]->key, sorted[k]->key) == 0) {
            good = error_text(p->error, p->error_size, "%s: the metadata have the key %s twice",
                              p->path, sorted[k]->key);
        }
    }
    free(sorted);
    return good;
}

// One tensor must begin where the one before ends, from the header's end to the file's.
static bool check_layout(struct parser *p, const struct safetensors_entry **sorted, size_t count,
                         uint64_t data_bytes) {
    uint64_t at = 0;
    qsort(sorted, count, sizeof *sorted, compare_offsets);
    for (size_t k = 0; k < count; k++) {
        if (sorted[k]->offset != at) {
            return error_text(p->error, p->error_size,
                              "%s: the tensor %s begins at byte %" PRIu64
                              ", but the one before ends "
                              "at %" PRIu64,
                              p->path, sorted[k]->name, sorted[k]->offset, at);
        }
        at += sorted[k]->bytes; // both below 2^53, so no overflow before they differ
        if (at > data_bytes) {
            break;
        }
    }
    if (at != data_bytes) {
        return error_text(p->error, p->error_size,
                          "%s: the file is %s: it has %" PRIu64 " bytes of tensors, its header "
                          "promises %s%" PRIu64,
                          p->path, at > data_bytes ? "cut short" : "too long", data_bytes,
                          at > data_bytes ? "at least " : "", at);
    }
    return true;
}

// Needs the entries in their final place: fills by_name.
static bool check_entries(struct parser *p, struct safetensors *file, uint64_t data_bytes) {
    file->by_name = malloc((file->count + 1) * sizeof *file->by_name);
    CHECK(file->by_name != NULL);
    for (size_t k = 0; k < file->count; k++) {
        file->by_name[k] = &file->entries[k];
    }
    if (!check_layout(p, file->by_name, file->count, data_bytes)) {
        return false;
    }
    qsort(file->by_name, file->count, sizeof *file->by_name, compare_names);
    for (size_t k = 1; k < file->count; k++) {
        if (compare_names(&file->by_name[k - 1], &file->by_name[k]) == 0) {
            return error_text(p->error, p->error_size, "%s: the tensor %s is there twice", p->path,
                              file->by_name[k]->name);
        }
    }
    return check_keys(p, file);
}

// ---- reading -----------------------------------------------------------------------------------

static bool read_header(struct safetensors *file, uint64_t file_bytes, char *error,
                        size_t error_size) {
    uint64_t bytes;
    if (file_bytes < LENGTH_BYTES || fread(&bytes, LENGTH_BYTES, 1, file->file) != 1) {
        return error_text(error, error_size,
                          "%s: has %" PRIu64 " bytes; expected a safetensors file", file->path,
                          file_bytes);
    }
    if (bytes > file_bytes - LENGTH_BYTES || bytes > HEADER_BYTES_MAX) {
        return error_text(error, error_size,
                          "%s: is cut short or not a safetensors file: its first 8 bytes say that "
                          "the header has %" PRIu64 " bytes, the file has %" PRIu64 ", and %d are "
                          "allowed",
                          file->path, bytes, file_bytes, HEADER_BYTES_MAX);
    }
    file->header = malloc(bytes > 0 ? bytes : 1);
    CHECK(file->header != NULL);
    if (fread(file->header, 1, bytes, file->file) != bytes) {
        return error_text(error, error_size, "%s: the header cannot be read: %s", file->path,
                          ferror(file->file) ? strerror(errno) : "the file became shorter");
    }
    struct parser parser = {
        .begin = file->header,
        .at = file->header,
        .end = file->header + bytes,
        .path = file->path,
        .error = error,
        .error_size = error_size,
    };
    if (!parse_header(&parser, file) ||
        !check_entries(&parser, file, file_bytes - LENGTH_BYTES - bytes)) {
        return false;
    }
    for (size_t k = 0; k < file->count; k++) {
        file->entries[k].offset += LENGTH_BYTES + bytes;
    }
    return true;
}

struct safetensors *safetensors_open(const char *path, char *error, size_t error_size) {
    uint64_t bytes;
    FILE *stream = files_open(path, &bytes, error, error_size);
    if (stream == NULL) {
        return NULL;
    }
    struct safetensors *file = calloc(1, sizeof *file);
    CHECK(file != NULL);
    file->file = stream;
    file->path = strdup(path);
    CHECK(file->path != NULL);
    if (!read_header(file, bytes, error, error_size)) {
        safetensors_close(file);
        return NULL;
    }
    return file;
}

void safetensors_close(struct safetensors *file) {
    if (file == NULL) {
        return;
    }
    fclose(file->file);
    free(file->pairs);
    free(file->by_name);
    free(file->entries);
    free(file->header);
    free(file->path);
    free(file);
}

size_t safetensors_count(const struct safetensors *file) {
    return file->count;
}

const struct safetensors_entry *safetensors_at(const struct safetensors *file, size_t k) {
    CHECK(k < file->count);
    return &file->entries[k];
}

const struct safetensors_entry *safetensors_find(const struct safetensors *file, const char *name) {
    const struct safetensors_entry wanted = {
        .name = name,
    };
    const struct safetensors_entry *key = &wanted;
    const struct safetensors_entry **found =
        bsearch(&key, file->by_name, file->count, sizeof *file->by_name, compare_names);
    return found != NULL ? *found : NULL;
}

const char *safetensors_metadata(const struct safetensors *file, const char *key) {
    for (size_t k = 0; k < file->pair_count; k++) {
        if (strcmp(file->pairs[k].key, key) == 0) {
            return file->pairs[k].value;
        }
    }
    return NULL;
}

const struct safetensors_pair *safetensors_metadata_all(const struct safetensors *file,
                                                        size_t *count) {
    *count = file->pair_count;
    return file->pairs;
}

uint64_t safetensors_hash(const struct safetensors *file, uint64_t hash) {
    uint64_t words[1024] = {0};
    off_t at = 0;
    ssize_t got;
    while ((got = pread(fileno(file->file), words, sizeof words, at)) > 0) {
        at += got;
        for (size_t i = 0; i < ((size_t)got + 7) / 8; i++) {
            hash = (hash ^ words[i]) * 0x100000001b3; // FNV, eight bytes at a time
            hash ^= hash >> 32;
        }
        memset(words, 0, sizeof words);
    }
    return hash;
}

bool safetensors_read(const struct safetensors *file, const struct safetensors_entry *entry,
                      size_t first, size_t count, void *out, char *error, size_t error_size) {
    if (!entry->known) {
        return error_text(error, error_size,
                          "%s: the tensor %s has the type %s, which is not read here", file->path,
                          entry->name, entry->type_name);
    }
    if (first > entry->count || count > entry->count - first) {
        return error_text(error, error_size,
                          "%s: elements %zu to %zu of the tensor %s were asked for; it has %zu",
                          file->path, first, first + count, entry->name, entry->count);
    }
    size_t size = dtype_size(entry->dtype);
    size_t bytes = count * size;
    off_t at = (off_t)(entry->offset + first * size);
    char *to = out;
    while (bytes > 0) {
        ssize_t got = pread(fileno(file->file), to, bytes, at);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return error_text(error, error_size, "%s: the tensor %s cannot be read: %s", file->path,
                              entry->name, got < 0 ? strerror(errno) : "the file became shorter");
        }
        to += got;
        at += got;
        bytes -= (size_t)got;
    }
    return true;
}

// ---- writing -----------------------------------------------------------------------------------

struct safetensors_writer {
    char *path;
    FILE *file;
    uint64_t promised; // bytes of tensors
    uint64_t written;
    bool failed;
};

static bool is_utf8(const char *text) {
    size_t room = strlen(text);
    while (room > 0) {
        size_t length = utf8_length((const uint8_t *)text, room);
        if (length == 0) {
            return false;
        }
        text += length;
        room -= length;
    }
    return true;
}

static void json_string(FILE *json, const char *text) {
    putc('"', json);
    for (; *text != '\0'; text++) {
        const char *escape = strchr(ESCAPE_MEANINGS, *text);
        if (escape != NULL && *text != '/') {
            fprintf(json, "\\%c", ESCAPES[escape - ESCAPE_MEANINGS]);
        } else if ((unsigned char)*text < 0x20) {
            fprintf(json, "\\u%04x", (unsigned char)*text);
        } else {
            putc(*text, json);
        }
    }
    putc('"', json);
}

static bool json_entry(FILE *json, const struct safetensors_entry *entry, uint64_t *offset) {
    size_t bytes = dtype_size(entry->dtype);
    if (entry->dims > SAFETENSORS_MAX_DIMS) {
        return false;
    }
    json_string(json, entry->name);
    fprintf(json, ":{\"dtype\":\"%s\",\"shape\":[", dtype_name(entry->dtype));
    for (size_t d = 0; d < entry->dims; d++) {
        fprintf(json, "%s%zu", d > 0 ? "," : "", entry->shape[d]);
        if (__builtin_mul_overflow(bytes, entry->shape[d], &bytes)) {
            return false;
        }
    }
    if (bytes >= (UINT64_C(1) << 53) - *offset) {
        return false;
    }
    fprintf(json, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", *offset, *offset + bytes);
    *offset += bytes;
    return true;
}

static void json_metadata(FILE *json, const struct safetensors_pair *metadata, size_t count) {
    fprintf(json, "\"%s\":{", METADATA);
    for (size_t k = 0; k < count; k++) {
        fputs(k > 0 ? "," : "", json);
        json_string(json, metadata[k].key);
        putc(':', json);
        json_string(json, metadata[k].value);
    }
    putc('}', json);
}

static int compare_strings(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

// Sorts the strings. NULL if they can be names, else the first that cannot: one that is empty, the
// metadata's, not UTF-8 or there twice.
static const char *bad_name(const char **names, size_t count) {
    qsort(names, count, sizeof *names, compare_strings);
    for (size_t k = 0; k < count; k++) {
        if (names[k][0] == '\0' || strcmp(names[k], METADATA) == 0 || !is_utf8(names[k]) ||
            (k > 0 && strcmp(names[k - 1], names[k]) == 0)) {
            return names[k];
        }
    }
    return NULL;
}

static bool check_names(const struct safetensors_entry *entries, size_t count,
                        const struct safetensors_pair *metadata, size_t metadata_count,
                        const char *path, char *error, size_t error_size) {
    const char **names = malloc((count + metadata_count + 1) * sizeof *names);
    CHECK(names != NULL);
    for (size_t k = 0; k < count; k++) {
        names[k] = entries[k].name;
    }
    for (size_t k = 0; k < metadata_count; k++) {
        names[count + k] = metadata[k].key;
    }
    const char *bad = bad_name(names, count);
    bad = bad != NULL ? bad : bad_name(names + count, metadata_count);
    free(names);
    for (size_t k = 0; k < metadata_count && bad == NULL; k++) {
        bad = is_utf8(metadata[k].value) ? NULL : metadata[k].value;
    }
    return bad == NULL ||
           error_text(error, error_size,
                      "%s: the name or text \"%s\" is empty, there twice, reserved or "
                      "not UTF-8",
                      path, bad);
}

// The header with its length in front, padded. The caller frees it.
static char *make_header(const struct safetensors_entry *entries, size_t count,
                         const struct safetensors_pair *metadata, size_t metadata_count,
                         uint64_t *data_bytes, size_t *header_bytes) {
    char *header = NULL;
    bool good = true;
    uint64_t length = 0;
    FILE *json = open_memstream(&header, header_bytes);
    CHECK(json != NULL);
    fwrite(&length, sizeof length, 1, json);
    putc('{', json);
    if (metadata_count > 0) {
        json_metadata(json, metadata, metadata_count);
    }
    *data_bytes = 0;
    for (size_t k = 0; k < count && good; k++) {
        fputs(k > 0 || metadata_count > 0 ? "," : "", json);
        good = json_entry(json, &entries[k], data_bytes);
    }
    putc('}', json);
    while (ftell(json) % ALIGNMENT != 0) {
        putc(' ', json);
    }
    CHECK(fclose(json) == 0);
    length = *header_bytes - LENGTH_BYTES;
    if (!good || length > HEADER_BYTES_MAX) {
        free(header);
        return NULL;
    }
    memcpy(header, &length, sizeof length);
    return header;
}

static bool writer_fail(struct safetensors_writer *writer, const char *reason, char *error,
                        size_t error_size) {
    writer->failed = true;
    return error_text(error, error_size, "%s: cannot be written: %s", writer->path, reason);
}

struct safetensors_writer *safetensors_create(const char *path,
                                              const struct safetensors_entry *entries, size_t count,
                                              const struct safetensors_pair *metadata,
                                              size_t metadata_count, char *error,
                                              size_t error_size) {
    size_t header_bytes;
    uint64_t data_bytes;
    if (!check_names(entries, count, metadata, metadata_count, path, error, error_size)) {
        return NULL;
    }
    char *header =
        make_header(entries, count, metadata, metadata_count, &data_bytes, &header_bytes);
    if (header == NULL) {
        error_text(error, error_size, "%s: its tensors or their header would be too large", path);
        return NULL;
    }
    struct safetensors_writer *writer = calloc(1, sizeof *writer);
    CHECK(writer != NULL);
    writer->path = strdup(path);
    CHECK(writer->path != NULL);
    writer->promised = data_bytes;
    writer->file = fopen(path, "wbe");
    if (writer->file == NULL || fwrite(header, 1, header_bytes, writer->file) != header_bytes) {
        writer_fail(writer, strerror(errno), error, error_size);
        if (writer->file != NULL) {
            fclose(writer->file);
        }
        free(writer->path);
        free(writer);
        writer = NULL;
    }
    free(header);
    return writer;
}

bool safetensors_write(struct safetensors_writer *writer, const void *data, size_t bytes,
                       char *error, size_t error_size) {
    if (writer->failed) {
        return writer_fail(writer, "an earlier write failed", error, error_size);
    }
    if (bytes > writer->promised - writer->written) {
        return writer_fail(writer, "more bytes came than its header promises", error, error_size);
    }
    if (fwrite(data, 1, bytes, writer->file) != bytes) {
        return writer_fail(writer, strerror(errno), error, error_size);
    }
    writer->written += bytes;
    return true;
}

bool safetensors_finish(struct safetensors_writer *writer, char *error, size_t error_size) {
    bool good = !writer->failed;
    if (!good) {
        writer_fail(writer, "an earlier write failed", error, error_size);
    } else if (writer->written != writer->promised) {
        good = writer_fail(writer, "fewer bytes came than its header promises", error, error_size);
    } else if (!files_sync(writer->file)) {
        good = writer_fail(writer, strerror(errno), error, error_size);
    }
    if (fclose(writer->file) != 0 && good) {
        good = writer_fail(writer, strerror(errno), error, error_size);
    }
    free(writer->path);
    free(writer);
    return good;
}
