#include "text.h"
#include "error.h"
#include "files.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

// Reads on until the end of the file, wherever that is: the size was only what it was on opening.
static void text_read(struct text *out, FILE *file, size_t expected) {
    size_t capacity = expected + 1;
    uint8_t *bytes = malloc(capacity);
    size_t count = 0;
    for (;;) {
        if (bytes == NULL) {
            error_user("%s: not enough memory for its %zu bytes", out->path, capacity);
        }
        count += fread(bytes + count, 1, capacity - count, file);
        if (count < capacity) {
            break;
        }
        capacity *= 2;
        bytes = realloc(bytes, capacity);
    }
    if (ferror(file)) {
        error_user("%s: cannot be read: %s", out->path, strerror(errno));
    }
    out->bytes = bytes;
    out->count = count;
}

void text_open(struct text *out, const char *path, const char *hint) {
    char error[ERROR_TEXT_SIZE];
    uint64_t bytes;
    FILE *file = files_open(path, &bytes, error, sizeof error);
    if (file == NULL) {
        error_user("%s%s%s", error, hint != NULL ? "; " : "", hint != NULL ? hint : "");
    }
    *out = (struct text){
        .path = strdup(path),
    };
    CHECK(out->path != NULL);
    text_read(out, file, (size_t)bytes);
    fclose(file);
    if (out->count == 0) {
        error_user("%s: the file is empty; expected text%s%s", path, hint != NULL ? "; " : "",
                   hint != NULL ? hint : "");
    }
}

void text_check_count(const struct text *text, size_t count, const char *purpose) {
    if (text->count < count) {
        error_user("%s: the text has %zu bytes; expected at least %zu: %s", text->path, text->count,
                   count, purpose);
    }
}

void text_check_vocab(const struct text *text, size_t vocab) {
    for (size_t i = 0; i < text->count; i++) {
        if (text->bytes[i] >= vocab) {
            error_user("%s: byte %zu has the value %u; with --vocab %zu values are 0 to %zu; use "
                       "--vocab 256 or another text",
                       text->path, i, text->bytes[i], vocab, vocab - 1);
        }
    }
}

void text_free(struct text *text) {
    free(text->bytes);
    free(text->path);
    *text = (struct text){0};
}
